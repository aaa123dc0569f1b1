"""From a run's settings, the model and the name of a platform to how, and in what shapes, the learner computes."""

import math

from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.batch import Layout
from jaxrl_llm.learner.settings import Learner
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.sharding import batch_parts, platform_of

KERNELS = {"splash": "tpu", "cudnn": "gpu"}
"""Attention back ends beside "xla", and the platform that has them."""
CUDNN_HEAD = 128
"""The widest head of cuDNN's fused attention on every generation that has it."""
SHORT_ROW, TILES = 256, {"cpu": 32}
"""Tokens below which a row is not worth its overhead, and what its length is a multiple of (128 if not listed)."""
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
    settings: Learner, compute: Compute, longest: int, completion_tokens: int, mesh: Mesh | AbstractMesh
) -> Layout:
    """Shapes of a microbatch for prompts with completions of up to ``longest`` tokens.

    Splash attention knows segments only: there every completion follows its own copy of the prompt.
    """
    row_tokens = settings.row_tokens
    if not row_tokens:
        row_tokens = _row_tokens(longest, completion_tokens, platform_of(mesh), mesh.shape["tensor"])
    share = compute.attention != "splash"
    return Layout(settings.microbatch_rows, row_tokens, completion_tokens, batch_parts(mesh), share)


def _row_tokens(longest: int, completion_tokens: int, platform: str, tensor: int) -> int:
    """Enough for one prompt and as many of its longest completions as make a row of 256 tokens, in the platform's
    tiles.

    Divided by ``tensor``, as positions are between matrix products.
    """
    prompt = longest - completion_tokens
    completions = max(-(-(SHORT_ROW - prompt) // completion_tokens), 1)
    tile = math.lcm(TILES.get(platform, 128), tensor)
    return -(-(prompt + completions * completion_tokens) // tile) * tile
