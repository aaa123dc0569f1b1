"""Early stopping of sampled completions by the step scores of a process reward model."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.collection.rows import split_steps
from jaxrl_llm.stages.rl.device_model import DeviceModel
from jaxrl_llm.stages.rl.step_rewards import step_ends
from jaxrl_llm.types import Completion, Problem


@dataclasses.dataclass
class FallingSteps:
    """A stopping rule: a completion ends at the step with which the scores of several steps in a row have fallen.

    A step counts once the next has begun: its end is then fixed, and the last step of a completion that has ended by
    itself never stops it. So the end of a completion does not depend on when it is checked.

    Attributes:
      model: a process reward model.
      problems: of each completion, by its number.
      separator: ends a step.
      falls: number of consecutive steps, each with a lower score than the one before, that stop it; at least 1.
      tokenizer: the policy's.
      seen: number of scored steps of each completion, by its number.
      ends: number of tokens that a stopped completion keeps, by its number.
    """

    model: DeviceModel
    problems: Sequence[Problem]
    separator: str
    falls: int
    tokenizer: Any
    seen: dict[int, int] = dataclasses.field(default_factory=dict)
    ends: dict[int, int] = dataclasses.field(default_factory=dict)

    def __call__(self, made: Mapping[int, Completion]) -> dict[int, int]:
        """Return the number of tokens to keep of each stopped completion; the completions must have their texts."""
        longer = {}
        for number, completion in made.items():
            complete = len(split_steps(completion.text, self.separator)) - 1
            if number not in self.ends and complete > max(self.falls, self.seen.get(number, 0)):
                longer[number] = completion
        if longer:
            values = self.model.values([(self.problems[number], c) for number, c in longer.items()])
            for (number, completion), said in zip(longer.items(), values, strict=True):
                ends = step_ends(completion, self.separator, self.tokenizer)[:-1]
                self.seen[number] = len(ends)
                fallen = first_fall(said[ends + 1], self.falls)
                if fallen is not None:
                    self.ends[number] = int(ends[fallen]) + 1
        return {number: self.ends[number] for number in made if number in self.ends}


def first_fall(scores: Sequence[float], falls: int) -> int | None:
    """Return the index of the score that ends the first ``falls`` consecutive falls; None without any.

    >>> first_fall([0.9, 0.8, 0.85, 0.6, 0.5, 0.4], 2)
    4
    """
    run = 0
    for index in range(1, len(scores)):
        run = run + 1 if scores[index] < scores[index - 1] else 0
        if run == falls:
            return index
    return None
