"""Where a series leaves what it was for good: windows of medians, measured against the run's own past."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm.telemetry.diagnosis.history import Series

FEWEST = 8
"""Measurements below which nothing is said of a series."""
WIDEST = 100
"""Measurements that what a series was is the median of, at most."""
ALIKE = 0.05
"""The share of a change that it has made where it counts as begun."""
KNEE = 0.15
"""How far below the line from first to last, as a share of its rise, growth must have stayed to have begun later."""
Limit = Callable[[np.ndarray], np.ndarray]
"""What a series was -> from where on it is bad."""


@dataclasses.dataclass(frozen=True)
class Departure:
    """A lasting change, up to the end of a series.

    Attributes:
      step: where it began: the first one whose value was not like those before.
      steep: where it became fast: as ``step``, unless a slow change came first.
      reached: the first step that was bad.
      before: what the series was.
      after: its median since it was bad.
      count: measurements since then.
    """

    step: int
    steep: int
    reached: int
    before: float
    after: float
    count: int


def window(count: int) -> int:
    """Measurements that one median is taken over, odd: 3 in short runs, 15 in long ones."""
    return min(max(count // 20, 3), 15) | 1


def lasting(count: int) -> int:
    """Measurements that a trouble must have lasted for: 4 in short runs, 20 in long ones."""
    return min(max(count // 25, 4), 20)


def smoothed(values: np.ndarray, width: int, share: float = 0.5) -> np.ndarray:
    """The running median, or another quantile, float64[n] of ``width`` neighbours in float64[n].

    At the ends it is that of the last whole window; where there are fewer values they are as they were.
    """
    if len(values) < width:
        return values
    windows = np.lib.stride_tricks.sliding_window_view(values, width)
    medians = np.sort(windows, axis=1)[:, int(share * (width - 1) + 0.5)]
    return medians[np.clip(np.arange(len(values)) - width // 2, 0, len(medians) - 1)]


def noise(values: np.ndarray) -> float:
    """The deviation of one value, from how far it is off the middle of its neighbours: what drifts is no noise."""
    if len(values) < 3:
        return 0.0
    off = np.abs(np.diff(values, 2))
    return float(0.605 * np.median(off)) or float(0.512 * np.mean(off))


def departure(series: Series, limit: Limit, up: bool, relative: bool = False) -> Departure | None:
    """The change after which a series is bad up to its end; None where there is none.

    Args:
      series: at least ``FEWEST`` measurements.
      limit: what is bad, by the least that the series was up to each point (the most, where it falls).
      up: whether what grows is bad; else what falls.
      relative: whether where it began is told from factors, not from differences.
    """
    count = len(series)
    if count < FEWEST:
        return None
    sign = 1.0 if up else -1.0
    values = sign * series.values
    level = smoothed(values, window(count))
    past = np.minimum.accumulate(smoothed(values, max(window(count), min(count // 8, WIDEST) | 1)))
    bad = level >= sign * limit(sign * past)
    start = _to_the_end(bad)
    if start is None or count - start < lasting(count):
        return None
    after = float(np.median(values[start:]))
    before = float(past[start])
    began = _began(values[: start + 1], before, after, window(count), relative)
    steep = began + _knee(np.log(np.maximum(level[began : start + 1], 1e-12))) if relative else began
    steps = series.steps
    return Departure(
        int(steps[began]), int(steps[steep]), int(steps[start]), sign * before, sign * after, count - start
    )


def _to_the_end(bad: np.ndarray) -> int | None:
    """Where the longest stretch to the end begins of which nine in ten are bad; None where the end is not bad."""
    if not bad[-1]:
        return None
    share = np.cumsum(bad[::-1]) / np.arange(1, len(bad) + 1)
    return int(np.flatnonzero((share >= 0.9)[::-1] & bad)[0])


def _began(values: np.ndarray, before: float, after: float, width: int, relative: bool) -> int:
    """The first point of which no later one is like what was before; the change is over at the last of them."""
    if relative:
        least = max(1e-3 * after, 1e-12)
        values = np.log(np.maximum(values, least))
        before = float(np.log(max(before, least)))
        after = float(np.log(max(after, least)))
    # What was before is the least of what was, so noise is mostly above it.
    most = before + max(ALIKE * (after - before), 3.5 * noise(values) / width**0.5)
    alike = np.flatnonzero(smoothed(values, width)[:-1] <= most)
    return int(alike[-1]) + 1 if len(alike) else 0


def _knee(level: np.ndarray) -> int:
    """Where slow growth turns into fast growth: the point furthest below the line from first to last.

    0 where none is far below it.
    """
    below = np.linspace(level[0], level[-1], len(level)) - level
    furthest = int(np.argmax(below))
    return furthest if below[furthest] > KNEE * (level[-1] - level[0]) else 0
