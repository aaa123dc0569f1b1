"""Objectives of roles: an objective is a value that maps outputs of a forward pass to a loss.

A role is trained by the sum of its objectives over one forward pass. An objective declares the role that it trains, the
outputs that it reads, and the arrays that it needs before the first update; it divides by counts of its own.

Samples that a loss compares, as of preferences, share one ``Sample.together``. They are in one microbatch, where
``by_sequence["together"]`` is the row of the first of them.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import Algorithm, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.advantages import value_loss
from jaxrl_llm.algorithms.kl import K3, JensenShannon, UnbiasedK3
from jaxrl_llm.algorithms.loss import clipped_tokens, log_ratios, whole_step
from jaxrl_llm.algorithms.preference import KTO, bradley_terry, pretraining_loss, sequence_logp, step_entropy
from jaxrl_llm.algorithms.surrogates import LOTS
from jaxrl_llm.algorithms.tokens import clamp_log_ratio
from jaxrl_llm.learner.batch import Counts, Packed
from jaxrl_llm.learner.forward import Output, Outputs, max_predictions, prediction_states
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import Decoder, cast
from jaxrl_llm.models.heads import TeacherStates, TopTokens, token_divergence, top_tokens
from jaxrl_llm.models.lora import without_adapter

Scalars = dict[str, jax.Array]
Share = tuple[jax.Array, Scalars]
"""One microbatch's share of a step's loss, and metrics."""


CLIP_PROBABILITY = "clip_probability"
"""The prefix of metrics of the clipped tokens' probability."""


PRECOMPUTED = {"old_logp": ("policy", "logp"), "ref_logp": ("reference", "logp"), "old_values": ("critic", "values")}
"""Arrays [B, T] that an objective may need, by their name in ``Packed.by_token``: the role, or frozen copy, and its
model output. They are computed once, before a batch's first update, at the shapes of the updates, unless samples give
them.
"""


class Objective:
    """The interface of an objective and its defaults; a new objective overrides those that differ. Static and hashable.

    Attributes:
      name: unique in a run; ``Sample.counted_by`` refers to it.
      role: the role that it trains.
      outputs: what it reads of the outputs of that model's forward pass; see ``learner.forward.Output``.
      needs: names in ``PRECOMPUTED``.
      entropy_gradient: whether it differentiates the entropy.
      looks_ahead: whether ``over_step`` computes arrays, from a forward pass over the whole step before its gradient.
    """

    name: ClassVar[str]
    role: ClassVar[str]
    outputs: ClassVar[tuple[Output, ...]]
    needs: tuple[str, ...] = ()
    entropy_gradient: bool = False
    looks_ahead: bool = False

    def over_step(self, outputs: Outputs, batch: Packed) -> Scalars:
        """Return arrays [B, T] for ``Packed.by_token``, by name, that depend on all rows of a step; {} for none.
        Outputs and batch hold the rows of all microbatches, without the microbatch axis.
        """
        return {}

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return one microbatch's share of the step's loss, and metrics: scalars that are summed over microbatches, or
        for names ending in ``_max`` the largest.

        Args:
          outputs: float32[B, T] each.
          batch: without the microbatch axis; its ``mask`` is True where this objective counts.
          counts: of the whole step, the divisors of sums.
          coefficients: scalars by name, traced.
        """
        raise NotImplementedError

    def finalize(self, metrics: Scalars) -> Scalars:
        """Return the metrics to log, from the sums over all microbatches."""
        return metrics


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Objective):
    """The loss of an ``algorithm``, over tokens that the policy sampled.

    Attributes:
      several: whether each rollout is followed by more than one update, so that the policy leaves the old one.
      entropy_moves: whether the coefficient of the entropy bonus is given to each update; it may be 0 in some.
      idle: whether nothing in the loss has a gradient, all advantages being 0: only the metrics are computed.
    """

    algorithm: Algorithm
    several: bool = False
    entropy_moves: bool = False
    idle: bool = False
    name: ClassVar[str] = "policy"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp", "entropy")

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the arrays of the old policy if the ratio changes, and of the reference if the loss has a KL to it."""
        reference = self.algorithm.kl_in_loss and self.algorithm.needs_reference
        return ("old_logp",) * self.several + ("ref_logp",) * reference

    @property
    def entropy_gradient(self) -> bool:
        """Whether the loss may have an entropy bonus."""
        return self.entropy_moves or self.algorithm.entropy_coef != 0

    @property
    def looks_ahead(self) -> bool:
        """Whether the algorithm chooses tokens among all those of a step."""
        return bool(self.algorithm.chooses)

    def over_step(self, outputs: Outputs, batch: Packed) -> Scalars:
        """Return the arrays that the algorithm computes over a whole step."""
        return whole_step(self.algorithm, outputs["logp"], self.inputs(outputs["logp"], batch), outputs["entropy"])

    def inputs(self, logp: jax.Array, batch: Packed) -> PolicyBatch:
        """Return the loss's inputs besides the live log-probabilities."""
        by_token = batch.by_token
        names = (*self.algorithm.reads, *(piece.of_step for piece in self.algorithm.chooses), LOTS)
        sampler_logp = by_token["sampler_logp"]
        return PolicyBatch(
            advantages=by_token["advantages"] if "advantages" in by_token else batch.by_sequence["advantages"],
            mask=batch.mask,
            old_logp=old_policy(self.algorithm, logp, by_token.get("old_logp"), sampler_logp, by_token["fresh"]),
            ref_logp=by_token.get("ref_logp"),
            sampler_logp=sampler_logp,
            extras={name: by_token[name] for name in names if name in by_token or name in self.algorithm.reads},
        )

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the algorithm's loss and metrics, and the gap between learner and sampler."""
        if self.idle:
            outputs = {name: jax.lax.stop_gradient(outputs[name]) for name in self.outputs}
        logp = outputs["logp"]
        by_token = batch.by_token
        inputs = self.inputs(logp, batch)
        kl_coef = coefficients.get("kl_coef") if self.algorithm.kl_in_loss else None
        entropy_coef = coefficients.get("entropy_coef")
        totals = counts.tokens, counts.sequences
        loss, metrics = policy_loss(self.algorithm, logp, inputs, *totals, outputs["entropy"], kl_coef, entropy_coef)
        for side, cut in zip(("low", "high"), clipped_tokens(self.algorithm, logp, inputs), strict=True):
            chance = jnp.sum(jnp.where(cut, jnp.exp(logp), 0.0))
            metrics[f"{CLIP_PROBABILITY}/{side}"] = chance / jnp.maximum(counts.tokens, 1)
        gap = jnp.abs(logp - by_token["sampler_logp"])
        fresh = (batch.mask & by_token["fresh"]).astype(jnp.float32)
        log_ratio = jnp.where(batch.mask, logp - inputs.old_logp, 0.0)
        metrics |= {
            "sampler/gap_sum": jnp.sum(gap * fresh),
            "sampler/fresh_tokens": jnp.sum(fresh),
            "sampler/logp_abs_diff_max": jnp.max(gap * fresh),
            # Tokens are the old policy's, so this k3 estimates KL(old || policy).
            "policy_kl": jnp.sum(jnp.expm1(log_ratio) - log_ratio) / jnp.maximum(counts.tokens, 1),
            "ratio_spread": jnp.sum(jnp.abs(log_ratios(self.algorithm, logp, inputs))) / jnp.maximum(counts.tokens, 1),
        }
        if "rerouted" in outputs:
            rerouted = outputs["rerouted"] * fresh
            metrics |= {"sampler/rerouted": jnp.sum(rerouted), "sampler/rerouted_gap": jnp.sum(gap * rerouted)}
        return loss, metrics

    def finalize(self, metrics: Scalars) -> Scalars:
        """Replace the sums of the gap to the sampler by its mean; NaN without fresh tokens."""
        fresh = metrics["sampler/fresh_tokens"]
        means = {
            "sampler/logp_abs_diff_mean": metrics["sampler/gap_sum"] / fresh,
            "sampler/logp_abs_diff_max": jnp.where(fresh > 0, metrics["sampler/logp_abs_diff_max"], jnp.nan),
        }
        sums = ("sampler/fresh_tokens", "sampler/gap_sum", "sampler/rerouted", "sampler/rerouted_gap")
        if "sampler/rerouted" in metrics:
            means["sampler/rerouted_fraction"] = metrics["sampler/rerouted"] / fresh
            gap = metrics["sampler/rerouted_gap"] / metrics["sampler/rerouted"]
            means["sampler/rerouted_logp_abs_diff_mean"] = gap
        return {name: metric for name, metric in metrics.items() if name not in sums} | means


@dataclasses.dataclass(frozen=True)
class ValueLoss(Objective):
    """A critic's ``advantages.value_loss`` towards ``returns``, which are computed once, before the first update.
    ``clip``: how far a value may move from its old one; None for no bound.
    """

    clip: float | None = 0.2
    name: ClassVar[str] = "values"
    role: ClassVar[str] = "critic"
    outputs: ClassVar[tuple[str, ...]] = ("values",)

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the array of old values if the loss clips to them."""
        return ("old_values",) * (self.clip is not None)

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the loss, and with ``clip`` the metric ``clip_fraction``: the share of tokens with a cut gradient."""
        values = outputs["values"]
        targets = batch.by_token["returns"]
        tokens = jnp.maximum(counts.tokens, 1)
        old = None if self.clip is None else batch.by_token["old_values"]
        loss = value_loss(values, targets, batch.mask, old, self.clip, tokens)
        if old is None:
            return loss, {"loss": loss}
        clipped = old + jnp.clip(values - old, -self.clip, self.clip)
        cut = (jnp.abs(values - old) > self.clip) & (jnp.abs(clipped - targets) > jnp.abs(values - targets))
        return loss, {"loss": loss, "clip_fraction": jnp.sum((cut & batch.mask).astype(jnp.float32)) / tokens}


TEXT = "text"
"""The name of the objective on texts, for ``Sample.counted_by``."""


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """``-coef mean_t(logp)`` over the tokens that count, nats: supervised fine-tuning, and the texts of PPO-ptx. With a
    policy gradient, ``coef``, 0 and above, is the gamma of arXiv 2203.02155, eq. 2, for a mean over tokens:
    InstructGPT's 27.8 belongs to its own reduction and does not carry over. ``prefix`` begins the names of its
    metrics.
    """

    coef: float = 1.0
    prefix: str = ""
    name: ClassVar[str] = TEXT
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp", "entropy")

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the loss, and as metrics the loss and the mean entropy of the predictions (nats)."""
        tokens = jnp.maximum(counts.tokens, 1)
        loss = pretraining_loss(outputs["logp"], batch.mask, counts.tokens)
        entropy = jnp.sum(jnp.where(batch.mask, outputs["entropy"], 0.0)) / tokens
        # Without a prefix there is one loss, that with the coefficient.
        metrics = {f"{self.prefix}loss": loss, f"{self.prefix}entropy": entropy}
        return self.coef * loss, metrics | {"loss": self.coef * loss}


def old_policy(
    algorithm: Algorithm, logp: jax.Array, old_logp: jax.Array | None, sampler_logp: jax.Array, fresh: jax.Array
) -> jax.Array:
    """Return the log-probabilities [B, T] that ratios are taken against. On-policy the ratio is 1 by construction. For
    a token of an earlier step it is the sampler's log-probability: the ratio covers the whole drift, and the correction
    adds nothing. For a loss with a correction and no ratio, the correction covers the drift, and the old policy is the
    learner's.
    """
    old = jax.lax.stop_gradient(logp) if old_logp is None else old_logp
    if algorithm.correction is not None and not algorithm.surrogate.reads_ratio:
        return old
    return jnp.where(fresh, old, sampler_logp)


@jax.jit
def summed_kl(packed: Packed, logp: jax.Array) -> jax.Array:
    """Return the KL of a policy with these log-probabilities; nats, summed over the tokens that its loss counts. With a
    reference it is ``KL(policy || reference)``, weighted by policy / sampler since another policy drew the tokens; else
    ``KL(old || policy)`` on the old policy's own tokens. It is for each token given those before it.
    """
    by_token = packed.by_token
    sampler = by_token["sampler_logp"]
    if "ref_logp" in by_token:
        estimate = UnbiasedK3()(logp, by_token["ref_logp"], clamp_log_ratio(logp, sampler))
    else:
        # The old policy of an earlier step's token is the one that sampled it.
        estimate = K3()(jnp.where(by_token["fresh"], by_token["old_logp"], sampler), logp)
    return jnp.sum(jnp.where(packed.mask & packed.counted["policy"][..., None], estimate, 0.0))


@dataclasses.dataclass(frozen=True)
class PairLoss(Objective):
    """A ``loss`` of ``algorithms.preference``, of each pair's margin, over pairs of completions. Samples carry the
    scalars ``sign``, 1 for the better one and -1 for the worse, and ``ref_logp``, the sum over its tokens under the
    reference, nats, which a loss without a reference does not read. Both of a pair are counted.
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
        gap = logp_gaps(outputs, batch) if self.loss.to_reference else logp
        if self.loss.average:
            gap /= lengths
        sign = batch.by_sequence["sign"]
        present = jnp.any(batch.mask, axis=1)
        # A row of padding has no value; that of 0 may be infinite.
        margin = sum_compared(batch, sign * jnp.where(present, self.loss.value(jnp.where(present, gap, -1.0)), 0.0))
        complete = sum_compared(batch, present.astype(jnp.float32)) == 2
        each = self.loss(margin)
        if self.loss.nll_coef:
            each -= self.loss.nll_coef * sum_compared(batch, jnp.where(sign > 0, logp / lengths, 0.0))
        loss = jnp.sum(jnp.where(complete, each, 0.0)) / pairs
        right = jnp.where(complete, order_accuracy(margin), 0.0)
        reward = jnp.where(complete, self.loss.beta * margin, 0.0)
        return loss, {"loss": loss, "pairs/accuracy": jnp.sum(right) / pairs, "pairs/margin": jnp.sum(reward) / pairs}


def sum_compared(batch: Packed, values: jax.Array) -> jax.Array:
    """Return sums [B] over the samples that belong together, each in their first row; 0 in the others."""
    together = batch.by_sequence["together"]
    return jax.ops.segment_sum(values, together, num_segments=len(values))


def order_accuracy(margin: jax.Array) -> jax.Array:
    """Return 1 for a positive margin, 0 for a negative one, 0.5 for 0."""
    return (jnp.sign(margin) + 1) / 2


REFERENCE_POINT = "reference_point"
"""The array [B, T] with KTO's z at every token."""
UNRELATED = -1.0
"""The ``label`` of an answer to another prompt."""


@dataclasses.dataclass(frozen=True)
class UnpairedLoss(Objective):
    """KTO, the ``loss`` of each completion, over completions with labels. Samples carry the scalars ``label``, 1 for a
    good completion, 0 for a bad one and ``UNRELATED`` for the completion of another prompt, one for each labelled
    sample; and ``ref_logp`` as in ``PairLoss``. The reference point is a mean over the whole step.
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
        point = self.loss.point(logp_gaps(outputs, batch), unrelated)
        return {REFERENCE_POINT: jnp.broadcast_to(point, batch.mask.shape)}

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the mean loss over labelled completions, and sums for the metrics."""
        label = batch.by_sequence["label"]
        point = batch.by_token[REFERENCE_POINT][0, 0]
        gap = logp_gaps(outputs, batch)
        labelled = jnp.any(batch.mask, axis=1) & (label != UNRELATED)
        each = self.loss(gap, label > 0, point)
        loss = jnp.sum(jnp.where(labelled, each, 0.0)) / jnp.maximum(counts.sequences / 2, 1)
        metrics = {"loss": loss, "point_max": point}
        for name, group in (("good", labelled & (label > 0)), ("bad", labelled & (label == 0))):
            metrics |= {
                name: self.loss.beta * jnp.sum(jnp.where(group, gap, 0.0)),
                f"{name}/count": jnp.sum(group, dtype=gap.dtype),
            }
        return loss, metrics

    def finalize(self, metrics: Scalars) -> Scalars:
        """Return the loss, the reference point, and the margin of rewards: NaN without good or without bad ones."""
        means = [metrics[name] / metrics[f"{name}/count"] for name in ("good", "bad")]
        return {"loss": metrics["loss"], "pairs/margin": means[0] - means[1], "kto/point": metrics["point_max"]}


def logp_gaps(outputs: Outputs, batch: Packed) -> jax.Array:
    """Return ``logp - ref`` of each completion, summed over its tokens, nats [B]."""
    return sequence_logp(outputs["logp"], batch.mask) - batch.by_sequence["ref_logp"]


@dataclasses.dataclass(frozen=True)
class Ranking(Objective):
    """Bradley-Terry over all pairs of each prompt's ranked completions (arXiv 2203.02155, eq. 1): ``mean over i before
    j of -log sigmoid(r_i - r_j - margin)``, averaged over prompts, so that each prompt counts once whatever its number
    of pairs.

    Samples carry the scalars ``rank`` (0 is the best), ``margin`` and ``last``: the place of the value that is the
    completion's score. Only the best sample of a prompt is counted, at its last place. ``centre``: coefficient of the
    square of twice the mean score, which keeps scores around 0; for a pair ``(r_w + r_l)^2`` (arXiv 2312.09244).
    """

    centre: float = 0.0
    name: ClassVar[str] = "ranking"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the mean loss over prompts, and the metrics accuracy, mean difference and mean score."""
        prompts = jnp.maximum(counts.sequences, 1)
        by_sequence = batch.by_sequence
        last = by_sequence["last"].astype(jnp.int32)
        scores = jnp.take_along_axis(outputs["values"], last[:, None], axis=1)[:, 0]
        together = by_sequence["together"]
        counted = sum_compared(batch, jnp.any(batch.mask, axis=1).astype(jnp.float32))[together] > 0
        rank = by_sequence["rank"]
        # [B, B]: 1 if the first ranks before the second of the same, counted prompt, else 0.
        ahead = (together[:, None] == together[None, :]) & (rank[:, None] < rank[None, :]) & counted[:, None]
        ahead = ahead.astype(jnp.float32)
        difference = scores[:, None] - scores[None, :]
        share = ahead / jnp.maximum(sum_compared(batch, jnp.sum(ahead, axis=1))[together], 1)[:, None]

        def mean(values: jax.Array) -> jax.Array:
            return jnp.sum(share * values) / prompts

        loss = mean(bradley_terry(difference, by_sequence["margin"][:, None]))
        ranked = jnp.any(ahead > 0, axis=1) | jnp.any(ahead > 0, axis=0)
        members = sum_compared(batch, ranked.astype(scores.dtype))
        centre = sum_compared(batch, jnp.where(ranked, scores, 0.0)) / jnp.maximum(members, 1)
        if self.centre:
            loss += self.centre * jnp.sum((2 * centre) ** 2) / prompts
        return loss, {
            "loss": loss,
            "pairs/accuracy": mean(order_accuracy(difference)),
            "pairs/margin": mean(difference),
            "reward_model/mean": jnp.sum(centre) / prompts,
        }


@dataclasses.dataclass(frozen=True)
class StepEntropy(Objective):
    """Cross-entropy of ``sigmoid(value)`` with a label from 0 to 1 at the end of each step (arXiv 2305.20050). Labels
    may be soft: the share of continuations from there that succeeded. Samples carry the array ``labels``; the mask
    counts the places one behind the last tokens of steps, where the value has read the step.
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


DISTILLATION = "distillation"
"""The name of the objective, for ``Sample.counted_by``, and the prefix of its metrics."""
TEACHER_INDEX = "teacher"
"""The name of the number of a sample's teacher among its scalars, if there are several."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=("model",), meta_fields=("compute",))
@dataclasses.dataclass(frozen=True)
class Teacher:
    """A frozen model that is run with each microbatch of the policy: ``model``, or its shapes, None for the frozen base
    of the policy's own adapter; ``compute``: how its layers are computed.
    """

    model: Any
    compute: ComputeOptions


@dataclasses.dataclass(frozen=True)
class TopOutput:
    """A teacher's ``k`` most likely tokens as an output: ``models.heads.TopTokens`` [P, N, ...]. ``vocab`` is the
    student's; tokens from there on are left out.
    """

    k: int
    vocab: int

    def __call__(self, model: Decoder, hidden: jax.Array, batch: Packed, temperature: jax.Array) -> TopTokens:
        """Return the tokens and their log-probabilities at each prediction."""
        return top_tokens(model, hidden, self.k, temperature, self.vocab)


@dataclasses.dataclass(frozen=True)
class TeacherDivergence:
    """The ``divergence`` from the teacher as an output, float32[P, N], nats. With ``divergence.top_k`` it reads
    ``teacher_ids`` and ``teacher_logp`` of the predictions; otherwise the batch's teachers read its rows here, and no
    logits outlive a chunk. ``teachers``: names in ``Packed.teachers``, in the order of the numbers of samples'
    teachers; of several only those run that have a row in the microbatch.
    """

    divergence: JensenShannon
    teachers: tuple[str, ...]

    def __call__(self, model: Decoder, hidden: jax.Array, batch: Packed, temperature: jax.Array) -> jax.Array:
        """Return the divergence at each prediction."""
        measure = functools.partial(
            token_divergence, self.divergence, model, hidden, temperature=temperature, count=max_predictions(batch)
        )
        if self.divergence.top_k:
            return measure(TopTokens(batch.by_prediction["teacher_ids"], batch.by_prediction["teacher_logp"]))
        assert batch.teachers is not None
        states = [self._states(batch.teachers[name], model, batch) for name in self.teachers]
        if len(states) == 1:
            return measure(states[0]())
        places = jnp.minimum(batch.predictions.scatter // batch.mask.shape[1], len(batch.mask) - 1)
        which = batch.by_sequence[TEACHER_INDEX][places]
        valid = batch.predictions.scatter < batch.mask.size
        divergence = zeros = jnp.zeros(which.shape, jnp.float32)
        for number, of_teacher in enumerate(states):
            rows = valid & (which == number)
            measured = jax.lax.cond(jnp.any(rows), lambda s=of_teacher: measure(s()), lambda: zeros)
            divergence = jnp.where(rows, measured, divergence)
        return divergence

    @staticmethod
    def _states(teacher: Teacher, model: Decoder, batch: Packed) -> Any:
        """Return a function that runs the teacher on the rows."""

        def run() -> TeacherStates:
            frozen = without_adapter(model) if teacher.model is None else cast(teacher.model, teacher.compute.dtype)
            return TeacherStates(frozen, jax.lax.stop_gradient(prediction_states(frozen, batch, teacher.compute)[0]))

        return run


@dataclasses.dataclass(frozen=True)
class DivergenceLoss(Objective):
    """``weight mean_t(D)``: the ``divergence`` D of the policy from its teacher (of the names ``teachers``) over the
    tokens that count, nats: a sum over the vocabulary divided by the number of tokens (GKD, arXiv 2306.13649). The
    tokens are the policy's or given ones; no gradient passes through how they were sampled.
    """

    weight: float
    divergence: JensenShannon
    teachers: tuple[str, ...]
    name: ClassVar[str] = DISTILLATION
    role: ClassVar[str] = "policy"

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Return the divergence as an output."""
        return (TeacherDivergence(self.divergence, self.teachers),)

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the loss, and as metrics the loss and the mean divergence without the weight."""
        each = outputs[self.outputs[0]]
        mean = jnp.sum(jnp.where(batch.mask, each, 0.0)) / jnp.maximum(counts.tokens, 1)
        return self.weight * mean, {"loss": self.weight * mean, f"{DISTILLATION}/divergence": mean}
