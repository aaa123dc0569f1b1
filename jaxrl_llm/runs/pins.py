"""Pins: the versions of the models that a run reads, decided when it begins and kept at each later start.

Another run may be trained further, and a directory overwritten. So config.json records for each model, with the
settings, the step that ``RUN`` means and a fingerprint of the weights (``config.Pin``). Steps of runs are compared by
the checksums of their files, before anything is loaded; other models by their weights, as they are loaded.
"""

import contextlib
import contextvars
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints.dependents import DEPENDENTS, NEEDS, drop_copies, keep_copy, kept_copy, noted, write_note
from jaxrl_llm.checkpoints.integrity import mark
from jaxrl_llm.checkpoints.snapshots import BEST, CHECKPOINTS, kept, listed, phase_of, standing
from jaxrl_llm.checkpoints.store import steps_in
from jaxrl_llm.config import Found, Pin, Start
from jaxrl_llm.config.origin import FILES, OF_CRITIC, models_of, place_of
from jaxrl_llm.config.texts import FromData
from jaxrl_llm.data import Collected
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.pretrained import BUILTIN
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.sharding.rules import weights_digest
from jaxrl_llm.system import storage
from jaxrl_llm.system.paths import COLLECTED


def decide(found: Found, directory: Path, began: bool, start: Start | None) -> dict[str, Pin]:
    """Return the pins of a run at this start, by model name: those of its config.json, and current ones for others.

    Called by one process.

    Args:
      found: the run's settings and their origin.
      directory: the run's.
      began: whether it has anything to lose: otherwise config.json may have other settings.
      start: the step of another run with its first weights; None for those of the model.

    Raises:
      InputError: a model that this start reads has changed or is missing.
    """
    path = directory / "config.json"
    known: Mapping[str, Pin] = {}
    if began and path.exists():
        known = configs.read(path, own=False).origin.models
    elif start is not None and found.run.learner.lora.rank:  # the first weights are an adapter of that run's model
        base = configs.read(start.directory / "config.json", own=False).origin.models
        known = {name: pin for name, pin in base.items() if name == found.run.model}
    needed = dict(models_of(found.run)) | ({} if start is None else {start.name: "--from"})
    if steps := steps_in(directory / CHECKPOINTS):
        needed = _read_from(found.run, directory / CHECKPOINTS / str(max(steps)))
    holders = [directory] if start is None else [directory, start.directory]
    pins = {}
    for name, field in (dict(models_of(found.run)) | needed).items():
        pin = known.get(name)
        place = place_of(name, found.origin, found.directory)
        if name in BUILTIN and not Path(place).is_dir():
            continue
        if pin is None:
            pin = _at_hand(place)
        elif name in needed and _there(pin, place, holders) is None:
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
    if start is not None and start.name in known:
        pins[start.name] = known[start.name]
    return pins


def keep_dependencies(found: Found, directory: Path, say: Callable[[str], None]) -> list[tuple[Path, str]]:
    """Keep the steps of other runs that a run reads, and those that they were trained from, each once and beside it.

    Called by one process; gives back the runs with a note now, and the step's mark. What cannot be kept is told by
    ``say``.

    Args:
      found: the run, with the pins from ``decide`` in its origin.
      directory: the run's.
    """
    start = found.origin.start
    if not found.origin.models and not any(storage.place(directory / name).exists() for name in (NEEDS, DEPENDENTS)):
        return []
    holders = [directory] if start is None else [directory, start.directory]
    wanted, seen = noted(directory), set()
    asked = [(found, name) for name in found.origin.models]
    notes = []
    for of, name in asked:  # which grows
        pin, place = of.origin.models[name], place_of(name, of.origin, of.directory)
        run, step = pin.of(place)
        folder = _there(pin, place, holders)
        if step is None or folder is None or (folder, step) in seen:  # of no run, or not read any more
            continue
        seen.add((folder, step))
        if folder == run and step:
            write_note(run, pin.mark, directory)
            notes.append((run, pin.mark))
        wanted.add(pin.mark or str(step))
        if kept_copy(directory, run, step, pin.mark) is None:
            source = kept(folder).get(step, folder / BEST / "0")
            if why := keep_copy(directory, run, source, step, pin.mark):
                say(f"jaxrl-llm: {place} is not kept in {directory} as well ({why}): leave it where it is")
        inner = configs.read(folder / "config.json", own=False)
        first = [inner.origin.start.name] if inner.origin.start is not None and not step else []
        holders.append(folder)
        asked += [(inner, name) for name in (inner.run.model, *first) if name in inner.origin.models]
    drop_copies(directory, wanted)
    return notes


def _there(pin: Pin, place: str, holders: Sequence[Path]) -> Path | None:
    """Return the folder in which a pinned step of a run is as it was; None for other models too."""
    run, step = pin.of(place)
    return None if step is None else standing(run, step, pin.mark, *holders)


def needs_base(run: configs.Configuration, directory: Path) -> bool:
    """Whether a run with a checkpoint still needs the weights of its model: below an adapter, to compare with, or to
    collect its data again."""
    collects = isinstance(run, FromData) and isinstance(run.data.source, Collected)
    lacks_data = collects and not (directory / COLLECTED).exists()
    return bool(run.learner.lora.rank) or isinstance(run, configs.Preference) or lacks_data


def of_shapes(run: configs.Configuration, directory: Path) -> bool:
    """Whether a start needs only the shapes of the run's own model."""
    return not needs_base(run, directory) and bool(steps_in(directory / CHECKPOINTS))


def _read_from(run: configs.Configuration, checkpoint: Path) -> dict[str, str]:
    """Return the models that a run reads from a checkpoint on, with the field that names each: without those of past
    phases, and without the first weights of the policy and its roles."""
    phases = range(len(configs.phases_of(run)))
    with contextlib.suppress(OSError, ValueError):  # a damaged checkpoint is passed over later
        phases = phases[phase_of(checkpoint) :] if len(phases) > 1 else phases
    found = (pair for number in phases for pair in models_of(configs.in_phase(run, number)))
    return {name: field for name, field in found if field != OF_CRITIC}


def _at_hand(place: str) -> Pin:
    """Return a pin of the current version: the newest checkpoint of ``RUN``; without a step for other models and
    missing steps."""
    directory, step = configs.split_step(place)
    if not configs.is_run(directory / "config.json"):
        return Pin()
    found = kept(directory)
    step = max(steps_in(directory / CHECKPOINTS), default=None) if step is None else step
    return Pin(step, {FILES: mark(found[step])}) if step in found else Pin()


class Changed(Exception):
    """A model differs from the one that the run began with; the message gives the reason, as part of a sentence."""


def _compared(pin: Pin, place: str) -> Pin:
    """Return the pin after checking that its model is still there and unchanged.

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
    if pin.weights != {FILES: mark(found[pin.step])}:
        raise Changed(f"the files of step {pin.step} have changed")
    return pin


def refusal(run: configs.Configuration, directory: Path, field: str, model: str, change: object) -> InputError:
    """Return the error that refuses to resume the run in this directory with a changed model."""
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


def checking(found: Found, directory: Path, peers: Peers) -> Callable[[str, str, Any], None]:
    """Return a function that compares the weights of a model with its pin, or records their fingerprint in config.json.

    It takes the place from which a model was loaded, its dtype, and the model; its InputError says that the weights
    differ from those of the previous start.

    Args:
      found: the run, with the pins from ``decide`` in its origin.
      directory: the run's.
      peers: its processes; all of them read, and the first one decides and writes.
    """
    models = dict(found.origin.models)
    names = {place_of(name, found.origin, found.directory): name for name in models}

    def settle(name: str, dtype: str, digest: str) -> None:
        pin = models[name]
        if pin.weights.get(dtype, digest) != digest:
            field = dict(models_of(found.run)).get(name, "model")
            raise refusal(found.run, directory, field, name, "its weights have changed")
        if dtype not in pin.weights:
            models[name] = dataclasses.replace(pin, weights={**pin.weights, dtype: digest})
            data = json.loads((directory / "config.json").read_text())
            data["origin"]["models"] = {name: dataclasses.asdict(pin) for name, pin in models.items()}
            configs.write(directory / "config.json", data)

    def check(place: str, dtype: str, model: Any) -> None:
        if place in names:
            digest = weights_digest(model)
            peers.first(lambda: settle(names[place], dtype, digest))

    return check


PINS: contextvars.ContextVar[Callable[[str, str, Any], None] | None] = contextvars.ContextVar("pins", default=None)
"""Checks the models of the run in training, in this thread: ``runs.load.load_model`` calls it with what it reads."""
