"""The model families: how each one's config.json and tensor names map to ours, and back.

A family is one value in ``FAMILIES``, keyed by Hugging Face's ``model_type``. Every fact is declared once: the same
tables serve reading and writing. To add a family, add one entry (and new axes or rules only for new features of the
decoder).

Sources: the ``configuration_*`` and ``modeling_*`` files of transformers for each family.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.config import ModelConfig

REQUIRED = object()
"""Marks attributes in ``Family.defaults`` that config.json must have."""


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One named tensor of a checkpoint and its place in our parameters.

    Attributes:
      name: Hugging Face's name; a first ``{}`` stands for the layer, a second one for the expert. Such tensors are
        stacked over L, or over L and E, in ours.
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
class Family:
    """The facts that all models of one ``model_type`` share.

    Attributes:
      model_type: Hugging Face's key.
      architecture: the class that transformers loads.
      classifier: the class that transformers loads for a reward model; "" where it has none.
      defaults: every attribute that config.json may set and the model obeys, with the value that holds where it
        is left out (``REQUIRED``: it must be there). Any other attribute must be harmless or switched off.
      constants: fields of ModelConfig, dotted, that every member shares.
      tensors: the tensors of a checkpoint.
      slides: (attributes, layer) -> whether the layer has a window, where ``layer_types`` is missing.
      scaled_embedding: embeddings are multiplied by sqrt(D).
      default_theta: rope base where config.json has none.
      local_theta: rope base of the windowed layers; None where all layers share one base.
      required: further attributes that must have the value here, since the tensors imply it.
    """

    model_type: str
    architecture: str
    classifier: str
    defaults: Mapping[str, Any]
    constants: Mapping[str, Any]
    tensors: tuple[Tensor, ...]
    slides: Callable[[Mapping[str, Any], int], bool] = lambda attributes, layer: False
    scaled_embedding: bool = False
    default_theta: float = 10000.0
    local_theta: float | None = None
    required: Mapping[str, Any] = dataclasses.field(default_factory=dict)


FIELDS = types.MappingProxyType(
    {
        "vocab_size": "vocab_size",
        "hidden_size": "width",
        "num_hidden_layers": "layers",
        "intermediate_size": "mlp_width",
        "tie_word_embeddings": "embeddings.tied",
        "final_logit_softcapping": "embeddings.logit_softcap",
        "rms_norm_eps": "norm.eps",
        "num_attention_heads": "attention.heads",
        "num_key_value_heads": "attention.kv_heads",
        "head_dim": "attention.head_dim",
        "max_position_embeddings": "attention.rope.max_positions",
        "attn_logit_softcapping": "attention.softcap",
        "num_experts": "experts.count",
        "num_local_experts": "experts.count",
        "num_experts_per_tok": "experts.active",
        "moe_intermediate_size": "experts.width",
        "norm_topk_prob": "experts.renormalise",
        "shared_expert_intermediate_size": "experts.shared_width",
    }
)
"""Attributes of config.json that are fields of ModelConfig under another name."""

ACTIVATIONS = types.MappingProxyType({"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"})


def _defaults(activation: tuple[str, str] = ("hidden_act", "silu"), **changes: Any) -> Mapping[str, Any]:
    shared = dict.fromkeys(
        ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"), REQUIRED
    )
    shared |= {"num_key_value_heads": None, "head_dim": None, "max_position_embeddings": 2048}
    shared |= {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, activation[0]: activation[1]}
    return types.MappingProxyType(shared | changes)


_QWEN_WINDOWS: dict[str, Any] = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = {
    "num_key_value_heads": 4, "head_dim": 256, "activation": ("hidden_activation", "gelu_pytorch_tanh"),
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
}  # fmt: skip

_ENDS = (
    Tensor("model.embed_tokens.weight", "embed", "V D", "VD"),
    Tensor("model.norm.weight", "final_norm", "D", "D"),
    Tensor("lm_head.weight", "head", "V D", "DV"),
)
_LAYER = "model.layers.{}."
_ATTENTION = (
    Tensor(_LAYER + "self_attn.q_proj.weight", "blocks.attn.q", "NH D", "DNH"),
    Tensor(_LAYER + "self_attn.k_proj.weight", "blocks.attn.k", "KH D", "DKH"),
    Tensor(_LAYER + "self_attn.v_proj.weight", "blocks.attn.v", "KH D", "DKH"),
    Tensor(_LAYER + "self_attn.o_proj.weight", "blocks.attn.o", "D NH", "NHD"),
)
_MATRICES = (
    *_ATTENTION,
    Tensor(_LAYER + "mlp.gate_proj.weight", "blocks.mlp.gate", "F D", "DF"),
    Tensor(_LAYER + "mlp.up_proj.weight", "blocks.mlp.up", "F D", "DF"),
    Tensor(_LAYER + "mlp.down_proj.weight", "blocks.mlp.down", "D F", "FD"),
)


def _experts(block: str, gate: str, up: str, down: str) -> tuple[Tensor, ...]:
    """Return the tensors of a router and its experts, named so below ``block`` of a layer."""
    names = {"gate": (gate, "I D", "EDI"), "up": (up, "I D", "EDI"), "down": (down, "D I", "EID")}
    return (
        Tensor(f"{_LAYER}{block}.gate.weight", "blocks.experts.router", "E D", "DE"),
        *(
            Tensor(f"{_LAYER}{block}.experts.{{}}.{name}.weight", f"blocks.experts.{ours}", stored, axes)
            for ours, (name, stored, axes) in names.items()
        ),
    )


_EXPERTS = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_SHARED_EXPERT = (
    Tensor(_LAYER + "mlp.shared_expert.gate_proj.weight", "blocks.mlp.gate", "S D", "DS"),
    Tensor(_LAYER + "mlp.shared_expert.up_proj.weight", "blocks.mlp.up", "S D", "DS"),
    Tensor(_LAYER + "mlp.shared_expert.down_proj.weight", "blocks.mlp.down", "D S", "SD"),
    Tensor(_LAYER + "mlp.shared_expert_gate.weight", "blocks.experts.shared_gate", "1 D", "D"),
)
_BIASES = (
    Tensor(_LAYER + "self_attn.q_proj.bias", "blocks.attn.q_bias", "NH", "NH"),
    Tensor(_LAYER + "self_attn.k_proj.bias", "blocks.attn.k_bias", "KH", "KH"),
    Tensor(_LAYER + "self_attn.v_proj.bias", "blocks.attn.v_bias", "KH", "KH"),
)
_HEAD_NORMS = (
    Tensor(_LAYER + "self_attn.q_norm.weight", "blocks.attn.q_norm", "H", "H"),
    Tensor(_LAYER + "self_attn.k_norm.weight", "blocks.attn.k_norm", "H", "H"),
)
_FULL_NORMS = (
    Tensor(_LAYER + "self_attn.q_norm.weight", "blocks.attn.q_norm", "NH", "NH"),
    Tensor(_LAYER + "self_attn.k_norm.weight", "blocks.attn.k_norm", "KH", "KH"),
)
_PRE_NORMS = (
    Tensor(_LAYER + "input_layernorm.weight", "blocks.norms.attn", "D", "D"),
    Tensor(_LAYER + "post_attention_layernorm.weight", "blocks.norms.mlp", "D", "D"),
)
_POST_NORMS = (
    Tensor(_LAYER + "post_attention_layernorm.weight", "blocks.norms.attn_post", "D", "D"),
    Tensor(_LAYER + "post_feedforward_layernorm.weight", "blocks.norms.mlp_post", "D", "D"),
)
_SANDWICH_NORMS = (
    Tensor(_LAYER + "input_layernorm.weight", "blocks.norms.attn", "D", "D"),
    Tensor(_LAYER + "pre_feedforward_layernorm.weight", "blocks.norms.mlp", "D", "D"),
    *_POST_NORMS,
)

LLAMA = Family(
    "llama", "LlamaForCausalLM", "LlamaForSequenceClassification", _defaults(),
    constants={}, tensors=_ENDS + _MATRICES + _PRE_NORMS,
)  # fmt: skip
MISTRAL = Family(
    "mistral", "MistralForCausalLM", "MistralForSequenceClassification",
    _defaults(num_key_value_heads=8, max_position_embeddings=131072, sliding_window=4096),
    constants={}, tensors=_ENDS + _MATRICES + _PRE_NORMS, slides=lambda attributes, layer: True,
)  # fmt: skip
QWEN2 = Family(
    "qwen2", "Qwen2ForCausalLM", "Qwen2ForSequenceClassification",
    _defaults(max_position_embeddings=32768, num_key_value_heads=32, **_QWEN_WINDOWS),
    constants={}, tensors=_ENDS + _MATRICES + _BIASES + _PRE_NORMS,
    slides=lambda attributes, layer: layer >= attributes["max_window_layers"],
)  # fmt: skip
QWEN3 = Family(
    "qwen3", "Qwen3ForCausalLM", "Qwen3ForSequenceClassification",
    _defaults(max_position_embeddings=32768, num_key_value_heads=32, head_dim=128, **_QWEN_WINDOWS),
    constants={}, tensors=_ENDS + _MATRICES + _HEAD_NORMS + _PRE_NORMS, slides=QWEN2.slides,
)  # fmt: skip
GEMMA2 = Family(
    "gemma2", "Gemma2ForCausalLM", "Gemma2ForSequenceClassification",
    _defaults(**_GEMMA, max_position_embeddings=8192, attn_logit_softcapping=50.0, final_logit_softcapping=30.0),
    constants={"norm.plus_one": True, "norm.placement": "both"},
    tensors=_ENDS + _MATRICES + _SANDWICH_NORMS, slides=lambda attributes, layer: layer % 2 == 0, scaled_embedding=True,
)  # fmt: skip
GEMMA3 = Family(
    "gemma3_text", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification",
    _defaults(**_GEMMA, max_position_embeddings=131072, attn_logit_softcapping=None, final_logit_softcapping=None,
              sliding_window_pattern=6),
    constants={"norm.plus_one": True, "norm.placement": "both"},
    tensors=_ENDS + _MATRICES + _HEAD_NORMS + _SANDWICH_NORMS, scaled_embedding=True,
    slides=lambda attributes, layer: (layer + 1) % attributes["sliding_window_pattern"] != 0,
    default_theta=1e6, local_theta=1e4,
)  # fmt: skip
OLMO2 = Family(
    "olmo2", "Olmo2ForCausalLM", "Olmo2ForSequenceClassification", _defaults(rms_norm_eps=1e-5),
    constants={"norm.placement": "post"},
    tensors=_ENDS + _MATRICES + _FULL_NORMS + _POST_NORMS,
)  # fmt: skip

MIXTRAL = Family(
    "mixtral", "MixtralForCausalLM", "MixtralForSequenceClassification",
    _defaults(num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5, sliding_window=None,
              num_local_experts=8, num_experts_per_tok=2),
    constants={"experts.renormalise": True},
    tensors=_ENDS + _ATTENTION + _experts("block_sparse_moe", "w1", "w3", "w2") + _PRE_NORMS,
    slides=MISTRAL.slides, default_theta=1e6,
)  # fmt: skip
OLMOE = Family(
    "olmoe", "OlmoeForCausalLM", "",
    _defaults(max_position_embeddings=4096, rms_norm_eps=1e-5, num_experts=64, num_experts_per_tok=8,
              norm_topk_prob=False),
    constants={}, tensors=_ENDS + _ATTENTION + _EXPERTS + _FULL_NORMS + _PRE_NORMS,
)  # fmt: skip
QWEN2_MOE = Family(
    "qwen2_moe", "Qwen2MoeForCausalLM", "Qwen2MoeForSequenceClassification",
    _defaults(max_position_embeddings=32768, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4,
              moe_intermediate_size=1408, shared_expert_intermediate_size=5632, norm_topk_prob=False, **_QWEN_WINDOWS),
    constants={}, tensors=_ENDS + _ATTENTION + _EXPERTS + _SHARED_EXPERT + _BIASES + _PRE_NORMS,
    slides=lambda attributes, layer: layer % 2 == 0 and layer < attributes["max_window_layers"],
    required={"qkv_bias": True},
)  # fmt: skip
QWEN3_MOE = Family(
    "qwen3_moe", "Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification",
    _defaults(max_position_embeddings=32768, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
              moe_intermediate_size=768, norm_topk_prob=False, use_sliding_window=False, sliding_window=4096),
    constants={}, tensors=_ENDS + _ATTENTION + _EXPERTS + _HEAD_NORMS + _PRE_NORMS, slides=MISTRAL.slides,
)  # fmt: skip

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, OLMO2, MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE)
FAMILIES: Mapping[str, Family] = types.MappingProxyType({family.model_type: family for family in _ALL})


def family_of(model_type: Any) -> Family:
    """Return the family of a ``model_type``; InputError lists the known ones."""
    if model_type not in FAMILIES:
        raise InputError(f"model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}")
    return FAMILIES[model_type]


SCORE = Tensor("score.weight", "scalar", "1 D", "D")
"""The tensor that replaces the LM head in a reward model."""


def tensors_of(config: ModelConfig, scalar: bool = False) -> tuple[Tensor, ...]:
    """Return the tensors that a checkpoint of this model holds; tied models have no LM head of their own.

    ``scalar``: it is a reward model.
    """
    headless = scalar or config.embeddings.tied
    named = tuple(t for t in FAMILIES[config.family].tensors if not (headless and t.path == "head"))
    return (*named, SCORE) if scalar else named


def our_shape(tensor: Tensor, config: ModelConfig) -> tuple[int, ...]:
    """Return the shape of our parameter, with a leading layer axis if every layer has one."""
    sizes = axis_sizes(config)
    return ((config.layers,) if tensor.layered else ()) + tuple(sizes[letter] for letter in tensor.axes)


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the size of each axis letter."""
    attention = config.attention
    sizes = {
        "V": config.vocab_size, "D": config.width, "F": config.mlp_width, "L": config.layers,
        "N": attention.heads, "K": attention.kv_heads, "H": attention.head_dim, "1": 1,
    }  # fmt: skip
    if config.experts is not None:
        sizes |= {"E": config.experts.count, "I": config.expert_width, "S": config.experts.shared_width}
    return sizes
