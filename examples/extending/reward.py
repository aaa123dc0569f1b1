"""A reward: the share of the answer's letters that stand at their places.

A reward is a function of a problem and a completion, or in one of the other forms of ``rewards/functions.py``. Nothing
goes into the package: ``Scoring(rewards=(Accuracy(), in_place))``.
"""

from jaxrl_llm.types import Completion, Problem


def in_place(problem: Problem, completion: Completion) -> float:
    """Return a number from 0 to 1."""
    pairs = zip(problem.answer, completion.text.strip(), strict=False)
    return sum(letter == written for letter, written in pairs) / len(problem.answer)
