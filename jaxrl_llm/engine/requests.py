"""One completion in the making, and what a caller may do with a made one: cut it off, add to it, and go on."""

import dataclasses
import functools
from collections.abc import Hashable, Sequence

import numpy as np

from jaxrl_llm.types import Completion


@dataclasses.dataclass
class Request:
    """What the engine knows of one completion.

    Attributes:
      handle: its name.
      prompt: int32 token ids.
      seed: decides its random numbers.
      limit: tokens of the completion at most, those begun with included.
      begun: what it goes on from; None for a new one.
      keep: whether its keys and values stay when it ends.
      block_key: what its block of prompt columns holds, to the bit; requests of one key may share a block.
      slot: where it runs.
      lane: its block, and its number among those that the block serves; None until it has one.
      pieces: what each chunk sampled: tokens, log-probabilities, versions, extras.
      count: tokens in them.
    """

    handle: int
    prompt: np.ndarray
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
        """Tokens that it was begun with."""
        return 0 if self.begun is None else len(self.begun.tokens)

    @functools.cached_property
    def given(self) -> np.ndarray:
        """int32: the prompt and the tokens that it was begun with. Made once: a queue is looked through often."""
        if self.begun is None:
            return self.prompt
        return np.concatenate([self.prompt, self.begun.tokens.astype(np.int32)])

    def sequence(self) -> np.ndarray:
        """int32: ``given`` and all tokens sampled so far."""
        return np.concatenate([self.given, *(piece[0] for piece in self.pieces)])

    @property
    def columns(self) -> int:
        """Columns of its slot: all tokens but those in its block and the newest, which is decoded next."""
        return self.earlier + self.count

    @property
    def prompt_columns(self) -> int:
        """Columns of its block: the prompt but its last token, so that one path samples all new tokens."""
        return len(self.prompt) - 1

    def sampled_before(self) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that it was begun with and the policy's log-probability of each.

        -inf where no policy sampled it.
        """
        logp = self.begun.extras.get("policy_logp", self.begun.sampler_logp)
        return self.begun.tokens, np.where(self.begun.mask, logp, -np.inf).astype(np.float32)

    def add(self, tokens: np.ndarray, logp: np.ndarray, extras: dict[str, np.ndarray], version: int) -> None:
        """What a chunk sampled."""
        self.pieces.append((tokens, logp, np.full(len(tokens), version, np.int32), extras))
        self.count += len(tokens)

    def completion(self, reason: str) -> Completion:
        """All of it, as it ended."""
        empty = (np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32), {})
        pieces = self.pieces or [empty]
        tokens, logp, version = (np.concatenate([piece[i] for piece in pieces]) for i in range(3))
        extras = {name: np.concatenate([piece[3][name] for piece in pieces]) for name in pieces[0][3]}
        new = Completion(tokens, logp, reason, np.ones(len(tokens), bool), version, extras)
        return new if self.begun is None else joined(self.begun, new)


def joined(first: Completion, second: Completion) -> Completion:
    """One completion of two, finished as the second is; an extra that only one of them has is 0 in the other."""
    names = {**first.extras, **second.extras}
    extras = {
        name: np.concatenate([_extra(part, name, other) for part, other in ((first, second), (second, first))])
        for name in names
    }

    def both(name: str) -> np.ndarray:
        return np.concatenate([getattr(first, name), getattr(second, name)])

    return Completion(
        both("tokens"), both("sampler_logp"), second.finish_reason, both("mask"), both("version"), extras
    )  # fmt: skip


def _extra(part: Completion, name: str, other: Completion) -> np.ndarray:
    if name in part.extras:
        return part.extras[name]
    model = other.extras[name]
    return np.zeros((len(part.tokens), *model.shape[1:]), model.dtype)


def with_tokens(completion: Completion, tokens: Sequence[int], version: int = 0) -> Completion:
    """The completion followed by tokens that no policy sampled (a tool's output): masked, of log-probability 0."""
    ids = np.asarray(tokens, np.int32).reshape(-1)
    count = len(ids)
    given = Completion(
        ids, np.zeros(count, np.float32), "aborted", np.zeros(count, bool), np.full(count, version, np.int32)
    )
    return joined(completion, given)


def first_tokens(completion: Completion, count: int) -> Completion:
    """The completion cut off after ``count`` tokens: a branch goes on from there."""
    extras = {name: values[:count] for name, values in completion.extras.items()}
    cut = (completion.tokens, completion.sampler_logp, completion.mask, completion.version)
    tokens, logp, mask, version = (values[:count] for values in cut)
    return Completion(tokens, logp, "aborted", mask, version, extras)
