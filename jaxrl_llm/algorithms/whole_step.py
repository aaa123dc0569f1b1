"""Surrogates and a filter that choose tokens by looking at all those of an optimiser step.

Each has ``over_step``, which computes one array [B, T] from the whole step without a gradient; the loss of a microbatch
reads its part by the name ``of_step`` (``loss.whole_step``). So microbatches and devices change nothing. The policy by
which they choose is the live one before the update; a run finds its values by a forward pass more. Tokens of equal
value at the border are all kept by ``TopEntropy`` and all left out by the others: their order does not matter.
"""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.contracts import ABOVE_0, AT_LEAST_0, FINITE, ordered, within_bounds
from jaxrl_llm.algorithms.surrogates import Bounds, PPOClip, Surrogate
from jaxrl_llm.algorithms.tokens import Tokens
from jaxrl_llm.system.setting import Range

SHARE = Range("(0, 1]")


class Choosing(Surrogate):
    """The interface of a surrogate that reads an array of the whole step."""

    token_ratios = True
    bounds_ratio = False

    def over_step(self, at: Tokens) -> jax.Array:
        """Return float[B, T], computed over all tokens of the step."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class M2PO(Choosing):
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
class M2POClip(Choosing):
    """PPO's clip to ``[min(e^-c, 1 - low), max(e^c, 1 + high)]``: M2PO as in its authors' code (arXiv 2510.01161).

    c is the largest ``|log r|`` of a harmful token (A > 0 and r > 1, or A < 0 and r < 1) at which the mean of
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
class ClipCov(Choosing):
    """PPO's clipped loss without a few tokens that would cost the most entropy: Clip-Cov (arXiv 2505.22617).

    ``cov = (A - mean A)(logp - mean logp)``, means over the step's tokens. Of those with ``least < cov < most`` that
    PPO does not clip, max(1, share N) get no gradient; they stay in the counts. Which ones is decided by ``lot``: as
    good as at random, equal on any number of devices and microbatches, and in each epoch.
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
        ordered(self, "least", "most")
        within_bounds(self)

    def over_step(self, at: Tokens) -> jax.Array:
        """Return 1 for the tokens that are left out, float[B, T]."""
        cov = covariance(at)
        clipped = jnp.logical_or(*self.clipped(jnp.exp(at.log_ratio), at.advantages))
        eligible = (at.mask > 0) & (cov > self.least) & (cov < self.most) & ~clipped
        lots = jnp.where(eligible, lot(at), jnp.uint32(2**32 - 1))
        last = jnp.sort(lots.reshape(-1))[jnp.minimum(taken(self.share, at), lots.size - 1)]
        return (eligible & ((lots < last) | (jnp.sum(eligible, dtype=jnp.int32) <= taken(self.share, at)))).astype(
            at.mask.dtype
        )

    clipped = PPOClip.clipped

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        return PPOClip(self.low, self.high)(at) * (1 - at.extras[self.of_step])

    def cut(self, at: Tokens) -> Bounds:
        """Return bool[B, T] masks of cuts at the lower bound, and at the upper bound or by the choice."""
        low, high = self.clipped(jnp.exp(at.log_ratio), at.advantages)
        return low, high | (at.extras[self.of_step] > 0)


@dataclasses.dataclass(frozen=True)
class KLCov(Choosing):
    """``-r A``, plus ``coef |log r|`` for the max(1, share N) tokens of the highest cov: KL-Cov (arXiv 2505.22617).

    cov as in ``ClipCov``. The paper writes a KL; this is its code's penalty, which has no gradient at r = 1. There is
    no clip. ``coef`` is that of verl's recipe.
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
        border = jnp.append(falling, -jnp.inf)[jnp.minimum(taken(self.share, at), falling.size)]
        return ((at.mask > 0) & (cov > border)).astype(at.mask.dtype)

    def __call__(self, at: Tokens) -> jax.Array:
        """Return losses [B, T]."""
        # |log r|, with the slope 0 at r = 1.
        penalty = self.coef * at.extras[self.of_step] * jax.lax.stop_gradient(jnp.sign(at.log_ratio)) * at.log_ratio
        return -jnp.exp(at.log_ratio) * at.advantages + penalty


@dataclasses.dataclass(frozen=True)
class TopEntropy:
    """A filter: 1 for tokens whose entropy is in the top ``share`` of the step's, else 0 (arXiv 2506.01939).

    Kept are those at or above the (1 - share) quantile, interpolated linearly, of the current policy's entropy without
    a gradient. It multiplies the policy term only; the KL and the counts stay.
    """

    share: Annotated[float, SHARE] = 0.2
    of_step: ClassVar[str] = "entropy_top"

    __post_init__ = within_bounds

    def over_step(self, at: Tokens) -> jax.Array:
        """Return 0 or 1 for each token, float[B, T].

        Raises:
          ValueError: the entropy is not given.
        """
        if at.entropy is None:
            raise ValueError("TopEntropy chooses tokens by their entropy: entropy must be given")
        falling = -jnp.sort(jnp.where(at.mask > 0, -at.entropy, jnp.inf).reshape(-1))
        # At or above an interpolated quantile is at or above the next order statistic.
        others = jnp.maximum(jnp.sum(at.mask), 1) - 1
        border = falling[jnp.floor(self.share * others * (1 + 1e-6)).astype(jnp.int32)]
        return ((at.mask > 0) & (at.entropy >= border)).astype(at.mask.dtype)

    def __call__(self, at: Tokens) -> jax.Array:
        """Return 0 or 1 for each token, float[B, T]."""
        return at.extras[self.of_step]


def covariance(at: Tokens) -> jax.Array:
    """Return ``(A - mean A)(logp - mean logp)`` [B, T], means over all valid tokens; 0 at padding."""
    count = jnp.maximum(jnp.sum(at.mask), 1)
    centred = [x - jnp.sum(x * at.mask) / count for x in (at.advantages * at.mask, at.logp)]
    return centred[0] * centred[1] * at.mask


def taken(share: float, at: Tokens) -> jax.Array:
    """Return ``max(1, floor(share N))`` for the N valid tokens, int32[]."""
    return jnp.maximum(jnp.floor(share * jnp.sum(at.mask) * (1 + 1e-6)), 1).astype(jnp.int32)


LOTS = "lots"
"""Name of the array [B, T] of ``lots_of`` each completion, among the extras of a batch."""


def lots_of(tokens: np.ndarray, number: int) -> np.ndarray:
    """Return a whole number below 2^24 for each token, uint32[T], that looks drawn at random: a hash of the token, its
    position, and the completion's number in the step. Unlike log-probabilities these have no last digits that differ
    between meshes.
    """
    places = np.arange(len(tokens), dtype=np.uint32)
    mixed = tokens.astype(np.uint32) * np.uint32(0x9E3779B1) ^ places * np.uint32(0x85EBCA77)
    return _mixed(mixed ^ np.uint32(number * 0xC2B2AE3D & 0xFFFFFFFF)) >> np.uint32(8)


def _mixed(x: Any) -> Any:
    for factor in (0x7FEB352D, 0x846CA68B):
        x = (x ^ (x >> 16)) * np.uint32(factor)
    return x ^ (x >> 15)


def lot(at: Tokens) -> jax.Array:
    """Return a number for each token that looks drawn at random, uint32[B, T]: that of ``lots_of`` where the batch has
    it, else a hash of the sampler's log-probability (or the old policy's), the advantage and the position.
    """
    if at.extras and LOTS in at.extras:
        return at.extras[LOTS].astype(jnp.uint32)
    known = at.old_logp if at.sampler_logp is None else at.sampler_logp
    bits = [jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) for x in (known, at.advantages)]
    mixed = bits[0] * jnp.uint32(0x9E3779B1) ^ bits[1]
    return _mixed(mixed ^ (jnp.arange(at.mask.shape[1], dtype=jnp.uint32)[None] * jnp.uint32(0x85EBCA77)))
