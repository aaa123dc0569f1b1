"""Advantage estimators of success: MaxRL, which leans to the likelihood, and pass@k, which rewards the best of k."""

import dataclasses
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.advantages import Estimator
from jaxrl_llm.algorithms.grouping import scores
from jaxrl_llm.system.setting import Range
from jaxrl_llm.types import AdvantageContext


@dataclasses.dataclass(frozen=True)
class MaxRL(Estimator):
    """``A_i = (R_i - mean(R)) / mean(R)``, 0 in a group without a success: MaxRL (arXiv 2602.02710).

    For rewards of 0 and 1 and groups of G, the expected gradient is that of ``sum_{k=1}^{G-1} pass@k / k``, which
    tends to that of log pass@1, the likelihood of a success, as G grows; that of the mean reward is its first term. So
    hard prompts weigh more. Rewards must not be negative: where the mean is 0 or less, the advantage is 0.
    """

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        given = scores(rewards, context)
        centre, count = given.centred()
        mean = given.by_group(jnp.sum, given.rewards) / jnp.maximum(count, 1)
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

    def __call__(self, rewards: Any, context: AdvantageContext | None = None) -> jax.Array:
        """Return float[P, G] for rewards float[P, G]."""
        given = scores(rewards, context)
        together = given.same is None
        x, valid = (y if together else y.reshape(1, -1) for y in (given.rewards, given.valid))
        same = valid[:, None, :] & (valid[:, :, None] if together else (given.same[None] & valid[:, :, None]))
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
        return jnp.sum(gains, axis=2).reshape(given.rewards.shape)
