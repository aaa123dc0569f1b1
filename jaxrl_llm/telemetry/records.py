"""What of a step is written down."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.evaluate import Evaluated, Tested
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.samples import advantage_of
from jaxrl_llm.telemetry.writers import RunWriter
from jaxrl_llm.types import Completion, Group

LOGGED_ANSWERS = 200
"""Answers of an evaluation that are written to samples.jsonl at most; its tasks share them."""
LOGGED_TOKENS = 4096
"""Tokens of a step that are written down one by one: about 150 KB."""
DIGITS = 4


@dataclasses.dataclass(frozen=True)
class Learned:
    """What a step has learned from.

    Attributes:
      groups: those to be written down.
      samples: what the learner saw of their completions, in any order.
      spell: the text of each of a completion's tokens; where it has none they are not written one by one.
    """

    groups: Sequence[Group] = ()
    samples: Sequence[Sample] = ()
    spell: Callable[[Sequence[int]], list[str]] = lambda tokens: []


def record(
    writer: RunWriter | None,
    step: int,
    found: Evaluated | Tested | None,
    row: dict[str, Any],
    learned: Learned = Learned(),
) -> None:
    """Write a step's metrics and samples, and after an evaluation the report, where there is a writer."""
    if writer is None:
        return
    lines = training_lines(learned)
    for answers in found.answers if found else ():
        lines += _answers(answers, LOGGED_ANSWERS // len(found.answers))
    writer.samples(step, lines)
    writer.write(step, row)
    if found:
        writer.report()


def training_lines(learned: Learned) -> list[dict[str, Any]]:
    """A line for each completion; of the first ones, up to ``LOGGED_TOKENS``, with what is known of each token."""
    seen = {id(sample.tokens): sample for sample in learned.samples}
    room = LOGGED_TOKENS
    lines = []
    for number, group in enumerate(learned.groups):
        for i, completion in enumerate(group.completions):
            sample = seen.get(id(completion.tokens))
            line = {"kind": "training", "group": number, **_scored(group, i)}
            if sample is not None:
                line["advantage"] = _advantage(sample)
            room -= len(completion.tokens)
            if room >= 0 and (texts := learned.spell(completion.tokens.tolist())):
                line["by_token"] = {"text": texts, **by_token(completion, sample)}
            lines.append(line)
    return lines


def by_token(completion: Completion, sample: Sample | None) -> dict[str, list[Any]]:
    """What is known of each token, by name: numbers of sampler and learner; ``mask``, where the policy did not sample
    all of them; ``counted``, where the loss leaves some of those out."""
    arrays = {"sampler_logp": completion.sampler_logp, **completion.extras, **({} if sample is None else sample.arrays)}
    told: dict[str, list[Any]] = {name: _rounded(x) for name, x in arrays.items() if _numbers(x)}
    if not completion.mask.all():
        told["mask"] = completion.mask.astype(int).tolist()
    if sample is not None and (sample.mask != completion.mask).any():
        told["counted"] = sample.mask.astype(int).tolist()
    return told


def _numbers(array: np.ndarray) -> bool:
    """Whether it has one number for each token; sets and marks are none."""
    return array.ndim == 1 and np.issubdtype(array.dtype, np.floating)


def _rounded(array: np.ndarray) -> list[float]:
    return np.round(array.astype(np.float64), DIGITS).tolist()


def _advantage(sample: Sample) -> float:
    """Of the completion; where each token has its own, their mean over those that the loss counts."""
    advantage = np.asarray(advantage_of(sample), np.float64)
    if advantage.ndim == 0:
        return float(advantage)
    return float(np.sum(advantage * sample.mask) / max(np.sum(sample.mask), 1))


def _scored(group: Group, i: int) -> dict[str, Any]:
    completion = group.completions[i]
    return {
        "task": group.problem.task,
        "prompt": group.problem.prompt[-1]["content"],
        "completion": completion.text,
        "reward": float(group.rewards[i]),
        "parts": {name: float(part[i]) for name, part in group.parts.items()},
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.tokens),
    }


def _answers(found: Evaluated, most: int) -> list[dict[str, Any]]:
    """The first answers to the first problems, and what each of them is worth."""
    lines = []
    for i, (problem, answers) in enumerate(zip(found.problems, found.completions, strict=True)):
        asked = {"kind": "evaluation", "task": found.task, "prompt": problem.prompt[-1]["content"]}
        lines.append(asked | {"completion": answers[0].text} | found.worth(i, 0))
    return lines[:most]
