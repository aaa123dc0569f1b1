"""Requests: one completion in the making; the places of those that run; and operations on finished completions:
truncate, append, resume.

A running request has a slot, and a lane of a block that holds the prompt for all requests that share it. Slots and
blocks are divided into as many parts as the mesh divides a batch into; a request and its block are in one part.
"""

import collections
import dataclasses
import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.models.experts import EXPERTS
from jaxrl_llm.types import Completion, Prompt


@dataclasses.dataclass
class Request:
    """The engine's record of one completion.

    Attributes:
      handle: its name.
      prompt: the prompt that the completion follows.
      seed: determines its random numbers.
      limit: maximum number of tokens of the completion, those begun with included.
      begun: completion to resume; None for a new one.
      keep: whether its keys and values are kept when it ends.
      keep_prompt: whether those of its prompt are kept, and what was begun is computed from them.
      block_key: key of the exact contents of its prompt columns; requests with equal keys may share a block.
      slot: number of its slot.
      lane: its block, and its number among the requests of the block; None until it has one.
      pieces: the tokens of each chunk, with their data.
      count: tokens in them.
    """

    handle: int
    prompt: Prompt
    seed: int
    limit: int
    begun: Completion | None = None
    keep: bool = False
    keep_prompt: bool = False
    block_key: Hashable = None
    slot: int = -1
    lane: tuple[int, int] | None = None
    pieces: list[Completion] = dataclasses.field(default_factory=list)
    count: int = 0

    @property
    def earlier(self) -> int:
        """Number of tokens that it was begun with."""
        return 0 if self.begun is None else len(self.begun.tokens)

    @functools.cached_property
    def given(self) -> np.ndarray:
        """Tokens of the prompt and of the completion begun, int32. Cached, since a queue is looked through often."""
        if self.begun is None:
            return self.prompt.tokens
        return np.concatenate([self.prompt.tokens, self.begun.tokens.astype(np.int32)])

    @functools.cached_property
    def key(self) -> Hashable:
        """Key of the sequence given, exact to the bit: its tokens, and the other contents of the prompt."""
        return (self.given.tobytes(), self.prompt.beside)

    @property
    def columns(self) -> int:
        """Columns of its slot: all tokens but those in its block and the newest, which is decoded next."""
        return self.earlier + self.count

    @property
    def prompt_columns(self) -> int:
        """Columns of its block: the prompt without its last token, so that one path samples all new tokens."""
        return len(self.prompt) - 1

    def add(self, tokens: np.ndarray, logp: np.ndarray, extras: dict[str, np.ndarray], version: int) -> None:
        """Add the tokens that a chunk sampled."""
        count = len(tokens)
        sampled, versions = np.ones(count, bool), np.full(count, version, np.int32)
        self.pieces.append(Completion(tokens, logp, "aborted", sampled, versions, extras))
        self.count += count

    def completion(self, reason: str) -> Completion:
        """Return the whole completion, with the reason of its end."""
        return dataclasses.replace(joined(self.begun or EMPTY, *self.pieces), finish_reason=reason)


EMPTY = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "aborted", np.zeros(0, bool), np.zeros(0, np.int32))
ARRAYS = ("tokens", "sampler_logp", "mask", "version")
"""Fields of a completion with an entry for each token."""


def joined(*parts: Completion) -> Completion:
    """Join completions: finished as the last is, with the episode of the first; an extra that only some of them have is
    0 in the others."""
    arrays: dict = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    extras = {}
    for name, model in collections.ChainMap(*(part.extras for part in reversed(parts))).items():
        own = (part.extras.get(name) for part in parts)
        shapes = ((len(part.tokens), *model.shape[1:]) for part in parts)
        whole = [np.zeros(shape, model.dtype) if x is None else x for x, shape in zip(own, shapes, strict=True)]
        extras[name] = np.concatenate(whole)
    first = parts[0]
    kept = {"prompt_extras": first.prompt_extras, "episode": first.episode}
    return Completion(**arrays, finish_reason=parts[-1].finish_reason, extras=extras, **kept)


def with_routes(begun: Completion, routes: np.ndarray) -> Completion:
    """Return what a completion is begun with, with the experts of the tokens that no policy sampled.

    ``routes``: experts of the prompt and of what was begun, without the last token, [t, L, k].
    """
    prompt = len(routes) + 1 - len(begun.tokens)
    # Row t is of the pass before token t; no pass precedes the first one.
    given = np.concatenate([np.zeros((1, *routes.shape[1:]), routes.dtype), routes])
    own = given[prompt:]
    sampled = begun.mask[:, None, None]
    kept = np.where(sampled, begun.extras[EXPERTS], own) if EXPERTS in begun.extras else own
    extras = begun.extras | {EXPERTS: kept}
    return dataclasses.replace(begun, extras=extras, prompt_extras={EXPERTS: given[:prompt]} | begun.prompt_extras)


def with_tokens(completion: Completion, tokens: Sequence[int] | np.ndarray, version: int = 0) -> Completion:
    """Append tokens that no policy sampled (a tool's output): masked, of log-probability 0."""
    ids = np.asarray(tokens, np.int32).reshape(-1)
    count = len(ids)
    given = Completion(
        ids, np.zeros(count, np.float32), "aborted", np.zeros(count, bool), np.full(count, version, np.int32)
    )
    return joined(completion, given)


def first_tokens(completion: Completion, count: int) -> Completion:
    """Truncate a completion after ``count`` tokens, so that a branch can resume there."""
    return dataclasses.replace(_tokens_of(completion, slice(count)), finish_reason="aborted")


def last_tokens(completion: Completion, start: int) -> Completion:
    """Return what a completion has from its token ``start`` on, ended as it is."""
    return _tokens_of(completion, slice(start, None))


def _tokens_of(completion: Completion, part: slice) -> Completion:
    cut = {name: getattr(completion, name)[part] for name in ARRAYS}
    extras = {name: values[part] for name, values in completion.extras.items()}
    return Completion(
        **cut, finish_reason=completion.finish_reason, extras=extras, prompt_extras=completion.prompt_extras
    )


def row_offset(completion: Completion, prompt: int) -> int:
    """Return how many tokens a completion's last row has after the first ``prompt`` ones, minus its own number of
    tokens; see ``Completion.forks``.
    """
    forks = completion.forks
    return max(len(forks[max(forks)]) - prompt, 0) - max(forks) if forks else 0


def row_room(completion: Completion, limit: int, prompt: int) -> int:
    """Return the most tokens that a completion may have, where none of its rows has more than ``limit`` after
    ``prompt``.
    """
    return limit - max(row_offset(completion, prompt), 0)


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
