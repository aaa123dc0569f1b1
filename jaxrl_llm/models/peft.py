"""An adapter as a directory that PEFT loads beside the model that it adapts: ``PeftModel.from_pretrained``."""

import os
from typing import Any

import numpy as np

from jaxrl_llm.models.config import Lora, ModelConfig
from jaxrl_llm.models.decoder import Adapter, to_parameters
from jaxrl_llm.models.families import Tensor, axis_sizes, tensors_of
from jaxrl_llm.models.hf import new_directory, write_card
from jaxrl_llm.models.lora import INPUTS
from jaxrl_llm.models.weights import to_hf, write_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def save_adapter(
    adapter: Adapter, config: ModelConfig, lora: Lora, base: str, directory: str | os.PathLike, card: str | None = None
) -> None:
    """Write ``adapter_config.json`` and ``adapter_model.safetensors`` (float32).

    PEFT adds ``alpha / r * B A`` to a weight [out, in], with A [r, in] and B [out, r]; ours are their transposes, with
    heads as axes of their own.

    Args:
      adapter: of a language model; its arrays are addressable.
      config: the model's.
      lora: what the adapter was made with.
      base: the name by which PEFT finds the model.
      directory: must not exist, or be empty.
      card: the text of its README.md, if it is to have one.

    Raises:
      InputError: it exists and is not empty.
    """
    from safetensors.numpy import save_file

    stored = {}
    modules = []
    for tensor in tensors_of(config):
        part, _, name = tensor.path.removeprefix("blocks.").partition(".")
        if f"{part}/{name}" not in lora.targets:
            continue
        modules.append(tensor.name.split(".")[-2])
        stored |= _factors(tensor, to_parameters(adapter)["blocks"][part][name], config, lora.rank)
    with new_directory(directory) as folder:
        write_json(folder / CONFIG, _describe(lora, base, modules))
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)
        write_card(folder, card)


def _factors(tensor: Tensor, factors: dict[str, Any], config: ModelConfig, rank: int) -> dict[str, np.ndarray]:
    """A and B of each layer, under PEFT's names."""
    outputs, inputs = tensor.hf_axes.split()
    summed = INPUTS.get(tensor.path.removeprefix("blocks.").replace(".", "/"), 1)
    sizes = axis_sizes(config) | {"R": rank}
    shapes = {
        "lora_A": ("a", Tensor("", "", f"R {inputs}", tensor.axes[:summed] + "R")),
        "lora_B": ("b", Tensor("", "", f"{outputs} R", "R" + tensor.axes[summed:])),
    }
    found = {}
    for layer in range(config.layers):
        module = "base_model.model." + tensor.name.format(layer).removesuffix(".weight")
        for name, (ours, axes) in shapes.items():
            found[f"{module}.{name}.weight"] = to_hf(axes, np.asarray(factors[ours][layer], np.float32), sizes)
    return found


def _describe(lora: Lora, base: str, modules: list[str]) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
