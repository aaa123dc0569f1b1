"""Advantage estimators: map rewards [P, G] to advantages, by completion [P, G] or by token [B, T].

An estimator is a callable frozen dataclass, so it can be a static argument and a field of ``Algorithm``. It takes its
other inputs from an ``AdvantageContext`` of the global batch, which has B = P * G rows in the order of the rewards; an
error names the missing field. Groups are the rows of [P, G], or explicit ``group_ids``; they are never guessed.

The advantage is exactly 0 where all rewards of a group are equal (max == min: in float32 their mean may differ from
them, and dividing that residue by a tiny deviation would make advantages out of nothing). An unscorable reward (NaN) is
excluded from the statistics and gets 0.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.contracts import ABOVE_0, AT_LEAST_0, array, shaped, within_bounds
from jaxrl_llm.algorithms.grouping import context_arrays, divided, scores, steps_of, suffix_sum, whiten
from jaxrl_llm.algorithms.tokens import LOWEST_LOGP
from jaxrl_llm.algorithms.values import gae, returns
from jaxrl_llm.types import AdvantageContext


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
    __post_init__ = within_bounds

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return the advantages; the module docstring gives the shapes."""
        raise NotImplementedError

    def with_returns(self, rewards: Any, context: AdvantageContext) -> tuple[jax.Array, jax.Array]:
        """Return advantages and the critic's targets, [B, T] each, for an estimator that needs values."""
        advantages = self(rewards, context)
        return advantages, returns(advantages, context.values)


@dataclasses.dataclass(frozen=True)
class GroupMean(Estimator):
    """``A_i = R_i - mean(R)``: Dr. GRPO (arXiv 2503.20783), also Kimi k1.5, DeepSeek-V3.2 and MiniRL.

    The mean includes the completion itself, so the policy gradient is 1 - 1/G of the unbiased one.
    """

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        return scores(rewards, context).centred()[0]


@dataclasses.dataclass(frozen=True)
class GroupZScore(Estimator):
    """``A_i = (R_i - mean(R)) / (std(R) + eps)``: GRPO (arXiv 2402.03300, section 4.1.2).

    The paper specifies neither the deviation nor eps. Ours is the sample deviation (ddof 1) with 1e-6, as in verl; TRL
    adds 1e-4. ``jnp.std`` defaults to the population's (ddof 0), which scales A by sqrt(G / (G - 1)).
    """

    ddof: Annotated[int, AT_LEAST_0] = 1
    eps: Annotated[float, AT_LEAST_0] = 1e-6

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        given = scores(rewards, context)
        centre, count = given.centred()
        return divided(centre, given.by_group(jnp.sum, centre**2) / jnp.maximum(count - self.ddof, 1), self.eps)


@dataclasses.dataclass(frozen=True)
class LeaveOneOut(Estimator):
    """``A_i = R_i - mean_{j != i}(R_j) = G / (G - 1) (R_i - mean(R))``: RLOO (arXiv 2402.14740)."""

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        centre, count = scores(rewards, context).centred()
        return centre * count / jnp.maximum(count - 1, 1)


@dataclasses.dataclass(frozen=True)
class BatchScaled(Estimator):
    """``A_i = (R_i - mean_group(R)) / (std_batch + eps)``: Lite-PPO (arXiv 2508.08221).

    ``of="rewards"`` divides by the deviation of the raw rewards over the batch (TRL's ``scale_rewards="batch"``),
    ``"advantages"`` by that of the centred rewards (ScaleRL, arXiv 2510.13786; ms-swift's REINFORCE++-baseline).
    """

    of: Literal["rewards", "advantages"] = "rewards"
    ddof: Annotated[int, AT_LEAST_0] = 1
    eps: Annotated[float, AT_LEAST_0] = 1e-6

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        given = scores(rewards, context)
        centre, _ = given.centred()
        x = given.rewards if self.of == "rewards" else centre
        count = jnp.sum(given.valid, dtype=centre.dtype)
        deviation = jnp.where(given.valid, x - jnp.sum(jnp.where(given.valid, x, 0)) / jnp.maximum(count, 1), 0)
        return divided(centre, jnp.sum(deviation**2) / jnp.maximum(count - self.ddof, 1), self.eps)


@dataclasses.dataclass(frozen=True)
class GDPO(Estimator):
    """Group-normalised rewards, summed with weights, then normalised over the batch (arXiv 2601.05242).

    A sum of raw rewards would drown those of small scale. ``weights``: one for each reward; () gives each 1, and in a
    run the weight of its reward.
    """

    weights: tuple[float, ...] = ()
    ddof: Annotated[int, AT_LEAST_0] = 1
    eps: Annotated[float, AT_LEAST_0] = 1e-6
    several: ClassVar[bool] = True

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return advantages [P, G] for rewards float[P, G, n], or [B] for rewards float[B, n] with group ids.

        Raises:
          ValueError: rewards have no axis n, or its length differs from the number of weights.
        """
        rewards = array(rewards, "rewards", "any")
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
        return divided(total, jnp.sum(total**2) / jnp.maximum(count - self.ddof, 1), self.eps)


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

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[B, T] for rewards float[P, G]; the context has mask and perhaps step_rewards [B, T]."""
        given = scores(rewards, context, self.baseline == "group")
        (mask,) = context_arrays(context, "Whitened", given.rewards.size, "mask")
        outcome = given.centred()[0] if self.baseline == "group" else given.rewards
        counts = mask & given.valid.reshape(-1, 1)
        to_come = jnp.broadcast_to(outcome.reshape(-1, 1), mask.shape)
        if context.step_rewards is not None:
            to_come += suffix_sum(steps_of(context, "Whitened", mask, to_come.dtype))
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

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[B, T] for rewards float[P, G]; the context has mask and step_rewards [B, T]."""
        given = scores(rewards, context)
        mask, steps = context_arrays(context, "ProcessSupervised", given.rewards.size, *self.needs)
        ends = mask & ~jnp.isnan(steps) & given.valid.reshape(-1, 1)
        shape = given.rewards.shape

        def total(x: jax.Array) -> jax.Array:
            """Return the sum over the steps of each group, repeated for each of its completions: [B, 1]."""
            rows = given.by_group(jnp.sum, jnp.sum(jnp.where(ends, x, 0), axis=1).reshape(shape))
            return jnp.broadcast_to(rows, shape).reshape(-1, 1)

        high = given.by_group(jnp.max, jnp.max(steps, axis=1, where=ends, initial=-jnp.inf).reshape(shape), -jnp.inf)
        low = given.by_group(jnp.min, jnp.min(steps, axis=1, where=ends, initial=jnp.inf).reshape(shape), jnp.inf)
        differ = jnp.broadcast_to(high > low, shape).reshape(-1, 1)
        count = total(jnp.ones_like(steps))
        centre = jnp.where(ends & differ, steps - total(steps) / jnp.maximum(count, 1), 0)
        normal = divided(centre, total(centre**2) / jnp.maximum(count - self.ddof, 1), self.eps)
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

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[B, T] for rewards float[P, G]; the context has mask, values, perhaps step_rewards [B, T]."""
        return self.with_returns(rewards, context)[0]

    def with_returns(self, rewards: Any, context: AdvantageContext | None = None) -> tuple[jax.Array, jax.Array]:
        """Return advantages and the critic's targets, ``A_t + V_t`` of the advantages before whitening; [B, T] each.

        Both are 0 where the mask is False and where the reward is unscorable.
        """
        given = scores(rewards, context, False)
        mask, values = context_arrays(context, "GAE", given.rewards.size, "mask", "values")
        counts = mask & given.valid.reshape(-1, 1)
        last = mask & (jnp.cumsum(mask, axis=1) == jnp.sum(mask, axis=1, keepdims=True))
        token_rewards = jnp.where(last, given.rewards.reshape(-1, 1), 0)
        if context.step_rewards is not None:
            token_rewards += steps_of(context, "GAE", mask, token_rewards.dtype)
        values = values.astype(token_rewards.dtype)
        after = jnp.zeros_like(values[:, 0])
        if self.bootstrap:
            if context.bootstrap is None:
                raise ValueError(
                    "GAE needs context.bootstrap: pass AdvantageContext(bootstrap=...) of the global batch"
                )
            shaped((given.rewards.size,), **{"context.bootstrap": context.bootstrap})
            after = array(context.bootstrap, "context.bootstrap").astype(values.dtype)
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

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return the estimator's advantages for rewards float[P, G]; mask, old_logp and ref_logp [B, T] are read."""
        return self.estimator(*self.penalised(rewards, context, self.coef))

    def with_returns(self, rewards: Any, context: AdvantageContext) -> tuple[jax.Array, jax.Array]:
        """Return advantages and the critic's targets, [B, T] each, for an estimator with a critic."""
        return self.estimator.with_returns(*self.penalised(rewards, context, self.coef))

    def penalised(self, rewards: Any, context: AdvantageContext | None, coef: Any) -> tuple[jax.Array, Any]:
        """Return rewards and context with the penalty added to the outcome, or to ``step_rewards`` at each token.

        ``coef`` may be traced, for controllers.
        """
        rewards = array(rewards, "rewards", "any")
        arrays = context_arrays(context, "a KL in the reward", rewards.size, "mask", "old_logp", "ref_logp")
        mask, *logps = arrays
        clean = [jnp.where(mask, jnp.maximum(x.astype(rewards.dtype), LOWEST_LOGP), 0) for x in logps]
        penalty = -coef * self.kl(*clean)
        if not self.by_token:
            return rewards + jnp.sum(penalty, axis=1).reshape(rewards.shape), context
        if context.step_rewards is not None:
            penalty += steps_of(context, "a KL in the reward", mask, penalty.dtype)
        return rewards, context._replace(step_rewards=penalty)
