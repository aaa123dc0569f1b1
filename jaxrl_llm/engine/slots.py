"""Slots: the sampler's state on the device, its layout on the mesh, and the compiled calls that change it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.engine.requests import SlotShape
from jaxrl_llm.engine.sampling import Draw, DrawOptions, Tail, TracedSampling, draw, empty_tail, extend_tail, uniforms
from jaxrl_llm.engine.settings import Repetition
from jaxrl_llm.models.decode_kernels import ByLength
from jaxrl_llm.models.decoder import Decoder, unembed
from jaxrl_llm.models.decoding import (
    Cache,
    decode,
    empty_cache,
    extend,
    first_rows,
    flush,
    insert,
    insert_divided,
    joined_sequence,
    move_rows,
    shared_prefix,
    take_rows,
    with_columns,
)
from jaxrl_llm.models.experts import EXPERTS, routes_shape
from jaxrl_llm.sharding import BATCH, batch_parts, constrain, fit_spec

CACHE_PARTITION = (None, BATCH, "tensor")
"""Partition of a cache's arrays: rows over data and fsdp, heads over tensor."""


def slot_parts(mesh: Mesh | None, rows: int) -> int:
    """Return the number of parts into which the mesh divides the slots and the blocks that they read."""
    parts = 1 if mesh is None else batch_parts(mesh)
    return parts if rows % parts == 0 else 1


def slot_shardings(slots: Any, mesh: Any) -> Any:
    """Return shardings for arrays of slots or of a cache: B and U over data and fsdp, key/value heads over tensor."""
    partition = lambda array: CACHE_PARTITION if array.ndim == 5 else (BATCH,)  # noqa: E731
    return jax.tree.map(lambda array: NamedSharding(mesh, fit_spec(array.shape, partition(array), mesh)), slots)


def constrain_slots(slots: Any, mesh: Mesh | None) -> Any:
    """Constrain slots to their shardings."""
    return slots if mesh is None else jax.lax.with_sharding_constraint(slots, slot_shardings(slots, mesh))


def constrain_cache(cache: Cache) -> Cache:
    """Constrain a cache: rows over data and fsdp, heads over tensor."""
    return jax.tree.map(lambda x: constrain(x, *CACHE_PARTITION), cache)


def map_local_rows(change: Callable[..., Cache], mesh: Mesh | None, cache: Cache, new: Any, *index: jax.Array) -> Cache:
    """Apply ``change(cache, new, *index)`` to every device's own rows and heads; ``index`` has an entry for each slot.
    ``new``: None, or a cache of as many rows, partitioned alike.
    """
    if mesh is None:
        return change(cache, new, *index)
    rows, new_rows = (cache_specs(c, mesh) for c in (cache, new))
    in_specs = (rows, new_rows, *(PartitionSpec(rows.k[1]) for _ in index))
    return jax.shard_map(change, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)(cache, new, *index)


def cache_specs(cache: Cache | None, mesh: Mesh) -> Any:
    """Return the partition of each array of a cache."""
    return jax.tree.map(lambda x: fit_spec(x.shape, CACHE_PARTITION, mesh), cache)


def insert_rows(
    mesh: Mesh | None, cache: Cache, prefilled: Cache, needed: jax.Array, source: jax.Array, start: jax.Array
) -> Cache:
    """Apply ``insert`` to every device's own rows and heads; the rows given may be divided too."""
    if mesh is None:
        return insert(cache, prefilled, source, start)
    rows, prefilled_rows = (cache_specs(c, mesh) for c in (cache, prefilled))
    change: Callable[..., Cache] = lambda *arguments: insert(*arguments[:-1])  # noqa: E731
    if prefilled_rows.k[1]:
        change = functools.partial(insert_divided, axes=prefilled_rows.k[1])
    each = PartitionSpec(rows.k[1])
    in_specs = (rows, prefilled_rows, each, each, PartitionSpec())
    return jax.shard_map(change, mesh=mesh, in_specs=in_specs, out_specs=rows, check_vma=False)(
        cache, prefilled, source, start, needed
    )


class Slots(NamedTuple):
    """State of the slots on the device between calls; [B] for each slot unless noted.

    Attributes:
      cache: keys and values after the prompt. It may have more rows: the first of each part are the slots'.
      blocks: keys and values of prompts, [U].
      lanes: which lane of the blocks each slot reads, as ``shared_prefix`` takes them.
      before: columns of its block that a slot begins with.
      lengths: valid columns of the cache.
      tokens: the newest token, not in the cache yet.
      seeds: uint32[B, 2].
      sampled: tokens of the completion so far, at most ``limits``.
      tail: state of the repetition rules.
      active: whether the slot is still sampling.
    """

    cache: Any
    blocks: Any
    lanes: jax.Array
    before: jax.Array
    lengths: jax.Array
    tokens: jax.Array
    seeds: jax.Array
    sampled: jax.Array
    limits: jax.Array
    tail: Tail
    active: jax.Array


class Admission(NamedTuple):
    """Slots and blocks that begin, and the prefilled rows that they are made of.

    Attributes:
      needed: [rows prefilled], rows that any block or slot is made of, then negative numbers.
      blocks: [U], the prefilled row that a block is made of; negative leaves it unchanged.
      source: [B], the prefilled row of a slot's own columns from its column ``before`` on; negative for none.
      slots: initial values of the slots that begin, which are active, without cache and blocks; lanes of all slots.
    """

    needed: Any
    blocks: Any
    source: Any
    slots: Slots


def empty_admission(shape: SlotShape, prefilled: int, repetition: Repetition | None) -> Admission:
    """Return an admission in NumPy that begins no slot, for so many prefilled rows."""
    none = functools.partial(np.full, fill_value=-1, dtype=np.int32)
    rows = shape.rows
    names = ("lanes", "before", "lengths", "tokens", "sampled", "limits")
    new: dict[str, Any] = {name: np.zeros(rows, np.int32) for name in names}
    new |= {"seeds": np.zeros((rows, 2), np.uint32), "active": np.zeros(rows, bool)}
    slots = Slots(None, None, **new, tail=empty_tail(rows, repetition))
    return Admission(needed=none(prefilled), blocks=none(shape.blocks), source=none(rows), slots=slots)


@functools.partial(jax.jit, static_argnames=("config", "shape", "dtype", "mesh", "repetition", "cache_shape"))
def empty_slots(
    config: Any,
    shape: SlotShape,
    dtype: Any,
    mesh: Mesh | None = None,
    repetition: Repetition | None = None,
    cache_shape: tuple[int, int] | None = None,
) -> Slots:
    """Return inactive slots on the mesh: B and U over data and fsdp, key/value heads over tensor. ``cache_shape``: rows
    and columns of the cache, those of the slots unless more are given.
    """
    cache = empty_cache(config, *(cache_shape or (shape.rows, shape.columns)), dtype)
    blocks = empty_cache(config, shape.blocks, shape.prompt_columns, dtype)._replace(state=None)
    slots = jax.tree.map(jnp.asarray, empty_admission(shape, 0, repetition).slots)
    return constrain_slots(slots._replace(cache=cache, blocks=blocks), mesh)


@functools.partial(jax.jit, static_argnames=("steps", "options", "group", "mesh", "columns", "form"), donate_argnums=1)
def run_chunk(
    model: Decoder,
    slots: Slots,
    rules: TracedSampling,
    steps: int,
    options: DrawOptions,
    group: int = 1,
    mesh: Mesh | None = None,
    columns: int | None = None,
    form: ByLength | None = None,
) -> tuple[Slots, tuple[Draw, jax.Array]]:
    """Sample up to ``steps`` tokens for every active slot; end early once none is active. Returns the slots, and for
    the host, on every device of the mesh, the output and which slots remain active.

    The cache needs ``steps`` columns beyond the longest active row; ``columns`` of it are read, which must hold all
    valid ones (None: the whole); at most ``group`` slots read one block. With kernels (``form``) only live columns of
    active slots are read, however many columns there are.
    """
    config = model.config
    rows = slots.tokens.shape[0]
    before = shared_prefix(slots.blocks, slots.before, slots.lanes, slot_parts(mesh, slots.cache.v.shape[1]), group)
    lengths = slots.lengths
    if form is not None:  # nothing is live of a slot without a request, and what is read is the same in all steps
        lengths, prompt_lengths = (jnp.where(slots.active, x, 0) for x in (slots.lengths, slots.before))
        before = before._replace(lengths=prompt_lengths)

    def sample_token(now: Slots, hidden: jax.Array, experts: jax.Array | None, step: jax.Array) -> tuple[Slots, Draw]:
        """Sample one token for every row; ``now`` has no caches."""
        logits = constrain(unembed(model, hidden), BATCH, "tensor")
        # Each device draws for rows of its own: a vocabulary that is divided cannot be cut into blocks to be summed.
        logits = constrain(logits, (*BATCH, "tensor"))
        drawn = draw(logits, uniforms(now.seeds, slots.before + slots.lengths + step + 1), rules, options)
        if experts is not None:
            drawn.extras[EXPERTS] = experts
        drawn = jax.tree.map(lambda x: constrain(x, BATCH), drawn)
        sampled = now.sampled + now.active.astype(jnp.int32)
        tail, repeats = extend_tail(now.tail, drawn.token, drawn.extras["policy_logp"], rules)
        stopped = jnp.any(drawn.token[:, None] == rules.stop_ids[None], axis=1) | (sampled >= now.limits) | repeats
        after = now._replace(tokens=drawn.token, sampled=sampled, tail=tail, active=now.active & ~stopped)
        return after, drawn._replace(real=now.active, repeats=repeats)

    light = slots._replace(cache=None, blocks=None)
    states = first_rows(slots.cache.state, rows, slot_parts(mesh, slots.cache.v.shape[1]))
    chunk = empty_cache(config, rows, steps, slots.cache.k.dtype)._replace(state=states)
    hidden = jax.ShapeDtypeStruct((rows, config.width), model.weights.final_norm[...].dtype)
    routes = routes_shape(config, rows)
    shapes = jax.eval_shape(lambda *inputs: sample_token(light, *inputs, jnp.int32(0))[1], hidden, routes)
    draws = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), shapes)

    def decode_step(carry: tuple) -> tuple:
        step, now, chunk, draws = carry
        hidden, chunk, experts = decode(
            model, slots.cache, chunk, step, now.tokens, lengths, before, columns, form, now.active
        )
        now, new = sample_token(now, hidden, experts, step)
        return step + 1, now, chunk, jax.tree.map(lambda a, b: a.at[step].set(b), draws, new)

    # The cache is read, never carried: only the small chunk travels through the loop.
    more = lambda carry: (carry[0] < steps) & jnp.any(carry[1].active)  # noqa: E731
    _, now, chunk, draws = jax.lax.while_loop(more, decode_step, (jnp.int32(0), light, chunk, draws))
    cache = map_local_rows(flush, mesh, slots.cache, chunk, slots.lengths)
    lengths = slots.lengths + now.sampled - slots.sampled
    host_outputs = (draws, now.active)
    if mesh is not None:
        host_outputs = jax.lax.with_sharding_constraint(host_outputs, NamedSharding(mesh, PartitionSpec()))
    return now._replace(cache=cache, blocks=slots.blocks, lengths=lengths), host_outputs


@functools.partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def fill_slots(slots: Slots, prefilled: Cache, admission: Admission, mesh: Mesh | None = None) -> Slots:
    """Begin slots and blocks with rows of ``prefilled``."""
    new = admission.slots
    cache = insert_rows(mesh, slots.cache, prefilled, admission.needed, admission.source, new.before)
    first_columns = jnp.zeros_like(admission.blocks)
    columns = prefilled._replace(state=None)
    blocks = insert_rows(mesh, slots.blocks, columns, admission.needed, admission.blocks, first_columns)
    is_new = lambda old: new.active.reshape((-1,) + (1,) * (old.ndim - 1))  # noqa: E731
    old_slots = slots._replace(cache=None, blocks=None)
    chosen = jax.tree.map(lambda array, old: jnp.where(is_new(old), array, old), new, old_slots)
    return constrain_slots(chosen._replace(cache=cache, blocks=blocks, lanes=new.lanes), mesh)


@functools.partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def rearrange_slots(cache: Cache, rows: Slots, order: jax.Array, source: jax.Array, mesh: Mesh | None = None) -> Slots:
    """Replace slot i with slot ``order[i]`` of ``rows`` (without cache and blocks), idle where that int32[new B] is
    negative. The cache's rows move in place, never copied: row ``source[i]`` of its part to slot i; negative where it
    stays, int32[new B]. ``mesh`` divides both.
    """
    old = jnp.maximum(order, 0)
    new_rows = jax.tree.map(lambda x: jnp.take(x, old, axis=0), rows)
    cache = map_local_rows(move_rows, mesh, cache, None, source)
    new_rows = new_rows._replace(cache=cache, active=new_rows.active & (order >= 0))
    return constrain_slots(new_rows, mesh)


@functools.partial(jax.jit, static_argnames=("columns", "mesh", "parts"))
def rearrange_blocks(
    slots: Slots, order: jax.Array, columns: int, lanes: jax.Array, mesh: Mesh | None = None, parts: int = 1
) -> Slots:
    """Return the slots with block i made of the old block ``order[i]``, of ``columns`` columns, and with new lanes.
    Every device moves its own blocks, since otherwise each would gather all of them.
    """

    take = lambda cache, _, order: with_columns(take_rows(cache, order % cache.v.shape[1]), columns)  # noqa: E731
    blocks = map_local_rows(take, mesh if parts > 1 else None, slots.blocks, None, order)
    return constrain_slots(slots._replace(blocks=blocks, lanes=lanes), mesh)


@functools.partial(jax.jit, static_argnames="columns")
def copy_sequence(slots: Slots, row: jax.Array, slot: jax.Array, block: jax.Array, columns: int) -> Cache:
    """Return one row with the keys and values of a slot's sequence, in ``columns`` columns; ``row``: of the cache."""
    return with_columns(joined_sequence(slots.cache, row, slots.blocks, block, slots.before[slot]), columns)


@functools.partial(jax.jit, donate_argnums=0)
def stop_slots(slots: Slots, gone: jax.Array) -> Slots:
    """Deactivate the slots in ``gone`` (bool[B])."""
    return slots._replace(active=slots.active & ~gone)


@functools.partial(jax.jit, static_argnames=("columns", "mesh", "dtype"), donate_argnums=1)
def extend_prompts(
    model: Decoder,
    cache: Cache | None,
    lengths: jax.Array,
    tokens: jax.Array,
    state_tokens: jax.Array,
    columns: int,
    mesh: Mesh | None = None,
    dtype: Any = None,
) -> tuple[Cache, jax.Array | None]:
    """Extend the cache [P rows] with keys and values of ``tokens`` int32[P, C] from each row's position ``lengths`` on,
    and its states with the first ``state_tokens`` int32[P]. ``cache``: None creates one of so many columns; ``dtype``:
    of keys and values. Each device computes its own rows. Returns the cache, and for the host, on every device, the
    experts of each token [P, C, L, k]; None for a dense model.
    """
    tokens = constrain(tokens, BATCH)
    new, experts = extend(model, cache, lengths, tokens, dtype, state_tokens)
    if mesh is not None and experts is not None:
        experts = jax.lax.with_sharding_constraint(experts, NamedSharding(mesh, PartitionSpec()))
    start = empty_cache(model.config, len(tokens), columns, new.k.dtype) if cache is None else cache
    return constrain_cache(map_local_rows(flush, mesh, constrain_cache(start), new, lengths)), experts


@functools.partial(jax.jit, static_argnames=("rows", "columns"))
def concatenate_caches(caches: list[Cache], rows: int, columns: int) -> Cache:
    """Join caches by rows and pad the result to so many rows and columns."""
    padded = [with_columns(cache, columns) for cache in caches]
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *padded)
    return constrain_cache(jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (0, rows - x.shape[1]), *[(0, 0)] * 3]), joined))
