"""A backend without a model: requests take slots and blocks as the engine seats them, and simulated time passes."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.engine.requests import Request, SlotShape
from jaxrl_llm.engine.scheduler import EngineSpec, plan_slots, pop_next
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.models.decode_kernels import columns_read
from jaxrl_llm.types import Completion


@dataclasses.dataclass
class Clock:
    """Simulated seconds."""

    now: float = 0.0


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds that a device's memory takes, at its peak.

    Attributes:
      step: of a decode step, for the weights.
      column: for a column of a slot, or of a block.
    """

    step: float
    column: float


class Slots:
    """A backend without a model: requests in slots and blocks as the engine seats them, and a clock.

    Args:
      build: of the engine; a mesh may be abstract.
      costs: of a decode step.
      tokens: function from a request's seed to the tokens of its completion.
      clock: advanced with every chunk.
    """

    def __init__(self, build: EngineSpec, costs: Costs, tokens: Callable[[int], int], clock: Clock):
        self.slots, self.max_length = build.slots, build.max_length
        self.build, self.costs, self.tokens, self.clock = build, costs, tokens, clock
        self.tally = collections.Counter()  # decode steps, tokens and columns by name: see ``pass_time``
        self.start(Sampling())

    def start(self, sampling: Sampling) -> None:
        """Drop all requests."""
        self.sampling, self.held = sampling, None
        self.queue: collections.deque[Request] = collections.deque()
        self.seated: dict[int, Request] = {}
        self.unread: list[tuple[Request, int, str]] = []  # tokens of the chunk that is under way, and why it ends
        self.finished: list[tuple[int, Completion]] = []
        self.handles = self.slot_steps = 0

    def submit(
        self, prompts: Sequence[Any], seeds: Sequence[int], limits: Sequence[int], begun: Sequence[Completion | None]
    ) -> list[int]:
        """Queue requests."""
        handles = list(range(self.handles, self.handles + len(prompts)))
        self.handles += len(prompts)
        for handle, *asked in zip(handles, prompts, seeds, limits, begun, strict=True):
            self.queue.append(Request(handle, *asked, block_key=asked[0].key))
        return handles

    @property
    def running(self) -> list[tuple[int, Completion]]:
        """Completions so far."""
        return [(request.handle, self.completion(request, "aborted")) for request in self.seated.values()]

    def step(self, model: Any, version: int = 0) -> int:
        """Seat what waits, and let a chunk's time pass; return the tokens that were read, as ``Engine.step`` does."""
        self.version = version
        read = self.read() if self.queue else 0
        taken = pop_next(self.queue, self.seated, self.held, self.slots)
        self.held, self.seated, *_ = plan_slots(
            self.build, self.sampling, self.seated, taken, self.held, bool(self.unread)
        )
        ended = {id(request): (count, why) for request, count, why in self.unread}
        live, sent = [], []
        for request in self.seated.values():
            count, why = ended.get(id(request), (0, ""))
            if not why:
                done = request.columns + count
                left = min(self.tokens(request.seed), request.limit) - done
                new = min(left, self.build.chunk)
                stops = self.tokens(request.seed) <= request.limit
                live.append((request, done))
                sent.append((request, new, "" if new < left else "stop" if stops else "length"))
        steps = max((new for _, new, _ in sent), default=0)
        self.pass_time(self.held, live, steps)
        self.tally["tokens"] += sum(new for _, new, _ in sent)
        read += self.read()
        self.unread = sent
        return read

    def pass_time(self, shape: SlotShape, live: list[tuple[Request, int]], steps: int) -> None:
        """Let ``steps`` decode steps pass, for requests with so many live columns each."""
        form, each = self.build.form, shape.rows // shape.parts
        own, blocks = np.zeros(shape.parts), np.zeros(shape.parts)
        shared: dict[int, tuple[int, int]] = {}
        for request, done in live:
            part = shape.part(request.slot)
            shared[request.lane[0]] = part, request.prompt_columns
            own[part] += 0 if form is None else columns_read(form, done, shape.columns)
        for part, columns in shared.values():
            blocks[part] += 0 if form is None else columns_read(form, columns, shape.prompt_columns)
        if form is None:
            own[:], blocks[:] = each * shape.columns, shape.blocks // shape.parts * shape.prompt_columns
        self.clock.now += steps * (self.costs.step + float((own + blocks).max()) * self.costs.column)
        self.slot_steps += steps * shape.rows
        self.tally.update(
            steps=steps,
            empty=0 if self.queue else steps,
            slots=steps * self.slots,
            read=steps * float((own + blocks).sum()),
            live=steps * (sum(done for _, done in live) + sum(columns for _, columns in shared.values())),
            blocks=len(shared),
            prompts=len({request.block_key for request, _ in live}),
        )

    def read(self) -> int:
        """Take the tokens of the chunk under way."""
        found, self.unread = self.unread, []
        for request, count, why in found:
            request.num_sampled += count
            if why:
                del self.seated[request.slot]
                self.finished.append((request.handle, self.completion(request, why)))
        return sum(count for _, count, _ in found)

    def completion(self, request: Request, reason: str) -> Completion:
        """Return a completion of tokens that say nothing."""
        zeros = np.zeros(request.num_sampled, np.int32)
        piece = Completion(zeros, zeros.astype(np.float32), reason, zeros == 0, zeros + self.version)
        request.chunks = [piece] if request.num_sampled else []
        return request.completion(reason)

    def abort(self, handles: Sequence[int]) -> None:
        """End requests as they are; those that end in the chunk under way have ended."""
        self.read()
        ending = set(handles)
        gone = [request for request in (*self.seated.values(), *self.queue) if request.handle in ending]
        self.finished += [(request.handle, self.completion(request, "aborted")) for request in gone]
        self.seated = {slot: request for slot, request in self.seated.items() if request.handle not in ending}
        self.queue = collections.deque(request for request in self.queue if request.handle not in ending)

    def collect(self) -> list[tuple[int, Completion]]:
        """Return what has ended."""
        done, self.finished = self.finished, []
        return done
