"""The command line. Nothing slow is imported before the arguments are known to be sound."""

import contextlib
import dataclasses
import difflib
import io
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError

USAGE = """usage: jaxrl-llm COMMAND ...

  train CONFIG     teach a model; run it again to go on       jaxrl-llm train quickstart
  eval RUN         test a run or a model on its task          jaxrl-llm eval runs/quickstart
  generate MODEL   type a prompt, see the answer              jaxrl-llm generate smollm2-135m --prompt "Hello"
  export RUN       write a run's policy for transformers      jaxrl-llm export runs/quickstart --out model
  list             configurations, tasks, recipes, models

jaxrl-llm COMMAND --help tells more."""


def main() -> None:
    """Entry point of ``jaxrl-llm``: exit code 0 done, 2 wrong input, 3 stopped by a guard, 75 preempted."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; wrong input is one line on stderr."""
    try:
        return dispatch(list(arguments))
    except InputError as error:
        return refuse(str(error))
    except OSError as error:
        if error.errno not in (28, 122):  # no space left; over quota
            raise
        return refuse(f"the disk is full ({error.filename or 'while writing'}): free some space and run the same command again")
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return refuse("out of memory: lower --learner.microbatch_rows (learning) or --rollout.slots (sampling)")


def refuse(message: str) -> int:
    """One line on stderr; exit code 2."""
    print(f"jaxrl-llm: {' '.join(message.split())}", file=sys.stderr)
    return 2


def dispatch(arguments: list[str]) -> int:
    """Find the command and hand it the rest."""
    commands: dict[str, Callable[[list[str]], int]] = {
        "train": train, "eval": evaluate, "generate": generate, "export": export, "list": list_names,
    }
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        from jaxrl_llm import __version__

        print(__version__)
        return 0
    if name not in commands:
        raise InputError(f"no command {name!r}: " + _suggest(name, list(commands)))
    return commands[name](rest)


def _suggest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"


def parse(kind: type, arguments: list[str], program: str, description: str, default: Any = None) -> Any:
    """Values of a dataclass from flags, by tyro; anything wrong is one line with a suggestion."""
    import tyro

    options = {"prog": program, "description": description, "config": (tyro.conf.AvoidSubcommands,)}
    options |= {} if default is None else {"default": default}
    known = {flag for action in tyro.extras.get_parser(kind, **options)._actions for flag in action.option_strings}
    known |= {flag.replace("-", "_") if flag.startswith("--") else flag for flag in known}
    known = {"--" + f[2:].lstrip("_-") if f.startswith("_") else f for f in known}
    for argument in arguments:
        flag = argument.split("=", 1)[0]
        if flag.startswith("--") and flag.replace("_", "-") not in {k.replace("_", "-") for k in known}:
            close = difflib.get_close_matches(flag, sorted(known), 1, 0.5)
            raise InputError(f"no option {flag}: " + (f"did you mean {close[0]}?" if close else f"see {program} --help"))
    captured = io.StringIO()
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(kind, args=arguments, **options)
    except SystemExit as stop:
        if not stop.code:
            raise
    raise InputError(_flatten(captured.getvalue()) or f"see {program} --help")


def _flatten(box: str) -> str:
    """The text of one of tyro's boxes in one line."""
    lines = [re.sub(r"[│╭╮╰╯─]+", " ", line).strip() for line in box.splitlines()]
    return " ".join(line for line in lines if line and not line.startswith("For full helptext"))


def take(arguments: list[str], flag: str, value: bool) -> Any:
    """Remove ``flag`` (and its value) from the arguments; returns the value, or whether it was there."""
    for index, argument in enumerate(arguments):
        name, equals, inline = argument.partition("=")
        if name.replace("_", "-") != flag:
            continue
        del arguments[index]
        if not value:
            return True
        if equals:
            return inline
        if index == len(arguments):
            raise InputError(f"{flag} needs a value")
        return arguments.pop(index)
    return None if value else False


def train(arguments: list[str]) -> int:
    """``train CONFIG [--recipe NAME] [--fresh] [--field value ...]``."""
    if not arguments or arguments[0].startswith("-"):
        if arguments and arguments[0] in ("-h", "--help"):
            print("usage: jaxrl-llm train CONFIG [--recipe NAME] [--fresh] [--field value ...]\n\njaxrl-llm train CONFIG --help lists the fields; jaxrl-llm list the configurations.")
            return 0
        raise InputError("train needs a configuration: jaxrl-llm train quickstart (jaxrl-llm list names the others)")
    quiet()
    began = time.monotonic()
    from jaxrl_llm import config as configs

    name, settings = configs.load_config(arguments.pop(0))
    fresh, recipe = take(arguments, "--fresh", False), take(arguments, "--recipe", True)
    if recipe:
        settings = configs.with_recipe(settings, recipe)
    help_text = "--recipe NAME takes another method, --fresh starts over in a new folder."
    settings = parse(configs.Run, arguments, f"jaxrl-llm train {name}", help_text, settings)
    configs.validate(settings)
    directory = choose_directory(settings, name, fresh)
    if directory is None:
        return 0
    hint_accelerator()
    from jaxrl_llm.train import train as run_training

    say = lambda line: print(line, file=sys.stderr)
    code = run_training(settings, directory, say)
    if code == 0:
        from jaxrl_llm.telemetry.summarise import summarise
        from jaxrl_llm.telemetry.summary import print_summary

        print_summary(summarise(directory, name, time.monotonic() - began))
    return code


def choose_directory(settings: Any, name: str, fresh: bool) -> Path | None:
    """The run's directory with its config.json written; None where the run there is finished, which is said."""
    import json

    from jaxrl_llm import config as configs
    from jaxrl_llm.checkpoint import steps_in

    directory = Path(settings.run_dir or Path("runs") / name)
    if fresh:
        number = 2
        while directory.exists():
            directory = directory.with_name(f"{Path(settings.run_dir or name).name}-{number}")
            number += 1
    saved = directory / "config.json"
    if saved.exists():
        old = configs.load_json(saved)
        own = [c for c in configs.changes(old, settings) if not c.startswith(configs.FREE_TO_CHANGE)]
        configs.require(not own, f"{directory} was begun with other settings ({'; '.join(own)}): take the old ones, or --fresh for a new folder")
        done = max(steps_in(directory / "checkpoints"), default=0)
        if done >= settings.steps:
            print(f"{directory} is finished: {done} of {settings.steps} steps. Go on with --steps {2 * done}, or start over with --fresh.")
            return None
    directory.mkdir(parents=True, exist_ok=True)
    temporary = directory / ".config.json"
    temporary.write_text(json.dumps(configs.to_json(settings), indent=1))
    os.replace(temporary, saved)
    return directory


def quiet() -> None:
    """Keep the libraries' import-time warnings off the terminal."""
    for name, value in {"TRANSFORMERS_VERBOSITY": "error", "TF_CPP_MIN_LOG_LEVEL": "2", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1"}.items():
        os.environ.setdefault(name, value)
    import logging

    logging.getLogger("absl").setLevel(logging.ERROR)
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)


def hint_accelerator() -> None:
    """Say it where the machine has an accelerator that this JAX cannot use."""
    found = [("cuda", "an NVIDIA GPU")] if Path("/proc/driver/nvidia/version").exists() else []
    found += [("tpu", "a TPU")] if any(Path("/dev").glob("accel[0-9]*")) else []
    if not found:
        return
    import jax

    if jax.default_backend() == "cpu":
        extra, device = found[0]
        print(f"jaxrl-llm: this machine has {device}, but this JAX runs on the CPU only: pip install -e '.[{extra}]'", file=sys.stderr)


def evaluate(arguments: list[str]) -> int:
    return 0


def generate(arguments: list[str]) -> int:
    return 0


def export(arguments: list[str]) -> int:
    return 0


def list_names(arguments: list[str]) -> int:
    return 0
