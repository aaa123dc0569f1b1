"""The lines of samples.jsonl: some completions of each step, with the numbers of each token."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.learner import Forward, Sample
from jaxrl_llm.learner.samples import advantage_of
from jaxrl_llm.types import Completion, Group

LOGGED_TOKENS = 4096
"""Most tokens of a step that are written one by one: about 150 KB."""
DIGITS = 4


def shown_places(count: int, most: int, step: int) -> list[int]:
    """Return the places of the groups that a step writes to samples.jsonl, in rotation: the first ones would always
    show only one task of a mixture with a fixed order."""
    return [(step * most + i) % count for i in range(min(most, count))]


def training_lines(
    groups: Sequence[Group], samples: Sequence[Sample], spell: Callable[[Sequence[int]], list[str]]
) -> list[dict[str, Any]]:
    """Return a line for each completion; the first ones, up to ``LOGGED_TOKENS`` tokens, have values of each token.

    Args:
      groups: the groups to write down.
      samples: the learner's samples of their completions, each with its place among these groups.
      spell: returns the text of each token of a completion; if empty, tokens are not written one by one.
    """
    sample_by_place = {sample.place: sample for sample in samples}
    tokens_left = LOGGED_TOKENS
    lines = []
    for number, group in enumerate(groups):
        for i, completion in enumerate(group.completions):
            sample = sample_by_place.get((number, i))
            line = {
                "kind": "training",
                "group": number,
                "task": group.problem.task,
                "prompt": group.problem.prompt[-1]["content"],
                "completion": completion.transcript,
                "reward": float(group.rewards[i]),
                "parts": {name: float(part[i]) for name, part in group.parts.items()},
                "finish_reason": completion.finish_reason,
                "tokens": completion.length,
                **completion.played,
            }
            if sample is not None:  # where each token has its own advantage, their mean over those that count
                advantage = np.asarray(advantage_of(sample), np.float64)
                counted = np.broadcast_to(sample.mask, advantage.shape) if advantage.ndim else np.ones(())
                line["advantage"] = float(np.sum(advantage * counted) / max(np.sum(counted), 1))
            tokens_left -= len(completion.tokens)
            if tokens_left >= 0 and (texts := spell(completion.tokens.tolist())):
                line["by_token"] = {"text": texts, **token_numbers(completion, sample)}
            lines.append(line)
    return lines


def token_numbers(completion: Completion, sample: Sample | None) -> dict[str, list[Any]]:
    """Return the values of each token by name: numbers of sampler and learner; ``mask``, if the policy did not sample
    all tokens; ``counted``, if the loss leaves out some of those.
    """
    arrays = {"sampler_logp": completion.sampler_logp, **completion.extras, **({} if sample is None else sample.arrays)}
    numbers: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        if array.ndim == 1 and np.issubdtype(array.dtype, np.floating):  # sets and marks are no numbers of tokens
            numbers[name] = np.round(array.astype(np.float64), DIGITS).tolist()
    if not completion.mask.all():
        numbers["mask"] = completion.mask.astype(int).tolist()
    if sample is not None and (sample.mask != completion.mask).any():
        numbers["counted"] = sample.mask.astype(int).tolist()
    return numbers


def samples_at(places: Sequence[int], samples: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return the learner's samples of the groups at these places of a step, with their places renumbered."""
    order = {place: number for number, place in enumerate(places)}
    return [
        dataclasses.replace(sample, place=(order[sample.place[0]], sample.place[1]))
        for group in samples
        for sample in group
        if sample.place is not None and sample.place[0] in order
    ]


def with_ratios(samples: Sequence[Sample], algorithm: Algorithm, forward: Forward, policy: Any) -> list[Sample]:
    """Add ``ratio``, of the current policy to the sampler, and ``clipped``, 1 where the surrogate bounds it.

    ``clipped`` is added only for algorithms with bounds on token ratios alone. Both are NaN where the loss does not
    count a token.
    """
    with_arrays = []
    for sample, logp in zip(samples, forward.by_sample(policy, samples), strict=True):
        ratio = np.exp(np.where(sample.mask, logp - sample.arrays["sampler_logp"], np.nan))
        arrays = {"ratio": ratio}
        if algorithm.ratio.level == "token" and getattr(algorithm.surrogate, "bounds_ratio", True):
            bounds = algorithm.surrogate.clipped(ratio, np.asarray(advantage_of(sample)))
            arrays["clipped"] = np.where(sample.mask, np.logical_or(*bounds), np.nan)
        with_arrays.append(sample.with_arrays(**arrays))
    return with_arrays
