"""``jaxrl-llm train``: settings, the run's directory, then the training itself."""

import contextlib
import dataclasses
import difflib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoint import steps_in
from jaxrl_llm.cli.flags import first, parse, prepare_libraries, take, writable
from jaxrl_llm.cli.processes import check_shared, take_distributed, together
from jaxrl_llm.dialects import SPELLINGS, explain, translate
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.pretrained import check_name
from jaxrl_llm.sharding.distributed import Peers

USAGE = """usage: jaxrl-llm train CONFIG [--recipe NAME] [--fresh] [--field value ...]

CONFIG is a name (jaxrl-llm list configs) or a Python file that sets config = Run(...).
jaxrl-llm train CONFIG --help lists the fields with their values.
TRL's and verl's names of the loss's settings are understood too: docs/dialects.md."""
MISSING = "train needs a configuration: jaxrl-llm train quickstart (jaxrl-llm list configs names the others)"
HELP = (
    "--recipe NAME takes another method, --fresh starts over in a new folder. "
    "--distributed.coordinator HOST:PORT --distributed.processes N --distributed.process I runs it on several hosts: "
    "docs/hosts.md. "
    "TRL's and verl's names of the loss's settings are understood too: docs/dialects.md."
)

OVERRIDES = {name.partition(".")[0] for name in SPELLINGS if "." in name}
"""What verl's overrides that say something of the loss begin with."""


def train(arguments: list[str]) -> int:
    """``train CONFIG [--recipe NAME] [--fresh] [--field value ...]``; returns the exit code."""
    given = first(arguments, USAGE, MISSING)
    if given is None:
        return 0
    prepare_libraries()
    began = time.monotonic()
    name, settings = configs.load_config(given)
    fresh, recipe = take(arguments, "--fresh", False), take(arguments, "--recipe", True)
    distributed = take_distributed(arguments)
    if recipe:
        settings = configs.with_recipe(settings, recipe)
    foreign = take_spellings(arguments)
    translated = translate(settings.recipe, foreign)
    settings = dataclasses.replace(settings, recipe=translated)
    settings = parse(configs.Run, arguments, f"jaxrl-llm train {given}", HELP, settings)
    settings = configs.resolved(settings)
    configs.validate(settings)
    check_name(settings.model)
    lines = explain(translated, foreign)
    with together(distributed) as peers:
        directory = begin(peers, settings, name, fresh)
        if directory is None:
            return 0
        code = run(peers, settings, directory, lines)
    if code == 0 and peers.leads:
        from jaxrl_llm.telemetry.summarise import summarise
        from jaxrl_llm.telemetry.summary import print_summary

        print_summary(summarise(directory, time.monotonic() - began))
    return code


def begin(peers: Peers, settings: configs.Run, name: str, fresh: bool) -> Path | None:
    """The run's directory, chosen by process 0; None where the run there has done its steps."""
    peers.check_same("settings", fingerprint(settings))

    def choose() -> str | None:
        directory = choose_directory(settings, name, fresh)
        return None if finished(directory, settings) else str(directory)

    chosen = peers.first(choose)
    return None if chosen is None else Path(chosen)


def run(peers: Peers, settings: configs.Run, directory: Path, lines: list[str]) -> int:
    """Train there; returns the exit code. ``lines`` are said first."""
    say = lambda line: print(line, file=sys.stderr) if peers.leads else None
    with contextlib.ExitStack() as stack:
        # The directory is made, and removed again, by process 0.
        peers.first(lambda: stack.enter_context(claimed(directory, settings)))
        check_shared(peers, directory / "config.json")
        for line in lines:
            say(line)
        hint_accelerator()
        from jaxrl_llm.train import train as run_training

        return run_training(settings, directory, say, peers)


def fingerprint(settings: configs.Run) -> str:
    """Equal where processes would run the same thing."""
    import jax

    from jaxrl_llm import __version__

    text = json.dumps([configs.to_json(settings), __version__, jax.__version__])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def take_spellings(arguments: list[str]) -> dict[str, str]:
    """Remove what is spelled as TRL (``--name value``) or verl (also ``name=value``) does; values by name.

    Raises:
      InputError: one is given twice or has no value, or an override begins as verl's do and is none that is known.
    """
    found, rest = {}, []
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.partition("=")
        dashed = name.startswith("--")
        name = name.removeprefix("--").replace("-", "_") if dashed else name.lstrip("+")
        if not dashed and (not equals or name.partition(".")[0] not in OVERRIDES):
            rest.append(argument)
        elif name in SPELLINGS:
            if name in found:
                raise InputError(f"{argument.partition('=')[0]} is given twice")
            if not equals and arguments and not arguments[0].startswith("--"):
                value = arguments.pop(0)
            if not value:
                raise InputError(f"{argument.partition('=')[0]} needs a value")
            found[name] = value
        elif dashed and (whole := [x for x in SPELLINGS if x.endswith(f".{name}")]):
            raise InputError(f"{argument.partition('=')[0]} is short for {' or '.join(whole)} of verl: write it whole")
        elif dashed:
            rest.append(argument)
        else:
            close = difflib.get_close_matches(name, SPELLINGS, 1, 0.8)
            hint = f"did you mean {close[0]}?" if close else "docs/dialects.md lists those that are understood"
            raise InputError(f"no translation of {name}: {hint}")
    arguments[:] = rest
    return found


def choose_directory(settings: configs.Run, name: str, fresh: bool) -> Path:
    """Where the run lies; with ``fresh`` the first name that is free.

    Raises:
      InputError: something else is there, or a run that was begun with other settings.
    """
    base = Path(settings.run_dir or Path("runs") / name)
    directory, number = base, 2
    while fresh and directory.exists():
        directory, number = base.with_name(f"{base.name}-{number}"), number + 1
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file: give a folder with --run_dir")
    if not (directory / "config.json").exists() or not _began(directory):
        return directory
    old = configs.load_json(directory / "config.json")
    own = [change for change in configs.changes(old, settings) if not change.startswith(configs.FREE_TO_CHANGE)]
    if own:
        shown = "; ".join(own[:3]) + (f"; and {len(own) - 3} more" if len(own) > 3 else "")
        raise InputError(
            f"{directory} was begun with other settings ({shown}): take the old ones, or --fresh for a new folder"
        )
    return directory


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
    """The run's directory with its config.json; a directory made here is removed again if nothing comes of the run."""
    made = next((p for p in reversed([directory, *directory.parents]) if not p.exists()), None)
    try:
        with writable(directory, "--run_dir"):
            directory.mkdir(parents=True, exist_ok=True)
            temporary = directory / ".config.json"
            temporary.write_text(json.dumps(configs.to_json(settings), indent=1))
            os.replace(temporary, directory / "config.json")
        yield
    except BaseException:
        if made is not None and not _began(directory):
            shutil.rmtree(made, ignore_errors=True)
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
