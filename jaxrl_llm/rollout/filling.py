"""How requests begin in their slots and blocks: the arguments of ``fill_slots``."""

from collections.abc import Iterator

import jax
import numpy as np

from jaxrl_llm.models.cache import Cache
from jaxrl_llm.rollout.places import Shape, lane_table
from jaxrl_llm.rollout.prefixes import Held, Prefixes
from jaxrl_llm.rollout.repetition import Tail, tail_of
from jaxrl_llm.rollout.requests import Request
from jaxrl_llm.rollout.settings import Repetition
from jaxrl_llm.rollout.slots import Begun


def fillings(
    taken: list[Request], running: dict[int, Request], shape: Shape, prefixes: Prefixes, repetition: Repetition | None
) -> Iterator[tuple[Cache, Begun]]:
    """For each prefilled batch that the requests taken come from: its cache, and what begins with it."""
    batches: dict[int, tuple[Cache, list[tuple[Held, Request]]]] = {}
    for request in taken:
        held = prefixes[request.given]
        batches.setdefault(id(held.cache), (held.cache, []))[1].append((held, request))
    lanes, fresh = lane_table(running, shape), {request.handle for request in taken}
    made = {request.lane[0] for request in running.values() if request.handle not in fresh}
    for cache, members in batches.values():
        begun = _idle(shape, lanes, repetition)
        for held, request in members:
            if request.lane[0] not in made:
                begun.blocks[request.lane[0]] = held.row
                made.add(request.lane[0])
            _begin(begun, held, request, repetition)
        yield cache, begun


def _begin(begun: Begun, held: Held, request: Request, repetition: Repetition | None) -> None:
    slot, seed = request.slot, request.seed
    begun.new[slot], begun.before[slot], begun.lengths[slot] = True, request.prompt_columns, request.columns
    begun.source[slot] = held.row if request.columns else -1
    begun.tokens[slot] = request.given[-1]
    begun.seeds[slot] = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    begun.sampled[slot], begun.limits[slot] = request.earlier, request.limit
    if request.begun is not None and repetition:
        tail = tail_of(*request.sampled_before(), repetition)
        jax.tree.map(lambda whole, one: whole.__setitem__(slot, one), begun.tail, tail)


def _idle(shape: Shape, lanes: np.ndarray, repetition: Repetition | None) -> Begun:
    """What begins no slot."""
    rows = shape.rows
    int32 = lambda *size: np.zeros(size, np.int32)
    period = repetition.longest_period if repetition else 0
    tail = Tail(int32(rows, period) - 1, int32(rows, period), int32(rows))
    return Begun(
        int32(shape.blocks) - 1, int32(rows) - 1, np.zeros(rows, bool), lanes, int32(rows), int32(rows), int32(rows),
        np.zeros((rows, 2), np.uint32), int32(rows), int32(rows), tail,
    )  # fmt: skip
