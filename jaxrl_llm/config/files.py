"""Configurations by name: one Python file per run."""

import dataclasses
import importlib
import os
from pathlib import Path

from jaxrl_llm.checkpoints.snapshots import CHECKPOINTS, kept, listed
from jaxrl_llm.checkpoints.store import steps_in
from jaxrl_llm.config.checks import KINDS, check_types
from jaxrl_llm.config.origin import Origin, Start, execute, split_step
from jaxrl_llm.config.run import Run
from jaxrl_llm.config.saved import Found, is_run, read, whole
from jaxrl_llm.config.texts import Configuration
from jaxrl_llm.errors import InputError, did_you_mean, require
from jaxrl_llm.recipes import RECIPES


def config_folder() -> Path:
    """Return the folder of the shipped configurations: next to the package in a source tree, inside it once
    installed."""
    tree = Path(__file__).resolve().parents[2]
    if (tree / "pyproject.toml").is_file() and (tree / "configs").is_dir():
        return tree / "configs"
    return Path(importlib.import_module("jaxrl_llm.configs").__path__[0])


def config_names() -> list[str]:
    """Return the names of the shipped configurations, sorted."""
    return sorted(p.stem for p in config_folder().glob("*.py") if p.stem != "__init__")


def load_config(name: str) -> tuple[str, Configuration]:
    """Load a configuration, as (name, value): a Python file that sets ``config``, a shipped name, or a run's
    directory."""
    found = find_config(name)
    return found.name, found.run


def find_config(name: str) -> Found:
    """Find a configuration by name, as ``load_config`` does, and return it with its origin. A run's directory, or the
    config.json in it, gives that run, with its ``run_dir`` there.

    Raises:
      InputError: it is missing or unreadable; the line names the remedy.
    """
    path = Path(name)
    if path.suffix == ".json":
        return _saved(path)
    if name not in config_names() and is_run(path / "config.json"):
        return _saved(path / "config.json")
    if path.suffix != ".py":
        path = config_folder() / f"{name}.py"
    if not path.is_file():
        known = config_names()
        others = f"there are {', '.join(known)}, or give a .py file or a run"
        raise InputError(f"no configuration {name!r}: {did_you_mean(name, known, others)}")
    module = execute(path)
    others = "".join(f", or {kind.__name__}(...)" for kind in KINDS[1:])
    require(isinstance(getattr(module, "config", None), KINDS), f"{path} must set config = Run(...){others}")
    try:
        check_types(module.config)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    return Found(path.stem, module.config, Origin(str(Path.cwd()), str(path.absolute())))


def find_start(name: str, carry: bool = False) -> Start:
    """Find the checkpoint or snapshot that ``RUN@STEP`` names, or the newest checkpoint of ``RUN``.

    ``carry``: as in ``Start``.

    Raises:
      InputError: the run does not exist, does not keep this step, or has nothing to carry there.
    """
    directory, step = split_step(name)
    path = directory / "config.json"
    require(is_run(path), f"{directory} is no run: give the folder that holds its config.json and checkpoints")
    run = read(path, own=False).run
    found = kept(directory)
    newest = max(steps_in(directory / CHECKPOINTS), default=None)
    if not found or (step is None and newest is None):
        snapshots = f", or give RUN@STEP: it keeps {listed(directory)}" if found else ""
        raise InputError(
            f"{directory} has no checkpoint yet: go on with its training first, or give the model itself ({run.model})"
            + snapshots
        )
    require(
        step is None or step in found, f"{directory} has no checkpoint of step {step}: it keeps {listed(directory)}"
    )
    step = newest if step is None else step
    if carry:
        kind = type(run).__name__
        require(
            isinstance(run, Run), f"--carry is for reinforcement learning, and {directory} is a {kind}: leave it out"
        )
        whole = step in steps_in(directory / CHECKPOINTS)
        require(whole, f"step {step} of {directory} is a snapshot, which has weights alone: leave --carry out")
    return Start(os.path.abspath(directory), step or 0, carry)


def _saved(path: Path) -> Found:
    found = read(path)
    run = whole(found.run, str(path))
    if path.name == "config.json":
        run = dataclasses.replace(run, run_dir=str(path.parent))
    return dataclasses.replace(found, run=run)


def with_recipe(run: Configuration, name: str) -> Run:
    """Return the run with another recipe; ``prorl`` is short for ``prorl_v1``.

    Raises:
      InputError: unknown recipe, or a kind of run without recipes.
    """
    if not isinstance(run, Run):
        kind = type(run).__name__
        raise InputError(
            f"--recipe {name} is a method of reinforcement learning, and this is a {kind} run: leave it out"
        )
    name = "prorl_v1" if name == "prorl" else name
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES, f"there are {', '.join(RECIPES)}")
        raise InputError(f"no recipe {name!r}: {hint}")
    return dataclasses.replace(run, recipe=RECIPES[name])
