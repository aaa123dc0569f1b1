"""Advantage estimators: map rewards [P, G] to advantages, by completion [P, G] or by token [B, T].

An estimator is a callable frozen dataclass, so it can be a static argument and a field of ``Algorithm``. It takes its
other inputs from an ``AdvantageContext`` of the global batch, which has B = P * G rows in the order of the rewards; an
error names the missing field. Groups are the rows of [P, G], or explicit ``group_ids``; they are never guessed.

The advantage is exactly 0 where all rewards of a group are equal (max == min: in float32 their mean may differ from
them, and dividing that residue by a tiny deviation would make advantages out of nothing). An unscorable reward (NaN) is
excluded from the statistics and gets 0.

Estimators that give each turn of an episode its own credit, float[B, T], equal within a turn, read
``context.turn_rewards``: the reward of each turn at its last token, NaN everywhere else. A turn's reward is what the
environment gave for it; the last one's has all that no turn gave, so that they add up to the completion's reward.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxrl_llm.algorithms.tokens import (
    ABOVE_0,
    AT_LEAST_0,
    LOWEST_LOGP,
    FloatBT,
    FloatPG,
    as_array,
    as_mask,
    check_rank,
    check_self,
    check_shape,
    divisor,
)
from jaxrl_llm.system.setting import Range
from jaxrl_llm.types import AdvantageContext


class GroupedRewards(NamedTuple):
    """Rewards with their assignment to groups.

    Attributes:
      rewards: float[P, G], or float[B] with group ids; 0 where unscorable (NaN).
      valid: bool of the shape of rewards: False where unscorable.
      same: bool[B, B], whether two completions share a prompt; None where the groups are the rows of [P, G].
    """

    rewards: jax.Array
    valid: jax.Array
    same: jax.Array | None

    def by_group(self, reduction: Callable[..., jax.Array], x: jax.Array, fill: float = 0) -> jax.Array:
        """Apply ``jnp.sum``, ``jnp.max``, ... to x over each group, to broadcast; ``fill``: its neutral element."""
        if self.same is None:
            return reduction(x, axis=1, keepdims=True)
        return reduction(jnp.where(self.same, x.reshape(-1)[None, :], fill), axis=1).reshape(x.shape)

    def centred(self) -> tuple[jax.Array, jax.Array]:
        """Return ``R_i - mean_group`` (exactly 0 if invalid or all are equal) and each group's number of scored
        rewards.
        """
        count = self.by_group(jnp.sum, self.valid.astype(self.rewards.dtype))
        mean = self.by_group(jnp.sum, self.rewards) / jnp.maximum(count, 1)
        high = self.by_group(jnp.max, jnp.where(self.valid, self.rewards, -jnp.inf), -jnp.inf)
        low = self.by_group(jnp.min, jnp.where(self.valid, self.rewards, jnp.inf), jnp.inf)
        return jnp.where(self.valid & (high > low), self.rewards - mean, 0), count


def group_rewards(rewards: FloatPG, context: AdvantageContext | None, grouped: bool = True) -> GroupedRewards:
    """Group the rewards of the global batch: by the rows of [P, G], or by ``context.group_ids`` where given. An
    estimator that does not compare completions of one prompt passes ``grouped=False`` and may pass [B] as well.
    """
    rewards = as_array(rewards, "rewards", "any")
    ids = None if context is None else context.group_ids
    if ids is None:
        if rewards.ndim != 2 and (grouped or rewards.ndim != 1):
            raise ValueError(f"rewards must be [P, G], got shape {rewards.shape}, or [B] with context.group_ids")
        same = None
    else:
        if rewards.ndim not in (1, 2):
            raise ValueError(f"rewards must be [B] or [P, G] with context.group_ids, got shape {rewards.shape}")
        ids = as_array(ids, "context.group_ids", "integers")
        if ids.shape not in (rewards.shape, (rewards.size,)):
            raise ValueError(f"context.group_ids must have shape {(rewards.size,)}, got {ids.shape}")
        ids = ids.reshape(-1)
        same = ids[:, None] == ids[None, :]
    valid = ~jnp.isnan(rewards)
    return GroupedRewards(jnp.where(valid, rewards, 0), valid, same)


def context_arrays(context: AdvantageContext | None, owner: str, rows: int, *names: str) -> tuple[jax.Array, ...]:
    """Return the context's arrays of these names, [B, T] each with B = ``rows``; ``mask`` (bool) comes first."""
    arrays: list[Any] = [getattr(context, name, None) for name in names]
    for name, x in zip(names, arrays, strict=True):
        if x is None:
            raise ValueError(f"{owner} needs context.{name}: pass AdvantageContext({name}=...) of the global batch")
    check_rank(2, **{f"context.{names[0]}": arrays[0]})
    shape = (rows, jnp.shape(arrays[0])[1])
    mask = as_mask(arrays[0], shape, f"context.{names[0]}")
    float_arrays = {f"context.{name}": x for name, x in zip(names[1:], arrays[1:], strict=True)}
    check_shape(shape, **float_arrays)
    return mask, *(as_array(x, name) for name, x in float_arrays.items())


def clean_step_rewards(context: AdvantageContext | None, owner: str, mask: jax.Array, dtype: Any) -> jax.Array:
    """Return ``context.step_rewards`` [B, T] with 0 in place of NaN and where the mask is False."""
    _, steps = context_arrays(context, owner, mask.shape[0], "mask", "step_rewards")
    return jnp.where(mask & ~jnp.isnan(steps), steps, 0).astype(dtype)


def whiten(x: jax.Array, counts: jax.Array, ddof: int = 1, eps: float = 1e-8) -> jax.Array:
    """Return ``(x - mean) / sqrt(var + eps)`` of ``x``, any shape, over the entries that count (``counts``, bool of
    that shape), 0 elsewhere; exactly 0 if all are equal. ``n / (n - 1)`` of a single entry is never formed.
    """
    count = jnp.sum(counts, dtype=x.dtype)
    mean = jnp.sum(jnp.where(counts, x, 0)) / jnp.maximum(count, 1)
    centre = jnp.where(counts, x - mean, 0)
    variance = jnp.sum(centre**2) / jnp.maximum(count - ddof, 1)
    differ = jnp.max(jnp.where(counts, x, -jnp.inf)) > jnp.min(jnp.where(counts, x, jnp.inf))
    # The root of 0 has an infinite slope, and eps may be 0.
    return jnp.where(differ, centre * jax.lax.rsqrt(jnp.where(variance > 0, variance, 1) + eps), 0)


def divide_by_std(x: jax.Array, variance: jax.Array, eps: float) -> jax.Array:
    """Return ``x / (sqrt(variance) + eps)``; 0 where the variance is 0."""
    std = jnp.sqrt(jnp.where(variance > 0, variance, 1))
    return jnp.where(variance > 0, x / (std + eps), 0)


def suffix_sum(x: jax.Array) -> jax.Array:
    """Return ``y_t = sum_{s >= t} x_s`` along the last axis."""
    return jnp.flip(jnp.cumsum(jnp.flip(x, -1), axis=-1), -1)


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


def returns(advantages: FloatBT, values: FloatBT) -> jax.Array:
    """Return ``A_t + V_t`` [B, T], the targets of the value loss, for unwhitened advantages (arXiv 1506.02438)."""
    advantages = as_array(advantages, "advantages")
    values = as_array(values, "values")
    check_rank(2, advantages=advantages)
    check_shape(advantages.shape, values=values)
    return jax.lax.stop_gradient(advantages + values.astype(advantages.dtype))


def value_loss(
    values: FloatBT,
    targets: FloatBT,
    mask: FloatBT,
    old_values: FloatBT | None = None,
    clip: float | None = None,
    token_count: ArrayLike | None = None,
) -> jax.Array:
    """Compute ``0.5 mean_t max((V - Ret)^2, (V_old + clip(V - V_old, -clip, clip) - Ret)^2)``. The half and the clip
    are conventions of code; the paper's loss is ``(V - Ret)^2`` (arXiv 1707.06347, eq. 9). PPO's whole loss is
    ``policy_loss + c_v value_loss``, with the entropy bonus inside ``policy_loss``.

    Args:
      values: float[B, T], with gradient.
      targets: ``returns``, float[B, T].
      mask: [B, T], 1 where a token counts.
      old_values: float[B, T], those at the start of the batch's updates; needed with ``clip``.
      clip: how far a value may move from its old one; None for no bound.
      token_count: valid tokens of the whole optimiser step; None for this batch's own.

    ValueError: an array has another shape, or ``clip`` is given without ``old_values``.
    """
    values = as_array(values, "values")
    check_rank(2, values=values)
    keep = as_mask(mask, values.shape, "mask")
    check_shape(values.shape, targets=targets, old_values=old_values)

    def clean(x: Any, name: str) -> jax.Array:
        return jnp.where(keep, as_array(x, name).astype(values.dtype), 0)

    value = clean(values, "values")
    target = jax.lax.stop_gradient(clean(targets, "targets"))
    loss = (value - target) ** 2
    if clip is not None:
        if old_values is None or not clip > 0:
            raise ValueError(f"clip={clip} is a distance from old_values: it must be above 0, and they must be given")
        old = jax.lax.stop_gradient(clean(old_values, "old_values"))
        loss = jnp.maximum(loss, (old + jnp.clip(value - old, -clip, clip) - target) ** 2)
    return 0.5 * jnp.sum(loss) / divisor(token_count, keep, "token_count", loss.dtype)


class Estimator:
    """The interface of an estimator and its defaults; a new estimator overrides those that differ.

    Attributes:
      needs: fields of the context that it reads.
      by_token: whether it returns [B, T].
      several: whether it takes all rewards of a completion, [P, G, n], instead of their sum.
      compares: whether it compares completions of one prompt, so that a single completion gives no signal.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    by_token: ClassVar[bool] = False
    several: ClassVar[bool] = False
    compares: ClassVar[bool] = True
    __post_init__ = check_self

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return the advantages; the module docstring gives the shapes."""
        raise NotImplementedError

    def with_returns(self, rewards: FloatPG, context: AdvantageContext) -> tuple[jax.Array, jax.Array]:
        """Return advantages and the critic's targets, [B, T] each, for an estimator that needs values."""
        advantages = self(rewards, context)
        return advantages, returns(advantages, context.values)


@dataclasses.dataclass(frozen=True)
class GroupMean(Estimator):
    """``A_i = R_i - mean(R)``: Dr. GRPO (arXiv 2503.20783), also Kimi k1.5, DeepSeek-V3.2 and MiniRL. The mean includes
    the completion itself, so the policy gradient is 1 - 1/G of the unbiased one.
    """

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        return group_rewards(rewards, context).centred()[0]


@dataclasses.dataclass(frozen=True)
class GroupZScore(Estimator):
    """``A_i = (R_i - mean(R)) / (std(R) + eps)``: GRPO (arXiv 2402.03300, section 4.1.2). The paper specifies neither
    the deviation nor eps. Ours is the sample deviation (ddof 1) with 1e-6, as in verl; TRL adds 1e-4. ``jnp.std``
    defaults to the population's (ddof 0), which scales A by sqrt(G / (G - 1)).
    """

    ddof: Annotated[int, AT_LEAST_0] = 1
    eps: Annotated[float, AT_LEAST_0] = 1e-6

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        groups = group_rewards(rewards, context)
        centre, count = groups.centred()
        return divide_by_std(centre, groups.by_group(jnp.sum, centre**2) / jnp.maximum(count - self.ddof, 1), self.eps)


@dataclasses.dataclass(frozen=True)
class LeaveOneOut(Estimator):
    """``A_i = R_i - mean_{j != i}(R_j) = G / (G - 1) (R_i - mean(R))``: RLOO (arXiv 2402.14740)."""

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        centre, count = group_rewards(rewards, context).centred()
        return centre * count / jnp.maximum(count - 1, 1)


@dataclasses.dataclass(frozen=True)
class BatchScaled(Estimator):
    """``A_i = (R_i - mean_group(R)) / (std_batch + eps)``: Lite-PPO (arXiv 2508.08221). ``of="rewards"`` divides by the
    deviation of the raw rewards over the batch (TRL's ``scale_rewards="batch"``), ``"advantages"`` by that of the
    centred rewards (ScaleRL, arXiv 2510.13786; ms-swift's REINFORCE++-baseline).
    """

    of: Literal["rewards", "advantages"] = "rewards"
    ddof: Annotated[int, AT_LEAST_0] = 1
    eps: Annotated[float, AT_LEAST_0] = 1e-6

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        groups = group_rewards(rewards, context)
        centre, _ = groups.centred()
        x = groups.rewards if self.of == "rewards" else centre
        count = jnp.sum(groups.valid, dtype=centre.dtype)
        deviation = jnp.where(groups.valid, x - jnp.sum(jnp.where(groups.valid, x, 0)) / jnp.maximum(count, 1), 0)
        return divide_by_std(centre, jnp.sum(deviation**2) / jnp.maximum(count - self.ddof, 1), self.eps)


@dataclasses.dataclass(frozen=True)
class GDPO(Estimator):
    """Group-normalised rewards, summed with weights, then normalised over the batch (arXiv 2601.05242). A sum of raw
    rewards would drown those of small scale. ``weights``: one for each reward; () gives each 1, and in a run the
    reward's own.
    """

    weights: tuple[float, ...] = ()
    ddof: Annotated[int, AT_LEAST_0] = 1
    eps: Annotated[float, AT_LEAST_0] = 1e-6
    several: ClassVar[bool] = True

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return advantages [P, G] for rewards float[P, G, n], or [B] for rewards float[B, n] with group ids.
        ValueError: no axis n, or another number of weights.
        """
        rewards = as_array(rewards, "rewards", "any")
        axes = 2 if context is not None and context.group_ids is not None and rewards.ndim == 2 else 3
        if rewards.ndim != axes:
            raise ValueError(f"rewards must be [P, G, n] for GDPO, all rewards of a completion; got {rewards.shape}")
        weights = self.weights or (1.0,) * rewards.shape[-1]
        if len(weights) != rewards.shape[-1]:
            raise ValueError(f"GDPO.weights has {len(weights)} entries, the last axis of rewards {rewards.shape[-1]}")
        valid = ~jnp.any(jnp.isnan(rewards), axis=-1)
        normalise = GroupZScore(self.ddof, self.eps)
        terms = [w * normalise(jnp.where(valid, rewards[..., n], jnp.nan), context) for n, w in enumerate(weights)]
        total = sum(terms)
        size = sum(jnp.abs(x) for x in terms)
        # Rewards that cancel leave a rounding residue, which dividing by its own deviation would blow up.
        total = jnp.where(jnp.abs(total) > 16 * jnp.finfo(total.dtype).eps * size, total, 0)
        # Its mean over the batch is 0 as it is, since every group's is.
        count = jnp.sum(valid, dtype=total.dtype)
        return divide_by_std(total, jnp.sum(total**2) / jnp.maximum(count - self.ddof, 1), self.eps)


@dataclasses.dataclass(frozen=True)
class Whitened(Estimator):
    """Returns whitened over all valid tokens of the batch: REINFORCE++ (arXiv 2501.03262).

    ``G_t = R + sum_{s >= t} step_s``, then ``(G - mean) / sqrt(var + eps)``. Rewards of single tokens come from
    ``context.step_rewards``, if given, for example a KL in the reward. ``baseline="group"`` first subtracts the
    group's mean from R: REINFORCE++-baseline, ProRL v2. Whitening over tokens weights long completions more, so that
    the advantages of a group no longer sum to 0, and a group of equal rewards gets a small constant.

    Frameworks differ in the deviation: verl takes ddof 1 and adds 1e-8 to the variance, OpenRLHF and NeMo-RL ddof 0.
    """

    baseline: Literal["batch", "group"] = "batch"
    ddof: Annotated[int, AT_LEAST_0] = 1
    eps: Annotated[float, AT_LEAST_0] = 1e-8
    needs: ClassVar[tuple[str, ...]] = ("mask",)
    by_token: ClassVar[bool] = True

    @property
    def compares(self) -> bool:
        """Whether the baseline is the mean of the group."""
        return self.baseline == "group"

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[B, T] for rewards float[P, G]; the context has mask and perhaps step_rewards [B, T]."""
        groups = group_rewards(rewards, context, self.baseline == "group")
        (mask,) = context_arrays(context, "Whitened", groups.rewards.size, "mask")
        outcome = groups.centred()[0] if self.baseline == "group" else groups.rewards
        counts = mask & groups.valid.reshape(-1, 1)
        to_come = jnp.broadcast_to(outcome.reshape(-1, 1), mask.shape)
        if context.step_rewards is not None:
            to_come += suffix_sum(clean_step_rewards(context, "Whitened", mask, to_come.dtype))
        return whiten(to_come, counts, self.ddof, self.eps)


@dataclasses.dataclass(frozen=True)
class ProcessSupervised(Estimator):
    """``A_t = sum of the normalised rewards of the steps that end at t or later``: GRPO (arXiv 2402.03300, sec. 4.1.3).

    ``context.step_rewards`` holds a step's reward at the step's last token and NaN everywhere else (0 is a valid
    reward). Mean and deviation are over all steps of the group. More steps make larger advantages. The outcome rewards
    define the groups; an unscorable one excludes the steps of its completion.
    """

    ddof: Annotated[int, AT_LEAST_0] = 1
    eps: Annotated[float, AT_LEAST_0] = 1e-6
    needs: ClassVar[tuple[str, ...]] = ("mask", "step_rewards")
    by_token: ClassVar[bool] = True

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[B, T] for rewards float[P, G]; the context has mask and step_rewards [B, T]."""
        groups = group_rewards(rewards, context)
        mask, steps = context_arrays(context, "ProcessSupervised", groups.rewards.size, *self.needs)
        ends = mask & ~jnp.isnan(steps) & groups.valid.reshape(-1, 1)
        shape = groups.rewards.shape

        def total(x: jax.Array) -> jax.Array:
            """Return the sum over the steps of each group, repeated for each of its completions: [B, 1]."""
            rows = groups.by_group(jnp.sum, jnp.sum(jnp.where(ends, x, 0), axis=1).reshape(shape))
            return jnp.broadcast_to(rows, shape).reshape(-1, 1)

        high = groups.by_group(jnp.max, jnp.max(steps, axis=1, where=ends, initial=-jnp.inf).reshape(shape), -jnp.inf)
        low = groups.by_group(jnp.min, jnp.min(steps, axis=1, where=ends, initial=jnp.inf).reshape(shape), jnp.inf)
        differ = jnp.broadcast_to(high > low, shape).reshape(-1, 1)
        count = total(jnp.ones_like(steps))
        centre = jnp.where(ends & differ, steps - total(steps) / jnp.maximum(count, 1), 0)
        normal = divide_by_std(centre, total(centre**2) / jnp.maximum(count - self.ddof, 1), self.eps)
        return jnp.where(mask, suffix_sum(normal), 0)


@dataclasses.dataclass(frozen=True)
class GAE(Estimator):
    """``A_t = delta_t + gamma lam A_{t+1}``, ``delta_t = r_t + gamma V_{t+1} - V_t`` (arXiv 1506.02438).

    The outcome reward is added at the last valid token, ``context.step_rewards`` (if given) at their own. Tokens that
    the policy did not sample (tool output) are skipped: the token before them uses the value and the advantage after
    them. The value after the last token is 0, also for a completion that was cut off; with ``bootstrap`` it is
    ``context.bootstrap``. ``whiten`` normalises over the batch's valid tokens, as TRL and verl do and the paper does
    not; the targets of the value loss are computed before that (``with_returns``).
    """

    gamma: Annotated[float, AT_LEAST_0] = 1.0
    lam: Annotated[float, AT_LEAST_0] = 0.95
    whiten: bool = False
    bootstrap: bool = False
    by_token: ClassVar[bool] = True
    compares: ClassVar[bool] = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the fields of the context that it reads."""
        return ("mask", "values") + ("bootstrap",) * self.bootstrap

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[B, T] for rewards float[P, G]; the context has mask, values, perhaps step_rewards [B, T]."""
        return self.with_returns(rewards, context)[0]

    def with_returns(self, rewards: FloatPG, context: AdvantageContext | None = None) -> tuple[jax.Array, jax.Array]:
        """Return advantages and the critic's targets, ``A_t + V_t`` of the advantages before whitening; [B, T] each.
        Both are 0 where the mask is False and where the reward is unscorable.
        """
        groups = group_rewards(rewards, context, False)
        mask, values = context_arrays(context, "GAE", groups.rewards.size, "mask", "values")
        counts = mask & groups.valid.reshape(-1, 1)
        last = mask & (jnp.cumsum(mask, axis=1) == jnp.sum(mask, axis=1, keepdims=True))
        token_rewards = jnp.where(last, groups.rewards.reshape(-1, 1), 0)
        if context.step_rewards is not None:
            token_rewards += clean_step_rewards(context, "GAE", mask, token_rewards.dtype)
        values = values.astype(token_rewards.dtype)
        after = jnp.zeros_like(values[:, 0])
        if self.bootstrap:
            if context.bootstrap is None:
                raise ValueError(
                    "GAE needs context.bootstrap: pass AdvantageContext(bootstrap=...) of the global batch"
                )
            check_shape((groups.rewards.size,), **{"context.bootstrap": context.bootstrap})
            after = as_array(context.bootstrap, "context.bootstrap").astype(values.dtype)
        advantages = jnp.where(counts, gae(token_rewards, values, mask, self.gamma, self.lam, after), 0)
        targets = jnp.where(counts, returns(advantages, values), 0)
        return whiten(advantages, counts) if self.whiten else advantages, targets


@dataclasses.dataclass(frozen=True)
class KLInReward(Estimator):
    """A wrapper that adds ``-coef * kl(old, reference)`` to the reward of each token of another estimator.

    ``Algorithm`` wraps its estimator in it where ``kl_in="reward"`` and the coefficient is not 0. The KL is estimated
    for the policy that sampled, a constant in the loss: KL in the reward passes through returns and baselines, so k1 is
    right here and wrong as a loss. An outcome estimator gets the sum over the sequence (RLOO, arXiv 2402.14740), one
    that works by token gets it at each token (REINFORCE++, PPO; arXiv 2203.02155).
    """

    estimator: Any
    kl: Any
    coef: Annotated[float, ABOVE_0]

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the fields of the context that it reads."""
        return tuple(dict.fromkeys(("mask", "old_logp", "ref_logp", *self.estimator.needs)))

    @property
    def by_token(self) -> bool:
        """Whether it returns [B, T]."""
        return self.estimator.by_token

    @property
    def compares(self) -> bool:
        """Whether it compares completions of one prompt."""
        return getattr(self.estimator, "compares", True)

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return the estimator's advantages for rewards float[P, G]; mask, old_logp and ref_logp [B, T] are read."""
        return self.estimator(*self.penalised(rewards, context, self.coef))

    def with_returns(self, rewards: FloatPG, context: AdvantageContext) -> tuple[jax.Array, jax.Array]:
        """Return advantages and the critic's targets, [B, T] each, for an estimator with a critic."""
        return self.estimator.with_returns(*self.penalised(rewards, context, self.coef))

    def penalised(self, rewards: FloatPG, context: AdvantageContext | None, coef: ArrayLike) -> tuple[jax.Array, Any]:
        """Return rewards and context with the penalty added to the outcome, or to ``step_rewards`` at each token.
        ``coef`` may be traced, for controllers.
        """
        rewards = as_array(rewards, "rewards", "any")
        arrays = context_arrays(context, "a KL in the reward", rewards.size, "mask", "old_logp", "ref_logp")
        mask, *logps = arrays
        clean = [jnp.where(mask, jnp.maximum(x.astype(rewards.dtype), LOWEST_LOGP), 0) for x in logps]
        penalty = -coef * self.kl(*clean)
        if not self.by_token:
            return rewards + jnp.sum(penalty, axis=1).reshape(rewards.shape), context
        if context.step_rewards is not None:
            penalty += clean_step_rewards(context, "a KL in the reward", mask, penalty.dtype)
        return rewards, context._replace(step_rewards=penalty)


@dataclasses.dataclass(frozen=True)
class MaxRL(Estimator):
    """``A_i = (R_i - mean(R)) / mean(R)``, 0 in a group without a success: MaxRL (arXiv 2602.02710).

    For rewards of 0 and 1 and groups of G, the expected gradient is that of ``sum_{k=1}^{G-1} pass@k / k``, which
    tends to that of log pass@1, the likelihood of a success, as G grows; that of the mean reward is its first term. So
    hard prompts weigh more. Rewards must not be negative: where the mean is 0 or less, the advantage is 0.
    """

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        groups = group_rewards(rewards, context)
        centre, count = groups.centred()
        mean = groups.by_group(jnp.sum, groups.rewards) / jnp.maximum(count, 1)
        return jnp.where(mean > 0, centre / jnp.where(mean > 0, mean, 1), 0)


@dataclasses.dataclass(frozen=True)
class PassAtK(Estimator):
    """``A_i = mean_S(max_S R - max_{S without i} R)`` over the sets S of k completions of the group that hold i.

    Leave-one-out pass@k (arXiv 2503.19595; k below the group's size: arXiv 2505.15201). For rewards of 0 and 1 with c
    successes among n, a success gets ``C(n - c, k - 1) / C(n - 1, k - 1)`` and a failure 0. It is unbiased: the sum of
    ``A_i grad logp_i`` over the group is, in expectation, n / k times the gradient of pass@k, the expected best of k.
    Dividing by a deviation, as verl's ``grpo_passk`` does, would bias it. With k = n two successes give no signal.

    Attributes:
      k: how many tries are judged by their best; at least 2. None, or more than the group has: the whole group.
    """

    k: Annotated[int | None, Range("[2, inf)", words="at least 2")] = None

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        groups = group_rewards(rewards, context)
        together = groups.same is None
        x, valid = (y if together else y.reshape(1, -1) for y in (groups.rewards, groups.valid))
        same = valid[:, None, :] & (valid[:, :, None] if together else (groups.same[None] & valid[:, :, None]))
        later = np.triu(np.ones((1, x.shape[1], x.shape[1]), bool), 1)
        # Of two equal rewards the earlier ranks higher: it gains 0 over the other, whichever it is.
        behind = (x[:, None, :] < x[:, :, None]) | ((x[:, None, :] == x[:, :, None]) & later)
        behind = behind & same
        rank = jnp.sum(behind, axis=2).astype(x.dtype)
        count = jnp.sum(same, axis=2).astype(x.dtype)
        k = count if self.k is None else jnp.minimum(self.k, count)
        # With i best and j second, the other k - 2 are from behind j: C(rank_j, k - 2) of C(n - 1, k - 1) sets.
        share = jnp.maximum(k - 1, 0) / jnp.maximum(count - 1, 1)
        for t in range(x.shape[1] - 2 if self.k is None else min(self.k, x.shape[1]) - 2):
            share = share * jnp.where(t < k - 2, jnp.maximum(rank - t, 0) / jnp.maximum(count - 2 - t, 1), 1)
        gains = jnp.where(behind, (x[:, :, None] - x[:, None, :]) * share[:, None, :], 0)
        return jnp.sum(gains, axis=2).reshape(groups.rewards.shape)


class Turns(NamedTuple):
    """Turns of a batch of completions.

    Attributes:
      ends: bool[B, T], True at the last token of each turn.
      rewards: float[B, T], of turns at their ends, 0 elsewhere.
      number: int32[B, T], of the turn that the token belongs to, from 0.
      count: int32[B, 1], turns of the completion.
      mask: bool[B, T], the tokens that get an advantage.
    """

    ends: jax.Array
    rewards: jax.Array
    number: jax.Array
    count: jax.Array
    mask: jax.Array


def split_turns(rewards: jax.Array, context: AdvantageContext | None, owner: str) -> Turns:
    """Return the turns in ``context.turn_rewards``: none of completions with an unscorable reward (NaN); of completions
    that the loss leaves out theirs, since their rewards count.
    """
    groups = group_rewards(rewards, context)
    mask, turn_rewards = context_arrays(context, owner, groups.rewards.size, "mask", "turn_rewards")
    ends = ~jnp.isnan(turn_rewards) & groups.valid.reshape(-1, 1)
    done = jnp.cumsum(ends, axis=1, dtype=jnp.int32)
    number, count = done - ends.astype(jnp.int32), done[:, -1:]
    return Turns(
        ends, jnp.where(ends, turn_rewards, 0).astype(groups.rewards.dtype), number, count, mask & (number < count)
    )


@dataclasses.dataclass(frozen=True)
class GiGPO(Estimator):
    """``A = A_E + omega A_S``: group-in-group policy optimisation (arXiv 2505.10978).

    A_E compares the episodes of a prompt, ``(R - mean) / (std + eps)``. A_S compares their turns that begin in equal
    states in the same way, by returns ``R_k = sum_{j >= k} gamma^(j - k) r_j``; it is 0 for a state that occurs once.
    ``context.states`` tells which are equal. Without ``std`` neither is divided.

    An episode counts once in the mean of A_E; verl-agent counts it once for each of its turns. The sample deviation
    (ddof 1) and eps are verl-agent's.
    """

    omega: Annotated[float, AT_LEAST_0] = 1.0
    gamma: Annotated[float, Range("[0, 1]")] = 0.95
    std: bool = True
    ddof: Annotated[int, AT_LEAST_0] = 1
    eps: Annotated[float, AT_LEAST_0] = 1e-6
    needs: ClassVar[tuple[str, ...]] = ("mask", "turn_rewards", "states")
    by_token: ClassVar[bool] = True

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[B, T] for rewards float[P, G]; the context has mask, turn_rewards and states [B, T]."""
        rewards = as_array(rewards, "rewards", "any")
        turns = split_turns(rewards, context, "GiGPO")
        if context.states is None:
            raise ValueError("GiGPO needs context.states: pass AdvantageContext(states=...) of the global batch")
        check_shape(turns.ends.shape, **{"context.states": context.states})
        of_episodes = GroupZScore(self.ddof, self.eps) if self.std else GroupMean()
        episodes = of_episodes(rewards, context).reshape(-1, 1)
        states = as_array(context.states, "context.states", "integers")
        places = jnp.where(turns.ends, jnp.arange(states.shape[1]), states.shape[1] - 1)
        ends = jax.lax.cummin(places, axis=1, reverse=True)
        of_states = jnp.take_along_axis(self.by_state(turns, states), ends, axis=1)
        return jnp.where(turns.mask, episodes + self.omega * of_states, 0)

    def by_state(self, turns: Turns, states: jax.Array) -> jax.Array:
        """Return A_S at the ends of turns, [B, T]."""
        turn_returns = discounted_returns(turns.rewards, turns.ends, self.gamma).reshape(-1)
        ends = turns.ends.reshape(-1)
        size = len(ends)
        ids = jnp.where(ends, states.reshape(-1), size)

        def total(x: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(jnp.where(ends, x, 0), ids, size + 1)[ids]

        high, low = (reduce(turn_returns, ids, size + 1)[ids] for reduce in (jax.ops.segment_max, jax.ops.segment_min))
        count = jnp.maximum(total(jnp.ones_like(turn_returns)), 1)
        centre = jnp.where(ends & (high > low), turn_returns - total(turn_returns) / count, 0)
        if self.std:
            centre = divide_by_std(centre, total(centre**2) / jnp.maximum(count - self.ddof, 1), self.eps)
        return centre.reshape(turns.ends.shape)


@dataclasses.dataclass(frozen=True)
class MTGRPO(Estimator):
    """``A_O + coef A_T`` before the environment answers, ``A_O`` in the last turn: MT-GRPO (arXiv 2505.11821).

    A_T is the z-score in the group of the turn's reward, A_O that of the last turn's, the outcome. An episode of a
    single turn has the z-score of its whole reward. The authors' code has one answer; with several, each turn before an
    answer is compared with the turns of the same number, which is ours. A turn that an episode does not have gave 0.
    """

    coef: Annotated[float, AT_LEAST_0] = 1.0
    ddof: Annotated[int, AT_LEAST_0] = 1
    eps: Annotated[float, AT_LEAST_0] = 1e-6
    needs: ClassVar[tuple[str, ...]] = ("mask", "turn_rewards")
    by_token: ClassVar[bool] = True

    def __call__(self, rewards: FloatPG, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[B, T] for rewards float[P, G]; the context has mask and turn_rewards [B, T]."""
        rewards = as_array(rewards, "rewards", "any")
        turns = split_turns(rewards, context, "MTGRPO")
        normal = GroupZScore(self.ddof, self.eps)

        def compared(x: jax.Array) -> jax.Array:
            """Return the z-scores [B] of values [B], those of unscorable completions left out."""
            scorable = jnp.where(jnp.isnan(rewards), jnp.nan, x.reshape(rewards.shape))
            return normal(scorable, context).reshape(-1)

        answered = turns.ends & (turns.number < turns.count - 1)
        rows = jnp.arange(len(turns.ends))[:, None]
        by_number = jnp.zeros_like(turns.rewards).at[rows, turns.number].add(jnp.where(answered, turns.rewards, 0))
        of_turns = jax.vmap(compared, in_axes=1, out_axes=1)(by_number)
        outcome = compared(jnp.sum(jnp.where(answered, 0, turns.rewards), axis=1))[:, None]
        before = jnp.where(turns.number < turns.count - 1, jnp.take_along_axis(of_turns, turns.number, axis=1), 0)
        advantages = jnp.where(turns.count > 1, outcome + self.coef * before, compared(rewards.reshape(-1))[:, None])
        return jnp.where(turns.mask, advantages, 0)


def discounted_returns(rewards: jax.Array, ends: jax.Array, gamma: float) -> jax.Array:
    """Return ``R_k = sum_{j >= k} gamma^(j - k) r_j`` at the ends of turns, from their rewards there: float[B, T]."""

    def back(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, end = now
        discounted_return = jnp.where(end, reward + gamma * later, later)
        return discounted_return, discounted_return

    return jax.lax.scan(back, jnp.zeros_like(rewards[:, 0]), (rewards.T, ends.T), reverse=True)[1].T
