"""Where running requests lie: a slot each, and a lane of a block that holds the prompt for all who share it.

Slots and blocks are divided into as many parts as the mesh divides a batch into; a request and its block are in one
part.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.engine.requests import Request

SIZES = 8
"""Of the batch and of its blocks, at most: each is compiled when first needed."""


def power_of_two(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()


class SlotShape(NamedTuple):
    """Of what the device holds.

    Attributes:
      rows: slots.
      columns: of each.
      blocks: prompts.
      prompt_columns: of each.
      parts: of slots and blocks.
      group: lanes of a block.
    """

    rows: int
    columns: int
    blocks: int
    prompt_columns: int
    parts: int
    group: int

    def part(self, slot: int) -> int:
        """Where a slot is."""
        return slot // (self.rows // self.parts)

    def row(self, slot: int, rows: int) -> int:
        """The row of a slot in a cache of so many rows, of which each part's first are its slots."""
        each = self.rows // self.parts
        return slot // each * (rows // self.parts) + slot % each


def seat(running: dict[int, Request], taken: Iterable[Request], shape: SlotShape) -> None:
    """Give each request a free slot: beside those with its prompt if they leave a lane, or in the emptiest part."""
    free: list[collections.deque[int]] = [collections.deque() for _ in range(shape.parts)]
    mates = [collections.Counter() for _ in range(shape.parts)]
    for slot in range(shape.rows):
        if slot in running:
            mates[shape.part(slot)][running[slot].block_key] += 1
        else:
            free[shape.part(slot)].append(slot)
    for request in taken:
        key = request.block_key
        part = max(
            (p for p in range(shape.parts) if free[p]), key=lambda p: (mates[p][key] % shape.group > 0, len(free[p]))
        )
        request.slot = free[part].popleft()
        running[request.slot] = request
        mates[part][key] += 1


def blocks_needed(running: dict[int, Request], shape: SlotShape) -> int:
    """Blocks of the part that needs most, where no two of one prompt have free lanes."""
    mates = [collections.Counter() for _ in range(shape.parts)]
    for slot, request in running.items():
        mates[shape.part(slot)][request.block_key] += 1
    return max(sum(-(-count // shape.group) for count in of_part.values()) for of_part in mates)


def with_blocks_for(running: dict[int, Request], shape: SlotShape, slots: int, fixed: bool) -> SlotShape:
    """The shape with as many blocks more as these requests need, in few sizes; ``fixed``: as any could need."""
    each = shape.rows // shape.parts
    if shape.group > 1 and not fixed:
        least = max(slots // shape.parts // SIZES, 1)
        wanted = least * power_of_two(-(-blocks_needed(running, shape) // least))
        each = min(each, max(wanted, shape.blocks // shape.parts))
    return shape._replace(blocks=each * shape.parts)


def assign_blocks(running: dict[int, Request], shape: SlotShape, stay: bool) -> bool:
    """Give requests that have none a lane; returns whether the others kept theirs.

    With ``stay`` false, or where the lanes of one prompt lie too scattered, all move together.
    """
    if stay and _assigned(running, shape):
        return True
    for request in running.values():
        request.lane = None
    _assigned(running, shape)
    return False


def _assigned(running: dict[int, Request], shape: SlotShape) -> bool:
    each = shape.blocks // shape.parts
    members: list[list[Request]] = [[] for _ in range(shape.parts)]
    for slot in sorted(running):
        members[shape.part(slot)].append(running[slot])
    return all(
        _assigned_part(requests, range(p * each, (p + 1) * each), shape.group) for p, requests in enumerate(members)
    )


def _assigned_part(members: Sequence[Request], blocks: range, group: int) -> bool:
    """Whether every request of this part has found a lane of these blocks."""
    used = {request.lane[0]: request.block_key for request in members if request.lane}
    occupied = {request.lane for request in members if request.lane}
    unused = [block for block in reversed(blocks) if block not in used]
    free: dict = collections.defaultdict(list)
    for block, key in used.items():
        free[key] += [(block, lane) for lane in range(group) if (block, lane) not in occupied]
    for request in members:
        if request.lane:
            continue
        lanes = free[request.block_key]
        if not lanes and not unused:
            return False
        if not lanes:
            block = unused.pop()
            lanes += [(block, lane) for lane in reversed(range(group))]
        request.lane = lanes.pop()
    return True


def lane_table(running: dict[int, Request], shape: SlotShape) -> np.ndarray:
    """int32[rows]: the lane of each slot, counted through the blocks of its part.

    Beyond the last one for an idle slot.
    """
    count = shape.blocks // shape.parts * shape.group
    table = np.full(shape.rows, count, np.int32)
    for slot, request in running.items():
        block, lane = request.lane
        table[slot] = block * shape.group + lane - shape.part(slot) * count
    return table


def moved_slots(running: dict[int, Request], old: int, rows: int, parts: int) -> tuple[np.ndarray, dict[int, Request]]:
    """Which of ``old`` slots each of ``rows`` becomes, int32[rows], negative for an idle one; and who runs where then.

    Each stays in its part, where there must be room for all that run there, and at its place in it if that remains.
    """
    order = np.full(rows, -1, np.int32)
    before = old // parts
    after = rows // parts
    moved = {}
    for part in range(parts):
        kept = [place for place in range(before) if part * before + place in running]
        free = collections.deque(place for place in range(after) if place not in kept)
        for place in kept:
            slot = part * after + (place if place < after else free.popleft())
            order[slot] = part * before + place
            moved[slot] = running[order[slot]]
    for slot, request in moved.items():
        request.slot = slot
    return order, moved


def moved_rows(order: np.ndarray, old: int, parts: int) -> np.ndarray:
    """For each slot of ``order`` (from ``moved_slots``) the row of its part that its keys and values are moved from,
    int32; negative where they stay.
    """
    slots = np.arange(len(order), dtype=np.int32)
    stays = (order < 0) | (order % (old // parts) == slots % (len(order) // parts))
    return np.where(stays, np.int32(-1), order % (old // parts)).astype(np.int32)


def moved_blocks(before: dict[int, int], running: dict[int, Request], shape: SlotShape) -> np.ndarray:
    """int32[blocks]: which old block each block is made of; ``before`` has the old block of requests by handle."""
    order = np.zeros(shape.blocks, np.int32)
    for request in running.values():
        if request.handle in before:
            order[request.lane[0]] = before[request.handle]
    return order
