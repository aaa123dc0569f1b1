"""Whether a completion answers its problem: the extracted answer against the reference."""

import math
from typing import NamedTuple

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.extract import extract, integer, normalised, number
from jaxrl_llm.tasks.instructions import followed
from jaxrl_llm.tasks.resolve import resolve
from jaxrl_llm.types import Completion, Problem


def match(answer: str, problem: Problem) -> float:
    """1 for equal numbers, or for texts that are equal but for case, width, white space and a final full stop."""
    value = number(answer)
    if value is not None and value == number(problem.answer):
        return 1.0
    return float(_normal(answer) == _normal(problem.answer))


def same_integer(answer: str, problem: Problem) -> float:
    """1 for the same integer, however it is written: ``"3.0"``, ``"+3"``, ``"1,000"``."""
    value = integer(answer)
    return float(value is not None and value == integer(problem.answer))


def instructed(text: str, problem: Problem) -> float:
    """The share of the problem's instructions that the text follows; 1 is IFEval's strict accuracy of a prompt.

    Characters count as they are written: a full-width comma is none, as in IFEval.
    """
    found = followed(text, problem.metadata)
    return sum(found) / len(found)


INLINE = {"match": match, "integer": same_integer, "instructions": instructed}
"""Verifiers that cannot hang: ``(answer, problem) -> score``."""

POOLED = {"math": "jaxrl_llm.rewards.math_answer:score", "reasoning_gym": "jaxrl_llm.rewards.gym_answer:score"}
"""Verifiers that run a model's text through code that may hang, as ``module:function`` of the same form."""


class Pooled(NamedTuple):
    """A verifier's call that belongs into the pool.

    Attributes:
      path: of the function, ``module:function``.
      answer: what it is called with, beside the problem.
    """

    path: str
    answer: str


def accuracy(problem: Problem, completion: Completion) -> float:
    """The verifier's score of the extracted answer, 0 where there is none; accurate means 1 or more. NaN without a
    verifier.

    It runs here, however long that takes; ``Scorer`` runs the pooled verifiers where they can be killed.

    Raises:
      InputError: the problem names an unknown extractor or verifier.
    """
    found = verdict(problem, completion)
    return resolve(found.path)(found.answer, problem) if isinstance(found, Pooled) else found


def verdict(problem: Problem, completion: Completion) -> float | Pooled:
    """The accuracy where the verifier cannot hang; else the call that computes it. It raises what ``accuracy`` does."""
    if problem.verifier == "none":
        return math.nan
    answer = extract(completion.text, problem.extractor)
    if answer is None:
        return 0.0
    if problem.verifier in INLINE:
        return INLINE[problem.verifier](answer, problem)
    if problem.verifier not in POOLED:
        raise InputError(
            f"verifier {problem.verifier!r} of problem {problem.id} is unknown; "
            f"choose one of {', '.join((*INLINE, *POOLED))}"
        )
    return Pooled(POOLED[problem.verifier], answer)


def _normal(text: str) -> str:
    return " ".join(normalised(text).split()).rstrip(".。").casefold()
