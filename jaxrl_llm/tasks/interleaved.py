"""Several streams of problems as one, each with its exact share."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.tasks.stream import Memory, PromptStream
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


def going_on(memory: Memory, labels: Sequence[str]) -> Memory:
    """What a mixture remembers that goes on with these tasks of another, by label: their streams go on where they were,
    and the shares count from here."""
    asked = {label: count for label, count in memory[ASKED].items() if label in labels}
    return {
        ASKED: asked,
        BEFORE: asked,
        STREAMS: {label: own for label, own in memory[STREAMS].items() if label in labels},
    }


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
