"""What of a step is written down."""

from typing import Any

from jaxrl_llm.evaluate import Evaluated, Tested
from jaxrl_llm.telemetry.writers import RunWriter
from jaxrl_llm.types import Group

LOGGED_ANSWERS = 200
"""Answers of an evaluation that are written to samples.jsonl at most."""


def record(
    writer: RunWriter | None, step: int, found: Evaluated | Tested | None, row: dict[str, Any], groups: list[Group]
) -> None:
    """Write a step's metrics and samples, where there is a writer."""
    if writer is None:
        return
    lines = [
        {
            "kind": "training",
            "prompt": g.problem.prompt[-1]["content"],
            "completion": c.text,
            "reward": float(g.rewards[i]),
            "parts": {name: float(part[i]) for name, part in g.parts.items()},
            "finish_reason": c.finish_reason,
            "tokens": len(c.tokens),
        }
        for g in groups
        for i, c in enumerate(g.completions)
    ]
    lines += _answers(found.answers, LOGGED_ANSWERS - len(lines)) if found and found.answers else []
    writer.samples(step, lines)
    writer.write(step, row)


def _answers(found: Evaluated, most: int) -> list[dict[str, Any]]:
    """The first answers to the first problems: whether they are correct, or their rewards where nothing is verified."""
    lines = []
    for i, (problem, answers) in enumerate(zip(found.problems, found.completions, strict=True)):
        line = {"kind": "evaluation", "prompt": problem.prompt[-1]["content"], "completion": answers[0].text}
        if found.correct is None:
            lines.append(line | {"reward": float(found.rewards[i, 0])})
        else:
            lines.append(line | {"correct": bool(found.correct[i, 0])})
    return lines[: max(most, 0)]
