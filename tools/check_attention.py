"""How far a fused attention is from plain scores, through a whole model, on this machine's default device.

    python tools/check_attention.py [--attention triton|cudnn|splash] [--layers 4] [--tokens 1024]

Prints one JSON line. The model has the published shape of Qwen2.5-0.5B with fewer layers and random weights; packed
rows hold groups that share a prompt. ``logp`` is the mean distance of log-probabilities, ``gradient`` that of gradients
by their norm, both from a pass in float32; ``plain_logp`` and ``plain_gradient`` are those of plain scores in bfloat16,
which round as much. ``gradient_s`` and ``plain_gradient_s`` are the seconds of a gradient. ``decoded`` and
``plain_decoded`` are distances of the final states of one decode step, by the kernels that read rows by their length
and by the plain form. ``ok``: fused ones are at most half as far again. On a CPU the kernels' arithmetic is computed by
XLA: that rehearses the command and proves nothing of the kernels.
"""

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxrl_llm.learner import Layout, PolicyGradient, pack
from jaxrl_llm.learner.forward import score
from jaxrl_llm.learner.update import accumulate
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decode_kernels import ByLength, whole_blocks
from jaxrl_llm.models.decoder import Decoder, cast, initialise
from jaxrl_llm.models.decoding import Cache, decode, empty_cache, shared_prefix
from jaxrl_llm.plan.programs import find_model_config
from jaxrl_llm.types import Role

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.speed import ALGORITHM, samples_of

GROUP, PROMPT = 4, 32
CHUNK = 16
TOLERANCE = 1.5
FUSED = {"tpu": "splash"}


@dataclasses.dataclass(frozen=True)
class Options:
    """The work.

    Attributes:
      attention: the fused one; empty for that of the device: splash on a TPU, otherwise triton.
      model: whose shape.
      layers: of it.
      tokens: of a row.
      rows: of them.
    """

    attention: str = ""
    model: str = "Qwen/Qwen2.5-0.5B"
    layers: int = 4
    tokens: int = 1024
    rows: int = 4


def batch(options: Options, words: int) -> Any:
    """Packed groups of completions of several lengths."""
    random = np.random.default_rng(0)
    shared = options.attention != "splash"  # which knows no branches
    longest = (options.tokens - PROMPT) // GROUP if shared else options.tokens // GROUP - PROMPT
    layout = Layout(options.rows, options.tokens, longest, share_prompts=shared)
    count = options.rows * GROUP
    prompts = [prompt for prompt in random.integers(0, words, (options.rows, PROMPT)) for _ in range(GROUP)]
    completions = [random.integers(0, words, length) for length in random.integers(longest // 2, longest, count)]
    groups = samples_of(prompts, completions, random.standard_normal(count).tolist(), GROUP)
    return pack([sample for group in groups for sample in group], layout)


def results(model: Decoder, packed: Any, compute: ComputeOptions) -> tuple[jax.Array, Any, float]:
    """Log-probabilities of all tokens, the gradient of GRPO's loss, and seconds of a second gradient."""
    coefficients = {"temperature": jnp.float32(1)}
    objectives = (PolicyGradient(ALGORITHM),)

    def gradient(model: Decoder) -> Any:
        return accumulate(Role(model, None, jnp.int32(0)), packed, objectives, coefficients, compute)[0]

    compiled = jax.jit(gradient)
    found = jax.block_until_ready(compiled(model))
    began = time.perf_counter()
    jax.block_until_ready(compiled(model))
    return score(model, packed, jnp.float32(1), compute), found, time.perf_counter() - began


def distance(found: Any, wanted: Any) -> float:
    """Of two gradients, by the norm of the second."""
    norms = []
    for difference in (jax.tree.map(jnp.subtract, found, wanted), wanted):
        norms.append(float(jnp.sqrt(sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in jax.tree.leaves(difference)))))
    return norms[0] / norms[1]


def decoded(model: Decoder, tokens: int, form: ByLength | None) -> jax.Array:
    """Final states of a decode step over random keys and values, with rows of every length, and two shared prompts."""
    config, dtype = model.config, model.weights.embed[...].dtype
    random = np.random.default_rng(1)

    def filled(rows: int, columns: int) -> Cache:
        shapes = jax.eval_shape(lambda: empty_cache(config, rows, columns, dtype))
        return jax.tree.map(lambda x: jnp.asarray(random.standard_normal(x.shape), dtype), shapes)

    rows, columns = 2 * GROUP, whole_blocks(4 * tokens)
    lengths = jnp.asarray(random.integers(0, columns - CHUNK, rows), jnp.int32).at[0].set(0)
    prompts, lanes = jnp.full(rows, 3 * PROMPT, jnp.int32), jnp.arange(rows, dtype=jnp.int32)
    before = shared_prefix(filled(2, whole_blocks(4 * PROMPT)), prompts, lanes, 1, GROUP)
    newest = jnp.asarray(random.integers(0, config.vocab_size, rows), jnp.int32)
    step = jax.jit(decode, static_argnames=("width", "form"))
    given = model, filled(rows, columns), filled(rows, CHUNK), jnp.int32(3), newest, lengths, before
    return step(*given, form=form)[0].astype(jnp.float32)


def run(options: Options) -> dict[str, Any]:
    """The row."""
    device = jax.devices()[0]
    options = dataclasses.replace(options, attention=options.attention or FUSED.get(device.platform, "triton"))
    config = dataclasses.replace(find_model_config(options.model)[0], layers=options.layers)
    model = initialise(config, jax.random.key(0))
    packed = batch(options, config.vocab_size)
    wanted, gradient, _ = results(model, packed, ComputeOptions("float32"))
    row = dataclasses.asdict(options) | {"device": device.device_kind}
    fused = ComputeOptions("bfloat16", attention=options.attention, interpret=device.platform == "cpu")
    for name, compute in {"plain_": ComputeOptions("bfloat16"), "": fused}.items():
        logp, found, seconds = results(model, packed, compute)
        row[f"{name}gradient_s"] = round(seconds, 5)
        row[f"{name}logp"] = float(jnp.abs(logp - wanted).sum()) / int(packed.mask.sum())
        row[f"{name}gradient"] = distance(found, gradient)
    kernels = ByLength("tpu" if device.platform == "tpu" else "gpu", interpret=device.platform == "cpu")
    states = decoded(model, options.tokens, None)
    for name, form in {"plain_": None, "": kernels}.items():
        row[f"{name}decoded"] = distance(decoded(cast(model, jnp.bfloat16), options.tokens, form), states)
    close = [row[name] <= TOLERANCE * row[f"plain_{name}"] for name in ("logp", "gradient", "decoded")]
    return row | {"ok": all(close)}


if __name__ == "__main__":
    print(json.dumps(run(tyro.cli(Options, description=__doc__))))
