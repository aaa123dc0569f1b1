"""What the loop asks of a kind of training.

A module of ``stages/`` has two functions. ``resources(run, peers, directory)`` is a context of what must be closed when
the run ends, whatever ends it; it has ``close()``. ``prepare(run, model, tokenizer, mesh, resources, progress, peers)``
reads the data and returns a ``Stage``: all that may refuse the run is tried there, and nothing large is computed. One
whose runs can be planned has two more: see ``stages/outline.py``.
"""

import dataclasses
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from jaxrl_llm.config import Configuration
from jaxrl_llm.evaluate import Evaluated, Tested
from jaxrl_llm.learner import Forward, Sample, Training
from jaxrl_llm.rules import Rule
from jaxrl_llm.types import Group, TrainState

Fingerprints = dict[str, Any]
"""Of the data, by what it is for: JSON values."""


class Batch(Protocol):
    """What one step learns from.

    Attributes:
      left: what it leaves to the next step.
      metrics: what was measured while it was made.
      examples: what people may want to look at: some of them go to samples.jsonl, others in each step.
      common: arrays that must be the same on every process.
    """

    left: Any
    metrics: Mapping[str, float] = types.MappingProxyType({})
    examples: Sequence[Group] = ()
    common: Iterable[np.ndarray] = ()

    def __len__(self) -> int:
        """Groups to learn from; 0 where there is nothing to learn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A kind of training, ready to make steps; a new one adds what it is made of, and overrides what differs.

    Attributes:
      training: of each role, the policy first.
      forward: how the learner runs its models.
      label: of its data, for people.
      problems: fingerprints of the data that it trains and tests on.
      reference: whether the policy as it was is kept, frozen: for the loss, for the reward, or to be watched.
      coefficients: that objectives read and rules may move, as they are at first.
      rules: what decides between steps, by name; of several that stop the run the first says why.
      notes: lines for people before the first step: how large its data and a step are, what does nothing.
      ahead: whether the next batch is made with the weights from before this step's update.
      apart: whether making a batch and learning may run at one time.
      measures_kl: whether a rule wants to know how far the policy is after each step.
      records: the dataclasses that a batch, or what it leaves, is made of; the run saves them.
    """

    training: Sequence[Training]
    forward: Forward
    label: str
    problems: Fingerprints = dataclasses.field(default_factory=dict)
    reference: bool = False
    coefficients: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    ahead: bool = False
    apart: bool = False
    measures_kl: bool = False
    records: ClassVar[Sequence[type]] = ()

    def next(self, weights: Any, version: int, left: Any) -> Batch:
        """The next batch.

        Args:
          weights: what ``weights`` makes of the policy.
          version: optimiser updates of the policy so far.
          left: what the batch before has left; None before the first.
        """
        raise NotImplementedError

    def samples(
        self, state: TrainState, batch: Any, coefficients: Mapping[str, float]
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """What the learner sees of a batch, group by group, and what was measured on the way."""
        raise NotImplementedError

    def learning(self, step: int) -> Sequence[Training]:
        """Of the roles that learn in this step."""
        return self.training

    def let_go(self, left: Any) -> Any:
        """What the next step finds of what the last one has left where the policy goes back to an earlier one."""
        return left

    def leaves(self, left: Any, following: Configuration) -> Any:
        """What a phase of other settings finds of what the last batch of this one has left."""
        return left

    def weights(self, policy: Any) -> Any:
        """What batches are made with: the policy itself, or a copy laid out for sampling."""
        return policy

    def followed(self, state: TrainState, samples: list[Sample]) -> list[Sample]:
        """The samples with what the updates since have made of each token, for people, where a stage knows it."""
        return samples

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token of an example, for people; nothing leaves them out."""
        return []

    def test_first(self, policy: Any) -> Evaluated | Tested | None:
        """The evaluation before the first step, where a run is not gone on with."""
        return self.test(policy)

    def test(self, policy: Any) -> Evaluated | Tested | None:
        """An evaluation of the live model; None where there is nothing to test on."""
        return None
