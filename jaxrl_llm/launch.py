"""A run's directory and what surrounds the training there: is it new, who else is at it, what is said at the end."""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm import integrity, pins
from jaxrl_llm.checkpoint import steps_in
from jaxrl_llm.collection.ledger import COLLECTED, part_of
from jaxrl_llm.config.origin import origin_of
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import InUse, alone, new_file, prepare_libraries, writable
from jaxrl_llm.recovery import check_whole
from jaxrl_llm.rewards.scorer import REWARD_ERROR
from jaxrl_llm.rules import PHASE
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.signals import farewell
from jaxrl_llm.snapshots import CHECKPOINTS, kept
from jaxrl_llm.telemetry.voice import Voice

FILE_SYSTEM_S = 20.0
"""Until a file that one host writes is seen by another."""


def launch(
    found: configs.Found,
    fresh: bool = False,
    start: configs.Start | None = None,
    peers: Peers = ALONE,
    lines: Sequence[str] = (),
    voice: Voice = Voice(),
) -> int:
    """Train, or go on, in the run's directory, and sum it up; returns the exit code.

    Args:
      found: settings, resolved and validated, and where they came from. The directory is ``runs/NAME`` where they name
        none.
      fresh: start over in a new one.
      start: begin a new run with the weights of this checkpoint or snapshot.
      peers: the other processes of the run.
      lines: said first.
      voice: how much is said after them.

    Raises:
      InputError: the directory cannot be used, or whatever the run cannot work with.
    """
    began = time.monotonic()
    begun = begin(peers, found, fresh, start)
    if begun is None:
        return 0
    directory, found = begun
    code = run(peers, found, directory, lines, voice)
    if code == 0 and peers.leads and not (voice.quiet and voice.rows):  # whose last row says how it ended
        from jaxrl_llm.telemetry.diagnosis import diagnose
        from jaxrl_llm.telemetry.rows import read_rows
        from jaxrl_llm.telemetry.summarise import summarise
        from jaxrl_llm.telemetry.summary import print_summary

        summary = summarise(directory, time.monotonic() - began)
        writes = not isinstance(found.run, configs.RewardModel)
        rows = list(read_rows(directory / "metrics.jsonl"))
        findings = diagnose(rows)
        phases = [(row["step"], str(row[PHASE])) for row in rows if PHASE in row]
        summary = dataclasses.replace(summary, reloads=configs.reloads(found.run), writes=writes)
        print_summary(summary, None, findings, voice.quiet, phases)
    return code


def train(run: configs.Configuration, name: str = "run", fresh: bool = False, start: str | None = None) -> int:
    """All that ``jaxrl-llm train`` does, from Python: check the settings, train or go on in the run's directory, sum it
    up.

    Args:
      run: whatever it leaves open is filled in as on the command line.
      name: the directory is ``runs/NAME`` below the current folder where ``run.run_dir`` is None.
      fresh: start over in a new directory.
      start: ``RUN`` or ``RUN@STEP``: begin a new run with the weights of that one's checkpoint, as ``--from`` does.

    Returns:
      0 done, 3 stopped by a guard with state saved, 75 preempted: call it again to go on.

    Raises:
      InputError: the settings cannot work, in one line that names field, value and remedy.
    """
    from jaxrl_llm.trained import find_run

    prepare_libraries()
    configs.check_types(run)
    settings = configs.resolved(run)
    configs.validate(settings)
    find_run(settings.model)
    found = configs.Found(name, settings, configs.Origin(str(Path.cwd())))
    return launch(found, fresh, None if start is None else configs.find_start(start))


def begin(
    peers: Peers, found: configs.Found, fresh: bool, start: configs.Start | None
) -> tuple[Path, configs.Found] | None:
    """The run's directory, and the settings with its origin and what its start decides, chosen by process 0; None where
    the run has done its steps."""
    peers.check_same("settings", fingerprint(found.run))
    if start is not None:
        configs.check_start(found.run)

    def choose() -> tuple[str, configs.AtStart, dict[str, Any]] | None:
        directory, at_start = choose_directory(found.run, found.name, fresh, start)
        if finished(directory, found.run):
            return None
        weights = first_weights(directory, start or found.origin.start)
        models = pins.decide(found, directory, _began(directory), weights)
        return str(directory), at_start, dataclasses.replace(found.origin, start=weights, models=models).to_json()

    chosen = peers.first(choose)
    if chosen is None:
        return None
    directory, at_start, decided = chosen
    decided = origin_of(decided, Path(directory))
    modules = configs.own_modules(found.run)
    origin = dataclasses.replace(found.origin, modules=modules, start=decided.start, models=decided.models)
    return Path(directory), dataclasses.replace(found, run=configs.as_started(found.run, at_start), origin=origin)


def run(peers: Peers, found: configs.Found, directory: Path, lines: Sequence[str], voice: Voice) -> int:
    """Train there; returns the exit code. ``lines`` are said first."""

    def say(line: str) -> None:
        if peers.leads:
            print(line, file=sys.stderr)

    with contextlib.ExitStack() as stack:
        # The directory is made, and removed again, by process 0.
        peers.first(lambda: stack.enter_context(claimed(directory, found)))
        check_shared(peers, directory / "config.json")
        for line in lines:
            say(line)
        hint_accelerator()
        from jaxrl_llm.loop import train as run_training

        settings = dataclasses.replace(found, run=configs.pinned(found.run, found.origin)).located
        with pins.comparing(pins.Pins(found, directory, peers)):
            return run_training(settings, directory, say, peers, found.origin.start, voice)


def fingerprint(settings: configs.Configuration) -> str:
    """Equal where processes would run the same thing."""
    import jax

    from jaxrl_llm import __version__

    text = json.dumps([configs.to_json(settings), __version__, jax.__version__])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def choose_directory(
    settings: configs.Configuration, name: str, fresh: bool, start: configs.Start | None = None
) -> tuple[Path, configs.AtStart]:
    """Where the run lies, with ``fresh`` or ``start`` the first name that is free, or the run that was begun just so;
    and what was decided when it began, which may be now.

    Raises:
      InputError: something else is there, or a run that was begun with other settings.
    """
    base = Path(settings.run_dir or Path("runs") / name)
    directory = base
    number = 2
    while directory.exists() and (fresh or (start is not None and not begun_so(directory, settings, start))):
        directory = base.with_name(f"{base.name}-{number}")
        number = number + 1
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file: give a folder with --run_dir")
    own, at_start = other_settings(directory, settings)
    if own:
        shown = "; ".join(own[:3]) + (f"; and {len(own) - 3} more" if len(own) > 3 else "")
        raise InputError(
            f"{directory} was begun with other settings ({shown}): take the old ones, or --fresh for a new folder"
        )
    return directory, at_start


def begun_so(directory: Path, settings: configs.Configuration, start: configs.Start) -> bool:
    """Whether the folder is free, or its run was begun with these settings and these first weights."""
    if not _began(directory):
        return True
    same = configs.read(directory / "config.json").origin.start == start
    return same and not other_settings(directory, settings)[0]


def other_settings(
    directory: Path, settings: configs.Configuration, free: tuple[str, ...] = configs.FREE_TO_CHANGE
) -> tuple[list[str], configs.AtStart]:
    """What the run there cannot go on without, as ``name: old -> new``, and what was decided when it began.

    ``free``: settings (and all below them) that may differ.
    """
    today = datetime.date.today().isoformat()
    if not (directory / "config.json").exists() or not _began(directory):
        return [], configs.AtStart(today)
    old = configs.read(directory / "config.json").run
    at_start = configs.decided_by(old, today)
    if configs.is_whole(old):  # an older version may have left open what this one fills in
        old = configs.as_started(configs.resolved(old), at_start)
    found = configs.changes(old, configs.as_read(configs.as_started(settings, at_start)))
    return [change for change in found if not change.startswith(free)], at_start


def first_weights(directory: Path, start: configs.Start | None) -> configs.Start | None:
    """Whose weights the run there began with, or else those of ``start``.

    Raises:
      InputError: they are needed, since the run has no checkpoint of its own yet, and are not there any more, or
        damaged.
    """
    if _began(directory) and (directory / "config.json").exists():
        start = configs.read(directory / "config.json", own=False).origin.start
    if start is None or steps_in(directory / CHECKPOINTS):
        return start
    if start.step not in kept(Path(start.run)):
        raise InputError(
            f"{directory} begins with step {start.step} of {start.run}, which is not there any more: give another with "
            "--from RUN@STEP"
        )
    check_whole(kept(Path(start.run))[start.step])
    return start


def finished(directory: Path, settings: configs.Configuration) -> bool:
    """Whether the run there has done its steps, and what it has saved of the last one is whole; if so it is said."""
    done = max(steps_in(directory / CHECKPOINTS), default=0)
    if done < settings.steps or integrity.fault(directory / CHECKPOINTS / str(done)):
        return False
    print(
        f"{directory} is finished: {done} of {settings.steps} steps. Go on with --steps {2 * done}, or "
        "start over with --fresh."
    )
    return True


def described(found: configs.Found) -> dict[str, Any]:
    """What config.json holds: the settings, and where they came from."""
    own = found.directory is not None and found.run.run_dir == str(found.directory)  # a run lies where its directory is
    return configs.to_json(dataclasses.replace(found.run, run_dir=None) if own else found.run) | found.origin.to_json()


@contextlib.contextmanager
def claimed(directory: Path, found: configs.Found) -> Generator[None]:
    """The run's directory with its config.json, held for this process alone; a directory made here is removed again if
    nothing comes of the run, but for the traceback of a reward, which the message names.
    """
    made = next((p for p in reversed([directory, *directory.parents]) if not p.exists()), None)

    def remove(*reason: object) -> None:
        if made is None or _began(directory):
            return
        if not (directory / REWARD_ERROR).exists():
            shutil.rmtree(directory, ignore_errors=True)
            with contextlib.suppress(OSError):  # other runs may lie beside it by now
                for parent in directory.parents[: len(directory.parts) - len(made.parts)]:
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
                lock = stack.enter_context(alone(directory, "take --fresh for a new folder"))
                with new_file(directory / "config.json") as part:
                    part.write_text(json.dumps(described(found), indent=1))
            with farewell(lambda *reason: lock.unlink(missing_ok=True)), farewell(remove):
                yield
        except InUse:
            raise
        except BaseException:
            remove()
            raise


def _began(directory: Path) -> bool:
    """Whether there is anything to lose: a checkpoint, answers that were collected, or a row of a training step."""
    answers = directory / COLLECTED
    if steps_in(directory / CHECKPOINTS) or answers.exists() or part_of(answers).exists():
        return True
    from jaxrl_llm.telemetry.rows import read_rows

    return any(row["step"] > 0 for row in read_rows(directory / "metrics.jsonl"))


def hint_accelerator() -> None:
    """Say it where the machine has an accelerator that this JAX cannot use."""
    found = [("cuda", "an NVIDIA GPU")] if Path("/proc/driver/nvidia/version").exists() else []
    found += [("tpu", "a TPU")] if any(Path("/dev").glob("accel[0-9]*")) else []
    if not found:
        return
    import jax

    if jax.default_backend() == "cpu":
        extra, device = found[0]
        print(
            f"jaxrl-llm: this machine has {device}, but this JAX runs on the CPU only: pip install -e '.[{extra}]'",
            file=sys.stderr,
        )


def check_shared(peers: Peers, path: Path) -> None:
    """Refuse a run whose folder is another one on another host.

    ``path``: a file that process 0 has just written.

    Raises:
      InputError: a process that does not see it, or sees another content.
    """
    content = peers.first(path.read_text)
    limit = time.monotonic() + FILE_SYSTEM_S
    while not (seen := path.is_file() and path.read_text() == content) and time.monotonic() < limit:
        time.sleep(0.2)
    blind = [i for i, sees in enumerate(peers.gather(seen)) if not sees]
    if blind:
        raise InputError(
            f"process {blind[0]} does not see {path}: all processes write the checkpoints, so give a folder that they "
            "share with --run_dir"
        )
