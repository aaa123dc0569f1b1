"""Low-rank adapters (LoRA, arXiv 2106.09685): ``W + alpha / rank * a @ b`` on top of a frozen model.

The sum is formed inside each layer, where it runs, so no gradient of a whole stack of weights ever exists: gradients,
moments and checkpoints have the adapter's size. The reference is the base with the initial adapter, which is zero, so
it costs no second copy of the weights. An adapter with a ``scalar`` [D] represents a ``ScalarModel``: its head is
trained directly, and its base may be a language model.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import require
from jaxrl_llm.models.config import Lora, ModelConfig
from jaxrl_llm.models.decoder import Adapter, Decoder, add_adapter, parameter_shapes, to_parameters
from jaxrl_llm.models.heads import ScalarModel, split_head, with_scalar_head
from jaxrl_llm.types import TrainState

INPUTS = {"attn/o": 2}
"""Number of summed axes of a weight, where it is not one."""


def create_adapter(config: ModelConfig, lora: Lora, key: jax.Array, scalar: Any = None) -> Adapter:
    """Create a float32 adapter that changes nothing yet: ``a`` normal with variance 1 / inputs, ``b`` zero. ``scalar``
    [D] is the initial head of a scalar model; None for a language model. Targets that the model lacks are left out
    (experts are no MLP); InputError where none is left. Each expert has factors of its own.
    """
    shapes = parameter_shapes(config)
    parameters = {}
    for index, target in enumerate(lora.targets):
        part, name = target.split("/")
        if f"blocks.{part}.{name}" not in shapes:
            continue
        shape = shapes[f"blocks.{part}.{name}"]
        first = 2 if part == "experts" else 1
        last = first + INPUTS.get(target, 1)
        outer, inputs, outputs = shape[:first], shape[first:last], shape[last:]
        normal = jax.random.normal(jax.random.fold_in(key, index), (*outer, *inputs, lora.rank))
        a = normal / math.sqrt(math.prod(inputs))
        parameters.setdefault(part, {})[name] = {"a": a, "b": jnp.zeros((*outer, lora.rank, *outputs))}
    targets = ", ".join(lora.targets)
    require(bool(parameters), f"learner.lora.targets {targets}: a {config.family} model has none of them; add attn/q")
    head = {} if scalar is None else {"scalar": jnp.asarray(scalar, jnp.float32)}
    return Adapter(lora.alpha / lora.rank, {"blocks": parameters} | head)


def with_adapter(base: Decoder | None, policy: Any) -> Any:
    """Return the model of ``policy``: itself without a base, or else the base with this adapter in its layers, a
    ``ScalarModel`` if it has a scalar head. Nothing is computed or copied; ``forward`` adds the two layer by layer.
    """
    if base is None:
        return policy
    parameters = to_parameters(base)
    parameters_of_policy = to_parameters(policy)
    adapter = Adapter(policy.scale, parameters_of_policy["blocks"])
    model = Decoder(base.config, parameters | {"blocks": parameters["blocks"] | {"adapter": adapter}})
    return with_scalar_head(model, parameters_of_policy["scalar"]) if "scalar" in parameters_of_policy else model


def without_adapter(model: Decoder) -> Decoder:
    """Return the frozen model below an attached adapter; of a model without one an equal model."""
    return Decoder(model.config, to_parameters(model))


def merge(model: Decoder | ScalarModel) -> Any:
    """Return an ordinary model, in one dtype: an attached adapter is added to the weights, one layer at a time."""
    decoder, scalar = split_head(model)
    parameters = to_parameters(decoder)
    blocks = decoder.weights.blocks
    if not hasattr(blocks, "adapter"):
        return model
    merged = Decoder(decoder.config, parameters | {"blocks": jax.lax.map(add_adapter, blocks)})
    return merged if scalar is None else with_scalar_head(merged, scalar.astype(parameters["embed"].dtype))


def frozen_base(state: TrainState, name: str) -> Any:
    """Return the frozen model that the parameters of a role or of a frozen copy adapt; None for a whole model. An
    adapter without its own base adapts the policy's: no two roles hold the same buffer.
    """
    role = state.roles.get(name)
    params = state.frozen[name] if role is None else role.params
    if not isinstance(params, Adapter):
        return None
    return state.policy.base if role is None or role.base is None else role.base


def model_of(state: TrainState, name: str = "policy") -> Any:
    """Return the model of a role's parameters, or of a frozen copy's; by default the current policy."""
    params = state.roles[name].params if name in state.roles else state.frozen[name]
    return with_adapter(frozen_base(state, name), params)
