"""The critic's side of PPO: generalised advantages, targets and the value loss."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.contracts import array, count, flags, ranked, shaped


def gae(
    rewards: jax.Array, values: jax.Array, mask: jax.Array, gamma: float, lam: float, after: jax.Array
) -> jax.Array:
    """Compute generalised advantages float[B, T] of token rewards and values [B, T] (see ``advantages.GAE``).

    ``after``: values [B] of the states after the last tokens. The result is 0 where the mask is False.
    """

    def back(later: tuple[jax.Array, jax.Array], now: tuple[jax.Array, ...]) -> tuple[Any, jax.Array]:
        value_after, advantage_after = later
        reward, value, valid = now
        advantage = reward + gamma * value_after - value + gamma * lam * advantage_after
        carried = jnp.where(valid, value, value_after), jnp.where(valid, advantage, advantage_after)
        return carried, jnp.where(valid, advantage, 0)

    return jax.lax.scan(back, (after, jnp.zeros_like(after)), (rewards.T, values.T, mask.T), reverse=True)[1].T


def returns(advantages: Any, values: Any) -> jax.Array:
    """Return ``A_t + V_t`` [B, T], the targets of the value loss, for unwhitened advantages (arXiv 1506.02438)."""
    advantages = array(advantages, "advantages")
    values = array(values, "values")
    ranked(2, advantages=advantages)
    shaped(advantages.shape, values=values)
    return jax.lax.stop_gradient(advantages + values.astype(advantages.dtype))


def value_loss(
    values: Any, targets: Any, mask: Any, old_values: Any = None, clip: float | None = None, token_count: Any = None
) -> jax.Array:
    """Compute ``0.5 mean_t max((V - Ret)^2, (V_old + clip(V - V_old, -clip, clip) - Ret)^2)``.

    The half and the clip are conventions of code; the paper's loss is ``(V - Ret)^2`` (arXiv 1707.06347, eq. 9). PPO's
    whole loss is ``policy_loss + c_v value_loss``, with the entropy bonus inside ``policy_loss``.

    Args:
      values: float[B, T], with gradient.
      targets: ``returns``, float[B, T].
      mask: [B, T], 1 where a token counts.
      old_values: float[B, T], those at the start of the batch's updates; needed with ``clip``.
      clip: how far a value may move from its old one; None for no bound.
      token_count: valid tokens of the whole optimiser step; None for this batch's own.

    Raises:
      ValueError: a wrong rank, shape or dtype (the message names the argument), or ``clip`` without ``old_values``.
    """
    values = array(values, "values")
    ranked(2, values=values)
    keep = flags(mask, values.shape, "mask")
    shaped(values.shape, targets=targets, old_values=old_values)

    def clean(x: Any, name: str) -> jax.Array:
        return jnp.where(keep, array(x, name).astype(values.dtype), 0)

    value = clean(values, "values")
    target = jax.lax.stop_gradient(clean(targets, "targets"))
    loss = (value - target) ** 2
    if clip is not None:
        if old_values is None or not clip > 0:
            raise ValueError(f"clip={clip} is a distance from old_values: it must be above 0, and they must be given")
        old = jax.lax.stop_gradient(clean(old_values, "old_values"))
        loss = jnp.maximum(loss, (old + jnp.clip(value - old, -clip, clip) - target) ** 2)
    return 0.5 * jnp.sum(loss) / count(token_count, keep, "token_count", loss.dtype)
