"""Which runs need reference answers, and what is refused where a task has none."""

from jaxrl_llm.config.run import Run
from jaxrl_llm.config.scored import bases
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.group_shaping import RelativeLength
from jaxrl_llm.rewards.shaping import Accuracy


def verifies(run: Run) -> bool:
    """Whether something that the run scores compares answers with references."""
    return any(isinstance(base, Accuracy) for base in bases(run))


def check_answers(run: Run) -> None:
    """Refuse a task that says that it has no answers where something reads which are right, before it is read.

    Raises:
      InputError: names the task's field, what reads the answers, and the remedy.
    """
    for name, task in (("task", run.task), ("evaluation.task", run.evaluation.task)):
        if task is None:
            continue
        if task.verifier == "none":
            refuse_readers(run, f"{name}.verifier none")
        elif getattr(task.source, "answer_field", "") is None:
            refuse_readers(run, f"{name}.source.answer_field None")


def refuse_readers(run: Run, cause: str) -> None:
    """InputError where something of the run reads which answers are right; for this ``cause`` none is known to be."""
    if verifies(run):
        raise InputError(
            f"{cause} leaves the reward Accuracy nothing to compare: give the task its answers and a verifier, or take "
            "Accuracy() out of scoring.rewards"
        )
    if any(isinstance(shape, RelativeLength) for shape in run.recipe.shaping):
        raise InputError(
            f"{cause}, but recipe.shaping RelativeLength rewards short answers that are right: give the task its "
            "answers and a verifier, or take it out"
        )
