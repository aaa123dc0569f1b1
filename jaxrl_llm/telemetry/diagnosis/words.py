"""What is said of each kind of trouble: its numbers, what it commonly means, and the setting to change."""

import numpy as np

from jaxrl_llm.telemetry.columns import short
from jaxrl_llm.telemetry.diagnosis.departure import Departure
from jaxrl_llm.telemetry.diagnosis.finding import Finding
from jaxrl_llm.telemetry.diagnosis.history import History, Series
from jaxrl_llm.telemetry.diagnosis.progress import level
from jaxrl_llm.telemetry.diagnosis.stalls import Parting, Plateau

RATE = "--learner.optimiser.learning_rate"


def entropy_collapse(step: int, found: Departure, run: History) -> Finding:
    """Words for it."""
    return Finding(
        "entropy_collapse",
        step,
        f"entropy fell from {short(found.before)} to {short(found.after)} nats{_beside(run, step)}",
        "The policy has become nearly deterministic before it learned the task, so that its groups hold no other "
        "answers to learn from.",
        "raise the upper clip, --recipe.algorithm.surrogate.high 0.28, or add a bonus, --recipe.algorithm.entropy_coef "
        f"0.001; a lower {RATE}; a higher --rollout.temperature",
    )


def entropy_explosion(found: Departure, run: History) -> Finding:
    """Words for it."""
    return Finding(
        "entropy_explosion",
        found.steep,
        f"entropy rose from {short(found.before)} to {short(found.after)} nats{_beside(run, found.steep)}",
        "The policy dissolves towards random tokens: updates are too large, or an entropy bonus outweighs the reward.",
        f"a lower {RATE}, --recipe.algorithm.entropy_coef 0, a lower --rollout.temperature",
    )


def length_collapse(found: Departure, run: History) -> Finding:
    """Words for it."""
    return Finding(
        "length_collapse",
        found.step,
        f"completions shrank from {short(found.before)} to {short(found.after)} tokens{_beside(run, found.step)}",
        "Short answers pay at least as well as good ones: a length penalty is too strong, or a loss that averages over "
        "each sequence favours the short ones.",
        "weaken what punishes length in --scoring.rewards or --recipe.overlong_share; --recipe dr_grpo weights all "
        "tokens alike",
    )


def length_explosion(found: Departure, run: History) -> Finding:
    """Words for it."""
    return Finding(
        "length_explosion",
        found.steep,
        f"completions grew from {short(found.before)} to {short(found.after)} tokens{_beside(run, found.steep)}",
        "Tokens are added that bring no reward: long wrong answers are punished too little for each token, or the end "
        "of an answer is no longer learned.",
        "--recipe.overlong_share 0.2, a LengthPenalty among scoring.rewards, or a smaller --rollout.max_new_tokens",
    )


def truncation(found: Departure) -> Finding:
    """Words for it."""
    return Finding(
        "truncation",
        found.step,
        f"{_percent(found.after)} of the completions are cut off at the limit{_instead(found)}",
        "Answers that are cut off are scored as if they were wrong, so the run learns from its limit and not from its "
        "task.",
        "a larger --rollout.max_new_tokens; --recipe.drop_truncated leaves them out of the loss; "
        "--recipe.overlong_share 0.2 punishes them gently",
    )


def repetition(found: Departure) -> Finding:
    """Words for it."""
    return Finding(
        "repetition",
        found.step,
        f"{_percent(found.after)} of the completions repeat themselves to their end{_instead(found)}",
        "The policy has fallen into loops, which fill the budget and teach nothing.",
        "--rollout.repetition.longest_period 16 with --rollout.repetition.times 8 ends them early, a RepetitionPenalty "
        f"among scoring.rewards punishes them; a lower {RATE}, a higher --rollout.temperature",
    )


def reward_hacking(found: Parting) -> Finding:
    """Words for it."""
    return Finding(
        "reward_hacking",
        found.step,
        f"the training reward rose from {short(found.reward_then)} to {short(found.reward_now)} while "
        f"{found.task} fell from {_percent(found.best)} to {_percent(found.now)}",
        "The policy has found answers that the reward likes and the evaluation does not: a gap in the reward, or "
        "training problems learned by heart.",
        "read the best rewarded answers in samples.jsonl and mend scoring.rewards; hold the policy back with "
        f"--recipe.algorithm.kl_coef (of a recipe with a KL, such as --recipe grpo) or a lower {RATE}; the run can "
        "begin again from a checkpoint before it, --from RUN@STEP",
    )


def no_signal(found: Departure, run: History) -> Finding:
    """Words for it."""
    return Finding(
        "no_signal",
        found.step,
        f"in {_percent(found.after)} of the groups all rewards are equal{_beside(run, found.step)}",
        "A group without a difference has advantage 0: the problems are too hard or too easy for this policy, or the "
        "reward is blind to what differs.",
        "--recipe.filter_groups reward samples on until groups differ, a larger --rollout.group finds differences more "
        "often; else take problems that are sometimes solved (task.source), or a higher --rollout.temperature",
    )


def kl_runaway(found: Departure) -> Finding:
    """Words for it."""
    return Finding(
        "kl_runaway",
        found.steep,
        f"the KL to the reference rose from {short(found.before)} to {short(found.after)} nats per token",
        "The policy runs away from its reference faster than the penalty holds it, commonly on its way to nonsense.",
        f"a larger --recipe.algorithm.kl_coef, a lower {RATE}; where the policy is still good, "
        "--recipe.resets.reference_every begins the reference anew",
    )


def clip_saturation(found: Departure) -> Finding:
    """Words for it."""
    return Finding(
        "clip_saturation",
        found.step,
        f"{_percent(found.after)} of the tokens have their gradient cut by the clip{_instead(found)}",
        "Updates of one batch move the policy so far that much of the batch no longer teaches.",
        f"fewer --learner.minibatches or --learner.epochs, a lower {RATE}, or --learner.target_kl 0.05 to end the "
        "updates of a batch in time",
    )


def sampler_mismatch(found: Departure) -> Finding:
    """Words for it."""
    return Finding(
        "sampler_mismatch",
        found.step,
        f"sampler and learner differ by {short(found.after)} nats on the same tokens (before: {short(found.before)})",
        "The learner's gradient is of another policy than the one that sampled, by rounding, by truncated sampling or "
        "by stale weights.",
        "--learner.compute_dtype float32 and --rollout.strict; --learner.keep_sampling_mask where top_k or top_p cut; "
        "--rollout.collect.staleness 0; or --recipe.algorithm.correction, which weighs it out",
    )


def gradient_growth(found: Departure) -> Finding:
    """Words for gradients that have grown for good."""
    return _gradients(
        found.step, f"the gradient's norm grew from {short(found.before)} to {short(found.after)} and stays there"
    )


def gradient_spikes(gradients: Series, spikes: np.ndarray, usual: np.ndarray) -> Finding:
    """Words for single gradients; ``spikes``: where they are in the series, ``usual``: what they are measured by."""
    times = float(np.max(gradients.values[spikes] / np.maximum(usual[spikes], 1e-12)))
    often = f"{times:.0f}" if times < 1000 else "more than 1000"  # where most are next to nothing
    return _gradients(
        int(gradients.steps[spikes[0]]),
        f"the gradient's norm spiked {len(spikes)} times, up to {short(float(gradients.values[spikes].max()))}, "
        f"{often} times what is usual",
    )


def _gradients(step: int, what: str) -> Finding:
    return Finding(
        "gradient_spikes",
        step,
        what,
        "A few batches throw the policy off course: rare tokens with tiny probabilities, broken rewards, or a rate "
        "that is too high.",
        f"a smaller --learner.optimiser.clip_norm, a lower {RATE} with some --learner.optimiser.warmup; look at the "
        "step's answers in samples.jsonl",
    )


def stalled(found: Plateau, run: History) -> Finding:
    """Words for it."""
    return Finding(
        "stalled",
        found.step,
        f"no progress since step {found.step} of {run.last}: at best {short(found.best)}, now {short(found.now)}",
        "What the policy still fails at it never gets right by chance, or its updates are too small to matter.",
        f"a larger --rollout.group or easier problems (task.source), --recipe.filter_groups reward; a higher {RATE}; "
        "--recipe.resets.on_stall 3 where there is a KL",
    )


def _beside(run: History, step: int) -> str:
    """How reward and evaluation went meanwhile."""
    told = [("reward", run["reward/mean"]), *run.evaluations.items()]
    parts = []
    for name, series in told:
        if len(series):
            before = series.before(step)
            then = level(before) if len(before) else float(series.values[0])
            parts.append(f"{name} {short(then)} -> {short(level(series))}")
    return f" ({', '.join(parts)})" if parts else ""


def _instead(found: Departure) -> str:
    """What it was before, where it was otherwise."""
    return f", {_percent(found.before)} before" if found.after - found.before > 0.01 else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"
