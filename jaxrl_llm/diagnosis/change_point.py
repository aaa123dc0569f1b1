"""Lasting changes of a series: windows of medians, measured against the run's own past."""

import dataclasses
from collections.abc import Callable

import numpy as np

from jaxrl_llm.diagnosis.history import Series

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
class ChangePoint:
    """A lasting change, up to the end of a series.

    Attributes:
      step: its beginning: the first step with a value unlike those before.
      steep: the beginning of fast change: as ``step``, unless a slow change came first.
      reached: the first step that was bad.
      before: the past level of the series.
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
    """Return the width of the running median, odd: 3 in short runs, 15 in long ones."""
    return min(max(count // 20, 3), 15) | 1


def lasting(count: int) -> int:
    """Return the fewest measurements that a trouble must last for: 4 in short runs, 20 in long ones."""
    return min(max(count // 25, 4), 20)


def smoothed(values: np.ndarray, width: int, share: float = 0.5) -> np.ndarray:
    """Return the running median, or another quantile, float64[n] of ``width`` neighbours in float64[n].

    The ends repeat the nearest whole window; fewer values than ``width`` are returned unchanged.
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
    """Find the change after which a series is bad up to its end; None without one.

    Args:
      series: at least ``FEWEST`` measurements.
      limit: maps the lowest level so far (the highest, for a series that falls) to the bound of bad values.
      up: whether growth is bad; else decline.
      relative: whether its beginning is judged by factors, not by differences.
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
