"""Which problems a task keeps: functions of one problem, named by ``Task.keep``."""

from jaxrl_llm.tasks.extract import number
from jaxrl_llm.tasks.instructions import CHECKS, IDS
from jaxrl_llm.types import Problem


def nonnegative_answer(problem: Problem) -> bool:
    """Whether the reference is a number of 0 or more."""
    value = number(problem.answer)
    return value is not None and value >= 0


def checkable_instructions(problem: Problem) -> bool:
    """Whether the verifier ``instructions`` knows each of the problem's instructions."""
    return all(name in CHECKS for name in problem.metadata.get(IDS) or ())
