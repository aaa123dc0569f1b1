"""The learner's weights as the sampler wants them, where it samples; and whether they are those that it had."""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.errors import InputError
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


class KnownWeights:
    """Which weights an engine sampled from last; it holds none of them.

    Args:
      model: gives structure, shapes and dtypes.
    """

    def __init__(self, model: Decoder):
        self._structure = _structure(model)
        self._leaves: list[weakref.ref] = []

    def changed(self, model: Decoder) -> bool:
        """Whether these are others than the last ones, any array of them; from now on they are the last.

        Raises:
          InputError: a model of another structure, shape or dtype.
        """
        if _structure(model) != self._structure:
            raise InputError(
                "the engine was built for a model of another structure, shape or dtype: build a new Engine"
            )
        leaves = jax.tree.leaves(model)
        # An array that is gone is like no other, whatever took its place.
        known = len(self._leaves) == len(leaves)
        if known and all(ref() is leaf for ref, leaf in zip(self._leaves, leaves, strict=True)):
            return False
        # A NumPy array may change in place: with one among them, weights are never known again.
        self._leaves = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, jax.Array)]
        return True


def _structure(model: Decoder) -> tuple:
    leaves, structure = jax.tree.flatten(model)
    return structure, tuple((x.shape, np.dtype(x.dtype)) for x in leaves)
