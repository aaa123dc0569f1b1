"""The optimiser as an optax chain: clip by global norm, AdamW, a learning rate that warms up and may decay."""

import dataclasses
from typing import Any

import jax
import optax

from jaxrl_llm.sharding.rules import parameter_path


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """AdamW (arXiv 1711.05101).

    Attributes:
      learning_rate: after the warm-up.
      warmup: optimiser updates over which it rises linearly from 1/warmup of itself.
      schedule: "constant" or "cosine" (to 0 at ``decay_updates``).
      decay_updates: where the cosine ends, in optimiser updates.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: on matrices, not on norms and biases.
      clip_norm: gradients are scaled down to this global norm; 0 leaves them alone.
    """

    learning_rate: float = 1e-6
    warmup: int = 0
    schedule: str = "constant"
    decay_updates: int = 0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0


def learning_rate(config: Optimiser) -> optax.Schedule:
    """Learning rate as a function of the optimiser updates done so far."""
    peak, warmup = config.learning_rate, config.warmup
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(peak, max(config.decay_updates - warmup, 1))
    else:
        after = optax.constant_schedule(peak)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(warmup - 1, 1)), after], [warmup])


def build(config: Optimiser) -> optax.GradientTransformation:
    """The optax transformation; its state is a pytree of arrays."""
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    adam = optax.adamw(learning_rate(config), config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=_matrices)
    return optax.chain(clip, adam)


def _matrices(params: Any) -> Any:
    """True for the weights that decay: all but norms and biases."""
    return jax.tree.map_with_path(lambda path, _: not any(w in parameter_path(path) for w in ("norm", "bias")), params)
