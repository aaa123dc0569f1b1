"""Keys and values of token sequences, computed once for all requests that begin with them."""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.engine.requests import Request
from jaxrl_llm.engine.slots import Slots, extend_prompts, joined, kept_sequence
from jaxrl_llm.models.cache import Cache, with_columns
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding import batch_parts

ROWS, TOKENS = 8, 8192
"""Sequences in one call, fewer where their tokens would exceed the second number; one on each device at least."""
LONGEST_CALL, PIECE = 1024, 512
"""Sequences of more tokens than the first number are computed in pieces of the second."""

_resized = jax.jit(with_columns, static_argnums=1)


def bucket(length: int) -> int:
    """The next of 16, 24, 32, 48, 64, 96, ... tokens: few shapes, at most half of one wasted."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


def rows_of_call(tokens: int, parts: int) -> int:
    """Sequences of so many tokens in one call, where the mesh divides a batch into ``parts``."""
    return parts * max(1, min(ROWS, TOKENS // tokens) // parts)


class PrefillShape(NamedTuple):
    """How a sequence is computed; it follows from the sequence alone, never from its neighbours in a call.

    Attributes:
      continues: whether its first tokens are there already.
      piece: tokens of one call.
      calls: how many.
      columns: of the cache that holds all of it.
    """

    continues: bool
    piece: int
    calls: int
    columns: int

    def __str__(self) -> str:
        """In words."""
        return f"prompts: {self.calls} x {self.piece} tokens{', going on' if self.continues else ''}"


class Entry(NamedTuple):
    """Where the keys and values of a sequence are: all its tokens but the last are valid.

    Attributes:
      cache: of several sequences.
      row: the sequence's.
      origin: by what computation; the same origin and tokens give the same bits.
      exact: of how many first columns that is so.
    """

    cache: Cache
    row: int
    origin: Hashable
    exact: int


class PrefixCache:
    """The sequences at hand: those of waiting requests, and what is kept of earlier ones to go on from.

    Args:
      max_length: tokens of a sequence at most.
      mesh: that divides the sequences of a call; None for one device.

    Attributes:
      rows: sequences of a call at most.
      count: sequences computed.
      shapes: of all calls so far.
    """

    def __init__(self, max_length: int, mesh: Mesh | None = None):
        self._max_length = max_length
        self._mesh = mesh
        self._parts = 1 if mesh is None else batch_parts(mesh)
        self.rows = rows_of_call(1, self._parts)
        self._computed: dict[bytes, Entry] = {}
        self._kept: dict[bytes, Entry] = {}
        self.count = self._weights = 0
        self.shapes: dict[PrefillShape, None] = {}

    def clear(self) -> None:
        """Forget every sequence: the weights are others now."""
        self._computed = {}
        self._kept = {}
        self._weights += 1

    def __getitem__(self, sequence: np.ndarray) -> Entry:
        """Where a prepared sequence is."""
        return self._computed[sequence.tobytes()]

    def block_key(self, request: Request) -> Hashable:
        """What the columns of a prepared request's prompt hold: its tokens, and by what computation."""
        sequence = request.given.tobytes()
        held = self._computed[sequence]
        prompt = request.prompt.tobytes()
        return (held.origin, prompt) if request.prompt_columns <= held.exact else (held.origin, prompt, sequence)

    def keep(self, request: Request, slots: Slots, row: int) -> None:
        """Remember the columns of a request that still has its slot; ``row``: of the cache."""
        sequence = request.sequence()
        columns = min(bucket(len(sequence)), slots.blocks.columns + slots.cache.columns)
        one = kept_sequence(slots, row, request.slot, request.lane[0], columns)
        self._kept[sequence.tobytes()] = Entry(one, 0, request.block_key[0], request.prompt_columns)

    def release(self, waiting: Iterable[np.ndarray]) -> None:
        """Drop what was computed for requests that wait no more."""
        needed = {sequence.tobytes() for sequence in waiting}
        self._computed = {key: value for key, value in self._computed.items() if key in needed}

    def prepare(
        self,
        model: Decoder,
        sequences: Sequence[np.ndarray],
        resumed: Sequence[bool],
        upcoming: Iterable[np.ndarray] = (),
    ) -> None:
        """Compute the sequences that are not there; a resumed one goes on from the longest kept one that it begins
        with.

        Rows that a call would leave empty take new sequences of the same shape that are needed next.
        """
        groups: dict[PrefillShape, list[tuple[np.ndarray, int, Entry | None]]] = {}
        for key, again in dict(zip((s.tobytes() for s in sequences), resumed, strict=True)).items():
            if key in self._computed:
                continue
            sequence = np.frombuffer(key, np.int32)
            start, base = _longest(self._kept, sequence) if again else (0, None)
            if base is not None and start >= len(sequence) - 1:
                self._computed[key] = base
                continue
            groups.setdefault(_shape(len(sequence), start), []).append((sequence, start, base))
        for shape, members in groups.items():
            rows = rows_of_call(shape.columns if shape.continues else shape.piece, self._parts)
            if not shape.continues:
                there = {sequence.tobytes() for sequence, _, _ in members} | self._computed.keys()
                next_ones = _next(upcoming, shape, there, -len(members) % rows)
                members = members + [(sequence, 0, None) for sequence in next_ones]
            for batch in (members[i : i + rows] for i in range(0, len(members), rows)):
                self._compute(model, shape, rows, batch)

    def _compute(
        self, model: Decoder, shape: PrefillShape, rows: int, batch: list[tuple[np.ndarray, int, Entry | None]]
    ) -> None:
        starts = np.zeros(rows, np.int32)
        tokens = np.zeros((rows, shape.calls * shape.piece), np.int32)
        for row, (sequence, start, _) in enumerate(batch):
            starts[row] = start
            tokens[row, : len(sequence) - start] = sequence[start:]
        cache = joined([base.cache for _, _, base in batch], rows, shape.columns) if shape.continues else None
        for call in range(shape.calls):
            at = call * shape.piece
            now = tokens[:, at : at + shape.piece]
            cache = extend_prompts(model, cache, starts + at, now, shape.columns, self._mesh)
        if shape.columns > self._max_length:
            cache = _resized(cache, self._max_length)
        for row, (sequence, start, base) in enumerate(batch):
            origin = (self._weights, shape) if base is None else base.origin
            exact = len(sequence) if base is None else min(base.exact, start)
            self._computed[sequence.tobytes()] = Entry(cache, row, origin, exact)
        self.count += len(batch)
        self.shapes[shape] = None


def _shape(length: int, start: int) -> PrefillShape:
    rest = bucket(length - start)
    piece = rest if rest <= LONGEST_CALL else PIECE
    calls = -(-(length - start) // piece)
    return PrefillShape(start > 0, piece, calls, bucket(start + calls * piece))


def _next(upcoming: Iterable[np.ndarray], shape: PrefillShape, there: set[bytes], room: int) -> list[np.ndarray]:
    """The first ``room`` distinct sequences of this shape that are not there."""
    found: dict[bytes, np.ndarray] = {}
    for sequence in upcoming:
        if len(found) == room:
            break
        if sequence.tobytes() not in there and _shape(len(sequence), 0) == shape:
            found[sequence.tobytes()] = sequence
    return list(found.values())


def _longest(kept: dict[bytes, Entry], sequence: np.ndarray) -> tuple[int, Entry | None]:
    """How many first tokens of the sequence the best kept one holds."""
    best: tuple[int, Entry | None] = (0, None)
    for key, held in kept.items():
        other = np.frombuffer(key, np.int32)[:-1]
        size = min(len(other), len(sequence))
        different = np.flatnonzero(other[:size] != sequence[:size])
        shared = int(different[0]) if len(different) else size
        best = (shared, held) if shared > best[0] else best
    return best
