"""Configurations by name: one Python file for each run."""

import dataclasses
import difflib
import importlib
import os
from pathlib import Path

from jaxrl_llm.checkpoint import steps_in
from jaxrl_llm.config.code import execute
from jaxrl_llm.config.field_types import check_types
from jaxrl_llm.config.kinds import KINDS
from jaxrl_llm.config.origin import Origin, Start, located, split_step
from jaxrl_llm.config.run import Configuration, Run
from jaxrl_llm.config.saved import is_run, read, whole
from jaxrl_llm.config.validation import require
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.snapshots import CHECKPOINTS, kept, listed


def config_folder() -> Path:
    """Where the shipped configurations lie: beside the package in a source tree, inside it where it is installed."""
    tree = Path(__file__).resolve().parents[2]
    if (tree / "pyproject.toml").is_file() and (tree / "configs").is_dir():
        return tree / "configs"
    return Path(importlib.import_module("jaxrl_llm.configs").__path__[0])


def config_names() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(p.stem for p in config_folder().glob("*.py") if p.stem != "__init__")


@dataclasses.dataclass(frozen=True)
class Found:
    """A configuration and where it came from.

    Attributes:
      name: of the file or the run's directory: what a new run is called.
      run: its value.
      origin: its file, and the folder in which relative paths start.
      directory: of the run that it is, where it is one's config.json.
    """

    name: str
    run: Configuration
    origin: Origin
    directory: Path | None = None

    @property
    def located(self) -> Configuration:
        """The run with its data and model where they are found from here."""
        return located(self.run, self.origin, self.directory)


def load_config(name: str) -> tuple[str, Configuration]:
    """Name and value of a configuration: a Python file that sets ``config``, a shipped name, or a run's directory."""
    found = find_config(name)
    return found.name, found.run


def find_config(name: str) -> Found:
    """As ``load_config``, with where it came from. A run's directory, or the config.json in it, means that run, which
    lies there.

    Raises:
      InputError: there is none, or it cannot be read; the line says what to do.
    """
    path = Path(name)
    if path.suffix == ".json":
        return _saved(path)
    if name not in config_names() and is_run(path / "config.json"):
        return _saved(path / "config.json")
    if path.suffix != ".py":
        path = config_folder() / f"{name}.py"
    if not path.is_file():
        close = difflib.get_close_matches(name, config_names(), 1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"there are {', '.join(config_names())}, or give a .py file or a run"
        )
        raise InputError(f"no configuration {name!r}: {hint}")
    module = execute(path)
    others = "".join(f", or {kind.__name__}(...)" for kind in KINDS[1:])
    require(isinstance(getattr(module, "config", None), KINDS), f"{path} must set config = Run(...){others}")
    try:
        check_types(module.config)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return Found(path.stem, module.config, Origin(str(Path.cwd()), str(path.absolute())))


def find_start(name: str) -> Start:
    """The checkpoint or snapshot that ``RUN@STEP`` names; the newest checkpoint of ``RUN``.

    Raises:
      InputError: there is no such run, or it keeps no such step.
    """
    directory, step = split_step(name)
    path = directory / "config.json"
    require(is_run(path), f"{directory} is no run: give the folder that holds its config.json and checkpoints")
    model = read(path, own=False).run.model
    found = kept(directory)
    newest = max(steps_in(directory / CHECKPOINTS), default=None)
    if not found or (step is None and newest is None):
        snapshots = f", or give RUN@STEP: it keeps {listed(directory)}" if found else ""
        raise InputError(
            f"{directory} has no checkpoint yet: go on with its training first, or give the model itself ({model})"
            + snapshots
        )
    require(
        step is None or step in found, f"{directory} has no checkpoint of step {step}: it keeps {listed(directory)}"
    )
    return Start(os.path.abspath(directory), newest if step is None else step)


def _saved(path: Path) -> Found:
    saved = read(path)
    directory = path.parent
    run = whole(saved.run, str(path))
    if path.name == "config.json":
        run = dataclasses.replace(run, run_dir=str(directory))
    return Found(directory.absolute().name, run, saved.origin, directory)


def with_recipe(run: Configuration, name: str) -> Run:
    """The run with another method; ``prorl`` is its first version.

    Raises:
      InputError: no such method, or a kind of run that has none.
    """
    require(
        isinstance(run, Run),
        f"--recipe {name} is a method of reinforcement learning, and this is a {type(run).__name__} run: leave it out",
    )
    name = "prorl_v1" if name == "prorl" else name
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, 1)
        raise InputError(
            f"no recipe {name!r}: " + (f"did you mean {close[0]}?" if close else f"there are {', '.join(RECIPES)}")
        )
    return dataclasses.replace(run, recipe=RECIPES[name])
