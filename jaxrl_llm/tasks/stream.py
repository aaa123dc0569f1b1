"""Which problem is asked next: an endless stream, whose order is a function of the seed and of what came back."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Group, Problem

Memory = dict[str, Any]
"""What a stream remembers: JSON values and arrays, saved with the run. It is never changed, only replaced."""
OTHERS = "others"
"""Where the memory of a run's only task counts the prompts that asked other tasks, in phases before: its own are
numbered without them."""
COUNTED = "last"
"""What is in the memory of a task that has had a curriculum: the prompt that last asked each problem."""


class PromptStream(Protocol):
    """The order of the problems. Pure: what it remembers is handed in and out, so that a resumed run asks the same."""

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """The problem that is asked as number ``number`` of the run, counted from 0, and what is remembered then."""

    def told(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """What is remembered once these groups of answers are scored."""

    def measured(self, before: Memory, after: Memory) -> dict[str, Any]:
        """Metrics and events of a step, from what was remembered before and after it."""


@dataclasses.dataclass(frozen=True)
class Shuffled:
    """Epochs, each a fresh permutation of all problems; what came back changes nothing.

    Attributes:
      problems: all of them.
      seed: of the permutations.
      counting: goes on where a phase before had a curriculum: with its round, and with its counts.
    """

    problems: Sequence[Problem]
    seed: int
    counting: PromptStream | None = dataclasses.field(default=None, compare=False)

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """The problem at that position of the stream."""
        if self.counting is not None and COUNTED in memory:
            return self.counting.next(number, memory)
        epoch, position = _place(self.seed, number - memory.get(OTHERS, 0), len(self.problems))
        if epoch not in self._order:
            self._order.clear()
            self._order[epoch] = permutation(self.seed, epoch, len(self.problems))
        return self.problems[int(self._order[epoch][position])], memory

    @functools.cached_property
    def _order(self) -> dict[int, np.ndarray]:
        """The permutation of the epoch that is asked now: a stream of its own does not depend on how many there are."""
        return {}

    def told(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """The same, but for what is counted since a phase before."""
        return self.counting.told(memory, groups) if self.counting is not None and COUNTED in memory else memory

    def measured(self, before: Memory, after: Memory) -> dict[str, Any]:
        """Nothing."""
        return {}


def problem_index(seed: int, cursor: int, size: int) -> int:
    """The index, in ``[0, size)``, of the problem at position ``cursor`` of the stream.

    Positions ``e * size`` to ``(e + 1) * size - 1`` are epoch ``e``: a permutation of all problems, fresh for each
    (seed, epoch). A checkpoint needs one integer, the number of prompts consumed.

    Raises:
      InputError: size is 0, or seed or cursor is negative.
    """
    epoch, position = _place(seed, cursor, size)
    return int(permutation(seed, epoch, size)[position])


def _place(seed: int, cursor: int, size: int) -> tuple[int, int]:
    """The epoch, and the position in it."""
    if size < 1 or seed < 0 or cursor < 0:
        raise InputError(f"no problem at seed {seed}, cursor {cursor}, size {size}; size starts at 1, the others at 0")
    return divmod(cursor, size)


@functools.lru_cache(maxsize=8)
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """The numbers below ``size`` in an order of their own for each (seed, epoch); it is shared, so never change it."""
    # Raw bits and a stable sort: NumPy promises their values across versions, and not those of its own shuffle.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    return np.argsort(bits, kind="stable")
