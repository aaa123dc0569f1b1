"""Records of a step: its metrics row and sample lines."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tokenizers.decoders import DecodeStream

from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.samples import advantage_of
from jaxrl_llm.rollout.evaluate import Tested
from jaxrl_llm.telemetry.writers import RunWriter
from jaxrl_llm.types import Completion, Group

LOGGED_ANSWERS = 200
"""Most answers of an evaluation that are written to samples.jsonl; its tasks share them."""
LOGGED_TOKENS = 4096
"""Most tokens of a step that are written one by one: about 150 KB."""
DIGITS = 4


@dataclasses.dataclass(frozen=True)
class Learned:
    """The data of a step's updates.

    Attributes:
      groups: the groups to write down.
      samples: the learner's samples of their completions, each with its place among these groups.
      spell: returns the text of each token of a completion; if empty, tokens are not written one by one.
    """

    groups: Sequence[Group] = ()
    samples: Sequence[Sample] = ()
    spell: Callable[[Sequence[int]], list[str]] = lambda tokens: []


def record(
    writer: RunWriter | None,
    step: int,
    found: Tested | None,
    row: dict[str, Any],
    learned: Learned = Learned(),
) -> None:
    """Write a step's metrics and samples, and after an evaluation the report, if there is a writer."""
    if writer is None:
        return
    lines = training_lines(learned)
    for of_task in found.answers if found else ():
        # The first answers to the first problems, each with its score.
        first = zip(of_task.problems, of_task.completions, strict=True)
        for i, (problem, answers) in enumerate(itertools.islice(first, LOGGED_ANSWERS // len(found.answers))):
            asked = {"kind": "evaluation", "task": of_task.task, "prompt": problem.prompt[-1]["content"]}
            lines.append(asked | {"completion": answers[0].text} | of_task.worth(i, 0))
    writer.samples(step, lines)
    writer.write(step, row)
    if found:
        writer.report()


def training_lines(learned: Learned) -> list[dict[str, Any]]:
    """Return a line for each completion; the first ones, up to ``LOGGED_TOKENS`` tokens, have values of each token."""
    seen = {sample.place: sample for sample in learned.samples}
    room = LOGGED_TOKENS
    lines = []
    for number, group in enumerate(learned.groups):
        for i, completion in enumerate(group.completions):
            sample = seen.get((number, i))
            line = {
                "kind": "training",
                "group": number,
                "task": group.problem.task,
                "prompt": group.problem.prompt[-1]["content"],
                "completion": completion.text,
                "reward": float(group.rewards[i]),
                "parts": {name: float(part[i]) for name, part in group.parts.items()},
                "finish_reason": completion.finish_reason,
                "tokens": len(completion.tokens),
            }
            if sample is not None:  # where each token has its own advantage, their mean over those that count
                advantage = np.asarray(advantage_of(sample), np.float64)
                counted = np.broadcast_to(sample.mask, advantage.shape) if advantage.ndim else np.ones(())
                line["advantage"] = float(np.sum(advantage * counted) / max(np.sum(counted), 1))
            room -= len(completion.tokens)
            if room >= 0 and (texts := learned.spell(completion.tokens.tolist())):
                line["by_token"] = {"text": texts, **by_token(completion, sample)}
            lines.append(line)
    return lines


def by_token(completion: Completion, sample: Sample | None) -> dict[str, list[Any]]:
    """Return the values of each token by name: numbers of sampler and learner; ``mask``, if the policy did not sample
    all tokens; ``counted``, if the loss leaves out some of those.
    """
    arrays = {"sampler_logp": completion.sampler_logp, **completion.extras, **({} if sample is None else sample.arrays)}
    told: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        if array.ndim == 1 and np.issubdtype(array.dtype, np.floating):  # sets and marks are no numbers of tokens
            told[name] = np.round(array.astype(np.float64), DIGITS).tolist()
    if not completion.mask.all():
        told["mask"] = completion.mask.astype(int).tolist()
    if sample is not None and (sample.mask != completion.mask).any():
        told["counted"] = sample.mask.astype(int).tolist()
    return told


def token_texts(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text of each token, special ones included; joined they are the whole text.

    A character of several tokens is the text of the last one, and the others are empty. Some tokenizers cannot tell
    the pieces of bytes that form no characters: then each token is decoded alone.

    Args:
      tokens: ids.
      tokenizer: a fast one of transformers.
    """
    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer.backend_tokenizer, token) or "" for token in tokens]
    except Exception:  # noqa: BLE001  it has no kind of its own
        return [tokenizer.decode([token]) for token in tokens]
