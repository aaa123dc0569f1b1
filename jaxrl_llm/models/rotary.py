"""Rotary position embedding (arXiv 2104.09864) and its rescalings for long contexts, layer by layer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import Llama3Rope, ModelConfig, Rope, Yarn


class Rotation(NamedTuple):
    """What a layer's rotary embedding needs besides positions.

    Attributes:
      frequencies: float32[R / 2], radians per token of each pair of the R numbers that are rotated.
      magnitude: float32[], factor on what is rotated.
    """

    frequencies: Any
    magnitude: Any


def layer_constants(config: ModelConfig) -> tuple[Rotation, jax.Array]:
    """Return each layer's ``Rotation``, stacked over L, and sliding windows int32[L].

    Linear scaling divides all frequencies; Llama-3's and YaRN's keep short wavelengths and blend in between. Layers
    with a window and a base of their own are not scaled; those that do not rotate have frequencies of 0.
    """
    rope = config.attention.rope
    windows = layer_windows(config)
    dims = rope.dims or config.attention.head_dim
    exponents = np.arange(0, dims, 2, dtype=np.float64) / dims
    full = _scaled(1.0 / rope.theta**exponents, rope)
    magnitude = rope.scaling.magnitude if isinstance(rope.scaling, Yarn) else 1.0
    whole = rope.layers or (True,) * config.layers
    own = [bool(window) and rope.local_theta is not None for window in windows]
    local = full if rope.local_theta is None else 1.0 / rope.local_theta**exponents
    frequencies = np.stack([(local if one else full) * rotates for one, rotates in zip(own, whole, strict=True)])
    magnitudes = [magnitude if rotates and not one else 1.0 for one, rotates in zip(own, whole, strict=True)]
    rotation = Rotation(jnp.asarray(frequencies, jnp.float32), jnp.asarray(magnitudes, jnp.float32))
    return rotation, jnp.asarray(windows, jnp.int32)


def _scaled(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
    scaling = rope.scaling
    if isinstance(scaling, Llama3Rope):
        turns = scaling.original_positions * frequencies / (2 * np.pi)
        low = scaling.low_frequency_factor
        keep = np.clip((turns - low) / (scaling.high_frequency_factor - low), 0.0, 1.0)
        return keep * frequencies + (1 - keep) * frequencies / scaling.factor
    if isinstance(scaling, Yarn):
        count = len(frequencies)
        # The index of the frequency that makes so many turns over the original length.
        lengths = scaling.original_positions / (2 * np.pi * np.array([scaling.fast, scaling.slow]))
        first, last = count * np.log(lengths) / np.log(rope.theta)
        if scaling.truncate:
            first, last = np.floor(first), np.ceil(last)
        first, last = max(first, 0), min(last, 2 * count - 1)
        divided = np.clip((np.arange(count) - first) / (last - first or 0.001), 0.0, 1.0)
        return frequencies * (1 - divided + divided / scaling.factor)
    return frequencies if scaling is None else frequencies / scaling


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """Return the sliding window of every layer in tokens, 0 for full attention."""
    return config.attention.windows or (0,) * config.layers


def turns(positions: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines by which ``rotate`` turns heads at positions [...], float32[..., R / 2] each."""
    frequencies = jnp.expand_dims(rotation.frequencies, tuple(range(positions.ndim)))
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles) * rotation.magnitude, jnp.sin(angles) * rotation.magnitude


def rotate(x: jax.Array, turned: tuple[jax.Array, jax.Array], interleaved: bool = False) -> jax.Array:
    """Apply rotary embedding to the first R numbers of heads x [..., heads, H], by ``turns`` at their positions.

    Halves of them are paired as in Hugging Face, or neighbours where ``interleaved``.
    """
    cos, sin = (t[..., None, :] for t in turned)
    dims = 2 * cos.shape[-1]
    rotated = x[..., :dims].astype(jnp.float32)
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    out = jnp.stack(parts, axis=-1).reshape(rotated.shape) if interleaved else jnp.concatenate(parts, axis=-1)
    return jnp.concatenate([out.astype(x.dtype), x[..., dims:]], axis=-1) if dims < x.shape[-1] else out.astype(x.dtype)
