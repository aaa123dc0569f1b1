"""Objectives of roles: an objective is a value that maps outputs of a forward pass to a loss.

A role is trained by the sum of its objectives over one forward pass. An objective declares the role that it trains, the
outputs that it reads, and the arrays that it needs before the first update; it divides by counts of its own.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import Algorithm, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.advantages import value_loss
from jaxrl_llm.algorithms.kl import K3, UnbiasedK3
from jaxrl_llm.algorithms.loss import clipped_tokens, log_ratios, whole_step
from jaxrl_llm.algorithms.preference import pretraining_loss
from jaxrl_llm.algorithms.surrogates import LOTS
from jaxrl_llm.algorithms.tokens import clamped_log_ratio
from jaxrl_llm.learner.batch import Counts, Packed
from jaxrl_llm.learner.forward import Output, Outputs

Scalars = dict[str, jax.Array]
Share = tuple[jax.Array, Scalars]
"""One microbatch's share of a step's loss, and metrics."""


CLIPPED = "clip_probability"
"""The prefix of metrics of the clipped tokens' probability."""


BEFORE = {"old_logp": ("policy", "logp"), "ref_logp": ("reference", "logp"), "old_values": ("critic", "values")}
"""Arrays [B, T] that an objective may need, by their name in ``Packed.by_token``: the role, or frozen copy, and its
model output. They are computed once, before a batch's first update, at the shapes of the updates, unless samples give
them.
"""


class Objective:
    """The interface of an objective and its defaults; a new objective overrides those that differ. Static and hashable.

    Attributes:
      name: unique in a run; ``Sample.counted_by`` refers to it.
      role: the role that it trains.
      outputs: the outputs of that model's forward pass that it reads; see ``learner.forward.Output``.
      needs: names in ``BEFORE``.
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
        """Return one microbatch's share of the step's loss, and metrics.

        Args:
          outputs: float32[B, T] each.
          batch: without the microbatch axis; its ``mask`` is True where this objective counts.
          counts: of the whole step, the divisors of sums.
          coefficients: scalars by name, traced.

        Returns:
          The loss, and scalars that are summed over microbatches; for names ending in ``_max`` the largest is taken.
        """
        raise NotImplementedError

    def finalize(self, metrics: Scalars) -> Scalars:
        """Return the metrics to log, from the sums over all microbatches."""
        return metrics


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Objective):
    """The loss of an algorithm, over tokens that the policy sampled.

    Attributes:
      algorithm: computes the loss.
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
        given = batch.by_token
        names = (*self.algorithm.reads, *(piece.of_step for piece in self.algorithm.chooses), LOTS)
        return PolicyBatch(
            advantages=given["advantages"] if "advantages" in given else batch.by_sequence["advantages"],
            mask=batch.mask,
            old_logp=old_policy(self.algorithm, logp, given.get("old_logp"), given["sampler_logp"], given["fresh"]),
            ref_logp=given.get("ref_logp"),
            sampler_logp=given["sampler_logp"],
            extras={name: given[name] for name in names if name in given or name in self.algorithm.reads},
        )

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """Return the algorithm's loss and metrics, and the gap between learner and sampler."""
        if self.idle:
            outputs = {name: jax.lax.stop_gradient(outputs[name]) for name in self.outputs}
        logp = outputs["logp"]
        given = batch.by_token
        inputs = self.inputs(logp, batch)
        kl_coef = coefficients.get("kl_coef") if self.algorithm.kl_in_loss else None
        entropy_coef = coefficients["entropy_coef"] if self.entropy_moves else None
        totals = counts.tokens, counts.sequences
        loss, metrics = policy_loss(self.algorithm, logp, inputs, *totals, outputs["entropy"], kl_coef, entropy_coef)
        for side, cut in zip(("low", "high"), clipped_tokens(self.algorithm, logp, inputs), strict=True):
            chance = jnp.sum(jnp.where(cut, jnp.exp(logp), 0.0))
            metrics[f"{CLIPPED}/{side}"] = chance / jnp.maximum(counts.tokens, 1)
        gap = jnp.abs(logp - given["sampler_logp"])
        fresh = (batch.mask & given["fresh"]).astype(jnp.float32)
        moved = jnp.where(batch.mask, logp - inputs.old_logp, 0.0)
        metrics |= {
            "sampler/gap_sum": jnp.sum(gap * fresh),
            "sampler/fresh_tokens": jnp.sum(fresh),
            "sampler/logp_abs_diff_max": jnp.max(gap * fresh),
            # Tokens are the old policy's, so this k3 estimates KL(old || policy).
            "policy_kl": jnp.sum(jnp.expm1(moved) - moved) / jnp.maximum(counts.tokens, 1),
            "ratio_spread": jnp.sum(jnp.abs(log_ratios(self.algorithm, logp, inputs))) / jnp.maximum(counts.tokens, 1),
        }
        if "rerouted" in outputs:
            elsewhere = outputs["rerouted"] * fresh
            metrics |= {"sampler/rerouted": jnp.sum(elsewhere), "sampler/rerouted_gap": jnp.sum(gap * elsewhere)}
        return loss, metrics

    def finalize(self, metrics: Scalars) -> Scalars:
        """Replace the sums of the gap to the sampler by its mean; NaN without fresh tokens."""
        fresh = metrics["sampler/fresh_tokens"]
        measured = {
            "sampler/logp_abs_diff_mean": metrics["sampler/gap_sum"] / fresh,
            "sampler/logp_abs_diff_max": jnp.where(fresh > 0, metrics["sampler/logp_abs_diff_max"], jnp.nan),
        }
        sums = ("sampler/fresh_tokens", "sampler/gap_sum", "sampler/rerouted", "sampler/rerouted_gap")
        if "sampler/rerouted" in metrics:
            measured["sampler/rerouted_fraction"] = metrics["sampler/rerouted"] / fresh
            gap = metrics["sampler/rerouted_gap"] / metrics["sampler/rerouted"]
            measured["sampler/rerouted_logp_abs_diff_mean"] = gap
        return {name: value for name, value in metrics.items() if name not in sums} | measured


@dataclasses.dataclass(frozen=True)
class ValueLoss(Objective):
    """A critic's ``advantages.value_loss`` towards ``returns``, which are computed once, before the first update.

    Attributes:
      clip: how far a value may move from its old one; None for no bound.
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
        held = old + jnp.clip(values - old, -self.clip, self.clip)
        cut = (jnp.abs(values - old) > self.clip) & (jnp.abs(held - targets) > jnp.abs(values - targets))
        return loss, {"loss": loss, "clip_fraction": jnp.sum((cut & batch.mask).astype(jnp.float32)) / tokens}


TEXT = "text"
"""The name of the objective on texts, for ``Sample.counted_by``."""


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """``-coef mean_t(logp)`` over the tokens that count, nats: supervised fine-tuning, and the texts of PPO-ptx.

    With a policy gradient, ``coef`` is the gamma of arXiv 2203.02155, eq. 2, for a mean over tokens: InstructGPT's 27.8
    belongs to its own reduction and does not carry over.

    Attributes:
      coef: of the loss; 0 and above.
      prefix: begins the names of its metrics.
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
    """Return the log-probabilities [B, T] that ratios are taken against, so that every token is weighted for its full
    drift.

    On-policy the ratio is 1 by construction. For a token of an earlier step it is the sampler's log-probability: the
    ratio covers the whole drift, and the correction adds nothing. For a loss with a correction and no ratio, the
    correction covers the drift, and the old policy is the learner's.
    """
    old = jax.lax.stop_gradient(logp) if old_logp is None else old_logp
    if algorithm.correction is not None and not algorithm.surrogate.reads_ratio:
        return old
    return jnp.where(fresh, old, sampler_logp)


@jax.jit
def divergence(packed: Packed, logp: jax.Array) -> jax.Array:
    """Return the KL of a policy with these log-probabilities; nats, summed over the tokens that its loss counts.

    With a reference it is ``KL(policy || reference)``, weighted by policy / sampler since another policy drew the
    tokens; else ``KL(old || policy)`` on the old policy's own tokens. It is for each token given those before it.
    """
    given = packed.by_token
    sampler = given["sampler_logp"]
    if "ref_logp" in given:
        estimate = UnbiasedK3()(logp, given["ref_logp"], clamped_log_ratio(logp, sampler))
    else:
        # The old policy of an earlier step's token is the one that sampled it.
        estimate = K3()(jnp.where(given["fresh"], given["old_logp"], sampler), logp)
    return jnp.sum(jnp.where(packed.mask & packed.counted["policy"][..., None], estimate, 0.0))
