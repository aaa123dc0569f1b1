"""Scheduler: the requests that run at one time, and their state on the device."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.engine.prefix_cache import Prefix, PrefixCache
from jaxrl_llm.engine.requests import (
    EMPTY,
    SIZES,
    Request,
    SlotShape,
    assign_blocks,
    by_part,
    lane_table,
    moved_slots,
    power_of_two,
    seat,
    with_blocks_for,
    with_routes,
)  # fmt: skip
from jaxrl_llm.engine.sampling import Draw, as_rules, asked, tail_of
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.engine.slots import (
    Admission,
    empty_slots,
    fill_slots,
    idle,
    parts_of,
    rearranged,
    run_chunk,
    stop_slots,
    with_blocks,
)  # fmt: skip
from jaxrl_llm.models.decode_kernels import ByLength, whole_blocks
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.decoding import Cache
from jaxrl_llm.sharding import batch_parts

FEWEST_SLOTS, FEWEST_COLUMNS, FEWEST_PROMPT_COLUMNS, FEW_SLOTS_COLUMNS = 16, 64, 32, 256
"""Minimum sizes of the batch, cache and prompts of a chunk, since smaller ones save little.

The last number is the minimum of cache and prompts with so few slots.
"""
MANY_COLUMNS, LANES = 1024, 128
"""Columns of a cache: from the first number on they are a multiple of the second."""
LOOK_AHEAD = 32
"""Waiting requests, for each sequence of a call, that are searched for prompts to compute with it."""
WORTH_SHRINKING = 4
"""Minimum number of chunks that some request may still take before a batch of just the size needed is compiled."""
FEW = 4
"""Divisor of the slots: if all requests are near their end, a batch has all slots or this part of them, which adds only
one size, for the last requests of a step.
"""


@dataclasses.dataclass(frozen=True)
class Build:
    """Fixed settings of an engine.

    Attributes:
      config: the model's.
      dtype: of its weights, of keys and values.
      slots: completions sampled at one time.
      max_length: prompt and completion together, in tokens.
      chunk: decode steps in one compiled call.
      mesh: where the weights are; None for one device.
      strict: whether all slots and the whole cache are always computed.
      group: maximum number of requests that share one stored prompt.
      form: kernels of decoding, which read no more than live columns; None for the plain form.
    """

    config: Any
    dtype: Any
    slots: int
    max_length: int
    chunk: int
    mesh: Mesh | None
    strict: bool
    group: int
    form: ByLength | None = None


class Scheduler:
    """Owner of the slots on the device, of the requests in them, by slot, and of the prefixes that these begin with.

    Args:
      build: settings of the engine.
      sampling: rules for all requests.
    """

    def __init__(self, build: Build, sampling: Sampling):
        self._build = build
        self._sampling = sampling
        self._rules = as_rules(sampling)
        self._state: Any = None
        self._held: Any = None
        self.running: dict[int, Request] = {}
        self.prefixes = PrefixCache(build.max_length, build.mesh)

    def __str__(self) -> str:
        """Describe the shape of the next chunk in words."""
        rows, columns, blocks, prompt_columns, *_ = self._held
        return (
            f"decode: {rows} slots of {columns} columns, {blocks} prompts of {prompt_columns}, "
            f"{self._build.chunk} steps"
        )

    def refill(self, model: Decoder, queue: collections.deque[Request], unread: bool) -> None:
        """Compute the prompts of waiting requests and give these slots and blocks, first come first served, in a batch
        of the size that all requests need.

        ``unread``: whether the previous chunk has not been read yet.
        """
        taken = next_requests(queue, self.running, self._held, self._build.slots)
        near = itertools.islice(queue, LOOK_AHEAD * self.prefixes.rows)
        self.prefixes.prepare(model, taken, (request for request in near if request.begun is None))
        build = self._build
        for request in taken:
            request.block_key = self.prefixes.block_key(request)
            routes = self.prefixes.routes(request)
            if routes is not None:
                request.begun = with_routes(request.begun or EMPTY, routes)
        seated = seating(build, self._sampling, self.running, taken, self._held, unread)
        shape, self.running = seated.shape, seated.running
        if seated.moves is not None:
            cache, blocks = self._state.cache, self._state.blocks
            light = self._state._replace(cache=None, blocks=None)
            self._state = rearranged(cache, light, *seated.moves, build.mesh)._replace(blocks=blocks)
        if self._state is None:
            most = room(build, self._sampling)
            self._state = empty_slots(build.config, shape, build.dtype, build.mesh, self._sampling.repetition, most)
        if seated.blocks is not None:
            lanes = lane_table(self.running, shape)
            self._state = with_blocks(self._state, seated.blocks, shape.prompt_columns, lanes, build.mesh, shape.parts)
        self._held = shape
        for cache, begun in self._admissions(taken):
            self._state = fill_slots(self._state, cache, begun, build.mesh)
        if taken:
            self.prefixes.release(queue)

    def run(self, model: Decoder) -> tuple[Draw, jax.Array]:
        """Send a chunk to the device; return the tokens it samples, and which slots are active after it."""
        build, rules = self._build, asked(self._sampling)
        self._state, told = run_chunk(
            model, self._state, self._rules, build.chunk, rules, build.group, build.mesh, self._held.columns, build.form
        )
        return told

    def stop(self, handles: set[int]) -> list[Request]:
        """Stop these requests and free their slots; return those that ran."""
        gone = {slot: request for slot, request in self.running.items() if request.handle in handles}
        if gone:
            stopped = np.zeros(self._held.rows, bool)
            stopped[list(gone)] = True
            self._state = stop_slots(self._state, stopped)
        for request in gone.values():
            self.release(request)
        return list(gone.values())

    def release(self, request: Request) -> None:
        """Free the slot of a request that has ended; with ``keep`` its columns go to the prefixes."""
        del self.running[request.slot]
        if request.keep:
            self.prefixes.keep(request, self._state, self._held.row(request.slot, self._build.slots))

    def _admissions(self, taken: list[Request]) -> Iterator[tuple[Cache, Admission]]:
        """Yield the cache of each prefilled batch that the requests taken come from, and the slots and blocks begun."""
        shape, repetition = self._held, self._sampling.repetition
        batches: dict[int, tuple[Cache, list[tuple[Prefix, Request]]]] = {}
        for request in taken:
            held = self.prefixes[request]
            batches.setdefault(id(held.cache), (held.cache, []))[1].append((held, request))
        lanes = lane_table(self.running, shape)
        fresh = {request.handle for request in taken}
        made = {request.lane[0] for request in self.running.values() if request.handle not in fresh}
        for cache, members in batches.values():
            begun = idle(shape, cache.v.shape[1], repetition)
            begun.slots.lanes[:] = lanes
            for held, request in members:
                if request.lane[0] not in made:
                    begun.blocks[request.lane[0]] = held.row
                    made.add(request.lane[0])
                slot, new = request.slot, begun.slots
                new.active[slot] = True
                new.before[slot] = request.prompt_columns
                new.lengths[slot] = request.columns
                new.tokens[slot] = request.given[-1]
                new.seeds[slot] = (request.seed & 0xFFFFFFFF, request.seed >> 32 & 0xFFFFFFFF)
                new.sampled[slot] = request.earlier
                new.limits[slot] = request.limit
                begun.source[slot] = held.row if request.columns else -1
                if request.begun is not None and repetition:
                    logp = request.begun.extras.get("policy_logp", request.begun.sampler_logp)
                    # No policy was sure of the others.
                    logp = np.where(request.begun.mask, logp, -np.inf).astype(np.float32)
                    for whole, one in zip(new.tail, tail_of(request.begun.tokens, logp, repetition), strict=True):
                        whole[slot] = one
            needed = np.unique(np.concatenate([begun.blocks, begun.source]))
            needed = needed[needed >= 0]
            begun.needed[: len(needed)] = needed
            yield cache, begun


class Seating(NamedTuple):
    """Places of the requests in the next chunk.

    Attributes:
      shape: of its slots and blocks.
      running: the requests by slot; each has its lane.
      moves: order and source of ``moved_slots``, if the number of slots changes; None if all stay.
      blocks: the old block that each block is made of, as ``assign_blocks`` has it; None if all stay.
    """

    shape: SlotShape
    running: dict[int, Request]
    moves: tuple[np.ndarray, np.ndarray] | None
    blocks: np.ndarray | None


def seating(
    build: Build, sampling: Sampling, running: dict[int, Request], taken: list[Request], held: SlotShape | None,
    unread: bool,
) -> Seating:  # fmt: skip
    """Give the requests taken slots and blocks beside those that run, in a batch of the size that all need.

    ``held``: shape of the chunk before, None for the first; ``unread``: whether that chunk has not been read yet.
    """
    shape = wanted(build, sampling, [*running.values(), *taken], held, unread)
    moves = None
    if held is not None and shape.rows != held.rows:  # those who run move with their slots
        order, source, running = moved_slots(running, held.rows, shape.rows, shape.parts)
        moves = order, source
    seat(running, taken, shape)
    fixed = build.strict or build.slots <= FEWEST_SLOTS or build.form is not None
    shape = with_blocks_for(running, shape, build.slots, fixed)
    stay = (held or shape)._replace(columns=shape.columns) == shape
    return Seating(shape, running, moves, assign_blocks(running, shape, stay))


def room(build: Build, sampling: Sampling) -> tuple[int, int]:
    """Return rows and columns of the cache: the most that may be needed, for it is allocated once and never copied."""
    # With few slots it is small, and one size then serves whatever the sampler is asked for.
    few = build.slots <= FEWEST_SLOTS and not build.strict
    columns = build.chunk + (build.max_length if few else sampling.max_new_tokens)
    if build.form is not None:
        return build.slots, whole_blocks(columns)
    # TPUs store numbers by 128: a cache of other sizes has another layout than prompts, which are then transposed.
    return build.slots, columns if columns < MANY_COLUMNS else -(-columns // LANES) * LANES


def wanted(
    build: Build, sampling: Sampling, requests: list[Request], held: SlotShape | None, unread: bool
) -> SlotShape:
    """Return slots and columns of the next chunk, in few sizes, so that few programs are compiled; and its minimum
    blocks.
    """
    slots, longest = room(build, sampling)
    parts = parts_of(build.mesh, slots)
    if build.strict:
        prompts = build.max_length - sampling.max_new_tokens
        prompts = prompts if build.form is None else whole_blocks(prompts)
        return SlotShape(slots, longest, 0, prompts, parts, build.group)
    rows, blocks = _rows_and_blocks(build, requests, held)
    if build.form is not None:  # what is not live costs nothing, so that the slots' number alone compiles anything
        prompts = build.max_length - (0 if slots <= FEWEST_SLOTS else sampling.max_new_tokens)
        return SlotShape(rows, longest, 0, whole_blocks(prompts), parts, build.group)
    # What the chunk before has sampled is not known yet.
    columns = max(request.columns for request in requests) + build.chunk * (2 if unread else 1)
    columns = columns_for(columns, slots, longest)
    least = FEWEST_PROMPT_COLUMNS if slots > FEWEST_SLOTS else FEW_SLOTS_COLUMNS
    prompt = max(power_of_two(max(request.prompt_columns for request in requests)), least)
    return SlotShape(rows, columns, blocks, min(prompt, build.max_length), parts, build.group)


def columns_for(needed: int, slots: int, room: int) -> int:
    """Return the columns of a chunk whose longest request needs ``needed``, of a cache with ``room``, in few sizes."""
    # With few slots no setting of the sampler compiles anything, and neighbours rarely do.
    least = FEWEST_COLUMNS if slots > FEWEST_SLOTS else FEW_SLOTS_COLUMNS
    return min(max(power_of_two(needed), least), room)


def rows_for(needed: int, slots: int, parts: int) -> int:
    """Return the slots of a chunk with ``needed`` requests, in few sizes; ``parts``: of the mesh's rows."""
    # Of slots that the mesh does not divide, some would be on other devices than their rows of the cache.
    if slots <= FEWEST_SLOTS or slots % parts:
        return slots
    part = math.lcm(max(slots // SIZES, 1), parts)
    return min(-(-needed // part) * part, slots)


def _rows_and_blocks(build: Build, requests: list[Request], held: SlotShape | None) -> tuple[int, int]:
    """Return slots and minimum blocks; once no request can take long, the slots are those held, all, or a part."""
    slots = build.slots
    blocks = 0
    parts = 1 if build.mesh is None else batch_parts(build.mesh)
    part = math.lcm(max(slots // SIZES, 1) if build.form is None else -(-slots // SIZES), parts)
    # Requests stay in their part of the mesh, so the fullest decides.
    crowd = collections.Counter(held.part(r.slot) for r in requests if r.slot >= 0) if held else {}
    needed = max(len(requests), max(crowd.values(), default=0) * (held.parts if held else 1))
    rows = rows_for(needed, slots, parts)
    if max(request.limit - request.earlier - request.count for request in requests) < WORTH_SHRINKING * build.chunk:
        few = -(-slots // (FEW * part)) * part if rows < slots else slots
        sizes = {few, slots} | ({held.rows} if held else set())
        rows = min(size for size in sizes if size >= rows)
        blocks = held.blocks if held else 0
    return rows, blocks


def next_requests(
    queue: collections.deque[Request], running: dict[int, Request], shape: SlotShape | None, slots: int
) -> list[Request]:
    """Take waiting requests for the free ones of ``slots`` slots out of the queue, in order.

    Where a mesh divides the slots, each part first continues with prompts that it has, then begins one that no other
    has: a prompt's requests stay together, and read one block. It looks at four times the slots.
    """
    free = min(slots - len(running), len(queue))
    if shape is None or shape.parts == 1 or not free:
        return [queue.popleft() for _ in range(free)]
    near = [queue.popleft() for _ in range(min(len(queue), max(free, 4 * slots)))]
    waiting: dict[Hashable, collections.deque[Request]] = collections.defaultdict(collections.deque)
    for request in near:
        waiting[request.prompt.key].append(request)
    homes = [dict.fromkeys(request.prompt.key for request in own) for own in by_part(running, shape)]
    room = slots // shape.parts - np.array([len(own) for own in by_part(running, shape)])
    taken: list[Request] = []
    for part in np.argsort(-room, kind="stable"):
        begun = set().union(*homes)
        for _ in range(min(int(room[part]), free - len(taken))):
            here = next((key for key in homes[part] if waiting.get(key)), None)
            fresh = next((key for key, own in waiting.items() if own and key not in begun), None)
            some = next(key for key, own in waiting.items() if own)
            key = next(key for key in (here, fresh, some) if key is not None)
            taken.append(waiting[key].popleft())
            homes[part][key] = None
            begun.add(key)
    gone = {id(request) for request in taken}
    queue.extendleft(request for request in reversed(near) if id(request) not in gone)
    return taken
