"""What a role is trained towards: an objective is a value that turns outputs of a forward pass into a loss.

A role is trained by the sum of its objectives over one forward pass. An objective says which role it trains, what it
reads of the forward pass, and what must be known before the first update; it divides by counts of its own.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import Algorithm, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.kl import K3, UnbiasedK3
from jaxrl_llm.algorithms.loss import clipped_tokens
from jaxrl_llm.algorithms.tokens import clamped_log_ratio
from jaxrl_llm.algorithms.values import value_loss
from jaxrl_llm.learner.batch import Counts, Packed
from jaxrl_llm.learner.forward import Outputs

Metrics = dict[str, jax.Array]


CLIPPED = "clip_probability"
"""What the names of metrics begin with that say how likely the clipped tokens are."""


class Before(NamedTuple):
    """An array [B, T] that is computed once, before a batch's first update, at the shapes of the updates.

    Attributes:
      whose: a role, or the name of a frozen copy.
      output: what of it.
    """

    whose: str
    output: str


BEFORE = {
    "old_logp": Before("policy", "logp"),
    "ref_logp": Before("reference", "logp"),
    "old_values": Before("critic", "values"),
}
"""What an objective may need, by the name that it has in ``Packed.by_token``; what samples bring is not computed."""


class Objective:
    """What an objective says of itself beside its loss; a new one overrides what differs. It is static and hashable.

    Attributes:
      name: unique among a run's; what samples are ``counted_by``.
      role: what it trains.
      outputs: what it reads of that model's forward pass.
      needs: names in ``BEFORE``.
      entropy_gradient: it differentiates the entropy.
    """

    name: ClassVar[str]
    role: ClassVar[str]
    outputs: ClassVar[tuple[str, ...]]
    needs: tuple[str, ...] = ()
    entropy_gradient: bool = False

    def __call__(
        self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        """One microbatch's share of the step's loss, and metrics.

        Args:
          outputs: float32[B, T] each.
          batch: without the microbatch axis; its ``mask`` has what this objective counts.
          counts: of the whole step: what sums are divided by.
          coefficients: scalars by name, traced.

        Returns:
          The loss, and scalars that are added over microbatches; of those whose name ends in ``_max`` the largest is
          taken.
        """
        raise NotImplementedError

    def told(self, metrics: Metrics) -> Metrics:
        """What is logged, from the sums over all microbatches."""
        return metrics


@dataclasses.dataclass(frozen=True)
class PolicyGradient(Objective):
    """The loss of an algorithm, over tokens that the policy sampled.

    Attributes:
      algorithm: what it computes.
      several: more than one update follows each rollout, so that the policy moves away from the one that began.
      entropy_moves: the coefficient of the entropy bonus is given to each update, and may be 0 in some.
    """

    algorithm: Algorithm
    several: bool = False
    entropy_moves: bool = False
    name: ClassVar[str] = "policy"
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp", "entropy")

    @property
    def needs(self) -> tuple[str, ...]:
        """The old policy where the ratio moves, the reference where the loss has a KL to it."""
        reference = self.algorithm.kl_in_loss and self.algorithm.needs_reference
        return ("old_logp",) * self.several + ("ref_logp",) * reference

    @property
    def entropy_gradient(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.entropy_moves or self.algorithm.entropy_coef != 0

    def __call__(
        self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        """The algorithm's loss and metrics, and how far the learner is from the sampler."""
        logp = outputs["logp"]
        given = batch.by_token
        old = old_policy(self.algorithm, logp, given.get("old_logp"), given["sampler_logp"], given["fresh"])
        inputs = PolicyBatch(
            advantages=given["advantages"] if "advantages" in given else batch.by_sequence["advantages"],
            mask=batch.mask,
            old_logp=old,
            ref_logp=given.get("ref_logp"),
            sampler_logp=given["sampler_logp"],
            extras={name: given[name] for name in self.algorithm.reads},
        )
        kl_coef = coefficients.get("kl_coef") if self.algorithm.kl_in_loss else None
        entropy_coef = coefficients["entropy_coef"] if self.entropy_moves else None
        totals = counts.tokens, counts.sequences
        loss, metrics = policy_loss(self.algorithm, logp, inputs, *totals, outputs["entropy"], kl_coef, entropy_coef)
        for side, cut in zip(("low", "high"), clipped_tokens(self.algorithm, logp, inputs), strict=True):
            chance = jnp.sum(jnp.where(cut, jnp.exp(logp), 0.0))
            metrics[f"{CLIPPED}/{side}"] = chance / jnp.maximum(counts.tokens, 1)
        gap = jnp.abs(logp - given["sampler_logp"])
        fresh = (batch.mask & given["fresh"]).astype(jnp.float32)
        moved = jnp.where(batch.mask, logp - old, 0.0)
        metrics |= {
            "sampler/gap_sum": jnp.sum(gap * fresh),
            "sampler/fresh_tokens": jnp.sum(fresh),
            "sampler/logp_abs_diff_max": jnp.max(gap * fresh),
            # Tokens are the old policy's, so this k3 estimates KL(old || policy).
            "policy_kl": jnp.sum(jnp.expm1(moved) - moved) / jnp.maximum(counts.tokens, 1),
        }
        return loss, metrics

    def told(self, metrics: Metrics) -> Metrics:
        """The gap to the sampler as a mean; NaN where no token was fresh, for nothing was measured."""
        fresh = metrics["sampler/fresh_tokens"]
        measured = {
            "sampler/logp_abs_diff_mean": metrics["sampler/gap_sum"] / fresh,
            "sampler/logp_abs_diff_max": jnp.where(fresh > 0, metrics["sampler/logp_abs_diff_max"], jnp.nan),
        }
        sums = ("sampler/fresh_tokens", "sampler/gap_sum")
        return {name: value for name, value in metrics.items() if name not in sums} | measured


@dataclasses.dataclass(frozen=True)
class ValueLoss(Objective):
    """``values.value_loss`` of a critic: towards ``returns``, which are made once, before the first update.

    Attributes:
      clip: how far a value may move from its old one; None for no bound.
    """

    clip: float | None = 0.2
    name: ClassVar[str] = "values"
    role: ClassVar[str] = "critic"
    outputs: ClassVar[tuple[str, ...]] = ("values",)

    @property
    def needs(self) -> tuple[str, ...]:
        """The old values where the new ones are held to them."""
        return ("old_values",) * (self.clip is not None)

    def __call__(
        self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        """The loss, and with a bound ``clip_fraction``: the share of tokens whose gradient it cuts."""
        values = outputs["values"]
        targets = batch.by_token["returns"]
        tokens = jnp.maximum(counts.tokens, 1)
        if self.clip is None:
            loss = value_loss(values, targets, batch.mask, token_count=tokens)
            return loss, {"loss": loss}
        old = batch.by_token["old_values"]
        loss = value_loss(values, targets, batch.mask, old, self.clip, tokens)
        held = old + jnp.clip(values - old, -self.clip, self.clip)
        cut = (jnp.abs(values - old) > self.clip) & (jnp.abs(held - targets) > jnp.abs(values - targets))
        return loss, {"loss": loss, "clip_fraction": jnp.sum((cut & batch.mask).astype(jnp.float32)) / tokens}


def old_policy(
    algorithm: Algorithm, logp: jax.Array, old_logp: jax.Array | None, sampler_logp: jax.Array, fresh: jax.Array
) -> jax.Array:
    """The log-probabilities [B, T] that ratios are taken against; every token is weighted for all that lies behind it.

    On-policy the ratio is 1 by construction. The old policy of an earlier step's token is the one that sampled it, so
    that the ratio leads from there and the correction has nothing to add. Where a loss has a correction and no ratio,
    it is the correction that leads from there, and the old policy is the learner's.
    """
    old = jax.lax.stop_gradient(logp) if old_logp is None else old_logp
    if algorithm.correction is not None and not algorithm.surrogate.reads_ratio:
        return old
    return jnp.where(fresh, old, sampler_logp)


@jax.jit
def divergence(packed: Packed, logp: jax.Array) -> jax.Array:
    """How far a policy of these log-probabilities is from what it is held to; nats, summed over the tokens that the
    policy's loss counts.

    ``KL(policy || reference)`` where there is a reference, weighted by policy / sampler since another policy drew the
    tokens; ``KL(old || policy)`` otherwise, whose tokens they are. Of each token given those before it.
    """
    given = packed.by_token
    sampler = given["sampler_logp"]
    if "ref_logp" in given:
        estimate = UnbiasedK3()(logp, given["ref_logp"], clamped_log_ratio(logp, sampler))
    else:
        # The old policy of an earlier step's token is the one that sampled it.
        estimate = K3()(jnp.where(given["fresh"], given["old_logp"], sampler), logp)
    return jnp.sum(jnp.where(packed.mask & packed.counted["policy"][..., None], estimate, 0.0))


def combined(total: Metrics, new: Metrics) -> Metrics:
    """Metrics of two microbatches: largest for names ending in ``_max``, sum for the rest."""
    return {name: (jnp.maximum if name.endswith("_max") else jnp.add)(total[name], new[name]) for name in total}


def names_of(objectives: Any) -> tuple[str, ...]:
    """The objectives' names, in order."""
    return tuple(objective.name for objective in objectives)
