"""How fast the sampler is, on this machine's default device.

    python tools/bench_rollout.py [--model 7m] [--dtype float32] [--lengths equal] [--slots 64] [--group 8]
    [--repeats 3]

Prints one JSON line. Every request has its length forced by a limit of its own, so that all samplers do the same work:
``equal`` gives each the longest one, ``long`` a long tail whose mean is 0.3 of it. There are four requests for each
slot, in groups that share a prompt. ``roofline`` is the share that the least possible time has of the time taken: the
larger of the bytes read (the weights at each of the fewest steps that will do, and the cache of the live rows) over the
memory's bandwidth, and the tokens' matrix products over their speed, both measured here first. ``mbu`` is those bytes a
second over that bandwidth. ``compile_s`` is what the first run took longer.
"""

import dataclasses
import json
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxrl_llm.engine.backend import for_sampling
from jaxrl_llm.models import layers, load_pretrained
from jaxrl_llm.models.config import Attention, Embeddings, Experts, ModelConfig, Norm, Rope
from jaxrl_llm.models.decoder import Decoder, initialise
from jaxrl_llm.plan.lowering import model_config
from jaxrl_llm.rollout import Engine, Sampling


def qwen3_shape(width: int, layers: int) -> ModelConfig:
    """A small model of Qwen3's architecture with 8192 words."""
    attention = Attention(width // 64, width // 128, 64, Rope(1e6))
    return ModelConfig("qwen3", 8192, width, layers, 3 * width, attention, Norm(1e-6), embeddings=Embeddings(tied=True))


def with_experts(shape: ModelConfig, count: int, active: int) -> ModelConfig:
    """The same with experts, of which those of a token are together as wide as its MLP."""
    experts = Experts(count, active, shape.mlp_width // active, renormalise=True)
    return dataclasses.replace(shape, family="qwen3_moe", experts=experts)


SHAPES = {"7m": qwen3_shape(256, 6), "20m": qwen3_shape(384, 9)}
SHAPES["7m-experts"] = with_experts(SHAPES["7m"], 32, 4)
RANDOM = "random:"
WAVES = 4
"""Requests for each slot."""


@dataclasses.dataclass(frozen=True)
class Options:
    """The work.

    Attributes:
      model: 7m, 20m, 7m-experts (4 of 32 for each token) or ``random:NAME`` of a published shape (random weights), or
        anything that jaxrl-llm loads.
      dtype: of the weights; float32 or bfloat16.
      lengths: equal or long (a long tail).
      slots: completions sampled at one time.
      group: completions of each prompt.
      prompt: tokens of a prompt.
      completion: tokens of the longest completion.
      chunk: decode steps in one call.
      repeats: timed runs after one that compiles.
    """

    model: str = "7m"
    dtype: str = "float32"
    lengths: Literal["equal", "long"] = "equal"
    slots: int = 64
    group: int = 8
    prompt: int = 32
    completion: int = 128
    chunk: int = 4
    repeats: int = 3


def best_seconds(run: Callable[..., Any], *arguments: Any) -> float:
    """Of five calls, after one that compiles."""
    jax.block_until_ready(run(*arguments))
    times = []
    for _ in range(5):
        began = time.perf_counter()
        jax.block_until_ready(run(*arguments))
        times.append(time.perf_counter() - began)
    return min(times)


@jax.jit
def product(x: jax.Array, y: jax.Array) -> jax.Array:
    """Of two matrices, as the models compute it."""
    return layers.product("ij,jk->ik", x, y)


def measured_peaks(dtype: str = "float32") -> tuple[float, float]:
    """Bytes a second of a copy, and operations a second of a matrix product of this type."""
    on_cpu = jax.devices()[0].platform == "cpu"
    size = 2048 if on_cpu else 8192
    large = jnp.ones(1 << (26 if on_cpu else 30), jnp.float32)
    bandwidth = 2 * large.nbytes / best_seconds(jax.jit(lambda x: x + 1), large)
    del large
    return bandwidth, 2 * size**3 / best_seconds(product, *[jnp.ones((size, size), dtype)] * 2)


def least_work(model: Decoder, prompt: int, limits: np.ndarray, slots: int) -> tuple[float, float]:
    """Bytes and operations, with every slot in use at every step; the embedding table counts as the head's product."""
    steps = max(int(limits.max()), -(-int(limits.sum()) // slots))
    attention, leaves = model.config.attention, jax.tree.leaves(model)
    weights, size = sum(x.nbytes for x in leaves), sum(x.size for x in leaves)
    column = 2 * model.config.layers * attention.kv_heads * attention.head_dim * leaves[0].dtype.itemsize
    cache = column * float(np.sum(limits * prompt + limits * (limits + 1) / 2))
    return steps * weights + cache, 2.0 * size * int(limits.sum())


def model_of(name: str, dtype: str = "float32") -> Decoder:
    """The model that is named: random weights of a shape from the same key always, or a loaded one."""
    shape = SHAPES.get(name)
    if name.startswith(RANDOM):
        shape, _ = model_config(name.removeprefix(RANDOM))
    return load_pretrained(name, dtype)[0] if shape is None else initialise(shape, jax.random.key(0), dtype)


def requests(
    words: int, count: int, group: int, prompt: int, completion: int, lengths: str
) -> tuple[list[np.ndarray], np.ndarray]:
    """The same for all samplers and learners: prompts int[prompt] below ``words``, group by group, and a length for
    each.
    """
    random = np.random.default_rng(0)
    unique = [random.integers(0, words, prompt) for _ in range(-(-count // group))]
    share = np.ones(count) if lengths == "equal" else random.beta(1, 7 / 3, count)
    limits = np.maximum(1, np.round(share * completion)).astype(int)
    return [unique[i // group] for i in range(count)], limits


def work_of(options: Options, words: int, waves: int = WAVES) -> tuple[list[np.ndarray], np.ndarray]:
    """``requests`` that fill the slots so many times."""
    count = waves * options.slots
    return requests(words, count, options.group, options.prompt, options.completion, options.lengths)


def run(options: Options) -> dict[str, Any]:
    """The row."""
    model = for_sampling(model_of(options.model, options.dtype), jax.default_backend())
    prompts, limits = work_of(options, model.config.vocab_size)
    count = len(prompts)
    engine = Engine(model, options.slots, options.prompt + options.completion, options.chunk, group=options.group)
    seconds = []
    for _ in range(options.repeats + 1):
        began = time.perf_counter()
        engine.start(Sampling(max_new_tokens=options.completion))
        engine.submit(prompts, range(count), limits.tolist())
        while engine.busy:
            engine.step(model)
        assert sum(len(done.tokens) for _, done in engine.collect()) == limits.sum()
        seconds.append(time.perf_counter() - began)
    taken = statistics.median(seconds[1:])
    moved, operations = least_work(model, options.prompt, limits, options.slots)
    bandwidth, speed = measured_peaks(options.dtype)
    return dataclasses.asdict(options) | {
        "device": jax.devices()[0].device_kind,
        "parameters_m": round(sum(x.size for x in jax.tree.leaves(model)) / 1e6, 2),
        "mean_over_max": round(float(limits.mean()) / options.completion, 3),
        "tokens": int(limits.sum()),
        "seconds": round(taken, 3),
        "tokens_per_s": round(limits.sum() / taken, 1),
        "slot_utilisation": round(float(limits.sum()) / engine.slot_steps, 3),
        "compile_s": round(max(seconds[0] - taken, 0), 1),
        "roofline": round(max(moved / bandwidth, operations / speed) / taken, 3),
        "mbu": round(moved / bandwidth / taken, 3),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


if __name__ == "__main__":
    print(json.dumps(run(tyro.cli(Options, description=__doc__))))
