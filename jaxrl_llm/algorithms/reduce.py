"""Reducers of per-token losses [B, T] to a scalar; the weight of a token decides all length bias.

Every reducer divides by the optimiser step's *global* counts, so summing over microbatches and devices gives the same
number as one large batch. ``sequence_count`` excludes rows without a valid token (as in verl and OpenRLHF; TRL counts
them).

=================  =========================  ====================================
reducer            weight of one token        used by
=================  =========================  ====================================
TokenMean          1 / tokens                 DAPO, CISPO, ProRL, PPO
SequenceMean       1 / (sequences * L_i)      GRPO, GSPO, SAPO, REINFORCE++
SequenceSum        1 / sequences              REINFORCE, RLOO, Kimi k1.5, MiniRL
ConstantLength(n)  1 / (sequences * n)        Dr. GRPO
=================  =========================  ====================================

Sums and constants ascend the expected reward, whatever the baseline b. SequenceMean ascends ``E[(R - b) / L]``, so that
b matters: right answers gain by being short, wrong ones by being long. TokenMean does so by the group's mean length,
which depends on each completion only by its own share.
"""

import dataclasses
import operator
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.tokens import ABOVE_0, as_array, check_rank, check_self, check_shape


class Reducer:
    """The interface of a reducer, which gives each token its weight; a new one overrides ``weight``. Weights depend on
    lengths and counts alone, so that loss and gradient can be computed in one pass over the batch.
    """

    def weight(self, lengths: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """Return the weight of a valid token, a scalar or [B, 1] by sequence; ``lengths`` [B, 1] are in tokens."""
        raise NotImplementedError

    def __call__(
        self, loss: jax.Array, mask: jax.Array, token_count: jax.Array, sequence_count: jax.Array
    ) -> jax.Array:
        """Return the reduced loss, a scalar; loss and mask are [B, T], counts scalars."""
        loss = as_array(loss, "loss")
        mask = as_array(mask, "mask", "any")
        check_rank(2, loss=loss)
        check_shape(loss.shape, mask=mask)
        check_rank(0, token_count=token_count, sequence_count=sequence_count)
        mask, tokens, sequences = (jnp.asarray(x, loss.dtype) for x in (mask, token_count, sequence_count))
        lengths = jnp.sum(mask, axis=1, keepdims=True)
        return jnp.sum(loss * mask * self.weight(lengths, tokens, sequences))


@dataclasses.dataclass(frozen=True)
class TokenMean(Reducer):
    """``sum(loss) / token_count``."""

    def weight(self, lengths: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """Return the weight of every token, a scalar."""
        return 1 / token_count


@dataclasses.dataclass(frozen=True)
class SequenceMean(Reducer):
    """``sum_i (sum_t loss / L_i) / sequence_count``."""

    def weight(self, lengths: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """Return the weight of a token of each sequence, [B, 1]."""
        return 1 / (sequence_count * jnp.maximum(lengths, 1))


@dataclasses.dataclass(frozen=True)
class SequenceSum(Reducer):
    """``sum(loss) / sequence_count``."""

    def weight(self, lengths: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """Return the weight of every token, a scalar."""
        return 1 / sequence_count


@dataclasses.dataclass(frozen=True)
class ConstantLength(Reducer):
    """``sum(loss) / (sequence_count * length)``: Dr. GRPO as coded (arXiv 2503.20783). ``length`` is the generation
    budget in tokens, constant over training; for None the trainer fills in the run's.
    """

    length: Annotated[int | None, ABOVE_0] = None

    __post_init__ = check_self

    def weight(self, lengths: jax.Array, token_count: jax.Array, sequence_count: jax.Array) -> jax.Array:
        """Return the weight of every token, a scalar."""
        if self.length is None:
            raise ValueError("ConstantLength.length must be given: the generation budget in tokens")
        return 1 / (sequence_count * self.length)


@jax.custom_jvp
def totals(*arrays: jax.Array) -> list[jax.Array]:
    """Sum each array, all of one shape, in one pass over memory if the compiler supports it. For GPUs and TPUs XLA
    fuses such sums by itself, also with the computation of their operands; for CPUs it materialises each operand unless
    one reduction takes them all. The barrier keeps that reduction whole where only some of its sums are used.
    """
    return jax.lax.platform_dependent(*arrays, cpu=_sum_together, default=lambda *xs: [jnp.sum(x) for x in xs])


@totals.defjvp
def _totals_jvp(
    arrays: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[list[jax.Array], list[jax.Array]]:
    # A sum is its own derivative; a reduction of several operands has no rule in JAX.
    return totals(*arrays), [jnp.sum(x) for x in tangents]


def _sum_together(*arrays: jax.Array) -> list[jax.Array]:
    zeros = [jnp.zeros((), x.dtype) for x in arrays]
    axes = tuple(range(arrays[0].ndim))
    sums = jax.lax.reduce(list(arrays), zeros, lambda a, b: list(map(operator.add, a, b)), axes)
    return jax.lax.optimization_barrier(sums)
