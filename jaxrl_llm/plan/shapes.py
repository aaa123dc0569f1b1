"""Shapes and placement of every array that a run keeps on its devices; no array is made."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxrl_llm.engine.engine import for_sampling
from jaxrl_llm.engine.requests import Request, SlotShape
from jaxrl_llm.engine.scheduler import Build, prefill_shape, rows_of_call, wanted
from jaxrl_llm.engine.slots import Slots, empty_slots, slot_shardings
from jaxrl_llm.learner import Forward, Training
from jaxrl_llm.learner.batch import Packed, packed_shapes
from jaxrl_llm.learner.forward import batch_shardings
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decode_kernels import form_for
from jaxrl_llm.models.decoder import Adapter, Decoder, cast, initialise
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.models.lora import base_of, model_of
from jaxrl_llm.sharding import abstract, platform_of, sampling_shardings, shardings
from jaxrl_llm.stages.stage import Outline, Pass, PlannedSampler
from jaxrl_llm.types import Prompt, Role, TrainState


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A model on the devices, and the data that a program reads with it.

    Attributes:
      name: of the program: "update" for the policy, or that of another role or of a pass.
      forward: options of the model's forward pass.
      predicts: whether it predicts tokens; a scalar model does not.
      model: the model that reads.
      packed: the data of one call.
      microbatches: non-empty microbatches of the data.
    """

    name: str
    forward: Forward
    predicts: bool
    model: Any
    packed: Packed
    microbatches: int

    @functools.cached_property
    def gathered(self) -> Any:
        """The model as its layers read it: in the compute type, divided over the tensor axis alone."""
        narrow = jax.eval_shape(lambda m: cast(m, self.forward.compute.dtype), self.model)
        return abstract(narrow, sampling_shardings(narrow, self.forward.mesh))

    @property
    def width(self) -> int:
        """Return the bytes of a number in the compute type of the model's layers."""
        return jnp.dtype(self.forward.compute.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class PlannedRole(PlannedModel):
    """One role on the devices, with the program that updates it.

    Attributes:
      training: its training functions.
      role: its weights and optimiser.
    """

    training: Training
    role: Role

    @property
    def adapter(self) -> int | None:
        """Return the number of weights of its adapter, as in ``training_flops``; None if the whole model learns."""
        return optax.tree.size(self.role.params) if isinstance(self.role.params, Adapter) else None


@dataclasses.dataclass(frozen=True)
class PlannedPass(PlannedModel):
    """A pass on the devices; ``asked``: the pass to run."""

    asked: Pass


@dataclasses.dataclass(frozen=True)
class Arrays:
    """All arrays on the devices; every leaf is a ``ShapeDtypeStruct`` with its sharding.

    Attributes:
      state: weights, optimiser, reference.
      packed: one optimiser update's data, for all roles.
      learned: one for each role, the policy first.
      readings: the passes.
    """

    state: TrainState
    packed: Packed
    learned: tuple[PlannedRole, ...]
    readings: tuple[PlannedPass, ...]


@dataclasses.dataclass(frozen=True)
class SamplingArrays(Arrays):
    """All arrays of a run that samples.

    Attributes:
      sampler: the planned sampler.
      sampled: weights to sample from.
      slots: the engine's slots, at their largest.
      slot_shape: the shape of the slots.
      build: settings of the engine.
    """

    sampler: PlannedSampler
    sampled: Decoder
    slots: Slots
    slot_shape: SlotShape
    build: Build


def abstract_mesh(sizes: Mapping[str, int], platform: str = "") -> AbstractMesh:
    """Return a mesh without devices, for arrays on a platform: enough to compute the size of each device's part."""
    device = AbstractDevice(platform, None, platform) if platform else None
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), abstract_device=device)


def abstract_model(config: ModelConfig, dtype: str) -> Decoder:
    """Return the model as shapes."""
    return jax.eval_shape(lambda key: initialise(config, key, jnp.dtype(dtype)), jax.random.key(0))


def arrays(outline: Outline, initial: Decoder, mesh: Any, where: Any) -> Arrays:
    """Return the run's arrays, where ``mesh`` learns and ``where`` samples (either may be abstract).

    ``initial``: the model at the start, as shapes.
    """
    state = abstract(outline.state, shardings(outline.state, mesh))
    names = tuple(objective.name for one in outline.training for objective in one.objectives)
    samples = outline.samples(outline.groups.longest)
    packed, microbatches = packed_shapes(samples, outline.forward.layout, names)
    computed = jax.ShapeDtypeStruct(packed.mask.shape, np.float32)
    needed = set().union(*(one.needs for one in outline.training)) - set(packed.by_token)
    packed = packed.with_tokens(**dict.fromkeys(sorted(needed), computed))
    packed = abstract(packed, batch_shardings(packed, mesh))
    learned = []
    for one in outline.training:
        role = state.roles[one.role]._replace(base=base_of(state, one.role))
        model, forward = model_of(state, one.role), outline.forwards[one.role]
        name = "update" if one.role == "policy" else one.role
        predicts = not isinstance(model, ScalarModel)
        learned.append(PlannedRole(name, forward, predicts, model, packed, microbatches, one, role))
    readings = []
    for asked in outline.passes:
        on = asked.forward.mesh
        model = model_of(state, asked.role) if asked.role else abstract(asked.model, shardings(asked.model, on))
        read, count = packed_shapes(asked.samples, asked.forward.layout)
        read = abstract(read, batch_shardings(read, on))
        predicts = asked.output != "values"
        readings.append(PlannedPass(asked.name, asked.forward, predicts, model, read, count, asked))
    found = Arrays(state, packed, tuple(learned), tuple(readings))
    if outline.sampler is None:
        return found
    return _with_sampler(found, outline.sampler, initial, jnp.dtype(outline.forward.compute.dtype), where)


def _with_sampler(held: Arrays, sampler: PlannedSampler, model: Decoder, dtype: Any, where: Any) -> SamplingArrays:
    """Add the weights to sample from, and the slots at their largest: all of them, the longest prompts and completions,
    the most prompt blocks."""
    rollout = sampler.rollout
    sampled = jax.eval_shape(lambda m: for_sampling(cast(m, dtype), platform_of(where)), model)
    engine = rollout.engine
    group = 1 if engine.strict else min(rollout.group, engine.slots)
    form = form_for(model.config.attention, engine.slots, where) if engine.attention == "auto" else None
    build = Build(
        model.config, dtype, engine.slots, rollout.max_length, engine.chunk, where, engine.strict, group, form
    )
    prompt = Prompt(np.zeros(rollout.max_prompt_tokens, np.int32))
    most = rollout.max_new_tokens
    at_their_end = [Request(i, prompt, 0, most, count=most - 1, block_key=i) for i in range(engine.slots)]
    shape = wanted(build, sampler.rules, at_their_end, None, False)
    shape = shape._replace(blocks=shape.rows)
    with jax.sharding.use_abstract_mesh(where.abstract_mesh):
        slots = jax.eval_shape(lambda: empty_slots(model.config, shape, dtype, None, sampler.rules.repetition))
    return SamplingArrays(
        **vars(held),
        sampler=sampler,
        sampled=abstract(sampled, sampling_shardings(sampled, where)),
        slots=abstract(slots, slot_shardings(slots, where)),
        slot_shape=shape,
        build=build,
    )


def bytes_per_device(tree: Any) -> int:
    """Return the bytes of these arrays on one device, without padding of their layout."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def share_of(tree: Any) -> float:
    """Return one device's share of arrays by bytes, which is also its share of their matrix products."""
    return bytes_per_device(tree) / sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def prompt_calls(tokens: int, parts: int) -> tuple[int, int, int]:
    """Return how prompts of ``tokens`` tokens are prefilled: sequences per call, tokens per call, calls per prompt.

    ``parts``: number of parts into which the mesh divides the sequences.
    """
    shape = prefill_shape(tokens)
    return rows_of_call(shape.piece * shape.calls, parts), shape.piece, shape.calls
