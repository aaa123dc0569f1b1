"""What of a run's settings does nothing, or something else than one might think; and the remedy.

Said when the run begins.
"""

import math

from jaxrl_llm.algorithms.advantages import ProcessSupervised
from jaxrl_llm.config.mixture import parts_of_task
from jaxrl_llm.config.run import Run, given_rewards, has_accuracy, overlong_weight, resolved, rewards_of
from jaxrl_llm.config.scored import of_steps
from jaxrl_llm.rewards.group_shaping import RelativeLength
from jaxrl_llm.rewards.models import OF_STEPS

MANY_SNAPSHOTS = 20
LEAST_COMPLETIONS = 128
"""Of an update, in the papers' own runs."""
USUAL_MINIBATCHES = 4
"""What would act where a paper does not say how many updates it makes of a batch."""


def notes(run: Run) -> list[str]:
    """Everything to be said of a run before it begins, one line each."""
    run = resolved(run)
    return [*inert(run), *_short_memory(run), *_rewards(run), *_steps(run), *_critic(run)]


def inert(run: Run) -> list[str]:
    """Which pieces of the recipe cannot act under the run's settings, and the flag under which they would."""
    run = resolved(run)
    return [*_at_ratio_one(run), *_without_gap(run), *_too_late(run)]


def _at_ratio_one(run: Run) -> list[str]:
    """What waits for the policy to differ from the one that it is compared with.

    In a batch of one update the live policy is the old one, token for token, and, unless sampling runs ahead, the one
    that sampled. Tokens of earlier steps are compared with the policy of their own time.
    """
    algorithm = run.recipe.algorithm
    stale = run.rollout.collect.staleness > 0
    surrogate = algorithm.surrogate
    against_sampler = algorithm.ratio.anchor == "sampler"
    waiting = {
        getattr(surrogate, "idle", ""): not (stale and against_sampler),
        "the weight against the sampler is 1": surrogate.reads_sampler and not stale,
        "the sequence filter drops nothing": algorithm.sequence_filter is not None and not stale,
    }
    idle = [piece for piece, waits in waiting.items() if piece and waits]
    if _learns_earlier(run):
        idle = [f"{piece} but on tokens of earlier steps" for piece in idle]
    if run.learner.target_kl is not None:
        idle.append("learner.target_kl stops nothing")
    critic = run.recipe.critic
    if critic is not None and critic.clip is not None and critic.epochs < 2:
        idle.append("recipe.critic.clip holds no value")
    if not idle or run.learner.updates > 1:
        return []
    paper = run.recipe.paper
    alike = ", as in the paper" if paper is not None and paper.count == 1 else ""
    return [f"one update a batch{alike}: {', '.join(idle)}; {_more_updates(run)}{_in_the_paper(run)}{_few(run)}"]


def _learns_earlier(run: Run) -> bool:
    """Whether a batch may hold tokens that an earlier policy than its own sampled: surplus, parts of
    completions, or stored successes."""
    collect = run.rollout.collect
    leaves = bool(run.recipe.filter_groups or collect.token_budget or collect.interrupt or collect.replay)
    return collect.learn_earlier and leaves


def _more_updates(run: Run) -> str:
    """The flag that makes several updates of a batch."""
    return "--learner.epochs 2" if run.rollout.prompts == 1 else f"--learner.minibatches {_minibatches(run)}"


def _minibatches(run: Run) -> int:
    """The paper's count if minibatches of two groups remain."""
    paper = run.recipe.paper
    wanted = paper.count if paper is not None and paper.count > 1 else USUAL_MINIBATCHES
    return max(2, min(wanted, run.rollout.prompts // 2))


def _in_the_paper(run: Run) -> str:
    paper = run.recipe.paper
    if paper is None or paper.count == 1:
        return ""
    size = "" if paper.completions is None else f" of {paper.completions} completions"
    return f" (the paper makes {paper.count} updates{size})"


def _few(run: Run) -> str:
    """Where each of several updates would be of fewer completions than any paper's: that they are no advice."""
    size = run.rollout.prompts * run.rollout.group
    if run.rollout.prompts == 1 or size // _minibatches(run) >= LEAST_COMPLETIONS:
        return ""
    return f", but {size} completions are few for it: papers have {LEAST_COMPLETIONS} or more an update"


def _without_gap(run: Run) -> list[str]:
    """A correction for what the sampler did differently, where it is the learner's own model and policy.

    A loss without a ratio leaves tokens of earlier steps to its correction.
    """
    correction = run.recipe.algorithm.correction
    surrogate = run.recipe.algorithm.surrogate
    needed = run.rollout.collect.staleness > 0 or (_learns_earlier(run) and not surrogate.reads_ratio)
    if correction is None or needed:
        return []
    return [
        f"sampler and learner are one policy: the correction {type(correction).__name__} sees no gap but rounding; "
        "--rollout.collect.staleness 1 makes one"
    ]


def _too_late(run: Run) -> list[str]:
    """What begins after the run has ended."""
    recipe = run.recipe
    updates = run.steps * run.learner.updates
    lines = [
        f"recipe.resets.{name} {every} never comes in {run.steps} steps"
        for name, every in (
            ("reference_every", recipe.resets.reference_every),
            ("optimiser_every", recipe.resets.optimiser_every),
        )
        if every > run.steps
    ]
    kept = run.steps // recipe.resets.reference_every if recipe.resets.reference_every else 0
    if recipe.resets.snapshots and kept > MANY_SNAPSHOTS:
        lines.append(
            f"recipe.resets.reference_every {recipe.resets.reference_every} keeps {kept} snapshots of the models for "
            "good; --recipe.resets.no-snapshots keeps none"
        )
    if recipe.critic is not None and recipe.critic.warmup >= run.steps:
        lines.append(f"recipe.critic.warmup {recipe.critic.warmup} leaves the policy none of {run.steps} steps")
    for shape in recipe.shaping:
        if isinstance(shape, RelativeLength) and shape.warmup >= updates:
            lines.append(f"the length reward begins after {shape.warmup} updates, and the run makes {updates}")
    return lines


def _short_memory(run: Run) -> list[str]:
    """An optimiser that begins anew before its first moment has averaged over as many gradients as it can."""
    every = run.recipe.resets.optimiser_every
    optimiser = run.learner.optimiser
    learner = run.learner
    updates = every * run.learner.updates
    memory = round(1 / (1 - optimiser.b1))
    if not 0 < updates < memory or every > run.steps:
        return []
    when = "update" if updates == 1 else f"{updates} updates"
    alone = optimiser.name == "adamw" and updates == 1
    seen = "AdamW's steps are the signs of one gradient" if alone else f"its moments average over {memory}"
    wanted = math.ceil(memory / every)
    minibatches = min(wanted, run.rollout.prompts)
    epochs = math.ceil(wanted / minibatches)
    flags = [f"--learner.minibatches {minibatches}"] if minibatches != learner.minibatches else []
    flags += [f"--learner.epochs {epochs}"] if epochs != learner.epochs else []
    remedy = f"{' '.join(flags)}, or --recipe.resets.optimiser_every {math.ceil(memory / run.learner.updates)}"
    return [f"the optimiser begins anew after every {when}, and {seen}; {remedy}"]


def _rewards(run: Run) -> list[str]:
    """Punishments that punish nothing, and filters that read something else than they are known for."""
    recipe = run.recipe
    lines = []
    parts = parts_of_task(run.task)
    lacking = [part.task.label for part in parts if not has_accuracy(rewards_of(run, part))]
    if recipe.filter_groups and lacking:
        whose = "" if len(lacking) == len(parts) else f" of {', '.join(lacking)}"
        lines.append(f"no Accuracy among the rewards{whose}: groups are filtered by reward")
    if recipe.overlong_share and recipe.overlong_weight is None:
        lines.append(
            f"no Accuracy among the rewards: recipe.overlong_share {recipe.overlong_share:g} punishes nothing; "
            "--recipe.overlong_weight W takes W away at the end of the budget (half of what lies between right "
            "and wrong)"
        )
    if recipe.drop_truncated and overlong_weight(run):
        lines.append(
            "completions that are cut off are punished but left out of the loss: being cut off is never unlearned; "
            "--recipe.no-drop_truncated"
        )
    return lines


def _steps(run: Run) -> list[str]:
    """Rewards of steps, or of outcomes, that the estimator does not read."""
    rewards = given_rewards(run)
    steps = of_steps(rewards)
    estimator = run.recipe.algorithm.advantage
    kind = type(estimator).__name__
    lines = []
    if steps and not estimator.by_token:
        lines.append(
            f"{kind} reads outcome rewards: {', '.join(reward.name for reward in steps)} is measured, and nothing "
            "learns from it; estimators of steps are ProcessSupervised, Whitened and GAE"
        )
    if isinstance(estimator, ProcessSupervised):
        others = [reward.name for reward in rewards if not isinstance(reward, OF_STEPS) and reward.weight]
        if others:
            lines.append(f"{kind} reads the rewards of steps alone: {', '.join(others)} is measured only")
        if run.recipe.filter_groups:
            lines.append(
                f"{kind} reads the rewards of steps, and groups are filtered by {run.recipe.filter_groups}: "
                "--recipe.filter_groups False"
            )
    return lines


def _critic(run: Run) -> list[str]:
    """When the policy waits for its critic, and completions whose last value goes unread."""
    recipe = run.recipe
    lines = []
    if recipe.critic is not None and 0 < recipe.critic.warmup < run.steps:
        steps = "step" if recipe.critic.warmup == 1 else f"{recipe.critic.warmup} steps"
        lines.append(f"the critic learns alone in the first {steps} (recipe.critic.warmup)")
    if recipe.drop_truncated and "bootstrap" in recipe.algorithm.advantage.needs:
        lines.append(
            "completions that are cut off are left out of the loss: the value of the state after them is never read; "
            "--recipe.no-drop_truncated"
        )
    return lines
