"""What the sampler holds on the device, and the compiled calls that change it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.engine.blocks import SlotShape
from jaxrl_llm.engine.repetition import Tail, TailRule, extend_tail, fresh_tail, tail_rule
from jaxrl_llm.engine.sampling import Asked, DrawRule, as_rule, draw, uniforms
from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.models.cache import (
    Beginnings,
    Cache,
    beginnings,
    decode,
    empty_cache,
    extend,
    flush,
    insert,
    sequence_of,
    take_rows,
    with_columns,
)  # fmt: skip
from jaxrl_llm.models.decoder import Decoder, unembed
from jaxrl_llm.sharding import BATCH, batch_parts, fitting


class Slots(NamedTuple):
    """What the device holds between calls; [B] for each slot unless said.

    Attributes:
      cache: keys and values of what follows the prompt.
      blocks: those of prompts, [U].
      lanes: which lane of the blocks each slot reads, as ``beginnings`` takes them.
      before: columns of its block that a slot begins with.
      lengths: valid columns of the cache.
      tokens: the newest token, not in the cache yet.
      seeds: uint32[B, 2].
      sampled: tokens of the completion so far.
      limits: tokens that it may have at most.
      tail: what is remembered of them, to notice repetition.
      active: whether the slot is still sampling.
    """

    cache: Cache
    blocks: Cache
    lanes: jax.Array
    before: jax.Array
    lengths: jax.Array
    tokens: jax.Array
    seeds: jax.Array
    sampled: jax.Array
    limits: jax.Array
    tail: Tail
    active: jax.Array


class Rules(NamedTuple):
    """``Sampling`` as arrays: how a token is drawn, and what ends a completion that repeats itself."""

    draw: DrawRule
    tail: TailRule


def as_rules(sampling: Sampling) -> Rules:
    """The traced form."""
    return Rules(as_rule(sampling), tail_rule(sampling.repetition))


class Emitted(NamedTuple):
    """What a chunk of C steps produced, [C, B] each.

    Attributes:
      token: sampled.
      logp: nats, of the distribution that was sampled from.
      extras: further arrays by name.
      real: which entries count.
      repeats: where the completion only repeats itself and ends for that.
    """

    token: jax.Array
    logp: jax.Array
    extras: dict[str, jax.Array]
    real: jax.Array
    repeats: jax.Array


@functools.partial(jax.jit, static_argnames=("config", "shape", "dtype", "mesh", "repetition"))
def empty_slots(
    config: Any, shape: SlotShape, dtype: Any, mesh: Mesh | None = None, repetition: Repetition | None = None
) -> Slots:
    """Slots of which none is active, on the mesh: B and U over data and fsdp, key/value heads over tensor."""
    rows = shape.rows
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    slots = Slots(
        empty_cache(config, rows, shape.columns, dtype), empty_cache(config, shape.blocks, shape.prompt_columns, dtype),
        zeros(rows), zeros(rows), zeros(rows), zeros(rows), jnp.zeros((rows, 2), jnp.uint32), zeros(rows), zeros(rows),
        fresh_tail(rows, repetition), jnp.zeros(rows, bool),
    )  # fmt: skip
    return slots if mesh is None else jax.lax.with_sharding_constraint(slots, slot_shardings(slots, mesh))


@functools.partial(jax.jit, static_argnames=("steps", "asked", "group", "mesh"), donate_argnums=1)
def run_chunk(
    model: Decoder, slots: Slots, rules: Rules, steps: int, asked: Asked, group: int = 1, mesh: Mesh | None = None
) -> tuple[Slots, tuple[Emitted, jax.Array]]:
    """Up to ``steps`` tokens for every active slot; ends early when none is left.

    The cache needs ``steps`` columns beyond the longest active row; ``group`` slots at most read one block. Returns the
    slots, and for the host, on every device of the mesh, what was emitted and which slots go on.
    """
    config = model.config
    rows = slots.tokens.shape[0]
    before = beginnings(slots.blocks, slots.before, slots.lanes, parts_of(mesh, rows), group)

    def pick(now: Slots, chunk: Cache, step: jax.Array) -> tuple[Slots, Cache, Emitted]:
        return _pick(model, slots, before, rules, asked, now, chunk, step)

    light = slots._replace(cache=None, blocks=None)
    chunk = empty_cache(config, rows, steps, slots.cache.k.dtype)
    shapes = jax.eval_shape(lambda: pick(light, chunk, jnp.int32(0))[2])
    out = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), shapes)

    def more(carry: tuple) -> jax.Array:
        step = carry[0]
        now = carry[1]
        return (step < steps) & jnp.any(now.active)

    def one(carry: tuple) -> tuple:
        step, now, chunk, out = carry
        now, chunk, new = pick(now, chunk, step)
        return step + 1, now, chunk, jax.tree.map(lambda a, b: a.at[step].set(b), out, new)

    # The cache is read, never carried: only the small chunk travels through the loop.
    _, now, chunk, out = jax.lax.while_loop(more, one, (jnp.int32(0), light, chunk, out))
    cache = _on_rows(flush, mesh, slots.cache, chunk, slots.lengths)
    lengths = slots.lengths + now.sampled - slots.sampled
    told = (out, now.active)
    if mesh is not None:
        told = jax.lax.with_sharding_constraint(told, NamedSharding(mesh, PartitionSpec()))
    return now._replace(cache=cache, blocks=slots.blocks, lengths=lengths), told


def parts_of(mesh: Mesh | None, rows: int) -> int:
    """Into how many parts the mesh divides the slots and the blocks that they read."""
    parts = 1 if mesh is None else batch_parts(mesh)
    return parts if rows % parts == 0 else 1


def _pick(
    model: Decoder,
    slots: Slots,
    before: Beginnings,
    rules: Rules,
    asked: Asked,
    now: Slots,
    chunk: Cache,
    step: jax.Array,
) -> tuple[Slots, Cache, Emitted]:
    """One token for every row; ``slots`` as the chunk began, ``now`` without its caches."""
    hidden, chunk = decode(model, slots.cache, chunk, step, now.tokens, slots.lengths, before)
    drawn = draw(
        unembed(model, hidden), uniforms(now.seeds, slots.before + slots.lengths + step + 1), rules.draw, asked
    )
    sampled = now.sampled + now.active.astype(jnp.int32)
    tail, repeats = extend_tail(now.tail, drawn.token, drawn.extras["policy_logp"], rules.tail)
    stopped = jnp.any(drawn.token[:, None] == rules.draw.stop_ids[None], axis=1) | (sampled >= now.limits) | repeats
    emitted = Emitted(drawn.token, drawn.logp, drawn.extras, now.active, repeats)
    return now._replace(tokens=drawn.token, sampled=sampled, tail=tail, active=now.active & ~stopped), chunk, emitted


class Admission(NamedTuple):
    """How slots begin, [B] each.

    Attributes:
      blocks: [U], the prefilled row that a block is made of; negative leaves it alone.
      source: that which a slot's own columns are made of, from its column ``before`` on; negative for none.
      new: which slots begin; the other fields of these are those of ``Slots``.
      lanes: of all slots, new or not.
    """

    blocks: Any
    source: Any
    new: Any
    lanes: Any
    before: Any
    lengths: Any
    tokens: Any
    seeds: Any
    sampled: Any
    limits: Any
    tail: Any


OF_EACH_SLOT = ("before", "lengths", "tokens", "seeds", "sampled", "limits", "tail")
"""The fields of an ``Admission`` that become those of the slots that begin."""


@functools.partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def fill_slots(slots: Slots, given: Cache, begun: Admission, mesh: Mesh | None = None) -> Slots:
    """Slots and blocks begun with rows of ``given``."""
    cache = _on_rows(insert, mesh, slots.cache, given, begun.source, begun.before)
    blocks = _on_rows(insert, mesh, slots.blocks, given, begun.blocks, jnp.zeros_like(begun.blocks))

    def choose(given: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(begun.new.reshape((-1,) + (1,) * (old.ndim - 1)), given, old)

    own = {name: jax.tree.map(choose, getattr(begun, name), getattr(slots, name)) for name in OF_EACH_SLOT}
    filled = slots._replace(cache=cache, blocks=blocks, lanes=begun.lanes, active=begun.new | slots.active, **own)
    return filled if mesh is None else jax.lax.with_sharding_constraint(filled, slot_shardings(filled, mesh))


@functools.partial(jax.jit, static_argnames=("columns", "mesh", "parts"))
def rearranged(slots: Slots, order: jax.Array, columns: int, mesh: Mesh | None = None, parts: int = 1) -> Slots:
    """Slot i becomes what slot ``order[i]`` was, or an idle one where that is negative; the cache gets ``columns``
    columns.

    ``parts``: of the mesh, which no slot leaves.
    """
    rows = jnp.maximum(order, 0)
    moved = jax.tree.map(lambda x: jnp.take(x, rows, axis=0), slots._replace(cache=None, blocks=None))
    cache = _moved(slots.cache, rows, columns, mesh, parts)
    moved = moved._replace(cache=cache, blocks=slots.blocks, active=moved.active & (order >= 0))
    return moved if mesh is None else jax.lax.with_sharding_constraint(moved, slot_shardings(moved, mesh))


@functools.partial(jax.jit, static_argnames=("columns", "mesh", "parts"))
def with_blocks(
    slots: Slots, order: jax.Array, columns: int, lanes: jax.Array, mesh: Mesh | None = None, parts: int = 1
) -> Slots:
    """The slots with block i made of what block ``order[i]`` was, of ``columns`` columns, and read by other lanes."""
    moved = slots._replace(blocks=_moved(slots.blocks, order, columns, mesh, parts), lanes=lanes)
    return moved if mesh is None else jax.lax.with_sharding_constraint(moved, slot_shardings(moved, mesh))


def _moved(cache: Cache, order: jax.Array, columns: int, mesh: Mesh | None, parts: int) -> Cache:
    """Rows in that order, of ``columns`` columns; every device moves its own, or each would gather the whole cache."""
    if mesh is None or parts == 1:
        return with_columns(take_rows(cache, order), columns)
    rows = fitting(cache.k.shape, (None, BATCH, "tensor"), mesh)

    def own(cache: Cache, order: jax.Array) -> Cache:
        return with_columns(take_rows(cache, order % cache.v.shape[1]), columns)

    inside = Cache(rows, rows), PartitionSpec(rows[1])
    return jax.shard_map(own, mesh=mesh, in_specs=inside, out_specs=Cache(rows, rows), check_vma=False)(cache, order)


@functools.partial(jax.jit, static_argnames="columns")
def kept_sequence(slots: Slots, slot: jax.Array, block: jax.Array, columns: int) -> Cache:
    """One row with the keys and values of a slot's whole sequence, in ``columns`` columns."""
    return with_columns(sequence_of(slots.cache, slot, slots.blocks, block, slots.before[slot]), columns)


@functools.partial(jax.jit, donate_argnums=0)
def stop_slots(slots: Slots, gone: jax.Array) -> Slots:
    """Slots of which those in ``gone`` (bool[B]) sample no more."""
    return slots._replace(active=slots.active & ~gone)


@functools.partial(jax.jit, static_argnames="continues", donate_argnums=1)
def extend_prompts(model: Decoder, cache: Cache, lengths: jax.Array, tokens: jax.Array, continues: bool) -> Cache:
    """The cache [P rows] with the keys and values of ``tokens`` int32[P, C] at each row's positions ``lengths`` and on.

    ``continues``: whether any row holds something already.
    """
    return flush(cache, extend(model, cache if continues else None, lengths, tokens), lengths)


def slot_shardings(slots: Slots, mesh: Any) -> Slots:
    """Where each array is: B and U over data and fsdp, key/value heads over tensor."""

    def spec(x: Any) -> tuple[Any, ...]:
        return (None, BATCH, "tensor") if x.ndim == 5 else (BATCH,)

    return jax.tree.map(lambda x: NamedSharding(mesh, fitting(x.shape, spec(x), mesh)), slots)


def _on_rows(change: Callable[..., Cache], mesh: Mesh | None, cache: Cache, new: Cache, *index: jax.Array) -> Cache:
    """``change(cache, new, *index)`` on every device's own rows and heads; ``index`` has an entry for each row.

    ``new`` has a row for each slot (a chunk), or any rows (prompts), which every device then sees all of.
    """
    if mesh is None:
        return change(cache, new, *index)

    def spec(x: Any, axes: tuple[Any, ...]) -> PartitionSpec:
        return fitting(x.shape, axes, mesh)

    rows = spec(cache.k, (None, BATCH, "tensor"))
    own = BATCH if change is flush else None
    inside = (
        Cache(rows, rows),
        jax.tree.map(lambda x: spec(x, (None, own, "tensor")), new),
        *(spec(x, (BATCH,)) for x in index),
    )
    return jax.shard_map(change, mesh=mesh, in_specs=inside, out_specs=Cache(rows, rows), check_vma=False)(
        cache, new, *index
    )
