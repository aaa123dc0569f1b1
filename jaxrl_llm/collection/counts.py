"""What became of the problems that were asked, in numbers."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Counts:
    """Sums over the problems that were asked; of several parts they are added.

    Attributes:
      problems: asked.
      solved: of these, with a right answer at least.
      answers: sampled, K to each problem.
      right: of these.
      ended: of these, that came to their end.
      rows: written.
      length: tokens of the answers.
      tokens: sampled, those of continuations too.
      seconds: taken.
    """

    problems: int = 0
    solved: int = 0
    answers: int = 0
    right: int = 0
    ended: int = 0
    rows: int = 0
    length: int = 0
    tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(one + more for one, more in zip(dataclasses.astuple(self), dataclasses.astuple(other))))  # noqa: B905  both are of one class

    def numbers(self) -> dict[str, Any]:
        """By name, with the shares and means that people ask for."""
        return dataclasses.asdict(self) | {
            "pass@1": self.right / max(self.answers, 1),
            "solved_fraction": self.solved / max(self.problems, 1),
            "mean_length": self.length / max(self.answers, 1),
        }

    def lines(self) -> list[str]:
        """For people."""
        found = self.numbers()
        return [
            f"  {'pass@1':<12}{100 * found['pass@1']:6.1f} %  {self.right:,} of {self.answers:,} answers are right, "
            f"{self.ended:,} came to their end",
            f"  {'solved':<12}{100 * found['solved_fraction']:6.1f} %  {self.solved:,} of {self.problems:,} problems "
            "have a right answer",
            f"  {'length':<12}{found['mean_length']:6.1f} tokens",
            f"  {'sampled':<12}{self.tokens:,} tokens in {self.seconds:,.1f} s",
            f"  {'rows':<12}{self.rows:,}",
        ]
