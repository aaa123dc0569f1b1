"""Series of numbers from a run's rows, by the pinned names of metrics, and their lasting changes. A change is measured
against the run's own past, in windows of medians. The series also tell whether a run learns, which excuses much that
would else be a trouble, has stalled, or has lost its progress.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.system.json_lines import number
from jaxrl_llm.types import MEAN_OF_TASKS, NOT_FINITE

MEASURED = (
    "reward/mean", "reward/zero_std_fraction", "completions/mean_length", "completions/truncated_fraction",
    "completions/repetition_fraction", "entropy", "kl", "clip_fraction/low", "clip_fraction/high",
    "sampler/logp_abs_diff_mean", "sampler/logp_abs_diff_max", "grad_norm", "loss", "reward/accuracy",
    "reward_model/mean", "pairs/accuracy", "steps/accuracy", "eval/pairs/accuracy", "eval/steps/accuracy",
    "eval/text/loss", "episode/turns", "episode/tools", "episode/tool_calls", "episode/tool_errors",
)  # fmt: skip
"""The metrics that are read, in addition to evaluations of tasks."""
ROLLED_BACK = "rollback/to_step"
"""The metric of a step that was followed by a rollback: the step of the checkpoint."""
LARGEST = 1e100
"""The bound that larger numbers are clipped to: their squares stay finite."""
TESTED = re.compile(r"eval/(.+)/pass@(\d+|k)")
"""The names of evaluations: of one task, or the mean of several."""

FEWEST = 8
"""The fewest measurements of a series that is judged."""
WIDEST = 100
"""The widest window of medians for the past level of a series."""
ALIKE = 0.05
"""The share of a change after which it counts as begun."""
KNEE = 0.15
"""The share of a rise by which growth must stay below the straight line to count as begun later."""
Limit = Callable[[np.ndarray], np.ndarray]
"""A function from the past level of a series to the bound from which it is bad."""


@dataclasses.dataclass(frozen=True)
class Series:
    """The measurements of one metric, by step: ``steps``, int64[n], each once, and ``values``, float64[n], finite."""

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def since(self, step: int) -> "Series":
        """Return the measurements at that step and after it."""
        start = int(np.searchsorted(self.steps, step))
        return Series(self.steps[start:], self.values[start:])

    def before(self, step: int) -> "Series":
        """Return the measurements before that step."""
        end = int(np.searchsorted(self.steps, step))
        return Series(self.steps[:end], self.values[:end])


@dataclasses.dataclass(frozen=True)
class History:
    """The metrics of a run so far. ``metrics``: a series for each of ``MEASURED``; empty if never measured.
    ``evaluations``: the share of right answers, by task. ``last``: the last step; 0 without steps. ``planned``: steps,
    or ``last`` if that is more or the plan is unknown. ``broken``: what was not finite, by step.
    """

    metrics: Mapping[str, Series]
    evaluations: Mapping[str, Series]
    last: int
    planned: int
    broken: Mapping[int, str]

    def __getitem__(self, name: str) -> Series:
        return self.metrics[name]


FINITE = ("loss", "grad_norm", "entropy", "policy_kl", "ratio", "ratio_spread", "advantage/abs_mean")
"""The metrics of a role that are numbers where it made an update; others may be unmeasured, and so not a number."""
EVENT_BROKEN = "event/not_a_number"
"""The event of a step with numbers that are not finite."""
ROLES = ("", "critic/")
"""The prefixes of the metrics of roles."""


def not_finite(row: Mapping[str, Any], role: str = "") -> list[str]:
    """Return the names of what is not finite in a step and has to be: of samples, updates, rewards and evaluations.
    ``role``: the prefix of the names of one that learns; empty for the policy.
    """
    found = [name.removeprefix(role + NOT_FINITE) for name in row if name.startswith(role + NOT_FINITE)]
    found += ["grad_norm"] if row.get(f"{role}updates/not_finite") and not found else []
    names = [role + name for name in FINITE if number(row.get(f"{role}updates"))]
    # Evaluations that are numbers where they were made.
    names += [] if role else ("eval/text/loss", "eval/steps/loss")
    return found + [name for name in names if name in row and number(row[name]) is None]


def broken(row: Mapping[str, Any]) -> str:
    """Return what is not finite in a row, as its event or its numbers say; empty if nothing is."""
    names = ", ".join(dict.fromkeys(name for role in ROLES for name in not_finite(row, role)))
    return str(row.get(EVENT_BROKEN) or (names and f"{names} is not a number"))


def history(rows: Iterable[Mapping[str, Any]], steps: int = 0) -> History:
    """Return the series in a run's rows; ``steps``: the planned ones. A step that occurs twice, as after a resume,
    counts once: its later measurement holds. A value that is not a finite number counts as unmeasured; a row without a
    step is skipped. After a rollback, measurements of the undone steps do not count.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in MEASURED}
    last = 0
    wrong: dict[int, str] = {}
    for row in rows:
        at = number(row.get("step"))
        if at is None:
            continue
        last = max(last, int(at))
        wrong |= {int(at): said} if (said := broken(row)) else {}
        for name, value in row.items():
            if name in found or TESTED.fullmatch(name):
                measured = number(value)
                if measured is not None:
                    found.setdefault(name, {})[int(at)] = min(max(measured, -LARGEST), LARGEST)
        if (back := number(row.get(ROLLED_BACK))) is not None:
            for name, values in found.items():
                found[name] = {step: value for step, value in values.items() if step <= back}
            wrong = {step: said for step, said in wrong.items() if step <= back}
    series = {}
    for name, values in found.items():
        steps_of = np.array(sorted(values), np.int64)
        series[name] = Series(steps_of, np.array([values[step] for step in steps_of.tolist()], float))
    tested: dict[str, dict[float, Series]] = {}
    for name, values in series.items():
        if (match := TESTED.fullmatch(name)) and len(values):
            task, k = match.groups()
            tested.setdefault(task, {})[math.inf if k == "k" else float(k)] = values
    # By task: pass@1 where it was measured, else the pass@k of the smallest k.
    evaluations = {task: by_k[min(by_k)] for task, by_k in tested.items()}
    return History({name: series[name] for name in MEASURED}, evaluations, last, max(last, steps), wrong)


@dataclasses.dataclass(frozen=True)
class ChangePoint:
    """A lasting change, up to the end of a series. ``step``: the first with a value unlike those before. ``steep``: the
    beginning of fast change: as ``step``, unless a slow change came first. ``reached``: the first step that was bad.
    ``before``: the past level. ``after``: the median since it was bad. ``count``: measurements since then.
    """

    step: int
    steep: int
    reached: int
    before: float
    after: float
    count: int


def window(count: int) -> int:
    """Return the width of the running median, odd: 3 in short runs, 15 in long ones."""
    return min(max(count // 20, 3), 15) | 1


def lasting(count: int) -> int:
    """Return the fewest measurements that a trouble must last for: 4 in short runs, 20 in long ones."""
    return min(max(count // 25, 4), 20)


def smoothed(values: np.ndarray, width: int, share: float = 0.5) -> np.ndarray:
    """Return the running median, or another quantile, float64[n] of ``width`` neighbours in float64[n]. The ends repeat
    the nearest whole window; fewer values than ``width`` are returned unchanged.
    """
    if len(values) < width:
        return values
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    medians = np.sort(windows, axis=1)[:, int(share * (width - 1) + 0.5)]
    return medians[np.clip(np.arange(len(values)) - width // 2, 0, len(medians) - 1)]


def noise(values: np.ndarray) -> float:
    """Estimate the deviation of one value from second differences of neighbours, so that drift is not counted."""
    if len(values) < 3:
        return 0.0
    off = np.abs(np.diff(values, 2))
    return float(0.605 * np.median(off)) or float(0.512 * np.mean(off))


def change_point(series: Series, limit: Limit, up: bool, relative: bool = False) -> ChangePoint | None:
    """Find the change after which a series of at least ``FEWEST`` measurements is bad up to its end; None
    without one. ``limit``: maps the lowest level so far (the highest, for a series that falls) to the bound of bad
    values. ``up``: whether growth is bad; else decline. ``relative``: whether its beginning is judged by factors, not
    by differences.
    """
    count = len(series)
    if count < FEWEST:
        return None
    sign = 1.0 if up else -1.0
    values = sign * series.values
    level = smoothed(values, window(count))
    past = np.minimum.accumulate(smoothed(values, max(window(count), min(count // 8, WIDEST) | 1)))
    bad = level >= sign * limit(sign * past)
    if not bad[-1]:
        return None
    # The longest stretch to the end of which nine in ten are bad.
    share = np.cumsum(bad[::-1]) / np.arange(1, count + 1)
    start = int(np.flatnonzero((share >= 0.9)[::-1] & bad)[0])
    if count - start < lasting(count):
        return None
    after = float(np.median(values[start:]))
    before = float(past[start])
    began = _began(values[: start + 1], before, after, window(count), relative)
    steep = began
    if relative:
        # Where slow growth turns into fast growth: the point furthest below the line from first to last, if it is far.
        grows = np.log(np.maximum(level[began : start + 1], 1e-12))
        below = np.linspace(grows[0], grows[-1], len(grows)) - grows
        furthest = int(np.argmax(below))
        steep += furthest if below[furthest] > KNEE * (grows[-1] - grows[0]) else 0
    steps = series.steps
    return ChangePoint(
        int(steps[began]), int(steps[steep]), int(steps[start]), sign * before, sign * after, count - start
    )


def _began(values: np.ndarray, before: float, after: float, width: int, relative: bool) -> int:
    """Return the index after the last point that is still like the past level."""
    if relative:
        least = max(1e-3 * after, 1e-12)
        values = np.log(np.maximum(values, least))
        before = float(np.log(max(before, least)))
        after = float(np.log(max(after, least)))
    # What was before is the least of what was, so noise is mostly above it.
    most = before + max(ALIKE * (after - before), 3.5 * noise(values) / width**0.5)
    alike = np.flatnonzero(smoothed(values, width)[:-1] <= most)
    return int(alike[-1]) + 1 if len(alike) else 0


SURE = 2.5
"""The number of standard errors that a change must exceed."""
NOTICEABLE = 0.03
"""The least change that counts, as a share of the rewards' scale."""
NEAR_PERFECT = 0.75
"""The share of the best reward, and of right answers, from which a run has learned its task."""
SURELY_PERFECT = 0.85
"""The share of the best reward from which a run has learned its task if the best reward is a guess."""
FEW = 8
"""Measurements below which their noise is hard to estimate."""
FEWEST_REWARDS, FEWEST_EVALUATIONS = 20, 6
"""Measurements below which a run is too short to have stalled."""
FAR = 0.7
"""The share of the best reward, and of right answers, below which a run is far from perfect."""
FLAT = 0.15
"""The share of the remaining gain that half of a run may have gained and still count as stalled."""
LOST = 0.75
"""The share of its best level that a series must lose to count as lost."""
KNOWN, GUESSED, UNKNOWN = 2, 1, 0
"""Degrees of knowledge of the best reward."""


class Plateau(NamedTuple):
    """The plateau of a series: the step of its beginning, the highest level, and the last one."""

    step: int
    best: float
    now: float


def improved(run: History, since: int) -> bool:
    """Whether an evaluation has risen since a step, or the training reward while no evaluation fell."""
    tests = run.evaluations.values()
    if any(risen(test, since) for test in tests):
        return True
    return risen(run["reward/mean"], since) and not any(fallen(test, since) for test in tests)


def risen(series: Series, since: int) -> bool:
    """Whether a series is surely and noticeably higher than before a step, or has grown since, each by its standard
    error: from the level at the step to the last one, and along the line through all values since.
    """
    later = series.since(since)
    if not len(later):
        return False
    then, error, after = _level_at(series, later, since)
    last = after[-min(recent(len(series)), max(len(after) // 2, 1)) :]
    changes = [(float(last.mean()) - then, math.hypot(error, noise_floor(series) / math.sqrt(len(last))))]
    if len(after) >= 4:
        changes.append(line(after))
    least = NOTICEABLE * scale(series)
    return any(amount > max(SURE * deviation, least) for amount, deviation in changes)


def fallen(series: Series, since: int) -> bool:
    """Whether a series is surely and noticeably lower than before a step, or has fallen since; see ``risen``."""
    return risen(Series(series.steps, -series.values), since)


def _level_at(series: Series, later: Series, since: int) -> tuple[float, float, np.ndarray]:
    """Return the level at a step, its error, and the later values; ``later``: the measurements from there on. The first
    of those still measures the earlier policy. If measurements are rare the level is interpolated.
    """
    first = int(len(later) > 1)
    after = later.values[first:]
    earlier = series.before(since)
    spread = noise_floor(series)
    if not len(earlier):
        then = later.values[: max(min(recent(len(series)), len(after) // 2), 1)]
        return float(then.mean()), spread / math.sqrt(len(then)), after
    gap = int(later.steps[0] - earlier.steps[-1])
    if gap > 2:
        grown = float(later.values[0] - earlier.values[-1])
        share = (since - int(earlier.steps[-1])) / gap
        return float(earlier.values[-1]) + share * grown, math.hypot(spread, grown / 6), after
    then = series.before(int(later.steps[0]) + first).values[-recent(len(series)) :]
    # Where what rose before is now, not where it was on average: it may have stopped.
    trend = line(then)[0] / 2 if len(then) >= 4 else float(then[-1] - then.mean())
    return float(then.mean()) + max(trend, 0.0), spread * math.sqrt((4 if trend else 1) / len(then)), after


def noise_floor(series: Series) -> float:
    """Return the noise of one measurement; for few it is bounded from one to two times the least noticeable change."""
    spread = noise(series.values)
    least = NOTICEABLE * scale(series)
    return spread if len(series) >= FEW else min(max(spread, least), 2 * least)


def recent(count: int) -> int:
    """Return the number of measurements that a level is the mean of."""
    return min(max(count // 10, 4), 15)


def line(values: np.ndarray) -> tuple[float, float]:
    """Return the change of the least-squares line from first to last of at least 3 values, and its standard error."""
    count = len(values)
    x = np.arange(count) - (count - 1) / 2
    slope = float(x @ values / (x @ x))
    residuals = values - values.mean() - slope * x
    deviation = max(math.sqrt(float(residuals @ residuals) / (count - 2)), noise(values))
    return slope * (count - 1), deviation * (count - 1) / math.sqrt(float(x @ x))


def scale(series: Series) -> float:
    """Return the scale of changes of rewards: 1 for rewards up to 1, the largest if it is far from that."""
    largest = float(np.abs(series.values).max(initial=0.0))
    return 1.0 if 0.1 <= largest <= 1.05 or not largest else largest


def level(series: Series) -> float:
    """Return the median of the last measurements."""
    return float(np.median(series.values[-recent(len(series)) :]))


def learned(run: History, near: float = NEAR_PERFECT) -> bool:
    """Whether the last rewards, or the last evaluations, are close to the best possible. ``near``: the share of the
    best. If rewards exceed 1 only evaluations count, if there are any.
    """
    tests = run.evaluations.values()
    # Of several tasks their mean: one that is easy says nothing of the others.
    if tests and float(np.mean([level(test) for test in tests])) >= near:
        return True
    rewards = run["reward/mean"]
    if tests and scale(rewards) > 1:
        return False
    share, trust = perfection(rewards)
    return share >= (near if trust == KNOWN else SURELY_PERFECT)


def perfection(rewards: Series) -> tuple[float, int]:
    """Return the last rewards' share of the way to the best possible, and how well that best is known. A reward's scale
    is not recorded. Within 0 to 1, and -1 to 1, the best is taken to be 1; for rewards never above 0 it is 0; else the
    least of 1, 2, 5, 10, 100, 1000, ... above all of them. 0 without measurements.
    """
    if not len(rewards):
        return 0.0, UNKNOWN
    medians = smoothed(rewards.values, window(len(rewards)))
    last = level(rewards)
    low = float(medians.min())
    high = float(medians.max())
    if high <= 0 and low < 0:
        first = float(np.median(rewards.values[: recent(len(rewards))]))
        return max(1 - last / min(first, -0.25), (last + 1) / 2 if low >= -1 else 0.0), GUESSED
    if high <= 1.05:
        return (last, KNOWN) if low >= -0.5 else ((last + 1) / 2, KNOWN if low >= -1.05 else UNKNOWN)
    if low >= 0 and high > 5:
        return last / 10 ** math.ceil(math.log10(high / 1.05)), KNOWN
    return last / next((best for best in (1, 2, 5) if high <= 1.05 * best), high), UNKNOWN


def plateau(run: History) -> Plateau | None:
    """Find the plateau of a run without a rise of reward or evaluation for at least half of it, far from perfect."""
    rewards = run["reward/mean"]
    tests = list(run.evaluations.values())
    enough = len(rewards) >= FEWEST_REWARDS
    long_tests = [test for test in tests if len(test) >= FEWEST_EVALUATIONS]
    if not (enough or (long_tests and not len(rewards))) or learned(run, FAR):
        return None
    half = run.last // 2 + 1
    evidence = [rewards] if enough else long_tests
    watched = [rewards, *tests] if len(rewards) else tests
    if any(_rises(series, half) for series in watched) or not all(is_flat(series, half) for series in evidence):
        return None
    plateaus = [_plateau(series) for series in evidence]
    latest = max(plateaus, key=lambda plateau: plateau.step)
    if latest.step > half:
        return None
    if enough and not tests:
        share, trust = perfection(rewards)
        # Where the best reward is unknown, the run is far from it if its rewards never rose.
        rose = trust == UNKNOWN and latest.step > rewards.steps[len(rewards) // 10]
        if rose or share >= (FAR if trust == KNOWN else SURELY_PERFECT):
            return None
    return latest


def lost(run: History) -> Plateau | None:
    """Find the best level of a run that has lost most of it since, by rewards and by evaluations, if it has any."""
    tests = run.evaluations
    evidence = [run["reward/mean"], *([tests[MEAN_OF_TASKS]] if MEAN_OF_TASKS in tests else tests.values())]
    falls = [_fall(series) for series in evidence if len(series)]
    seen_falls = [fall for fall in falls if fall is not None]
    return min(seen_falls, key=lambda fall: fall.step) if seen_falls and len(seen_falls) == len(falls) else None


def _fall(series: Series) -> Plateau | None:
    """Find the last step near the best level of a series that has lost three quarters of it, for good; else None.
    Levels count from 0, or from the lowest level if that is negative.
    """
    values = series.values
    count = len(values)
    if count < FEWEST_EVALUATIONS:
        return None
    medians = smoothed(values, window(count) if count >= FEWEST_REWARDS else 3)
    best = float(medians.max())
    now = level(series)
    drop = best - now
    least = max(LOST * (best - min(float(medians.min()), 0.0)), 0.2 * scale(series), 6 * noise(values))
    low = medians[-lasting(count) :] if count >= FEWEST_REWARDS else medians[-2:]
    if drop < least or float(low.max()) > best - LOST * drop:
        return None
    near = np.flatnonzero(medians >= best - 0.1 * drop)
    return Plateau(int(series.steps[near[-1]]), best, now)


def _rises(series: Series, since: int) -> bool:
    """Whether a series is higher since a step than before, or still grows."""
    if risen(series, since):
        return True
    before = series.before(since).values
    after = series.since(since).values
    if not len(before) or not len(after) or len(series) >= FEWEST_REWARDS:
        return False
    spread = noise(series.values)
    return float(after.max() - before.max()) > max(3 * spread, 3 * NOTICEABLE * scale(series))


def is_flat(series: Series, since: int) -> bool:
    """Whether a series has surely gained little since a step."""
    values = series.since(since).values
    if len(values) < 3:
        return False
    amount, error = line(values)
    share, _ = perfection(series)
    now = level(series)
    room = 1 - now if scale(series) <= 1 else abs(now) * max((1 - share) / max(share, 0.05), 1.0)
    return amount + 1.5 * error < FLAT * max(room, 0.1 * scale(series))


def _plateau(series: Series) -> Plateau:
    """Return the plateau of a series, from the first step at which its level is near the best."""
    values = series.values
    width = max(window(len(values)), len(values) // 12 | 1)
    medians = smoothed(values, width)
    best = float(medians.max())
    error = 1.25 * noise(values) * math.sqrt(1 / min(width, len(values)))
    near = best - max(2 * SURE * error, NOTICEABLE * scale(series))
    at = int(np.argmax(medians >= near))
    return Plateau(int(series.steps[at]), best, float(np.mean(values[-recent(len(values)) :])))
