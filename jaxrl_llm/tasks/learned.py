"""Rows as the supervised stages learn them: values, each made of one row."""

import dataclasses
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to learn by heart.

    Attributes:
      id: made from the prompt, as a Problem's is; rows of one prompt share it.
      prompt: int32[p], p >= 1, what stands before the first token that may be learned.
      tokens: int32[t], what follows it, the token that ends it included.
      mask: bool[t], True where a token is learned.
      where: the row stands, such as ``rows.jsonl:3``.
    """

    id: str
    prompt: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    where: str

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what follows."""
        return len(self.prompt) + len(self.tokens)

    def cut(self, most: int) -> "Text | None":
        """Its first ``most`` tokens; None where nothing of these is learned."""
        room = max(most - len(self.prompt), 0)
        mask = self.mask[:room]
        return dataclasses.replace(self, tokens=self.tokens[:room], mask=mask) if mask.any() else None


@dataclasses.dataclass(frozen=True)
class Ranked:
    """Completions of one prompt, of which each is better than those after it: a preference where they are two.

    Attributes:
      id, prompt, where: as in Text.
      completions: int32[t] each, the token that ends it included, the best first; at least two, no two equal.
      margin: by how much the better should win, as the row says; 0 where it does not.
    """

    id: str
    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    margin: float
    where: str

    @property
    def length(self) -> int:
        """Tokens of the prompt and of the longest completion."""
        return len(self.prompt) + max(len(tokens) for tokens in self.completions)

    def cut(self, most: int) -> "Ranked | None":
        """Each completion up to ``most`` tokens with its prompt; None where that leaves one empty, or two equal."""
        room = max(most - len(self.prompt), 0)
        parts = tuple(tokens[:room] for tokens in self.completions)
        same = len({part.tobytes() for part in parts}) < len(parts)
        return None if same or not room else dataclasses.replace(self, completions=parts)


@dataclasses.dataclass(frozen=True)
class Stepped:
    """A completion in steps, with how good each is.

    Attributes:
      id, prompt, where: as in Text.
      tokens: int32[t], the steps, each but the last with the separator that follows it, and the token that ends all.
      ends: int32[k], the index in ``tokens`` of each step's last token, the separator's where one follows; rising.
      labels: float32[k], in [0, 1]; 1 is a right step.
    """

    id: str
    prompt: np.ndarray
    tokens: np.ndarray
    ends: np.ndarray
    labels: np.ndarray
    where: str

    @property
    def length(self) -> int:
        """Tokens of the prompt and of what follows."""
        return len(self.prompt) + len(self.tokens)

    def cut(self, most: int) -> "Stepped | None":
        """The steps that end within its first ``most`` tokens; None where none does."""
        count = int(np.sum(self.ends < most - len(self.prompt)))
        if not count:
            return None
        ends = self.ends[:count]
        return dataclasses.replace(self, tokens=self.tokens[: ends[-1] + 1], ends=ends, labels=self.labels[:count])


Learned = Text | Ranked | Stepped


def longest(rows: Iterable[Learned]) -> tuple[int, str]:
    """Tokens of the longest row, and where it stands; 0 and nothing where there is none."""
    return max(((row.length, row.where) for row in rows), key=lambda found: found[0], default=(0, ""))
