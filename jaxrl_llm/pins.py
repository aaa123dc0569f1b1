"""Which weights the models have that a run reads: decided when it begins, the same at each later start.

A run that is read may be trained on, and a directory may be written over. So config.json keeps of each model, with the
settings, the step that ``RUN`` stands for and a fingerprint of the weights (``config.Pin``). Steps of runs are compared
by the checksums of their files, before anything is loaded; other models as they are loaded, by their weights.
"""

import contextlib
import contextvars
import dataclasses
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm import integrity
from jaxrl_llm.checkpoint import steps_in
from jaxrl_llm.config import Found, Pin, Start
from jaxrl_llm.config.origin import OF_CRITIC, models_of, place_of
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import new_file
from jaxrl_llm.models.builtin import BUILTIN
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.snapshots import CHECKPOINTS, kept, listed, phase_of

FILES = "files"
"""Under which the fingerprint of a run's step stands."""


def decide(found: Found, directory: Path, began: bool, start: Start | None) -> dict[str, Pin]:
    """The pins of a run at this start, by the names of its models: those of its config.json, and for others what is
    there now. Called by one process.

    Args:
      found: its settings, and where they came from.
      directory: its own.
      began: whether there is anything to lose: else config.json may be of other settings.
      start: whose weights it begins with; None for those of the model.

    Raises:
      InputError: a model that this start reads has changed, or is gone.
    """
    path = directory / "config.json"
    known = configs.read(path, own=False).origin.models if began and path.exists() else _base_of(found.run, start)
    needed = _read_from_here(found.run, directory, start)
    pins = {}
    new = []
    for name, field in (dict(models_of(found.run)) | needed).items():
        pin = (known or {}).get(name)
        place = place_of(name, found.origin, found.directory)
        if name in BUILTIN and not Path(place).is_dir():
            continue
        if pin is None and began and name == found.run.model and found.run.learner.lora.rank:
            continue  # an earlier version's checkpoints say which one their adapter was trained beside
        if pin is None:
            pin = _at_hand(place)
            new.append(name if pin.step is None else f"{place}, step {pin.step}")
        elif name in needed:
            try:
                pin = _compared(pin, place)
            except Changed as change:
                if field != "model" or not of_shapes(found.run, directory):
                    since = Path(start.run) if start is not None and not began else directory
                    raise refusal(found.run, since, field, place, change) from None
                told = f"{directory}: {place} is not as it was when the run began ({change})"
                print(f"jaxrl-llm: {told}; the run's own checkpoint has its weights", file=sys.stderr)
                pin = _at_hand(place)
        pins[name] = pin
    if known is None and new:
        told = f"{directory}: an earlier version has not written down which weights its models have; from here on"
        print(f"jaxrl-llm: {told} they are those of now: {'; '.join(new)}", file=sys.stderr)
    return pins


def of_shapes(run: configs.Configuration, directory: Path) -> bool:
    """Whether a start needs no more than the shapes of the run's own model: its checkpoints hold all weights, and what
    it was at first is asked no more."""
    kept_whole = not run.learner.lora.rank and not isinstance(run, configs.Preference)
    return kept_whole and bool(steps_in(directory / CHECKPOINTS))


def _base_of(run: configs.Configuration, start: Start | None) -> dict[str, Pin]:
    """The pin of the model that the first weights, where they are an adapter, were trained beside."""
    if start is None or not run.learner.lora.rank:
        return {}
    pins = configs.read(Path(start.run) / "config.json", own=False).origin.models or {}
    return {name: pin for name, pin in pins.items() if name == run.model}


def _read_from_here(run: configs.Configuration, directory: Path, start: Start | None) -> dict[str, str]:
    """The models that a start reads, with the field that names each: none of phases that are over, and what a role or
    the policy begins with only where the run has no checkpoint yet.
    """
    done = max(steps_in(directory / CHECKPOINTS), default=None)
    phases = range(len(configs.phases_of(run)))
    if done is None:
        begins = {} if start is None else {f"{start.run}@{start.step}": "--from"}
        return dict(models_of(run)) | begins
    with contextlib.suppress(OSError, ValueError):  # a damaged checkpoint is passed over later
        phases = phases[phase_of(directory / CHECKPOINTS / str(done)) :] if len(phases) > 1 else phases
    found = (pair for number in phases for pair in models_of(configs.in_phase(run, number)))
    return {name: field for name, field in found if field != OF_CRITIC}


def _at_hand(place: str) -> Pin:
    """What is there now: of ``RUN`` the newest checkpoint; no step where it is no run, or keeps no such step."""
    directory, step = configs.split_step(place)
    if not configs.is_run(directory / "config.json"):
        return Pin()
    found = kept(directory)
    step = max(steps_in(directory / CHECKPOINTS), default=None) if step is None else step
    return Pin(step, _files(found[step])) if step in found else Pin()


def _files(step: Path) -> dict[str, str]:
    """The fingerprint of a run's step; nothing where an earlier version has written no checksums of it."""
    mark = integrity.mark(step)
    return {FILES: mark} if mark else {}


class Changed(Exception):
    """A model is not the one that the run began with; says why, as part of a sentence."""


def _compared(pin: Pin, place: str) -> Pin:
    """The pin, where what it names is still there as it was.

    Raises:
      Changed: it is not.
    """
    if pin.step is None:
        now = _at_hand(place)
        if now.step is not None and pin.weights:
            raise Changed("its weights were another model's, and it is a run now")
        return pin if now.step is None else now
    run = configs.split_step(place)[0]
    found = kept(run) if configs.is_run(run / "config.json") else {}
    if pin.step not in found:
        raise Changed(f"step {pin.step} was read, and " + (f"it keeps {listed(run)}" if found else "it is gone"))
    files = _files(found[pin.step])
    if files and files != (pin.weights or files):
        raise Changed(f"the files of step {pin.step} have changed")
    return dataclasses.replace(pin, weights=files or pin.weights)


def refusal(run: configs.Configuration, directory: Path, field: str, model: str, change: object) -> InputError:
    """The line that refuses to go on with another model than the run in this directory began with."""
    begin = "--fresh"
    adapted = field == "model" and run.learner.lora.rank  # an adapter is nothing without its model
    with contextlib.suppress(InputError):
        configs.check_start(run)
        if steps_in(directory / CHECKPOINTS) and not adapted:
            begin = f"--from {directory} (on from its weights) or --fresh"
    return InputError(
        f"{field}: {model} is not as it was when {directory} began ({change}): put it back, or begin a new run, which "
        f"reads it as it is now, with {begin}"
    )


class Pins:
    """Owner of the pins in a run's config.json while it trains: what is read for the first time is written down there.

    Args:
      found: the run, with the pins that ``decide`` has returned in its origin.
      directory: its own.
      peers: its processes; all of them read, and the first one decides and writes.
    """

    def __init__(self, found: Found, directory: Path, peers: Peers):
        self._run = found.run
        self._pins = dict(found.origin.models or {})
        compared = [name for name in self._pins if name != found.run.model or not of_shapes(found.run, directory)]
        self._names = {place_of(name, found.origin, found.directory): name for name in compared}
        self._fields = dict(models_of(found.run))
        self._directory = directory
        self._peers = peers

    def check(self, place: str, dtype: str, model: Any) -> None:
        """Compare the weights of a model that was loaded from this place, or write their fingerprint down.

        Raises:
          InputError: they are not those of the start before.
        """
        from jaxrl_llm.models.fingerprint import weights_digest

        if place in self._names:
            found = weights_digest(model)
            self._peers.first(lambda: self._settle(self._names[place], dtype, found))

    def _settle(self, name: str, dtype: str, found: str) -> None:
        pin = self._pins[name]
        if pin.weights.get(dtype, found) != found:
            field = self._fields.get(name, "model")
            raise refusal(self._run, self._directory, field, name, "its weights have changed")
        if dtype in pin.weights:
            return
        self._pins[name] = dataclasses.replace(pin, weights={**pin.weights, dtype: found})
        path = self._directory / "config.json"
        data = json.loads(path.read_text())
        data["origin"]["models"] = {name: dataclasses.asdict(pin) for name, pin in self._pins.items()}
        with new_file(path) as part:
            part.write_text(json.dumps(data, indent=1))


_PINS: contextvars.ContextVar[Pins | None] = contextvars.ContextVar("pins", default=None)


@contextlib.contextmanager
def comparing(pins: Pins) -> Generator[None]:
    """Within the block, and in this thread, what ``trained.load_model`` reads is held against these pins."""
    before = _PINS.set(pins)
    try:
        yield
    finally:
        _PINS.reset(before)


def check_read(place: str, dtype: str, model: Any) -> None:
    """Hold what was loaded from this place against the pins of the run that trains, if one does.

    Raises:
      InputError: its weights have changed since that run began.
    """
    pins = _PINS.get()
    if pins is not None:
        pins.check(place, dtype, model)
