"""The key/value cache of the sampler: a part that is only read, and a short chunk that decode steps write.

A decode call of C steps reads ``Cache`` and writes column i of a chunk buffer at step i, the same column for every row,
so nothing large is copied per step; ``flush`` moves the chunk into the cache once per call. A row's columns are its
positions, whatever slot or time it was filled at: its numbers never depend on its neighbours.

Keys lie with their columns last, so that the scores of one query are plain matrix products: on CPUs twice as fast.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models import layers
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, block, causal_rows, embed, forward, layer_constants


class Cache(NamedTuple):
    """Keys [L, B, K, H, S] and values [L, B, K, S, H]; column s of a row holds its position s."""

    k: Any
    v: Any


def empty_cache(config: ModelConfig, rows: int, length: int, dtype: Any) -> Cache:
    """A cache of zeros for ``rows`` sequences of up to ``length`` positions."""
    outer, width = (config.layers, rows, config.attention.kv_heads), config.attention.head_dim
    return Cache(jnp.zeros((*outer, width, length), dtype), jnp.zeros((*outer, length, width), dtype))


def first_columns(cache: Cache, count: int) -> Cache:
    """The cache's columns below ``count``."""
    return Cache(cache.k[..., :count], cache.v[..., :count, :])


def prefill(model: Decoder, tokens: jax.Array) -> tuple[jax.Array, Cache]:
    """Hidden states [P, S, D] and cache of right-padded prompts int32[P, S]."""
    hidden, (k, v) = forward(model, causal_rows(tokens), keep_cache=True)
    return hidden, Cache(k, v)


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
    columns, steps = jnp.arange(cache.v.shape[3]), jnp.arange(chunk.v.shape[3])
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
    """The cache with the chunk's C columns written at each row's positions ``lengths`` and on."""
    offset = jnp.arange(cache.v.shape[3])[None] - lengths[:, None]
    inside = (offset >= 0) & (offset < chunk.v.shape[3])
    index = jnp.clip(offset, 0, chunk.v.shape[3] - 1)

    def merge(old: jax.Array, new: jax.Array, column: int) -> jax.Array:
        spread = lambda x: jnp.expand_dims(x, (0, 2, 7 - column))
        return jnp.where(spread(inside), jnp.take_along_axis(new, spread(index), axis=column), old)

    return Cache(merge(cache.k, chunk.k, 4), merge(cache.v, chunk.v, 3))


def insert(cache: Cache, prompts: Cache, source: jax.Array) -> Cache:
    """The cache with row b replaced by prompt ``source[b]``, or kept where that is negative.

    prompts: a cache of P rows of at most S columns; columns beyond keep what they hold (they are invalid until written).
    """

    def place(old: jax.Array, new: jax.Array, column: int) -> jax.Array:
        chosen = jnp.take(new, jnp.maximum(source, 0), axis=1)
        kept = jax.lax.slice_in_dim(old, 0, new.shape[column], axis=column)
        head = jnp.where((source >= 0)[None, :, None, None, None], chosen, kept)
        return jax.lax.dynamic_update_slice(old, head, (0, 0, 0, 0, 0))

    return Cache(place(cache.k, prompts.k, 4), place(cache.v, prompts.v, 3))
