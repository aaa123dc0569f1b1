"""Per-token estimates [B, T] of KL(policy || reference) from sampled tokens; nats. After joschu.net/blog/kl-approx.

Their value and their gradient are two things: k1's gradient has mean zero (useless as a loss), k2's is that of
KL(policy || reference), k3's is that of KL(reference || policy).
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class K1:
    """``logp - ref``: unbiased in value; its expected gradient is 0."""

    def __call__(self, logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
        """All [B, T]; returns [B, T]."""
        return logp - ref_logp


@dataclasses.dataclass(frozen=True)
class K2:
    """``(logp - ref)^2 / 2``: biased in value, unbiased in gradient. ``clip`` bounds the log ratio (ProRL v2: 10)."""

    clip: float | None = None

    def __call__(self, logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
        """All [B, T]; returns [B, T]."""
        difference = logp - ref_logp
        if self.clip is not None:
            difference = jnp.clip(difference, -self.clip, self.clip)
        return 0.5 * difference**2


@dataclasses.dataclass(frozen=True)
class K3:
    """``rho - 1 - log rho`` with ``rho = ref / policy``: GRPO (arXiv 2402.03300, eq. 4); never negative.

    ``clip`` bounds the estimate, after clamping the log ratio to ±20, as verl does with 10. ``expm1`` keeps the digits that
    ``exp(d) - d - 1`` loses near 0.
    """

    clip: float | None = None

    def __call__(self, logp: jax.Array, ref_logp: jax.Array) -> jax.Array:
        """All [B, T]; returns [B, T]."""
        d = jnp.clip(ref_logp - logp, -20.0, 20.0)
        estimate = jnp.expm1(d) - d
        return estimate if self.clip is None else jnp.clip(estimate, -self.clip, self.clip)
