"""Rewards made of others, and what a run keeps within bounds: hinges, thresholds, constraints, a gate.

What is bounded is scored as any reward is, by whatever scores such rewards; its values are changed afterwards. Its own
weight is 1: the weight belongs to what goes into the sum.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.by_task import OfTasks
from jaxrl_llm.rewards.functions import as_reward
from jaxrl_llm.rewards.models import OF_STEPS

REJECTED = "gate/rejected"
"""The part of a group that says which completions its gate rejects."""


@dataclasses.dataclass(frozen=True)
class Bound:
    """A value made of another reward's.

    Attributes:
      of: that reward, or a function.
    """

    of: Any

    def __post_init__(self):
        object.__setattr__(self, "of", as_reward(self.of))

    def shaped(self, values: np.ndarray) -> np.ndarray:
        """float64[n] of the inner reward's values, float64[n]."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Hinge(Bound):
    """``-max(0, x - limit)`` of another reward's value x: what lies above the limit is punished, completion by
    completion.

    In the sum, ``r_help + weight * hinge = r_help - weight * max(0, x - limit)``. No dual of a limit on the mean: that
    is ``Constraint``.

    Attributes:
      of: a reward, or a function; NaN stays NaN.
      limit: up to which x costs nothing.
      weight: what each unit above costs.
    """

    limit: float
    weight: float = 1.0

    @property
    def name(self) -> str:
        """That of the inner reward."""
        return self.of.name

    def shaped(self, values: np.ndarray) -> np.ndarray:
        """See ``Bound``."""
        return -np.maximum(0.0, values - self.limit)


@dataclasses.dataclass(frozen=True)
class Threshold(Bound):
    """1 where another reward's value is at least ``at``, else 0; NaN stays NaN."""

    at: float
    weight: float = 1.0

    @property
    def name(self) -> str:
        """That of the inner reward."""
        return self.of.name

    def shaped(self, values: np.ndarray) -> np.ndarray:
        """See ``Bound``."""
        return np.where(np.isnan(values), np.nan, values >= self.at)


@dataclasses.dataclass(frozen=True)
class Gate(Bound):
    """What a completion must pass to be reinforced: where the value is below ``at`` its advantages are at most 0.

    ``A <- min(A, 0)`` for each of its tokens, after estimation: the others are compared with it as before. A completion
    that cannot be scored does not pass.

    Attributes:
      of: a reward, or a function.
      at: the least value that passes.
    """

    at: float = 0.5

    @property
    def name(self) -> str:
        """For messages."""
        return f"gate of {self.of.name}"

    def shaped(self, values: np.ndarray) -> np.ndarray:
        """1 where the completion is rejected, else 0."""
        return np.where(values >= self.at, 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class Constraint:
    """Holds the mean of a cost to a limit: ``R = r - lam * (cost - limit)``, the Lagrangian of E[cost] <= limit.

    After each step ``lam <- max(0, lam + rate * (mean cost - limit))``, over all groups finished in it. A completion
    whose cost is NaN, or could not be had, is left out of the mean and has no advantage. What reads rewards before
    advantages are made (filters of groups, ``reward/mean``, shaping) sees r alone.

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
        """Its column in groups, metrics and samples."""
        return f"constraint/{self.label}/cost"

    @property
    def coefficient(self) -> str:
        """What lam is called."""
        return f"constraint/{self.label}/multiplier"

    @property
    def label(self) -> str:
        """The name, or the cost's."""
        return self.cost.name if self.name is None else self.name


def base_of(reward: Any) -> Any:
    """What is scored for a reward: the innermost one that it is made of."""
    return base_of(reward.of) if isinstance(reward, (Bound, OfTasks)) else reward


def shaped(reward: Any, values: np.ndarray) -> np.ndarray:
    """The reward's values float64[n] from those of ``base_of(reward)``."""
    if isinstance(reward, OfTasks):
        return shaped(reward.of, values)
    return reward.shaped(shaped(reward.of, values)) if isinstance(reward, Bound) else values


def check_bound(bound: Bound | Constraint, check: Callable[[Any], None]) -> None:
    """Refuses a bound that cannot work.

    Args:
      bound: one of those above.
      check: does it for the reward that it is made of.

    Raises:
      InputError: a number out of its range, a name that metrics cannot have, a reward of steps, an inner reward with a
        weight of its own, or what ``check`` raises.
    """
    kind = type(bound).__name__
    for field in ("limit", "at", "rate", "multiplier"):
        value = getattr(bound, field, 0.0)
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise InputError(f"{kind}.{field} must be a finite number, got {value!r}")
    inner = bound.cost if isinstance(bound, Constraint) else bound.of
    if isinstance(bound, Constraint) and (bound.rate <= 0 or bound.multiplier < 0):
        raise InputError(
            f"{kind} of {inner.name} has rate {bound.rate:g} and multiplier {bound.multiplier:g}; give a rate above 0 "
            "and a multiplier of at least 0"
        )
    if isinstance(bound, Constraint) and (not bound.label or "/" in bound.label):
        raise InputError(f"{kind} of {inner.name} has the name {bound.label!r}: give one without a slash")
    if isinstance(base_of(inner), OF_STEPS):
        raise InputError(f"{kind} holds the step reward {inner.name}: give a reward with one value a completion")
    check(inner)
    if inner.weight != 1:
        raise InputError(f"{inner.name} in {kind} has the weight {inner.weight:g}, which nothing reads: leave it out")
