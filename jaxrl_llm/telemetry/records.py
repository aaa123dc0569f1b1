"""A run's records: metrics.jsonl, samples.jsonl, log.txt, and what its trackers get."""

import contextlib
import dataclasses
import importlib
import io
import logging
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers.decoders import DecodeStream

from jaxrl_llm.codec import jsonable
from jaxrl_llm.errors import InputError, as_input_error, did_you_mean, one_line, require
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.system.json_lines import append_rows, cut_after, last_row
from jaxrl_llm.system.paths import new_file, open_nofollow
from jaxrl_llm.telemetry.report import Reporter

SAMPLE_COLUMNS = ("step", "kind", "prompt", "completion", "reward")

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker sees it when it starts. ``directory``: the run's; its name is the run's name, and a tracker
    may keep files there. ``config``: as plain values. ``project``: to write to; None for the tracker's own default.
    ``resumed_at``: the step of the checkpoint that the run resumes from: later steps will come again. -1 if it starts
    over in a directory that it has begun before; None for a new run.
    """

    directory: Path
    config: Mapping[str, Any]
    project: str | None = None
    resumed_at: int | None = None

    def identity(self, tracker: str) -> str:
        """Return a random name of the run that stays the same when it resumes, kept in ``TRACKER_id.txt``."""
        path = self.directory / f"{tracker}_id.txt"
        if not path.exists():
            with new_file(path) as part:
                part.write_text(uuid.uuid4().hex)
        return path.read_text().strip()


@runtime_checkable
class Tracker(Protocol):
    """A tracker of one run. Any method may raise: the run then continues without this tracker, after one warning."""

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Take one step's metrics: numbers, booleans and text by name, without those that were not measured."""

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Take a step's completions with an evaluation: ``SAMPLE_COLUMNS``, at most 16 of its and 16 of training."""

    def close(self) -> None:
        """Flush, and end the run."""


class TensorBoard:
    """Curves under ``RUN/tensorboard``."""

    def __init__(self, run: TrackedRun):
        from tensorboardX import SummaryWriter

        options: dict[str, Any] = {}
        if run.resumed_at is not None:
            # File names count whole seconds: without the suffix a quick restart would overwrite the curves so far.
            first = run.resumed_at + 1
            options = {"purge_step": first, "filename_suffix": f".from{first:09d}"}
        self._curves = SummaryWriter(str(run.directory / "tensorboard"), flush_secs=10, **options)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Add a point to each curve; texts are shown as texts."""
        for name, value in values.items():
            if isinstance(value, str):
                self._curves.add_text(name, value, step)
            else:
                self._curves.add_scalar(name, float(value), step)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Show nothing: the report has completions."""

    def close(self) -> None:
        """Close the file."""
        self._curves.close()


class Wandb:
    """A run in Weights & Biases; resumed, it keeps its id. InputError: wandb refuses it (without an account, say)."""

    def __init__(self, run: TrackedRun):
        import wandb

        self._module: Any = wandb
        try:
            self._run = wandb.init(
                project=run.project, name=run.directory.name, dir=str(run.directory), config=dict(run.config),
                id=run.identity("wandb"), resume="allow", settings=wandb.Settings(console="off"),
            )  # fmt: skip
        except wandb.Error as error:
            raise InputError(f"wandb: {error} (WANDB_MODE=offline needs no account)") from error
        # wandb drops rows whose own counter goes back, as it does after a resume: our step is the axis instead.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Log the step's metrics."""
        self._run.log({"step": step, **values})

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Log a table ``samples``."""
        data = [[row[name] for name in SAMPLE_COLUMNS] for row in rows]
        self._run.log({"step": step, "samples": self._module.Table(columns=list(SAMPLE_COLUMNS), data=data)})

    def close(self) -> None:
        """End wandb's run."""
        self._run.finish()


class Trackio:
    """A run in trackio, in its database on this machine unless trackio's own variables name a Space or a server. A
    resumed run continues under the same name, which ends with letters of its identity: trackio knows runs by name. Its
    messages go to log.txt. InputError: trackio refuses to start the run.
    """

    def __init__(self, run: TrackedRun):
        import trackio

        self._module: Any = trackio
        name = f"{run.directory.name}-{run.identity('trackio')[:6]}"
        refusal = as_input_error("trackio refuses the run", "name another project: --output.trackers trackio:PROJECT")
        with refusal, _log_prints():
            project = run.project or "jaxrl_llm"
            self._run = trackio.init(project, name, config=dict(run.config), resume="allow", embed=False)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Log the step's metrics."""
        self._run.log(dict(values), step=step)

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Log a table ``samples``."""
        self._run.log({"samples": self._module.Table(data=rows)}, step=step)

    def close(self) -> None:
        """Write what is waiting, and end trackio's run."""
        with _log_prints():
            self._module.finish()  # as a method of the run it would be repeated when the program ends


TrackerFactory = Callable[[TrackedRun], Tracker]
BUILT_IN: dict[str, tuple[TrackerFactory, str]] = {
    "tensorboard": (TensorBoard, "tensorboardX"), "trackio": (Trackio, "trackio"), "wandb": (Wandb, "wandb"),
}  # fmt: skip
"""Trackers of this package, each with the module that it needs."""


def tracker_factories(trackers: Iterable[str]) -> dict[str, TrackerFactory]:
    """Return the factory of each tracker, with its package imported; InputError for an unknown or missing one. Other
    packages offer trackers as entry points: a name, and a class or function ``TrackedRun -> Tracker``.
    """
    from importlib.metadata import entry_points  # which is slow to import

    offered = [entry for entry in entry_points(group="jaxrl_llm.writers") if entry.name not in BUILT_IN]
    factories: dict[str, TrackerFactory] = {}
    for tracker in trackers:
        name = tracker.partition(":")[0]
        if name in BUILT_IN:
            factories[tracker], module = BUILT_IN[name]
            import_extra(module, name)
            continue
        entries = [entry for entry in offered if entry.name == name]
        names = sorted({*BUILT_IN, *(entry.name for entry in offered)})
        hint = did_you_mean(name, names, f"there are {', '.join(names)}")
        require(bool(entries), f"output.trackers {name!r} is unknown: {hint}")
        values = " and ".join(sorted(entry.value for entry in entries))
        require(len(entries) == 1, f"output.trackers {name!r} is offered twice, by {values}: uninstall one of them")
        with as_input_error(f"output.trackers {name!r} cannot be imported from {values}", "repair it or leave it out"):
            factories[tracker] = entries[0].load()
    return factories


class Trackers:
    """The trackers of a run; one that raises is left out from then on, with one warning. A new run is refused if a
    tracker does not start; a resumed run continues without it.
    """

    def __init__(self, factories: Mapping[str, TrackerFactory], run: TrackedRun, warn: Callable[[str], None]):
        self._warn = warn
        self._trackers: dict[str, Tracker] = {}
        for setting, make in factories.items():
            name, colon, project = setting.partition(":")
            try:
                tracker = make(dataclasses.replace(run, project=project if colon else None))
                fits = isinstance(tracker, Tracker)
                require(fits, f"tracker {name} made a {type(tracker).__name__}, which lacks write, samples or close")
            except InputError as error:
                if run.resumed_at is None:
                    self.close()
                    raise
                self._leave_out(name, error)
            except Exception as error:  # noqa: BLE001  whatever a tracker does, the run continues
                self._leave_out(name, error)
            else:
                self._trackers[name] = tracker

    def __bool__(self) -> bool:
        return bool(self._trackers)

    def write(self, step: int, values: dict[str, Any]) -> None:
        """Give each tracker the step's metrics, without those that are None."""
        measured = {name: value for name, value in values.items() if value is not None}
        self._each("write", lambda tracker: tracker.write(step, dict(measured)))

    def samples(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Give each tracker the completions; see ``Tracker.samples``."""
        self._each("samples", lambda tracker: tracker.samples(step, [dict(row) for row in rows]))

    def close(self) -> None:
        """Close each tracker."""
        self._each("close", lambda tracker: tracker.close())
        self._trackers = {}

    def _each(self, method: str, call: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001  whatever a tracker does, the run continues
                del self._trackers[name]
                self._leave_out(name, error, f" in {method}")

    def _leave_out(self, name: str, error: Exception, where: str = "") -> None:
        self._warn(f"tracker {name} failed{where} and is left out: {one_line(error, 300)}")


def import_extra(module: str, extra: str) -> None:
    """Import an optional package; InputError names the extra to install."""
    try:
        importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == module
        reason = "is not installed" if missing else f"cannot be imported ({one_line(error, 200)})"
        raise InputError(
            f"{module} {reason}: pip install 'jaxrl-llm[{extra}]', or -e '.[{extra}]' in the checkout"
        ) from None


def choose_samples(step: int, rows: list[dict[str, Any]], limit: int = 16, longest: int = 1000) -> list[dict[str, Any]]:
    """Return ``SAMPLE_COLUMNS`` of the first ``limit`` samples of each kind, evaluation first, with texts of at most
    ``longest`` characters; empty without an evaluation.
    """
    by_kind = [[row for row in rows if row.get("kind") == kind] for kind in ("evaluation", "training")]
    if not by_kind[0]:
        return []
    lines = []
    for row in (row for of_kind in by_kind for row in of_kind[:limit]):
        texts = (row["prompt"], row["completion"])
        prompt, completion = (x if len(x) <= longest else f"{x[: longest - 1]}…" for x in texts)
        # Where an answer was only verified, its reward is 1 or 0.
        reward = jsonable(float(row["reward"] if "reward" in row else row["correct"]))
        lines.append(dict(zip(SAMPLE_COLUMNS, (step, row["kind"], prompt, completion, reward), strict=True)))
    return lines


@contextlib.contextmanager
def _log_prints() -> Generator[None]:
    """Send what the block prints to the log in place of stdout, which may carry a run's rows."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            yield
    finally:
        for line in filter(None, printed.getvalue().splitlines()):
            log.info("%s", line)


class RunWriter(contextlib.AbstractContextManager):
    """Writer of each step's metrics to all outputs; construct it on one process of a run only.

    ``run_dir``: made if missing. ``resumed_at``: the step of the checkpoint that the run resumes from: rows of later
    steps are cut off, so that each step appears once. -1 cuts all (a run that stopped before its first checkpoint);
    None is a new run. ``trackers``: names of those that get each row and completions too, with ``config``, plain
    values. ``tell``: called with each row as written, once it is on the disk; ``warn``: with one line when a tracker
    fails. InputError: a new run's directory holds metrics already; a row is not valid JSON; a tracker is unknown, not
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
        made_by = tracker_factories(trackers)
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
        """Append a step's samples (prompt, completion, reward parts), ``step`` first in each row. Trackers get some of
        them if an evaluation's answers are among them.
        """
        append_rows(self._samples, [{"step": step, **row} for row in rows])
        if self._trackers and (sample := choose_samples(step, rows)):
            self._trackers.samples(step, sample)

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
def log_to_file(path: Path) -> Generator[None]:
    """Append the package's log messages to ``path`` within the block, each line with its time."""
    package = logging.getLogger("jaxrl_llm")
    previous = package.level, package.propagate
    with open_nofollow(path, "a", "utf-8") as file:
        handler = _Log(file)
        handler.setFormatter(logging.Formatter("%(asctime)s  %(message)s"))
        package.addHandler(handler)
        package.setLevel(logging.INFO)
        package.propagate = False  # some libraries print on the terminal whatever comes to the root
        try:
            yield
        finally:
            package.setLevel(previous[0])
            package.propagate = previous[1]
            package.removeHandler(handler)


def record_step(
    writer: RunWriter | None,
    step: int,
    row: dict[str, Any],
    training_rows: Sequence[dict[str, Any]] = (),
    evaluation_rows: Sequence[dict[str, Any]] | None = None,
) -> None:
    """Write a step's metrics and samples, and after an evaluation the report, if there is a writer. ``training_rows``:
    of the step's completions; ``evaluation_rows``: of its evaluation, None without one.
    """
    if writer is None:
        return
    writer.samples(step, [*training_rows, *(evaluation_rows or ())])
    writer.write(step, row)
    if evaluation_rows is not None:
        writer.report()


def token_texts(tokens: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text of each token, special ones included; joined they are the whole text. A character of several
    tokens is the text of the last one, and the others are empty. Some tokenizers cannot tell the pieces of bytes that
    form no characters: then each token is decoded alone.
    """
    stream = DecodeStream(skip_special_tokens=False)
    try:
        return [stream.step(tokenizer.backend_tokenizer, token) or "" for token in tokens]
    except Exception:  # noqa: BLE001  tokenizers raises no narrower class
        return [text_of(tokenizer, [token]) for token in tokens]
