"""Findings: the report of each kind of trouble, with its numbers, its usual meaning and the setting to change."""

import dataclasses

from jaxrl_llm.diagnosis.history import ChangePoint, History, level
from jaxrl_llm.system.text import percent, short


@dataclasses.dataclass(frozen=True)
class Finding:
    """A trouble of a run.

    Attributes:
      kind: its name, such as ``entropy_collapse``.
      step: the step of its beginning.
      what: the numbers.
      why: its usual meaning.
      remedy: the setting to change.
    """

    kind: str
    step: int
    what: str
    why: str
    remedy: str


RATE = "--learner.optimiser.learning_rate"
WORDS = {
    "entropy_collapse": (
        "entropy fell from {before} to {after} nats{meanwhile}",
        "The policy has become nearly deterministic before it learned the task, so that its groups hold no other "
        "answers to learn from.",
        "raise the upper clip, --recipe.algorithm.surrogate.high 0.28, or add a bonus, --recipe.algorithm.entropy_coef "
        f"0.001; a lower {RATE}; a higher --rollout.temperature",
    ),
    "entropy_explosion": (
        "entropy rose from {before} to {after} nats{meanwhile}",
        "The policy drifts towards random tokens: updates are too large, or an entropy bonus outweighs the reward.",
        f"a lower {RATE}, --recipe.algorithm.entropy_coef 0, a lower --rollout.temperature",
    ),
    "length_collapse": (
        "completions shrank from {before} to {after} tokens{meanwhile}",
        "Short answers pay at least as well as good ones: a length penalty is too strong, or a loss that averages over "
        "each sequence favours the short ones.",
        "weaken the length penalty in --scoring.rewards or --recipe.overlong.share; --recipe dr_grpo weights all "
        "tokens alike",
    ),
    "length_explosion": (
        "completions grew from {before} to {after} tokens{meanwhile}",
        "Added tokens bring no reward: long wrong answers are punished too little for each token, or the end "
        "of an answer is no longer learned.",
        "--recipe.overlong.share 0.2, a LengthPenalty among scoring.rewards, or a smaller --rollout.max_new_tokens",
    ),
    "truncation": (
        "{share} of the completions are cut off at the limit{share_before}",
        "Answers that are cut off are scored as if they were wrong, so the run learns its limit instead of its task.",
        "a larger --rollout.max_new_tokens; --recipe.overlong.drop leaves them out of the loss; "
        "--recipe.overlong.share 0.2 punishes them gently",
    ),
    "repetition": (
        "{share} of the completions repeat themselves to their end{share_before}",
        "The policy has fallen into loops, which fill the budget and teach nothing.",
        "--rollout.repetition.longest_period 16 with --rollout.repetition.times 8 ends them early, a RepetitionPenalty "
        f"among scoring.rewards punishes them; a lower {RATE}, a higher --rollout.temperature",
    ),
    "reward_hacking": (
        "the {reward} rose from {reward_then} to {reward_now} while {task} fell from {best} to {now}",
        "The policy has found answers that the reward likes and the evaluation does not: a gap in the reward, or "
        "training problems memorised.",
        "read the best rewarded answers in samples.jsonl and repair scoring.rewards; hold the policy back with "
        f"--recipe.algorithm.kl_coef (of a recipe with a KL, such as --recipe grpo) or a lower {RATE}; the run can "
        "start again from its best evaluation, --from RUN@best",
    ),
    "no_signal": (
        "in {share} of the groups all rewards are equal{meanwhile}",
        "A group with equal rewards has advantage 0: the problems are too hard or too easy for this policy, or the "
        "reward does not see the difference.",
        "--recipe.filter_groups reward samples on until groups differ, a larger --rollout.group finds differences more "
        "often; else take problems that are sometimes solved (task.source), or a higher --rollout.temperature",
    ),
    "kl_runaway": (
        "the KL to the reference rose from {before} to {after} nats per token",
        "The policy runs away from its reference faster than the penalty holds it, commonly on its way to nonsense.",
        f"a larger --recipe.algorithm.kl_coef, a lower {RATE}; where the policy is still good, "
        "--recipe.resets.reference_every resets the reference",
    ),
    "clip_saturation": (
        "{share} of the tokens have their gradient cut by the clip{share_before}",
        "Updates of one batch move the policy so far that much of the batch no longer teaches.",
        f"fewer --learner.minibatches or --learner.epochs, a lower {RATE}, or --learner.target_kl 0.05 to end the "
        "updates of a batch in time",
    ),
    "sampler_mismatch": (
        "sampler and learner differ by {after} nats on the same tokens (before: {before})",
        "The learner's gradient is of another policy than the one that sampled, by rounding, by truncated sampling or "
        "by stale weights.",
        "--learner.compute.dtype float32 and --rollout.engine.strict; --learner.keep_sampling_mask where top_k or "
        "top_p cut; --rollout.collect.staleness 0; or --recipe.algorithm.correction, which corrects for it",
    ),
    "gradient_spikes": (
        "the gradient's norm {changed}",
        "A few batches throw the policy off course: rare tokens with tiny probabilities, broken rewards, or a rate "
        "that is too high.",
        f"a smaller --learner.optimiser.clip_norm, a lower {RATE} with some --learner.optimiser.warmup; look at the "
        "step's answers in samples.jsonl",
    ),
    "not_a_number": (
        "step {step}: {found}",
        "An update went beyond the range of its numbers, or a reward, a log-probability or a row of data did.",
        f"a lower {RATE}, a smaller --learner.optimiser.clip_norm, --learner.compute.dtype float32; look at the step's "
        "answers in samples.jsonl",
    ),
    "stalled": (
        "no progress since step {step} of {last}: at best {best}, now {now}",
        "The remaining failures are never right by chance, or its updates are too small to matter.",
        f"a larger --rollout.group or easier problems (task.source), --recipe.filter_groups reward; a higher {RATE}; "
        "--recipe.resets.on_stall 3 where there is a KL",
    ),
    "overfitting": (
        "training rose from {then} to {training} since step {step}, and {tested} stays at {now}",
        "The policy memorises its training rows: there are too few of them for so many passes, or the held-out "
        "rows ask for something else.",
        f"more training rows (task.source), or fewer passes over them; a lower {RATE}, or a larger "
        "--recipe.algorithm.kl_coef; --from RUN@STEP takes a checkpoint from then, RUN@best the best model",
    ),
    "tools_unused": (
        "an episode has {after} calls of tools, {before} before{meanwhile}",
        "A policy that calls nothing never learns what a call is worth: none of its groups has an episode with one.",
        "show a worked call in the prompt (--task.system), or learn from episodes with calls first (jaxrl-llm "
        "collect); a higher --rollout.temperature",
    ),
    "tools_failing": (
        "{share} of the calls of tools fail{share_before}",
        "The policy calls tools that there are not, gives arguments that they refuse, or writes calls that cannot be "
        "read: environment/tool_errors/* says which.",
        "read the answers to its calls in samples.jsonl; say in the tools' docstrings what they take, and show a "
        "worked call in the prompt (--task.system); --rollout.episode.tool_timeout_s for slow ones",
    ),
    "turns_growing": (
        "episodes grew from {before} to {after} turns{meanwhile}",
        "Added turns bring no reward: the policy asks on instead of answering, or its limit is what ends an episode.",
        "a smaller --rollout.episode.max_turns or --rollout.episode.max_tool_calls; a cost of each turn in the "
        "environment's Step.reward",
    ),
}
"""The texts what, why and remedy of each kind; names in braces are replaced by numbers."""
LOST = (
    "what was learned is lost: at best {best}, until step {step}; now {now}",
    "Updates have thrown the policy off course, commonly after gradients or a KL that grew, or its problems or "
    "rewards have changed.",
    f"start again from a checkpoint before it, --from RUN@STEP or RUN@best, with a lower {RATE} or a larger "
    "--recipe.algorithm.kl_coef; --guard stalled with --rules.on_guard rollback does this automatically",
)
"""The texts for a run that has stalled because it lost its progress."""


def make_finding(kind: str, step: int, words: tuple[str, str, str] | None = None, **facts: str | int) -> Finding:
    """Make the finding of a trouble that began at a step.

    Args:
      kind: its name.
      step: the step of its beginning.
      words: what, why and remedy, in place of those of ``kind``.
      facts: values for the names in braces.
    """
    what, why, remedy = words or WORDS[kind]
    return Finding(kind, step, what.format(step=step, **facts), why, remedy)


def finding_of_change(kind: str, step: int, change: ChangePoint, run: History) -> Finding:
    """Make the finding of a lasting change, with the levels before and after: as numbers, and as shares."""
    meanwhile = []
    for name, series in (("reward", run["reward/mean"]), *run.evaluations.items()):
        if len(series):
            before = series.before(step)
            then = level(before) if len(before) else float(series.values[0])
            meanwhile.append(f"{name} {short(then)} -> {short(level(series))}")
    return make_finding(
        kind,
        step,
        before=short(change.before),
        after=short(change.after),
        share=percent(change.after),
        share_before=f", {percent(change.before)} before" if change.after - change.before > 0.01 else "",
        meanwhile=f" ({', '.join(meanwhile)})" if meanwhile else "",
    )
