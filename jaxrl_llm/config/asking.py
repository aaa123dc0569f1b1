"""What is refused of which problems are asked."""

from jaxrl_llm import tasks
from jaxrl_llm.config.run import Run


def check_order(run: Run) -> None:
    """Refuse a curriculum that cannot work, before anything is loaded.

    Raises:
      InputError: names field, value and remedy.
    """
    curriculum = run.rollout.collect.curriculum
    if curriculum is not None:
        tasks.check_curriculum(curriculum, "rollout.collect.curriculum")
