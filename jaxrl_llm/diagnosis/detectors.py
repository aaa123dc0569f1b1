"""Checks of a run: one for each kind of trouble, a pure function of the run's history. The value of a metric alone says
little: checks compare it with the run's own past, require a change to last, and tolerate much in a run that learns. The
thresholds are ours, chosen on synthetic and real runs.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.codec import jsonable
from jaxrl_llm.diagnosis.history import (
    EVENT_BROKEN,
    FEW,
    MEASURED,
    ROLLED_BACK,
    TESTED,
    ChangePoint,
    History,
    Limit,
    Series,
    broken,
    change_point,
    fallen,
    history,
    improved,
    lasting,
    learned,
    level,
    line,
    lost,
    noise,
    plateau,
    recent,
    risen,
    smoothed,
)
from jaxrl_llm.system.text import percent, short
from jaxrl_llm.types import MEAN_OF_TASKS


@dataclasses.dataclass(frozen=True)
class Finding:
    """A trouble of a run: its ``kind``, such as ``entropy_collapse``, the ``step`` of its beginning, the numbers
    (``what``), their usual meaning (``why``), and the setting to change (``remedy``).
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
        "--learner.compute.dtype float32, --rollout.engine.strict and --rollout.engine.kv_cache_dtype auto; "
        "--learner.keep_sampling_mask where top_k or top_p cut; --rollout.collect.staleness 0; or "
        "--recipe.algorithm.correction, which corrects for it",
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
    """Make the finding of a trouble that began at a step. ``words``: what, why and remedy, in place of those of
    ``kind``. ``facts``: values for the names in braces.
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


FEW_CALLS, SHARE_LEFT = 0.02, 0.2
"""The calls in an episode that count as none, and the share of the past calls at which they are given up."""
MOSTLY = 0.8
"""The share of failed calls that is much."""
TIMES, MORE = 1.5, 1.0
"""The growth of turns that is much: as a multiple of the past, and in turns."""


def tools_unused(run: History) -> Finding | None:
    """Find episodes with tools that are not called, or hardly any more, while nothing is learned."""
    tools = run["episode/tools"]
    calls = steps_where(_tried(run), tools.steps[tools.values > 0])
    return _idle("tools_unused", run, calls, lambda past: np.maximum(FEW_CALLS, SHARE_LEFT * past), up=False)


def tools_failing(run: History) -> Finding | None:
    """Find calls of tools that nearly all fail, or cannot be read, while nothing is learned."""
    tried, errors = _tried(run), run["episode/tool_errors"]
    tried = steps_where(tried, np.intersect1d(tried.steps[tried.values > FEW_CALLS], errors.steps))
    shares = Series(tried.steps, steps_where(errors, tried.steps).values / tried.values)
    return _idle("tools_failing", run, shares, lambda past: np.full_like(past, MOSTLY), up=True)


def turns_growing(run: History) -> Finding | None:
    """Find episodes of ever more turns, while nothing is learned."""
    return _idle(
        "turns_growing", run, run["episode/turns"], lambda past: np.maximum(TIMES * past, past + MORE), up=True
    )


def _idle(kind: str, run: History, series: Series, limit: Limit, up: bool) -> Finding | None:
    """Return the finding of a lasting change in a run that has not learned since."""
    change = change_point(series, limit, up)
    if change is None or learned(run) or improved(run, change.step):
        return None
    return finding_of_change(kind, change.steep, change, run)


def _tried(run: History) -> Series:
    """Return the calls of an episode, with those that could not be read: they are errors, and no calls."""
    calls, errors = run["episode/tool_calls"], run["episode/tool_errors"]
    failed = dict(zip(errors.steps.tolist(), errors.values.tolist(), strict=True))
    values = [max(call, failed.get(step, 0.0)) for step, call in zip(calls.steps.tolist(), calls.values, strict=True)]
    return Series(calls.steps, np.array(values, float))


def steps_where(series: Series, steps: np.ndarray) -> Series:
    """Return the measurements at these steps."""
    at_steps = np.isin(series.steps, steps)
    return Series(series.steps[at_steps], series.values[at_steps])


FEWEST_STEPS, FEWEST_TESTS, FEWEST_SINCE = 20, 5, 3
"""The fewest measurements for a finding: of training, of held-out data, and of the latter since it is flat."""
RISE, GAP = 0.1, 0.15
"""The least rise of training since then, and the least lead of training over held-out data."""
SHARE, SURE = 0.5, 2.5
"""The share of that rise that held-out data surely stays below, and the standard errors that make it sure."""
MOST = 200
"""The most measurements that are searched for a break."""


def reward_hacking(run: History) -> Finding | None:
    """Find a falling evaluation, or training accuracy, while a training reward rises or keeps its rise. The reward is
    the training reward or the reward model's score; another evaluation that rises excuses it.
    """
    rewards = {"training reward": run["reward/mean"], "reward model's score": run["reward_model/mean"]}
    for task, test in (run.evaluations | {"the accuracy in training": _in_blocks(run["reward/accuracy"])}).items():
        at = _peak(test)
        if at is None:
            continue
        step = int(test.steps[at])
        if any(risen(other, step + 1) for name, other in run.evaluations.items() if name != task):
            continue
        for name, series in rewards.items():
            if not len(series):
                continue
            stays = risen(series, int(series.steps[0])) and not fallen(series, step + 1)
            if stays or risen(series, step + 1):
                return make_finding(
                    "reward_hacking",
                    step,
                    task=task,
                    best=percent(float(test.values[at])),
                    now=percent(level(test)),
                    reward=name,
                    reward_then=short(_level_before(series, step + 1, recent(len(series)))),
                    reward_now=short(level(series)),
                )
    return None


def _level_before(series: Series, step: int, first: int) -> float:
    """Return the mean of the last measurements before a step; without any, the mean of the ``first`` of all."""
    before = series.before(step).values
    return float(np.mean(before[-recent(len(series)) :] if len(before) else series.values[:first]))


def _in_blocks(series: Series) -> Series:
    """Return means of up to 20 blocks of a series, of at least 5 measurements, at the blocks' last steps. Empty for a
    series shorter than four blocks.
    """
    count = min(len(series) // 5, 20)
    if count < 4:
        return Series(series.steps[:0], series.values[:0])
    parts = np.array_split(np.arange(len(series)), count)
    ends = [part[-1] for part in parts]
    return Series(series.steps[ends], np.array([series.values[part].mean() for part in parts]))


def _peak(test: Series) -> int | None:
    """Return the index of an evaluation's last best value before a sure fall by a tenth; None without a fall. Levels
    are means of several values: the best of many noisy values is biased.
    """
    values = test.values
    count = len(values)
    if count < 2:
        return None
    width = 3 if count >= FEW else 2 if count > 4 else 1
    means = np.convolve(values, np.ones(width) / width, "valid")
    best = float(means.max())
    drop = best - float(means[-1])
    error = noise(values) * math.sqrt(2 / width) if count > 4 else 0.0
    # Of few values it cannot be told what is noise.
    least = {1: 0.2, 2: 0.14, 3: 0.05}[width]
    if drop <= max((2 if count < FEW else 4) * error, least, 0.1 * best):
        return None
    # It may have been as good for long: the fall begins where it was for the last time.
    last = int(np.flatnonzero(means >= best - max(error, 0.1 * drop))[-1])
    return last + width - 1 - int(np.argmax(values[last : last + width][::-1]))


def overfitting(run: History) -> Finding | None:
    """Find training that still rises while held-out data no longer does, or never did; reward hacking comes first."""
    gap = next((gap for training, tests in _watched(run) if (gap := overfitting_gap(training, tests))), None)
    return gap if gap is not None and reward_hacking(run) is None else None


def _watched(run: History) -> Iterator[tuple[Series, Mapping[str, Series]]]:
    """Yield training and held-out series as shares of right answers; for texts as the mean probability of a token."""
    rewards = run["reward/mean"]
    if len(rewards):
        accuracy = run["reward/accuracy"]
        # A reward from 0 to 1 stands in for the accuracy where that was not measured.
        if len(accuracy) or (rewards.values.min() > -0.2 and rewards.values.max() < 1.2):
            tests = run.evaluations
            mean = {MEAN_OF_TASKS: tests[MEAN_OF_TASKS]} if MEAN_OF_TASKS in tests else tests
            yield accuracy if len(accuracy) else rewards, mean
        return
    for name in ("pairs", "steps"):
        yield run[f"{name}/accuracy"], {f"held-out {name}": run[f"eval/{name}/accuracy"]}
    texts = run["eval/text/loss"]
    if len(texts):
        training, tested = (Series(of.steps, np.exp(-np.clip(of.values, 0.0, 50.0))) for of in (run["loss"], texts))
        yield training, {"a token of the held-out texts": tested}


def overfitting_gap(training: Series, tests: Mapping[str, Series]) -> Finding | None:
    """Find learning on training data without learning on held-out data; None without it."""
    if len(training) < FEWEST_STEPS or not tests or min(map(len, tests.values())) < FEWEST_TESTS:
        return None
    started, _ = fit_break(Series(-training.steps[::-1], training.values[::-1]))
    breaks = {name: fit_break(test) for name, test in tests.items()}
    step = max([-started, *(at for at, _ in breaks.values())])
    last = int(training.steps[-1])
    if last - step < last / 4 or not risen(training, step):
        return None
    then = _level_before(training, step + 1, recent(len(training)) // 2)
    now = level(training)
    worst = min(tests, key=lambda name: level(tests[name]))
    if now - then < RISE or now - level(tests[worst]) < GAP:
        return None
    if not all(_flat(test, step, breaks[name][1], now - then) for name, test in tests.items()):
        return None
    held_out = percent(level(tests[worst]))
    return make_finding("overfitting", step, tested=worst, then=percent(then), training=percent(now), now=held_out)


def _flat(test: Series, step: int, deviation: float, rise: float) -> bool:
    """Whether held-out data has surely made no more than a share of ``rise`` since a step. ``deviation``: of each of
    its measurements.
    """
    since = test.since(step).values
    if len(since) < FEWEST_SINCE:
        return False
    x = np.arange(len(since)) - (len(since) - 1) / 2
    error = deviation * (len(since) - 1) / float(np.sqrt(x @ x))
    return line(since)[0] + SURE * error < SHARE * rise


def fit_break(series: Series) -> tuple[int, float]:
    """Return the step where a series levels off, and the deviation of one measurement. It is the break of a line that
    is constant after it, by least squares; the first step if the line has no slope before. For a reversed series, with
    negative steps, it is the step where the original begins to rise.
    """
    sampled = np.unique(np.linspace(0, len(series) - 1, MOST).astype(int))
    steps = series.steps[sampled].astype(float)
    values = series.values[sampled] - series.values[sampled].mean()
    # One line of ``min(steps, break)`` for each break; the first leaves the constant.
    bent = np.minimum(steps[None, :], steps[:, None])
    bent -= bent.mean(axis=1, keepdims=True)
    sizes = np.maximum(np.sum(bent**2, axis=1), 1e-12)
    explained = (bent @ values) ** 2 / sizes
    best = int(np.argmax(explained))
    variance = max(float(values @ values) - explained[best], 0.0) / (len(values) - 2)
    if explained[best] <= 9 * variance:  # a slope of less than three standard errors
        return int(steps[0]), math.sqrt(float(values @ values) / (len(values) - 1))
    # Of breaks that chance cannot tell apart, the earliest; steps that run backwards are negative.
    alike = steps[explained >= explained[best] - 2 * variance]
    return int(alike[np.argmin(np.abs(alike))]), math.sqrt(variance)


log = logging.getLogger(__name__)

READ = {"step", ROLLED_BACK, *MEASURED}
"""The metrics that a diagnosis reads, in addition to evaluations."""
EVERY = 10
"""Steps between two diagnoses, or a twentieth of all so far if that is more: a longer history takes longer."""
SMALL = 0.1
"""The gradient norm below which there are no spikes: a converged run has tiny gradients."""
APART, FEWEST_BELOW, LEAST_SPACING = 16.0, 10, 0.03
"""A spike's distance in mean spacings of the heights below it, the fewest such heights, and the least mean spacing."""
SHORT = 200
"""The number of gradients up to which two spikes are many; a rare single one is harmless."""


def diagnose(rows: Iterable[Mapping[str, Any]], steps: int = 0) -> list[Finding]:
    """Diagnose a run by the rows of its ``metrics.jsonl``; return at most one finding of each kind, in the order of
    their beginning. Only the pinned names of metrics are read; a missing, null or non-numeric value counts as
    unmeasured, but where an update was made. Troubles that are over by the last row are not reported, except spikes of
    the gradient and what was not a number. ``steps``: planned, of an unfinished run; it counts as stalled only after
    half of them without progress.
    """
    run = history(rows, steps)
    findings = [finding for rule in RULES.values() if (finding := rule(run)) is not None]
    return sorted(findings, key=lambda finding: finding.step)


class FindingTracker:
    """A tracker of a run's rows that diagnoses them during the run. Guards get all findings, at steps that depend on
    nothing else, interrupted or not; people get each kind once, when it is first found. ``steps``: that the run ends
    with. ``earlier``: the rows of a run that is resumed; findings in them have been reported to people.
    """

    def __init__(self, steps: int, earlier: Iterable[Mapping[str, Any]] = ()):
        self._steps = steps
        self._rows: list[dict[str, Any]] = []
        for row in earlier:
            self.take(row)
        self._next = EVERY
        self._told = {finding.kind for finding in diagnose(self._rows, steps)} if self._rows else set()

    def take(self, row: Mapping[str, Any]) -> None:
        """Keep a row, or merge later metrics of the last step into its row."""
        read = {
            name: plain
            for name, value in row.items()
            if (name in READ or TESTED.fullmatch(name)) and (plain := jsonable(value)) is not None
        }
        read |= {EVENT_BROKEN: said} if (said := broken(row)) else {}
        if self._rows and read.get("step") in (None, self._rows[-1].get("step")):
            self._rows[-1] |= read
        else:
            self._rows.append(read)

    def found(self, row: Mapping[str, Any]) -> list[Finding]:
        """Keep the row and return all findings after its step; empty at steps without a diagnosis."""
        self.take(row)
        step = int(row["step"])
        if step == 0 or not (looks(step) or any(TESTED.fullmatch(name) for name in row)):
            return []
        return diagnose(self._rows, self._steps)

    def new(self, row: Mapping[str, Any]) -> list[Finding]:
        """Keep the row and return new kinds of findings; diagnoses after an evaluation, or at regular intervals."""
        self.take(row)
        step = int(row["step"])
        if step < self._next and not any(TESTED.fullmatch(name) for name in row):
            return []
        self._next = step + max(EVERY, step // 20)
        try:
            new = [finding for finding in diagnose(self._rows, self._steps) if finding.kind not in self._told]
        except Exception:
            log.exception("the diagnosis failed")  # no run ends for its diagnosis
            return []
        self._told |= {finding.kind for finding in new}
        return new


def looks(step: int) -> bool:
    """Whether guards diagnose after this step: each ``EVERY``-th at first, then less often; a function of it."""
    at = 0
    while at < step:
        at += max(EVERY, at // 20)
    return at == step


def above(least: float, times: float = 1.0, more: float = 0.0, always: float = np.inf) -> Limit:
    """Return a limit for a metric that is bad when it grows: from ``times`` the past level, from ``more`` above it, and
    from ``always`` at any past level; never below ``least``.
    """
    return lambda past: np.minimum(np.maximum(np.maximum(least, times * past), past + more), always)


def entropy_collapse(run: History) -> Finding | None:
    """Find an entropy near 0, far below its own past, while neither reward nor evaluation rises."""
    # 0.2 of the past up to 0.25 nats, or 0.5 of it up to 0.03 nats.
    near_zero = lambda past: np.maximum(np.minimum(0.2 * past, 0.25), np.minimum(0.5 * past, 0.03))  # noqa: E731
    change = change_point(run["entropy"], near_zero, False)
    if change is None or learned(run):
        return None
    step = change.step
    # Texts have no reward: there the loss tells.
    if improved(run, step) if _scored(run) else fallen(run["loss"], step):
        flat = plateau(run)
        late = max(flat.step, change.reached) if flat else run.last
        if run.last - late < run.last / 3:
            return None
        step = change.reached
    return finding_of_change("entropy_collapse", step, change, run)


GROWN: dict[str, tuple[str, Limit, Limit, bool, float]] = {
    "entropy_explosion": ("entropy", above(0.5, 2.0, 0.4), above(1.5, 3.0, 1.2), True, np.inf),
    "truncation": ("completions/truncated_fraction", above(0.2, more=0.15), above(0.3, more=0.2), False, 0.5),
    "repetition": ("completions/repetition_fraction", above(0.15, more=0.12), above(0.25, more=0.15), False, 0.4),
    "kl_runaway": ("kl", above(0.2, 5.0), above(0.4, 8.0), True, np.inf),
}
"""Troubles that are a metric's growth: its name, two bounds, whether factors count, and what is much from the start."""


def grown(kind: str, run: History) -> Finding | None:
    """Find growth of a metric of ``GROWN``: beyond the second bound in any run, beyond the first in one that learned
    nothing meanwhile; or there, where the metric is high from the first step and does not fall.
    """
    name, idle, learning, relative, high = GROWN[kind]
    series = run[name]
    change = change_point(series, learning, True, relative)
    if change is None:
        change = change_point(series, idle, True, relative)
        if change is not None and (not still_lasts(change, series) or is_excused(run, change)):
            change = None
    if change is None:
        change = change_point(series, above(high), True)
        if change is not None and (change.count < 12 or fallen(series, change.step) or is_excused(run, change)):
            change = None
    return finding_of_change(kind, change.steep, change, run) if change else None


def lengths_off(kind: str, run: History) -> Finding | None:
    """Find completions that shrank to 55 % of their length or less, or grew to 1.8 times of it or more, while nothing
    is learned: to a third or to three times, or for long in a run with rewards or evaluations.
    """
    up = kind == "length_explosion"
    lengths = run["completions/mean_length"]
    change = change_point(lengths, above(0.0, 1.8) if up else lambda past: 0.55 * past, up, relative=up)
    if change is None:
        return None
    gross = change.after > 3 * change.before if up else change.after < change.before / 3
    excused = improved(run, change.step) or (learned(run) and not (up and change.after >= 4 * change.before))
    if excused or not (gross or (_scored(run) and still_lasts(change, lengths))):
        return None
    return finding_of_change(kind, change.steep, change, run)


def no_signal(run: History) -> Finding | None:
    """Find nearly all groups with equal rewards, while the task is unsolved and reward and evaluation do not rise. If
    almost no group teaches, a rising evaluation does not excuse a flat reward.
    """
    change = change_point(run["reward/zero_std_fraction"], above(0.8), True)
    if change is None or learned(run):
        return None
    rewards = run["reward/mean"]
    none_left = change.after > 0.95 and len(rewards) and not risen(rewards, change.step)
    if not none_left and improved(run, change.step):
        return None
    return finding_of_change("no_signal", change.step, change, run)


def clip_saturation(run: History) -> Finding | None:
    """Find many tokens with a cut gradient; a clip on whole sequences cuts about one in seven in good runs."""
    low, high = run["clip_fraction/low"], run["clip_fraction/high"]
    steps = np.union1d(low.steps, high.steps)
    clipped = np.zeros(len(steps))
    for series in (low, high):  # an unmeasured value counts as 0
        clipped[np.searchsorted(steps, series.steps)] += series.values
    change = change_point(Series(steps, clipped), above(0.2, 4.0, 0.1, always=0.3), True)
    return finding_of_change("clip_saturation", change.step, change, run) if change else None


def sampler_mismatch(run: History) -> Finding | None:
    """Find a disagreement of sampler and learner on the tokens that were just sampled."""
    change = change_point(run["sampler/logp_abs_diff_mean"], above(0.02, 5.0, always=0.1), True, relative=True)
    change = change or change_point(run["sampler/logp_abs_diff_max"], above(1.5, 8.0, always=5.0), True, relative=True)
    return finding_of_change("sampler_mismatch", change.step, change, run) if change else None


def gradient_spikes(run: History) -> Finding | None:
    """Find several gradients far above all others, close together; or lasting growth to ten times the past norm."""
    measured = run["grad_norm"]
    # Where all advantages are 0 there is none.
    gradients = Series(measured.steps[measured.values > 0], measured.values[measured.values > 0])
    if len(gradients) < 2 * lasting(len(gradients)):
        return None
    if change := change_point(gradients, above(SMALL, 10.0), True, relative=True):
        start = np.median(gradients.values[: recent(len(gradients))])
        if change.after > 5 * start:
            changed = f"grew from {short(change.before)} to {short(change.after)} and stays there"
            return make_finding("gradient_spikes", change.step, changed=changed)
    values = gradients.values
    # Of every second gradient that is a spike, the median is one, too.
    usual = np.maximum(smoothed(values, 15, 0.35), np.quantile(values, 0.35))
    heights = np.log(np.maximum(values, 1e-12) / np.maximum(usual, 1e-12))
    spread = (np.quantile(heights, 0.35) - np.quantile(heights, 0.1)) / 0.9
    spikes = np.flatnonzero((heights > max(np.log(4.0), 6 * spread)) & (values > SMALL))
    high = len(values) <= SHORT and heights[spikes].max(initial=0.0) > np.log(10.0)
    fewest = 2 if high else 3
    spikes = _apart(heights, spikes, fewest)
    # From the first of ``fewest`` on that are close together.
    distances = spikes[fewest - 1 :] - spikes[: len(spikes) - fewest + 1]
    close = np.flatnonzero(distances < max(SHORT // 2, len(values) // 4))
    if not len(close):
        return None
    spikes = spikes[close[0] :]
    times = float(np.max(values[spikes] / np.maximum(usual[spikes], 1e-12)))
    often = f"{times:.0f}" if times < 1000 else "more than 1000"  # where most are next to nothing
    highest = short(float(values[spikes].max()))
    changed = f"spiked {len(spikes)} times, up to {highest}, {often} times what is usual"
    return make_finding("gradient_spikes", int(gradients.steps[spikes[0]]), changed=changed)


def not_a_number(run: History) -> Finding | None:
    """Find the first step with a loss, a gradient, log-probabilities, advantages or rewards that are not finite."""
    return make_finding("not_a_number", (at := min(run.broken)), found=run.broken[at]) if run.broken else None


def stalled(run: History) -> Finding | None:
    """Find a run without a rise of reward or evaluation for at least half of it, far from perfect; or one that lost
    most of its best reward and evaluation.
    """
    if fall := lost(run):
        return make_finding("stalled", fall.step, LOST, best=short(fall.best), now=short(fall.now))
    flat = plateau(run)
    if flat is None or (run.last < run.planned and run.last - flat.step < run.planned / 2):
        return None
    return make_finding("stalled", flat.step, last=run.last, best=short(flat.best), now=short(flat.now))


RULES: dict[str, Callable[[History], Finding | None]] = {
    "entropy_collapse": entropy_collapse,
    "entropy_explosion": functools.partial(grown, "entropy_explosion"),
    "length_collapse": functools.partial(lengths_off, "length_collapse"),
    "length_explosion": functools.partial(lengths_off, "length_explosion"),
    "truncation": functools.partial(grown, "truncation"),
    "reward_hacking": reward_hacking,
    "no_signal": no_signal,
    "kl_runaway": functools.partial(grown, "kl_runaway"),
    "clip_saturation": clip_saturation,
    "sampler_mismatch": sampler_mismatch,
    "gradient_spikes": gradient_spikes,
    "not_a_number": not_a_number,
    "stalled": stalled,
    "repetition": functools.partial(grown, "repetition"),
    "overfitting": overfitting,
    "tools_unused": tools_unused,
    "tools_failing": tools_failing,
    "turns_growing": turns_growing,
}
"""The check of each kind of trouble."""


def _apart(heights: np.ndarray, spikes: np.ndarray, fewest: int) -> np.ndarray:
    """Return the highest spikes that are separated by a gap from all lower heights; empty if fewer than ``fewest``.
    Heavy tails have high values without a gap below them: for an exponential tail, common for logarithms, the gaps
    between sorted heights, the j-th from the top times j, are all of one size (Renyi, 1953).
    """
    if len(spikes) < fewest:
        return spikes[:0]
    order = np.argsort(-heights, kind="stable")
    gaps = -np.diff(heights[order])
    spacings = gaps * np.arange(1, len(heights))
    # Some of those that stand apart may be too low for spikes.
    for count in range(int(np.sum(heights > heights[spikes].min() / 2)), fewest - 1, -1):
        below = float(np.mean(spacings[count : count + max(2 * count, FEWEST_BELOW)]))
        if spacings[count - 1] > APART * max(below, LEAST_SPACING):
            return np.sort(order[: min(count, len(spikes))])
    return spikes[:0]


def _scored(run: History) -> bool:
    """Whether the run has rewards or evaluations."""
    return bool(len(run["reward/mean"]) or run.evaluations)


def is_excused(run: History, change: ChangePoint) -> bool:
    """Whether the run has learned since a change began, or has learned its task."""
    return improved(run, change.step) or learned(run)


def still_lasts(change: ChangePoint, series: Series) -> bool:
    """Whether a change has lasted long enough."""
    return change.count >= max(lasting(len(series)), min(max(len(series) // 10, 8), 60))
