"""Which runs need reference answers, and what is refused where a task has none."""

from jaxrl_llm.config.mixture import Mixture, Part, parts_of_task
from jaxrl_llm.config.run import Run
from jaxrl_llm.config.scored import asked, bases, watched
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.bounds import base_of
from jaxrl_llm.rewards.group_shaping import RelativeLength
from jaxrl_llm.rewards.shaping import Accuracy
from jaxrl_llm.tasks.task import UNANSWERED


def verifies(run: Run, part: Part | None = None) -> bool:
    """Whether something that the run scores, of one task if ``part`` says which, compares answers with references."""
    if part is not None and part.rewards is not None:
        beside = (*watched(run).values(), *asked(run).values())
        return any(isinstance(base_of(reward), Accuracy) for reward in (*part.rewards, *beside))
    return any(isinstance(base, Accuracy) for base in bases(run))


def check_answers(run: Run) -> None:
    """Refuse a task that says that it has no answers where something reads which are right, before it is read.

    Raises:
      InputError: names the task's field, what reads the answers, and the remedy.
    """
    for name, task in (("task", run.task), ("evaluation.task", run.evaluation.task)):
        for number, part in enumerate(parts_of_task(task)):
            field = f"{name}.parts[{number}].task" if isinstance(task, Mixture) else name
            if part.task.verifier == "none":
                refuse_readers(run, part, f"{field}.verifier none")
            elif part.task.verifier not in UNANSWERED and getattr(part.task.source, "answer_field", "") is None:
                refuse_readers(run, part, f"{field}.source.answer_field None")


def refuse_readers(run: Run, part: Part, cause: str) -> None:
    """InputError where something of the run reads which answers are right; for this ``cause`` none is known to be."""
    if verifies(run, part):
        raise InputError(
            f"{cause} leaves the reward Accuracy nothing to compare: give the task its answers and a verifier, or take "
            "Accuracy() out of scoring.rewards"
        )
    if any(isinstance(shape, RelativeLength) for shape in run.recipe.shaping):
        raise InputError(
            f"{cause}, but recipe.shaping RelativeLength rewards short answers that are right: give the task its "
            "answers and a verifier, or take it out"
        )
