"""Adapters in the format of PEFT: ``adapter_config.json`` and ``adapter_model.safetensors``, written and read. PEFT
adds ``scale * B A`` to a weight [out, in], with A [r, in] and B [out, r]; ours (models/lora.py) are their transposes,
with heads as separate axes. The scale is alpha / r, or alpha / sqrt(r) for rsLoRA (arXiv 2312.03732).
"""

import itertools
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.config import ADAPTABLE, Lora, ModelConfig, matrix_role
from jaxrl_llm.models.families import FAMILIES, StoredTensor, Tensor, axis_sizes, layers_of, tensors_of
from jaxrl_llm.models.packed_files import open_packed
from jaxrl_llm.models.weights import (
    hf_shape,
    join_tensors,
    open_file,
    read_object,
    split_tensors,
    to_hf,
    to_ours,
    write_object,
)

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FACTOR = "base_model.model.{}.lora_{}.weight"
"""Name of a factor in the weights' file, by module and letter."""
PRECISION = "base_precision"
"""Key of the weights' metadata that names the ``Lora.base`` over which an adapter was trained."""
SUPPORTED: Mapping[str, Any] = {
    "r": int, "lora_alpha": float, "rank_pattern": dict, "alpha_pattern": dict, "use_rslora": bool,
    "target_modules": list, "target_parameters": list, "base_model_name_or_path": str,
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
        required = name in ("r", "lora_alpha", "base_model_name_or_path")
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
    layers of a matrix get the largest rank; what a layer has less is filled with zeros, which add nothing. InputError
    where the tensors are not those of the modules that adapter_config.json names, or do not fit the model.
    """
    from jaxrl_llm.models.decoder import Adapter

    settings, stored = read_settings(folder), open_packed(open_file(folder / WEIGHTS))
    sizes, modules = axis_sizes(config), modules_of(config)
    below = "language_model." if any(".language_model." in name for name in stored) else ""
    a: dict[str, np.ndarray] = {}
    b: dict[str, StoredTensor] = {}
    for weight, tensors in modules:
        rows, columns = sum(hf_shape(tensor, sizes)[0] for tensor in tensors), hf_shape(tensors[0], sizes)[1]
        for layer in layers_of(tensors[0], config):
            module = module_name(weight, layer, below)
            if name := adapted_name(settings, module):
                rank, scale = rank_and_scale(settings, name)
                shared = take_factor(folder, stored, FACTOR.format(module, "A"), (rank, columns))
                a |= dict.fromkeys((tensor.name.format(layer) for tensor in tensors), shared)
                values = scale * take_factor(folder, stored, FACTOR.format(module, "B"), (rows, rank))
                b[weight.format(layer)] = StoredTensor(values.shape, values.__getitem__)
    foreign = next(iter(stored), None)
    require(
        foreign is None,
        f"{folder / WEIGHTS} holds {foreign}, and only matrices of the layers that target_modules names are adapted "
        f"here: {MERGED}",
    )
    targets = f"{folder / CONFIG} has target_modules {settings['target_modules']!r}"
    require(bool(a), f"{targets}, and the base has none of them: give the adapter its own base")
    split = {name: part.read() for name, part in split_tensors(config, b).items()}
    parameters: dict[str, Any] = {}
    for tensor in itertools.chain(*(tensors for _, tensors in modules)):
        names = [tensor.name.format(layer) for layer in layers_of(tensor, config)]
        if rank := max(len(a.get(name, ())) for name in names):
            part, matrix = target_of(tensor).split("/")
            parameters.setdefault(part, {})[matrix] = {
                side.path: stack_factors(side, [values.get(name) for name in names], sizes | {"R": rank})
                for side, values in zip(factors(tensor), (a, split), strict=True)
            }
    return Adapter(1.0, {"blocks": parameters})


def take_factor(folder: Path, stored: dict[str, StoredTensor], name: str, shape: tuple[int, int]) -> np.ndarray:
    """Take a factor out of ``stored``, in float32."""
    require(name in stored, f"{folder / WEIGHTS} lacks {name}, which {CONFIG} names: fetch both again")
    tensor = stored.pop(name)
    require(
        tensor.shape == shape,
        f"{folder / WEIGHTS}: {name} has shape {list(tensor.shape)}, and base and {CONFIG} say {list(shape)}: give "
        "the adapter its own base",
    )
    return tensor.read().astype(np.float32)


def stack_factors(side: Tensor, layers: list[np.ndarray | None], sizes: Mapping[str, int]) -> np.ndarray:
    """Stack one factor of all layers that have the matrix, with our axes; None: a layer is not adapted."""
    out = np.zeros((len(layers), *hf_shape(side, sizes)), np.float32)
    for whole, value in zip(out, layers, strict=True):
        if value is not None:
            whole[: value.shape[0], : value.shape[1]] = value
    return np.stack([to_ours(side, layer, sizes) for layer in out])


def save_adapter(
    adapter: Any,
    config: ModelConfig,
    lora: Lora,
    base: str,
    directory: str | os.PathLike,
    card: str | None = None,
    below: str = "",
) -> None:
    """Write a folder with ``adapter_config.json`` and ``adapter_model.safetensors`` (float32), which PEFT loads. A
    module that holds several of our matrices gets the sum of their ranks: its A has the rows of all their A, and its B
    zeros where one's columns meet another's rows. ``base``: the name by which PEFT finds the model. ``card``:
    README.md's text. ``below``: of ``Family``, if the base reads pictures too. InputError: the directory is not empty,
    or PEFT has no modules for what is adapted (experts).
    """
    from safetensors.numpy import save_file

    from jaxrl_llm.models.decoder import to_parameters
    from jaxrl_llm.models.hf import new_directory

    sizes = axis_sizes(config) | {"R": lora.rank}
    adapted = lambda tensor: matrix_role(target_of(tensor)) in lora.targets  # noqa: E731
    modules = [(weight, tensors) for weight, tensors in modules_of(config) if any(map(adapted, tensors))]
    known = set(itertools.chain(*(tensors for _, tensors in modules)))
    unsupported = {target_of(tensor) for tensor in tensors_of(config) if adapted(tensor) and tensor not in known}
    require(
        not unsupported,
        f"PEFT has no modules for {', '.join(sorted(unsupported))} of a {config.family} model: export the merged model",
    )
    blocks = to_parameters(adapter)["blocks"]
    counts = {weight: sum(map(adapted, tensors)) for weight, tensors in modules}
    stored: dict[str, np.ndarray] = {}
    parts: dict[str, StoredTensor] = {}
    for weight, tensors in modules:
        for place, layer in enumerate(layers_of(tensors[0], config)):
            a: list[np.ndarray] = []
            for tensor in tensors:
                b = np.zeros((hf_shape(tensor, sizes)[0], counts[weight] * lora.rank), np.float32)
                if adapted(tensor):
                    part, matrix = target_of(tensor).split("/")
                    first, second = (
                        to_hf(side, np.asarray(blocks[part][matrix][side.path][place], np.float32), sizes)
                        for side in factors(tensor)
                    )
                    b[:, len(a) * lora.rank :][:, : lora.rank] = second
                    a.append(first)
                parts[tensor.name.format(layer)] = StoredTensor(b.shape, b.__getitem__)
            stored[FACTOR.format(module_name(weight, layer, below), "A")] = np.concatenate(a)
    for weight, tensor in join_tensors(config, parts).items():
        stored[FACTOR.format(module_name(weight, below=below), "B")] = tensor.read()
    others = {module_name(weight_of(tensor, config)) for tensor in tensors_of(config)}

    def ending(weight: str) -> str:
        """Return the shortest end of a module's name that no other module has."""
        words = module_name(weight).split(".")
        ends = (".".join(words[-count:]) for count in range(1, len(words) + 1))
        return next(end for end in ends if sum(module.endswith(f".{end}") for module in others) == 1)

    def targets(weight: str) -> list[str]:
        """Return the name by which PEFT finds a module in all layers; beside pictures' modules it needs all names."""
        layers = [layer for name, tensors in modules if name == weight for layer in layers_of(tensors[0], config)]
        return [module_name(weight, layer, below) for layer in layers] if below else [ending(weight)]

    # PEFT 0.21 takes modules named gate_proj, up_proj and down_proj for experts' in many models that have some.
    by_weight = [weight for weight in counts if config.experts is not None and ".mlp." in weight]
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base,
        "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": 0.0,
        "target_modules": [name for weight in counts if weight not in by_weight for name in targets(weight)],
        "rank_pattern": {ending(weight): count * lora.rank for weight, count in counts.items() if count > 1},
        "alpha_pattern": {ending(weight): count * lora.alpha for weight, count in counts.items() if count > 1},
        "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
    }  # fmt: skip
    if by_weight:
        settings["target_parameters"] = [f"{name}.weight" for weight in by_weight for name in targets(weight)]
    with new_directory(directory, card) as folder:
        write_object(folder / CONFIG, settings)
        save_file(stored, folder / WEIGHTS, metadata={"format": "pt", PRECISION: lora.base})
        (folder / WEIGHTS).chmod(0o644)


def modules_of(config: ModelConfig) -> list[tuple[str, list[Tensor]]]:
    """Return the weights of transformers' modules that an adapter may adapt, and what each holds of ours. Layers of two
    kinds may have modules of one name.
    """
    modules: dict[tuple[str, str], list[Tensor]] = {}
    for tensor in tensors_of(config):
        part = target_of(tensor).partition("/")[0]
        if matrix_role(target_of(tensor)) in ADAPTABLE and part != "experts":
            modules.setdefault((weight_of(tensor, config), part), []).append(tensor)
    return [(weight, tensors) for (weight, _), tensors in modules.items()]


def weight_of(tensor: Tensor, config: ModelConfig) -> str:
    """Return the name of the checkpoint's tensor that holds this one, itself or what it is fused into."""
    return next((fused.name for fused in FAMILIES[config.family].fused if tensor.name in fused.parts), tensor.name)


def target_of(tensor: Tensor) -> str:
    """Return a tensor's name in ``Lora.targets``."""
    return tensor.path.removeprefix("blocks.").replace(".", "/")


def module_name(weight: str, layer: int = 0, below: str = "") -> str:
    """Return the name of the module with this weight, of the first expert's among experts, in transformers. ``below``:
    see ``Family``.
    """
    return weight.format(layer, 0).removesuffix(".weight").replace("model.", f"model.{below}", 1)


def factors(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factors A and B of a weight's change with their axes; R is the rank. The path is the name of ours,
    ``a`` or ``b``.
    """
    outputs, inputs = tensor.hf_axes.split()
    input_axes = len(inputs)
    return (
        Tensor("lora_A", "a", f"R {inputs}", tensor.axes[:input_axes] + "R"),
        Tensor("lora_B", "b", f"{outputs} R", "R" + tensor.axes[input_axes:]),
    )


def adapted_name(settings: Mapping[str, Any], module: str) -> str:
    """Return a module's name, or its weight's, if PEFT adapts it by that; else "". A list has names or their ends, a
    string is a regular expression.
    """
    targets = settings["target_modules"]
    if isinstance(targets, str):
        found = targets == "all-linear" or re.fullmatch(targets, module) is not None
    else:
        found = any(f".{module}".endswith(f".{target}") for target in targets)
    weight = f"{module}.weight"
    by_weight = any(f".{weight}".endswith(f".{target}") for target in settings["target_parameters"])
    return module if found else weight if by_weight else ""


def rank_and_scale(settings: Mapping[str, Any], name: str) -> tuple[int, float]:
    """Return the rank of the factors of a module, or of a weight, and the scale of their product; the first pattern
    that fits decides.
    """

    def chosen(attribute: str) -> Any:
        fitting = (x for pattern, x in settings[PATTERNS[attribute]].items() if re.match(rf"(.*\.)?({pattern})$", name))
        return next(fitting, settings[attribute])

    rank, alpha = chosen("r"), chosen("lora_alpha")
    return rank, alpha / (math.sqrt(rank) if settings["use_rslora"] else rank)
