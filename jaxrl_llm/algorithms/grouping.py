"""Statistics of rewards by group, by batch and by token: building blocks of advantage estimators."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.contracts import array, flags, ranked, shaped
from jaxrl_llm.types import AdvantageContext

Reduction = Callable[..., jax.Array]


class Grouped(NamedTuple):
    """Rewards with their assignment to groups.

    Attributes:
      rewards: float[P, G], or float[B] with group ids; 0 where unscorable (NaN).
      valid: bool of the shape of rewards: False where unscorable.
      same: bool[B, B], whether two completions share a prompt; None where the groups are the rows of [P, G].
    """

    rewards: jax.Array
    valid: jax.Array
    same: jax.Array | None

    def by_group(self, reduction: Reduction, x: jax.Array, fill: float = 0) -> jax.Array:
        """Apply ``reduction`` (``jnp.sum``, ``jnp.max``, ...) to x over each group; the result broadcasts against x.

        ``fill`` is the neutral element of the reduction.
        """
        if self.same is None:
            return reduction(x, axis=1, keepdims=True)
        return reduction(jnp.where(self.same, x.reshape(-1)[None, :], fill), axis=1).reshape(x.shape)

    def centred(self) -> tuple[jax.Array, jax.Array]:
        """Return ``R_i - mean_group`` (exactly 0 if invalid or all are equal) and the number of scored rewards by
        group.
        """
        count = self.by_group(jnp.sum, self.valid.astype(self.rewards.dtype))
        mean = self.by_group(jnp.sum, self.rewards) / jnp.maximum(count, 1)
        high = self.by_group(jnp.max, jnp.where(self.valid, self.rewards, -jnp.inf), -jnp.inf)
        low = self.by_group(jnp.min, jnp.where(self.valid, self.rewards, jnp.inf), jnp.inf)
        return jnp.where(self.valid & (high > low), self.rewards - mean, 0), count


def scores(rewards: Any, context: AdvantageContext | None, grouped: bool = True) -> Grouped:
    """Group the rewards of the global batch: by the rows of [P, G], or by ``context.group_ids`` where given.

    An estimator that does not compare completions of one prompt passes ``grouped=False`` and may pass [B] as well.

    Raises:
      ValueError: the groups are undefined, or the ids do not fit the rewards.
    """
    rewards = array(rewards, "rewards", "any")
    ids = None if context is None else context.group_ids
    if ids is None:
        if rewards.ndim != 2 and (grouped or rewards.ndim != 1):
            raise ValueError(f"rewards must be [P, G], got shape {rewards.shape}, or [B] with context.group_ids")
        same = None
    else:
        if rewards.ndim not in (1, 2):
            raise ValueError(f"rewards must be [B] or [P, G] with context.group_ids, got shape {rewards.shape}")
        ids = array(ids, "context.group_ids", "integers")
        if ids.shape not in (rewards.shape, (rewards.size,)):
            raise ValueError(f"context.group_ids must have shape {(rewards.size,)}, got {ids.shape}")
        ids = ids.reshape(-1)
        same = ids[:, None] == ids[None, :]
    valid = ~jnp.isnan(rewards)
    return Grouped(jnp.where(valid, rewards, 0), valid, same)


def context_arrays(context: AdvantageContext | None, owner: str, rows: int, *names: str) -> tuple[jax.Array, ...]:
    """Return the context's arrays of these names, [B, T] each with B = ``rows``; ``mask`` (bool) comes first.

    Raises:
      ValueError: one is missing or has another shape; the message names it and its user.
    """
    given: list[Any] = [getattr(context, name, None) for name in names]
    for name, x in zip(names, given, strict=True):
        if x is None:
            raise ValueError(f"{owner} needs context.{name}: pass AdvantageContext({name}=...) of the global batch")
    ranked(2, **{f"context.{names[0]}": given[0]})
    shape = (rows, jnp.shape(given[0])[1])
    mask = flags(given[0], shape, f"context.{names[0]}")
    others = {f"context.{name}": x for name, x in zip(names[1:], given[1:], strict=True)}
    shaped(shape, **others)
    return mask, *(array(x, name) for name, x in others.items())


def steps_of(context: AdvantageContext | None, owner: str, mask: jax.Array, dtype: Any) -> jax.Array:
    """Return ``context.step_rewards`` [B, T] with 0 in place of NaN and where the mask is False."""
    _, steps = context_arrays(context, owner, mask.shape[0], "mask", "step_rewards")
    return jnp.where(mask & ~jnp.isnan(steps), steps, 0).astype(dtype)


def whiten(x: jax.Array, counts: jax.Array, ddof: int = 1, eps: float = 1e-8) -> jax.Array:
    """Return ``(x - mean) / sqrt(var + eps)`` over the entries that count, 0 elsewhere; exactly 0 if all are equal.

    x: any shape; counts: bool of that shape. ``n / (n - 1)`` of a single entry is never formed.
    """
    count = jnp.sum(counts, dtype=x.dtype)
    mean = jnp.sum(jnp.where(counts, x, 0)) / jnp.maximum(count, 1)
    centre = jnp.where(counts, x - mean, 0)
    variance = jnp.sum(centre**2) / jnp.maximum(count - ddof, 1)
    differ = jnp.max(jnp.where(counts, x, -jnp.inf)) > jnp.min(jnp.where(counts, x, jnp.inf))
    # The root of 0 has an infinite slope, and eps may be 0.
    return jnp.where(differ, centre * jax.lax.rsqrt(jnp.where(variance > 0, variance, 1) + eps), 0)


def divided(x: jax.Array, variance: jax.Array, eps: float) -> jax.Array:
    """Return ``x / (sqrt(variance) + eps)``; 0 where the variance is 0."""
    std = jnp.sqrt(jnp.where(variance > 0, variance, 1))
    return jnp.where(variance > 0, x / (std + eps), 0)


def suffix_sum(x: jax.Array) -> jax.Array:
    """Return ``y_t = sum_{s >= t} x_s`` along the last axis."""
    return jnp.flip(jnp.cumsum(jnp.flip(x, -1), axis=-1), -1)
