"""The run's own programs, compiled for the machine from shapes alone."""

import dataclasses
import functools
import re
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import Configuration
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.forward import score
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.logprobs import CHUNK
from jaxrl_llm.models.lora import policy_model
from jaxrl_llm.plan import hlo, sampler
from jaxrl_llm.plan.arrays import Arrays, Learned, Reading, SamplingArrays, abstract_model, arrays, meshes
from jaxrl_llm.plan.movement import Loop, loops
from jaxrl_llm.plan.topology import without_compilation_cache
from jaxrl_llm.stages import stage_of
from jaxrl_llm.stages.critic import Architectures
from jaxrl_llm.stages.outline import Outline
from jaxrl_llm.trained import config_of

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program and what one device needs to run it.

    Attributes:
      name: "weights", "prompts", "refill", "decode", "update", or that of another role or of a pass.
      arguments: bytes of what it is given.
      outputs: bytes of what it returns in new memory.
      temporary: bytes that exist while it runs.
      collectives: what it sends in one call; loops multiplied out.
      loops: what it and each of its loops move in memory.
      products: of matrices, by who computes them; a GPU's compiler chooses.
      seconds: that its compilation took.
      refused: bytes that it would need, where that is more than the device has; the other numbers are 0 then.
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
    """What is compiled: a run on a mesh of described devices.

    Attributes:
      run: resolved.
      mesh: learns.
      where: samples.
      outline: the trainer's functions.
      arrays: their arguments.
    """

    run: Configuration
    mesh: Mesh
    where: Mesh
    outline: Outline
    arrays: Arrays

    @property
    def apart(self) -> bool:
        """Whether other devices sample than learn."""
        return self.run.mesh.rollout > 0


def subject(run: Configuration, config: ModelConfig, devices: list[Any], find: Architectures = config_of) -> Subject:
    """The run's functions and their arguments on these devices; ``find``: the architecture of other models."""
    mesh, where = meshes(run, devices)
    model = abstract_model(config, run.learner.dtype)
    outline = planned_stage(run).outline(run, model, mesh, where, find)
    return Subject(run, mesh, where, outline, arrays(outline, model, mesh, where))


def planned_stage(run: Configuration) -> ModuleType:
    """The run's kind of training, which says what it computes.

    Raises:
      InputError: it does not say.
    """
    stage = stage_of(run)
    if not hasattr(stage, "outline"):
        raise InputError(f"a {type(run).__name__} cannot be planned: its stage has no outline (stages/outline.py)")
    return stage


def lower_update(one: Subject, learned: Learned) -> jax.stages.Lowered:
    """An optimiser update of a role."""
    scalar = jax.ShapeDtypeStruct((), np.float32)
    coefficients = dict.fromkeys(one.outline.coefficients[learned.training.role], scalar)
    with jax.set_mesh(one.mesh):
        return learned.training.update.lower(one.arrays.state, learned.training.reads(one.arrays.packed), coefficients)


def lower_reading(reading: Reading) -> jax.stages.Lowered:
    """A pass over one call's completions."""
    temperature = jax.ShapeDtypeStruct((), np.float32)
    forward = reading.forward
    with jax.set_mesh(forward.mesh):
        return score.lower(reading.model, reading.packed, temperature, forward.compute, reading.asked.output)


def lower_decode(one: Subject, a: SamplingArrays) -> jax.stages.Lowered:
    """A chunk of decode steps with all slots and the longest cache."""
    return sampler.lower_chunk(a.sampled, a.slots, a.rollout, a.sampling, a.slot_shape.group, one.where)


def lower_prompts(one: Subject, a: SamplingArrays) -> jax.stages.Lowered:
    """Keys and values of some prompts."""
    return sampler.lower_prompts(a.sampled, a.rollout, a.slots.cache.k.dtype, one.where)


def lower_refill(one: Subject, a: SamplingArrays) -> jax.stages.Lowered:
    """Slots begun with prompts."""
    given = sampler.prompts(a.sampled.config, a.rollout, a.slots.cache.k.dtype, one.where)
    return sampler.lower_refill(a.slots, a.slot_shape, given, a.sampling.repetition, one.where)


def lower_weights(one: Subject, a: SamplingArrays) -> jax.stages.Lowered:
    """The policy cast and laid out for sampling."""
    transfer = a.sampler.transfer(one.mesh, one.where)
    with jax.set_mesh(one.mesh):
        # Of a run whose weights are moved, they are not compiled.
        return transfer.lower(policy_model(one.arrays.state))  # ty: ignore[missing-attribute]


SAMPLING: dict[str, Callable[[Subject, SamplingArrays], jax.stages.Lowered]] = {
    "weights": lower_weights, "prompts": lower_prompts, "refill": lower_refill, "decode": lower_decode,
}  # fmt: skip
"""The programs that sample, in their order."""


def programs(one: Subject) -> dict[str, tuple[Mesh, Callable[[], jax.stages.Lowered]]]:
    """The programs of this run, in their order, and where they run; weights that go elsewhere are moved by none."""
    found: dict[str, tuple[Mesh, Callable[[], jax.stages.Lowered]]] = {}
    if isinstance(one.arrays, SamplingArrays):
        for name, lower in SAMPLING.items():
            if name != "weights" or not one.apart:
                found[name] = one.mesh if name == "weights" else one.where, functools.partial(lower, one, one.arrays)
    for reading in one.arrays.readings:
        found[reading.asked.name] = reading.forward.mesh, functools.partial(lower_reading, reading)
    for learned in one.arrays.learned:
        found[learned.program] = one.mesh, functools.partial(lower_update, one, learned)
    return found


def names(one: Subject) -> list[str]:
    """The programs of this run."""
    return list(programs(one))


def compile_one(one: Subject, name: str) -> Compiled:
    """Compile one of the programs; one that needs more memory than there is comes back as refused."""
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
    """How often loops run whose bound is data, the outermost first: microbatches and chunks of predictions.

    Decode steps.
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
    """Bytes that a program would have needed, from the compiler's refusal.

    Raises:
      InputError: it refused for another reason.
    """
    found = re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", text)
    if "RESOURCE_EXHAUSTED" not in text and not found:
        raise InputError(f"the compiler failed: {text.splitlines()[0]}")
    return float(found[1]) * _UNITS[found[2]] if found else float("inf")
