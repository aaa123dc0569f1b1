"""Whether a run learns: what excuses much of what would be a trouble otherwise."""

import dataclasses
import math

import numpy as np

from jaxrl_llm.telemetry.diagnosis.departure import noise, smoothed, window
from jaxrl_llm.telemetry.diagnosis.history import History, Series

SURE = 2.5
"""Standard errors that a change must exceed."""
NOTICEABLE = 0.03
"""The least change that counts, as a share of the rewards' scale."""
NEAR_PERFECT = 0.75
"""The share of the way to the best reward, and of right answers, from which on a run has learned its task."""
SURELY_PERFECT = 0.85
"""The same where the best is a guess."""
FEW = 8
"""Measurements below which their noise is hard to tell."""
KNOWN, GUESSED, UNKNOWN = 2, 1, 0
"""How well the best reward is known."""


@dataclasses.dataclass(frozen=True)
class Change:
    """How much a series has changed, and the standard error of that."""

    amount: float
    error: float


def improved(run: History, since: int) -> bool:
    """Whether evaluation has risen since a step, or the training reward while no evaluation fell."""
    tests = run.evaluations.values()
    if any(risen(test, since) for test in tests):
        return True
    return risen(run["reward/mean"], since) and not any(fallen(test, since) for test in tests)


def risen(series: Series, since: int) -> bool:
    """Whether a series is surely and noticeably higher than before a step, or has grown since."""
    least = NOTICEABLE * scale(series)
    return any(change.amount > max(SURE * change.error, least) for change in _changes(series, since))


def fallen(series: Series, since: int) -> bool:
    """The opposite of ``risen``."""
    return risen(Series(series.steps, -series.values), since)


def _changes(series: Series, since: int) -> list[Change]:
    """From the level at a step to the last one, and along the line through all since."""
    later = series.since(since)
    if not len(later):
        return []
    then, after = _level_at(series, later, since)
    width = recent(len(series))
    last = after[-min(width, max(len(after) // 2, 1)) :]
    error = math.hypot(then.error, _spread(series) / math.sqrt(len(last)))
    found = [Change(float(last.mean()) - then.amount, error)]
    if len(after) >= 4:
        found.append(line(after))
    return found


def _level_at(series: Series, later: Series, since: int) -> tuple[Change, np.ndarray]:
    """The level at a step with its error, and what was measured after; ``later``: the measurements from there on.

    The first of those is of what was learned before. Where measurements are rare the level lies between two of them.
    """
    first = int(len(later) > 1)
    after = later.values[first:]
    earlier = series.before(since)
    spread = _spread(series)
    if not len(earlier):
        then = later.values[: max(min(recent(len(series)), len(after) // 2), 1)]
        return Change(float(then.mean()), spread / math.sqrt(len(then))), after
    gap = int(later.steps[0] - earlier.steps[-1])
    if gap > 2:
        grown = float(later.values[0] - earlier.values[-1])
        share = (since - int(earlier.steps[-1])) / gap
        return Change(float(earlier.values[-1]) + share * grown, math.hypot(spread, grown / 6)), after
    then = series.before(int(later.steps[0]) + first).values[-recent(len(series)) :]
    # Where what rose before is now, not where it was on average: it may have stopped.
    trend = line(then).amount / 2 if len(then) >= 4 else float(then[-1] - then.mean())
    return Change(float(then.mean()) + max(trend, 0.0), spread * math.sqrt((4 if trend else 1) / len(then))), after


def _spread(series: Series) -> float:
    """The noise of one measurement; of few it cannot be told, and is taken to be noticeable, or twice that at most."""
    found = noise(series.values)
    least = NOTICEABLE * scale(series)
    return found if len(series) >= FEW else min(max(found, least), 2 * least)


def recent(count: int) -> int:
    """Measurements that a level is the mean of."""
    return min(max(count // 10, 4), 15)


def line(values: np.ndarray) -> Change:
    """How much the least-squares line through at least 3 values changes from the first to the last."""
    count = len(values)
    x = np.arange(count) - (count - 1) / 2
    slope = float(x @ values / (x @ x))
    left = values - values.mean() - slope * x
    deviation = max(math.sqrt(float(left @ left) / (count - 2)), noise(values))
    return Change(slope * (count - 1), deviation * (count - 1) / math.sqrt(float(x @ x)))


def scale(series: Series) -> float:
    """What a change of rewards is measured by: 1 for rewards up to 1, the largest where it is far from that."""
    largest = float(np.abs(series.values).max(initial=0.0))
    return 1.0 if 0.1 <= largest <= 1.05 or not largest else largest


def level(series: Series) -> float:
    """The median of the last measurements."""
    return float(np.median(series.values[-recent(len(series)) :]))


def learned(run: History, near: float = NEAR_PERFECT) -> bool:
    """Whether the last rewards, or the last evaluations, are close to the best there can be.

    ``near``: the share of the way. Where rewards go beyond 1 evaluations tell, if there are any.
    """
    if accuracy(run) >= near:
        return True
    rewards = run["reward/mean"]
    if run.evaluations and scale(rewards) > 1:
        return False
    share, trust = perfection(rewards)
    return share >= (near if trust == KNOWN else SURELY_PERFECT)


def accuracy(run: History) -> float:
    """The last share of right answers; of several tasks their mean: one that is easy says nothing of the others. NaN
    where nothing was evaluated."""
    tests = run.evaluations
    return float(np.mean([level(test) for test in tests.values()])) if tests else math.nan


def perfection(rewards: Series) -> tuple[float, int]:
    """The last rewards' share of the way to the best there can be, and how well that best is known.

    A reward's scale is written down nowhere. Within 0 to 1, and -1 to 1, the best is taken to be 1; of what is never
    above 0 it is 0; else the least of 1, 2, 5, 10, 100, 1000, ... above all of them. Nothing measured: 0.
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
