"""Load and save a model as a Hugging Face directory: config.json, safetensors, tokenizer."""

import collections
import contextlib
import dataclasses
import logging
import math
import operator
import os
import tempfile
from collections.abc import Generator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models import weights
from jaxrl_llm.models.config import (
    Attention,
    Embeddings,
    Experts,
    Latent,
    Llama3Rope,
    ModelConfig,
    Norm,
    Recurrent,
    Rope,
    TokenIds,
    Yarn,
)
from jaxrl_llm.models.families import ACTIVATIONS, ALIASES, FAMILIES, FIELDS, REQUIRED, Family, family_of
from jaxrl_llm.models.packed_files import METHODS
from jaxrl_llm.models.tokenizer import load_tokenizer, save_tokenizer, special_ids, with_pad_token
from jaxrl_llm.system.signals import on_exit

log = logging.getLogger(__name__)

OUR_ATTRIBUTE = "jaxrl_llm"
"""The config.json attribute that describes the training of a reward model written by this package."""
IGNORED = frozenset(
    """
    jaxrl_llm
    architectures model_type transformers_version torch_dtype dtype _name_or_path name_or_path auto_map use_cache
    initializer_range attention_dropout bos_token_id eos_token_id pad_token_id rope_theta rope_scaling rope_parameters
    pretraining_tp is_llama_config transformers.js_config cache_implementation hidden_act
    _attn_implementation _attn_implementation_autoset _sliding_window_pattern id2label label2id num_labels
    problem_type return_dict output_attentions output_hidden_states unsloth_fixed unsloth_version
    router_aux_loss_coef output_router_logits experts_per_token initial_context_length aux_loss_alpha seq_aux ep_size
    num_nextn_predict_layers num_mtp_layers qk_head_dim
    mtp_num_hidden_layers mtp_use_dedicated_embeddings mamba_ssm_dtype block_dim block_mlp_init_scale
    linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor
    block_out_init_scale block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init num_heads
    """.split()
)
"""Attributes that a family's table may omit: they are read elsewhere, or do not affect a forward pass."""

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")

_NEUTRAL = {"partial_rotary_factor": 1.0, "decoder_sparse_step": 1}

_LOCAL = "rope_local_base_freq"

ROPE_DEFAULTS = {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}
"""Attributes of some families that stand among the rotary parameters."""

_ROPE_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"),
}  # fmt: skip


def read_config(attributes: Mapping[str, Any]) -> ModelConfig:
    """Parse a config.json into a ModelConfig; InputError names the attribute that cannot be obeyed."""
    try:
        attributes = text_attributes(attributes)
        kind: Any = attributes.get("model_type")
        family = family_of(ALIASES.get(kind, kind))
        # Versions of transformers write two names for one attribute.
        spellings = {
            old: new for old in EXPERT_COUNTS for new in EXPERT_COUNTS if old != new and new in family.defaults
        }
        spellings |= {"_sliding_window_pattern": "sliding_window_pattern", **family.spellings}
        spellings = {
            old: new for old, new in spellings.items() if new in family.defaults and old not in family.defaults
        }
        renamed = [(spellings.get(name, name), value) for name, value in attributes.items()]
        attributes = _with_global_sizes(dict(renamed), family)
        for name, value in renamed:
            if name in family.spellings.values() and attributes[name] != value:
                raise InputError(
                    f"config.json has {name} under two names, {value!r} and {attributes[name]!r}; keep one"
                )
        neutral = _NEUTRAL | dict(family.required)
        for name, value in attributes.items():
            if name in IGNORED or name in family.defaults or value == neutral.get(name):
                continue
            if not value and name not in family.required:
                continue
            if name == "quantization_config" and isinstance(value, dict):
                method = value.get("quant_method")
                require(
                    method in METHODS,
                    f"config.json sets quantization_config of {method!r}, which is not read: take the model in 16 "
                    f"bits, or packed by {', '.join(METHODS)}",
                )
                eight = value.get("load_in_8bit") or value.get("weight_block_size", [128, 128]) != [128, 128]
                require(
                    not eight,
                    "config.json's quantization_config is of 8 bits of bitsandbytes, or of blocks other than "
                    "[128, 128], which are not read: take the model in 16 bits",
                )
                continue
            raise InputError(
                f"config.json sets {name}={value!r}, which {family.model_type} here does not know; remove it if it "
                "does not change the model, else use another model"
            )
        fields = _with_defaults(attributes, family)
        activation = fields.get("hidden_activation", fields.get("hidden_act"))
        other = attributes.get("hidden_act")
        if attributes.get("hidden_activation") is None and other not in (None, activation):
            raise InputError(f"config.json sets hidden_act={other!r}; {family.model_type} has {activation}: remove it")
        if activation not in ACTIVATIONS:
            raise InputError(f"config.json names the activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
        values = {path: fields[name] for name, path in FIELDS.items() if name in fields}
        two_sizes = "global_head_dim" in fields
        rope = (_read_two_ropes if two_sizes else _read_rope)(attributes, family, fields)
        values |= dict(family.constants) | rope | _read_layers(fields, family)
        values |= {
            "family": family.model_type,
            "activation": ACTIVATIONS[activation],
            "tokens": read_token_ids(attributes),
        }
        if family.scaled_embedding:
            values["embeddings.scale"] = float(fields["hidden_size"] ** 0.5)
        if "n_shared_experts" in fields:
            values["experts.shared_width"] = fields["n_shared_experts"] * fields["moe_intermediate_size"]
        if "kv_lora_rank" in fields:
            values["attention.rope.dims"] = fields["qk_rope_head_dim"]
            values["attention.latent.query_rank"] = fields["q_lora_rank"] or 0
        if "linear_allow_neg_eigval" in fields:
            values["recurrent.strength"] = 2.0 if fields["linear_allow_neg_eigval"] else 1.0
        if "query_pre_attn_scalar" in fields:
            values["attention.scale"] = float(fields["query_pre_attn_scalar"]) ** -0.5
        if two_sizes:
            shared = {path: value for path, value in values.items() if path.startswith("attention.")}
            values = {f"global_{path}": x for path, x in shared.items() if path != "attention.windows"} | values
            values["shared_kv_mlp_width"] = 2 * fields["intermediate_size"] if fields["use_double_wide_mlp"] else 0
        parts: dict[str, dict[str, Any]] = collections.defaultdict(dict)
        for path, value in values.items():
            part, _, name = path.rpartition(".")
            parts[part][name] = value
        latent = Latent(**parts["attention.latent"]) if "attention.latent" in parts else None
        attention = Attention(rope=Rope(**parts["attention.rope"]), latent=latent, **parts["attention"])
        wide = None
        if two_sizes:
            wide = Attention(rope=Rope(**parts["global_attention.rope"]), **parts["global_attention"])
        embeddings = Embeddings(**parts["embeddings"])
        experts = Experts(**parts["experts"]) if "count" in parts["experts"] else None
        recurrent = Recurrent(**parts["recurrent"]) if "recurrent" in parts else None
        norm = Norm(**parts["norm"])
        return ModelConfig(
            attention=attention, norm=norm, embeddings=embeddings, experts=experts, recurrent=recurrent,
            global_attention=wide, **parts[""],
        )  # fmt: skip
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:  # a list for a number, and the like
        raise InputError(f"config.json holds a value of the wrong type ({error}); fetch it again") from None


def text_attributes(attributes: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the attributes of the text model in a config.json that has other parts too; others as they are."""
    text = attributes.get("text_config")
    if text is None:
        return attributes
    kind = text.get("model_type")
    if kind not in FAMILIES and kind not in ALIASES:
        raise InputError(
            f"model_type {attributes.get('model_type')!r} has a text model of the type {kind!r}, which is not "
            f"supported; supported are {', '.join(FAMILIES)}"
        )
    outer = ("tie_word_embeddings", "quantization_config", "eos_token_id", "bos_token_id", "pad_token_id")
    return text | {name: attributes[name] for name in outer if attributes.get(name) is not None}


def text_tensors(stored: Mapping[str, weights.StoredTensor]) -> dict[str, weights.StoredTensor]:
    """Return the tensors of the text model of a checkpoint that has other parts too, by the names that they have in one
    of its own; a line says what is left out.
    """
    tensors = {}
    left_out: dict[str, None] = {}
    for name, tensor in stored.items():
        inner = name.replace("model.language_model.", "model.", 1).removeprefix("language_model.")
        if inner != name or name == "lm_head.weight":
            tensors[inner] = tensor
        else:
            left_out[name.removeprefix("model.").partition(".")[0]] = None
    if left_out:
        log.warning("only the text model is read; left out are the tensors of %s", ", ".join(left_out))
    return tensors


def is_reward_model(attributes: Mapping[str, Any]) -> bool:
    """Whether a config.json is a sequence classifier's with one label, a reward model; InputError for several
    labels.
    """
    names = attributes.get("architectures") or ()
    if not any(str(name).endswith("ForSequenceClassification") for name in names):
        return False
    # transformers' own reading: names of the labels before their number, and two where it knows neither.
    labels = attributes.get("id2label")
    count = attributes.get("num_labels", 2) if labels is None else len(labels)
    if count != 1:
        raise InputError(f"config.json is of a classifier of {count} labels; a reward model has one (num_labels=1)")
    return True


def write_config(config: ModelConfig, dtype: str, scalar: bool = False) -> dict[str, Any]:
    """Return the config.json of a model, which transformers 4 and 5 both read. ``scalar``: it is a reward model.
    InputError where the family's config.json cannot express one of the values.
    """
    family = FAMILIES[config.family]
    if scalar and not family.classifier:
        raise InputError(f"transformers has no reward model of the family {config.family}: train another one")
    attributes: dict[str, Any] = {
        "architectures": [family.classifier if scalar else family.architecture],
        "model_type": family.model_type,
        "torch_dtype": dtype,
    }
    attributes |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}} if scalar else {}
    fields = {name: FIELDS[name] for name in family.defaults if name in FIELDS}
    absent = () if config.experts is not None else tuple(name for name in fields if fields[name].startswith("experts."))
    attributes |= {name: operator.attrgetter(fields[name])(config) for name in fields if name not in absent}
    activation = next(hf for hf, ours in ACTIVATIONS.items() if ours == config.activation)
    attributes |= {name: activation for name in ("hidden_act", "hidden_activation") if name in family.defaults}
    if "query_pre_attn_scalar" in family.defaults and config.attention.scale is not None:
        denominator = config.attention.scale**-2
        # The rounding of x ** -0.5 ** -2 is undone where x was an integer.
        integral = abs(denominator - round(denominator)) < 1e-6 * denominator
        attributes["query_pre_attn_scalar"] = round(denominator) if integral else denominator
    if (latent := config.attention.latent) is not None:
        attributes |= {"head_dim": latent.rotary_dim, "q_lora_rank": latent.query_rank or None}
    if "n_shared_experts" in family.defaults and config.experts is not None:
        attributes["n_shared_experts"] = config.experts.shared_width // config.expert_width
    windows = config.attention.windows or (0,) * config.layers
    derived = {
        "sliding_window": max(windows) or None,
        "use_sliding_window": any(windows),
        "max_window_layers": next((i for i, window in enumerate(windows) if window), config.layers),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "block_auto_adjust_ff_dim": False,
        "mlp_layer_types": [
            "dense" if layer in config.layers_with("mlp") else "sparse" for layer in range(config.layers)
        ],
    }
    if config.recurrent is not None:
        _, other = family.recurrent
        derived["layer_types"] = [other if recurrent else "full_attention" for recurrent in config.recurrent.layers]
    rope = config.attention.rope
    derived |= {
        "no_rope_layers": [int(rotates) for rotates in rope.layers or (True,) * config.layers],
        "partial_rotary_factor": (rope.dims or config.attention.head_dim) / config.attention.head_dim,
    }
    derived |= {"enable_moe_block": config.experts is not None, "use_double_wide_mlp": config.shared_kv_mlp_width > 0}
    derived["vocab_size_per_layer_input"] = config.vocab_size
    derived["linear_allow_neg_eigval"] = config.recurrent is not None and config.recurrent.strength == 2
    attributes |= {name: value for name, value in derived.items() if name in family.defaults}
    if family.optional_rope and rope.layers:
        attributes["rope_parameters"] = {"rope_theta": None, "rope_type": "default"}
    elif config.global_attention is None:
        attributes |= {"rope_theta": rope.theta, "rope_scaling": write_scaling(rope.scaling)}
    else:
        attributes["rope_parameters"] = _write_two_ropes(config.attention, config.global_attention)
    if rope.local_theta is not None:
        attributes["rope_local_base_freq"] = rope.local_theta
    attributes |= write_token_ids(config.tokens)
    lost = differing_fields(config, read_config(attributes))
    if lost:
        value = operator.attrgetter(lost[0])(config)
        raise InputError(f"a {config.family} config.json cannot express {lost[0]}={value!r}; set it back")
    return attributes


def differing_fields(config: Any, other: Any) -> list[str]:
    """Return the dotted names of the fields that differ between two configurations."""
    names = []
    for field in dataclasses.fields(config):
        ours, theirs = getattr(config, field.name), getattr(other, field.name)
        if ours == theirs:
            continue
        parts = dataclasses.is_dataclass(ours) and type(ours) is type(theirs)
        names += [f"{field.name}.{name}" for name in differing_fields(ours, theirs)] if parts else [field.name]
    return names


def read_token_ids(attributes: Mapping[str, Any]) -> TokenIds:
    """Read the special ids of a config.json or generation_config.json; negative ids are dropped."""
    ids_of = {}
    for name in ("bos", "eos", "pad"):
        value = attributes.get(f"{name}_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(i) is not int for i in ids):
            raise InputError(f"{name}_token_id is {value!r}; it must be an integer or a list of integers")
        ids_of[name] = tuple(dict.fromkeys(i for i in ids if i >= 0))
    return TokenIds(next(iter(ids_of["bos"]), None), ids_of["eos"], next(iter(ids_of["pad"]), None))


def write_token_ids(tokens: TokenIds) -> dict[str, Any]:
    """Return config.json's attributes of the special ids; a single end id is written plain, several as a list."""
    eos = None if not tokens.eos else tokens.eos[0] if len(tokens.eos) == 1 else list(tokens.eos)
    return {"bos_token_id": tokens.bos, "eos_token_id": eos, "pad_token_id": tokens.pad}


def _with_defaults(attributes: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the attributes that the family knows, with its defaults, after checking their types and sizes."""
    fields = {name: _typed(name, attributes, default) for name, default in family.defaults.items()}
    missing = [name for name, value in fields.items() if value is REQUIRED]
    if missing:
        raise InputError(f"config.json does not say {missing[0]}; take the file that belongs to the model")
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if not fields.get("enable_moe_block", True):
        fields = {name: x for name, x in fields.items() if not FIELDS.get(name, "").startswith("experts.")}
    if "global_head_dim" in fields:
        _check_two_sizes(fields)
    if "linear_allow_neg_eigval" in fields:
        _fill_in_delta_sizes(fields)
    counts = """
        vocab_size hidden_size num_hidden_layers intermediate_size num_attention_heads num_key_value_heads head_dim
        max_position_embeddings sliding_window num_experts num_local_experts num_experts_per_tok moe_intermediate_size
        shared_expert_intermediate_size linear_conv_kernel_dim linear_num_key_heads linear_num_value_heads
        linear_key_head_dim linear_value_head_dim conv_L_cache full_attention_interval block_multiple_of
        n_routed_experts kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim n_group topk_group
        global_head_dim num_global_key_value_heads top_k_experts
    """.split()
    for name in (name for name in counts if name in fields):
        optional = (fields[name] is None and name == "head_dim") or (not fields[name] and name == "sliding_window")
        if not optional and (type(fields[name]) is not int or fields[name] < 1):
            raise InputError(f"config.json sets {name}={fields[name]!r}; it must be a positive integer")
    # Lists with an entry for each layer are made before tensors are counted: a damaged file must not fill the memory.
    if fields["num_hidden_layers"] > 10_000:
        raise InputError(f"config.json sets num_hidden_layers={fields['num_hidden_layers']}; at most 10000 are read")
    _multiple(fields, "num_attention_heads", "num_key_value_heads")
    experts = next((fields[name] for name in EXPERT_COUNTS if name in fields), None)
    per_token = next((name for name in ("num_experts_per_tok", "top_k_experts") if name in fields), "")
    if experts is not None and fields[per_token] > experts:
        raise InputError(f"config.json sets {per_token}={fields[per_token]} of {experts} experts")
    if "kv_lora_rank" in fields:
        fields["head_dim"] = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
    if fields["head_dim"] is None:
        fields["head_dim"] = _multiple(fields, "hidden_size", "num_attention_heads")
    if "no_rope_layers" in fields:
        fields["no_rope_layers"] = _rotating_layers(fields)
    if (kinds := fields.get("mlp_layer_types")) is not None:
        fields["first_k_dense_replace"] = dense = kinds.count("dense")
        if kinds != ["dense"] * dense + ["sparse"] * (fields["num_hidden_layers"] - dense):
            raise InputError(f"config.json sets mlp_layer_types={kinds!r}; the dense layers must be the first")
    if "n_group" in fields:
        _multiple(fields, "n_routed_experts", "n_group")
    if "linear_num_key_heads" in fields:
        _multiple(fields, "linear_num_value_heads", "linear_num_key_heads")
    if fields.get("block_auto_adjust_ff_dim"):
        width = int(int(2 * fields["intermediate_size"] / 3) * fields["block_ffn_dim_multiplier"])
        fields["intermediate_size"] = -(-width // fields["block_multiple_of"]) * fields["block_multiple_of"]
    if fields["head_dim"] % 2:
        raise InputError(f"config.json gives a head_dim of {fields['head_dim']}; rotary positions need an even one")
    return fields


def _typed(name: str, attributes: Mapping[str, Any], default: Any) -> Any:
    """Return an attribute, or its default where it is absent; null stands for the default of a number or a name."""
    value = attributes.get(name, default)
    if value is None and isinstance(default, (float, str)) and not name.endswith("softcapping"):
        return default
    kinds = bool if isinstance(default, bool) else (int, float) if isinstance(default, float) else object
    if value is not None and (not isinstance(value, kinds) or (isinstance(default, float) and isinstance(value, bool))):
        raise InputError(f"config.json holds a value of the wrong type: {name}={value!r}, where {default!r} is usual")
    return value


def _with_global_sizes(attributes: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """Return the attributes with the sizes of layers without a window under the names of published models, where
    transformers 5.24 lists them by layer.
    """
    if "global_head_dim" not in family.defaults:
        return attributes
    if not (by_layer := attributes.get("per_layer_config")):
        # In this form the heads count only where values are keys.
        return {**attributes, **({} if attributes.get("attention_k_eq_v") else {"num_global_key_value_heads": None})}
    first, *more = by_layer.values()
    kinds = attributes.get("layer_types") or ()
    wide = {str(layer) for layer, kind in enumerate(kinds) if kind == "full_attention"}
    if {*by_layer} != wide or any(other != first for other in more) or {*first} - {"head_dim", "num_key_value_heads"}:
        raise InputError(
            f"config.json sets per_layer_config={by_layer!r}; only full_attention layers may differ, all in the same "
            "head_dim and num_key_value_heads"
        )
    sizes = {"global_head_dim": first.get("head_dim", attributes.get("head_dim", 256))}
    others = {name: value for name, value in attributes.items() if name != "per_layer_config"}
    return {**others, **sizes, "num_global_key_value_heads": first.get("num_key_value_heads")}


def _check_two_sizes(fields: dict[str, Any]) -> None:
    """Refuse what models with two sizes of attention cannot be, and fill in the keys' heads of global layers."""
    if fields["num_global_key_value_heads"] is None:
        fields["num_global_key_value_heads"] = fields["num_key_value_heads"]
    _multiple(fields, "num_attention_heads", "num_global_key_value_heads")
    layers, shared = fields["num_hidden_layers"], fields["num_kv_shared_layers"]
    kinds = fields["layer_types"] or [
        "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(layers)
    ]
    kinds = fields["layer_types"] = [*kinds[:-1], "full_attention"]  # as transformers does
    both = {"full_attention", "sliding_attention"}
    reasons = {
        "layer_types to one kind of layer; both must be there": len(kinds) == layers and both - {*kinds},
        f"num_kv_shared_layers={shared}, and an earlier layer of each kind must have keys": not isinstance(shared, int)
        or (len(kinds) == layers and both - {*kinds[: layers - shared]}),
        f"global_head_dim={fields['global_head_dim']}, which must be even": fields["global_head_dim"] % 2 != 0,
        "use_bidirectional_attention='all': tokens here see only those before them":
            fields["use_bidirectional_attention"] not in (None, "vision"),
        f"vocab_size_per_layer_input={fields.get('vocab_size_per_layer_input')}, which is not vocab_size":
            (fields.get("hidden_size_per_layer_input") or 0) > 0
            and fields["vocab_size_per_layer_input"] not in (None, fields["vocab_size"]),
    }  # fmt: skip
    for reason, holds in reasons.items():
        require(not holds, f"config.json sets {reason}")


def _fill_in_delta_sizes(fields: dict[str, Any]) -> None:
    """Fill in the sizes of a delta net that config.json leaves open, as transformers does."""
    heads = fields["num_attention_heads"]
    key_heads = fields["linear_num_key_heads"] or heads
    key_dim = fields["linear_key_head_dim"] or int(0.75 * fields["hidden_size"] / key_heads)
    sizes = {
        "num_key_heads": key_heads,
        "num_value_heads": heads,
        "key_head_dim": key_dim,
        "value_head_dim": 2 * key_dim,
    }
    fields.update({f"linear_{name}": fields[f"linear_{name}"] or size for name, size in sizes.items()})


def _rotating_layers(fields: Mapping[str, Any]) -> list[bool]:
    """Return for each layer whether it rotates, which ``no_rope_layers`` says, 1 or 0 a layer."""
    layers, interval = fields["num_hidden_layers"], fields["no_rope_layer_interval"]
    flags = fields["no_rope_layers"]
    if flags is None:
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if len(flags) != layers:
        raise InputError(f"config.json: no_rope_layers has {len(flags)} entries for {layers} layers")
    return [bool(flag) for flag in flags]


def _multiple(fields: Mapping[str, Any], name: str, unit: str) -> int:
    """Return ``fields[name] / fields[unit]``; InputError where that is not a whole number."""
    if fields[name] % fields[unit]:
        raise InputError(f"config.json sets {name}={fields[name]}, which is no multiple of {unit}={fields[unit]}")
    return fields[name] // fields[unit]


def _read_layers(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the windows of the layers, and which of them are recurrent."""
    layers = range(fields["num_hidden_layers"])
    kinds = fields.get("layer_types")
    size = fields.get("sliding_window") if fields.get("use_sliding_window", True) else None
    kind, recurrent = family.recurrent
    if kinds is None:
        other = recurrent or "sliding_attention"
        kinds = [other if family.slides(fields, i) else "full_attention" for i in layers]
    valid = ("full_attention", recurrent or "sliding_attention")
    strange = set(kinds) - {*valid}
    if strange or len(kinds) != len(layers):
        reason = f"names {strange.pop()!r}" if strange else f"has {len(kinds)} entries for {len(layers)} layers"
        raise InputError(f"config.json: layer_types {reason}; it takes one of {', '.join(valid)} a layer")
    if kind:
        return {"recurrent.kind": kind, "recurrent.layers": tuple(kind == recurrent for kind in kinds)}
    used = fields.get("use_sliding_window", True) and fields.get("layer_types")
    if used and "sliding_attention" in kinds and not size:
        raise InputError("config.json: layer_types has sliding layers, and sliding_window is not set; set it")
    windows = tuple(size or 0 if kind == "sliding_attention" else 0 for kind in kinds)
    return {"attention.windows": windows if any(windows) else ()}


def _read_rope(attributes: Mapping[str, Any], family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    full, local = _rope_parameters(attributes, family)
    theta = _single_number("rope_theta", family.defaults, full, attributes)
    given = (attributes.get("rope_parameters") or {}).get("rope_theta", attributes.get("rope_theta", theta))
    rotates = not family.optional_rope or given is not None
    values = {"attention.rope.theta": theta, "attention.rope.scaling": _read_scaling(full, family, fields)}
    if _LOCAL in family.defaults:
        old = {"rope_theta": attributes.get(_LOCAL)}
        values["attention.rope.local_theta"] = _single_number(
            "rope_theta", {"rope_theta": family.defaults[_LOCAL] or theta}, local, old
        )
        if _read_scaling(local, family, fields) is not None:
            raise InputError(
                "config.json scales the rotary positions of sliding layers; only full layers may be scaled"
            )
    if "partial_rotary_factor" in family.defaults:
        share = _single_number("partial_rotary_factor", family.defaults, full, attributes)
        dims = int(fields["head_dim"] * share)
        if dims % 2 or not 0 < dims <= fields["head_dim"]:
            raise InputError(
                f"config.json sets partial_rotary_factor={share}, which rotates {dims} of "
                f"{fields['head_dim']} numbers of a head; that must be an even number of them"
            )
        values["attention.rope.dims"] = 0 if dims == fields["head_dim"] else dims
    rotating = fields.get("no_rope_layers", () if rotates else [False] * fields["num_hidden_layers"])
    values["attention.rope.layers"] = () if all(rotating) else tuple(rotating)
    return values


def _read_two_ropes(attributes: Mapping[str, Any], family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary parameters of layers with a window, and of those without, which rotate a part of their pairs."""
    full, local = _rope_parameters(attributes, family)
    full = full or {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    strange = {*full} - {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
    if strange or full.get("rope_type", "default") not in ("default", "proportional"):
        raise InputError(f"config.json sets rope_parameters={full!r} of full_attention, which is not known here")
    if _read_scaling(local, family, fields) is not None:
        raise InputError("config.json scales the rotary positions of sliding layers; only full layers may be scaled")
    share = full.get("partial_rotary_factor", 1.0) if full.get("rope_type") == "proportional" else 1.0
    pairs, factor = int(share * fields["global_head_dim"] // 2), full.get("factor", 1.0)
    require(pairs > 0, f"config.json sets partial_rotary_factor={share}, which rotates nothing; remove it")
    return {
        "attention.rope.theta": float(local.get("rope_theta", 1e4)),
        "global_attention.rope.theta": float(full.get("rope_theta", 1e6)),
        "global_attention.rope.rotated_pairs": pairs if share < 1 else 0,
        "global_attention.rope.scaling": None if factor == 1 else float(factor),
    }


def _write_two_ropes(attention: Attention, wide: Attention) -> dict[str, Any]:
    share = 2 * wide.rope.rotated_pairs / wide.head_dim if wide.rope.rotated_pairs else 1.0
    factor = {} if wide.rope.scaling is None else {"factor": wide.rope.scaling}
    full = {"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": wide.rope.theta, **factor}
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": attention.rope.theta}, "full_attention": full,
    }  # fmt: skip


def _rope_parameters(attributes: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary parameters of full and of sliding layers, from each form that transformers 4 and 5 write.
    ``rope_parameters`` or ``rope_scaling`` has them flat or by kind of layer. Flat ones are of all layers; in families
    with two bases only ``rope_scaling`` may be flat, and is of full layers. A key that is null is absent.
    """
    two_bases = _LOCAL in family.defaults or "global_head_dim" in family.defaults
    kinds: dict[str, dict[str, Any]] = {"full_attention": {}, "sliding_attention": {}}
    for name in ("rope_parameters", "rope_scaling"):
        form = dict(attributes.get(name) or {})
        nested = {kind: form.pop(kind) for kind in kinds if kind in form}
        if form and (nested or (two_bases and name == "rope_parameters")):
            key, value = next(iter(form.items()))
            raise InputError(
                f"config.json sets {name}.{key}={value!r} outside of {' and '.join(kinds)}; move it into one of them"
            )
        for kind, parameters in (nested or dict.fromkeys([*kinds][: 1 if two_bases else 2], form)).items():
            entries = (parameters or {}).items()
            present = {key: value for key, value in entries if value is not None or key == "factor"}
            rope_type = present.pop("type", present.get("rope_type"))  # ``type`` is the old name
            if rope_type is not None and (other := present.setdefault("rope_type", rope_type)) != rope_type:
                raise InputError(f"config.json has the rope types {other!r} and {rope_type!r}; keep one of them")
            if present and kinds[kind] and present != kinds[kind]:
                raise InputError("config.json has rope_parameters and rope_scaling, and they differ; keep one of them")
            kinds[kind] = present or kinds[kind]
    full, sliding = kinds.values()
    if not two_bases and full != sliding:
        raise InputError(f"config.json rotates sliding layers otherwise than full ones; {family.model_type} cannot")
    return full or dict(family.defaults.get("rope_scaling") or {}), sliding


def _single_number(name: str, defaults: Mapping[str, Any], *places: Mapping[str, Any]) -> float:
    """Return an attribute that may be in several places of a config.json; InputError where they differ."""
    numbers = [float(place[name]) for place in places if place.get(name) is not None]
    if len({*numbers}) > 1:
        raise InputError(f"config.json has {name} in two places, {numbers[0]} and {numbers[1]}; keep the right one")
    return numbers[0] if numbers else float(defaults[name])


def _read_scaling(
    rope: Mapping[str, Any], family: Family, fields: Mapping[str, Any]
) -> Llama3Rope | Yarn | float | None:
    kind = rope.get("rope_type", "default")
    if kind == "longrope" or (family.model_type == "phi3" and kind in ("su", "yarn")):
        raise InputError(
            f"config.json names the rope type {kind!r} (longrope), which is not known here; use a model with the "
            "original context, such as microsoft/phi-4 or Phi-3-mini-4k-instruct"
        )
    if kind not in _ROPE_KEYS:
        raise InputError(f"config.json names the rope type {kind!r}; known are {', '.join(_ROPE_KEYS)}")
    keys = {"rope_type", "rope_theta", *_ROPE_KEYS[kind], *(family.defaults.keys() & ROPE_DEFAULTS)}
    for name, value in rope.items():
        if name not in keys and value not in (None, _NEUTRAL.get(name)):
            raise InputError(
                f"config.json sets the rope parameter {name}={value!r}, which is not known here for the rope type "
                f"{kind!r} of {family.model_type}"
            )
    try:
        if kind == "default":
            return None
        if kind == "linear":
            return float(rope["factor"])
        original = int(rope.get("original_max_position_embeddings", fields["max_position_embeddings"]))
        if kind == "llama3":
            factors = (float(rope[name]) for name in ("factor", "low_freq_factor", "high_freq_factor"))
            return Llama3Rope(*factors, original_positions=original)
        factor = fields["max_position_embeddings"] / original if rope["factor"] is None else float(rope["factor"])
        fast, slow = (float(rope.get(name) or default) for name, default in (("beta_fast", 32), ("beta_slow", 1)))
        all_dims = float(rope.get("mscale_all_dim") or 0) if "kv_lora_rank" in fields else 0.0
        truncate = _typed("truncate", rope, True)
        return Yarn(factor, original, fast, slow, _magnitude(rope, factor), truncate, all_dims)
    except KeyError as error:
        raise InputError(f"config.json: rope type {kind!r} needs {error.args[0]!r}") from None


def _magnitude(rope: Mapping[str, Any], factor: float) -> float:
    """Return YaRN's factor on queries and keys: as given, else ``0.1 ln(factor) + 1``, or a ratio of two such sums."""
    if rope.get("attention_factor") is not None:
        return float(rope["attention_factor"])
    scales = [rope.get(name) for name in ("mscale", "mscale_all_dim")]
    above, below = scales if all(scales) else (1.0, 0.0)
    logarithm = 0.1 * math.log(max(factor, 1.0))
    return (logarithm * above + 1.0) / (logarithm * below + 1.0)


def write_scaling(scaling: Llama3Rope | Yarn | float | None) -> dict[str, Any] | None:
    """Return config.json's ``rope_scaling``: the rescaling of rotary positions, or None without any."""
    if isinstance(scaling, Llama3Rope):
        return {
            "rope_type": "llama3", "factor": scaling.factor, "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        }  # fmt: skip
    if isinstance(scaling, Yarn):
        return {
            "rope_type": "yarn", "factor": scaling.factor, "beta_fast": scaling.fast, "beta_slow": scaling.slow,
            "original_max_position_embeddings": scaling.original_positions, "attention_factor": scaling.magnitude,
            "truncate": scaling.truncate, **({"mscale_all_dim": scaling.all_dims} if scaling.all_dims else {}),
        }  # fmt: skip
    return None if scaling is None else {"rope_type": "linear", "factor": float(scaling)}


def load_directory(directory: Path, dtype: str, mesh: Any, pack: Any = None) -> tuple[Any, Any | None]:
    """Load (model, tokenizer or None) from a Hugging Face directory, parameters in ``dtype`` and laid out on the mesh.
    The model is a ``Decoder``, or the ``ScalarModel`` of a sequence classifier with one label. ``pack``: see
    ``weights.read_parameters``.
    """
    from jaxrl_llm.models.decoder import Decoder
    from jaxrl_llm.models.heads import with_scalar_head

    attributes = weights.read_object(directory / "config.json")
    config = read_config(attributes)
    stored = weights.open_checkpoint(directory)
    stored = text_tensors(stored) if "text_config" in attributes else stored
    generation = directory / "generation_config.json"
    tokenizer = load_tokenizer(directory)
    config = with_special_ids(config, weights.read_object(generation) if generation.is_file() else {}, tokenizer)
    parameters = weights.read_parameters(config, stored, dtype, mesh, is_reward_model(attributes), pack)
    scalar = parameters.pop("scalar", None)
    decoder = Decoder(config, parameters)
    return decoder if scalar is None else with_scalar_head(decoder, scalar), tokenizer


def save_pretrained(
    model: Any,
    tokenizer: Any | None,
    directory: str | os.PathLike,
    card: str | None = None,
    reward_format: Mapping[str, str] | None = None,
    generation: Mapping[str, Any] | None = None,
) -> None:
    """Write a directory that transformers loads: config, generation config, weights, tokenizer.

    A ``ScalarModel`` becomes a sequence classifier with one label, for ``AutoModelForSequenceClassification``. It reads
    the score at the last token that is not padding, so config and tokenizer name a padding token that ends no text
    (``padding_id``), perhaps not the language model's. Weights above 5 GB are sharded. The directory appears whole or
    not at all.

    Args:
      model: a ``Decoder`` or ``ScalarModel``; its arrays are addressable by this process.
      tokenizer: written beside it, or None.
      directory: must not exist, or be empty; InputError otherwise.
      card: the text of README.md, or None for no such file.
      reward_format: how a reward model was trained, which config.json holds as ``jaxrl_llm``.
      generation: the content of the generation config, but for the special ids, which are the model's.
    """
    from jaxrl_llm.models.decoder import to_parameters
    from jaxrl_llm.models.heads import split_head

    decoder, scalar = split_head(model)
    config = decoder.config
    parameters = to_parameters(decoder)
    attributes = write_config(config, parameters["embed"].dtype.name, scalar is not None)
    if scalar is not None:
        parameters["scalar"] = scalar
        attributes["pad_token_id"] = padding_id(config, tokenizer)
        tokenizer = None if tokenizer is None else with_pad_token(tokenizer, attributes["pad_token_id"])
        attributes |= {} if reward_format is None else {OUR_ATTRIBUTE: dict(reward_format)}
    with new_directory(directory, card) as folder:
        write_directory(folder, attributes, weights.to_stored(config, parameters), tokenizer, generation or {})


def write_directory(
    folder: Path,
    attributes: Mapping[str, Any],
    stored: Mapping[str, weights.StoredTensor],
    tokenizer: Any | None,
    generation: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write every file of a model into an existing folder; ``attributes`` is the content of config.json, which has the
    special ids, and ``generation`` that of generation_config.json without them.
    """
    weights.write_object(folder / "config.json", attributes)
    if not is_reward_model(attributes):
        ids = write_token_ids(read_token_ids(attributes))
        settings = {name: value for name, value in generation.items() if name not in ids}
        present_ids = {name: value for name, value in ids.items() if value is not None}
        weights.write_object(folder / "generation_config.json", settings | present_ids)
    weights.write_checkpoint(stored, folder, attributes["torch_dtype"])
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


@contextlib.contextmanager
def new_directory(target: str | os.PathLike, card: str | None = None) -> Generator[Path]:
    """Yield a folder with this README.md next to ``target``; it is renamed on success and removed otherwise."""
    target = Path(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} exists and is not empty; give a new directory, or remove it first")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True)
    with work, on_exit(lambda *reason: work.cleanup()):
        folder = Path(work.name)
        folder.chmod(0o755)
        if card is not None:
            (folder / "README.md").write_text(card, encoding="utf-8")
        yield folder
        os.replace(folder, target)


def with_special_ids(config: ModelConfig, generation: Mapping[str, Any], tokenizer: Any | None) -> ModelConfig:
    """Collect the special ids: ends from config, generation config and, for chat models, the tokenizer. Ids outside the
    vocabulary are dropped: no model can produce them.
    """
    sources = [config.tokens, read_token_ids(generation)]
    if tokenizer is not None:
        ends = (tokenizer.eos_token_id,) if tokenizer.chat_template and tokenizer.eos_token_id is not None else ()
        sources.append(TokenIds(tokenizer.bos_token_id, ends, tokenizer.pad_token_id))

    first = {}
    for name in ("bos", "pad"):
        candidates = (getattr(source, name) for source in sources)
        first[name] = next((i for i in candidates if i is not None and i < config.vocab_size), None)
    ids = dict.fromkeys(i for source in sources for i in source.eos)
    ends = [i for i in ids if i < config.vocab_size]
    if ids and not ends:
        raise InputError(
            f"the model's end of a text, id {max(ids)}, has no row in its embedding of {config.vocab_size} rows: set "
            "eos_token_id in config.json to a token that the model can write"
        )
    return dataclasses.replace(config, tokens=TokenIds(first["bos"], tuple(ends), first["pad"]))


def padding_id(config: ModelConfig, tokenizer: Any | None) -> int:
    """Return a reward model's padding id, which ends no text: scores are read at the last unpadded token."""
    tokens = config.tokens
    special = () if tokenizer is None else special_ids(tokenizer)
    candidates = (tokens.pad, tokens.bos, *special, *range(config.vocab_size))
    return next(i for i in candidates if i is not None and i < config.vocab_size and i not in tokens.eos)
