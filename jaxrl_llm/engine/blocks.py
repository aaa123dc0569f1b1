"""Places of running requests: a slot each, and a lane of a block that holds the prompt for all requests that share it.

Slots and blocks are divided into as many parts as the mesh divides a batch into; a request and its block are in one
part.
"""

import collections
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.engine.requests import Request

SIZES = 8
"""Maximum number of sizes of the batch and of its blocks; each is compiled when first needed."""


def power_of_two(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()


class SlotShape(NamedTuple):
    """Shape of the slots and blocks on the device.

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
        """Return the part that a slot is in."""
        return slot // (self.rows // self.parts)

    def row(self, slot: int, rows: int) -> int:
        """Return the row of a slot in a cache of so many rows; the first rows of each part are its slots."""
        each = self.rows // self.parts
        return slot // each * (rows // self.parts) + slot % each


def by_part(running: dict[int, Request], shape: SlotShape) -> list[list[Request]]:
    """Return the requests of each part, by slot."""
    members: list[list[Request]] = [[] for _ in range(shape.parts)]
    for slot in sorted(running):
        members[shape.part(slot)].append(running[slot])
    return members


def seat(running: dict[int, Request], taken: Iterable[Request], shape: SlotShape) -> None:
    """Give each request a free slot: in a part where requests with its prompt leave a lane, or in the emptiest part."""
    each = shape.rows // shape.parts
    free = [[s for s in range(p * each, (p + 1) * each) if s not in running] for p in range(shape.parts)]
    mates = [collections.Counter(request.block_key for request in own) for own in by_part(running, shape)]
    for request in taken:
        key = request.block_key
        part = max(
            (p for p in range(shape.parts) if free[p]), key=lambda p: (mates[p][key] % shape.group > 0, len(free[p]))
        )
        request.slot = free[part].pop(0)
        running[request.slot] = request
        mates[part][key] += 1


def with_blocks_for(running: dict[int, Request], shape: SlotShape, slots: int, fixed: bool) -> SlotShape:
    """Return the shape with as many more blocks as these requests need, in few sizes; ``fixed``: as any could need."""
    each = shape.rows // shape.parts
    if shape.group > 1 and not fixed:
        mates = (collections.Counter(request.block_key for request in own) for own in by_part(running, shape))
        # The part that needs most decides; no two blocks of one prompt have free lanes.
        needed = max(sum(-(-count // shape.group) for count in of_part.values()) for of_part in mates)
        least = max(slots // shape.parts // SIZES, 1)
        wanted = least * power_of_two(-(-needed // least))
        each = min(each, max(wanted, shape.blocks // shape.parts))
    return shape._replace(blocks=each * shape.parts)


def assign_blocks(running: dict[int, Request], shape: SlotShape, stay: bool) -> np.ndarray | None:
    """Give requests without a lane one; return None if the others kept theirs, else the old block that each block is
    made of, int32[blocks].

    With ``stay`` false, or if the lanes of one prompt are too scattered, all move together.
    """
    before = {slot: request.lane[0] for slot, request in running.items() if request.lane}
    each = shape.blocks // shape.parts
    members = by_part(running, shape)
    blocks = [range(p * each, (p + 1) * each) for p in range(shape.parts)]
    if stay and all(_assigned(own, there, shape.group) for own, there in zip(members, blocks, strict=True)):
        return None
    for request in running.values():
        request.lane = None
    for own, there in zip(members, blocks, strict=True):
        _assigned(own, there, shape.group)
    order = np.zeros(shape.blocks, np.int32)
    for slot, block in before.items():
        order[running[slot].lane[0]] = block
    return order


def _assigned(members: Sequence[Request], blocks: range, group: int) -> bool:
    """Give the requests of a part lanes of its blocks; return whether all have one."""
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
    """Return the lane of each slot, int32[rows], counted through the blocks of its part.

    An idle slot has a number beyond the last lane.
    """
    count = shape.blocks // shape.parts * shape.group
    table = np.full(shape.rows, count, np.int32)
    for slot, request in running.items():
        block, lane = request.lane
        table[slot] = block * shape.group + lane - shape.part(slot) * count
    return table


def moved_slots(
    running: dict[int, Request], old: int, rows: int, parts: int
) -> tuple[np.ndarray, np.ndarray, dict[int, Request]]:
    """Return the old slot that each of ``rows`` slots takes over, int32[rows], negative for an idle one; the row of its
    part from which its keys and values move, int32[rows], negative if they stay; and the requests by their new slot.

    Each stays in its part, which must have room for all its requests, and keeps its place there if that remains.
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
    places = np.arange(rows, dtype=np.int32) % after
    stays = (order < 0) | (order % before == places)
    source = np.where(stays, np.int32(-1), order % before).astype(np.int32)
    return order, source, moved
