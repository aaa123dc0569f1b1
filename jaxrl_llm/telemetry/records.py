"""A run's records: metrics.jsonl, samples.jsonl, TensorBoard curves, log.txt and, optionally, Weights & Biases."""

import contextlib
import importlib
import logging
import uuid
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers.decoders import DecodeStream

from jaxrl_llm.errors import InputError
from jaxrl_llm.system.json_lines import append_rows, cut_after, jsonable, last_row
from jaxrl_llm.system.paths import new_file, open_nofollow
from jaxrl_llm.telemetry.report import Reporter

SAMPLE_COLUMNS = ("step", "kind", "prompt", "completion", "reward")
TABLE_ROWS, TABLE_TEXT = 16, 1000
"""Limits of a table: rows of each kind, and characters of a prompt or a completion."""


class RunWriter(contextlib.AbstractContextManager):
    """Writer of each step's metrics to all outputs; construct it on one process of a run only.

    Args:
      run_dir: the run's directory; made if missing.
      resumed_at: the step of the checkpoint that the run resumes from: rows of later steps are cut off, so that each
        step appears once. -1 cuts all of them (a run that stopped before its first checkpoint). None is a new run.
      tensorboard: also write curves under ``run_dir/tensorboard``.
      wandb: the project of Weights & Biases to log to, or None.
      config: the run's configuration as plain values, shown next to the curves in wandb.
      tell: called with each row once it is on the disk, as it is written there.

    Raises:
      InputError: a new run's directory holds metrics already; a row is not valid JSON; wandb is not installed, or
        refuses the run.
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
        self._wandb_module: Any = import_extra("wandb", "wandb") if wandb else None
        metrics = self._run_dir / "metrics.jsonl"
        samples = self._run_dir / "samples.jsonl"
        self._run_dir.mkdir(parents=True, exist_ok=True)
        for path in (metrics, samples):
            if resumed_at is not None:
                cut_after(path, resumed_at)
            elif path.exists() and path.stat().st_size:
                raise InputError(f"{self._run_dir} already holds a run: choose another --run_dir, or remove it")
        self._last_step = (last_row(metrics) or {"step": -1})["step"]
        self._block = contextlib.ExitStack()
        self._wandb = wandb_run(self._wandb_module, self._run_dir, wandb, config or {}) if wandb else None
        if self._wandb is not None:
            self._block.callback(self._wandb.finish)
        self._metrics = self._block.enter_context(open_nofollow(metrics))
        self._samples = self._block.enter_context(open_nofollow(samples))
        self._curves: Any = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            after: dict[str, Any] = {}
            if resumed_at is not None:
                # File names count whole seconds: without the suffix a quick restart would overwrite the curves so far.
                after = {"purge_step": resumed_at + 1, "filename_suffix": f".from{resumed_at + 1:09d}"}
            self._curves = SummaryWriter(str(self._run_dir / "tensorboard"), flush_secs=10, **after)
            self._block.callback(self._curves.close)
        self._tell = tell
        self._reporter = self._block.enter_context(contextlib.closing(Reporter(self._run_dir)))

    def write(self, step: int, metrics: dict[str, Any]) -> None:
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
        for name, value in values.items() if self._curves is not None else ():
            if isinstance(value, str):
                self._curves.add_text(name, value, step)
            elif value is not None:
                self._curves.add_scalar(name, float(value), step)
        if self._wandb is not None:
            self._wandb.log({"step": step, **{name: value for name, value in values.items() if value is not None}})

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append a step's samples (prompt, completion, reward parts), ``step`` first in each row.

        Weights & Biases gets a table of them if an evaluation's answers are among them.
        """
        append_rows(self._samples, [{"step": step, **row} for row in rows])
        if self._wandb is not None and (data := table(step, rows)):
            shown = self._wandb_module.Table(columns=list(SAMPLE_COLUMNS), data=data)
            self._wandb.log({"step": step, "samples": shown})

    def report(self) -> None:
        """Start to rewrite ``report.html``, in a separate process; see ``Reporter``."""
        self._reporter.begin(self._last_step)

    def close(self) -> None:
        """Flush and close all files; further calls do nothing."""
        self._block.close()

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self._reporter.finish(self._last_step)
        self.close()


def import_extra(module: str, extra: str) -> ModuleType:
    """Import an optional package.

    Raises:
      InputError: it is not installed; the message names the extra to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        raise InputError(f"{module} is not installed: pip install -e '.[{extra}]' in the checkout") from None


def wandb_run(wandb: ModuleType, run_dir: Path, project: str, config: dict[str, Any]) -> Any:
    """Start a run in Weights & Biases; a resumed run continues under the same id.

    Args:
      wandb: the package.
      run_dir: directory of wandb's files and of the run's id.
      project: the project to log to.
      config: the run's configuration as plain values, shown next to the curves.

    Raises:
      InputError: wandb refuses to start the run (without an account, for example).
    """
    run_id = run_dir / "wandb_id.txt"
    if not run_id.exists():
        with new_file(run_id) as part:
            part.write_text(uuid.uuid4().hex)
    try:
        run = wandb.init(
            project=project, name=run_dir.name, dir=str(run_dir), config=jsonable(config),
            id=run_id.read_text().strip(), resume="allow", settings=wandb.Settings(console="off"),
        )  # fmt: skip
    except wandb.Error as error:
        raise InputError(f"wandb: {error} (WANDB_MODE=offline needs no account)") from error
    # wandb drops rows whose own counter goes back, as it does after a resume: our step is the axis instead.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def table(step: int, rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Return ``SAMPLE_COLUMNS`` of the first samples of each kind, evaluation first; empty without an evaluation."""
    found = [[row for row in rows if row.get("kind") == kind] for kind in ("evaluation", "training")]
    if not found[0]:
        return []
    lines = []
    for row in (row for of_kind in found for row in of_kind[:TABLE_ROWS]):
        texts = (row["prompt"], row["completion"])
        prompt, completion = (x if len(x) <= TABLE_TEXT else f"{x[: TABLE_TEXT - 1]}…" for x in texts)
        # Where an answer was only verified, its reward is 1 or 0.
        reward = jsonable(float(row["reward"] if "reward" in row else row["correct"]))
        lines.append([step, row["kind"], prompt, completion, reward])
    return lines


class _Log(logging.StreamHandler):
    """A log file that ignores write errors: the records, which matter more, report a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


@contextlib.contextmanager
def logged(path: Path) -> Generator[None]:
    """Append the package's log messages to ``path`` within the block, each line with its time."""
    package = logging.getLogger("jaxrl_llm")
    before = package.level, package.propagate
    with open_nofollow(path, "a", "utf-8") as file:
        handler = _Log(file)
        handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False  # some libraries print on the terminal whatever comes to the root
        try:
            yield
        finally:
            package.setLevel(before[0])
            package.propagate = before[1]
            package.removeHandler(handler)


def record(
    writer: RunWriter | None,
    step: int,
    row: dict[str, Any],
    learned: Sequence[dict[str, Any]] = (),
    answered: Sequence[dict[str, Any]] | None = None,
) -> None:
    """Write a step's metrics and samples, and after an evaluation the report, if there is a writer.

    ``learned``: the lines of the step's completions; ``answered``: those of its evaluation, None without one.
    """
    if writer is None:
        return
    writer.samples(step, [*learned, *(answered or ())])
    writer.write(step, row)
    if answered is not None:
        writer.report()


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
    except Exception:  # noqa: BLE001  tokenizers raises no narrower class
        return [tokenizer.decode([token]) for token in tokens]
