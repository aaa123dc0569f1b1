"""Per-token policy losses [B, T] to minimise, from the log ratio, the advantage and the live log-probability.

A surrogate is called as ``surrogate(log_ratio, advantages, logp)``, all [B, T]. ``clipped(ratio, advantages)`` says where
its lower and upper bound cut the gradient, for the metrics.
"""

import dataclasses

import jax
import jax.numpy as jnp


def nowhere(ratio: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
    """No bound cuts anything."""
    return jnp.zeros(ratio.shape, bool), jnp.zeros(ratio.shape, bool)


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """``-A logp``: REINFORCE (Williams 1992)."""

    def __call__(self, log_ratio: jax.Array, advantages: jax.Array, logp: jax.Array) -> jax.Array:
        """All [B, T]; returns [B, T]."""
        return -advantages * logp

    def clipped(self, ratio: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """bool[B, T] each: where the lower and the upper bound cut the gradient."""
        return nowhere(ratio, advantages)


@dataclasses.dataclass(frozen=True)
class PPOClip:
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``: PPO (arXiv 1707.06347, eq. 7).

    ``high > low`` is DAPO's clip-higher (arXiv 2503.14476, eq. 8). ``dual`` bounds the loss of negative advantages at
    ``-dual * A`` (arXiv 1912.09729); None, as in the papers above, leaves it unbounded.
    """

    low: float = 0.2
    high: float = 0.2
    dual: float | None = None

    def __call__(self, log_ratio: jax.Array, advantages: jax.Array, logp: jax.Array) -> jax.Array:
        """All [B, T]; returns [B, T]."""
        ratio = jnp.exp(log_ratio)
        bounded = jnp.clip(ratio, 1 - self.low, 1 + self.high)
        loss = jnp.maximum(-ratio * advantages, -bounded * advantages)
        if self.dual is None:
            return loss
        return jnp.where(advantages < 0, jnp.minimum(loss, -self.dual * advantages), loss)

    def clipped(self, ratio: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """bool[B, T] each: where the lower and the upper bound cut the gradient."""
        return (ratio < 1 - self.low) & (advantages < 0), (ratio > 1 + self.high) & (advantages > 0)


@dataclasses.dataclass(frozen=True)
class CISPO:
    """``-sg[clip(r, ratio_min, ratio_max)] A logp``: MiniMax-M1 (arXiv 2506.13585, eq. 4).

    Both bounds are absolute ratios. The paper has no lower bound and does not publish its upper one; 5.0 is TRL's and
    ScaleRL's. verl and slime write the same bound as its distance from 1. The gradient never vanishes.
    """

    ratio_max: float = 5.0
    ratio_min: float = 0.0

    def __call__(self, log_ratio: jax.Array, advantages: jax.Array, logp: jax.Array) -> jax.Array:
        """All [B, T]; returns [B, T]."""
        weight = jax.lax.stop_gradient(jnp.clip(jnp.exp(log_ratio), self.ratio_min, self.ratio_max))
        return -weight * advantages * logp

    def clipped(self, ratio: jax.Array, advantages: jax.Array) -> tuple[jax.Array, jax.Array]:
        """bool[B, T] each: where the weight is cut at the lower and the upper bound."""
        return ratio < self.ratio_min, ratio > self.ratio_max
