"""The programs of a run, compiled for a machine from shapes alone, and the architectures of its models."""

import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxrl_llm.config import Configuration, Run, split_step, without_step
from jaxrl_llm.config.origin import SAVED_RUNS
from jaxrl_llm.engine.prefix_cache import bucket
from jaxrl_llm.engine.sampling import as_rules, asked
from jaxrl_llm.engine.scheduler import idle
from jaxrl_llm.engine.slots import extend_prompts, fill_slots, run_chunk, slot_shardings
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.forward import score
from jaxrl_llm.models.cache import Cache, empty_cache
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.heads import CHUNK
from jaxrl_llm.models.hf_config import read_config
from jaxrl_llm.models.lora import policy_model
from jaxrl_llm.models.pretrained import architecture
from jaxrl_llm.plan import hlo
from jaxrl_llm.plan.machines import Machine, without_compilation_cache
from jaxrl_llm.plan.movement import Loop, loops
from jaxrl_llm.plan.shapes import (
    Arrays,
    PlannedPass,
    PlannedRole,
    SamplingArrays,
    abstract_mesh,
    abstract_model,
    arrays,
    meshes,
    prompt_calls,
)
from jaxrl_llm.runs.load import config_of, find_run
from jaxrl_llm.sharding import abstract, batch_parts
from jaxrl_llm.stages import stage_of
from jaxrl_llm.stages.outline import Architectures, Outline
from jaxrl_llm.stages.rl.ingredients import ingredients_of

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program and its needs on one device.

    Attributes:
      name: "weights", "prompts", "refill", "decode", "update", or that of another role or of a pass.
      arguments: bytes of its arguments.
      outputs: bytes of its results in new memory.
      temporary: bytes of temporaries while it runs.
      collectives: transfers of one call; loops multiplied out.
      loops: memory traffic of the program and each of its loops.
      products: number of matrix products by implementation, which a GPU's compiler chooses.
      seconds: duration of the compilation.
      refused: bytes that it would need, if that is more than the device has; the other numbers are then 0.
    """

    name: str
    arguments: int = 0
    outputs: int = 0
    temporary: int = 0
    collectives: tuple[hlo.Collective, ...] = ()
    loops: tuple[Loop, ...] = ()
    products: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    refused: float = 0.0


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
    mesh, where = meshes(run, devices) if machine is None or devices is not None else abstract_meshes(run, machine)
    model = abstract_model(config, run.learner.dtype)
    outline = planned_stage(run).outline(run, model, mesh, where, find)
    return Subject(run, mesh, where, outline, arrays(outline, model, mesh, where))


def abstract_meshes(run: Configuration, machine: Machine) -> tuple[AbstractMesh, AbstractMesh]:
    """Return the run's meshes for learning and for sampling, abstract, without described devices."""
    sizes = run.mesh.sizes(machine.devices), run.mesh.sampling_sizes(machine.devices)
    return abstract_mesh(sizes[0], machine.chip.platform), abstract_mesh(sizes[1], machine.chip.platform)


def planned_stage(run: Configuration) -> ModuleType:
    """Return the module of the run's kind of training, which outlines its computation.

    Raises:
      InputError: the module has no outline.
    """
    stage = stage_of(run)
    if not hasattr(stage, "outline"):
        raise InputError(f"a {type(run).__name__} cannot be planned: its stage has no outline (stages/outline.py)")
    return stage


def lower_update(one: Subject, learned: PlannedRole) -> jax.stages.Lowered:
    """Lower an optimiser update of a role."""
    scalar = jax.ShapeDtypeStruct((), np.float32)
    coefficients = dict.fromkeys(one.outline.coefficients[learned.training.role], scalar)
    with jax.set_mesh(one.mesh):
        return learned.training.update.lower(one.arrays.state, learned.training.reads(one.arrays.packed), coefficients)


def lower_reading(reading: PlannedPass) -> jax.stages.Lowered:
    """Lower a pass over one call's completions."""
    temperature = jax.ShapeDtypeStruct((), np.float32)
    forward = reading.forward
    with jax.set_mesh(forward.mesh):
        return score.lower(reading.model, reading.packed, temperature, forward.compute, reading.asked.output)


def lower_decode(one: Subject, a: SamplingArrays) -> jax.stages.Lowered:
    """Lower a chunk of decode steps with all slots and the longest cache."""
    rules = jax.eval_shape(lambda: as_rules(a.sampling))
    with jax.set_mesh(one.where):
        return run_chunk.lower(
            a.sampled, a.slots, rules, a.rollout.chunk, asked(a.sampling), a.slot_shape.group, one.where
        )


def prompts(one: Subject, a: SamplingArrays) -> Cache:
    """Return the cache of one call with the longest prompts, as shapes with their layout."""
    rows, piece, calls = prompt_calls(a.rollout.max_prompt_tokens, batch_parts(one.where))
    dtype = a.slots.cache.k.dtype
    cache = jax.eval_shape(lambda: empty_cache(a.sampled.config, rows, bucket(calls * piece), dtype))
    return abstract(cache, slot_shardings(cache, one.where))


def lower_prompts(one: Subject, a: SamplingArrays) -> jax.stages.Lowered:
    """Lower the prefill of the longest prompts; the last call, where there are several."""
    rows, piece, calls = prompt_calls(a.rollout.max_prompt_tokens, batch_parts(one.where))
    cache = prompts(one, a)
    lengths = jax.ShapeDtypeStruct((rows,), np.int32)
    tokens = jax.ShapeDtypeStruct((rows, piece), np.int32)
    with jax.set_mesh(one.where):
        return extend_prompts.lower(a.sampled, cache if calls > 1 else None, lengths, tokens, cache.columns, one.where)


def lower_refill(one: Subject, a: SamplingArrays) -> jax.stages.Lowered:
    """Lower the filling of slots and blocks with the prompts of a call."""
    given = prompts(one, a)
    lanes = np.zeros(a.slot_shape.rows, np.int32)
    begun = jax.eval_shape(lambda: idle(a.slot_shape, given.v.shape[1], lanes, a.sampling.repetition))
    with jax.set_mesh(one.where):
        return fill_slots.lower(a.slots, given, begun, one.where)


def lower_weights(one: Subject, a: SamplingArrays) -> jax.stages.Lowered:
    """Lower the cast and relayout of the policy for sampling."""
    transfer = a.sampler.transfer(one.mesh, one.where)
    with jax.set_mesh(one.mesh):
        # Of a run whose weights are moved, they are not compiled.
        return transfer.lower(policy_model(one.arrays.state))  # ty: ignore[missing-attribute]


SAMPLING: dict[str, Callable[[Subject, SamplingArrays], jax.stages.Lowered]] = {
    "weights": lower_weights, "prompts": lower_prompts, "refill": lower_refill, "decode": lower_decode,
}  # fmt: skip
"""The programs that sample, in order."""


def programs(one: Subject) -> dict[str, tuple[Mesh, Callable[[], jax.stages.Lowered]]]:
    """Return the run's programs in order, each with its mesh; weights that move to other devices need none."""
    found: dict[str, tuple[Mesh, Callable[[], jax.stages.Lowered]]] = {}
    if isinstance(one.arrays, SamplingArrays):
        for name, lower in SAMPLING.items():
            if name != "weights" or not one.run.mesh.rollout:
                found[name] = one.mesh if name == "weights" else one.where, functools.partial(lower, one, one.arrays)
    for reading in one.arrays.readings:
        found[reading.asked.name] = reading.forward.mesh, functools.partial(lower_reading, reading)
    for learned in one.arrays.learned:
        found[learned.program] = one.mesh, functools.partial(lower_update, one, learned)
    return found


def compile_one(one: Subject, name: str) -> Compiled:
    """Compile one of the programs; one that needs more memory than the device has is returned as refused."""
    began = time.monotonic()
    where, lower = programs(one)[name]
    with without_compilation_cache():
        try:
            done = lower().compile()
        except jax.errors.JaxRuntimeError as error:
            return Compiled(name, seconds=time.monotonic() - began, refused=needed(str(error)))
    memory = done.memory_analysis()
    text = done.as_text()
    program = hlo.parse(text, where.size)
    repeats = _repeats(one, name)
    return Compiled(
        name,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        tuple(hlo.collectives(program, repeats)),
        tuple(loops(program, repeats)),
        hlo.products(text),
        time.monotonic() - began,
    )


def _repeats(one: Subject, name: str) -> tuple[float, ...]:
    """Return the trip counts of loops with a bound in the data, the outermost first.

    They are microbatches and chunks of predictions, or decode steps.
    """
    arrays = one.arrays
    chunks = -(-arrays.packed.target.shape[-1] // CHUNK)
    found = {held.program: (arrays.microbatches,) + (chunks,) * held.predicts for held in arrays.learned}
    for reading in arrays.readings:
        inside = (-(-reading.packed.target.shape[-1] // CHUNK),) * reading.predicts
        found[reading.asked.name] = reading.microbatches, *inside
    if isinstance(arrays, SamplingArrays):
        found["decode"] = (arrays.rollout.chunk,)
    return found.get(name, ())


def needed(text: str) -> float:
    """Return the bytes that a program would have needed, from the compiler's error.

    Raises:
      InputError: the compiler failed for another reason.
    """
    found = re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", text)
    if "RESOURCE_EXHAUSTED" not in text and not found:
        raise InputError(f"the compiler failed: {text.splitlines()[0]}")
    return float(found[1]) * _UNITS[found[2]] if found else float("inf")


def model_config(name: str) -> tuple[ModelConfig, str]:
    """Return the architecture of a directory, .gguf file, built-in name, hub id or RUN[@STEP], and its source.

    The package holds a copy of config.json for well-known models, so that planning needs no network.

    Raises:
      InputError: no such model, or an unknown architecture.
    """
    if name in published() and not Path(name).is_dir():
        return read_config(published()[name]), "the published config.json, copied into this package"
    trained = find_run(name)
    if trained is None:
        return architecture(name)
    config, source = model_config(without_step(trained.run.model))
    return config, f"of run {name}: {source}"


def architectures(run: Configuration, policy: ModelConfig) -> tuple[Architectures, tuple[str, ...]]:
    """Return a function from names of the run's other models to their architectures, and notes of what was assumed.

    A run that has not been trained yet has no directory: it is planned with the policy's architecture.

    Raises:
      InputError: a model exists, but cannot be read.
    """
    found = {}
    notes = []
    named = [name for one in ingredients_of(run) for name in one.loads] if isinstance(run, Run) else []
    for name in dict.fromkeys(named):
        directory, _ = split_step(name)
        # Where there is no folder of runs yet, its name would read as a hub id.
        there = directory.parent.name != SAVED_RUNS or directory.exists()
        try:
            config = model_config(name)[0] if there else None
        except InputError:
            if directory.exists():
                raise
            config = None
        if config is None:
            notes.append(f"{name} is not there: planned as a model of the policy's architecture")
        found[name] = config or policy
    return found.__getitem__, tuple(notes)


@functools.cache
def published() -> dict[str, dict[str, Any]]:
    """Return the config.json of well-known models by hub id; attributes that change no shape are left out."""
    text = (resources.files("jaxrl_llm.plan") / "published.json").read_text()
    return {name: entry["config"] for entry in json.loads(text) for name in entry["names"]}
