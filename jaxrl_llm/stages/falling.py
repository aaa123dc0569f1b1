"""Ending answers that a process reward model gives up on, while they are sampled."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.collection.rows import split_steps
from jaxrl_llm.stages.judges import DeviceModel, step_ends
from jaxrl_llm.types import Completion, Problem


@dataclasses.dataclass
class FallingSteps:
    """What ends a completion at the step with which the scores of several in a row have fallen.

    A step counts once another has begun behind it: its end cannot move then, and what is the last step of a completion
    that has ended by itself ends nothing. So where a completion ends does not depend on when it is looked at.

    Attributes:
      model: a process reward model.
      problems: of each completion, by its number.
      separator: ends a step.
      falls: steps in a row whose scores are each lower than the one before, from which on there is no hope; at least 1.
      tokenizer: the policy's.
      seen: steps of each completion that were scored, by its number.
      ends: first tokens that are left of those without hope, by number.
    """

    model: DeviceModel
    problems: Sequence[Problem]
    separator: str
    falls: int
    tokenizer: Any
    seen: dict[int, int] = dataclasses.field(default_factory=dict)
    ends: dict[int, int] = dataclasses.field(default_factory=dict)

    def __call__(self, made: Mapping[int, Completion]) -> dict[int, int]:
        """How many first tokens are left of those of these completions, with their texts, that have no hope."""
        longer = {number: completion for number, completion in made.items() if self._has_news(number, completion)}
        if longer:
            values = self.model.values([(self.problems[number], c) for number, c in longer.items()])
            for (number, completion), said in zip(longer.items(), values, strict=True):
                ends = step_ends(completion, self.separator, self.tokenizer)[:-1]
                self.seen[number] = len(ends)
                fallen = first_fall(said[ends + 1], self.falls)
                if fallen is not None:
                    self.ends[number] = int(ends[fallen]) + 1
        return {number: self.ends[number] for number in made if number in self.ends}

    def _has_news(self, number: int, completion: Completion) -> bool:
        """Whether enough steps are complete, and one that was not scored."""
        complete = len(split_steps(completion.text, self.separator)) - 1
        return number not in self.ends and complete > max(self.falls, self.seen.get(number, 0))


def first_fall(scores: Sequence[float], falls: int) -> int | None:
    """The index of the first score with which so many in a row have each been lower than the one before.

    >>> first_fall([0.9, 0.8, 0.85, 0.6, 0.5, 0.4], 2)
    4
    """
    run = 0
    for index in range(1, len(scores)):
        run = run + 1 if scores[index] < scores[index - 1] else 0
        if run == falls:
            return index
    return None
