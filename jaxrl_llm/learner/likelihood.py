"""Learning from text: next-token prediction."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from jaxrl_llm.learner.batch import Counts, Packed
from jaxrl_llm.learner.forward import Outputs
from jaxrl_llm.learner.objectives import Metrics, Objective

TEXT = "text"
"""The objective's name: what samples are ``counted_by``."""


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """``-coef mean_t(logp)`` over the tokens that count, nats: supervised fine-tuning, and the texts of PPO-ptx.

    Beside a policy gradient (arXiv 2203.02155, eq. 2) ``coef`` is gamma there: of a mean over tokens, so that
    InstructGPT's 27.8, which belongs to its own reduction, does not carry over.

    Attributes:
      coef: of the loss; 0 and above.
      prefix: begins the names of its metrics.
    """

    coef: float = 1.0
    prefix: str = ""
    name: ClassVar[str] = TEXT
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp", "entropy")

    def __call__(
        self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: dict[str, jax.Array]
    ) -> tuple[jax.Array, Metrics]:
        """The loss, the mean entropy of the predictions (nats), and the share of tokens that were the likeliest."""
        tokens = jnp.maximum(counts.tokens, 1)
        loss = -jnp.sum(jnp.where(batch.mask, outputs["logp"], 0.0)) / tokens
        entropy = jnp.sum(jnp.where(batch.mask, outputs["entropy"], 0.0)) / tokens
        if not self.prefix:
            return self.coef * loss, {"loss": self.coef * loss, "entropy": entropy}
        return self.coef * loss, {
            "loss": self.coef * loss,
            f"{self.prefix}loss": loss,
            f"{self.prefix}entropy": entropy,
        }
