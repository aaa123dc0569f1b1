"""Low-rank adapters (LoRA, arXiv 2106.09685): ``W + alpha / rank * a @ b`` beside a model that stays as it is.

The sum is formed inside each layer, where the layer runs, so no gradient of a whole stack of weights ever exists:
gradients, moments, checkpoints and the reference have the adapter's size. The reference is the base under the adapter
that training began with, which is zero, so it costs no second copy of the weights. An adapter with a ``scalar`` [D]
stands for a ``ScalarModel``: its head is trained as it is, beside a base that may be a language model.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import Lora, ModelConfig
from jaxrl_llm.models.decoder import Adapter, Decoder, from_parameters, merged, parameter_shapes, to_parameters
from jaxrl_llm.models.heads import ScalarModel, split, with_scalar_head
from jaxrl_llm.types import TrainState

INPUTS = {"attn/o": 2}
"""Axes of a weight that are summed over, where they are not one."""


def create(config: ModelConfig, lora: Lora, key: jax.Array, scalar: Any = None) -> Adapter:
    """A float32 adapter that changes nothing yet: ``a`` normal with variance 1 / inputs, ``b`` zero.

    ``scalar`` [D] is the head that a scalar model begins with; None for a language model.
    """
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
    head = {} if scalar is None else {"scalar": jnp.asarray(scalar, jnp.float32)}
    return Adapter(lora.alpha / lora.rank, {"blocks": parameters} | head)


def attached(base: Decoder | None, policy: Any) -> Any:
    """The model that ``policy`` stands for: itself without a base, or else the base with this adapter in its layers.

    A ``ScalarModel`` where the adapter has a head of one. Nothing is computed or copied; ``forward`` adds the two layer
    by layer.
    """
    if base is None:
        return policy
    parameters = to_parameters(base)
    trained = to_parameters(policy)
    adapter = Adapter(policy.scale, trained["blocks"])
    model = from_parameters(base.config, parameters | {"blocks": parameters["blocks"] | {"adapter": adapter}})
    return with_scalar_head(model, trained["scalar"]) if "scalar" in trained else model


def merge(model: Decoder | ScalarModel) -> Any:
    """An ordinary model: an attached adapter is added to its weights, one layer at a time; all have one dtype then."""
    decoder, scalar = split(model)
    parameters = to_parameters(decoder)
    blocks = decoder.weights.blocks
    if not blocks.has("adapter"):
        return model
    summed = from_parameters(decoder.config, parameters | {"blocks": jax.lax.map(merged, blocks)})
    return summed if scalar is None else with_scalar_head(summed, scalar.astype(parameters["embed"].dtype))


def base_of(state: TrainState, name: str) -> Any:
    """The frozen model that the parameters of a role, or of a frozen copy, adapt; None where they are a whole model.

    An adapter without a base of its own adapts the policy's: no two roles hold the same buffer.
    """
    role = state.roles.get(name)
    params = state.frozen[name] if role is None else role.params
    if not isinstance(params, Adapter):
        return None
    return state.policy.base if role is None or role.base is None else role.base


def model_of(state: TrainState, name: str) -> Any:
    """The model that a role's parameters stand for, or a frozen copy's."""
    params = state.roles[name].params if name in state.roles else state.frozen[name]
    return attached(base_of(state, name), params)


def policy_model(state: TrainState) -> Any:
    """The live model of a state."""
    return model_of(state, "policy")
