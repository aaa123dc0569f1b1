"""Scores of a completion's steps by a process reward model, and rewards computed from them."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jaxrl_llm.algorithms.preference import solution_score, step_differences
from jaxrl_llm.collection.rows import split_steps, step_lengths
from jaxrl_llm.rewards.models import StepReward
from jaxrl_llm.rewards.scores import last_token
from jaxrl_llm.stages.rl.device_model import DeviceModel, Item
from jaxrl_llm.types import Completion


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

    Steps are those of ``collection.rows.split_steps``: a part of only white space belongs to the step before.
    """
    text = completion.text
    tokens = completion.tokens.tolist()
    ends = step_lengths(split_steps(text, separator), separator)
    return np.asarray(sorted({last_token(text, tokens, end, tokenizer) for end in ends}), np.int64)
