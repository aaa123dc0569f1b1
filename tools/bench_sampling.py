"""What it takes to draw one token for each row from logits, on this machine's default device.

    python tools/bench_sampling.py [--rows 64] [--vocab 8192,49152] [--repeats 30]

Prints one JSON line for each way and vocabulary: the median and least milliseconds of a call. Beside the sampler's own
draws stand the ways that it does not take: Gumbel noise over the vocabulary, one long running sum, and top-p by
sorting.
"""

import dataclasses
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxrl_llm.engine.sampling import BLOCK, as_blocks, as_rules, asked, block_sums, draw
from jaxrl_llm.rollout import Sampling


@dataclasses.dataclass(frozen=True)
class Options:
    """The work.

    Attributes:
      rows: B.
      vocab: V, several separated by commas.
      repeats: timed calls after one that compiles.
    """

    rows: int = 64
    vocab: str = "8192,49152"
    repeats: int = 30


OURS = {
    "plain": Sampling(),
    "temperature": Sampling(0.7),
    "greedy": Sampling(0.0),
    "top_k": Sampling(top_k=50),
    "top_p": Sampling(top_p=0.9),
    "min_p": Sampling(min_p=0.05),
    "top_k, top_p": Sampling(top_k=50, top_p=0.9),
    "top_p, kept": Sampling(top_p=0.9, keep_mask=True),
}


def gumbel(logits: jax.Array, u: jax.Array) -> jax.Array:
    """The argmax of logits and noise: a random number for every token of the vocabulary."""
    key = jax.random.key(jax.lax.bitcast_convert_type(u[0], jnp.uint32), impl="threefry2x32")
    return jnp.argmax(logits + jax.random.gumbel(key, logits.shape), axis=-1)


def flat_cdf(logits: jax.Array, u: jax.Array) -> jax.Array:
    """One running sum over the vocabulary."""
    running = jnp.cumsum(jax.nn.softmax(logits), axis=-1)
    return jnp.sum(running <= (u * running[:, -1])[:, None], axis=-1)


def inverse_cdf(weights: jax.Array, u: jax.Array) -> jax.Array:
    """The token at which the running sum of weights passes ``u`` of its total: a sum over blocks, and one inside."""
    blocks = as_blocks(weights, 0.0)
    upper = jnp.cumsum(block_sums(blocks)[0], axis=-1)
    target = u * upper[:, -1]
    index = jnp.sum(upper <= target[:, None], axis=-1)
    below = jnp.take_along_axis(upper, jnp.maximum(index - 1, 0)[:, None], axis=1)[:, 0]
    rest = target - jnp.where(index > 0, below, 0.0)
    running = jnp.cumsum(jnp.take_along_axis(blocks, index[:, None, None], axis=1)[:, 0], axis=-1)
    return index * BLOCK + jnp.sum(running <= rest[:, None], axis=-1)


def two_level_cdf(logits: jax.Array, u: jax.Array) -> jax.Array:
    """Token only, without log-probability and entropy."""
    return inverse_cdf(jax.nn.softmax(logits), u)


def sorted_top_p(logits: jax.Array, u: jax.Array) -> jax.Array:
    """Top-p 0.9 by sorting the vocabulary."""
    probabilities = jax.nn.softmax(logits)
    ordered = jnp.sort(probabilities, axis=-1, descending=True)
    inside = jnp.cumsum(ordered, axis=-1) - ordered < 0.9
    least = jnp.min(jnp.where(inside, ordered, jnp.inf), axis=-1, keepdims=True)
    return inverse_cdf(jnp.where(probabilities >= least, probabilities, 0.0), u)


OTHERS = {"gumbel": gumbel, "flat CDF": flat_cdf, "two-level CDF": two_level_cdf, "top_p by sort": sorted_top_p}


def milliseconds(call: Callable[..., Any], arguments: tuple[Any, ...], repeats: int) -> dict[str, float]:
    """Of a call, after one that compiles."""
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(1e3 * (time.perf_counter() - began))
    return {"median_ms": round(statistics.median(times), 3), "least_ms": round(min(times), 3)}


def rows(options: Options) -> Iterator[dict[str, Any]]:
    """One for each way and vocabulary."""
    for vocab in map(int, options.vocab.split(",")):
        random = np.random.default_rng(0)
        logits = jnp.asarray(random.normal(0, 2, (options.rows, vocab)), jnp.float32)
        u = jnp.asarray(random.random(options.rows), jnp.float32)
        ways = {name: (jax.jit(way), (logits, u)) for name, way in OTHERS.items()}
        for name, sampling in OURS.items():
            ours = jax.jit(functools.partial(draw, asked=asked(sampling)))
            ways[f"draw: {name}"] = ours, (logits, u, jax.tree.map(jnp.asarray, as_rules(sampling)))
        for name, (call, arguments) in ways.items():
            row = {"way": name, "rows": options.rows, "vocab": vocab, "device": jax.devices()[0].device_kind}
            yield row | milliseconds(call, arguments, options.repeats)


if __name__ == "__main__":
    for row in rows(tyro.cli(Options, description=__doc__)):
        print(json.dumps(row), flush=True)
