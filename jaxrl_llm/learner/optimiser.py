"""The optimiser as an optax chain: clip by global norm, direction of descent, weight decay; and the learning rate."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from jaxrl_llm.learner.settings import MUON_RMS, Moments, Optimiser
from jaxrl_llm.models.decoder import summed_axes
from jaxrl_llm.sharding import constrain
from jaxrl_llm.sharding.rules import parameter_path, rule_of


class Offloaded(NamedTuple):
    """An optimiser state that is kept in host memory between updates; the layout rules know it by this name."""

    on_host: Any


@functools.cache
def learning_rate(config: Optimiser) -> optax.Schedule:
    """Return the learning rate as a function of the optimiser updates done so far; the same for equal settings."""
    peak = float(config.learning_rate)  # JAX takes no class of its own
    warmup = config.warmup
    begin = max(config.decay[0], warmup)
    end = config.decay[1]
    pieces = [optax.constant_schedule(peak)]
    bounds = []
    if warmup:
        pieces = [optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), *pieces]
        bounds = [warmup]
    if config.schedule != "constant":
        fall = {
            "cosine": optax.cosine_decay_schedule,
            "linear": lambda peak, steps: optax.linear_schedule(peak, 0.0, steps),
        }
        pieces = [*pieces, fall[config.schedule](peak, end - begin)]
        bounds = [*bounds, begin]
    schedule = optax.join_schedules(pieces, bounds)
    # optax mixes the integer count with floats, which strict promotion refuses.
    return lambda updates: schedule(jnp.asarray(updates, jnp.float32))


@functools.cache
def build(config: Optimiser) -> optax.GradientTransformation:
    """Build the optimiser, from gradients to directions of descent: clipped, scaled, plus the decayed weights. Equal
    settings give the same value, so that a reset compiles nothing anew.

    All of it is float32 whatever the weights' dtype, except the first moment if ``moments.dtype`` differs. The learning
    rate is excluded: the update multiplies by it, so that it is known, logged and survives a reset.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    # Without a decay the state has the same form, so that a phase may begin or end one.
    none = optax.masked(optax.identity(), decay_mask)
    decay = optax.add_decayed_weights(config.weight_decay, decay_mask) if config.weight_decay else none
    chain = optax.chain(clip, {"adamw": adam, "adafactor": adafactor, "muon": muon}[config.name](config.moments), decay)

    def init(params: Any) -> Any:
        state = chain.init(optax.tree.cast(params, jnp.float32))
        return Offloaded(state) if config.moments.offload else state

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # optax relies on both
            before = state.on_host if config.moments.offload else state
            wide, weights = optax.tree.cast((updates, params), jnp.float32)
            directions, after = chain.update(wide, before, weights)
        after = jax.tree.map_with_path(lambda path, x: constrain(x, *rule_of(parameter_path(path))), after)
        return directions, Offloaded(after) if config.moments.offload else after

    return optax.GradientTransformation(init, update)


def adam(moments: Moments) -> optax.GradientTransformation:
    """Return Adam's scaling, with the first moment in its own dtype."""
    return store_moment_as(optax.scale_by_adam(moments.b1, moments.b2, moments.eps), "mu", moments.dtype)


def adafactor(moments: Moments) -> optax.GradientTransformation:
    """Return Adafactor: factored second moments, with a decay rising to b2 as 1 - t ** -0.8; momentum unless b1 is 0.
    Arrays are folded to matrices, so that the paper's matrix is factored, not a head of it; those with fewer than 128
    rows or columns are kept whole. Step sizes are not relative, as in arXiv 2106.04560, section 3.4, and steps are not
    clipped.
    """
    fold = functools.partial(jax.tree.map_with_path, fold_to_matrices)

    def decay(step: Any, _: Any) -> jax.Array:
        return jnp.minimum(1.0 - (step + 1.0) ** -0.8, moments.b2)

    scale = optax.scale_by_factored_rms(epsilon=moments.eps**2, decay_rate_fn=decay)
    momentum = store_moment_as(optax.ema(moments.b1), "ema", moments.dtype) if moments.b1 else optax.identity()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        directions, state = scale.update(fold(updates), state, fold(params))
        return jax.tree.map(lambda d, g: d.reshape(g.shape), directions, updates), state

    return optax.chain(optax.GradientTransformation(lambda params: scale.init(fold(params)), update), momentum)


def muon(moments: Moments) -> optax.GradientTransformation:
    """Return Muon (arXiv 2502.16982): momentum of each layer's matrices, orthogonalised. Embeddings, head, norms and
    biases use Adam.
    """

    axes = functools.partial(jax.tree.map_with_path, muon_dimensions)

    def label(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, x: "adam" if input_axes(path, x) is None else "muon", params)

    def resize(path: tuple, x: jax.Array) -> jax.Array:
        return MUON_RMS * math.sqrt(max(fold_to_matrices(path, x).shape[1:])) * x

    momentum = contrib.scale_by_muon(beta=moments.b1, eps=moments.eps, weight_dimension_numbers=axes)
    momentum = store_moment_as(momentum, "mu", moments.dtype)
    sized = optax.stateless(lambda grads, _: jax.tree.map_with_path(resize, grads))
    return optax.partition({"muon": optax.chain(momentum, sized), "adam": adam(moments)}, label)


def store_moment_as(inner: optax.GradientTransformation, field: str, dtype: str) -> optax.GradientTransformation:
    """Keep one field of the state of ``inner`` in ``dtype``; it computes in float32, so each update rounds once."""

    def cast(state: Any, to: str) -> Any:
        return state._replace(**{field: optax.tree.cast(getattr(state, field), to)})

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        directions, after = inner.update(updates, cast(state, "float32"), params)
        return directions, cast(after, dtype)

    return optax.GradientTransformation(lambda params: cast(inner.init(params), dtype), update)


def muon_dimensions(path: tuple, x: Any) -> contrib.MuonDimensionNumbers:
    """Return which axes of a stack of matrices are summed over, and which are made."""
    inputs = input_axes(path, x)
    return contrib.MuonDimensionNumbers(tuple(range(1, 1 + inputs)), tuple(range(1 + inputs, x.ndim)))


def input_axes(path: tuple, x: Any) -> int | None:
    """Return how many axes after L are summed over, for a stack of matrices; else None."""
    name = parameter_path(path)
    if not name.startswith("blocks/") or not _is_decayed(name):
        return None
    return summed_axes(name.removeprefix("blocks/").removesuffix("/a"))


def fold_to_matrices(path: tuple, x: jax.Array) -> jax.Array:
    """Return a stack of matrices as [L, inputs, outputs]; anything else unchanged."""
    inputs = input_axes(path, x)
    if inputs is None:
        return x
    return x.reshape(x.shape[0], math.prod(x.shape[1 : 1 + inputs]), math.prod(x.shape[1 + inputs :]))


def decay_mask(params: Any) -> Any:
    """Return True for the weights that decay: all but norms, biases, and what recurrent layers have beside matrices."""
    return jax.tree.map_with_path(lambda path, _: _is_decayed(parameter_path(path)), params)


def _is_decayed(name: str) -> bool:
    return not any(word in name for word in ("norm", "bias", "decay_log", "_conv", "_scale"))


def move_memory(tree: Any, like: Any = None) -> Any:
    """Move every array to the memory of its counterpart in ``like``, or else to the device's; inside jit."""

    def move(x: jax.Array, y: jax.Array) -> jax.Array:
        space = jax.memory.Space.Device if like is None else jax.typeof(y).memory_space
        return x if jax.typeof(x).memory_space == space else jax.device_put(x, space)

    return jax.tree.map(move, tree, tree if like is None else like)
