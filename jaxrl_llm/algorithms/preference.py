"""Losses on preferences and steps: DPO, IPO, Bradley-Terry, process rewards; and the pretraining loss."""

import dataclasses
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.contracts import ABOVE_0, array, count, flags, ranked, within_bounds
from jaxrl_llm.system.setting import Range


def sequence_logp(logp: Any, mask: Any) -> jax.Array:
    """Return the log-probability [B] of each completion: the sum over its valid tokens.

    logp: float[B, T], nats; mask: [B, T].
    """
    logp = array(logp, "logp")
    ranked(2, logp=logp)
    keep = flags(mask, logp.shape, "mask")
    return jnp.sum(jnp.where(keep, logp, 0), axis=1)


@dataclasses.dataclass(frozen=True)
class DPO:
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

    __post_init__ = within_bounds

    def __call__(self, margin: Any) -> jax.Array:
        """Return the loss of each pair, float[B], for margins h, float[B]."""
        scaled = self.beta * _given(margin)
        right = jax.nn.log_sigmoid(scaled)
        if not self.label_smoothing:
            return -right
        return -(1 - self.label_smoothing) * right - self.label_smoothing * jax.nn.log_sigmoid(-scaled)


@dataclasses.dataclass(frozen=True)
class IPO:
    """``(h - 1 / (2 beta))^2``: identity preference optimisation (arXiv 2310.12036, eq. 17); h as in ``DPO``.

    Attributes:
      beta: how strongly the policy is held to the reference; above 0.
      average: log-probabilities are means over a completion's tokens, as in TRL; the paper takes sums. beta does not
        carry over from one to the other.
    """

    beta: Annotated[float, ABOVE_0] = 0.1
    average: bool = False

    __post_init__ = within_bounds

    def __call__(self, margin: Any) -> jax.Array:
        """Return the loss of each pair, float[B], for margins h, float[B]."""
        return (_given(margin) - 1 / (2 * self.beta)) ** 2


def _given(margin: Any) -> jax.Array:
    margin = array(margin, "margin")
    if margin.ndim > 1:
        raise ValueError(f"margin must be [B], got shape {margin.shape}")
    return margin


def bradley_terry(difference: jax.Array, margin: Any = 0.0) -> jax.Array:
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
    """Return rewards ``s_j - s_{j-1}`` of the steps of a solution, from their scores [n].

    They telescope to ``s_last - start``: potential-based shaping, which cannot be farmed by writing more steps, as the
    sum of the scores can. ``start`` is s_0, the score of a prompt; 0 gives the first step its whole score.
    """
    return np.diff(scores, prepend=scores.dtype.type(start))


def pretraining_loss(logp: Any, mask: Any, token_count: Any = None) -> jax.Array:
    """Return ``-mean_t(logp)`` of text, PPO-ptx's term (arXiv 2203.02155, eq. 2), for the policy loss to add.

    InstructGPT's coefficient 27.8 belongs to its own reduction and does not carry over to a token mean.

    logp: float[B, T], nats, with gradient; mask: [B, T]; token_count: of the whole step, None for this batch's own.
    """
    logp = array(logp, "logp")
    ranked(2, logp=logp)
    keep = flags(mask, logp.shape, "mask")
    return -jnp.sum(jnp.where(keep, logp, 0)) / count(token_count, keep, "token_count", logp.dtype)
