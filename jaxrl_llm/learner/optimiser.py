"""The optimiser as an optax chain: clip by global norm, AdamW, a learning rate that warms up and may decay."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.learner.settings import Optimiser
from jaxrl_llm.sharding.rules import parameter_path


def learning_rate(config: Optimiser) -> optax.Schedule:
    """Learning rate as a function of the optimiser updates done so far."""
    peak, warmup = config.learning_rate, config.warmup
    if config.schedule == "cosine":
        schedule = optax.cosine_decay_schedule(peak, max(config.decay_updates - warmup, 1))
    else:
        schedule = optax.constant_schedule(peak)
    if warmup:
        rise = optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1))
        schedule = optax.join_schedules([rise, schedule], [warmup])
    # optax mixes the integer count with floats, which strict promotion refuses.
    return lambda updates: schedule(jnp.asarray(updates, jnp.float32))


def build(config: Optimiser) -> optax.GradientTransformation:
    """Gradients to directions of descent: clipped, scaled by Adam's moments, plus the decayed weights.

    The learning rate is not in it: the update multiplies by it, so that it is known, logged and outlives a reset.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    decay = optax.add_decayed_weights(config.weight_decay, _matrices) if config.weight_decay else optax.identity()
    chain = optax.chain(clip, optax.scale_by_adam(config.b1, config.b2, config.eps), decay)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # Adam raises its decays to an integer power
            return chain.update(grads, state, params)

    return optax.GradientTransformation(chain.init, update)


def _matrices(params: Any) -> Any:
    """True for the weights that decay: all but norms and biases."""
    return jax.tree.map_with_path(lambda path, _: not any(w in parameter_path(path) for w in ("norm", "bias")), params)
