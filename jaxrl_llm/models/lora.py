"""Low-rank adapters (LoRA, arXiv 2106.09685): ``W + alpha / rank * a @ b`` on top of a frozen model.

The sum is formed inside each layer, where the layer runs, so no gradient of a whole stack of weights ever exists:
gradients, moments, checkpoints and the reference have the adapter's size. The reference is the base model with the
initial adapter, which is zero, so it costs no second copy of the weights. An adapter with a ``scalar`` [D] represents
a ``ScalarModel``: its head is trained directly, and its base may be a language model.
"""

import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models.config import Lora, ModelConfig
from jaxrl_llm.models.decoder import Adapter, Decoder, merged, parameter_shapes, to_parameters
from jaxrl_llm.models.families import Tensor, axis_sizes, tensors_of
from jaxrl_llm.models.heads import ScalarModel, split, with_scalar_head
from jaxrl_llm.models.hf import new_directory
from jaxrl_llm.models.weights import to_hf, write_json
from jaxrl_llm.types import TrainState

INPUTS = {"attn/o": 2}
"""Number of summed axes of a weight, where it is not one."""


def create(config: ModelConfig, lora: Lora, key: jax.Array, scalar: Any = None) -> Adapter:
    """Create a float32 adapter that changes nothing yet: ``a`` normal with variance 1 / inputs, ``b`` zero.

    ``scalar`` [D] is the initial head of a scalar model; None for a language model.
    """
    shapes = parameter_shapes(config)
    parameters = {}
    for index, target in enumerate(lora.targets):
        part, name = target.split("/")
        count, *sizes = shapes[f"blocks.{part}.{name}"]
        inputs = sizes[: INPUTS.get(target, 1)]
        outputs = sizes[INPUTS.get(target, 1) :]
        drawn = jax.random.normal(jax.random.fold_in(key, index), (count, *inputs, lora.rank))
        a = drawn / math.sqrt(math.prod(inputs))
        parameters.setdefault(part, {})[name] = {"a": a, "b": jnp.zeros((count, lora.rank, *outputs))}
    head = {} if scalar is None else {"scalar": jnp.asarray(scalar, jnp.float32)}
    return Adapter(lora.alpha / lora.rank, {"blocks": parameters} | head)


def attached(base: Decoder | None, policy: Any) -> Any:
    """Return the model of ``policy``: itself without a base, or else the base with this adapter in its layers.

    It is a ``ScalarModel`` if the adapter has a scalar head. Nothing is computed or copied; ``forward`` adds the two
    layer by layer.
    """
    if base is None:
        return policy
    parameters = to_parameters(base)
    trained = to_parameters(policy)
    adapter = Adapter(policy.scale, trained["blocks"])
    model = Decoder(base.config, parameters | {"blocks": parameters["blocks"] | {"adapter": adapter}})
    return with_scalar_head(model, trained["scalar"]) if "scalar" in trained else model


def merge(model: Decoder | ScalarModel) -> Any:
    """Return an ordinary model, in one dtype: an attached adapter is added to the weights, one layer at a time."""
    decoder, scalar = split(model)
    parameters = to_parameters(decoder)
    blocks = decoder.weights.blocks
    if not hasattr(blocks, "adapter"):
        return model
    summed = Decoder(decoder.config, parameters | {"blocks": jax.lax.map(merged, blocks)})
    return summed if scalar is None else with_scalar_head(summed, scalar.astype(parameters["embed"].dtype))


def base_of(state: TrainState, name: str) -> Any:
    """Return the frozen model that the parameters of a role or of a frozen copy adapt; None for a whole model.

    An adapter without its own base adapts the policy's: no two roles hold the same buffer.
    """
    role = state.roles.get(name)
    params = state.frozen[name] if role is None else role.params
    if not isinstance(params, Adapter):
        return None
    return state.policy.base if role is None or role.base is None else role.base


def model_of(state: TrainState, name: str = "policy") -> Any:
    """Return the model of a role's parameters, or of a frozen copy's; by default the current policy."""
    params = state.roles[name].params if name in state.roles else state.frozen[name]
    return attached(base_of(state, name), params)


CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(
    adapter: Adapter, config: ModelConfig, lora: Lora, base: str, directory: str | os.PathLike, card: str | None = None
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` (float32), which PEFT loads.

    PEFT adds ``alpha / r * B A`` to a weight [out, in], with A [r, in] and B [out, r]; ours are their transposes, with
    heads as separate axes.

    Args:
      adapter: adapter of a language model; its arrays are addressable.
      config: the model's configuration.
      lora: the settings that the adapter was made with.
      base: the name by which PEFT finds the model.
      directory: must not exist, or be empty.
      card: the text of README.md, or None for no such file.

    Raises:
      InputError: the directory exists and is not empty.
    """
    from safetensors.numpy import save_file

    sizes = axis_sizes(config) | {"R": lora.rank}
    stored = {}
    modules = []
    for tensor in tensors_of(config):
        part, _, name = tensor.path.removeprefix("blocks.").partition(".")
        if f"{part}/{name}" not in lora.targets:
            continue
        modules.append(tensor.name.split(".")[-2])
        factors = to_parameters(adapter)["blocks"][part][name]
        outputs, inputs = tensor.hf_axes.split()
        summed = INPUTS.get(f"{part}/{name}", 1)
        shapes = {
            "lora_A": ("a", Tensor("", "", f"R {inputs}", tensor.axes[:summed] + "R")),
            "lora_B": ("b", Tensor("", "", f"{outputs} R", "R" + tensor.axes[summed:])),
        }
        for layer in range(config.layers):
            module = "base_model.model." + tensor.name.format(layer).removesuffix(".weight")
            for side, (ours, axes) in shapes.items():
                stored[f"{module}.{side}.weight"] = to_hf(axes, np.asarray(factors[ours][layer], np.float32), sizes)
    described = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0, "target_modules": modules, "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    with new_directory(directory, card) as folder:
        write_json(folder / CONFIG, described)
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)
