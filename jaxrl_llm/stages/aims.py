"""What completions are worth to the loss beside their rewards: several aims, limits of costs, a gate."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.config import Run
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.samples import without_gain
from jaxrl_llm.rewards import Reward
from jaxrl_llm.rewards.bounds import REJECTED, Constraint
from jaxrl_llm.rewards.models import OF_STEPS, ModelReward
from jaxrl_llm.rewards.shaping import named
from jaxrl_llm.types import Group


def separately(algorithm: Algorithm, parts: dict[str, Reward], groups: list[Group]) -> tuple[Algorithm, np.ndarray]:
    """For an estimator of several rewards: each of them, float64[P, G, n], and their weights, which it applies.

    Those of steps are left out.
    """
    parts = {name: reward for name, reward in parts.items() if not isinstance(reward, OF_STEPS)}
    weights = algorithm.advantage.weights or tuple(float(reward.weight) for reward in parts.values())
    rewards = np.stack([np.stack([group.parts[name] for group in groups]) for name in parts], axis=-1)
    return dataclasses.replace(algorithm, advantage=dataclasses.replace(algorithm.advantage, weights=weights)), rewards


def lagrangian(
    constraints: Sequence[Constraint], groups: Sequence[Group], coefficients: Mapping[str, float]
) -> np.ndarray:
    """What advantages are made of, float64[P, G]: ``r - sum of lam * (cost - limit)``, NaN where a cost is."""
    rewards = np.stack([group.rewards for group in groups])
    for one in constraints:
        cost = np.stack([group.parts[one.part] for group in groups])
        rewards = rewards - coefficients[one.coefficient] * (cost - one.limit)
    return rewards


def gated(samples: list[list[Sample]], groups: Sequence[Group]) -> list[list[Sample]]:
    """The samples, with ``min(A, 0)`` for the advantages of completions that the gate rejects."""
    return [
        [without_gain(sample) if out else sample for sample, out in zip(members, group.parts[REJECTED], strict=True)]
        for members, group in zip(samples, groups, strict=True)
    ]


def modelled(run: Run, metrics: Mapping[str, float]) -> dict[str, float]:
    """``reward_model/mean``: what reward models give on average, where there are any; of several, the first.

    NaN for a step in which nothing was scored.
    """
    parts = named(configs.rewards(run))
    models = [name for name, reward in parts.items() if isinstance(reward, ModelReward)]
    return {"reward_model/mean": metrics.get(f"reward/{models[0]}", math.nan)} if models else {}
