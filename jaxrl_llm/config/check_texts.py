"""What is refused of runs that learn from data, before anything is loaded."""

import math

from jaxrl_llm import tasks
from jaxrl_llm.config.learning import check_learner
from jaxrl_llm.config.numbers import check_answers_asked, check_numbers
from jaxrl_llm.config.run import Configuration, Evaluation
from jaxrl_llm.config.texts import FromData, Preference, RewardModel
from jaxrl_llm.errors import require
from jaxrl_llm.tasks import Collected, Pairs
from jaxrl_llm.tasks.collected import KINDS


def check_from_data(run: FromData) -> None:
    """Refuse what cannot work, before anything is loaded; InputError names the field, its value and the remedy."""
    _check_counts(run)
    _check_data(run)
    _check_learning(run)
    _check_testing(run)


def _check_counts(run: FromData) -> None:
    answering = run.answering
    counts = {
        "batch.rows": run.batch.rows,
        "batch.max_tokens": run.batch.max_tokens,
        "answering.max_new_tokens": answering.max_new_tokens,
        "answering.slots": answering.slots,
        "answering.chunk": answering.chunk,
        "answering.workers": answering.workers,
    }
    check_numbers(run, counts, {})
    require(answering.timeout_s > 0, f"answering.timeout_s must be above 0 seconds, got {answering.timeout_s}")
    require(
        not run.mesh.rollout,
        f"mesh.rollout {run.mesh.rollout} sets devices aside for sampling, which a {type(run).__name__} does not need: "
        "set it to 0",
    )


def _check_data(run: FromData) -> None:
    require(0 <= run.data.holdout < 1, f"data.holdout is a share from 0 to below 1, got {run.data.holdout}")
    if isinstance(run, RewardModel):
        require(0 <= run.centre < math.inf, f"centre must be at least 0, and finite, got {run.centre}")
        require(
            not run.centre or isinstance(run.data, Pairs),
            f"centre {run.centre} is of pairs and rankings, and data is Steps, whose scores are held by their labels: "
            "leave it out",
        )
        require(
            run.score_at is None or isinstance(run.data, Pairs),
            f"score_at {run.score_at} is of pairs and rankings, and data is Steps, whose scores are read where steps "
            "end: leave it out",
        )
    source = run.data.source
    if not isinstance(source, Collected):
        return
    tasks.check_collected(source, KINDS[type(run.data)], "data.source.")


def _check_learning(run: FromData) -> None:
    learner = run.learner
    check_learner(learner, ("batch.rows", run.batch.rows), run.batch.max_tokens + 1)
    require(
        learner.target_kl is None, f"learner.target_kl {learner.target_kl} is for reinforcement learning: leave it out"
    )
    require(
        not run.output.monitor_kl,
        "output.monitor_kl is for reinforcement learning, whose policy samples what is measured: leave it out",
    )
    require(
        not learner.keep_sampling_mask,
        "learner.keep_sampling_mask is for tokens that a sampler drew, and these are data: leave it out",
    )


def _check_testing(run: FromData) -> None:
    evaluation = run.evaluation
    check_answers_asked(evaluation)
    require(
        evaluation.judge is None,
        "evaluation.judge compares the answers of a policy in reinforcement learning: leave it out",
    )
    if isinstance(run, RewardModel):
        only = Evaluation(every=evaluation.every, limit=evaluation.limit)
        require(
            evaluation == only,
            "a reward model gives no answers: of evaluation it has every and limit alone, leave the others out",
        )
    if evaluation.task is not None:
        tasks.check(evaluation.task)
    held_out = run.data.holdout > 0 or (isinstance(run.data.source, Collected) and run.data.source.task.holdout > 0)
    require(
        not evaluation.every or held_out or evaluation.task is not None,
        f"evaluation.every {evaluation.every} has nothing to test on: set data.holdout above 0, or evaluation.task",
    )


def check_start(run: Configuration) -> None:
    """Refuse first weights of another run where the run's data is made with its own model.

    Raises:
      InputError: names the remedy.
    """
    own = isinstance(getattr(getattr(run, "data", None), "source", None), Collected)
    require(
        not (own or isinstance(run, Preference)),
        "--from would begin with other weights than those that the data is made with: give them as --model RUN@STEP",
    )
