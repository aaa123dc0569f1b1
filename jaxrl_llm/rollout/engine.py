"""The sampler: slots that are refilled between compiled chunks of decode steps.

A completion is a function of (weights, prompt, seed, sampling) only: its columns in the cache are its own positions, its
random numbers are folded from (seed, position), and chunks begin where it begins, whoever shares the batch.
"""

import collections
import dataclasses
import itertools
import logging
import math
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.filling import fillings
from jaxrl_llm.rollout.places import (
    SIZES, Shape, assign_blocks, lane_table, moved_blocks, moved_slots, power_of_two, seat, with_blocks_for,
)  # fmt: skip
from jaxrl_llm.rollout.prefixes import Prefixes
from jaxrl_llm.rollout.requests import Request
from jaxrl_llm.rollout.sampling import asked
from jaxrl_llm.rollout.settings import Sampling
from jaxrl_llm.rollout.slots import (
    Emitted, Slots, as_rules, empty_slots, fill_slots, parts_of, rearranged, run_chunk, stop_slots, with_blocks,
)  # fmt: skip
from jaxrl_llm.sharding import batch_parts
from jaxrl_llm.types import Completion

FEWEST_SLOTS, FEWEST_COLUMNS, FEWEST_PROMPT_COLUMNS, FEW_SLOTS_COLUMNS = 16, 64, 32, 256
"""What a chunk computes at least of batch, cache and prompts, for less saves little; the last: of both, with so few slots."""
WORTH_SHRINKING = 4
"""Chunks that some request may still take for a smaller batch to be worth compiling."""
LOOK_AHEAD = 256
"""Waiting requests among which prompts are looked for that may be computed with those needed now."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Flight:
    """A chunk that was given to the device and not read yet.

    Attributes:
      told: what it samples, and which slots go on after it.
      running: the request of each slot when it was sent.
      version: of the weights.
    """

    told: tuple[Emitted, jax.Array]
    running: dict[int, Request]
    version: int


class Engine:
    """Owner of the sampler's device state; it keeps no weights.

    A chunk is sent before the one before it is read, unless requests wait: then finished slots are refilled first. Where
    nothing waits any more, the batch shrinks with the number of requests that still run.

    Args:
      model: gives shapes, dtypes and config; ``jax.eval_shape`` of a model will do.
      slots: completions sampled at one time.
      max_length: prompt and completion together, in tokens.
      chunk: decode steps in one compiled call; finished slots are refilled between calls.
      mesh: where the weights are; slots are divided over data and fsdp, heads over tensor. None for one device.
      strict: always compute all slots and the whole cache, so that no bit of a completion depends on how many and how long
        its neighbours are. If not, a chunk has as many slots and columns as it needs, in buckets; rounding may then differ.
      group: requests of one prompt whose prompt is stored and read once, at most; a strict engine stores it for each.
    """

    def __init__(
        self, model: Decoder, slots: int = 16, max_length: int = 512, chunk: int = 16, mesh: Mesh | None = None,
        strict: bool = False, group: int = 1,
    ):  # fmt: skip
        if slots < 1 or max_length < 2 or group < 1:
            raise InputError(f"slots must be at least 1 and max_length at least 2, got {slots} and {max_length}")
        self.slots, self.max_length, self.chunk = slots, max_length, chunk
        self._shape = _shape(model)
        self._config, self._dtype = model.config, jax.tree.leaves(model)[0].dtype
        self._mesh, self._strict, self._group = mesh, strict, 1 if strict else min(group, slots)
        self._shapes: dict[str, None] = {}
        self.start(Sampling())

    def start(self, sampling: Sampling) -> None:
        """Forget all requests and sample by these rules from now on."""
        self._sampling, self._rules = sampling, as_rules(sampling)
        self._state: Slots | None = None
        self._held: Shape | None = None
        self._flight: Flight | None = None
        self._weights: Any = None
        self._prefixes = Prefixes(self._config, self._dtype, self.max_length)
        self._queue: collections.deque[Request] = collections.deque()
        self._running: dict[int, Request] = {}
        self._finished: list[tuple[int, Completion]] = []
        self._handles = 0
        self.decode_steps = self.slot_steps = 0

    def submit(
        self,
        prompts: Sequence[Any],
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        begun: Sequence[Completion | None] | None = None,
        keep: bool = False,
    ) -> list[int]:
        """Queue requests; returns a handle for each.

        Args:
          prompts: token ids.
          seeds: one int each.
          limits: tokens of each completion at most, those begun with included; ``max_new_tokens`` if not given.
          begun: completions to go on from, whatever ended them; None for a new one. What they hold stays as it is, and the
            random draws are those of a completion that was never interrupted.
          keep: hold the keys and values of these requests when they end, so that requests begun with them (or with any of
            their first tokens) go on from there; until other weights come, or ``start``.

        Raises:
          InputError: a request that does not fit.
        """
        sampling = self._sampling
        limits = [sampling.max_new_tokens] * len(prompts) if limits is None else limits
        begun = [None] * len(prompts) if begun is None else begun
        for name, given in {"seed": seeds, "limit": limits, "begun completion": begun}.items():
            if len(given) != len(prompts):
                raise InputError(f"every prompt needs one {name}: got {len(prompts)} prompts and {len(given)} {name}s")
        room = self._room
        new = []
        for prompt, seed, limit, earlier in zip(prompts, seeds, limits, begun, strict=True):
            ids, count = np.asarray(prompt, np.int32).reshape(-1), 0 if earlier is None else len(earlier.tokens)
            if not 1 <= len(ids) <= room:
                raise InputError(
                    f"a prompt of {len(ids)} tokens and max_new_tokens {sampling.max_new_tokens} do not fit "
                    f"max_length {self.max_length}: prompts must have 1 to {room} tokens"
                )
            if not count < limit <= sampling.max_new_tokens:
                raise InputError(f"a limit must be from {count + 1} to max_new_tokens {sampling.max_new_tokens}, got {limit}")
            new.append(Request(self._handles + len(new), ids, int(seed), int(limit), earlier if count else None, keep))
        self._queue.extend(new)
        self._handles += len(new)
        return [request.handle for request in new]

    @property
    def _room(self) -> int:
        """Tokens of a prompt at most."""
        return self.max_length - self._sampling.max_new_tokens

    @property
    def busy(self) -> bool:
        """Whether any request is queued or running."""
        return bool(self._queue or self._running)

    @property
    def queued(self) -> int:
        """Requests that wait for a slot."""
        return len(self._queue)

    @property
    def prompts_prefilled(self) -> int:
        """Distinct sequences whose keys and values were computed since ``start``."""
        return self._prefixes.count

    @property
    def shapes(self) -> list[str]:
        """The shapes of all that was compiled for this engine, in words; each is logged once, when it is first needed."""
        return list(self._shapes)

    def step(self, model: Decoder, version: int = 0) -> int:
        """Send one chunk with these weights to the device; returns how many tokens were read meanwhile.

        What the chunk samples is read by the next call, or before it where free slots have to be found.
        """
        with self._on_mesh():
            return self._step(model, version)

    def _step(self, model: Decoder, version: int) -> int:
        self._accept(model)
        count = self._read() if self._queue else 0
        self._refill(model)
        self._note(
            f"decode: {self._held.rows} slots of {self._held.columns} columns, {self._held.blocks} prompts of "
            f"{self._held.prompt_columns}, {self.chunk} steps"
        )
        rules = asked(self._sampling)
        self._state, told = run_chunk(model, self._state, self._rules, self.chunk, rules, self._group, self._mesh)
        before, self._flight = self._flight, Flight(told, dict(self._running), version)
        return count + (self._take(before) if before else 0)

    def abort(self, handles: Sequence[int]) -> None:
        """End these requests now: ``collect`` returns what they have, which may be nothing, with the reason "aborted"."""
        with self._on_mesh():
            self._abort(set(handles))

    def _abort(self, ending: set[int]) -> None:
        self._read()
        gone = {slot: request for slot, request in self._running.items() if request.handle in ending}
        if gone:
            idle = np.zeros(self._state.tokens.shape[0], bool)
            idle[list(gone)] = True
            self._state = stop_slots(self._state, idle)
        for request in gone.values():
            self._end(request, "aborted")
        waiting = [request for request in self._queue if request.handle in ending]
        self._finished += [(request.handle, request.completion("aborted")) for request in waiting]
        self._queue = collections.deque(request for request in self._queue if request.handle not in ending)

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

    def _on_mesh(self) -> AbstractContextManager:
        return nullcontext() if self._mesh is None else jax.set_mesh(self._mesh)

    def _accept(self, model: Decoder) -> None:
        """Refuse a model of another shape; what other weights computed of prompts is no good for these."""
        if _shape(model) != self._shape:
            raise InputError("the engine was built for a model of another structure, shape or dtype: build a new Engine")
        leaf = jax.tree.leaves(model)[0]
        if self._weights is None or self._weights() is not leaf:
            self._prefixes.clear()
            self._weights = weakref.ref(leaf)
            for request in self._running.values():  # what these have in the cache is of other weights
                request.keep = False

    def _read(self) -> int:
        flight, self._flight = self._flight, None
        return self._take(flight) if flight else 0

    def _take(self, flight: Flight) -> int:
        """Read a chunk: give its tokens to their requests, and end those that are done; returns the tokens sampled."""
        out, active = jax.device_get(flight.told)
        counts = out.real.sum(axis=0)
        steps = int(counts.max(initial=0))
        self.decode_steps += steps
        self.slot_steps += steps * len(counts)
        names = [name for name in out.extras if name != "policy_logp" or self._sampling.alters_policy]
        for slot, request in flight.running.items():
            count = int(counts[slot])
            if not count:  # it had ended in the chunk before, which was not read yet when this one was sent
                continue
            tokens, logp = out.token[:count, slot], out.logp[:count, slot]
            request.add(tokens, logp, {name: out.extras[name][:count, slot] for name in names}, flight.version)
            if not active[slot]:
                self._end(request, self._reason(request, tokens[-1]))
        return int(counts.sum())

    def _reason(self, request: Request, last: int) -> str:
        if last in self._sampling.stop_ids:
            return "stop"
        return "length" if request.earlier + request.count >= request.limit else "repetition"

    def _end(self, request: Request, reason: str) -> None:
        del self._running[request.slot]
        if request.keep:
            self._prefixes.keep(request, self._state)
        self._finished.append((request.handle, request.completion(reason)))

    def _refill(self, model: Decoder) -> None:
        """Give waiting requests to free slots, in a batch of the size that all of them need."""
        taken = [self._queue.popleft() for _ in range(min(self.slots - len(self._running), len(self._queue)))]
        upcoming = (request.given for request in itertools.islice(self._queue, LOOK_AHEAD) if request.begun is None)
        self._prefixes.prepare(model, [r.given for r in taken], [r.begun is not None for r in taken], upcoming)
        for request in taken:
            request.block_key = self._prefixes.block_key(request)
        for form in self._prefixes.shapes:
            self._note(f"prompts: {form.calls} x {form.piece} tokens{', going on' if form.continues else ''}")
        shape = self._wanted([*self._running.values(), *taken])
        self._resize_slots(shape)
        seat(self._running, taken, shape)
        shape = with_blocks_for(self._running, shape, self.slots, self._strict or self.slots <= FEWEST_SLOTS)
        self._resize_blocks(shape)
        for cache, begun in fillings(taken, self._running, shape, self._prefixes, self._sampling.repetition):
            self._state = fill_slots(self._state, cache, begun, self._mesh)
        if taken:
            self._prefixes.release(request.given for request in self._queue)

    def _resize_slots(self, shape: Shape) -> None:
        """Bring the slots to this shape, and the running requests with them."""
        if self._state is None or (shape.rows, shape.columns) == (self._held.rows, self._held.columns):
            return
        order, self._running = moved_slots(self._running, self._held.rows, shape.rows)
        self._state = rearranged(self._state, order, shape.columns, self._mesh)

    def _resize_blocks(self, shape: Shape) -> None:
        """Bring the blocks to this shape, and give every request a lane of one."""
        if self._state is None:
            self._state = empty_slots(self._config, shape, self._dtype, self._mesh, self._sampling.repetition)
            self._held = shape
        stay = self._held._replace(columns=shape.columns) == shape
        before = {request.handle: request.lane[0] for request in self._running.values() if request.lane}
        stayed = assign_blocks(self._running, shape, stay)
        if not stayed:
            order, lanes = moved_blocks(before, self._running, shape), lane_table(self._running, shape)
            self._state = with_blocks(self._state, order, shape.prompt_columns, lanes, self._mesh)
        self._held = shape

    def _wanted(self, requests: list[Request]) -> Shape:
        """Slots and columns of the next chunk: few sizes, so that few programs are compiled; and blocks at least."""
        parts = parts_of(self._mesh, self.slots)
        longest = self._sampling.max_new_tokens + self.chunk
        if self._strict:
            return Shape(self.slots, longest, 0, self._room, parts, self._group)
        few, least = self.slots <= FEWEST_SLOTS, (FEWEST_COLUMNS, FEWEST_PROMPT_COLUMNS)
        if few:  # where it saves little, no setting of the sampler compiles anything, and neighbours hardly ever do
            longest, least = self.max_length + self.chunk, (FEW_SLOTS_COLUMNS, FEW_SLOTS_COLUMNS)
        part = math.lcm(max(self.slots // SIZES, 1), 1 if self._mesh is None else batch_parts(self._mesh))
        rows = -(-len(requests) // part) * part if not few else self.slots
        blocks = 0
        if max(request.limit - request.earlier - request.count for request in requests) < WORTH_SHRINKING * self.chunk:
            rows = self.slots if self._state is None else max(rows, self._held.rows)
            blocks = 0 if self._state is None else self._held.blocks
        rows = min(rows, self.slots)
        # What the chunk before has sampled is not known yet.
        columns = max(request.columns for request in requests) + self.chunk * (2 if self._flight else 1)
        columns = min(max(power_of_two(columns), least[0]), longest)
        prompt = max(power_of_two(max(request.prompt_columns for request in requests)), least[1])
        return Shape(rows, columns, blocks, min(prompt, self.max_length), parts_of(self._mesh, rows), self._group)

    def _note(self, shape: str) -> None:
        if shape not in self._shapes:
            self._shapes[shape] = None
            log.info("compiling %s", shape)


def _shape(model: Decoder) -> tuple:
    leaves, structure = jax.tree.flatten(model)
    return structure, tuple((x.shape, np.dtype(x.dtype)) for x in leaves)
