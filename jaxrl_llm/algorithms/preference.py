"""Losses over preferences and steps: DPO, IPO, Bradley-Terry, process rewards; and the mix with pretraining."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.contracts import count, flags, floating, integers, listed, numeric, positive, ranked, shaped


def sequence_logp(logp: Any, mask: Any, average: bool = False) -> jax.Array:
    """Log-probability [B] of each completion: the sum over its valid tokens, or their average.

    logp: float[B, T], nats; mask: [B, T].
    """
    logp = floating(logp, "logp")
    ranked(2, logp=logp)
    keep = flags(mask, logp.shape, "mask")
    total = jnp.sum(jnp.where(keep, logp, 0), axis=1)
    return total / jnp.maximum(jnp.sum(keep, axis=1), 1).astype(logp.dtype) if average else total


def preference_margin(chosen: Any, rejected: Any, ref_chosen: Any, ref_rejected: Any) -> jax.Array:
    """``h = (logp_w - ref_w) - (logp_l - ref_l)`` [B] of sequence log-probabilities; the reference has no gradient."""
    chosen, rejected = _pair(chosen, rejected)
    reference = [floating(x, name) for x, name in ((ref_chosen, "ref_chosen"), (ref_rejected, "ref_rejected"))]
    shaped(chosen.shape, ref_chosen=reference[0], ref_rejected=reference[1])
    better, worse = (jax.lax.stop_gradient(x.astype(chosen.dtype)) for x in reference)
    return chosen - rejected - (better - worse)


@dataclasses.dataclass(frozen=True)
class DPO:
    """``-(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h)``: direct preference optimisation.

    ``h = (logp_w - ref_w) - (logp_l - ref_l)`` of sequence log-probabilities (arXiv 2305.18290, eq. 7). The implicit
    reward of an answer is ``beta (logp - ref)``.

    Attributes:
      beta: how strongly the reference holds; above 0.
      label_smoothing: s, the share of pairs that are taken to be the wrong way round, from 0 to below 0.5 (conservative
        DPO).
      average: log-probabilities are means over a completion's tokens, not sums: the length-normalised form (Tulu 3,
        arXiv 2411.15124), whose beta is larger by about a length.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    average: bool = False

    def __post_init__(self):
        positive(self, "beta")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"DPO.label_smoothing must be from 0 to below 0.5, got {self.label_smoothing}")

    def __call__(self, margin: Any) -> jax.Array:
        """margin: h, float[B]; returns a loss for each pair, float[B]."""
        scaled = self.beta * _given(margin)
        right = jax.nn.log_sigmoid(scaled)
        if not self.label_smoothing:
            return -right
        return -(1 - self.label_smoothing) * right - self.label_smoothing * jax.nn.log_sigmoid(-scaled)


@dataclasses.dataclass(frozen=True)
class IPO:
    """``(h - 1 / (2 beta))^2``: identity preference optimisation (arXiv 2310.12036, eq. 17); h as in ``DPO``.

    Attributes:
      beta: how strongly the reference holds; above 0.
      average: log-probabilities are means over a completion's tokens, as in TRL; the paper takes sums. beta does not
        carry over from one to the other.
    """

    beta: float = 0.1
    average: bool = False

    def __post_init__(self):
        positive(self, "beta")

    def __call__(self, margin: Any) -> jax.Array:
        """margin: h, float[B]; returns a loss for each pair, float[B]."""
        return (_given(margin) - 1 / (2 * self.beta)) ** 2


def _given(margin: Any) -> jax.Array:
    margin = floating(margin, "margin")
    listed(margin=margin)
    return margin


def dpo_loss(margin: Any, beta: float = 0.1) -> jax.Array:
    """The mean of ``DPO``; margin: ``preference_margin`` of sequence sums, float[B]."""
    return jnp.mean(DPO(beta)(margin))


def ipo_loss(margin: Any, beta: float = 0.1) -> jax.Array:
    """The mean of ``IPO``; margin: ``preference_margin``, float[B], of sums as in the paper and in OpenRLHF, or of
    averages by token as in TRL (``sequence_logp(average=True)``)."""
    return jnp.mean(IPO(beta)(margin))


def bradley_terry_loss(chosen: Any, rejected: Any, margin: Any = 0.0) -> jax.Array:
    """``mean(-log sigmoid(r_w - r_l - margin))``: a reward model from pairs (arXiv 2203.02155, eq. 1).

    chosen, rejected: scores float[B]; margin: float or float[B].
    """
    chosen, rejected = _pair(chosen, rejected)
    margin = numeric(margin, "margin").astype(chosen.dtype)
    if margin.ndim:
        shaped(chosen.shape, margin=margin)
    return -jnp.mean(jax.nn.log_sigmoid(chosen - rejected - margin))


def _pair(chosen: Any, rejected: Any) -> tuple[jax.Array, jax.Array]:
    """Both as float[B] of one dtype."""
    chosen = floating(chosen, "chosen")
    rejected = floating(rejected, "rejected")
    listed(chosen=chosen)
    shaped(chosen.shape, rejected=rejected)
    return chosen, rejected.astype(chosen.dtype)


def ranking_loss(scores: Any) -> jax.Array:
    """Mean of Bradley-Terry over the K (K - 1) / 2 pairs of each prompt (arXiv 2203.02155, eq. 1).

    scores: float[P, K], best answer first, K at least 2. All pairs of a prompt are one element of the batch, so that
    none counts K times.
    """
    scores = floating(scores, "scores")
    ranked(2, scores=scores)
    if scores.shape[1] < 2:
        raise ValueError(f"scores must hold at least 2 answers to compare, got shape {scores.shape}")
    better, worse = jnp.triu_indices(scores.shape[1], 1)
    return -jnp.mean(jax.nn.log_sigmoid(scores[:, better] - scores[:, worse]))


def step_loss(logits: Any, labels: Any, ends: Any) -> jax.Array:
    """Cross-entropy of a process reward model at the last token of each step (arXiv 2305.20050); a scalar.

    Args:
      logits: float[B, T, classes]; two classes (wrong, right) or three (bad, neutral, good).
      labels: int[B, T]; read where ``ends`` is.
      ends: bool[B, T], where a labelled step ends. PRM800K labels no step after the first mistake.
    """
    logits = floating(logits, "logits")
    ranked(3, logits=logits)
    ends = flags(ends, logits.shape[:2], "ends")
    labels = integers(labels, "labels")
    shaped(logits.shape[:2], labels=labels)
    labels = jnp.where(ends, labels, 0)
    logits = jnp.where(ends[..., None], logits, 0)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]
    return -jnp.sum(jnp.where(ends, picked, 0)) / jnp.maximum(jnp.sum(ends), 1).astype(logits.dtype)


def solution_score(step_scores: Any, ends: Any, lowest: bool = False) -> jax.Array:
    """A solution's score [B]: the product of its steps' probabilities, or the lowest (arXiv 2305.20050, section 2.6).

    step_scores: float[B, T], read where ``ends`` (bool[B, T]) is.
    """
    step_scores = floating(step_scores, "step_scores")
    ranked(2, step_scores=step_scores)
    kept = jnp.where(flags(ends, step_scores.shape, "ends"), step_scores, 1)
    return jnp.min(kept, axis=1) if lowest else jnp.prod(kept, axis=1)


def step_differences(step_scores: Any, ends: Any, start: float = 0.0) -> jax.Array:
    """Rewards ``s_j - s_{j-1}`` at the last token of each step, NaN elsewhere: ``AdvantageContext.step_rewards``, [B,
    T].

    They telescope to ``s_last - start``: potential-based shaping, which cannot be farmed by writing more steps, as the
    sum of the scores can. ``start`` is s_0, the score of a prompt; 0 gives the first step its whole score.

    step_scores: float[B, T], read where ``ends`` (bool[B, T]) is.
    """
    step_scores = floating(step_scores, "step_scores")
    ranked(2, step_scores=step_scores)
    ends = flags(ends, step_scores.shape, "ends")

    def forward(before: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        score, end = now
        return jnp.where(end, score, before), jnp.where(end, score - before, jnp.nan)

    first = jnp.full(step_scores.shape[0], start, step_scores.dtype)
    return jax.lax.scan(forward, first, (step_scores.T, ends.T))[1].T


def pretraining_loss(logp: Any, mask: Any, coef: float, token_count: Any = None) -> jax.Array:
    """``-coef mean_t(logp)`` of pretraining text, to be added to the policy loss: PPO-ptx (arXiv 2203.02155, eq. 2).

    InstructGPT's coefficient 27.8 belongs to its own reduction, and is no discount; it does not carry over to a token
    mean.

    logp: float[B, T], nats, with gradient; mask: [B, T]; token_count: of the whole step, None for this batch's own.
    """
    logp = floating(logp, "logp")
    ranked(2, logp=logp)
    keep = flags(mask, logp.shape, "mask")
    return -coef * jnp.sum(jnp.where(keep, logp, 0)) / count(token_count, keep, "token_count", logp.dtype)
