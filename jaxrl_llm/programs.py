"""What a run computes on its devices, made in one place for the trainer and for the planner."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_llm import learner
from jaxrl_llm.config import Run
from jaxrl_llm.learner.compute import compute_for, layout_for, platform_of
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.update import make_update
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.decoder import Decoder, cast
from jaxrl_llm.rollout import Engine
from jaxrl_llm.rollout.weights import weights_for_sampling
from jaxrl_llm.sharding import batch_parts


@dataclasses.dataclass(frozen=True)
class Programs:
    """The device's part of a run.

    Attributes:
      engine: samples.
      weights: from the policy to what the engine samples from.
      update: of the optimiser.
      layout: shapes of a microbatch.
      compute: how forward passes are computed.
    """

    engine: Engine
    weights: Callable[[Decoder], Decoder]
    update: Callable[..., Any]
    layout: learner.Layout
    compute: Compute


def build_programs(run: Run, model: Decoder, mesh: Mesh, where: Mesh) -> Programs:
    """Nothing is computed yet, and nothing compiled.

    Args:
      run: with its settings resolved.
      model: shapes and dtypes will do.
      mesh: learns; its devices may be described only.
      where: samples.
    """
    rollout, optimiser = run.rollout, run.learner.optimiser
    compute = compute_for(run.learner, model.config, platform_of(mesh))
    shapes = jax.eval_shape(lambda m: cast(m, compute.dtype), model)
    engine = Engine(shapes, rollout.slots, rollout.max_length, rollout.chunk, where, rollout.strict, rollout.group)
    weights = weights_for_sampling(model, compute.dtype, mesh, where, keep=rollout.collect.staleness > 0)
    update = make_update(run.recipe.algorithm, build(optimiser), learning_rate(optimiser), compute)
    layout = layout_for(run.learner, compute, rollout.max_length, rollout.max_new_tokens, mesh)
    return Programs(engine, weights, update, layout, compute)
