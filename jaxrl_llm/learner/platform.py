"""From a run's settings, the model and the name of a platform to how, and in what shapes, the learner computes."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.batch import Layout
from jaxrl_llm.learner.settings import Learner
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import parameter_shapes
from jaxrl_llm.sharding import batch_parts, memory_of, platform_of

KERNELS = {"splash": "tpu", "cudnn": "gpu"}
"""Attention back ends beside "xla", and the platform that has them."""
CUDNN_HEAD = 128
"""The widest head of cuDNN's fused attention on every generation that has it."""
SHORT_ROW, TILES = 256, {"cpu": 32}
"""Tokens below which a row is not worth its overhead, and what its length is a multiple of (128 if not listed)."""
MICROBATCH_TOKENS, MICROBATCH_TOKENS_OF = 8192, {"cpu": SHORT_ROW}
"""Tokens of a device's part of a microbatch, where they are chosen, at most: more make no product faster."""
ROOM = 0.5
"""The share of what weights and optimiser leave of a device's memory that chosen activations may take."""
UNROLLED_LAYERS = 12
"""Up to how many layers have their own part of a CPU program."""


def compute_for(settings: Learner, config: ModelConfig, platform: str) -> Compute:
    """The one place that knows what suits a platform ("cpu", "gpu" or "tpu") and a model.

    Raises:
      InputError: the settings ask for an attention that the platform has not, or that cannot compute the model.
    """
    asked = settings.attention
    if asked == "auto":
        fit = [
            name
            for name, where in KERNELS.items()
            if where == platform and not _obstacle(name, settings, config, platform)
        ]
        asked = fit[0] if fit else "xla"
    obstacle = _obstacle(asked, settings, config, platform)
    if obstacle:
        raise InputError(f"learner.attention {asked!r} {obstacle}: set it to 'auto' or 'xla'")
    unroll = platform == "cpu" and config.layers <= UNROLLED_LAYERS
    return Compute(settings.compute_dtype, settings.remat, asked, unroll)


def _obstacle(name: str, settings: Learner, config: ModelConfig, platform: str) -> str | None:
    """Why this back end cannot serve; None where it can."""
    if name in KERNELS and platform != KERNELS[name]:
        return f"is for {KERNELS[name]}, and this is {platform}"
    if name == "splash" and settings.row_tokens % 128:
        return f"needs learner.row_tokens to be a multiple of 128, got {settings.row_tokens}"
    if name != "cudnn":
        return None
    attention = config.attention
    reasons = {
        f"needs learner.compute_dtype 'bfloat16', got {settings.compute_dtype!r}": settings.compute_dtype != "bfloat16",
        "has no soft cap, which this model needs": attention.softcap is not None,
        f"needs heads of at most {CUDNN_HEAD}, a multiple of 8, and this model's have {attention.head_dim}":
            attention.head_dim > CUDNN_HEAD or attention.head_dim % 8 != 0,
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), None)


def layout_for(
    settings: Learner,
    compute: Compute,
    longest: int,
    completion_tokens: int,
    mesh: Mesh | AbstractMesh,
    config: ModelConfig | None = None,
    update_tokens: float = math.inf,
) -> Layout:
    """Shapes of a microbatch for prompts with completions of up to ``longest`` tokens.

    Splash attention knows segments only: there every completion follows its own copy of the prompt.

    Args:
      settings: what is 0 there is chosen.
      compute: how the model is computed.
      longest: tokens of a prompt with its completion.
      completion_tokens: of the longest completion.
      mesh: learns.
      config: of the model; rows that are chosen fit the devices' memory beside it where it is given.
      update_tokens: that an optimiser update learns from, prompts with their completions; no more rows are chosen.
    """
    row_tokens = settings.row_tokens
    if not row_tokens:
        row_tokens = _row_tokens(longest, completion_tokens, platform_of(mesh), mesh.shape["tensor"])
    share = compute.attention != "splash"
    parts = batch_parts(mesh)
    rows = settings.microbatch_rows
    if not rows:
        most = MICROBATCH_TOKENS_OF.get(platform_of(mesh), MICROBATCH_TOKENS)
        tokens = min(most, update_tokens / parts)
        if config is not None:
            sizes = (mesh.shape["fsdp"], mesh.shape["tensor"])
            tokens = min(tokens, tokens_in_memory(settings, compute, config, row_tokens, sizes, memory_of(mesh)))
        rows = parts * max(int(tokens // row_tokens), 1)
    return Layout(rows, row_tokens, completion_tokens, parts, share)


def tokens_in_memory(
    settings: Learner, compute: Compute, config: ModelConfig, row_tokens: int, sizes: tuple[int, int], memory: float
) -> float:
    """About how many tokens of a microbatch a device can hold beside the model that it trains; a formula.

    ``sizes``: of the mesh's axes fsdp and tensor. ``memory``: bytes of the device, infinite where they are not known.
    """
    shapes = jax.tree.leaves(parameter_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    own = jnp.dtype(settings.dtype).itemsize
    each = own + jnp.dtype(compute.dtype).itemsize
    if not settings.lora.rank:  # a reference, a microbatch's gradients, their sum and two moments in float32
        each += 2 * own + 3 * 4
    free = memory - each * sum(map(math.prod, shapes)) / math.prod(sizes)
    return ROOM * free / update_bytes(compute, config, row_tokens, 1 / sizes[1])


def update_bytes(compute: Compute, config: ModelConfig, row_tokens: int, share: float) -> float:
    """About what each token of a device's part of a microbatch needs of its memory in an update; a formula.

    What a forward pass needs, and what the backward pass keeps of each layer.

    Args:
      compute: how the model is computed.
      config: of the model.
      row_tokens: S.
      share: of a matrix product that the device does.
    """
    a = config.attention
    width = jnp.dtype(compute.dtype).itemsize
    dots = 3 * config.width + ((a.heads + 2 * a.kv_heads) * a.head_dim + 2 * config.mlp_width) * share
    kept = {"full": config.width * width, "dots": dots * width, "none": _layer_bytes(compute, config, share)}
    return kept[compute.remat] * config.layers + forward_bytes(compute, config, row_tokens, share)


def forward_bytes(compute: Compute, config: ModelConfig, row_tokens: int, share: float) -> float:
    """What each token needs in a forward pass: the widest layer, scores of attention, hidden states."""
    scores = 3 * 4 * config.attention.heads * share * min(row_tokens, 1024)
    hidden = 2 * config.width * jnp.dtype(compute.dtype).itemsize
    return _layer_bytes(compute, config, share) + scores + hidden


def _layer_bytes(compute: Compute, config: ModelConfig, share: float) -> float:
    a = config.attention
    sizes = 6 * config.mlp_width * share + 12 * config.width + 4 * a.heads * a.head_dim * share
    return sizes * jnp.dtype(compute.dtype).itemsize


def _row_tokens(longest: int, completion_tokens: int, platform: str, tensor: int) -> int:
    """Enough for one prompt and as many of its longest completions as make a row of 256 tokens, in the platform's
    tiles.

    Divided by ``tensor``, as positions are between matrix products.
    """
    prompt = longest - completion_tokens
    completions = max(-(-(SHORT_ROW - prompt) // completion_tokens), 1)
    tile = math.lcm(TILES.get(platform, 128), tensor)
    return -(-(prompt + completions * completion_tokens) // tile) * tile
