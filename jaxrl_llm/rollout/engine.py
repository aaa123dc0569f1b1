"""The sampler: slots that are refilled between compiled chunks of decode steps.

A completion is a function of (weights, prompt, seed, sampling) only: its columns in the cache are its own positions, its
random numbers are folded from (seed, position), and chunks begin where it begins, whoever shares the batch.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.cache import Cache, decode, empty_cache, first_columns, flush, insert, prefill
from jaxrl_llm.models.decoder import Decoder, unembed
from jaxrl_llm.rollout.sampling import Asked, Rule, as_rule, asked, draw, uniforms
from jaxrl_llm.rollout.settings import Sampling
from jaxrl_llm.sharding import BATCH, fitting
from jaxrl_llm.types import Completion

PREFILL_ROWS, PREFILL_TOKENS = 8, 8192
"""Prompts in one prefill call, fewer where their tokens would exceed the second number."""
FEWEST_COLUMNS = 128
"""Of the cache, that a chunk reads: reading fewer would save little."""


class Slots(NamedTuple):
    """What the device holds between calls; [B] for each slot unless said.

    Attributes:
      cache: keys and values of what is done.
      lengths: valid columns of the cache.
      tokens: the newest token, not in the cache yet.
      seeds: uint32[B, 2].
      sampled: tokens sampled so far.
      limits: tokens to sample at most.
      active: whether the slot is still sampling.
    """

    cache: Cache
    lengths: jax.Array
    tokens: jax.Array
    seeds: jax.Array
    sampled: jax.Array
    limits: jax.Array
    active: jax.Array


class Emitted(NamedTuple):
    """What a chunk of C steps produced, [C, B] each; ``real`` says which entries count."""

    token: jax.Array
    logp: jax.Array
    entropy: jax.Array
    real: jax.Array


@functools.partial(jax.jit, static_argnames=("steps", "wanted", "live"), donate_argnums=1)
def run_chunk(model: Decoder, slots: Slots, rule: Rule, steps: int, wanted: Asked, live: int) -> tuple[Slots, Emitted]:
    """Up to ``steps`` tokens for every active slot; ends early when none is left.

    ``live``: columns of the cache that are read, at least the longest active row.
    """
    rows = slots.tokens.shape[0]
    main = first_columns(slots.cache, live)
    config = model.config
    chunk = empty_cache(config, rows, steps, slots.cache.k.dtype)
    out = Emitted(*(jnp.zeros((steps, rows), kind) for kind in (jnp.int32, jnp.float32, jnp.float32, bool)))

    def more(carry: tuple) -> jax.Array:
        step, slots = carry[0], carry[1]
        return (step < steps) & jnp.any(slots.active)

    def one(carry: tuple) -> tuple:
        step, now, chunk, out = carry
        hidden, chunk = decode(model, main, chunk, step, now.tokens, slots.lengths)
        drawn = draw(unembed(model, hidden), uniforms(now.seeds, slots.lengths + step + 1), rule, wanted)
        sampled = now.sampled + now.active.astype(jnp.int32)
        stopped = jnp.any(drawn.token[:, None] == rule.stop_ids[None], axis=1) | (sampled >= now.limits)
        out = Emitted(*(a.at[step].set(b) for a, b in zip(out, (drawn.token, drawn.logp, drawn.extras["entropy"], now.active), strict=True)))
        now = now._replace(tokens=drawn.token, sampled=sampled, active=now.active & ~stopped)
        return step + 1, now, chunk, out

    # The cache is read, never carried: only the small chunk travels through the loop.
    light = slots._replace(cache=None)
    step, light, chunk, out = jax.lax.while_loop(more, one, (jnp.int32(0), light, chunk, out))
    cache = flush(slots.cache, chunk, slots.lengths)
    return light._replace(cache=cache, lengths=slots.lengths + step), out


@functools.partial(jax.jit, donate_argnums=0)
def fill_slots(
    slots: Slots, prompts: Cache, source: jax.Array, lengths: jax.Array, tokens: jax.Array, seeds: jax.Array, limits: jax.Array
) -> Slots:
    """Slots with row b started on prompt ``source[b]``, or untouched where that is negative; the others [B] likewise."""
    new = source >= 0
    return Slots(
        insert(slots.cache, prompts, source),
        jnp.where(new, lengths, slots.lengths),
        jnp.where(new, tokens, slots.tokens),
        jnp.where(new[:, None], seeds, slots.seeds),
        jnp.where(new, 0, slots.sampled),
        jnp.where(new, limits, slots.limits),
        new | slots.active,
    )


@jax.jit
def prefill_cache(model: Decoder, tokens: jax.Array) -> Cache:
    """Keys and values of right-padded prompts int32[P, S]."""
    return prefill(model, tokens)[1]


@dataclasses.dataclass
class Request:
    """One completion in the making: its prompt, its seed, its longest length, and what has been sampled."""

    handle: int
    prompt: np.ndarray
    seed: int
    limit: int
    pieces: list[tuple[np.ndarray, ...]] = dataclasses.field(default_factory=list)

    @property
    def columns(self) -> int:
        """Columns of the cache that hold this request: all tokens but the newest, which is decoded next."""
        return len(self.prompt) - 1 + sum(len(piece[0]) for piece in self.pieces)


class Engine:
    """Owner of the sampler's device state; it keeps no weights.

    Args:
      model: gives shapes, dtypes and config; ``jax.eval_shape`` of a model will do.
      slots: completions sampled at one time.
      max_length: prompt and completion together, in tokens.
      chunk: decode steps in one compiled call; finished slots are refilled between calls.
      mesh: where the weights are; slots are divided over data and fsdp, heads over tensor. None for one device.
      strict: read the whole cache at every step, so that a completion's bits do not depend on how long its neighbours are.
        If not, only as many columns are read as the longest of them needs, in buckets; rounding may then differ.
    """

    def __init__(
        self, model: Decoder, slots: int = 16, max_length: int = 512, chunk: int = 16, mesh: Mesh | None = None, strict: bool = False
    ):
        if slots < 1 or max_length < 2:
            raise InputError(f"slots must be at least 1 and max_length at least 2, got {slots} and {max_length}")
        self.slots, self.max_length, self.chunk = slots, max_length, chunk
        self._shape = _shape(model)
        self._config, self._dtype = model.config, jax.tree.leaves(model)[0].dtype
        self._mesh, self._strict = mesh, strict
        self.start(Sampling())

    def start(self, sampling: Sampling) -> None:
        """Forget all requests and sample by these rules from now on."""
        self._sampling = sampling
        self._state: Slots | None = None
        self._queue: collections.deque[Request] = collections.deque()
        self._running: dict[int, Request] = {}
        self._finished: list[tuple[int, Completion]] = []
        self._prompts: dict[bytes, tuple[Cache, int]] = {}
        self._handles = 0
        self.prompts_prefilled = self.decode_steps = 0

    def submit(self, prompts: Sequence[Any], seeds: Sequence[int], limits: Sequence[int] | None = None) -> list[int]:
        """Queue one completion for each prompt (token ids) and seed; returns their handles.

        ``limits``: the longest each may become, from 1 to ``max_new_tokens``, which is taken without them.
        """
        longest = self._sampling.max_new_tokens
        limits = [longest] * len(prompts) if limits is None else limits
        for name, values in (("seed", seeds), ("limit", limits)):
            if len(prompts) != len(values):
                raise InputError(f"every prompt needs one {name}: got {len(prompts)} prompts and {len(values)} {name}s")
        if wrong := [limit for limit in limits if not 1 <= limit <= longest]:
            raise InputError(f"a limit must be from 1 to max_new_tokens {longest}, got {wrong[0]}")
        room = self.max_length - self._sampling.max_new_tokens
        handles = []
        for prompt, seed, limit in zip(prompts, seeds, limits, strict=True):
            prompt = np.asarray(prompt, np.int32)
            if not 1 <= len(prompt) <= room:
                raise InputError(
                    f"a prompt of {len(prompt)} tokens and max_new_tokens {self._sampling.max_new_tokens} do not fit "
                    f"max_length {self.max_length}: prompts must have 1 to {room} tokens"
                )
            self._queue.append(Request(self._handles, prompt, int(seed), int(limit)))
            handles.append(self._handles)
            self._handles += 1
        return handles

    @property
    def busy(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._queue or self._running)

    def step(self, model: Decoder, version: int = 0) -> int:
        """Refill free slots, then run one chunk with these weights; returns how many tokens were sampled."""
        if _shape(model) != self._shape:
            raise InputError("the engine was built for a model of another structure, shape or dtype: build a new Engine")
        if self._state is None:
            self._state = _placed(_empty(self._config, self.slots, self.max_length, self._dtype), self._mesh)
        self._refill(model)
        rule, wanted = as_rule(self._sampling), asked(self._sampling)
        self._state, out = run_chunk(model, self._state, rule, self.chunk, wanted, self._live())
        active, out = jax.device_get((self._state.active, out))
        self.decode_steps += int(out.real.any(axis=1).sum())
        for slot in list(self._running):
            self._take(slot, active[slot], Emitted(*(x[:, slot] for x in out)), version)
        return int(out.real.sum())

    def collect(self) -> list[tuple[int, Completion]]:
        """Finished completions since the last call, by handle."""
        done, self._finished = self._finished, []
        return done

    def generate(
        self, model: Decoder, prompts: Sequence[Any], seeds: Sequence[int], sampling: Sampling, version: int = 0
    ) -> list[Completion]:
        """One completion for each prompt (token ids) and seed, in order.

        Raises:
          InputError: a prompt that does not fit, or a model of another structure.
        """
        self.start(sampling)
        handles = self.submit(prompts, seeds)
        while self.busy:
            self.step(model, version)
        done = dict(self.collect())
        return [done[handle] for handle in handles]

    def _live(self) -> int:
        """How many columns of the cache the next chunk reads: few sizes, so that few programs are compiled."""
        longest = max((request.columns for request in self._running.values()), default=0)
        return self.max_length if self._strict else min(max(_bucket(longest), FEWEST_COLUMNS), self.max_length)

    def _refill(self, model: Decoder) -> None:
        free = [slot for slot in range(self.slots) if slot not in self._running]
        taken = [self._queue.popleft() for _ in range(min(len(free), len(self._queue)))]
        if not taken:
            return
        new = list(dict.fromkeys(r.prompt.tobytes() for r in taken if r.prompt.tobytes() not in self._prompts))
        self._prefill(model, [np.frombuffer(key, np.int32) for key in new])
        self._running |= dict(zip(free, taken, strict=False))
        for cache, rows in self._by_source(dict(zip(free, taken, strict=False))):
            self._state = fill_slots(self._state, cache, *rows)
        waiting = {request.prompt.tobytes() for request in self._queue}
        self._prompts = {key: value for key, value in self._prompts.items() if key in waiting}

    def _prefill(self, model: Decoder, prompts: list[np.ndarray]) -> None:
        """Keys and values of new prompts; a prompt's shapes depend on its own length only, never on its neighbours."""
        buckets: dict[int, list[np.ndarray]] = {}
        for prompt in prompts:
            buckets.setdefault(min(_bucket(len(prompt)), self.max_length), []).append(prompt)
        for width, members in buckets.items():
            rows = max(1, min(PREFILL_ROWS, PREFILL_TOKENS // width))
            for batch in (members[i : i + rows] for i in range(0, len(members), rows)):
                tokens = np.zeros((rows, width), np.int32)
                for row, prompt in enumerate(batch):
                    tokens[row, : len(prompt)] = prompt
                cache = prefill_cache(model, tokens)
                self._prompts |= {prompt.tobytes(): (cache, row) for row, prompt in enumerate(batch)}
        self.prompts_prefilled += len(prompts)

    def _by_source(self, placed: dict[int, Request]) -> Iterator[tuple[Cache, tuple[np.ndarray, ...]]]:
        """The arguments of ``fill_slots``, for each prefilled batch that the placed requests come from."""
        batches: dict[int, tuple[Cache, list[tuple[int, int, Request]]]] = {}
        for slot, request in placed.items():
            cache, row = self._prompts[request.prompt.tobytes()]
            batches.setdefault(id(cache), (cache, []))[1].append((slot, row, request))
        for cache, members in batches.values():
            source, lengths, tokens, limits = np.full(self.slots, -1, np.int32), *np.zeros((3, self.slots), np.int32)
            seeds = np.zeros((self.slots, 2), np.uint32)
            for slot, row, request in members:
                # The last prompt token is decoded again: one path samples the first token and all others.
                source[slot], lengths[slot], tokens[slot] = row, len(request.prompt) - 1, request.prompt[-1]
                limits[slot] = request.limit
                seeds[slot] = (request.seed & 0xFFFFFFFF, request.seed >> 32 & 0xFFFFFFFF)
            yield cache, (source, lengths, tokens, seeds, limits)

    def _take(self, slot: int, active: bool, out: Emitted, version: int) -> None:
        request, count = self._running[slot], int(out.real.sum())
        request.pieces.append((out.token[:count], out.logp[:count], out.entropy[:count], np.full(count, version, np.int32)))
        if active:
            return
        del self._running[slot]
        tokens, logp, entropy, versions = (np.concatenate(piece) for piece in zip(*request.pieces, strict=True))
        reason = "stop" if tokens[-1] in self._sampling.stop_ids else "length"
        mask = np.ones(len(tokens), bool)
        self._finished.append((request.handle, Completion(tokens, logp, reason, mask, versions, {"entropy": entropy})))


def _empty(config: Any, slots: int, length: int, dtype: Any) -> Slots:
    zeros = functools.partial(jnp.zeros, dtype=jnp.int32)
    seeds = jnp.zeros((slots, 2), jnp.uint32)
    cache = empty_cache(config, slots, length, dtype)
    return Slots(cache, zeros(slots), zeros(slots), seeds, zeros(slots), zeros(slots), jnp.zeros(slots, bool))


def _placed(slots: Slots, mesh: Mesh | None) -> Slots:
    """The slots on the mesh: B over data and fsdp, key/value heads over tensor."""
    if mesh is None:
        return slots
    specs = jax.tree.map(lambda x: (None, BATCH, "tensor") if x.ndim == 5 else (BATCH,), slots)
    leaves, treedef = jax.tree.flatten(slots)
    layouts = [NamedSharding(mesh, fitting(x.shape, s, mesh)) for x, s in zip(leaves, treedef.flatten_up_to(specs), strict=True)]
    return jax.device_put(slots, treedef.unflatten(layouts))


def _shape(model: Decoder) -> tuple:
    leaves, structure = jax.tree.flatten(model)
    return structure, tuple((x.shape, np.dtype(x.dtype)) for x in leaves)


def _bucket(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, ... tokens: few shapes, at most half of one wasted."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size
