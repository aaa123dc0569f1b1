"""How long a run still takes: each kind of work at its own pace."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

STEP, EVALUATION, SAVE = "step", "evaluation", "save"
RECENT = 20
"""Durations of each kind that the pace is taken from."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When a run does what.

    Attributes:
      steps: that it ends with.
      evaluate_every: steps between evaluations; 0 evaluates after the last one only.
      save_every: steps between checkpoints.
    """

    steps: int
    evaluate_every: int = 0
    save_every: int = 0

    def evaluates(self, step: int) -> bool:
        """Whether the policy is tested after ``step``; after the last one it always is."""
        return step == self.steps or (self.evaluate_every > 0 and step % self.evaluate_every == 0)

    def saves(self, step: int) -> bool:
        """Whether ``step`` has a checkpoint; the last one always has."""
        return step == self.steps or (self.save_every > 0 and step % self.save_every == 0)

    def ahead(self, step: int) -> dict[str, int]:
        """How much of each kind is left once ``step`` has learned: its own evaluation and save, and all after it."""
        return {
            STEP: self.steps - step,
            EVALUATION: self._due(step, self.evaluate_every),
            SAVE: self._due(step, self.save_every),
        }

    def _due(self, step: int, every: int) -> int:
        """Multiples of ``every`` from ``step`` on; the last step always counts."""
        if not every:
            return 1
        return self.steps // every - (step - 1) // every + (self.steps % every > 0)


def time_left(durations: Mapping[str, Sequence[float]], ahead: Mapping[str, int]) -> float | None:
    """Seconds for what is ``ahead`` at the mean pace of each kind's ``durations``; None before the first step.

    A first time takes longer than the others (files, workers), so it is left out as soon as there is another. What was
    never done counts nothing.
    """
    if not durations.get(STEP):
        return None
    total = 0.0
    for kind, count in ahead.items():
        done = durations.get(kind, ())
        usual = done[1:] or done
        total += count * sum(usual) / len(usual) if usual else 0.0
    return total


class Pace:
    """What each kind of work has taken so far, but for what was compiled in it.

    Args:
      compiled: seconds that this process has compiled so far.
    """

    def __init__(self, compiled: Callable[[], float]):
        self.durations: dict[str, tuple[float, ...]] = {}
        self._compiled = compiled
        self.begin()

    def begin(self) -> None:
        """Work begins now: what came before is no part of the pace."""
        self._told = time.monotonic()
        self._before = self._compiled()

    def took(self, kind: str) -> None:
        """The time since the last call, or since ``begin``, was this kind's."""
        seconds = max(time.monotonic() - self._told - (self._compiled() - self._before), 0.0)
        self.durations[kind] = (*self.durations.get(kind, ()), seconds)[-RECENT:]
        self.begin()
