"""Driver of a backend: turns requests into finished episodes, for all callers.

Training, evaluation, collection, reranking and chat all sample through ``respond``; they differ in their requests and
in their use of the completions.
"""

import dataclasses
import enum
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_llm.engine.backend import Backend
from jaxrl_llm.engine.requests import first_tokens, with_tokens
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.types import Completion

Status = Callable[[str], None]
Watch = Callable[[Mapping[Any, Completion]], Mapping[Any, int]]
"""Function from completions with texts, by key, to the number of first tokens to keep of each one to stop early."""
Responder = Callable[[Any, Completion], Sequence[int] | None]
"""Function from an episode's key and a turn that the model has ended with a stop token to the tokens that answer it;
None ends the episode. Turns that end otherwise end the episode without it."""


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
    """

    engine: Backend
    model: Any
    tokenizer: Any
    scorer: Scorer


class Requests:
    """Owner of the open requests to a backend, by keys of the caller's choice.

    Args:
      backend: samples; its earlier requests are dropped.
      sampling: rules.

    Attributes:
      tokens: sampled so far.
    """

    def __init__(self, backend: Backend, sampling: Sampling):
        self.backend = backend
        self.tokens = 0
        self._sampling = sampling
        self._asked: dict[int, tuple[Hashable, Any, int, int]] = {}  # by handle, in the order of the backend's queue
        backend.start(sampling)

    def __len__(self) -> int:
        """Return the number of open requests."""
        return len(self._asked)

    def submit(
        self,
        keys: Sequence[Hashable],
        prompts: Sequence[Any],
        seeds: Sequence[int],
        limits: Sequence[int] | None = None,
        begun: Sequence[Completion | None] | None = None,
        **more: bool,
    ) -> None:
        """Request one completion for each key; the other arguments are those of ``Backend.submit``."""
        limits = [self._sampling.max_new_tokens] * len(prompts) if limits is None else limits
        handles = self.backend.submit(prompts, seeds, limits, begun, **more)
        self._asked |= dict(zip(handles, zip(keys, prompts, seeds, limits, strict=True), strict=True))

    @property
    def keys(self) -> list[Hashable]:
        """Keys of the open requests, in the order in which they were submitted."""
        return [asked[0] for asked in self._asked.values()]

    @property
    def running(self) -> dict[Hashable, Completion]:
        """Completions being sampled now, as far as they are; other requests wait."""
        return {self._asked[handle][0]: completion for handle, completion in self.backend.running}

    def abort(self, keys: Sequence[Hashable]) -> None:
        """Abort the requests of these keys; their completions are returned as they are."""
        ending = set(keys)
        if ending:  # the chunk that is being computed has to be waited for
            self.backend.abort([handle for handle, asked in self._asked.items() if asked[0] in ending])

    def take(self, version: int, responder: Responder | None) -> dict[Hashable, Completion]:
        """Return the finished episodes; an episode with a turn that the responder answers continues after it."""
        over = {}
        for handle, completion in self.backend.collect():
            key, prompt, seed, limit = self._asked.pop(handle)
            ended = responder is None or completion.finish_reason != "stop"  # aborted, repetitive or out of tokens
            answer = None if ended else responder(key, completion)
            more = completion if answer is None else with_tokens(completion, answer, version)
            if answer is None or len(more.tokens) >= limit:
                over[key] = completion
            else:
                self.submit([key], [prompt], [seed], [limit], [more])
        return over


def respond(
    requests: Requests, weights: Any, version: int = 0, responder: Responder | None = None
) -> Iterator[dict[Hashable, Completion]]:
    """Sample until no request is open; yield, before each chunk, the episodes finished since the last one.

    The first yield is empty. At every yield the caller may submit more requests, or abort some.

    Args:
      requests: open requests.
      weights: to sample from.
      version: of the weights; every token sampled is marked with it.
      responder: answers each finished turn, or returns None to end its episode; None: all episodes have one turn.
    """
    over: dict[Hashable, Completion] = {}
    yield over
    while requests:
        over = requests.take(version, responder)  # what was aborted
        if not over:
            requests.tokens += requests.backend.step(weights, version)
            over = requests.take(version, responder)
        yield over


def gather(
    requests: Requests, weights: Any, tokenizer: Any, status: Status = lambda text: None, watch: Watch | None = None
) -> dict[Hashable, Completion]:
    """Sample all open requests; return the completions with texts, by key in the order of submission.

    ``status`` receives progress texts. ``watch`` is called after each chunk with all running completions, and at the
    end with all: a completion that it stops has the reason "aborted".
    """
    keys = requests.keys
    before = requests.tokens
    done: dict[Hashable, Completion] = {}
    for over in respond(requests, weights):
        done |= over
        if requests:
            status(f"sampling {len(done)}/{len(keys)} completions, {requests.tokens - before} tokens")
        if watch is not None:
            requests.abort([*watch(with_texts(requests.running, tokenizer))])
    done = with_texts({key: done[key] for key in keys}, tokenizer)
    if watch is not None:
        ends = watch(done)
        done |= with_texts({key: first_tokens(done[key], end) for key, end in ends.items()}, tokenizer)
    return done


def with_texts(completions: Mapping[Any, Any], tokenizer: Any) -> dict[Any, Completion]:
    """Return the completions with their tokens decoded."""
    if not completions:  # of no text at all tokenizers make one that is empty
        return {}
    texts = tokenizer.batch_decode([c.tokens for c in completions.values()], skip_special_tokens=True)
    return {key: dataclasses.replace(c, text=text) for (key, c), text in zip(completions.items(), texts, strict=True)}
