"""The environment that compare_peers gives to every contestant: written after TRL's interface, it needs no library."""

from typing import Any


class Calculator:
    """One tool; the reward is 1 if it was called with the row's two numbers.

    Attributes:
      made: calls in all episodes of the process.
    """

    made = 0

    def reset(self, a: int, b: int, **row: Any) -> None:
        """Begin."""
        self._asked, self._reward = sorted((a, b)), 0.0

    def multiply(self, a: int, b: int) -> str:
        """Multiply two integers.

        Args:
          a: the first.
          b: the second.
        """
        Calculator.made += 1
        if sorted((a, b)) == self._asked:
            self._reward = 1.0
        return str(a * b)

    def get_reward(self) -> float:
        """Return the reward of the episode."""
        return self._reward
