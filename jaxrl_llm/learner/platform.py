"""Choices by platform: how, and in which shapes, the learner computes, from a run's settings and its model."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.learner.batch import Layout, Sample
from jaxrl_llm.learner.settings import Learner
from jaxrl_llm.learner.update import Training
from jaxrl_llm.models.config import PACKED, ComputeOptions, ModelConfig
from jaxrl_llm.models.decoder import Adapter, parameter_shapes, training_flops, visible_pairs
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.models.layers import SHORT
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.sharding import batch_parts, platform_of
from jaxrl_llm.sharding.mesh import CompilerOptions, chip_of, device_memory
from jaxrl_llm.types import TrainState

ATTENTION_PLATFORMS = {"splash": "tpu", "triton": "gpu", "cudnn": "gpu"}
"""Attention backends other than "xla", and the platform of each; of several that can serve, "auto" takes the first."""
TRITON_HEADS, CUDNN_HEAD = (16, 32, 64, 128), 128
"""Widths of a head that our kernels for GPUs compute, and the widest of cuDNN's on every generation that has them."""
MIN_ROW_TOKENS, ROW_TILES = 256, {"cpu": 32}
"""Tokens below which a row is not worth its overhead, and divisors of its length by platform (128 if not listed)."""
MICROBATCH_TOKENS, MICROBATCH_TOKENS_OF = 8192, {"cpu": MIN_ROW_TOKENS}
"""The most tokens of a device's part of a chosen microbatch: more do not make products faster."""
ACTIVATION_SHARE = 0.5
"""The share that chosen activations may take of the device memory left by weights and optimiser."""
HEAD_CHUNK = {"tpu": 1024, "gpu": 1024}
"""Positions of a chunk of the LM head by platform (``ComputeOptions``' own if not listed). The compiler's cycles of
8,192 positions, chunks of 512, 1,024 and 2,048: 1.5B on v5e 0.151, 0.117 and 0.125 s; 7B over tensor 2 on v5p 0.062,
0.054 and 0.052 s; 32B over tensor 8 there 0.021 and 0.017 s for the first two. An H100's bytes: 1.5B 26, 18 and 14 ms,
with temporaries of 1.0, 1.5 and 2.6 GiB.
"""
MAX_UNROLLED_LAYERS = 12
"""The most layers that are unrolled in a CPU program."""


def compute_for(
    settings: Learner, config: ModelConfig, platform: str, compiler: CompilerOptions = ()
) -> ComputeOptions:
    """Return compute options for a platform ("cpu", "gpu" or "tpu") and a model; all such choices are made here.
    ``compiler``: of ``compiler_options``, for the mesh on which the model is computed. InputError: the settings ask for
    an attention that the platform lacks, or that cannot compute the model; or for replay of the routing of a model
    without experts.
    """
    attention = settings.compute.attention
    if attention == "auto":
        usable = (name for name in ATTENTION_PLATFORMS if not attention_obstacle(name, settings, config, platform))
        attention = next(usable, "xla")
    obstacle = attention_obstacle(attention, settings, config, platform)
    if obstacle:
        raise InputError(f"learner.compute.attention {attention!r} {obstacle}: set it to 'auto' or 'xla'")
    replay = settings.routing_replay
    if replay != "off" and config.experts is None:
        raise InputError(f"learner.routing_replay {replay!r} needs a model with experts: set it to 'off'")
    unroll = platform == "cpu" and config.layers <= MAX_UNROLLED_LAYERS
    # The kernel's rows on an axis of experts that others compute are zeros, so it serves every mesh.
    experts = "megablox" if platform == "tpu" else "blocks"
    options = ComputeOptions(
        settings.compute.dtype, settings.compute.remat, attention, unroll, compiler=compiler, experts=experts
    )
    return dataclasses.replace(options, head_chunk=HEAD_CHUNK.get(platform, options.head_chunk))


def attention_obstacle(name: str, settings: Learner, config: ModelConfig, platform: str) -> str | None:
    """Return why this attention backend cannot be used; None if it can."""
    if name in ATTENTION_PLATFORMS and platform != ATTENTION_PLATFORMS[name]:
        return f"is for {ATTENTION_PLATFORMS[name]}, and this is {platform}"
    if name in ATTENTION_PLATFORMS and config.attention.sinks:
        return "has no attention sinks, which this model needs"
    if name in ATTENTION_PLATFORMS and config.attention.latent is not None:
        return "has keys and values of one width, which this model's are not"
    if name in ("splash", "triton") and settings.compute.row_tokens % 128:
        return f"needs learner.compute.row_tokens to be a multiple of 128, got {settings.compute.row_tokens}"
    if ATTENTION_PLATFORMS.get(name) != "gpu":
        return None
    attention = config.widest_attention
    if settings.compute.dtype != "bfloat16":
        return f"needs learner.compute.dtype 'bfloat16', got {settings.compute.dtype!r}"
    if name == "triton":
        fits = attention.head_dim in TRITON_HEADS
        words = f"needs heads of {', '.join(map(str, TRITON_HEADS))}, and this model's have {attention.head_dim}"
        return None if fits else words
    reasons = {
        "has no soft cap, which this model needs": attention.softcap is not None,
        f"needs heads of at most {CUDNN_HEAD}, a multiple of 8, and this model's have {attention.head_dim}":
            attention.head_dim > CUDNN_HEAD or attention.head_dim % 8 != 0,
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


def layout_for(
    settings: Learner,
    compute: ComputeOptions,
    longest: int,
    completion_tokens: int,
    mesh: Mesh | AbstractMesh,
    config: ModelConfig | None = None,
    update_tokens: float = math.inf,
) -> Layout:
    """Return the shapes of a microbatch; values of 0 in ``settings`` are chosen. Splash attention supports segments
    only: with it every completion follows its own copy of the prompt. InputError: the mesh does not divide a
    microbatch's rows.

    Args:
      longest: tokens of a prompt with its completion.
      completion_tokens: of the longest completion.
      mesh: of the devices that learn.
      config: of the model; if given, chosen rows fit into the devices' memory with it.
      update_tokens: tokens of an optimiser update, prompts with their completions; no more rows are chosen.
    """
    row_tokens = settings.compute.row_tokens
    if not row_tokens:
        # Enough for one prompt and as many of its longest completions as make a row of 256 tokens, in the tiles of the
        # platform, and divided by ``tensor``, as positions are between matrix products.
        prompt = longest - completion_tokens
        completions = max(-(-(MIN_ROW_TOKENS - prompt) // completion_tokens), 1)
        tile = math.lcm(ROW_TILES.get(platform_of(mesh), 128), mesh.shape["tensor"])
        row_tokens = -(-(prompt + completions * completion_tokens) // tile) * tile
    share = compute.attention != "splash"
    parts = batch_parts(mesh)
    rows = settings.compute.microbatch_rows
    if not rows:
        most = MICROBATCH_TOKENS_OF.get(platform_of(mesh), MICROBATCH_TOKENS)
        tokens = min(most, update_tokens / parts)
        if config is not None:
            sizes = (mesh.shape["fsdp"], mesh.shape["tensor"])
            tokens = min(tokens, tokens_in_memory(settings, compute, config, row_tokens, sizes, device_memory(mesh)))
        rows = parts * max(int(tokens // row_tokens), 1)
    words = f"learner.compute.microbatch_rows {rows} does not divide over the mesh's {parts} parts of a batch"
    require(rows % parts == 0, f"{words}: make it a multiple of {parts}, or 0 to choose")
    return Layout(rows, row_tokens, completion_tokens, parts, share)


def rows_for_turns(layout: Layout, turns: int, microbatch_rows: int) -> Layout:
    """Return the layout with as many rows as an episode of so many turns can fill, since the loss reads them together.
    ``microbatch_rows``: ``learner.compute.microbatch_rows``; 0 takes as many as needed. InputError: it sets fewer.
    """
    require(
        layout.rows >= turns or not microbatch_rows,
        f"learner.compute.microbatch_rows {microbatch_rows} is less than rollout.episode.max_turns {turns}, and with "
        f"rollout.episode.history fork each turn may begin a row: set it to {turns} or more, or to 0 to choose",
    )
    return dataclasses.replace(layout, rows=max(layout.rows, -(-turns // layout.parts) * layout.parts))


def tokens_in_memory(
    settings: Learner,
    compute: ComputeOptions,
    config: ModelConfig,
    row_tokens: int,
    sizes: tuple[int, int],
    memory: float,
) -> float:
    """Estimate by a formula the tokens of a microbatch that fit on a device together with the trained model. ``sizes``:
    of the mesh's axes fsdp and tensor. ``memory``: bytes of the device, infinite if unknown.
    """
    width, lora = jnp.dtype(settings.initial_dtype).itemsize, settings.lora
    numbers = {path: math.prod(shape) for path, shape in parameter_shapes(config).items()}
    matrices = {path: path.removeprefix("blocks.").replace(".", "/") for path in numbers}
    packed = sum(numbers[path] for path, matrix in matrices.items() if lora.packs(matrix, config))
    if lora.packed:
        held = width * (sum(numbers.values()) - packed) + PACKED[lora.base] * packed
    elif lora.rank:  # and where layers are separate once more, stacked
        held = 2 * width * sum(numbers.values())
    else:  # itself, a reference, a microbatch's gradients; their sum and two moments in float32; as computed with
        held = (3 * width + 3 * 4 + jnp.dtype(compute.dtype).itemsize) * sum(numbers.values())
    free = memory - held / math.prod(sizes)
    return ACTIVATION_SHARE * free / sum(token_bytes(compute, config, row_tokens, 1 / sizes[1]))


def token_bytes(
    compute: ComputeOptions, config: ModelConfig, row_tokens: int, share: float, update: bool = True
) -> tuple[float, float]:
    """Estimate by a formula the bytes that a pass needs for each token of a device's part of a microbatch, in rows of
    ``row_tokens`` S: those kept of all layers for the backward pass (0 without ``update``), and those in use at one
    time, for the widest layer and hidden states. Kernels of attention keep no scores. ``share``: of a matrix product
    that the device does.
    """
    a = config.widest_attention
    width = jnp.dtype(compute.dtype).itemsize
    layer = (6 * config.active_width * share + 12 * config.width + 4 * a.heads * a.head_dim * share) * width
    scores = 4 * a.heads * share * min(row_tokens, SHORT) if compute.attention == "xla" else 0
    in_use = layer + 3 * scores + 2 * config.width * width
    in_use += config.layers * config.per_layer_width * width
    if not update:
        return 0, in_use
    # Between matrix products ``tensor`` divides the positions of hidden states.
    hidden = config.width * share
    products = hidden + ((a.heads + 2 * a.kv_heads) * a.head_dim + 2 * config.active_width) * share
    dots = 2 * hidden + products
    # Longer rows compute their scores again.
    every = layer + (scores if row_tokens <= SHORT else 0)
    kept = {"offload": 0.0, "full": hidden * width, "dots": dots * width, "none": every}[compute.remat]
    return kept * config.layers, in_use


MFU = "throughput/mfu"


def utilisation(
    state: TrainState,
    groups: Sequence[Sequence[Sample]],
    training: Sequence[Training],
    minibatches: int,
    row: Mapping[str, Any],
    devices: Sequence[Any],
) -> dict[str, float]:
    """Return the metric ``throughput/mfu``, FLOPs / (seconds * devices * peak); {} for devices with unknown peaks, such
    as a CPU. The peak is that of bfloat16 products, whatever the run computes in.

    The FLOPs are those of ``training_flops``, summed over roles and epochs. A prompt counts once in each group;
    padding, recomputation and passes without a gradient never count. An update that was refused counts nothing; one
    that was applied counts as an equal share of its epoch.

    Args:
      state: with each role's parameters, at least as shapes.
      groups: samples of each prompt.
      training: of each role.
      minibatches: updates of an epoch, at most one for each group.
      row: the step's ``time/update_s``, and the metrics of ``learn`` that say how many updates each role made.
      devices: those that learned, all of one kind.
    """
    chip = chip_of(devices[0].device_kind)
    if chip is None:
        return {}
    flops = 0.0
    for trained in training:
        updates = row["updates" if trained.role == "policy" else f"{trained.role}/updates"]
        params = state.roles[trained.role].params
        adapter = sum(x.size for x in jax.tree.leaves(params)) if isinstance(params, Adapter) else None
        model = model_of(state, trained.role)
        tokens, pairs, predictions = count_work(model.config, groups)
        predictions = 0 if isinstance(model, ScalarModel) else predictions
        epochs = updates / max(min(minibatches, len(groups)), 1)
        flops += epochs * training_flops(model.config, tokens, pairs, predictions, adapter)
    return {MFU: flops / (row["time/update_s"] * len(devices) * chip.flops)}


def count_work(config: ModelConfig, groups: Sequence[Sequence[Sample]]) -> tuple[int, float, int]:
    """Return what a model reads of the groups in one epoch: tokens, pairs of queries and keys that see each other
    (summed over layers), and completion tokens, which a language model predicts.
    """
    lengths = [(len(sample.prompt), len(sample.tokens)) for group in groups for sample in group]
    prompts = [len(prompt) for group in groups for prompt in {s.prompt.tobytes(): s.prompt for s in group}.values()]
    pairs = sum(visible_pairs(config, 0, prompt) for prompt in prompts)
    pairs += sum(visible_pairs(config, prompt, prompt + tokens) for prompt, tokens in lengths)
    predictions = sum(tokens for _, tokens in lengths)
    return sum(prompts) + predictions, pairs, predictions
