"""Every array that a run keeps on its devices, as a shape with its place: no array is made."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxrl_llm.config import Configuration
from jaxrl_llm.engine.blocks import SlotShape
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.engine.slots import Slots
from jaxrl_llm.engine.weight_transfer import for_sampling
from jaxrl_llm.learner import Forward, Training
from jaxrl_llm.learner.batch import Packed
from jaxrl_llm.learner.forward import batch_shardings
from jaxrl_llm.learner.objectives import names_of
from jaxrl_llm.learner.packing import packed_shapes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Adapter, Decoder, cast, initialise
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.models.lora import base_of, model_of
from jaxrl_llm.plan.sampler import abstract_slots, largest_shape
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.sharding import abstract, make_mesh, platform_of, rollout_mesh, sampling_shardings, shardings
from jaxrl_llm.sharding.mesh import AXES
from jaxrl_llm.stages.outline import Outline, Pass, Sampler
from jaxrl_llm.types import Role, TrainState


@dataclasses.dataclass(frozen=True)
class Learned:
    """One role on the devices.

    Attributes:
      training: how it learns.
      forward: how its model is run.
      role: its weights and optimiser.
      model: what its weights stand for.
      gathered: that model as its layers read it: in the compute type, whole over fsdp.
    """

    training: Training
    forward: Forward
    role: Role
    model: Any
    gathered: Any

    @property
    def program(self) -> str:
        """The name of its update."""
        return "update" if self.training.role == "policy" else self.training.role

    @property
    def config(self) -> ModelConfig:
        """The model's architecture."""
        return self.model.config

    @property
    def predicts(self) -> bool:
        """Whether it predicts tokens; a scalar model does not."""
        return not isinstance(self.model, ScalarModel)

    @property
    def passes(self) -> int:
        """Forward passes that learning is worth: no gradient of a frozen weight is work."""
        return 2 if isinstance(self.role.params, Adapter) else 3


@dataclasses.dataclass(frozen=True)
class Reading:
    """A pass on the devices.

    Attributes:
      asked: what it is.
      model: reads.
      gathered: as in ``Learned``.
      packed: the data of one call.
      microbatches: of it, that hold anything.
    """

    asked: Pass
    model: Any
    gathered: Any
    packed: Packed
    microbatches: int

    @property
    def forward(self) -> Forward:
        """How the model is run."""
        return self.asked.forward

    @property
    def predicts(self) -> bool:
        """Whether it predicts tokens."""
        return self.asked.output != "values"


@dataclasses.dataclass(frozen=True)
class Arrays:
    """What is on the devices; every leaf is a ``ShapeDtypeStruct`` with its sharding.

    Attributes:
      state: weights, optimiser, reference.
      packed: one optimiser update's data, for all roles.
      microbatches: of it, that hold anything.
      learned: of each role, the policy first.
      readings: the passes.
    """

    state: TrainState
    packed: Packed
    microbatches: int
    learned: tuple[Learned, ...]
    readings: tuple[Reading, ...]


@dataclasses.dataclass(frozen=True)
class SamplingArrays(Arrays):
    """And what a run has there that samples.

    Attributes:
      sampler: how it samples.
      sampled: weights to sample from.
      slots: of the engine, at their largest.
      slot_shape: theirs.
    """

    sampler: Sampler
    sampled: Decoder
    slots: Slots
    slot_shape: SlotShape

    @property
    def rollout(self) -> Rollout:
        """Lengths and slots."""
        return self.sampler.rollout

    @property
    def sampling(self) -> Sampling:
        """The engine's rules."""
        return self.sampler.rules


def abstract_mesh(sizes: tuple[int, int, int], platform: str = "") -> AbstractMesh:
    """A mesh without devices, of what is on a platform: enough to say how large each one's part is."""
    device = AbstractDevice(platform, None, platform) if platform else None
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), abstract_device=device)


def abstract_model(config: ModelConfig, dtype: str) -> Decoder:
    """The model as shapes."""
    return jax.eval_shape(lambda key: initialise(config, key, jnp.dtype(dtype)), jax.random.key(0))


def arrays(outline: Outline, model: Decoder, mesh: Any, where: Any) -> Arrays:
    """What the run keeps, where ``mesh`` learns and ``where`` samples (either may be abstract).

    ``model``: that it begins with, as shapes.
    """
    state = abstract(outline.state, shardings(outline.state, mesh))
    names = names_of(objective for one in outline.training for objective in one.objectives)
    samples = outline.samples(outline.groups.longest)
    packed, microbatches = packed_shapes(samples, outline.forward.layout, names)
    computed = jax.ShapeDtypeStruct(packed.mask.shape, np.float32)
    needed = set().union(*(one.needs for one in outline.training)) - set(packed.by_token)
    packed = packed.with_tokens(**dict.fromkeys(sorted(needed), computed))
    learned = tuple(_learned(outline, state, one) for one in outline.training)
    held = Arrays(
        state, abstract(packed, batch_shardings(packed, mesh)), microbatches, learned,
        tuple(_reading(one, state) for one in outline.passes),
    )  # fmt: skip
    if outline.sampler is None:
        return held
    return _sampling(held, outline.sampler, model, outline.forward.compute.dtype, where)


def _learned(outline: Outline, state: TrainState, one: Training) -> Learned:
    role = state.roles[one.role]
    forward = outline.forwards[one.role]
    model = model_of(state, one.role)
    whole = role._replace(base=base_of(state, one.role))
    return Learned(one, forward, whole, model, gathered(model, forward))


def _reading(asked: Pass, state: TrainState) -> Reading:
    forward = asked.forward
    model = model_of(state, asked.role) if asked.role else abstract(asked.model, shardings(asked.model, forward.mesh))
    packed, microbatches = packed_shapes(asked.samples, forward.layout)
    packed = abstract(packed, batch_shardings(packed, forward.mesh))
    return Reading(asked, model, gathered(model, forward), packed, microbatches)


def gathered(model: Any, forward: Forward) -> Any:
    """The model as its layers read it: in the compute type, divided over the tensor axis alone."""
    narrow = jax.eval_shape(lambda m: cast(m, forward.compute.dtype), model)
    return abstract(narrow, sampling_shardings(narrow, forward.mesh))


def _sampling(held: Arrays, sampler: Sampler, model: Decoder, dtype: Any, where: Any) -> SamplingArrays:
    dtype = jnp.dtype(dtype)
    sampled = jax.eval_shape(lambda m: for_sampling(cast(m, dtype), platform_of(where)), model)
    shape = largest_shape(model.config, sampler.rollout, dtype, where, sampler.rules)
    return SamplingArrays(
        held.state,
        held.packed,
        held.microbatches,
        held.learned,
        held.readings,
        sampler,
        sampled=abstract(sampled, sampling_shardings(sampled, where)),
        slots=abstract_slots(model.config, shape, dtype, where, sampler.rules),
        slot_shape=shape,
    )


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of these arrays, padding of their layout left out."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def width_of(one: Learned | Reading) -> int:
    """Bytes of a number that a model's layers compute with."""
    return jnp.dtype(one.forward.compute.dtype).itemsize


def share_of(tree: Any) -> float:
    """What one device holds of arrays, as a share of them all: of a matrix product it does as much."""
    return bytes_per_device(tree) / sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def meshes(run: Configuration, devices: list[Any]) -> tuple[Mesh, Mesh]:
    """Where the run learns and where it samples, of these devices."""
    return make_mesh(run.mesh, devices), rollout_mesh(run.mesh, devices)
