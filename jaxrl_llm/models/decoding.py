"""The model over the cache: prefill (``extend``) and decoding of one token per row (``decode``).

A decode call of C steps reads ``Cache`` and writes column i of a chunk buffer at step i, the same column for every row,
so nothing large is copied per step; ``flush`` moves the chunk into the cache once per call. Rows that share a prefix
may read it from one block: its keys and values then pass through memory once for all of them.

Column s of a row holds the row's position s, whatever slot or time it was filled at: the numbers never depend on
neighbouring rows. The cache may have more rows and columns than a call reads: it is allocated once, at the largest size
it may need. Keys have their columns last: the scores of one query are plain matrix products, twice as fast on CPUs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.models import decode_kernels, layers
from jaxrl_llm.models.config import Attention, ComputeOptions, ModelConfig
from jaxrl_llm.models.decode_kernels import ByLength, ChunkColumns, ColumnRange, PartialAttention, ReadPlan
from jaxrl_llm.models.decoder import (
    Decoder,
    SharedKV,
    Stacks,
    Weights,
    attention_part,
    block,
    embed,
    empty_shared_kv,
    final_hidden,
    per_layer_inputs,
    scan_layers,
)
from jaxrl_llm.models.recurrent import Continuation, empty_state
from jaxrl_llm.sharding import BATCH, constrain, fit_spec, head_copies


class Cache(NamedTuple):
    """Keys [L, B, K, H, S] and values [L, B, K, S, H] (widths: ``Attention.cached``); column s of a row holds its
    position s. On a mesh whose ``tensor`` is no divisor of K, each head is there several times (``head_copies``). Of
    int8 ones ``scales`` float32 [L, B, K, 2, S] are the factors of each head's key and value in a column; None for
    others. L counts the layers with attention. ``state``: the ``recurrent.State`` of the other layers, [L', B, ...],
    after what is valid of each row's columns; None without such layers, and of what has columns alone.
    ``global_attn``: the cache of layers with ``ModelConfig.global_attention``; None without such layers.
    """

    k: Any
    v: Any
    scales: Any = None
    state: Any = None
    global_attn: Any = None

    @property
    def columns(self) -> int:
        """Return S, the number of columns, also of one layer."""
        return self.v.shape[-2]


def empty_cache(config: ModelConfig, rows: int, columns: int, dtype: Any) -> Cache:
    """Return a cache of zeros on ``jax.set_mesh``'s mesh, for ``rows`` sequences of up to ``columns`` positions."""
    caches: Stacks = {}
    for part in config.cached_parts:
        heads, key, value = config.attention_of(part).cached
        outer = (len(config.layers_with(part)), rows, heads * head_copies(heads))
        scales = jnp.zeros((*outer, 2, columns), jnp.float32) if dtype == jnp.int8 else None
        caches[part] = Cache(
            jnp.zeros((*outer, key, columns), dtype), jnp.zeros((*outer, columns, value), dtype), scales
        )
    return join_parts(caches, empty_state(config, rows))


def cached_numbers(config: ModelConfig) -> int:
    """Return the numbers that a cache holds of each token."""
    each = {part: config.attention_of(part).cached for part in config.cached_parts}
    return sum(len(config.layers_with(part)) * heads * (key + value) for part, (heads, key, value) in each.items())


def split_parts(cache: Cache) -> Stacks:
    """Return the columns of a cache by the part of the layers that they are of."""
    own = cache._replace(state=None, global_attn=None)
    return {"attn": own} if cache.global_attn is None else {"attn": own, "global_attn": cache.global_attn}


def join_parts(caches: Stacks, state: Any) -> Cache:
    """Return a cache of columns by part."""
    return caches["attn"]._replace(state=state, global_attn=caches.get("global_attn"))


def stored(k: jax.Array, v: jax.Array, dtype: Any) -> Cache:
    """Return keys [B, K, H, C] and values [B, K, C, H] of a layer as a cache of this dtype holds them: int8 ones as
    multiples of 1/127 of the largest of their head and column.
    """
    if dtype != jnp.int8:
        return Cache(k, v)
    k, v = k.astype(jnp.float32), v.astype(jnp.float32)
    largest = functools.partial(jnp.max, initial=0.0)
    scales = jnp.stack([largest(jnp.abs(k), axis=2), largest(jnp.abs(v), axis=3)], axis=2) / 127
    factors = jnp.where(scales > 0, 1 / scales, 0)
    k, v = k * factors[:, :, :1], v * factors[:, :, 1, :, None]
    return Cache(jnp.round(k).astype(jnp.int8), jnp.round(v).astype(jnp.int8), scales)


def by_columns(change: Callable[..., jax.Array], *caches: Cache) -> Cache:
    """Apply ``change(array of each cache, axis of its columns)`` to keys, values and scales; states are the first's."""
    arrays = zip(*(cache[:3] for cache in caches), (-1, -2, -1), strict=True)
    inner = [cache.global_attn for cache in caches]
    changed = None if inner[0] is None else by_columns(change, *inner)
    return Cache(*(None if x[0] is None else change(*x) for x in arrays), caches[0].state, changed)


def with_columns(cache: Cache, count: int) -> Cache:
    """Return the cache cut or padded to ``count`` columns."""
    if count <= cache.columns:
        return by_columns(lambda x, axis: jax.lax.slice_in_dim(x, 0, count, axis=axis), cache)
    room = (0, count - cache.columns)
    return by_columns(lambda x, axis: jnp.pad(x, [room if i == axis else (0, 0) for i in range(-x.ndim, 0)]), cache)


def read_layer(cache: Cache, layer: Cache, index: Any, rows: int, columns: int, parts: int = 1) -> Cache:
    """Return keys [rows, K, H, columns] and values [rows, K, columns, H] of one layer: the first rows of each of the
    ``parts`` into which the mesh divides the cache's rows. ``layer``: as a loop over layers slices it: CPUs are fastest
    with a part of that, where TPUs would copy all of it to read a part. ``index``: the layer's number; not a tracer in
    a program with every layer written out.
    """
    if (rows, columns) == (len(layer.v), layer.v.shape[2]):
        return layer

    def read(cache: Cache, layer: Cache, index: Any, rows: int) -> Cache:
        def of_layer() -> Cache:
            return with_columns(jax.tree.map(lambda x: x[:rows], layer), columns)

        def of_all() -> Cache:
            part = jax.eval_shape(of_layer)
            cut = lambda x, y: jax.lax.dynamic_slice(x, (index, 0, 0, 0, 0), (1, *y.shape))[0]  # noqa: E731
            return jax.tree.map(cut, cache, part)

        traced = isinstance(index, jax.Array)
        return jax.lax.platform_dependent(cpu=of_layer, default=of_all) if traced else of_layer()

    if parts == 1 or rows == len(layer.v):
        return read(cache, layer, index, rows)
    spec = fit_spec(cache.k.shape, (None, BATCH, "tensor"), jax.sharding.get_abstract_mesh())
    layer_spec = PartitionSpec(*spec[1:])
    return jax.shard_map(
        functools.partial(read, rows=rows // parts),
        in_specs=(spec, layer_spec, PartitionSpec()),
        out_specs=layer_spec,
        check_vma=False,
    )(cache, layer, index)


def take_rows(cache: Cache, rows: jax.Array) -> Cache:
    """Return the cache of the given rows, in that order."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=1), cache)


def flush(cache: Cache, chunk: Cache, lengths: jax.Array) -> Cache:
    """Return the cache with the chunk's C columns written at its rows' ``lengths``, where there must be room, and with
    its rows' states.
    """
    put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, 0, axis=1)  # noqa: E731
    state = jax.tree.map(put, cache.state, chunk.state)
    cache, chunk = cache._replace(state=None), chunk._replace(state=None)
    # A bound that the compiler cannot see: TPUs' takes a loop over all rows for a copy of whole arrays, and fails.
    rows = jax.lax.optimization_barrier(jnp.int32(chunk.v.shape[1]))
    return _write_rows(cache, rows, lambda i, cache: (_row(chunk, i), i, lengths[i]))._replace(state=state)


def insert(cache: Cache, new: Cache, source: jax.Array, start: jax.Array) -> Cache:
    """Return the cache with row b overwritten by row ``source[b]`` of ``new``, from column ``start[b]`` on. Rows with a
    negative source stay. Columns beyond those given hold anything: they are invalid until written.
    """
    first = jnp.argsort(source < 0, stable=True)

    def writing(i: jax.Array, cache: Cache) -> tuple[Cache, Any, Any]:
        row = _row(new, source[first[i]])
        shift = -start[first[i]]
        shifted = by_columns(lambda x, axis: jnp.roll(x, shift, axis=axis), row)
        return with_columns(shifted, min(new.columns, cache.columns)), first[i], 0

    return _write_rows(cache, jnp.sum(source >= 0), writing)


def insert_divided(
    cache: Cache, new: Cache, source: jax.Array, start: jax.Array, needed: jax.Array, axes: tuple[str, ...]
) -> Cache:
    """Insert inside ``shard_map``: ``cache`` has the device's own rows, and ``new`` its part of the given ones, which
    mesh ``axes`` divide. ``source`` int32[rows of the cache], indices into all given rows, and ``start``: as in
    ``insert``. ``needed``: int32[all given rows], those that any device reads, then negative numbers; they are
    broadcast one by one, so that no device ever holds all of them.
    """
    count = new.v.shape[1]
    first = jax.lax.axis_index(axes) * count

    def bring(i: jax.Array, cache: Cache) -> Cache:
        place = needed[i] - first
        row = _row(new, jnp.clip(place, 0, count - 1))
        owned = (place >= 0) & (place < count)
        row = jax.tree.map(lambda x: jax.lax.psum(jnp.where(owned, x, jnp.zeros_like(x)), axes), row)
        return insert(cache, row, jnp.where(source == needed[i], 0, -1), start)

    return jax.lax.fori_loop(0, jnp.sum(needed >= 0), bring, cache)


def move_rows(cache: Cache, new: None, source: jax.Array) -> Cache:
    """Copy row ``source[b]`` of the cache to row b if not negative; no row that is overwritten may be a source."""
    first = jnp.argsort(source < 0, stable=True)
    return _write_rows(cache, jnp.sum(source >= 0), lambda i, cache: (_row(cache, source[first[i]]), first[i], 0))


def joined_sequence(cache: Cache, row: jax.Array, blocks: Cache, block: jax.Array, length: jax.Array) -> Cache:
    """Return one row with all positions of a sequence: ``length`` columns of a block, then the row's own."""
    sequence = with_columns(_row(blocks, block), blocks.columns + cache.columns)
    new = _row(cache, row)
    return _write_rows(sequence._replace(state=new.state), 1, lambda i, sequence: (new, 0, length))


def first_rows(state: Any, rows: int, parts: int) -> Any:
    """Return the states [L, B, ...] of the first rows of each part of a cache's."""

    def first(x: jax.Array) -> jax.Array:
        x = x.reshape(len(x), parts, -1, *x.shape[2:])[:, :, : rows // parts]
        return x.reshape(len(x), rows, *x.shape[3:])

    return jax.tree.map(first, state)


def _row(cache: Cache, row: jax.Array) -> Cache:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis=1), cache)


def _write_rows(cache: Cache, count: Any, writing: Callable[[jax.Array, Cache], tuple[Cache, Any, Any]]) -> Cache:
    """Write ``new`` into a row from a column on, and its state, where (new, row, column) = writing(i, cache), for each
    i below count. A loop updates the cache in place; a scatter of all rows at once copies it (on TPUs twice).
    """

    def body(i: jax.Array, cache: Cache) -> Cache:
        new, row, column = writing(i, cache)
        start = lambda axis: (0, row, 0, 0, column) if axis == -1 else (0, row, 0, column, 0)  # noqa: E731
        changed = by_columns(lambda x, y, axis: jax.lax.dynamic_update_slice(x, y, start(axis)), cache, new)
        put = lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, row, axis=1)  # noqa: E731
        return changed._replace(state=jax.tree.map(put, cache.state, new.state))

    return jax.lax.fori_loop(0, count, body, cache)


FEW = ComputeOptions(experts="few")
"""Experts of a decode step, in which every row has one token."""


class SharedPrefix(NamedTuple):
    """Blocks of shared prefixes that rows read in front of their own columns; none crosses the mesh's parts of rows.

    Attributes:
      cache: one row for each of U blocks.
      lengths: int32[B], prefix length of each row in its block; the row's own column 0 holds that position.
      rows: int32[parts, U / parts * lanes], the row of its part that a block's lane serves; arbitrary if unused.
      lanes: int32[parts, B / parts], the lane of each row, counted through the blocks of its part.
    """

    cache: Cache
    lengths: jax.Array
    rows: jax.Array
    lanes: jax.Array


def shared_prefix(cache: Cache, lengths: jax.Array, lanes: jax.Array, parts: int, width: int) -> SharedPrefix:
    """Build a SharedPrefix with blocks of ``width`` lanes; in ``lanes`` int32[B] rows without a block have one beyond
    all.
    """
    lanes = lanes.reshape(parts, -1)
    count = cache.v.shape[1] // parts * width
    unused = jnp.zeros(count, jnp.int32)
    rows = jax.vmap(lambda of_part: unused.at[of_part].set(jnp.arange(len(of_part)), mode="drop"))(lanes)
    return SharedPrefix(cache, lengths, rows, jnp.minimum(lanes, count - 1))


def _gather_by_part(x: jax.Array, index: jax.Array, count: int) -> jax.Array:
    """Gather x [rows, ...] as [count, ..., ...]: entries ``index`` [parts, ...] of each part of the rows, in order."""
    parts = x.reshape(len(index), -1, *x.shape[1:])
    return jax.vmap(lambda part, at: part[at])(parts, index).reshape(count, -1, *x.shape[1:])


def extend(
    model: Decoder,
    cache: Cache | None,
    lengths: jax.Array,
    tokens: jax.Array,
    dtype: Any = None,
    state_tokens: jax.Array | None = None,
) -> tuple[Cache, jax.Array | None]:
    """Compute keys and values of the next C tokens of every row. Returns a cache of C columns with the states after
    them, and the experts of each token, [P, C, L, k]; None for a dense model. Tokens read each other's keys and values
    as the cache holds them, so that the numbers do not depend on which are computed in one call.

    Args:
      cache: read only; row p is valid below ``lengths[p]``. None for an empty one.
      lengths: int32[P].
      tokens: int32[P, C], from position ``lengths`` on; padding on the right changes nothing before it.
      dtype: of keys and values; None for the model's own.
      state_tokens: int32[P], the number of its first tokens that change a row's state; None for all.
    """
    config = model.config
    count = tokens.shape[1]
    states = empty_state(config, len(tokens)) if cache is None else cache.state
    state_tokens = jnp.full(len(tokens), count, jnp.int32) if state_tokens is None else state_tokens
    cached = {} if cache is None else split_parts(cache)
    steps = jnp.arange(count)
    columns = jnp.arange(cache.columns if cache else 0)
    positions = lengths[:, None] + steps[None]
    since = jnp.broadcast_to(steps[:, None] - steps[None], (len(tokens), count, count))
    distance = jnp.concatenate([positions[:, :, None] - columns[None, None], since], 2)
    before = jnp.broadcast_to(columns[None, None] < lengths[:, None, None], (len(tokens), count, len(columns)))
    in_sequence = jnp.concatenate([before, since >= 0], 2)

    def layer(carry: tuple[jax.Array, SharedKV], w: Weights, inputs: Stacks) -> tuple[Any, Stacks]:
        x, shared_kv = carry
        rotation, window = inputs["layer"]
        part = attention_part(w)
        settings, main = config.attention_of(part), _of_layer(inputs, part, cached)
        sequences = Continuation(inputs.get(config.state_part, {}), state_tokens)
        visible = in_sequence & ((window == 0) | (distance < window))
        new_columns = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
            new_columns.append(stored(k, v, dtype))
            parts = new_columns if main is None else [main, *new_columns]
            s = jnp.concatenate([_scores(settings, q, part) for part in parts], -1)
            weights = layers.attention_weights(s, visible[:, None, :, None], sinks)
            mix = lambda weights, part: layers.mix(*_weighted(settings, weights, part, v.dtype))  # noqa: E731
            mixed = mix(weights[..., len(columns) :], new_columns[0])
            return mixed + mix(weights[..., : len(columns)], main) if main else mixed

        cos_sin, token_input = layers.rotary_cos_sin(positions, rotation), inputs.get("per_layer")
        x, routing, shared_kv = block(
            w, config, x, cos_sin, attend, sequences, shared_kv=shared_kv, token_input=token_input
        )
        return (constrain(x, BATCH), shared_kv), _outputs(config, part, new_columns, sequences, routing)

    x = constrain(embed(model, tokens), BATCH)
    inputs = {"layer": layers.layer_constants(config), config.state_part: states, **cached}
    inputs |= per_layer_inputs(model, tokens, x)
    carry = (x, empty_shared_kv(config, x.shape[:2], x.dtype))
    _, out = scan_layers(layer, carry, config, model.weights.blocks, inputs, indexed=True)
    experts = jnp.moveaxis(out["experts"], 0, 2) if "experts" in out else None
    return join_parts(out, out.get(config.state_part)), experts


def _of_layer(inputs: Stacks, part: str, stacks: Stacks) -> Any:
    """Return what belongs to a layer's keys and values; for a layer that shares another's, the last of ``stacks``."""
    source = part.removeprefix("shared_kv_")
    return inputs.get(part) if part == source else jax.tree.map(lambda x: x[-1], stacks.get(source))


def _outputs(
    config: ModelConfig, part: str, new_columns: list[Cache], sequences: Continuation, routing: jax.Array | None
) -> Stacks:
    """Return what a layer adds to the cache, and the experts of its tokens, by the part that it comes from."""
    out: Stacks = {part: new_columns[0]} if part else {config.state_part: sequences.new}
    if part.startswith("shared_kv_"):
        out = {}
    return out if routing is None else out | {"experts": routing}


def decode(
    model: Decoder,
    cache: Cache,
    chunk: Cache,
    step: jax.Array,
    tokens: jax.Array,
    lengths: jax.Array,
    prefix: SharedPrefix | None = None,
    width: int | None = None,
    form: ByLength | None = None,
    active: jax.Array | None = None,
) -> tuple[jax.Array, Cache, jax.Array | None]:
    """Decode one token for every row. Returns final hidden states [B, D], the chunk with the new column and state, and
    the experts [B, L, k], or None for a dense model.

    Args:
      cache: read only; row b is valid below ``lengths[b]``. It may have more rows: the first of each part are read.
      chunk: a cache of C columns, valid below column ``step``, and the rows' states; this call writes column ``step``.
      step: int32[], 0 <= step < C.
      tokens: int32[B], each row's newest token, at position ``lengths + step`` after its shared prefix.
      lengths: int32[B].
      prefix: the shared prefixes in front of column 0, or None.
      width: upper bound of the cache's columns in use; None for all.
      form: kernels that read the live columns of each row alone; None reads ``width`` columns of all rows.
      active: bool[B], rows whose state changes; None for all.
    """
    config = model.config
    state_tokens = jnp.ones_like(tokens) if active is None else active.astype(jnp.int32)
    caches, states, chunks = split_parts(cache), chunk.state, split_parts(chunk)
    blocks = {} if prefix is None else split_parts(prefix.cache)
    positions = lengths + step + (0 if prefix is None else prefix.lengths)
    places = (lengths, lengths + step, positions)
    read, stacks = {}, {}
    for part, own in caches.items():
        shared = prefix and prefix._replace(cache=blocks[part])
        if form is None:
            read[part] = _attend_all(config.attention_of(part), own, shared, places, width)
        else:
            read[part] = _attend_live(config, part, own, shared, places, form)
        sliced = (own, blocks.get(part)) if form is None else (None, None)
        stacks[part] = (chunks[part], np.arange(len(own.v)), *sliced)
    with_chunk = form is not None and decode_kernels.reads_chunk(form, chunk.columns)

    def layer(carry: tuple[jax.Array, SharedKV], w: Weights, inputs: Stacks) -> tuple[Any, Stacks]:
        x, shared_kv = carry
        rotation, window = inputs["layer"]
        part = attention_part(w)
        settings = config.attention_of(part)
        new, *place = _of_layer(inputs, part, stacks) if part else (Cache(None, None),)
        sequences = Continuation(inputs.get(config.state_part, {}), state_tokens)
        new_columns = []

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
            put = jax.lax.dynamic_update_slice_in_dim
            fresh = by_columns(lambda x, y, axis: put(x, y, step, axis), new, stored(k, v, new.k.dtype))
            new_columns.append(fresh)
            q = q[:, 0]
            read_cache = read[part.removeprefix("shared_kv_")]
            if with_chunk:
                chunk_columns = ChunkColumns(*fresh[:3], jnp.stack(decode_kernels.column_range(step + 1, step, window)))
                parts = read_cache(q, window, *place, chunk_columns)
            else:
                cached, *prefixes = read_cache(q, window, *place)
                parts = [cached, _attend_chunk(settings, q, fresh, step, window), *prefixes]
            if sinks is not None:  # [K, N / K] of the heads: each is a score and no value
                cached = parts[0]
                top = jnp.broadcast_to(sinks[None, :, :, None].astype(cached.top.dtype), cached.top.shape)
                parts = [*parts, PartialAttention(top, jnp.ones_like(top), jnp.zeros_like(cached.mixed))]
            return _merge_parts(parts).astype(q.dtype)[:, None]

        cos_sin, token_input = layers.rotary_cos_sin(positions[:, None], rotation), inputs.get("per_layer")
        x, routing, shared_kv = block(w, config, x, cos_sin, attend, sequences, None, FEW, shared_kv, token_input)
        return (x, shared_kv), _outputs(config, part, new_columns, sequences, routing)

    x = constrain(embed(model, tokens)[:, None], BATCH)
    inputs = {"layer": layers.layer_constants(config), config.state_part: states, **stacks}
    inputs |= per_layer_inputs(model, tokens[:, None], x)
    carry = (x, empty_shared_kv(config, x.shape[:2], x.dtype))
    (x, _), out = scan_layers(layer, carry, config, model.weights.blocks, inputs, indexed=True)
    experts = jnp.moveaxis(out["experts"][:, :, 0], 0, 1) if "experts" in out else None
    return final_hidden(model, x[:, 0]), join_parts(out, out.get(config.state_part)), experts


Places = tuple[jax.Array, jax.Array, jax.Array]
"""int32[B] each: columns of a row in the cache, its newest token's column, and that token's position."""


def _attend_all(
    config: Attention, cache: Cache, prefix: SharedPrefix | None, places: Places, width: int | None
) -> Callable[..., list[PartialAttention]]:
    """Return the attention of a layer over ``width`` columns of all rows, and over their shared prefixes."""
    lengths, newest, positions = places
    columns = jnp.arange(width or cache.columns)
    parts = 1 if prefix is None else len(prefix.rows)
    distance = newest[:, None] - columns[None]
    valid = columns[None] < lengths[:, None]

    def attend(q: jax.Array, window: jax.Array, index: Any, main: Cache, first: Cache) -> list[PartialAttention]:
        main = read_layer(cache, main, index, len(q), len(columns), parts)
        cached = _attend_part(config, q, main, (valid & ((window == 0) | (distance < window)))[:, None, None])
        return [cached] if prefix is None else [cached, _attend_prefix(config, q, first, prefix, positions, window)]

    return attend


def _attend_part(config: Attention, q: jax.Array, cache: Cache, visible: jax.Array) -> PartialAttention:
    """Attend over one layer's cache: q [B, K, N / K, H]; mask ``visible`` bool[B, 1, N / K or 1, S]."""
    scores = jnp.where(visible, _scores(config, q, cache), layers.MASKED)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - top)
    mixed = layers.product("bkgz,bkzh->bkgh", *_weighted(config, weights, cache, q.dtype))
    return PartialAttention(top, jnp.sum(weights, axis=-1, keepdims=True), mixed)


def _scores(config: Attention, q: jax.Array, cache: Cache) -> jax.Array:
    """Return the attention scores of queries over one layer's keys; scales multiply scores, and keys stay int8."""
    if cache.scales is None:
        return layers.attention_scores(q, cache.k, config)
    scale = jnp.expand_dims(cache.scales[:, :, 0], range(2, q.ndim - 1))
    return layers.attention_scores(q, cache.k.astype(q.dtype), config, scale)


def _weighted(config: Attention, weights: jax.Array, cache: Cache, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return weights [B, K, ..., Z] and values of one layer as factors of a product in ``dtype``. Latent vectors are
    the first numbers of keys.
    """
    latent = config.latent
    values = cache.v if latent is None else jnp.swapaxes(cache.k[:, :, : latent.rank], 2, 3)
    if cache.scales is not None:
        weights = weights * jnp.expand_dims(cache.scales[:, :, int(latent is None)], range(2, weights.ndim - 1))
    return weights.astype(dtype), values.astype(dtype)


def _attend_chunk(config: Attention, q: jax.Array, chunk: Cache, step: Any, window: Any) -> PartialAttention:
    """Attend over one layer's chunk up to column ``step``."""
    since = (step - jnp.arange(chunk.v.shape[2]))[None]
    visible = (since >= 0) & ((window == 0) | (since < window))
    # A GPU's compiler merges products that share an operand, and would copy the cache to do so.
    return _attend_part(config, jax.lax.optimization_barrier(q), chunk, visible[:, None, None])


def _merge_parts(parts: list[PartialAttention]) -> jax.Array:
    """Combine partial attention over disjoint columns; the scores are never concatenated, which would copy them."""
    top = functools.reduce(jnp.maximum, [part.top for part in parts])
    mass = jnp.zeros_like(top)
    mixed = jnp.zeros_like(parts[0].mixed)
    for part in parts:
        share = jnp.exp(part.top - top)
        mass += share * part.mass
        mixed += share * part.mixed
    return mixed / mass


def _attend_prefix(
    config: Attention, q: jax.Array, blocks: Cache, prefix: SharedPrefix, positions: jax.Array, window: jax.Array
) -> PartialAttention:
    """Attend over each row's shared prefix: queries [B, K, N / K, H] and results move, both small."""
    count = blocks.v.shape[0]
    (_, heads, queries, _) = q.shape

    by_block = functools.partial(_gather_by_part, index=prefix.rows, count=count)
    columns = jnp.arange(blocks.v.shape[2])[None, None]
    distance = by_block(positions)[..., None] - columns
    visible = (columns < by_block(prefix.lengths)[..., None]) & ((window == 0) | (distance < window))
    visible = jnp.repeat(visible, queries, axis=1)[:, None]
    block_queries = by_block(q).swapaxes(1, 2).reshape(count, heads, -1, q.shape[-1])
    attention = jnp.concatenate(_attend_part(config, block_queries, blocks, visible), axis=-1)
    size = attention.shape[-1]
    attention = attention.reshape(count, heads, -1, queries, size).swapaxes(1, 2).reshape(-1, heads, queries, size)
    attention = _gather_by_part(attention, prefix.lanes, len(positions))[:, 0]
    return PartialAttention(attention[..., :1], attention[..., 1:2], attention[..., 2:])


def _attend_live(
    config: ModelConfig, part: str, cache: Cache, prefix: SharedPrefix | None, places: Places, form: ByLength
) -> Callable[..., list[PartialAttention]]:
    """Return the attention of a layer over the live columns of each row and of its shared prefix, and perhaps over the
    chunk; each device reads its own rows and heads.
    """
    mesh = jax.sharding.get_abstract_mesh()
    windows = [layers.layer_windows(config)[i] for i in config.layers_with(part)]
    kinds = sorted(set(windows))
    of_layer = jnp.asarray([kinds.index(window) for window in windows], jnp.int32)
    blocks = () if prefix is None else (prefix.cache, prefix.rows, prefix.lanes, prefix.lengths)
    by_row = fit_spec(places[0].shape, (BATCH,), mesh)
    spec = fit_spec(cache.k.shape, (None, BATCH, "tensor"), mesh)
    of_blocks = (spec, by_row, by_row, by_row) if blocks else ()

    def on_own(call: Callable, out: PartitionSpec, specs: tuple, *arrays: Any) -> Any:
        if mesh.empty:
            return call(*arrays)
        return jax.shard_map(call, in_specs=specs, out_specs=out, check_vma=False)(*arrays)

    plans_of = functools.partial(_read_plans, form, kinds, cache.columns)
    all_plans = on_own(plans_of, PartitionSpec(None, *by_row), (by_row, *of_blocks), places, *blocks)

    def local(q: jax.Array, layer: jax.Array, cache: Cache, plans: list, chunk: Any, blocks: Any) -> list:
        read = functools.partial(decode_kernels.attend_by_length, form, config.attention_of(part), q)
        parts = read(cache, layer, plans[0], chunk)
        return parts + (read(blocks, layer, plans[1]) if blocks else [])

    def attend(
        q: jax.Array, _: jax.Array, index: Any, main: None, first: None, chunk: ChunkColumns | None = None
    ) -> list[PartialAttention]:
        plans = jax.tree.map(lambda x: x[of_layer[index] if len(kinds) > 1 else 0], all_plans)
        heads = fit_spec(q.shape, (BATCH, "tensor"), mesh)
        chunk_specs = ChunkColumns(heads, heads, heads, PartitionSpec()) if chunk else None
        block_cache = prefix and prefix.cache
        specs = (heads, PartitionSpec(), spec, by_row, chunk_specs, spec)
        return on_own(local, heads, specs, q, jnp.int32(index), cache, plans, chunk, block_cache)

    return attend


def _read_plans(form: ByLength, kinds: Sequence[int], width: int, places: Places, *blocks: Any) -> list[ReadPlan]:
    """Return what the kernels read of a device's rows, and of its blocks if it has any, for each kind of window.
    ``width``: columns of the cache. ``blocks``: their cache, rows, lanes and lengths, as in ``SharedPrefix``.
    """
    columns, newest, positions = places
    plans = []
    for window in kinds:
        visible = ColumnRange(*(x[:, None] for x in decode_kernels.column_range(columns, newest, window)))
        plans.append([decode_kernels.read_plan(form, visible, width)])
        if blocks:
            (block_cache, (rows,), (lanes,), lengths) = blocks
            seen = decode_kernels.column_range(lengths, positions, window)
            has_row = (lanes[rows] == jnp.arange(len(rows))) & (lengths[rows] > 0)
            served = jnp.where(has_row, rows, -1).reshape(block_cache.v.shape[1], -1)
            limit = jnp.where(has_row, seen.limit[rows], 0)
            lane_range = ColumnRange(*(x.reshape(served.shape) for x in (seen.least[rows], limit)))
            has_lane = seen.limit > seen.least
            plans[-1].append(decode_kernels.read_plan(form, lane_range, block_cache.columns, served, has_lane))
    return jax.tree.map(lambda *each: jnp.stack(each), *plans)
