"""The arrays of one loss, checked and cleaned once, for ratios, surrogates, corrections and filters."""

import typing
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxrl_llm.errors import InputError
from jaxrl_llm.system.setting import Range, annotations, check_fields
from jaxrl_llm.types import PolicyBatch

LOG_RATIO_BOUND = 20.0
"""Bound on the size of every log ratio, in nats, so that no ratio overflows."""
LOWEST_LOGP = -1e4
"""Lower bound on log-probabilities, in nats: differences stay finite where a token is impossible (-inf)."""
FloatPG = Annotated[ArrayLike, "P G"]
"""A NumPy or JAX array of numbers for each completion of each prompt; [P, G, n] for an estimator of several rewards."""
FloatBT = Annotated[ArrayLike, "B T"]
"""An array of numbers for each token of each completion."""
FloatB = Annotated[ArrayLike, "B"]
"""An array of numbers for each completion, or pair."""


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
        """Return the number of valid tokens of each sequence, [B, 1]. It is counted in integers, which compilers do
        without materialising the mask.
        """
        return jnp.sum(self.mask > 0, axis=1, keepdims=True, dtype=jnp.int32).astype(self.mask.dtype)

    def total(self, x: jax.Array) -> jax.Array:
        """Sum x [B, T] over each sequence's valid tokens, [B, 1]."""
        return jnp.sum(x * self.mask, axis=1, keepdims=True)

    def mean(self, x: jax.Array) -> jax.Array:
        """Average x [B, T] over each sequence's valid tokens, [B, 1], 0 without any; return x [B, 1] unchanged."""
        return x if x.shape[1] == 1 else self.total(x) / jnp.maximum(self.lengths, 1)


def clean_tokens(logp: FloatBT, batch: PolicyBatch, kl_coef: ArrayLike) -> Tokens:
    """Check and clean the arrays of a loss: one dtype, 0 at padding, finite, gradient only through ``logp``."""
    logp = as_array(logp, "logp")
    check_rank(2, logp=logp)
    optional = {name: getattr(batch, name) for name in ("old_logp", "ref_logp", "sampler_logp")}
    keep = as_mask(batch.mask, logp.shape, "mask")
    check_shape(logp.shape, **optional)
    advantages = as_array(batch.advantages, "advantages", "any")
    if advantages.shape not in (logp.shape[:1], logp.shape):
        raise ValueError(f"advantages must be [B] or [B, T] of {logp.shape}, got shape {advantages.shape}")
    dtype = jnp.float64 if logp.dtype == jnp.float64 else jnp.float32

    def clean(x: Any, name: str) -> jax.Array:
        return jnp.where(keep, jnp.maximum(as_array(x, name).astype(dtype), LOWEST_LOGP), 0)

    logp = clean(logp, "logp")
    logps: dict[str, Any] = {
        name: None if x is None else jax.lax.stop_gradient(clean(x, name)) for name, x in optional.items()
    }
    if logps["old_logp"] is None:
        logps["old_logp"] = jax.lax.stop_gradient(logp)
    extras = {}
    for name, x in (batch.extras or {}).items():
        check_shape(logp.shape, **{name: x})
        extras[name] = jax.lax.stop_gradient(jnp.where(keep, as_array(x, name, "any").astype(dtype), 0))
    at = Tokens(logp, keep.astype(dtype), advantages, **logps, kl_coef=kl_coef, extras=extras)
    counts = keep if advantages.ndim == 2 else at.lengths > 0
    advantages = jnp.where(counts, advantages.astype(dtype).reshape(counts.shape), 0)
    return at._replace(advantages=jax.lax.stop_gradient(advantages))


def clamp_log_ratio(logp: jax.Array, other: jax.Array) -> jax.Array:
    """Return ``logp - other`` clamped to ±20 nats, with gradient 0 beyond; every importance ratio uses it."""
    return jnp.clip(logp - other, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def mu_logp(at: Tokens, owner: Any) -> jax.Array:
    """Return ``sampler_logp`` [B, T]; ValueError names ``owner``, the piece that needs it, where it is missing."""
    if at.sampler_logp is None:
        raise ValueError(f"{type(owner).__name__} compares with the sampler: batch.sampler_logp must be given")
    return at.sampler_logp


ABOVE_0 = Range("(0, inf]")
AT_LEAST_0 = Range("[0, inf]")
FINITE = Range("[-inf, inf)", words="finite")


def check_rank(rank: int, **arrays: Any) -> None:
    """Refuse None and any array without exactly ``rank`` axes."""
    for name, x in arrays.items():
        if x is None:
            raise ValueError(f"{name} must be given")
        if np.ndim(x) != rank:
            raise ValueError(f"{name} must have {rank} axes, got shape {np.shape(x)}")


def check_shape(shape: tuple[int, ...], **arrays: Any) -> None:
    """Refuse an array of another shape; None is skipped."""
    for name, x in arrays.items():
        if x is not None and np.shape(x) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {np.shape(x)}")


def as_array(x: Any, name: str, kind: str = "floating point") -> jax.Array:
    """Return ``x`` as an array: "floating point", "integers", or "any" (integers and bools become float32)."""
    if x is None:
        raise ValueError(f"{name} must be given")
    try:
        x = jnp.asarray(x)
    except TypeError as error:
        raise ValueError(f"{name} must be an array of numbers, got {type(x).__name__}") from error
    if kind == "any" and (x.dtype == bool or jnp.issubdtype(x.dtype, jnp.integer)):
        return x.astype(jnp.float32)
    kind = "floating point" if kind == "any" else kind
    if not jnp.issubdtype(x.dtype, jnp.integer if kind == "integers" else jnp.floating):
        raise ValueError(f"{name} must be {kind}, got {x.dtype}")
    return x


def as_mask(x: Any, shape: tuple[int, ...], name: str) -> jax.Array:
    """Return ``x`` as bool of this shape, True where it is not 0: a mask, or the ends of steps."""
    as_array(x, name, "any")
    check_shape(shape, **{name: x})
    return jnp.asarray(x).astype(bool)


def divisor(number: Any, counted: jax.Array, name: str, dtype: Any) -> jax.Array:
    """Return the divisor of a loss, at least 1: ``number``, or the sum of ``counted`` without one."""
    check_rank(0, **{name: 0 if number is None else number})
    return jnp.maximum(jnp.sum(counted) if number is None else number, 1).astype(dtype)


def check_self(piece: Any) -> None:
    """Refuse a value unless its fields lie in the ranges, and among the literals, of their annotations. A class of
    values takes it as its ``__post_init__``.
    """
    owner = type(piece).__name__
    try:
        check_fields(piece, f"{owner}.")
    except InputError as error:
        raise ValueError(*error.args) from None
    for name, (hint, _) in annotations(type(piece)).items():
        if typing.get_origin(hint) is typing.Literal and getattr(piece, name) not in typing.get_args(hint):
            allowed = " or ".join(typing.get_args(hint))
            raise ValueError(f"{owner}.{name} must be {allowed}, got {getattr(piece, name)!r}")


def check_order(owner: Any, low: str, high: str) -> None:
    """Refuse a value unless ``0 <= low < high`` holds for the fields of these names."""
    least, most = getattr(owner, low), getattr(owner, high)
    if not 0 <= least < most:
        raise ValueError(f"{type(owner).__name__} needs 0 <= {low} < {high}, got {low}={least} and {high}={most}")
