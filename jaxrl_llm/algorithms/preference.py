"""Losses on preferences and steps: DPO, IPO, SimPO, ORPO, KTO, Bradley-Terry, process rewards, and the pretraining
loss.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxrl_llm.algorithms.tokens import (
    ABOVE_0,
    AT_LEAST_0,
    FINITE,
    FloatB,
    FloatBT,
    as_array,
    as_mask,
    check_rank,
    check_self,
    divisor,
)
from jaxrl_llm.system.setting import Range


def sequence_logp(logp: FloatBT, mask: FloatBT) -> jax.Array:
    """Return each completion's log-probability [B]: the sum of ``logp``, float[B, T], nats, where ``mask`` [B, T] is
    1.
    """
    logp = as_array(logp, "logp")
    check_rank(2, logp=logp)
    keep = as_mask(mask, logp.shape, "mask")
    return jnp.sum(jnp.where(keep, logp, 0), axis=1)


class PairwiseLoss:
    """The interface of a loss of pairs and its defaults: a function of the margin ``value(g_w) - value(g_l)``, where g
    is an answer's log-probability, less the reference's if there is one.

    Each loss also has ``beta``, which scales margins to rewards, ``average``, whether log-probabilities are means over
    an answer's tokens, not sums, and ``nll_coef``, the coefficient of the better answer's negative log-likelihood, nats
    per token, which is added. ``to_reference``: whether a reference, the initial model, is subtracted.
    """

    to_reference: ClassVar[bool] = True
    __post_init__ = check_self

    def value(self, gap: jax.Array) -> jax.Array:
        """Return what the margin is the difference of, for each answer; by default g itself."""
        return gap

    def __call__(self, margin: FloatB) -> jax.Array:
        """Return the loss of each pair, float[B], for margins, float[B]."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class DPO(PairwiseLoss):
    """``-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)``: direct preference optimisation.

    ``h = (logp_w - ref_w) - (logp_l - ref_l)`` of sequence log-probabilities (arXiv 2305.18290, eq. 7). The implicit
    reward of an answer is ``beta (logp - ref)``.

    Attributes:
      beta: how strongly the policy is held to the reference; above 0.
      label_smoothing: s, the assumed share of pairs with the wrong order, from 0 to below 0.5 (conservative DPO).
      average: log-probabilities are means over a completion's tokens, not sums: the length-normalised form (Tulu 3,
        arXiv 2411.15124); it needs a beta larger by about the number of tokens.
    """

    beta: Annotated[float, ABOVE_0] = 0.1
    label_smoothing: Annotated[float, Range("[0, 0.5)")] = 0.0
    average: bool = False
    nll_coef: ClassVar[float] = 0.0

    def __call__(self, margin: FloatB) -> jax.Array:
        """Return the loss of each pair, float[B], for margins h, float[B]."""
        scaled = self.beta * _check_rank_1(margin)
        right = jax.nn.log_sigmoid(scaled)
        if not self.label_smoothing:
            return -right
        return -(1 - self.label_smoothing) * right - self.label_smoothing * jax.nn.log_sigmoid(-scaled)


@dataclasses.dataclass(frozen=True)
class IPO(PairwiseLoss):
    """``(h - 1 / (2 beta))^2``: identity preference optimisation (arXiv 2310.12036, eq. 17); h as in ``DPO``.

    Attributes:
      beta: how strongly the policy is held to the reference; above 0.
      average: log-probabilities are means over a completion's tokens, as in TRL; the paper takes sums. beta does not
        carry over from one to the other.
    """

    beta: Annotated[float, ABOVE_0] = 0.1
    average: bool = False
    nll_coef: ClassVar[float] = 0.0

    def __call__(self, margin: FloatB) -> jax.Array:
        """Return the loss of each pair, float[B], for margins h, float[B]."""
        return (_check_rank_1(margin) - 1 / (2 * self.beta)) ** 2


@dataclasses.dataclass(frozen=True)
class SimPO(PairwiseLoss):
    """``-log sigmoid(beta (a_w - a_l) - gamma)``: simple preference optimisation (arXiv 2405.14734, eq. 6). a is the
    mean of the log-probabilities of an answer's tokens, the reward that sampling itself maximises; there is no
    reference.

    Attributes:
      beta: scales mean log-probabilities to rewards; above 0.
      gamma: target margin of rewards; beta and gamma are TRL's defaults, with which the paper's grid begins.
      nll_coef: of the better answer's negative log-likelihood, nats per token; 0 in the paper (TRL's ``cpo_alpha``: 1).
    """

    beta: Annotated[float, ABOVE_0] = 2.5
    gamma: Annotated[float, AT_LEAST_0, FINITE] = 1.375
    nll_coef: Annotated[float, AT_LEAST_0, FINITE] = 0.0
    average: ClassVar[bool] = True
    to_reference: ClassVar[bool] = False

    def __call__(self, margin: FloatB) -> jax.Array:
        """Return the loss of each pair, float[B], for margins a_w - a_l, float[B]."""
        return -jax.nn.log_sigmoid(self.beta * _check_rank_1(margin) - self.gamma)


@dataclasses.dataclass(frozen=True)
class ORPO(PairwiseLoss):
    """``-a_w - beta log sigmoid(lo)``: odds-ratio preference optimisation (arXiv 2403.07691, eq. 6 and 7).

    a is the mean of the log-probabilities of an answer's tokens, lo the log of the odds ratio: the difference of
    ``a - log(1 - e^a)``. The first term is fine-tuning on the better answer, so that one run needs neither a fine-tuned
    start nor a reference. It is of the answer's tokens; TRL's includes those of the prompt.

    Attributes:
      beta: weight of the odds ratio, the paper's lambda; above 0.
      nll_coef: coefficient of the first term; 1 in the paper.
    """

    beta: Annotated[float, ABOVE_0] = 0.1
    nll_coef: Annotated[float, AT_LEAST_0, FINITE] = 1.0
    average: ClassVar[bool] = True
    to_reference: ClassVar[bool] = False

    def value(self, gap: jax.Array) -> jax.Array:
        """Return the log-odds ``a - log(1 - e^a)``, for a below 0; a sure answer counts as just below it."""
        below = jnp.minimum(gap, -jnp.finfo(gap.dtype).eps)
        return below - jnp.log(-jnp.expm1(below))

    def __call__(self, margin: FloatB) -> jax.Array:
        """Return the odds-ratio term of each pair, float[B], for margins lo, float[B]."""
        return -self.beta * jax.nn.log_sigmoid(_check_rank_1(margin))


@dataclasses.dataclass(frozen=True)
class KTO:
    """``w (1 - sigmoid(beta (h - z)))`` for a good answer, ``w (1 - sigmoid(beta (z - h)))`` for a bad one: KTO, from
    answers that are good or bad each by itself (arXiv 2402.01306, eq. 7 and 8). ``h = logp - ref`` of the sequence. z,
    the reference point, estimates KL(policy || reference): the mean of h over answers to other prompts, at least 0, and
    without a gradient.

    Attributes:
      beta: how strongly the policy is held to the reference; above 0.
      desirable: weight of good answers.
      undesirable: weight of bad ones. The paper advises weights for which those of all good answers are 1 to 4/3 times
        those of all bad ones.
    """

    beta: Annotated[float, ABOVE_0] = 0.1
    desirable: Annotated[float, AT_LEAST_0, FINITE] = 1.0
    undesirable: Annotated[float, AT_LEAST_0, FINITE] = 1.0

    __post_init__ = check_self

    def __call__(self, gap: FloatB, good: FloatB, point: ArrayLike) -> jax.Array:
        """Return the loss of each answer, float[B], for h float[B], good bool[B], and the scalar z."""
        gap = _check_rank_1(gap, "gap")
        above = self.beta * (gap - jax.lax.stop_gradient(point))
        return jnp.where(good, self.desirable * jax.nn.sigmoid(-above), self.undesirable * jax.nn.sigmoid(above))

    def point(self, unrelated: FloatB, counts: FloatB) -> jax.Array:
        """Return z, without a gradient, from h [B] of answers to other prompts, where ``counts`` bool[B] is True."""
        unrelated = _check_rank_1(unrelated, "unrelated")
        mean = jnp.sum(jnp.where(counts, unrelated, 0)) / jnp.maximum(jnp.sum(counts, dtype=unrelated.dtype), 1)
        return jax.lax.stop_gradient(jnp.maximum(mean, 0))


def _check_rank_1(x: Any, name: str = "margin") -> jax.Array:
    x = as_array(x, name)
    if x.ndim > 1:
        raise ValueError(f"{name} must be [B], got shape {x.shape}")
    return x


def bradley_terry(difference: jax.Array, margin: ArrayLike = 0.0) -> jax.Array:
    """Return ``-log sigmoid(r_w - r_l - margin)`` of each pair's difference of scores (arXiv 2203.02155, eq. 1)."""
    return -jax.nn.log_sigmoid(difference - margin)


def step_entropy(values: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy of ``sigmoid(value)`` with labels in [0, 1], for each step (arXiv 2305.20050)."""
    return -labels * jax.nn.log_sigmoid(values) - (1 - labels) * jax.nn.log_sigmoid(-values)


def solution_score(steps: np.ndarray, by: Literal["product", "minimum", "last"]) -> np.floating:
    """Return a solution's score from its steps' probabilities [n], 0 for n = 0 (arXiv 2305.20050, section 2.6)."""
    if not len(steps):
        return steps.dtype.type(0)
    if by == "last":
        return steps[-1]
    return np.prod(steps) if by == "product" else np.min(steps)


def step_differences(scores: np.ndarray, start: float = 0.0) -> np.ndarray:
    """Return rewards ``s_j - s_{j-1}`` of the steps of a solution, from their scores [n]. They telescope to
    ``s_last - start``: potential-based shaping, which more steps cannot farm, unlike the sum of the scores. ``start``
    is s_0, the score of a prompt; 0 gives the first step its whole score.
    """
    return np.diff(scores, prepend=scores.dtype.type(start))


def pretraining_loss(logp: FloatBT, mask: FloatBT, token_count: ArrayLike | None = None) -> jax.Array:
    """Return ``-mean_t(logp)`` of text, PPO-ptx's term (arXiv 2203.02155, eq. 2), for the policy loss to add.
    InstructGPT's coefficient 27.8 belongs to its own reduction and does not carry over to a token mean. ``logp``:
    float[B, T], nats, with gradient; ``mask``: [B, T]; ``token_count``: of the whole step, None for this batch's
    own.
    """
    logp = as_array(logp, "logp")
    check_rank(2, logp=logp)
    keep = as_mask(mask, logp.shape, "mask")
    return -jnp.sum(jnp.where(keep, logp, 0)) / divisor(token_count, keep, "token_count", logp.dtype)
