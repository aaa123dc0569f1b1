"""Requests: one completion in the making, and operations on finished ones: truncate, append, resume."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import numpy as np

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
      block_key: key of the exact contents of its prompt columns; requests with equal keys may share a block.
      slot: number of its slot.
      lane: its block, and its number among the requests of the block; None until it has one.
      pieces: tokens, log-probabilities, versions and extras of each chunk.
      count: tokens in them.
    """

    handle: int
    prompt: Prompt
    seed: int
    limit: int
    begun: Completion | None = None
    keep: bool = False
    block_key: Hashable = None
    slot: int = -1
    lane: tuple[int, int] | None = None
    pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]] = dataclasses.field(
        default_factory=list
    )
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
        self.pieces.append((tokens, logp, np.full(len(tokens), version, np.int32), extras))
        self.count += len(tokens)

    def completion(self, reason: str) -> Completion:
        """Return the whole completion, with the reason of its end."""
        empty = (np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), {})
        pieces = self.pieces or [empty]
        tokens, logp, version = (np.concatenate([piece[i] for piece in pieces]) for i in range(3))
        extras = {name: np.concatenate([piece[3][name] for piece in pieces]) for name in pieces[0][3]}
        new = Completion(tokens, logp, reason, np.ones(len(tokens), bool), version, extras)
        return new if self.begun is None else joined(self.begun, new)


def joined(first: Completion, second: Completion) -> Completion:
    """Join two completions, finished as the second is; an extra that only one of them has is 0 in the other."""
    extras = {}
    for name, model in {**first.extras, **second.extras}.items():
        lacking = [np.zeros((len(part.tokens), *model.shape[1:]), model.dtype) for part in (first, second)]
        own = [part.extras.get(name, zeros) for part, zeros in zip((first, second), lacking, strict=True)]
        extras[name] = np.concatenate(own)
    fields = ("tokens", "sampler_logp", "mask", "version")
    tokens, logp, mask, version = (np.concatenate([getattr(first, f), getattr(second, f)]) for f in fields)
    return Completion(tokens, logp, second.finish_reason, mask, version, extras)


def with_tokens(completion: Completion, tokens: Sequence[int], version: int = 0) -> Completion:
    """Append tokens that no policy sampled (a tool's output): masked, of log-probability 0."""
    ids = np.asarray(tokens, np.int32).reshape(-1)
    count = len(ids)
    given = Completion(
        ids, np.zeros(count, np.float32), "aborted", np.zeros(count, bool), np.full(count, version, np.int32)
    )
    return joined(completion, given)


def first_tokens(completion: Completion, count: int) -> Completion:
    """Truncate a completion after ``count`` tokens, so that a branch can resume there."""
    fields = ("tokens", "sampler_logp", "mask", "version")
    cut = {name: getattr(completion, name)[:count] for name in fields}
    extras = {name: values[:count] for name, values in completion.extras.items()}
    return Completion(**cut, finish_reason="aborted", extras=extras)
