"""How one token is drawn from logits: temperature, top-k, top-p, by one uniform number for each row."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.rollout.settings import MAX_STOP_IDS, Sampling

BLOCK = 128
"""Width of the lower level of the two-level inverse distribution function."""


class Rule(NamedTuple):
    """``Sampling`` as arrays, for the compiled loop."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    stop_ids: np.ndarray


def as_rule(sampling: Sampling) -> Rule:
    """The traced form; unused stop ids are -1."""
    stops = np.full(MAX_STOP_IDS, -1, np.int32)
    stops[: len(sampling.stop_ids)] = sampling.stop_ids
    return Rule(
        np.float32(sampling.temperature),
        np.int32(sampling.top_k),
        np.float32(sampling.top_p),
        stops,
    )


class Draw(NamedTuple):
    """One token for each row [B]: the token, its log-probability where it was sampled, the policy's entropy (nats)."""

    token: jax.Array
    logp: jax.Array
    entropy: jax.Array


def uniforms(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """One number in [0, 1) for each row, a function of (seed uint32[B, 2], position int32[B]) only."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(0, impl="threefry2x32")
        for word in (seed[0], seed[1], position.astype(jnp.uint32)):
            key = jax.random.fold_in(key, word)
        return jax.random.uniform(key)

    return jax.vmap(one)(seeds, positions)


def draw(logits: jax.Array, u: jax.Array, rule: Rule, truncate: bool) -> Draw:
    """Draw one token for each row of float32 logits [B, V] by the uniform numbers u [B].

    ``truncate`` is static: the vocabulary is sorted only where top-k or top-p ask for it. At temperature 0 the token is
    the argmax and its log-probability 0, for that is the distribution sampled.
    """
    greedy = rule.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, rule.temperature)
    log_z = jax.nn.logsumexp(scaled, axis=-1, keepdims=True)
    probabilities = jnp.exp(scaled - log_z)
    entropy = log_z[:, 0] - jnp.sum(probabilities * jnp.maximum(scaled, jnp.finfo(jnp.float32).min), axis=-1)
    kept = truncated(probabilities, rule.top_k, rule.top_p) if truncate else probabilities
    token = jnp.where(greedy, jnp.argmax(logits, axis=-1), inverse_cdf(kept, u)).astype(jnp.int32)
    logp = jnp.take_along_axis(scaled - log_z, token[:, None], axis=-1)[:, 0]
    if truncate:
        logp = logp - jnp.log(jnp.sum(kept, axis=-1))
    return Draw(token, jnp.where(greedy, 0.0, logp), entropy)


def truncated(probabilities: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """Probabilities [B, V] with everything outside top-k, then top-p of what is left, set to 0; not renormalised.

    Tokens as likely as the last one kept are kept too.
    """
    ordered = jnp.sort(probabilities, axis=-1, descending=True)
    ranks = jnp.arange(ordered.shape[-1])[None]
    ordered = jnp.where((top_k == 0) | (ranks < top_k), ordered, 0.0)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    inside = (before < top_p * jnp.sum(ordered, axis=-1, keepdims=True)) & (ordered > 0)
    least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(probabilities >= least, probabilities, 0.0)


def inverse_cdf(probabilities: jax.Array, u: jax.Array) -> jax.Array:
    """The token at which the running sum of probabilities [B, V] (of any total) passes ``u * total``: int32[B].

    Two levels, so that the long running sum is over V / 128 blocks only. A token of probability 0 is never chosen.
    """
    rows, vocab = probabilities.shape
    blocks = jnp.pad(probabilities, ((0, 0), (0, -vocab % BLOCK))).reshape(rows, -1, BLOCK)
    upper = jnp.cumsum(jnp.sum(blocks, axis=-1), axis=-1)
    target = u * upper[:, -1]
    index = _first_above(upper, target)
    below = jnp.where(index > 0, jnp.take_along_axis(upper, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    lower = jnp.cumsum(jnp.take_along_axis(blocks, index[:, None, None], axis=1)[:, 0], axis=-1)
    return (index * BLOCK + _first_above(lower, target - below)).astype(jnp.int32)


def _first_above(running: jax.Array, target: jax.Array) -> jax.Array:
    """First index where the running sum [B, n] exceeds target [B]; at most the last one that added anything."""
    last = jnp.sum(running < running[:, -1:], axis=-1)
    return jnp.minimum(jnp.sum(running <= target[:, None], axis=-1), last)
