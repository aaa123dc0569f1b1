"""The model families: how each one's config.json and tensor names map to ours, and back, by the same tables.

A family is one value in ``FAMILIES``, keyed by Hugging Face's ``model_type``. To add one, add an entry (and new axes or
rules only for new features of the decoder). Sources: transformers' ``configuration_*`` and ``modeling_*`` files.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One named tensor of a checkpoint and its place in our parameters.

    Attributes:
      name: Hugging Face's; a first ``{}`` stands for the layer, a second one for the expert. Such tensors are stacked
        over L, or over L and E, in ours.
      path: our dotted path.
      hf_axes: axis letters of the stored tensor, one word per axis; a word of two letters is two merged axes, and ``1``
        an axis of size 1 that ours does not have.
      axes: axis letters of our parameter, without L.
    """

    name: str
    path: str
    hf_axes: str
    axes: str

    @property
    def layered(self) -> bool:
        """Whether every layer has one such tensor, or one for each expert."""
        return "{}" in self.name

    @property
    def outer(self) -> str:
        """The axes of ours over which checkpoints have a tensor each: "", "L" or "LE"."""
        return "LE"[: self.name.count("{}")]

    @property
    def inner(self) -> str:
        """The axes of ours that are in one tensor of a checkpoint."""
        return self.axes.removeprefix(self.outer[1:])


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor that is read on demand: ``shape`` is the whole one's, and ``part`` reads a tuple of slices (start and
    stop, one for each dimension) as a NumPy array. ``dtype``: as safetensors names it.
    """

    shape: tuple[int, ...]
    part: Callable[[tuple[slice, ...]], np.ndarray]
    dtype: str = "F32"

    def read(self) -> np.ndarray:
        """Read the whole tensor."""
        return self.part(tuple(slice(0, size) for size in self.shape))


@dataclasses.dataclass(frozen=True)
class Fused:
    """A tensor of a checkpoint that holds several of ours; reading splits it, and writing joins it. ``name`` is Hugging
    Face's, with ``{}`` for the layer; ``parts`` are the names of its ``Tensor`` values, which follow each other along
    ``axis`` of the stored tensor: in each of its ``groups``, as many as the axis of that letter has numbers, the share
    of each part; "1" for one group.
    """

    name: str
    parts: tuple[str, ...]
    axis: int = 0
    groups: str = "1"


EMBEDDINGS = (
    Tensor("model.embed_tokens.weight", "embed", "V D", "VD"),
    Tensor("model.norm.weight", "final_norm", "D", "D"),
    Tensor("lm_head.weight", "head", "V D", "DV"),
)
LAYER = "model.layers.{}."
ATTENTION = (
    Tensor(LAYER + "self_attn.q_proj.weight", "blocks.attn.q", "NH D", "DNH"),
    Tensor(LAYER + "self_attn.k_proj.weight", "blocks.attn.k", "KH D", "DKH"),
    Tensor(LAYER + "self_attn.v_proj.weight", "blocks.attn.v", "KH D", "DKH"),
    Tensor(LAYER + "self_attn.o_proj.weight", "blocks.attn.o", "D NH", "NHD"),
)
MATRICES = (
    *ATTENTION,
    Tensor(LAYER + "mlp.gate_proj.weight", "blocks.mlp.gate", "F D", "DF"),
    Tensor(LAYER + "mlp.up_proj.weight", "blocks.mlp.up", "F D", "DF"),
    Tensor(LAYER + "mlp.down_proj.weight", "blocks.mlp.down", "D F", "FD"),
)


def expert_tensors(block: str, gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    """Return the tensors of a router and its experts, named so below ``block`` of a layer."""
    names = {"gate": (gate, "I D", "EDI"), "up": (up, "I D", "EDI"), "down": (down, "D I", "EID")}
    return (
        Tensor(f"{LAYER}{block}.gate.weight", "blocks.experts.router", "E D", "DE"),
        *(
            Tensor(f"{LAYER}{block}.experts.{{}}.{name}.weight", f"blocks.experts.{ours}", stored, axes)
            for ours, (name, stored, axes) in names.items()
        ),
    )


EXPERTS = expert_tensors("mlp", "gate_proj", "up_proj", "down_proj")

BIASES = (
    Tensor(LAYER + "self_attn.q_proj.bias", "blocks.attn.q_bias", "NH", "NH"),
    Tensor(LAYER + "self_attn.k_proj.bias", "blocks.attn.k_bias", "KH", "KH"),
    Tensor(LAYER + "self_attn.v_proj.bias", "blocks.attn.v_bias", "KH", "KH"),
)
HEAD_NORMS = (
    Tensor(LAYER + "self_attn.q_norm.weight", "blocks.attn.q_norm", "H", "H"),
    Tensor(LAYER + "self_attn.k_norm.weight", "blocks.attn.k_norm", "H", "H"),
)
FULL_NORMS = (
    Tensor(LAYER + "self_attn.q_norm.weight", "blocks.attn.q_norm", "NH", "NH"),
    Tensor(LAYER + "self_attn.k_norm.weight", "blocks.attn.k_norm", "KH", "KH"),
)
PRE_NORMS = (
    Tensor(LAYER + "input_layernorm.weight", "blocks.norms.attn", "D", "D"),
    Tensor(LAYER + "post_attention_layernorm.weight", "blocks.norms.mlp", "D", "D"),
)
POST_NORMS = (
    Tensor(LAYER + "post_attention_layernorm.weight", "blocks.norms.attn_post", "D", "D"),
    Tensor(LAYER + "post_feedforward_layernorm.weight", "blocks.norms.mlp_post", "D", "D"),
)
SANDWICH_NORMS = (
    Tensor(LAYER + "input_layernorm.weight", "blocks.norms.attn", "D", "D"),
    Tensor(LAYER + "pre_feedforward_layernorm.weight", "blocks.norms.mlp", "D", "D"),
    *POST_NORMS,
)
GATED_QUERIES = (
    Tensor(LAYER + "self_attn.q_proj.query", "blocks.attn.q", "NH D", "DNH"),
    Tensor(LAYER + "self_attn.q_proj.gate", "blocks.attn.gate", "NH D", "DNH"),
)
SELF = LAYER + "self_attn."
LATENT_ATTENTION = (
    ATTENTION[0],
    Tensor(SELF + "q_a_proj.weight", "blocks.attn.q_latent", "Q D", "DQ"),
    Tensor(SELF + "q_a_layernorm.weight", "blocks.attn.q_latent_norm", "Q", "Q"),
    Tensor(SELF + "q_b_proj.weight", "blocks.attn.q", "NH Q", "QNH"),
    Tensor(SELF + "kv_a_proj_with_mqa.latent", "blocks.attn.latent", "Z D", "DZ"),
    Tensor(SELF + "kv_a_proj_with_mqa.rotary", "blocks.attn.k_rotary", "B D", "DB"),
    Tensor(SELF + "kv_a_layernorm.weight", "blocks.attn.latent_norm", "Z", "Z"),
    Tensor(SELF + "kv_b_proj.key", "blocks.attn.k_up", "NA Z", "ZNA"),
    Tensor(SELF + "kv_b_proj.value", "blocks.attn.v_up", "NU Z", "ZNU"),
    Tensor(SELF + "o_proj.weight", "blocks.attn.o", "D NU", "NUD"),
)
FUSED_LATENTS = (
    Fused(SELF + "kv_a_proj_with_mqa.weight", tuple(SELF + f"kv_a_proj_with_mqa.{x}" for x in ("latent", "rotary"))),
    Fused(SELF + "kv_b_proj.weight", tuple(SELF + f"kv_b_proj.{x}" for x in ("key", "value")), groups="N"),
)
DELTA = LAYER + "linear_attn."
DELTA_NET = (
    *(
        Tensor(DELTA + f"in_proj_{name}.weight", f"blocks.delta.{name}", f"{word} D", "D" + word)
        for name, word in {"q": "PX", "k": "PX", "v": "MY", "z": "MY", "b": "M", "a": "M"}.items()
    ),
    *(
        Tensor(DELTA + f"conv1d.{name}", f"blocks.delta.{name}_conv", f"{word} 1 W", word + "W")
        for name, word in {"q": "PX", "k": "PX", "v": "MY"}.items()
    ),
    Tensor(DELTA + "A_log", "blocks.delta.decay_log", "M", "M"),
    Tensor(DELTA + "dt_bias", "blocks.delta.decay_bias", "M", "M"),
    Tensor(DELTA + "norm.weight", "blocks.delta.norm", "Y", "Y"),
    Tensor(DELTA + "out_proj.weight", "blocks.delta.o", "D MY", "MYD"),
)
_OLMO_NAMES = {
    "in_proj_q": "q_proj", "in_proj_k": "k_proj", "in_proj_v": "v_proj", "in_proj_z": "g_proj", "in_proj_b": "b_proj",
    "in_proj_a": "a_proj", "conv1d.q": "q_conv1d.weight", "conv1d.k": "k_conv1d.weight", "conv1d.v": "v_conv1d.weight",
    "norm.weight": "o_norm.weight", "out_proj": "o_proj",
}  # fmt: skip


def _olmo_delta(tensor: Tensor) -> Tensor:
    """Return a tensor of a delta net under its name in OLMo Hybrid."""
    name = tensor.name.removeprefix(DELTA)
    found = next((theirs for ours, theirs in _OLMO_NAMES.items() if name.startswith(ours)), name)
    ending = ".weight" if name.endswith(".weight") and not found.endswith(".weight") else ""
    return dataclasses.replace(tensor, name=f"{DELTA}{found}{ending}")


FUSED_QUERIES = Fused(LAYER + "self_attn.q_proj.weight", tuple(tensor.name for tensor in GATED_QUERIES), groups="N")
FUSED_CONV = Fused(DELTA + "conv1d.weight", tuple(DELTA + f"conv1d.{name}" for name in "qkv"))
FUSED_GATE_AND_UP = Fused(
    LAYER + "mlp.gate_up_proj.weight", tuple(LAYER + f"mlp.{name}_proj.weight" for name in ("gate", "up"))
)


REQUIRED = object()
"""Marks attributes in ``Family.defaults`` that config.json must have."""


@dataclasses.dataclass(frozen=True)
class Family:
    """The facts that all models of one ``model_type`` share.

    Attributes:
      model_type: Hugging Face's key.
      architecture: the class that transformers loads.
      classifier: the class that transformers loads for a reward model; "" where it has none.
      defaults: every attribute that config.json may set and the model obeys, with the value where it is left out
        (``REQUIRED``: it must be there). Any other attribute must be harmless or switched off.
      constants: fields of ModelConfig, dotted, that every member shares.
      slides: (attributes, layer) -> whether the layer has a window, or is recurrent, where ``layer_types`` is missing.
      scaled_embedding: embeddings are multiplied by sqrt(D).
      required: further attributes that must have the value here, since the tensors imply it.
      fused: tensors of a checkpoint that hold several of ``tensors``.
      recurrent: the kind of layers without attention, and their name in ``layer_types``.
      spellings: older names of attributes.
      skipped: beginnings of the names of tensors that a checkpoint may have and that are left out.
      optional_rope: a ``rope_theta`` of null means that no layer rotates.
      below: what stands in the names of transformers' modules, after "model.", where it loads a checkpoint that reads
        pictures too; "" where it loads the text model alone.
    """

    model_type: str
    architecture: str
    classifier: str
    defaults: Mapping[str, Any]
    constants: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    slides: Callable[[Mapping[str, Any], int], bool] = lambda attributes, layer: False
    scaled_embedding: bool = False
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fused: tuple[Fused, ...] = ()
    recurrent: tuple[str, str] = ("", "")
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    optional_rope: bool = False
    below: str = ""


FIELDS = types.MappingProxyType({
    "vocab_size": "vocab_size", "hidden_size": "width", "num_hidden_layers": "layers", "rms_norm_eps": "norm.eps",
    "intermediate_size": "mlp_width", "residual_multiplier": "residual_scale",
    "tie_word_embeddings": "embeddings.tied", "embedding_multiplier": "embeddings.scale",
    "final_logit_softcapping": "embeddings.logit_softcap", "logits_scaling": "embeddings.logit_divisor",
    "num_attention_heads": "attention.heads", "num_key_value_heads": "attention.kv_heads",
    "head_dim": "attention.head_dim", "max_position_embeddings": "attention.rope.max_positions",
    "attn_logit_softcapping": "attention.softcap", "attention_multiplier": "attention.scale",
    "attention_bias": "attention.biased",
    "num_experts": "experts.count", "num_local_experts": "experts.count", "num_experts_per_tok": "experts.active",
    "moe_intermediate_size": "experts.width", "shared_expert_intermediate_size": "experts.shared_width",
    "norm_topk_prob": "experts.renormalise", "swiglu_limit": "experts.limit", "swiglu_alpha": "experts.alpha",
    "n_routed_experts": "experts.count", "first_k_dense_replace": "experts.dense_layers", "n_group": "experts.groups",
    "topk_group": "experts.active_groups", "routed_scaling_factor": "experts.scaling",
    "kv_lora_rank": "attention.latent.rank", "q_lora_rank": "attention.latent.query_rank",
    "qk_nope_head_dim": "attention.latent.plain_dim", "qk_rope_head_dim": "attention.latent.rotary_dim",
    "v_head_dim": "attention.latent.value_dim", "rope_interleave": "attention.rope.interleaved",
    "use_qk_norm": "attention.normed", "norm_eps": "norm.eps",
    "linear_conv_kernel_dim": "recurrent.kernel", "conv_L_cache": "recurrent.kernel",
    "linear_num_key_heads": "recurrent.key_heads", "linear_num_value_heads": "recurrent.value_heads",
    "linear_key_head_dim": "recurrent.key_dim", "linear_value_head_dim": "recurrent.value_dim",
    "global_head_dim": "global_attention.head_dim", "num_global_key_value_heads": "global_attention.kv_heads",
    "attention_k_eq_v": "global_attention.keys_as_values", "num_kv_shared_layers": "shared_kv_layers",
    "hidden_size_per_layer_input": "per_layer_width", "top_k_experts": "experts.active",
})  # fmt: skip
"""Attributes of config.json that are fields of ModelConfig under another name."""

ACTIVATIONS = types.MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})


def _defaults(activation: tuple[str, str] = ("hidden_act", "silu"), **changes: Any) -> Mapping[str, Any]:
    shared = dict.fromkeys(
        ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"), REQUIRED
    )
    shared |= {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048}
    shared |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, activation[0]: activation[1], "rope_theta": 10000.0}
    present = {name: value for name, value in (shared | changes).items() if value is not ...}
    return types.MappingProxyType(present)


_QWEN_WINDOWS: dict[str, Any] = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None,
}  # fmt: skip
_GEMMA = {
    "num_key_value_heads": 4, "head_dim": 256, "activation": ("hidden_activation", "gelu_pytorch_tanh"),
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
}  # fmt: skip


def _projections(name: str, parts: str, groups: str = "1") -> Fused:
    return Fused(DELTA + f"in_proj_{name}.weight", tuple(DELTA + f"in_proj_{part}.weight" for part in parts), 0, groups)


def _is_linear(attributes: Mapping[str, Any], layer: int) -> bool:
    return (layer + 1) % attributes["full_attention_interval"] != 0


_HYBRID: dict[str, Any] = {
    "head_dim": 256, "max_position_embeddings": 32768, "partial_rotary_factor": 0.25, "layer_types": None,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
}  # fmt: skip
_QWEN3_5: dict[str, Any] = _HYBRID | {
    "mrope_section": None,
    "mrope_interleaved": None,
}  # of texts all three positions are equal
_HYBRID_LAYERS: dict[str, Any] = {
    "slides": _is_linear, "recurrent": ("delta", "linear_attention"), "skipped": ("mtp.",),
}  # fmt: skip
_HYBRID_CONSTANTS = {"norm.plus_one": True, "attention.gated": True}
_HYBRID_TENSORS = (*EMBEDDINGS, *GATED_QUERIES, *ATTENTION[1:], *HEAD_NORMS, *DELTA_NET, *PRE_NORMS)
_QWEN3_5_FUSED = (FUSED_QUERIES, FUSED_CONV, _projections("qkv", "qkv"))
_SHARED_EXPERT = (
    Tensor(LAYER + "mlp.shared_expert.gate_proj.weight", "blocks.mlp.gate", "S D", "DS"),
    Tensor(LAYER + "mlp.shared_expert.up_proj.weight", "blocks.mlp.up", "S D", "DS"),
    Tensor(LAYER + "mlp.shared_expert.down_proj.weight", "blocks.mlp.down", "D S", "SD"),
    Tensor(LAYER + "mlp.shared_expert_gate.weight", "blocks.experts.shared_gate", "1 D", "D"),
)

_GROUPED: dict[str, Any] = {
    "n_routed_experts": REQUIRED, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": REQUIRED,
    "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "rope_interleave": True,
}  # fmt: skip
_FLASH: dict[str, Any] = {**_GROUPED, **_LATENT, "first_k_dense_replace": 1}
_GROUPED_FACTS: dict[str, Any] = {
    "constants": {"experts.sigmoid": True}, "skipped": ("model.layers.{layers}.",),  # several tokens' prediction
    "required": {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
}  # fmt: skip
_GROUPED_TENSORS = (
    *(*MATRICES[4:], *EXPERTS),
    Tensor(LAYER + "mlp.gate.e_score_correction_bias", "blocks.experts.choice_bias", "E", "E"),
    Tensor(LAYER + "mlp.shared_experts.gate_proj.weight", "blocks.shared.gate", "S D", "DS"),
    Tensor(LAYER + "mlp.shared_experts.up_proj.weight", "blocks.shared.up", "S D", "DS"),
    Tensor(LAYER + "mlp.shared_experts.down_proj.weight", "blocks.shared.down", "D S", "SD"),
)
_LATENT_GROUPED: dict[str, Any] = _GROUPED_FACTS | {
    "tensors": (*EMBEDDINGS, *LATENT_ATTENTION, *_GROUPED_TENSORS, *PRE_NORMS), "fused": FUSED_LATENTS,
}  # fmt: skip


def _gemma4_attention(part: str, letters: str) -> tuple[Tensor, ...]:
    """Return the tensors of the layers of a kind; ``letters``: of their numbers of keys' heads, and of a head."""
    keys, width = letters
    shared = part.startswith("shared_kv_")
    names = {"q": f"N{width}"} | ({} if shared else {"k": keys + width, "v": keys + width})
    return (
        *(Tensor(f"{SELF}{x}_proj.weight", f"blocks.{part}.{x}", f"{axes} D", "D" + axes) for x, axes in names.items()),
        *(Tensor(f"{SELF}{x}_norm.weight", f"blocks.{part}.{x}_norm", width, width) for x in names if x != "v"),
        Tensor(SELF + "o_proj.weight", f"blocks.{part}.o", f"D N{width}", f"N{width}D"),
    )


def _wide(tensor: Tensor) -> Tensor:
    """Return an MLP's tensor of the layers in which it is wider."""
    axes = (x.replace("F", "O") for x in (tensor.hf_axes, tensor.axes))
    return Tensor(tensor.name, tensor.path.replace(".mlp.", ".wide_mlp."), *axes)


_GEMMA4: dict[str, Any] = {
    **{name: value for name, value in _GEMMA.items() if name != "query_pre_attn_scalar"},
    "global_head_dim": 512, "num_global_key_value_heads": None, "attention_k_eq_v": False, "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False, "final_logit_softcapping": None, "use_bidirectional_attention": None,
    "max_position_embeddings": 131072, "sliding_window": 512,
}  # fmt: skip
_GEMMA4_UNIFIED: dict[str, Any] = _GEMMA4 | {"max_position_embeddings": 262144, "sliding_window": 1024}
_GEMMA4_FACTS: dict[str, Any] = {
    "constants": {
        "attention.scale": 1.0, "attention.normed_values": True,
        "experts.renormalise": True, "experts.beside_mlp": True,
    },
    "tensors": (
        *(EMBEDDINGS + MATRICES[4:] + SANDWICH_NORMS),
        *(tensor for part, letters in {"attn": "KH", "global_attn": "JG"}.items()
          for tensor in _gemma4_attention(part, letters) + _gemma4_attention(f"shared_kv_{part}", letters)),
        *map(_wide, MATRICES[4:]),
        Tensor(LAYER + "layer_scalar", "blocks.norms.layer_scale", "1", ""),
        Tensor("model.embed_tokens_per_layer.weight", "per_layer_embed", "V l", "Vl"),
        Tensor("model.per_layer_model_projection.weight", "per_layer_projection", "l D", "Dl"),
        Tensor("model.per_layer_projection_norm.weight", "per_layer_norm", "T", "T"),
        Tensor(LAYER + "per_layer_input_gate.weight", "blocks.per_layer.gate", "T D", "DT"),
        Tensor(LAYER + "per_layer_projection.weight", "blocks.per_layer.projection", "D T", "TD"),
        Tensor(LAYER + "post_per_layer_input_norm.weight", "blocks.norms.per_layer", "D", "D"),
        Tensor(LAYER + "router.proj.weight", "blocks.experts.router", "E D", "DE"),
        Tensor(LAYER + "router.scale", "blocks.experts.router_norm", "D", "D"),
        Tensor(LAYER + "router.per_expert_scale", "blocks.experts.expert_scale", "E", "E"),
        Tensor(LAYER + "experts.gate_proj", "blocks.experts.gate", "E I D", "EDI"),
        Tensor(LAYER + "experts.up_proj", "blocks.experts.up", "E I D", "EDI"),
        Tensor(LAYER + "experts.down_proj", "blocks.experts.down", "E D I", "EID"),
        Tensor(LAYER + "post_feedforward_layernorm_1.weight", "blocks.experts.mlp_post_norm", "D", "D"),
        Tensor(LAYER + "pre_feedforward_layernorm_2.weight", "blocks.experts.pre_norm", "D", "D"),
        Tensor(LAYER + "post_feedforward_layernorm_2.weight", "blocks.experts.post_norm", "D", "D"),
    ),
    "fused": (Fused(LAYER + "experts.gate_up_proj", (LAYER + "experts.gate_proj", LAYER + "experts.up_proj"), 1),),
    "scaled_embedding": True, "slides": lambda attributes, layer: (layer + 1) % 6 != 0, "below": "language_model.",
}  # fmt: skip

LLAMA = Family(
    "llama", "LlamaForCausalLM", "LlamaForSequenceClassification", _defaults(),
    constants={}, tensors=EMBEDDINGS + MATRICES + PRE_NORMS,
)  # fmt: skip
MISTRAL = Family(
    "mistral", "MistralForCausalLM", "MistralForSequenceClassification",
    _defaults(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
    constants={}, tensors=EMBEDDINGS + MATRICES + PRE_NORMS, slides=lambda attributes, layer: True,
)  # fmt: skip
QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", "Qwen2ForSequenceClassification",
    _defaults(max_position_embeddings=32768, num_key_value_heads=32, **_QWEN_WINDOWS),
    constants={}, tensors=EMBEDDINGS + MATRICES + BIASES + PRE_NORMS,
    slides=lambda attributes, layer: layer >= attributes["max_window_layers"],
)  # fmt: skip
OLMO2 = Family(
    "olmo2", "Olmo2ForCausalLM", "Olmo2ForSequenceClassification", _defaults(rms_norm_eps=1e-5),
    constants={},
    tensors=EMBEDDINGS + MATRICES + FULL_NORMS + POST_NORMS,
)  # fmt: skip
_ALL = (
    LLAMA,
    MISTRAL,
    QWEN2,
    Family(
        "qwen3", "Qwen3ForCausalLM", "Qwen3ForSequenceClassification",
        _defaults(max_position_embeddings=32768, num_key_value_heads=32, head_dim=128, **_QWEN_WINDOWS),
        constants={}, tensors=EMBEDDINGS + MATRICES + HEAD_NORMS + PRE_NORMS, slides=QWEN2.slides,
    ),
    Family(
        "gemma2", "Gemma2ForCausalLM", "Gemma2ForSequenceClassification",
        _defaults(**_GEMMA, max_position_embeddings=8192, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
        constants={"norm.plus_one": True},
        tensors=EMBEDDINGS + MATRICES + SANDWICH_NORMS,
        slides=lambda attributes, layer: layer % 2 == 0, scaled_embedding=True,
    ),
    Family(
        "gemma3_text", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification",
        _defaults(vocab_size=262208, num_attention_heads=8, **_GEMMA, max_position_embeddings=131072,
                  attn_logit_softcapping=None, final_logit_softcapping=None,
                  sliding_window_pattern=6, rope_theta=1e6, rope_local_base_freq=1e4),
        constants={"norm.plus_one": True},
        tensors=EMBEDDINGS + MATRICES + HEAD_NORMS + SANDWICH_NORMS, scaled_embedding=True, below="language_model.",
        slides=lambda attributes, layer: (layer + 1) % attributes["sliding_window_pattern"] != 0,
    ),
    Family(
        "gemma4_text", "Gemma4ForCausalLM", "",
        _defaults(vocab_size=262144, num_attention_heads=8, **_GEMMA4, hidden_size_per_layer_input=256,
                  vocab_size_per_layer_input=None,
                  enable_moe_block=False, num_experts=None, top_k_experts=None, moe_intermediate_size=None),
        **_GEMMA4_FACTS,
    ),
    Family(
        "gemma4_unified_text", "Gemma4UnifiedForCausalLM", "",
        _defaults(vocab_size=262144, num_attention_heads=8,
                  **_GEMMA4_UNIFIED,
                  vocab_size_per_layer_input=None),
        **_GEMMA4_FACTS,
    ),
    OLMO2,
    Family(
        "olmo3", "Olmo3ForCausalLM", "Olmo3ForSequenceClassification",
        _defaults(rms_norm_eps=1e-5, sliding_window=4096, layer_types=None, rope_theta=5e5, rope_local_base_freq=None),
        constants=OLMO2.constants, tensors=OLMO2.tensors, slides=lambda attributes, layer: (layer + 1) % 4 != 0,
    ),
    Family(
        "olmo_hybrid", "OlmoHybridForCausalLM", "",
        _defaults(max_position_embeddings=65536, layer_types=None, linear_conv_kernel_dim=4,
                  linear_num_key_heads=None, linear_num_value_heads=None, linear_key_head_dim=None,
                  linear_value_head_dim=None, linear_allow_neg_eigval=True),
        constants={"recurrent.norm_eps": 1e-5},
        tensors=(
            *(EMBEDDINGS + MATRICES + FULL_NORMS),
            *(dataclasses.replace(x, path=x.path.replace(".norms.", ".attn_norms.")) for x in POST_NORMS),
            *map(_olmo_delta, DELTA_NET),
            Tensor(LAYER + "attention_layer_norm.weight", "blocks.state_norms.attn", "D", "D"),
            Tensor(LAYER + "feedforward_layer_norm.weight", "blocks.state_norms.mlp", "D", "D"),
        ),
        slides=lambda attributes, layer: (layer + 1) % 4 != 0, recurrent=("delta", "linear_attention"),
        optional_rope=True,
    ),
    Family(
        "smollm3", "SmolLM3ForCausalLM", "SmolLM3ForSequenceClassification",
        _defaults(num_key_value_heads=4, max_position_embeddings=32768, tie_word_embeddings=True, rope_theta=2e6,
                  use_sliding_window=False, sliding_window=None, layer_types=None, no_rope_layers=None,
                  no_rope_layer_interval=4),
        constants={}, tensors=LLAMA.tensors,
        slides=lambda attributes, layer: not attributes["no_rope_layers"][layer],
    ),
    Family(
        "phi3", "Phi3ForCausalLM", "Phi3ForSequenceClassification",
        _defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, sliding_window=None, partial_rotary_factor=1.0,
                  original_max_position_embeddings=4096, resid_pdrop=0.0, embd_pdrop=0.0),
        constants={}, tensors=LLAMA.tensors, slides=MISTRAL.slides,
        fused=(
            Fused(LAYER + "self_attn.qkv_proj.weight",
                  tuple(LAYER + f"self_attn.{name}_proj.weight" for name in "qkv")),
            FUSED_GATE_AND_UP,
        ),
    ),
    Family(
        "glm4", "Glm4ForCausalLM", "Glm4ForSequenceClassification",
        _defaults(num_key_value_heads=2, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1.5625e-7,
                  attention_bias=True, partial_rotary_factor=0.5),
        constants={"attention.rope.interleaved": True},
        tensors=(
            *(EMBEDDINGS + MATRICES + BIASES + PRE_NORMS),
            Tensor(LAYER + "post_self_attn_layernorm.weight", "blocks.norms.attn_post", "D", "D"),
            Tensor(LAYER + "post_mlp_layernorm.weight", "blocks.norms.mlp_post", "D", "D"),
        ),
        fused=(FUSED_GATE_AND_UP,),
    ),
    Family(
        "granite", "GraniteForCausalLM", "",
        _defaults(embedding_multiplier=1.0, logits_scaling=1.0, residual_multiplier=1.0, attention_multiplier=1.0),
        constants={}, tensors=LLAMA.tensors,
    ),
    Family(
        "mixtral", "MixtralForCausalLM", "MixtralForSequenceClassification",
        _defaults(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, sliding_window=None,
                  num_local_experts=8, num_experts_per_tok=2, rope_theta=1e6),
        constants={"experts.renormalise": True},
        tensors=EMBEDDINGS + ATTENTION + expert_tensors("block_sparse_moe", "w1", "w3", "w2") + PRE_NORMS,
        slides=MISTRAL.slides,
    ),
    Family(
        "olmoe", "OlmoeForCausalLM", "",
        _defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8,
                  norm_topk_prob=False),
        constants={}, tensors=EMBEDDINGS + ATTENTION + EXPERTS + FULL_NORMS + PRE_NORMS,
    ),
    Family(
        "qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification",
        _defaults(max_position_embeddings=32768, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4,
                  moe_intermediate_size=1408, shared_expert_intermediate_size=5632, norm_topk_prob=False,
                  **_QWEN_WINDOWS),
        constants={},
        tensors=(
            *(EMBEDDINGS + ATTENTION + EXPERTS + _SHARED_EXPERT + BIASES + PRE_NORMS),
        ),
        slides=lambda attributes, layer: layer % 2 == 0 and layer < attributes["max_window_layers"],
        required={"qkv_bias": True},
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification",
        _defaults(max_position_embeddings=32768, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
                  moe_intermediate_size=768, norm_topk_prob=False, use_sliding_window=False, sliding_window=4096),
        constants={}, tensors=EMBEDDINGS + ATTENTION + EXPERTS + HEAD_NORMS + PRE_NORMS, slides=MISTRAL.slides,
    ),
    Family(
        "gpt_oss", "GptOssForCausalLM", "GptOssForSequenceClassification",
        _defaults(num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
                  sliding_window=128, layer_types=None, num_local_experts=128, num_experts_per_tok=4, swiglu_limit=7.0,
                  swiglu_alpha=1.702, rope_theta=150000.0,
                  rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                                "truncate": False}),
        constants={"attention.sinks": True, "experts.renormalise": True},
        tensors=(
            *(EMBEDDINGS + ATTENTION + BIASES),
            Tensor(LAYER + "self_attn.o_proj.bias", "blocks.attn.o_bias", "D", "D"),
            Tensor(LAYER + "self_attn.sinks", "blocks.attn.sinks", "N", "N"),
            Tensor(LAYER + "mlp.router.weight", "blocks.experts.router", "E D", "DE"),
            Tensor(LAYER + "mlp.router.bias", "blocks.experts.router_bias", "E", "E"),
            Tensor(LAYER + "mlp.experts.gate_proj", "blocks.experts.gate", "E D I", "EDI"),
            Tensor(LAYER + "mlp.experts.up_proj", "blocks.experts.up", "E D I", "EDI"),
            Tensor(LAYER + "mlp.experts.down_proj", "blocks.experts.down", "E I D", "EID"),
            Tensor(LAYER + "mlp.experts.gate_proj_bias", "blocks.experts.gate_bias", "E I", "EI"),
            Tensor(LAYER + "mlp.experts.up_proj_bias", "blocks.experts.up_bias", "E I", "EI"),
            Tensor(LAYER + "mlp.experts.down_proj_bias", "blocks.experts.down_bias", "E D", "ED"),
            *PRE_NORMS,
        ),
        slides=lambda attributes, layer: layer % 2 == 0, required={"attention_bias": True},
        fused=tuple(
            Fused(
                LAYER + f"mlp.experts.gate_up_proj{kind}",
                tuple(LAYER + f"mlp.experts.{name}_proj{kind}" for name in ("gate", "up")), axis, groups="I",
            )
            for kind, axis in (("", 2), ("_bias", 1))
        ),
    ),
    Family(
        "qwen3_next", "Qwen3NextForCausalLM", "Qwen3NextForSequenceClassification",
        _defaults(num_key_value_heads=2, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512,
                  shared_expert_intermediate_size=512, norm_topk_prob=True, **_HYBRID),
        constants=_HYBRID_CONSTANTS, tensors=(*_HYBRID_TENSORS, *EXPERTS, *_SHARED_EXPERT),
        fused=(FUSED_QUERIES, FUSED_CONV, _projections("qkvz", "qkvz", "P"), _projections("ba", "ba", "P")),
        **_HYBRID_LAYERS,
    ),
    Family(
        "qwen3_5_text", "Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification",
        _defaults(num_key_value_heads=4, **_QWEN3_5),
        constants=_HYBRID_CONSTANTS, tensors=(*_HYBRID_TENSORS, *MATRICES[4:]), fused=_QWEN3_5_FUSED,
        **_HYBRID_LAYERS, required={"attn_output_gate": True},
    ),
    Family(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", "",
        _defaults(num_key_value_heads=2, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512,
                  shared_expert_intermediate_size=512, intermediate_size=512, **_QWEN3_5),
        constants=_HYBRID_CONSTANTS | {"experts.renormalise": True},
        tensors=(*_HYBRID_TENSORS, *EXPERTS, *_SHARED_EXPERT), fused=_QWEN3_5_FUSED,
        **_HYBRID_LAYERS, required={"attn_output_gate": True},
    ),
    Family(
        "lfm2", "Lfm2ForCausalLM", "",
        _defaults(rms_norm_eps=..., norm_eps=1e-5, num_key_value_heads=8, max_position_embeddings=128000,
                  rope_theta=1e6, tie_word_embeddings=True, layer_types=None, full_attn_idxs=None, conv_L_cache=3,
                  block_auto_adjust_ff_dim=True, block_multiple_of=256, block_ffn_dim_multiplier=1.0),
        constants={},
        tensors=(
            *(EMBEDDINGS[0], dataclasses.replace(EMBEDDINGS[1], name="model.embedding_norm.weight"), EMBEDDINGS[2]),
            *ATTENTION[:3],
            Tensor(LAYER + "self_attn.out_proj.weight", "blocks.attn.o", "D NH", "NHD"),
            Tensor(LAYER + "self_attn.q_layernorm.weight", "blocks.attn.q_norm", "H", "H"),
            Tensor(LAYER + "self_attn.k_layernorm.weight", "blocks.attn.k_norm", "H", "H"),
            *(Tensor(LAYER + f"conv.in_proj.{name}", f"blocks.conv.{name}", "C D", "DC") for name in "bcx"),
            Tensor(LAYER + "conv.conv.weight", "blocks.conv.x_conv", "C 1 W", "CW"),
            Tensor(LAYER + "conv.out_proj.weight", "blocks.conv.o", "D C", "CD"),
            Tensor(LAYER + "feed_forward.w1.weight", "blocks.mlp.gate", "F D", "DF"),
            Tensor(LAYER + "feed_forward.w3.weight", "blocks.mlp.up", "F D", "DF"),
            Tensor(LAYER + "feed_forward.w2.weight", "blocks.mlp.down", "D F", "FD"),
            Tensor(LAYER + "operator_norm.weight", "blocks.norms.attn", "D", "D"),
            Tensor(LAYER + "ffn_norm.weight", "blocks.norms.mlp", "D", "D"),
        ),
        required={"block_use_swiglu": True, "use_pos_enc": True},
        spellings={"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings", "theta": "rope_theta",
                   "block_norm_eps": "norm_eps"},
        fused=(Fused(LAYER + "conv.in_proj.weight", tuple(LAYER + f"conv.in_proj.{name}" for name in "bcx")),),
        slides=lambda attributes, layer: layer not in (attributes["full_attn_idxs"] or (layer,)),
        recurrent=("conv", "conv"),
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", "DeepseekV3ForSequenceClassification",
        _defaults(num_key_value_heads=128, max_position_embeddings=4096, **_GROUPED, **_LATENT),
        **_LATENT_GROUPED,
    ),
    Family(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", "",
        _defaults(num_key_value_heads=20, max_position_embeddings=202752, rms_norm_eps=1e-5, mlp_layer_types=None,
                  **_FLASH),
        **_LATENT_GROUPED,
    ),
    Family(
        "glm4_moe", "Glm4MoeForCausalLM", "",
        _defaults(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, partial_rotary_factor=0.5,
                  attention_bias=False, use_qk_norm=False, **_GROUPED),
        **_GROUPED_FACTS, tensors=(*EMBEDDINGS, *ATTENTION, *BIASES, *HEAD_NORMS, *_GROUPED_TENSORS, *PRE_NORMS),
    ),
)  # fmt: skip
ALIASES = types.MappingProxyType({"kimi_k2": "deepseek_v3"})
"""Other names of a ``model_type``, of models whose code came with them."""
FAMILIES: Mapping[str, Family] = types.MappingProxyType({family.model_type: family for family in _ALL})


def family_of(model_type: Any) -> Family:
    """Return the family of a ``model_type``; InputError lists the known ones."""
    if model_type not in FAMILIES:
        raise InputError(f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


FLOAT32 = frozenset(("blocks.experts.choice_bias",))
"""Parameters that are float32 whatever the model's dtype is: probabilities of experts differ by less than a step of a
bfloat16 bias.
"""


def tensors_of(config: ModelConfig, scalar: bool = False) -> tuple[Tensor, ...]:
    """Return the tensors that a checkpoint of this model, a reward model if ``scalar``, holds: no LM head if tied."""
    absent = {"head"} if scalar or config.embeddings.tied else set()
    absent |= set() if config.attention.biased else {tensor.path for tensor in BIASES}
    other = config.global_attention
    absent |= {"blocks.global_attn.v"} if other is not None and other.keys_as_values else set()
    absent |= set() if config.per_layer_width else {"blocks.norms.per_layer"}
    absent |= set() if config.attention.normed else {tensor.path for tensor in HEAD_NORMS}
    tensors = tuple(tensor for tensor in FAMILIES[config.family].tensors if tensor.path not in absent)
    tensors = tuple(tensor for tensor in tensors if layers_of(tensor, config) or not tensor.layered)
    tensors = tuple(tensor for tensor in tensors if config.per_layer_width or not {"T", "l"} & {*tensor.axes})
    if config.attention.latent is not None:
        plain = config.attention.latent.query_rank == 0
        absent_queries = LATENT_ATTENTION[1:4] if plain else LATENT_ATTENTION[:1]
        tensors = tuple(tensor for tensor in tensors if tensor not in absent_queries)
    # The tensor that replaces the LM head in a reward model.
    return (*tensors, Tensor("score.weight", "scalar", "1 D", "D")) if scalar else tensors


def our_shape(tensor: Tensor, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of our parameter, with a leading layer axis if every layer has one."""
    sizes = axis_sizes(config)
    layers = (len(layers_of(tensor, config)),) if tensor.layered else ()
    return layers + tuple(sizes[letter] for letter in tensor.axes)


def layers_of(tensor: Tensor, config: ModelConfig) -> tuple[int, ...]:
    """Return the layers that have a tensor, over which ours is stacked; none for one outside the layers."""
    return config.layers_with(tensor.path.split(".")[1]) if tensor.layered else ()


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the size of each axis letter."""
    attention = config.attention
    sizes = {
        "V": config.vocab_size, "D": config.width, "F": config.mlp_width, "L": config.layers,
        "N": attention.heads, "K": attention.kv_heads, "H": attention.head_dim, "1": 1,
    }  # fmt: skip
    sizes |= {"T": config.per_layer_width, "l": config.layers * config.per_layer_width, "O": config.shared_kv_mlp_width}
    if config.global_attention is not None:
        sizes |= {"J": config.global_attention.kv_heads, "G": config.global_attention.head_dim}
    if config.experts is not None:
        sizes |= {"E": config.experts.count, "I": config.expert_width, "S": config.experts.shared_width}
    if (latent := attention.latent) is not None:
        sizes |= {"Q": latent.query_rank, "Z": latent.rank, "A": latent.plain_dim, "B": latent.rotary_dim}
        sizes |= {"U": latent.value_dim}
    if config.recurrent is not None:
        sizes |= {"P": config.recurrent.key_heads, "X": config.recurrent.key_dim, "C": config.width}
        sizes |= {"M": config.recurrent.value_heads, "Y": config.recurrent.value_dim, "W": config.recurrent.kernel}
    return sizes
