"""The tensors of checkpoints: the names of each, and their places in our parameters; families.py combines them."""

import dataclasses
from collections.abc import Callable

import numpy as np


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
class StoredTensor:
    """A tensor that is read on demand.

    Attributes:
      shape: shape of the whole tensor.
      part: reads a tuple of slices (start and stop, one for each dimension) as a floating NumPy array.
    """

    shape: tuple[int, ...]
    part: Callable[[tuple[slice, ...]], np.ndarray]

    def read(self) -> np.ndarray:
        """Read the whole tensor."""
        return self.part(tuple(slice(0, size) for size in self.shape))


@dataclasses.dataclass(frozen=True)
class Fused:
    """A tensor of a checkpoint that holds several of ours; reading splits it, and writing joins it.

    Attributes:
      name: Hugging Face's name, with ``{}`` for the layer.
      parts: the names of the ``Tensor`` values that it holds.
      axis: of the stored tensor, along which they follow each other.
      alternating: they alternate along it one by one, in place of one after the other.
    """

    name: str
    parts: tuple[str, ...]
    axis: int = 0
    alternating: bool = False


ENDS = (
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
SHARED_EXPERT = (
    Tensor(LAYER + "mlp.shared_expert.gate_proj.weight", "blocks.mlp.gate", "S D", "DS"),
    Tensor(LAYER + "mlp.shared_expert.up_proj.weight", "blocks.mlp.up", "S D", "DS"),
    Tensor(LAYER + "mlp.shared_expert.down_proj.weight", "blocks.mlp.down", "D S", "SD"),
    Tensor(LAYER + "mlp.shared_expert_gate.weight", "blocks.experts.shared_gate", "1 D", "D"),
)
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
TWO_NORMS = (
    *PRE_NORMS,
    Tensor(LAYER + "post_self_attn_layernorm.weight", "blocks.norms.attn_post", "D", "D"),
    Tensor(LAYER + "post_mlp_layernorm.weight", "blocks.norms.mlp_post", "D", "D"),
)
CLAMPED_EXPERTS = (
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
)
"""What GPT-OSS has besides matrices, biases and norms of attention: sinks, and experts with biases."""

FUSED_HEADS = Fused(
    LAYER + "self_attn.qkv_proj.weight", tuple(LAYER + f"self_attn.{name}_proj.weight" for name in "qkv")
)
FUSED_GATE_AND_UP = Fused(
    LAYER + "mlp.gate_up_proj.weight", tuple(LAYER + f"mlp.{name}_proj.weight" for name in ("gate", "up"))
)
FUSED_EXPERTS = tuple(
    Fused(
        LAYER + f"mlp.experts.gate_up_proj{kind}",
        tuple(LAYER + f"mlp.experts.{name}_proj{kind}" for name in ("gate", "up")), axis, alternating=True,
    )
    for kind, axis in (("", 2), ("_bias", 1))
)  # fmt: skip
