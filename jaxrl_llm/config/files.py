"""Configurations in files: Python files by name, and runs as JSON that loads again, with the changes between two."""

import contextlib
import dataclasses
import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.codec import digest, flat
from jaxrl_llm.config.checks import KINDS, check_types
from jaxrl_llm.config.origin import (
    LOST,
    SIGNED,
    Origin,
    Start,
    check_trust,
    execute,
    find_class,
    located,
    make_findable,
    origin_of,
    own_modules,
    signed,
    standing_place,
    use_copies,
    why_not_found,
)
from jaxrl_llm.config.run import Run
from jaxrl_llm.config.texts import Configuration
from jaxrl_llm.errors import InputError, did_you_mean, naming, require
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rewards.functions import Local, StepFunction
from jaxrl_llm.system import storage
from jaxrl_llm.system.paths import config_folder, config_names, new_file
from jaxrl_llm.system.setting import FREE, RECORDED, differing, has_default, names_marked, parts_of
from jaxrl_llm.tasks.task import MISSING, InMemory

FREE_TO_CHANGE = tuple(dict.fromkeys(name for kind in KINDS for name in names_marked(kind, FREE)))
"""Fields (and all below them) that may change when a run is resumed."""
DTYPES_OF_BASES = {"float32": "f32", "bfloat16": "bf16"}
"""``learner.lora.base`` by the dtype of the frozen model."""
RECORDED_CHANGES = tuple(dict.fromkeys(name for kind in KINDS for name in names_marked(kind, RECORDED)))
"""Fields that may change when a run is resumed, with the change recorded, since it affects what is measured later."""
RUNS = tuple(f"{kind.__module__}:{kind.__qualname__}" for kind in KINDS)
"""The values of ``type`` in a config.json."""
ABOUT = ("type", "origin", "from", "chosen", SIGNED)
"""The keys of a config.json that are not fields of the run."""


@dataclasses.dataclass(frozen=True)
class Unsaveable:
    """A placeholder in a loaded run for a value that its config.json could not hold, or that is not found again;
    ``why``: the reason, a part of a sentence.
    """

    why: str


@dataclasses.dataclass(frozen=True)
class LoadedConfig:
    """A configuration and its origin.

    Attributes:
      name: of the file or the run's directory; the name of a new run.
      run: its value; as ``read`` returns it, perhaps with ``Unsaveable`` in some places.
      directory: of the run, if it is loaded from a run's config.json.
      code: at a start, the bytes of its own modules, by name.
    """

    name: str
    run: Configuration
    origin: Origin
    directory: Path | None = None
    code: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    @property
    def located(self) -> Configuration:
        """The run with the paths of its data and models resolved from the current folder."""
        return located(self.run, self.origin, self.directory)

    @property
    def pinned(self) -> Configuration:
        """The run as ``located`` gives it, with the step of each model that is another run."""
        return located(self.run, self.origin, self.directory, pinned=True)

    @property
    def start(self) -> Start | None:
        """The step of another run with its first weights; the run's copy of it if it is gone or has changed."""
        start = self.origin.start
        if start is None or start.name not in self.origin.models:
            return start
        place = standing_place(start.name, self.origin, self.directory)
        return dataclasses.replace(start, run=place.rpartition("@")[0])


def load_config(name: str) -> tuple[str, Configuration]:
    """Load a configuration, as (name, value), from a Python file that sets ``config``, a shipped name, or a run."""
    loaded = find_config(name)
    return loaded.name, loaded.run


def find_config(name: str) -> LoadedConfig:
    """Find a configuration by name, as ``load_config`` does, and return it with its origin. A run's address or
    config.json also gives that run, with its ``run_dir`` there. InputError: missing or unreadable, with the remedy.
    """
    path = Path(name)
    if storage.split(name):
        path = storage.folder(name.removesuffix("/config.json"))
        require(path.is_dir(), f"there is no run at {name}: give the folder that holds its config.json")
    inside = path / "config.json"
    if path.suffix != ".json" and inside.exists() and name not in config_names() and is_run(inside):
        path = path / "config.json"
    if path.suffix == ".json":
        loaded = read(path)
        run = whole(loaded.run, str(path))
        is_run_config = path.name == "config.json"
        here = dataclasses.replace(run.output, run_dir=str(path.parent))
        return dataclasses.replace(loaded, run=dataclasses.replace(run, output=here) if is_run_config else run)
    if path.suffix != ".py":
        path = config_folder() / f"{name}.py"
    if not path.is_file():
        names = config_names()
        alternatives = f"there are {', '.join(names)}, or give a .py file or a run"
        raise InputError(f"no configuration {name!r}: {did_you_mean(name, names, alternatives)}")
    module = execute(path)
    alternatives = "".join(f", or {kind.__name__}(...)" for kind in KINDS[1:])
    require(isinstance(getattr(module, "config", None), KINDS), f"{path} must set config = Run(...){alternatives}")
    with naming(path):
        check_types(module.config)
    return LoadedConfig(path.stem, module.config, Origin(str(Path.cwd()), str(path.absolute())))


def with_recipe(run: Configuration, name: str) -> Run:
    """Return the run with another recipe. InputError: unknown recipe, or a kind of run without recipes."""
    if not isinstance(run, Run):
        kind = type(run).__name__
        raise InputError(
            f"--recipe {name} is a method of reinforcement learning, and this is a {kind} run: leave it out"
        )
    if name not in RECIPES:
        hint = did_you_mean(name, RECIPES, f"there are {', '.join(RECIPES)}")
        raise InputError(f"no recipe {name!r}: {hint}")
    return dataclasses.replace(run, recipe=RECIPES[name])


def to_json(value: Any) -> Any:
    """Convert a value to nested JSON values; a dataclass becomes an object with its class name as ``type``, and a value
    that JSON cannot hold ``{"unsaveable": why}``.
    """
    if isinstance(value, Unsaveable):
        return {"unsaveable": value.why}
    if isinstance(value, (Local, StepFunction, InMemory)):
        value = value.to_save()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = type(value)
        why = why_not_found(kind)
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"unsaveable": why} if why else {"type": f"{kind.__module__}:{kind.__qualname__}"} | fields
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = getattr(value, "__qualname__", None)
    made = f"a {type(value).__qualname__}" if name is None else f"{value.__module__}.{name}"
    return {"unsaveable": f"the run holds {made}, which only the program that started it has: resume it from there"}


def whole(value: Any, where: str = "config.json") -> Any:
    """Return the value; InputError, which begins with ``where``, gives the reason if a part of it is ``Unsaveable``."""
    for part in parts_of(value):
        if isinstance(part, Unsaveable):
            raise InputError(f"{where}: {part.why}")
    return value


def is_whole(value: Any) -> bool:
    """Whether no part of the value is ``Unsaveable``."""
    return not any(isinstance(part, Unsaveable) for part in parts_of(value))


def as_read(run: Configuration) -> Configuration:
    """Return the run as loading its config.json would give it."""
    return from_json(to_json(run), Origin("", modules=own_modules(run)))


def from_json(data: Any, origin: Origin | None = None) -> Any:
    """Rebuild a value from the JSON of ``to_json``, with tuples for lists, and dataclasses of this package and the
    origin's modules alone. A part that is not saved, found or allowed, or needs such a part, becomes ``Unsaveable``.
    """
    if isinstance(data, list):
        return tuple(from_json(item, origin) for item in data)
    if not isinstance(data, dict):
        return data
    if data.keys() == {"unsaveable"}:
        return Unsaveable(data["unsaveable"])
    about = ABOUT if data.get("type") in RUNS else ("type",)
    fields = {name: from_json(item, origin) for name, item in data.items() if name not in about}
    if "type" not in data:
        return fields
    if not isinstance(data["type"], str):
        return Unsaveable(f"it has a value of type {data['type']!r:.40}, which is no name of a class")
    try:
        kind = find_class(data["type"], origin)
    except (InputError, ImportError) as error:
        return Unsaveable(str(error))
    if kind is None:
        return Unsaveable(f"it names {data['type']}, which is not a configuration class of this version")
    missing = [item for item in fields.values() if isinstance(item, Unsaveable)]
    try:
        return kind(**fields)
    except (TypeError, ValueError, AttributeError):
        if not missing:
            raise
        return missing[0]


def chosen(run: Configuration) -> list[str]:
    """List the settings that differ from their defaults, by their names in config.json; ``X.type``: another class."""
    usual = {field.name: field.default for field in dataclasses.fields(run) if not has_default(field)}
    current = {name: getattr(run, name) for name in usual}
    differences = [name for field in current for name in differing(current[field], usual[field], field)]
    return [*differences, *differing(run, type(run)(**current))]


def write(path: Path, data: dict[str, Any]) -> None:
    """Write a config.json, atomically; one that names code of its own is signed (``origin.signed``)."""
    with new_file(path) as part:
        part.write_text(json.dumps(signed(data, origin_of(data)), indent=1))


@contextlib.contextmanager
def _of_this_version(path: Path) -> Generator[None]:
    """Turn the exceptions of a file that is no run of this version into one line."""
    try:
        yield
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is not complete JSON ({error}): put the file back as the run wrote it") from None
    except (ValueError, TypeError, ImportError, AttributeError, KeyError, OverflowError, RecursionError) as error:
        raise InputError(
            f"{path} does not describe a run of this version ({error}): take the version of jaxrl_llm that wrote it, "
            "or begin a new run"
        ) from None


def read(path: Path, own: bool = True, calls: bool = True) -> LoadedConfig:
    """Read a config.json; values that cannot be loaded from it are ``Unsaveable``.

    Args:
      own: whether files of own classes may be run for it, and modules where it began be found.
      calls: whether the functions that it names will be called; False if the run is only compared.

    Raises:
      InputError: it is no run of this version; or code of its own would be executed that this user did not make.
    """
    with _of_this_version(path):
        data = json.loads(path.read_text())
        origin = origin_of(data)
    if own and check_trust(path, data, origin, calls):
        for folder in origin.places():
            make_findable(folder)
        if calls:
            use_copies(path.parent, origin)
    with _of_this_version(path):
        run = from_json(as_now_written(data), origin if own else None)
        if isinstance(run, KINDS):
            check_types(run, Unsaveable)
    require(isinstance(run, KINDS), f"{path} does not describe a run")
    return LoadedConfig(path.parent.absolute().name, run, origin, path.parent)


def as_now_written(data: Any) -> Any:
    """Return a config.json's values as this version writes them. Until 0.1.0 the base of adapters had the dtype of
    ``learner.dtype``, and learner and sampler added the adapters to it.
    """
    if isinstance(data, list):
        return [as_now_written(item) for item in data]
    if not isinstance(data, dict):
        return data
    data = {name: as_now_written(item) for name, item in data.items()}
    lora = data.get("lora")
    if isinstance(lora, dict) and "base" not in lora and data.get("dtype") in DTYPES_OF_BASES:
        data["lora"] = lora | {"base": DTYPES_OF_BASES[data["dtype"]], "merged": True}
    return data


def is_run(path: Path) -> bool:
    """Whether a config.json is a run's, not a model's; an unreadable one is if its folder has checkpoints."""
    try:
        data = json.loads(path.read_text())
    except OSError:
        return False
    except (ValueError, RecursionError):
        return (path.parent / "checkpoints").is_dir()
    return isinstance(data, dict) and data.get("type") in RUNS


def reloads(run: Configuration) -> bool:
    """Whether config.json holds all that the run trains with; functions and large tables are only in the program."""
    values = flat(to_json(run)).values()
    lost = any(value == LOST or str(value).startswith(MISSING) for value in values)
    return not lost and is_whole(as_read(run))


def changes(old: Configuration, new: Configuration) -> list[str]:
    """List the fields that differ, as ``name: old -> new``."""
    before = flat(to_json(old))
    after = flat(to_json(new))
    lines = []
    for name in sorted(before.keys() | after.keys()):
        values = before.get(name), after.get(name)
        if repr(values[0]) != repr(values[1]):  # as text, since nan is not equal to itself
            texts = [str(value) for value in values]
            then, now = (text if len(text) <= 100 else f"{text[:100]}..." for text in texts)
            lines.append(f"{name}: {then} -> {now}")
    return lines


def shown(changes_found: Sequence[str]) -> str:
    """Format changes in one line: the first three, and the number of others."""
    return "; ".join(changes_found[:3]) + (f"; and {len(changes_found) - 3} more" if len(changes_found) > 3 else "")


def changed_since(directory: Path, step: int | None) -> str:
    """Report the settings of the run in a directory that changed at this step or later, in one line; empty if none."""
    path = directory / "config.json"
    if not path.is_file():
        return ""
    changed = origin_of(json.loads(path.read_text())).changed
    return "; ".join(shown(names) for at, names in changed if at >= (step or 0))


def evaluation_key(run: Any) -> str:
    """Return a key of the settings that evaluations depend on: equal keys measure the same problems in the same way."""
    test = dataclasses.replace(run.evaluation, task=run.evaluation.task or run.task, every=0, judge=None)
    return digest(to_json(test))
