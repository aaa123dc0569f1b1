"""Scoring by reasoning-gym itself. For the pool: some of its data sets evaluate the expression that the model wrote.
Those see only texts that cannot do anything: literals, or formulas of numbers, names and known functions.
"""

import ast
import functools
import json
import re
from typing import Any

import reasoning_gym

from jaxrl_llm.tasks.extract import normalise, too_large
from jaxrl_llm.types import Problem

LITERAL = ("binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion")
"""Data sets that call ``eval`` with the answer, or with the reference, which should be a list."""
SYMBOLIC = ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration")
"""Data sets that call SymPy's ``parse_expr`` with the answer, which evaluates it as Python does."""
LONGEST = 2000
"""Characters of an answer that is evaluated."""


def score_gym(answer: str, problem: Problem) -> float:
    """Score an answer by its data set: 1 is right, less is partial credit, 0 a text that must not be evaluated."""
    metadata = problem.metadata
    name, answer = metadata["generator"], normalise(answer)
    harmless = is_literal if name in LITERAL else is_formula if name in SYMBOLIC else lambda text: True
    if not harmless(answer) or not harmless(str(metadata["entry"]["answer"])):  # the reference may be a checkpoint's
        return 0.0
    dataset = dataset_of(name, json.dumps(metadata["options"], sort_keys=True))
    return float(dataset.score_answer(answer, metadata["entry"]))


def is_literal(text: str) -> bool:
    """Whether Python evaluates a text without calling anything: a literal, or words, numbers and brackets."""
    if len(text) > LONGEST:
        return False
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return re.fullmatch(r"[\w\s,.'\"\[\]-]*", text) is not None
    return True


def is_formula(text: str) -> bool:
    """Whether a text is made of numbers, names, operators and calls of known functions, without huge numbers.

    >>> is_formula("2*x + sin(x)"), is_formula("open(x)"), is_formula("x.y"), is_formula("(exec)(x)")
    (True, False, False, False)
    """
    calls = {name for name in re.findall(r"([^\W\d]\w*|\))\s*\(", text)}
    functions = (
        "sin cos tan sec csc cot asin acos atan sinh cosh tanh asinh acosh atanh exp log ln sqrt Abs abs".split()
    )
    characters = len(text) <= LONGEST and re.fullmatch(r"[\w\s.,+*/^()!-]*", text) is not None
    attribute = re.search(r"\.\s*[^\W\de]|__", text) is not None
    return characters and not attribute and calls <= {*functions} and not too_large(text)


@functools.lru_cache(maxsize=64)
def dataset_of(name: str, options: str) -> Any:
    """Return a data set of reasoning-gym by its name and its options, JSON."""
    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))
