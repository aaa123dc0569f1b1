"""A run as JSON that loads again, and what differs between two runs."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from jaxrl_llm.config.code import find_class, make_findable, own_modules, why_not_found
from jaxrl_llm.config.field_types import check_types
from jaxrl_llm.config.kinds import KINDS
from jaxrl_llm.config.origin import Origin, origin_of
from jaxrl_llm.config.parts import parts_of
from jaxrl_llm.config.run import Configuration, Run
from jaxrl_llm.config.texts import RewardModel
from jaxrl_llm.config.validation import require
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.rewards.functions import Local, Lost
from jaxrl_llm.rewards.steps import StepFunction
from jaxrl_llm.tasks.memory import MISSING, Memory
from jaxrl_llm.tasks.texts import Pairs

FREE_TO_CHANGE = (
    "steps",
    "mesh",
    # All of the evaluation but its judge: what it compares with are answers from before the first step.
    "evaluation.every",
    "evaluation.samples",
    "evaluation.temperature",
    "evaluation.top_p",
    "evaluation.limit",
    "evaluation.task",
    # All of the output but monitor_kl: what it measures from is kept from the first step on.
    "output.checkpoint_every",
    "output.keep",
    "output.samples",
    "output.ratios",
    "output.tensorboard",
    "output.wandb",
    "output.run_dir",
    # What fits a machine: a run that ran out of memory must be able to go on with less.
    "learner.microbatch_rows",
    "learner.row_tokens",
    "learner.remat",
    "learner.attention",
    "rollout.slots",
    "answering.slots",
    "scoring.workers",
    "answering.workers",
    # What a paper does decides nothing here.
    "recipe.paper",
)
"""Fields (and all below them) that a run may be continued with other values of."""
LONGEST_SHOWN = 100
"""Characters of a value that is shown as changed."""
RUNS = tuple(f"{kind.__module__}:{kind.__qualname__}" for kind in KINDS)
"""The ``type`` of a config.json."""
ABOUT = ("type", "origin", "from")
"""What stands in a config.json beside the run's fields."""


@dataclasses.dataclass(frozen=True)
class Unsaveable:
    """Stands in a run that was read for what its config.json could not hold, or does not find again.

    Attributes:
      why: the reason; a part of a sentence.
    """

    why: str


@dataclasses.dataclass(frozen=True)
class Saved:
    """What a config.json holds.

    Attributes:
      run: with ``Unsaveable`` in some places, perhaps.
      origin: where it came from.
    """

    run: Configuration
    origin: Origin


def to_json(value: Any) -> Any:
    """Nested JSON values; a dataclass becomes an object whose ``type`` names its class.

    What JSON cannot hold becomes ``{"unsaveable": why}``.
    """
    if isinstance(value, Unsaveable):
        return {"unsaveable": value.why}
    if isinstance(value, (Local, StepFunction, Memory)):
        value = value.to_save()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        why = why_not_found(type(value))
        fields = {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"unsaveable": why} if why else {"type": _name(type(value))} | fields
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    name = getattr(value, "__qualname__", None)
    made = f"a {type(value).__qualname__}" if name is None else f"{value.__module__}.{name}"
    return {"unsaveable": f"the run holds {made}, which only the program that began it has: go on with it from there"}


def _name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def from_json(data: Any, origin: Origin | None = None) -> Any:
    """The inverse of ``to_json``; lists come back as tuples. Only dataclasses are ever built.

    Args:
      data: nested JSON values: a config.json is data, whoever wrote it.
      origin: whose modules, beside those of this package, may be named.

    Raises:
      InputError: something was not saved, or names what may not be named or is not there; the line says why.
    """
    return whole(rebuilt(data, origin))


def whole(value: Any, where: str = "config.json") -> Any:
    """The value, nothing of which is ``Unsaveable``.

    Raises:
      InputError: something is; the line begins with ``where`` and says why.
    """
    for part in parts_of(value):
        if isinstance(part, Unsaveable):
            raise InputError(f"{where}: {part.why}")
    return value


def is_whole(value: Any) -> bool:
    """Whether nothing of it is ``Unsaveable``."""
    return not any(isinstance(part, Unsaveable) for part in parts_of(value))


def as_read(run: Configuration) -> Configuration:
    """The run as it will be read from its config.json."""
    return rebuilt(to_json(run), Origin("", modules=own_modules(run)))


def rebuilt(data: Any, origin: Origin | None) -> Any:
    """As ``from_json``, but what cannot be had is ``Unsaveable``, and so is what cannot be made without it."""
    if isinstance(data, list):
        return tuple(rebuilt(item, origin) for item in data)
    if not isinstance(data, dict):
        return data
    if data.keys() == {"unsaveable"}:
        return Unsaveable(data["unsaveable"])
    about = ABOUT if data.get("type") in RUNS else ("type",)
    fields = {name: rebuilt(item, origin) for name, item in data.items() if name not in about}
    if "type" not in data:
        return fields
    try:
        kind = find_class(data["type"], origin)
    except (InputError, ImportError) as error:
        return Unsaveable(str(error))
    if kind is None:
        return Unsaveable(f"it names {data['type']}, which is no configuration class of this version")
    missing = [item for item in fields.values() if isinstance(item, Unsaveable)]
    try:
        return kind(**_meant_then(kind, fields) | fields)
    except (TypeError, ValueError, AttributeError):
        if not missing:
            raise
        return missing[0]


def _meant_then(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields that a class has got since the file was written, where the old meaning is not the new default."""
    if kind is RewardModel and isinstance(fields.get("data"), Pairs):
        return {"score_at": "stop"}
    return {"overlong_weight": 1.0} if kind is Recipe and fields.get("overlong_share") else {}


def load_json(path: Path) -> Configuration:
    """The run that a config.json describes.

    Raises:
      InputError: there is none, or it cannot be had from there; the line says why.
    """
    return whole(read(path).run, str(path))


def read(path: Path, own: bool = True) -> Saved:
    """What a config.json holds; what cannot be had from there is ``Unsaveable``.

    Args:
      path: of the file.
      own: whether files of own classes may be run for it, and modules where it began be found.
    """
    try:
        data = json.loads(path.read_text())
        origin = origin_of(data, path.parent)
        if own:
            for folder in origin.places():
                make_findable(folder)
        run = rebuilt(data, origin if own else None)
        if is_whole(run) and isinstance(run, KINDS):
            check_types(run)
    except FileNotFoundError:
        raise InputError(f"no such file: {path}") from None
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is no whole JSON ({error}): put the file back as the run wrote it") from None
    except (ValueError, TypeError, ImportError) as error:
        raise InputError(
            f"{path} does not describe a run of this version ({error}): take the version of jaxrl_llm that wrote it, "
            "or begin a new run"
        ) from None
    require(isinstance(run, KINDS), f"{path} does not describe a run")
    return Saved(run, origin)


def is_run(path: Path) -> bool:
    """Whether a file is a run's config.json; a model's directory has a file of that name too.

    One that cannot be read is a run's where checkpoints lie beside it.
    """
    try:
        data = json.loads(path.read_text())
    except OSError:
        return False
    except ValueError:
        return (path.parent / "checkpoints").is_dir()
    return isinstance(data, dict) and data.get("type") in RUNS


def reloads(run: Configuration) -> bool:
    """Whether config.json holds all that the run trains with: functions and many rows are the program's own."""
    values = flat(to_json(run)).values()
    lost = any(value == _name(Lost) or str(value).startswith(MISSING) for value in values)
    return not lost and is_whole(as_read(run))


def changes(old: Configuration, new: Configuration) -> list[str]:
    """Fields that differ, as ``name: old -> new``."""
    before = flat(to_json(old))
    after = flat(to_json(new))
    names = sorted(before.keys() | after.keys())
    # As text, since nan is not equal to itself.
    return [
        f"{name}: {_short(before.get(name))} -> {_short(after.get(name))}"
        for name in names
        if repr(before.get(name)) != repr(after.get(name))
    ]


def evaluation_key(run: Run) -> str:
    """Tells what the evaluations of a run measure from what others do: the problems, and how answers are sampled."""
    test = dataclasses.replace(run.evaluation, task=run.evaluation.task or run.task, every=0, judge=None)
    return hashlib.sha256(json.dumps(to_json(test)).encode()).hexdigest()[:16]


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
