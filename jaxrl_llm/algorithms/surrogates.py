"""Per-token policy losses to minimise: [B, T], or [B, 1] where all tokens of a sequence share one value.

r is the algorithm's importance ratio, A the advantage.

=================  ==================================  ==========================================
surrogate          loss of one token                   its gradient, as a weight on A grad(logp)
=================  ==================================  ==========================================
Likelihood         -A logp                             1
Unclipped          -r A                                r
PPOClip            -min(r A, clip(r) A)                r, and 0 beyond the bound that A pushes to
CISPO              -sg[clip(r)] A logp                 clip(r), never 0
SAPO               -(4 / tau) sigmoid(tau (r - 1)) A   r sech^2(tau (r - 1) / 2)
MirrorDescent      (A - tau sum log r)^2 / (2 tau L)   (A - tau sum log r) / A
MiniRL             -M sg[min(pi / mu, cap)] A logp     min(pi / mu, cap), and 0 where PPOClip's is
PenaltyKL          -r A + beta (r - 1 - log r)         r - beta (r - 1) / A
DPPO               -M sg[min(r, cap)] A logp           min(r, cap), and 0 where the probability moved too far
VESPO              -sg[phi(W)] A logp                  phi of the sequence's weight W = prod r
GMPO               -A exp(mean clip(log r))            the geometric mean, by 1 / L; 0 for clipped tokens
LUSPO              L PPOClip                           L times PPOClip's
=================  ==================================  ==========================================

Surrogates and a filter that choose tokens by looking at all those of an optimiser step.

Each has ``over_step``, which computes one array [B, T] from the whole step without a gradient; the loss of a microbatch
reads its part by the name ``of_step`` (``loss.whole_step``). So microbatches and devices change nothing. The policy by
which they choose is the live one before the update; a run finds its values by a forward pass more. Tokens of equal
value at the border are all kept by ``TopEntropy`` and all left out by the others: their order does not matter.
"""

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.tokens import (
    ABOVE_0,
    AT_LEAST_0,
    FINITE,
    Tokens,
    check_order,
    check_self,
    clamp_log_ratio,
    mu_logp,
)
from jaxrl_llm.system.setting import Range

Bounds = tuple[jax.Array, jax.Array]


class Surrogate:
    """The interface of a surrogate and its defaults; a new surrogate overrides those that differ.

    Attributes:
      reads_ratio: whether it uses ``log_ratio``.
      reads_sampler: whether it weights by the sampler's log-probabilities itself; a correction would then count twice.
      reads: names of further arrays [B, T] that it reads from ``Tokens.extras``; in a run the sampler provides them.
      reads_kl_coef: whether it has a KL term of its own with the KL coefficient, instead of a KL to a reference.
      whole_sequences: whether its value is one number per sequence, which only SequenceSum adds up as in its paper.
      averaged: whether its value is one number per sequence, which only SequenceMean counts once.
      token_ratios: whether it needs the ratio of each token, so that a sequence ratio would break it.
      bounds_ratio: whether ``clipped`` has all its cuts, those of a ratio alone; else it overrides ``cut``.
      of_step: name of the array [B, T] that ``over_step`` computes over all tokens of an optimiser step, and that the
        surrogate reads from ``Tokens.extras``; empty for none.
      idle: the part, in words, that has no effect while every ratio is 1; empty without such a part.
    """

    reads_ratio = True
    reads_sampler = False
    reads: tuple[str, ...] = ()
    reads_kl_coef = False
    whole_sequences = False
    averaged = False
    token_ratios = False
    bounds_ratio = True
    of_step = ""
    idle = ""
    __post_init__ = check_self

    def clipped(self, ratio: jax.Array, advantages: jax.Array) -> Bounds:
        """Return bool[B, T] masks of cuts at the lower and the upper bound, for metrics; all False by default."""
        return jnp.zeros(ratio.shape, bool), jnp.zeros(ratio.shape, bool)

    def cut(self, at: Tokens) -> Bounds:
        """Return the masks of ``clipped`` where they depend on more than ratio and advantage."""
        return self.clipped(jnp.exp(at.log_ratio), at.advantages)


@dataclasses.dataclass(frozen=True)
class Likelihood(Surrogate):
    """``-A logp``: REINFORCE (Williams 1992)."""

    reads_ratio = False

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        return -at.advantages * at.logp


@dataclasses.dataclass(frozen=True)
class Unclipped(Surrogate):
    """``-r A``: the unclipped surrogate objective (arXiv 1707.06347, eq. 6). However old the samples are, its expected
    gradient is that of ``sum P_old(prefix) pi(token | prefix) A_old``, which equals that of the expected reward at the
    old policy, and anywhere for completions of one token, but not for longer ones.
    """

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        return -jnp.exp(at.log_ratio) * at.advantages


@dataclasses.dataclass(frozen=True)
class PPOClip(Surrogate):
    """``-min(r A, clip(r, 1 - low, 1 + high) A)``: PPO (arXiv 1707.06347, eq. 7). ``high > low`` is DAPO's clip-higher
    (arXiv 2503.14476, eq. 8). ``dual`` bounds the loss of negative advantages at ``-dual * A`` (arXiv 1912.09729);
    None, as in the papers above, leaves it unbounded. verl defaults to dual=3.
    """

    low: Annotated[float, AT_LEAST_0] = 0.2
    high: Annotated[float, AT_LEAST_0] = 0.2
    dual: Annotated[float | None, Range("(1, inf]", words="above 1 (it bounds a ratio)")] = None
    idle = "the clip range never binds"

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        ratio = jnp.exp(at.log_ratio)
        low, high = self.clipped(ratio, at.advantages)
        # The smaller objective is the clipped one exactly where the bound that the advantage pushes to is passed.
        loss = -jnp.where(low, 1 - self.low, jnp.where(high, 1 + self.high, ratio)) * at.advantages
        if self.dual is None:
            return loss
        return jnp.where(at.advantages < 0, jnp.minimum(loss, -self.dual * at.advantages), loss)

    def clipped(self, ratio: jax.Array, advantages: jax.Array) -> Bounds:
        """Return bool[B, T] masks of tokens with the gradient cut at the lower and at the upper bound."""
        return (ratio < 1 - self.low) & (advantages < 0), (ratio > 1 + self.high) & (advantages > 0)


@dataclasses.dataclass(frozen=True)
class CISPO(Surrogate):
    """``-sg[clip(r, ratio_min, ratio_max)] A logp``: MiniMax-M1 (arXiv 2506.13585, eq. 4). Both bounds are absolute
    ratios. The paper has no lower bound and does not publish its upper one; 5.0 is TRL's and ScaleRL's. verl and slime
    give the bound as its distance from 1. The gradient never vanishes.
    """

    ratio_max: float = 5.0
    ratio_min: float = 0.0
    idle = "the cap never binds"

    def __post_init__(self):
        if not self.ratio_max >= 1:
            raise ValueError(
                f"CISPO.ratio_max is an absolute ratio of at least 1, got {self.ratio_max}: "
                f"where a framework writes the distance from 1, give {1 + self.ratio_max:g}"
            )
        if not 0 <= self.ratio_min <= 1:
            raise ValueError(f"CISPO.ratio_min is an absolute ratio from 0 to 1, got {self.ratio_min}")

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        weight = jax.lax.stop_gradient(jnp.clip(jnp.exp(at.log_ratio), self.ratio_min, self.ratio_max))
        return -weight * at.advantages * at.logp

    def clipped(self, ratio: jax.Array, advantages: jax.Array) -> Bounds:
        """Return bool[B, T] masks of tokens with the weight cut at the lower and at the upper bound."""
        return ratio < self.ratio_min, ratio > self.ratio_max


@dataclasses.dataclass(frozen=True)
class SAPO(Surrogate):
    """``-(4 / tau) sigmoid(tau (r - 1)) A``: soft adaptive policy optimisation (arXiv 2511.20347, eq. 5).

    ``tau`` is ``tau_pos`` where A > 0, else ``tau_neg``; with a larger tau the gradient decays faster. At r = 1 the
    gradient is GRPO's for any tau, and tau -> 0 is the unclipped ratio. Being symmetric around 1, it also damps steps
    back to r = 1, which PPO's clip leaves at full weight.
    """

    tau_pos: Annotated[float, ABOVE_0] = 1.0
    tau_neg: Annotated[float, ABOVE_0] = 1.05
    idle = "the gate never closes"

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        tau = jnp.where(at.advantages > 0, jnp.asarray(self.tau_pos, at.logp.dtype), self.tau_neg)
        return -4 / tau * jax.nn.sigmoid(tau * (jnp.exp(at.log_ratio) - 1)) * at.advantages


@dataclasses.dataclass(frozen=True)
class MirrorDescent(Surrogate):
    """``(A - tau sum_t log r_t)^2 / (2 tau)`` for each sequence: Kimi k1.5 (arXiv 2501.12599, eq. 2 and 3).

    A = R - mean(R) replaces ``R - tau log Z``, as in the paper. The paper's loss has no ``1 / (2 tau)``; with it the
    gradient is minus its equation 3. Each of a sequence's L tokens gets value / L, so that SequenceSum adds the value
    up once.
    """

    tau: Annotated[float, ABOVE_0] = 1.0
    whole_sequences = True
    idle = "tau does nothing"

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, 1]."""
        length = jnp.maximum(at.lengths, 1)
        gap = at.mean(at.advantages) - self.tau * at.total(at.log_ratio)
        return gap**2 / (2 * self.tau * length)


@dataclasses.dataclass(frozen=True)
class MiniRL(Surrogate):
    """``-M sg[min(pi / mu, cap)] A logp``: "Stabilizing reinforcement learning with LLMs" (arXiv 2512.01374, eq. 5 to
    7). The weight is against the sampler, the clip against the old policy: M is 0 where PPO's clip would cut the
    gradient.
    """

    low: Annotated[float, AT_LEAST_0] = 0.2
    high: Annotated[float, AT_LEAST_0] = 0.27
    cap: Annotated[float, ABOVE_0] = 5.0
    reads_sampler = True
    idle = "the clip range never binds"
    clipped = PPOClip.clipped

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        low, high = self.clipped(jnp.exp(at.log_ratio), at.advantages)
        weight = jnp.minimum(jnp.exp(clamp_log_ratio(at.logp, mu_logp(at, self))), self.cap)
        return -jax.lax.stop_gradient(jnp.where(low | high, 0, weight)) * at.advantages * at.logp


@dataclasses.dataclass(frozen=True)
class PenaltyKL(Surrogate):
    """``-r A + beta (r - 1 - log r)``: PPO with a penalty in place of the clip (arXiv 1707.06347, section 4).

    The paper's penalty is the exact KL(old || policy) over the vocabulary. That needs the old logits, which are never
    kept, so this is its k3 estimate from the sampled token: never negative, and unbiased under the old policy in value
    and in gradient. beta is the algorithm's ``kl_coef``, so that a controller can change it (``kl.AdaptiveKL``). It is
    not a KL to a reference.
    """

    reads_kl_coef = True
    idle = "the penalty is 0"

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        excess = jnp.expm1(at.log_ratio)
        return -(excess + 1) * at.advantages + at.kl_coef * (excess - at.log_ratio)


@dataclasses.dataclass(frozen=True)
class DPPO(Surrogate):
    """``-M sg[min(r, cap)] A logp``: divergence PPO (arXiv 2602.04879).

    M is 0 where the advantage pushes a token's probability p further away from its anchor q, and it is too far already:
    ``p - q > high`` or ``< -low`` for "tv"; for "kl" the KL of the two-way choice between this token and all others,
    ``q log(q / p) + (1 - q) log((1 - q) / (1 - p))``, above ``high`` or ``low``. A rare token may so grow a
    hundredfold, which PPO's clip forbids, and a common one not lose a fifth, which it allows. Masked tokens stay in the
    counts. The anchor is that of the ratio: the sampler in the presets, the old policy in verl.
    """

    low: Annotated[float, AT_LEAST_0] = 0.15
    high: Annotated[float, AT_LEAST_0] = 0.15
    divergence: Literal["tv", "kl"] = "tv"
    cap: Annotated[float, ABOVE_0] = 1e4
    token_ratios = True
    bounds_ratio = False
    idle = "no token is masked"

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        low, high = self.cut(at)
        weight = jnp.where(low | high, 0, jnp.minimum(jnp.exp(at.log_ratio), self.cap))
        return -jax.lax.stop_gradient(weight) * at.advantages * at.logp

    def cut(self, at: Tokens) -> Bounds:
        """Return bool[B, T] masks of tokens that fell, and that rose, too far."""
        p, q = jnp.exp(at.logp), jnp.exp(at.logp - at.log_ratio)
        if self.divergence == "tv":
            far = jnp.abs(p - q)
        else:
            # Rounded to 1, a probability leaves nothing for the other tokens.
            p, q = (jnp.minimum(x, 1 - jnp.finfo(x.dtype).eps) for x in (p, q))
            far = q * -at.log_ratio + (1 - q) * (jnp.log1p(-q) - jnp.log1p(-p))
        fell = (p < q) & (far > self.low) & (at.advantages < 0)
        return fell, (p > q) & (far > self.high) & (at.advantages > 0)


@dataclasses.dataclass(frozen=True)
class VESPO(Surrogate):
    """``-sg[phi(W)] A logp`` with ``phi = W^k exp(lam (1 - W))``: VESPO (arXiv 2602.10693).

    W is the product of the sequence's token ratios, without a mean over its length; its logarithm is clamped to
    [log 1e-8, 20]. phi(1) = 1, the maximum is at k / lam. The anchor is that of the ratio: the sampler in the preset,
    so that W includes the gap which a correction would count twice. k and lam by the sign of A are those that the
    authors' code runs; its docstring has others.
    """

    k_pos: Annotated[float, ABOVE_0] = 2.0
    lam_pos: Annotated[float, ABOVE_0] = 3.0
    k_neg: Annotated[float, ABOVE_0] = 3.0
    lam_neg: Annotated[float, ABOVE_0] = 2.0
    token_ratios = True
    idle = "every sequence has the weight 1"

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        log_w = jnp.clip(at.total(at.log_ratio), math.log(1e-8), 20)
        good = at.advantages >= 0
        k, lam = (
            jnp.where(good, jnp.asarray(pos, at.logp.dtype), neg)
            for pos, neg in ((self.k_pos, self.k_neg), (self.lam_pos, self.lam_neg))
        )
        phi = jnp.exp(k * log_w - lam * jnp.expm1(log_w))
        return -jax.lax.stop_gradient(phi) * at.advantages * at.logp


@dataclasses.dataclass(frozen=True)
class GMPO(Surrogate):
    """``-A exp(mean_t clip(log r_t))`` for each sequence: geometric-mean policy optimisation (arXiv 2507.20673). The
    clip is of each token, before the mean (GSPO's comes after it), in logarithms, and on the side that the advantage
    pushes to: ``min(log r, high)`` for A > 0, ``max(log r, -low)`` for A < 0.
    """

    low: Annotated[float, AT_LEAST_0] = 0.4
    high: Annotated[float, AT_LEAST_0] = 0.4
    averaged = True
    token_ratios = True
    idle = "the clip range never binds"

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, 1]."""
        good = at.advantages > 0
        clipped = jnp.where(good, jnp.minimum(at.log_ratio, self.high), jnp.maximum(at.log_ratio, -self.low))
        return -at.mean(at.advantages) * jnp.exp(at.mean(clipped))

    def clipped(self, ratio: jax.Array, advantages: jax.Array) -> Bounds:
        """Return bool[B, T] masks of tokens without a gradient at the lower and at the upper bound."""
        return (ratio < math.exp(-self.low)) & (advantages < 0), (ratio > math.exp(self.high)) & (advantages > 0)


@dataclasses.dataclass(frozen=True)
class LUSPO(Surrogate):
    """``L_i`` times PPO's clipped loss: length-unbiased sequence policy optimisation (arXiv 2602.05261). With a
    sequence ratio and SequenceMean, GSPO's pieces, every token has the weight 1 / sequences, whatever its sequence's
    length.
    """

    low: Annotated[float, AT_LEAST_0] = 2e-3
    high: Annotated[float, AT_LEAST_0] = 2.5e-3
    averaged = True
    idle = "the clip range never binds"
    clipped = PPOClip.clipped

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T], or [B, 1] for one ratio and one advantage by sequence."""
        return at.lengths * PPOClip(self.low, self.high)(at)


SHARE = Range("(0, 1]")


class WholeStepSurrogate(Surrogate):
    """The interface of a surrogate that reads an array of the whole step."""

    token_ratios = True
    bounds_ratio = False

    def over_step(self, at: Tokens) -> jax.Array:
        """Return float[B, T], computed over all tokens of the step."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class M2PO(WholeStepSurrogate):
    """``-M r A``, no clip: second-moment trust policy optimisation as AReaL states it (arXiv 2510.01161).

    M is 0 for the tokens with the largest ``(log r)^2``: as many as needed for its mean over the others, M2, to be
    below ``threshold``. They stay in the counts. The ratio is against the sampler in the preset. ``M2POClip`` is the
    authors' code, another algorithm.
    """

    threshold: Annotated[float, ABOVE_0] = 0.04
    of_step = "m2_kept"
    idle = "no token is masked"

    def over_step(self, at: Tokens) -> jax.Array:
        """Return 1 for the tokens that stay, float[B, T]."""
        moment = jnp.where(at.mask > 0, at.log_ratio**2, jnp.inf).reshape(-1)
        rising = jnp.sort(moment)
        mean = jnp.cumsum(rising) / jnp.arange(1, rising.size + 1, dtype=rising.dtype)
        few = jnp.sum(mean < self.threshold)
        border = jnp.append(rising, jnp.inf)[few]
        return ((at.mask > 0) & (at.log_ratio**2 < border)).astype(at.mask.dtype)

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        return -jnp.exp(at.log_ratio) * at.advantages * at.extras[self.of_step]

    def cut(self, at: Tokens) -> Bounds:
        """Return bool[B, T] masks of left-out tokens with a ratio below and above 1."""
        out = at.extras[self.of_step] == 0
        return out & (at.log_ratio < 0), out & (at.log_ratio > 0)


@dataclasses.dataclass(frozen=True)
class M2POClip(WholeStepSurrogate):
    """PPO's clip to ``[min(e^-c, 1 - low), max(e^c, 1 + high)]``: M2PO as in its authors' code (arXiv 2510.01161). c is
    the largest ``|log r|`` of a harmful token (A > 0 and r > 1, or A < 0 and r < 1) at which the mean of
    ``min(|log r|, c)^2`` over the harmful tokens is at most ``threshold``; 0 without one.
    """

    threshold: Annotated[float, ABOVE_0] = 0.04
    low: Annotated[float, Range("[0, 1)")] = 0.3
    high: Annotated[float, AT_LEAST_0] = 0.5
    of_step = "m2_cap"
    idle = "the clip range never binds"

    def over_step(self, at: Tokens) -> jax.Array:
        """Return c at every token, float[B, T]."""
        harmful = (at.mask > 0) & (at.advantages * at.log_ratio > 0)
        rising = jnp.sort(jnp.where(harmful, jnp.abs(at.log_ratio), jnp.inf).reshape(-1))
        count = jnp.sum(harmful, dtype=rising.dtype)
        index = jnp.arange(rising.size, dtype=rising.dtype)
        square = jnp.where(index < count, rising**2, 0)
        mean = (jnp.cumsum(square) + (count - 1 - index) * square) / jnp.maximum(count, 1)
        fits = (index < count) & (mean <= self.threshold)
        return jnp.broadcast_to(jnp.max(jnp.where(fits, rising, 0)), at.mask.shape)

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        low, high = self.cut(at)
        least, most = self.bounds(at)
        return -jnp.where(low, least, jnp.where(high, most, jnp.exp(at.log_ratio))) * at.advantages

    def bounds(self, at: Tokens) -> Bounds:
        """Return the lowest and the highest ratio with a gradient, float[B, T] each."""
        cap = at.extras[self.of_step]
        return jnp.minimum(jnp.exp(-cap), 1 - self.low), jnp.maximum(jnp.exp(cap), 1 + self.high)

    def cut(self, at: Tokens) -> Bounds:
        """Return bool[B, T] masks of gradients cut at the lower and at the upper bound."""
        least, most = self.bounds(at)
        ratio = jnp.exp(at.log_ratio)
        return (ratio < least) & (at.advantages < 0), (ratio > most) & (at.advantages > 0)


@dataclasses.dataclass(frozen=True)
class ClipCov(WholeStepSurrogate):
    """PPO's clipped loss without a few tokens that would cost the most entropy: Clip-Cov (arXiv 2505.22617).

    ``cov = (A - mean A)(logp - mean logp)``, means over the step's tokens. Of those with ``least < cov < most`` that
    PPO does not clip, max(1, share N) get no gradient; they stay in the counts. ``random_numbers`` decides
    which ones: as good as at random, equal on any number of devices and microbatches, and in each epoch.
    """

    share: Annotated[float, SHARE] = 2e-4
    least: Annotated[float, FINITE] = 1.0
    most: Annotated[float, FINITE] = 5.0
    low: Annotated[float, AT_LEAST_0] = 0.2
    high: Annotated[float, AT_LEAST_0] = 0.2
    of_step = "covariance_out"
    draws = True
    idle = "the clip range never binds"

    def __post_init__(self):
        check_order(self, "least", "most")
        check_self(self)

    def over_step(self, at: Tokens) -> jax.Array:
        """Return 1 for the tokens that are left out, float[B, T]."""
        cov = covariance(at)
        clipped = jnp.logical_or(*self.clipped(jnp.exp(at.log_ratio), at.advantages))
        eligible = (at.mask > 0) & (cov > self.least) & (cov < self.most) & ~clipped
        numbers = jnp.where(eligible, random_numbers(at), jnp.uint32(2**32 - 1))
        count = share_count(self.share, at)
        last = jnp.sort(numbers.reshape(-1))[jnp.minimum(count, numbers.size - 1)]
        few = jnp.sum(eligible, dtype=jnp.int32) <= count
        return (eligible & ((numbers < last) | few)).astype(at.mask.dtype)

    clipped = PPOClip.clipped

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        return PPOClip(self.low, self.high)(at) * (1 - at.extras[self.of_step])

    def cut(self, at: Tokens) -> Bounds:
        """Return bool[B, T] masks of cuts at the lower bound, and at the upper bound or by the choice."""
        low, high = self.clipped(jnp.exp(at.log_ratio), at.advantages)
        return low, high | (at.extras[self.of_step] > 0)


@dataclasses.dataclass(frozen=True)
class KLCov(WholeStepSurrogate):
    """``-r A``, plus ``coef |log r|`` for the max(1, share N) tokens of the highest cov: KL-Cov (arXiv 2505.22617). cov
    as in ``ClipCov``. The paper writes a KL; this is its code's penalty, which has no gradient at r = 1. There is no
    clip. ``coef`` is that of verl's recipe.
    """

    share: Annotated[float, SHARE] = 2e-4
    coef: Annotated[float, AT_LEAST_0, FINITE] = 0.1
    of_step = "covariance_top"
    bounds_ratio = True
    idle = "the penalty is 0"

    def over_step(self, at: Tokens) -> jax.Array:
        """Return 1 for the tokens with a penalty, float[B, T]."""
        cov = jnp.where(at.mask > 0, covariance(at), -jnp.inf)
        falling = -jnp.sort(-cov.reshape(-1))
        border = jnp.append(falling, -jnp.inf)[jnp.minimum(share_count(self.share, at), falling.size)]
        return ((at.mask > 0) & (cov > border)).astype(at.mask.dtype)

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        # |log r|, with the slope 0 at r = 1.
        penalty = self.coef * at.extras[self.of_step] * jax.lax.stop_gradient(jnp.sign(at.log_ratio)) * at.log_ratio
        return -jnp.exp(at.log_ratio) * at.advantages + penalty


@dataclasses.dataclass(frozen=True)
class TopEntropy:
    """A filter: 1 for tokens whose entropy is in the top ``share`` of the step's, else 0 (arXiv 2506.01939). Kept are
    those at or above the (1 - share) quantile, interpolated linearly, of the current policy's entropy without a
    gradient. It multiplies the policy term only; the KL and the counts stay.
    """

    share: Annotated[float, SHARE] = 0.2
    of_step: ClassVar[str] = "entropy_top"

    __post_init__ = check_self

    def over_step(self, at: Tokens) -> jax.Array:
        """Return 0 or 1 for each token, float[B, T]."""
        if at.entropy is None:
            raise ValueError("TopEntropy chooses tokens by their entropy: entropy must be given")
        falling = -jnp.sort(jnp.where(at.mask > 0, -at.entropy, jnp.inf).reshape(-1))
        # At or above an interpolated quantile is at or above the next order statistic.
        last = jnp.maximum(jnp.sum(at.mask), 1) - 1
        border = falling[jnp.floor(self.share * last * (1 + 1e-6)).astype(jnp.int32)]
        return ((at.mask > 0) & (at.entropy >= border)).astype(at.mask.dtype)

    def __call__(self, at: Tokens) -> jax.Array:
        """Return 0 or 1 for each token, float[B, T]."""
        return at.extras[self.of_step]


def covariance(at: Tokens) -> jax.Array:
    """Return ``(A - mean A)(logp - mean logp)`` [B, T], means over all valid tokens; 0 at padding."""
    count = jnp.maximum(jnp.sum(at.mask), 1)
    centred = [x - jnp.sum(x * at.mask) / count for x in (at.advantages * at.mask, at.logp)]
    return centred[0] * centred[1] * at.mask


def share_count(share: float, at: Tokens) -> jax.Array:
    """Return ``max(1, floor(share N))`` for the N valid tokens, int32[]."""
    return jnp.maximum(jnp.floor(share * jnp.sum(at.mask) * (1 + 1e-6)), 1).astype(jnp.int32)


LOTS = "lots"
"""Name of the array [B, T] of ``lots_of`` each completion, among the extras of a batch."""


def lots_of(tokens: np.ndarray, number: int) -> np.ndarray:
    """Return a whole number below 2^24 for each token, uint32[T], that looks drawn at random: a hash of the token, its
    position, and the completion's number in the step. Unlike log-probabilities it is the same on every mesh.
    """
    places = np.arange(len(tokens), dtype=np.uint32)
    mixed = tokens.astype(np.uint32) * np.uint32(0x9E3779B1) ^ places * np.uint32(0x85EBCA77)
    return _hash_bits(mixed ^ np.uint32(number * 0xC2B2AE3D & 0xFFFFFFFF)) >> np.uint32(8)


def _hash_bits(x: Any) -> Any:
    for factor in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * np.uint32(factor)
    return x ^ (x >> 15)


def random_numbers(at: Tokens) -> jax.Array:
    """Return a number for each token that looks drawn at random, uint32[B, T]: that of ``lots_of`` where the batch has
    it, else a hash of the sampler's log-probability (or the old policy's), the advantage and the position.
    """
    if at.extras and LOTS in at.extras:
        return at.extras[LOTS].astype(jnp.uint32)
    behaviour_logp = at.old_logp if at.sampler_logp is None else at.sampler_logp
    bits = [jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) for x in (behaviour_logp, at.advantages)]
    mixed = bits[0] * jnp.uint32(0x9E3779B1) ^ bits[1]
    return _hash_bits(mixed ^ (jnp.arange(at.mask.shape[1], dtype=jnp.uint32)[None] * jnp.uint32(0x85EBCA77)))
