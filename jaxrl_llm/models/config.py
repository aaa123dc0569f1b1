"""The architecture of a decoder as hashable values; families.py fills them from config.json."""

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Annotated, Any

from jaxrl_llm.errors import require
from jaxrl_llm.system.setting import Choice, Range, Setting


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Llama-3's frequency rescaling for long contexts (Llama-3.1 model card)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclasses.dataclass(frozen=True)
class Yarn:
    """YaRN's rescaling for long contexts (arXiv 2309.00071).

    Attributes:
      factor: how many times the original length is reached; fast frequencies stay, slow ones are divided by it.
      original_positions: the longest sequence before.
      fast: turns over that length from which on a frequency stays; ``slow``: turns up to which it is divided.
      magnitude: factor on rotated queries and keys.
      truncate: the two bounds are rounded outwards to whole frequencies.
      all_dims: by which scores grow with the length in latent attention, ``mscale_all_dim``; 0 for none.
    """

    factor: float
    original_positions: int
    fast: float = 32.0
    slow: float = 1.0
    magnitude: float = 1.0
    truncate: bool = True
    all_dims: float = 0.0


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary position embedding (arXiv 2104.09864).

    Attributes:
      theta: base of the frequencies.
      scaling: Llama-3 or YaRN rescaling, a float (linear: positions divided by it), or None.
      local_theta: base used by the layers that have a window, unscaled; None means that of all, scaled.
      max_positions: the longest sequence the model was made for.
      dims: numbers of a head that are rotated, its first ones; 0 for all.
      interleaved: neighbouring numbers are rotated together, in place of those half a head apart.
      rotated_pairs: number of pairs that are rotated, those with the largest frequencies; 0 for all (Gemma 4).
      layers: whether each layer rotates; () means all do.
    """

    theta: float = 10000.0
    scaling: Llama3Rope | Yarn | float | None = None
    local_theta: float | None = None
    max_positions: int = 2048
    dims: int = 0
    interleaved: bool = False
    rotated_pairs: int = 0
    layers: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv 2405.04434): keys and values are products of a latent vector of each token,
    and all heads share the rotated part of their keys.

    Attributes:
      rank: Z, numbers of the latent vector.
      query_rank: Q, of that of the queries; 0 for plain queries.
      plain_dim: A, numbers of a query and key that are not rotated; ``rotary_dim``: B, that are.
      value_dim: U, of a value.
    """

    rank: int
    query_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """Shape and rules of the attention of every layer.

    Attributes:
      heads: N, query heads.
      kv_heads: K, key/value heads; divides N.
      head_dim: H.
      rope: see ``Rope``.
      scale: factor on the scores; None means H ** -0.5.
      softcap: scores become softcap * tanh(scores / softcap); None means off.
      windows: sliding window of each layer in tokens, 0 for full attention; () means all full.
      sinks: each head has a score of its own that takes part in the softmax and has no value (GPT-OSS).
      gated: what each head returns is multiplied by the sigmoid of a projection of its own (Qwen3-Next).
      biased: queries, keys and values have biases, in a family that has them.
      normed: queries and keys are normalised, in a family that has weights for it.
      latent: keys and values come from a latent vector, which is what the cache holds; None: the cache holds them.
      normed_values: values are normalised, without weights (Gemma 4).
      keys_as_values: values are the keys before their norm and rotation (Gemma 4).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope = Rope()
    scale: float | None = None
    softcap: float | None = None
    windows: tuple[int, ...] = ()
    sinks: bool = False
    gated: bool = False
    biased: bool = True
    normed: bool = True
    latent: Latent | None = None
    normed_values: bool = False
    keys_as_values: bool = False

    @property
    def factor(self) -> float:
        """The factor on the scores."""
        scaling = self.rope.scaling
        growth = 1.0
        if isinstance(scaling, Yarn) and scaling.all_dims:
            growth = 0.1 * scaling.all_dims * math.log(max(scaling.factor, 1.0)) + 1.0
        return growth**2 * (self.head_dim**-0.5 if self.scale is None else self.scale)

    @property
    def cached(self) -> tuple[int, int, int]:
        """Return the heads of the cache, and the widths of its keys and values; 0 where values are a part of keys."""
        if self.latent is None:
            return self.kv_heads, self.head_dim, self.head_dim
        return 1, self.latent.rank + self.latent.rotary_dim, 0


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """The layers that have a state of fixed size in place of attention.

    Attributes:
      kind: "delta", the gated delta rule (arXiv 2412.06464), or "conv", a gated convolution alone (LFM2).
      layers: whether each layer is recurrent; the others have attention.
      kernel: W, tokens that a causal convolution of each channel reads, the newest included.
      key_heads: P, of queries and keys; ``value_heads``: M, a multiple of P.
      key_dim: X, of a query and a key; ``value_dim``: Y. A head's state is [X, Y].
      strength: the most that a token may replace of what the state holds under its key; 2 turns it around (OLMo).
      norm_eps: ``Norm.eps`` of the heads' outputs; 0 takes that of the model.
    """

    kind: str
    layers: tuple[bool, ...]
    kernel: int
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    strength: float = 1.0
    norm_eps: float = 0.0


@dataclasses.dataclass(frozen=True)
class Norm:
    """RMS normalisation, ``x / rms(x) * weight``; ``eps`` is added to the mean square. ``plus_one``: the weight is
    stored less 1 (Gemma).
    """

    eps: float = 1e-5
    plus_one: bool = False


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Special token ids: any of ``eos`` ends a completion."""

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


RESIZED_PARTS = types.MappingProxyType(
    {"global_attn": "attn", "shared_kv_attn": "attn", "shared_kv_global_attn": "attn", "wide_mlp": "mlp"}
)
"""Parts of layers that are another part with other sizes."""


def matrix_role(matrix: str) -> str:
    """Return the name, in ``ADAPTABLE``, of a matrix ``part/name``."""
    part, _, name = matrix.partition("/")
    return f"{RESIZED_PARTS.get(part, part)}/{name}"


ADAPTED = (
    *("attn/q", "attn/k", "attn/v", "attn/o", "mlp/gate", "mlp/up", "mlp/down"),
    *("delta/q", "delta/k", "delta/v", "delta/z", "delta/o", "conv/b", "conv/c", "conv/x", "conv/o"),
    *("shared/gate", "shared/up", "shared/down", "attn/q_latent", "attn/latent", "attn/k_rotary"),
    *("per_layer/gate", "per_layer/projection"),
)
"""The matrices of a layer that an adapter adapts unless its settings say otherwise."""
ADAPTABLE = (*ADAPTED, "attn/gate", "experts/gate", "experts/up", "experts/down")
"""The matrices of a layer that an adapter may adapt."""
PACKED: Mapping[str, float] = types.MappingProxyType({"int8": 1.0, "fp8": 1.0, "nf4": 0.516, "mxfp4": 0.532})
"""The forms in which a frozen model's matrices are packed, and the bytes of a number in each."""


@dataclasses.dataclass(frozen=True)
class Lora(Setting):
    """Low-rank adapters in place of training the model itself (arXiv 2106.09685).

    Attributes:
      rank: r; 0 trains the whole model.
      alpha: the adapters' product is multiplied by alpha / rank.
      targets: the matrices of each layer that are adapted, of ``ADAPTABLE``; of experts only those named here.
      base: the frozen model's weights: "bf16", "f32", or matrices of the layers packed (``models.quantised``) as
        "int8" (by output channel), "fp8", "nf4" (4.1 bits, as in QLoRA) or "mxfp4" (4.25 bits; of a model with experts
        only theirs, as in GPT-OSS). What a checkpoint holds packed in the same way is kept bit for bit. Sampler and
        learner read the same ones.
      merged: sampler and learner form ``W + alpha / rank a b``, rounded to the type that they compute in, where
        otherwise ``x W + alpha / rank (x a) b`` is computed, in which no change is too small to count.
    """

    rank: Annotated[int, Range("[0, inf]", "0 trains the whole model")] = 0
    alpha: Annotated[float, Range("(0, inf]")] = 32.0
    targets: tuple[str, ...] = ADAPTED
    base: Annotated[str, Choice("f32", "bf16", *PACKED, unknown=True)] = "bf16"
    merged: bool = False

    @property
    def read_dtype(self) -> str:
        """Return the dtype in which the frozen model is read."""
        return "float32" if self.base == "f32" else "bfloat16"

    @property
    def packed(self) -> bool:
        """Return whether matrices of the frozen model are packed."""
        return self.rank > 0 and self.base in PACKED

    def packs(self, matrix: str, config: "ModelConfig") -> bool:
        """Return whether a matrix ``part/name`` of the layers is packed."""
        kinds = matrix.startswith("experts/") or self.base != "mxfp4" or config.experts is None
        return matrix_role(matrix) in ADAPTABLE and kinds

    def check(self, run: Any, where: str) -> None:
        """Refuse matrices that no layer has, or that are listed twice, and a packed base without adapters."""
        require(
            self.rank > 0 or self.base not in PACKED,
            f"{where}base {self.base} is of a frozen model below adapters, and {where}rank 0 trains all of it: set "
            f"{where}rank, or leave {where}base out",
        )
        adaptable = bool(self.targets) and set(self.targets) <= set(ADAPTABLE)
        require(
            adaptable and len(set(self.targets)) == len(self.targets),
            f"{where}targets must be some of {', '.join(ADAPTABLE)}, each once; got "
            f"{', '.join(self.targets) or 'none'}",
        )


@dataclasses.dataclass(frozen=True)
class Embeddings:
    """Token embeddings, multiplied by ``scale`` (Gemma: sqrt(D)), and the LM head, the same if ``tied``. Logits are
    divided by ``logit_divisor`` (Granite), and become c * tanh(logits / c) with c = ``logit_softcap``; None means
    off.
    """

    tied: bool = False
    scale: float = 1.0
    logit_softcap: float | None = None
    logit_divisor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Experts:
    """Experts: MLPs in place of one in every layer, of which a router picks a few for each token (arXiv 2101.03961).

    Attributes:
      count: E.
      active: k, experts of a token: those with the largest of its E router probabilities.
      width: I, of an expert's MLP; 0 takes ``ModelConfig.mlp_width``.
      renormalise: the probabilities of the k experts, which weigh their outputs, are divided by their sum.
      shared_width: of a further MLP that computes every token; 0 for none. In families with a gate for it its sigmoid
        weighs that MLP.
      dense_layers: number of the first layers, which have an MLP in place of experts; None in families without.
      sigmoid: probabilities are sigmoids of each expert's score; experts are chosen by their sum with a bias that is
        not trained (arXiv 2408.15664).
      groups: experts are chosen from this many groups of equal size, of which each token takes ``active_groups``, those
        with the largest sum of their best two.
      scaling: factor on the weights.
      beside_mlp: each layer has an MLP too, to which the experts' output is added (Gemma 4).
      limit: the gate is at most this, and ``up`` is between its negative and it: GPT-OSS's
        ``gate * sigmoid(alpha * gate) * (up + 1)``; 0 for the plain ``activation(gate) * up``.
      alpha: see ``limit``.
      bits: of a probability's mantissa by which experts are chosen, 7 as in bfloat16; 0 for all. Weights have them all.
    """

    count: int
    active: int
    width: int = 0
    renormalise: bool = False
    shared_width: int = 0
    limit: float = 0.0
    alpha: float = 1.702
    bits: int = 0
    dense_layers: int | None = None
    sigmoid: bool = False
    groups: int = 1
    active_groups: int = 1
    scaling: float = 1.0
    beside_mlp: bool = False


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Attributes:
      family: key of ``families.FAMILIES``, whose tensors say which biases and norms a layer has.
      vocab_size: V.
      width: D.
      layers: L.
      mlp_width: F.
      activation: "silu" or "gelu_tanh".
      experts: of every layer, in place of the MLP; None for a dense model.
      recurrent: layers without attention; None where all have it.
      global_attention: of the layers without a window, where its sizes are others (Gemma 4); None: ``attention``.
      shared_kv_layers: number of the last layers, which have queries alone, and attend to the keys and values of the
        last layer of their kind before them (Gemma 4); ``shared_kv_mlp_width``: of their MLPs, 0 takes ``mlp_width``.
      per_layer_width: T, width of the token embeddings that each layer has of its own (Gemma 4); 0 for none.
      residual_scale: factor on what attention and MLP add to the residual stream (Granite).
    """

    family: str
    vocab_size: int
    width: int
    layers: int
    mlp_width: int
    attention: Attention
    norm: Norm = Norm()
    activation: str = "silu"
    embeddings: Embeddings = Embeddings()
    tokens: TokenIds = TokenIds()
    experts: Experts | None = None
    recurrent: Recurrent | None = None
    global_attention: Attention | None = None
    shared_kv_layers: int = 0
    shared_kv_mlp_width: int = 0
    per_layer_width: int = 0
    residual_scale: float = 1.0

    @property
    def state_part(self) -> str:
        """Return the part of the layers that have a state in place of attention; "" where none has."""
        return "" if self.recurrent is None else self.recurrent.kind

    def layers_with(self, part: str) -> tuple[int, ...]:
        """Return the layers that have a part (``blocks.<part>`` of the parameters), over which it is stacked."""
        layers = range(self.layers)
        first = None if self.experts is None else self.experts.dense_layers
        if part in ("mlp", "wide_mlp") and self.shared_kv_mlp_width:
            return tuple(i for i in layers if self._shares_kv(i) == (part == "wide_mlp"))
        if first is not None and part in ("mlp", "shared", "experts"):
            return tuple(layers[:first] if part == "mlp" else layers[first:])
        if self.global_attention is not None and RESIZED_PARTS.get(part, part) == "attn":
            kind = ("shared_kv_" in part, "global_" in part)
            return tuple(i for i in layers if (self._shares_kv(i), not self.attention.windows[i]) == kind)
        if part in RESIZED_PARTS or (part == "experts" and self.experts is None):
            return ()
        kinds = {"attn": False, "attn_norms": False, self.state_part: True, "state_norms": True}
        if self.recurrent is None or part not in kinds:
            return tuple(layers)
        return tuple(i for i, recurrent in enumerate(self.recurrent.layers) if recurrent == kinds[part])

    def _shares_kv(self, layer: int) -> bool:
        return layer >= self.layers - self.shared_kv_layers

    def attention_of(self, part: str) -> Attention:
        """Return the attention of the layers with one of the parts ``attn``, ``global_attn``, ..."""
        if self.global_attention is None:
            return self.attention
        own = dataclasses.replace(self.attention, windows=tuple(filter(None, self.attention.windows)))
        return self.global_attention if "global_" in part else own

    @property
    def widest_attention(self) -> Attention:
        """Return the attention with the widest heads."""
        wide = self.global_attention
        return wide if wide is not None and wide.head_dim > self.attention.head_dim else self.attention

    @property
    def cached_parts(self) -> tuple[str, ...]:
        """Return the parts whose keys and values a cache holds."""
        return ("attn",) if self.global_attention is None else ("attn", "global_attn")

    @property
    def cached_heads(self) -> tuple[int, ...]:
        """Return the numbers of heads of keys and values in a cache."""
        return tuple({self.attention_of(part).cached[0]: None for part in self.cached_parts})

    @property
    def expert_width(self) -> int:
        """Return I, the width of an expert's MLP; of the MLP in a dense model."""
        return self.mlp_width if self.experts is None else self.experts.width or self.mlp_width

    @property
    def active_width(self) -> int:
        """Return the width of all MLPs of a layer that compute one token, its mean where they differ."""
        wide = self.shared_kv_layers * (self.shared_kv_mlp_width or self.mlp_width)
        mlp = (wide + (self.layers - self.shared_kv_layers) * self.mlp_width) // self.layers
        if self.experts is None:
            return mlp
        return self.experts.active * self.expert_width + self.experts.shared_width + self.experts.beside_mlp * mlp


@dataclasses.dataclass(frozen=True)
class ComputeOptions:
    """Choices that change speed and memory, and results by rounding only. No field is read from the machine that traces
    a program: a program for a TPU can be compiled without a TPU.

    Attributes:
      dtype: of matrix products and activations.
      remat: "none", "full", "dots" or "offload": what the backward pass recomputes (``decoder.REMAT``).
      attention: "xla", "splash", "triton" or "cudnn".
      unroll: every layer has its own part of the program; otherwise one loop body serves all.
      interpret: XLA computes the attention of another platform's kernels on this one, slowly: for tests.
      compiler: options of the device's compiler by name (``sharding.mesh``).
      experts: how experts are computed, of ``experts.FORMS``.
      head_chunk: positions whose logits are in memory at one time; each such chunk of the backward pass reads and
        writes the whole gradient of the LM head.
    """

    dtype: str = "float32"
    remat: str = "none"
    attention: str = "xla"
    unroll: bool = False
    interpret: bool = False
    compiler: tuple[tuple[str, bool | int], ...] = ()
    experts: str = "blocks"
    head_chunk: int = 512
