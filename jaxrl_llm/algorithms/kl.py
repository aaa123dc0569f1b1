"""Per-token estimates [B, T] of KL(policy || reference) from sampled tokens, nats; and controllers of coefficients: the
KL's and the entropy bonus'.

The value and the gradient of an estimator differ. With tokens drawn from the policy, and rho = reference / policy:

===========  =======================  =====================  ==============================================
estimator    value                    gradient on logp       expected gradient, used as a loss
===========  =======================  =====================  ==============================================
K1           logp - ref               1                      0: useless as a loss, right in the reward
K2           (logp - ref)^2 / 2       logp - ref             that of KL(policy || reference)
K3           rho - 1 - log rho        1 - rho                that of KL(reference || policy)
K3Plus       k3's                     k2's                   that of KL(policy || reference)
UnbiasedK3   r k3                     r (logp - ref)         that of KL(policy || reference), off-policy too
===========  =======================  =====================  ==============================================

The table holds for the next token given its sampled prefix. The KL of whole sequences has one more term, through the
probability of the prefix, which only K1 in the reward includes. After joschu.net/blog/kl-approx and arXiv 2512.02556.
"""

import dataclasses
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.contracts import ABOVE_0, array, shaped, within_bounds
from jaxrl_llm.algorithms.tokens import clamped_log_ratio


@dataclasses.dataclass(frozen=True)
class K1:
    """``logp - ref``: unbiased in value; its expected gradient is 0."""

    def __call__(self, logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None = None) -> jax.Array:
        """Return the estimate [B, T]; all arguments are [B, T]."""
        logp, ref_logp = _checked(logp, ref_logp, log_ratio)
        return logp - ref_logp


@dataclasses.dataclass(frozen=True)
class K2:
    """``(logp - ref)^2 / 2``: biased in value, unbiased in gradient. ``clip`` bounds the log ratio (ProRL v2: 10)."""

    clip: Annotated[float | None, ABOVE_0] = None

    __post_init__ = within_bounds

    def __call__(self, logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None = None) -> jax.Array:
        """Return the estimate [B, T]; all arguments are [B, T]."""
        logp, ref_logp = _checked(logp, ref_logp, log_ratio)
        difference = logp - ref_logp
        if self.clip is not None:
            difference = jnp.clip(difference, -self.clip, self.clip)
        return 0.5 * difference**2


@dataclasses.dataclass(frozen=True)
class K3:
    """``rho - 1 - log rho`` with ``rho = ref / policy``: GRPO (arXiv 2402.03300, eq. 4); never negative.

    ``clip`` bounds the estimate, after clamping the log ratio to ±20, as verl does with 10. ``expm1`` keeps the digits
    that ``exp(d) - d - 1`` loses near 0.
    """

    clip: Annotated[float | None, ABOVE_0] = None

    __post_init__ = within_bounds

    def __call__(self, logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None = None) -> jax.Array:
        """Return the estimate [B, T]; all arguments are [B, T]."""
        logp, ref_logp = _checked(logp, ref_logp, log_ratio)
        d = clamped_log_ratio(ref_logp, logp)
        estimate = jnp.expm1(d) - d
        return estimate if self.clip is None else jnp.clip(estimate, -self.clip, self.clip)


@dataclasses.dataclass(frozen=True)
class K3Plus:
    """The value of k3 with the gradient of k2 (verl's ``k3+``): unbiased in both, on-policy."""

    def __call__(self, logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None = None) -> jax.Array:
        """Return the estimate [B, T]; all arguments are [B, T]."""
        logp, ref_logp = _checked(logp, ref_logp, log_ratio)
        value = K3()(logp, ref_logp)
        slope = K2()(clamped_log_ratio(logp, ref_logp), jnp.zeros_like(logp))
        return jax.lax.stop_gradient(value - slope) + slope


@dataclasses.dataclass(frozen=True)
class UnbiasedK3:
    """``r k3`` with the gradient of both: ``r (logp - ref)``, unbiased off-policy (arXiv 2512.02556, eq. 7)."""

    def __call__(self, logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None = None) -> jax.Array:
        """Return the estimate [B, T]; all arguments are [B, T].

        ``log_ratio`` is the token's own, of the live policy to the one that sampled it; None means on-policy, a ratio
        of 1 with gradient.
        """
        logp, ref_logp = _checked(logp, ref_logp, log_ratio)
        log_ratio = logp - jax.lax.stop_gradient(logp) if log_ratio is None else log_ratio
        return jnp.exp(log_ratio) * K3()(logp, ref_logp)


def _checked(logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    logp = array(logp, "logp")
    shaped(logp.shape, ref_logp=array(ref_logp, "ref_logp"), log_ratio=log_ratio)
    return logp, jnp.asarray(ref_logp, logp.dtype)


@dataclasses.dataclass(frozen=True)
class AdaptiveKL:
    """PPO's rule (arXiv 1707.06347, section 4): halve the coefficient below target / 1.5, double it above 1.5 target.

    ``target``: nats per token of KL(old || policy) for ``PenaltyKL``, of KL(policy || reference) otherwise. Both
    controllers change the ``kl_coef`` argument of ``policy_loss``, which may be traced, never the algorithm, so nothing
    is recompiled.
    """

    target: Annotated[float, ABOVE_0] = 0.01

    reads: ClassVar[str] = "controller/kl"
    """The metric that is compared with the target."""

    __post_init__ = within_bounds

    def __call__(self, coef: float, kl: float, completions: int = 0) -> float:
        """Return the next coefficient, from the measured KL per token; ``completions`` is ignored."""
        return coef / 2 if kl < self.target / 1.5 else coef * 2 if kl > self.target * 1.5 else coef


@dataclasses.dataclass(frozen=True)
class ProportionalKL:
    """The rule of Ziegler et al. 2019 (arXiv 1909.08593): ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * completions
    / horizon``.

    ``target``: nats per sequence, the sum over its tokens (the paper's 6), of the KL that ``AdaptiveKL`` takes per
    token. ``horizon``: completions.
    """

    target: Annotated[float, ABOVE_0] = 6.0
    horizon: Annotated[int, ABOVE_0] = 10000

    reads: ClassVar[str] = "controller/kl_sequence"
    """The metric that is compared with the target."""

    __post_init__ = within_bounds

    def __call__(self, coef: float, kl: float, completions: int) -> float:
        """Return the next coefficient, from the KL per sequence measured on this number of completions."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return coef * (1 + error * completions / self.horizon)
