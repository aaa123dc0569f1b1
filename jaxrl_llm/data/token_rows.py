"""Examples made of rows: token ids of texts, rankings, completions with labels, and solutions in steps."""

import dataclasses
from collections.abc import Iterable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to learn by heart.

    Attributes:
      id: made from the prompt, as a Problem's is; rows of one prompt share it.
      prompt: int32[p], p >= 1, the tokens before the first one that may be learned.
      tokens: int32[t], the tokens after it, with the one that ends the text.
      mask: bool[t], True where a token is learned.
      where: place of the row, such as ``rows.jsonl:3``.
    """

    id: str
    prompt: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    where: str

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the text after it."""
        return len(self.prompt) + len(self.tokens)

    def cut(self, most: int) -> "Text | None":
        """Return the example cut to its first ``most`` tokens; None if none of these is learned."""
        room = max(most - len(self.prompt), 0)
        mask = self.mask[:room]
        return dataclasses.replace(self, tokens=self.tokens[:room], mask=mask) if mask.any() else None


@dataclasses.dataclass(frozen=True)
class Ranked:
    """Completions of one prompt, each better than those after it; two completions make a preference.

    Attributes:
      id, prompt, where: as in Text.
      completions: int32[t] each, with the token that ends it, the best first; at least two, no two equal.
      margin: amount by which the better should win, from the row; 0 if it has none.
    """

    id: str
    prompt: np.ndarray
    completions: tuple[np.ndarray, ...]
    margin: float
    where: str

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the longest completion."""
        return len(self.prompt) + max(len(tokens) for tokens in self.completions)

    def cut(self, most: int) -> "Ranked | None":
        """Return the example with each completion cut to ``most`` tokens with its prompt; None if one is empty or two
        are equal.
        """
        room = max(most - len(self.prompt), 0)
        parts = tuple(tokens[:room] for tokens in self.completions)
        same = len({part.tobytes() for part in parts}) < len(parts)
        return None if same or not room else dataclasses.replace(self, completions=parts)


@dataclasses.dataclass(frozen=True)
class Judged:
    """A completion that is good or bad by itself.

    Attributes:
      id, prompt, where: as in Text.
      tokens: int32[t], with the token that ends it.
      good: its label.
    """

    id: str
    prompt: np.ndarray
    tokens: np.ndarray
    good: bool
    where: str

    @property
    def length(self) -> int:
        """Number of tokens of the prompt and the completion."""
        return len(self.prompt) + len(self.tokens)

    def cut(self, most: int) -> "Judged | None":
        """Return the example cut to its first ``most`` tokens; None if none of the completion is left."""
        room = most - len(self.prompt)
        return dataclasses.replace(self, tokens=self.tokens[:room]) if room > 0 else None


@dataclasses.dataclass(frozen=True)
class Stepped:
    """A completion in steps, with a label of each.

    Attributes:
      id, prompt, where: as in Text.
      tokens: int32[t], the steps, each but the last with its separator, and the token that ends the text.
      ends: int32[k], the index in ``tokens`` of each step's last token, its separator included; rising.
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
        """Number of tokens of the prompt and the steps."""
        return len(self.prompt) + len(self.tokens)

    def cut(self, most: int) -> "Stepped | None":
        """Return the example cut to the steps that end within its first ``most`` tokens; None without any."""
        count = int(np.sum(self.ends < most - len(self.prompt)))
        if not count:
            return None
        ends = self.ends[:count]
        return dataclasses.replace(self, tokens=self.tokens[: ends[-1] + 1], ends=ends, labels=self.labels[:count])


Example = Text | Ranked | Judged | Stepped


def longest(rows: Iterable[Example]) -> tuple[int, str]:
    """Return the number of tokens of the longest row, and its place; 0 and an empty text without rows."""
    return max(((row.length, row.where) for row in rows), key=lambda found: found[0], default=(0, ""))
