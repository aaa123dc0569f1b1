"""Trends of a run: whether it learns, which excuses much that would else be a trouble; whether it has stalled, or
has lost its progress.
"""

import math
from typing import NamedTuple

import numpy as np

from jaxrl_llm.diagnosis.history import History, Series, lasting, noise, smoothed, window
from jaxrl_llm.types import MEAN_OF_TASKS

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
    """Whether a series is surely and noticeably higher than before a step, or has grown since.

    Two changes are tested, each against its standard error: from the level at the step to the last one, and along the
    line through all values since.
    """
    later = series.since(since)
    if not len(later):
        return False
    then, error, after = _level_at(series, later, since)
    last = after[-min(recent(len(series)), max(len(after) // 2, 1)) :]
    changes = [(float(last.mean()) - then, math.hypot(error, _spread(series) / math.sqrt(len(last))))]
    if len(after) >= 4:
        changes.append(line(after))
    least = NOTICEABLE * scale(series)
    return any(amount > max(SURE * deviation, least) for amount, deviation in changes)


def fallen(series: Series, since: int) -> bool:
    """Whether a series is surely and noticeably lower than before a step, or has fallen since; see ``risen``."""
    return risen(Series(series.steps, -series.values), since)


def _level_at(series: Series, later: Series, since: int) -> tuple[float, float, np.ndarray]:
    """Return the level at a step, its error, and the later values; ``later``: the measurements from there on.

    The first of those still measures the earlier policy. If measurements are rare the level is interpolated.
    """
    first = int(len(later) > 1)
    after = later.values[first:]
    earlier = series.before(since)
    spread = _spread(series)
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


def _spread(series: Series) -> float:
    """Return the noise of one measurement; for few it is bounded from one to two times the least noticeable change."""
    found = noise(series.values)
    least = NOTICEABLE * scale(series)
    return found if len(series) >= FEW else min(max(found, least), 2 * least)


def recent(count: int) -> int:
    """Return the number of measurements that a level is the mean of."""
    return min(max(count // 10, 4), 15)


def line(values: np.ndarray) -> tuple[float, float]:
    """Return the change of the least-squares line from the first to the last of at least 3 values, and its standard
    error.
    """
    count = len(values)
    x = np.arange(count) - (count - 1) / 2
    slope = float(x @ values / (x @ x))
    left = values - values.mean() - slope * x
    deviation = max(math.sqrt(float(left @ left) / (count - 2)), noise(values))
    return slope * (count - 1), deviation * (count - 1) / math.sqrt(float(x @ x))


def scale(series: Series) -> float:
    """Return the scale of changes of rewards: 1 for rewards up to 1, the largest if it is far from that."""
    largest = float(np.abs(series.values).max(initial=0.0))
    return 1.0 if 0.1 <= largest <= 1.05 or not largest else largest


def level(series: Series) -> float:
    """Return the median of the last measurements."""
    return float(np.median(series.values[-recent(len(series)) :]))


def learned(run: History, near: float = NEAR_PERFECT) -> bool:
    """Whether the last rewards, or the last evaluations, are close to the best possible.

    ``near``: the share of the best. If rewards exceed 1 only evaluations count, if there are any.
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
    """Return the last rewards' share of the way to the best possible, and how well that best is known.

    A reward's scale is not recorded. Within 0 to 1, and -1 to 1, the best is taken to be 1; for rewards never above 0
    it is 0; else the least of 1, 2, 5, 10, 100, 1000, ... above all of them. 0 without measurements.
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
    known = [test for test in tests if len(test) >= FEWEST_EVALUATIONS]
    if not (enough or (known and not len(rewards))) or learned(run, FAR):
        return None
    half = run.last // 2 + 1
    told = [rewards] if enough else known
    watched = [rewards, *tests] if len(rewards) else tests
    if any(_rises(series, half) for series in watched) or not all(_flat(series, half) for series in told):
        return None
    plateaus = [_plateau(series) for series in told]
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
    """Find the best level of a run that has lost most of it since, by its rewards and by its evaluations, if it has
    any.
    """
    tests = run.evaluations
    told = [run["reward/mean"], *([tests[MEAN_OF_TASKS]] if MEAN_OF_TASKS in tests else tests.values())]
    falls = [_fall(series) for series in told if len(series)]
    known = [fall for fall in falls if fall is not None]
    return min(known, key=lambda fall: fall.step) if known and len(known) == len(falls) else None


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


def _flat(series: Series, since: int) -> bool:
    """Whether a series has surely gained little since a step."""
    values = series.since(since).values
    if len(values) < 3:
        return False
    amount, error = line(values)
    share, _ = perfection(series)
    now = level(series)
    left = 1 - now if scale(series) <= 1 else abs(now) * max((1 - share) / max(share, 0.05), 1.0)
    return amount + 1.5 * error < FLAT * max(left, 0.1 * scale(series))


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
