"""A decoder-only transformer as one immutable value: weights declared once, one block for learning and sampling.

The module tree is a JAX pytree whose every leaf is a trainable array of one floating dtype; nothing is assigned after
``__init__``. Layers are stacked on a leading axis L and run by ``lax.scan``.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxrl_llm.models import layers
from jaxrl_llm.models.attention import Rows, attention_over
from jaxrl_llm.models.compute import REMAT, Compute
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.sharding import activation


class Weights(nnx.Module):
    """A named bundle of parameters; its attributes are the names."""

    def __init__(self, parameters: dict[str, Any]):
        for name, value in parameters.items():
            value = Weights(value) if isinstance(value, dict) else value
            setattr(self, name, value if isinstance(value, nnx.Module) else nnx.Param(value))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def has(self, name: str) -> bool:
        """Whether the architecture has this parameter."""
        return hasattr(self, name)


class Decoder(nnx.Module):
    """The language model; build it with ``from_parameters`` or ``initialise``.

    Attributes:
      config: static; part of the pytree's structure, so models of two architectures never mix.
      weights: ``embed`` [V, D], ``blocks`` (stacked on L), ``final_norm`` [D] and, if untied, ``head`` [D, V].
    """

    def __init__(self, config: ModelConfig, parameters: dict[str, Any]):
        self.config = config
        self.weights = Weights(parameters)


def parameter_shapes(config: ModelConfig) -> dict[str, Any]:
    """Every parameter of the architecture as a nested dict of shapes."""
    a = config.attention
    L = config.layers
    D = config.width
    F = config.mlp_width
    N = a.heads
    K = a.kv_heads
    H = a.head_dim
    attn = {"q": (L, D, N, H), "k": (L, D, K, H), "v": (L, D, K, H), "o": (L, N, H, D)}
    if a.bias:
        attn |= {"q_bias": (L, N, H), "k_bias": (L, K, H), "v_bias": (L, K, H)}
    if a.qk_norm != "none":
        full = a.qk_norm == "full"
        attn |= {"q_norm": (L, N, H) if full else (L, H), "k_norm": (L, K, H) if full else (L, H)}
    norms = {}
    if config.norm.placement in ("pre", "both"):
        norms |= {"attn": (L, D), "mlp": (L, D)}
    if config.norm.placement in ("post", "both"):
        norms |= {"attn_post": (L, D), "mlp_post": (L, D)}
    mlp = {"gate": (L, D, F), "up": (L, D, F), "down": (L, F, D)}
    shapes = {"embed": (config.vocab_size, D), "final_norm": (D,), "blocks": {"attn": attn, "mlp": mlp, "norms": norms}}
    return shapes if config.tied_embeddings else shapes | {"head": (D, config.vocab_size)}


def initialise(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32, scale: float = 0.02) -> Decoder:
    """A model with normal weights of standard deviation ``scale``, norms at 1 and biases at 0."""
    paths, treedef = jax.tree.flatten_with_path(parameter_shapes(config), is_leaf=lambda x: isinstance(x, tuple))
    leaves = []
    for index, (path, shape) in enumerate(paths):
        name = path[-1].key
        if "norm" in jax.tree_util.keystr(path):
            leaves.append(jnp.full(shape, 0.0 if config.norm.plus_one else 1.0, dtype))
        elif name.endswith("_bias"):
            leaves.append(jnp.zeros(shape, dtype))
        else:
            leaves.append((scale * jax.random.normal(jax.random.fold_in(key, index), shape)).astype(dtype))
    return from_parameters(config, jax.tree.unflatten(treedef, leaves))


def from_parameters(config: ModelConfig, parameters: dict[str, Any]) -> Decoder:
    """A model around the given nested dict of arrays (or of ``jax.ShapeDtypeStruct``)."""
    return Decoder(config, parameters)


def to_parameters(model: Decoder) -> dict[str, Any]:
    """The model's arrays as a plain nested dict, the form that checkpoints and files use."""
    return _unwrap(model.weights)


def _unwrap(weights: Weights) -> dict[str, Any]:
    items = {k: v for k, v in vars(weights).items() if isinstance(v, (Weights, nnx.Param))}
    return {k: _unwrap(v) if isinstance(v, Weights) else v.get_value() for k, v in items.items()}


class Adapter(nnx.Module):
    """Low-rank factors of some weights: ``a`` [L, in.., r] and ``b`` [L, r, out..] below the path of each
    (models/lora.py).

    Attributes:
      scale: static; a weight becomes ``W + scale * a @ b``.
      weights: nested as the weights that they belong to.
    """

    def __init__(self, scale: float, parameters: dict[str, Any]):
        self.scale = scale
        self.weights = Weights(parameters)


def merged(w: Weights) -> Weights:
    """One layer's weights with its ``adapter`` added to them; the same value where it has none."""
    if not w.has("adapter"):
        return w
    parameters = _unwrap(w)
    for part, names in _unwrap(w.adapter.weights).items():
        for name, factors in names.items():
            parameters[part][name] = layers.low_rank(
                parameters[part][name], factors["a"], factors["b"], w.adapter.scale
            )
    return Weights(parameters)


def cast(model: Decoder, dtype: Any) -> Decoder:
    """The model with every weight in ``dtype``; the same arrays where they have it already."""
    return jax.tree.map(lambda x: x.astype(dtype), model)


def by_layer(model: Decoder) -> Decoder:
    """The model with ``blocks/0``, ``blocks/1``, ... in place of stacked weights, for ``over_layers`` alone."""
    parameters = to_parameters(model)
    layers = {str(i): jax.tree.map(lambda x, i=i: x[i], parameters["blocks"]) for i in range(model.config.layers)}
    return from_parameters(model.config, parameters | {"blocks": layers})


def over_layers(layer: Callable[[Any, Any], tuple[Any, Any]], x: Any, model: Decoder, *others: Any) -> tuple[Any, Any]:
    """``jax.lax.scan`` of ``layer(x, (weights, *others))`` over the layers, written out where the model is
    ``by_layer``.

    ``others`` have a leading axis of layers. A GPU's compiler copies a slice of stacked weights before a matrix product
    reads it, three passes through memory for one; weights of their own are read where they lie, and take longer to
    compile.
    """
    blocks = model.weights.blocks
    if blocks.has("attn"):
        return jax.lax.scan(layer, x, (blocks, *others))
    found = []
    for index in range(model.config.layers):
        own = jax.tree.map(lambda stacked, index=index: stacked[index], others)
        x, result = layer(x, (getattr(blocks, str(index)), *own))
        found.append(result)
    return x, jax.tree.map(lambda *results: jnp.stack(results), *found)


Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(q [B, S, K, N / K, H], k [B, K, H, S], v [B, K, S, H]) -> [B, S, K, N / K, H]; rotary already applied."""


def block(w: Weights, config: ModelConfig, x: jax.Array, angles: jax.Array, attend: Attend) -> jax.Array:
    """One layer on x [B, S, D]; ``angles`` [B, S, H / 2] turn queries and keys, ``attend`` knows mask and cache."""
    norm = functools.partial(layers.rms_norm, norm=config.norm)
    pre = config.norm.placement != "post"
    post = config.norm.placement != "pre"
    h = activation(norm(x, w.norms.attn[...]) if pre else x, "hidden")
    with jax.named_scope("attention"):
        h = activation(_attention(w.attn, config, h, angles, attend), "residual")
    x = x + (norm(h, w.norms.attn_post[...]) if post else h)
    h = activation(norm(x, w.norms.mlp[...]) if pre else x, "hidden")
    with jax.named_scope("mlp"):
        gate, up = (activation(layers.project(h, p[...]), "mlp") for p in (w.mlp.gate, w.mlp.up))
        h = layers.project(layers.ACTIVATIONS[config.activation](gate) * up, w.mlp.down[...])
        h = activation(h, "residual")
    return x + (norm(h, w.norms.mlp_post[...]) if post else h)


def _attention(w: Weights, config: ModelConfig, h: jax.Array, angles: jax.Array, attend: Attend) -> jax.Array:
    q, k, v = (activation(layers.project(h, p[...]), "heads") for p in (w.q, w.k, w.v))
    if w.has("q_bias"):
        q, k, v = (t + b[...][None, None] for t, b in ((q, w.q_bias), (k, w.k_bias), (v, w.v_bias)))
    if w.has("q_norm"):
        norm = layers.full_norm if config.attention.qk_norm == "full" else layers.rms_norm
        q = norm(q, w.q_norm[...], config.norm)
        k = norm(k, w.k_norm[...], config.norm)
    q = layers.rotate(q, angles)
    k = layers.rotate(k, angles)
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    out = attend(q, jnp.moveaxis(k, 1, 3), jnp.swapaxes(v, 1, 2))
    out = activation(out.reshape(*out.shape[:2], -1, out.shape[-1]), "heads")
    return jnp.einsum("bsnh,nhd->bsd", out, w.o[...])


def embed(model: Decoder, tokens: jax.Array) -> jax.Array:
    """Token embeddings, [..., D]; ids outside the vocabulary (padding may hold anything) are clamped into it."""
    x = model.weights.embed[...].at[tokens].get(mode="clip")
    scale = model.config.embedding_scale
    return x if scale == 1.0 else x * jnp.asarray(scale, x.dtype)


def unembed(model: Decoder, hidden: jax.Array) -> jax.Array:
    """Float32 logits [..., V] of final hidden states [..., D]."""
    w = model.weights
    if model.config.tied_embeddings:
        raw = layers.product("...d,vd->...v", hidden, w.embed[...])
    else:
        raw = layers.product("...d,dv->...v", hidden, w.head[...])
    return layers.softcap(raw, model.config.logit_softcap)


def forward(model: Decoder, rows: Rows, compute: Compute = Compute()) -> jax.Array:
    """Normalised final hidden states [R, S, D] of packed rows.

    Args:
      model: the decoder.
      rows: R rows of S tokens.
      compute: how; the model's weights are of its dtype already.
    """
    config = model.config
    positions = jnp.asarray(rows.positions)
    attention = attention_over(rows, config.attention, compute)

    def one_layer(x: jax.Array, per_layer: Any) -> tuple[jax.Array, None]:
        w, frequencies, window = per_layer
        w = merged(w)
        attend = functools.partial(attention, window=window)  # ty: ignore[unknown-argument]
        x = block(w, config, x, positions[..., None].astype(jnp.float32) * frequencies[None, None], attend)
        return activation(x, "residual"), None

    policy = REMAT[compute.remat]
    layer = one_layer if policy is None else jax.checkpoint(one_layer, policy=policy)
    # First whole: positions divided as the vocabulary is would gather the table instead.
    x = activation(activation(embed(model, jnp.asarray(rows.tokens)), "hidden"), "residual")
    x, _ = jax.lax.scan(layer, x, (model.weights.blocks, *layer_constants(config)), unroll=compute.unroll)
    return activation(layers.rms_norm(x, model.weights.final_norm[...], config.norm), "hidden")


def layer_constants(config: ModelConfig) -> tuple[jax.Array, jax.Array]:
    """What differs between layers beside weights: rotary frequencies [L, H / 2] and windows int32[L]."""
    return jnp.asarray(layers.rope_frequencies(config)), jnp.asarray(layers.layer_windows(config), jnp.int32)


def causal_rows(tokens: Any) -> Rows:
    """Rows [B, T] of one sequence each, right-padded: what follows a token never changes it."""
    tokens = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    return Rows(tokens, positions, jnp.ones_like(tokens), jnp.zeros_like(tokens))


def logits(model: Decoder, tokens: Any) -> jax.Array:
    """Next-token logits of right-padded sequences: array-like int[B, T] -> float32[B, T, V].

    For tests and tools: training and sampling never hold an array of this size.
    """
    return _logits(model, jnp.asarray(tokens, jnp.int32))


@jax.jit
def _logits(model: Decoder, tokens: jax.Array) -> jax.Array:
    return unembed(model, forward(model, causal_rows(tokens)))
