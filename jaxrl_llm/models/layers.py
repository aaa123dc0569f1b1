"""The parts of a decoder layer as functions of arrays; sums and softmax are float32 whatever the weights are."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import Attention, Llama3Rope, ModelConfig, Norm

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}
MASKED = -1e30
"""Score of a forbidden position: finite, so that a row with no allowed position stays finite."""


def product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """``einsum`` of two arrays whose sums and result are float32 (float64 for float64), whatever the arrays are.

    XLA's CPU programs refuse two bfloat16 operands with a float32 result in some layouts, at run time. There the
    operands are float32 first, which loses nothing: float32 holds the product of two bfloat16 numbers. The choice is
    made where a program is lowered, so that others keep their mixed products, and can be compiled where they cannot
    run.
    """
    return _mixed(letters, x, y) if jnp.bfloat16 in (x.dtype, y.dtype) else _product(letters, x, y)


def _product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    return jnp.einsum(letters, x, y, preferred_element_type=wide)


def _widened(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    return _product(letters, x.astype(jnp.float32), y.astype(jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mixed(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    def of(form: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return functools.partial(form, letters)

    return jax.lax.platform_dependent(x, y, cpu=of(_widened), default=of(_product))


def _mixed_forward(letters: str, x: jax.Array, y: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _mixed(letters, x, y), (x, y)


def _mixed_back(letters: str, saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    # What JAX would derive through the choice saves the operands of both forms.
    def back(form: Callable[..., jax.Array]) -> Callable[..., Any]:
        return lambda x, y, g: jax.vjp(functools.partial(form, letters), x, y)[1](g)

    return jax.lax.platform_dependent(*saved, g, cpu=back(_widened), default=back(_product))


_mixed.defvjp(_mixed_forward, _mixed_back)


@jax.custom_vjp
def project(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [B, S, D] times w [D, ...].

    Its own gradient to the weights is the same product with its operands the other way round: what JAX derives made
    CPUs transpose the wide gradient of an MLP, and compute the activation's twice for it.
    """
    return jnp.tensordot(x, w, 1)


def _project(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return jnp.tensordot(x, w, 1), (x, w)


def _project_back(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    return jnp.tensordot(g, w, (tuple(range(2, g.ndim)), tuple(range(1, w.ndim)))), jnp.tensordot(
        x, g, ((0, 1), (0, 1))
    )


project.defvjp(_project, _project_back)


def rms_norm(x: jax.Array, weight: jax.Array, norm: Norm) -> jax.Array:
    """``x / rms(x) * weight`` over the last axis, computed in float32 and returned in x's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + norm.eps)
    scale = weight.astype(jnp.float32) + (1.0 if norm.plus_one else 0.0)
    return (wide * scale.reshape((1,) * (x.ndim - scale.ndim) + scale.shape)).astype(x.dtype)


def full_norm(x: jax.Array, weight: jax.Array, norm: Norm) -> jax.Array:
    """RMS norm of [..., N, H] over both last axes together (OLMo 2's query and key norm)."""
    flat = x.reshape(*x.shape[:-2], -1)
    return rms_norm(flat, weight.reshape(-1), norm).reshape(x.shape)


def low_rank(w: jax.Array, a: jax.Array, b: jax.Array, scale: float) -> jax.Array:
    """``w + scale * a @ b`` of w [in.., out..], a [in.., r], b [r, out..]: added in float32, in w's dtype."""
    change = jnp.tensordot(a, b, 1, preferred_element_type=jnp.float32)
    return (w.astype(jnp.float32) + scale * change).astype(w.dtype)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Rotary frequencies of every layer, float32[L, H / 2], radians per token."""
    attention = config.attention
    full = _scaled(_base_frequencies(attention.rope_theta, attention.head_dim), attention.rope_scaling)
    if attention.local_rope_theta is None:
        return np.tile(full, (config.layers, 1)).astype(np.float32)
    local = _base_frequencies(attention.local_rope_theta, attention.head_dim)
    return np.stack([local if window else full for window in layer_windows(config)]).astype(np.float32)


def layer_windows(config: ModelConfig) -> tuple[int, ...]:
    """The sliding window of every layer in tokens, 0 for full attention."""
    return config.attention.windows or (0,) * config.layers


def _base_frequencies(theta: float, head_dim: int) -> np.ndarray:
    return 1.0 / theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _scaled(frequencies: np.ndarray, scaling: Llama3Rope | float | None) -> np.ndarray:
    """Linear scaling divides all frequencies; Llama-3's leaves short wavelengths alone and blends in between."""
    if scaling is None:
        return frequencies
    if not isinstance(scaling, Llama3Rope):
        return frequencies / scaling
    turns = scaling.original_positions * frequencies / (2 * np.pi)
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return keep * frequencies + (1 - keep) * frequencies / scaling.factor


def rotate(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary embedding of x [..., heads, H] by angles [..., H / 2], halves paired as Hugging Face does."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos = jnp.cos(angles)[..., None, :]
    sin = jnp.sin(angles)[..., None, :]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def scores(q: jax.Array, k: jax.Array, attention: Attention) -> jax.Array:
    """Scaled, soft-capped attention scores, float32.

    q: [B, S, K, N / K, H]; k: [B, K, H, Z]; returns [B, K, S, N / K, Z], as the product gives them: in another order
    they are turned over in both passes.
    """
    scale = attention.scale if attention.scale is not None else attention.head_dim**-0.5
    raw = product("bskgh,bkhz->bksgz", q, k) * scale
    return softcap(raw, attention.softcap)


def scores_of_one(q: jax.Array, k: jax.Array, attention: Attention) -> jax.Array:
    """``scores`` of a single query: [B, K, N / K, H] with [B, K, H, Z] gives [B, K, N / K, Z].

    A query axis of size 1 would do as well, and made these products four times as slow on CPUs.
    """
    scale = attention.scale if attention.scale is not None else attention.head_dim**-0.5
    return softcap(product("bkgh,bkhz->bkgz", q, k) * scale, attention.softcap)


def mix_for_one(probabilities: jax.Array, v: jax.Array) -> jax.Array:
    """``mix`` for a single query, float32: [B, K, N / K, Z] with [B, K, Z, H] gives [B, K, N / K, H]."""
    return product("bkgz,bkzh->bkgh", probabilities.astype(v.dtype), v)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """``cap * tanh(x / cap)``, or x where there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def mix(probabilities: jax.Array, v: jax.Array) -> jax.Array:
    """Values weighted by attention: [B, K, S, N / K, Z] with [B, K, Z, H] gives [B, S, K, N / K, H]."""
    return jnp.einsum("bksgz,bkzh->bskgh", probabilities.astype(v.dtype), v)
