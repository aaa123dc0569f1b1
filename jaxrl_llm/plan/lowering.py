"""The programs of a run, compiled for a machine from shapes alone, and the architectures of its models."""

import dataclasses
import functools
import json
import re
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import Configuration, split_step, without_step
from jaxrl_llm.config.origin import SAVED_RUNS
from jaxrl_llm.engine.sampling import as_rules
from jaxrl_llm.engine.sampling import asked as asked_of
from jaxrl_llm.engine.scheduler import bucket
from jaxrl_llm.engine.slots import extend_prompts, fill_slots, idle, run_chunk, slot_shardings
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.learner.forward import scoring
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoding import empty_cache
from jaxrl_llm.models.hf import read_config
from jaxrl_llm.models.lora import base_named, is_adapter, model_of
from jaxrl_llm.models.pretrained import architecture
from jaxrl_llm.plan import hlo
from jaxrl_llm.plan.machines import Machine
from jaxrl_llm.plan.movement import Loop, cycles, loops
from jaxrl_llm.plan.shapes import Arrays, SamplingArrays, abstract_mesh, abstract_model, arrays, prompt_calls
from jaxrl_llm.runs.load import config_of, find_run
from jaxrl_llm.sharding import abstract, batch_parts, make_mesh, rollout_mesh
from jaxrl_llm.sharding.mesh import without_compilation_cache
from jaxrl_llm.stages import stage_of
from jaxrl_llm.stages.stage import Architectures, Outline
from jaxrl_llm.system import storage

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program and its needs on one device.

    Attributes:
      arguments: bytes of its arguments.
      outputs: bytes of its results in new memory.
      temporary: bytes of temporaries while it runs.
      loops: memory traffic and transfers of the program and each of its loops.
      cycles: of a TPU's core in one call, by its compiler, without kernels of Pallas and collectives; 0 on GPUs.
      products: number of matrix products by implementation, which a GPU's compiler chooses.
      seconds: duration of the compilation.
      refused: bytes that it would need, if that is more than the device has; the other numbers are then 0.
      text: the compiled program.
    """

    arguments: int = 0
    outputs: int = 0
    temporary: int = 0
    loops: tuple[Loop, ...] = ()
    cycles: float = 0.0
    products: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    refused: float = 0.0
    text: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A run on a mesh of described devices, ready to compile.

    Attributes:
      run: the resolved settings.
      mesh: mesh that learns; abstract where nothing is compiled.
      where: mesh that samples.
      outline: the trainer's functions.
      arrays: their arguments.
    """

    run: Configuration
    mesh: Any
    where: Any
    outline: Outline
    arrays: Arrays


def subject(
    run: Configuration,
    config: ModelConfig,
    devices: list[Any] | None,
    find: Architectures = config_of,
    machine: Machine | None = None,
) -> Subject:
    """Return the run's functions and their arguments on these devices.

    ``find``: returns the architecture of other models. Without devices the meshes are abstract, of the ``machine``, and
    nothing can be compiled.
    """
    mesh, where = meshes(run, devices, machine)
    model = abstract_model(config, run.learner.dtype)
    outline = planned_stage(run).outline(run, model, mesh, where, find)
    return Subject(run, mesh, where, outline, arrays(outline, model, mesh, where))


def meshes(run: Configuration, devices: list[Any] | None, machine: Machine | None = None) -> tuple[Any, Any]:
    """Return the run's meshes for learning and for sampling: of these devices, or without them abstract, of the
    machine."""
    if devices is not None or machine is None:
        return make_mesh(run.mesh, devices), rollout_mesh(run.mesh, devices)
    sizes = run.mesh.sizes(machine.devices), run.mesh.sampling_sizes(machine.devices)
    return abstract_mesh(sizes[0], machine.chip.platform), abstract_mesh(sizes[1], machine.chip.platform)


def planned_stage(run: Configuration) -> ModuleType:
    """Return the module of the run's kind of training, which outlines its computation.

    Raises:
      InputError: the module has no outline.
    """
    stage = stage_of(run)
    kind = type(run).__name__
    require(hasattr(stage, "outline"), f"a {kind} cannot be planned: its stage has no outline (stages/stage.py)")
    return stage


def lowered(one: Subject, name: str) -> jax.stages.Lowered:
    """Lower a program of the run, at its largest: all slots, the longest prompts, the last call of several.

    ``weights`` casts and lays out the policy for sampling; ``refill`` fills slots and blocks with a call's prompts.
    """
    held = one.arrays
    scalar = jax.ShapeDtypeStruct((), np.float32)
    for learned in held.learned:
        if learned.name == name:
            role = learned.training
            coefficients = dict.fromkeys(one.outline.coefficients[role.role], scalar)
            with jax.set_mesh(one.mesh):
                return role.update.lower(held.state, role.reads(held.packed), coefficients)
    for reading in held.readings:
        if reading.name == name:
            with jax.set_mesh(reading.forward.mesh):
                compute = reading.forward.compute
                program = scoring(compute.compiler)
                return program.lower(reading.model, reading.packed, scalar, compute, reading.asked.output)
    assert isinstance(held, SamplingArrays)
    sampler = held.sampler
    if name == "weights":
        with jax.set_mesh(one.mesh):
            transfer: Any = sampler.transfer(one.mesh, one.where)
            return transfer.lower(model_of(held.state))
    shape, where = held.slot_shape, one.where
    rows, piece, calls = prompt_calls(sampler.rollout.max_prompt_tokens, batch_parts(where))
    dtype = held.slots.cache.k.dtype
    with jax.set_mesh(where):
        cache = jax.eval_shape(lambda: empty_cache(held.sampled.config, rows, bucket(calls * piece), dtype))
        cache = abstract(cache, slot_shardings(cache, where))
        if name == "prompts":
            lengths = jax.ShapeDtypeStruct((rows,), np.int32)
            tokens = jax.ShapeDtypeStruct((rows, piece), np.int32)
            given = cache if calls > 1 else None
            return extend_prompts.lower(held.sampled, given, lengths, tokens, cache.columns, where)
        if name == "refill":
            begun = jax.eval_shape(lambda: idle(shape, cache.v.shape[1], sampler.rules.repetition))
            return fill_slots.lower(held.slots, cache, begun, where)
        rules = jax.eval_shape(lambda: as_rules(sampler.rules))
        chunk = sampler.rollout.engine.chunk
        how = {"group": shape.group, "mesh": where, "form": held.build.form}
        return run_chunk.lower(held.sampled, held.slots, rules, chunk, asked_of(sampler.rules), **how)


def programs(one: Subject) -> dict[str, Mesh]:
    """Return the run's programs in order, each with its mesh; weights that move to other devices need none."""
    found = {}
    if isinstance(one.arrays, SamplingArrays):
        found = {} if one.run.mesh.rollout else {"weights": one.mesh}
        found |= dict.fromkeys(("prompts", "refill", "decode"), one.where)
    return found | {model.name: model.forward.mesh for model in (*one.arrays.readings, *one.arrays.learned)}


def compile_one(one: Subject, name: str) -> Compiled:
    """Compile one of the programs; one that needs more memory than the device has is returned as refused."""
    began = time.monotonic()
    with without_compilation_cache():
        try:
            done = lowered(one, name).compile()
        except jax.errors.JaxRuntimeError as error:
            return Compiled(seconds=time.monotonic() - began, refused=needed(str(error)))
    memory = done.memory_analysis()
    text = str(done.as_text())
    # Trip counts of loops with a bound in the data: microbatches and chunks of predictions, or decode steps.
    repeats: tuple[float, ...] = ()
    if isinstance(one.arrays, SamplingArrays) and name == "decode":
        repeats = (one.arrays.sampler.rollout.engine.chunk,)
    for model in (*one.arrays.learned, *one.arrays.readings):
        if model.name == name:
            chunks = -(-model.packed.predictions.target.shape[-1] // model.forward.compute.head_chunk)
            repeats = (model.microbatches,) + (chunks,) * model.predicts
    program = hlo.parse(text, programs(one)[name].size)
    return Compiled(
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        tuple(loops(program, repeats)),
        cycles(program, unknown=repeats),
        hlo.products(text),
        time.monotonic() - began,
        text=text,
    )


def needed(text: str) -> float:
    """Return the bytes that a program would have needed, from the compiler's error.

    Raises:
      InputError: the compiler failed for another reason.
    """
    found = re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", text)
    require("RESOURCE_EXHAUSTED" in text or found is not None, f"the compiler failed: {text.splitlines()[0]}")
    return float(found[1]) * _UNITS[found[2]] if found else float("inf")


def model_config(name: str) -> tuple[ModelConfig, str]:
    """Return the architecture of a model or adapter directory, .gguf file, built-in name, hub id or RUN[@STEP], and its
    source.

    The package holds a copy of config.json for well-known models, so that planning needs no network.

    Raises:
      InputError: no such model, or an unknown architecture.
    """
    if name in published() and not Path(name).is_dir():
        return read_config(published()[name]), "the published config.json, copied into this package"
    trained = find_run(name)
    adapter = is_adapter(storage.folder(name))
    if trained is None and not adapter:
        return architecture(name)
    base = base_named(storage.folder(name)) if trained is None else without_step(trained.run.model)
    config, source = model_config(base)
    return config, f"of {'adapter' if adapter else 'run'} {name}: {source}"


def architectures(policy: ModelConfig) -> tuple[Architectures, list[str]]:
    """Return a function from the name of a run's other model to its architecture, and the notes that it adds to.

    A run that has not been trained yet has no directory: the function assumes the policy's architecture and notes that.
    It raises InputError for a model that exists, but cannot be read.
    """
    notes: list[str] = []

    @functools.cache
    def find(name: str) -> ModelConfig:
        directory, _ = split_step(name)
        # Where there is no folder of runs yet, its name would read as a hub id.
        if directory.parent.name != SAVED_RUNS or directory.exists():
            try:
                return model_config(name)[0]
            except InputError:
                if directory.exists():
                    raise
        notes.append(f"{name} not found: planned as a model of the policy's architecture")
        return policy

    return find, notes


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """Return the config.json of well-known models by hub id; attributes that change no shape are left out."""
    text = (resources.files("jaxrl_llm.plan") / "published.json").read_text()
    return {name: entry["config"] for entry in json.loads(text) for name in entry["names"]}
