"""Rewards of some of a mixture's tasks: they are no part of what the others' completions score."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards.forms import Item


@dataclasses.dataclass(frozen=True)
class OfTasks:
    """A reward of the completions of some tasks.

    Attributes:
      of: the reward.
      tasks: their labels.
    """

    of: Any
    tasks: tuple[str, ...]

    @property
    def name(self) -> str:
        """That of the reward, with its tasks'."""
        return f"{self.of.name}/{'+'.join(self.tasks)}"

    @property
    def weight(self) -> float:
        """That of the reward."""
        return self.of.weight


def places_of(reward: Any, items: Sequence[Item]) -> list[int] | None:
    """Which of the completions a reward scores; None where it is all of them."""
    if not isinstance(reward, OfTasks):
        return None
    return [place for place, (problem, _) in enumerate(items) if problem.task in reward.tasks]


def spread(values: np.ndarray, places: Sequence[int] | None, count: int) -> np.ndarray:
    """A column of ``count`` completions, or several, from the values of those that were scored; NaN for the others."""
    if places is None:
        return values
    column = np.full((count, *values.shape[1:]), np.nan)
    column[list(places)] = values
    return column
