"""Driver of a backend: turns requests into finished episodes. All callers sample through ``generate_stream``."""

import dataclasses
import enum
import hashlib
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.engine.engine import Backend
from jaxrl_llm.engine.requests import EMPTY, concatenate, first_tokens, last_tokens, row_limit, row_offset, with_tokens
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.types import Completion, Episode

Status = Callable[[str], None]
Watch = Callable[[Mapping[Any, Completion]], Mapping[Any, int]]
"""Function from completions with texts, by key, to the number of first tokens to keep of each one to stop early."""
ENVIRONMENT_WAIT_S = 1.0
"""Longest wait for an environment, in seconds, before the caller is asked again whether to go on."""


class EnvironmentClient(Protocol):
    """The other side of episodes of several turns, such as ``episodes.Episodes``. It answers beside the sampler.
    ``max_turn_tokens``: tokens of one turn at most; 0 for no limit but that of the episode.
    """

    max_turn_tokens: int

    @property
    def preparing(self) -> Collection[Hashable]:
        """Keys of the episodes that begin, or are brought back, beside the sampler; they are open requests too."""
        ...

    def has(self, key: Hashable) -> bool:
        """Whether the request of this key is an episode; others are one turn."""
        ...

    def submit_turn(self, key: Hashable, turn: Completion, limit: int) -> None:
        """Take a turn that the model has ended, whatever ended it; ``limit``: tokens of the whole episode at most."""

    def abort(self, keys: Sequence[Hashable]) -> dict[Hashable, Completion]:
        """Leave the answers to these episodes for later: ``pop_answers`` returns them if they are submitted again.
        Returns those that were in preparation, as they are.
        """
        ...

    def pop_answers(self, wait_s: float) -> dict[Hashable, Completion]:
        """Return the episodes answered since the last call; those with an end are over. Wait ``wait_s`` for one."""
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
    """A model that answers, by its engine and weights, and the scorer of its answers; ``episodes``: of tasks with
    environments or tools, None without such tasks.
    """

    engine: Backend
    model: Any
    tokenizer: Any
    scorer: Scorer
    episodes: Any = None


class OpenRequest(NamedTuple):
    """An open request, for ``limit`` tokens at most; ``partial``: the completion that it resumes, or None."""

    key: Hashable
    prompt: Any
    seed: int
    limit: int
    partial: Completion | None

    def to_row(self, max_turn_tokens: int) -> tuple[Any, int, int, Completion | None]:
        """Return prompt, seed, limit and partial completion of the row that continues it; see ``Completion.forks``.

        A row that begins anew has a seed of its own, since random numbers follow from the seed and the place in the
        row. What it holds beyond the length of the prompt is given as the first tokens of its completion.
        """
        start, limit = 0, self.limit
        if self.partial is not None:
            start, limit = self.partial.last_turn, row_limit(self.partial, self.limit, len(self.prompt))
        if max_turn_tokens:
            limit = min(limit, start + max_turn_tokens)
        if self.partial is None or not self.partial.forks:
            return self.prompt, self.seed, limit, self.partial
        forks, prompt = self.partial.forks, len(self.prompt)
        start = max(forks)
        seed = int.from_bytes(hashlib.sha256(f"{self.seed} {start}".encode()).digest()[:8], "big")
        row = concatenate(with_tokens(EMPTY, forks[start][prompt:]), last_tokens(self.partial, start))
        return forks[start][:prompt], seed, limit + row_offset(self.partial, prompt), row

    def from_row(self, row: Completion) -> Completion:
        """Return the whole completion of which this row is the end."""
        if self.partial is None or not self.partial.forks:
            return row
        start = max(self.partial.forks)
        end = last_tokens(row, start + row_offset(self.partial, len(self.prompt)))
        return concatenate(dataclasses.replace(first_tokens(self.partial, start), episode=self.partial.episode), end)


class OpenRequests:
    """Owner of the open requests to a backend, by keys of the caller's choice.

    Args:
      backend: samples; its earlier requests are dropped.
      environments: answer the model's turns; None: each completion is one turn.

    Attributes:
      num_ended: completions, and turns of episodes, that have ended by themselves.
      environment_wait_s: seconds in which nothing was sampled, since all requests waited for their environments.
    """

    def __init__(self, backend: Backend, sampling: Sampling, environments: EnvironmentClient | None = None):
        self.backend = backend
        self.tokens = self.num_ended = 0
        self.environment_wait_s = 0.0
        self.sampling = sampling
        self._environments = environments
        self._at_backend: dict[int, OpenRequest] = {}  # by handle, in the order of the backend's queue
        self._at_environment: dict[Hashable, tuple[OpenRequest, Completion]] = {}  # with the turn to answer
        self._finished: dict[Hashable, Completion] = {}  # without the backend, and not popped yet
        self._aborting: dict[Hashable, bool] = {}  # not returned by the backend yet; whether to undo
        backend.start(sampling)

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._at_backend) + len(self._at_environment) + len(self._finished) + len(self._preparing)

    @property
    def _preparing(self) -> Collection[Hashable]:
        return () if self._environments is None else self._environments.preparing

    def submit(
        self,
        keys: Sequence[Hashable],
        prompts: Sequence[Any],
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        partials: Sequence[Completion | None] | None = None,
        **options: bool,
    ) -> None:
        """Request one completion for each key; the other arguments are those of ``Backend.submit``. A turn that has
        ended waits for the environment first; an episode that is over is returned as it is.
        """
        limits = [self.sampling.max_new_tokens] * len(prompts) if limits is None else limits
        partials = [None] * len(prompts) if partials is None else partials
        by_kind: dict[bool, list[OpenRequest]] = {False: [], True: []}
        for request in map(OpenRequest, keys, prompts, seeds, limits, partials):
            partial = request.partial or EMPTY
            episode = partial.episode or Episode()
            if episode.end:
                self._finished[request.key] = partial
            elif episode.unanswered:
                self._submit_turn(request, resume_turn(partial, episode))
            else:
                by_kind[self._is_episode(request.key)].append(request)
        for is_episode, requests in by_kind.items():
            if requests:
                max_turn_tokens = self._environments.max_turn_tokens if is_episode else 0
                rows = zip(*(request.to_row(max_turn_tokens) for request in requests), strict=True)
                columns: list[Any] = [[*column] for column in rows]
                keep_prompt = {"keep_prompt": True} if is_episode else {}
                handles = self.backend.submit(*columns, **options, **keep_prompt)
                self._at_backend |= dict(zip(handles, requests, strict=True))

    def _is_episode(self, key: Hashable) -> bool:
        return self._environments is not None and self._environments.has(key)

    def _submit_turn(self, request: OpenRequest, turn: Completion) -> None:
        self._at_environment[request.key] = request, turn
        self._environments.submit_turn(request.key, turn, request.limit)

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the open requests: those at the backend in the order of submission, then the others."""
        submitted = [request.key for request in self._at_backend.values()]
        return [*submitted, *self._at_environment, *self._finished, *self._preparing]

    @property
    def episodes(self) -> dict[Hashable, Completion]:
        """Running episodes, up to the environment's last answer; those in their first turn are left out."""
        requests = [*self._at_backend.values(), *(request for request, _ in self._at_environment.values())]
        return {r.key: r.partial for r in requests if r.partial is not None and r.partial.episode}

    @property
    def running(self) -> dict[Hashable, Completion]:
        """Unfinished completions as far as they are: those being sampled, and all episodes after their first turn."""
        rows = ((self._at_backend[handle], row) for handle, row in self.backend.running)
        sampled = {request.key: request.from_row(row) for request, row in rows}
        return self.episodes | sampled | {key: turn for key, (_, turn) in self._at_environment.items()}

    def abort(self, keys: Sequence[Hashable], undo: bool = False) -> None:
        """Abort the requests of these keys; their completions are returned as they are. With ``undo`` a turn that is
        being sampled loses its tokens: all of them are sampled in one way whenever the run is stopped.
        """
        aborted = set(keys)
        for key in [key for key in self._at_environment if key in aborted]:
            self._finished[key] = suspend_turn(self._at_environment.pop(key)[1])
        if self._environments is not None:
            self._finished |= self._environments.abort([*aborted])
        handles = [handle for handle, request in self._at_backend.items() if request.key in aborted]
        if handles:  # the chunk that is being computed has to be waited for
            self._aborting |= {self._at_backend[handle].key: undo for handle in handles}
            self.backend.abort(handles)

    def step(self, weights: Any, version: int) -> None:
        """Sample a chunk, unless all requests wait for their environments."""
        if self._at_backend:
            self.tokens += self.backend.step(weights, version)

    def pop_finished(self, wait: bool = False) -> dict[Hashable, Completion]:
        """Return the completions that have ended; an episode that its environment answers continues. ``wait``: whether
        to wait for an environment for a while if all requests do.
        """
        finished, self._finished = self._finished, {}
        for handle, row in self.backend.collect():
            request = self._at_backend.pop(handle)
            completion = request.from_row(row)
            is_aborted, undo = request.key in self._aborting, self._aborting.pop(request.key, False)
            self.num_ended += completion.finish_reason != "aborted"
            if completion.finish_reason == "aborted":
                finished[request.key] = (request.partial or EMPTY) if undo else completion
            elif not self._is_episode(request.key):
                finished[request.key] = completion
            elif is_aborted:  # its turn has ended meanwhile, and nobody answers it now
                finished[request.key] = suspend_turn(completion)
            else:
                self._submit_turn(request, completion)
        if self._at_environment or self._preparing:
            finished |= self._pop_answers(wait and not self._at_backend and not finished)
        return finished

    def _pop_answers(self, wait: bool) -> dict[Hashable, Completion]:
        """Return the episodes that are over, and request the next turns of the others that have an answer."""
        started_at = time.perf_counter()
        answered = self._environments.pop_answers(ENVIRONMENT_WAIT_S if wait else 0.0)
        self.environment_wait_s += (time.perf_counter() - started_at) * wait
        finished = {}
        for key, completion in answered.items():
            request, _ = self._at_environment.pop(key)
            if completion.episode is not None and completion.episode.end:
                finished[key] = completion
            else:
                self.submit([key], [request.prompt], [request.seed], [request.limit], [completion])
        return finished


def suspend_turn(turn: Completion) -> Completion:
    """Return a completion whose last turn has ended and waits for its answer."""
    episode = dataclasses.replace(turn.episode or Episode(), unanswered=turn.finish_reason)
    return dataclasses.replace(turn, finish_reason="aborted", episode=episode)


def resume_turn(partial: Completion, episode: Episode) -> Completion:
    """Return a completion of ``suspend_turn`` as it was before."""
    before = dataclasses.replace(episode, unanswered="")
    finish_reason = episode.unanswered
    return dataclasses.replace(partial, finish_reason=finish_reason, episode=None if before == Episode() else before)


def generate_stream(requests: OpenRequests, weights: Any, version: int = 0) -> Iterator[dict[Hashable, Completion]]:
    """Sample until no request is open; yield, before each chunk, the completions finished since the last one. The first
    yield is empty. At every yield the caller may submit more requests, or abort some. Every token sampled is marked
    with ``version``, that of the weights.
    """
    yield {}
    while requests:
        finished = requests.pop_finished()  # what was aborted
        if not finished:
            requests.step(weights, version)
            finished = requests.pop_finished(wait=True)
        yield finished


def generate_all(
    requests: OpenRequests, weights: Any, tokenizer: Any, status: Status = lambda text: None, watch: Watch | None = None
) -> dict[Hashable, Completion]:
    """Sample all open requests; return the completions with texts, by key in the order of submission. ``watch`` gets
    all running completions after each chunk, and at the end all; those that it stops have the reason "aborted".
    """
    keys, stop_ids = requests.keys, requests.sampling.stop_ids
    tokens_before = requests.tokens
    completions: dict[Hashable, Completion] = {}
    for finished in generate_stream(requests, weights):
        completions |= finished
        if requests:
            tokens = requests.tokens - tokens_before
            status(f"sampling {len(completions)}/{len(keys)} completions, {tokens} tokens")
        if watch is not None:
            requests.abort([*watch(with_texts(requests.running, tokenizer, stop_ids))])
    completions = with_texts({key: completions[key] for key in keys}, tokenizer, stop_ids)
    if watch is not None:
        cuts = {key: first_tokens(completions[key], end) for key, end in watch(completions).items()}
        completions |= with_texts(cuts, tokenizer, stop_ids)
    return completions


def with_texts(completions: Mapping[Any, Any], tokenizer: Any, stop_ids: Sequence[int] = ()) -> dict[Any, Completion]:
    """Return the completions with the texts that their tokens spell, of episodes those of the last turn, without the
    end token: one of ``stop_ids``, or the tokenizer's own without any.
    """
    ends = stop_ids or (tokenizer.eos_token_id,)
    turns = {key: c.tokens[c.last_turn if c.episode else 0 :] for key, c in completions.items()}
    return {key: dataclasses.replace(c, text=text_of(tokenizer, turns[key], ends)) for key, c in completions.items()}
