"""What of a step is written down and shown."""

from typing import Any

from jaxrl_llm.evaluate import Evaluated
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.telemetry.writers import RunWriter
from jaxrl_llm.types import Group

LOGGED_ANSWERS = 200
"""Answers of an evaluation that are written to samples.jsonl at most."""


def record(
    writer: RunWriter | None, progress: Progress, step: int, found: Evaluated | None, row: dict[str, Any], groups: list[Group]
) -> None:
    """Write a step's metrics and samples, where there is a writer, and show its line."""
    metrics = {name: value for name, value in row.items()} | (found.metrics() if found else {})
    lines = [
        {"kind": "training", "prompt": g.problem.prompt[-1]["content"], "completion": c.text, "reward": float(g.rewards[i]),
         "parts": {name: float(part[i]) for name, part in g.parts.items()}, "finish_reason": c.finish_reason, "tokens": len(c.tokens)}
        for g in groups for i, c in enumerate(g.completions)
    ]
    for problem, answers, right in zip(found.problems, found.completions, found.correct, strict=True) if found else ():
        if len(lines) < LOGGED_ANSWERS:
            asked, answer = problem.prompt[-1]["content"], answers[0].text
            lines.append({"kind": "evaluation", "prompt": asked, "completion": answer, "correct": bool(right[0])})
    if writer is not None:
        writer.samples(step, lines)
        writer.write(step, metrics)
    progress.step({"step": step} | metrics)
