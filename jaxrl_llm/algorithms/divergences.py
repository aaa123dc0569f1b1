"""What a teacher's distribution tells of the policy's: advantages of sampled tokens, and divergences between the two.

pi is the policy, nu the teacher, both at the temperature of the sampling; no gradient reaches the teacher.
"""

import dataclasses
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.contracts import within_bounds
from jaxrl_llm.system.setting import Range


@dataclasses.dataclass(frozen=True)
class SampledKL:
    """On-policy distillation by the policy gradient: each sampled token's advantage is ``log nu - log pi``, frozen.

    Its expectation is minus the reverse KL(pi || nu) of the token's position: each token answers for its own position
    only. Differentiating ``log pi - log nu`` itself would not do: its expected gradient has no teacher in it. log pi is
    that of the policy which sampled the token, so that the weights of stale tokens act on a fixed advantage.

    With another scale than 1 it is ExOPD (arXiv 2602.12125), ``scale (log nu - log ref) - (log pi - log ref)``: above
    1 the policy is led past the teacher, away from the reference that it began as. The paper's best scale is 1.25.

    Attributes:
      scale: of the teacher's reward.
    """

    scale: Annotated[float, Range("(0, inf)", words="above 0")] = 1.0
    __post_init__ = within_bounds

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
    __post_init__ = within_bounds

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
    """Return log-probabilities [..., k + 1] of the tokens ``ids`` [..., k], and of all others as one class.

    The mass of the others is summed, not subtracted from 1, so that it keeps its digits.

    ``logp``: of all tokens, [..., V]; k is below V.
    """
    own = jnp.take_along_axis(logp, ids, axis=-1)
    others = jax.nn.logsumexp(jnp.put_along_axis(logp, ids, -jnp.inf, axis=-1, inplace=False), axis=-1, keepdims=True)
    return jnp.concatenate([own, others], axis=-1)


def spread_slopes(slopes: jax.Array, logp: jax.Array, classes: jax.Array, ids: jax.Array) -> jax.Array:
    """Return derivatives [..., V] by the logits of all tokens from those by classes [..., k + 1] of ``top_classes``.

    The tokens of the last class share its derivative by their probabilities. ``classes``: its result for ``logp``.
    """
    shared = slopes[..., -1:] * jnp.exp(logp - classes[..., -1:])
    return jnp.put_along_axis(shared, ids, slopes[..., :-1], axis=-1, inplace=False)
