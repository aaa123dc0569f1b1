"""Attention over packed rows as kernels for GPUs, which Pallas lowers to Triton; no array has a row's length twice.

The mask is three numbers for each query (``spans``). A block of queries reads the blocks of keys that one of them sees,
and no others: of a group with a shared prompt those of the prompt and of its own completion (the tiles of
FlashAttention, arXiv 2307.08691). Sums are float32, and added in one order in every run.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

LOWEST = -1e30
"""The score of a key that a query does not see: finite, so that one that sees none stays finite."""


class Kernel(NamedTuple):
    """Static options of the kernels: factor (``scale``) and cap (``softcap``, or None) of the scores; ``interpret``:
    whether XLA computes what a GPU would, for tests.
    """

    scale: float
    softcap: float | None
    interpret: bool


class Tiles(NamedTuple):
    """Tiles of one kernel: queries and keys of a block, warps, and stages of the pipeline of loads."""

    queries: int
    keys: int
    warps: int
    stages: int


FORWARD, BACKWARD = Tiles(128, 64, 8, 3), Tiles(64, 64, 4, 2)


def spans(group: jax.Array, branch: jax.Array, positions: jax.Array, window: jax.Array | int) -> jax.Array:
    """Return the keys that each query of packed rows sees, from ``TokenRows``' arrays int32[B, S], as int32[B, 3, S]:
    begin and end of the shared prompt's columns, and the begin of those of the query's own branch, which end with
    itself; only what is inside the ``window`` (tokens that a query sees, itself included; 0 for all). Padding sees
    nothing.

    A group's columns must follow each other, its prompt (branch 0) first and each branch in one piece, as packing lays
    them.
    """
    columns = jnp.broadcast_to(jnp.arange(group.shape[1], dtype=jnp.int32), group.shape)
    changes = jnp.pad(group[:, 1:] != group[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    turns = changes | jnp.pad(branch[:, 1:] != branch[:, :-1], ((0, 0), (1, 0)))
    begins, branch_starts = (jax.lax.cummax(jnp.where(at, columns, 0), axis=1) for at in (changes, turns))
    # The prompt ends where the branch first changes; a query of the prompt itself has nothing before its own run.
    ends = jax.lax.cummin(jnp.where(turns & ~changes, columns, group.shape[1]), axis=1, reverse=True)
    prompts = jnp.where(branch == 0, ends, columns)
    last = jnp.minimum(jnp.take_along_axis(prompts, begins, axis=1), branch_starts)
    limit = jnp.where(window > 0, window, group.shape[1])
    first = jnp.minimum(jnp.maximum(begins, begins + positions - limit + 1), last)
    branch_starts = jnp.maximum(branch_starts, columns - limit + 1)
    nothing = jnp.array([0, 0, group.shape[1]], jnp.int32)[None, :, None]
    return jnp.where(group[:, None] > 0, jnp.stack([first, last, branch_starts], axis=1), nothing)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def packed_attention(kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> jax.Array:
    """Attend q [B, S, N, H] over k, v [B, S, K, H], K dividing N, by ``spans``; a query that sees nothing gives 0."""
    return _packed_forward(kernel, q, k, v, seen)[0]


def reach_of(seen: jax.Array, tiles: Tiles) -> jax.Array:
    """Return the blocks of keys that blocks of queries read: two pairs of begin and end, int32[B, S / queries, 4]."""
    columns = seen.shape[2]
    first, last, branch_starts = seen.reshape(len(seen), 3, -1, tiles.queries).swapaxes(0, 1)
    start = jnp.arange(0, columns, tiles.queries, dtype=jnp.int32)[None, :, None]
    real = branch_starts < columns
    # What is inside the block's own columns is among those that it reads anyway.
    before = real & (first < jnp.minimum(last, start))
    low = jnp.min(jnp.where(before, first, columns), axis=2) // tiles.keys
    high = -(-jnp.max(jnp.where(before, jnp.minimum(last, start), 0), axis=2) // tiles.keys)
    begin = jnp.min(jnp.where(real, jnp.minimum(branch_starts, start), columns), axis=2) // tiles.keys
    end = jnp.where(jnp.any(real, axis=2), (start[..., 0] + tiles.queries) // tiles.keys, begin)
    high = jnp.minimum(high, begin)
    return jnp.stack([jnp.minimum(low, high), high, begin, end], axis=2)


def readers_of(reach: jax.Array, blocks: int) -> jax.Array:
    """Return the first and the last block of queries, plus one, that read each block of keys: int32[B, blocks, 2]."""
    numbers = jnp.arange(blocks, dtype=jnp.int32)[None, :, None]
    low, high, begin, end = (x[:, None] for x in jnp.moveaxis(reach, 2, 0))
    reads = ((low <= numbers) & (numbers < high)) | ((begin <= numbers) & (numbers < end))
    queries = jnp.arange(reach.shape[1], dtype=jnp.int32)[None, None]
    last = jnp.max(jnp.where(reads, queries + 1, 0), axis=2)
    return jnp.stack([jnp.minimum(jnp.min(jnp.where(reads, queries, queries.size), axis=2), last), last], axis=2)


def _dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


def _qk_scores(kernel: Kernel, q: jax.Array, k: jax.Array) -> jax.Array:
    s = _dot(q, k.T) * kernel.scale
    return s if kernel.softcap is None else kernel.softcap * jnp.tanh(s / kernel.softcap)


def _visible(spans: Any, row: jax.Array, column: jax.Array) -> jax.Array:
    """Whether queries at columns ``row`` [Q] with these spans [Q] see keys at columns ``column`` [Z]: bool[Q, Z]."""
    first, last, branch_starts = (x[:, None] for x in spans)
    key = column[None]
    return ((first <= key) & (key < last)) | ((branch_starts <= key) & (key <= row[:, None]))


def _pallas_call(kernel: Kernel, tiles: Tiles, body: Any, **arguments: Any) -> Any:
    """Return the Pallas call of a kernel's body."""
    # Half a second that programs without it need not wait for.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    parameters = triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages)
    return pl.pallas_call(body, interpret=kernel.interpret, compiler_params=parameters, **arguments)


def _specs(tiles: Tiles, q: jax.Array, k: jax.Array) -> dict[str, Any]:
    """Return what a program of a block of queries (i), a head (n) and a row (b) is given of each kind of array."""
    from jax.experimental import pallas as pl

    columns, width, share = q.shape[1], q.shape[3], q.shape[2] // k.shape[2]
    return {
        "reach": pl.BlockSpec((None, None, 4), lambda i, n, b: (b, i, 0)),
        "spans": pl.BlockSpec((None, 3, tiles.queries), lambda i, n, b: (b, 0, i)),
        "queries": pl.BlockSpec((None, tiles.queries, None, width), lambda i, n, b: (b, i, n, 0)),
        "keys": pl.BlockSpec((None, columns, None, width), lambda i, n, b: (b, 0, n // share, 0)),
        "sums": pl.BlockSpec((None, 2, None, tiles.queries), lambda i, n, b: (b, 0, n, i)),
        "logsum": pl.BlockSpec((None, None, tiles.queries), lambda i, n, b: (b, n, i)),
    }


def _call_by_queries(
    kernel: Kernel, tiles: Tiles, q: jax.Array, k: jax.Array, body: Any, name: str, inputs: tuple[str, ...], **out: Any
) -> Any:
    """Return the Pallas call with a program for each block of queries, head and row. ``inputs`` and ``out``, shapes by
    name: kinds of arrays in ``_specs``.
    """
    spec, (rows, columns, heads, _) = _specs(tiles, q, k), q.shape
    return _pallas_call(
        kernel,
        tiles,
        body,
        name=name,
        grid=(columns // tiles.queries, heads, rows),
        in_specs=[spec[x] for x in inputs],
        out_specs=[spec[x] for x in out],
        out_shape=[*out.values()],
    )


def _over_keys(reach: Any, step: Any, carry: Any) -> Any:
    """Run ``step(block of keys, carry)`` over the blocks of two spans."""
    low, high, begin, end = (reach[i] for i in range(4))
    first_count = high - low

    def body(t: jax.Array, carry: Any) -> Any:
        return step(jnp.where(t < first_count, low + t, begin + t - first_count), carry)

    return jax.lax.fori_loop(0, first_count + end - begin, body, carry)


def _packed_forward(kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, seen: jax.Array) -> tuple[jax.Array, Any]:
    from jax.experimental import pallas as pl

    tiles = FORWARD
    (rows, columns, heads, width) = q.shape

    def body(reach: Any, spans: Any, q: Any, k: Any, v: Any, out: Any, logsum: Any) -> None:
        row = pl.program_id(0) * tiles.queries + jnp.arange(tiles.queries)
        row_spans = [spans[i, :] for i in range(3)]
        queries = q[...]

        def step(block: jax.Array, carry: Any) -> Any:
            top, mass, mixed = carry
            at = pl.ds(block * tiles.keys, tiles.keys)
            visible = _visible(row_spans, row, block * tiles.keys + jnp.arange(tiles.keys))
            s = jnp.where(visible, _qk_scores(kernel, queries, k[at, :]), LOWEST)
            higher = jnp.maximum(top, jnp.max(s, axis=1))
            # A query that sees none of these keys has the top of those before.
            weights = jnp.where(visible, jnp.exp(s - higher[:, None]), 0.0)
            decay = jnp.exp(top - higher)
            mixed = mixed * decay[:, None] + _dot(weights.astype(v.dtype), v[at, :])
            return higher, mass * decay + jnp.sum(weights, axis=1), mixed

        empty = jnp.full((tiles.queries,), LOWEST, jnp.float32), jnp.zeros((tiles.queries,), jnp.float32)
        initial = *empty, jnp.zeros((tiles.queries, width), jnp.float32)
        top, mass, mixed = _over_keys(reach, step, initial)
        mass = jnp.where(mass > 0, mass, 1.0)
        out[...] = (mixed / mass[:, None]).astype(out.dtype)
        logsum[...] = top + jnp.log(mass)

    shapes = {
        "queries": jax.ShapeDtypeStruct(q.shape, q.dtype),
        "logsum": jax.ShapeDtypeStruct((rows, heads, columns), jnp.float32),
    }
    inputs = ("reach", "spans", "queries", "keys", "keys")
    call = _call_by_queries(kernel, tiles, q, k, body, "attention", inputs, **shapes)
    out, logsum = call(reach_of(seen, tiles), seen, q, k, v)
    return out, (q, k, v, seen, out, logsum)


def _slopes(kernel: Kernel, s: jax.Array, g: jax.Array, v: jax.Array, visible: Any, logsum: Any, dot: Any) -> Any:
    """Return probabilities and slopes of the scores [Q, Z]; ``dot``: ``g . out`` of each query."""
    weights = jnp.where(visible, jnp.exp(s - logsum[:, None]), 0.0)
    slope = weights * (_dot(g, v.T) - dot[:, None])
    return weights, slope if kernel.softcap is None else slope * (1 - jnp.square(s / kernel.softcap))


def _packed_backward(kernel: Kernel, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, None]:
    q, k, v, seen, out, logsum = saved
    dot = jnp.einsum("bsnh,bsnh->bns", g.astype(jnp.float32), out.astype(jnp.float32))
    reach = reach_of(seen, BACKWARD)
    arguments = (kernel, reach, seen, q, k, v, g, jnp.stack([logsum, dot], axis=1))
    to_keys, to_values = _key_gradients(*arguments)
    return _query_gradient(*arguments), to_keys, to_values, None


def _query_gradient(kernel: Kernel, reach: jax.Array, seen: jax.Array, *arrays: jax.Array) -> jax.Array:
    from jax.experimental import pallas as pl

    tiles, (q, k) = BACKWARD, arrays[:2]
    width = q.shape[-1]

    def body(reach: Any, spans: Any, q: Any, k: Any, v: Any, g: Any, sums: Any, out: Any) -> None:
        row = pl.program_id(0) * tiles.queries + jnp.arange(tiles.queries)
        row_spans, logsum, dot = [spans[i, :] for i in range(3)], sums[0, :], sums[1, :]
        queries, slope_out = q[...], g[...]

        def step(block: jax.Array, carry: jax.Array) -> jax.Array:
            at = pl.ds(block * tiles.keys, tiles.keys)
            visible = _visible(row_spans, row, block * tiles.keys + jnp.arange(tiles.keys))
            keys = k[at, :]
            slope = _slopes(kernel, _qk_scores(kernel, queries, keys), slope_out, v[at, :], visible, logsum, dot)[1]
            return carry + _dot(slope.astype(keys.dtype), keys)

        gradient = _over_keys(reach, step, jnp.zeros((tiles.queries, width), jnp.float32))
        out[...] = (gradient * kernel.scale).astype(out.dtype)

    inputs = ("reach", "spans", "queries", "keys", "keys", "queries", "sums")
    shape = jax.ShapeDtypeStruct(q.shape, q.dtype)
    call = _call_by_queries(kernel, tiles, q, k, body, "attention_queries", inputs, queries=shape)
    return call(reach, seen, *arrays)[0]


def _key_gradients(kernel: Kernel, reach: jax.Array, seen: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Return the gradients of keys and values: a program has a block of keys, and goes over all heads that read it."""
    from jax.experimental import pallas as pl

    tiles, (q, k) = BACKWARD, arrays[:2]
    (rows, columns, heads, width) = q.shape
    share = heads // k.shape[2]

    def body(readers: Any, spans: Any, q: Any, k: Any, v: Any, g: Any, sums: Any, dk: Any, dv: Any) -> None:
        column = pl.program_id(0) * tiles.keys + jnp.arange(tiles.keys)
        keys, values = k[...], v[...]
        first, count = readers[0], readers[1] - readers[0]

        def step(t: jax.Array, carry: Any) -> Any:
            head, start = t // count, (first + t % count) * tiles.queries
            at = pl.ds(start, tiles.queries)
            visible = _visible([spans[i, at] for i in range(3)], start + jnp.arange(tiles.queries), column)
            queries, slope_out = q[at, head, :], g[at, head, :]
            logsum, dot = sums[0, head, at], sums[1, head, at]
            weights, slope = _slopes(kernel, _qk_scores(kernel, queries, keys), slope_out, values, visible, logsum, dot)
            to_keys = carry[0] + _dot(slope.T.astype(queries.dtype), queries)
            return to_keys, carry[1] + _dot(weights.T.astype(slope_out.dtype), slope_out)

        nothing = jnp.zeros((tiles.keys, width), jnp.float32)
        to_keys, to_values = jax.lax.fori_loop(0, share * count, step, (nothing, nothing))
        dk[...] = (to_keys * kernel.scale).astype(dk.dtype)
        dv[...] = to_values.astype(dv.dtype)

    block = pl.BlockSpec((None, tiles.keys, None, width), lambda j, n, b: (b, j, n, 0))
    queries = pl.BlockSpec((None, columns, share, width), lambda j, n, b: (b, 0, n, 0))
    sums = pl.BlockSpec((None, 2, share, columns), lambda j, n, b: (b, 0, n, 0))
    call = _pallas_call(
        kernel,
        tiles,
        body,
        name="attention_keys",
        grid=(columns // tiles.keys, k.shape[2], rows),
        in_specs=[
            pl.BlockSpec((None, None, 2), lambda j, n, b: (b, j, 0)),
            pl.BlockSpec((None, 3, columns), lambda j, n, b: (b, 0, 0)),
            queries,
            block,
            block,
            queries,
            sums,
        ],
        out_specs=[block, block],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype)] * 2,
    )
    return call(readers_of(reach, columns // tiles.keys), seen, *arrays)


packed_attention.defvjp(_packed_forward, _packed_backward)
