"""A run's rows as series of numbers, by the pinned names of metrics."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.telemetry.rows import number

MEASURED = (
    "reward/mean", "reward/zero_std_fraction", "completions/mean_length", "completions/truncated_fraction",
    "completions/repetition_fraction", "entropy", "kl", "clip_fraction/low", "clip_fraction/high",
    "sampler/logp_abs_diff_mean", "sampler/logp_abs_diff_max", "grad_norm", "loss", "reward/accuracy",
    "reward_model/mean", "pairs/accuracy", "steps/accuracy", "eval/pairs/accuracy", "eval/steps/accuracy",
    "eval/text/loss",
)  # fmt: skip
"""What is read of a row, but for evaluations of tasks."""
ROLLED_BACK = "rollback/to_step"
"""The metric of a step after which the run went back: to which step's checkpoint."""
LARGEST = 1e100
"""Numbers beyond are taken for this one: their squares are numbers, too."""
TESTED = re.compile(r"eval/(.+)/pass@(\d+|k)")
"""Evaluations: of a task, or of several the mean."""


@dataclasses.dataclass(frozen=True)
class Series:
    """One metric where it was measured, in the order of steps.

    Attributes:
      steps: int64[n], each once.
      values: float64[n], finite.
    """

    steps: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.values)

    def since(self, step: int) -> "Series":
        """What was measured at that step and after it."""
        start = int(np.searchsorted(self.steps, step))
        return Series(self.steps[start:], self.values[start:])

    def before(self, step: int) -> "Series":
        """What was measured before that step."""
        end = int(np.searchsorted(self.steps, step))
        return Series(self.steps[:end], self.values[:end])


@dataclasses.dataclass(frozen=True)
class History:
    """A run so far.

    Attributes:
      metrics: a series for each of ``MEASURED``; one that was never measured is empty.
      evaluations: the share of right answers, by task.
      last: the last step; 0 where there is none.
      planned: the steps that the run is to make, or ``last`` where that is more or nothing is known of it.
    """

    metrics: Mapping[str, Series]
    evaluations: Mapping[str, Series]
    last: int
    planned: int

    def __getitem__(self, name: str) -> Series:
        return self.metrics[name]


def history(rows: Iterable[Mapping[str, Any]], steps: int = 0) -> History:
    """The series in a run's rows; ``steps``: that it is to make.

    A step that stands there twice, as after a resume, counts once: what its later row measured stands. A value that is
    no finite number was not measured; a row without a step is passed over. Where the run went back after a row to an
    earlier step's policy, what the policy that it left has done does not count.
    """
    found: dict[str, dict[int, float]] = {name: {} for name in MEASURED}
    last = 0
    for row in rows:
        at = number(row.get("step"))
        if at is None:
            continue
        last = max(last, int(at))
        for name, value in row.items():
            if name not in found:
                if not (name.startswith("eval/") and TESTED.fullmatch(name)):
                    continue
                found[name] = {}
            if (measured := number(value)) is not None:
                found[name][int(at)] = min(max(measured, -LARGEST), LARGEST)
        if (back := number(row.get(ROLLED_BACK))) is not None:
            for name, values in found.items():
                found[name] = {step: value for step, value in values.items() if step <= back}
    series = {name: _series(values) for name, values in found.items()}
    return History({name: series[name] for name in MEASURED}, _evaluations(series), last, max(last, steps))


def total(one: Series, other: Series) -> Series:
    """The sum of two series; where one of them was not measured it counts 0."""
    steps = np.union1d(one.steps, other.steps)
    values = np.zeros(len(steps))
    for series in (one, other):
        values[np.searchsorted(steps, series.steps)] += series.values
    return Series(steps, values)


def _series(values: dict[int, float]) -> Series:
    steps = np.array(sorted(values), np.int64)
    return Series(steps, np.array([values[step] for step in steps.tolist()], float))


def _evaluations(series: Mapping[str, Series]) -> dict[str, Series]:
    """By task: pass@1 where it was measured, else the pass@k of the smallest k."""
    found: dict[str, dict[float, Series]] = {}
    for name, values in series.items():
        if (match := TESTED.fullmatch(name)) and len(values):
            task, k = match.groups()
            found.setdefault(task, {})[math.inf if k == "k" else float(k)] = values
    return {task: by_k[min(by_k)] for task, by_k in found.items()}
