"""How long a run still takes: each kind of work at its own pace."""

import dataclasses
from collections.abc import Mapping, Sequence

STEP, EVALUATION, SAVE = "step", "evaluation", "save"


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

    def ahead(self, step: int) -> dict[str, int]:
        """How much of each kind is to be done once ``step`` has learned: its own evaluation and save, and all after it."""
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

    A first time takes longer than the others (files, workers), so it is left out as soon as there is another. What was never
    done counts nothing.
    """
    if not durations.get(STEP):
        return None
    total = 0.0
    for kind, count in ahead.items():
        done = durations.get(kind, ())
        usual = done[1:] or done
        total += count * sum(usual) / len(usual) if usual else 0.0
    return total
