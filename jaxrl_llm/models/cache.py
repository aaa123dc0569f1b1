"""The key/value cache of the sampler: a part that is only read, and a short chunk that decode steps write.

A decode call of C steps reads ``Cache`` and writes column i of a chunk buffer at step i, the same column for every row,
so nothing large is copied per step; ``flush`` moves the chunk into the cache once per call, row by row and in place. A row's
columns are its positions, whatever slot or time it was filled at: its numbers never depend on its neighbours.

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
    outer, width = (config.layers, rows, config.attention.kv_heads), config.attention.head_dim
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
    config, count = model.config, tokens.shape[1]
    steps, columns = jnp.arange(count), jnp.arange(cache.columns if cache else 0)
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
    model: Decoder, cache: Cache, chunk: Cache, step: jax.Array, tokens: jax.Array, lengths: jax.Array
) -> tuple[jax.Array, Cache]:
    """One token for every row.

    Args:
      model: the decoder.
      cache: read only; row b is valid below ``lengths[b]``.
      chunk: a cache of C columns, of which those below ``step`` are valid; this step writes column ``step``.
      step: int32[], 0 <= step < C.
      tokens: int32[B], each row's newest token, at position ``lengths + step``.
      lengths: int32[B].

    Returns:
      Final hidden states [B, D] and the chunk with the new column.
    """
    config, positions, rows = model.config, lengths + step, tokens.shape[0]
    columns, steps = jnp.arange(cache.columns), jnp.arange(chunk.columns)
    since = jnp.broadcast_to((step - steps)[None], (rows, len(steps)))
    distance = jnp.concatenate([positions[:, None] - columns[None], since], 1)
    valid = jnp.concatenate([columns[None] < lengths[:, None], since >= 0], 1)

    def layer(x: jax.Array, per_layer: Any) -> tuple[jax.Array, Cache]:
        w, frequencies, window, main, new = per_layer
        visible = valid & ((window == 0) | (distance < window))
        written = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            put = jax.lax.dynamic_update_slice
            fresh = Cache(put(new.k, k, (0, 0, 0, step)), put(new.v, v, (0, 0, step, 0)))
            written.append(fresh)
            parts = [layers.scores_of_one(q[:, 0], keys, config.attention) for keys in (main.k, fresh.k)]
            s = jnp.where(visible[:, None, None], jnp.concatenate(parts, -1), layers.MASKED)
            far, near = jnp.split(jax.nn.softmax(s, axis=-1), [len(columns)], axis=-1)
            return (layers.mix_for_one(far, main.v) + layers.mix_for_one(near, fresh.v))[:, None]

        angles = positions[:, None, None].astype(jnp.float32) * frequencies[None, None]
        return block(w, config, x, angles, attend), written[0]

    x = embed(model, tokens)[:, None]
    x, chunk = jax.lax.scan(layer, x, (model.weights.blocks, *layer_constants(config), cache, chunk))
    return layers.rms_norm(x[:, 0], model.weights.final_norm[...], config.norm), chunk


def flush(cache: Cache, chunk: Cache, lengths: jax.Array) -> Cache:
    """The cache with the chunk's C columns written at each row's positions ``lengths`` and on, where there must be room."""
    return _write_rows(cache, cache.v.shape[1], lambda i: (i, _row(chunk, i), lengths[i]))


def insert(cache: Cache, prompts: Cache, source: jax.Array) -> Cache:
    """The cache with row b begun by row ``source[b]`` of ``prompts``, or kept where that is negative.

    prompts: has no more columns than the cache; columns beyond keep what they hold (they are invalid until written).
    """
    first = jnp.argsort(source < 0, stable=True)
    return _write_rows(cache, jnp.sum(source >= 0), lambda i: (first[i], _row(prompts, source[first[i]]), 0))


def _row(cache: Cache, row: jax.Array) -> Cache:
    return Cache(*(jax.lax.dynamic_slice_in_dim(x, row, 1, axis=1) for x in cache))


def _write_rows(cache: Cache, count: Any, writing: Callable[[jax.Array], tuple[Any, Cache, Any]]) -> Cache:
    """For i below count: (row, new, column) = writing(i), and ``new`` is written into that row from that column on.

    A loop, for it updates the cache where it lies; a scatter of all rows at once copies it (on TPUs twice).
    """

    def body(i: jax.Array, cache: Cache) -> Cache:
        (row, new, column), put = writing(i), jax.lax.dynamic_update_slice
        return Cache(put(cache.k, new.k, (0, row, 0, 0, column)), put(cache.v, new.v, (0, row, 0, column, 0)))

    return jax.lax.fori_loop(0, count, body, cache)
