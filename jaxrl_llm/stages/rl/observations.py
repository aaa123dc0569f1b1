"""The likelihood of what an environment said, in addition to the policy gradient: ECHO (arXiv 2605.24517)."""

import dataclasses
from typing import Any, ClassVar, Self

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms.preference import pretraining_loss
from jaxrl_llm.config import Run
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.objectives import Objective, Scalars, Share
from jaxrl_llm.rollout.groups import RolloutBatch
from jaxrl_llm.stages.rl.ingredient import Ingredient
from jaxrl_llm.types import Completion

NAME = "observations"
"""The name of the objective, and of its mask among a sample's arrays."""


@dataclasses.dataclass(frozen=True)
class ObservationLoss(Objective):
    """``-coef mean_t(logp)`` over the tokens that an environment said, nats; 0 where nothing was said.

    They are the contents of its messages, in completions that the policy's loss leaves out too. Their number is the
    divisor, so that the policy gradient is as it is without them.

    Attributes:
      coef: lambda.
    """

    coef: float
    name: ClassVar[str] = NAME
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp",)

    def __call__(self, outputs: Any, batch: Any, counts: Any, coefficients: Scalars) -> Share:
        """Return the loss, and as metrics the loss, the mean without the coefficient, and the number of tokens."""
        mean = pretraining_loss(outputs["logp"], batch.mask, counts.tokens)
        said = jnp.sum(batch.mask, dtype=jnp.float32)
        return self.coef * mean, {"loss": self.coef * mean, f"{NAME}/loss": mean, f"{NAME}/tokens": said}

    def finalize(self, metrics: Scalars) -> Scalars:
        """Return the metrics; the mean is NaN where nothing was said."""
        mean = jnp.where(metrics[f"{NAME}/tokens"] > 0, metrics[f"{NAME}/loss"], jnp.nan)
        return metrics | {f"{NAME}/loss": mean}


@dataclasses.dataclass(frozen=True)
class Observations(Ingredient):
    """What environments said, as a mask of each sample."""

    name = NAME

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        coef = run.recipe.observation_coef
        return cls(objectives=(ObservationLoss(coef),)) if coef else None

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Add a mask without tokens to the samples."""
        return [sample.with_arrays(**{NAME: np.zeros(len(sample.tokens), bool)}) for sample in samples]

    def samples(self, samples: list[list[Sample]], batch: RolloutBatch) -> list[list[Sample]]:
        """Add to each sample the mask of what its environment said."""
        return [
            [one.with_arrays(**{NAME: observed(said)}) for one, said in zip(members, group.completions, strict=True)]
            for members, group in zip(samples, batch.groups, strict=True)
        ]


def observed(completion: Completion) -> np.ndarray:
    """Return bool[T], True on the contents of the messages of an episode's environment, False on the template's."""
    found = np.zeros(len(completion.tokens), bool)
    for turn in () if completion.episode is None else completion.episode.turns:
        for begin, end in turn.said:
            found[begin:end] = True
    return found
