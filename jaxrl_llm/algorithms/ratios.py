"""Importance ratios between the live policy and the one at the start of the batch, as clamped logarithms [B, T]."""

import dataclasses

import jax
import jax.numpy as jnp

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to this size, in nats, so that no ratio overflows."""


def clamped_log_ratio(logp: jax.Array, old_logp: jax.Array) -> jax.Array:
    """``logp - old_logp`` within ±20; its gradient is 0 beyond."""
    return jnp.clip(logp - old_logp, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def masked_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of x [B, T] over each row's valid tokens, [B, 1]; 0 for a row without any."""
    return jnp.sum(x * mask, axis=1, keepdims=True) / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)


@dataclasses.dataclass(frozen=True)
class Token:
    """``log r_t = logp_t - old_t``: PPO (arXiv 1707.06347) and GRPO, one ratio for each token."""

    level = "token"

    def __call__(self, logp: jax.Array, old_logp: jax.Array, mask: jax.Array) -> jax.Array:
        """All [B, T]; returns log ratios [B, T]."""
        return clamped_log_ratio(logp, old_logp)


@dataclasses.dataclass(frozen=True)
class Sequence:
    """``log s = mean_t (logp_t - old_t)``, the same for all tokens: GSPO (arXiv 2507.18071, eq. 7)."""

    level = "sequence"

    def __call__(self, logp: jax.Array, old_logp: jax.Array, mask: jax.Array) -> jax.Array:
        """All [B, T]; returns log ratios [B, T], constant along T."""
        return jnp.broadcast_to(masked_mean(clamped_log_ratio(logp, old_logp), mask), logp.shape)


@dataclasses.dataclass(frozen=True)
class SequenceToken:
    """GSPO's ratio in value, the token's own in gradient: ``sg[s] * pi / sg[pi]`` (arXiv 2507.18071, eq. 14).

    With one advantage for the whole sequence its gradient is GSPO's; it permits an advantage for each token.
    """

    level = "sequence"

    def __call__(self, logp: jax.Array, old_logp: jax.Array, mask: jax.Array) -> jax.Array:
        """All [B, T]; returns log ratios [B, T]."""
        s = masked_mean(clamped_log_ratio(logp, old_logp), mask)
        return jax.lax.stop_gradient(s) + logp - jax.lax.stop_gradient(logp)
