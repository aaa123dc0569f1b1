"""Importance ratios as clamped logarithms [B, T], and corrections for the gap between sampler and learner.

A token has three policies: the live one (pi), the one at the start of the batch's updates (old), and the distribution
that the engine sampled from (mu). Surrogates clip the ratio ``r = pi / old``; corrections weight by ``w = old / mu``,
the gap between training and inference; ``pi / mu = r w``.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.tokens import ABOVE_0, AT_LEAST_0, Tokens, check_order, check_self, clamp_log_ratio, mu_logp

Level = Literal["token", "sequence", "geometric"]


@dataclasses.dataclass(frozen=True)
class Token:
    """``log r_t = logp_t - old_t``: PPO (arXiv 1707.06347) and GRPO, one ratio for each token. ``anchor="sampler"``
    divides by the sampler's probability instead, for both kinds of drift at once: DeepSeek-V3.2 (arXiv 2512.02556, eq.
    5).
    """

    anchor: Literal["old", "sampler"] = "old"
    level = "token"

    __post_init__ = check_self

    def __call__(self, at: Tokens) -> jax.Array:
        """Return log ratios [B, T]."""
        return clamp_log_ratio(at.logp, at.old_logp if self.anchor == "old" else mu_logp(at, self))


@dataclasses.dataclass(frozen=True)
class Sequence:
    """``log s = mean_t (logp_t - old_t)``, one ratio for all tokens: GSPO (arXiv 2507.18071, eq. 7)."""

    anchor = "old"
    level = "sequence"

    def __call__(self, at: Tokens) -> jax.Array:
        """Return log ratios [B, 1]."""
        return at.mean(clamp_log_ratio(at.logp, at.old_logp))


@dataclasses.dataclass(frozen=True)
class SequenceToken:
    """``sg[s] * pi / sg[pi]``: GSPO's ratio in value, the token's own in gradient (arXiv 2507.18071, eq. 14). With one
    advantage for the whole sequence its gradient is GSPO's; it permits an advantage for each token.
    """

    anchor = "old"
    level = "sequence"

    def __call__(self, at: Tokens) -> jax.Array:
        """Return log ratios [B, T]."""
        s = at.mean(clamp_log_ratio(at.logp, at.old_logp))
        return jax.lax.stop_gradient(s) + at.logp - jax.lax.stop_gradient(at.logp)


def mismatch(at: Tokens, level: Level, owner: object) -> jax.Array:
    """Return ``w = old / mu`` of each token [B, T], or its product or geometric mean over each sequence [B, 1].
    Logarithms are summed and exponentiated once, at the end. A product grows with length: 0.012 nats per token give a
    factor of 3.3 after 100 tokens. "sequence" is the product in TRL, verl and slime, the geometric mean in ms-swift.
    Only the product, without a cap, gives in expectation the loss on samples of the old policy; by token, prefixes stay
    the sampler's, with less variance.
    """
    log_w = clamp_log_ratio(at.old_logp, mu_logp(at, owner))
    if level == "token":
        return jnp.exp(log_w)
    total = at.mean(log_w) if level == "geometric" else at.total(log_w)
    return jnp.exp(clamp_log_ratio(total, jnp.zeros_like(total)))


@dataclasses.dataclass(frozen=True)
class TruncatedIS:
    """``min(w, cap)``: truncated importance sampling of the gap between training and inference. Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"; cap 2 as in TRL, verl and slime.
    """

    cap: Annotated[float, ABOVE_0] = 2.0
    level: Level = "token"

    __post_init__ = check_self

    def __call__(self, at: Tokens) -> jax.Array:
        """Return weights [B, T] or, by sequence, [B, 1]."""
        return jnp.minimum(mismatch(at, self.level, self), self.cap)


@dataclasses.dataclass(frozen=True)
class MaskedIS:
    """``w`` where ``low <= w <= high``, else 0: masked importance sampling; with (0.5, 5) by token it is IcePop. Masked
    tokens stay in the loss's counts, as in TRL and OpenRLHF; verl's rejection rewrites the mask, so that its counts
    shrink.
    """

    low: float = 0.5
    high: float = 2.0
    level: Level = "token"

    def __post_init__(self):
        check_order(self, "low", "high")
        check_self(self)

    def __call__(self, at: Tokens) -> jax.Array:
        """Return weights [B, T] or, by sequence, [B, 1]."""
        w = mismatch(at, self.level, self)
        return jnp.where((w >= self.low) & (w <= self.high), w, 0)


@dataclasses.dataclass(frozen=True)
class SequenceMask:
    """``w`` by token if the geometric mean of w over its sequence is in [low, high], else 0 (ProRL v2.1's
    seq-mask-tis). Masked sequences stay in the counts.
    """

    low: float = 0.999
    high: float = 1.002

    def __post_init__(self):
        check_order(self, "low", "high")

    def __call__(self, at: Tokens) -> jax.Array:
        """Return weights [B, T]."""
        mean = mismatch(at, "geometric", self)
        return jnp.where((mean >= self.low) & (mean <= self.high), mismatch(at, "token", self), 0)


@dataclasses.dataclass(frozen=True)
class OffPolicySequenceMask:
    """A filter: 0 for sequences with ``A_i < 0`` and ``mean_t (mu - logp) > delta``, else 1 (DeepSeek-V3.2, arXiv
    2512.02556, eq. 9). It multiplies the policy term only; the KL and the counts stay. The paper publishes no delta;
    0.5 nats is TRL's advice. Where advantages differ by token, A_i is their mean.
    """

    delta: Annotated[float, AT_LEAST_0] = 0.5

    __post_init__ = check_self

    def __call__(self, at: Tokens) -> jax.Array:
        """Return 0 or 1 for each sequence, [B, 1]."""
        drift = at.mean(clamp_log_ratio(at.logp, mu_logp(at, self)))
        dropped = (at.mean(at.advantages) < 0) & (drift < -self.delta)
        return jnp.where(dropped, jnp.zeros_like(drift), 1)
