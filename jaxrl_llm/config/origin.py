"""Where a run came from: what config.json records beside the settings, so that all is found again from elsewhere."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.parts import parts_of, with_parts
from jaxrl_llm.folders import local
from jaxrl_llm.learner.settings import Critic
from jaxrl_llm.rewards.models import ModelReward, StepReward
from jaxrl_llm.tasks.curriculum import Curriculum
from jaxrl_llm.tasks.sources import HubDataset, Table

SAVED_RUNS = "runs"
"""A run lies in ``runs/NAME`` below the folder where it began, unless it is told otherwise."""


@dataclasses.dataclass(frozen=True)
class Start:
    """What a run's first weights are, where they are not the model's: those of another run.

    Attributes:
      run: its directory.
      step: of a checkpoint, or of a snapshot.
    """

    run: str
    step: int


@dataclasses.dataclass(frozen=True)
class Pin:
    """Which weights a model that a run reads has from the run's beginning to its end.

    Attributes:
      step: of the checkpoint or snapshot of a run; None for other models.
      weights: their fingerprints, by the dtype in which they were read; of a run's step that of its files, under
        ``files``. Empty where nothing is known of them.
    """

    step: int | None = None
    weights: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a run's settings came from.

    Attributes:
      folder: where the run began; relative paths of data and models start there.
      config: the configuration's file; None for a run that was made in Python.
      modules: files of the modules beside the configuration that the run's own classes are defined in, by name.
      start: whose weights it began with; None for those of the model.
      models: the pins of the models that it reads, by the names that its settings give them; None where it has none
        yet, and in runs of earlier versions.
    """

    folder: str
    config: str | None = None
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start: Start | None = None
    models: Mapping[str, Pin] | None = None

    def places(self) -> list[Path]:
        """Where its modules lie: the configuration's folder, then that where it began; as far as they are there."""
        beside = [] if self.config is None else [Path(self.config).parent]
        return [folder for folder in (*beside, Path(self.folder)) if folder.is_dir()]

    def to_json(self) -> dict[str, Any]:
        """What config.json has beside the settings: ``origin``, and ``from`` where it began with another's weights."""
        origin: dict[str, Any] = {"folder": self.folder, "config": self.config, "modules": dict(self.modules)}
        if self.models is not None:
            origin["models"] = {name: dataclasses.asdict(pin) for name, pin in self.models.items()}
        return {"origin": origin} | ({} if self.start is None else {"from": dataclasses.asdict(self.start)})


def origin_of(data: Mapping[str, Any], directory: Path) -> Origin:
    """The inverse of ``to_json``, of a config.json in ``directory``; older ones do not say it, and are guessed at."""
    start = Start(**data["from"]) if "from" in data else None
    if "origin" in data:
        models = data["origin"].get("models")
        pins = None if models is None else {name: Pin(**found) for name, found in models.items()}
        return Origin(**data["origin"] | {"models": pins}, start=start)
    usual = directory.absolute().parent
    return Origin(str(usual.parent if usual.name == SAVED_RUNS else Path.cwd()), start=start)


MODELS: tuple[tuple[type, str], ...] = ((Critic, "model"), (ModelReward, "path"), (StepReward, "path"))
"""Fields that name a model, or several; so does every configuration's ``model``."""
PLACES: tuple[tuple[type, str], ...] = (
    (Table, "path"),
    (HubDataset, "name"),
    *MODELS,
    (Curriculum, "statistics"),
)
"""Fields that name a file or a folder, or several."""
OF_CRITIC = "recipe.critic.model"


def split_step(name: str) -> tuple[Path, int | None]:
    """``RUN@STEP`` as a directory and a number; without one, or where a folder has just this name, None.

    Raises:
      InputError: it is an address.
    """
    run, _, step = local(name).rpartition("@")
    return (Path(run), int(step)) if run and step.isdecimal() and not Path(name).exists() else (Path(name), None)


def without_step(name: str) -> str:
    """``RUN`` for ``RUN@STEP``; any other name as it is."""
    directory, step = split_step(name)
    return name if step is None else str(directory)


def located(run: Any, origin: Origin, directory: Path | None = None) -> Any:
    """The run with relative paths of data and models that are not found from the current folder written out.

    They are looked for in the folder where the run began, beside its configuration, above ``runs/`` where the run's
    ``directory`` lies now, and in the current folder; the first that exists is taken.
    """
    return _renamed(run, PLACES, lambda name: place_of(name, origin, directory))


def _renamed(run: Any, fields: tuple[tuple[type, str], ...], rename: Callable[[str], str]) -> Any:
    """The run with other names in these fields, and in its ``model``."""

    def renamed(part: Any) -> Any:
        for kind, field in fields:
            if isinstance(part, kind):
                named = getattr(part, field)
                several = isinstance(named, (tuple, list))
                new = tuple(rename(one) for one in named) if several else None if named is None else rename(named)
                return dataclasses.replace(part, **{field: new})
        return part

    return dataclasses.replace(with_parts(run, renamed), model=rename(run.model))


def place_of(text: str, origin: Origin, directory: Path | None) -> str:
    """Where a relative path lies, as ``located`` writes it."""
    if Path(text).is_absolute() or not text:
        return text
    folders = [Path(origin.folder), *origin.places()]
    if directory is not None and directory.absolute().parent.name == SAVED_RUNS:
        folders.append(directory.absolute().parent.parent)
    for folder in folders:
        if split_step(str(folder / text))[0].exists():
            return text if folder == Path.cwd() else str(folder / text)
    return text


def models_of(run: Any) -> Iterator[tuple[str, str]]:
    """Each name that the settings give a model that the run reads, and the field or reward that names it."""
    yield run.model, "model"
    for part in parts_of(run):
        for kind, field in MODELS:
            if isinstance(part, kind):
                named = getattr(part, field) or ()
                label = OF_CRITIC if isinstance(part, Critic) else f"reward {part.name}"
                yield from ((name, label) for name in ((named,) if isinstance(named, str) else named))


def pinned(run: Any, origin: Origin) -> Any:
    """The run with ``RUN@STEP`` in place of each ``RUN`` that is pinned to a step."""

    def at_step(name: str) -> str:
        pin = (origin.models or {}).get(name, Pin())
        return name if pin.step is None or split_step(name)[1] is not None else f"{name}@{pin.step}"

    return _renamed(run, MODELS, at_step)
