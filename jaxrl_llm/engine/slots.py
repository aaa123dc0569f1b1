"""What the sampler holds on the device, and the compiled calls that change it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.engine.blocks import SlotShape
from jaxrl_llm.engine.placement import inserted, on_own_rows, parts_of, placed, resized, slot_shardings
from jaxrl_llm.engine.repetition import Tail, TailRule, extend_tail, fresh_tail, tail_rule
from jaxrl_llm.engine.sampling import Asked, DrawRule, as_rule, draw, uniforms
from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.models.cache import Cache, empty_cache, flush, move_rows, sequence_of, with_columns
from jaxrl_llm.models.decoder import Decoder, unembed
from jaxrl_llm.models.decoding import beginnings, decode, extend
from jaxrl_llm.sharding import BATCH, constrain


class Slots(NamedTuple):
    """What the device holds between calls; [B] for each slot unless said.

    Attributes:
      cache: keys and values of what follows the prompt. It may have more rows: of each of its parts the first are those
        of the slots there.
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


@functools.partial(jax.jit, static_argnames=("config", "shape", "dtype", "mesh", "repetition", "room"))
def empty_slots(
    config: Any, shape: SlotShape, dtype: Any, mesh: Mesh | None = None, repetition: Repetition | None = None,
    room: tuple[int, int] | None = None,
) -> Slots:  # fmt: skip
    """Slots of which none is active, on the mesh: B and U over data and fsdp, key/value heads over tensor.

    ``room``: rows and columns of the cache, those of the slots unless more are given.
    """
    rows = shape.rows
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    slots = Slots(
        empty_cache(config, *(room or (rows, shape.columns)), dtype),
        empty_cache(config, shape.blocks, shape.prompt_columns, dtype),
        zeros(rows), zeros(rows), zeros(rows), zeros(rows), jnp.zeros((rows, 2), jnp.uint32), zeros(rows), zeros(rows),
        fresh_tail(rows, repetition), jnp.zeros(rows, bool),
    )  # fmt: skip
    return slots if mesh is None else jax.lax.with_sharding_constraint(slots, slot_shardings(slots, mesh))


@functools.partial(jax.jit, static_argnames=("steps", "asked", "group", "mesh", "columns"), donate_argnums=1)
def run_chunk(
    model: Decoder, slots: Slots, rules: Rules, steps: int, asked: Asked, group: int = 1, mesh: Mesh | None = None,
    columns: int | None = None,
) -> tuple[Slots, tuple[Emitted, jax.Array]]:  # fmt: skip
    """Up to ``steps`` tokens for every active slot; ends early when none is left.

    The cache needs ``steps`` columns beyond the longest active row; of it ``columns`` are read, which must hold all
    that is there (None: the whole); ``group`` slots at most read one block. Returns the slots, and for the host, on
    every device of the mesh, what was emitted and which slots go on.
    """
    config = model.config
    rows = slots.tokens.shape[0]
    before = beginnings(slots.blocks, slots.before, slots.lanes, parts_of(mesh, slots.cache.v.shape[1]), group)

    def pick(now: Slots, chunk: Cache, step: jax.Array) -> tuple[Slots, Cache, Emitted]:
        hidden, chunk = decode(model, slots.cache, chunk, step, now.tokens, slots.lengths, before, columns)
        now, emitted = _pick(model, hidden, slots, rules, asked, now, step)
        return now, chunk, emitted

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
    cache = on_own_rows(flush, mesh, slots.cache, chunk, slots.lengths)
    lengths = slots.lengths + now.sampled - slots.sampled
    told = (out, now.active)
    if mesh is not None:
        told = jax.lax.with_sharding_constraint(told, NamedSharding(mesh, PartitionSpec()))
    return now._replace(cache=cache, blocks=slots.blocks, lengths=lengths), told


def _pick(
    model: Decoder, hidden: jax.Array, slots: Slots, rules: Rules, asked: Asked, now: Slots, step: jax.Array
) -> tuple[Slots, Emitted]:
    """One token for every row of hidden [B, D]; ``slots`` as the chunk began, ``now`` without its caches."""
    logits = constrain(unembed(model, hidden), BATCH, "tensor")
    # Each device draws for rows of its own: a vocabulary that is divided cannot be cut into blocks to be summed.
    logits = constrain(logits, (*BATCH, "tensor"))
    drawn = draw(logits, uniforms(now.seeds, slots.before + slots.lengths + step + 1), rules.draw, asked)
    drawn = jax.tree.map(lambda x: constrain(x, BATCH), drawn)
    sampled = now.sampled + now.active.astype(jnp.int32)
    tail, repeats = extend_tail(now.tail, drawn.token, drawn.extras["policy_logp"], rules.tail)
    stopped = jnp.any(drawn.token[:, None] == rules.draw.stop_ids[None], axis=1) | (sampled >= now.limits) | repeats
    emitted = Emitted(drawn.token, drawn.logp, drawn.extras, now.active, repeats)
    return now._replace(tokens=drawn.token, sampled=sampled, tail=tail, active=now.active & ~stopped), emitted


class Admission(NamedTuple):
    """How slots begin, [B] each.

    Attributes:
      needed: [rows prefilled], those that any block or slot is made of, then negative numbers.
      blocks: [U], the prefilled row that a block is made of; negative leaves it alone.
      source: that which a slot's own columns are made of, from its column ``before`` on; negative for none.
      new: which slots begin; the other fields of these are those of ``Slots``.
      lanes: of all slots, new or not.
    """

    needed: Any
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
    cache = inserted(mesh, slots.cache, given, begun.needed, begun.source, begun.before)
    blocks = inserted(mesh, slots.blocks, given, begun.needed, begun.blocks, jnp.zeros_like(begun.blocks))

    def choose(given: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(begun.new.reshape((-1,) + (1,) * (old.ndim - 1)), given, old)

    own = {name: jax.tree.map(choose, getattr(begun, name), getattr(slots, name)) for name in OF_EACH_SLOT}
    filled = slots._replace(cache=cache, blocks=blocks, lanes=begun.lanes, active=begun.new | slots.active, **own)
    return filled if mesh is None else jax.lax.with_sharding_constraint(filled, slot_shardings(filled, mesh))


@functools.partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def rearranged(cache: Cache, rows: Slots, order: jax.Array, source: jax.Array, mesh: Mesh | None = None) -> Slots:
    """Slot i becomes what slot ``order[i]`` was, or an idle one where that is negative.

    Args:
      cache: of the slots; what moves in it is moved where it lies, so there is never a second one.
      rows: the slots without their cache and blocks.
      order: int32[new B].
      source: int32[new B], the row in its part of the cache that slot i's is made of; negative where it stays.
      mesh: that divides them.
    """
    old = jnp.maximum(order, 0)
    moved = jax.tree.map(lambda x: jnp.take(x, old, axis=0), rows)
    cache = on_own_rows(move_rows, mesh, cache, None, source)
    moved = moved._replace(cache=cache, active=moved.active & (order >= 0))
    return moved if mesh is None else jax.lax.with_sharding_constraint(moved, slot_shardings(moved, mesh))


@functools.partial(jax.jit, static_argnames=("columns", "mesh", "parts"))
def with_blocks(
    slots: Slots, order: jax.Array, columns: int, lanes: jax.Array, mesh: Mesh | None = None, parts: int = 1
) -> Slots:
    """The slots with block i made of what block ``order[i]`` was, of ``columns`` columns, and read by other lanes."""
    moved = slots._replace(blocks=resized(slots.blocks, order, columns, mesh, parts), lanes=lanes)
    return moved if mesh is None else jax.lax.with_sharding_constraint(moved, slot_shardings(moved, mesh))


@functools.partial(jax.jit, static_argnames="columns")
def kept_sequence(slots: Slots, row: jax.Array, slot: jax.Array, block: jax.Array, columns: int) -> Cache:
    """One row with the keys and values of a slot's whole sequence, in ``columns`` columns; ``row``: of the cache."""
    return with_columns(sequence_of(slots.cache, row, slots.blocks, block, slots.before[slot]), columns)


@functools.partial(jax.jit, donate_argnums=0)
def stop_slots(slots: Slots, gone: jax.Array) -> Slots:
    """Slots of which those in ``gone`` (bool[B]) sample no more."""
    return slots._replace(active=slots.active & ~gone)


@functools.partial(jax.jit, static_argnames=("columns", "mesh"), donate_argnums=1)
def extend_prompts(
    model: Decoder, cache: Cache | None, lengths: jax.Array, tokens: jax.Array, columns: int, mesh: Mesh | None = None
) -> Cache:
    """The cache [P rows] with the keys and values of ``tokens`` int32[P, C] at each row's positions ``lengths`` and on.

    ``cache``: None where no row holds anything yet; it gets so many columns. Each device computes rows of its own.
    """
    tokens = constrain(tokens, BATCH)
    new = extend(model, cache, lengths, tokens)
    begun = empty_cache(model.config, len(tokens), columns, new.k.dtype) if cache is None else cache
    return placed(on_own_rows(flush, mesh, placed(begun), new, lengths))


@functools.partial(jax.jit, static_argnames=("rows", "columns"))
def joined(caches: list[Cache], rows: int, columns: int) -> Cache:
    """One cache of so many rows and columns that begins with the rows of these."""
    given = [with_columns(cache, columns) for cache in caches]

    def join(*parts: jax.Array) -> jax.Array:
        whole = jnp.concatenate(parts, axis=1)
        return jnp.pad(whole, [(0, 0), (0, rows - whole.shape[1]), *[(0, 0)] * 3])

    return placed(jax.tree.map(join, *given))
