"""The computation of a run on its devices, outlined from its configuration: the planner lays it out and compiles it.

A module of ``stages/`` that can be planned has ``groups(run)``, the size of a step's batch, and ``outline(run, model,
mesh, where, find)``. The latter uses the functions of ``prepare``, so the plan matches the training.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.sharding import Mesh

from jaxrl_llm.config import Configuration
from jaxrl_llm.engine import Sampling
from jaxrl_llm.learner import Forward, Sample, Training
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.state import abstract_state
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.types import TrainState

Architectures = Callable[[str], ModelConfig]
"""A function from the name of a model to its architecture, without its weights."""


class Groups(NamedTuple):
    """The size of a step's batch.

    Attributes:
      field: the setting that gives the number of groups.
      count: the number of groups; a group is never split.
      each: completions of a group.
      longest: tokens of a completion; with its prompt where the boundary is unknown.
      words: for people, between the number of groups and their tokens.
    """

    field: str
    count: int
    each: int
    longest: int
    words: str


@dataclasses.dataclass(frozen=True)
class Pass:
    """A gradient-free pass of a model over completions: ``forward.by_sample(model, samples, output)``.

    Attributes:
      name: unique among a run's.
      forward: how the model is run.
      samples: of one call, at their longest.
      output: the output that is read.
      calls: in a step; 0 for a model that reads all data before the first step.
      role: the model's role, if it is part of the state.
      model: as shapes, if it is not part of the state.
      copies: number of such models on the devices for the whole run.
    """

    name: str
    forward: Forward
    samples: Sequence[Sample]
    output: str
    calls: int
    role: str = ""
    model: Any = None
    copies: int = 0


@dataclasses.dataclass(frozen=True)
class PlannedSampler:
    """The sampling of completions, as planned.

    Attributes:
      rollout: lengths and slots.
      rules: of the sampling.
      transfer: maps two meshes, of real or described devices, to a function that lays the policy's weights out.
    """

    rollout: Rollout
    rules: Sampling
    transfer: Callable[[Mesh, Mesh], Callable[[Decoder], Decoder]]


@dataclasses.dataclass(frozen=True)
class Outline:
    """The state and the computation of a run on its devices; no array is made.

    Attributes:
      state: as shapes.
      training: of each role, the policy first.
      forwards: how the model of each role is run.
      groups: the size of a step's batch.
      samples: maps a completion's tokens (``groups.longest`` at most) to the samples of one optimiser update.
      coefficients: names of the coefficients that each role's updates are given.
      passes: gradient-free passes over completions.
      sampler: None if the run's steps sample nothing.
      notes: lines about the limits of the plan.
    """

    state: TrainState
    training: Sequence[Training]
    forwards: Mapping[str, Forward]
    groups: Groups
    samples: Callable[[int], list[Sample]]
    coefficients: Mapping[str, Sequence[str]]
    passes: Sequence[Pass] = ()
    sampler: PlannedSampler | None = None
    notes: Sequence[str] = ()

    @property
    def forward(self) -> Forward:
        """Return how the policy is run."""
        return self.forwards["policy"]


def state_of(run: Configuration, model: Any, training: Sequence[Training], reference: bool) -> TrainState:
    """Return the run's initial state, as shapes; ``model``: the trained model, as shapes."""
    others = [one.begins for one in training if one.begins is not None]
    return abstract_state(model, build(run.learner.optimiser), reference, run.learner.lora, others)
