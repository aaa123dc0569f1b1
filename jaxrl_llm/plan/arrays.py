"""Every array that a run keeps on its devices, as a shape with its place: no array is made."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxrl_llm import learner
from jaxrl_llm.config import Run
from jaxrl_llm.engine.blocks import SlotShape
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.engine.slots import Slots
from jaxrl_llm.engine.weight_transfer import for_sampling
from jaxrl_llm.learner.batch import Packed
from jaxrl_llm.learner.forward import batch_shardings
from jaxrl_llm.learner.objectives import names_of
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.packing import packed_shapes
from jaxrl_llm.learner.state import abstract_state
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, cast, initialise
from jaxrl_llm.plan.sampler import abstract_slots, largest_shape
from jaxrl_llm.sharding import abstract, make_mesh, platform_of, rollout_mesh, sampling_shardings, shardings
from jaxrl_llm.sharding.mesh import AXES
from jaxrl_llm.stages.programs import minibatch, objectives_of
from jaxrl_llm.types import TrainState


@dataclasses.dataclass(frozen=True)
class Arrays:
    """What is on the devices; every leaf is a ``ShapeDtypeStruct`` with its sharding.

    Attributes:
      state: weights, optimiser, reference.
      sampled: weights to sample from.
      slots: of the engine, at their largest.
      slot_shape: theirs.
      packed: one optimiser update's data.
      microbatches: of it, that hold anything.
      sampling: the engine's rules.
    """

    state: TrainState
    sampled: Decoder
    slots: Slots
    slot_shape: SlotShape
    packed: Packed
    microbatches: int
    sampling: Sampling


def abstract_mesh(sizes: tuple[int, int, int]) -> AbstractMesh:
    """A mesh without devices: enough to say how large each one's part is."""
    return AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def abstract_model(config: ModelConfig, dtype: str) -> Decoder:
    """The model as shapes."""
    return jax.eval_shape(lambda key: initialise(config, key, jnp.dtype(dtype)), jax.random.key(0))


def arrays(run: Run, config: ModelConfig, layout: learner.Layout, mesh: Any, where: Any) -> Arrays:
    """What the run keeps, where ``mesh`` learns and ``where`` samples (either may be abstract)."""
    model = abstract_model(config, run.learner.dtype)
    compute_dtype = jnp.dtype(run.learner.compute_dtype)
    state = abstract_state(model, build(run.learner.optimiser), run.recipe.algorithm.needs_reference, run.learner.lora)
    platform = platform_of(where) if isinstance(where, Mesh) else ""
    sampled = jax.eval_shape(lambda m: for_sampling(cast(m, compute_dtype), platform), model)
    sampling = run.rollout.sampling(config.tokens.eos, run.learner.keep_sampling_mask)
    shape = largest_shape(config, run.rollout, compute_dtype, where, sampling)
    objectives = objectives_of(run)
    packed, microbatches = packed_shapes(minibatch(run, config.vocab_size), layout, names_of(objectives))
    computed = jax.ShapeDtypeStruct(packed.mask.shape, np.float32)
    packed = packed.with_tokens(**{name: computed for objective in objectives for name in objective.needs})
    return Arrays(
        abstract(state, shardings(state, mesh)), abstract(sampled, sampling_shardings(sampled, where)),
        abstract_slots(config, shape, compute_dtype, where, sampling), shape,
        abstract(packed, batch_shardings(packed, mesh)), microbatches, sampling,
    )  # fmt: skip


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of these arrays, padding of their layout left out."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def meshes(run: Run, devices: list[Any]) -> tuple[Mesh, Mesh]:
    """Where the run learns and where it samples, of these devices."""
    return make_mesh(run.mesh, devices), rollout_mesh(run.mesh, devices)
