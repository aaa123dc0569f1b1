"""Inputs of advantages besides the summed rewards: limits of costs, the gate, and several separate rewards."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.config import Run
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.samples import without_gain
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.functions import OF_STEPS
from jaxrl_llm.rewards.shaping import REJECTED, Constraint
from jaxrl_llm.rollout.groups import RolloutBatch
from jaxrl_llm.rules.decision import Decided, Decision, Own, Row
from jaxrl_llm.stages.rl.ingredient import Ingredient
from jaxrl_llm.types import Group


@dataclasses.dataclass(frozen=True)
class Constraints(Ingredient):
    """Limits on a run's mean costs, each with a multiplier that a rule updates, and its gate: a completion that it
    rejects is never made more likely.
    """

    constraints: tuple[Constraint, ...]
    gated: bool = False
    name = "constraints"

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        limits = run.scoring.constraints
        moves = {one.coefficient: functools.partial(constrained, limited=one) for one in limits}
        begins = {one.coefficient: float(one.multiplier) for one in limits}
        gated = run.scoring.gate is not None
        return cls(limits, gated, coefficients=begins, rules=moves) if limits or gated else None

    def rewards(self, rewards: np.ndarray, groups: Sequence[Group], coefficients: Mapping[str, float]) -> np.ndarray:
        """Return ``r - sum of lam * (cost - limit)``, NaN where a cost is NaN."""
        for one in self.constraints:
            cost = np.stack([group.parts[one.part] for group in groups])
            rewards = rewards - coefficients[one.coefficient] * (cost - one.limit)
        return rewards

    def samples(self, samples: list[list[Sample]], batch: RolloutBatch) -> list[list[Sample]]:
        """Return the samples, with advantages ``min(A, 0)`` for completions that the gate rejects."""
        if not self.gated:
            return samples
        return [
            [without_gain(one) if out else one for one, out in zip(members, group.parts[REJECTED], strict=True)]
            for members, group in zip(samples, batch.groups, strict=True)
        ]


def constrained(row: Row, own: Own, limited: Constraint) -> Decided:
    """Update the multiplier of a constraint, ``lam <- max(0, lam + rate * (mean cost - limit))``: a ``Rule``.

    A step without a cost leaves it unchanged.
    """
    cost = row.get(limited.part, math.nan)
    if math.isnan(cost):
        return Decision(), own
    moved = max(0.0, row[limited.coefficient] + limited.rate * (cost - limited.limit))
    return Decision(coefficients={limited.coefficient: moved}), own


def separately(algorithm: Algorithm, parts: dict[str, Reward], groups: list[Group]) -> tuple[Algorithm, np.ndarray]:
    """Return the algorithm with its weights filled in, and each reward float64[P, G, n], for an estimator of several.

    Step rewards are excluded.
    """
    parts = {name: reward for name, reward in parts.items() if not isinstance(reward, OF_STEPS)}
    weights = algorithm.advantage.weights or tuple(float(reward.weight) for reward in parts.values())
    rewards = np.stack([np.stack([group.parts[name] for group in groups]) for name in parts], axis=-1)
    return dataclasses.replace(algorithm, advantage=dataclasses.replace(algorithm.advantage, weights=weights)), rewards
