"""Start or resume a run in its directory: choose and lock it, train, and print the summary."""

import contextlib
import dataclasses
import datetime
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints.dependents import drop_copies, write_note
from jaxrl_llm.checkpoints.snapshots import BEST, CHECKPOINTS, check_whole, ended_at, kept, phase_of
from jaxrl_llm.checkpoints.step_files import fault
from jaxrl_llm.checkpoints.store import steps_in
from jaxrl_llm.codec import digest
from jaxrl_llm.config.origin import origin_of, other_tests, recorded_best, with_step_numbers
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rules import OF_LESSONS, OF_PHASES, Stalls
from jaxrl_llm.rules.guards import (
    ENDED,
    SOLVED,
    ends_run,
    evaluation_result,
    flags_to_continue,
    measured_result,
    surviving_rows,
)
from jaxrl_llm.runs import (
    MODEL_CHECKER,
    decide_model_versions,
    find_run,
    has_started,
    keep_dependencies,
    model_checker,
    parse_start,
    read_started_run,
    step_of,
)
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.system import lease, storage
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.system.paths import REWARD_ERROR, InUse, alone, hint_accelerator, prepare_libraries, writable
from jaxrl_llm.system.setting import parts_of
from jaxrl_llm.system.signals import on_exit
from jaxrl_llm.telemetry import Verbosity
from jaxrl_llm.telemetry.records import tracker_factories

OTHERWISE = "take --fresh for a new folder"
"""An alternative to waiting for a run in use."""
FILE_VISIBLE_S = 20.0
"""The most seconds until another host sees a file that one host writes."""


class Result(int):
    """The exit code of a training (0 done, 3 stopped by a guard, 75 preempted: call it again to resume), with the run.
    ``directory``: the run's; of one in object storage, the folder on this machine with its files but the checkpoints.
    """

    directory: Path

    @classmethod
    def of(cls, code: int, directory: Path) -> "Result":
        """Return the result of a run."""
        instance = cls(code)
        instance.directory = directory
        return instance

    @functools.cached_property
    def history(self) -> list[dict[str, Any]]:
        """The rows of metrics.jsonl, by step."""
        return list(read_rows(self.directory / "metrics.jsonl"))

    @property
    def evaluations(self) -> list[tuple[float, dict[str, Any]]]:
        """The result of each evaluation, higher is better, with its row."""
        scored_rows = [(evaluation_result(row), row) for row in self.history]
        return [(result, row) for result, row in scored_rows if result is not None]

    @property
    def last(self) -> dict[str, Any] | None:
        """The row of the last evaluation; None without one."""
        return self.evaluations[-1][1] if self.evaluations else None

    @property
    def best(self) -> dict[str, Any] | None:
        """The row of the best evaluation, that of ``RUN@best``: the first of equal ones, of those under the last phase
        and settings of evaluations that no rollback has undone; None without one.
        """
        best = recorded_best(self.directory)
        return next((row for row in self.history if row["step"] == best), None)


def launch(
    loaded: configs.LoadedConfig,
    fresh: bool = False,
    start: configs.Start | None = None,
    peers: Peers = ALONE,
    voice: Verbosity = Verbosity(),
) -> Result:
    """Train, or resume, in the run's directory, and print a summary; return the exit code with the run. ``loaded``:
    settings, resolved and validated, and where they came from; the directory is ``runs/NAME`` where they name none.
    ``fresh``: start over in a new one. ``start``: begin a new run with the weights of this checkpoint or snapshot.
    ``voice``: how much is printed. InputError: the directory cannot be used, or whatever the run cannot work with.
    """
    began = time.monotonic()
    chosen, resolved = decide_start(peers, loaded, fresh, start)
    directory = chosen.absolute()  # a tool may change the current folder
    if resolved is None:
        return Result.of(0, directory)
    loaded = resolved

    def name() -> str:
        return storage.named(chosen if chosen.absolute() == directory else directory)

    def say(line: str) -> None:
        if peers.leads:
            print(storage.shown(line).replace(str(directory), name()), file=sys.stderr)

    with contextlib.ExitStack() as stack:
        # The directory is made, and removed again, by process 0.
        peers.first(lambda: stack.enter_context(claim_directory(directory, loaded)))
        check_shared(peers, directory / "config.json")
        hint_accelerator()
        from jaxrl_llm.trainer.loop import train as run_training

        loaded = dataclasses.replace(loaded, directory=directory)
        notes: list[tuple[Path, str]] = []
        peers.first(lambda: notes.extend(keep_dependencies(loaded, directory, say)))
        stack.callback(
            lambda: None if has_started(directory) else [write_note(*note, directory, False) for note in notes]
        )
        stack.callback(MODEL_CHECKER.reset, MODEL_CHECKER.set(model_checker(loaded, directory, peers)))
        try:
            code = run_training(loaded.pinned, directory, say, peers, loaded.start, voice)
        except InputError as error:
            error.args = (str(error).replace(str(directory), name()),)
            raise
    if code == 0 and peers.leads and not (voice.quiet and voice.rows):  # whose last row says how it ended
        from jaxrl_llm.telemetry.summary import print_summary, summarise

        summary = dataclasses.replace(summarise(directory, time.monotonic() - began), run_dir=name())
        best, last, steps = Result.of(code, directory).best, summary.took.last, loaded.run.steps
        if best is not None and best["step"] in (0, *kept(directory)):
            summary = dataclasses.replace(summary, best=(best["step"], measured_result(best)[0]))
        if last < steps and (memory := ended_at(directory / CHECKPOINTS / str(last))):
            summary = dataclasses.replace(
                summary, ended=(steps, memory[ENDED]["reason"], flags_to_continue(memory, loaded.run))
            )
        writes = not isinstance(loaded.run, configs.RewardModel)
        print_summary(summary, brief=voice.quiet, reloads=configs.reloads(loaded.run), writes=writes)
    return Result.of(code, directory)


def train(
    run: configs.Configuration,
    name: str = "run",
    fresh: bool = False,
    start: str | None = None,
    carry: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Train as ``jaxrl-llm train`` does: check the settings, start or resume the run in its directory, print a summary.
    InputError: the settings cannot work, in one line that names field, value and remedy.

    Args:
      run: whatever it leaves open is filled in as on the command line.
      name: the directory is ``runs/NAME`` below the current folder where ``run.output.run_dir`` is None.
      fresh: start over in a new directory.
      start: ``RUN`` or ``RUN@STEP``: begin a new run with the weights of that one's checkpoint, as ``--from`` does.
      carry: with ``start``, also go on in its data, curriculum and stored successes, as ``--carry`` does.
      on_step: called with each row of metrics.jsonl once it is written.
    """
    prepare_libraries()
    configs.check_types(run)
    settings = configs.resolved(run)
    configs.validate(settings)
    loaded = configs.LoadedConfig(name, settings, configs.Origin(str(Path.cwd())))
    voice = Verbosity(rows=on_step)
    return launch(loaded, fresh, None if start is None else parse_start(start, carry), voice=voice)


def decide_start(
    peers: Peers, loaded: configs.LoadedConfig, fresh: bool, start: configs.Start | None
) -> tuple[Path, configs.LoadedConfig | None]:
    """Return the run's directory, and the settings with its origin and the choices of its start, as process 0 decides;
    None in place of the settings if the run has finished its steps.
    """
    import jax

    from jaxrl_llm import __version__

    place = loaded.run.output.run_dir
    is_shared = peers.count == 1 or storage.written_directly(storage.mirror(place or ""))
    require(is_shared, f"run_dir {place}: only one process writes to s3://; give gs://, or a shared folder")
    if f"@{BEST}" in json.dumps(configs.to_json(loaded.run)):
        before = None if fresh else read_started_run(storage.refreshed(storage.mirror(place or f"runs/{loaded.name}")))
        models_before = {} if before is None else before.origin.models
        loaded = dataclasses.replace(loaded, run=with_step_numbers(loaded.run, loaded.origin, models_before))
    peers.check_same("settings", digest([configs.to_json(loaded.run), __version__, jax.__version__]))
    if start is not None:
        configs.check_start(loaded.run, start.carry)
    code: dict[str, bytes] = {}

    def choose() -> tuple[str, str | None, dict[str, Any]]:
        directory, before, changed = choose_directory(loaded.run, loaded.name, fresh, start)
        origin, copied = configs.own_code(loaded.run, loaded.origin, loaded.directory)
        edited = [] if before is None else configs.changed_code(before.origin, origin)
        ending = "" if before is None else ending_reason(before, loaded.run, changed, edited)
        if before is not None and report_finished(directory, loaded.run, ending):
            return storage.named(directory), None, {}
        tracker_factories(loaded.run.output.trackers)  # what is missing is refused before anything is made or compiled
        weights = start or loaded.origin.start
        if before is not None or weights is not None:
            weights = first_weights(directory, weights)
        models = decide_model_versions(loaded, directory, before is not None, weights)
        origin = dataclasses.replace(origin, start=weights, models=models, copy=1)
        if before is None:
            holder = None if weights is None else weights.directory
            find_run(configs.located(loaded.run, origin, holder, pinned=True).model)
        else:
            if edited:
                note = f"{storage.named(directory)} goes on with other code than before ({configs.shown(edited)})"
                print(f"jaxrl-llm: {note}; --fresh begins a new run", file=sys.stderr)
            now: list[Any] = [[max(steps_in(directory / CHECKPOINTS), default=0), [*changed, *edited]]]
            recorded = [*before.origin.changed, *(now if changed or edited else [])]
            origin = dataclasses.replace(origin, changed=recorded, copy=before.origin.copy + bool(edited))
        code.update(copied)
        return storage.named(directory), first_day(before), origin.to_json()

    name, day, decided = peers.first(choose)
    directory = storage.mirror(name)
    if day is None:
        return directory, None
    run = configs.dated(loaded.run, day)
    return directory, dataclasses.replace(loaded, run=run, origin=origin_of(decided), code=code)


def choose_directory(
    settings: configs.Configuration, name: str, fresh: bool, start: configs.Start | None = None
) -> tuple[Path, configs.LoadedConfig | None, list[str]]:
    """Return the run's directory, the run that has begun there, and the recorded changes of its settings. With
    ``fresh`` it is the first free name; with ``start`` that, or a run that began with these settings and weights; for
    an address the mirror. InputError: a file, or a run that began with other settings, is there; or the storage cannot
    be reached.
    """
    base = storage.mirror(settings.output.run_dir or f"runs/{name}", "run_dir")
    directory = storage.refreshed(base)
    number = 2
    while directory.exists() and (fresh or (start is not None and not same_start(directory, settings, start))):
        directory = storage.refreshed(base.with_name(f"{base.name}-{number}"))
        number = number + 1
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file: give a folder with --run_dir")
    before = read_started_run(directory)
    changes = [] if before is None else settings_changes(before, settings)
    free = configs.FREE_TO_CHANGE + configs.RECORDED_CHANGES
    if fixed := [change for change in changes if not change.startswith(free)]:
        raise InputError(
            f"{directory} was begun with other settings ({configs.shown(fixed)}): take the old ones, or --fresh for a "
            "new folder"
        )
    return directory, before, [change for change in changes if change.startswith(configs.RECORDED_CHANGES)]


def same_start(directory: Path, settings: configs.Configuration, start: configs.Start) -> bool:
    """Whether the folder is free, or its run was started with these settings and these first weights. Another learning
    rate makes another run here, where it would only be recorded on resume; other measurements do not.
    """
    before = read_started_run(directory)
    if before is None:
        return True
    measured = tuple(name for name in configs.RECORDED_CHANGES if name.startswith("evaluation."))
    free = configs.FREE_TO_CHANGE + measured
    changes = settings_changes(before, settings)
    return before.origin.start == start and all(change.startswith(free) for change in changes)


def settings_changes(before: configs.LoadedConfig, settings: configs.Configuration) -> list[str]:
    """Return the settings that differ from those of a run, as ``name: old -> new``."""
    return configs.changes(before.run, configs.as_read(configs.dated(settings, first_day(before))))


def first_day(before: configs.LoadedConfig | None) -> str:
    """Return the day of a run's first start (``dated``); today for a new run, and if it recorded none."""
    parts = () if before is None else parts_of(before.run)
    days = [getattr(part, "date", None) for part in parts if hasattr(part, "template")]
    return next(filter(None, days), datetime.date.today().isoformat())


def first_weights(directory: Path, start: configs.Start | None) -> configs.Start | None:
    """Return the step that gave the run there its first weights, or else ``start``. InputError: it is missing or
    damaged, and the run has no checkpoint of its own yet.
    """
    here = start
    if (before := read_started_run(directory)) is not None:
        start, here = before.origin.start, before.start
    if start is None or here is None or steps_in(directory / CHECKPOINTS) or start.step == 0:
        return start
    if start.step not in kept(here.directory):
        if before is None:
            step_of(start.name)
        raise InputError(
            f"{directory} begins with step {start.step} of {start.run}, which is missing: give another with "
            "--from RUN@STEP"
        )
    check_whole(kept(here.directory)[start.step])
    return start


def report_finished(directory: Path, settings: configs.Configuration, ending: str = "") -> bool:
    """Whether the run there has a whole last checkpoint, of its last step or of the one after which a rule has ended
    it; if so, report it. ``ending``: from ``ending_reason``.
    """
    done = max(steps_in(directory / CHECKPOINTS), default=0)
    place = directory / CHECKPOINTS / str(done)
    if (done < settings.steps and not ending) or fault(place):
        return False
    name, reached = storage.named(directory), f"{done} of {settings.steps} steps"
    more = f"Continue with --steps {2 * done}"
    if ending:
        reached = f"it ended at step {done} of {settings.steps}: {ending}"
        flags = flags_to_continue(ended_at(place), settings)
        more = f"Continue with {flags}" if flags else f"Begin a new run with its weights by --from {name}"
    print(f"{name} is finished: {reached}. {more}, or start over with --fresh.")
    return True


def ending_reason(
    before: configs.LoadedConfig, settings: configs.Configuration, changed: Sequence[str], edited: Sequence[str]
) -> str:
    """Return why a rule has ended a run as done before its steps were made; empty if none has, or would with its
    present settings. ``changed``: settings that differ from those before; ``edited``: files of the run's own code.
    """
    directory = Path(before.directory or "")
    place = directory / CHECKPOINTS / str(max(steps_in(directory / CHECKPOINTS), default=0))
    memory = ended_at(place)
    if not memory or int(place.name) >= settings.steps:
        return ""
    rule, reason, number = memory[ENDED]["rule"], memory[ENDED]["reason"], phase_of(place)
    if rule not in (OF_LESSONS, OF_PHASES):  # of the user's own
        return "" if edited or any(change.startswith("rules.own") for change in changed) else reason
    if rule == OF_LESSONS:
        patience = configs.in_phase(settings, number).rollout.collect.patience
        return reason if 0 < patience <= memory[rule][SOLVED] else ""
    until = configs.phases_of(settings)[number].until
    compares = isinstance(until, Stalls) and not until.metric
    restarts = compares and bool(other_tests([(0, changed)]))
    if not restarts and not any(change.startswith("rules.until") for change in changed):
        return reason
    rows = surviving_rows(
        read_rows(directory / "metrics.jsonl"), other_tests(before.origin.changed) if compares else ()
    )[-1]
    test = configs.evaluation_key(settings)
    holds = until is not None and not restarts and ends_run(until, rows, settings.evaluation.every, test)
    return reason if holds else ""


@contextlib.contextmanager
def claim_directory(directory: Path, loaded: configs.LoadedConfig) -> Generator[None]:
    """Create and lock the run's directory with its config.json. A directory made here is removed if the run does not
    begin, except for the traceback of a reward, which the message names.
    """
    run = loaded.run
    here = loaded.directory
    if here is not None and run.output.run_dir == str(here):  # a run lies where its directory is
        run = dataclasses.replace(run, output=dataclasses.replace(run.output, run_dir=None))
    settings = configs.to_json(run) | {"chosen": configs.chosen(loaded.run)}
    topmost = next((p for p in reversed([directory, *directory.parents]) if not p.exists()), None)

    def remove(*reason: object) -> None:
        if topmost is None or has_started(directory):
            return
        if not (directory / REWARD_ERROR).exists():
            shutil.rmtree(directory, ignore_errors=True)
            if storage.address(directory):
                drop_copies(directory, ())
                lease.upload_last(directory)
            with contextlib.suppress(OSError):  # other runs may lie beside it by now
                for parent in directory.parents[: len(directory.parts) - len(topmost.parts)]:
                    parent.rmdir()
            return
        for path in directory.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != REWARD_ERROR:
                path.unlink(missing_ok=True)

    with contextlib.ExitStack() as stack:
        try:
            with writable(directory, "--run_dir"):
                directory.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(alone(directory, OTHERWISE))
            stack.enter_context(lease.leased(directory, OTHERWISE))
            if storage.address(directory):  # another machine may have trained it since it was chosen
                storage.fetch(directory)
            with writable(directory, "--run_dir"):
                configs.write_code(directory, loaded.origin, loaded.code)
                configs.write(directory / "config.json", settings | loaded.origin.to_json())
            if storage.address(directory):
                storage.push(directory)
                stack.callback(lease.upload_last, directory)
            with on_exit(lambda *reason: lock.unlink(missing_ok=True)), on_exit(remove):
                yield
        except InUse:
            raise
        except BaseException:
            remove()
            raise


def check_shared(peers: Peers, path: Path) -> None:
    """Refuse a run directory that is not shared by all hosts. ``path``: a file that process 0 has just written.
    InputError: a process does not see it, or sees other content.
    """
    content = peers.first(path.read_text)
    limit = time.monotonic() + FILE_VISIBLE_S
    seen = peers.leads
    while not seen and time.monotonic() < limit:
        storage.refreshed(path.parent)
        seen = path.is_file() and path.read_text() == content
        time.sleep(0.0 if seen else 0.2)
    blind = [i for i, sees in enumerate(peers.gather(seen)) if not sees]
    if blind:
        raise InputError(
            f"process {blind[0]} does not see {path}: all processes write the checkpoints, so give a folder that they "
            "share with --run_dir"
        )
