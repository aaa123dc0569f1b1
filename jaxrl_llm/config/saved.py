"""A run as JSON that loads again, and what differs between two runs."""

import dataclasses
import importlib
import json
from pathlib import Path
from typing import Any

from jaxrl_llm.config.run import Run
from jaxrl_llm.config.validation import require
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.rewards.functions import Local, Lost
from jaxrl_llm.tasks.memory import MISSING, Memory

FREE_TO_CHANGE = (
    "steps",
    "run_dir",
    "mesh",
    "evaluation",
    "output",
    # What fits a machine: a run that ran out of memory must be able to go on with less.
    "learner.microbatch_rows",
    "learner.row_tokens",
    "learner.remat",
    "learner.attention",
    "rollout.slots",
    "scoring.workers",
    # What a paper does decides nothing here.
    "recipe.paper",
)
"""Fields (and all below them) that a run may be continued with other values of."""
LONGEST_SHOWN = 100
"""Characters of a value that is shown as changed."""


def to_json(value: Any) -> Any:
    """Nested JSON values; a dataclass becomes an object whose ``type`` names its class."""
    if isinstance(value, (Local, Memory)):
        value = value.to_save()
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": _name(type(value))} | fields
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    return {k: to_json(v) for k, v in value.items()} if isinstance(value, dict) else value


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def from_json(data: Any) -> Any:
    """The inverse of ``to_json``; lists come back as tuples. Only dataclasses are ever built."""
    if isinstance(data, list):
        return tuple(from_json(item) for item in data)
    if not isinstance(data, dict):
        return data
    if "type" not in data:
        return {k: from_json(v) for k, v in data.items()}
    module, _, name = data["type"].partition(":")
    # Only our own modules are imported, and only dataclasses built: a config.json is data, whoever wrote it.
    ours = module.partition(".")[0] == __name__.partition(".")[0]
    kind = getattr(importlib.import_module(module), name, None) if ours else None
    require(
        dataclasses.is_dataclass(kind),
        f"config.json names {data['type']}, which is no configuration class of this version",
    )
    fields = {k: from_json(v) for k, v in data.items() if k != "type"}
    return kind(**_meant_then(kind, fields) | fields)


def _meant_then(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that a class has got since the file was written, where the old meaning is not the new default."""
    return {"overlong_weight": 1.0} if kind is Recipe and fields.get("overlong_share") else {}


def load_json(path: Path) -> Run:
    """The run that a config.json describes."""
    try:
        run = from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(f"{path} does not describe a run of this version: {error}") from None
    require(isinstance(run, Run), f"{path} does not describe a run")
    return run


def reloads(run: Run) -> bool:
    """Whether config.json holds all that the run trains with: functions and many rows are the program's own."""
    values = flat(to_json(run)).values()
    return not any(value == _name(Lost) or str(value).startswith(MISSING) for value in values)


def changes(old: Run, new: Run) -> list[str]:
    """Fields that differ, as ``name: old -> new``."""
    before, after = flat(to_json(old)), flat(to_json(new))
    names = sorted(before.keys() | after.keys())
    # As text, since nan is not equal to itself.
    return [
        f"{name}: {_short(before.get(name))} -> {_short(after.get(name))}"
        for name in names
        if repr(before.get(name)) != repr(after.get(name))
    ]


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def flat(data: Any, prefix: str = "") -> dict[str, Any]:
    """Nested JSON values by dotted name."""
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    else:
        return {prefix: data}
    return {k: v for name, item in items for k, v in flat(item, f"{prefix}.{name}" if prefix else str(name)).items()}
