"""Outcome advantages: rewards [P, G] in, advantages [P, G] out. Sections 1 and 3 of the papers' definitions.

An estimator is a frozen dataclass, so it can be a static argument and a field of ``Algorithm``. In every one of them a
group whose rewards are all equal gets exactly 0 (tested by max == min: in float32 the mean of equal rewards need not
equal them, and dividing that residue by a tiny deviation makes advantages out of nothing), and an unscorable reward
(NaN) is left out of the statistics and gets 0.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.types import AdvantageContext


def group_statistics(rewards: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rewards with NaN as 0, which of them count, how many in each group [P, 1], and whether they differ [P, 1]."""
    rewards = jnp.asarray(rewards)
    if rewards.ndim != 2:
        raise ValueError(f"rewards must be [P, G], got shape {rewards.shape}")
    if not jnp.issubdtype(rewards.dtype, jnp.floating):
        rewards = rewards.astype(jnp.float32)
    valid = ~jnp.isnan(rewards)
    high = jnp.max(jnp.where(valid, rewards, -jnp.inf), axis=1, keepdims=True)
    low = jnp.min(jnp.where(valid, rewards, jnp.inf), axis=1, keepdims=True)
    return jnp.where(valid, rewards, 0), valid, jnp.sum(valid, axis=1, keepdims=True, dtype=rewards.dtype), high > low


def centred(rewards: Any) -> tuple[jax.Array, jax.Array]:
    """``R_i - mean_group`` where it counts, else exactly 0; and the number of scored rewards of each group [P, 1]."""
    rewards, valid, count, differ = group_statistics(rewards)
    mean = jnp.sum(rewards, axis=1, keepdims=True) / jnp.maximum(count, 1)
    return jnp.where(valid & differ, rewards - mean, 0), count


@dataclasses.dataclass(frozen=True)
class GroupMean:
    """``A_i = R_i - mean(R)``: Dr. GRPO (arXiv 2503.20783), also Kimi k1.5, DeepSeek-V3.2 and MiniRL."""

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """rewards: float[P, G]; returns float[P, G]."""
        return centred(rewards)[0]


@dataclasses.dataclass(frozen=True)
class GroupZScore:
    """``A_i = (R_i - mean(R)) / (std(R) + eps)``: GRPO (arXiv 2402.03300, section 4.1.2).

    The paper says neither which deviation nor eps. Ours is the sample deviation (ddof 1) with 1e-6, as verl has it; TRL
    adds 1e-4. ``jnp.std`` alone would be the population's (ddof 0), which scales A by sqrt(G / (G - 1)).
    """

    ddof: int = 1
    eps: float = 1e-6

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """rewards: float[P, G]; returns float[P, G]."""
        centre, count = centred(rewards)
        variance = jnp.sum(centre**2, axis=1, keepdims=True) / jnp.maximum(count - self.ddof, 1)
        # The root of 0 has an infinite slope, and eps may be 0: groups without variance are already exactly 0.
        std = jnp.sqrt(jnp.where(variance > 0, variance, 1))
        return jnp.where(variance > 0, centre / (std + self.eps), 0)


@dataclasses.dataclass(frozen=True)
class LeaveOneOut:
    """``A_i = R_i - mean_{j != i}(R_j) = G / (G - 1) (R_i - mean(R))``: RLOO (arXiv 2402.14740)."""

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """rewards: float[P, G]; returns float[P, G]."""
        centre, count = centred(rewards)
        return centre * count / jnp.maximum(count - 1, 1)
