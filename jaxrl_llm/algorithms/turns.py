"""Advantage estimators that give each turn of an episode its own credit: float[B, T], equal within a turn.

They read ``context.turn_rewards``: the reward of each turn at its last token, NaN everywhere else. A turn's reward is
what the environment gave for it; the last one's has all that no turn gave, so that they add up to the completion's
reward.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.advantages import Estimator, GroupMean, GroupZScore
from jaxrl_llm.algorithms.contracts import AT_LEAST_0, array, shaped
from jaxrl_llm.algorithms.grouping import context_arrays, divided, scores
from jaxrl_llm.system.setting import Range
from jaxrl_llm.types import AdvantageContext


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


def turns_of(rewards: jax.Array, context: AdvantageContext | None, owner: str) -> Turns:
    """Return the turns in ``context.turn_rewards``.

    Completions with an unscorable reward (NaN) have none. Those that the loss leaves out have theirs, since their
    rewards count.
    """
    given = scores(rewards, context)
    mask, found = context_arrays(context, owner, given.rewards.size, "mask", "turn_rewards")
    ends = ~jnp.isnan(found) & given.valid.reshape(-1, 1)
    done = jnp.cumsum(ends, axis=1, dtype=jnp.int32)
    number, count = done - ends.astype(jnp.int32), done[:, -1:]
    return Turns(ends, jnp.where(ends, found, 0).astype(given.rewards.dtype), number, count, mask & (number < count))


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

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[B, T] for rewards float[P, G]; the context has mask, turn_rewards and states [B, T]."""
        rewards = array(rewards, "rewards", "any")
        turns = turns_of(rewards, context, "GiGPO")
        if context.states is None:
            raise ValueError("GiGPO needs context.states: pass AdvantageContext(states=...) of the global batch")
        shaped(turns.ends.shape, **{"context.states": context.states})
        of_episodes = GroupZScore(self.ddof, self.eps) if self.std else GroupMean()
        episodes = of_episodes(rewards, context).reshape(-1, 1)
        states = array(context.states, "context.states", "integers")
        places = jnp.where(turns.ends, jnp.arange(states.shape[1]), states.shape[1] - 1)
        ends = jax.lax.cummin(places, axis=1, reverse=True)
        of_states = jnp.take_along_axis(self.by_state(turns, states), ends, axis=1)
        return jnp.where(turns.mask, episodes + self.omega * of_states, 0)

    def by_state(self, turns: Turns, states: jax.Array) -> jax.Array:
        """Return A_S at the ends of turns, [B, T]."""
        found = discounted(turns.rewards, turns.ends, self.gamma).reshape(-1)
        ends = turns.ends.reshape(-1)
        size = len(ends)
        ids = jnp.where(ends, states.reshape(-1), size)

        def total(x: jax.Array) -> jax.Array:
            return jax.ops.segment_sum(jnp.where(ends, x, 0), ids, size + 1)[ids]

        high, low = (reduce(found, ids, size + 1)[ids] for reduce in (jax.ops.segment_max, jax.ops.segment_min))
        count = jnp.maximum(total(jnp.ones_like(found)), 1)
        centre = jnp.where(ends & (high > low), found - total(found) / count, 0)
        if self.std:
            centre = divided(centre, total(centre**2) / jnp.maximum(count - self.ddof, 1), self.eps)
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

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[B, T] for rewards float[P, G]; the context has mask and turn_rewards [B, T]."""
        rewards = array(rewards, "rewards", "any")
        turns = turns_of(rewards, context, "MTGRPO")
        normal = GroupZScore(self.ddof, self.eps)

        def compared(x: jax.Array) -> jax.Array:
            """Return the z-scores [B] of values [B], those of unscorable completions left out."""
            known = jnp.where(jnp.isnan(rewards), jnp.nan, x.reshape(rewards.shape))
            return normal(known, context).reshape(-1)

        answered = turns.ends & (turns.number < turns.count - 1)
        rows = jnp.arange(len(turns.ends))[:, None]
        by_number = jnp.zeros_like(turns.rewards).at[rows, turns.number].add(jnp.where(answered, turns.rewards, 0))
        of_turns = jax.vmap(compared, in_axes=1, out_axes=1)(by_number)
        outcome = compared(jnp.sum(jnp.where(answered, 0, turns.rewards), axis=1))[:, None]
        before = jnp.where(turns.number < turns.count - 1, jnp.take_along_axis(of_turns, turns.number, axis=1), 0)
        whole = jnp.where(turns.count > 1, outcome + self.coef * before, compared(rewards.reshape(-1))[:, None])
        return jnp.where(turns.mask, whole, 0)


def discounted(rewards: jax.Array, ends: jax.Array, gamma: float) -> jax.Array:
    """Return ``R_k = sum_{j >= k} gamma^(j - k) r_j`` at the ends of turns, from their rewards there: float[B, T]."""

    def back(later: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, end = now
        found = jnp.where(end, reward + gamma * later, later)
        return found, found

    return jax.lax.scan(back, jnp.zeros_like(rewards[:, 0]), (rewards.T, ends.T), reverse=True)[1].T
