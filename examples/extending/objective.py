"""An objective with a role of its own: a model that learns how many tokens a completion will still have.

An objective defines the role it trains, the parts of that model's forward pass that it reads, and its loss. All
objectives of a role share one forward pass; each counts its own rows (``Sample.counted_by``, which ``Sample.counting``
narrows) and divides by its own counts. An array of a sample with the objective's name is its mask, in place of
``Sample.mask``. Completions that a loss compares have a key in common (``Sample.together``) and stay in one microbatch.

Parameters, optimiser and update count of the role are in ``TrainState.roles["length"]`` and in every checkpoint; its
metrics begin with ``length/``.
"""

# jaxrl_llm/learner/objectives.py
import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from jaxrl_llm.learner.batch import Packed
from jaxrl_llm.learner.objectives import Counts, Objective, Outputs, Scalars, Share


@dataclasses.dataclass(frozen=True)
class TokensLeft(Objective):
    """Mean squared error of a prediction of ``log(1 + tokens left)``, [B, T]."""

    name: ClassVar[str] = "tokens_left"
    role: ClassVar[str] = "length"
    outputs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(self, outputs: Outputs, batch: Packed, counts: Counts, coefficients: Scalars) -> Share:
        """The loss alone is its metric."""
        left = jnp.cumsum(batch.mask[:, ::-1], axis=1)[:, ::-1]
        error = outputs["values"] - jnp.log1p(left.astype(jnp.float32))
        loss = jnp.sum(jnp.where(batch.mask, error**2, 0.0)) / jnp.maximum(counts.tokens, 1)
        return loss, {"loss": loss}


# jaxrl_llm/stages/programs.py, at the top: from jaxrl_llm.learner.objectives import TokensLeft
# jaxrl_llm/stages/programs.py
from jaxrl_llm.learner import Optimiser, Training, make_update
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.update import NewRole
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.heads import with_scalar_head


def length_training(optimiser: Optimiser, compute: ComputeOptions) -> Training:
    """A model of the policy's size that learns how long completions will be."""
    objectives = (TokensLeft(),)
    update = make_update(objectives, build(optimiser), learning_rate(optimiser), compute)
    return Training(objectives, update, NewRole("length", with_scalar_head, build(optimiser)))


# jaxrl_llm/stages/programs.py, in build_training, before return tuple(training)
def build_training(run, training, forwards, forward):
    training.append(length_training(run.learner.optimiser, forward.compute))
    forwards["length"] = forward
