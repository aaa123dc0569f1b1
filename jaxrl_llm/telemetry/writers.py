"""The owner of a run's records: metrics.jsonl, samples.jsonl, TensorBoard curves and, where asked for, wandb."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import open_nofollow
from jaxrl_llm.telemetry.reporter import Reporter
from jaxrl_llm.telemetry.rows import append_rows, cut_after, jsonable, last_row
from jaxrl_llm.telemetry.wandb_run import WandbRun

Scalar = float | int | bool | str | None


class RunWriter:
    """Appends each step's metrics once, wherever they are wanted; construct it on one process of a run only.

    Args:
      run_dir: the run's directory; made if missing.
      resumed_at: the step whose checkpoint the run goes on from: rows of later steps are cut off, so that each step
        stands once. -1 cuts all of them (a run that stopped before its first checkpoint). None is a new run.
      tensorboard: also write curves under ``run_dir/tensorboard``.
      wandb: the project to log to, or None; see ``WandbRun``.
      config: the run's configuration as plain values, shown beside the curves in wandb.
      tell: called with each row once it is on the disk, as it stands there.

    Raises:
      InputError: a new run's directory holds metrics already; a row is no JSON; wandb is asked for and not installed,
        or refuses.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resumed_at: int | None,
        tensorboard: bool = True,
        wandb: str | None = None,
        config: dict[str, Any] | None = None,
        tell: Callable[[dict[str, Any]], None] | None = None,
    ):
        self._run_dir = Path(run_dir)
        wandb_module = import_extra("wandb", "wandb") if wandb else None
        metrics = self._run_dir / "metrics.jsonl"
        samples = self._run_dir / "samples.jsonl"
        _prepare(metrics, samples, resumed_at)
        self._last_step = (last_row(metrics) or {"step": -1})["step"]
        self._wandb = WandbRun(wandb_module, self._run_dir, wandb, config or {}) if wandb_module else None
        self._metrics = open_nofollow(metrics)
        self._samples = open_nofollow(samples)
        self._curves = _tensorboard(self._run_dir, resumed_at) if tensorboard else None
        self._tell = tell
        self._reporter = Reporter(self._run_dir)

    def write(self, step: int, metrics: dict[str, Scalar]) -> None:
        """Append one step's row, ``step`` first; it is on the disk when this returns. NaN and infinity become null.

        Raises:
          ValueError: the step is not later than the last one written.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} is already written: the last row is of step {self._last_step}")
        values = {name: jsonable(value) for name, value in metrics.items() if name != "step"}
        append_rows(self._metrics, [{"step": step, **values}])
        self._last_step = step
        if self._tell is not None:
            self._tell({"step": step, **values})
        if self._curves is not None:
            _add_curves(self._curves, step, values)
        if self._wandb is not None:
            self._wandb.metrics(step, values)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append a step's samples (prompt, completion, reward parts), ``step`` first in each row."""
        append_rows(self._samples, [{"step": step, **row} for row in rows])
        if self._wandb is not None:
            self._wandb.samples(step, rows)

    def report(self) -> None:
        """Begin to write ``report.html`` anew, beside the run; see ``Reporter``."""
        self._reporter.begin(self._last_step)

    def close(self) -> None:
        """Write out what is buffered and let go of the files; further calls do nothing."""
        self._metrics.close()
        self._samples.close()
        if self._curves is not None:
            self._curves.close()
        if self._wandb is not None:
            self._wandb.close()
        self._curves = self._wandb = None
        self._reporter.close()

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self._reporter.finish(self._last_step)
        self.close()


def import_extra(module: str, extra: str) -> ModuleType:
    """An optional package.

    Raises:
      InputError: it is not installed; the line names the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise InputError(f"{module} is not installed: pip install -e '.[{extra}]' in the checkout") from None


def _prepare(metrics: Path, samples: Path, resumed_at: int | None) -> None:
    metrics.parent.mkdir(parents=True, exist_ok=True)
    if resumed_at is not None:
        cut_after(metrics, resumed_at)
        cut_after(samples, resumed_at)
    elif any(path.exists() and path.stat().st_size for path in (metrics, samples)):
        raise InputError(f"{metrics.parent} already holds a run: choose another --run_dir, or remove it")


def _tensorboard(run_dir: Path, resumed_at: int | None) -> Any:
    from tensorboardX import SummaryWriter

    if resumed_at is None:
        return SummaryWriter(str(run_dir / "tensorboard"), flush_secs=10)
    # File names count whole seconds: without the suffix a quick restart would overwrite the curves so far.
    return SummaryWriter(
        str(run_dir / "tensorboard"),
        purge_step=resumed_at + 1,
        flush_secs=10,
        filename_suffix=f".from{resumed_at + 1:09d}",
    )


def _add_curves(curves: Any, step: int, values: dict[str, Scalar]) -> None:
    for name, value in values.items():
        if isinstance(value, str):
            curves.add_text(name, value, step)
        elif value is not None:
            curves.add_scalar(name, float(value), step)
