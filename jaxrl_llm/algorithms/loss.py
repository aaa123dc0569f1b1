"""The policy loss: an ``Algorithm`` is a value, ``policy_loss`` a pure function of it and of arrays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import reduce as reducers
from jaxrl_llm.types import PolicyBatch


@dataclasses.dataclass(frozen=True)
class Algorithm:
    """What the loss computes: ``reduce(surrogate(ratio, advantage)) + kl_coef * reduce(kl) - entropy_coef * reduce(H)``.

    Attributes:
      advantage: rewards [P, G] -> advantages.
      ratio: log importance ratios [B, T].
      surrogate: per-token loss [B, T].
      reduce: to a scalar, by global counts.
      kl: estimator of the KL to the reference, added in the loss; None for no KL term.
      kl_coef: its coefficient; at 0 no reference is needed.
      entropy_coef: coefficient of the entropy bonus.
    """

    # Any callable value of the right shape will do: the fields are open to pieces written elsewhere.
    advantage: Any
    ratio: Any
    surrogate: Any
    reduce: Any
    kl: Any = None
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    def __post_init__(self):
        if self.kl_coef and self.kl is None:
            raise ValueError(f"kl_coef={self.kl_coef} needs an estimator: set kl, for example kl.K3()")
        if self.ratio.level == "sequence" and not isinstance(self.reduce, reducers.SequenceMean):
            raise ValueError("a sequence ratio needs SequenceMean: any other reducer weights GSPO's sequences by length")

    @property
    def needs_reference(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl is not None and self.kl_coef != 0


def policy_loss(
    algorithm: Algorithm,
    logp: Any,
    batch: PolicyBatch,
    token_count: Any = None,
    sequence_count: Any = None,
    entropy: Any = None,
    kl_coef: Any = None,
    entropy_coef: Any = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Scalar loss to minimise, and its metrics.

    Args:
      algorithm: static.
      logp: live log-probabilities float[B, T], nats, with gradient. Padding may hold anything and gets gradient 0.
      batch: advantages, mask and the other log-probabilities.
      token_count: valid tokens of the whole optimiser step; None for this batch's own.
      sequence_count: rows with a valid token of the whole optimiser step; None for this batch's own.
      entropy: float[B, T], nats, with gradient; needed iff the entropy coefficient is not 0.
      kl_coef: overrides the algorithm's; may be traced.
      entropy_coef: likewise.

    Returns:
      The loss and a dict of scalars, divided by the same counts: adding them over microbatches gives the step's value.

    Raises:
      ValueError: something that the algorithm needs is None; the message names it.
    """
    keep = jnp.asarray(batch.mask).astype(bool)
    weight = keep.astype(jnp.float64 if jnp.asarray(logp).dtype == jnp.float64 else jnp.float32)
    clean = lambda x: jnp.where(keep, jnp.asarray(x, weight.dtype), 0)
    logp = clean(logp)
    old_logp = jax.lax.stop_gradient(logp if batch.old_logp is None else clean(batch.old_logp))
    advantages = jnp.asarray(batch.advantages, weight.dtype)
    advantages = advantages[:, None] if advantages.ndim == 1 else advantages
    advantages = jax.lax.stop_gradient(clean(jnp.broadcast_to(advantages, logp.shape)))
    tokens = _count(token_count, keep, weight.dtype)
    rows = _count(sequence_count, jnp.any(keep, axis=1), weight.dtype)
    log_ratio = algorithm.ratio(logp, old_logp, weight)
    loss = algorithm.reduce(algorithm.surrogate(log_ratio, advantages, logp), weight, tokens, rows)
    ratio = jnp.exp(log_ratio)
    low, high = algorithm.surrogate.clipped(ratio, advantages)
    per_token = {"ratio": ratio, "clip_fraction/low": low, "clip_fraction/high": high}

    kl_coef = algorithm.kl_coef if kl_coef is None else kl_coef
    if algorithm.kl is not None and _present(kl_coef):
        if batch.ref_logp is None:
            raise ValueError("this algorithm has a KL term: batch.ref_logp must be given")
        kl = algorithm.kl(logp, jax.lax.stop_gradient(clean(batch.ref_logp)))
        loss += kl_coef * algorithm.reduce(kl, weight, tokens, rows)
        per_token["kl"] = kl
    if entropy is not None:
        per_token["entropy"] = clean(entropy)
    entropy_coef = algorithm.entropy_coef if entropy_coef is None else entropy_coef
    if _present(entropy_coef):
        if entropy is None:
            raise ValueError("the entropy coefficient is not 0: entropy must be given")
        loss -= entropy_coef * algorithm.reduce(per_token["entropy"], weight, tokens, rows)
    means = {name: jnp.sum(x.astype(weight.dtype) * weight) / tokens for name, x in per_token.items()}
    return loss, jax.lax.stop_gradient({"loss": loss} | means)


def _present(coefficient: Any) -> bool:
    """Whether a term is computed: always where its coefficient is an array, which may be traced."""
    return isinstance(coefficient, jax.Array) or coefficient != 0


def _count(given: Any, counted: jax.Array, dtype: Any) -> jax.Array:
    """The count that was given, or that of what is True; at least 1, so that nothing is divided by 0."""
    return jnp.maximum(jnp.sum(counted) if given is None else given, 1).astype(dtype)
