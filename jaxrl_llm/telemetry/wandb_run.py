"""A run on Weights & Biases: its metrics, and at evaluations a table of completions."""

import uuid
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import new_file
from jaxrl_llm.telemetry.rows import jsonable

COLUMNS = ("step", "kind", "prompt", "completion", "reward")
TABLE_ROWS, TABLE_TEXT = 16, 1000
"""Of a table: rows of each kind, and characters of a prompt or a completion."""


class WandbRun:
    """Owner of the run there; a resumed run goes on under the same id.

    Args:
      wandb: the package.
      run_dir: where wandb keeps what it sends, and where the id is.
      project: the project to log to.
      config: the run's configuration as plain values, shown beside the curves.

    Raises:
      InputError: wandb does not let the run begin (it knows no account, say).
    """

    def __init__(self, wandb: ModuleType, run_dir: Path, project: str, config: dict[str, Any]):
        self._table = wandb.Table
        run_id = run_dir / "wandb_id.txt"
        if not run_id.exists():
            with new_file(run_id) as part:
                part.write_text(uuid.uuid4().hex)
        try:
            self._run = wandb.init(
                project=project, name=run_dir.name, dir=str(run_dir), config=jsonable(config),
                id=run_id.read_text().strip(), resume="allow", settings=wandb.Settings(console="off"),
            )  # fmt: skip
        except wandb.Error as error:
            raise InputError(f"wandb: {error} (WANDB_MODE=offline needs no account)") from error
        # wandb drops rows whose own counter goes back, as it does after a resume: our step is the axis instead.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """A step's row, without what is null."""
        self._run.log({"step": step, **{name: value for name, value in values.items() if value is not None}})

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """A table of a step's samples, if an evaluation's answers are among them."""
        data = table(step, rows)
        if data:
            self._run.log({"step": step, "samples": self._table(columns=list(COLUMNS), data=data)})

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


def table(step: int, rows: list[dict[str, Any]]) -> list[list[Any]]:
    """``COLUMNS`` of the first samples of each kind, the evaluation's first; none where it has none."""
    found = [[row for row in rows if row.get("kind") == kind] for kind in ("evaluation", "training")]
    if not found[0]:
        return []
    chosen = [row for of_kind in found for row in of_kind[:TABLE_ROWS]]
    return [[step, row["kind"], _cut(row["prompt"]), _cut(row["completion"]), _reward(row)] for row in chosen]


def _cut(text: str) -> str:
    return text if len(text) <= TABLE_TEXT else f"{text[: TABLE_TEXT - 1]}…"


def _reward(row: dict[str, Any]) -> float | None:
    """The reward of a sample; where its answer was only verified, 1 or 0."""
    return jsonable(float(row["reward"] if "reward" in row else row["correct"]))
