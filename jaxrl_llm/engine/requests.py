"""Requests: one completion in the making, and operations on finished ones: truncate, append, resume."""

import collections
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
      pieces: the tokens of each chunk, with their data.
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
    """Join completions, finished as the last is; an extra that only some of them have is 0 in the others."""
    arrays: dict = {name: np.concatenate([getattr(part, name) for part in parts]) for name in ARRAYS}
    extras = {}
    for name, model in collections.ChainMap(*(part.extras for part in reversed(parts))).items():
        own = (part.extras.get(name) for part in parts)
        shapes = ((len(part.tokens), *model.shape[1:]) for part in parts)
        whole = [np.zeros(shape, model.dtype) if x is None else x for x, shape in zip(own, shapes, strict=True)]
        extras[name] = np.concatenate(whole)
    return Completion(**arrays, finish_reason=parts[-1].finish_reason, extras=extras)


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
    cut = {name: getattr(completion, name)[:count] for name in ARRAYS}
    extras = {name: values[:count] for name, values in completion.extras.items()}
    return Completion(**cut, finish_reason="aborted", extras=extras)
