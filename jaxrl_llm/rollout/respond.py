"""Driver of a backend: turns requests into finished episodes, for all callers.

Training, evaluation, collection, reranking and chat all sample through ``respond``; they differ in their requests and
in their use of the completions.
"""

import dataclasses
import enum
import hashlib
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.engine.engine import Backend
from jaxrl_llm.engine.requests import EMPTY, first_tokens, joined, last_tokens, row_offset, row_room, with_tokens
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.types import Completion, Episode

Status = Callable[[str], None]
Watch = Callable[[Mapping[Any, Completion]], Mapping[Any, int]]
"""Function from completions with texts, by key, to the number of first tokens to keep of each one to stop early."""
WAIT_S = 1.0
"""Longest wait for an environment, in seconds, before the caller is asked again whether to go on."""


class Responder(Protocol):
    """The other side of episodes of several turns, such as ``episodes.Episodes``. It answers beside the sampler.

    Attributes:
      max_turn_tokens: tokens of one turn at most; 0 for no limit but that of the episode.
    """

    max_turn_tokens: int

    @property
    def preparing(self) -> Collection[Hashable]:
        """Keys of the episodes that begin, or are brought back, beside the sampler; they are open requests too."""
        ...

    def has(self, key: Hashable) -> bool:
        """Whether the request of this key is an episode; others are one turn."""
        ...

    def ask(self, key: Hashable, turn: Completion, limit: int) -> None:
        """Take a turn that the model has ended, whatever ended it; ``limit``: tokens of the whole episode at most."""

    def abort(self, keys: Sequence[Hashable]) -> dict[Hashable, Completion]:
        """Leave the answers to these episodes for later: ``answered`` returns them if they are asked again.

        Returns those that were in preparation, as they are.
        """
        ...

    def answered(self, wait_s: float) -> dict[Hashable, Completion]:
        """Return the episodes answered since the last call: those with an end are over, the others are sampled further.

        ``wait_s``: seconds to wait if there are none.
        """
        ...


class SeedSpace(enum.IntEnum):
    """First request number of each use of the sampler: no two uses ever share a random number."""

    TRAINING = 0
    EVALUATION = 1 << 39
    COLLECTION = 3 << 38
    CONTINUATION = 7 << 37


def request_seed(run_seed: int, number: int) -> int:
    """Return the 64-bit seed of one completion: no two requests of a run share one."""
    return (run_seed & 0xFFFFFF) << 40 | number


@dataclasses.dataclass(frozen=True)
class Answerer:
    """A model that answers, and the scorer of its answers.

    Attributes:
      engine: samples.
      model: weights to sample from.
      tokenizer: of the model.
      scorer: verifies, or scores.
      episodes: of tasks with environments or tools; None without such tasks.
    """

    engine: Backend
    model: Any
    tokenizer: Any
    scorer: Scorer
    episodes: Any = None


class Asked(NamedTuple):
    """One open request.

    Attributes:
      key: of the caller's choice.
      prompt: token ids.
      seed: determines its random numbers.
      limit: maximum number of tokens.
      begun: completion that it resumes; None for a new one.
    """

    key: Hashable
    prompt: Any
    seed: int
    limit: int
    begun: Completion | None

    def turn_limit(self, longest: int) -> int:
        """Return the tokens that it has at most when its present turn ends; ``longest``: of a turn, 0 for any."""
        start, room = 0, self.limit
        if self.begun is not None:
            start, room = self.begun.last_turn, row_room(self.begun, self.limit, len(self.prompt))
        return min(room, start + longest) if longest else room

    def row(self, longest: int) -> tuple[Any, int, int, Completion | None]:
        """Return prompt, seed, limit and beginning of the row in which it goes on; see ``Completion.forks``.

        A row that begins anew has a seed of its own, since random numbers follow from the seed and the place in the
        row. What it holds beyond the length of the prompt is given as the first tokens of its completion.
        """
        limit = self.turn_limit(longest)
        if self.begun is None or not self.begun.forks:
            return self.prompt, self.seed, limit, self.begun
        forks, prompt = self.begun.forks, len(self.prompt)
        start = max(forks)
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {start}".encode()).digest()[:8], "big")
        row = joined(with_tokens(EMPTY, forks[start][prompt:]), last_tokens(self.begun, start))
        return forks[start][:prompt], seed, limit + row_offset(self.begun, prompt), row

    def of_row(self, row: Completion) -> Completion:
        """Return the whole completion that goes on in this row, as far as the row is."""
        if self.begun is None or not self.begun.forks:
            return row
        start = max(self.begun.forks)
        own = last_tokens(row, start + row_offset(self.begun, len(self.prompt)))
        return joined(dataclasses.replace(first_tokens(self.begun, start), episode=self.begun.episode), own)


class Requests:
    """Owner of the open requests to a backend, by keys of the caller's choice.

    Args:
      backend: samples; its earlier requests are dropped.
      sampling: rules.
      responder: answers the model's turns; None: each completion is one turn.

    Attributes:
      tokens: sampled so far.
      ended: completions, and turns of episodes, that have ended by themselves.
      waited_s: seconds in which nothing was sampled, since all requests waited for the responder.
    """

    def __init__(self, backend: Backend, sampling: Sampling, responder: Responder | None = None):
        self.backend = backend
        self.tokens = self.ended = 0
        self.waited_s = 0.0
        self.sampling = sampling
        self._responder = responder
        self._asked: dict[int, Asked] = {}  # by handle, in the order of the backend's queue
        self._waiting: dict[Hashable, tuple[Asked, Completion]] = {}  # turns that the responder answers
        self._over: dict[Hashable, Completion] = {}  # ended without the backend, and not taken yet
        self._ending: dict[Hashable, bool] = {}  # aborted, and not returned by the backend yet; whether undone
        backend.start(sampling)

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._asked) + len(self._waiting) + len(self._over) + len(self._preparing)

    @property
    def _preparing(self) -> Collection[Hashable]:
        return () if self._responder is None else self._responder.preparing

    def submit(
        self,
        keys: Sequence[Hashable],
        prompts: Sequence[Any],
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        begun: Sequence[Completion | None] | None = None,
        **more: bool,
    ) -> None:
        """Request one completion for each key; the other arguments are those of ``Backend.submit``.

        A turn that has ended waits for the responder first; an episode that is over is taken as it is.
        """
        limits = [self.sampling.max_new_tokens] * len(prompts) if limits is None else limits
        begun = [None] * len(prompts) if begun is None else begun
        sampled: dict[bool, list[Asked]] = {False: [], True: []}
        for asked in map(Asked, keys, prompts, seeds, limits, begun):
            begun_with = asked.begun or EMPTY
            episode = begun_with.episode or Episode()
            if episode.end:
                self._over[asked.key] = begun_with
            elif episode.pending:
                self._hear(asked, _resumed(begun_with, episode))
            else:
                sampled[self._plays(asked.key)].append(asked)
        for plays, some in sampled.items():
            if some:
                longest = self._responder.max_turn_tokens if plays else 0
                given = [[*of_all] for of_all in zip(*(one.row(longest) for one in some), strict=True)]
                kept = {"keep_prompt": True} if plays else {}
                handles = self.backend.submit(given[0], given[1], given[2], given[3], **more, **kept)
                self._asked |= dict(zip(handles, some, strict=True))

    def _plays(self, key: Hashable) -> bool:
        return self._responder is not None and self._responder.has(key)

    def _hear(self, asked: Asked, turn: Completion) -> None:
        self._waiting[asked.key] = asked, turn
        self._responder.ask(asked.key, turn, asked.limit)

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the open requests: those at the backend in the order of submission, then those that wait, or end."""
        return [asked.key for asked in self._asked.values()] + [*self._waiting, *self._over, *self._preparing]

    @property
    def episodes(self) -> dict[Hashable, Completion]:
        """Episodes under way, up to the responder's last answer; those in their first turn are left out."""
        every = [*self._asked.values(), *(asked for asked, _ in self._waiting.values())]
        return {one.key: one.begun for one in every if one.begun is not None and one.begun.episode}

    @property
    def running(self) -> dict[Hashable, Completion]:
        """Completions under way, as far as they are: those being sampled, and all episodes after their first turn."""
        running = ((self._asked[handle], row) for handle, row in self.backend.running)
        found = self.episodes | {asked.key: asked.of_row(row) for asked, row in running}
        return found | {key: turn for key, (_, turn) in self._waiting.items()}

    def abort(self, keys: Sequence[Hashable], undo: bool = False) -> None:
        """Abort the requests of these keys; their completions are returned as they are.

        With ``undo`` they are returned as they were requested: a turn that is being sampled loses its tokens, so that
        all of them are sampled in one way whenever the run is stopped.
        """
        ending = set(keys)
        for key in [key for key in self._waiting if key in ending]:
            self._over[key] = _pending(self._waiting.pop(key)[1])
        if self._responder is not None:
            self._over |= self._responder.abort([*ending])
        handles = [handle for handle, asked in self._asked.items() if asked.key in ending]
        if handles:  # the chunk that is being computed has to be waited for
            self._ending |= {self._asked[handle].key: undo for handle in handles}
            self.backend.abort(handles)

    def step(self, weights: Any, version: int) -> None:
        """Sample a chunk, if any request is not waiting for the responder."""
        if self._asked:
            self.tokens += self.backend.step(weights, version)

    def take(self, wait: bool = False) -> dict[Hashable, Completion]:
        """Return the completions that have ended; an episode that the responder answers continues.

        ``wait``: whether to wait for the responder for a while if all requests do.
        """
        over, self._over = self._over, {}
        for handle, row in self.backend.collect():
            asked = self._asked.pop(handle)
            completion = asked.of_row(row)
            ending, undo = asked.key in self._ending, self._ending.pop(asked.key, False)
            self.ended += completion.finish_reason != "aborted"
            if completion.finish_reason == "aborted":
                over[asked.key] = (asked.begun or EMPTY) if undo else completion
            elif not self._plays(asked.key):
                over[asked.key] = completion
            elif ending:  # its turn has ended meanwhile, and nobody answers it now
                over[asked.key] = _pending(completion)
            else:
                self._hear(asked, completion)
        if self._waiting or self._preparing:
            over |= self._answers(wait and not self._asked and not over)
        return over

    def _answers(self, wait: bool) -> dict[Hashable, Completion]:
        """Return the episodes that are over, and request the next turns of those that the responder has answered."""
        began = time.perf_counter()
        answered = self._responder.answered(WAIT_S if wait else 0.0)
        self.waited_s += (time.perf_counter() - began) * wait
        over = {}
        for key, completion in answered.items():
            asked, _ = self._waiting.pop(key)
            if completion.episode is not None and completion.episode.end:
                over[key] = completion
            else:
                self.submit([key], [asked.prompt], [asked.seed], [asked.limit], [completion])
        return over


def _pending(turn: Completion) -> Completion:
    """Return a completion whose last turn has ended and waits for its answer."""
    episode = dataclasses.replace(turn.episode or Episode(), pending=turn.finish_reason)
    return dataclasses.replace(turn, finish_reason="aborted", episode=episode)


def _resumed(begun: Completion, episode: Episode) -> Completion:
    """Return a completion of ``_pending`` as it was before."""
    before = dataclasses.replace(episode, pending="")
    return dataclasses.replace(begun, finish_reason=episode.pending, episode=None if before == Episode() else before)


def respond(requests: Requests, weights: Any, version: int = 0) -> Iterator[dict[Hashable, Completion]]:
    """Sample until no request is open; yield, before each chunk, the episodes finished since the last one.

    The first yield is empty. At every yield the caller may submit more requests, or abort some.

    Args:
      requests: open requests.
      weights: to sample from.
      version: of the weights; every token sampled is marked with it.
    """
    over: dict[Hashable, Completion] = {}
    yield over
    while requests:
        over = requests.take()  # what was aborted
        if not over:
            requests.step(weights, version)
            over = requests.take(wait=True)
        yield over


def gather(
    requests: Requests, weights: Any, tokenizer: Any, status: Status = lambda text: None, watch: Watch | None = None
) -> dict[Hashable, Completion]:
    """Sample all open requests; return the completions with texts, by key in the order of submission.

    ``status`` receives progress texts. ``watch`` is called after each chunk with all running completions, and at the
    end with all: a completion that it stops has the reason "aborted".
    """
    keys, ends = requests.keys, requests.sampling.stop_ids
    before = requests.tokens
    done: dict[Hashable, Completion] = {}
    for over in respond(requests, weights):
        done |= over
        if requests:
            status(f"sampling {len(done)}/{len(keys)} completions, {requests.tokens - before} tokens")
        if watch is not None:
            requests.abort([*watch(with_texts(requests.running, tokenizer, ends))])
    done = with_texts({key: done[key] for key in keys}, tokenizer, ends)
    if watch is not None:
        cuts = watch(done)
        done |= with_texts({key: first_tokens(done[key], end) for key, end in cuts.items()}, tokenizer, ends)
    return done


def with_texts(completions: Mapping[Any, Any], tokenizer: Any, stop_ids: Sequence[int] = ()) -> dict[Any, Completion]:
    """Return the completions with the texts that their tokens spell, of episodes those of the last turn.

    The end token is left out: one of ``stop_ids``, or the tokenizer's own without any.
    """
    ends = stop_ids or (tokenizer.eos_token_id,)
    turns = {key: c.tokens[c.last_turn if c.episode else 0 :] for key, c in completions.items()}
    return {key: dataclasses.replace(c, text=text_of(tokenizer, turns[key], ends)) for key, c in completions.items()}
