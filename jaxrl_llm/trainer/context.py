"""State of a run in progress: the parts fixed while it trains, its position, the host state in its checkpoints, and
requests to it.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxrl_llm import codec
from jaxrl_llm.checkpoints.integrity import mark
from jaxrl_llm.checkpoints.snapshots import BEST, CHECKPOINTS, keep_only, kept
from jaxrl_llm.checkpoints.store import Checkpoints, steps_in
from jaxrl_llm.config import Configuration, Start, to_json
from jaxrl_llm.config.origin import recorded_best
from jaxrl_llm.diagnosis import FindingTracker
from jaxrl_llm.diagnosis.history import ROLLED_BACK
from jaxrl_llm.errors import InputError, one_line
from jaxrl_llm.rules import ASKED, BY_HAND, PHASE, Memory
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.stage import Batch, Fingerprints, Stage
from jaxrl_llm.system import lease, storage
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.system.paths import new_file
from jaxrl_llm.system.signals import Preemption
from jaxrl_llm.telemetry import Verbosity
from jaxrl_llm.telemetry.progress import Progress, Schedule
from jaxrl_llm.telemetry.records import RunWriter, logged
from jaxrl_llm.types import TrainState


@dataclasses.dataclass
class LoopState:
    """The host state of the loop, saved with the device state.

    Attributes:
      left: the leftovers of the last batch for the next; None before the first, and if ``ready`` holds the leftovers.
      ready: a batch made ahead for the next step, or None.
      memory: of each rule, and the critic's last measurements.
      coefficients: of the loss, for the next step, where a rule moves them.
      problems: fingerprints of the problems that the run, or its phase, began with; empty between two phases.
      phase: the number of the run's phase, from 0.
    """

    left: Any = None
    ready: Batch | None = None
    memory: Memory = dataclasses.field(default_factory=dict)
    coefficients: dict[str, float] = dataclasses.field(default_factory=dict)
    problems: Fingerprints = dataclasses.field(default_factory=dict)
    phase: int = 0

    @property
    def carried(self) -> Any:
        """The state that the last batch made leaves to the next one."""
        return self.left if self.ready is None else self.ready.left

    @classmethod
    def from_json(cls, data: dict[str, Any], records: Sequence[type]) -> "LoopState":
        """Rebuild the state from the JSON values in a checkpoint. ``records``: the dataclasses in it.

        Raises:
          InputError: it cannot be read.
        """
        try:
            return cls(**codec.from_json(data, records))
        except (ValueError, TypeError) as error:
            reason = one_line(error, 200)
            raise InputError(f"the checkpoint's host state cannot be read ({reason}): remove it") from None


@dataclasses.dataclass(frozen=True)
class RunContext:
    """The parts of a run that stay the same through its segments.

    Attributes:
      run: its settings.
      directory: the run's.
      start: the step of the checkpoint that it resumes from; None for a new run.
      weights: the checkpoint that a new run takes its first weights from; None for those of its model.
      peers: its processes.
      mesh: of its devices.
      schedule: of evaluations and checkpoints.
      store: of checkpoints.
      progress: the display for people.
      writer: of the files; None on all processes but the first.
      sight: the input of guards, on process 0; None without guards.
      stop: whether the run was asked to stop.
    """

    run: Configuration
    directory: Path
    start: int | None
    weights: Start | None
    peers: Peers
    mesh: Any
    schedule: Schedule
    store: Checkpoints
    progress: Progress
    writer: RunWriter | None
    sight: FindingTracker | None
    stop: Preemption

    def late(self, seconds: float = 0.0) -> bool:
        """Whether any process was asked to stop and has no time left for work of this duration."""
        return any(self.peers.gather(self.stop.late(seconds)))


@dataclasses.dataclass
class Cursor:
    """The current position of a run.

    Attributes:
      settings: of its phase.
      tokenizer: of its model.
      stage: makes the steps of the phase.
      state: on the devices.
      host: the host state.
      step: the last one that is made.
      row: the first entries of the next row.
      learning_s: seconds of the last step's updates; infinite before the first one of this process.
    """

    settings: Configuration
    tokenizer: Any
    stage: Stage
    state: TrainState
    host: LoopState
    step: int
    row: dict[str, Any]
    learning_s: float = math.inf


def rows_until(directory: Path, step: int | None, having: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yield the run's rows up to a step; none if the step is None. ``having``: as in ``read_rows``."""
    rows = () if step is None else read_rows(directory / "metrics.jsonl", having)
    return (row for row in rows if row["step"] <= step)


def moved_until(directory: Path, step: int | None, peers: Peers) -> set[int]:
    """Return the run's steps up to this one after which it went back or into another phase; none if it is None."""
    rows = rows_until(directory, step, (PHASE, ROLLED_BACK))
    return set(peers.first(lambda: [row["step"] for row in rows if PHASE in row or ROLLED_BACK in row]))


@contextlib.contextmanager
def opened(
    run: Configuration,
    directory: Path,
    start: int | None,
    resumed: bool,
    weights: Start | None,
    peers: Peers,
    voice: Verbosity,
) -> Generator[RunContext]:
    """Open a run's devices, files and terminal output while it trains; only the first process writes and prints.

    The arguments are fields of ``RunContext``; ``resumed``: it has begun before, with a checkpoint or without one.
    """
    mesh = make_mesh(run.mesh)
    moved = moved_until(directory, start, peers)
    schedule = Schedule(run.steps, run.evaluation.every, run.output.checkpoint_every, moved)
    first_step = (start or 0) + 1
    with (
        Checkpoints(directory / CHECKPOINTS, run.output.keep, schedule.saves) as store,
        jax.set_mesh(mesh),
        contextlib.ExitStack() as stack,
    ):
        writer = None
        if peers.leads:
            stack.enter_context(logged(directory / "log.txt"))
            tracker = FindingTracker(run.steps, rows_until(directory, start))
            progress = stack.enter_context(Progress(schedule, first_step, tracker=tracker, quiet=voice.quiet))
            cut = (-1 if start is None else start) if resumed else None
            warn = functools.partial(progress.note, warning=True)
            writer = RunWriter(directory, cut, run.output.trackers, to_json(run), voice.rows, warn)
            stack.enter_context(writer)
        else:
            progress = stack.enter_context(Progress(schedule, first_step, Console(quiet=True)))
        sight = progress.tracker if run.rules.guards else None
        stop = Preemption(functools.partial(progress.note, warning=True), run.output.grace_s)
        yield RunContext(run, directory, start, weights, peers, mesh, schedule, store, progress, writer, sight, stop)


UNDERWAY = "underway.json"
"""A file in the run's folder: the host state of a step that was stopped within its sampling, and the checkpoint that
the step begins with."""


def keep_underway(directory: Path, step: int, host: dict[str, Any]) -> None:
    """Write the host state for the step after ``step``, which has a checkpoint without it."""
    with new_file(directory / UNDERWAY) as part:
        part.write_text(json.dumps({"checkpoint": _checkpoint(directory, step), "host": host}))


def underway_after(directory: Path, step: int) -> dict[str, Any] | None:
    """Return the host state that was written for the step after this one; None without it.

    It belongs to one checkpoint: a run that went back further may have saved this step anew, with other weights.
    """
    found = _underway(directory)
    return found.get("host") if found.get("checkpoint") == _checkpoint(directory, step) else None


def forget_underway(directory: Path) -> None:
    """Remove the host state of a stopped step once there is a later checkpoint."""
    step, _ = _underway(directory).get("checkpoint", (math.inf, ""))
    if step < math.inf and max(steps_in(directory / CHECKPOINTS), default=0) > step:
        (directory / UNDERWAY).unlink(missing_ok=True)


def _underway(directory: Path) -> dict[str, Any]:
    path = directory / UNDERWAY
    return json.loads(path.read_bytes()) if path.exists() else {}


def _checkpoint(directory: Path, step: int) -> list[Any]:
    """Return the step of a checkpoint and what identifies its files."""
    return [step, mark(directory / CHECKPOINTS / str(step))]


def forget_best(directory: Path) -> None:
    """Remove the models of earlier best evaluations, but for those that were the best as of a checkpoint: a run that
    resumes or rolls back to it still has them."""
    if steps_in(directory / BEST) and recorded_best(directory) in (0, *kept(directory)):
        if storage.address(directory):  # its row is there too before an older one goes
            lease.before_commit(directory)
        ends = (*steps_in(directory / CHECKPOINTS), math.inf)
        keep_only(directory / BEST, [recorded_best(directory, last=last) for last in ends])


REQUEST = "reset.json"
"""A file in the run's folder: a request to the run in training, kept until the result is in a checkpoint."""


def ask_reset(directory: Path, with_optimiser: bool) -> None:
    """Request a reset of the reference after the current step of the run, or after its next one once it is resumed."""
    request = {"id": f"{time.time_ns()}-{os.getpid()}", "with_optimiser": with_optimiser}
    with new_file(directory / REQUEST) as part:
        part.write_text(json.dumps(request))


def asked_reset(directory: Path) -> dict[str, Any]:
    """Return the pending request, if any, as input of the rules, which know whether it is new."""
    try:
        return {ASKED: json.loads((directory / REQUEST).read_text())}
    except FileNotFoundError:
        return {}


def forget_settled(directory: Path, memory: Memory) -> None:
    """Remove a request and a stopped step's host state that a complete checkpoint has settled."""
    forget_reset(directory, memory)
    forget_underway(directory)


def forget_reset(directory: Path, memory: Memory) -> None:
    """Remove the request once a complete checkpoint has its result.

    A run that is killed before that resumes without the result, and finds the file again.

    ``memory``: of the run's rules.
    """
    taken = memory.get(BY_HAND, {})
    request = asked_reset(directory).get(ASKED)
    same = request is not None and request["id"] == taken.get("id")
    if same and max(steps_in(directory / CHECKPOINTS), default=0) >= taken["step"]:
        (directory / REQUEST).unlink(missing_ok=True)
