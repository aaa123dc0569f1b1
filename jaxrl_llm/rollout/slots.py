"""What the sampler holds on the device, and the compiled calls that change it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models.cache import Cache, decode, empty_cache, extend, flush, insert, take_rows, with_columns
from jaxrl_llm.models.decoder import Decoder, unembed
from jaxrl_llm.rollout.repetition import Tail, TailRule, extend_tail, fresh_tail, tail_rule
from jaxrl_llm.rollout.sampling import Asked, Rule, as_rule, draw, uniforms
from jaxrl_llm.rollout.settings import Repetition, Sampling
from jaxrl_llm.sharding import BATCH, fitting


class Slots(NamedTuple):
    """What the device holds between calls; [B] for each slot unless said.

    Attributes:
      cache: keys and values of what is done.
      lengths: valid columns of the cache.
      tokens: the newest token, not in the cache yet.
      seeds: uint32[B, 2].
      sampled: tokens of the completion so far.
      limits: tokens that it may have at most.
      tail: what is remembered of them, to notice repetition.
      active: whether the slot is still sampling.
    """

    cache: Cache
    lengths: jax.Array
    tokens: jax.Array
    seeds: jax.Array
    sampled: jax.Array
    limits: jax.Array
    tail: Tail
    active: jax.Array


class Rules(NamedTuple):
    """``Sampling`` as arrays: how a token is drawn, and what ends a completion that repeats itself."""

    draw: Rule
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
    """

    token: jax.Array
    logp: jax.Array
    extras: dict[str, jax.Array]
    real: jax.Array


def empty_slots(
    config: Any, rows: int, columns: int, dtype: Any, mesh: Mesh | None = None, repetition: Repetition | None = None
) -> Slots:
    """Slots of which none is active, on the mesh: B over data and fsdp, key/value heads over tensor."""
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    slots = Slots(
        empty_cache(config, rows, columns, dtype), zeros(rows), zeros(rows), jnp.zeros((rows, 2), jnp.uint32), zeros(rows),
        zeros(rows), fresh_tail(rows, repetition), jnp.zeros(rows, bool),
    )  # fmt: skip
    return slots if mesh is None else jax.device_put(slots, _layout(slots, mesh))


@functools.partial(jax.jit, static_argnames=("steps", "asked", "mesh"), donate_argnums=1)
def run_chunk(
    model: Decoder, slots: Slots, rules: Rules, steps: int, asked: Asked, mesh: Mesh | None = None
) -> tuple[Slots, tuple[Emitted, jax.Array]]:
    """Up to ``steps`` tokens for every active slot; ends early when none is left.

    The cache needs ``steps`` columns beyond the longest active row. Returns the slots, and for the host, on every device of
    the mesh, what was emitted and which slots go on.
    """
    config, rows = model.config, slots.tokens.shape[0]
    pick = lambda now, chunk, step: _pick(model, slots, rules, asked, now, chunk, step)
    light = slots._replace(cache=None)
    chunk = empty_cache(config, rows, steps, slots.cache.k.dtype)
    shapes = jax.eval_shape(lambda: pick(light, chunk, jnp.int32(0))[2])
    out = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), shapes)

    def more(carry: tuple) -> jax.Array:
        step, now = carry[0], carry[1]
        return (step < steps) & jnp.any(now.active)

    def one(carry: tuple) -> tuple:
        step, now, chunk, out = carry
        now, chunk, new = pick(now, chunk, step)
        return step + 1, now, chunk, jax.tree.map(lambda a, b: a.at[step].set(b), out, new)

    # The cache is read, never carried: only the small chunk travels through the loop.
    _, now, chunk, out = jax.lax.while_loop(more, one, (jnp.int32(0), light, chunk, out))
    cache = _on_rows(flush, mesh, slots.cache, chunk, slots.lengths)
    told = (out, now.active)
    if mesh is not None:
        told = jax.lax.with_sharding_constraint(told, NamedSharding(mesh, PartitionSpec()))
    return now._replace(cache=cache, lengths=slots.lengths + now.sampled - slots.sampled), told


def _pick(
    model: Decoder, slots: Slots, rules: Rules, asked: Asked, now: Slots, chunk: Cache, step: jax.Array
) -> tuple[Slots, Cache, Emitted]:
    """One token for every row; ``slots`` as the chunk began, ``now`` without its cache."""
    hidden, chunk = decode(model, slots.cache, chunk, step, now.tokens, slots.lengths)
    drawn = draw(unembed(model, hidden), uniforms(now.seeds, slots.lengths + step + 1), rules.draw, asked)
    sampled = now.sampled + now.active.astype(jnp.int32)
    tail, repeats = extend_tail(now.tail, drawn.token, drawn.extras["policy_logp"], rules.tail)
    stopped = jnp.any(drawn.token[:, None] == rules.draw.stop_ids[None], axis=1) | (sampled >= now.limits) | repeats
    emitted = Emitted(drawn.token, drawn.logp, drawn.extras, now.active)
    return now._replace(tokens=drawn.token, sampled=sampled, tail=tail, active=now.active & ~stopped), chunk, emitted


class Begun(NamedTuple):
    """How slots begin, [B] each: the prefilled row (negative leaves the slot alone) and the fields of ``Slots``."""

    source: Any
    lengths: Any
    tokens: Any
    seeds: Any
    sampled: Any
    limits: Any
    tail: Any


@functools.partial(jax.jit, static_argnames="mesh", donate_argnums=0)
def fill_slots(slots: Slots, prompts: Cache, begun: Begun, mesh: Mesh | None = None) -> Slots:
    """Slots with row b begun on row ``begun.source[b]`` of ``prompts``."""
    new = begun.source >= 0
    cache = _on_rows(insert, mesh, slots.cache, prompts, begun.source)
    choose = lambda given, old: jnp.where(new.reshape((-1,) + (1,) * (old.ndim - 1)), given, old)
    light = jax.tree.map(choose, tuple(begun[1:]), tuple(slots[1:-1]))
    return Slots(cache, *light, new | slots.active)


@functools.partial(jax.jit, static_argnames=("columns", "mesh"))
def rearranged(slots: Slots, order: jax.Array, columns: int, mesh: Mesh | None = None) -> Slots:
    """Slot i becomes what slot ``order[i]`` was, or an idle one where that is negative; the cache gets ``columns`` columns."""
    rows = jnp.maximum(order, 0)
    moved = jax.tree.map(lambda x: jnp.take(x, rows, axis=0), slots._replace(cache=None))
    moved = moved._replace(cache=with_columns(take_rows(slots.cache, rows), columns), active=moved.active & (order >= 0))
    return moved if mesh is None else jax.lax.with_sharding_constraint(moved, _layout(moved, mesh))


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


def _layout(slots: Slots, mesh: Mesh) -> Slots:
    spec = lambda x: (None, BATCH, "tensor") if x.ndim == 5 else (BATCH,)
    return jax.tree.map(lambda x: NamedSharding(mesh, fitting(x.shape, spec(x), mesh)), slots)


def _on_rows(change: Callable[..., Cache], mesh: Mesh | None, cache: Cache, new: Cache, index: jax.Array) -> Cache:
    """``change(cache, new, index)`` on every device's own rows and heads.

    ``new`` has a row for each slot (a chunk), or any rows (prompts), which every device then sees all of.
    """
    if mesh is None:
        return change(cache, new, index)
    spec = lambda x, axes: fitting(x.shape, axes, mesh)
    rows = spec(cache.k, (None, BATCH, "tensor"))
    own = BATCH if change is flush else None
    inside = Cache(rows, rows), jax.tree.map(lambda x: spec(x, (None, own, "tensor")), new), spec(index, (BATCH,))
    return jax.shard_map(change, mesh=mesh, in_specs=inside, out_specs=Cache(rows, rows), check_vma=False)(cache, new, index)
