"""Equivalence of mathematical expressions. For the pool: parsing a model's text may hang. ``math_verify`` bounds its
own time with signals, which fail outside the main thread; they are off here, and the pool kills instead.
"""

import logging
import re
from decimal import Decimal
from typing import Any

import math_verify
from sympy import Expr, Float, N, UnevaluatedExpr

from jaxrl_llm.tasks.extract import extract, normalise_answer, parse_number, same_answer, same_number, too_large
from jaxrl_llm.types import Problem

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off


def score_math(answer: str, problem: Problem) -> float:
    """Return 1 if the answer is equivalent to the reference, else 0. An extracted answer is read as LaTeX; with the
    extractor ``whole`` or ``after:TAG`` the expression is searched in the text. Numbers are compared by
    ``same_number``. An expression that is nested too deep, or stands for too large a number, only equals itself.
    """
    prose = problem.extractor == "whole" or problem.extractor.startswith("after:")
    boxed = extract(answer, "boxed") if prose else None
    searched = prose and not boxed
    bold = r"(?<![\w)\]}*])(\*\*|__)(?! )([^*\n]{1,200}?)(?<! )\1(?![\w(\[{*])"
    answer = normalise_answer(re.sub(bold, r"\2", answer) if searched else boxed or answer)
    reference = normalise_answer(problem.answer)
    # Parsing takes minutes for some hundreds of brackets within brackets.
    if any(_depth(text) > 40 or too_large(text) for text in (reference, answer)):
        return float(answer == reference)
    if same_answer(answer, reference) or (parse_number(answer) is not None and parse_number(reference) is not None):
        return float(same_answer(answer, reference))
    scientific = r"(?<![\w.])[0-9]*\.?[0-9]+[eE][+-]?[0-9]{1,3}(?!\w)"  # math_verify reads 2e3 as a product with e
    texts = (re.sub(r"\\\$|[€£¥₹]", "", text) for text in (answer, reference))
    answer, reference = (re.sub(scientific, lambda match: f"{Decimal(match[0]):f}", text) for text in texts)
    candidate, expected = _parse_math(answer if searched else _latex(answer)), _parse_math(_latex(reference))
    if candidate and expected and _decimals(candidate[0], expected[0]):
        return float(same_number(*(Decimal(str(N(parsed[0], 15))) for parsed in (candidate, expected))))
    return float(math_verify.verify(expected, candidate, timeout_seconds=None))


def _parse_math(text: str) -> list[Any]:
    return math_verify.parse(text, parsing_timeout=None)  # ty: ignore[invalid-argument-type]


def _decimals(*values: Any) -> bool:
    """Whether all are real numbers, at least one of them with decimals; a percentage may be meant in two ways."""
    real = (isinstance(n, Expr) and n.is_number and n.is_real and not n.has(UnevaluatedExpr) for n in values)
    return all(real) and any(number.has(Float) for number in values)


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}" and depth > 0)
        deepest = max(deepest, depth)
    return deepest


def _latex(text: str) -> str:
    return text if "$" in text or r"\boxed" in text else f"${text}$"
