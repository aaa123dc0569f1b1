"""A run's summary from the files that it left."""

from pathlib import Path
from typing import Any

from jaxrl_llm.telemetry.rows import read_rows
from jaxrl_llm.telemetry.summary import Answered, RunSummary, pair_samples


def summarise(run_dir: Path, seconds: float) -> RunSummary:
    """What ``metrics.jsonl`` and ``samples.jsonl`` say of the first and the last evaluation."""
    rows = list(read_rows(run_dir / "metrics.jsonl"))
    tested = [(row["step"], name, value) for row in rows for name, value in row.items() if name.startswith("eval/") and name.endswith("/pass@1")]
    task = tested[0][1].split("/")[1] if tested else ""
    steps = rows[-1]["step"] if rows else 0
    if len({step for step, _, _ in tested}) < 2:
        return RunSummary(str(run_dir), task, steps, seconds, None, tested[-1][2] if tested else None)
    answers = list(read_rows(run_dir / "samples.jsonl"))
    pairs = pair_samples(_answered(answers, tested[0][0]), _answered(answers, tested[-1][0]))
    return RunSummary(str(run_dir), task, steps, seconds, tested[0][2], tested[-1][2], pairs)


def _answered(rows: list[dict[str, Any]], step: int) -> list[Answered]:
    return [(r["prompt"], r["completion"], r["correct"]) for r in rows if r["step"] == step and r["kind"] == "evaluation"]
