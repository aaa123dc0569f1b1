"""Rewards made of others: hinges, thresholds, constraints, a gate, and rewards of some of a mixture's tasks.

The inner reward is scored like any other; its values are changed afterwards. Its own weight is 1: the weight belongs to
the value that goes into the sum.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards.functions import Item, as_reward

REJECTED = "gate/rejected"
"""Name of the part of a group that marks the completions that its gate rejects."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """Base of rewards made of another reward's value.

    Attributes:
      of: that reward, or a function.
    """

    of: Any

    def __post_init__(self):
        object.__setattr__(self, "of", as_reward(self.of))

    @property
    def name(self) -> str:
        """Name of the inner reward."""
        return self.of.name


@dataclasses.dataclass(frozen=True)
class Hinge(Bound):
    """``-max(0, x - limit)`` of another reward's value x: each completion is punished by its excess over the limit.

    In the sum, ``r_help + weight * hinge = r_help - weight * max(0, x - limit)``. It does not limit the mean;
    ``Constraint`` does.

    Attributes:
      of: a reward, or a function; NaN stays NaN.
      limit: largest x that costs nothing.
      weight: cost of each unit above.
    """

    limit: float
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Threshold(Bound):
    """1 where another reward's value is at least ``at``, else 0; NaN stays NaN."""

    at: float
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Gate(Bound):
    """Gate that a completion must pass to be reinforced: if the value is below ``at`` its advantages are at most 0.

    ``A <- min(A, 0)`` for each of its tokens, after estimation: other completions are still compared with it. A
    completion that cannot be scored does not pass.

    Attributes:
      of: a reward, or a function.
      at: the least value that passes.
    """

    at: float = 0.5


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Limit on the mean of a cost: ``R = r - lam * (cost - limit)``, the Lagrangian of E[cost] <= limit.

    After each step ``lam <- max(0, lam + rate * (mean cost - limit))``, over all groups finished in it. A completion
    with a NaN or failed cost is left out of the mean and has no advantage. Readers of rewards before the advantages
    (filters of groups, ``reward/mean``, shaping) see r alone.

    Attributes:
      cost: a reward, or a function, to be kept low.
      limit: of its mean.
      rate: of lam, for one step and one unit of cost.
      multiplier: lam before the first step.
      name: names its metrics; None for the cost's.
    """

    cost: Any
    limit: float
    rate: float
    multiplier: float = 0.0
    name: str | None = None

    def __post_init__(self):
        object.__setattr__(self, "cost", as_reward(self.cost))

    @property
    def part(self) -> str:
        """Name of its column in groups, metrics and samples."""
        return f"constraint/{self.label}/cost"

    @property
    def coefficient(self) -> str:
        """Name of lam in metrics."""
        return f"constraint/{self.label}/multiplier"

    @property
    def label(self) -> str:
        """Name, or the cost's."""
        return self.cost.name if self.name is None else self.name


@dataclasses.dataclass(frozen=True)
class TaskReward(Bound):
    """Reward of the completions of some of a mixture's tasks only; other completions are scored without it.

    Attributes:
      of: the reward.
      tasks: their labels.
    """

    tasks: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name of the reward, with those of its tasks."""
        return f"{self.of.name}/{'+'.join(self.tasks)}"

    @property
    def weight(self) -> float:
        """Weight of the reward."""
        return self.of.weight


def places_of(reward: Any, items: Sequence[Item]) -> list[int]:
    """Return the indices of the completions that a reward scores."""
    some = isinstance(reward, TaskReward)
    return [place for place, (problem, _) in enumerate(items) if not some or problem.task in reward.tasks]


def spread(values: np.ndarray, places: Sequence[int], count: int) -> np.ndarray:
    """Return one or several columns of ``count`` completions from the values of the scored ones; NaN for the others."""
    if len(places) == count:
        return values
    column = np.full((count, *values.shape[1:]), np.nan, np.result_type(values, np.float64))
    column[places] = values
    return column


def base_of(reward: Any) -> Any:
    """Return the innermost reward, which is scored for this one."""
    return base_of(reward.of) if isinstance(reward, Bound) else reward


def shaped(reward: Any, values: np.ndarray) -> np.ndarray:
    """Return the reward's values, float64[n], from those of ``base_of(reward)``; a gate's are 1 where it rejects."""
    if not isinstance(reward, Bound):
        return values
    inner = shaped(reward.of, values)
    match reward:
        case Hinge():
            return -np.maximum(0.0, inner - reward.limit)
        case Threshold():
            return np.where(np.isnan(inner), np.nan, inner >= reward.at)
        case Gate():
            return np.where(inner >= reward.at, 0.0, 1.0)
    return inner
