"""A decoder-only transformer as one immutable value, and its FLOPs; training and sampling share it. It
is a JAX pytree with a trainable array of one floating dtype at each leaf; nothing is assigned after ``__init__``.
Layers are stacked on a leading axis L and run by ``lax.scan``.
"""

import collections
import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.ad_checkpoint import checkpoint_name

from jaxrl_llm.models import experts, layers, recurrent
from jaxrl_llm.models.config import ADAPTABLE, ComputeOptions, ModelConfig, Norm, matrix_role
from jaxrl_llm.models.experts import Matrices
from jaxrl_llm.models.families import FLOAT32, our_shape, tensors_of
from jaxrl_llm.models.layers import TokenRows, attention_over, layer_windows
from jaxrl_llm.models.quantised import QuantisedMatrix, widen
from jaxrl_llm.sharding import activation, gather_layer, head_copies
from jaxrl_llm.sharding.rules import parameter_path

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "adapted dots": jax.checkpoint_policies.save_only_these_names("adapted_product"),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=(), names_which_can_be_offloaded=("layer_input",),
        offload_src="device", offload_dst="pinned_host",
    ),
}  # fmt: skip
"""Checkpoint policies by name: the backward pass keeps all of a layer, only its input, its matrix products (below
adapters the sum of two, without either), or its input in the host's memory.
"""


def summed_axes(matrix: str) -> int:
    """Return the number of axes of a layer's matrix ``part/name`` over which a product sums."""
    return 2 if matrix_role(matrix) in ("attn/o", "delta/o") else 1


class Weights(nnx.Module):
    """A named bundle of parameters; the attributes are the names."""

    def __init__(self, parameters: dict[str, Any]):
        for name, value in parameters.items():
            value = Weights(value) if isinstance(value, dict) else value
            setattr(self, name, value if isinstance(value, nnx.Module) else nnx.Param(value))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Decoder(nnx.Module):
    """The language model; ``initialise`` draws one. ``config`` is static, part of the pytree's structure, so models of
    two architectures never mix. ``weights``, a nested dict of arrays (or of ``jax.ShapeDtypeStruct``): ``embed`` [V,
    D], ``blocks`` (stacked on L), ``final_norm`` [D] and, if untied, ``head`` [D, V].
    """

    def __init__(self, config: ModelConfig, parameters: dict[str, Any]):
        self.config = config
        self.weights = Weights(parameters)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the architecture by dotted path, in the order of the model's leaves."""
    return {tensor.path: our_shape(tensor, config) for tensor in sorted(tensors_of(config), key=lambda t: t.path)}


def initialise(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32, scale: float = 0.02) -> Decoder:
    """Create a model with normal weights of standard deviation ``scale``, norms at 1 and biases at 0."""
    leaves = {}
    for index, (path, shape) in enumerate(parameter_shapes(config).items()):
        if "norm" in path:
            leaves[path] = jnp.full(shape, neutral_norm(config, path), dtype)
        elif path.endswith("_scale"):
            leaves[path] = jnp.ones(shape, dtype)
        elif path.endswith(("_bias", "_log")):
            leaves[path] = jnp.zeros(shape, dtype)
        else:
            leaves[path] = (scale * jax.random.normal(jax.random.fold_in(key, index), shape)).astype(dtype)
    return Decoder(config, traverse_util.unflatten_dict(leaves, sep="."))


def neutral_norm(config: ModelConfig, path: str) -> float:
    """Return the weight of a norm, by dotted path, that scales by 1; the delta rule's is stored as it is."""
    return 0.0 if config.norm.plus_one and path != "blocks.delta.norm" else 1.0


def to_parameters(model: Any) -> dict[str, Any]:
    """Return the arrays of a model, or of its ``Weights``, as the plain nested dict that checkpoints and files use.
    QuantisedMatrix matrices stay as they are.
    """
    items = vars(model if isinstance(model, Weights) else model.weights).items()
    parameters: dict[str, Any] = {}
    for name, value in items:
        if isinstance(value, Weights):
            parameters[name] = to_parameters(value)
        elif isinstance(value, (nnx.Param, QuantisedMatrix)):
            parameters[name] = value if isinstance(value, QuantisedMatrix) else value.get_value()
    return parameters


class Adapter(nnx.Module):
    """Low-rank factors of weights: ``a`` [L, in.., r] and ``b`` [L, r, out..] under each one's path, [L, E, in, r] and
    [L, E, r, out] of experts (models/lora.py). ``scale`` and ``merged`` (see ``Lora``) are static: a weight W acts as
    ``W + scale * a @ b``.
    """

    def __init__(self, scale: float, parameters: dict[str, Any], merged: bool = False):
        self.scale = scale
        self.merged = merged
        self.weights = Weights(parameters)


def keeps_dtype(path: str) -> bool:
    """Return whether a matrix keeps its dtype below an adapter."""
    return path in ("embed", "head", "per_layer_embed") or matrix_role(path.removeprefix("blocks/")) in ADAPTABLE


def add_adapter(w: Weights, dtype: Any) -> Weights:
    """Return one layer's weights in ``dtype``, with its ``adapter`` added to them in float32."""
    parameters = to_parameters(w)
    changes = to_parameters(w.adapter)
    for part, names in parameters.items():
        for name, weight in names.items():
            if name in changes.get(part, ()):
                a, b = changes[part][name]["a"], changes[part][name]["b"]
                if part == "experts":
                    change = jnp.einsum("eir,ero->eio", a, b, preferred_element_type=jnp.float32)
                else:
                    change = jnp.tensordot(a, b, 1, preferred_element_type=jnp.float32)
                weight = widen(weight, jnp.float32) + w.adapter.scale * change
            names[name] = widen(weight, jnp.float32 if f"blocks.{part}.{name}" in FLOAT32 else dtype)
    return Weights(parameters)


def linear(w: Weights, part: str, name: str, x: jax.Array) -> jax.Array:
    """Multiply x [B, S, in..] by a layer's matrix ``part/name`` [in.., out..]; below an adapter ``x W + scale (x a) b``
    is computed, without a gradient of W.
    """
    matrix = getattr(getattr(w, part), name)
    matrix = matrix if isinstance(matrix, QuantisedMatrix) else matrix[...]
    inputs = summed_axes(f"{part}/{name}")
    if hasattr(w, "adapter"):
        factors = getattr(getattr(w.adapter.weights, part, None), name, None)
        pair = None if factors is None else (factors.a[...], factors.b[...])
        return checkpoint_name(layers.project_frozen(inputs, w.adapter.scale, x, matrix, pair), "adapted_product")
    return layers.project(x, matrix) if inputs == 1 else layers.contract(x, matrix, inputs)


def cast(model: Decoder, dtype: Any) -> Decoder:
    """Return the model with every weight in ``dtype``; arrays that already have it are not copied. Below an adapter the
    matrices of the frozen model stay as they are: each product converts its own.
    """
    decoder = getattr(model, "decoder", model)
    frozen = keeps_dtype if hasattr(decoder.weights.blocks, "adapter") else lambda path: False

    def convert(path: tuple, x: Any) -> Any:
        name = re.sub(r"^blocks/\d+/", "blocks/", parameter_path(path))
        if name.replace("/", ".") in FLOAT32:
            return x.astype(jnp.float32)
        matrix, _, part = name.rpartition("/")  # of a packed one, or of an adapter
        return x if frozen(name) or (frozen(matrix) and part not in ("a", "b")) else x.astype(dtype)

    return jax.tree.map_with_path(convert, model)


class LayerRun(NamedTuple):
    """Equal layers that follow each other: their number, and the place of the first among the layers with each of its
    parts ("layer": among all).
    """

    count: int
    places: Mapping[str, int]


class Period(NamedTuple):
    """Runs of layers that repeat; the places are those of the first time."""

    repeats: int
    runs: tuple[LayerRun, ...]

    @property
    def sizes(self) -> Mapping[str, int]:
        """Return the number of layers with each part, of one time."""
        sizes = collections.Counter()
        for run in self.runs:
            sizes.update(dict.fromkeys(run.places, run.count))
        return sizes


@functools.cache
def layer_places(config: ModelConfig) -> tuple[dict[str, int], ...]:
    """Return each layer's place among the layers with each of its parts, and among all ("layer")."""
    parts = dict.fromkeys(tensor.path.split(".")[1] for tensor in tensors_of(config) if tensor.layered)
    stacks = {part: config.layers_with(part) for part in (*parts, "layer")}
    places = range(config.layers)
    return tuple({part: stack.index(i) for part, stack in stacks.items() if i in stack} for i in places)


@functools.cache
def periods_of(config: ModelConfig) -> tuple[Period, ...]:
    """Return the layers in few periods, so that few bodies are compiled."""
    groups = (tuple(group) for _, group in itertools.groupby(layer_places(config), tuple))
    runs = [LayerRun(len(group), group[0]) for group in groups]
    shapes = [(run.count, *run.places) for run in runs]
    periods, at = [], 0
    while at < len(runs):
        repeats = {1: 1}
        for size in range(1, (len(runs) - at) // 2 + 1):
            period = shapes[at : at + size]
            starts = itertools.takewhile(lambda i, p=period: shapes[i : i + len(p)] == p, range(at, len(runs), size))
            repeats[size] = sum(1 for _ in starts)
        size = max(repeats, key=lambda size: (repeats[size] - 1) * size)
        periods.append(Period(repeats[size], tuple(runs[at : at + size])))
        at += size * repeats[size]
    return tuple(periods)


Stacks = dict[str, Any]
"""Arrays stacked over the layers that have a part, by its name; of all layers "layer"."""


def _cut(stacks: Stacks, places: Mapping[str, int], counts: Mapping[str, int]) -> Stacks:
    """Return so many layers of each stack, from a place on."""

    def cut(x: Any, start: int, count: int) -> Any:
        return x if count == len(x) else x[start : start + count]

    present = [part for part in places if part in stacks]
    return {part: jax.tree.map(functools.partial(cut, start=places[part], count=counts[part]), stacks[part])
            for part in present}  # fmt: skip


def _layer_of(stacks: Stacks, places: Mapping[str, int]) -> Stacks:
    return {part: jax.tree.map(lambda x, i=i: x[i], stacks[part]) for part, i in places.items() if part in stacks}


def _join(outputs: Sequence[Stacks]) -> Stacks:
    """Join the stacks of layers that follow each other."""
    parts = dict.fromkeys(part for out in outputs for part in out)
    stacks = {part: [out[part] for out in outputs if part in out] for part in parts}
    join = lambda *x: x[0] if len(x) == 1 else jnp.concatenate(x)  # noqa: E731
    return {part: jax.tree.map(join, *each) for part, each in stacks.items()}


def _unfold(outputs: Stacks) -> Stacks:
    """Join the first two axes, of periods and of layers in one."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), outputs)


def unstack_layers(model: Decoder) -> Decoder:
    """Return the model with ``blocks/0``, ``blocks/1``, ... in place of stacked weights: see ``scan_layers``."""
    parameters = to_parameters(model)
    layers = {str(i): _layer_of(parameters["blocks"], places) for i, places in enumerate(layer_places(model.config))}
    return Decoder(model.config, parameters | {"blocks": layers})


def stack_layers(model: Decoder) -> Weights:
    """Return the weights of all layers, stacked on a leading axis, with an attached adapter."""
    blocks = model.weights.blocks
    if not hasattr(blocks, "0"):
        return blocks
    each = [to_parameters(getattr(blocks, str(index))) for index in range(model.config.layers)]
    stacked = _join([jax.tree.map(lambda x: x[None], parameters) for parameters in each])
    return Weights(stacked | ({"adapter": blocks.adapter} if hasattr(blocks, "adapter") else {}))


def scan_layers(
    layer: Callable[[Any, Weights, Stacks], tuple[Any, Stacks]],
    x: Any,
    config: ModelConfig,
    blocks: Weights,
    inputs: Stacks,
    unroll: bool = False,
    indexed: bool = False,
) -> tuple[Any, Stacks]:
    """Run ``layer(x, weights, its inputs) -> (x, its outputs)`` over the layers by ``jax.lax.scan``, or unrolled after
    ``unstack_layers``. Returns x, and the outputs, stacked as the inputs are. x: hidden states, or a pair of them and
    ``SharedKV``, which the backward pass keeps once for all layers that only read them. ``indexed``: layers of several
    kinds are read from their stacks by number, where a compiler would copy the parts into which stacks are cut; but a
    gradient of whole stacks would be made for each layer.

    A GPU's compiler copies a slice of stacked weights before a matrix product reads it, three passes through memory
    instead of one; separate weights are read in place, but compile more slowly: 36 layers of a learner's update in 45
    s, where a scan takes 9.
    """
    adapter = getattr(blocks, "adapter", None)
    factors = {} if adapter is None else to_parameters(adapter)

    def apply(x: Any, sliced: tuple[Stacks, ...], kept: Any = None) -> tuple[Any, Stacks]:
        parameters, factors, inputs = sliced
        attached = {} if adapter is None else {"adapter": Adapter(adapter.scale, factors, adapter.merged)}
        x, out = layer(x if kept is None else (x, kept), Weights(parameters | attached), inputs)
        return x if kept is None else x[0], out

    def apply_one(x: Any, sliced: tuple[Stacks, ...], kept: Any = None) -> tuple[Any, Stacks]:
        x, out = apply(x, sliced, kept)
        return x, jax.tree.map(lambda x: x[None], out)

    outputs = []
    if hasattr(blocks, "0"):
        for i, places in enumerate(layer_places(config)):
            parameters = to_parameters(getattr(blocks, str(i)))
            x, out = apply_one(x, (parameters, _layer_of(factors, places), _layer_of(inputs, places)))
            outputs.append(out)
        return x, _join(outputs)

    stacks = (to_parameters(blocks), factors, inputs)
    periods = periods_of(config)
    if indexed and sum(len(period.runs) for period in periods) > 1:
        return _scan_by_number(apply, x, periods, stacks)
    for repeats, runs in periods:
        firsts = dict(reversed([item for run in runs for item in run.places.items()]))
        sizes = Period(repeats, runs).sizes
        kept = None
        if isinstance(x, tuple) and not any(part in run.places for run in runs for part in config.cached_parts):
            x, kept = x

        def period(
            x: Any, stacks: Any, runs: tuple[LayerRun, ...] = runs, firsts: Any = firsts, kept: Any = kept
        ) -> tuple[Any, Stacks]:
            outputs = []
            for run in runs:
                places = {part: place - firsts[part] for part, place in run.places.items()}
                counts = dict.fromkeys(places, run.count)
                sliced = tuple(_cut(stack, places, counts) for stack in stacks)
                if run.count == 1:
                    x, out = apply_one(x, jax.tree.map(lambda x: x[0], sliced), kept)
                else:
                    x, out = jax.lax.scan(functools.partial(apply, kept=kept), x, sliced, unroll=unroll)
                outputs.append(out)
            return x, _join(outputs)

        sliced = tuple(_cut(stack, firsts, {part: repeats * n for part, n in sizes.items()}) for stack in stacks)
        if repeats == 1:
            x, out = period(x, sliced)
        else:
            sliced = jax.tree.map(lambda x, r=repeats: x.reshape(r, len(x) // r, *x.shape[1:]), sliced)
            x, out = jax.lax.scan(period, x, sliced, unroll=unroll)
            out = _unfold(out)
        x = x if kept is None else (x, kept)
        outputs.append(out)
    return x, _join(outputs)


def _scan_by_number(
    apply: Callable[[Any, tuple[Stacks, ...]], tuple[Any, Stacks]],
    x: Any,
    periods: Sequence[Period],
    stacks: tuple[Stacks, ...],
) -> tuple[Any, Stacks]:
    """Run ``apply(x, (its parameters, ...)) -> (x, its outputs)`` over layers of several kinds: see ``scan_layers``."""

    def take(stack: Stacks, places: Mapping[str, jax.Array]) -> Stacks:
        read = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
        return {part: jax.tree.map(lambda x, i=i: read(jnp.asarray(x), i), stack[part])
                for part, i in places.items() if part in stack}  # fmt: skip

    outputs = []
    for period in periods:

        def run_period(x: Any, number: jax.Array, runs: Any = period.runs, sizes: Any = period.sizes) -> Any:
            outputs = []
            for run in runs:
                first = {part: place + number * sizes[part] for part, place in run.places.items()}

                def layer(x: Any, i: jax.Array, first: Any = first) -> tuple[Any, Stacks]:
                    places = {part: place + i for part, place in first.items()}
                    return apply(x, tuple(take(stack, places) for stack in stacks))

                x, out = jax.lax.scan(layer, x, jnp.arange(run.count, dtype=jnp.int32))
                outputs.append(out)
            return x, _join(outputs)

        x, out = jax.lax.scan(run_period, x, jnp.arange(period.repeats, dtype=jnp.int32))
        outputs.append(_unfold(out))
    return x, _join(outputs)


LATENT_EPS = 1e-6
"""``Norm.eps`` of latent vectors, whatever the model's is."""

Attend = Callable[..., jax.Array]
"""(q [B, S, K, N / K, H], k [B, K, H, S], v [B, K, S, H], sinks=[K, N / K] or None) -> [B, S, K, N / K, H]. Rotary is
already applied. On a mesh K counts the copies of heads.
"""


ATTENTION_PARTS = ("attn", "global_attn", "shared_kv_attn", "shared_kv_global_attn")

SharedKV = dict[str, tuple[jax.Array, jax.Array]]
"""Keys and values [B, S, K, H] of the last layer with its own, by part: layers after it may attend to them too."""


def attention_part(w: Weights) -> str:
    """Return the part of a layer that attends; "" of one with a state."""
    return next((part for part in ATTENTION_PARTS if hasattr(w, part)), "")


def empty_shared_kv(config: ModelConfig, outer: tuple[int, ...], dtype: Any) -> SharedKV:
    """Return zeros [*outer, K, H] in place of keys and values before the first layer; {} where no layer needs them."""
    if not config.shared_kv_layers:
        return {}
    each = {part: config.attention_of(part) for part in config.cached_parts}
    zeros = {part: jnp.zeros((*outer, a.kv_heads, a.head_dim), dtype) for part, a in each.items()}
    return {part: (x, x) for part, x in zeros.items()}


def block(
    w: Weights,
    config: ModelConfig,
    x: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    attend: Attend,
    sequences: Any,
    replayed: jax.Array | None = None,
    compute: ComputeOptions = ComputeOptions(),
    shared_kv: SharedKV | None = None,
    token_input: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, SharedKV]:
    """Apply one layer to x [B, S, D]; ``attend`` knows mask and cache, and ``sequences`` (``recurrent.Sequences``, None
    in a model of attention alone) the states. Returns x, the router's own choice of experts, uint8 or uint16[B, S, k],
    None for a layer without, and ``shared_kv`` with the layer's own. ``cos_sin``: see ``layers.rotary_cos_sin``.
    ``replayed`` and ``compute``: see ``experts.mixture``. ``token_input``: see ``per_layer_inputs``.
    """
    norm = functools.partial(layers.rms_norm, norm=config.norm)
    norms = next(getattr(w, part) for part in ("norms", "attn_norms", "state_norms") if hasattr(w, part))
    shared_kv = shared_kv or {}
    h = activation(norm(x, norms.attn[...]) if hasattr(norms, "attn") else x, "hidden")
    if hasattr(w, "delta"):
        with jax.named_scope("delta"):
            h = recurrent.delta_net(w.delta, config, functools.partial(linear, w, "delta"), h, sequences)
    elif hasattr(w, "conv"):
        with jax.named_scope("conv"):
            h = recurrent.short_convolution(w.conv, functools.partial(linear, w, "conv"), h, sequences)
    else:
        with jax.named_scope("attention"):
            if config.attention.latent is None:
                h, shared_kv = self_attention(w, config, h, cos_sin, attend, shared_kv)
            else:
                h = latent_attention(w, config, h, cos_sin, attend, isinstance(sequences, recurrent.Continuation))
    x = add_residual(x, norm(h, norms.attn_post[...]) if hasattr(norms, "attn_post") else h, config)
    h = activation(norm(x, norms.mlp[...]) if hasattr(norms, "mlp") else x, "hidden")
    routing = None
    if not hasattr(w, "experts"):
        h = mlp(w, config, h)
    elif config.experts is not None and config.experts.beside_mlp:
        with jax.named_scope("experts"):
            routed_h = activation(norm(x, w.experts.pre_norm[...]), "hidden")
            routed, routing = layer_experts(w, config, routed_h, replayed, compute, router_input(w, config, x))
            routed = norm(activation(routed, "residual"), w.experts.post_norm[...])
        h = norm(mlp(w, config, h), w.experts.mlp_post_norm[...]) + routed
    else:
        with jax.named_scope("experts"):
            routed, routing = layer_experts(w, config, h, replayed, compute)
            routed = activation(routed, "residual")
        if hasattr(w, "shared"):
            routed += mlp(w, config, h, "shared")
        if hasattr(w, "mlp"):
            gate = jax.nn.sigmoid(layers.product("bsd,d->bs", h, w.experts.shared_gate[...]))
            routed += gate[..., None].astype(h.dtype) * mlp(w, config, h)
        h = routed
    x = add_residual(x, norm(h, norms.mlp_post[...]) if hasattr(norms, "mlp_post") else h, config)
    if token_input is not None:
        gate = layers.ACTIVATIONS[config.activation](linear(w, "per_layer", "gate", activation(x, "hidden")))
        h = activation(linear(w, "per_layer", "projection", gate * token_input), "residual")
        x += norm(h, norms.per_layer[...])
    if hasattr(norms, "layer_scale"):
        x *= jax.lax.stop_gradient(norms.layer_scale[...]).astype(x.dtype)
    return x, routing, shared_kv


def self_attention(
    w: Weights,
    config: ModelConfig,
    h: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    attend: Attend,
    shared_kv: SharedKV,
) -> tuple[jax.Array, SharedKV]:
    """Apply a layer's attention to the normalised h [B, S, D]: see ``block``."""
    part = attention_part(w)
    settings, weights, stored = config.attention_of(part), getattr(w, part), part.removeprefix("shared_kv_")
    norm = functools.partial(layers.rms_norm, norm=config.norm)
    cos, sin = (x[..., : (settings.rope.dims or settings.head_dim) // 2] for x in cos_sin)
    rotate = functools.partial(layers.rotate, cos_sin=(cos, sin), interleaved=settings.rope.interleaved)

    def project(name: str) -> jax.Array:
        x = activation(linear(w, part, name, h), "heads")
        return x + getattr(weights, f"{name}_bias")[...][None, None] if hasattr(weights, f"{name}_bias") else x

    q = project("q")
    q = rotate(norm(q, weights.q_norm[...]) if hasattr(weights, "q_norm") else q)
    if part == stored:
        k = project("k")
        v = k if settings.keys_as_values else project("v")
        k = rotate(norm(k, weights.k_norm[...]) if hasattr(weights, "k_norm") else k)
        v = layers.rms_norm(v, jnp.ones(v.shape[-1:], v.dtype), Norm(config.norm.eps)) if settings.normed_values else v
        shared_kv = shared_kv | {stored: (k, v)} if stored in shared_kv else shared_kv
    else:
        k, v = shared_kv[stored]
    sinks = weights.sinks[...] if settings.sinks else None
    out = activation(attend_with_copies(attend, head_copies(k.shape[2]), q, k, v, sinks), "heads")
    if settings.gated:
        out = out * jax.nn.sigmoid(activation(linear(w, part, "gate", h), "heads"))
    out = activation(linear(w, part, "o", out), "residual")
    out = out + weights.o_bias[...][None, None] if hasattr(weights, "o_bias") else out
    return out, shared_kv


def router_input(w: Weights, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return what the router of experts beside an MLP reads of the residual stream x [B, S, D]."""
    h = layers.rms_norm(x, w.experts.router_norm[...], Norm(config.norm.eps))
    return activation(h * jnp.asarray(config.width**-0.5, h.dtype), "hidden")


def latent_attention(
    w: Weights,
    config: ModelConfig,
    h: jax.Array,
    cos_sin: tuple[jax.Array, jax.Array],
    attend: Attend,
    cached: bool,
) -> jax.Array:
    """Apply a layer's latent attention to the normalised h [B, S, D]: see ``block``. Over a cache (``cached``), which
    holds latent vectors and rotated keys, queries are multiplied by the matrix of the keys, and what they read by that
    of the values; elsewhere keys and values are made, which takes fewer products for as many queries as keys.
    """
    settings = config.attention
    latent = settings.latent
    if latent is None:
        raise ValueError(f"a model of the family {config.family} has no latent attention")
    norm = functools.partial(layers.rms_norm, norm=dataclasses.replace(config.norm, eps=LATENT_EPS))
    rotate = functools.partial(layers.rotate, cos_sin=cos_sin, interleaved=settings.rope.interleaved)
    source = norm(linear(w, "attn", "q_latent", h), w.attn.q_latent_norm[...]) if latent.query_rank else h
    q = activation(linear(w, "attn", "q", source), "heads")
    plain, rotated = q[..., : latent.plain_dim], rotate(q[..., latent.plain_dim :])
    vectors = norm(linear(w, "attn", "latent", h), w.attn.latent_norm[...])
    k_rotated = rotate(linear(w, "attn", "k_rotary", h)[:, :, None])
    k_up, v_up = (x[...].astype(h.dtype) for x in (w.attn.k_up, w.attn.v_up))
    if cached:
        q = jnp.concatenate([jnp.einsum("bsna,zna->bsnz", plain, k_up), rotated], axis=-1)
        k = jnp.concatenate([vectors[:, :, None], k_rotated], axis=-1)
        mixed = attend_with_copies(attend, head_copies(1), q, k, k[..., :0])
        out = jnp.einsum("bsnz,znu->bsnu", mixed, v_up)
    else:
        k = activation(layers.project(vectors, k_up), "heads")
        k = jnp.concatenate([k, jnp.broadcast_to(k_rotated, (*k.shape[:3], latent.rotary_dim))], axis=-1)
        v = activation(layers.project(vectors, v_up), "heads")
        q = jnp.concatenate([plain, rotated], axis=-1)
        out = attend_with_copies(attend, head_copies(settings.heads), q, k, v)
    return activation(linear(w, "attn", "o", activation(out, "heads")), "residual")


def layer_experts(
    w: Weights,
    config: ModelConfig,
    h: jax.Array,
    replayed: jax.Array | None,
    compute: ComputeOptions,
    router_input: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Compute ``experts.mixture`` of a layer's weights. Packed ones are widened again in the backward pass: the wide
    matrices of all layers would be in memory otherwise.
    """

    def run(w: Weights, h: jax.Array, router_input: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        matrices = add_adapter(w, h.dtype).experts if hasattr(w, "adapter") else w.experts
        return experts.mixture(matrices, config, h, replayed, compute, router_input)

    return (jax.checkpoint(run) if isinstance(w.experts.gate, QuantisedMatrix) else run)(w, h, router_input)


def add_residual(x: jax.Array, change: jax.Array, config: ModelConfig) -> jax.Array:
    """Add what attention or MLP computed to the residual stream."""
    scale = config.residual_scale
    return x + (change if scale == 1.0 else change * jnp.asarray(scale, change.dtype))


def mlp(w: Weights, config: ModelConfig, h: jax.Array, part: str = "mlp") -> jax.Array:
    """Apply a layer's MLP, or its ``shared`` expert, to the normalised h [B, S, D]."""
    part = part if hasattr(w, part) else "wide_mlp"
    with jax.named_scope("mlp"):
        gate, up = (activation(linear(w, part, name, h), "mlp") for name in ("gate", "up"))
        h = linear(w, part, "down", layers.ACTIVATIONS[config.activation](gate) * up)
        return activation(h, "residual")


def attend_with_copies(
    attend: Attend, copies: int, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None
) -> jax.Array:
    """Attend with q [B, S, N, H] over ``copies`` of each head of k and v [B, S, K, H]; returns [B, S, N, H]. Copies
    share the queries of their head, and its ``sinks`` [N], evenly: zeros are added where these do not divide.
    """
    (_, _, heads, width) = k.shape
    q = q.reshape(*q.shape[:2], heads, -1, width)
    group = q.shape[3]
    each = -(-group // copies)
    if sinks is not None:
        sinks = jnp.pad(sinks.reshape(heads, group), ((0, 0), (0, copies * each - group))).reshape(-1, each)
    if copies > 1:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, copies * each - group), (0, 0)))
        q = activation(q.reshape(*q.shape[:2], -1, each, width), "heads")
        k, v = (activation(jnp.repeat(x, copies, axis=2), "heads") for x in (k, v))
    out = attend(q, jnp.moveaxis(k, 1, 3), jnp.swapaxes(v, 1, 2), sinks=sinks)
    out = out.reshape(*out.shape[:2], heads, -1, out.shape[-1])[:, :, :, :group]
    return out.reshape(*out.shape[:2], -1, out.shape[-1])


def embed(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Return token embeddings, [..., D]; ids outside the vocabulary (padding may hold anything) are clamped into it."""
    x = model.weights.embed[...].at[tokens].get(mode="clip").astype(model.weights.final_norm.dtype)
    scale = model.config.embeddings.scale
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def per_layer_inputs(model: Decoder, tokens: jax.Array, x: jax.Array) -> Stacks:
    """Return what each layer reads of tokens [B, S] besides hidden states, [L, B, S, T], by part: a token's row in a
    table of that layer plus a product of its embedding x [B, S, D], over sqrt(2); {} in models without.
    """
    config, w = model.config, model.weights
    if not config.per_layer_width:
        return {}
    rows = w.per_layer_embed[...].at[tokens].get(mode="clip").astype(x.dtype)
    projected = layers.project(x, w.per_layer_projection[...]) * jnp.asarray(config.width**-0.5, x.dtype)
    rows, projected = (t.reshape(*x.shape[:2], config.layers, -1) for t in (rows, projected))
    rows = rows * jnp.asarray(config.per_layer_width**0.5, x.dtype)
    projected = layers.rms_norm(projected, w.per_layer_norm[...], config.norm)
    return {"per_layer": jnp.moveaxis((rows + projected) * jnp.asarray(2.0**-0.5, x.dtype), 2, 0)}


def final_hidden(model: Decoder, x: jax.Array) -> jax.Array:
    """Return the normalised final hidden states of the last layer's output x [..., D], as heads multiply them."""
    hidden = layers.rms_norm(x, model.weights.final_norm[...], model.config.norm)
    divisor = model.config.embeddings.logit_divisor
    return hidden if divisor == 1.0 else hidden / jnp.asarray(divisor, hidden.dtype)


def unembed(model: Decoder, hidden: jax.Array) -> jax.Array:
    """Return float32 logits [..., V] of final hidden states [..., D]."""
    w = model.weights
    if model.config.embeddings.tied:
        raw = layers.product("...d,vd->...v", hidden, w.embed[...])
    else:
        raw = layers.product("...d,dv->...v", hidden, w.head[...])
    return layers.softcap(raw, model.config.embeddings.logit_softcap)


def forward(model: Decoder, rows: TokenRows, compute: ComputeOptions = ComputeOptions()) -> jax.Array:
    """Compute the normalised final hidden states [R, S, D] of packed rows: see ``routed``."""
    return routed(model, rows, compute)[0]


def routed(
    model: Decoder, rows: TokenRows, compute: ComputeOptions = ComputeOptions(), replayed: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Compute the normalised final hidden states [R, S, D] of packed rows (R rows of S tokens), and the routers' choice
    of experts [R, S, L, k], with or without replay; None for a dense model. The model's weights already have the dtype
    of ``compute``. ``replayed``: int[R, S, L, k], experts to take in place of the routers' choice; None for theirs.
    """
    config = model.config
    positions = jnp.asarray(rows.positions)
    parts = [part for part in ATTENTION_PARTS if config.layers_with(part)]
    attention = {part: attention_over(rows, config.attention_of(part), compute) for part in parts}

    sequences = None
    if config.recurrent is not None:
        group, branch = (jnp.asarray(x) for x in (rows.group, rows.branch))
        sequences = recurrent.PackedSequences(group, branch, compute.attention != "splash", config.recurrent.kernel)

    def apply_layer(carry: tuple[jax.Array, SharedKV], w: Weights, inputs: Stacks) -> tuple[Any, Stacks]:
        x, shared_kv = carry
        rotation, window = inputs["layer"]
        x = checkpoint_name(x, "layer_input")
        w = gather_layer(add_adapter(w, x.dtype) if getattr(getattr(w, "adapter", None), "merged", False) else w)
        part = attention_part(w)
        attend: Any = functools.partial(attention[part], window=window) if part else None
        cos_sin, forced = layers.rotary_cos_sin(positions, rotation), inputs.get("experts")
        token_input = inputs.get("per_layer")
        x, routing, shared_kv = block(w, config, x, cos_sin, attend, sequences, forced, compute, shared_kv, token_input)
        return (activation(x, "residual"), shared_kv), {} if routing is None else {"experts": routing}

    adapted = hasattr(model.weights.blocks, "adapter") and not model.weights.blocks.adapter.merged
    policy = REMAT["adapted dots" if compute.remat == "dots" and adapted else compute.remat]
    layer = apply_layer if policy is None else jax.checkpoint(apply_layer, policy=policy)
    # First whole: positions divided as the vocabulary is would gather the table instead.
    hidden = activation(embed(model, jnp.asarray(rows.tokens)), "hidden")
    x = activation(hidden, "residual")
    inputs = {"layer": layers.layer_constants(config), **per_layer_inputs(model, jnp.asarray(rows.tokens), hidden)}
    inputs |= {} if replayed is None else {"experts": jnp.moveaxis(replayed, 2, 0)}
    carry = (x, empty_shared_kv(config, x.shape[:2], x.dtype))
    (x, _), out = scan_layers(layer, carry, config, stack_layers(model), inputs, compute.unroll)
    hidden = activation(final_hidden(model, x), "hidden")
    return hidden, jnp.moveaxis(out["experts"], 0, 2) if "experts" in out else None


def causal_rows(tokens: Any) -> TokenRows:
    """Return rows [B, T] of one right-padded sequence each: a token's result never depends on later ones."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return TokenRows(tokens, positions, jnp.ones_like(tokens), jnp.zeros_like(tokens))


def logits(model: Decoder, tokens: Any) -> jax.Array:
    """Compute next-token logits of right-padded sequences, int[B, T] -> float32[B, T, V], for tests and tools alone:
    training and sampling never hold so large an array.
    """
    return _logits(model, jnp.asarray(tokens, jnp.int32))


_logits = jax.jit(lambda model, tokens: unembed(model, forward(model, causal_rows(tokens))))


def count_parameters(config: ModelConfig) -> tuple[int, int, int]:
    """Count the parameters of the architecture: all of them, those that one token uses (not the experts that it does
    not take), and of these the ones in matrix products of the layers.
    """
    sizes = {path: math.prod(shape) for path, shape in parameter_shapes(config).items()}
    total = sum(sizes.values())
    if config.experts is not None:
        for path in sizes.keys() & {f"blocks.experts.{name}" for name in Matrices._fields}:
            sizes[path] = sizes[path] * config.experts.active // config.experts.count
    # Norms and biases are added or scaled with: no products.
    elementwise = ("norm", "_bias", "sinks", "_scale")
    matrices = [path for path in sizes if path.startswith("blocks.") and not any(word in path for word in elementwise)]
    return total, sum(sizes.values()), sum(sizes[path] for path in matrices)


def attention_layers(config: ModelConfig) -> float:
    """Count the layers with attention; one with wider heads than ``attention.head_dim`` counts as much more."""
    widths = {part: config.attention_of(part).head_dim for part in ATTENTION_PARTS}
    return sum(len(config.layers_with(part)) * width / config.attention.head_dim for part, width in widths.items())


def visible_pairs(config: ModelConfig, first: int, last: int) -> float:
    """Count pairs of a query at positions first .. last - 1 and a key it sees, itself included, summed over layers. A
    pair of wider heads than ``attention.head_dim`` counts as much more.
    """
    pairs = 0.0
    windows = layer_windows(config)
    for part in ATTENTION_PARTS:
        share = config.attention_of(part).head_dim / config.attention.head_dim
        for window in (windows[layer] for layer in config.layers_with(part)):
            full = min(max(window - 1, first), last) if window else last  # queries before it see all
            pairs += share * ((full * (full + 1) - first * (first + 1)) / 2 + (last - full) * window)
    return pairs


def forward_flops(config: ModelConfig, tokens: float, pairs: float, predictions: float) -> float:
    """Return the FLOPs of a forward pass: ``2 n_layers tokens + 2 D V predictions + 4 N H pairs``. Pairs are those of
    ``visible_pairs``: attention is causal, so published counts of 6 N S D for it are halved. A state of the delta rule
    is multiplied three times for each token.
    """
    *_, layers = count_parameters(config)
    a, r = config.attention, config.recurrent
    head = config.width * config.vocab_size
    states = 0 if r is None else sum(r.layers) * r.value_heads * r.key_dim * r.value_dim
    products = layers + 3 * states
    widths = a.head_dim + (a.head_dim if a.latent is None else a.latent.value_dim)
    return 2.0 * products * tokens + 2.0 * head * predictions + 2.0 * a.heads * widths * pairs


def training_flops(
    config: ModelConfig, tokens: float, pairs: float, predictions: float, adapter: int | None = None
) -> float:
    """Return the FLOPs of a loss and its gradient, without recomputation: ``6 N D`` and the attention.

    A forward pass's products are made once, and twice as many follow for the gradients of what they multiply: of inputs
    and of weights. Frozen weights get none, so below an adapter each product counts twice, not three times; attention
    multiplies no weights and counts three times in any case; the adapter's own weights count ``6 n`` a token.

    Args:
      tokens: that its layers read.
      pairs: as in ``forward_flops``.
      predictions: tokens that its head predicts.
      adapter: the number of the adapter's weights, n, with all other weights frozen; None for none.
    """
    products = forward_flops(config, tokens, 0, predictions)
    attention = forward_flops(config, 0, pairs, 0)
    if adapter is None:
        return 3 * (products + attention)
    return 2 * products + 3 * attention + 6.0 * adapter * tokens
