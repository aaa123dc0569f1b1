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
"""

import dataclasses

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.contracts import floating, numeric, positive, ranked, shaped


@dataclasses.dataclass(frozen=True)
class TokenMean:
    """``sum(loss) / token_count``."""

    def __call__(self, loss: jax.Array, mask: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """loss and mask [B, T], counts scalars; returns a scalar."""
        loss, mask, tokens, _ = _checked(loss, mask, token_count, sequence_count)
        return jnp.sum(loss * mask) / tokens


@dataclasses.dataclass(frozen=True)
class SequenceMean:
    """``sum_i (sum_t loss / L_i) / sequence_count``."""

    def __call__(self, loss: jax.Array, mask: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """loss and mask [B, T], counts scalars; returns a scalar."""
        loss, mask, _, sequences = _checked(loss, mask, token_count, sequence_count)
        lengths = jnp.maximum(jnp.sum(mask, axis=1), 1)
        return jnp.sum(jnp.sum(loss * mask, axis=1) / lengths) / sequences


@dataclasses.dataclass(frozen=True)
class SequenceSum:
    """``sum(loss) / sequence_count``."""

    def __call__(self, loss: jax.Array, mask: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """loss and mask [B, T], counts scalars; returns a scalar."""
        loss, mask, _, sequences = _checked(loss, mask, token_count, sequence_count)
        return jnp.sum(loss * mask) / sequences


@dataclasses.dataclass(frozen=True)
class ConstantLength:
    """``sum(loss) / (sequence_count * length)``: Dr. GRPO as coded; ``length`` is the generation budget in tokens."""

    length: int

    def __post_init__(self):
        positive(self, "length")

    def __call__(self, loss: jax.Array, mask: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """loss and mask [B, T], counts scalars; returns a scalar."""
        loss, mask, _, sequences = _checked(loss, mask, token_count, sequence_count)
        return jnp.sum(loss * mask) / (sequences * self.length)


def _checked(loss: jax.Array, mask: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> tuple:
    loss, mask = floating(loss, "loss"), numeric(mask, "mask")
    ranked(2, loss=loss)
    shaped(loss.shape, mask=mask)
    ranked(0, token_count=token_count, sequence_count=sequence_count)
    return loss, *(jnp.asarray(x, loss.dtype) for x in (mask, token_count, sequence_count))
