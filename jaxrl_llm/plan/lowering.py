"""The run's own programs, compiled for the machine from shapes alone."""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import Run
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.logprobs import CHUNK
from jaxrl_llm.models.lora import policy_model
from jaxrl_llm.plan import hlo, sampler
from jaxrl_llm.plan.arrays import Arrays, abstract_model, arrays, meshes
from jaxrl_llm.plan.movement import Loop, loops
from jaxrl_llm.plan.topology import without_compilation_cache
from jaxrl_llm.stages.programs import Programs, build_programs, coefficients_of

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program and what one device needs to run it.

    Attributes:
      name: "weights", "prompts", "refill", "decode" or "update".
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
      programs: those that the trainer builds.
      arrays: their arguments.
    """

    run: Run
    mesh: Mesh
    where: Mesh
    programs: Programs
    arrays: Arrays

    @property
    def apart(self) -> bool:
        """Whether other devices sample than learn."""
        return self.run.mesh.rollout > 0


def subject(run: Run, config: ModelConfig, devices: list[Any]) -> Subject:
    """The run's programs and their arguments on these devices."""
    mesh, where = meshes(run, devices)
    programs = build_programs(run, abstract_model(config, run.learner.dtype), mesh, where)
    return Subject(run, mesh, where, programs, arrays(run, config, programs.forward.layout, mesh, where))


def lower_update(one: Subject) -> jax.stages.Lowered:
    """An optimiser update."""
    scalar = jax.ShapeDtypeStruct((), np.float32)
    policy = one.programs.training[0]
    with jax.set_mesh(one.mesh):
        return policy.update.lower(one.arrays.state, one.arrays.packed, dict.fromkeys(coefficients_of(one.run), scalar))


def lower_decode(one: Subject) -> jax.stages.Lowered:
    """A chunk of decode steps with all slots and the longest cache."""
    a = one.arrays
    return sampler.lower_chunk(a.sampled, a.slots, one.run.rollout, a.sampling, a.slot_shape.group, one.where)


def lower_prompts(one: Subject) -> jax.stages.Lowered:
    """Keys and values of some prompts."""
    return sampler.lower_prompts(one.arrays.sampled, one.run.rollout, one.arrays.slots.cache.k.dtype, one.where)


def lower_refill(one: Subject) -> jax.stages.Lowered:
    """Slots begun with prompts."""
    a = one.arrays
    given = sampler.prompts(a.sampled.config, one.run.rollout, a.slots.cache.k.dtype, one.where)
    return sampler.lower_refill(a.slots, a.slot_shape, given, a.sampling.repetition, one.where)


def lower_weights(one: Subject) -> jax.stages.Lowered:
    """The policy cast and laid out for sampling."""
    with jax.set_mesh(one.mesh):
        # Of a run whose weights are moved, they are not compiled.
        return one.programs.weights.lower(policy_model(one.arrays.state))  # ty: ignore[missing-attribute]


LOWERED: dict[str, Callable[[Subject], jax.stages.Lowered]] = {
    "weights": lower_weights, "prompts": lower_prompts, "refill": lower_refill, "decode": lower_decode,
    "update": lower_update,
}  # fmt: skip
"""The programs of a step, in their order."""


def names(one: Subject) -> list[str]:
    """The programs of this run; weights that go to other devices are moved by none."""
    return [name for name in LOWERED if name != "weights" or not one.apart]


def compile_one(one: Subject, name: str) -> Compiled:
    """Compile one of the programs; one that needs more memory than there is comes back as refused."""
    began = time.monotonic()
    where = one.mesh if name in ("update", "weights") else one.where
    with without_compilation_cache():
        try:
            done = LOWERED[name](one).compile()
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
    predictions = one.arrays.packed.target.shape[-1]
    return {"update": (one.arrays.microbatches, -(-predictions // CHUNK)), "decode": (one.run.rollout.chunk,)}.get(
        name, ()
    )


def needed(text: str) -> float:
    """Bytes that a program would have needed, from the compiler's refusal.

    Raises:
      InputError: it refused for another reason.
    """
    found = re.search(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", text)
    if "RESOURCE_EXHAUSTED" not in text and not found:
        raise InputError(f"the compiler failed: {text.splitlines()[0]}")
    return float(found[1]) * _UNITS[found[2]] if found else float("inf")
