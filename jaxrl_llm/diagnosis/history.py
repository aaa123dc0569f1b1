"""Series of numbers from a run's rows, by the pinned names of metrics."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.system.json_lines import number

MEASURED = (
    "reward/mean", "reward/zero_std_fraction", "completions/mean_length", "completions/truncated_fraction",
    "completions/repetition_fraction", "entropy", "kl", "clip_fraction/low", "clip_fraction/high",
    "sampler/logp_abs_diff_mean", "sampler/logp_abs_diff_max", "grad_norm", "loss", "reward/accuracy",
    "reward_model/mean", "pairs/accuracy", "steps/accuracy", "eval/pairs/accuracy", "eval/steps/accuracy",
    "eval/text/loss",
)  # fmt: skip
"""The metrics that are read, in addition to evaluations of tasks."""
ROLLED_BACK = "rollback/to_step"
"""The metric of a step that was followed by a rollback: the step of the checkpoint."""
LARGEST = 1e100
"""The bound that larger numbers are clipped to: their squares stay finite."""
TESTED = re.compile(r"eval/(.+)/pass@(\d+|k)")
"""The names of evaluations: of one task, or the mean of several."""


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
    """

    metrics: Mapping[str, Series]
    evaluations: Mapping[str, Series]
    last: int
    planned: int

    def __getitem__(self, name: str) -> Series:
        return self.metrics[name]


def history(rows: Iterable[Mapping[str, Any]], steps: int = 0) -> History:
    """Return the series in a run's rows; ``steps``: the planned ones.

    A step that occurs twice, as after a resume, counts once: its later measurement holds. A value that is not a finite
    number counts as unmeasured; a row without a step is skipped. After a rollback, measurements of the undone steps do
    not count.
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
    return History({name: series[name] for name in MEASURED}, evaluations, last, max(last, steps))


def total(one: Series, other: Series) -> Series:
    """Return the sum of two series; an unmeasured value counts as 0."""
    steps = np.union1d(one.steps, other.steps)
    values = np.zeros(len(steps))
    for series in (one, other):
        values[np.searchsorted(steps, series.steps)] += series.values
    return Series(steps, values)
