"""Configurations by name: one Python file for each run."""

import dataclasses
import difflib
import importlib.util
import traceback
from pathlib import Path

from jaxrl_llm.config.run import Run
from jaxrl_llm.config.saved import load_json
from jaxrl_llm.config.validation import require
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import RECIPES


def config_folder() -> Path:
    """Where the shipped configurations lie: beside the package in a source tree, inside it where it is installed."""
    tree = Path(__file__).resolve().parents[2]
    if (tree / "pyproject.toml").is_file() and (tree / "configs").is_dir():
        return tree / "configs"
    spec = importlib.util.find_spec("jaxrl_llm.configs")
    return Path(next(iter(spec.submodule_search_locations)))


def config_names() -> list[str]:
    """Names of the shipped configurations."""
    return sorted(p.stem for p in config_folder().glob("*.py") if p.stem != "__init__")


def load_config(name: str) -> tuple[str, Run]:
    """Name and value of a configuration: a Python file that sets ``config``, a run's config.json, or a shipped name."""
    path = Path(name)
    if path.suffix == ".json":
        return path.parent.name, load_json(path)
    if path.suffix != ".py":
        path = config_folder() / f"{name}.py"
    if not path.is_file():
        close = difflib.get_close_matches(name, config_names(), 1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(config_names())}, or give a .py file"
        raise InputError(f"no configuration {name!r}: {hint}")
    spec = importlib.util.spec_from_file_location(f"jaxrl_llm_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except InputError:
        raise
    except Exception as error:  # whatever a person's file raises
        line = next(
            (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == str(path)), None
        )
        line = getattr(error, "lineno", None) or line
        where = path if line is None else f"{path}, line {line}"
        raise InputError(f"{where}: {type(error).__name__}: {error}; correct the configuration") from error
    require(isinstance(getattr(module, "config", None), Run), f"{path} must set config = Run(...)")
    return path.stem, module.config


def with_recipe(run: Run, name: str) -> Run:
    """The run with another method; ``prorl`` is its first version."""
    name = "prorl_v1" if name == "prorl" else name
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, 1)
        raise InputError(
            f"no recipe {name!r}: " + (f"did you mean {close[0]}?" if close else f"there are {', '.join(RECIPES)}")
        )
    return dataclasses.replace(run, recipe=RECIPES[name])
