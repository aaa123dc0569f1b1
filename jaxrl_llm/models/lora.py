"""Low-rank adapters (LoRA, arXiv 2106.09685): ``W + alpha / rank * a @ b`` beside a model that stays as it is.

The sum is formed inside each layer, where the layer runs, so no gradient of a whole stack of weights ever exists:
gradients, moments, checkpoints and the reference have the adapter's size. The reference is the base under the adapter
that training began with, which is zero, so it costs no second copy of the weights.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import Lora, ModelConfig
from jaxrl_llm.models.decoder import Adapter, Decoder, from_parameters, merged, parameter_shapes, to_parameters
from jaxrl_llm.types import TrainState

INPUTS = {"attn/o": 2}
"""Axes of a weight that are summed over, where they are not one."""


def create(config: ModelConfig, lora: Lora, key: jax.Array) -> Adapter:
    """A float32 adapter that changes nothing yet: ``a`` normal with variance 1 / inputs, ``b`` zero."""
    shapes = parameter_shapes(config)["blocks"]
    parameters = {}
    for index, target in enumerate(lora.targets):
        part, name = target.split("/")
        count, *sizes = shapes[part][name]
        inputs = sizes[: INPUTS.get(target, 1)]
        outputs = sizes[INPUTS.get(target, 1) :]
        a = jax.random.normal(jax.random.fold_in(key, index), (count, *inputs, lora.rank)) / math.sqrt(
            math.prod(inputs)
        )
        parameters.setdefault(part, {})[name] = {"a": a, "b": jnp.zeros((count, lora.rank, *outputs))}
    return Adapter(lora.alpha / lora.rank, {"blocks": parameters})


def attached(base: Decoder | None, policy: Any) -> Any:
    """The model that ``policy`` stands for: itself without a base, or else the base with this adapter in its layers.

    Nothing is computed or copied; ``forward`` adds the two layer by layer.
    """
    if base is None:
        return policy
    parameters = to_parameters(base)
    adapter = Adapter(policy.scale, to_parameters(policy)["blocks"])
    return from_parameters(base.config, parameters | {"blocks": parameters["blocks"] | {"adapter": adapter}})


def merge(model: Decoder) -> Decoder:
    """An ordinary model: an attached adapter is added to its weights, one layer at a time."""
    blocks = model.weights.blocks
    if not blocks.has("adapter"):
        return model
    summed = jax.lax.map(merged, blocks)
    return from_parameters(model.config, to_parameters(model) | {"blocks": summed})


def model_of(state: TrainState, name: str) -> Any:
    """The model that a role's parameters stand for, or a frozen copy's.

    A copy of the policy adapts the policy's base.
    """
    if name in state.roles:
        return attached(state.roles[name].base, state.roles[name].params)
    return attached(state.policy.base, state.frozen[name])


def policy_model(state: TrainState) -> Decoder:
    """The live model of a state."""
    return model_of(state, "policy")
