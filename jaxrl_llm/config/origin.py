"""Where a run came from: what config.json records beside the settings, so that all is found again from elsewhere."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.config.parts import with_parts
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
class Origin:
    """Where a run's settings came from.

    Attributes:
      folder: where the run began; relative paths of data and models start there.
      config: the configuration's file; None for a run that was made in Python.
      modules: files of the modules beside the configuration that the run's own classes are defined in, by name.
      start: whose weights it began with; None for those of the model.
    """

    folder: str
    config: str | None = None
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start: Start | None = None

    def places(self) -> list[Path]:
        """Where its modules lie: the configuration's folder, then that where it began; as far as they are there."""
        beside = [] if self.config is None else [Path(self.config).parent]
        return [folder for folder in (*beside, Path(self.folder)) if folder.is_dir()]

    def to_json(self) -> dict[str, Any]:
        """What config.json has beside the settings: ``origin``, and ``from`` where it began with another's weights."""
        origin = {"folder": self.folder, "config": self.config, "modules": dict(self.modules)}
        return {"origin": origin} | ({} if self.start is None else {"from": dataclasses.asdict(self.start)})


def origin_of(data: Mapping[str, Any], directory: Path) -> Origin:
    """The inverse of ``to_json``, of a config.json in ``directory``; older ones do not say it, and are guessed at."""
    start = Start(**data["from"]) if "from" in data else None
    if "origin" in data:
        return Origin(**data["origin"], start=start)
    usual = directory.absolute().parent
    return Origin(str(usual.parent if usual.name == SAVED_RUNS else Path.cwd()), start=start)


PLACES: tuple[tuple[type, str], ...] = (
    (Table, "path"),
    (HubDataset, "name"),
    (Critic, "model"),
    (ModelReward, "path"),
    (StepReward, "path"),
    (Curriculum, "statistics"),
)
"""Fields that name a file or a folder, or several; so does every configuration's ``model``."""


def split_step(name: str) -> tuple[Path, int | None]:
    """``RUN@STEP`` as a directory and a number; without one, or where a folder has just this name, None.

    Raises:
      InputError: it is an address.
    """
    run, _, step = local(name).rpartition("@")
    return (Path(run), int(step)) if run and step.isdecimal() and not Path(name).exists() else (Path(name), None)


def located(run: Any, origin: Origin, directory: Path | None = None) -> Any:
    """The run with relative paths of data and models that are not found from the current folder written out.

    They are looked for in the folder where the run began, beside its configuration, above ``runs/`` where the run's
    ``directory`` lies now, and in the current folder; the first that exists is taken.
    """
    folders = [Path(origin.folder), *origin.places()]
    if directory is not None and directory.absolute().parent.name == SAVED_RUNS:
        folders.append(directory.absolute().parent.parent)

    def placed(part: Any) -> Any:
        for kind, field in PLACES:
            if isinstance(part, kind):
                return dataclasses.replace(part, **{field: _placed(getattr(part, field), folders)})
        return part

    return dataclasses.replace(with_parts(run, placed), model=_found(run.model, folders))


def _placed(named: Any, folders: list[Path]) -> Any:
    """A path, several, or None."""
    if isinstance(named, (tuple, list)):
        return tuple(_found(one, folders) for one in named)
    return None if named is None else _found(named, folders)


def _found(text: str, folders: list[Path]) -> str:
    if Path(text).is_absolute() or not text:
        return text
    for folder in folders:
        if split_step(str(folder / text))[0].exists():
            return text if folder == Path.cwd() else str(folder / text)
    return text
