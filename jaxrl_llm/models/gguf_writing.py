"""Write a model as one GGUF file in the layout of llama.cpp's converter, by the tables of ``gguf``."""

import dataclasses
import math
import operator
import os
import types
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models import gguf as tables
from jaxrl_llm.models.config import Llama3Rope, ModelConfig
from jaxrl_llm.models.families import family_of, tensors_of
from jaxrl_llm.models.hf_config import differences, read_config, write_config
from jaxrl_llm.models.tensors import StoredTensor, Tensor
from jaxrl_llm.models.weights import to_stored
from jaxrl_llm.system.paths import new_file

KINDS = types.MappingProxyType({"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"})
"""Storage types of matrices -> llama.cpp's name of such a file."""
NORMAL, UNUSED = 1, 5
"""Token types of llama.cpp: text, and ids without a meaning."""
SAME = types.MappingProxyType({"mistral": "llama", "mixtral": "llama"})
"""model_type -> the equivalent architecture, for families without one of their own."""


def save_gguf(model: Any, tokenizer: Any | None, path: str | os.PathLike, kind: str = "f32") -> None:
    """Write a decoder and its tokenizer as a GGUF file.

    Matrices are stored as ``kind``; norms, biases and routers always in float32, and a matrix with rows that Q8_0's
    blocks of 32 do not divide in float16. The file appears whole or not at all.

    Args:
      model: a decoder; its arrays are addressable by this process.
      tokenizer: byte-level BPE, or None.
      path: the file, which is replaced if it exists.
      kind: a key of ``KINDS``.

    Raises:
      InputError: the model is a reward model, or has something that the format cannot express.
    """
    import gguf

    from jaxrl_llm.models.decoder import to_parameters
    from jaxrl_llm.models.heads import ScalarModel

    require(kind in KINDS, f"{kind!r} is not a GGUF type that can be written: use one of {', '.join(KINDS)}")
    require(not isinstance(model, ScalarModel), "a GGUF file cannot hold a reward model: write a directory")
    config = model.config
    metadata = _metadata(config, tokenizer, Path(path).stem)
    tensors = _tensors(config, metadata["general.architecture"], to_stored(config, to_parameters(model)))
    _check(config, metadata, tensors)
    metadata["general.file_type"] = int(gguf.LlamaFileType[KINDS[kind]])
    metadata["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    with new_file(Path(path)) as part:
        _write(part, metadata, tensors, kind)


def _metadata(config: ModelConfig, tokenizer: Any | None, name: str) -> dict[str, Any]:
    """Return the file's metadata by key; floats are rounded to float32."""
    known = {model_type: architecture for architecture, model_type in tables.ARCHITECTURES.items()} | dict(SAME)
    require(
        config.family in known,
        f"the family {config.family} has no known name in GGUF files: write a directory",
    )
    prefix = known[config.family]
    attributes = write_config(config, "float32")
    if "num_experts" in attributes:  # under the name that the table has
        attributes["num_local_experts"] = attributes["num_experts"]
    found = {key: attributes[attribute] for key, attribute in tables.ATTRIBUTES.items() if attributes.get(attribute)}
    scaling = config.attention.rope.scaling
    if isinstance(scaling, float):
        found |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling}
    found |= {"vocab_size": config.vocab_size, "attention.value_length": config.attention.head_dim}
    found["rope.dimension_count"] = config.attention.head_dim
    metadata = {"general.architecture": prefix, "general.name": name}
    metadata |= {f"{prefix}.{key}": tables.shortest(value) for key, value in found.items()}
    own = None if tokenizer is None else tokenizer.eos_token_id
    ends = sorted(config.tokens.eos, key=lambda index: index != own)  # the tokenizer's own is the first
    ids = dict(zip(tables.ENDS, ends, strict=False))
    ids |= {tables.NAMED["bos"]: config.tokens.bos, tables.NAMED["pad"]: config.tokens.pad}
    metadata |= {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items() if index is not None}
    return metadata | _tokenizer(tokenizer, config.vocab_size)


def _tokenizer(tokenizer: Any | None, size: int) -> dict[str, Any]:
    """Return tokens, merges and template; the model's ids beyond the tokenizer's tokens are marked unused."""
    from jaxrl_llm.models.tokenizer import byte_pairs_of

    if tokenizer is None:
        return {}
    pairs = byte_pairs_of(tokenizer)
    require(
        len(pairs.tokens) <= size,
        f"the tokenizer has {len(pairs.tokens)} tokens and the model {size}: write a directory",
    )
    kinds = dict.fromkeys(pairs.tokens, NORMAL) | dict.fromkeys(pairs.special, tables.CONTROL)
    kinds |= dict.fromkeys(pairs.added, tables.USER_DEFINED)
    unused = [f"[PAD{index}]" for index in range(len(pairs.tokens), size)]
    found = {
        "model": "gpt2",
        "pre": pairs.pre,
        "tokens": [*pairs.tokens, *unused],
        "token_type": [*(kinds[token] for token in pairs.tokens), *(UNUSED for _ in unused)],
        "merges": [" ".join(merge) for merge in pairs.merges],
        "add_bos_token": pairs.begin,
    }
    if tokenizer.unk_token_id is not None:
        found[f"{tables.NAMED['unk']}_token_id"] = tokenizer.unk_token_id
    # The format has no empty arrays; a tokenizer of single bytes has no merges.
    metadata = {f"tokenizer.ggml.{name}": value for name, value in found.items() if value != []}
    return metadata | ({} if pairs.chat_template is None else {"tokenizer.chat_template": pairs.chat_template})


def _tensors(config: ModelConfig, architecture: str, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the file's tensors by name, float32 when read."""
    family = family_of(tables.ARCHITECTURES[architecture])
    names = {path: name for name, path in tables.PATHS.items()}
    if config.experts is not None:
        matrices = {path: name for path, name in names.items() if path.startswith("blocks.mlp.")}
        names |= {path: name.replace(".weight", f"{tables.SHARED}.weight") for path, name in matrices.items()}
    found = {}
    for tensor in tensors_of(config):
        change, _ = tables.changes_of(family, tensor.path, config.attention.head_dim)
        for layer in range(config.layers) if tensor.layered else (0,):
            prefix = f"blk.{layer}." if tensor.layered else ""
            plain = _stacked(tensor, layer, config, stored)
            found[prefix + names[tensor.path]] = StoredTensor(
                plain.shape, lambda place, plain=plain, change=change: change(plain.part(place).astype(np.float32))
            )
    rope = config.attention.rope
    if isinstance(rope.scaling, Llama3Rope):
        table = tables.llama3_table(rope.scaling, rope.theta, config.attention.head_dim // 2).astype(np.float32)
        found[tables.LLAMA3_ROPE] = StoredTensor(table.shape, lambda place: table[place])
    return found


def _stacked(tensor: Tensor, layer: int, config: ModelConfig, stored: dict[str, StoredTensor]) -> StoredTensor:
    """Return a layer's tensor, of all experts together where each has one."""
    if config.experts is None or tensor.name.count("{}") < 2:
        return stored[tensor.name.format(layer)]
    each = [stored[tensor.name.format(layer, expert)] for expert in range(config.experts.count)]

    def part(place: tuple[slice, ...]) -> np.ndarray:
        return np.stack([one.part(place[1:]) for one in each[place[0]]])

    return StoredTensor((len(each), *each[0].shape), part)


def _check(config: ModelConfig, metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
    """Refuse a model that the file would not reproduce when it is read again."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    table = tensors[tables.LLAMA3_ROPE].read() if tables.LLAMA3_ROPE in tensors else None
    try:
        again = read_config(tables.attributes_of(metadata.get, shapes, table))
    except InputError:
        raise InputError(
            f"a GGUF file of {metadata['general.architecture']} cannot express this model's attention (its windows, or "
            "a rescaling of rotary positions that was not published): write a directory"
        ) from None
    # Any of its ends ends an answer, in whatever order they are listed.
    ordered = [
        dataclasses.replace(one, tokens=dataclasses.replace(one.tokens, eos=tuple(sorted(one.tokens.eos))))
        for one in (config, again)
    ]
    lost = [name for name in differences(*ordered) if name != "family"]
    if lost:
        value = operator.attrgetter(lost[0])(config)
        raise InputError(
            f"a GGUF file of {metadata['general.architecture']} cannot express {lost[0]}={value!r}: write a directory"
        )


def _write(path: Path, metadata: dict[str, Any], tensors: dict[str, StoredTensor], kind: str) -> None:
    import gguf

    stored_types = gguf.GGMLQuantizationType
    kinds = gguf.GGUFValueType
    scalars = {bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, str: kinds.STRING}
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    try:
        for key, value in metadata.items():
            if isinstance(value, list):
                of = kinds.STRING if isinstance(value[0], str) else kinds.INT32
                writer.add_key_value(key, value, kinds.ARRAY, of)
            elif key != "general.architecture":  # the writer has said it
                writer.add_key_value(key, value, scalars[type(value)])
        types_of = {}
        for name, tensor in tensors.items():
            exact = len(tensor.shape) == 1 or "ffn_gate_inp" in name
            of = stored_types.F32 if exact else stored_types[kind.upper()]
            types_of[name] = of if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[of][0] == 0 else stored_types.F16
            shape = gguf.quant_shape_to_byte_shape(tensor.shape, types_of[name])
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), types_of[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            with np.errstate(over="ignore"):
                found = gguf.quantize(np.ascontiguousarray(tensor.read()), types_of[name])
            if found.dtype == np.float16 and not np.isfinite(found).all():
                raise InputError(f"{name} holds values that float16 cannot: take bf16 or f32")
            writer.write_tensor_data(np.ascontiguousarray(found))
    finally:
        writer.close()
