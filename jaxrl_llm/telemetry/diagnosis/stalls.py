"""Whether a run has stopped to learn, or learns what it should not."""

import dataclasses
import math

import numpy as np

from jaxrl_llm.telemetry.diagnosis.departure import lasting, noise, smoothed, window
from jaxrl_llm.telemetry.diagnosis.history import History, Series
from jaxrl_llm.telemetry.diagnosis.learning import (
    FEW,
    KNOWN,
    NOTICEABLE,
    SURE,
    SURELY_PERFECT,
    UNKNOWN,
    fallen,
    learned,
    level,
    line,
    perfection,
    recent,
    risen,
    scale,
)
from jaxrl_llm.types import MEAN_OF_TASKS

FEWEST_REWARDS, FEWEST_EVALUATIONS = 20, 6
"""Measurements below which a run is too short to have stalled."""
FAR = 0.7
"""The share of the way to the best reward, and of right answers, below which a run is far from perfect."""
FLAT = 0.15
"""The share of what is left to gain that half of a run may have gained and still count as stalled."""
LOST = 0.75
"""The share of its best level that a run has lost where it has lost what it had learned."""


@dataclasses.dataclass(frozen=True)
class Plateau:
    """Where a series stopped to rise.

    Attributes:
      step: since when.
      best: the highest level that it had.
      now: the last one.
    """

    step: int
    best: float
    now: float


def stalled(run: History) -> Plateau | None:
    """Where neither reward nor evaluation has risen any more, for at least half of the run and far from perfect."""
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
    if latest.step > half or (enough and not tests and not _far(rewards, latest)):
        return None
    return latest


def lost(run: History) -> Plateau | None:
    """Where a run was at its best that has lost most of it since, for good: by its rewards and by its evaluations, as
    far as it has any."""
    tests = run.evaluations
    told = [run["reward/mean"], *([tests[MEAN_OF_TASKS]] if MEAN_OF_TASKS in tests else tests.values())]
    falls = [_fall(series) for series in told if len(series)]
    known = [fall for fall in falls if fall is not None]
    return min(known, key=lambda fall: fall.step) if known and len(known) == len(falls) else None


def _fall(series: Series) -> Plateau | None:
    """Where a series was near its best for the last time that has fallen below a quarter of it, and stays there; None
    where it has not. What counts from is 0, or its least where that is below."""
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


def _far(rewards: Series, plateau: Plateau) -> bool:
    """Whether rewards are far from the best: where that is unknown, whether they never rose."""
    share, trust = perfection(rewards)
    if share >= (FAR if trust == KNOWN else SURELY_PERFECT):
        return False
    return trust != UNKNOWN or plateau.step <= rewards.steps[len(rewards) // 10]


def _rises(series: Series, since: int) -> bool:
    """Whether a series is higher since a step than it was before, or goes on growing."""
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
    change = line(values)
    return change.amount + 1.5 * change.error < FLAT * max(_left(series), 0.1 * scale(series))


def _left(series: Series) -> float:
    """What is left to gain."""
    share, _ = perfection(series)
    now = level(series)
    return 1 - now if scale(series) <= 1 else abs(now) * max((1 - share) / max(share, 0.05), 1.0)


def _plateau(series: Series) -> Plateau:
    """The first step whose level no later one surely exceeds."""
    values = series.values
    width = max(window(len(values)), len(values) // 12 | 1)
    medians = smoothed(values, width)
    best = float(medians.max())
    error = 1.25 * noise(values) * math.sqrt(1 / min(width, len(values)))
    near = best - max(2 * SURE * error, NOTICEABLE * scale(series))
    at = int(np.argmax(medians >= near))
    return Plateau(int(series.steps[at]), best, float(np.mean(values[-recent(len(values)) :])))


@dataclasses.dataclass(frozen=True)
class Parting:
    """Where training reward and evaluation go apart.

    Attributes:
      step: of the best evaluation.
      task: the one that was evaluated, or the accuracy in training.
      best: the share of right answers there.
      now: the last one.
      reward: which one rises.
      reward_then: that reward about that step.
      reward_now: the last.
    """

    step: int
    task: str
    best: float
    now: float
    reward: str
    reward_then: float
    reward_now: float


def parting(run: History) -> Parting | None:
    """Where an evaluation falls, or the accuracy in training, while the training reward or the reward model's rises, or
    stays where it rose to; and no other evaluation rises."""
    rewards = {"training reward": run["reward/mean"], "reward model's score": run["reward_model/mean"]}
    for task, test in (run.evaluations | {"the accuracy in training": _in_blocks(run["reward/accuracy"])}).items():
        at = _peak(test)
        if at is None:
            continue
        step = int(test.steps[at])
        if any(risen(other, step + 1) for name, other in run.evaluations.items() if name != task):
            continue
        for name, series in rewards.items():
            if _holds(series, step):
                before = series.before(step + 1).values
                width = recent(len(series))
                then = float(np.mean(before[-width:] if len(before) else series.values[:width]))
                return Parting(step, task, float(test.values[at]), level(test), name, then, level(series))
    return None


def _holds(rewards: Series, step: int) -> bool:
    """Whether a reward has risen since a step, or has risen before and stays there."""
    if not len(rewards):
        return False
    stays = risen(rewards, int(rewards.steps[0])) and not fallen(rewards, step + 1)
    return stays or risen(rewards, step + 1)


def _in_blocks(series: Series) -> Series:
    """The means of up to 20 stretches of a series, each of 5 measurements at least, at their last steps; empty where
    it is shorter than four of those."""
    count = min(len(series) // 5, 20)
    if count < 4:
        return Series(series.steps[:0], series.values[:0])
    parts = np.array_split(np.arange(len(series)), count)
    ends = [part[-1] for part in parts]
    return Series(series.steps[ends], np.array([series.values[part].mean() for part in parts]))


def _peak(test: Series) -> int | None:
    """Where an evaluation was best for the last time that has fallen since, surely and by a tenth; None if it has not.

    Levels are means of some: the best of many noisy values is no level.
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
