"""What the loop asks of a kind of training.

A module of ``stages/`` has two functions. ``resources(run, peers, directory)`` is a context of what must be closed when
the run ends, whatever ends it; it has ``close()``. ``prepare(run, model, tokenizer, mesh, resources, progress, peers)``
reads the data and returns a ``Stage``: all that may refuse the run is tried there, and nothing large is computed.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl_llm.evaluate import Evaluated
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
    """

    left: Any
    metrics: dict[str, float]

    def __len__(self) -> int:
        """Groups to learn from; 0 where there is nothing to learn."""


class Stage:
    """A kind of training, ready to make steps; a new one overrides what differs.

    Attributes:
      training: of each role, the policy first.
      forward: how the learner runs its models.
      problems: fingerprints of the data that it trains and tests on.
      ahead: whether the next batch is made with the weights from before this step's update.
      apart: whether making a batch and learning may run at one time.
      judges: whether something wants to know how far the policy is after each step.
    """

    training: Sequence[Training]
    forward: Forward
    problems: Fingerprints
    ahead = False
    apart = False
    judges = False

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

    def weights(self, policy: Any) -> Any:
        """What batches are made and tests are done with: the policy itself, or a copy laid out for sampling."""
        return policy

    def test(self, weights: Any) -> Evaluated | None:
        """An evaluation; None where there is nothing to test on."""
        return None

    def rules(self) -> dict[str, Rule]:
        """What decides between steps, by name; of several that stop the run the first says why."""
        return {}

    def header(self, parameters: int, trained: int) -> list[str]:
        """What the run says of its size: parameters of the model, and of what is trained of it."""
        return []

    def status(self, text: str) -> None:
        """Says what is going on."""

    def examples(self, batch: Any) -> list[Group]:
        """What of a batch goes to samples.jsonl."""
        return []

    def common(self, batch: Any) -> Iterator[np.ndarray]:
        """Arrays of a batch that must be the same on every process."""
        return iter(())

    def to_json(self, left: Any, ready: Any) -> dict[str, Any]:
        """What a batch left and one that was made ahead, as JSON values; exact."""
        return {"left": left}

    def from_json(self, data: Mapping[str, Any]) -> tuple[Any, Any]:
        """The inverse."""
        return data["left"], None
