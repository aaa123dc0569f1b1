"""Scheduler: the requests that run at one time, and their state on the device."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

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
    Slots,
    empty_slots,
    extend_prompts,
    fill_slots,
    idle,
    joined_caches,
    kept_sequence,
    parts_of,
    rearranged,
    run_chunk,
    stop_slots,
    with_blocks,
)  # fmt: skip
from jaxrl_llm.models.decode_kernels import ByLength, whole_blocks
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.decoding import Cache, take_rows, with_columns
from jaxrl_llm.models.experts import EXPERTS
from jaxrl_llm.sharding import batch_parts

ROWS, TOKENS = 8, 8192
"""Sequences in one call, fewer if their tokens would exceed the second number; at least one on each device."""
LONGEST_CALL, PIECE = 1024, 512
"""Lengths in tokens: sequences longer than the first are computed in pieces of the second."""

KEPT_PROMPTS = 64
"""Most prompts of episodes whose keys and values are kept between turns; others are computed again, to equal bits."""

_resized = jax.jit(with_columns, static_argnums=1)
_one_row = jax.jit(lambda cache, row, columns: with_columns(take_rows(cache, row[None]), columns), static_argnums=2)


def bucket(length: int) -> int:
    """Return the next of 16, 24, 32, 48, 64, 96, ... tokens: few shapes, and at most half of one is wasted."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def rows_of_call(tokens: int, parts: int) -> int:
    """Return the number of sequences of so many tokens in one call, if the mesh divides a batch into ``parts``."""
    return parts * max(1, min(ROWS, TOKENS // tokens) // parts)


class PrefillShape(NamedTuple):
    """Shape of the calls that compute a sequence; it follows from the sequence alone, never from its neighbours in a
    call.

    Attributes:
      continues: whether its first tokens are computed already.
      piece: tokens of one call.
      calls: number of calls.
      columns: of the cache that holds all of it.
    """

    continues: bool
    piece: int
    calls: int
    columns: int

    def __str__(self) -> str:
        """Describe the shape in words."""
        return f"prompts: {self.calls} x {self.piece} tokens{', resumed' if self.continues else ''}"


class Prefix(NamedTuple):
    """Reference to the keys and values of a sequence: those of all its tokens but the last are valid.

    Attributes:
      cache: of several sequences.
      row: the sequence's.
      origin: identifies the computation; equal origins and tokens give equal bits.
      exact: number of first columns for which this holds.
      routes: the experts of each token, [columns, L, k] or more; None for a dense model.
    """

    cache: Cache
    row: int
    origin: Hashable
    exact: int
    routes: np.ndarray | None = None


class PrefixCache:
    """Cache of computed sequences: those of waiting requests, and those kept of earlier ones to resume from.

    Args:
      max_length: maximum number of tokens of a sequence.
      mesh: that divides the sequences of a call; None for one device.

    Attributes:
      rows: maximum number of sequences of a call.
      count: sequences computed.
      shapes: of all calls so far.
    """

    def __init__(self, max_length: int, mesh: Mesh | None = None):
        self._max_length = max_length
        self._mesh = mesh
        self._parts = 1 if mesh is None else batch_parts(mesh)
        self.rows = rows_of_call(1, self._parts)
        self._computed: dict[Hashable, Prefix] = {}
        self._kept: dict[Hashable, tuple[np.ndarray, Prefix]] = {}
        self._prompts: dict[Hashable, Prefix] = {}
        self.count = self._weights = 0
        self.shapes: dict[PrefillShape, None] = {}

    def clear(self) -> None:
        """Drop every sequence, because the weights have changed."""
        self._computed = {}
        self._kept = {}
        self._prompts = {}
        self._weights += 1

    def __getitem__(self, request: Request) -> Prefix:
        """Return the prefix of a prepared request."""
        return self._computed[request.key]

    def block_key(self, request: Request) -> Hashable:
        """Return a key of the contents of a prepared request's prompt columns: the prompt, and the computation."""
        held = self[request]
        known = (held.origin, request.prompt.key)
        return known if request.prompt_columns <= held.exact else (*known, request.key)

    def routes(self, request: Request) -> np.ndarray | None:
        """Return the experts of the tokens of a prepared request but its last, [t, L, k]; None for a dense model."""
        held = self[request].routes
        return None if held is None else held[: len(request.given) - 1]

    def keep(self, request: Request, slots: Slots, row: int) -> None:
        """Keep the columns of a request that still has its slot; ``row``: of the cache."""
        tokens = np.concatenate([request.given, *(piece.tokens for piece in request.pieces)])
        columns = min(bucket(len(tokens)), slots.blocks.columns + slots.cache.columns)
        one = kept_sequence(slots, row, request.slot, request.lane[0], columns)
        done = request.completion("aborted")
        routes = None
        if EXPERTS in done.extras:
            routes = np.concatenate([done.prompt_extras[EXPERTS][1:], done.extras[EXPERTS]])
        entry = Prefix(one, 0, request.block_key[0], request.prompt_columns, routes)
        self._kept[tokens.tobytes(), request.prompt.beside] = tokens[:-1], entry

    def release(self, waiting: Iterable[Request]) -> None:
        """Drop the sequences of requests that no longer wait, and the oldest prompts of episodes beyond
        ``KEPT_PROMPTS``."""
        needed = {request.key for request in waiting}
        self._computed = {key: value for key, value in self._computed.items() if key in needed}
        self._prompts = dict([*self._prompts.items()][-KEPT_PROMPTS:])

    def prepare(self, model: Decoder, requests: Sequence[Request], upcoming: Iterable[Request] = ()) -> None:
        """Compute the sequences of these requests that are missing; one that was begun resumes from the kept sequence
        that shares most first tokens.

        Rows that a call would leave empty take new sequences of equal shape that are needed next.
        """
        turns = [request for request in requests if request.keep_prompt and request.begun is not None]
        missing = {one.prompt.key: one for one in turns if one.prompt.key not in self._prompts}
        if missing:
            self.prepare(model, [dataclasses.replace(request, begun=None) for request in missing.values()])
        groups: dict[PrefillShape, list[tuple[Request, int, Prefix | None]]] = {}
        for request in {request.key: request for request in requests}.values():
            if request.key in self._computed:
                continue
            start, base = (0, None) if request.begun is None else self._longest(request)
            if base is not None and start >= len(request.given) - 1:
                self._computed[request.key] = base
                continue
            groups.setdefault(prefill_shape(len(request.given), start), []).append((request, start, base))
        for shape, members in groups.items():
            rows = rows_of_call(shape.columns if shape.continues else shape.piece, self._parts)
            if not shape.continues:
                there = {request.key for request, _, _ in members} | self._computed.keys()
                found: dict[Hashable, Request] = {}
                for request in upcoming:
                    if len(found) == -len(members) % rows:
                        break
                    if request.key not in there and prefill_shape(len(request.given)) == shape:
                        found[request.key] = request
                members = members + [(request, 0, None) for request in found.values()]
            for batch in (members[i : i + rows] for i in range(0, len(members), rows)):
                self._compute(model, shape, rows, batch)
        for request in requests:
            if request.keep_prompt and request.begun is None and request.prompt.key not in self._prompts:
                held = self._computed[request.key]
                one = _one_row(held.cache, np.int32(held.row), bucket(len(request.prompt)))
                self._prompts[request.prompt.key] = held._replace(cache=one, row=0)

    def _longest(self, request: Request) -> tuple[int, Prefix | None]:
        """Return the largest number of a request's first tokens that a kept sequence holds, and that sequence; of a
        turn of an episode always those of the prompt.
        """
        if request.keep_prompt:
            return len(request.prompt), self._prompts[request.prompt.key]
        best: tuple[int, Prefix | None] = (0, None)
        for (_, beside), (other, held) in self._kept.items():
            size = min(len(other), len(request.given))
            different = np.flatnonzero(other[:size] != request.given[:size])
            shared = int(different[0]) if len(different) else size
            best = (shared, held) if shared > best[0] and beside == request.prompt.beside else best
        return best

    def _compute(
        self, model: Decoder, shape: PrefillShape, rows: int, batch: list[tuple[Request, int, Prefix | None]]
    ) -> None:
        starts = np.zeros(rows, np.int32)
        tokens = np.zeros((rows, shape.calls * shape.piece), np.int32)
        for row, (request, start, _) in enumerate(batch):
            starts[row] = start
            tokens[row, : len(request.given) - start] = request.given[start:]
        cache = None
        routes: list[jax.Array | None] = []
        if shape.continues:  # as many caches in each call, so that one program joins them
            bases = [base.cache for _, _, base in batch]
            cache = joined_caches([*bases, *bases[:1] * (rows - len(bases))], rows, shape.columns)
        for call in range(shape.calls):
            at = call * shape.piece
            now = tokens[:, at : at + shape.piece]
            cache, experts = extend_prompts(model, cache, starts + at, now, shape.columns, self._mesh)
            routes.append(experts)
        if shape.columns > self._max_length:
            cache = _resized(cache, self._max_length)
        found = None if routes[0] is None else np.concatenate(jax.device_get(routes), axis=1)
        for row, (request, start, base) in enumerate(batch):
            origin = (self._weights, shape) if base is None else base.origin
            exact = len(request.given) if base is None else min(base.exact, start)
            own = None if found is None else found[row]
            if base is not None and base.routes is not None:
                own = np.concatenate([base.routes[:start], own])
            self._computed[request.key] = Prefix(cache, row, origin, exact, own)  # ty: ignore[invalid-argument-type]
        self.count += len(batch)
        self.shapes[shape] = None


def prefill_shape(length: int, start: int = 0) -> PrefillShape:
    """Return the shape of the calls that compute a sequence of ``length`` tokens, of which ``start`` are computed."""
    rest = bucket(length - start)
    piece = rest if rest <= LONGEST_CALL else PIECE
    calls = -(-(length - start) // piece)
    return PrefillShape(start > 0, piece, calls, bucket(start + calls * piece))


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
        places = seating(build, self._sampling, self.running, taken, self._held, unread)
        shape, self.running, moves, sources = places
        if moves is not None:
            cache, blocks = self._state.cache, self._state.blocks
            light = self._state._replace(cache=None, blocks=None)
            self._state = rearranged(cache, light, *moves, build.mesh)._replace(blocks=blocks)
        if self._state is None:
            most = room(build, self._sampling)
            self._state = empty_slots(build.config, shape, build.dtype, build.mesh, self._sampling.repetition, most)
        if sources is not None:
            lanes = lane_table(self.running, shape)
            self._state = with_blocks(self._state, sources, shape.prompt_columns, lanes, build.mesh, shape.parts)
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


def seating(
    build: Build, sampling: Sampling, running: dict[int, Request], taken: list[Request], held: SlotShape | None,
    unread: bool,
) -> tuple[SlotShape, dict[int, Request], tuple[np.ndarray, np.ndarray] | None, np.ndarray | None]:  # fmt: skip
    """Give the requests taken slots and blocks beside those that run, in a batch of the size that all need.

    Returns the shape of the next chunk's slots and blocks; its requests by slot, each with its lane; order and source
    of ``moved_slots``, None if the number of slots stays; the old block that each block is made of, as
    ``assign_blocks`` has it, None if all stay.

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
    return shape, running, moves, assign_blocks(running, shape, stay)


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
