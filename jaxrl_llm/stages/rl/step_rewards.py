"""Scores of a completion's steps by a process reward model: rewards computed from them, and early stopping by them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from jaxrl_llm.algorithms.preference import solution_score, step_differences
from jaxrl_llm.data.datasets import split_steps, step_lengths
from jaxrl_llm.rewards.functions import StepReward
from jaxrl_llm.rewards.scorer import last_token
from jaxrl_llm.stages.rl.device_model import DeviceModel, Item
from jaxrl_llm.types import Completion, Problem


def by_step(reward: StepReward, model: DeviceModel, tokenizer: Any, items: Sequence[Item]) -> np.ndarray:
    """Return for each completion ``[(index of a step's last token, value), ...]``, as an array of lists [n]."""
    found = np.zeros(len(items), object)
    for place, ((_, completion), values) in enumerate(zip(items, model.values(items), strict=True)):
        ends = step_ends(completion, reward.separator, tokenizer)
        scores = 1 / (1 + np.exp(-values[ends + 1].astype(np.float64)))
        if reward.differences:
            scores = step_differences(scores, reward.start)
        found[place] = [(int(end), float(score)) for end, score in zip(ends, scores, strict=True)]
    return found


def solution_scores(
    model: DeviceModel,
    items: Sequence[Item],
    by: Literal["score", "product", "minimum", "last"],
    separator: str,
    tokenizer: Any,
) -> np.ndarray:
    """Return one score of each completion, float64[n]: of the whole, or from the probabilities of its steps.

    The latter is their product, the lowest or the last (arXiv 2305.20050, section 2.6); 0 without a step.
    """
    if by == "score":
        return np.asarray([values[-1] for values in model.values(items)], np.float64)
    said = by_step(StepReward("", separator=separator), model, tokenizer, items)
    found = [np.asarray([value for _, value in steps], np.float64) for steps in said]
    return np.asarray([solution_score(steps, by) for steps in found], np.float64)


def step_ends(completion: Completion, separator: str, tokenizer: Any) -> np.ndarray:
    """Return the index of each step's last token, int64[k], rising: that of the separator, or of the text's end.

    Steps are those of ``data.datasets.split_steps``: a part of only white space belongs to the step before.
    """
    text = completion.text
    tokens = completion.tokens.tolist()
    ends = step_lengths(split_steps(text, separator), separator)
    return np.asarray(sorted({last_token(text, tokens, end, tokenizer) for end in ends}), np.int64)


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
