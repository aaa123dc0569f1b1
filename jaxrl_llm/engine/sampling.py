"""How one token is drawn from logits: temperature, top-k, top-p, min-p, by one uniform number for each row.

Everything that truncation keeps is a set {tokens whose probability is at least a threshold}. The threshold is found by
bisection over the bits of the probabilities, so the vocabulary is never sorted.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.engine.settings import MAX_STOP_IDS, Sampling

BLOCK = 128
"""Width of the lower level of the two-level inverse distribution function."""
WORD = 32
"""Tokens in one word of a kept set."""
BITS_OF_ONE = 0x3F800000
"""Of the float32 1.0; floats that are not negative order as their bits do."""


class DrawRule(NamedTuple):
    """``Sampling`` as arrays, for the compiled loop."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    stop_ids: np.ndarray
    min_p: np.ndarray


def as_rule(sampling: Sampling) -> DrawRule:
    """The traced form; unused stop ids are -1."""
    stops = np.full(MAX_STOP_IDS, -1, np.int32)
    stops[: len(sampling.stop_ids)] = sampling.stop_ids
    return DrawRule(
        np.float32(sampling.temperature),
        np.int32(sampling.top_k),
        np.float32(sampling.top_p),
        stops,
        np.float32(sampling.min_p),
    )


class Asked(NamedTuple):
    """What a compiled loop computes beside token, ``logp`` and entropy; static.

    Attributes:
      truncates: whether top-k, top-p and min-p are looked at.
      policy_logp: the token's log-probability under the policy at temperature 1 with nothing cut off.
      kept: the tokens that truncation kept.
    """

    truncates: bool = False
    policy_logp: bool = False
    kept: bool = False


def asked(sampling: Sampling) -> Asked:
    """What these rules need.

    The policy's own log-probability always belongs to it: a schedule of temperatures that begins at 1, where it equals
    ``logp`` and costs nothing, then compiles nothing new.
    """
    return Asked(sampling.truncates, True, sampling.keep_mask)


class Draw(NamedTuple):
    """One token for each row.

    Attributes:
      token: int32[B].
      logp: float32[B], nats, of the distribution that was sampled.
      extras: by name: ``entropy`` float32[B], nats, of the policy at the sampling temperature with nothing cut off;
        ``policy_logp`` float32[B], nats; ``kept`` uint32[B, ceil(V / 32)], token v as bit v % 32 of word v // 32.
    """

    token: jax.Array
    logp: jax.Array
    extras: dict[str, jax.Array]


def uniforms(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """One number in [0, 1) for each row, a function of (seed uint32[B, 2], position int32[B]) only."""

    def one(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.key(0, impl="threefry2x32")
        for word in (seed[0], seed[1], position.astype(jnp.uint32)):
            key = jax.random.fold_in(key, word)
        return jax.random.uniform(key)

    return jax.vmap(one)(seeds, positions)


def draw(logits: jax.Array, u: jax.Array, rule: DrawRule, asked: Asked = Asked()) -> Draw:
    """Draw one token for each row of float32 logits [B, V] by the uniform numbers u [B].

    At temperature 0 the token is the argmax and its log-probability 0, for that is the distribution sampled. Two passes
    over the vocabulary, one for the largest logit and one for all sums: only the block of the drawn token is looked at
    closer.
    """
    greedy = rule.temperature == 0
    blocks = as_blocks(logits, -jnp.inf)
    peaks = jnp.max(blocks, axis=-1)
    peak = jnp.max(peaks, axis=-1)
    scale = jnp.where(greedy, 1.0, rule.temperature)
    scaled = (blocks - peak[:, None, None]) / scale
    weights = kept = jnp.exp(scaled)
    if asked.truncates:
        # Computed once: the threshold is one of these very numbers.
        weights = jax.lax.optimization_barrier(weights)
        least = least_kept(weights, rule)
        kept = _at_least(weights, least)
    # An impossible token has logit -inf: it adds nothing to the entropy, and 0 * inf must not become NaN.
    moment = weights * jnp.maximum(scaled, jnp.finfo(jnp.float32).min)
    kept_sums, moments, *whole = block_sums(kept, moment, *([weights] if asked.truncates else []))
    total = jnp.sum(whole[0] if whole else kept_sums, axis=-1)
    index, rest, mass = _enter(kept_sums, u)
    index = jnp.where(greedy, jnp.argmax(peaks, axis=-1), index)
    near = _take(blocks, index) - peak[:, None]
    near_kept = _at_least(_take(weights, index), least) if asked.truncates else jnp.exp(near / scale)
    inside = _first_above(jnp.cumsum(near_kept, axis=-1), rest)
    inside = jnp.where(greedy, jnp.argmax(near, axis=-1), inside)
    found = jnp.take_along_axis(near, inside[:, None], axis=-1)[:, 0]
    extras = {"entropy": jnp.log(total) - jnp.sum(moments, axis=-1) / total}
    if asked.policy_logp:
        extras["policy_logp"] = found - jnp.log(_policy_mass(blocks, peak, total, scale))
    if asked.kept:
        extras["kept"] = pack_bits(kept > 0)[:, : -(-logits.shape[1] // WORD)]
    logp = jnp.where(greedy, 0.0, found / scale - jnp.log(mass))
    return Draw((index * BLOCK + inside).astype(jnp.int32), logp, extras)


def _policy_mass(blocks: jax.Array, peak: jax.Array, total: jax.Array, scale: jax.Array) -> jax.Array:
    """Sum of exp(logit - peak) over a row of blocks; ``total`` is it already where nothing was scaled."""

    def anew() -> jax.Array:
        return jnp.sum(block_sums(jnp.exp(blocks - peak[:, None, None]))[0], axis=-1)

    return jax.lax.cond(scale == 1, lambda: total, anew)


def as_blocks(values: jax.Array, padding: float) -> jax.Array:
    """[B, V] as [B, ceil(V / BLOCK), BLOCK]."""
    rows, vocab = values.shape
    # On CPUs a concatenation is a copy, where a pad goes element by element.
    rest = [jnp.full((rows, -vocab % BLOCK), padding, values.dtype)] if vocab % BLOCK else []
    return jnp.concatenate([values, *rest], axis=1).reshape(rows, -1, BLOCK)


def block_sums(*arrays: jax.Array) -> list[jax.Array]:
    """Sums of each array [B, n, BLOCK] over its blocks, [B, n], in one pass over all of them.

    Reducing in two steps, the first across lanes of 16, lets the compiler use vector instructions and share the passes'
    exponentials: 3 times as fast on CPUs as a sum for each.
    """
    parts = [x.reshape(*x.shape[:2], BLOCK // 16, 16) for x in arrays]

    def add(left: Any, right: Any) -> Any:
        return type(left)(a + b for a, b in zip(left, right, strict=True))

    return [jnp.sum(lanes, axis=-1) for lanes in jax.lax.reduce(parts, [jnp.float32(0)] * len(parts), add, (2,))]


def _at_least(weights: jax.Array, least: jax.Array) -> jax.Array:
    """Weights [B, ...] with what is smaller than the threshold [B] set to 0."""
    return jnp.where(weights >= least.reshape(-1, *(1,) * (weights.ndim - 1)), weights, 0.0)


def least_kept(weights: jax.Array, rule: DrawRule) -> jax.Array:
    """The threshold [B] of weights [B, n, BLOCK], of which the largest of each row is 1: kept is what is at least as
    large.

    The k-th largest; then the largest one that leaves the share ``top_p`` of what top-k left; then ``min_p`` itself.
    """
    least = jnp.zeros(weights.shape[0], jnp.int32)
    none = jnp.zeros(weights.shape[0], jnp.float32)
    least = _bisect(weights, none + rule.top_k.astype(jnp.float32), none, least, rule.top_k > 0)
    mass = rule.top_p * _count_and_mass(weights, least)[1]
    least = _bisect(weights, none, mass, least, rule.top_p < 1)
    return jnp.maximum(jax.lax.bitcast_convert_type(least, jnp.float32), rule.min_p)


def _bisect(weights: jax.Array, count: jax.Array, mass: jax.Array, low: jax.Array, on: jax.Array) -> jax.Array:
    """Bits int32[B] of the largest threshold in [0, 1] that leaves at least this count and this mass of weights.

    ``low`` are bits of one that does, and the answer where ``on`` is false. Sums are monotone in float32 too: the order
    of additions is fixed, and no addition of something positive makes one smaller.
    """

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        left = _count_and_mass(weights, middle)
        enough = (left[0] >= count) & (left[1] >= mass)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    rounds = jnp.where(on, BITS_OF_ONE.bit_length(), 0)
    return jax.lax.fori_loop(0, rounds, halve, (low, jnp.full_like(low, BITS_OF_ONE + 1)))[0]


def _count_and_mass(weights: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the weights no smaller than the threshold with these bits, [B] each. Both in one pass: XLA writes out the
    terms of a sum that stands alone, which takes 7 times as long on CPUs."""
    inside = weights >= jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None, None]
    count, mass = block_sums(jnp.where(inside, 1.0, 0.0), jnp.where(inside, weights, 0.0))
    return jnp.sum(count, axis=-1), jnp.sum(mass, axis=-1)


def pack_bits(kept: jax.Array) -> jax.Array:
    """Kept sets bool[B, n, BLOCK] as uint32[B, n * BLOCK / 32]."""
    words = kept.reshape(kept.shape[0], -1, WORD)
    places = jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32)
    return jnp.sum(jnp.where(words, places, jnp.uint32(0)), axis=-1, dtype=jnp.uint32)


def inverse_cdf(weights: jax.Array, u: jax.Array) -> jax.Array:
    """The token at which the running sum of weights [B, V] (of any total) passes ``u * total``: int32[B].

    Two levels, so that the long running sum is over V / BLOCK blocks only. A token of weight 0 is never chosen.
    """
    blocks = as_blocks(weights, 0.0)
    index, rest, _ = _enter(block_sums(blocks)[0], u)
    return (index * BLOCK + _first_above(jnp.cumsum(_take(blocks, index), axis=-1), rest)).astype(jnp.int32)


def _enter(sums: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For sums of blocks [B, n]: the block that ``u * total`` falls in, what is left of it there, and the total."""
    upper = jnp.cumsum(sums, axis=-1)
    target = u * upper[:, -1]
    index = _first_above(upper, target)
    below = jnp.where(index > 0, jnp.take_along_axis(upper, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    return index, target - below, upper[:, -1]


def _take(blocks: jax.Array, index: jax.Array) -> jax.Array:
    """Block index[b] of each row: [B, BLOCK]."""
    return jnp.take_along_axis(blocks, index[:, None, None], axis=1)[:, 0]


def _first_above(running: jax.Array, target: jax.Array) -> jax.Array:
    """First index where the running sum [B, n] exceeds target [B]; at most the last one that added anything."""
    last = jnp.sum(running < running[:, -1:], axis=-1)
    return jnp.minimum(jnp.sum(running <= target[:, None], axis=-1), last)
