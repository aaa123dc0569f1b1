"""Scheduler: the requests that run at one time, and their state on the device."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.engine.requests import (
    EMPTY,
    MAX_SIZES,
    Request,
    SlotShape,
    assign_blocks,
    assign_slots,
    block_table,
    grow_blocks,
    move_slots,
    power_of_two,
    requests_by_part,
    with_routes,
)
from jaxrl_llm.engine.sampling import Draw, draw_options, tail_after, to_traced
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.engine.slots import (
    Admission,
    Slots,
    concatenate_caches,
    copy_sequence,
    empty_admission,
    empty_slots,
    extend_prompts,
    fill_slots,
    rearrange_blocks,
    rearrange_slots,
    run_chunk,
    slot_parts,
    stop_slots,
)
from jaxrl_llm.models.decode_kernels import ByLength, whole_blocks
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.decoding import Cache, cached_numbers, take_rows, with_columns
from jaxrl_llm.models.experts import EXPERTS
from jaxrl_llm.sharding import batch_parts, bytes_per_device

MAX_CALL_ROWS, MAX_CALL_TOKENS = 8, 8192
"""Sequences in one call, fewer if their tokens would exceed the second number; at least one on each device."""
MAX_UNSPLIT_TOKENS, PIECE_TOKENS = 1024, 512
"""Lengths in tokens: sequences longer than the first are computed in pieces of the second."""

PROMPT_BYTES = 1 << 30
"""Bytes on a device that keys, values and states of prompts of episodes take between turns; others are computed again,
to equal bits.
"""

resize_columns = jax.jit(with_columns, static_argnums=1)
copy_row = jax.jit(lambda cache, row, columns: with_columns(take_rows(cache, row[None]), columns), static_argnums=2)


def bucket_length(length: int) -> int:
    """Return the next of 16, 24, 32, 48, 64, 96, ... tokens: few shapes, and at most half of one is wasted."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def call_rows(tokens: int, parts: int) -> int:
    """Return the number of sequences of so many tokens in one call, if the mesh divides a batch into ``parts``."""
    return parts * max(1, min(MAX_CALL_ROWS, MAX_CALL_TOKENS // tokens) // parts)


class PrefillShape(NamedTuple):
    """Shape of the calls that compute a sequence; it follows from the sequence alone, never from its neighbours in a
    call: ``calls`` of ``piece`` tokens each, in a cache with the ``columns`` of all of it; ``continues`` if its first
    tokens are computed already.
    """

    continues: bool
    piece: int
    calls: int
    columns: int

    def __str__(self) -> str:
        """Describe the shape in words."""
        return f"prompts: {self.calls} x {self.piece} tokens{', resumed' if self.continues else ''}"


class Prefix(NamedTuple):
    """Reference to the keys and values of a sequence, a ``row`` of ``cache``: those of all its tokens but the last are
    valid.

    Attributes:
      origin: identifies the computation; equal origins and tokens give equal bits, in the ``exact`` first columns.
      routes: the experts of each token, [columns, L, k] or more; None for a dense model.
    """

    cache: Cache
    row: int
    origin: Hashable
    exact: int
    routes: np.ndarray | None = None


class PrefixCache:
    """Cache of computed sequences of up to ``max_length`` tokens: those of waiting requests, and those kept of earlier
    ones to resume from. ``mesh`` divides the sequences of a call; None for one device. ``dtype``: of keys and values.
    ``recurrent``: the model has states, from which a sequence goes on only where they were kept: after its last but
    one token.

    Attributes:
      rows: maximum number of sequences of a call.
      prompt_bytes: on a device, that prompts of episodes may take between turns.
      count: sequences computed.
      shapes: of all calls so far.
    """

    def __init__(self, max_length: int, mesh: Mesh | None = None, dtype: Any = None, recurrent: bool = False):
        self._max_length = max_length
        self._recurrent = recurrent
        self._mesh = mesh
        self._dtype = dtype
        self._parts = 1 if mesh is None else batch_parts(mesh)
        self.rows = call_rows(1, self._parts)
        self.prompt_bytes = PROMPT_BYTES
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
        prefix = self[request]
        key = (prefix.origin, request.prompt.key)
        return key if request.prompt_columns <= prefix.exact else (*key, request.key)

    def routes(self, request: Request) -> np.ndarray | None:
        """Return the experts of the tokens of a prepared request but its last, [t, L, k]; None for a dense model."""
        routes = self[request].routes
        return None if routes is None else routes[: len(request.input_tokens) - 1]

    def keep(self, request: Request, slots: Slots, row: int) -> None:
        """Keep the columns of a request that still has its slot; ``row``: of the cache."""
        tokens = np.concatenate([request.input_tokens, *(piece.tokens for piece in request.chunks)])
        columns = min(bucket_length(len(tokens)), slots.blocks.columns + slots.cache.columns)
        cache = copy_sequence(slots, row, request.slot, request.lane[0], columns)
        completion = request.completion("aborted")
        routes = None
        if EXPERTS in completion.extras:
            routes = np.concatenate([completion.prompt_extras[EXPERTS][1:], completion.extras[EXPERTS]])
        entry = Prefix(cache, 0, request.block_key[0], request.prompt_columns, routes)
        self._kept[tokens.tobytes(), request.prompt.beside] = tokens[:-1], entry

    def release(self, waiting: Iterable[Request]) -> None:
        """Drop the sequences of requests that no longer wait, and the oldest prompts of episodes beyond
        ``prompt_bytes``.
        """
        needed = {request.key for request in waiting}
        self._computed = {key: prefix for key, prefix in self._computed.items() if key in needed}
        self._drop_prompts()

    def _drop_prompts(self, needed: Collection[Hashable] = ()) -> None:
        """Drop the oldest prompts of episodes beyond ``prompt_bytes``, but for the ``needed`` ones."""
        sizes = {key: bytes_per_device(prefix.cache) for key, prefix in self._prompts.items()}
        size = sum(sizes.values())
        for key in [key for key in sizes if key not in needed]:
            if size > self.prompt_bytes:
                size -= sizes[key]
                del self._prompts[key]

    def prepare(
        self,
        model: Decoder,
        requests: Sequence[Request],
        upcoming: Iterable[Request] = (),
        needed: Collection[Hashable] = (),
    ) -> None:
        """Compute the sequences of these requests that are missing; a partial completion resumes from the kept sequence
        that shares most first tokens. Rows that a call would leave empty take new sequences of equal shape that are
        needed next. ``needed``: prompts of episodes that stay.
        """
        turns = [request for request in requests if request.keep_prompt and request.partial is not None]
        missing = {turn.prompt.key: turn for turn in turns if turn.prompt.key not in self._prompts}
        if missing:
            firsts = [dataclasses.replace(request, partial=None) for request in missing.values()]
            self.prepare(model, firsts, needed={turn.prompt.key for turn in turns})
        groups: dict[PrefillShape, list[tuple[Request, int, Prefix | None]]] = {}
        for request in {request.key: request for request in requests}.values():
            if request.key in self._computed:
                continue
            start, base = (0, None) if request.partial is None else self._longest(request)
            if base is not None and start >= len(request.input_tokens) - 1:
                self._computed[request.key] = base
                continue
            groups.setdefault(prefill_shape(len(request.input_tokens), start), []).append((request, start, base))
        for shape, members in groups.items():
            rows = call_rows(shape.columns if shape.continues else shape.piece, self._parts)
            if not shape.continues:
                scheduled = {request.key for request, _, _ in members} | self._computed.keys()
                extra: dict[Hashable, Request] = {}
                for request in upcoming:
                    if len(extra) == -len(members) % rows:
                        break
                    if request.key not in scheduled and prefill_shape(len(request.input_tokens)) == shape:
                        extra[request.key] = request
                members = members + [(request, 0, None) for request in extra.values()]
            for batch in (members[i : i + rows] for i in range(0, len(members), rows)):
                self._compute(model, shape, rows, batch)
        for request in requests:
            if request.keep_prompt and request.partial is None and request.prompt.key not in self._prompts:
                prefix = self._computed[request.key]
                cache = copy_row(prefix.cache, np.int32(prefix.row), bucket_length(len(request.prompt)))
                self._prompts[request.prompt.key] = prefix._replace(cache=cache, row=0)
                self._drop_prompts(needed)

    def _longest(self, request: Request) -> tuple[int, Prefix | None]:
        """Return the largest number of a request's first tokens that a kept sequence holds, and that sequence; of a
        turn of an episode always those of the prompt.
        """
        if request.keep_prompt:
            return len(request.prompt) - self._recurrent, self._prompts[request.prompt.key]
        best: tuple[int, Prefix | None] = (0, None)
        for (_, beside), (tokens, prefix) in self._kept.items():
            size = min(len(tokens), len(request.input_tokens))
            different = np.flatnonzero(tokens[:size] != request.input_tokens[:size])
            shared = int(different[0]) if len(different) else size
            if self._recurrent and (shared < len(tokens) or shared == len(request.input_tokens)):
                continue
            best = (shared, prefix) if shared > best[0] and beside == request.prompt.beside else best
        return best

    def _compute(
        self, model: Decoder, shape: PrefillShape, rows: int, batch: list[tuple[Request, int, Prefix | None]]
    ) -> None:
        starts = np.zeros(rows, np.int32)
        ends = np.zeros(rows, np.int32)
        tokens = np.zeros((rows, shape.calls * shape.piece), np.int32)
        for row, (request, start, _) in enumerate(batch):
            starts[row], ends[row] = start, len(request.input_tokens) - 1
            tokens[row, : len(request.input_tokens) - start] = request.input_tokens[start:]
        cache = None
        routes: list[jax.Array | None] = []
        if shape.continues:  # as many caches in each call, so that one program joins them
            bases = [base.cache for _, _, base in batch]
            cache = concatenate_caches([*bases, *bases[:1] * (rows - len(bases))], rows, shape.columns)
        for call in range(shape.calls):
            at = call * shape.piece
            piece = tokens[:, at : at + shape.piece]
            changing = np.clip(ends - starts - at, 0, shape.piece)
            cache, experts = extend_prompts(
                model, cache, starts + at, piece, changing, shape.columns, self._mesh, self._dtype
            )
            routes.append(experts)
        if shape.columns > self._max_length:
            cache = resize_columns(cache, self._max_length)
        all_routes = None if routes[0] is None else np.concatenate(jax.device_get(routes), axis=1)
        for row, (request, start, base) in enumerate(batch):
            origin = (self._weights, shape) if base is None else base.origin
            exact = len(request.input_tokens) if base is None else min(base.exact, start)
            row_routes = None if all_routes is None else all_routes[row]
            if base is not None and base.routes is not None:
                row_routes = np.concatenate([base.routes[:start], row_routes])
            self._computed[request.key] = Prefix(cache, row, origin, exact, row_routes)  # ty: ignore[invalid-argument-type]
        self.count += len(batch)
        self.shapes[shape] = None


def prefill_shape(length: int, start: int = 0) -> PrefillShape:
    """Return the shape of the calls that compute a sequence of ``length`` tokens, of which ``start`` are computed."""
    rest = bucket_length(length - start)
    piece = rest if rest <= MAX_UNSPLIT_TOKENS else PIECE_TOKENS
    calls = -(-(length - start) // piece)
    return PrefillShape(start > 0, piece, calls, bucket_length(start + calls * piece))


FEW_SLOTS, MIN_COLUMNS, MIN_PROMPT_COLUMNS, MIN_COLUMNS_FEW_SLOTS = 16, 64, 32, 256
"""Minimum sizes of the batch, cache and prompts of a chunk, since smaller ones save little. The last number is the
minimum of cache and prompts with so few slots.
"""
FEW_BYTES = 2**30
"""Bytes of keys and values of a small cache."""
ALIGN_FROM_COLUMNS, COLUMN_ALIGNMENT = 1024, 128
"""Columns of a cache: from the first number on they are a multiple of the second."""
LOOK_AHEAD = 32
"""Waiting requests, for each sequence of a call, that are searched for prompts to compute with it."""
MIN_CHUNKS_TO_SHRINK = 4
"""Minimum number of chunks that some request may still take before a batch of just the size needed is compiled."""
TAIL_DIVISOR = 4
"""Divisor of the slots: if all requests are near their end, a batch has all slots or this part of them, which adds only
one size, for the last requests of a step.
"""


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """Fixed settings of an engine: those of ``Engine``, the model's ``config``, and the ``dtype`` of keys and values.
    With the kernels ``form`` no more than live columns are read; None is the plain form.
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
    ``sampling``: rules for all requests.
    """

    def __init__(self, spec: EngineSpec, sampling: Sampling):
        self._spec = spec
        self._sampling = sampling
        self._rules = to_traced(sampling)
        self._state: Any = None
        self._shape: Any = None
        self.running: dict[int, Request] = {}
        self._recurrent = spec.config.recurrent is not None
        self.prefixes = PrefixCache(spec.max_length, spec.mesh, spec.dtype, self._recurrent)

    def __str__(self) -> str:
        """Describe the shape of the next chunk in words."""
        rows, columns, blocks, prompt_columns, *_ = self._shape
        return (
            f"decode: {rows} slots of {columns} columns, {blocks} prompts of {prompt_columns}, {self._spec.chunk} steps"
        )

    def refill(self, model: Decoder, queue: collections.deque[Request], unread: bool) -> None:
        """Compute the prompts of waiting requests and give these slots and blocks, first come first served, in a batch
        of the size that all requests need. ``unread``: whether the previous chunk has not been read yet.
        """
        admitted = pop_next(queue, self.running, self._shape, self._spec.slots)
        near = itertools.islice(queue, LOOK_AHEAD * self.prefixes.rows)
        self.prefixes.prepare(model, admitted, (request for request in near if request.partial is None))
        spec = self._spec
        for request in admitted:
            request.block_key = self.prefixes.block_key(request)
            routes = self.prefixes.routes(request)
            if routes is not None:
                request.partial = with_routes(request.partial or EMPTY, routes)
        places = plan_slots(spec, self._sampling, self.running, admitted, self._shape, unread)
        shape, self.running, moves, sources = places
        if moves is not None:
            cache, blocks = self._state.cache, self._state.blocks
            light = self._state._replace(cache=None, blocks=None)
            self._state = rearrange_slots(cache, light, *moves, spec.mesh)._replace(blocks=blocks)
        if self._state is None:
            largest = cache_shape(spec, self._sampling)
            self._state = empty_slots(spec.config, shape, spec.dtype, spec.mesh, self._sampling.repetition, largest)
        if sources is not None:
            lanes = block_table(self.running, shape)
            self._state = rearrange_blocks(self._state, sources, shape.prompt_columns, lanes, spec.mesh, shape.parts)
        self._shape = shape
        for cache, admission in self._admissions(admitted):
            self._state = fill_slots(self._state, cache, admission, spec.mesh)
        if admitted:
            self.prefixes.release(queue)

    def run(self, model: Decoder) -> tuple[Draw, jax.Array]:
        """Send a chunk to the device; return the tokens it samples, and which slots are active after it."""
        spec, options = self._spec, draw_options(self._sampling)
        self._state, outputs = run_chunk(
            model, self._state, self._rules, spec.chunk, options, spec.group, spec.mesh, self._shape.columns, spec.form
        )
        return outputs

    def stop(self, handles: set[int]) -> list[Request]:
        """Stop these requests and free their slots; return those that ran."""
        aborted = {slot: request for slot, request in self.running.items() if request.handle in handles}
        if aborted:
            stopped = np.zeros(self._shape.rows, bool)
            stopped[list(aborted)] = True
            self._state = stop_slots(self._state, stopped)
        for request in aborted.values():
            self.release(request)
        return list(aborted.values())

    def release(self, request: Request) -> None:
        """Free the slot of a request that has ended; with ``keep`` its columns go to the prefixes."""
        del self.running[request.slot]
        if request.keep:
            self.prefixes.keep(request, self._state, self._shape.row(request.slot, self._spec.slots))

    def _admissions(self, admitted: list[Request]) -> Iterator[tuple[Cache, Admission]]:
        """Yield the cache of each prefilled batch that the admitted requests come from, and their admission."""
        shape, repetition = self._shape, self._sampling.repetition
        batches: dict[int, tuple[Cache, list[tuple[Prefix, Request]]]] = {}
        for request in admitted:
            prefix = self.prefixes[request]
            batches.setdefault(id(prefix.cache), (prefix.cache, []))[1].append((prefix, request))
        lanes = block_table(self.running, shape)
        fresh = {request.handle for request in admitted}
        filled = {request.lane[0] for request in self.running.values() if request.handle not in fresh}
        for cache, members in batches.values():
            admission = empty_admission(shape, cache.v.shape[1], repetition)
            admission.slots.lanes[:] = lanes
            for prefix, request in members:
                if request.lane[0] not in filled:
                    admission.blocks[request.lane[0]] = prefix.row
                    filled.add(request.lane[0])
                slot, new = request.slot, admission.slots
                new.active[slot] = True
                new.before[slot] = request.prompt_columns
                new.lengths[slot] = request.columns
                new.tokens[slot] = request.input_tokens[-1]
                new.seeds[slot] = (request.seed & 0xFFFFFFFF, request.seed >> 32 & 0xFFFFFFFF)
                new.sampled[slot] = request.num_partial
                new.limits[slot] = request.limit
                admission.source[slot] = prefix.row if request.columns or self._recurrent else -1
                if request.partial is not None and repetition:
                    logp = request.partial.extras.get("policy_logp", request.partial.sampler_logp)
                    # No policy was sure of the others.
                    logp = np.where(request.partial.mask, logp, -np.inf).astype(np.float32)
                    tail = tail_after(request.partial.tokens, logp, repetition)
                    for column, entry in zip(new.tail, tail, strict=True):
                        column[slot] = entry
            needed = np.unique(np.concatenate([admission.blocks, admission.source]))
            needed = needed[needed >= 0]
            admission.needed[: len(needed)] = needed
            yield cache, admission


def plan_slots(
    spec: EngineSpec,
    sampling: Sampling,
    running: dict[int, Request],
    admitted: list[Request],
    previous: SlotShape | None,
    unread: bool,
) -> tuple[SlotShape, dict[int, Request], tuple[np.ndarray, np.ndarray] | None, np.ndarray | None]:
    """Give the admitted requests slots and blocks beside those that run, in a batch of the size that all need.
    ``previous``: shape of the chunk before, None for the first; ``unread``: whether that chunk has not been read yet.

    Returns the shape of the next chunk's slots and blocks; its requests by slot, each with its lane; order and source
    of ``move_slots``, None if the number of slots stays; the old block that each block is made of, as ``assign_blocks``
    has it, None if all stay.
    """
    shape = chunk_shape(spec, sampling, [*running.values(), *admitted], previous, unread)
    moves = None
    if previous is not None and shape.rows != previous.rows:  # those who run move with their slots
        order, source, running = move_slots(running, previous.rows, shape.rows, shape.parts)
        moves = order, source
    assign_slots(running, admitted, shape)
    fixed = spec.strict or spec.slots <= FEW_SLOTS or spec.form is not None
    shape = grow_blocks(running, shape, spec.slots, fixed)
    stay = (previous or shape)._replace(columns=shape.columns) == shape
    return shape, running, moves, assign_blocks(running, shape, stay)


def cache_shape(spec: EngineSpec, sampling: Sampling) -> tuple[int, int]:
    """Return rows and columns of the cache: the most that may be needed, for it is allocated once and never copied."""
    columns = spec.chunk + (spec.max_length if has_one_shape(spec) else sampling.max_new_tokens)
    if spec.form is not None:
        return spec.slots, whole_blocks(columns)
    # TPUs store numbers by 128: a cache of other sizes has another layout than prompts, which are then transposed.
    return spec.slots, columns if columns < ALIGN_FROM_COLUMNS else -(-columns // COLUMN_ALIGNMENT) * COLUMN_ALIGNMENT


def has_one_shape(spec: EngineSpec) -> bool:
    """Whether prompts and completions each have room for the longest sequence, so that one shape of the cache serves
    whatever the sampler is asked for: where the cache is small.
    """
    token_bytes = cached_numbers(spec.config) * np.dtype(spec.dtype).itemsize
    few = spec.slots <= FEW_SLOTS and not spec.strict
    return few and spec.slots * spec.max_length * token_bytes <= FEW_BYTES


def chunk_shape(
    spec: EngineSpec, sampling: Sampling, requests: list[Request], previous: SlotShape | None, unread: bool
) -> SlotShape:
    """Return slots and columns of the next chunk, in few sizes, so that few programs are compiled; and its minimum
    blocks.
    """
    slots, longest = cache_shape(spec, sampling)
    parts = slot_parts(spec.mesh, slots)
    if spec.strict:
        prompts = spec.max_length - sampling.max_new_tokens
        prompts = prompts if spec.form is None else whole_blocks(prompts)
        return SlotShape(slots, longest, 0, prompts, parts, spec.group)
    rows, blocks = rows_and_blocks(spec, requests, previous)
    if spec.form is not None:  # what is not live costs nothing, so that the slots' number alone compiles anything
        prompts = spec.max_length - (0 if has_one_shape(spec) else sampling.max_new_tokens)
        return SlotShape(rows, longest, 0, whole_blocks(prompts), parts, spec.group)
    # What the chunk before has sampled is not known yet.
    columns = max(request.columns for request in requests) + spec.chunk * (2 if unread else 1)
    columns = chunk_columns(columns, slots, longest)
    minimum = MIN_PROMPT_COLUMNS if slots > FEW_SLOTS else MIN_COLUMNS_FEW_SLOTS
    prompt = max(power_of_two(max(request.prompt_columns for request in requests)), minimum)
    return SlotShape(rows, columns, blocks, min(prompt, spec.max_length), parts, spec.group)


def chunk_columns(needed: int, slots: int, largest: int) -> int:
    """Return the columns of a chunk whose longest request needs ``needed``, of a cache of ``largest``, in few sizes."""
    # With few slots no setting of the sampler compiles anything, and neighbours rarely do.
    minimum = MIN_COLUMNS if slots > FEW_SLOTS else MIN_COLUMNS_FEW_SLOTS
    return min(max(power_of_two(needed), minimum), largest)


def chunk_rows(needed: int, slots: int, parts: int) -> int:
    """Return the slots of a chunk with ``needed`` requests, in few sizes; ``parts``: of the mesh's rows."""
    # Of slots that the mesh does not divide, some would be on other devices than their rows of the cache.
    if slots <= FEW_SLOTS or slots % parts:
        return slots
    part = math.lcm(max(slots // MAX_SIZES, 1), parts)
    return min(-(-needed // part) * part, slots)


def rows_and_blocks(spec: EngineSpec, requests: list[Request], previous: SlotShape | None) -> tuple[int, int]:
    """Return slots and minimum blocks; once no request can take long, slots are as before, all, or a part."""
    slots = spec.slots
    blocks = 0
    parts = 1 if spec.mesh is None else batch_parts(spec.mesh)
    part = math.lcm(max(slots // MAX_SIZES, 1) if spec.form is None else -(-slots // MAX_SIZES), parts)
    # Requests stay in their part of the mesh, so the fullest decides.
    crowd = collections.Counter(previous.part(r.slot) for r in requests if r.slot >= 0) if previous else {}
    needed = max(len(requests), max(crowd.values(), default=0) * (previous.parts if previous else 1))
    rows = chunk_rows(needed, slots, parts)
    most = max(request.limit - request.num_partial - request.num_sampled for request in requests)
    if most < MIN_CHUNKS_TO_SHRINK * spec.chunk:
        few = -(-slots // (TAIL_DIVISOR * part)) * part if rows < slots else slots
        sizes = {few, slots} | ({previous.rows} if previous else set())
        rows = min(size for size in sizes if size >= rows)
        blocks = previous.blocks if previous else 0
    return rows, blocks


def pop_next(
    queue: collections.deque[Request], running: dict[int, Request], shape: SlotShape | None, slots: int
) -> list[Request]:
    """Take waiting requests for the free ones of ``slots`` slots out of the queue, in order. Where a mesh divides the
    slots, each part first continues with prompts that it has, then begins one that no other has: a prompt's requests
    stay together, and read one block. It looks at four times the slots.
    """
    free = min(slots - len(running), len(queue))
    if shape is None or shape.parts == 1 or not free:
        return [queue.popleft() for _ in range(free)]
    near = [queue.popleft() for _ in range(min(len(queue), max(free, 4 * slots)))]
    waiting: dict[Hashable, collections.deque[Request]] = collections.defaultdict(collections.deque)
    for request in near:
        waiting[request.prompt.key].append(request)
    parts = requests_by_part(running, shape)
    homes = [dict.fromkeys(request.prompt.key for request in members) for members in parts]
    room = slots // shape.parts - np.array([len(members) for members in parts])
    admitted: list[Request] = []
    for part in np.argsort(-room, kind="stable"):
        started = set().union(*homes)
        for _ in range(min(int(room[part]), free - len(admitted))):
            continued = next((key for key in homes[part] if waiting.get(key)), None)
            unstarted = next((key for key, members in waiting.items() if members and key not in started), None)
            first = next(key for key, members in waiting.items() if members)
            key = next(key for key in (continued, unstarted, first) if key is not None)
            admitted.append(waiting[key].popleft())
            homes[part][key] = None
            started.add(key)
    admitted_ids = {id(request) for request in admitted}
    queue.extendleft(request for request in reversed(near) if id(request) not in admitted_ids)
    return admitted
