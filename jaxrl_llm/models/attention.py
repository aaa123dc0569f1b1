"""Attention over packed rows by one of several back ends; the plain XLA form is what the others must equal."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import layers
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import Attention
from jaxrl_llm.sharding import BATCH, fitting

SHORT = 1024
"""Columns up to which a layer's scores all exist at one time."""
LEAST, MOST, PREFIXES = 128, 256, 8
"""Queries of a chunk at least, and at most in long rows; parts of a row whose keys end with the part."""
BLOCKS = (512, 256, 128)
"""Tile sizes of splash attention, best first; one of them must divide a row."""


class Rows(NamedTuple):
    """Packed token rows; int32[R, S] each. Group 0 is padding.

    A token sees earlier tokens of its row with the same group whose branch is 0 (a prompt shared by the group) or its
    own. ``positions`` count along the path of each branch, so a prompt stands once however many completions follow it.
    """

    tokens: Any
    positions: Any
    group: Any
    branch: Any


Windowed = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
"""(q [B, S, K, N / K, H], k [B, K, H, S], v [B, K, S, H], window int32[]) -> [B, S, K, N / K, H].

Window 0 sees everything.
"""


def attention_over(rows: Rows, config: Attention, compute: Compute) -> Windowed:
    """The attention of every layer over these rows.

    Raises:
      InputError: rows of a length that splash attention cannot divide.
    """
    if compute.attention == "splash":
        return functools.partial(_splash, rows, config, compute.interpret)
    if compute.attention == "cudnn":
        return functools.partial(_dot_product, rows, config, "xla" if compute.interpret else "cudnn")
    return functools.partial(_xla, rows, config)


def visible(rows: Rows, window: jax.Array | int, queries: slice = slice(None), keys: slice = slice(None)) -> jax.Array:
    """Which of the queries' columns sees which of the keys': bool[R, queries, keys]."""
    positions, group, branch = (jnp.asarray(x) for x in (rows.positions, rows.group, rows.branch))
    columns = jnp.arange(group.shape[1])

    def q(x: jax.Array) -> jax.Array:
        return x[:, queries, None]

    def k(x: jax.Array) -> jax.Array:
        return x[:, None, keys]

    causal = columns[None, queries, None] >= columns[None, None, keys]
    same_path = (k(branch) == 0) | (k(branch) == q(branch))
    near = (window == 0) | (q(positions) - k(positions) < window)
    return causal & (q(group) == k(group)) & (q(group) > 0) & same_path & near


def part_columns(columns: int) -> int:
    """Columns of a part of a row, whose queries get the keys up to its end."""
    return max(-(-columns // PREFIXES), min(LEAST, columns))


def _xla(rows: Rows, config: Attention, q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array) -> jax.Array:
    """Scores of a part of the queries at a time, with the keys up to the part's end: half of all scores are never made.

    In long rows the backward pass makes a part's scores again, and a part takes few queries at a time.
    """
    total = q.shape[1]
    part = part_columns(total)
    parts = []
    for start in range(0, total, part):
        end = min(start + part, total)
        attend = functools.partial(_scores_and_mix, config)
        inputs = (q[:, start:end], visible(rows, window, slice(start, end), slice(0, end)))
        keys = k[..., :end], v[:, :, :end]
        parts.append(attend(*inputs, *keys) if total <= SHORT else _few_at_a_time(attend, *inputs, *keys))
    return jnp.concatenate(parts, axis=1)


def _few_at_a_time(attend: Any, q: jax.Array, seen: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """``attend`` over chunks of the queries, each computed again in the backward pass."""
    chunks = -(-q.shape[1] // MOST)
    size = -(-q.shape[1] // chunks)

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(
            jnp.pad(x, ((0, 0), (0, chunks * size - x.shape[1]), *[(0, 0)] * (x.ndim - 2))).reshape(
                len(x), chunks, size, *x.shape[2:]
            ),
            1,
            0,
        )

    chunk = jax.checkpoint(lambda given: attend(*given, k, v))
    out = jnp.moveaxis(jax.lax.map(chunk, (split(q), split(seen))), 0, 1)
    return out.reshape(len(q), chunks * size, *out.shape[3:])[:, : q.shape[1]]


def _scores_and_mix(config: Attention, q: jax.Array, seen: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    s = jnp.where(seen[:, None, :, None], layers.scores(q, k, config), layers.MASKED)
    return layers.mix(jax.nn.softmax(s, axis=-1), v)


def _dot_product(
    rows: Rows, config: Attention, implementation: Any, q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array
) -> jax.Array:
    """jax.nn's attention with the whole mask; its fused kernels are for bfloat16 on GPUs."""
    heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
    keys = jnp.moveaxis(k, 3, 1)
    values = jnp.swapaxes(v, 1, 2)
    mask = visible(rows, window)
    # A row of nothing but forbidden keys is 0 / 0 in a fused kernel: padding sees itself.
    mask = (mask | jnp.eye(mask.shape[1], dtype=bool)[None])[:, None]
    scale = config.scale if config.scale is not None else config.head_dim**-0.5
    out = jax.nn.dot_product_attention(heads, keys, values, mask=mask, scale=scale, implementation=implementation)
    return out.reshape(q.shape)


def _splash(
    rows: Rows, config: Attention, interpret: bool, q: jax.Array, k: jax.Array, v: jax.Array, window: jax.Array
) -> jax.Array:
    """JAX's splash attention for TPUs, on rows whose groups share no prompt: a group is a segment."""
    scale = config.scale if config.scale is not None else config.head_dim**-0.5
    heads = jnp.moveaxis(q.reshape(*q.shape[:2], -1, q.shape[-1]), 1, 2) * jnp.asarray(scale, q.dtype)
    inputs = heads, jnp.swapaxes(k, 2, 3), v, jnp.asarray(rows.group)
    windows = sorted(set(config.windows or (0,)))
    branches = [functools.partial(_splash_rows, config, interpret, each) for each in windows]
    chosen = jnp.searchsorted(jnp.asarray(windows, jnp.int32), window)
    out = branches[0](*inputs) if len(windows) == 1 else jax.lax.switch(chosen, branches, *inputs)
    return jnp.moveaxis(out, 2, 1).reshape(q.shape)


def _splash_rows(
    config: Attention, interpret: bool, window: int, q: jax.Array, k: jax.Array, v: jax.Array, group: jax.Array
) -> jax.Array:
    """q [B, N, S, H], k and v [B, K, S, H], group [B, S]; each device its own rows and heads."""
    mesh = jax.sharding.get_abstract_mesh()

    def local(q: jax.Array, k: jax.Array, v: jax.Array, group: jax.Array) -> jax.Array:
        kernel, segments = _splash_kernel(q.shape[1], q.shape[2], window, config.softcap, interpret)

        def one(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> jax.Array:
            return kernel(q, k, v, segment_ids=segments(g, g))

        return jax.vmap(one)(q, k, v, group)

    if mesh.empty:
        return local(q, k, v, group)
    # Query heads go where their key/value head is: if those do not divide, all heads stay together.
    heads = fitting(k.shape, (BATCH, "tensor"), mesh)
    specs = (heads, heads, heads, PartitionSpec(heads[0]))
    return jax.shard_map(local, in_specs=specs, out_specs=heads, check_vma=False)(q, k, v, group)


def _splash_kernel(heads: int, columns: int, window: int, softcap: float | None, interpret: bool) -> tuple[Any, Any]:
    """The kernel of one row, and the type of its segments."""
    # Half a second that programs without it need not wait for.
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash_kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

    block = next((b for b in BLOCKS if columns % b == 0), None)
    if block is None:
        raise InputError(f"learner.row_tokens {columns} must be a multiple of {BLOCKS[-1]} for splash attention")
    shape = (columns, columns)
    mask = splash_mask.LocalMask(shape, (window - 1, 0), 0) if window else splash_mask.CausalMask(shape)
    sizes = splash_kernel.BlockSizes(*(block,) * 8)
    kernel = splash_kernel.make_splash_mha(
        splash_mask.MultiHeadMask([mask] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )
    return kernel, splash_kernel.SegmentIds
