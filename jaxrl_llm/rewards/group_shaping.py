"""Changes of a group's rewards that need more than one completion: the others of its group, or the run's progress.

Each is a value called as ``shape(group, updates, budget)`` and returns the group with other rewards. ``updates`` is
the number of optimiser updates so far, ``budget`` the run's longest completion in tokens. Accuracy, which group filters
read, stays.
"""

import dataclasses
from typing import Annotated

import numpy as np

from jaxrl_llm.rewards.shaping import CosineLength, free_name
from jaxrl_llm.system.setting import Range
from jaxrl_llm.types import Group

Finite = Annotated[float, Range("(-inf, inf)", words="finite")]
Natural = Annotated[int, Range("[0, inf]")]


@dataclasses.dataclass(frozen=True)
class StopProperly:
    """Penalty on truncation: a truncated completion gets ``min(reward, scale * reward)``; ProRL v2's "stop properly"
    has scale 0.

    Its recipes multiply, for rewards that are never below 0. Below 0 that would be a gain, -1 becoming 0: such a reward
    stays. With any scale, truncation never gains.
    """

    scale: Finite = 0.0

    def __call__(self, group: Group, updates: int, budget: int) -> Group:
        """Return the group with shaped rewards; see the module."""
        cut = np.array([c.finish_reason == "length" for c in group.completions])
        least = np.minimum(group.rewards, self.scale * group.rewards)
        return dataclasses.replace(group, rewards=np.where(cut, least, group.rewards))


@dataclasses.dataclass(frozen=True)
class RelativeLength:
    """Kimi k1.5's length reward (arXiv 2501.12599, section 2.3.3), added with ``weight`` after ``warmup`` updates.

    ``lam = 0.5 - (length - shortest) / (longest - shortest)`` within the group; a right answer gets lam, a wrong one
    min(0, lam), and all get 0 if the lengths are equal. The paper publishes neither weight nor warm-up.
    """

    weight: Finite = 1.0
    warmup: Natural = 0

    def __call__(self, group: Group, updates: int, budget: int) -> Group:
        """Return the group with shaped rewards; see the module."""
        lengths = np.array([c.length for c in group.completions], np.float64)
        spread = lengths.max() - lengths.min()
        lam = 0.5 - (lengths - lengths.min()) / spread if spread else np.zeros_like(lengths)
        part = np.where(group.accuracy >= 1, lam, np.minimum(0, lam))
        return _added(group, "relative_length", part, self.weight if updates >= self.warmup else 0.0)


@dataclasses.dataclass(frozen=True)
class LengthCycle:
    """Schedule of ProRL v2's cosine of the length: ``CosineLength`` up to the budget, in ``on`` of every ``on + off``
    updates.

    The weight is our choice: the recipes do not publish it.
    """

    low: float = -1.0
    high: float = 0.0
    weight: Finite = 0.5
    on: Annotated[int, Range("[1, inf]")] = 100
    off: Natural = 500

    def __call__(self, group: Group, updates: int, budget: int) -> Group:
        """Return the group with shaped rewards; see the module."""
        cosine = CosineLength(budget, self.low, self.high)
        part = np.array([cosine(group.problem, c) for c in group.completions])
        return _added(group, "cosine_length", part, self.weight if updates % (self.on + self.off) < self.on else 0.0)


GroupShaping = StopProperly | RelativeLength | LengthCycle


def _added(group: Group, name: str, part: np.ndarray, weight: float) -> Group:
    name = free_name(name, group.parts)  # a reward, or another shaping, may be called the same
    return dataclasses.replace(group, rewards=group.rewards + weight * part, parts=group.parts | {name: part})
