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
      limit: maximum number of tokens of the completion, those of ``partial`` included.
      partial: completion to resume; None for a new one.
      keep: whether its keys and values are kept when it ends.
      keep_prompt: whether those of its prompt are kept, and ``partial`` is computed from them.
      block_key: key of the exact contents of its prompt columns; requests with equal keys may share a block.
      slot: number of its slot.
      lane: its block, and its number among the requests of the block; None until it has one.
      chunks: the tokens that each chunk sampled, with their data; ``num_sampled`` tokens in all.
    """

    handle: int
    prompt: Prompt
    seed: int
    limit: int
    partial: Completion | None = None
    keep: bool = False
    keep_prompt: bool = False
    block_key: Hashable = None
    slot: int = -1
    lane: tuple[int, int] | None = None
    chunks: list[Completion] = dataclasses.field(default_factory=list)
    num_sampled: int = 0

    @property
    def num_partial(self) -> int:
        """Number of tokens of the completion that it resumes."""
        return 0 if self.partial is None else len(self.partial.tokens)

    @functools.cached_property
    def input_tokens(self) -> np.ndarray:
        """Tokens of the prompt and of the partial completion, int32. Cached, since a queue is looked through often."""
        if self.partial is None:
            return self.prompt.tokens
        return np.concatenate([self.prompt.tokens, self.partial.tokens.astype(np.int32)])

    @functools.cached_property
    def key(self) -> Hashable:
        """Key of the input, exact to the bit: its tokens, and the other contents of the prompt."""
        return (self.input_tokens.tobytes(), self.prompt.beside)

    @property
    def columns(self) -> int:
        """Columns of its slot: all tokens but those in its block and the newest, which is decoded next."""
        return self.num_partial + self.num_sampled

    @property
    def prompt_columns(self) -> int:
        """Columns of its block: the prompt without its last token, so that one path samples all new tokens."""
        return len(self.prompt) - 1

    def add(self, tokens: np.ndarray, logp: np.ndarray, extras: dict[str, np.ndarray], version: int) -> None:
        """Add the tokens that a chunk sampled."""
        count = len(tokens)
        sampled, versions = np.ones(count, bool), np.full(count, version, np.int32)
        self.chunks.append(Completion(tokens, logp, "aborted", sampled, versions, extras))
        self.num_sampled += count

    def completion(self, finish_reason: str) -> Completion:
        """Return the whole completion, with the reason of its end."""
        return dataclasses.replace(concatenate(self.partial or EMPTY, *self.chunks), finish_reason=finish_reason)


EMPTY = Completion(np.zeros(0, np.int32), np.zeros(0, np.float32), "aborted", np.zeros(0, bool), np.zeros(0, np.int32))
TOKEN_FIELDS = ("tokens", "sampler_logp", "mask", "version")
"""Fields of a completion with an entry for each token."""


def concatenate(*parts: Completion) -> Completion:
    """Join completions: finished as the last is, with the episode of the first; an extra that only some of them have is
    0 in the others.
    """
    arrays: dict = {name: np.concatenate([getattr(part, name) for part in parts]) for name in TOKEN_FIELDS}
    extras = {}
    for name, example in collections.ChainMap(*(part.extras for part in reversed(parts))).items():
        shape = example.shape[1:]
        padded = [part.extras.get(name, np.zeros((len(part.tokens), *shape), example.dtype)) for part in parts]
        extras[name] = np.concatenate(padded)
    first, last = parts[0], parts[-1]
    metadata = {"prompt_extras": first.prompt_extras, "episode": first.episode}
    return Completion(**arrays, finish_reason=last.finish_reason, extras=extras, **metadata)


def with_routes(partial: Completion, routes: np.ndarray) -> Completion:
    """Add the routing of prompt and tool tokens to a partial completion. ``routes``: experts of the prompt and of
    ``partial``, without the last token, [t, L, k].
    """
    prompt = len(routes) + 1 - len(partial.tokens)
    # Row t is of the pass before token t; no pass precedes the first one.
    routes = np.concatenate([np.zeros((1, *routes.shape[1:]), routes.dtype), routes])
    experts = routes[prompt:]
    if EXPERTS in partial.extras:
        experts = np.where(partial.mask[:, None, None], partial.extras[EXPERTS], experts)
    prompt_extras = {EXPERTS: routes[:prompt]} | partial.prompt_extras
    return dataclasses.replace(partial, extras=partial.extras | {EXPERTS: experts}, prompt_extras=prompt_extras)


def with_tokens(completion: Completion, tokens: Sequence[int] | np.ndarray, version: int = 0) -> Completion:
    """Append tokens that no policy sampled (a tool's output): masked, of log-probability 0."""
    ids = np.asarray(tokens, np.int32).reshape(-1)
    count = len(ids)
    appended = Completion(
        ids, np.zeros(count, np.float32), "aborted", np.zeros(count, bool), np.full(count, version, np.int32)
    )
    return concatenate(completion, appended)


def first_tokens(completion: Completion, count: int) -> Completion:
    """Truncate a completion after ``count`` tokens, so that a branch can resume there."""
    return dataclasses.replace(slice_tokens(completion, slice(count)), finish_reason="aborted")


def last_tokens(completion: Completion, start: int) -> Completion:
    """Return what a completion has from its token ``start`` on, ended as it is."""
    return slice_tokens(completion, slice(start, None))


def slice_tokens(completion: Completion, span: slice) -> Completion:
    """Return the completion with these of its tokens."""
    fields = {name: getattr(completion, name)[span] for name in TOKEN_FIELDS}
    extras = {name: array[span] for name, array in completion.extras.items()}
    return Completion(
        **fields, finish_reason=completion.finish_reason, extras=extras, prompt_extras=completion.prompt_extras
    )


def row_offset(completion: Completion, prompt: int) -> int:
    """Return how many tokens a completion's last row has after the first ``prompt`` ones, minus its own number of
    tokens; see ``Completion.forks``.
    """
    forks = completion.forks
    return max(len(forks[max(forks)]) - prompt, 0) - max(forks) if forks else 0


def row_limit(completion: Completion, limit: int, prompt: int) -> int:
    """Return the most tokens of a completion none of whose rows has more than ``limit`` after ``prompt``."""
    return limit - max(row_offset(completion, prompt), 0)


MAX_SIZES = 8
"""Maximum number of sizes of the batch and of its blocks; each is compiled when first needed."""


def power_of_two(count: int) -> int:
    """Return the next power of two."""
    return 1 << (count - 1).bit_length()


class SlotShape(NamedTuple):
    """Shape of the slots and blocks on the device: slots (``rows``) and their ``columns``, prompts (``blocks``) and
    their ``prompt_columns``, the ``parts`` of both, and the lanes of a block (``group``).
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


def requests_by_part(running: dict[int, Request], shape: SlotShape) -> list[list[Request]]:
    """Return the requests of each part, by slot."""
    members: list[list[Request]] = [[] for _ in range(shape.parts)]
    for slot in sorted(running):
        members[shape.part(slot)].append(running[slot])
    return members


def count_prompts(requests: Iterable[Request]) -> collections.Counter[Hashable]:
    """Count the requests of each prompt, by the key of its block."""
    return collections.Counter(request.block_key for request in requests)


def assign_slots(running: dict[int, Request], admitted: Iterable[Request], shape: SlotShape) -> None:
    """Give each request a free slot: in a part where requests with its prompt leave a lane, or in the emptiest part."""
    each = shape.rows // shape.parts
    free = [[s for s in range(p * each, (p + 1) * each) if s not in running] for p in range(shape.parts)]
    same_prompt = [count_prompts(members) for members in requests_by_part(running, shape)]
    for request in admitted:
        key = request.block_key
        open_parts = (p for p in range(shape.parts) if free[p])
        part = max(open_parts, key=lambda p: (same_prompt[p][key] % shape.group > 0, len(free[p])))
        request.slot = free[part].pop(0)
        running[request.slot] = request
        same_prompt[part][key] += 1


def grow_blocks(running: dict[int, Request], shape: SlotShape, slots: int, fixed: bool) -> SlotShape:
    """Return the shape with as many more blocks as these requests need, in few sizes; ``fixed``: as any could need."""
    each = shape.rows // shape.parts
    if shape.group > 1 and not fixed:
        same_prompt = (count_prompts(members) for members in requests_by_part(running, shape))
        # The part that needs most decides; no two blocks of one prompt have free lanes.
        needed = max(sum(-(-count // shape.group) for count in counts.values()) for counts in same_prompt)
        smallest = max(slots // shape.parts // MAX_SIZES, 1)
        size = smallest * power_of_two(-(-needed // smallest))
        each = min(each, max(size, shape.blocks // shape.parts))
    return shape._replace(blocks=each * shape.parts)


def assign_blocks(running: dict[int, Request], shape: SlotShape, stay: bool) -> np.ndarray | None:
    """Give requests without a lane one; return None if the others kept theirs, else the old block that each block is
    made of, int32[blocks]. With ``stay`` false, or if the lanes of one prompt are too scattered, all move together.
    """
    old_blocks = {slot: request.lane[0] for slot, request in running.items() if request.lane}
    each = shape.blocks // shape.parts
    members = requests_by_part(running, shape)
    blocks = [range(p * each, (p + 1) * each) for p in range(shape.parts)]
    if stay and all(assign_lanes(*part, shape.group) for part in zip(members, blocks, strict=True)):
        return None
    for request in running.values():
        request.lane = None
    for part in zip(members, blocks, strict=True):
        assign_lanes(*part, shape.group)
    order = np.zeros(shape.blocks, np.int32)
    for slot, block in old_blocks.items():
        order[running[slot].lane[0]] = block
    return order


def assign_lanes(members: Sequence[Request], blocks: range, group: int) -> bool:
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


def block_table(running: dict[int, Request], shape: SlotShape) -> np.ndarray:
    """Return the lane of each slot, int32[rows], counted through the blocks of its part. An idle slot has a number
    beyond the last lane.
    """
    count = shape.blocks // shape.parts * shape.group
    table = np.full(shape.rows, count, np.int32)
    for slot, request in running.items():
        block, lane = request.lane
        table[slot] = block * shape.group + lane - shape.part(slot) * count
    return table


def move_slots(
    running: dict[int, Request], old: int, rows: int, parts: int
) -> tuple[np.ndarray, np.ndarray, dict[int, Request]]:
    """Return the old slot that each of ``rows`` slots takes over, int32[rows], negative for an idle one; the row of its
    part from which its keys and values move, int32[rows], negative if they stay; and the requests by their new slot.
    Each stays in its part, which must have room for all its requests, and keeps its place there if that remains.
    """
    order = np.full(rows, -1, np.int32)
    slots_before = old // parts
    slots_after = rows // parts
    running_after = {}
    for part in range(parts):
        occupied = [place for place in range(slots_before) if part * slots_before + place in running]
        free = collections.deque(place for place in range(slots_after) if place not in occupied)
        for place in occupied:
            slot = part * slots_after + (place if place < slots_after else free.popleft())
            order[slot] = part * slots_before + place
            running_after[slot] = running[order[slot]]
    for slot, request in running_after.items():
        request.slot = slot
    places = np.arange(rows, dtype=np.int32) % slots_after
    stays = (order < 0) | (order % slots_before == places)
    source = np.where(stays, np.int32(-1), order % slots_before).astype(np.int32)
    return order, source, running_after
