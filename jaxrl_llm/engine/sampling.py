"""Drawing of one token from logits: temperature, top-k, top-p, min-p, by one uniform number for each row; and detection
of completions that only repeat themselves. Truncation keeps the tokens with a probability of at least a threshold,
found by bisection over the bits of the probabilities, so the vocabulary is never sorted.
"""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.engine.settings import MAX_STOP_IDS, Repetition, Sampling

BLOCK = 128
"""Width of the lower level of the two-level inverse distribution function."""
WORD = 32
"""Tokens in one word of a kept set."""
BITS_OF_ONE = 0x3F800000
"""Bits of the float32 1.0; nonnegative floats have the order of their bits."""


class TracedSampling(NamedTuple):
    """``Sampling`` as arrays, for the compiled loop; its ``repetition.longest_period`` is the shape of ``Tail``.

    Attributes:
      temperature, top_k, top_p, min_p: those of ``Sampling``.
      stop_ids: int32[MAX_STOP_IDS]; unused ones are -1.
      times: int32[], repetitions that end a completion; 0 never.
      sure: float32[], the log-probability above which a token is confident, nats.
      tail: int32[], confident tokens in a row that end a completion; 0 never.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    stop_ids: Any
    times: Any
    sure: Any
    tail: Any


def to_traced(sampling: Sampling) -> TracedSampling:
    """Return the rules in traced form."""
    stops = np.full(MAX_STOP_IDS, -1, np.int32)
    stops[: len(sampling.stop_ids)] = sampling.stop_ids
    repetition = sampling.repetition or Repetition()
    return TracedSampling(
        np.float32(sampling.temperature),
        np.int32(sampling.top_k),
        np.float32(sampling.top_p),
        np.float32(sampling.min_p),
        stops,
        np.int32(repetition.times),
        confident_logp(repetition),
        np.int32(repetition.tail),
    )


class DrawOptions(NamedTuple):
    """Static options of a compiled loop: whether top-k, top-p and min-p are applied (``truncates``), and whether the
    tokens that they kept are returned (``kept``).
    """

    truncates: bool = False
    kept: bool = False


def draw_options(sampling: Sampling) -> DrawOptions:
    """Return the options that these rules need."""
    return DrawOptions(sampling.truncates, sampling.keep_mask)


class Draw(NamedTuple):
    """One token for each row; arrays of a chunk of C steps are [C, B, ...].

    Attributes:
      token: int32[B].
      logp: float32[B], nats, of the distribution that was sampled.
      extras: by name: ``entropy`` float32[B], nats, of the policy at the sampling temperature without truncation;
        ``policy_logp`` float32[B], nats, of the policy at temperature 1 without truncation, which costs nothing where
        that is sampled from; ``kept`` uint32[B, ceil(V / 32)], token v as bit v % 32 of word v // 32.
      real: bool[B], which rows count; None until the slots are known.
      repeats: bool[B], where the completion ends because it only repeats itself; None likewise.
    """

    token: jax.Array
    logp: jax.Array
    extras: dict[str, jax.Array]
    real: jax.Array | None = None
    repeats: jax.Array | None = None


def uniforms(seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """Return one number in [0, 1) for each row, a function of (seed uint32[B, 2], position int32[B]) only."""

    key = jax.random.key(0, impl="threefry2x32")
    words = jnp.concatenate([seeds, positions[:, None].astype(jnp.uint32)], axis=1)
    return jax.vmap(lambda row: jax.random.uniform(functools.reduce(jax.random.fold_in, row, key)))(words)


def draw(logits: jax.Array, u: jax.Array, rules: TracedSampling, options: DrawOptions = DrawOptions()) -> Draw:
    """Draw one token for each row of float32 logits [B, V] by the uniform numbers u [B]. At temperature 0 the token is
    the argmax and its log-probability 0, as in the distribution sampled. Two passes over the vocabulary, for the
    largest logit and for all sums: then only the block of the drawn token is read.
    """
    greedy = rules.temperature == 0
    blocks = to_blocks(logits, -jnp.inf)
    peaks = jnp.max(blocks, axis=-1)
    peak = jnp.max(peaks, axis=-1)
    scale = jnp.where(greedy, 1.0, rules.temperature)
    scaled = (blocks - peak[:, None, None]) / scale
    weights = kept_weights = jnp.exp(scaled)
    if options.truncates:
        # Computed once: the threshold is one of these very numbers.
        weights = jax.lax.optimization_barrier(weights)
        threshold = truncation_threshold(weights, rules)
        kept_weights = zero_below(weights, threshold)
    # An impossible token has logit -inf: it adds nothing to the entropy, and 0 * inf must not become NaN.
    moment = weights * jnp.maximum(scaled, jnp.finfo(jnp.float32).min)
    kept_sums, moments, *all_sums = block_sums(kept_weights, moment, *([weights] if options.truncates else []))
    total = jnp.sum(all_sums[0] if all_sums else kept_sums, axis=-1)
    upper = jnp.cumsum(kept_sums, axis=-1)
    mass = upper[:, -1]
    target = u * mass
    index = first_above(upper, target)  # the block that the number falls in, and the rest of the number there
    below = jnp.where(index > 0, jnp.take_along_axis(upper, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0], 0.0)
    rest = target - below
    index = jnp.where(greedy, jnp.argmax(peaks, axis=-1), index)
    near = take_block(blocks, index) - peak[:, None]
    near_kept = zero_below(take_block(weights, index), threshold) if options.truncates else jnp.exp(near / scale)
    inside = first_above(jnp.cumsum(near_kept, axis=-1), rest)
    inside = jnp.where(greedy, jnp.argmax(near, axis=-1), inside)
    logit = jnp.take_along_axis(near, inside[:, None], axis=-1)[:, 0]
    extras = {"entropy": jnp.log(total) - jnp.sum(moments, axis=-1) / total}
    policy_total = lambda: jnp.sum(block_sums(jnp.exp(blocks - peak[:, None, None]))[0], axis=-1)  # noqa: E731
    extras["policy_logp"] = logit - jnp.log(jax.lax.cond(scale == 1, lambda: total, policy_total))
    if options.kept:
        words = (kept_weights > 0).reshape(len(kept_weights), -1, WORD)
        bits = jnp.where(words, jnp.uint32(1) << jnp.arange(WORD, dtype=jnp.uint32), jnp.uint32(0))
        extras["kept"] = jnp.sum(bits, axis=-1, dtype=jnp.uint32)[:, : -(-logits.shape[1] // WORD)]
    logp = jnp.where(greedy, 0.0, logit / scale - jnp.log(mass))
    return Draw((index * BLOCK + inside).astype(jnp.int32), logp, extras)


def to_blocks(logits: jax.Array, padding: float) -> jax.Array:
    """Reshape [B, V] to [B, ceil(V / BLOCK), BLOCK]."""
    rows, vocab = logits.shape
    # On CPUs a concatenation is a copy, where a pad goes element by element.
    rest = [jnp.full((rows, -vocab % BLOCK), padding, logits.dtype)] if vocab % BLOCK else []
    return jnp.concatenate([logits, *rest], axis=1).reshape(rows, -1, BLOCK)


def block_sums(*arrays: jax.Array) -> list[jax.Array]:
    """Sum each array [B, n, BLOCK] over its blocks, [B, n], in one pass over all of them. In two steps, the first
    across lanes of 16, the compiler uses vector instructions and shares the passes' exponentials: 3 times as fast on
    CPUs as a sum for each.
    """
    parts = [x.reshape(*x.shape[:2], BLOCK // 16, 16) for x in arrays]
    add = lambda first, second: type(first)(map(operator.add, first, second))  # noqa: E731
    return [jnp.sum(lanes, axis=-1) for lanes in jax.lax.reduce(parts, [jnp.float32(0)] * len(parts), add, (2,))]


def zero_below(weights: jax.Array, least: jax.Array) -> jax.Array:
    """Return weights [B, ...] with those smaller than the threshold [B] set to 0."""
    return jnp.where(weights >= least.reshape(-1, *(1,) * (weights.ndim - 1)), weights, 0.0)


def truncation_threshold(weights: jax.Array, rules: TracedSampling) -> jax.Array:
    """Compute the threshold [B] of weights [B, n, BLOCK] with a maximum of 1 in each row: larger or equal ones are
    kept. It is the k-th largest; then the largest one that leaves the share ``top_p`` of the mass left by top-k; then
    ``min_p`` itself.
    """
    bits = jnp.zeros(weights.shape[0], jnp.int32)
    none = jnp.zeros(weights.shape[0], jnp.float32)
    bits = bisect_threshold(weights, none + rules.top_k.astype(jnp.float32), none, bits, rules.top_k > 0)
    mass = rules.top_p * count_and_mass(weights, bits)[1]
    bits = bisect_threshold(weights, none, mass, bits, rules.top_p < 1)
    return jnp.maximum(jax.lax.bitcast_convert_type(bits, jnp.float32), rules.min_p)


def bisect_threshold(weights: jax.Array, count: jax.Array, mass: jax.Array, low: jax.Array, on: jax.Array) -> jax.Array:
    """Find the bits, int32[B], of the largest threshold in [0, 1] that leaves at least this count and mass of weights.
    ``low``: bits of one that does, and the result where ``on`` is false. Sums are monotone in float32 too: the order of
    additions is fixed, and no addition of something positive makes one smaller.
    """

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        remaining = count_and_mass(weights, middle)
        enough = (remaining[0] >= count) & (remaining[1] >= mass)
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    rounds = jnp.where(on, BITS_OF_ONE.bit_length(), 0)
    return jax.lax.fori_loop(0, rounds, halve, (low, jnp.full_like(low, BITS_OF_ONE + 1)))[0]


def count_and_mass(weights: jax.Array, bits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return count and mass, [B] each, of the weights no smaller than the threshold with these bits. One pass serves
    both, since XLA writes out the terms of a single sum, which takes 7 times as long on CPUs.
    """
    inside = weights >= jax.lax.bitcast_convert_type(bits, jnp.float32)[:, None, None]
    count, mass = block_sums(jnp.where(inside, 1.0, 0.0), jnp.where(inside, weights, 0.0))
    return jnp.sum(count, axis=-1), jnp.sum(mass, axis=-1)


def take_block(blocks: jax.Array, index: jax.Array) -> jax.Array:
    """Take block index[b] of each row: [B, BLOCK]."""
    return jnp.take_along_axis(blocks, index[:, None, None], axis=1)[:, 0]


def first_above(running: jax.Array, target: jax.Array) -> jax.Array:
    """Return the first index where the running sum [B, n] exceeds target [B]; at most the last that adds anything."""
    last = jnp.sum(running < running[:, -1:], axis=-1)
    return jnp.minimum(jnp.sum(running <= target[:, None], axis=-1), last)


class Tail(NamedTuple):
    """State of the repetition rules for each row's sampled tokens; N = ``longest_period``.

    Attributes:
      recent: int32[B, N], the last N tokens, the newest first; -1 before the first token.
      runs: int32[B, N], at n - 1: number of the newest tokens in a row that equal the token n before each of them.
      confident: int32[B], number of the newest tokens in a row with more than the rule's probability.
    """

    recent: Any
    runs: Any
    confident: Any


def confident_logp(repetition: Repetition) -> np.float32:
    """Return the logarithm of the rule's probability, nats; -inf for 0."""
    with np.errstate(divide="ignore"):
        return np.log(np.float32(repetition.probability))


def empty_tail(rows: int, repetition: Repetition | None) -> Tail:
    """Return the state (NumPy) of B rows before the first token."""
    shape = (rows, repetition.longest_period if repetition else 0)
    return Tail(np.full(shape, -1, np.int32), np.zeros(shape, np.int32), np.zeros(rows, np.int32))


def extend_tail(tail: Tail, tokens: jax.Array, logp: jax.Array, rules: TracedSampling) -> tuple[Tail, jax.Array]:
    """Return the state after one more token int32[B] of log-probability float32[B] in each row, and bool[B], where to
    stop. The log-probability is the policy's own, since greedy sampling samples every token with certainty. The last n
    tokens repeat ``times`` times in a row exactly if each of the last (times - 1) n tokens equals the one n before
    it.
    """
    runs = jnp.where(tail.recent == tokens[:, None], tail.runs + 1, 0)
    recent = jnp.concatenate([tokens[:, None], tail.recent], axis=1)[:, : tail.recent.shape[1]]
    confident = jnp.where(logp > rules.sure, tail.confident + 1, 0)
    periods = jnp.arange(1, runs.shape[1] + 1, dtype=jnp.int32)[None]
    repeats = (rules.times > 0) & jnp.any(runs >= (rules.times - 1) * periods, axis=1)
    return Tail(recent, runs, confident), repeats | ((rules.tail > 0) & (confident >= rules.tail))


def tail_after(tokens: np.ndarray, logps: np.ndarray, repetition: Repetition | None) -> Tail:
    """Return the state (NumPy, without the axis B) after tokens int[t] of log-probabilities float[t], to resume a
    completion; equal to feeding them to ``extend_tail`` one by one.
    """
    period = repetition.longest_period if repetition else 0
    tokens = np.asarray(tokens, np.int32)
    recent = np.full(period, -1, np.int32)
    recent[: len(tokens)] = tokens[::-1][:period]
    same = [tokens[n:] == tokens[: len(tokens) - n] for n in range(1, min(period, len(tokens)) + 1)]
    runs = np.zeros(period, np.int32)
    runs[: len(same)] = [trailing_run(equal) for equal in same]
    confident = trailing_run(np.asarray(logps, np.float32) > confident_logp(repetition or Repetition()))
    return Tail(recent, runs, np.int32(confident))


def trailing_run(flags: np.ndarray) -> int:
    """Count the last values of bool[n] in a row that are true."""
    return len(flags) if flags.all() else int(np.argmin(flags[::-1]))
