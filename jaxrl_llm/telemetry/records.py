"""A run's records: metrics.jsonl, samples.jsonl, log.txt, and what its trackers get."""

import contextlib
import logging
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from tokenizers.decoders import DecodeStream

from jaxrl_llm.codec import jsonable
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.system.json_lines import append_rows, cut_after, last_row
from jaxrl_llm.system.paths import open_nofollow
from jaxrl_llm.telemetry.report import Reporter
from jaxrl_llm.telemetry.trackers import TrackedRun, Trackers, makers, table

log = logging.getLogger(__name__)


class RunWriter(contextlib.AbstractContextManager):
    """Writer of each step's metrics to all outputs; construct it on one process of a run only.

    Args:
      run_dir: the run's directory; made if missing.
      resumed_at: the step of the checkpoint that the run resumes from: rows of later steps are cut off, so that each
        step appears once. -1 cuts all of them (a run that stopped before its first checkpoint). None is a new run.
      trackers: names of trackers that get each row and completions too, as in ``Output.trackers``.
      config: the run's configuration as plain values, for trackers.
      tell: called with each row once it is on the disk, as it is written there.
      warn: called with one line when a tracker fails.

    Raises:
      InputError: a new run's directory holds metrics already; a row is not valid JSON; a tracker is unknown, not
        installed, or refuses the run.
    """

    def __init__(
        self,
        run_dir: str | Path,
        resumed_at: int | None,
        trackers: Sequence[str] = (),
        config: dict[str, Any] | None = None,
        tell: Callable[[dict[str, Any]], None] | None = None,
        warn: Callable[[str], None] = log.warning,
    ):
        self._run_dir = Path(run_dir)
        made_by = makers(trackers)
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
        run = TrackedRun(self._run_dir, jsonable(config or {}), resumed_at=resumed_at)
        self._trackers = self._block.enter_context(contextlib.closing(Trackers(made_by, run, warn)))
        self._metrics = self._block.enter_context(open_nofollow(metrics))
        self._samples = self._block.enter_context(open_nofollow(samples))
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
        self._trackers.write(step, values)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Append a step's samples (prompt, completion, reward parts), ``step`` first in each row.

        Trackers get some of them if an evaluation's answers are among them.
        """
        append_rows(self._samples, [{"step": step, **row} for row in rows])
        if self._trackers and (shown := table(step, rows)):
            self._trackers.samples(step, shown)

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
        return [text_of(tokenizer, [token]) for token in tokens]
