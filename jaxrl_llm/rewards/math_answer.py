"""Equivalence of mathematical expressions. For the pool: parsing a model's text may hang.

``math_verify`` bounds its own time with signals, which fail outside the main thread; they are off here, and the pool
kills instead.
"""

import logging

import math_verify

from jaxrl_llm.tasks.extract import normalised, too_large
from jaxrl_llm.types import Problem

DEEPEST = 40
"""Brackets within brackets at most: parsing takes minutes for some hundreds."""

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off


def score(answer: str, problem: Problem) -> float:
    """Return 1 if the answer is equivalent to the reference, else 0.

    An extracted answer is read as LaTeX; with the extractor ``whole`` or ``after:TAG`` the expression is searched in
    the text. What is nested too deep, or would be too large a number, only equals itself.
    """
    if any(_depth(text) > DEEPEST or too_large(text) for text in (problem.answer, answer)):
        return float(normalised(answer) == normalised(problem.answer))
    reference = math_verify.parse(_latex(normalised(problem.answer)), parsing_timeout=None)  # ty: ignore[invalid-argument-type]
    answer = normalised(answer)
    prose = problem.extractor == "whole" or problem.extractor.startswith("after:")
    text = answer if prose else _latex(answer)
    candidate = math_verify.parse(text, parsing_timeout=None)  # ty: ignore[invalid-argument-type]
    return float(math_verify.verify(reference, candidate, timeout_seconds=None))


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}" and depth > 0)
        deepest = max(deepest, depth)
    return deepest


def _latex(text: str) -> str:
    return text if "$" in text or r"\boxed" in text else f"${text}$"
