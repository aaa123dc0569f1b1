"""The learner's weights as the sampler wants them: in the dtype that it computes in, and where it samples."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxrl_llm.models.decoder import Decoder, by_layer, cast
from jaxrl_llm.models.lora import merge
from jaxrl_llm.sharding import platform_of, sampling_shardings


def for_sampling(model: Decoder, platform: str) -> Decoder:
    """The model in the form that an engine is fastest with on a platform ("cpu", "gpu" or "tpu")."""
    return by_layer(model) if platform == "gpu" else model


def weights_for_sampling(
    shapes: Decoder, dtype: Any, learner: Mesh, sampler: Mesh, keep: bool
) -> Callable[[Decoder], Decoder]:
    """A function from the policy to weights to sample from.

    One compiled call casts them, adds an attached adapter as the learner's layers do, gives them the form that the
    platform wants (``for_sampling``), and lays them out; where the
    sampler has devices of its own, they are then moved there.

    Args:
      shapes: of the policy, without an adapter.
      dtype: to sample in.
      learner: the mesh that the policy is on.
      sampler: the mesh to sample on.
      keep: whether the weights must outlive the policy, whose buffers an update takes.
    """
    apart = learner.devices.tolist() != sampler.devices.tolist()
    platform = platform_of(sampler)
    layout = sampling_shardings(jax.eval_shape(lambda model: for_sampling(model, platform), shapes), sampler)

    @functools.partial(jax.jit, **({} if apart else {"out_shardings": layout}))
    def arranged(policy: Decoder) -> Decoder:
        narrow = for_sampling(merge(cast(policy, dtype)), platform)
        return jax.tree.map(jnp.copy, narrow) if keep else narrow

    def moved(policy: Decoder) -> Decoder:
        return jax.device_put(arranged(policy), layout)

    return moved if apart else arranged  # ty: ignore[invalid-explicit-return]  a compiled function is a function
