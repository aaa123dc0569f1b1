"""Learning from comparisons and from labelled steps: preferences, reward models, process reward models.

What a loss compares is several samples with one ``Sample.together``; they lie in one microbatch, where the first of
them stands for all: ``by_sequence["together"]`` is its row.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.learner.batch import Counts, Packed
from jaxrl_llm.learner.forward import Outputs
from jaxrl_llm.learner.objectives import Metrics, Objective


@dataclasses.dataclass(frozen=True)
class PairLoss(Objective):
    """A loss of ``algorithms.pairs`` over pairs of completions.

    Samples carry the scalars ``sign``, 1 for the better one and -1 for the worse, and ``ref_logp``, the sum over its
    tokens under the reference, nats. Both of a pair are counted.

    Attributes:
      loss: of each pair's margin.
    """

    loss: Any
    name: ClassVar[str] = "pairs"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp",)

    def __call__(
        self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        """The mean over pairs; how many are in the right order, and by how much reward."""
        pairs = jnp.maximum(counts.sequences / 2, 1)
        gap = sequence_gap(outputs["logp"], batch, self.loss.average)
        margin = of_each(batch, batch.by_sequence["sign"] * gap)
        whole = of_each(batch, jnp.any(batch.mask, axis=1).astype(jnp.float32)) == 2
        loss = jnp.sum(jnp.where(whole, self.loss(margin), 0.0)) / pairs
        right = jnp.where(whole, in_order(margin), 0.0)
        reward = jnp.where(whole, self.loss.beta * margin, 0.0)
        return loss, {
            "loss": loss,
            "pairs/accuracy": jnp.sum(right) / pairs,
            "pairs/margin": jnp.sum(reward) / pairs,
        }


def sequence_gap(logp: jax.Array, batch: Packed, average: bool) -> jax.Array:
    """``logp - ref`` [B] of whole completions, nats; divided by their tokens where it is an average."""
    total = jnp.sum(jnp.where(batch.mask, logp, 0.0), axis=1) - batch.by_sequence["ref_logp"]
    if not average:
        return total
    return total / jnp.maximum(jnp.sum(batch.mask, axis=1), 1).astype(total.dtype)


def of_each(batch: Packed, values: jax.Array) -> jax.Array:
    """The sums [B] of what belongs together, each in its first row; 0 in the others."""
    together = batch.by_sequence["together"]
    return jax.ops.segment_sum(values, together, num_segments=len(values))


def in_order(margin: jax.Array) -> jax.Array:
    """1 where the better one is ahead, 0 where it is behind, a half where neither is."""
    return (jnp.sign(margin) + 1) / 2


@dataclasses.dataclass(frozen=True)
class Ranking(Objective):
    """Bradley-Terry over all pairs of each prompt's ranked completions (arXiv 2203.02155, eq. 1).

    ``mean over i before j of -log sigmoid(r_i - r_j - margin)``, and the mean of that over prompts, so that none counts
    K times. Samples carry the scalars ``rank`` (0 is the best), ``margin`` and ``last``: the place of the value that is
    the completion's score. Of each prompt's samples the best one alone is counted, at its last place.

    Attributes:
      centre: times the square of twice the mean score, which keeps scores around 0; for a pair it is ``(r_w + r_l)^2``
        (arXiv 2312.09244).
    """

    centre: float = 0.0
    name: ClassVar[str] = "ranking"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(
        self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        """The mean over prompts; how many pairs are in the right order, and the mean difference and score."""
        prompts = jnp.maximum(counts.sequences, 1)
        given = batch.by_sequence
        scores = score_of(outputs["values"], batch)
        ahead = ordered_pairs(given["together"], given["rank"], batch)
        difference = scores[:, None] - scores[None, :]
        share = ahead / jnp.maximum(of_each(batch, jnp.sum(ahead, axis=1))[given["together"]], 1)[:, None]

        def mean(values: jax.Array) -> jax.Array:
            return jnp.sum(share * values) / prompts

        loss = mean(-jax.nn.log_sigmoid(difference - given["margin"][:, None]))
        ranked = jnp.any(ahead > 0, axis=1) | jnp.any(ahead > 0, axis=0)
        members = of_each(batch, ranked.astype(scores.dtype))
        centre = of_each(batch, jnp.where(ranked, scores, 0.0)) / jnp.maximum(members, 1)
        if self.centre:
            loss += self.centre * jnp.sum((2 * centre) ** 2) / prompts
        return loss, {
            "loss": loss,
            "pairs/accuracy": mean(in_order(difference)),
            "pairs/margin": mean(difference),
            "reward_model/mean": jnp.sum(centre) / prompts,
        }


def score_of(values: jax.Array, batch: Packed) -> jax.Array:
    """The score [B] of each completion: the value [B, T] at its ``last`` place."""
    last = batch.by_sequence["last"].astype(jnp.int32)
    return jnp.take_along_axis(values, last[:, None], axis=1)[:, 0]


def ordered_pairs(together: jax.Array, rank: jax.Array, batch: Packed) -> jax.Array:
    """float32[B, B]: 1 where the first is ranked before the second of the same prompt, and the prompt is counted."""
    same = together[:, None] == together[None, :]
    counted = of_each(batch, jnp.any(batch.mask, axis=1).astype(jnp.float32))[together] > 0
    return (same & (rank[:, None] < rank[None, :]) & counted[:, None]).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class StepEntropy(Objective):
    """Cross-entropy of ``sigmoid(value)`` with a label from 0 to 1 at the end of each step (arXiv 2305.20050).

    Labels may be soft: the share of continuations from there that succeeded. Samples carry the array ``labels``; what
    is counted are the places one behind the last tokens of steps, where the value has read the step.
    """

    name: ClassVar[str] = "steps"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(
        self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        """The mean over steps, and the share of them that are on their label's side of a half."""
        steps = jnp.maximum(counts.tokens, 1)
        values = outputs["values"]
        labels = jnp.where(batch.mask, batch.by_token["labels"], 0.0)
        entropy = -labels * jax.nn.log_sigmoid(values) - (1 - labels) * jax.nn.log_sigmoid(-values)
        loss = jnp.sum(jnp.where(batch.mask, entropy, 0.0)) / steps
        right = batch.mask & ((values > 0) == (labels > 0.5))
        return loss, {"loss": loss, "steps/accuracy": jnp.sum(right.astype(loss.dtype)) / steps}
