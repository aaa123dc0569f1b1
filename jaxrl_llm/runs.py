"""Models by name, including those of runs: the result of one run's training can be the start of the next.

Another run may be trained further, and a directory overwritten. So config.json records for each model that a run reads
the step that ``RUN`` means and a fingerprint of the weights (``config.Pin``), decided when the run begins and kept at
each later start.
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints.dependents import DEPENDENTS, NEEDS, drop_copies, keep_copy, kept_copy, noted, write_note
from jaxrl_llm.checkpoints.snapshots import BEST, CHECKPOINTS, check_whole, kept, listed, phase_of, standing
from jaxrl_llm.checkpoints.step_files import mark
from jaxrl_llm.checkpoints.store import read_host, restore_policy, steps_in
from jaxrl_llm.config import Configuration, LoadedConfig, Pin, Start
from jaxrl_llm.config.origin import FILES, OF_CRITIC, SAVED_RUNS, models_of, place_of
from jaxrl_llm.config.texts import FromData
from jaxrl_llm.data import Collected
from jaxrl_llm.errors import InputError, naming, require
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.pretrained import BUILTIN, check_name, load_either, model_config_of
from jaxrl_llm.sharding import MeshShape, make_mesh, only_shapes, shardings
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.sharding.rules import checksums_by_name, weights_digest
from jaxrl_llm.system import storage
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.system.paths import COLLECTED, part_of


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run and one of its checkpoints or snapshots. ``run``: with the paths of data and model resolved from the
    current folder; see ``on_this_machine``. ``directory``: the checkpoint's; that of step 0, the model that the run
    began with, does not exist.
    """

    run: Configuration
    directory: Path
    step: int


DECIDE_THE_MODEL = ("model", "learner", "seed")
"""Fields of a configuration that loading its model needs."""


TESTED_ON = ("task", "data", "rollout", "answering", "batch", "evaluation")
"""Further fields that testing it needs; no kind of run has all of them."""


def find_run(name: str, tests: bool = False) -> Trained | None:
    """Find the run that ``RUN`` or ``RUN@STEP`` names; return None for others, such as a model's directory, which has a
    config.json too. ``tests``: whether its test settings must be complete, so that the files of a person's own classes
    are executed; else settings that do not concern the model may be ``Unsaveable`` in parts. InputError: neither a run
    nor a model has this name; or the run lacks this checkpoint or needed settings, or is of another version.
    """
    directory, _ = configs.split_step(name)
    path = directory / "config.json"
    if not path.is_file():
        config = directory.name
        # A shipped run that is not there yet would read as a hub id.
        if directory.parent.name == SAVED_RUNS and not directory.exists() and config in configs.config_names():
            raise InputError(f"{directory} not found: jaxrl-llm train {config} makes it")
        check_name(name)
        return None
    if not configs.is_run(path):
        return None
    saved = configs.read(path, tests)
    for field in (*DECIDE_THE_MODEL, *(TESTED_ON if tests else ())):
        configs.whole(getattr(saved.run, field, None), str(path))
    step = step_of(name)
    place = kept(directory)[step] if step else directory / BEST / "0"
    run = saved.pinned
    above = [directory.resolve()]  # the runs that it began from, directly or through others
    model = run.model
    while configs.is_run((other := configs.split_step(model)[0]) / "config.json"):
        require(
            other.resolve() not in above,
            f"{other} starts from itself, directly or by way of other runs: set model in its config.json to what "
            "it was trained from",
        )
        above.append(other.resolve())
        path = other / "config.json"
        model = configs.whole(configs.read(path, own=False).pinned.model, str(path))
    rules = run.rules if hasattr(run.rules, "phases") else configs.whole(run.rules, str(path))
    if rules.phases:
        run = configs.in_phase(run, phase_of(place) if step else 0)
    return Trained(on_this_machine(run), place, step)


def on_this_machine(run: Configuration) -> Configuration:
    """Return a run's settings without those of the machine that it was made for: its mesh, and how many rows of which
    length its devices computed at a time, by which kernel; all are chosen anew.
    """
    learner = run.learner.computing(microbatch_rows=0, row_tokens=0, attention="auto")
    return dataclasses.replace(run, mesh=MeshShape(), learner=learner)


def mesh_here(shape: MeshShape) -> Mesh:
    """Make the mesh of a command that uses a model and trains none: over all devices. InputError: the shape does not
    fit them, or sets some aside.
    """
    require(not shape.rollout, f"--mesh.rollout {shape.rollout} sets devices aside, and nothing learns: leave it out")
    return make_mesh(shape)


def step_of(name: str) -> int:
    """Return the step of the checkpoint or snapshot that ``RUN@STEP`` names, or of the newest checkpoint of ``RUN``.
    Step 0 is the model that the run began with. InputError: the run does not exist, or does not keep this step.
    """
    directory, step = configs.split_step(name)
    path = directory / "config.json"
    require(
        configs.is_run(path), f"{directory} is not a run: give the folder that holds its config.json and checkpoints"
    )
    if step == 0:
        return 0
    found = kept(directory)
    newest = max(steps_in(directory / CHECKPOINTS), default=None)
    keeps = f"it keeps {listed(directory)}"
    require(
        bool(found) and (step is not None or newest is not None),
        f"{directory} has no checkpoint yet: resume its training first, or give the model itself "
        f"({configs.read(path, own=False).run.model})" + (f", or give RUN@STEP: {keeps}" if found else ""),
    )
    step = newest if step is None else step
    best = " of its best evaluation (output.keep_best)" if name.endswith(f"@{BEST}") else ""
    require(step in found, f"{directory} has no checkpoint of step {step}{best}: {keeps}")
    return int(step or 0)


def find_start(name: str, carry: bool = False) -> configs.Start:
    """Find the step that ``step_of`` returns; for step 0 that of another run with whose weights the run began, if any.
    ``carry``: as in ``Start``. InputError: as ``step_of``; or the run has nothing to carry there.
    """
    directory, step = configs.split_step(name)[0], step_of(name)
    found = configs.read(directory / "config.json", own=False)
    if carry:
        run, kind = found.run, type(found.run).__name__
        if not isinstance(run, configs.Run):
            raise InputError(f"--carry is for reinforcement learning, and {directory} is a {kind}: leave it out")
        weights = f"step {step} of {directory} is a snapshot, which has weights alone: leave --carry out"
        require(step in steps_in(directory / CHECKPOINTS), weights)
    if step == 0 and found.origin.start is not None:
        return dataclasses.replace(found.origin.start, carry=carry)
    return configs.Start(storage.named(directory.absolute()), step, carry)


def parse_start(name: str, carry: bool = False) -> configs.Start:
    """Find the step as ``find_start`` does; ``RUN@STEP`` may be gone, for a run that has begun with it."""
    directory, step = configs.split_step(name)
    if step and step not in kept(directory) and not name.endswith(f"@{BEST}"):
        return configs.Start(storage.named(directory.absolute()), step, carry)
    return find_start(name, carry)


def has_started(directory: Path) -> bool:
    """Whether the directory has anything to lose: a checkpoint, collected answers, or a row of a training step."""
    answers = directory / COLLECTED
    if steps_in(directory / CHECKPOINTS) or answers.exists() or part_of(answers).exists():
        return True
    return any(row["step"] > 0 for row in read_rows(directory / "metrics.jsonl"))


def read_started_run(directory: Path) -> configs.LoadedConfig | None:
    """Return the configuration of the run that has begun in a directory; None without one."""
    path = directory / "config.json"
    return configs.read(path, calls=False) if path.exists() and has_started(directory) else None


def host_state(start: configs.Start) -> Any:
    """Return the host state in a run's checkpoint, as JSON values; no weights are read."""
    require(step_of(start.name) > 0, f"step 0 of {start.run} is the model that it began with: give another")
    return read_host(kept(start.directory)[start.step])


def current_phase(directory: Path) -> int:
    """Return the number of a run's current phase: each begins with a checkpoint or a snapshot."""
    places = kept(directory)
    return phase_of(places[max(places)]) if places else 0


MODEL_CHECKER: contextvars.ContextVar[Callable[[str, str, Callable[[], str]], None] | None] = contextvars.ContextVar(
    "model_checker", default=None
)
"""Checks the models of the run in training, in this thread: ``load_model`` calls it with what it reads."""


def load_model(name: str, dtype: str, mesh: Any, pack: Any = None) -> tuple[Any, Any | None]:
    """Load (model, tokenizer or None) by any name that ``load_pretrained`` knows, or by ``RUN`` or ``RUN@STEP``. A
    reward model is a ``ScalarModel``. With an abstract mesh the arrays are only shapes. ``pack``: a ``BasePacker``.
    InputError: the model cannot be found, read or used; or its weights differ from those that the run in training began
    with.
    """
    trained = find_run(name)
    if trained is not None and trained.step:
        return load_trained(trained, mesh, dtype)
    model, tokenizer = (
        load_either(name, dtype, mesh, pack=pack) if trained is None else load_trained(trained, mesh, dtype)
    )
    if (check := MODEL_CHECKER.get()) is not None and not only_shapes(mesh):
        if pack is not None and pack.checksums:
            check(name, pack.form, pack.digest)
        else:
            check(name, dtype, functools.partial(weights_digest, model))
    return model, tokenizer


def as_trained(run: Configuration, model: Any) -> Any:
    """Return the model that the run trains, from the model that it names. A reward-model run adds a scalar head, drawn
    by its seed, to a model without one. InputError: another kind of run names a reward model.
    """
    from jaxrl_llm.models.heads import ScalarModel, random_scalar_head, with_scalar_head

    scores = isinstance(model, ScalarModel)
    if isinstance(run, configs.RewardModel):
        return model if scores else with_scalar_head(model, random_scalar_head(model, run.seed))
    if scores:
        raise InputError(f"{run.model} is a reward model, which scores text and writes none: give a language model")
    return model


def architecture_of(name: str) -> ModelConfig:
    """Return the architecture of the model that ``load_model`` loads by this name; no weights are read. InputError: the
    name or the architecture is unknown.
    """
    trained = find_run(configs.without_step(name))  # a resumed role no longer needs its step
    return model_config_of(name)[0] if trained is None else architecture_of(trained.run.model)


def load_trained(trained: Trained, mesh: Any, dtype: str | None = None, merged: bool = True) -> tuple[Any, Any | None]:
    """Load (model, tokenizer or None) of a run's checkpoint. ``mesh``: as for ``load_model``. ``dtype``: of the
    weights; None keeps that of training. ``merged``: an adapter is added to the weights, in float32; if not, it stays
    beside them, as the run samples.
    """
    from jaxrl_llm.models.decoder import cast
    from jaxrl_llm.models.lora import frozen_form, merge, with_adapter

    run = trained.run
    trained = initial_model_of(trained)
    if run.learner.lora.rank and not only_shapes(mesh):
        base, adapter, tokenizer = load_adapter(trained, mesh)
        if not merged and not run.learner.lora.merged:
            policy = with_adapter(frozen_form(base, run.learner.lora, mesh), adapter)
            return cast(policy, run.learner.compute.dtype), tokenizer
        base = frozen_form(base, run.learner.lora, mesh) if run.learner.lora.packed else base
        policy = with_adapter(base, adapter)
        found = jax.jit(merge, out_shardings=shardings(jax.eval_shape(merge, policy), mesh))(policy)
    elif trained.step == 0 and not only_shapes(mesh):
        model, tokenizer, _ = load_base(trained, mesh)
        found = as_trained(run, model)
    else:
        if trained.step:
            check_whole(trained.directory)
        model, tokenizer, _ = load_base(trained, mesh.abstract_mesh)
        like = jax.eval_shape(lambda m: as_trained(run, m), model)
        found = like if only_shapes(mesh) else restore_policy(trained.directory, like, mesh)
    if dtype is None:
        return found, tokenizer
    narrow = functools.partial(cast, dtype=dtype)
    return jax.eval_shape(narrow, found) if only_shapes(mesh) else narrow(found), tokenizer


def load_adapter(trained: Trained, mesh: Any) -> tuple[Any, Any, Any | None]:
    """Load (base, adapter, tokenizer or None) of a run's checkpoint that has an adapter."""
    from jaxrl_llm.models.heads import split_head
    from jaxrl_llm.models.lora import create_adapter

    trained = initial_model_of(trained)
    if trained.step:
        check_whole(trained.directory)
    model, tokenizer, checksums = load_base(trained, mesh)
    base, head = split_head(as_trained(trained.run, model))
    make = functools.partial(create_adapter, base.config, trained.run.learner.lora, jax.random.key(trained.run.seed))
    if trained.step == 0:
        return base, jax.jit(make, out_shardings=shardings(jax.eval_shape(make, head), mesh))(head), tokenizer
    adapter = jax.eval_shape(make, head)
    return base, restore_policy(trained.directory, adapter, mesh, checksums or checksums_by_name(base)), tokenizer


def initial_model_of(trained: Trained) -> Trained:
    """Return a run's step 0 as the step of another run with whose weights it began, if any; other steps unchanged."""
    start = configs.read(trained.directory.parents[1] / "config.json", own=False).start
    if trained.step or start is None:
        return trained
    first = find_run(start.name)
    if first is None:
        raise InputError(f"{start.run} is missing, with whose weights {trained.directory.parents[1]} began")
    return initial_model_of(first)


def load_base(trained: Trained, mesh: Any) -> tuple[Any, Any | None, dict[str, Any]]:
    """Load (model, tokenizer or None, checksums) that the run was trained from: packed as it was there, with the
    checksums of what was read; {} if it is not packed. ``mesh``: as for ``load_model``; for shapes any step of another
    run will do. InputError: the model is missing; the line names the run.
    """
    from jaxrl_llm.models.lora import BasePacker

    lora = trained.run.learner.lora
    packer = BasePacker(lora) if lora.packed and not only_shapes(mesh) else None
    name = configs.without_step(trained.run.model) if only_shapes(mesh) else trained.run.model
    with naming(f"the model that {trained.directory.parents[1]} was trained from"):
        model, tokenizer = load_model(name, trained.run.learner.initial_dtype, mesh, packer)
    return model, tokenizer, {} if packer is None else packer.checksums


def decide_model_versions(loaded: LoadedConfig, directory: Path, started: bool, start: Start | None) -> dict[str, Pin]:
    """Return the pins of a run at this start, by model name: those of its config.json, and current ones for others.
    Called by one process. ``started``: whether it has anything to lose: otherwise config.json may have other settings.
    ``start``: the step of another run with its first weights; None for those of the model. InputError: a model that
    this start reads has changed or is missing.
    """
    path = directory / "config.json"
    recorded: Mapping[str, Pin] = {}
    if started and path.exists():
        recorded = configs.read(path, own=False).origin.models
    elif start is not None and loaded.run.learner.lora.rank:  # the first weights are an adapter of that run's model
        base = configs.read(start.directory / "config.json", own=False).origin.models
        recorded = {name: pin for name, pin in base.items() if name == loaded.run.model}
    needed = dict(models_of(loaded.run)) | ({} if start is None else {start.name: "--from"})
    if steps := steps_in(directory / CHECKPOINTS):
        needed = models_read(loaded.run, directory / CHECKPOINTS / str(max(steps)))
    holders = [directory] if start is None else [directory, start.directory]
    pins = {}
    for name, field in (dict(models_of(loaded.run)) | needed).items():
        pin = recorded.get(name)
        place = place_of(name, loaded.origin, loaded.directory)
        if name in BUILTIN and not Path(place).is_dir():
            continue
        if pin is None:
            pin = current_version(place)
        elif name in needed and path_of_version(pin, place, holders) is None:
            try:
                pin = compare_version(pin, place)
            except ModelChanged as change:
                if field != "model" or not needs_only_shapes(loaded.run, directory):
                    since = Path(start.run) if start is not None and not started else directory
                    raise model_changed_error(loaded.run, since, field, place, change) from None
                note = f"{directory}: {place} is not as it was when the run began ({change})"
                print(f"jaxrl-llm: {note}; the run's own checkpoint has its weights", file=sys.stderr)
                pin = current_version(place)
        pins[name] = pin
    if start is not None and start.name in recorded:
        pins[start.name] = recorded[start.name]
    return pins


def keep_dependencies(loaded: LoadedConfig, directory: Path, say: Callable[[str], None]) -> list[tuple[Path, str]]:
    """Keep the steps of other runs that a run reads, and those that they were trained from, each once and beside it.
    Called by one process; gives back the runs with a note now, and the step's mark. What cannot be kept is told by
    ``say``. ``loaded``: the run, with the pins from ``decide_model_versions`` in its origin.
    """
    start = loaded.origin.start
    if not loaded.origin.models and not any(storage.place(directory / name).exists() for name in (NEEDS, DEPENDENTS)):
        return []
    holders = [directory] if start is None else [directory, start.directory]
    marks, seen = noted(directory), set()
    to_keep = [(loaded, name) for name in loaded.origin.models]
    notes = []
    for owner, name in to_keep:  # which grows
        pin, place = owner.origin.models[name], place_of(name, owner.origin, owner.directory)
        run, step = pin.of(place)
        folder = path_of_version(pin, place, holders)
        if step is None or folder is None or (folder, step) in seen:  # of no run, or not read any more
            continue
        seen.add((folder, step))
        if folder == run and step:
            write_note(run, pin.mark, directory)
            notes.append((run, pin.mark))
        marks.add(pin.mark or str(step))
        if kept_copy(directory, run, step, pin.mark) is None:
            source = kept(folder).get(step, folder / BEST / "0")
            if why := keep_copy(directory, run, source, step, pin.mark):
                say(f"jaxrl-llm: {place} is not kept in {directory} as well ({why}): leave it where it is")
        inner = configs.read(folder / "config.json", own=False)
        first = [inner.origin.start.name] if inner.origin.start is not None and not step else []
        holders.append(folder)
        to_keep += [(inner, name) for name in (inner.run.model, *first) if name in inner.origin.models]
    drop_copies(directory, marks)
    return notes


def path_of_version(pin: Pin, place: str, holders: Sequence[Path]) -> Path | None:
    """Return the folder in which a pinned step of a run is as it was; None for other models too."""
    run, step = pin.of(place)
    return None if step is None else standing(run, step, pin.mark, *holders)


def needs_base(run: configs.Configuration, directory: Path) -> bool:
    """Whether a run with a checkpoint still needs the weights of its model: below an adapter, to compare with, or to
    collect its data again.
    """
    collects = isinstance(run, FromData) and isinstance(run.data.source, Collected)
    lacks_data = collects and not (directory / COLLECTED).exists()
    return bool(run.learner.lora.rank) or isinstance(run, configs.Preference) or lacks_data


def needs_only_shapes(run: configs.Configuration, directory: Path) -> bool:
    """Whether a start needs only the shapes of the run's own model."""
    return not needs_base(run, directory) and bool(steps_in(directory / CHECKPOINTS))


def models_read(run: configs.Configuration, checkpoint: Path) -> dict[str, str]:
    """Return the models that a run reads from a checkpoint on, with the field that names each: without those of past
    phases, and without the first weights of the policy and its roles.
    """
    phases = range(len(configs.phases_of(run)))
    with contextlib.suppress(OSError, ValueError):  # a damaged checkpoint is passed over later
        phases = phases[phase_of(checkpoint) :] if len(phases) > 1 else phases
    pairs = (pair for number in phases for pair in models_of(configs.in_phase(run, number)))
    return {name: field for name, field in pairs if field != OF_CRITIC}


def current_version(place: str) -> Pin:
    """Return a pin of the current version: the newest checkpoint of ``RUN``; without a step for other models and
    missing steps.
    """
    directory, step = configs.split_step(place)
    if not configs.is_run(directory / "config.json"):
        return Pin()
    steps = kept(directory)
    step = max(steps_in(directory / CHECKPOINTS), default=None) if step is None else step
    return Pin(step, {FILES: mark(steps[step])}) if step in steps else Pin()


class ModelChanged(Exception):
    """A model differs from the one that the run began with; the message gives the reason, as part of a sentence."""


def compare_version(pin: Pin, place: str) -> Pin:
    """Return the pin after checking that its model is still there and unchanged. ModelChanged: it is not."""
    if pin.step is None:
        now = current_version(place)
        if now.step is not None and pin.weights:
            raise ModelChanged("its weights were another model's, and it is a run now")
        return pin if now.step is None else now
    run = configs.split_step(place)[0]
    steps = kept(run) if configs.is_run(run / "config.json") else {}
    if pin.step not in steps:
        raise ModelChanged(f"step {pin.step} was read, and " + (f"it keeps {listed(run)}" if steps else "it is gone"))
    if pin.weights != {FILES: mark(steps[pin.step])}:
        raise ModelChanged(f"the files of step {pin.step} have changed")
    return pin


def model_changed_error(
    run: configs.Configuration, directory: Path, field: str, model: str, change: object
) -> InputError:
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


def model_checker(loaded: LoadedConfig, directory: Path, peers: Peers) -> Callable[[str, str, Callable[[], str]], None]:
    """Return a function that compares the weights of a model with its pin, or records their fingerprint in config.json.
    It takes the place from which a model was loaded, its dtype, and what computes its ``weights_digest``; InputError:
    the weights differ from those of the previous start. ``loaded``: the run, with the pins from
    ``decide_model_versions`` in its origin. ``peers``: all of them read, and the first one decides and writes.
    """
    models = dict(loaded.origin.models)
    names = {place_of(name, loaded.origin, loaded.directory): name for name in models}

    def settle(name: str, dtype: str, digest: str) -> None:
        pin = models[name]
        if pin.weights.get(dtype, digest) != digest:
            field = dict(models_of(loaded.run)).get(name, "model")
            raise model_changed_error(loaded.run, directory, field, name, "its weights have changed")
        if dtype not in pin.weights:
            models[name] = dataclasses.replace(pin, weights={**pin.weights, dtype: digest})
            data = json.loads((directory / "config.json").read_text())
            data["origin"]["models"] = {name: dataclasses.asdict(pin) for name, pin in models.items()}
            configs.write(directory / "config.json", data)

    def check(place: str, dtype: str, digest: Callable[[], str]) -> None:
        if place in names:
            computed = digest()
            peers.first(lambda: settle(names[place], dtype, computed))

    return check
