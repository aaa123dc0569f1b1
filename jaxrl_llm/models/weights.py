"""Conversion between checkpoint tensors and our nested parameters.

Reading goes by slices: each process fetches from the files only the values of its devices, one device's part of one
stacked leaf at a time; matrices that stay packed it reads whole, a layer at a time. Writing holds one tensor at a time.
"""

import functools
import json
import logging
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families import (
    FAMILIES,
    FLOAT32,
    Fused,
    StoredTensor,
    Tensor,
    axis_sizes,
    layers_of,
    our_shape,
    tensors_of,
)
from jaxrl_llm.models.packed_files import PackedTensor, open_packed

log = logging.getLogger(__name__)

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def hf_shape(tensor: Tensor, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the tensor's shape in a checkpoint."""
    return tuple(math.prod(sizes[letter] for letter in word) for word in tensor.hf_axes.split())


def to_ours(tensor: Tensor, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """Convert a checkpoint's array (of one layer, and of one expert) to our axes."""
    letters = tensor.hf_axes.replace(" ", "").replace("1", "")
    unmerged = array.reshape([sizes[letter] for letter in letters])
    return unmerged.transpose([letters.index(letter) for letter in tensor.inner])


def to_hf(tensor: Tensor, array: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """Convert our array (of one layer, and of one expert) to the checkpoint's axes; the inverse of ``to_ours``."""
    letters = tensor.hf_axes.replace(" ", "").replace("1", "")
    unmerged = array.transpose([tensor.inner.index(letter) for letter in letters])
    return np.ascontiguousarray(unmerged.reshape(hf_shape(tensor, sizes)))


def read_parameters(
    config: ModelConfig,
    stored: Mapping[str, StoredTensor],
    dtype: str,
    mesh: Any = None,
    scalar: bool = False,
    pack: Callable[..., Any] | None = None,
) -> dict[str, Any]:
    """Read our nested dict of JAX arrays in one dtype, each laid out on the mesh by the rules of ``sharding``. Without
    a mesh they are on the default device. A reward model (``scalar``) has ``scalar`` [D], and no LM head. ``pack`` is a
    ``lora.BasePacker``, which reads matrices into their packed form. InputError names a missing, unknown or misshapen
    tensor.
    """
    import jax.numpy as jnp
    from flax import traverse_util

    from jaxrl_llm.sharding import from_parts, layout_of

    stored = split_tensors(config, stored)
    check_tensors(config, stored, scalar)

    def put(path: str, shape: tuple[int, ...], kind: Any, read: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
        if mesh is None:
            return jnp.array(read(tuple(slice(0, size) for size in shape)))
        return from_parts(shape, kind, layout_of(path, shape, mesh), read)

    def read(tensor: Tensor, layer: int | None = None) -> Any:
        """Read our parameter, or one layer's [1, ...]."""
        shape = our_shape(tensor, config) if layer is None else (1, *our_shape(tensor, config)[1:])
        first = layer or 0

        def part(place: tuple[slice, ...]) -> np.ndarray:
            place = (slice(place[0].start + first, place[0].stop + first), *place[1:])
            return read_part(config, tensor, stored, kind, place)

        kind = jnp.dtype(jnp.float32 if tensor.path in FLOAT32 else dtype)
        return put(tensor.path.replace(".", "/"), shape, kind, part)

    def read_packed(tensor: Tensor, kind: str, layer: int) -> dict[str, Any] | None:
        arrays = packed_arrays(config, tensor, stored, kind, layer)
        path = tensor.path.replace(".", "/")
        return arrays and {name: put(f"{path}/{name}", x.shape, x.dtype, x.__getitem__) for name, x in arrays.items()}

    leaves = {}
    for tensor in tensors_of(config, scalar):
        one = functools.partial(read, tensor)
        leaves[tensor.path] = (
            one()
            if pack is None
            else pack(config, tensor.path.replace(".", "/"), one, functools.partial(read_packed, tensor))
        )
    return traverse_util.unflatten_dict(leaves, sep=".")


def packed_arrays(
    config: ModelConfig, tensor: Tensor, stored: Mapping[str, StoredTensor], kind: str, layer: int
) -> dict[str, np.ndarray] | None:
    """Read the arrays of a ``QuantisedMatrix`` [1, ...] of this kind of one layer; {} if it is packed in another form,
    None if it is not packed.
    """
    sizes = axis_sizes(config)
    names = _tensor_names(tensor, config)[layer : layer + 1]
    parts = [stored[name] for name in names.flat]
    together = []
    for part in parts:
        if not isinstance(part, PackedTensor):
            return None
        if part.kind != kind:
            return {}
        arrays = part.arrays()
        if kind != "mxfp4":  # the stored axes are merged ones
            outputs, inputs = ([sizes[letter] for letter in word] for word in tensor.hf_axes.split())
            shapes = {"codes": [*inputs, *outputs], "nibbles": [-1, *outputs]}
            shapes |= {"scales": [*outputs, -1]} if kind == "nf4" else {}
            arrays |= {name: arrays[name].reshape(shape) for name, shape in shapes.items() if name in arrays}
        together.append(arrays)
    return {
        name: np.stack([arrays[name] for arrays in together]).reshape(*names.shape, *np.shape(together[0][name]))
        for name in together[0]
    }


def read_part(
    config: ModelConfig, tensor: Tensor, stored: Mapping[str, StoredTensor], dtype: np.dtype, place: tuple[slice, ...]
) -> np.ndarray:
    """Read the values at ``place`` (start and stop of each dimension) of our parameter, tensor by tensor."""
    sizes = axis_sizes(config)
    depth = len(tensor.outer)
    names = np.asarray(_tensor_names(tensor, config)[place[:depth]], object)
    inner = dict(zip(tensor.inner, place[depth:], strict=True))
    part_sizes = dict(sizes)
    cuts = []
    for word in tensor.hf_axes.split():
        # Only the outer of two merged axes is sliced while reading, for the sake of long contiguous reads.
        outer = inner.get(word[0], slice(0, 1))
        run = math.prod(sizes[letter] for letter in word[1:])
        cuts.append(slice(outer.start * run, outer.stop * run))
        part_sizes[word[0]] = outer.stop - outer.start
    outermost = {word[0] for word in tensor.hf_axes.split()}
    rest = tuple(slice(None) if letter in outermost else inner[letter] for letter in tensor.inner)
    out = np.empty((*names.shape, *(part.stop - part.start for part in inner.values())), dtype)
    for at, name in np.ndenumerate(names):
        out[at] = to_ours(tensor, stored[name].part(tuple(cuts)), part_sizes)[rest]
    return out


def check_tensors(config: ModelConfig, stored: Mapping[str, StoredTensor], scalar: bool = False) -> None:
    """Refuse a checkpoint unless its tensors are exactly those of the configuration."""
    sizes = axis_sizes(config)
    expected = {}
    for tensor in tensors_of(config, scalar):
        expected |= dict.fromkeys(_tensor_names(tensor, config).flat, hf_shape(tensor, sizes))
    missing = [name for name in expected if name not in stored]
    if missing:
        raise InputError(f"the weights lack {_name_some(missing)}; fetch the checkpoint again, or correct config.json")
    skipped = [name for name in stored if _is_skipped(name, config)]
    if skipped:
        log.warning("left out are layers that predict several tokens: %s", _name_some(skipped))
    unknown = [name for name in stored if name not in expected and not _ignorable(name, config, stored)]
    if unknown:
        raise InputError(f"the weights hold {_name_some(unknown)}, unknown to {config.family}; correct config.json")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            raise InputError(f"{name} has shape {list(stored[name].shape)} where config.json says {list(shape)}; "
                             "take the two from the same model")  # fmt: skip


def to_stored(config: ModelConfig, parameters: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return the checkpoint's tensors of our parameters (addressable arrays), under Hugging Face's names. The tensors
    are those of a reward model if ``scalar`` is among the parameters.
    """
    return join_tensors(config, to_parts(config, parameters))


def to_parts(config: ModelConfig, parameters: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """Return ``to_stored`` before those are joined that checkpoints hold in one tensor."""
    sizes = axis_sizes(config)
    stored = {}
    for tensor in tensors_of(config, "scalar" in parameters):
        leaf = functools.reduce(operator.getitem, tensor.path.split("."), parameters)
        for at, name in np.ndenumerate(_tensor_names(tensor, config)):
            stored[name] = StoredTensor(
                hf_shape(tensor, sizes),
                lambda place, tensor=tensor, leaf=leaf, at=at: to_hf(tensor, np.asarray(leaf)[at], sizes)[place],
            )
    return stored


def join_tensors(
    config: ModelConfig, stored: Mapping[str, StoredTensor], kinds: Iterable[Fused] | None = None
) -> dict[str, StoredTensor]:
    """Join what checkpoints, or files with tensors of other ``kinds``, hold in one tensor; the inverse of
    ``split_tensors``.
    """
    sizes, tensors = axis_sizes(config), dict(stored)
    for fused, name, names in _fused(config, kinds):
        if names[0] not in tensors:
            continue
        parts = [tensors.pop(part) for part in names]
        shape = list(parts[0].shape)
        shape[fused.axis] = sum(part.shape[fused.axis] for part in parts)
        tensors[name] = StoredTensor(
            tuple(shape), functools.partial(_join_parts, fused.axis, sizes[fused.groups], parts)
        )
    return tensors


def split_tensors(
    config: ModelConfig, stored: Mapping[str, StoredTensor], kinds: Iterable[Fused] | None = None
) -> dict[str, StoredTensor]:
    """Return a checkpoint's tensors, see ``open_packed``, after splitting those that hold several of ours."""
    tensors = open_packed(stored)
    sizes = axis_sizes(config)
    tensors = _split_experts(config, tensors)
    shapes = {tensor.name: hf_shape(tensor, sizes) for tensor in tensors_of(config)}
    for fused, name, parts in _fused(config, kinds):
        if name not in tensors:
            continue
        source = tensors.pop(name)
        lengths = [shapes[part][fused.axis] for part in fused.parts]
        groups = sizes[fused.groups]
        fits = len(source.shape) > fused.axis and source.shape[fused.axis] == sum(lengths)
        if not fits:
            raise InputError(f"{name} has shape {list(source.shape)} where config.json says {sum(lengths)} along axis "
                             f"{fused.axis}; take the two from the same model")  # fmt: skip
        for index, (part, length) in enumerate(zip(parts, lengths, strict=True)):
            shape = (*source.shape[: fused.axis], length, *source.shape[fused.axis + 1 :])
            rows = np.arange(sum(lengths)).reshape(groups, -1)
            first = sum(lengths[:index]) // groups
            rows = rows[:, first : first + length // groups].ravel()
            tensors[part] = StoredTensor(shape, functools.partial(_read_piece, fused.axis, source, rows))
            if isinstance(source, PackedTensor) and length > 1:
                kind = source.kind if source.kind == "mxfp4" else ""  # blocks of others may span two parts
                arrays = functools.partial(source.arrays, slice(rows[0], rows[-1] + 1, rows[1] - rows[0]))
                tensors[part] = PackedTensor(shape, tensors[part].part, kind=kind, arrays=arrays)
    return tensors


def _fused(config: ModelConfig, kinds: Iterable[Fused] | None) -> list[tuple[Fused, str, list[str]]]:
    """Return the fused tensors of a checkpoint, the name of each in each layer, and the names of its parts."""
    layers = {tensor.name: layers_of(tensor, config) for tensor in tensors_of(config)}
    return [
        (fused, fused.name.format(layer), [part.format(layer) for part in fused.parts])
        for fused in (FAMILIES[config.family].fused if kinds is None else kinds)
        for layer in layers.get(fused.parts[0], ())
    ]


def _split_experts(config: ModelConfig, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Split what some checkpoints hold of all experts of a layer, where others have tensors of each."""
    stacked = re.compile(r"(.*\.mlp\.experts\.)(gate_up|down)_proj")
    matches = {name: match for name in tensors if (match := stacked.fullmatch(name))}
    if not matches or any(tensor.name.endswith("experts.gate_proj") for tensor in tensors_of(config)):
        return tensors
    for name, match in matches.items():
        source = tensors.pop(name)
        parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
        experts, rows, columns = source.shape
        length = rows // len(parts)
        for at in np.ndindex(experts, len(parts)):

            def part(place: tuple[slice, ...], source: Any = source, expert: int = at[0], first: int = at[1] * length):
                rows = slice(first + place[0].start, first + place[0].stop)
                return source.part((slice(expert, expert + 1), rows, place[1]))[0]

            tensors[f"{match[1]}{at[0]}.{parts[at[1]]}_proj.weight"] = StoredTensor((length, columns), part)
    return tensors


def _read_piece(axis: int, source: StoredTensor, rows: np.ndarray, place: tuple[slice, ...]) -> np.ndarray:
    """Read a part of a fused tensor's part, which has these rows of its ``axis``."""
    rows = rows[place[axis]]
    values = source.part((*place[:axis], slice(int(rows[0]), int(rows[-1]) + 1), *place[axis + 1 :]))
    return values if len(rows) == values.shape[axis] else np.take(values, rows - rows[0], axis)


def _join_parts(axis: int, groups: int, tensors: list[StoredTensor], place: tuple[slice, ...]) -> np.ndarray:
    arrays = [tensor.read() for tensor in tensors]
    shares = [x.reshape(*x.shape[:axis], groups, -1, *x.shape[axis + 1 :]) for x in arrays]
    joined = np.concatenate(shares, axis=axis + 1)
    return joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])[place]


def open_checkpoint(directory: Path) -> dict[str, StoredTensor]:
    """Open the tensors of a directory: those of ``model.safetensors``, else of the shards that its index names. Other
    files of weights are not looked at. The choice is that of transformers.
    """
    places = _places(directory)
    files = {*places.values()}
    if (directory / SINGLE).is_file():
        tensors = open_file(directory / SINGLE)
        if files - {SINGLE} and all((directory / file).is_file() for file in files):  # else the index is left over
            sharded = _open_shards(directory, places)
            equal = tensors.keys() == sharded.keys() and all(_equal(tensors[name], sharded[name]) for name in sharded)
            both = f"{SINGLE} and the files of {INDEX}"
            require(equal, f"{directory} holds two models that differ, {both}; move one of them away")
        return tensors
    if files:
        return _open_shards(directory, places)
    remedy = "convert the weights to safetensors" if any(directory.glob("*.bin")) else "fetch the weights"
    raise InputError(f"{directory} holds no {SINGLE} and no {INDEX}; {remedy} (pickled ones are never read)")


def _places(directory: Path) -> dict[str, str]:
    """Return the file of each tensor by an index; {} without one."""
    if not (directory / INDEX).is_file():
        return {}
    places = read_object(directory / INDEX).get("weight_map", {})
    files = places.values() if isinstance(places, dict) else (None,)
    flat = all(isinstance(file, str) and file and Path(file).name == file for file in files)
    require(flat, f"{directory / INDEX} has a weight_map that names no files of this directory; fetch it again")
    return places


def _open_shards(directory: Path, places: Mapping[str, str]) -> dict[str, StoredTensor]:
    shards = {file: open_file(directory / file) for file in sorted({*places.values()})}
    lost = [name for name, file in places.items() if name not in shards[file]]
    if lost:
        raise InputError(f"{directory / places[lost[0]]} lacks {lost[0]}, which the index names; fetch it again")
    return {name: shards[file][name] for name, file in places.items()}


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Open the tensors of one safetensors file."""
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="np")
    except FileNotFoundError:
        raise InputError(f"{path} is missing though the index names it; fetch it again") from None
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a whole safetensors file ({error}); fetch it again") from None
    tensors, starts = {}, {}
    for name in file.keys():  # noqa: SIM118
        view = file.get_slice(name)
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        part = functools.partial(operator.getitem, view)
        if dtype == "F8_E4M3":
            starts = starts or _data_starts(path)
            part = functools.partial(_read_fp8, path, starts[name], shape)
        tensors[name] = StoredTensor(shape, part, dtype)
    return tensors


def _data_starts(path: Path) -> dict[str, int]:
    """Return where the numbers of each tensor of a safetensors file begin."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


def _read_fp8(path: Path, start: int, shape: tuple[int, ...], place: tuple[slice, ...]) -> np.ndarray:
    """Read a part of a float8 tensor, which safetensors has no NumPy type for."""
    import ml_dtypes

    return np.array(np.memmap(path, np.uint8, "r", start, shape)[place]).view(ml_dtypes.float8_e4m3fn)


def write_checkpoint(stored: Mapping[str, StoredTensor], directory: Path, dtype: str, limit: int = 5 * 10**9) -> None:
    """Write the tensors as one file, or as shards of at most ``limit`` bytes with an index."""
    import ml_dtypes
    from huggingface_hub import split_state_dict_into_shards_factory
    from safetensors.numpy import save_file

    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    wide = tuple(
        tensor.name.rpartition(".")[2]
        for family in FAMILIES.values()
        for tensor in family.tensors
        if tensor.path in FLOAT32
    )
    kind_of = lambda name: np.dtype(np.float32) if name.endswith(wide) else kind  # noqa: E731
    shards = split_state_dict_into_shards_factory(
        dict(stored),
        get_storage_size=lambda tensor: math.prod(tensor.shape) * kind.itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    for file, names in shards.filename_to_tensors.items():
        # save_file writes the memory of an array as it lies, so a transposed view would be stored scrambled.
        arrays = {name: np.ascontiguousarray(stored[name].read().astype(kind_of(name), copy=False)) for name in names}
        save_file(arrays, directory / file, metadata={"format": "pt"})
        (directory / file).chmod(0o644)
    if shards.is_sharded:
        write_object(directory / INDEX, {"metadata": shards.metadata, "weight_map": shards.tensor_to_filename})


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; InputError where the file is missing or holds something else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path.parent} holds no {path.name}; give the directory of a whole model") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path} does not hold a JSON object; fetch it again")
    return value


def write_object(path: Path, value: Mapping[str, Any]) -> None:
    """Write an indented JSON object."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _tensor_names(tensor: Tensor, config: ModelConfig) -> np.ndarray:
    """Return the names of the tensors that make up our parameter, by layer and by expert."""
    outer = {"L": layers_of(tensor, config), "E": range(axis_sizes(config).get("E", 0))}
    names = np.empty(tuple(len(outer[letter]) for letter in tensor.outer), object)
    for at in np.ndindex(names.shape):
        names[at] = tensor.name.format(*(outer[letter][i] for letter, i in zip(tensor.outer, at, strict=True)))
    return names


def _name_some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _ignorable(name: str, config: ModelConfig, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether an unknown tensor may be skipped: old rotary tables, what the family leaves out, projections of keys that
    a layer does not use, or a tied LM head that repeats the embedding.
    """
    if name.endswith("rotary_emb.inv_freq") or _is_skipped(name, config):
        return True
    if keys := re.fullmatch(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.weight", name):
        return config.layers - config.shared_kv_layers <= int(keys[1]) < config.layers
    if name != "lm_head.weight" or not config.embeddings.tied:
        return False
    if _equal(stored[name], stored["model.embed_tokens.weight"]):
        return True
    raise InputError("lm_head.weight differs from the embedding though tie_word_embeddings is true; set it to false")


def _is_skipped(name: str, config: ModelConfig) -> bool:
    return name.startswith(tuple(x.format(layers=config.layers) for x in FAMILIES[config.family].skipped))


def _equal(tensor: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors have the same numbers; some rows at a time, since both may be larger than memory."""
    rows, *rest = tensor.shape or (1,)
    cuts = [(slice(i, min(i + 8192, rows)), *(slice(0, size) for size in rest)) for i in range(0, rows, 8192)]
    return tensor.shape == other.shape and all(np.array_equal(tensor.part(cut), other.part(cut)) for cut in cuts)
