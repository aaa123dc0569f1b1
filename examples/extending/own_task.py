"""A source of problems: words to spell backwards.

A source is a frozen dataclass with a ``label`` and ``problems()``: equal settings give equal problems with equal ids.
Nothing goes into the package: ``Task(Backwards(), extractor="whole")``.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import ClassVar

from jaxrl_llm.types import Problem


@dataclasses.dataclass(frozen=True)
class Backwards:
    """Each word of ``length`` letters out of ``letters``, once."""

    letters: str = "abcdef"
    length: int = 3
    label: ClassVar[str] = "backwards"

    def problems(self) -> Iterator[Problem]:
        """Return the problems in the order of the words."""
        for word in map("".join, itertools.product(self.letters, repeat=self.length)):
            yield Problem(word, ({"role": "user", "content": f"{word} backwards:"},), word[::-1], self.label)
