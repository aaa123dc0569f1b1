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
from jaxrl_llm.models.families import FAMILIES, Fused, StoredTensor, Tensor, axis_sizes, layers_of, tensors_of
from jaxrl_llm.models.hf import EXPERT_COUNTS, differing_fields, read_config, write_config, write_scaling
from jaxrl_llm.models.weights import hf_shape, join_tensors, split_tensors, to_parts
from jaxrl_llm.system.paths import new_file

ARCHITECTURES = types.MappingProxyType({
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma2": "gemma2", "gemma3": "gemma3_text", "olmo2": "olmo2",
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe", "lfm2": "lfm2", "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text", "qwen3next": "qwen3_next", "glm4moe": "glm4_moe", "deepseek2": "deepseek_v3",
})  # fmt: skip
"""general.architecture -> model_type. Mistral's files carry "llama", and so do Mixtral's, with a number of experts;
GLM-4.7-Flash's carry "deepseek2".
"""
WRITTEN_AS = types.MappingProxyType({"mistral": "llama", "mixtral": "llama", "glm4_moe_lite": "deepseek2"})
"""Families without an architecture of their own."""

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
    "nextn_predict_layers": "num_nextn_predict_layers", "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
})  # fmt: skip
"""Metadata key after the architecture's prefix -> attribute of config.json."""
_GROUPED = {
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group", "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
    "leading_dense_block_count": "first_k_dense_replace",
}  # fmt: skip
_LATENT = {
    "attention.kv_lora_rank": "kv_lora_rank", "attention.q_lora_rank": "q_lora_rank",
    "attention.value_length_mla": "v_head_dim", "rope.dimension_count": "qk_rope_head_dim",
}  # fmt: skip
OWN_ATTRIBUTES = types.MappingProxyType({
    "lfm2": {"attention.layer_norm_rms_epsilon": "norm_eps", "shortconv.l_cache": "conv_L_cache"},
    "glm4moe": _GROUPED, "deepseek2": _GROUPED | _LATENT,
})  # fmt: skip
"""The same of one architecture."""

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
    "ffn_gate_inp_shexp.weight": "blocks.experts.shared_gate", "exp_probs_b.bias": "blocks.experts.choice_bias",
    "attn_q_a.weight": "blocks.attn.q_latent", "attn_q_a_norm.weight": "blocks.attn.q_latent_norm",
    "attn_kv_a_norm.weight": "blocks.attn.latent_norm",
    "attn_k_b.weight": "blocks.attn.k_up", "attn_v_b.weight": "blocks.attn.v_up",
    "attn_gate.weight": "blocks.delta.z", "ssm_beta.weight": "blocks.delta.b", "ssm_alpha.weight": "blocks.delta.a",
    "ssm_a": "blocks.delta.decay_log", "ssm_dt.bias": "blocks.delta.decay_bias",
    "ssm_norm.weight": "blocks.delta.norm", "ssm_out.weight": "blocks.delta.o",
    "shortconv.conv.weight": "blocks.conv.x_conv", "shortconv.out_proj.weight": "blocks.conv.o",
})  # fmt: skip
"""Tensor name after ``blk.N.`` -> our path; a shared expert's matrices are those of an MLP with ``SHARED_SUFFIX``."""
SHARED_SUFFIX = "_shexp"
FUSED_NAMES = types.MappingProxyType({
    "attn_q.weight": "self_attn.q_proj.weight", "attn_kv_a_mqa.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight", "ssm_ba.weight": "linear_attn.in_proj_ba.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight", "shortconv.in_proj.weight": "conv.in_proj.weight",
})  # fmt: skip
"""Tensor name after ``blk.N.`` -> the end of Hugging Face's, of tensors that hold several of ours."""
_TWO_NORMS = {"model.layers.{}.post_attention_layernorm.weight": "post_attention_norm.weight"}
OWN_NAMES = types.MappingProxyType({
    "lfm2": {"model.embedding_norm.weight": "token_embd_norm.weight"},
    "deepseek2": {"model.layers.{}.self_attn.q_b_proj.weight": "attn_q_b.weight"},
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next", "glm4moe"), _TWO_NORMS),
})  # fmt: skip
"""Architecture -> Hugging Face's names of tensors that it names otherwise than ``PATHS``."""
EXACT = ("ffn_gate_inp", "ssm_conv1d", "shortconv.conv")
"""Parts of the names of matrices that are stored in float32 always."""

EMBEDDING, LLAMA3_ROPE = "token_embd.weight", "rope_freqs.weight"
SIGMOID = 2
"""llama.cpp's number of the function by which experts are chosen."""
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
    """Read (config.json's attributes, float32 tensors under Hugging Face's names, those of ``split_tensors`` where it
    fuses several, tokenizer or None) from a GGUF file. InputError where the file is incomplete, or its architecture,
    quantisation or tokenizer is unknown.
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
        stored = _hf_tensors(reader.tensors, attributes)
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
    family = FAMILIES["mixtral" if is_mixtral else ARCHITECTURES[architecture]]
    attributes: dict[str, Any] = {"model_type": family.model_type, "torch_dtype": "float32"}
    attributes["architectures"] = [family.architecture]

    def field(key: str) -> Any:
        return lookup(f"{architecture}.{key}")

    names = ATTRIBUTES | OWN_ATTRIBUTES.get(architecture, {})
    attributes |= {name: x for key, name in names.items() if (x := field(key)) is not None}
    if "norm_topk_prob" in family.defaults:  # which some of llama.cpp's architectures imply
        attributes.setdefault("norm_topk_prob", family.model_type in ("qwen3_moe", "qwen3_next"))
    _add_own_attributes(attributes, field, shapes)
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


def _add_own_attributes(attributes: dict[str, Any], field: Callable[[str], Any], shapes: Mapping[str, Any]) -> None:
    """Add the attributes that newer architectures express in several keys, in lists, or by their tensors."""
    family = FAMILIES[attributes["model_type"]]
    if more := attributes.get("num_nextn_predict_layers"):
        attributes["num_hidden_layers"] -= more
    recurrent = field("attention.recurrent_layers")
    if family.model_type == "lfm2":
        heads = attributes["num_key_value_heads"]
        recurrent = [count == 0 for count in heads]
        attributes |= {"num_key_value_heads": max(heads), "block_auto_adjust_ff_dim": False}
    if recurrent:
        kinds = [family.recurrent[1] if state else "full_attention" for state in recurrent]
        attributes["layer_types"] = kinds[: attributes["num_hidden_layers"]]
    if "linear_value_head_dim" in family.defaults:
        attributes["linear_value_head_dim"] = field("ssm.inner_size") // attributes["linear_num_value_heads"]
    if "partial_rotary_factor" in family.defaults:
        attributes["partial_rotary_factor"] = field("rope.dimension_count") / attributes["head_dim"]
    if "scoring_func" in family.required and field("expert_gating_func") not in (None, SIGMOID):
        raise InputError("the file's experts are chosen by a softmax; load the model from a Hugging Face directory")
    if "use_qk_norm" in family.defaults:
        attributes["use_qk_norm"] = "blk.0.attn_q_norm.weight" in shapes
        attributes["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if "kv_lora_rank" in family.defaults:
        attributes["qk_nope_head_dim"] = field("attention.key_length_mla") - attributes["qk_rope_head_dim"]
        attributes |= {"num_key_value_heads": attributes["num_attention_heads"], "head_dim": None}
        attributes.setdefault("q_lora_rank", None)


def _own_fields(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that ``_add_own_attributes`` reads, and those that llama.cpp needs besides."""
    fields: dict[str, Any] = {}
    attention, recurrent = config.attention, config.recurrent
    if recurrent is not None and recurrent.kind == "conv":
        fields["attention.head_count_kv"] = [0 if state else attention.kv_heads for state in recurrent.layers]
    elif recurrent is not None:
        fields["attention.recurrent_layers"] = [*recurrent.layers]
        fields["ssm.inner_size"] = recurrent.value_heads * recurrent.value_dim
        # Pairs that turn by each of a picture's coordinates; in texts all of them are equal.
        thirds = [(attention.rope.dims // 2 + 2 - i) // 3 for i in range(3)]
        fields |= {} if config.family == "qwen3_next" else {"rope.dimension_sections": [*thirds, 0]}
    if config.experts is not None and config.experts.sigmoid:
        fields |= {"expert_gating_func": SIGMOID, "leading_dense_block_count": config.experts.dense_layers}
    if (latent := attention.latent) is not None:
        fields |= {"attention.head_count_kv": 1, "attention.key_length": latent.rank + latent.rotary_dim}
        fields |= {"attention.value_length": latent.rank, "attention.key_length_mla": attention.head_dim}
    return fields


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


def _hf_tensors(tensors: Sequence[Any], attributes: dict[str, Any]) -> dict[str, StoredTensor]:
    config = read_config(attributes)
    names, fused = _file_names(config)
    end = config.layers + attributes.get("num_nextn_predict_layers", 0)
    stored = {}
    for tensor in tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor.name)
        layer, name = (int(match[1]), match[2]) if match else (0, tensor.name)
        if tensor.name == LLAMA3_ROPE or config.layers <= layer < end:  # layers that predict several tokens
            continue
        if name not in names:
            raise InputError(f"the tensor {tensor.name} is unknown to {config.family}; "
                             "load the model from a Hugging Face directory")  # fmt: skip
        shape = tuple(int(size) for size in reversed(tensor.shape))
        stored[names[name].name.format(layer, "{}")] = StoredTensor(shape, functools.partial(_read_tensor, tensor))
    stored = split_tensors(config, stored, fused)
    for tensor, name in _in_layers(config):
        if name not in stored:
            continue
        plain = stored.pop(name)
        _, undo, shapes = storage_changes(config, tensor)
        if "{}" not in name:
            part = functools.partial(_read_changed, plain, undo, bool(shapes))
            stored[name] = StoredTensor(shapes[0] if shapes else plain.shape, part)
            continue
        for expert in range(plain.shape[0]):
            stored[name.format(expert)] = StoredTensor(
                plain.shape[1:],
                lambda place, plain=plain, expert=expert: plain.part((slice(expert, expert + 1), *place))[0],
            )
    return stored


def _read_changed(stored: StoredTensor, undo: Change, whole: bool, place: tuple[slice, ...]) -> np.ndarray:
    return undo(stored.read())[place] if whole else undo(stored.part(place))


def _file_names(config: ModelConfig) -> tuple[dict[str, Tensor | Fused], list[Fused]]:
    """Return what each of a file's tensors holds, by its name without ``blk.N.``, and those that hold several."""
    architecture = _architecture(config)
    names = {path: name for name, path in PATHS.items()}
    found: dict[str, tuple[str, Tensor | Fused]] = {}
    for tensor in tensors_of(config):
        name = names.get(tensor.path.replace("blocks.shared.", "blocks.mlp."), "")
        name = OWN_NAMES.get(architecture, {}).get(tensor.name, name)
        name = name.replace(".weight", f"{SHARED_SUFFIX}.weight") if "S" in tensor.axes else name
        found[tensor.name] = (name, tensor)
    kinds = []
    for name, end in FUSED_NAMES.items():
        fused = next(x for family in FAMILIES.values() for x in family.fused if x.name.endswith(end))
        if found.keys() >= {*fused.parts} and (name != "ssm_ba.weight" or architecture == "qwen3next"):
            found = {key: x for key, x in found.items() if key not in fused.parts} | {fused.name: (name, fused)}
            kinds.append(fused)
    return dict(found.values()), kinds


def _architecture(config: ModelConfig) -> str:
    """Return the name of the model's architecture in files; InputError where it has none."""
    architectures = {model_type: architecture for architecture, model_type in ARCHITECTURES.items()} | WRITTEN_AS
    require(
        config.family in architectures, f"the family {config.family} has no known name in GGUF files: write a directory"
    )
    return architectures[config.family]


def _in_layers(config: ModelConfig) -> list[tuple[Tensor, str]]:
    """Return each tensor and its name in each layer that has it, in which ``{}`` stands for the expert."""
    return [
        (tensor, tensor.name.format(layer, "{}"))
        for tensor in tensors_of(config)
        for layer in (layers_of(tensor, config) if tensor.layered else (0,))
    ]


def _read_tensor(tensor: Any, place: tuple[slice, ...]) -> np.ndarray:
    import gguf

    try:
        *rows, columns = place
        block, size = gguf.GGML_QUANT_SIZES[tensor.tensor_type] if tensor.data.dtype == np.uint8 else (1, 1)
        first = columns.start // block
        stored = tensor.data[(*rows, slice(first * size, -(-columns.stop // block) * size))]
        values = gguf.dequantize(stored, tensor.tensor_type).astype(np.float32, copy=False)
        return values[..., columns.start - first * block : columns.stop - first * block]
    except NotImplementedError:
        raise InputError(f"{tensor.name} is quantised as {tensor.tensor_type.name}, which cannot be read; "
                         "take a file quantised otherwise, or a Hugging Face directory") from None  # fmt: skip


def storage_changes(config: ModelConfig, tensor: Tensor) -> tuple[Change, Change, Sequence[tuple[int, ...]]]:
    """Return llama.cpp's change of a parameter before storage, and its inverse for whole heads or a part of a norm; if
    it is for nothing but the whole parameter, also the shapes of that and of what is stored. It pairs rows of a llama's
    queries and keys for interleaved rotary, adds 1 to norms stored as their difference from 1, stores a decay in place
    of its logarithm, gives heads of the second factors of latent attention an axis, turned for keys, and orders heads
    of Qwen3.5's values by their place in a group.
    """

    def swapped(rows: np.ndarray, first: int, second: int) -> np.ndarray:
        return rows.reshape(-1, first, second, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)

    sizes, path, words = axis_sizes(config), tensor.path, tensor.hf_axes.split()
    half = config.attention.head_dim // 2
    if _architecture(config) == "llama" and path in ("blocks.attn.q", "blocks.attn.k"):
        return lambda rows: swapped(rows, 2, half), lambda rows: swapped(rows, half, 2), ()
    if config.norm.plus_one and "norm" in path and path != "blocks.delta.norm":
        return lambda weight: weight + np.float32(1.0), lambda weight: weight - np.float32(1.0), ()
    plain = hf_shape(tensor, sizes)
    if path in ("blocks.attn.k_up", "blocks.attn.v_up"):
        heads = (sizes["N"], plain[0] // sizes["N"], plain[1])
        if path == "blocks.attn.v_up":
            return lambda x: x.reshape(heads), lambda x: x.reshape(plain), (plain, heads)
        turned = (heads[0], heads[2], heads[1])
        return lambda x: x.reshape(heads).swapaxes(1, 2), lambda x: x.swapaxes(1, 2).reshape(plain), (plain, turned)
    if not path.startswith(("blocks.delta.", "blocks.conv.")):
        return lambda array: array, lambda array: array, ()
    stored = tuple(size for size, word in zip(plain, words, strict=True) if word != "1")
    at = next((axis for axis, word in enumerate(words) if word[0] == "M"), 0)
    grouped = words[at][0] == "M" and config.family != "qwen3_next"
    groups = (sizes["P"], sizes["M"] // sizes["P"]) if grouped else (1, 1)
    decays = path == "blocks.delta.decay_log"

    def ordered(array: np.ndarray, first: int, second: int) -> np.ndarray:
        return array.reshape(*plain[:at], first, second, -1, *plain[at + 1 :]).swapaxes(at, at + 1)

    return (
        lambda x: ordered(-np.exp(x) if decays else x, *groups).reshape(stored),
        lambda x: ordered(np.log(-x) if decays else x, *groups[::-1]).reshape(plain),
        (plain, stored),
    )


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
        begin=bool(lookup("tokenizer.ggml.add_bos_token", pre in ("llama-bpe", "lfm2"))),
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
    tensors = _gguf_tensors(config, to_parts(config, to_parameters(model)))
    _check_round_trip(config, metadata, tensors)
    metadata["general.file_type"] = int(gguf.LlamaFileType[FILE_TYPES[kind]])
    metadata["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    with new_file(Path(path)) as part:
        _write_file(part, metadata, tensors, kind)


def _metadata(config: ModelConfig, tokenizer: Any | None, name: str) -> dict[str, Any]:
    """Return the file's metadata by key; floats are rounded to float32."""
    prefix = _architecture(config)
    attributes = write_config(config, "float32")
    # Under the name that the table has.
    attributes["num_local_experts"] = next((attributes[name] for name in EXPERT_COUNTS if name in attributes), None)
    keys = ATTRIBUTES | OWN_ATTRIBUTES.get(prefix, {})
    fields = {key: attributes[attribute] for key, attribute in keys.items() if attributes.get(attribute)}
    scaling = config.attention.rope.scaling
    if isinstance(scaling, float):
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": scaling}
    fields |= {"vocab_size": config.vocab_size, "attention.value_length": config.attention.head_dim}
    fields["rope.dimension_count"] = config.attention.rope.dims or config.attention.head_dim
    fields |= _own_fields(config)
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


def _gguf_tensors(config: ModelConfig, parts: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the file's tensors by name, float32 when read."""
    names, fused = _file_names(config)
    stored = {}
    for tensor, name in _in_layers(config):
        plain = _stacked(name, config, parts)
        change, _, shapes = storage_changes(config, tensor)
        stored[name] = StoredTensor(
            shapes[1] if shapes else plain.shape,
            lambda place, plain=plain, change=change: change(plain.read().astype(np.float32))[place],
        )
    stored = join_tensors(config, stored, fused)
    by_name = {}
    for name, held in names.items():
        for layer in range(config.layers):
            if (key := held.name.format(layer, "{}")) in stored:
                by_name[f"blk.{layer}.{name}" if "{}" in held.name else name] = stored[key]
    rope = config.attention.rope
    if isinstance(rope.scaling, Llama3Rope):
        table = llama3_table(rope.scaling, rope.theta, config.attention.head_dim // 2).astype(np.float32)
        by_name[LLAMA3_ROPE] = StoredTensor(table.shape, lambda place: table[place])
    return by_name


def _stacked(name: str, config: ModelConfig, parts: Mapping[str, StoredTensor]) -> StoredTensor:
    """Return a layer's tensor, of all experts together where each has one."""
    if "{}" not in name or config.experts is None:
        return parts[name]
    each = [parts[name.format(expert)] for expert in range(config.experts.count)]

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
                of = {str: kinds.STRING, bool: kinds.BOOL, int: kinds.INT32}[type(value[0])]
                writer.add_key_value(key, value, kinds.ARRAY, of)
            elif key != "general.architecture":  # the writer has said it
                writer.add_key_value(key, value, scalars[type(value)])
        types_of = {}
        for name, tensor in tensors.items():
            exact = len(tensor.shape) == 1 or any(part in name for part in EXACT)
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
