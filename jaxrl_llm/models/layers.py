"""The parts of a decoder layer as functions of arrays; sums and softmax are float32 whatever the weights are. Attention
over packed rows has several backends; the plain XLA form is the reference for the others.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import gpu_attention
from jaxrl_llm.models.config import Attention, ComputeOptions, Llama3Rope, ModelConfig, Norm, Rope, Yarn
from jaxrl_llm.models.quantised import QuantisedMatrix, widen_codes
from jaxrl_llm.sharding import BATCH, fit_spec

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}
MASKED = -1e30
"""Score of a masked position: finite, so that a row without an allowed position stays finite."""


def product(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute ``einsum`` of two arrays with float32 sums and result (float64 for float64), whatever their dtypes. XLA's
    CPU programs refuse two bfloat16 operands with a float32 result in some layouts, at run time: there operands are
    float32 first, which loses nothing. The choice is made at lowering, so that other platforms keep their mixed
    products, and programs compile where they cannot run.
    """
    return _einsum_bfloat16(letters, x, y) if jnp.bfloat16 in (x.dtype, y.dtype) else _einsum_wide(letters, x, y)


def _einsum_wide(letters: str, x: jax.Array, y: jax.Array, widened: bool = False) -> jax.Array:
    if widened:
        x = x.astype(jnp.float32)
        y = y.astype(jnp.float32)
    return jnp.einsum(letters, x, y, preferred_element_type=wide_dtype(x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _einsum_bfloat16(letters: str, x: jax.Array, y: jax.Array) -> jax.Array:
    form = functools.partial(_einsum_wide, letters)
    return jax.lax.platform_dependent(x, y, cpu=functools.partial(form, widened=True), default=form)


def _einsum_bfloat16_back(letters: str, saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    # What JAX would derive through the choice saves the operands of both forms.
    def back(x: jax.Array, y: jax.Array, g: jax.Array, widened: bool = False) -> Any:
        return jax.vjp(functools.partial(_einsum_wide, letters, widened=widened), x, y)[1](g)

    return jax.lax.platform_dependent(*saved, g, cpu=functools.partial(back, widened=True), default=back)


_einsum_bfloat16.defvjp(lambda letters, x, y: (_einsum_bfloat16(letters, x, y), (x, y)), _einsum_bfloat16_back)


def wide_dtype(x: jax.Array) -> Any:
    """Return the dtype of sums and logits: float64 if x is float64, else float32."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


@jax.custom_vjp
def project(x: jax.Array, w: jax.Array) -> jax.Array:
    """Multiply x [B, S, D] by w [D, ...]. The custom gradient of the weights is the same product with its operands
    swapped: JAX's own made CPUs transpose the wide gradient of an MLP, and compute the activation's twice for it.
    """
    return jnp.tensordot(x, w, 1)


def _project_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    back = jnp.tensordot(g, w, (tuple(range(2, g.ndim)), tuple(range(1, w.ndim))))
    return back, jnp.tensordot(x, g, ((0, 1), (0, 1)))


project.defvjp(lambda x, w: (jnp.tensordot(x, w, 1), (x, w)), _project_backward)


def contract(x: jax.Array, w: jax.Array, inputs: int, dtype: Any = None) -> jax.Array:
    """Multiply x [B, S, in..] by w [in.., out..] with so many summed axes, summed in ``dtype``."""
    if inputs == 1:
        return jnp.tensordot(x, w, 1, preferred_element_type=dtype)
    return jnp.einsum("bsnh,nh...->bs...", x, w, preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def project_frozen(
    inputs: int, scale: float, x: jax.Array, w: jax.Array | QuantisedMatrix, factors: tuple[jax.Array, jax.Array] | None
) -> jax.Array:
    """Multiply x [B, S, in..] by a frozen w [in.., out..] of any form, and add ``scale * (x a) b`` of its factors a
    [in.., r] and b [r, out..], if any. Both products are added in float32: a change below half a step of w's numbers
    counts. The backward pass forms nothing of w's size.

    Args:
      inputs: number of summed axes, 1 or 2.
    """
    return _project_frozen(inputs, scale, x, w, factors)[0]


def _project_frozen(inputs: int, scale: float, x: jax.Array, w: Any, factors: Any) -> tuple[jax.Array, Any]:
    wide = functools.partial(jnp.tensordot, axes=inputs, preferred_element_type=wide_dtype(x))
    matrix, output_scales = widen_codes(w, x.dtype)
    out = contract(x, matrix, inputs, wide_dtype(x)) * output_scales
    if factors is None:
        return out.astype(x.dtype), (x, w, None, None)
    a, b = factors
    # A GPU's compiler merges products that share an operand, and would copy w at each step to join a to it.
    narrow = wide(jax.lax.optimization_barrier(x), a).astype(x.dtype)
    change = jnp.tensordot(narrow, b, 1, preferred_element_type=out.dtype)
    return (out + scale * change).astype(x.dtype), (x, w, narrow, factors)


def _project_frozen_backward(inputs: int, scale: float, saved: Any, g: jax.Array) -> tuple[jax.Array, None, Any]:
    x, w, narrow, factors = saved
    outputs = g.ndim - 2

    def back(g: jax.Array, w: jax.Array, outputs: int) -> jax.Array:
        axes = (tuple(range(g.ndim - outputs, g.ndim)), tuple(range(w.ndim - outputs, w.ndim)))
        return jnp.tensordot(g, w, axes, preferred_element_type=wide_dtype(x))

    matrix, output_scales = widen_codes(w, x.dtype)
    d_x = back((g.astype(wide_dtype(x)) * output_scales).astype(x.dtype), matrix, outputs)
    if factors is None:
        return d_x.astype(x.dtype), None, None
    a, b = factors
    d_narrow = (scale * back(jax.lax.optimization_barrier(g), b, outputs)).astype(x.dtype)
    rows = ((0, 1), (0, 1))
    d_a = jnp.tensordot(x, d_narrow, rows, preferred_element_type=wide_dtype(x))
    d_b = scale * jnp.tensordot(narrow, g, rows, preferred_element_type=wide_dtype(x))
    d_x = d_x + back(d_narrow, a, 1)
    return d_x.astype(x.dtype), None, (d_a.astype(a.dtype), d_b.astype(b.dtype))


project_frozen.defvjp(_project_frozen, _project_frozen_backward)


def rms_norm(x: jax.Array, weight: jax.Array, norm: Norm) -> jax.Array:
    """Compute ``x / rms(x) * weight`` in float32 and return it in x's dtype; the mean is over the axes of the weight.
    OLMo 2 normalises all heads [N, H] as one vector.
    """
    wide = x.reshape(*x.shape[: x.ndim - weight.ndim], -1).astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + norm.eps)
    scale = weight.reshape((1,) * (wide.ndim - 1) + (-1,)).astype(jnp.float32) + (1.0 if norm.plus_one else 0.0)
    return (wide * scale).reshape(x.shape).astype(x.dtype)


def attention_scores(q: jax.Array, k: jax.Array, attention: Attention, scale: Any = 1) -> jax.Array:
    """Compute scaled, soft-capped attention scores, float32: of q [B, S, K, N / K, H] and k [B, K, H, Z] they are [B,
    K, S, N / K, Z], the order of the product: another costs a transposition in both passes. A single query per row is q
    [B, K, N / K, H] and gives [B, K, N / K, Z]: a query axis of size 1 made it four times as slow on CPUs. ``scale``:
    of each score's key.
    """
    letters = "bskgh,bkhz->bksgz" if q.ndim == 5 else "bkgh,bkhz->bkgz"
    return softcap(product(letters, q, k) * (attention.factor * scale), attention.softcap)


def softcap(x: jax.Array, cap: float | None) -> jax.Array:
    """Return ``cap * tanh(x / cap)``, or x if ``cap`` is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attention_weights(s: jax.Array, seen: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Return the softmax of scores s [B, K, S, N / K, Z] where ``seen``, over keys and sinks [K, N / K], which have no
    value.
    """
    s = jnp.where(seen, s, MASKED)
    if sinks is None:
        return jax.nn.softmax(s, axis=-1)
    sinks = sinks.astype(s.dtype)[None, :, None, :, None]
    top = jax.lax.stop_gradient(jnp.maximum(jnp.max(s, axis=-1, keepdims=True), sinks))
    weights = jnp.exp(s - top)
    return weights / (jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(sinks - top))


def mix(probabilities: jax.Array, v: jax.Array) -> jax.Array:
    """Weight values by attention: [B, K, S, N / K, Z] with [B, K, Z, H] gives [B, S, K, N / K, H]."""
    return jnp.einsum("bksgz,bkzh->bskgh", probabilities.astype(v.dtype), v)


SHORT = 1024
"""Longest row, in columns, that has all scores of a layer in memory at one time."""
MIN_PART, MAX_CHUNK, PREFIXES = 128, 256, 8
"""Fewest queries of a part, most queries of a chunk in long rows, and number of parts of a row."""
BLOCKS = (512, 256, 128)
"""Tile sizes of splash attention, best first; one of them must divide a row."""


class TokenRows(NamedTuple):
    """Packed token rows; int32[R, S] each. Group 0 is padding. A token sees earlier tokens of its row with the same
    group and either branch 0 (a prompt shared by the group) or its own branch. ``positions`` count along the path of
    each branch, so a prompt appears once, with any number of completions after it.
    """

    tokens: Any
    positions: Any
    group: Any
    branch: Any


def attention_over(rows: TokenRows, config: Attention, compute: ComputeOptions) -> Callable[..., jax.Array]:
    """Return the attention function of every layer over these rows: (q [B, S, K, N / K, H], k [B, K, H, S], v [B, K, S,
    H], window int32[], sinks) -> [B, S, K, N / K, H]. Window 0 sees everything; sinks (see ``attention_weights``) are
    for the plain form alone. InputError: rows of a length that splash attention cannot divide.
    """
    if config.sinks and compute.attention != "xla":
        raise InputError(
            f"learner.compute.attention {compute.attention!r} has no sinks, which this model has: use 'xla'"
        )
    if compute.attention == "splash":
        return functools.partial(_splash, rows, config, compute.interpret)
    if compute.attention == "triton":
        return functools.partial(_triton, rows, config, compute.interpret)
    if compute.attention == "cudnn":
        return functools.partial(_dot_product, rows, config, "xla" if compute.interpret else "cudnn")
    return functools.partial(_xla, rows, config)


def visible(
    rows: TokenRows, window: jax.Array | int, queries: slice = slice(None), keys: slice = slice(None)
) -> jax.Array:
    """Return the attention mask bool[R, queries, keys]: which query column sees which key column."""
    positions, group, branch = (jnp.asarray(x) for x in (rows.positions, rows.group, rows.branch))
    columns = jnp.arange(group.shape[1])[None]
    q = np.s_[:, queries, None]
    k = np.s_[:, None, keys]
    causal = columns[q] >= columns[k]
    same_path = (branch[k] == 0) | (branch[k] == branch[q])
    near = (window == 0) | (positions[q] - positions[k] < window)
    return causal & (group[q] == group[k]) & (group[q] > 0) & same_path & near


def part_columns(columns: int) -> int:
    """Return the number of query columns per part of a row; a part reads the keys up to its end."""
    return max(-(-columns // PREFIXES), min(MIN_PART, columns))


def _xla(
    rows: TokenRows,
    config: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: jax.Array,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attend one part of the queries at a time, with the keys up to the part's end: half of the scores are never made.
    In long rows parts are chunks of few queries, whose scores the backward pass recomputes.
    """
    total = q.shape[1]
    part = part_columns(total)
    parts = []

    def attend(q: jax.Array, seen: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return mix(attention_weights(attention_scores(q, k, config), seen[:, None, :, None], sinks), v)

    for start in range(0, total, part):
        end = min(start + part, total)

        inputs = (q[:, start:end], visible(rows, window, slice(start, end), slice(0, end)))
        keys = k[..., :end], v[:, :, :end]
        parts.append(attend(*inputs, *keys) if total <= SHORT else _in_chunks(attend, *inputs, *keys))
    return jnp.concatenate(parts, axis=1)


def _in_chunks(attend: Any, q: jax.Array, seen: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Apply ``attend`` to chunks of the queries, each recomputed in the backward pass."""
    chunks = -(-q.shape[1] // MAX_CHUNK)
    size = -(-q.shape[1] // chunks)
    room = (0, chunks * size - q.shape[1])
    padded = [jnp.pad(x, ((0, 0), room, *[(0, 0)] * (x.ndim - 2))) for x in (q, seen)]
    split = [jnp.moveaxis(x.reshape(len(x), chunks, size, *x.shape[2:]), 1, 0) for x in padded]
    chunk = jax.checkpoint(lambda inputs: attend(*inputs, k, v))
    out = jnp.moveaxis(jax.lax.map(chunk, split), 0, 1)
    return out.reshape(len(q), chunks * size, *out.shape[3:])[:, : q.shape[1]]


def _dot_product(
    rows: TokenRows,
    config: Attention,
    implementation: Any,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: jax.Array,
    sinks: None = None,
) -> jax.Array:
    """Apply jax.nn's attention with the whole mask; its fused kernels are for bfloat16 on GPUs."""
    heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
    keys = jnp.moveaxis(k, 3, 1)
    values = jnp.swapaxes(v, 1, 2)
    mask = visible(rows, window)
    # A row of nothing but forbidden keys is 0 / 0 in a fused kernel: padding sees itself.
    mask = (mask | jnp.eye(mask.shape[1], dtype=bool)[None])[:, None]
    out = jax.nn.dot_product_attention(
        heads, keys, values, mask=mask, scale=config.factor, implementation=implementation
    )
    return out.reshape(q.shape)


def _triton(
    rows: TokenRows,
    config: Attention,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: jax.Array,
    sinks: None = None,
) -> jax.Array:
    """Apply the kernels of ``gpu_attention``; shared prompts too are read in place."""
    kernel = gpu_attention.Kernel(config.factor, config.softcap, interpret)
    arrays = q.reshape(*q.shape[:2], -1, q.shape[-1]), jnp.moveaxis(k, 3, 1), jnp.swapaxes(v, 1, 2)
    seen = gpu_attention.spans(*(jnp.asarray(x) for x in (rows.group, rows.branch, rows.positions)), window)
    attend = functools.partial(gpu_attention.packed_attention, kernel)
    return _by_device(attend, 2, *arrays, seen).reshape(q.shape)


def _by_device(attend: Callable[..., jax.Array], axis: int, *arrays: jax.Array) -> jax.Array:
    """Apply ``attend`` to q, k and v, with their heads on ``axis``, and to arrays [B, ...], by rows and heads."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return attend(*arrays)
    # Query heads go where their key/value head is: if those do not divide, all heads stay together.
    axes = (BATCH, *[None] * (axis - 1), "tensor")
    heads = fit_spec(arrays[1].shape, axes, mesh)
    specs = (heads, heads, heads, *[PartitionSpec(heads[0])] * (len(arrays) - 3))
    return jax.shard_map(attend, in_specs=specs, out_specs=heads, check_vma=False)(*arrays)


def _splash(
    rows: TokenRows,
    config: Attention,
    interpret: bool,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: jax.Array,
    sinks: None = None,
) -> jax.Array:
    """Apply JAX's splash attention for TPUs to rows without shared prompts: a group is a segment."""
    heads = jnp.moveaxis(q.reshape(*q.shape[:2], -1, q.shape[-1]), 1, 2) * jnp.asarray(config.factor, q.dtype)
    inputs = heads, jnp.swapaxes(k, 2, 3), v, jnp.asarray(rows.group)
    windows = sorted(set(config.windows or (0,)))
    branches = [functools.partial(_splash_rows, config, interpret, each) for each in windows]
    chosen = jnp.searchsorted(jnp.asarray(windows, jnp.int32), window)
    out = branches[0](*inputs) if len(windows) == 1 else jax.lax.switch(chosen, branches, *inputs)
    return jnp.moveaxis(out, 2, 1).reshape(q.shape)


def _splash_rows(
    config: Attention, interpret: bool, window: int, q: jax.Array, k: jax.Array, v: jax.Array, group: jax.Array
) -> jax.Array:
    """Attend q [B, N, S, H] over k and v [B, K, S, H], group [B, S]; each device computes its own rows and heads."""
    # Half a second that programs without it need not wait for.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

    columns = q.shape[2]
    block = next((b for b in BLOCKS if columns % b == 0), None)
    if block is None:
        raise InputError(
            f"learner.compute.row_tokens {columns} must be a multiple of {BLOCKS[-1]} for splash attention"
        )
    shape = (columns, columns)
    mask = splash_mask.LocalMask(shape, (window - 1, 0), 0) if window else splash_mask.CausalMask(shape)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, group: jax.Array) -> jax.Array:
        kernel = splash_kernel.make_splash_mha(
            splash_mask.MultiHeadMask([mask] * q.shape[1]),
            head_shards=1,
            q_seq_shards=1,
            block_sizes=splash_kernel.BlockSizes(*(block,) * 8),  # ty: ignore[invalid-argument-type]
            attn_logits_soft_cap=config.softcap,
            interpret=interpret,
        )

        by_row = jax.vmap(lambda q, k, v, g: kernel(q, k, v, segment_ids=splash_kernel.SegmentIds(g, g)))
        return by_row(q, k, v, group)

    return _by_device(local, 1, q, k, v, group)


Rotation = tuple[jax.Array, jax.Array]
"""Of a layer: float32[R / 2], radians per token of each pair of the R numbers that are rotated; and a factor on them.
"""


def layer_constants(config: ModelConfig) -> tuple[Rotation, jax.Array]:
    """Return each layer's ``Rotation``, stacked over L, and sliding windows int32[L]. Linear scaling divides all
    frequencies; Llama-3's and YaRN's keep short wavelengths and blend in between. Layers with a window and a base of
    their own are not scaled; those that do not rotate have frequencies of 0. R is that of the widest heads.
    """
    windows = layer_windows(config)
    rotations = []
    for layer, window in enumerate(windows):
        attention = config.attention if window or config.global_attention is None else config.global_attention
        rope = attention.rope
        dims = rope.dims or attention.head_dim
        exponents = np.arange(0, dims, 2, dtype=np.float64) / dims
        if window and rope.local_theta is not None:
            frequencies, magnitude = 1.0 / rope.local_theta**exponents, 1.0
        else:
            frequencies = _scaled_frequencies(1.0 / rope.theta**exponents, rope)
            magnitude = rope.scaling.magnitude if isinstance(rope.scaling, Yarn) else 1.0
        rotates = not rope.layers or rope.layers[layer]
        turning = np.arange(len(frequencies)) < (rope.rotated_pairs or len(frequencies))
        rotations.append((frequencies * turning * rotates, magnitude if rotates else 1.0))
    widest = max(len(frequencies) for frequencies, _ in rotations)
    frequencies = np.stack([np.pad(frequencies, (0, widest - len(frequencies))) for frequencies, _ in rotations])
    magnitudes = [magnitude for _, magnitude in rotations]
    rotation = jnp.asarray(frequencies, jnp.float32), jnp.asarray(magnitudes, jnp.float32)
    return rotation, jnp.asarray(windows, jnp.int32)


def _scaled_frequencies(frequencies: np.ndarray, rope: Rope) -> np.ndarray:
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


def rotary_cos_sin(positions: jax.Array, rotation: Rotation) -> tuple[jax.Array, jax.Array]:
    """Return the cosines and sines by which ``rotate`` turns heads at positions [...], float32[..., R / 2] each."""
    frequencies, magnitude = rotation
    angles = positions[..., None].astype(jnp.float32) * jnp.expand_dims(frequencies, tuple(range(positions.ndim)))
    return jnp.cos(angles) * magnitude, jnp.sin(angles) * magnitude


def rotate(x: jax.Array, cos_sin: tuple[jax.Array, jax.Array], interleaved: bool = False) -> jax.Array:
    """Rotate the first R numbers of heads x [..., heads, H] by their ``rotary_cos_sin``. Pairs are of two halves as in
    Hugging Face, or neighbours where ``interleaved``.
    """
    cos, sin = (t[..., None, :] for t in cos_sin)
    dims = 2 * cos.shape[-1]
    rotated = x[..., :dims].astype(jnp.float32)
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    parts = (first * cos - second * sin, second * cos + first * sin)
    out = jnp.stack(parts, axis=-1).reshape(rotated.shape) if interleaved else jnp.concatenate(parts, axis=-1)
    return jnp.concatenate([out.astype(x.dtype), x[..., dims:]], axis=-1) if dims < x.shape[-1] else out.astype(x.dtype)
