"""Notes on settings of a run that have no effect, or another one than expected, with the remedy.

Said when the run begins.
"""

import math

from jaxrl_llm.algorithms.advantages import ProcessSupervised
from jaxrl_llm.config.checks import resolved
from jaxrl_llm.config.mixture import given_rewards, has_accuracy, of_steps, overlong_weight, parts_of_task, rewards_of
from jaxrl_llm.config.run import Run
from jaxrl_llm.rewards.functions import OF_STEPS
from jaxrl_llm.rewards.shaping import RelativeLength
from jaxrl_llm.system.setting import settings_in

LEAST_COMPLETIONS = 128
"""The fewest completions per update in the papers' own runs."""
USUAL_MINIBATCHES = 4
"""The suggested number of minibatches where a paper does not publish its updates per batch."""


def notes(run: Run) -> list[str]:
    """Return all notes on a run to print before it begins, one line each."""
    run = resolved(run)
    own = [line for setting, _ in settings_in(run) for line in setting.notes(run)]
    lines = [*inert(run), *_short_memory(run), *_rewards(run), *own]
    if run.recipe.overlong.drop and "bootstrap" in run.recipe.algorithm.advantage.needs:
        lines.append(
            "completions that are cut off are left out of the loss: the value of the state after them is never read; "
            "--recipe.overlong.no_drop"
        )
    return lines


def inert(run: Run) -> list[str]:
    """List the pieces of the recipe that cannot act under the run's settings, and the flag under which they would."""
    run = resolved(run)
    recipe, resets = run.recipe, run.recipe.resets
    lines = _at_ratio_one(run)
    correction = recipe.algorithm.correction
    # A loss without a ratio leaves tokens of earlier steps to its correction.
    corrects_earlier = _learns_earlier(run) and not recipe.algorithm.surrogate.reads_ratio
    if correction is not None and not run.rollout.collect.staleness and not corrects_earlier:
        lines.append(
            f"sampler and learner are one policy: the correction {type(correction).__name__} sees no gap but rounding; "
            "--rollout.collect.staleness 1 makes one"
        )
    for name in ("reference_every", "optimiser_every"):
        if (every := getattr(resets, name)) > run.steps:
            lines.append(f"recipe.resets.{name} {every} never comes in {run.steps} steps")
    kept = run.steps // resets.reference_every if resets.reference_every else 0
    if resets.snapshots and kept > 20:
        lines.append(
            f"recipe.resets.reference_every {resets.reference_every} keeps {kept} snapshots of the models for good; "
            "--recipe.resets.no_snapshots keeps none"
        )
    if recipe.critic is not None and recipe.critic.warmup >= run.steps:
        lines.append(f"recipe.critic.warmup {recipe.critic.warmup} leaves the policy none of {run.steps} steps")
    updates = run.steps * run.learner.updates
    for shape in recipe.shaping:
        if isinstance(shape, RelativeLength) and shape.warmup >= updates:
            lines.append(f"the length reward begins after {shape.warmup} updates, and the run makes {updates}")
    return lines


def _at_ratio_one(run: Run) -> list[str]:
    """List the pieces that only act once the live policy differs from the policy that it is compared with.

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
        idle = [f"{piece} except on tokens of earlier steps" for piece in idle]
    if run.learner.target_kl is not None:
        idle.append("learner.target_kl stops nothing")
    critic = run.recipe.critic
    if critic is not None and critic.clip is not None and critic.epochs < 2:
        idle.append("recipe.critic.clip never binds")
    if not idle or run.learner.updates > 1:
        return []
    paper, prompts = run.recipe.paper, run.rollout.prompts
    published = 1 if paper is None else paper.count
    # Each minibatch has at least two groups.
    minibatches = max(2, min(published if published > 1 else USUAL_MINIBATCHES, prompts // 2))
    flag = "--learner.epochs 2" if prompts == 1 else f"--learner.minibatches {minibatches}"
    alike = ", as in the paper" if paper is not None and published == 1 else ""
    in_paper = few = ""
    if published > 1:
        each = "" if paper.completions is None else f" of {paper.completions} completions"
        in_paper = f" (the paper makes {published} updates{each})"
    size = prompts * run.rollout.group
    if prompts > 1 and size // minibatches < LEAST_COMPLETIONS:
        few = f", but {size} completions are few for it: papers have {LEAST_COMPLETIONS} or more an update"
    return [f"one update a batch{alike}: {', '.join(idle)}; {flag}{in_paper}{few}"]


def _learns_earlier(run: Run) -> bool:
    """Whether a batch may hold tokens sampled by an earlier policy than its own: surplus groups, parts of completions,
    or stored successes."""
    collect = run.rollout.collect
    leaves = bool(run.recipe.filter_groups or collect.token_budget or collect.interrupt or collect.replay)
    return collect.learn_earlier and leaves


def _short_memory(run: Run) -> list[str]:
    """Note an optimiser that is reset before its first moment averages over as many gradients as it can."""
    every = run.recipe.resets.optimiser_every
    optimiser = run.learner.optimiser
    learner = run.learner
    updates = every * run.learner.updates
    memory = round(1 / (1 - optimiser.moments.b1))
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
    return [f"the optimiser is reset after every {when}, and {seen}; {remedy}"]


def _rewards(run: Run) -> list[str]:
    """Note punishments without effect, group filters that read the reward for lack of ``Accuracy``, and rewards, of
    steps or of outcomes, that the estimator does not read."""
    recipe = run.recipe
    lines = []
    parts = parts_of_task(run.task)
    lacking = [part.task.label for part in parts if not has_accuracy(rewards_of(run, part))]
    if recipe.filter_groups and lacking:
        whose = "" if len(lacking) == len(parts) else f" of {', '.join(lacking)}"
        lines.append(f"no Accuracy among the rewards{whose}: groups are filtered by reward")
    if recipe.overlong.share and recipe.overlong.weight is None:
        lines.append(
            f"no Accuracy among the rewards: recipe.overlong.share {recipe.overlong.share:g} punishes nothing; "
            "--recipe.overlong.weight W takes W away at the end of the budget (half of the distance between "
            "right and wrong)"
        )
    if recipe.overlong.drop and overlong_weight(run):
        lines.append(
            "completions that are cut off are punished but left out of the loss: being cut off is never unlearned; "
            "--recipe.overlong.no_drop"
        )
    rewards = given_rewards(run)
    steps = of_steps(rewards)
    estimator = recipe.algorithm.advantage
    kind = type(estimator).__name__
    if steps and not estimator.by_token:
        lines.append(
            f"{kind} reads outcome rewards: {', '.join(reward.name for reward in steps)} is measured, and nothing "
            "learns from it; estimators of steps are ProcessSupervised, Whitened and GAE"
        )
    mute = [part.task.label for part in parts if part.task.environment is None]
    if "turn_rewards" in estimator.needs and mute:
        lines.append(
            f"{kind} reads the rewards of turns, and task {mute[0]} has tools alone, which give none: only the "
            "end of an episode is rewarded"
        )
    if isinstance(estimator, ProcessSupervised):
        others = [reward.name for reward in rewards if not isinstance(reward, OF_STEPS) and reward.weight]
        if others:
            lines.append(f"{kind} reads the rewards of steps alone: {', '.join(others)} is measured only")
        if recipe.filter_groups:
            lines.append(
                f"{kind} reads the rewards of steps, and groups are filtered by {recipe.filter_groups}: "
                "--recipe.filter_groups False"
            )
    return lines
