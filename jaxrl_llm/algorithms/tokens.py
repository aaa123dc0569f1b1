"""The arrays of one loss, checked and cleaned once; ratios, surrogates, corrections and filters read them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.contracts import flags, floating, numeric, ranked, shaped
from jaxrl_llm.types import PolicyBatch

LOG_RATIO_BOUND = 20.0
"""Every log ratio is clamped to this size, in nats, so that no ratio overflows."""
LOWEST_LOGP = -1e4
"""Log-probabilities of impossible tokens (-inf) become this number of nats: differences of them stay finite."""


class Tokens(NamedTuple):
    """What the pieces of an algorithm may read; [B, T] in one floating dtype, 0 where the mask is 0.

    What is the same for a whole sequence may be [B, 1]: advantages, log ratios, and the losses made of them.

    Attributes:
      logp: the live policy, nats, with gradient.
      mask: 1 where a token counts.
      advantages: [B, T] or [B, 1], without gradient.
      old_logp: the policy at the start of the batch's updates, nats.
      sampler_logp: what was really sampled from, nats; None where it is not known.
      ref_logp: the reference, nats; None where there is none.
      log_ratio: the algorithm's log importance ratio [B, T] or [B, 1], with gradient; None until its ratio has made it.
      kl_coef: scalar, the KL coefficient in force.
      extras: what else the pieces read, by name, without gradient.
    """

    logp: jax.Array
    mask: jax.Array
    advantages: jax.Array
    old_logp: jax.Array
    sampler_logp: jax.Array | None = None
    ref_logp: jax.Array | None = None
    log_ratio: jax.Array | None = None
    kl_coef: Any = 0.0
    extras: dict[str, jax.Array] | None = None

    @property
    def lengths(self) -> jax.Array:
        """Valid tokens of each sequence, [B, 1].

        Counted as integers, which compilers do without writing the mask down.
        """
        return jnp.sum(self.mask > 0, axis=1, keepdims=True, dtype=jnp.int32).astype(self.mask.dtype)

    def total(self, x: jax.Array) -> jax.Array:
        """Sum of x [B, T] over each sequence's valid tokens, [B, 1]."""
        return jnp.sum(x * self.mask, axis=1, keepdims=True)

    def mean(self, x: jax.Array) -> jax.Array:
        """Mean of x [B, T] over them, 0 where there is none; one number a sequence, [B, 1], is its own mean."""
        return x if x.shape[1] == 1 else self.total(x) / jnp.maximum(self.lengths, 1)


def clean_tokens(logp: Any, batch: PolicyBatch, kl_coef: Any) -> Tokens:
    """The arrays of a loss: checked, in one dtype, 0 at padding, -inf made finite, gradients stopped but for ``logp``.

    Raises:
      ValueError: a wrong rank, shape or dtype; the message names the argument.
    """
    logp = floating(logp, "logp")
    ranked(2, logp=logp)
    optional = {name: getattr(batch, name) for name in ("old_logp", "ref_logp", "sampler_logp")}
    keep = flags(batch.mask, logp.shape, "mask")
    shaped(logp.shape, **optional)
    advantages = numeric(batch.advantages, "advantages")
    if advantages.shape not in (logp.shape[:1], logp.shape):
        raise ValueError(f"advantages must be [B] or [B, T] of {logp.shape}, got shape {advantages.shape}")
    dtype = jnp.float64 if logp.dtype == jnp.float64 else jnp.float32

    def clean(x: Any, name: str) -> jax.Array:
        return jnp.where(keep, jnp.maximum(floating(x, name).astype(dtype), LOWEST_LOGP), 0)

    logp = clean(logp, "logp")
    given = {name: None if x is None else jax.lax.stop_gradient(clean(x, name)) for name, x in optional.items()}
    if given["old_logp"] is None:
        given["old_logp"] = jax.lax.stop_gradient(logp)
    extras = {}
    for name, x in (batch.extras or {}).items():
        shaped(logp.shape, **{name: x})
        extras[name] = jax.lax.stop_gradient(jnp.where(keep, numeric(x, name).astype(dtype), 0))
    at = Tokens(logp, keep.astype(dtype), advantages, **given, kl_coef=kl_coef, extras=extras)
    counts = keep if advantages.ndim == 2 else at.lengths > 0
    advantages = jnp.where(counts, advantages.astype(dtype).reshape(counts.shape), 0)
    return at._replace(advantages=jax.lax.stop_gradient(advantages))


def clamped_log_ratio(logp: jax.Array, other: jax.Array) -> jax.Array:
    """``logp - other`` within ±20 nats; its gradient is 0 beyond. Every importance ratio comes from here."""
    return jnp.clip(logp - other, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def log_mismatch(at: Tokens, owner: Any) -> jax.Array:
    """``old - sampler`` [B, T], clamped: the logarithm of w, the gap between training and inference.

    Raises:
      ValueError: the sampler's log-probabilities are missing; the message says which piece needs them.
    """
    return clamped_log_ratio(at.old_logp, sampled(at, owner))


def sampled(at: Tokens, owner: Any) -> jax.Array:
    """``sampler_logp`` [B, T].

    Raises:
      ValueError: it is missing; the message says which piece needs it.
    """
    if at.sampler_logp is None:
        raise ValueError(f"{type(owner).__name__} compares with the sampler: batch.sampler_logp must be given")
    return at.sampler_logp
