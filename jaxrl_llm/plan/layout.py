"""Every array that a run keeps on its devices, as a shape with its place: no array is made."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxrl_llm import learner
from jaxrl_llm.config import Run
from jaxrl_llm.learner.batch import Packed, Sample, packed_shapes
from jaxrl_llm.learner.epochs import abstract_state, batch_shardings
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, cast, initialise
from jaxrl_llm.rollout.ahead import abstract_slots, largest_shape
from jaxrl_llm.rollout.places import Shape
from jaxrl_llm.rollout.settings import Sampling
from jaxrl_llm.rollout.slots import Slots
from jaxrl_llm.sharding import abstract, make_mesh, rollout_mesh, sampling_shardings, shardings
from jaxrl_llm.sharding.mesh import AXES
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
    slot_shape: Shape
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
    model, compute_dtype = abstract_model(config, run.learner.dtype), jnp.dtype(run.learner.compute_dtype)
    state = abstract_state(model, build(run.learner.optimiser), run.recipe.algorithm.needs_reference, run.learner.lora)
    sampled = jax.eval_shape(lambda m: cast(m, compute_dtype), model)
    sampling = run.rollout.sampling(config.tokens.eos, run.learner.keep_sampling_mask)
    shape = largest_shape(config, run.rollout, compute_dtype, where, sampling)
    packed, microbatches = packed_shapes(minibatch(run, config.vocab_size), layout)
    logp = packed.sampler_logp
    compared = run.recipe.algorithm.kl_in_loss and state.reference is not None
    packed = packed._replace(old_logp=logp if run.learner.updates > 1 else None, ref_logp=logp if compared else None)
    return Arrays(
        abstract(state, shardings(state, mesh)), abstract(sampled, sampling_shardings(sampled, where)),
        abstract_slots(config, shape, compute_dtype, where, sampling), shape,
        abstract(packed, batch_shardings(packed, mesh)), microbatches, sampling,
    )  # fmt: skip


def minibatch(run: Run, vocab: int, tokens: int | None = None) -> list[Sample]:
    """The samples of one optimiser update: its groups, with prompts and completions (or ``tokens`` of them) at their longest."""
    rollout = run.rollout
    length = rollout.max_new_tokens if tokens is None else tokens
    groups = -(-rollout.prompts // run.learner.minibatches)
    ids, mask, logp = np.zeros(length, np.int32), np.ones(length, bool), np.zeros(length, np.float32)
    kept = np.broadcast_to(np.uint32(0), (length, -(-vocab // 32))) if run.learner.keep_sampling_mask else None
    advantage = logp if run.recipe.algorithm.advantage.by_token else 0.0
    prompts = [np.full(rollout.max_prompt_tokens, group, np.int32) for group in range(groups)]
    return [Sample(prompt, ids, mask, logp, advantage, kept=kept) for prompt in prompts for _ in range(rollout.group)]


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of these arrays, padding of their layout left out."""
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def meshes(run: Run, devices: list[Any]) -> tuple[Mesh, Mesh]:
    """Where the run learns and where it samples, of these devices."""
    return make_mesh(run.mesh, devices), rollout_mesh(run.mesh, devices)
