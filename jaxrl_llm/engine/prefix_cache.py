"""Prefix cache: keys and values of token sequences, computed once for all requests that begin with them."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.engine.requests import Request
from jaxrl_llm.engine.slots import Slots, extend_prompts, joined_caches, kept_sequence
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
