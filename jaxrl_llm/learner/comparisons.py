"""Objectives for comparisons and labels: preferences, reward models, process reward models.

Samples that a loss compares share one ``Sample.together``. They are in one microbatch, where
``by_sequence["together"]`` is the row of the first of them.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms.preference import KTO, bradley_terry, sequence_logp, step_entropy
from jaxrl_llm.learner.batch import Counts, Packed
from jaxrl_llm.learner.forward import Outputs
from jaxrl_llm.learner.objectives import Objective, Scalars, Share


@dataclasses.dataclass(frozen=True)
class PairLoss(Objective):
    """A loss of ``algorithms.preference`` over pairs of completions.

    Samples carry the scalars ``sign``, 1 for the better one and -1 for the worse, and ``ref_logp``, the sum over its
    tokens under the reference, nats, which a loss without a reference does not read. Both of a pair are counted.

    Attributes:
      loss: of each pair's margin.
    """

    loss: Any
    name: ClassVar[str] = "pairs"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp",)

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the mean loss over pairs, and the metrics accuracy and reward margin."""
        pairs = jnp.maximum(counts.sequences / 2, 1)
        logp = sequence_logp(outputs["logp"], batch.mask)
        lengths = jnp.maximum(jnp.sum(batch.mask, axis=1), 1).astype(logp.dtype)
        gap = gaps(outputs, batch) if self.loss.to_reference else logp
        if self.loss.average:
            gap /= lengths
        sign = batch.by_sequence["sign"]
        present = jnp.any(batch.mask, axis=1)
        # A row of padding has no value; that of 0 may be infinite.
        margin = of_each(batch, sign * jnp.where(present, self.loss.value(jnp.where(present, gap, -1.0)), 0.0))
        whole = of_each(batch, present.astype(jnp.float32)) == 2
        each = self.loss(margin)
        if self.loss.nll_coef:
            each -= self.loss.nll_coef * of_each(batch, jnp.where(sign > 0, logp / lengths, 0.0))
        loss = jnp.sum(jnp.where(whole, each, 0.0)) / pairs
        right = jnp.where(whole, in_order(margin), 0.0)
        reward = jnp.where(whole, self.loss.beta * margin, 0.0)
        return loss, {"loss": loss, "pairs/accuracy": jnp.sum(right) / pairs, "pairs/margin": jnp.sum(reward) / pairs}


def of_each(batch: Packed, values: jax.Array) -> jax.Array:
    """Return sums [B] over the samples that belong together, each in their first row; 0 in the others."""
    together = batch.by_sequence["together"]
    return jax.ops.segment_sum(values, together, num_segments=len(values))


def in_order(margin: jax.Array) -> jax.Array:
    """Return 1 for a positive margin, 0 for a negative one, 0.5 for 0."""
    return (jnp.sign(margin) + 1) / 2


POINT = "reference_point"
"""The array [B, T] with KTO's z at every token."""
UNRELATED = -1.0
"""The ``label`` of an answer to another prompt."""


@dataclasses.dataclass(frozen=True)
class UnpairedLoss(Objective):
    """KTO over completions with labels.

    Samples carry the scalars ``label``, 1 for a good completion, 0 for a bad one and ``UNRELATED`` for the completion
    of another prompt, one for each labelled sample; and ``ref_logp`` as in ``PairLoss``. The reference point is a mean
    over the whole step.

    Attributes:
      loss: of each completion.
    """

    loss: KTO
    name: ClassVar[str] = "unpaired"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp",)

    @property
    def looks_ahead(self) -> bool:
        """True: it needs the reference point first."""
        return True

    def over_step(self, outputs: Outputs, batch: Packed) -> Scalars:
        """Return the reference point at every token."""
        unrelated = jnp.any(batch.mask, axis=1) & (batch.by_sequence["label"] == UNRELATED)
        return {POINT: jnp.broadcast_to(self.loss.point(gaps(outputs, batch), unrelated), batch.mask.shape)}

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the mean loss over labelled completions, and sums for the metrics."""
        label = batch.by_sequence["label"]
        point = batch.by_token[POINT][0, 0]
        gap = gaps(outputs, batch)
        labelled = jnp.any(batch.mask, axis=1) & (label != UNRELATED)
        each = self.loss(gap, label > 0, point)
        loss = jnp.sum(jnp.where(labelled, each, 0.0)) / jnp.maximum(counts.sequences / 2, 1)
        found = {"loss": loss, "point_max": point}
        for name, group in (("good", labelled & (label > 0)), ("bad", labelled & (label == 0))):
            found |= {
                name: self.loss.beta * jnp.sum(jnp.where(group, gap, 0.0)),
                f"{name}/count": jnp.sum(group, dtype=gap.dtype),
            }
        return loss, found

    def finalize(self, metrics: Scalars) -> Scalars:
        """Return the loss, the reference point, and the margin of rewards: NaN without good or without bad ones."""
        means = [metrics[name] / metrics[f"{name}/count"] for name in ("good", "bad")]
        return {"loss": metrics["loss"], "pairs/margin": means[0] - means[1], "kto/point": metrics["point_max"]}


def gaps(outputs: Outputs, batch: Packed) -> jax.Array:
    """Return ``logp - ref`` of each completion, summed over its tokens, nats [B]."""
    return sequence_logp(outputs["logp"], batch.mask) - batch.by_sequence["ref_logp"]


@dataclasses.dataclass(frozen=True)
class Ranking(Objective):
    """Bradley-Terry over all pairs of each prompt's ranked completions (arXiv 2203.02155, eq. 1).

    ``mean over i before j of -log sigmoid(r_i - r_j - margin)``, averaged over prompts, so that each prompt counts
    once whatever its number of pairs. Samples carry the scalars ``rank`` (0 is the best), ``margin`` and ``last``: the
    place of the value that is the completion's score. Only the best sample of a prompt is counted, at its last place.

    Attributes:
      centre: coefficient of the square of twice the mean score, which keeps scores around 0; for a pair the square is
        ``(r_w + r_l)^2`` (arXiv 2312.09244).
    """

    centre: float = 0.0
    name: ClassVar[str] = "ranking"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the mean loss over prompts, and the metrics accuracy, mean difference and mean score."""
        prompts = jnp.maximum(counts.sequences, 1)
        given = batch.by_sequence
        last = given["last"].astype(jnp.int32)
        scores = jnp.take_along_axis(outputs["values"], last[:, None], axis=1)[:, 0]
        together = given["together"]
        counted = of_each(batch, jnp.any(batch.mask, axis=1).astype(jnp.float32))[together] > 0
        rank = given["rank"]
        # [B, B]: 1 if the first ranks before the second of the same, counted prompt, else 0.
        ahead = (together[:, None] == together[None, :]) & (rank[:, None] < rank[None, :]) & counted[:, None]
        ahead = ahead.astype(jnp.float32)
        difference = scores[:, None] - scores[None, :]
        share = ahead / jnp.maximum(of_each(batch, jnp.sum(ahead, axis=1))[together], 1)[:, None]

        def mean(values: jax.Array) -> jax.Array:
            return jnp.sum(share * values) / prompts

        loss = mean(bradley_terry(difference, given["margin"][:, None]))
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


@dataclasses.dataclass(frozen=True)
class StepEntropy(Objective):
    """Cross-entropy of ``sigmoid(value)`` with a label from 0 to 1 at the end of each step (arXiv 2305.20050).

    Labels may be soft: the share of continuations from there that succeeded. Samples carry the array ``labels``; the
    mask counts the places one behind the last tokens of steps, where the value has read the step.
    """

    name: ClassVar[str] = "steps"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the mean loss over steps, and the accuracy at a threshold of one half."""
        steps = jnp.maximum(counts.tokens, 1)
        values = outputs["values"]
        labels = jnp.where(batch.mask, batch.by_token["labels"], 0.0)
        loss = jnp.sum(jnp.where(batch.mask, step_entropy(values, labels), 0.0)) / steps
        right = batch.mask & ((values > 0) == (labels > 0.5))
        return loss, {"loss": loss, "steps/accuracy": jnp.sum(right.astype(loss.dtype)) / steps}
