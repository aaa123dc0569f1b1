"""The requests that run at one time, and what the device holds of them."""

import collections
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.engine.blocks import (
    SIZES,
    SlotShape,
    assign_blocks,
    lane_table,
    moved_blocks,
    moved_slots,
    power_of_two,
    seat,
    with_blocks_for,
)  # fmt: skip
from jaxrl_llm.engine.prefix_cache import Entry, PrefixCache
from jaxrl_llm.engine.repetition import Tail, tail_of
from jaxrl_llm.engine.requests import Request
from jaxrl_llm.engine.sampling import asked
from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.engine.slots import (
    Admission,
    Emitted,
    Slots,
    as_rules,
    empty_slots,
    fill_slots,
    parts_of,
    rearranged,
    run_chunk,
    stop_slots,
    with_blocks,
)  # fmt: skip
from jaxrl_llm.models.cache import Cache
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding import batch_parts

FEWEST_SLOTS, FEWEST_COLUMNS, FEWEST_PROMPT_COLUMNS, FEW_SLOTS_COLUMNS = 16, 64, 32, 256
"""What a chunk computes at least of batch, cache and prompts, for less saves little.

The last: of both, with so few slots.
"""
WORTH_SHRINKING = 4
"""Chunks that some request may still take for a smaller batch to be worth compiling."""


@dataclasses.dataclass(frozen=True)
class Build:
    """What an engine was built for.

    Attributes:
      config: the model's.
      dtype: of its weights, of keys and values.
      slots: completions sampled at one time.
      max_length: prompt and completion together, in tokens.
      chunk: decode steps in one compiled call.
      mesh: where the weights are; None for one device.
      strict: whether all slots and the whole cache are always computed.
      group: requests that share one stored prompt, at most.
    """

    config: Any
    dtype: Any
    slots: int
    max_length: int
    chunk: int
    mesh: Mesh | None
    strict: bool
    group: int


class Scheduler:
    """Owner of the slots on the device and of the requests in them, by slot.

    Args:
      build: what the engine was built for.
      sampling: how all of them are sampled.
    """

    def __init__(self, build: Build, sampling: Sampling):
        self._build = build
        self._sampling = sampling
        self._rules = as_rules(sampling)
        self._state: Slots | None = None
        self._held: SlotShape | None = None
        self.running: dict[int, Request] = {}

    def __str__(self) -> str:
        """The shape of the next chunk, in words."""
        rows, columns, blocks, prompt_columns, *_ = self._held
        return (
            f"decode: {rows} slots of {columns} columns, {blocks} prompts of {prompt_columns}, "
            f"{self._build.chunk} steps"
        )

    def begin(self, taken: list[Request], prefixes: PrefixCache, unread: bool) -> None:
        """Seat requests whose tokens are prepared, in a batch of the size that all of them need.

        ``unread``: whether the chunk before this one is still to be read.
        """
        build = self._build
        for request in taken:
            request.block_key = prefixes.block_key(request)
        shape = wanted(build, self._sampling, [*self.running.values(), *taken], self._held, unread)
        self._resize_slots(shape)
        seat(self.running, taken, shape)
        shape = with_blocks_for(self.running, shape, build.slots, build.strict or build.slots <= FEWEST_SLOTS)
        self._resize_blocks(shape)
        for cache, begun in _admissions(taken, self.running, shape, prefixes, self._sampling.repetition):
            self._state = fill_slots(self._state, cache, begun, build.mesh)

    def run(self, model: Decoder) -> tuple[Emitted, jax.Array]:
        """Send a chunk to the device; returns what it samples, and which slots go on after it."""
        build = self._build
        rules = asked(self._sampling)
        self._state, told = run_chunk(model, self._state, self._rules, build.chunk, rules, build.group, build.mesh)
        return told

    def stop(self, handles: set[int]) -> list[Request]:
        """Those of these requests that run, whose slots sample no more."""
        gone = {slot: request for slot, request in self.running.items() if request.handle in handles}
        if gone:
            idle = np.zeros(self._held.rows, bool)
            idle[list(gone)] = True
            self._state = stop_slots(self._state, idle)
        return list(gone.values())

    def release(self, request: Request, prefixes: PrefixCache) -> None:
        """Free the slot of a request that has ended; what it asked to keep goes to the prefixes."""
        del self.running[request.slot]
        if request.keep:
            prefixes.keep(request, self._state)

    def _resize_slots(self, shape: SlotShape) -> None:
        """Bring the slots to this shape, and the running requests with them."""
        if self._state is None or (shape.rows, shape.columns) == (self._held.rows, self._held.columns):
            return
        parts = _common_parts(self._held, shape)
        order, self.running = moved_slots(self.running, self._held.rows, shape.rows, parts)
        self._state = rearranged(self._state, order, shape.columns, self._build.mesh, parts)

    def _resize_blocks(self, shape: SlotShape) -> None:
        """Bring the blocks to this shape, and give every request a lane of one."""
        build = self._build
        if self._state is None:
            self._state = empty_slots(build.config, shape, build.dtype, build.mesh, self._sampling.repetition)
            self._held = shape
        stay = self._held._replace(columns=shape.columns) == shape
        before = {request.handle: request.lane[0] for request in self.running.values() if request.lane}
        stayed = assign_blocks(self.running, shape, stay)
        if not stayed:
            order = moved_blocks(before, self.running, shape)
            lanes = lane_table(self.running, shape)
            parts = _common_parts(self._held, shape)
            self._state = with_blocks(self._state, order, shape.prompt_columns, lanes, build.mesh, parts)
        self._held = shape


def _common_parts(held: SlotShape, shape: SlotShape) -> int:
    """The parts within which all moves from one shape to another stay; 1 where the mesh divides only one of them."""
    return shape.parts if held.parts == shape.parts else 1


def wanted(
    build: Build, sampling: Sampling, requests: list[Request], held: SlotShape | None, unread: bool
) -> SlotShape:
    """Slots and columns of the next chunk: few sizes, so that few programs are compiled; and blocks at least."""
    slots = build.slots
    longest = sampling.max_new_tokens + build.chunk
    if build.strict:
        return SlotShape(
            slots, longest, 0, build.max_length - sampling.max_new_tokens, parts_of(build.mesh, slots), build.group
        )
    few = slots <= FEWEST_SLOTS
    least = (FEWEST_COLUMNS, FEWEST_PROMPT_COLUMNS)
    if few:  # where it saves little, no setting of the sampler compiles anything, and neighbours hardly ever do
        longest = build.max_length + build.chunk
        least = (FEW_SLOTS_COLUMNS, FEW_SLOTS_COLUMNS)
    rows, blocks = _rows_and_blocks(build, requests, held)
    # What the chunk before has sampled is not known yet.
    columns = max(request.columns for request in requests) + build.chunk * (2 if unread else 1)
    columns = min(max(power_of_two(columns), least[0]), longest)
    prompt = max(power_of_two(max(request.prompt_columns for request in requests)), least[1])
    return SlotShape(rows, columns, blocks, min(prompt, build.max_length), parts_of(build.mesh, rows), build.group)


def _rows_and_blocks(build: Build, requests: list[Request], held: SlotShape | None) -> tuple[int, int]:
    """Slots, and blocks at least: no fewer than held where no request can take long any more."""
    slots = build.slots
    blocks = 0
    part = math.lcm(max(slots // SIZES, 1), 1 if build.mesh is None else batch_parts(build.mesh))
    # Requests stay in their part of the mesh, so the fullest decides.
    crowd = collections.Counter(held.part(r.slot) for r in requests if r.slot >= 0) if held else {}
    needed = max(len(requests), max(crowd.values(), default=0) * (held.parts if held else 1))
    rows = -(-needed // part) * part if slots > FEWEST_SLOTS else slots
    if max(request.limit - request.earlier - request.count for request in requests) < WORTH_SHRINKING * build.chunk:
        rows, blocks = (slots, 0) if held is None else (max(rows, held.rows), held.blocks)
    return min(rows, slots), blocks


def _admissions(
    taken: list[Request],
    running: dict[int, Request],
    shape: SlotShape,
    prefixes: PrefixCache,
    repetition: Repetition | None,
) -> Iterator[tuple[Cache, Admission]]:
    """For each prefilled batch that the requests taken come from: its cache, and what begins with it."""
    batches: dict[int, tuple[Cache, list[tuple[Entry, Request]]]] = {}
    for request in taken:
        held = prefixes[request.given]
        batches.setdefault(id(held.cache), (held.cache, []))[1].append((held, request))
    lanes = lane_table(running, shape)
    fresh = {request.handle for request in taken}
    made = {request.lane[0] for request in running.values() if request.handle not in fresh}
    for cache, members in batches.values():
        begun = _idle(shape, lanes, repetition)
        for held, request in members:
            if request.lane[0] not in made:
                begun.blocks[request.lane[0]] = held.row
                made.add(request.lane[0])
            _begin(begun, held, request, repetition)
        yield cache, begun


def _begin(begun: Admission, held: Entry, request: Request, repetition: Repetition | None) -> None:
    slot = request.slot
    begun.new[slot] = True
    begun.before[slot] = request.prompt_columns
    begun.lengths[slot] = request.columns
    begun.source[slot] = held.row if request.columns else -1
    begun.tokens[slot] = request.given[-1]
    begun.seeds[slot] = (request.seed & 0xFFFFFFFF, request.seed >> 32 & 0xFFFFFFFF)
    begun.sampled[slot] = request.earlier
    begun.limits[slot] = request.limit
    if request.begun is not None and repetition:
        tail = tail_of(*request.sampled_before(), repetition)
        for whole, one in zip(begun.tail, tail, strict=True):
            whole[slot] = one


def _idle(shape: SlotShape, lanes: np.ndarray, repetition: Repetition | None) -> Admission:
    """What begins no slot."""

    def int32(*size: int) -> np.ndarray:
        return np.zeros(size, np.int32)

    rows = shape.rows
    period = repetition.longest_period if repetition else 0
    return Admission(
        blocks=int32(shape.blocks) - 1,
        source=int32(rows) - 1,
        new=np.zeros(rows, bool),
        lanes=lanes,
        before=int32(rows),
        lengths=int32(rows),
        tokens=int32(rows),
        seeds=np.zeros((rows, 2), np.uint32),
        sampled=int32(rows),
        limits=int32(rows),
        tail=Tail(int32(rows, period) - 1, int32(rows, period), int32(rows)),
    )
