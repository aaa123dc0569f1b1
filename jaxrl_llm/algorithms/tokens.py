"""The arrays of one loss, checked and cleaned once, for ratios, surrogates, corrections and filters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.contracts import array, flags, ranked, shaped
from jaxrl_llm.types import PolicyBatch

LOG_RATIO_BOUND = 20.0
"""Bound on the size of every log ratio, in nats, so that no ratio overflows."""
LOWEST_LOGP = -1e4
"""Lower bound on log-probabilities, in nats: differences stay finite where a token is impossible (-inf)."""


class Tokens(NamedTuple):
    """The inputs of an algorithm's pieces; [B, T] in one floating dtype, 0 where the mask is 0.

    Values shared by a whole sequence may be [B, 1]: advantages, log ratios, and the losses made of them.

    Attributes:
      logp: the live policy, nats, with gradient.
      mask: 1 where a token counts.
      advantages: [B, T] or [B, 1], without gradient.
      old_logp: the policy at the start of the batch's updates, nats.
      sampler_logp: the distribution that was sampled from, nats; None if unknown.
      ref_logp: the reference, nats; None without a reference.
      log_ratio: the algorithm's log importance ratio [B, T] or [B, 1], with gradient; None until it is computed.
      kl_coef: scalar, the current KL coefficient.
      extras: further inputs of the pieces, by name, without gradient.
      entropy: of the policy's distribution at each token, nats, without gradient; None if unknown.
    """

    logp: jax.Array
    mask: jax.Array
    advantages: jax.Array
    old_logp: jax.Array
    sampler_logp: jax.Array | None = None
    ref_logp: jax.Array | None = None
    log_ratio: Any = None
    kl_coef: Any = 0.0
    extras: dict[str, jax.Array] | None = None
    entropy: jax.Array | None = None

    @property
    def lengths(self) -> jax.Array:
        """Return the number of valid tokens of each sequence, [B, 1].

        It is counted in integers, which compilers do without materialising the mask.
        """
        return jnp.sum(self.mask > 0, axis=1, keepdims=True, dtype=jnp.int32).astype(self.mask.dtype)

    def total(self, x: jax.Array) -> jax.Array:
        """Sum x [B, T] over each sequence's valid tokens, [B, 1]."""
        return jnp.sum(x * self.mask, axis=1, keepdims=True)

    def mean(self, x: jax.Array) -> jax.Array:
        """Average x [B, T] over each sequence's valid tokens, [B, 1], 0 without any; return x [B, 1] unchanged."""
        return x if x.shape[1] == 1 else self.total(x) / jnp.maximum(self.lengths, 1)


def clean_tokens(logp: Any, batch: PolicyBatch, kl_coef: Any) -> Tokens:
    """Check and clean the arrays of a loss: one dtype, 0 at padding, finite, gradient only through ``logp``.

    Raises:
      ValueError: a wrong rank, shape or dtype; the message names the argument.
    """
    logp = array(logp, "logp")
    ranked(2, logp=logp)
    optional = {name: getattr(batch, name) for name in ("old_logp", "ref_logp", "sampler_logp")}
    keep = flags(batch.mask, logp.shape, "mask")
    shaped(logp.shape, **optional)
    advantages = array(batch.advantages, "advantages", "any")
    if advantages.shape not in (logp.shape[:1], logp.shape):
        raise ValueError(f"advantages must be [B] or [B, T] of {logp.shape}, got shape {advantages.shape}")
    dtype = jnp.float64 if logp.dtype == jnp.float64 else jnp.float32

    def clean(x: Any, name: str) -> jax.Array:
        return jnp.where(keep, jnp.maximum(array(x, name).astype(dtype), LOWEST_LOGP), 0)

    logp = clean(logp, "logp")
    given: dict[str, Any]
    given = {name: None if x is None else jax.lax.stop_gradient(clean(x, name)) for name, x in optional.items()}
    if given["old_logp"] is None:
        given["old_logp"] = jax.lax.stop_gradient(logp)
    extras = {}
    for name, x in (batch.extras or {}).items():
        shaped(logp.shape, **{name: x})
        extras[name] = jax.lax.stop_gradient(jnp.where(keep, array(x, name, "any").astype(dtype), 0))
    at = Tokens(logp, keep.astype(dtype), advantages, **given, kl_coef=kl_coef, extras=extras)
    counts = keep if advantages.ndim == 2 else at.lengths > 0
    advantages = jnp.where(counts, advantages.astype(dtype).reshape(counts.shape), 0)
    return at._replace(advantages=jax.lax.stop_gradient(advantages))


def clamped_log_ratio(logp: jax.Array, other: jax.Array) -> jax.Array:
    """Return ``logp - other`` clamped to ±20 nats, with gradient 0 beyond; every importance ratio uses it."""
    return jnp.clip(logp - other, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sampled(at: Tokens, owner: Any) -> jax.Array:
    """Return ``sampler_logp`` [B, T].

    Raises:
      ValueError: it is missing; the message names the piece that needs it.
    """
    if at.sampler_logp is None:
        raise ValueError(f"{type(owner).__name__} compares with the sampler: batch.sampler_logp must be given")
    return at.sampler_logp
