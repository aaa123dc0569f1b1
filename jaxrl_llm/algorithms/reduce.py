"""From per-token losses [B, T] to a scalar; the choice decides all length bias.

Every reducer divides by the optimiser step's *global* counts, so summing over microbatches and devices gives the same
number as one large batch. ``sequence_count`` leaves out rows with no valid token (verl and OpenRLHF do; TRL counts them).

=================  =========================  ============================
reducer            weight of one token        used by
=================  =========================  ============================
TokenMean          1 / tokens                 DAPO, CISPO, ProRL, PPO
SequenceMean       1 / (sequences * L_i)      GRPO, GSPO, SAPO
SequenceSum        1 / sequences              REINFORCE, RLOO, Kimi
ConstantLength(n)  1 / (sequences * n)        Dr. GRPO
=================  =========================  ============================

Sums and constants climb the expected reward, whatever the baseline b. SequenceMean climbs ``E[(R - b) / L]``, so that b
matters: right answers gain by being short, wrong ones by being long. TokenMean does the same by the group's mean length,
of which each completion moves its own share only.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.contracts import positive, ranked, shaped


@dataclasses.dataclass(frozen=True)
class TokenMean:
    """``sum(loss) / token_count``."""

    def __call__(self, loss: jax.Array, mask: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """loss and mask [B, T], counts scalars; returns a scalar."""
        _check(loss, mask)
        return jnp.sum(loss * mask) / token_count


@dataclasses.dataclass(frozen=True)
class SequenceMean:
    """``sum_i (sum_t loss / L_i) / sequence_count``."""

    def __call__(self, loss: jax.Array, mask: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """loss and mask [B, T], counts scalars; returns a scalar."""
        _check(loss, mask)
        lengths = jnp.maximum(jnp.sum(mask, axis=1), 1)
        return jnp.sum(jnp.sum(loss * mask, axis=1) / lengths) / sequence_count


@dataclasses.dataclass(frozen=True)
class SequenceSum:
    """``sum(loss) / sequence_count``."""

    def __call__(self, loss: jax.Array, mask: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """loss and mask [B, T], counts scalars; returns a scalar."""
        _check(loss, mask)
        return jnp.sum(loss * mask) / sequence_count


@dataclasses.dataclass(frozen=True)
class ConstantLength:
    """``sum(loss) / (sequence_count * length)``: Dr. GRPO as coded; ``length`` is the generation budget in tokens."""

    length: int

    def __post_init__(self):
        positive(self, "length")

    def __call__(self, loss: jax.Array, mask: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """loss and mask [B, T], counts scalars; returns a scalar."""
        _check(loss, mask)
        return jnp.sum(loss * mask) / (sequence_count * self.length)


def _check(loss: jax.Array, mask: jax.Array) -> None:
    ranked(2, loss=loss)
    shaped(loss.shape, mask=mask)
