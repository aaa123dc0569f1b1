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

What a teacher's distribution tells of the policy's: advantages of sampled tokens, and divergences between the two.

pi is the policy, nu the teacher, both at the temperature of the sampling; no gradient reaches the teacher.
"""

import dataclasses
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.tokens import ABOVE_0, AT_LEAST_0, FINITE, as_array, check_self, check_shape, clamp_log_ratio
from jaxrl_llm.system.setting import Range


@dataclasses.dataclass(frozen=True)
class SampledKL:
    """On-policy distillation by the policy gradient: each sampled token's advantage is ``log nu - log pi``, frozen.

    Its expectation is minus the reverse KL(pi || nu) of the token's position: each token answers for its own position
    only. Differentiating ``log pi - log nu`` itself would not do: its expected gradient has no teacher in it. log pi is
    that of the policy which sampled the token, so that the weights of stale tokens act on a fixed advantage. With
    another scale than 1 it is ExOPD (arXiv 2602.12125), ``scale (log nu - log ref) - (log pi - log ref)``: above 1 the
    policy is led past the teacher, away from the reference that it began as. The paper's best scale is 1.25.

    Attributes:
      scale: of the teacher's reward.
    """

    scale: Annotated[float, Range("(0, inf)", words="above 0")] = 1.0
    __post_init__ = check_self

    @property
    def needs_reference(self) -> bool:
        """Whether the reference does not cancel."""
        return self.scale != 1

    def advantages(self, logp: jax.Array, teacher_logp: jax.Array, ref_logp: jax.Array | None = None) -> jax.Array:
        """Return the advantages [...] of tokens with these log-probabilities [...], nats."""
        plain = teacher_logp - logp
        return plain if ref_logp is None else plain + (self.scale - 1) * (teacher_logp - ref_logp)


@dataclasses.dataclass(frozen=True)
class JensenShannon:
    """Generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649), nats, at each position of a completion.

    With ``m = (1 - beta) pi + beta nu`` it is ``beta KL(nu || m) + (1 - beta) KL(pi || m)``. beta 0 is the forward
    KL(nu || pi) and beta 1 the reverse KL(pi || nu). These are special cases: the formula tends to 0 at both ends, so
    that a small beta with an unchanged learning rate learns about beta times as fast. There is no factor T^2.

    Attributes:
      beta: from 0 (forward) to 1 (reverse).
      top_k: compare the probabilities of the teacher's k most likely tokens, and the mass of all others as one more
        class. That is a lower bound of the divergence over all tokens, and 0 where both models agree. 0 compares all.
    """

    beta: Annotated[float, Range("[0, 1]")] = 0.5
    top_k: Annotated[int, Range("[0, inf]")] = 0
    __post_init__ = check_self

    def __call__(self, logp: jax.Array, teacher_logp: jax.Array) -> jax.Array:
        """Return divergences [...] of distributions over classes, as log-probabilities [..., C]."""
        if self.beta == 0:
            return jnp.sum(jnp.exp(teacher_logp) * (teacher_logp - logp), axis=-1)
        if self.beta == 1:
            return jnp.sum(jnp.exp(logp) * (logp - teacher_logp), axis=-1)
        mixed = self._mixed(logp, teacher_logp)
        ours = jnp.sum(jnp.exp(logp) * (logp - mixed), axis=-1)
        theirs = jnp.sum(jnp.exp(teacher_logp) * (teacher_logp - mixed), axis=-1)
        return self.beta * theirs + (1 - self.beta) * ours

    def slopes(self, logp: jax.Array, teacher_logp: jax.Array) -> jax.Array:
        """Return the derivatives [..., C] of the divergence by the logits of the classes of pi."""
        share = jnp.exp(logp)
        if self.beta == 0:
            return share - jnp.exp(teacher_logp)
        apart = logp - (teacher_logp if self.beta == 1 else self._mixed(logp, teacher_logp))
        weight = 1.0 if self.beta == 1 else 1 - self.beta
        return weight * share * (apart - jnp.sum(share * apart, axis=-1, keepdims=True))

    def _mixed(self, logp: jax.Array, teacher_logp: jax.Array) -> jax.Array:
        ours, theirs = jnp.log(jnp.array([1 - self.beta, self.beta], logp.dtype))
        return jnp.logaddexp(ours + logp, theirs + teacher_logp)


TeacherSignal = SampledKL | JensenShannon
"""How the policy learns from a teacher."""


def top_classes(logp: jax.Array, ids: jax.Array) -> jax.Array:
    """Return log-probabilities [..., k + 1] of the tokens ``ids`` [..., k], and of all others as one class. The mass of
    the others is summed, not subtracted from 1, so that it keeps its digits. ``logp``: [..., V], V > k.
    """
    chosen = jnp.take_along_axis(logp, ids, axis=-1)
    rest = jax.nn.logsumexp(jnp.put_along_axis(logp, ids, -jnp.inf, axis=-1, inplace=False), axis=-1, keepdims=True)
    return jnp.concatenate([chosen, rest], axis=-1)


def spread_slopes(slopes: jax.Array, logp: jax.Array, classes: jax.Array, ids: jax.Array) -> jax.Array:
    """Return derivatives [..., V] by the logits of all tokens from those by classes [..., k + 1] of ``top_classes``.
    The tokens of the last class share its derivative by their probabilities. ``classes``: its result for ``logp``.
    """
    shared = slopes[..., -1:] * jnp.exp(logp - classes[..., -1:])
    return jnp.put_along_axis(shared, ids, slopes[..., :-1], axis=-1, inplace=False)


@dataclasses.dataclass(frozen=True)
class K1:
    """``logp - ref``: unbiased in value; its expected gradient is 0."""

    def __call__(self, logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None = None) -> jax.Array:
        """Return the estimate [B, T]; all arguments are [B, T]."""
        logp, ref_logp = _check_shapes(logp, ref_logp, log_ratio)
        return logp - ref_logp


@dataclasses.dataclass(frozen=True)
class K2:
    """``(logp - ref)^2 / 2``: biased in value, unbiased in gradient. ``clip`` bounds the log ratio (ProRL v2: 10)."""

    clip: Annotated[float | None, ABOVE_0] = None

    __post_init__ = check_self

    def __call__(self, logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None = None) -> jax.Array:
        """Return the estimate [B, T]; all arguments are [B, T]."""
        logp, ref_logp = _check_shapes(logp, ref_logp, log_ratio)
        difference = logp - ref_logp
        if self.clip is not None:
            difference = jnp.clip(difference, -self.clip, self.clip)
        return 0.5 * difference**2


@dataclasses.dataclass(frozen=True)
class K3:
    """``rho - 1 - log rho`` with ``rho = ref / policy``: GRPO (arXiv 2402.03300, eq. 4); never negative. ``clip``
    bounds the estimate, after clamping the log ratio to ±20, as verl does with 10. ``expm1`` keeps the digits that
    ``exp(d) - d - 1`` loses near 0.
    """

    clip: Annotated[float | None, ABOVE_0] = None

    __post_init__ = check_self

    def __call__(self, logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None = None) -> jax.Array:
        """Return the estimate [B, T]; all arguments are [B, T]."""
        logp, ref_logp = _check_shapes(logp, ref_logp, log_ratio)
        d = clamp_log_ratio(ref_logp, logp)
        estimate = jnp.expm1(d) - d
        return estimate if self.clip is None else jnp.clip(estimate, -self.clip, self.clip)


@dataclasses.dataclass(frozen=True)
class K3Plus:
    """The value of k3 with the gradient of k2 (verl's ``k3+``): unbiased in both, on-policy."""

    def __call__(self, logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None = None) -> jax.Array:
        """Return the estimate [B, T]; all arguments are [B, T]."""
        logp, ref_logp = _check_shapes(logp, ref_logp, log_ratio)
        slope = K2()(clamp_log_ratio(logp, ref_logp), jnp.zeros_like(logp))
        return jax.lax.stop_gradient(K3()(logp, ref_logp) - slope) + slope


@dataclasses.dataclass(frozen=True)
class UnbiasedK3:
    """``r k3`` with the gradient of both: ``r (logp - ref)``, unbiased off-policy (arXiv 2512.02556, eq. 7)."""

    def __call__(self, logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None = None) -> jax.Array:
        """Return the estimate [B, T]; all arguments are [B, T]. ``log_ratio`` is the token's own, of the live policy to
        the one that sampled it; None means on-policy, a ratio of 1 with gradient.
        """
        logp, ref_logp = _check_shapes(logp, ref_logp, log_ratio)
        log_ratio = logp - jax.lax.stop_gradient(logp) if log_ratio is None else log_ratio
        return jnp.exp(log_ratio) * K3()(logp, ref_logp)


def _check_shapes(logp: jax.Array, ref_logp: jax.Array, log_ratio: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    logp = as_array(logp, "logp")
    check_shape(logp.shape, ref_logp=as_array(ref_logp, "ref_logp"), log_ratio=log_ratio)
    return logp, jnp.asarray(ref_logp, logp.dtype)


@dataclasses.dataclass(frozen=True)
class AdaptiveKL:
    """PPO's rule (arXiv 1707.06347, section 4): halve the coefficient below target / 1.5, double it above 1.5 target.
    ``target``: nats per token of KL(old || policy) for ``PenaltyKL``, of KL(policy || reference) otherwise. Both
    controllers change ``policy_loss``'s ``kl_coef``, which may be traced, never the algorithm, so nothing is
    recompiled.
    """

    target: Annotated[float, ABOVE_0] = 0.01

    reads: ClassVar[str] = "controller/kl"
    """The metric that is compared with the target."""

    __post_init__ = check_self

    def __call__(self, coef: float, kl: float, completions: int = 0) -> float:
        """Return the next coefficient, from the measured KL per token; ``completions`` is ignored."""
        return coef / 2 if kl < self.target / 1.5 else coef * 2 if kl > self.target * 1.5 else coef


@dataclasses.dataclass(frozen=True)
class ProportionalKL:
    """The rule of Ziegler et al. 2019 (arXiv 1909.08593): ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * completions
    / horizon``. ``target``: nats per sequence, the sum over its tokens (the paper's 6), of the KL that ``AdaptiveKL``
    takes per token. ``horizon``: completions.
    """

    target: Annotated[float, ABOVE_0] = 6.0
    horizon: Annotated[int, ABOVE_0] = 10000

    reads: ClassVar[str] = "controller/kl_sequence"
    """The metric that is compared with the target."""

    __post_init__ = check_self

    def __call__(self, coef: float, kl: float, completions: int) -> float:
        """Return the next coefficient, from the KL per sequence measured on this number of completions."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        return coef * (1 + error * completions / self.horizon)


@dataclasses.dataclass(frozen=True)
class AdaptiveEntropy:
    """Adaptive entropy control of Skywork-OR1 (arXiv 2505.22312): the coefficient rises below the target entropy and
    falls above it; the bonus is applied only while the entropy is at most the target.

    ``c <- clip(c + rate [e < target] - rate [e > target], 0, largest)``, ``coefficient = c [e <= target]``

    Here e is the step's ``entropy``, and c starts as the algorithm's ``entropy_coef``, which the first step uses. A
    later step uses the coefficient computed from the entropy of the step before it; c is updated even while the bonus
    is off. ``largest`` is our addition: it bounds the growth of c during a long time below the target.

    Attributes:
      target: nats per token, at the sampling temperature; the paper's is 0.2.
      rate: change of c in a step; the paper's is 0.005.
      largest: upper bound of c.
    """

    target: Annotated[float, AT_LEAST_0, FINITE] = 0.2
    rate: Annotated[float, ABOVE_0, FINITE] = 0.005
    largest: Annotated[float, ABOVE_0, FINITE] = 0.1

    __post_init__ = check_self

    def __call__(self, coef: float, entropy: float) -> tuple[float, float]:
        """Return the next c, from this one and the measured entropy, and the coefficient for the next step."""
        coefficient = coef + self.rate * ((entropy < self.target) - (entropy > self.target))
        coefficient = min(max(coefficient, 0.0), self.largest)
        return coefficient, coefficient if entropy <= self.target else 0.0
