"""Read a GGUF file as if it were a Hugging Face directory: attributes, tensors under their names, tokenizer. The
``gguf`` package reads and dequantises; names, keys and the changes undone here are those of llama.cpp's converter.
"""

import contextlib
import dataclasses
import functools
import math
import operator
import os
import re
import types
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.config import Llama3Rope, ModelConfig
from jaxrl_llm.models.families import Family, StoredTensor, Tensor, family_of, tensors_of
from jaxrl_llm.models.hf import differing_fields, read_config, write_config, write_scaling
from jaxrl_llm.models.weights import to_stored
from jaxrl_llm.system.paths import new_file

ARCHITECTURES = types.MappingProxyType({
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text", "olmo2": "olmo2",
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe",
})  # fmt: skip
"""general.architecture -> model_type. Mistral's files carry "llama", and so do Mixtral's, with a number of experts."""

ATTRIBUTES = types.MappingProxyType({
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base": "rope_theta", "rope.freq_base_swa": "rope_local_base_freq",
    "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
})  # fmt: skip
"""Metadata key after the architecture's prefix -> attribute of config.json."""

PATHS = types.MappingProxyType({
    "token_embd.weight": "embed", "output_norm.weight": "final_norm", "output.weight": "head",
    "attn_q.weight": "blocks.attn.q", "attn_k.weight": "blocks.attn.k", "attn_v.weight": "blocks.attn.v",
    "attn_output.weight": "blocks.attn.o",
    "attn_q.bias": "blocks.attn.q_bias", "attn_k.bias": "blocks.attn.k_bias", "attn_v.bias": "blocks.attn.v_bias",
    "attn_q_norm.weight": "blocks.attn.q_norm", "attn_k_norm.weight": "blocks.attn.k_norm",
    "ffn_gate.weight": "blocks.mlp.gate", "ffn_up.weight": "blocks.mlp.up", "ffn_down.weight": "blocks.mlp.down",
    "attn_norm.weight": "blocks.norms.attn", "ffn_norm.weight": "blocks.norms.mlp",
    "post_attention_norm.weight": "blocks.norms.attn_post", "post_ffw_norm.weight": "blocks.norms.mlp_post",
    "ffn_gate_inp.weight": "blocks.experts.router", "ffn_gate_exps.weight": "blocks.experts.gate",
    "ffn_up_exps.weight": "blocks.experts.up", "ffn_down_exps.weight": "blocks.experts.down",
    "ffn_gate_inp_shexp.weight": "blocks.experts.shared_gate",
})  # fmt: skip
"""Tensor name after ``blk.N.`` -> our path; a shared expert's matrices are those of an MLP with ``SHARED_SUFFIX``."""
SHARED_SUFFIX = "_shexp"

EMBEDDING, LLAMA3_ROPE = "token_embd.weight", "rope_freqs.weight"
CONTROL, USER_DEFINED = 3, 4
"""Token types of llama.cpp that are cut out of the text whole."""
END_KEYS = ("eos", "eot", "eom")
"""Metadata keys, between ``tokenizer.ggml.`` and ``_token_id``, of tokens that end a completion."""
SPECIAL_KEYS = types.MappingProxyType({"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"})
"""transformers' names of special tokens -> the same keys."""


Change = Callable[[np.ndarray], np.ndarray]


def load_gguf(
    path: str | os.PathLike, dtype: str = "float32", mesh: Any = None, pack: Any = None
) -> tuple[Any, Any | None]:
    """Return (model, tokenizer or None) of a GGUF file, dequantised to ``dtype`` and laid out on the mesh. ``pack``:
    see ``weights.read_parameters``.
    """
    from jaxrl_llm.models.decoder import Decoder
    from jaxrl_llm.models.hf import with_special_ids
    from jaxrl_llm.models.weights import read_parameters

    attributes, stored, tokenizer = read_gguf(path)
    with _as_input_error(Path(path)):
        config = with_special_ids(read_config(attributes), {}, tokenizer)
        return Decoder(config, read_parameters(config, stored, dtype, mesh, pack=pack)), tokenizer


def read_gguf(path: str | os.PathLike) -> tuple[dict[str, Any], dict[str, StoredTensor], Any | None]:
    """Read (config.json's attributes, float32 tensors under Hugging Face's names, tokenizer or None) from a GGUF file.
    InputError where the file is incomplete, or its architecture, quantisation or tokenizer is unknown.
    """
    import gguf

    path = Path(path)
    if not path.is_file():
        raise InputError(f"no such GGUF file: {path}")
    with _as_input_error(path):
        reader = gguf.GGUFReader(path)

        def value(key: str, default: Any = None) -> Any:
            field = reader.get_field(key)
            return shortest_decimal(default if field is None else field.contents())

        shapes = {tensor.name: tuple(int(size) for size in reversed(tensor.shape)) for tensor in reader.tensors}
        tables = [np.asarray(tensor.data).ravel() for tensor in reader.tensors if tensor.name == LLAMA3_ROPE]
        attributes = config_attributes(value, shapes, tables[0] if tables else None)
        stored = _hf_tensors(reader.tensors, shapes, attributes)
        return attributes, stored, _tokenizer(value, attributes.get("max_position_embeddings", 2048))


@contextlib.contextmanager
def _as_input_error(path: Path) -> Generator[None]:
    """Turn any exception of the reader, which can be of any type for a broken file, into an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:  # noqa: BLE001  gguf's reader fails in ways of its own
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"{path} is not a whole GGUF file ({reason}); fetch it again") from None


def config_attributes(
    lookup: Callable[..., Any], shapes: Mapping[str, tuple[int, ...]], table: np.ndarray | None
) -> dict[str, Any]:
    """Return the attributes of config.json that a GGUF file's metadata and tensors describe. ``lookup`` returns None,
    or its second argument, where a key is missing; ``table`` divides the rotary frequencies.
    """
    architecture = lookup("general.architecture")
    if architecture not in ARCHITECTURES:
        raise InputError(f"the GGUF architecture {architecture!r} is not supported; supported are "
                         f"{', '.join(ARCHITECTURES)}")  # fmt: skip
    is_mixtral = architecture == "llama" and lookup("llama.expert_count")
    family = family_of("mixtral" if is_mixtral else ARCHITECTURES[architecture])
    attributes = {"model_type": family.model_type, "architectures": [family.architecture], "torch_dtype": "float32"}
    for key, name in ATTRIBUTES.items():
        field = lookup(f"{architecture}.{key}")
        if field is not None:
            attributes[name] = field
    if "norm_topk_prob" in family.defaults:
        attributes["norm_topk_prob"] = family.model_type == "qwen3_moe"  # which llama.cpp's architectures imply
    if EMBEDDING not in shapes:
        raise InputError(f"the file holds no {EMBEDDING}; take the file of a whole model")
    attributes |= {"vocab_size": shapes[EMBEDDING][0], "tie_word_embeddings": "output.weight" not in shapes}
    attributes |= _rope_scaling(lookup, architecture, table)
    ids = {name: lookup(f"tokenizer.ggml.{name}_token_id") for name in ("bos", *END_KEYS, "padding")}
    ends = list(dict.fromkeys(ids[name] for name in END_KEYS if ids[name] is not None))
    attributes |= {"bos_token_id": ids["bos"], "eos_token_id": ends, "pad_token_id": ids["padding"]}
    if "query_pre_attn_scalar" in family.defaults:
        width = attributes["hidden_size"]
        heads = attributes["num_attention_heads"]
        # Layers of each family's 27B model, which scales its attention scores by D / N rather than by H.
        largest = attributes["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[family.model_type]
        attributes["query_pre_attn_scalar"] = width // heads if largest else attributes.get("head_dim", width // heads)
    return attributes


def shortest_decimal(value: Any) -> Any:
    """Return the shortest decimal of a float stored as float32 (1e-05, not 9.99999974e-06); other values unchanged."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope_scaling(lookup: Callable[..., Any], architecture: str, table: np.ndarray | None) -> dict[str, Any]:
    """Return the file's named rescaling, or the published one of Llama 3 (factor 8 or 32) that matches the table."""
    if table is None:
        kind = lookup(f"{architecture}.rope.scaling.type", "none")
        factor = lookup(f"{architecture}.rope.scaling.factor")
        if kind == "yarn":  # of which the format leaves out what was trained with
            raise InputError("the file scales rotary positions by yarn; load the model from a Hugging Face directory")
        return {} if kind == "none" else {"rope_scaling": {"rope_type": kind, "factor": factor}}
    base = lookup(f"{architecture}.rope.freq_base", 10000.0)
    for factor in (8.0, 32.0):
        published = Llama3Rope(factor, 1.0, 4.0, 8192)
        if np.allclose(llama3_table(published, base, len(table)), table.astype(np.float64), rtol=1e-4):
            return {"rope_scaling": write_scaling(published)}
    raise InputError(
        f"{LLAMA3_ROPE} is not a published Llama 3 rescaling; load the model from a Hugging Face directory"
    )


def llama3_table(rope: Llama3Rope, base: float, count: int) -> np.ndarray:
    """Return Llama 3's divisors of the rotary frequencies: float64[count], from 1 (fast ones) to the factor."""
    turns = rope.original_positions * base ** -(np.arange(count) / count) / (2 * np.pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / rope.factor + smooth)


def _hf_tensors(
    tensors: Sequence[Any], shapes: Mapping[str, tuple[int, ...]], attributes: dict[str, Any]
) -> dict[str, StoredTensor]:
    family = family_of(attributes["model_type"])
    names = {tensor.path: tensor.name for tensor in family.tensors}
    head_dim = attributes.get("head_dim", attributes["hidden_size"] // attributes["num_attention_heads"])
    stored = {}
    for tensor in tensors:
        if tensor.name == LLAMA3_ROPE:
            continue
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
        name = match[2] if match else tensor.name
        path = PATHS.get(name, PATHS.get(name.replace(SHARED_SUFFIX, "")))
        if path not in names:
            raise InputError(f"the tensor {tensor.name} is unknown to {family.model_type}; "
                             "load the model from a Hugging Face directory")  # fmt: skip
        _, undo = storage_changes(family, path, head_dim)
        shape = shapes[tensor.name]
        read = functools.partial(_read_tensor, tensor, undo)
        if names[path].count("{}") == 2:
            for expert in range(shape[0]):
                name = names[path].format(match[1] if match else 0, expert)
                stored[name] = StoredTensor(
                    shape[1:], lambda place, read=read, expert=expert: read((slice(expert, expert + 1), *place))[0]
                )
        else:
            stored[names[path].format(match[1]) if match else names[path]] = StoredTensor(shape, read)
    return stored


def _read_tensor(tensor: Any, undo: Change, place: tuple[slice, ...]) -> np.ndarray:
    import gguf

    try:
        *rows, columns = place
        block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type] if tensor.data.dtype == np.uint8 else (1, 1)
        first = columns.start // block
        stored = tensor.data[(*rows, slice(first * size, -(-columns.stop // block) * size))]
        values = gguf.dequantize(stored, tensor.tensor_type).astype(np.float32, copy=False)
        return undo(values[..., columns.start - first * block : columns.stop - first * block])
    except NotImplementedError:
        raise InputError(f"{tensor.name} is quantised as {tensor.tensor_type.name}, which cannot be read; "
                         "take a file quantised otherwise, or a Hugging Face directory") from None  # fmt: skip


def storage_changes(family: Family, path: str, head_dim: int) -> tuple[Change, Change]:
    """Return llama.cpp's change of a parameter before storage, and its inverse for whole heads or a part of a norm. It
    pairs rows of a llama's queries and keys for interleaved rotary, and adds 1 to norms stored as their difference from
    1.
    """

    def swapped(rows: np.ndarray, first: int, second: int) -> np.ndarray:
        return rows.reshape(-1, first, second, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)

    half = head_dim // 2
    if family.model_type in ("llama", "mixtral") and path in ("blocks.attn.q", "blocks.attn.k"):
        return lambda rows: swapped(rows, 2, half), lambda rows: swapped(rows, half, 2)
    if family.constants.get("norm.plus_one") and "norm" in path:
        return lambda weight: weight + np.float32(1.0), lambda weight: weight - np.float32(1.0)
    return lambda array: array, lambda array: array


def _tokenizer(lookup: Callable[..., Any], max_length: int) -> Any | None:
    from jaxrl_llm.models.tokenizer import BytePairs, build_tokenizer

    kind = lookup("tokenizer.ggml.model")
    if kind is None:
        return None
    if kind != "gpt2":
        raise InputError(
            f"the tokenizer model {kind!r} cannot be rebuilt; load the model from a Hugging Face directory"
        )
    tokens = lookup("tokenizer.ggml.tokens")
    kinds = lookup("tokenizer.ggml.token_type")
    pre = lookup("tokenizer.ggml.pre", "gpt-2")
    ids = {name: lookup(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL_KEYS.items()}
    return build_tokenizer(BytePairs(
        tokens=tuple(tokens),
        merges=tuple(tuple(merge.split(" ", 1)) for merge in lookup("tokenizer.ggml.merges", [])),
        special=tuple(token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL),
        added=tuple(token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED),
        pre=pre,
        begin=bool(lookup("tokenizer.ggml.add_bos_token", pre == "llama-bpe")),
        chat_template=lookup("tokenizer.chat_template"),
        names=tuple((f"{name}_token", tokens[i]) for name, i in ids.items() if i is not None),
        max_length=max_length,
    ))  # fmt: skip


FILE_TYPES = types.MappingProxyType(
    {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
)
"""Storage types of matrices -> llama.cpp's name of such a file."""


def save_gguf(model: Any, tokenizer: Any | None, path: str | os.PathLike, kind: str = "f32") -> None:
    """Write a decoder, its arrays addressable by this process, and its byte-level BPE tokenizer, or None, as a GGUF
    file; it replaces any at ``path``, and appears whole or not at all. Matrices are stored as ``kind``, a key of
    ``FILE_TYPES``; norms, biases and routers always in float32, and a matrix with rows that Q8_0's blocks of 32 do not
    divide in float16. InputError: the model is a reward model, or has something that the format cannot express.
    """
    import gguf

    from jaxrl_llm.models.decoder import to_parameters
    from jaxrl_llm.models.heads import ScalarModel

    require(kind in FILE_TYPES, f"{kind!r} is not a GGUF type that can be written: use one of {', '.join(FILE_TYPES)}")
    require(not isinstance(model, ScalarModel), "a GGUF file cannot hold a reward model: write a directory")
    config = model.config
    metadata = _metadata(config, tokenizer, Path(path).stem)
    tensors = _gguf_tensors(config, metadata["general.architecture"], to_stored(config, to_parameters(model)))
    _check_round_trip(config, metadata, tensors)
    metadata["general.file_type"] = int(gguf.LlamaFileType[FILE_TYPES[kind]])
    metadata["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    with new_file(Path(path)) as part:
        _write_file(part, metadata, tensors, kind)


def _metadata(config: ModelConfig, tokenizer: Any | None, name: str) -> dict[str, Any]:
    """Return the file's metadata by key; floats are rounded to float32."""
    architectures = {model_type: architecture for architecture, model_type in ARCHITECTURES.items()}
    architectures |= {"mistral": "llama", "mixtral": "llama"}  # families without an architecture of their own
    require(
        config.family in architectures, f"the family {config.family} has no known name in GGUF files: write a directory"
    )
    prefix = architectures[config.family]
    attributes = write_config(config, "float32")
    if "num_experts" in attributes:  # under the name that the table has
        attributes["num_local_experts"] = attributes["num_experts"]
    fields = {key: attributes[attribute] for key, attribute in ATTRIBUTES.items() if attributes.get(attribute)}
    scaling = config.attention.rope.scaling
    if isinstance(scaling, float):
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling}
    fields |= {"vocab_size": config.vocab_size, "attention.value_length": config.attention.head_dim}
    fields["rope.dimension_count"] = config.attention.head_dim
    metadata = {"general.architecture": prefix, "general.name": name}
    metadata |= {f"{prefix}.{key}": shortest_decimal(value) for key, value in fields.items()}
    tokenizer_end = None if tokenizer is None else tokenizer.eos_token_id
    ends = sorted(config.tokens.eos, key=lambda index: index != tokenizer_end)  # the tokenizer's own is the first
    ids = dict(zip(END_KEYS, ends, strict=False))
    ids |= {SPECIAL_KEYS["bos"]: config.tokens.bos, SPECIAL_KEYS["pad"]: config.tokens.pad}
    metadata |= {f"tokenizer.ggml.{name}_token_id": index for name, index in ids.items() if index is not None}
    return metadata | _vocabulary_fields(tokenizer, config.vocab_size)


def _vocabulary_fields(tokenizer: Any | None, size: int) -> dict[str, Any]:
    """Return tokens, merges and template; the model's ids beyond the tokenizer's tokens are marked unused."""
    from jaxrl_llm.models.tokenizer import byte_pairs_of

    if tokenizer is None:
        return {}
    pairs = byte_pairs_of(tokenizer)
    require(
        len(pairs.tokens) <= size,
        f"the tokenizer has {len(pairs.tokens)} tokens and the model {size}: write a directory",
    )
    normal, without_meaning = 1, 5  # further token types of llama.cpp
    kinds = dict.fromkeys(pairs.tokens, normal) | dict.fromkeys(pairs.special, CONTROL)
    kinds |= dict.fromkeys(pairs.added, USER_DEFINED)
    unused = [f"[PAD{index}]" for index in range(len(pairs.tokens), size)]
    fields = {
        "model": "gpt2",
        "pre": pairs.pre,
        "tokens": [*pairs.tokens, *unused],
        "token_type": [*(kinds[token] for token in pairs.tokens), *(without_meaning for _ in unused)],
        "merges": [" ".join(merge) for merge in pairs.merges],
        "add_bos_token": pairs.begin,
    }
    if tokenizer.unk_token_id is not None:
        fields[f"{SPECIAL_KEYS['unk']}_token_id"] = tokenizer.unk_token_id
    # The format has no empty arrays; a tokenizer of single bytes has no merges.
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value != []}
    return metadata | ({} if pairs.chat_template is None else {"tokenizer.chat_template": pairs.chat_template})


def _gguf_tensors(config: ModelConfig, architecture: str, stored: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the file's tensors by name, float32 when read."""
    family = family_of(ARCHITECTURES[architecture])
    names = {path: name for name, path in PATHS.items()}
    if config.experts is not None:
        matrices = {path: name for path, name in names.items() if path.startswith("blocks.mlp.")}
        names |= {path: name.replace(".weight", f"{SHARED_SUFFIX}.weight") for path, name in matrices.items()}
    by_name = {}
    for tensor in tensors_of(config):
        change, _ = storage_changes(family, tensor.path, config.attention.head_dim)
        for layer in range(config.layers) if tensor.layered else (0,):
            prefix = f"blk.{layer}." if tensor.layered else ""
            plain = _stacked(tensor, layer, config, stored)
            by_name[prefix + names[tensor.path]] = StoredTensor(
                plain.shape, lambda place, plain=plain, change=change: change(plain.part(place).astype(np.float32))
            )
    rope = config.attention.rope
    if isinstance(rope.scaling, Llama3Rope):
        table = llama3_table(rope.scaling, rope.theta, config.attention.head_dim // 2).astype(np.float32)
        by_name[LLAMA3_ROPE] = StoredTensor(table.shape, lambda place: table[place])
    return by_name


def _stacked(tensor: Tensor, layer: int, config: ModelConfig, stored: dict[str, StoredTensor]) -> StoredTensor:
    """Return a layer's tensor, of all experts together where each has one."""
    if config.experts is None or tensor.name.count("{}") < 2:
        return stored[tensor.name.format(layer)]
    each = [stored[tensor.name.format(layer, expert)] for expert in range(config.experts.count)]

    def part(place: tuple[slice, ...]) -> np.ndarray:
        return np.stack([matrix.part(place[1:]) for matrix in each[place[0]]])

    return StoredTensor((len(each), *each[0].shape), part)


def _check_round_trip(config: ModelConfig, metadata: dict[str, Any], tensors: dict[str, StoredTensor]) -> None:
    """Refuse a model that the file would not reproduce when it is read again."""
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    table = tensors[LLAMA3_ROPE].read() if LLAMA3_ROPE in tensors else None
    try:
        reread = read_config(config_attributes(metadata.get, shapes, table))
    except InputError:
        raise InputError(
            f"a GGUF file of {metadata['general.architecture']} cannot express this model's attention (its windows, or "
            "a rescaling of rotary positions that was not published): write a directory"
        ) from None
    # Any of its ends ends an answer, in whatever order they are listed.
    ordered = [
        dataclasses.replace(form, tokens=dataclasses.replace(form.tokens, eos=tuple(sorted(form.tokens.eos))))
        for form in (config, reread)
    ]
    lost = [name for name in differing_fields(*ordered) if name != "family"]
    if lost:
        value = operator.attrgetter(lost[0])(config)
        raise InputError(
            f"a GGUF file of {metadata['general.architecture']} cannot express {lost[0]}={value!r}: write a directory"
        )


def _write_file(path: Path, metadata: dict[str, Any], tensors: dict[str, StoredTensor], kind: str) -> None:
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
                array = gguf.quantize(np.ascontiguousarray(tensor.read()), types_of[name])
            if array.dtype == np.float16 and not np.isfinite(array).all():
                raise InputError(f"{name} holds values that float16 cannot: take bf16 or f32")
            writer.write_tensor_data(np.ascontiguousarray(array))
    finally:
        writer.close()
