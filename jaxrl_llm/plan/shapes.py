"""Shapes and placement of every array that a run keeps on its devices; no array is made."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxrl_llm.engine.backend import for_sampling
from jaxrl_llm.engine.blocks import SlotShape
from jaxrl_llm.engine.prefix_cache import LONGEST_CALL, PIECE, bucket, rows_of_call
from jaxrl_llm.engine.requests import Request
from jaxrl_llm.engine.scheduler import Build, wanted
from jaxrl_llm.engine.slots import Slots, empty_slots, slot_shardings
from jaxrl_llm.learner import Forward, Training
from jaxrl_llm.learner.batch import Packed
from jaxrl_llm.learner.forward import batch_shardings
from jaxrl_llm.learner.packing import packed_shapes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Adapter, Decoder, cast, initialise
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.models.lora import base_of, model_of
from jaxrl_llm.sharding import abstract, platform_of, sampling_shardings, shardings
from jaxrl_llm.stages.stage import Outline, Pass, PlannedSampler
from jaxrl_llm.types import Prompt, Role, TrainState


@dataclasses.dataclass(frozen=True)
class PlannedRole:
    """One role on the devices.

    Attributes:
      training: its training functions.
      forward: options of its forward pass.
      role: its weights and optimiser.
      model: the model of its weights.
      gathered: that model as its layers read it: in the compute type, whole over fsdp.
    """

    training: Training
    forward: Forward
    role: Role
    model: Any
    gathered: Any

    @property
    def program(self) -> str:
        """Return the name of its update program."""
        return "update" if self.training.role == "policy" else self.training.role

    @property
    def predicts(self) -> bool:
        """Whether it predicts tokens; a scalar model does not."""
        return not isinstance(self.model, ScalarModel)

    @property
    def passes(self) -> int:
        """Return the cost of learning in forward passes: gradients of frozen weights do not count."""
        return 2 if isinstance(self.role.params, Adapter) else 3


@dataclasses.dataclass(frozen=True)
class PlannedPass:
    """A pass on the devices.

    Attributes:
      asked: the pass to run.
      model: the model that reads.
      gathered: as in ``PlannedRole``.
      packed: the data of one call.
      microbatches: non-empty microbatches of the data.
    """

    asked: Pass
    model: Any
    gathered: Any
    packed: Packed
    microbatches: int

    @property
    def forward(self) -> Forward:
        """Return the options of the model's forward pass."""
        return self.asked.forward

    @property
    def predicts(self) -> bool:
        """Whether it predicts tokens."""
        return self.asked.output != "values"


@dataclasses.dataclass(frozen=True)
class Arrays:
    """All arrays on the devices; every leaf is a ``ShapeDtypeStruct`` with its sharding.

    Attributes:
      state: weights, optimiser, reference.
      packed: one optimiser update's data, for all roles.
      microbatches: non-empty microbatches of the data.
      learned: one for each role, the policy first.
      readings: the passes.
    """

    state: TrainState
    packed: Packed
    microbatches: int
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
    """

    sampler: PlannedSampler
    sampled: Decoder
    slots: Slots
    slot_shape: SlotShape


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
    learned = []
    for one in outline.training:
        role = state.roles[one.role]._replace(base=base_of(state, one.role))
        model, forward = model_of(state, one.role), outline.forwards[one.role]
        learned.append(PlannedRole(one, forward, role, model, gathered(model, forward)))
    readings = []
    for asked in outline.passes:
        on = asked.forward.mesh
        model = model_of(state, asked.role) if asked.role else abstract(asked.model, shardings(asked.model, on))
        read, count = packed_shapes(asked.samples, asked.forward.layout)
        read = abstract(read, batch_shardings(read, on))
        readings.append(PlannedPass(asked, model, gathered(model, asked.forward), read, count))
    held = Arrays(state, abstract(packed, batch_shardings(packed, mesh)), microbatches, tuple(learned), tuple(readings))
    if outline.sampler is None:
        return held
    return _with_sampler(held, outline.sampler, initial, jnp.dtype(outline.forward.compute.dtype), where)


def gathered(model: Any, forward: Forward) -> Any:
    """Return the model as its layers read it: in the compute type, divided over the tensor axis alone."""
    narrow = jax.eval_shape(lambda m: cast(m, forward.compute.dtype), model)
    return abstract(narrow, sampling_shardings(narrow, forward.mesh))


def _with_sampler(held: Arrays, sampler: PlannedSampler, model: Decoder, dtype: Any, where: Any) -> SamplingArrays:
    """Add the weights to sample from, and the slots at their largest: all of them, the longest prompts and completions,
    the most prompt blocks."""
    rollout = sampler.rollout
    sampled = jax.eval_shape(lambda m: for_sampling(cast(m, dtype), platform_of(where)), model)
    group = 1 if rollout.strict else min(rollout.group, rollout.slots)
    build = Build(model.config, dtype, rollout.slots, rollout.max_length, rollout.chunk, where, rollout.strict, group)
    prompt = Prompt(np.zeros(rollout.max_prompt_tokens, np.int32))
    most = rollout.max_new_tokens
    at_their_end = [Request(i, prompt, 0, most, count=most - 1, block_key=i) for i in range(rollout.slots)]
    shape = wanted(build, sampler.rules, at_their_end, None, False)
    shape = shape._replace(blocks=shape.rows)
    slots = jax.eval_shape(lambda: empty_slots(model.config, shape, dtype, None, sampler.rules.repetition))
    return SamplingArrays(
        **vars(held),
        sampler=sampler,
        sampled=abstract(sampled, sampling_shardings(sampled, where)),
        slots=abstract(slots, slot_shardings(slots, where)),
        slot_shape=shape,
    )


def bytes_per_device(tree: Any) -> int:
    """Return the bytes of these arrays on one device, without padding of their layout."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def width_of(one: PlannedRole | PlannedPass) -> int:
    """Return the bytes of a number in the compute type of a model's layers."""
    return jnp.dtype(one.forward.compute.dtype).itemsize


def share_of(tree: Any) -> float:
    """Return one device's share of arrays by bytes, which is also its share of their matrix products."""
    return bytes_per_device(tree) / sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def prompt_calls(tokens: int, parts: int) -> tuple[int, int, int]:
    """Return how prompts of ``tokens`` tokens are prefilled: sequences per call, tokens per call, calls per prompt.

    ``parts``: number of parts into which the mesh divides the sequences.
    """
    piece = bucket(tokens) if bucket(tokens) <= LONGEST_CALL else PIECE
    calls = -(-tokens // piece)
    return rows_of_call(piece if calls == 1 else piece * calls, parts), piece, calls
