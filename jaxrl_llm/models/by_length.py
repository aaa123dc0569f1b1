"""Decode attention by length: kernels that read the live columns of each row of a cache, and nothing behind them.

Lengths are data, so one program serves rows of every length. The kernels take the cache of all layers and the number of
one: a layer is never cut out of it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.models.config import Attention
from jaxrl_llm.models.layers import MASKED, softcap
from jaxrl_llm.sharding import batch_parts, platform_of

LANES = 128
"""Numbers of a TPU's tile in its last dimension."""
LEAST_BLOCK, COLUMNS_OF_BLOCK = LANES, ((4096, 512), (2048, 256))
"""Columns of a block of a short cache, then of longer ones: (least columns of the cache, of a block)."""
GPU_BLOCK, GPU_SPAN = 64, 2048
"""Columns that a GPU's kernel reads at once, and the most that one of its programs reads: a long row has several."""


@dataclasses.dataclass(frozen=True)
class ByLength:
    """Choice of the kernels.

    Attributes:
      platform: "tpu" or "gpu".
      interpret: XLA computes what the kernels would, slowly, on any platform: for tests.
    """

    platform: str
    interpret: bool = False


class Seen(NamedTuple):
    """The columns that queries may see: ``least <= column < limit``; int32, one number for each query or several."""

    least: jax.Array
    limit: jax.Array

    def each(self, change: Callable[[jax.Array], jax.Array]) -> "Seen":
        """Return the bounds changed alike."""
        return Seen(change(self.least), change(self.limit))


def seen(limit: jax.Array, newest: jax.Array, window: int) -> Seen:
    """Return the columns below ``limit`` in a window that ends with column ``newest``; window 0 has no beginning."""
    least = jnp.maximum(newest - window + 1, 0) if window else jnp.zeros_like(limit)
    return Seen(least, limit)


class PartialAttention(NamedTuple):
    """Attention of queries over some of their columns, float32.

    Attributes:
      top: [B, K, M, 1], the largest score.
      mass: [B, K, M, 1], the sum of exp(score - top).
      mixed: [B, K, M, H], the values weighted by exp(score - top).
    """

    top: jax.Array
    mass: jax.Array
    mixed: jax.Array


def form_for(config: Attention, slots: int, mesh: Mesh | AbstractMesh | None) -> ByLength | None:
    """Return the kernels for a model and a mesh; None for the plain form, which reads all columns of every row.

    CPUs have no kernels. A GPU's want heads of a power of two, and no mesh may divide the slots unevenly.
    """
    platform = jax.default_backend() if mesh is None else platform_of(mesh)
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if platform not in ("tpu", "gpu") or (mesh is not None and slots % batch_parts(mesh)):
        return None
    width = config.head_dim
    powers = width & (width - 1) == 0 and 16 <= width <= 256
    return ByLength(platform) if platform == "tpu" or powers else None


def block_columns(columns: int) -> int:
    """Return the columns of a block in a cache of so many."""
    return next((block for least, block in COLUMNS_OF_BLOCK if columns >= least), LEAST_BLOCK)


def whole_blocks(columns: int) -> int:
    """Return the columns of a cache for so many, in whole blocks."""
    block = block_columns(columns)
    return -(-columns // block) * block


def live_blocks(seen: Seen, block: int) -> tuple[jax.Array, jax.Array]:
    """Return the first block of each row that any of its queries sees, and the number of blocks from there to the last.

    ``seen``: [B, M].
    """
    some = seen.limit > seen.least
    first = jnp.min(jnp.where(some, seen.least, jnp.iinfo(jnp.int32).max), axis=1) // block
    end = -(-jnp.max(jnp.where(some, seen.limit, 0), axis=1) // block)
    return first, jnp.maximum(end - first, 0)


class Reads(NamedTuple):
    """The order in which a TPU's kernel reads blocks; int32[halves * steps] but for the last.

    Attributes:
      row: of the half, for which a step computes.
      block: row of the half * blocks of a row + block; a step that reads nothing repeats a neighbour's.
      live: whether the step computes anything.
      steps: int32[1], of the longer half.
    """

    row: jax.Array
    block: jax.Array
    live: jax.Array
    steps: jax.Array


class Reading(NamedTuple):
    """The columns that a kernel reads of a cache's rows, and how it comes to them.

    Attributes:
      seen: [B, m], m divides the queries of a row.
      order: ``Reads`` of a TPU; of a GPU the first live block of each row and the end of these, int32[B].
    """

    seen: Seen
    order: Any


def reading(form: ByLength, seen: Seen, columns: int) -> Reading:
    """Return the reading of so much of rows of ``columns`` columns."""
    block = block_columns(columns) if form.platform == "tpu" else min(columns, GPU_BLOCK)
    if form.platform == "tpu":
        return Reading(seen, reads(seen, block, columns // block, halves_of(len(seen.limit))))
    first, count = live_blocks(seen, block)
    return Reading(seen, (first, first + count))


def reads(seen: Seen, block: int, each: int, halves: int) -> Reads:
    """Return the reads of rows of ``each`` blocks: the rows in order, in two halves where a chip has two cores.

    A row without a visible column still has one step, which reads nothing.
    """
    first, count = (x.reshape(halves, -1) for x in live_blocks(seen, block))
    rows = first.shape[1]
    places = jnp.arange(rows * each, dtype=jnp.int32)

    def half(first: jax.Array, count: jax.Array) -> Reads:
        taken = jnp.maximum(count, 1)
        ends = jnp.cumsum(taken)
        row = jnp.minimum(jnp.searchsorted(ends, places, side="right"), rows - 1).astype(jnp.int32)
        inside = places - (ends - taken)[row]
        live = inside < count[row]
        known = jax.lax.cummax(jnp.where(live, places, -1))
        known = jnp.where(known < 0, jnp.argmax(live).astype(jnp.int32), known)
        own = jnp.minimum(row * each + first[row] + inside, rows * each - 1)
        return Reads(row, own[known], live.astype(jnp.int32), ends[-1])

    found = jax.vmap(half)(first, count)
    row, blocks, live = (x.reshape(-1) for x in found[:3])
    return Reads(row, blocks, live, jnp.max(found.steps, keepdims=True))


def halves_of(rows: int) -> int:
    """Return the number of parts of the rows that a TPU's kernel works on side by side."""
    return 2 if rows % 2 == 0 else 1


def fetched(step: tuple[Any, Any], table: Reads, rows: int, each: int, halves: int) -> tuple[Any, Any, Any]:
    """Return the row computed in a step (half, number) of a TPU's kernel, and the row and block that it reads."""
    half, number = step
    at = half * (rows // halves * each) + number
    first = half * (rows // halves)
    read = table.block[at]
    # Signed division of Python's kind asks which TPU is there, and none need be.
    return first + table.row[at], first + jax.lax.div(read, jnp.int32(each)), jax.lax.rem(read, jnp.int32(each))


def attend(
    form: ByLength, config: Attention, q: jax.Array, cache: Any, layer: jax.Array, reading: Reading
) -> list[PartialAttention]:
    """Attend over the live columns of the first B rows of one layer of a cache.

    Args:
      form: the kernels.
      config: of the attention.
      q: [B, K, M, H].
      cache: k [L, E, K, H, S] and v [L, E, K, S, H], S of whole blocks.
      layer: int32[].
      reading: of the rows.

    Returns:
      Parts of the result, whose columns are disjoint; ``top`` of a query without a column is ``MASKED``.
    """
    kernel = {"tpu": _tpu, "gpu": _gpu}[form.platform]
    each = q.shape[2] // reading.seen.limit.shape[1]
    seen = reading.seen.each(lambda x: jnp.repeat(x, each, axis=1))
    return kernel(form.interpret, config, q, cache, layer, Reading(seen, reading.order))


def _update(
    config: Attention, q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, before: PartialAttention,
    turned: bool = False,
) -> PartialAttention:  # fmt: skip
    """Add a block of columns to the attention of queries q [M, H] over k [H, S] and v [S, H]; ``visible`` [M, S].

    ``turned``: v is [H, S].
    """
    scale = config.scale if config.scale is not None else config.head_dim**-0.5
    found = softcap(jnp.dot(q, k, preferred_element_type=jnp.float32) * scale, config.softcap)
    found = jnp.where(visible, found, MASKED)
    top = jnp.maximum(before.top, jnp.max(found, axis=1, keepdims=True))
    weights = jnp.exp(found - top)
    kept = jnp.exp(before.top - top)
    along = (((1,), (1 if turned else 0,)), ((), ()))
    mixed = jax.lax.dot_general(weights.astype(v.dtype), v, along, preferred_element_type=jnp.float32)
    return PartialAttention(
        top, kept * before.mass + jnp.sum(weights, axis=1, keepdims=True), kept * before.mixed + mixed
    )


def _none(queries: int, width: int) -> PartialAttention:
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    return PartialAttention(jnp.full((queries, 1), MASKED, jnp.float32), zeros((queries, 1)), zeros((queries, width)))


def _shapes(*shape: int) -> PartialAttention:
    one = jax.ShapeDtypeStruct((*shape[:-1], 1), jnp.float32)
    return PartialAttention(one, one, jax.ShapeDtypeStruct(shape, jnp.float32))


def _tpu(
    interpret: bool, config: Attention, q: jax.Array, cache: Any, layer: jax.Array, reading: Reading
) -> list[PartialAttention]:
    """One step of the grid for each live block, of all heads; the sums of a row stay in the chip's memory meanwhile."""
    (rows, heads, queries, width) = q.shape
    block = block_columns(cache.v.shape[3])
    each = cache.v.shape[3] // block
    halves = halves_of(rows)
    seen, table = reading
    # Of values narrower than a TPU's tile, columns are last in memory: turned, they are read as they lie.
    turned = width < LANES
    given = jnp.swapaxes(cache.v, 3, 4) if turned else cache.v

    def kernel(row, blocks, live, layer, q, k, v, least, limit, *found):
        half, number = pl.program_id(0), pl.program_id(1)
        at = half * (rows // halves * each) + number
        earlier = row[jnp.maximum(at - 1, 0)]

        @pl.when((number == 0) | (row[at] != earlier))
        def _begin() -> None:
            for head in range(heads):
                for ref, zero in zip(found, _none(queries, width), strict=True):
                    ref[0, head] = zero

        @pl.when(live[at] == 1)
        def _add() -> None:
            columns = jax.lax.rem(blocks[at], jnp.int32(each)) * block + jax.lax.broadcasted_iota(
                jnp.int32, (queries, block), 1
            )
            visible = (columns >= least[0]) & (columns < limit[0])
            for head in range(heads):
                before = PartialAttention(*(ref[0, head] for ref in found))
                after = _update(config, q[0, head], k[0, 0, head], v[0, 0, head], visible, before, turned)
                for ref, value in zip(found, after, strict=True):
                    ref[0, head] = value

    def own(*blocked: int):
        return pl.BlockSpec((1, *blocked), lambda h, n, *given: (where(h, n, *given)[0], *(0 for _ in blocked)))

    def where(half, number, *given):
        return fetched((half, number), Reads(*given[:3], steps=None), rows, each, halves)

    def keys(half, number, *given):
        _, row, column = where(half, number, *given)
        return given[3][0], row, 0, 0, column

    def values(half, number, *given):
        _, row, column = where(half, number, *given)
        return given[3][0], row, 0, *((0, column) if turned else (column, 0))

    whole = (heads, queries, 1), (heads, queries, 1), (heads, queries, width)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(halves, table.steps[0]),
        in_specs=[
            own(heads, queries, width),
            pl.BlockSpec((1, 1, heads, width, block), keys),
            pl.BlockSpec((1, 1, heads, *((width, block) if turned else (block, width))), values),
            own(queries, 1),
            own(queries, 1),
        ],
        out_specs=[own(*shape) for shape in whole],
    )
    found = pl.pallas_call(
        kernel,
        out_shape=list(_shapes(*q.shape)),
        grid_spec=grid,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="attention_by_length",
    )(*table[:3], layer.reshape(1), q, cache.k, given, seen.least[..., None], seen.limit[..., None])
    return [PartialAttention(*found)]


def _gpu(
    interpret: bool, config: Attention, q: jax.Array, cache: Any, layer: jax.Array, reading: Reading
) -> list[PartialAttention]:
    """One program for each row, head and span of columns, with a loop over the live ones of the span."""
    (rows, heads, queries, width) = q.shape
    columns = cache.v.shape[3]
    block = min(columns, GPU_BLOCK)
    spans = -(-columns // GPU_SPAN)
    padded = max(16, 1 << (queries - 1).bit_length())  # a tensor core's least rows, of a power of two

    def kernel(layer, first, end, q, k, v, least, limit, *found):
        row, head, span = (pl.program_id(axis) for axis in range(3))
        asked = q[row, head]
        lower, upper = least[row][:, None], limit[row][:, None]

        def add(number: jax.Array, before: PartialAttention) -> PartialAttention:
            there = pl.ds(pl.multiple_of(number * block, block), block)
            column = number * block + jax.lax.broadcasted_iota(jnp.int32, (padded, block), 1)
            visible = (column >= lower) & (column < upper)
            return _update(
                config, asked, k[layer[0], row, head, :, there], v[layer[0], row, head, there], visible, before
            )

        each = GPU_SPAN // block
        begin = jnp.maximum(first[row], span * each)
        after = jnp.minimum(end[row], (span + 1) * each)
        result = jax.lax.fori_loop(begin, after, add, _none(padded, width))
        for ref, value in zip(found, result, strict=True):
            ref[span, row, head] = value

    room = (0, padded - queries)
    seen, (first, end) = reading
    found = pl.pallas_call(
        kernel,
        out_shape=list(_shapes(spans, rows, heads, padded, width)),
        grid=(rows, heads, spans),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="attention_by_length",
    )(
        layer.reshape(1), first, end, jnp.pad(q, ((0, 0), (0, 0), room, (0, 0))), *cache,
        *(jnp.pad(x, ((0, 0), room)) for x in seen),
    )  # fmt: skip
    return [PartialAttention(*(x[span, :, :, :queries] for x in found)) for span in range(spans)]
