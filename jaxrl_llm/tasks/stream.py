"""Prompt streams: an endless order of problems, a function of the seed and of the results so far.

``Shuffled`` asks the problems of one task in epochs, ``curriculum.Scheduled`` by a curriculum, ``Interleaved`` those of
several tasks, each with its exact share.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Group, Problem

Memory = dict[str, Any]
"""Memory of a stream: JSON values and arrays, saved with the run. It is never changed, only replaced."""
OTHERS = "others"
"""Key, in the memory of a run's only task, of the number of prompts that asked other tasks in earlier phases: the
task's own prompts are numbered without them.
"""
COUNTED = "last"
"""Key, in the memory of a task that has had a curriculum, of the prompt that last asked each problem."""
NONE = -1
"""Value in place of a prompt's number if there was no prompt."""
ASKED = "asked"
"""Key, in the memory of a mixture, of the number of prompts asked of each task; the memory of each stream is under
``STREAMS``, and the counts from before the present shares under ``BEFORE``.
"""
STREAMS = "streams"
BEFORE = "before"
TOLERANCE = 1e-9
"""Rounding error allowed in shares, which are not exact fractions."""


class PromptStream(Protocol):
    """Protocol of an order of problems. Pure: memory is passed in and returned, so that a resumed run asks equal
    problems.
    """

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """Return the problem of prompt ``number`` of the run, counted from 0, and the new memory."""

    def observe(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """Return the memory after these groups of answers are scored."""

    def learns(self, memory: Memory) -> bool:
        """Whether what is observed changes what is asked next, or its order in the memory."""
        return True

    def metrics(self, before: Memory, after: Memory) -> dict[str, Any]:
        """Return metrics and events of a step, from the memory before and after it."""
        return {}


@dataclasses.dataclass(frozen=True)
class Shuffled(PromptStream):
    """Stream in epochs, each a fresh permutation of all problems; results do not change it.

    Attributes:
      problems: all of them.
      seed: of the permutations.
      counting: stream that takes over if an earlier phase had a curriculum: it keeps its round and its counts.
    """

    problems: Sequence[Problem]
    seed: int
    counting: PromptStream | None = dataclasses.field(default=None, compare=False)
    _order: dict[int, np.ndarray] = dataclasses.field(default_factory=dict, init=False, compare=False)
    """Cache of the present epoch's permutation, by epoch; one for each stream, however many streams there are."""

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """Return the problem at that position of the stream, and the memory."""
        if self.learns(memory):
            return self.counting.next(number, memory)
        epoch, position = divmod(number - memory.get(OTHERS, 0), len(self.problems))
        if epoch not in self._order:
            self._order.clear()
            self._order[epoch] = permutation(self.seed, epoch, len(self.problems))
        return self.problems[int(self._order[epoch][position])], memory

    def observe(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """Return the memory unchanged, unless an earlier phase had a curriculum: then its counts are updated."""
        return self.counting.observe(memory, groups) if self.learns(memory) else memory

    def learns(self, memory: Memory) -> bool:
        """Whether an earlier phase had a curriculum."""
        return self.counting is not None and COUNTED in memory


def problem_index(seed: int, cursor: int, size: int) -> int:
    """Return the index, in ``[0, size)``, of the problem at position ``cursor`` of the stream.

    Positions ``e * size`` to ``(e + 1) * size - 1`` are epoch ``e``: a permutation of all problems, fresh for each
    (seed, epoch). A checkpoint needs one integer, the number of prompts consumed.

    Raises:
      InputError: size is 0, or seed or cursor is negative.
    """
    if size < 1 or seed < 0 or cursor < 0:
        raise InputError(f"no problem at seed {seed}, cursor {cursor}, size {size}; size starts at 1, the others at 0")
    epoch, position = divmod(cursor, size)
    return int(permutation(seed, epoch, size)[position])


@functools.lru_cache(maxsize=8)
def permutation(seed: int, epoch: int, size: int) -> np.ndarray:
    """Return the numbers below ``size`` in an order of their own for each (seed, epoch); shared, so never change it."""
    # Raw bits and a stable sort: NumPy promises their values across versions, and not those of its own shuffle.
    bits = np.random.PCG64(np.random.SeedSequence((seed, epoch))).random_raw(size)
    return np.argsort(bits, kind="stable")


def drawn(weights: np.ndarray, seed: int, number: int) -> int:
    """Draw an index with probability in proportion to its weight; a function of seed and number."""
    bits = np.random.PCG64(np.random.SeedSequence((seed, number))).random_raw()
    total = np.cumsum(weights)
    # Rounding may reach the total itself, and what has no weight is never drawn.
    found = int(np.searchsorted(total, (bits >> 11) * 2.0**-53 * total[-1], side="right"))
    return min(found, int(np.flatnonzero(weights)[-1]))


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Streams of several tasks: after n prompts a task with share w of the weights has had w n prompts, within one.

    The next task is a function of the counts alone (``turn``), so that no chance moves the balance. Each stream numbers
    its own prompts: its order does not depend on the other streams.

    Attributes:
      streams: by the label of their task.
      weights: positive, by the same labels.
    """

    streams: Mapping[str, PromptStream]
    weights: Mapping[str, float]

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """Return the next problem, from the task that is due, and the new memory."""
        asked = {label: memory.get(ASKED, {}).get(label, 0) for label in self.streams}
        before = memory.get(BEFORE, {})
        label = turn({label: count - before.get(label, 0) for label, count in asked.items()}, self.weights)
        inner = memory.get(STREAMS, {})
        problem, remembered = self.streams[label].next(asked[label], inner.get(label, {}))
        return problem, memory | {ASKED: asked | {label: asked[label] + 1}, STREAMS: inner | {label: remembered}}

    def observe(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """Return the memory after each group is passed to the stream of its task."""
        inner = memory.get(STREAMS, {})
        remembered = {}
        for label in dict.fromkeys(group.problem.task for group in groups):
            own = [group for group in groups if group.problem.task == label]
            remembered[label] = self.streams[label].observe(inner.get(label, {}), own)
        return memory | {STREAMS: inner | remembered}

    def learns(self, memory: Memory) -> bool:
        """Whether any stream does."""
        inner = memory.get(STREAMS, {})
        return any(stream.learns(inner.get(label, {})) for label, stream in self.streams.items())

    def metrics(self, before: Memory, after: Memory) -> dict[str, Any]:
        """Return each stream's metrics as ``task/<label>/...``; events keep their names."""
        found = {}
        for label, stream in self.streams.items():
            of_task = stream.metrics(*(memory.get(STREAMS, {}).get(label, {}) for memory in (before, after)))
            for name, value in of_task.items():
                found[name if name.startswith("event/") else f"task/{label}/{name}"] = value
        return found


Places = Mapping[str, tuple[int, Memory]]
"""Number of prompts that have asked each task, by its label, and the memory of its stream."""


def places_in(memory: Memory, labels: Sequence[str], prompts: int) -> Places:
    """Return the count and memory of each of these tasks, read from a stream's memory.

    ``prompts``: of the run so far, by which those of a single task are numbered.
    """
    if len(labels) > 1:
        asked, streams = memory.get(ASKED, {}), memory.get(STREAMS, {})
        return {label: (asked.get(label, 0), streams.get(label, {})) for label in labels}
    own = {name: value for name, value in memory.items() if name != OTHERS}
    return {label: (prompts - memory.get(OTHERS, 0), own) for label in labels}


def going_on(places: Places, labels: Sequence[str], prompts: int) -> Memory:
    """Return a stream's memory in which each task resumes from its place, or starts if it has none: the inverse of
    ``places_in``. Shares count from here.
    """
    if len(labels) > 1:
        asked = {label: count for label, (count, _) in places.items()}
        return {ASKED: asked, BEFORE: asked, STREAMS: {label: own for label, (_, own) in places.items()}}
    count, own = places.get(labels[0], (0, {}))
    return own | ({OTHERS: prompts - count} if prompts > count else {})


def turn(asked: Mapping[str, int], weights: Mapping[str, float]) -> str:
    """Return the task that is due (R. Tijdeman, The chairman assignment problem, 1980): no count is ever a whole prompt
    away from its share.

    Among the tasks that one more prompt would not put too far ahead, it is the one that would fall behind first.

    Args:
      asked: prompts of each task so far.
      weights: positive.
    """
    if len(weights) == 1:
        return next(iter(weights))
    total = sum(weights.values())
    number = sum(asked.values())
    slack = 1 / (2 * len(weights) - 2)
    due = {}  # after how many prompts the task's share exceeds its count by too much
    for label, weight in weights.items():
        share = weight / total
        if share * (number + 1) - asked[label] >= slack - TOLERANCE:
            due[label] = (1 - slack - share * number + asked[label]) / share
    return min(due, key=due.__getitem__)


def of_tasks(streams: Sequence[tuple[str, float, PromptStream]]) -> PromptStream:
    """Join streams given as (label, weight, stream) into one; a single one is returned as it is."""
    if len(streams) == 1:
        return streams[0][2]
    return Interleaved({label: stream for label, _, stream in streams}, {label: weight for label, weight, _ in streams})
