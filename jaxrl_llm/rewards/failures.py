"""What went wrong while completions were scored."""

import dataclasses
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Failures:
    """Completions that a reward did not score.

    Attributes:
      errors: that raised, or whose process died.
      timeouts: that ran past their deadline.
      of: by reward, how many completions it was asked for, and how many of them it failed to score.
      told: by reward that failed, what the first of its failures was, in one line: ``my_rewards.py:7:
        ZeroDivisionError: division by zero``. The verifier's is there without an ``Accuracy`` too, under no name.
      trace: of those, where there are any, with their tracebacks.
    """

    errors: int = 0
    timeouts: int = 0
    of: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    told: dict[str, str] = dataclasses.field(default_factory=dict)
    trace: str = ""

    @property
    def message(self) -> str:
        """What is told of the reward that failed most often; empty where none failed."""
        return self.told[max(self.told, key=self.fraction)] if self.told else ""

    def fraction(self, name: str) -> float:
        """The share of completions that a reward failed to score."""
        asked, failed = self.of.get(name, (0, 0))
        return failed / asked if failed else 0.0

    def __add__(self, other: "Failures") -> "Failures":
        """Both together."""
        of = {name: (0, 0) for name in self.of | other.of}
        for name in of:
            (asked, failed) = self.of.get(name, (0, 0))
            (more_asked, more_failed) = other.of.get(name, (0, 0))
            of[name] = asked + more_asked, failed + more_failed
        told = self.told | {name: line for name, line in other.told.items() if name not in self.told}
        return Failures(self.errors + other.errors, self.timeouts + other.timeouts, of, told, self.trace or other.trace)

    def explained_in(self, file: Path) -> "Failures":
        """The same, each line with the file that holds the tracebacks."""
        return dataclasses.replace(
            self, told={name: f"{line} (traceback in {file})" for name, line in self.told.items()}
        )

    def metrics(self) -> dict[str, Any]:
        """As they stand in a step's row; a reward that never failed has no entry."""
        found: dict[str, Any] = {"reward/errors": self.errors, "reward/timeouts": self.timeouts}
        found |= {
            f"reward/{name}/failed_fraction": self.fraction(name) for name, (_, failed) in self.of.items() if failed
        }
        return found | ({"event/reward_failed": self.message} if self.told else {})
