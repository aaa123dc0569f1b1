"""The key/value cache of the sampler: its layout, and how rows of it are written in place.

Column s of a row holds the row's position s, whatever slot or time it was filled at: the numbers never depend on
neighbouring rows. The cache may have more rows and columns than a call reads: it is allocated once, at the largest
size it may need.

Keys have their columns last, so that the scores of one query are plain matrix products: twice as fast on CPUs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.sharding import BATCH, fitting, head_copies


class Cache(NamedTuple):
    """Keys [L, B, K, H, S] and values [L, B, K, S, H]; column s of a row holds its position s.

    On a mesh whose ``tensor`` is no divisor of K, each head is there several times (``head_copies``).
    """

    k: Any
    v: Any

    @property
    def columns(self) -> int:
        """Return S, the number of columns."""
        return self.v.shape[3]


def empty_cache(config: ModelConfig, rows: int, columns: int, dtype: Any) -> Cache:
    """Return a cache of zeros for ``rows`` sequences of up to ``columns`` positions, on the mesh set by
    ``jax.set_mesh``."""
    heads = config.attention.kv_heads
    outer = (config.layers, rows, heads * head_copies(heads))
    width = config.attention.head_dim
    return Cache(jnp.zeros((*outer, width, columns), dtype), jnp.zeros((*outer, columns, width), dtype))


def with_columns(cache: Cache, count: int) -> Cache:
    """Return the cache cut or padded to ``count`` columns."""
    if count <= cache.columns:
        return Cache(cache.k[..., :count], cache.v[..., :count, :])
    more = [(0, 0)] * 3
    room = (0, count - cache.columns)
    return Cache(jnp.pad(cache.k, (*more, (0, 0), room)), jnp.pad(cache.v, (*more, room, (0, 0))))


def layer_of(cache: Cache, one: Cache, index: Any, rows: int, columns: int, parts: int = 1) -> Cache:
    """Return keys [rows, K, H, columns] and values [rows, K, columns, H] of one layer: the first rows of each part.

    Args:
      cache: all layers.
      one: the layer, as a loop over layers slices it: CPUs are fastest with a part of that, where TPUs would copy the
        whole layer to read a part.
      index: the layer's number; not a tracer in a program with every layer written out.
      rows: number of rows over all parts.
      columns: number of columns that hold anything.
      parts: number of parts into which the mesh divides the cache's rows; each device reads its own.
    """
    if (rows, columns) == (len(one.v), one.v.shape[2]):
        return one

    def read(cache: Cache, one: Cache, index: Any, rows: int) -> Cache:
        def of_layer() -> Cache:
            return Cache(one.k[:rows, :, :, :columns], one.v[:rows, :, :columns])

        def of_all() -> Cache:
            (_, _, heads, _, width) = cache.v.shape
            first = (index, 0, 0, 0, 0)
            return Cache(
                jax.lax.dynamic_slice(cache.k, first, (1, rows, heads, width, columns))[0],
                jax.lax.dynamic_slice(cache.v, first, (1, rows, heads, columns, width))[0],
            )

        traced = isinstance(index, jax.Array)
        return jax.lax.platform_dependent(cpu=of_layer, default=of_all) if traced else of_layer()

    if parts == 1 or rows == len(one.v):
        return read(cache, one, index, rows)
    whole = fitting(cache.k.shape, (None, BATCH, "tensor"), jax.sharding.get_abstract_mesh())
    each = PartitionSpec(*whole[1:])
    return jax.shard_map(
        functools.partial(read, rows=rows // parts),
        in_specs=(Cache(whole, whole), Cache(each, each), PartitionSpec()),
        out_specs=Cache(each, each),
        check_vma=False,
    )(cache, one, index)


def take_rows(cache: Cache, rows: jax.Array) -> Cache:
    """Return the cache of the given rows, in that order."""
    return Cache(jnp.take(cache.k, rows, axis=1), jnp.take(cache.v, rows, axis=1))


def flush(cache: Cache, chunk: Cache, lengths: jax.Array) -> Cache:
    """Return the cache with the chunk's C columns written at each row's ``lengths``, where there must be room.

    Rows that the chunk does not have stay as they are.
    """
    # A bound that the compiler cannot see: TPUs' takes a loop over all rows for a copy of whole arrays, and fails.
    rows = jax.lax.optimization_barrier(jnp.int32(chunk.v.shape[1]))
    return _write_rows(cache, rows, lambda i, cache: (_row(chunk, i), i, lengths[i]))


def insert(cache: Cache, given: Cache, source: jax.Array, start: jax.Array) -> Cache:
    """Return the cache with row b overwritten by row ``source[b]`` of ``given``, from its column ``start[b]`` on.

    Rows with a negative source stay as they are. Columns beyond those given hold anything: they are invalid until
    written.
    """
    first = jnp.argsort(source < 0, stable=True)

    def writing(i: jax.Array, cache: Cache) -> tuple[Cache, Any, Any]:
        row = _row(given, source[first[i]])
        back = -start[first[i]]
        moved = Cache(jnp.roll(row.k, back, axis=4), jnp.roll(row.v, back, axis=3))
        return with_columns(moved, min(given.columns, cache.columns)), first[i], 0

    return _write_rows(cache, jnp.sum(source >= 0), writing)


def insert_divided(
    cache: Cache, given: Cache, source: jax.Array, start: jax.Array, needed: jax.Array, axes: tuple[str, ...]
) -> Cache:
    """Insert inside ``shard_map``, where the rows of ``given`` are divided over mesh axes: see ``insert``.

    Args:
      cache: the device's own rows.
      given: the part of all given rows that is on this device.
      source: int32[rows of the cache], indices into all given rows.
      start: as in ``insert``.
      needed: int32[all rows given], those that any device reads, then negative numbers. They are broadcast one after
        the other, so that no device ever holds all of them.
      axes: mesh axes.
    """
    here = given.v.shape[1]
    first = jax.lax.axis_index(axes) * here

    def bring(i: jax.Array, cache: Cache) -> Cache:
        place = needed[i] - first
        row = _row(given, jnp.clip(place, 0, here - 1))
        owned = (place >= 0) & (place < here)
        row = jax.tree.map(lambda x: jax.lax.psum(jnp.where(owned, x, jnp.zeros_like(x)), axes), row)
        return insert(cache, row, jnp.where(source == needed[i], 0, -1), start)

    return jax.lax.fori_loop(0, jnp.sum(needed >= 0), bring, cache)


def move_rows(cache: Cache, given: None, source: jax.Array) -> Cache:
    """Copy rows within the cache: row b becomes row ``source[b]`` where that is not negative.

    No row that is overwritten may be a source of another.
    """
    first = jnp.argsort(source < 0, stable=True)
    return _write_rows(cache, jnp.sum(source >= 0), lambda i, cache: (_row(cache, source[first[i]]), first[i], 0))


def sequence_of(cache: Cache, row: jax.Array, blocks: Cache, block: jax.Array, length: jax.Array) -> Cache:
    """Return one row with all positions of a sequence: ``length`` columns of a block, then the row's own."""
    begun = with_columns(_row(blocks, block), blocks.columns + cache.columns)
    return _write_rows(begun, 1, lambda i, begun: (_row(cache, row), 0, length))


def _row(cache: Cache, row: jax.Array) -> Cache:
    return Cache(*(jax.lax.dynamic_slice_in_dim(x, row, 1, axis=1) for x in cache))


def _write_rows(cache: Cache, count: Any, writing: Callable[[jax.Array, Cache], tuple[Cache, Any, Any]]) -> Cache:
    """Write ``new`` into a row from a column on, where (new, row, column) = writing(i, cache), for each i below count.

    A loop updates the cache in place; a scatter of all rows at once copies it (on TPUs twice).
    """

    def body(i: jax.Array, cache: Cache) -> Cache:
        new, row, column = writing(i, cache)
        put = jax.lax.dynamic_update_slice
        return Cache(put(cache.k, new.k, (0, row, 0, 0, column)), put(cache.v, new.v, (0, row, 0, column, 0)))

    return jax.lax.fori_loop(0, count, body, cache)
