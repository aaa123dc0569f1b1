"""Adapters in the format of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``, written and read. PEFT
adds ``scale * B A`` to a weight [out, in], with A [r, in] and B [out, r]; ours (models/lora.py) are their transposes,
with heads as separate axes. The scale is alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732).
"""

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.config import ADAPTED, Lora, ModelConfig
from jaxrl_llm.models.families import FAMILIES, StoredTensor, Tensor, axis_sizes, layers_of, tensors_of
from jaxrl_llm.models.packed_files import open_packed
from jaxrl_llm.models.weights import hf_shape, open_file, read_object, to_hf, to_ours, write_object

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PRECISION = "base_precision"
"""Key of the weights' metadata that names the ``Lora.base`` over which an adapter was trained."""
SUPPORTED: Mapping[str, Any] = {
    "r": int, "lora_alpha": float, "rank_pattern": dict, "alpha_pattern": dict, "use_rslora": bool,
    "target_modules": list, "base_model_name_or_path": str,
}  # fmt: skip
"""Attributes of adapter_config.json that are read here, and their types."""
KINDS: Mapping[str, tuple[type, ...]] = {"lora_alpha": (int, float), "target_modules": (str, list)}
"""Types of attributes that may have more than one."""
PATTERNS = {"r": "rank_pattern", "lora_alpha": "alpha_pattern"}
"""Attributes with a number for all modules, and those with numbers by pattern."""
IGNORED = frozenset(
    "lora_dropout inference_mode auto_mapping peft_version megatron_core qalora_group_size unsloth_fixed".split()
)
"""Further attributes that change nothing in the sum of base and adapter."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": ("CAUSAL_LM", "SEQ_CLS"),
    "bias": ("none",),
    "revision": ("main",),
    # Others change the base before the adapter is added to it.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
"""The only values that other attributes may have, unless they are switched off (false, null, empty)."""
LARGEST = 4096
"""Largest rank and alpha of an adapter."""
MERGED = "merge the adapter with PEFT (merge_and_unload) and give that model"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, as PEFT and transformers decide it: by its adapter_config.json."""
    return (folder / CONFIG).is_file()


def base_model_name(folder: Path) -> str:
    """Return the name of an adapter's base model; one that is a path is relative to the current folder, as in PEFT."""
    return read_settings(folder)["base_model_name_or_path"]


def precision_warnings(folder: Path, lora: Lora) -> list[str]:
    """Return a line if a folder holds an adapter that was trained over a base of another precision than ``lora.base``.
    Full types are taken for one; where an adapter does not name its precision, nothing is known but of 4-bit bases.
    """
    from safetensors import safe_open

    if not is_adapter(folder):
        return []
    base = base_model_name(folder)
    with safe_open(folder / WEIGHTS, framework="np") as file:
        trained = (file.metadata() or {}).get(PRECISION, "nf4" if "bnb-4bit" in base else None)
    kind = lambda name: "full precision" if name in ("f32", "bf16") else name  # noqa: E731
    current = kind(lora.base if lora.packed else "f32")
    if trained is None or kind(trained) == current:
        return []
    remedy = f"its answers differ a little; --learner.lora.base {trained} with a rank is the one that it knows"
    return [f"adapter {folder} was trained over {base} in {trained}, and its base is in {current} here: {remedy}"]


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the content of adapter_config.json; InputError where it asks for something that is not done here."""
    path = folder / CONFIG
    settings = read_object(path)
    kind = settings.get("peft_type")
    require(kind == "LORA", f"{path} has peft_type {kind!r}, not LORA: {MERGED}")
    for name, value in settings.items():
        supported = name in SUPPORTED or name in IGNORED or not value or value in NEUTRAL.get(name, ())
        require(supported, f"{path} sets {name} {value!r}, which jaxrl_llm does not do: {MERGED}")
    for name, kind in SUPPORTED.items():
        value = settings.get(name) or kind()
        required = name in ("r", "lora_alpha", "target_modules", "base_model_name_or_path")
        valid = isinstance(value, KINDS.get(name, kind)) and bool(value or not required)
        require(valid, f"{path} has {name} {settings.get(name)!r}: correct it, or fetch the file again")
        settings[name] = value
    ranks, alphas = ([settings[name], *settings[patterns].values()] for name, patterns in PATTERNS.items())
    valid = all(isinstance(rank, int) and 0 < rank <= LARGEST for rank in ranks)
    valid = valid and all(isinstance(alpha, int | float) and abs(alpha) <= LARGEST for alpha in alphas)
    numbers = f"ranks {ranks!s:.99} and alphas {alphas!s:.99}"
    require(valid, f"{path} has {numbers}, which must be whole positive numbers and numbers, up to {LARGEST}")
    targets = settings["target_modules"]
    targets = [targets] if isinstance(targets, str) else []
    for pattern in (*settings["rank_pattern"], *settings["alpha_pattern"], *targets):
        try:
            re.compile(pattern)
        except re.error as error:
            raise InputError(f"{path}: {pattern!r} is not a regular expression ({error}): correct it") from None
    has_weights = (folder / WEIGHTS).is_file()
    require(has_weights, f"{folder} holds no {WEIGHTS}: fetch it (pickled weights, .bin, are never read)")
    return settings


def read_adapter(folder: Path, config: ModelConfig) -> Any:
    """Read the ``Adapter`` of a model with this configuration: NumPy arrays, float32, with their scale in ``b``. All
    layers get the largest rank; what a layer has less is filled with zeros, which add nothing. InputError where the
    tensors are not those of the modules that adapter_config.json names, or do not fit the model.
    """
    from jaxrl_llm.models.decoder import Adapter

    settings, stored = read_settings(folder), open_packed(open_file(folder / WEIGHTS))
    parameters: dict[str, Any] = {}
    for tensor in adaptable_tensors(config):
        names = {layer: module_name(tensor, layer) for layer in layers_of(tensor, config)}
        ranks = {layer: rank_and_scale(settings, name) for layer, name in names.items() if is_target(settings, name)}
        if ranks:
            part, matrix = target_of(tensor).split("/")
            both_factors = {
                side.path: stacked_factor(folder, side, config, (*names,), ranks, stored) for side in factors(tensor)
            }
            parameters.setdefault(part, {})[matrix] = both_factors
    foreign = next(iter(stored), None)
    require(
        foreign is None,
        f"{folder / WEIGHTS} holds {foreign}, and only attention and MLP matrices that target_modules names are "
        f"adapted here: {MERGED}",
    )
    targets = f"{folder / CONFIG} has target_modules {settings['target_modules']!r}"
    require(bool(parameters), f"{targets}, and the base has none of them: give the adapter its own base")
    return Adapter(1.0, {"blocks": parameters})


def stacked_factor(
    folder: Path,
    side: Tensor,
    config: ModelConfig,
    layers: tuple[int, ...],
    ranks: Mapping[int, tuple[int, float]],
    stored: dict[str, StoredTensor],
) -> np.ndarray:
    """Take one factor of all ``layers`` that have the matrix, with our axes, out of ``stored``; ``ranks``: rank and
    scale of each adapted layer.
    """
    sizes = axis_sizes(config) | {"R": max(rank for rank, scale in ranks.values())}
    out = np.zeros((len(layers), *(sizes[letter] for letter in side.axes)), np.float32)
    for layer, (rank, scale) in ranks.items():
        name, layer_sizes = side.name.format(layer), sizes | {"R": rank}
        require(name in stored, f"{folder / WEIGHTS} lacks {name}, which {CONFIG} names: fetch both again")
        tensor, shape = stored.pop(name), hf_shape(side, layer_sizes)
        require(
            tensor.shape == shape,
            f"{folder / WEIGHTS}: {name} has shape {list(tensor.shape)}, and base and {CONFIG} say {list(shape)}: give "
            "the adapter its own base",
        )
        value = to_ours(side, tensor.read().astype(np.float32), layer_sizes)
        place = tuple(slice(layer_sizes[letter]) for letter in side.axes)
        out[layers.index(layer)][place] = value * scale if side.path == "b" else value
    return out


def save_adapter(
    adapter: Any, config: ModelConfig, lora: Lora, base: str, directory: str | os.PathLike, card: str | None = None
) -> None:
    """Write a folder with ``adapter_config.json`` and ``adapter_model.safetensors`` (float32), which PEFT loads.
    ``base``: the name by which PEFT finds the model. ``card``: README.md's text. InputError: the directory is not
    empty, or the format has no names for what is adapted: experts, and matrices that the family's checkpoints fuse.
    """
    from safetensors.numpy import save_file

    from jaxrl_llm.models.decoder import to_parameters
    from jaxrl_llm.models.hf import new_directory

    sizes = axis_sizes(config) | {"R": lora.rank}
    adapted = [tensor for tensor in adaptable_tensors(config) if target_of(tensor) in lora.targets]
    names = {target_of(tensor) for tensor in tensors_of(config)}
    unsupported = names & set(lora.targets) - set(map(target_of, adapted))
    require(
        not unsupported,
        f"PEFT has no modules for {', '.join(sorted(unsupported))} of a {config.family} model: export the merged model",
    )
    stored = {}
    for tensor in adapted:
        part, name = target_of(tensor).split("/")
        values = to_parameters(adapter)["blocks"][part][name]
        for side in factors(tensor):
            for place, layer in enumerate(layers_of(tensor, config)):
                stored[side.name.format(layer)] = to_hf(side, np.asarray(values[side.path][place], np.float32), sizes)
    frozen = [module_name(tensor, 0) for tensor in tensors_of(config) if tensor not in adapted]

    def ending(name: str) -> str:
        """Return the shortest end of a module's name that no other module has."""
        words = name.split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        return next(end for end in ends if not any(module.endswith(f".{end}") for module in frozen))

    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0,
        "target_modules": [ending(module_name(tensor, 0)) for tensor in adapted], "bias": "none",
        "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    with new_directory(directory, card) as folder:
        write_object(folder / CONFIG, settings)
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt", PRECISION: lora.base})
        (folder / WEIGHTS).chmod(0o644)


def adaptable_tensors(config: ModelConfig) -> list[Tensor]:
    """Return the tensors that are modules of their own in transformers, and that an adapter may adapt."""
    fused = {part for fusion in FAMILIES[config.family].fused for part in fusion.parts}
    return [tensor for tensor in tensors_of(config) if target_of(tensor) in ADAPTED and tensor.name not in fused]


def target_of(tensor: Tensor) -> str:
    """Return a tensor's name in ``Lora.targets``."""
    return tensor.path.removeprefix("blocks.").replace(".", "/")


def module_name(tensor: Tensor, layer: int) -> str:
    """Return the name of the module with this weight, of the first expert's among experts, in transformers."""
    return tensor.name.format(layer, 0).removesuffix(".weight")


def factors(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors A and B of a weight's change: their names in a file, and their axes; R is the rank. The path
    is the name of ours, ``a`` or ``b``.
    """
    outputs, inputs = tensor.hf_axes.split()
    input_axes = len(inputs)
    # Precedes a module's name in an adapter's file.
    name = "base_model.model." + tensor.name.removesuffix("weight")
    return (
        Tensor(name + "lora_A.weight", "a", f"R {inputs}", tensor.axes[:input_axes] + "R"),
        Tensor(name + "lora_B.weight", "b", f"{outputs} R", "R" + tensor.axes[input_axes:]),
    )


def is_target(settings: Mapping[str, Any], name: str) -> bool:
    """Whether PEFT adapts a module: a list has names or their ends, a string is a regular expression."""
    targets = settings["target_modules"]
    if isinstance(targets, str):
        return targets == "all-linear" or re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def rank_and_scale(settings: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return the rank of a module's factors and the scale of their product; the first pattern that fits decides."""

    def chosen(attribute: str) -> Any:
        fitting = (x for pattern, x in settings[PATTERNS[attribute]].items() if re.match(rf"(.*\.)?({pattern})$", name))
        return next(fitting, settings[attribute])

    rank, alpha = chosen("r"), chosen("lora_alpha")
    return rank, alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)
