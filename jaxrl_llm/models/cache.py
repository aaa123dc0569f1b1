"""The key/value cache of the sampler: parts that are only read, and a short chunk that decode steps write.

A decode call of C steps reads ``Cache`` and writes column i of a chunk buffer at step i, the same column for every row,
so nothing large is copied per step; ``flush`` moves the chunk into the cache once per call, row by row and in place. A
row's columns are its positions, whatever slot or time it was filled at: its numbers never depend on its neighbours.
Rows that begin alike may read their beginning from one block: its keys and values then pass through memory once for all
of them.

Keys lie with their columns last, so that the scores of one query are plain matrix products: on CPUs twice as fast.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import layers
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, block, embed, layer_constants
from jaxrl_llm.sharding import BATCH, constrain


class Cache(NamedTuple):
    """Keys [L, B, K, H, S] and values [L, B, K, S, H]; column s of a row holds its position s."""

    k: Any
    v: Any

    @property
    def columns(self) -> int:
        """S."""
        return self.v.shape[3]


def empty_cache(config: ModelConfig, rows: int, columns: int, dtype: Any) -> Cache:
    """A cache of zeros for ``rows`` sequences of up to ``columns`` positions."""
    outer = (config.layers, rows, config.attention.kv_heads)
    width = config.attention.head_dim
    return Cache(jnp.zeros((*outer, width, columns), dtype), jnp.zeros((*outer, columns, width), dtype))


def with_columns(cache: Cache, count: int) -> Cache:
    """The cache cut or padded to ``count`` columns."""
    if count <= cache.columns:
        return Cache(cache.k[..., :count], cache.v[..., :count, :])
    more = [(0, 0)] * 3
    room = (0, count - cache.columns)
    return Cache(jnp.pad(cache.k, (*more, (0, 0), room)), jnp.pad(cache.v, (*more, room, (0, 0))))


def take_rows(cache: Cache, rows: jax.Array) -> Cache:
    """The cache of the rows named, in that order."""
    return Cache(jnp.take(cache.k, rows, axis=1), jnp.take(cache.v, rows, axis=1))


class Beginnings(NamedTuple):
    """Blocks that rows read what comes before their own columns from; none crosses the parts that a mesh divides rows
    into.

    Attributes:
      cache: one row for each of U blocks.
      lengths: int32[B], columns of its block that a row begins with; its own column 0 holds that position.
      rows: int32[parts, U / parts * lanes], which row of its part a lane of a block serves; any, where it serves none.
      lanes: int32[parts, B / parts], the lane of each row, counted through the blocks of its part.
    """

    cache: Cache
    lengths: jax.Array
    rows: jax.Array
    lanes: jax.Array


def beginnings(cache: Cache, lengths: jax.Array, lanes: jax.Array, parts: int, width: int) -> Beginnings:
    """Beginnings in blocks of ``width`` lanes.

    ``lanes`` int32[B] as above, beyond the last lane for a row that reads none.
    """
    lanes = lanes.reshape(parts, -1)
    count = cache.v.shape[1] // parts * width

    def put(of_part: jax.Array) -> jax.Array:
        return jnp.zeros(count, jnp.int32).at[of_part].set(jnp.arange(len(of_part)), mode="drop")

    return Beginnings(cache, lengths, jax.vmap(put)(lanes), jnp.minimum(lanes, count - 1))


def _moved(x: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """x [rows, ...] as [count, ..., ...]: entries ``index`` [parts, ...] of each part of the rows, in their order."""
    parts = x.reshape(len(index), -1, *x.shape[1:])
    return jax.vmap(lambda part, at: part[at])(parts, index).reshape(count, -1, *x.shape[1:])


def extend(model: Decoder, cache: Cache | None, lengths: jax.Array, tokens: jax.Array) -> Cache:
    """Keys and values of the next C tokens of every row.

    Args:
      model: the decoder.
      cache: read only; row p is valid below ``lengths[p]``. None where nothing is.
      lengths: int32[P].
      tokens: int32[P, C], at positions ``lengths`` and on; padding on the right changes nothing before it.

    Returns:
      A cache of C columns.
    """
    config = model.config
    count = tokens.shape[1]
    steps = jnp.arange(count)
    columns = jnp.arange(cache.columns if cache else 0)
    positions = lengths[:, None] + steps[None]
    since = jnp.broadcast_to(steps[:, None] - steps[None], (len(tokens), count, count))
    distance = jnp.concatenate([positions[:, :, None] - columns[None, None], since], 2)
    before = jnp.broadcast_to(columns[None, None] < lengths[:, None, None], (len(tokens), count, len(columns)))
    valid = jnp.concatenate([before, since >= 0], 2)

    def layer(x: jax.Array, per_layer: Any) -> tuple[jax.Array, Cache]:
        w, frequencies, window, main = per_layer
        visible = valid & ((window == 0) | (distance < window))
        written = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            written.append(Cache(k, v))
            parts = [main, written[0]] if cache else written
            s = jnp.concatenate([layers.scores(q, part.k, config.attention) for part in parts], -1)
            weights = jax.nn.softmax(jnp.where(visible[:, None, None], s, layers.MASKED), axis=-1)
            near = layers.mix(weights[..., len(columns) :], v)
            return near + layers.mix(weights[..., : len(columns)], main.v) if cache else near

        x = block(w, config, x, positions[..., None].astype(jnp.float32) * frequencies[None, None], attend)
        return constrain(x, BATCH), written[0]

    x = constrain(embed(model, tokens), BATCH)
    return jax.lax.scan(layer, x, (model.weights.blocks, *layer_constants(config), cache))[1]


def decode(
    model: Decoder,
    cache: Cache,
    chunk: Cache,
    step: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    before: Beginnings | None = None,
) -> tuple[jax.Array, Cache]:
    """One token for every row.

    Args:
      model: the decoder.
      cache: read only; row b is valid below ``lengths[b]``.
      chunk: a cache of C columns, of which those below ``step`` are valid; this step writes column ``step``.
      step: int32[], 0 <= step < C.
      tokens: int32[B], each row's newest token, at position ``lengths + step`` after its beginning.
      lengths: int32[B].
      before: what comes before column 0; None for nothing.

    Returns:
      Final hidden states [B, D] and the chunk with the new column.
    """
    config = model.config
    rows = tokens.shape[0]
    positions = lengths + step + (0 if before is None else before.lengths)
    steps = jnp.arange(chunk.columns)
    columns = jnp.arange(cache.columns)
    since = jnp.broadcast_to((step - steps)[None], (rows, len(steps)))
    begun = jnp.zeros((rows, 0 if before is None else 1), jnp.int32)
    distance = jnp.concatenate([(lengths + step)[:, None] - columns[None], since, begun], 1)
    valid = jnp.concatenate([columns[None] < lengths[:, None], since >= 0, begun == 0], 1)

    def layer(x: jax.Array, per_layer: Any) -> tuple[jax.Array, Cache]:
        w, frequencies, window, main, new, first = per_layer
        visible = valid & ((window == 0) | (distance < window))
        written = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            put = jax.lax.dynamic_update_slice
            fresh = Cache(put(new.k, k, (0, 0, 0, step)), put(new.v, v, (0, 0, step, 0)))
            written.append(fresh)
            s = [layers.scores_of_one(q[:, 0], keys, config.attention) for keys in (main.k, fresh.k)]
            if before is not None:
                mixed, total = _begun(config, q[:, 0], first, before, positions, window)
                s.append(total)
            weights = jax.nn.softmax(jnp.where(visible[:, None, None], jnp.concatenate(s, -1), layers.MASKED), axis=-1)
            own, near, share = jnp.split(weights, [len(columns), len(columns) + len(steps)], axis=-1)
            out = layers.mix_for_one(own, main.v) + layers.mix_for_one(near, fresh.v)
            return (out if before is None else out + share.astype(q.dtype) * mixed)[:, None]

        angles = positions[:, None, None].astype(jnp.float32) * frequencies[None, None]
        return block(w, config, x, angles, attend), written[0]

    x = embed(model, tokens)[:, None]
    blocks = None if before is None else before.cache
    x, chunk = jax.lax.scan(layer, x, (model.weights.blocks, *layer_constants(config), cache, chunk, blocks))
    return layers.rms_norm(x[:, 0], model.weights.final_norm[...], config.norm), chunk


def _begun(
    config: ModelConfig, q: jax.Array, blocks: Cache, before: Beginnings, positions: jax.Array, window: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention of each row over its beginning alone: the queries go to the blocks and the results come back, all
    small.

    q: [B, K, N / K, H]. Returns the values mixed, like q, and the log of the summed weights [B, K, N / K, 1]: as the
    score of one more column, with the mixture as its value, that stands for the whole beginning.
    """
    count = blocks.v.shape[0]
    (_, heads, queries, width) = q.shape

    def there(x: jax.Array) -> jax.Array:
        return _moved(x, before.rows, count)

    columns = jnp.arange(blocks.v.shape[2])[None, None]
    distance = there(positions)[..., None] - columns
    visible = (columns < there(before.lengths)[..., None]) & ((window == 0) | (distance < window))
    visible = jnp.repeat(visible, queries, axis=1)[:, None]
    asked = there(q).swapaxes(1, 2).reshape(count, heads, -1, width)
    s = jnp.where(visible, layers.scores_of_one(asked, blocks.k, config.attention), layers.MASKED)
    top = jnp.max(s, axis=-1, keepdims=True)
    weights = jnp.exp(s - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    mixed = layers.mix_for_one(weights, blocks.v).astype(jnp.float32) / total
    found = jnp.concatenate([mixed, top + jnp.log(total)], axis=-1)
    found = found.reshape(count, heads, -1, queries, width + 1).swapaxes(1, 2).reshape(-1, heads, queries, width + 1)
    found = _moved(found, before.lanes, len(positions))[:, 0]
    return found[..., :-1].astype(q.dtype), found[..., -1:]


def flush(cache: Cache, chunk: Cache, lengths: jax.Array) -> Cache:
    """The cache with the chunk's C columns written from each row's ``lengths`` on, where there must be room."""
    # A bound that the compiler cannot see: TPUs' takes a loop over all rows for a copy of whole arrays, and fails.
    rows = jax.lax.optimization_barrier(jnp.int32(cache.v.shape[1]))
    return _write_rows(cache, rows, lambda i: (i, _row(chunk, i), lengths[i]))


def insert(cache: Cache, given: Cache, source: jax.Array, start: jax.Array) -> Cache:
    """The cache with row b begun by row ``source[b]`` of ``given`` from column ``start[b]`` on, or kept where source is
    negative.

    Columns beyond those given hold anything: they are invalid until written.
    """
    first = jnp.argsort(source < 0, stable=True)

    def writing(i: jax.Array) -> tuple[Any, Cache, Any]:
        row = _row(given, source[first[i]])
        back = -start[first[i]]
        moved = Cache(jnp.roll(row.k, back, axis=4), jnp.roll(row.v, back, axis=3))
        return first[i], with_columns(moved, min(given.columns, cache.columns)), 0

    return _write_rows(cache, jnp.sum(source >= 0), writing)


def sequence_of(cache: Cache, row: jax.Array, blocks: Cache, block: jax.Array, length: jax.Array) -> Cache:
    """One row of all the positions of a sequence: ``length`` columns of a block, then a row's own."""
    begun = with_columns(_row(blocks, block), blocks.columns + cache.columns)
    return _write_rows(begun, 1, lambda i: (0, _row(cache, row), length))


def _row(cache: Cache, row: jax.Array) -> Cache:
    return Cache(*(jax.lax.dynamic_slice_in_dim(x, row, 1, axis=1) for x in cache))


def _write_rows(cache: Cache, count: Any, writing: Callable[[jax.Array], tuple[Any, Cache, Any]]) -> Cache:
    """For i below count: (row, new, column) = writing(i), and ``new`` is written into that row from that column on.

    A loop, for it updates the cache where it lies; a scatter of all rows at once copies it (on TPUs twice).
    """

    def body(i: jax.Array, cache: Cache) -> Cache:
        (row, new, column) = writing(i)
        put = jax.lax.dynamic_update_slice
        return Cache(put(cache.k, new.k, (0, row, 0, 0, column)), put(cache.v, new.v, (0, row, 0, column, 0)))

    return jax.lax.fori_loop(0, count, body, cache)
