"""Several streams of problems as one, each with its exact share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.tasks.stream import OTHERS, Memory, PromptStream
from jaxrl_llm.types import Group, Problem

ASKED = "asked"
"""Where the memory of a mixture counts the prompts asked of each task; what each stream remembers stands beside it,
under ``STREAMS``; and under ``BEFORE`` what was asked before the present shares held."""
STREAMS = "streams"
BEFORE = "before"


@dataclasses.dataclass(frozen=True)
class Interleaved:
    """Streams of several tasks: after n prompts a task with the share w of the weights has had w n, to less than one.

    Which is asked next is a function of the counts alone (``turn``), so that no chance moves the balance. A stream's
    problems are numbered by itself: its order does not change with what stands beside it.

    Attributes:
      streams: by the label of their task.
      weights: positive, by the same labels.
    """

    streams: Mapping[str, PromptStream]
    weights: Mapping[str, float]

    def next(self, number: int, memory: Memory) -> tuple[Problem, Memory]:
        """The problem that is asked next, of the task whose turn it is."""
        asked = {label: memory.get(ASKED, {}).get(label, 0) for label in self.streams}
        before = memory.get(BEFORE, {})
        label = turn({label: count - before.get(label, 0) for label, count in asked.items()}, self.weights)
        inner = memory.get(STREAMS, {})
        problem, remembered = self.streams[label].next(asked[label], inner.get(label, {}))
        return problem, memory | {ASKED: asked | {label: asked[label] + 1}, STREAMS: inner | {label: remembered}}

    def told(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """What the stream of each group's task remembers then."""
        inner = memory.get(STREAMS, {})
        remembered = {}
        for label in dict.fromkeys(group.problem.task for group in groups):
            own = [group for group in groups if group.problem.task == label]
            remembered[label] = self.streams[label].told(inner.get(label, {}), own)
        return memory | {STREAMS: inner | remembered}

    def measured(self, before: Memory, after: Memory) -> dict[str, Any]:
        """What each stream measures, ``task/<label>/...``; events are all tasks' own."""
        found = {}
        for label, stream in self.streams.items():
            of_task = stream.measured(*(memory.get(STREAMS, {}).get(label, {}) for memory in (before, after)))
            for name, value in of_task.items():
                found[name if name.startswith("event/") else f"task/{label}/{name}"] = value
        return found


Places = Mapping[str, tuple[int, Memory]]
"""How many prompts have asked each task, by its label, and what its stream remembers."""


def places_in(memory: Memory, labels: Sequence[str], prompts: int) -> Places:
    """What a stream of these tasks remembers of each of them.

    ``prompts``: of the run so far, by which those of a single task are numbered.
    """
    if len(labels) > 1:
        asked, streams = memory.get(ASKED, {}), memory.get(STREAMS, {})
        return {label: (asked.get(label, 0), streams.get(label, {})) for label in labels}
    own = {name: value for name, value in memory.items() if name != OTHERS}
    return {label: (prompts - memory.get(OTHERS, 0), own) for label in labels}


def going_on(places: Places, labels: Sequence[str], prompts: int) -> Memory:
    """What a stream of these tasks remembers where each goes on from its place, and begins where it has none: the
    inverse of ``places_in``. Shares count from here."""
    if len(labels) > 1:
        asked = {label: count for label, (count, _) in places.items()}
        return {ASKED: asked, BEFORE: asked, STREAMS: {label: own for label, (_, own) in places.items()}}
    count, own = places.get(labels[0], (0, {}))
    return own | ({OTHERS: prompts - count} if prompts > count else {})


def turn(asked: Mapping[str, int], weights: Mapping[str, float]) -> str:
    """The task whose turn it is (R. Tijdeman, The chairman assignment problem, 1980): no count is ever a whole prompt
    away from its share.

    Of the tasks that may be asked once more without getting too far ahead, the one that would fall behind first.

    Args:
      asked: prompts of each task so far.
      weights: positive.
    """
    if len(weights) == 1:
        return next(iter(weights))
    total = sum(weights.values())
    number = sum(asked.values())
    slack = 1 / (2 * len(weights) - 2)

    def falls_behind(label: str) -> float:
        """How many prompts later its share is too far above its count."""
        share = weights[label] / total
        return (1 - slack - share * number + asked[label]) / share

    due = [label for label in weights if weights[label] / total * (number + 1) - asked[label] >= slack - TOLERANCE]
    return min(due, key=falls_behind)


TOLERANCE = 1e-9
"""Of shares, which are no exact fractions."""


def of_tasks(streams: Sequence[tuple[str, float, PromptStream]]) -> PromptStream:
    """One stream of several (label, weight, stream); a single one stays as it is."""
    if len(streams) == 1:
        return streams[0][2]
    return Interleaved({label: stream for label, _, stream in streams}, {label: weight for label, weight, _ in streams})
