"""Series of numbers from a run's rows, by the pinned names of metrics, and their lasting changes.

A change is measured against the run's own past, in windows of medians.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.system.json_lines import number
from jaxrl_llm.types import NOT_FINITE

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
    """The measurements of one metric, in the order of steps.

    Attributes:
      steps: int64[n], each once.
      values: float64[n], finite.
    """

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
    """The metrics of a run so far.

    Attributes:
      metrics: a series for each of ``MEASURED``; empty if never measured.
      evaluations: the share of right answers, by task.
      last: the last step; 0 without steps.
      planned: the planned steps of the run, or ``last`` if that is more or the plan is unknown.
      broken: what was not finite, by step.
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
FINITE_TESTS = ("eval/text/loss", "eval/steps/loss")
"""Evaluations that are numbers where they were made."""
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
    names += [] if role else FINITE_TESTS
    return found + [name for name in names if name in row and number(row[name]) is None]


def broken(row: Mapping[str, Any]) -> str:
    """Return what is not finite in a row, as its event or its numbers say; empty if nothing is."""
    names = ", ".join(dict.fromkeys(name for role in ROLES for name in not_finite(row, role)))
    return str(row.get(EVENT_BROKEN) or (names and f"{names} is not a number"))


def history(rows: Iterable[Mapping[str, Any]], steps: int = 0) -> History:
    """Return the series in a run's rows; ``steps``: the planned ones.

    A step that occurs twice, as after a resume, counts once: its later measurement holds. A value that is not a finite
    number counts as unmeasured; a row without a step is skipped. After a rollback, measurements of the undone steps do
    not count.
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
