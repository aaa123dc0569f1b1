"""Decode attention by length: which columns of a cache are live, and the kernels that read them on TPUs and GPUs; CPUs
have the plain form. Lengths are data, so one program serves rows of every length. The kernels take the cache of all
layers and the number of one: a layer is never cut out of it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
from jaxrl_llm.sharding.mesh import device_of, has_bfloat16

LANES, SUBLANES = 128, 8
"""A TPU's tile of float32, its last dimension first."""

GPU_BLOCK, GPU_SPAN, GPU_ROWS = 64, 2048, 16
"""Columns that a GPU's kernel reads at once, and the most that one of its programs reads: a long row has several; and
least queries of a program, those of a tensor core.
"""


@dataclasses.dataclass(frozen=True)
class ByLength:
    """Choice of the kernels: ``platform`` "tpu" or "gpu"; with ``interpret`` XLA computes what they would, in tests."""

    platform: str
    interpret: bool = False


class ColumnRange(NamedTuple):
    """The columns that queries may see: ``least <= column < limit``; int32, one number for each query or several."""

    least: jax.Array
    limit: jax.Array


def column_range(limit: jax.Array, newest: jax.Array, window: Any) -> ColumnRange:
    """Return the columns below ``limit`` in a window that ends with column ``newest``; window 0 has no beginning."""
    return ColumnRange(jnp.where(window == 0, 0, jnp.maximum(newest - window + 1, 0)), limit)


class PartialAttention(NamedTuple):
    """Attention of queries over some of their columns, float32: ``top`` [B, K, M, 1], the largest score; ``mass`` [B,
    K, M, 1], the sum of exp(score - top); ``mixed`` [B, K, M, H], the values weighted by exp(score - top).
    """

    top: jax.Array
    mass: jax.Array
    mixed: jax.Array


def form_for(config: Attention, slots: int, mesh: Mesh | AbstractMesh | None) -> ByLength | None:
    """Return the kernels for a model and a mesh; None for the plain form, which reads all columns of every row: on
    CPUs, on a mesh that divides the slots unevenly, for latent attention, and on GPUs that are too old, or unless the
    heads are a power of two wide.
    """
    platform = jax.default_backend() if mesh is None else platform_of(mesh)
    platform = "gpu" if platform in ("cuda", "rocm") else platform
    if platform not in ("tpu", "gpu") or (mesh is not None and slots % batch_parts(mesh)):
        return None
    width = config.head_dim
    if config.latent is not None:
        return None
    powers = width & (width - 1) == 0 and 16 <= width <= 256
    return ByLength(platform) if platform == "tpu" or (powers and has_bfloat16(device_of(mesh))) else None


def block_columns(columns: int) -> int:
    """Return the columns of a block in a cache of so many: more in longer ones."""
    return 512 if columns >= 4096 else 256 if columns >= 2048 else LANES


def whole_blocks(columns: int) -> int:
    """Return the columns of a cache for so many, in whole blocks."""
    block = block_columns(columns)
    return -(-columns // block) * block


def columns_read(form: ByLength, live: int, columns: int) -> int:
    """Return the columns that are read of a row of ``columns`` of which ``live`` are live: whole blocks."""
    block = _block(form, columns)
    return -(-live // block) * block


def _block(form: ByLength, columns: int) -> int:
    return block_columns(columns) if form.platform == "tpu" else min(columns, GPU_BLOCK)


def live_blocks(seen: ColumnRange, block: int) -> tuple[jax.Array, jax.Array]:
    """Return the first block of each row that any of its queries [B, M] sees, and how many there are up to the last."""
    some = seen.limit > seen.least
    first = jnp.min(jnp.where(some, seen.least, jnp.iinfo(jnp.int32).max), axis=1) // block
    end = -(-jnp.max(jnp.where(some, seen.limit, 0), axis=1) // block)
    return jnp.minimum(first, end), jnp.maximum(end - first, 0)


class ReadOrder(NamedTuple):
    """The order in which a TPU's kernel reads blocks; int32[halves * steps] but for the last.

    Attributes:
      row: of the half, for which a step computes; row * halves + half of all.
      block: row of the half * blocks of a row + block; a step that reads nothing repeats a neighbour's.
      live: whether the step computes anything.
      steps: int32[1], of the longer half.
    """

    row: jax.Array
    block: jax.Array
    live: jax.Array
    steps: Any = None


class ReadPlan(NamedTuple):
    """The columns that a kernel reads of a cache's rows, and how it comes to them.

    Attributes:
      seen: [E, lanes], of each lane; [E, 1] without lanes.
      order: ``ReadOrder`` of a TPU; of a GPU the first live block of each row and the end of these, int32[E].
      lanes: int32[E, lanes], the row of queries that each serves, negative if none; None: row i serves queries i.
      served: bool[B], whether a lane serves the row of queries; None without lanes.
    """

    seen: ColumnRange
    order: Any
    lanes: Any = None
    served: Any = None


def read_plan(form: ByLength, seen: ColumnRange, columns: int, lanes: Any = None, served: Any = None) -> ReadPlan:
    """Return the reading of so much of rows of ``columns`` columns."""
    block = _block(form, columns)
    if form.platform == "tpu":
        return ReadPlan(seen, read_order(seen, block, columns // block, lanes is not None), lanes, served)
    first, count = live_blocks(seen, block)
    return ReadPlan(seen, (first, first + count), lanes, served)


def read_order(seen: ColumnRange, block: int, each: int, sparse: bool = False) -> ReadOrder:
    """Return the reads of rows of ``each`` blocks: the rows in order, every other in a half where a chip has two cores.
    A row without a visible column still has one step, which reads nothing; none if ``sparse``.
    """
    halves = halves_of(len(seen.limit))
    first, count = (x.reshape(-1, halves).T for x in live_blocks(seen, block))
    rows = first.shape[1]
    places = jnp.arange(rows * each, dtype=jnp.int32)

    def half(first: jax.Array, count: jax.Array) -> ReadOrder:
        steps = count if sparse else jnp.maximum(count, 1)
        ends = jnp.cumsum(steps)
        row = jnp.sum(ends[None] <= places[:, None], axis=1, dtype=jnp.int32)
        row = jnp.minimum(row, rows - 1)
        step = places - (ends - steps)[row]
        live = step < count[row]
        nearest = jax.lax.cummax(jnp.where(live, places, -1))
        nearest = jnp.where(nearest < 0, jnp.argmax(live).astype(jnp.int32), nearest)
        blocks = jnp.minimum(row * each + first[row] + step, rows * each - 1)
        return ReadOrder(row, blocks[nearest], live.astype(jnp.int32), jnp.maximum(ends[-1], 1))

    halves_read = jax.vmap(half)(first, count)
    row, blocks, live = (x.reshape(-1) for x in halves_read[:3])
    return ReadOrder(row, blocks, live, jnp.max(halves_read.steps, keepdims=True))


def halves_of(rows: int) -> int:
    """Return the number of parts of the rows that a TPU's kernel works on side by side."""
    return 2 if rows % 2 == 0 else 1


def fetch_indices(half: Any, number: Any, table: ReadOrder, rows: int, each: int) -> tuple[Any, Any, Any]:
    """Return the row computed in a step of a TPU's kernel, and the row and the block that it reads."""
    halves = halves_of(rows)
    at = half * (rows // halves * each) + number
    read = table.block[at]
    # Signed division of Python's kind asks which TPU is there, and none need be.
    row = jax.lax.div(read, jnp.int32(each))
    return table.row[at] * halves + half, row * halves + half, jax.lax.rem(read, jnp.int32(each))


class ChunkColumns(NamedTuple):
    """The columns of the chunk: one layer's k [B, K, H, C], v [B, K, C, H] and scales [B, K, 2, C] (None unless int8),
    and the range of all rows, int32[2].
    """

    k: Any
    v: Any
    scales: Any
    seen: Any


def reads_chunk(form: ByLength, columns: int) -> bool:
    """Whether the kernel of a cache's own rows can read a chunk of so many columns too."""
    return form.platform == "gpu" and columns >= GPU_ROWS and columns & (columns - 1) == 0


def attend_by_length(
    form: ByLength,
    config: Attention,
    q: jax.Array,
    cache: Any,
    layer: jax.Array,
    plan: ReadPlan,
    chunk: Any = None,
) -> list[PartialAttention]:
    """Attend over live columns of one layer of a cache. Returns parts of the result, whose columns are disjoint;
    ``top`` of a query without a column is ``MASKED``.

    Args:
      form: the kernels.
      q: [B, K, M, H].
      cache: ``Cache`` of E rows and S columns, S of whole blocks; without lanes its first B rows are read.
      layer: int32[].
      plan: of the cache's rows.
      chunk: ``ChunkColumns``, to be read too, where ``reads_chunk``; only without lanes.
    """
    arguments = config, q, cache, layer, plan
    on_tpu = form.platform == "tpu"
    parts = _attend_tpu(form.interpret, *arguments) if on_tpu else _attend_gpu(form.interpret, *arguments, chunk)
    if plan.served is None:
        return parts
    served = plan.served[:, None, None, None]
    return [PartialAttention(*(jnp.where(served, x, y) for x, y in zip(p, _empty(p), strict=True))) for p in parts]


def _empty(shapes: Any) -> PartialAttention:
    """Return the attention over no column."""
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    top, mass, mixed = (x.shape for x in shapes)
    return PartialAttention(jnp.full(top, MASKED, jnp.float32), zeros(mass), zeros(mixed))


def _shapes(*shape: int, stat: int = 1) -> tuple[jax.ShapeDtypeStruct, ...]:
    stat_shape = jax.ShapeDtypeStruct((*shape[:-1], stat), jnp.float32)
    return stat_shape, stat_shape, jax.ShapeDtypeStruct(shape, jnp.float32)


def _add_columns(
    config: Attention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    before: PartialAttention,
    scales: Sequence[Any] = (1, 1),
    turned: bool = False,
) -> PartialAttention:
    """Add a block of columns to the attention of queries q [M, H] over k [H, S] and v [S, H] ([H, S] if ``turned``).
    ``scales``: of k and v, [1, S].
    """
    k, v = k.astype(q.dtype), v.astype(q.dtype)
    scores = jnp.dot(q, k, preferred_element_type=jnp.float32) * (config.factor * scales[0])
    scores = jnp.where(visible, softcap(scores, config.softcap), MASKED)
    top = jnp.maximum(before.top, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - top)
    decay = jnp.exp(before.top - top)
    along = (((1,), (1 if turned else 0,)), ((), ()))
    weighted = (weights * scales[1]).astype(v.dtype)
    mixed = jax.lax.dot_general(weighted, v, along, preferred_element_type=jnp.float32)
    mass = decay * before.mass + jnp.sum(weights, axis=1, keepdims=True)
    return PartialAttention(top, mass, decay * before.mixed + mixed)


class Tile(NamedTuple):
    """Sizes of what a TPU's kernel works on: rows of the cache, blocks of each, columns of a block, queries of a row.
    Values with heads narrower than a TPU's tile are ``turned``: in memory their columns are last. Products are in
    ``dtype``.
    """

    rows: int
    each: int
    block: int
    queries: int
    turned: bool
    dtype: Any


def _add_block(config: Attention, tile: Tile, first: jax.Array, inputs: Sequence[Any], sums: Sequence[Any]) -> None:
    """Add the block that begins with column ``first`` to the sums [K, M, ..] of all heads, references of Pallas.
    ``inputs``: queries [K, M, H], bounds of what each sees, keys, values, and scales if they are int8.
    """
    q, least, limit, k, v, *scales = inputs
    columns = first + jax.lax.broadcasted_iota(jnp.int32, (tile.queries, tile.block), 1)
    visible = (columns >= least[0]) & (columns < limit[0])
    for head in range(q.shape[0]):
        top, mass, mixed = (ref[head] for ref in sums)
        before = PartialAttention(top[:, :1], mass[:, :1], mixed)
        factors = [x[0, 0, head, i : i + 1] for x in scales for i in range(2)] or (1, 1)
        block = k[0, 0, head], v[0, 0, head]
        after = _add_columns(config, q[head].astype(tile.dtype), *block, visible, before, factors, tile.turned)
        for ref, value in zip(sums, after, strict=True):
            ref[head] = jnp.broadcast_to(value, ref.shape[1:])


def _row_kernel(config: Attention, tile: Tile, row: Any, blocks: Any, live: Any, _: Any, *refs: Any) -> None:
    """Compute one step for the row of queries of the cache's row."""
    *inputs, top, mass, mixed = refs
    sums = [ref.at[0] for ref in (top, mass, mixed)]
    at = pl.program_id(0) * (tile.rows // halves_of(tile.rows) * tile.each) + pl.program_id(1)

    @pl.when((pl.program_id(1) == 0) | (row[at] != row[jnp.maximum(at - 1, 0)]))
    def _begin() -> None:
        for ref, zero in zip(sums, _empty(sums), strict=True):
            ref[...] = zero

    @pl.when(live[at] == 1)
    def _compute() -> None:
        first = jax.lax.rem(blocks[at], jnp.int32(tile.each)) * tile.block
        _add_block(config, tile, first, [inputs[0].at[0], *inputs[1:]], sums)


def _lane_kernel(config: Attention, tile: Tile, row: Any, blocks: Any, live: Any, *refs: Any) -> None:
    """Compute one step for the rows of queries that read the cache's row: its first step gathers their queries, and its
    last one sends the results to their places.
    """
    _, lanes, q, *inputs, out_top, out_mass, out_mixed, gathered, top, mass, mixed, semaphore = refs
    sums, outs = [top, mass, mixed], [out_top, out_mass, out_mixed]
    size = q.shape[2]
    count = tile.queries // size
    half, number = pl.program_id(0), pl.program_id(1)
    at = half * (tile.rows // halves_of(tile.rows) * tile.each) + number
    after = jnp.minimum(at + 1, row.shape[0] - 1)
    base = (row[at] * halves_of(tile.rows) + half) * count
    last = (number == pl.num_programs(1) - 1) | (row[after] != row[at]) | (live[after] == 0)
    places = [slice(lane * size, (lane + 1) * size) for lane in range(count)]

    @pl.when((number == 0) | (row[at] != row[jnp.maximum(at - 1, 0)]))
    def _begin() -> None:
        copies = [
            pltpu.make_async_copy(q.at[jnp.maximum(lanes[base + lane], 0)], gathered.at[:, place], semaphore)
            for lane, place in enumerate(places)
        ]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.wait()
        for ref, zero in zip(sums, _empty(sums), strict=True):
            ref[...] = zero

    @pl.when(live[at] == 1)
    def _compute() -> None:
        first = jax.lax.rem(blocks[at], jnp.int32(tile.each)) * tile.block
        _add_block(config, tile, first, [gathered, *inputs], sums)

    def send(lane: int, act: Callable[[Any], None]) -> None:
        @pl.when((live[at] == 1) & last & (lanes[base + lane] >= 0))
        def _() -> None:
            for ref, out in zip(sums, outs, strict=True):
                act(pltpu.make_async_copy(ref.at[:, places[lane]], out.at[lanes[base + lane]], semaphore))

    for lane in range(count):
        send(lane, lambda copy: copy.start())
    for lane in range(count):
        send(lane, lambda copy: copy.wait())


def _attend_tpu(
    interpret: bool, config: Attention, q: jax.Array, cache: Any, layer: jax.Array, plan: ReadPlan
) -> list[PartialAttention]:
    """One step of the grid for each live block, of all heads; the sums of a row stay in the chip's memory meanwhile."""
    (count, heads, queries, width) = q.shape
    seen, table, lanes, _ = plan
    block = block_columns(cache.v.shape[3])
    size = queries if lanes is None else -(-queries // SUBLANES) * SUBLANES
    row_queries = size if lanes is None else size * lanes.shape[1]
    tile = Tile(len(seen.limit), cache.v.shape[3] // block, block, row_queries, width < LANES, q.dtype)
    values = jnp.swapaxes(cache.v, 3, 4) if tile.turned else cache.v
    bounds = [jnp.repeat(x, row_queries // x.shape[1], axis=1)[..., None] for x in seen]

    def where(half: Any, number: Any, *prefetched: Any) -> tuple[Any, Any, Any]:
        return fetch_indices(half, number, ReadOrder(*prefetched[:3]), tile.rows, tile.each)

    def own(*blocked: int) -> Any:
        return pl.BlockSpec((1, *blocked), lambda *indices: (where(*indices)[0], *(0 for _ in blocked)))

    def columns(turned: bool, width: int = width) -> Any:
        def at(half: Any, number: Any, *prefetched: Any) -> tuple:
            _, row, column = where(half, number, *prefetched)
            return prefetched[3][0], row, 0, *((0, column) if turned else (column, 0))

        return pl.BlockSpec((1, 1, heads, *((width, block) if turned else (block, width))), at)

    scales = [] if cache.scales is None else [cache.scales]
    inputs = [own(row_queries, 1), own(row_queries, 1), columns(True), columns(tile.turned)]
    inputs += [columns(True, 2) for _ in scales]
    scalars = [*table[:3], layer.reshape(1)]
    if lanes is None:
        kernel, shapes, scratch = _row_kernel, _shapes(count, heads, size, width), []
        ends = own(heads, size, width), [own(*shape.shape[1:]) for shape in shapes]
    else:
        kernel, shapes = _lane_kernel, _shapes(count, heads, size, width, stat=LANES)
        sums = [pltpu.VMEM((heads, row_queries, shape.shape[3]), jnp.float32) for shape in (shapes[2], *shapes)]
        scratch = [*sums, pltpu.SemaphoreType.DMA]
        ends = pl.BlockSpec(memory_space=pl.ANY), [pl.BlockSpec(memory_space=pl.ANY) for _ in shapes]
        scalars.append(lanes.reshape(-1))
        q = jnp.pad(q.astype(jnp.float32), ((0, 0), (0, 0), (0, size - queries), (0, 0)))
    outputs = pl.pallas_call(
        functools.partial(kernel, config, tile),
        out_shape=list(shapes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(halves_of(tile.rows), table.steps[0]),
            in_specs=[ends[0], *inputs],
            out_specs=ends[1],
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
        name="attention_by_length",
    )(*scalars, q, *bounds, cache.k, values, *scales)
    top, mass, mixed = (x[:, :, :queries] for x in outputs)
    return [PartialAttention(top[..., :1], mass[..., :1], mixed)]


def _gpu_kernel(config: Attention, width: int, count: int, size: int, lane_count: int, total: int, *refs: Any) -> None:
    """Attend over one span of columns of one head of a row of the cache, for all rows of queries that read it.
    ``width``: columns of a block. ``count``: a row's queries, ``size`` the next power of two, ``total`` the call's.
    """
    layer, first, end, lanes, q, least, limit, cache, chunk = refs[:-3]
    row, head, span = (pl.program_id(axis) for axis in range(3))
    each = jnp.arange(lane_count * size, dtype=jnp.int32)
    lane, number = (operation(each, jnp.int32(size)) for operation in (jax.lax.div, jax.lax.rem))
    served = lanes[row, lane]
    heads = cache.k.shape[2]
    at = (jnp.maximum(served, 0) * heads + head) * count + jnp.minimum(number, count - 1)
    queries = q[at]
    lower, upper = (x[row, lane][:, None] for x in (least, limit))

    def add_part(part: Any, at: tuple, columns: Any, visible: jax.Array, before: PartialAttention) -> PartialAttention:
        factors = (1, 1) if part.scales is None else [part.scales[*at, i, columns][None] for i in range(2)]
        keys, values = part.k[*at, :, columns], part.v[*at, columns]
        return _add_columns(config, queries, keys, values, visible, before, factors)

    def add(block: jax.Array, before: PartialAttention) -> PartialAttention:
        columns = pl.ds(pl.multiple_of(block * width, width), width)
        column = block * width + jax.lax.broadcasted_iota(jnp.int32, (len(each), width), 1)
        visible = (column >= lower) & (column < upper)
        return add_part(cache, (layer[0], row, head), columns, visible, before)

    def add_chunk(before: PartialAttention) -> PartialAttention:
        column = jax.lax.broadcasted_iota(jnp.int32, (len(each), chunk.k.shape[3]), 1)
        visible = (column >= chunk.seen[0]) & (column < chunk.seen[1])
        return add_part(chunk, (row, head), slice(None), visible, before)

    blocks = GPU_SPAN // width
    begin, after = jnp.maximum(first[row], span * blocks), jnp.minimum(end[row], (span + 1) * blocks)
    sums = jax.lax.fori_loop(begin, after, add, _empty(_shapes(len(each), q.shape[1])))
    if chunk is not None:
        sums = jax.lax.cond(span == 0, add_chunk, lambda before: before, sums)
    place = jnp.where((served >= 0) & (number < count), at, total)
    for ref, value in zip(refs[-3:], sums, strict=True):
        ref[span, place] = value if ref.ndim == 3 else value[:, 0]


def _attend_gpu(
    interpret: bool, config: Attention, q: jax.Array, cache: Any, layer: jax.Array, plan: ReadPlan, chunk: Any
) -> list[PartialAttention]:
    """Run one program for each row of the cache, head and span of columns, which gathers the queries that read the row,
    loops over the live columns of the span, and puts the results where they belong.
    """
    (count, heads, queries, width) = q.shape
    seen, (first, end), lanes, _ = plan
    columns = cache.v.shape[3]
    spans = -(-columns // GPU_SPAN)
    lanes = jnp.arange(count, dtype=jnp.int32)[:, None] if lanes is None else lanes
    size = 1 << (queries - 1).bit_length()
    lane_count = max(GPU_ROWS // size, 1 << (lanes.shape[1] - 1).bit_length())  # all sizes are powers of two
    lanes = jnp.pad(lanes, ((0, 0), (0, lane_count - lanes.shape[1])), constant_values=-1)
    bounds = [jnp.pad(x, ((0, 0), (0, lane_count - x.shape[1]))) for x in seen]
    total = count * heads * queries
    kernel = functools.partial(_gpu_kernel, config, min(columns, GPU_BLOCK), queries, size, lane_count, total)
    stats = jax.ShapeDtypeStruct((spans, total + 1), jnp.float32)  # the last place is for what nobody asked
    outputs = pl.pallas_call(
        kernel,
        out_shape=[stats, stats, jax.ShapeDtypeStruct((*stats.shape, width), jnp.float32)],
        grid=(len(lanes), heads, spans),
        compiler_params=plgpu.CompilerParams(num_warps=4 if lane_count * size < 64 else 8, num_stages=2),
        interpret=interpret,
        name="attention_by_length",
    )(layer.reshape(1), first, end, lanes, q.reshape(total, width), *bounds, cache, chunk)
    parts = [x[:, :total].reshape(spans, count, heads, queries, -1) for x in outputs]
    return [PartialAttention(*(x[span] for x in parts)) for span in range(spans)]
