"""A run's directory and what surrounds the training there: whether it is new, who else is at it, what is said at the end."""

import contextlib
import dataclasses
import datetime
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoint import steps_in
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import prepare_libraries, writable
from jaxrl_llm.rewards.scorer import REWARD_ERROR
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.signals import farewell

FILE_SYSTEM_S = 20.0
"""Until a file that one host writes is seen by another."""


def launch(settings: configs.Run, name: str, fresh: bool = False, peers: Peers = ALONE, lines: Sequence[str] = ()) -> int:
    """Train, or go on, in the run's directory, and sum it up; returns the exit code.

    Args:
      settings: resolved and validated.
      name: the directory is ``runs/NAME`` where the settings name none.
      fresh: start over in a new one.
      peers: the other processes of the run.
      lines: said first.

    Raises:
      InputError: the directory cannot be used, or whatever the run cannot work with.
    """
    began = time.monotonic()
    begun = begin(peers, settings, name, fresh)
    if begun is None:
        return 0
    directory, settings = begun
    code = run(peers, settings, directory, lines)
    if code == 0 and peers.leads:
        from jaxrl_llm.telemetry.summarise import summarise
        from jaxrl_llm.telemetry.summary import print_summary

        summary = summarise(directory, time.monotonic() - began)
        print_summary(dataclasses.replace(summary, reloads=configs.reloads(settings)))
    return code


def train(run: configs.Run, name: str = "run", fresh: bool = False) -> int:
    """All that ``jaxrl-llm train`` does, from Python: check the settings, train or go on in the run's directory, sum it up.

    Args:
      run: whatever it leaves open is filled in as on the command line.
      name: the directory is ``runs/NAME`` below the current folder where ``run.run_dir`` is None.
      fresh: start over in a new directory.

    Returns:
      0 done, 3 stopped by a guard with state saved, 75 preempted: call it again to go on.

    Raises:
      InputError: the settings cannot work, in one line that names field, value and remedy.
    """
    from jaxrl_llm.models.pretrained import check_name

    prepare_libraries()
    settings = configs.resolved(run)
    configs.validate(settings)
    check_name(settings.model)
    return launch(settings, name, fresh)


def begin(peers: Peers, settings: configs.Run, name: str, fresh: bool) -> tuple[Path, configs.Run] | None:
    """The run's directory and the settings with its date, chosen by process 0; None where the run has done its steps."""
    peers.check_same("settings", fingerprint(settings))

    def choose() -> tuple[str, str] | None:
        directory, day = choose_directory(settings, name, fresh)
        return None if finished(directory, settings) else (str(directory), day)

    chosen = peers.first(choose)
    return None if chosen is None else (Path(chosen[0]), configs.dated(settings, chosen[1]))


def run(peers: Peers, settings: configs.Run, directory: Path, lines: Sequence[str]) -> int:
    """Train there; returns the exit code. ``lines`` are said first, then what of the settings does nothing."""
    say = lambda line: print(line, file=sys.stderr) if peers.leads else None
    with contextlib.ExitStack() as stack:
        # The directory is made, and removed again, by process 0.
        peers.first(lambda: stack.enter_context(claimed(directory, settings)))
        check_shared(peers, directory / "config.json")
        for line in [*lines, *configs.notes(settings)]:
            say(line)
        hint_accelerator()
        from jaxrl_llm.loop import train as run_training

        return run_training(settings, directory, say, peers)


def fingerprint(settings: configs.Run) -> str:
    """Equal where processes would run the same thing."""
    import jax

    from jaxrl_llm import __version__

    text = json.dumps([configs.to_json(settings), __version__, jax.__version__])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def choose_directory(settings: configs.Run, name: str, fresh: bool) -> tuple[Path, str]:
    """Where the run lies, with ``fresh`` the first name that is free; and the day on which it began, which may be today.

    Raises:
      InputError: something else is there, or a run that was begun with other settings.
    """
    base = Path(settings.run_dir or Path("runs") / name)
    directory, number = base, 2
    while fresh and directory.exists():
        directory, number = base.with_name(f"{base.name}-{number}"), number + 1
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file: give a folder with --run_dir")
    today = datetime.date.today().isoformat()
    if not (directory / "config.json").exists() or not _began(directory):
        return directory, today
    # An older version may have left open what this one fills in.
    old = configs.resolved(configs.load_json(directory / "config.json"))
    day = old.task.date or today
    found = configs.changes(configs.dated(old, day), configs.dated(settings, day))
    own = [change for change in found if not change.startswith(configs.FREE_TO_CHANGE)]
    if own:
        shown = "; ".join(own[:3]) + (f"; and {len(own) - 3} more" if len(own) > 3 else "")
        raise InputError(
            f"{directory} was begun with other settings ({shown}): take the old ones, or --fresh for a new folder"
        )
    return directory, day


def finished(directory: Path, settings: configs.Run) -> bool:
    """Whether the run there has done its steps; if so it is said."""
    done = max(steps_in(directory / "checkpoints"), default=0)
    if done < settings.steps:
        return False
    print(
        f"{directory} is finished: {done} of {settings.steps} steps. Go on with --steps {2 * done}, or "
        "start over with --fresh."
    )
    return True


@contextlib.contextmanager
def claimed(directory: Path, settings: configs.Run) -> Iterator[None]:
    """The run's directory with its config.json; a directory made here is removed again if nothing comes of the run.

    It stays where it holds the traceback of a reward, which the message names.
    """
    made = next((p for p in reversed([directory, *directory.parents]) if not p.exists()), None)

    def remove(*reason: object) -> None:
        if made is not None and not _began(directory) and not (directory / REWARD_ERROR).exists():
            shutil.rmtree(made, ignore_errors=True)

    try:
        with writable(directory, "--run_dir"):
            directory.mkdir(parents=True, exist_ok=True)
            temporary = directory / ".config.json"
            temporary.write_text(json.dumps(configs.to_json(settings), indent=1))
            os.replace(temporary, directory / "config.json")
        with farewell(remove):
            yield
    except BaseException:
        remove()
        raise


def _began(directory: Path) -> bool:
    """Whether there is anything to lose: a checkpoint, or a row of a training step."""
    if steps_in(directory / "checkpoints"):
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
