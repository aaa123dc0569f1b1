"""A run's summary from the files that it left."""

import dataclasses
import math
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.models import DISAGREEMENT
from jaxrl_llm.telemetry.rows import read_rows
from jaxrl_llm.telemetry.summary import Answered, Measured, RunSummary, Took, pair_samples

OTHERS = {
    "eval/pairs/accuracy": ("pairs", True),
    "eval/steps/accuracy": ("steps", True),
    "eval/text/loss": ("text loss", False),
}
"""What tests measure beside the answers to a task: how it is called, and whether it is a share."""


def summarise(run_dir: Path, seconds: float) -> RunSummary:
    """What ``metrics.jsonl`` and ``samples.jsonl`` say of the first and the last evaluation."""
    rows = list(read_rows(run_dir / "metrics.jsonl"))
    steps = rows[-1]["step"] if rows else 0
    took = Took(max((row["step"] for row in rows if row.get("event/resumed")), default=1), steps, seconds)
    summary = RunSummary(str(run_dir), "", took, others=_others(rows), judged=_judged(rows))
    tested = [(row, name) for row in rows if (name := _told(row))]
    if not tested:
        return summary
    (last, name) = tested[-1]
    first = next(row for row in rows if name in row)  # a phase may test on other tasks
    task, _, kind = name.removeprefix("eval/").rpartition("/")
    measure = "accuracy" if kind == "pass@1" else "reward"
    summary = dataclasses.replace(summary, task=task, measure=measure, after=last[name])
    if first is last:
        return summary
    answers = list(read_rows(run_dir / "samples.jsonl"))
    pairs = pair_samples(_answered(answers, first["step"]), _answered(answers, last["step"]))
    counts = [last[count] for count in last if count.startswith("eval/") and count.endswith("/problems")]
    return dataclasses.replace(summary, before=first[name], pairs=pairs, problems=int(sum(counts)))


def _judged(rows: list[dict[str, Any]]) -> tuple[tuple[int, float, float, float | None], ...]:
    """Step, mean score and accuracy of every row that has both, and by how much the models of an ensemble differ."""
    found = [(row["step"], row.get("reward_model/mean"), row.get("reward/accuracy"), _differ(row)) for row in rows]
    return tuple(
        (step, score, right, differ) for step, score, right, differ in found if score is not None and right is not None
    )


def _differ(row: dict[str, Any]) -> float | None:
    """The first of its disagreements between reward models."""
    names = (name for name in row if name.startswith("reward/") and name.endswith(f"/{DISAGREEMENT}"))
    return row.get(next(names, ""))


def _others(rows: list[dict[str, Any]]) -> tuple[Measured, ...]:
    """The other measures, of the first and the last row that has them."""
    found = []
    for name, (called, share) in OTHERS.items():
        values = [row[name] for row in rows if name in row]
        if values:
            found.append(Measured(called, values[0] if len(values) > 1 else None, values[-1], share))
    return tuple(found)


def _told(row: dict[str, Any]) -> str:
    """The metric that sums a row's evaluation up: the accuracy, or the reward where nothing is verified; of several
    tasks the average, which stands first. Empty where there is none."""
    names = (name for name in row if name.startswith("eval/") and name.endswith(("/pass@1", "/reward")))
    return next(names, "")


def _answered(rows: list[dict[str, Any]], step: int) -> list[Answered]:
    tested = [row for row in rows if row["step"] == step and row["kind"] == "evaluation"]
    return [(row.get("task", ""), row["prompt"], row["completion"], _score(row)) for row in tested]


def _score(row: dict[str, Any]) -> float:
    if "correct" in row:
        return float(row["correct"])
    return math.nan if row["reward"] is None else row["reward"]
