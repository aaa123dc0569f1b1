"""What is refused of which problems are asked, and of what is replayed."""

from jaxrl_llm import tasks
from jaxrl_llm.config.run import Run, given_rewards, has_accuracy
from jaxrl_llm.errors import require


def check_order(run: Run) -> None:
    """Refuse a curriculum that cannot work, before anything is loaded.

    Raises:
      InputError: names field, value and remedy.
    """
    curriculum = run.rollout.collect.curriculum
    if curriculum is not None:
        tasks.check_curriculum(curriculum, "rollout.collect.curriculum")


def check_replay(run: Run) -> None:
    """Refuse a replay where nothing says what a success is, or whose ratios would not be the true ones.

    Raises:
      InputError: names field, value and remedy.
    """
    replay = run.rollout.collect.replay
    if replay is None:
        return
    name = "rollout.collect.replay"
    for field in ("per_prompt", "prompts"):
        value = getattr(replay, field)
        require(value >= 1, f"{name}.{field} must be at least 1, got {value}")
    algorithm = run.recipe.algorithm
    verified = has_accuracy(given_rewards(run))
    for wrong, reason in (
        (not verified, "stores answers that are right, and no reward says so: add Accuracy() to scoring.rewards"),
        (
            run.rollout.group < 2,
            f"puts a success beside failures, and rollout.group is {run.rollout.group}: set it to at least 2",
        ),
        (
            not run.rollout.collect.learn_earlier,
            "adds tokens that earlier policies sampled, and rollout.collect.learn_earlier False leaves those out of "
            "the loss: set it to True",
        ),
        (
            not (algorithm.surrogate.reads_ratio or algorithm.corrects_sampler),
            f"needs a ratio against the policy that sampled, and {type(algorithm.surrogate).__name__} of recipe "
            f"{run.recipe.name} has none: take another recipe, such as grpo, or set "
            "recipe.algorithm.correction TruncatedIS()",
        ),
        (
            run.learner.keep_sampling_mask,
            "has ratios of whole distributions, and learner.keep_sampling_mask True has those of truncated ones, whose "
            "kept sets would have to be stored: set rollout.top_k 0, rollout.top_p 1 and learner.keep_sampling_mask "
            "False",
        ),
        (
            run.recipe.critic is not None,
            "would teach the critic that a prompt is worth what its best answer was: set recipe.critic None",
        ),
        (
            run.learner.target_kl is not None,
            "adds tokens that are as far from the policy as it has moved since they were stored, and learner.target_kl "
            f"{run.learner.target_kl} would count them: set it to None",
        ),
    ):
        require(not wrong, f"{name} {reason}; or set {name} None")
