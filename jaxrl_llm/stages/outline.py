"""What a run computes on its devices, told from its configuration alone: the planner lays it out and compiles it.

A module of ``stages/`` that can be planned has ``groups(run)``, what a step learns from, and ``outline(run, model,
mesh, where, find)``, which is made of the functions that ``prepare`` is made of: what is planned is what is trained.
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
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.types import TrainState


class Groups(NamedTuple):
    """What a step learns from.

    Attributes:
      field: of the configuration, that says how many.
      count: how many; they stay whole.
      each: completions of one of them.
      longest: tokens of a completion; where it is not known where prompts end, with its prompt.
      words: for people, between how many and their tokens.
    """

    field: str
    count: int
    each: int
    longest: int
    words: str


@dataclasses.dataclass(frozen=True)
class Pass:
    """Completions read by a model that is not differentiated: ``forward.by_sample(model, samples, output)``.

    Attributes:
      name: unique among a run's.
      forward: how the model is run.
      samples: of one call, at their longest.
      output: what is read of it.
      calls: in a step; 0 for a model that reads all data before the first step.
      role: whose model it is, where it is one of the state's.
      model: as shapes, where it is none of the state's.
      copies: such models, which stay on the devices for the whole run.
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
class Sampler:
    """How completions are sampled.

    Attributes:
      rollout: lengths and slots.
      rules: of the sampling.
      transfer: from two meshes, of devices that are there or described, to what lays the policy's weights out.
    """

    rollout: Rollout
    rules: Sampling
    transfer: Callable[[Mesh, Mesh], Callable[[Decoder], Decoder]]


@dataclasses.dataclass(frozen=True)
class Outline:
    """What is on the devices of a run, and what it computes there; no array is made.

    Attributes:
      state: as shapes.
      training: of each role, the policy first.
      forwards: how the model of each role is run.
      groups: what a step learns from.
      samples: of one optimiser update, from how many tokens a completion has (``groups.longest`` at most).
      coefficients: names of the numbers that the policy's update is given, and other roles' updates.
      passes: over completions, without a gradient.
      sampler: None where the run's steps sample nothing.
      notes: what the plan does not say.
    """

    state: TrainState
    training: Sequence[Training]
    forwards: Mapping[str, Forward]
    groups: Groups
    samples: Callable[[int], list[Sample]]
    coefficients: Mapping[str, Sequence[str]]
    passes: Sequence[Pass] = ()
    sampler: Sampler | None = None
    notes: Sequence[str] = ()

    @property
    def forward(self) -> Forward:
        """How the policy is run."""
        return self.forwards["policy"]


def state_of(run: Configuration, model: Any, training: Sequence[Training], reference: bool) -> TrainState:
    """The state that the run begins with, as shapes; ``model``: what it trains, as shapes."""
    others = [one.begins for one in training if one.begins is not None]
    return abstract_state(model, build(run.learner.optimiser), reference, run.learner.lora, others)
