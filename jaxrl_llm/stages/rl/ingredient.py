"""The interface of an ingredient, an addition to a run's policy gradient: a value with hooks that do nothing."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm.config import Run
from jaxrl_llm.engine import Sampling
from jaxrl_llm.learner import Forward, Sample, Training
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rollout.evaluate import Tested
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.rules import Rule
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.stage import Architectures, Fingerprints, Pass
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import Group, TrainState


@dataclasses.dataclass(frozen=True)
class Around:
    """The parts of a run that an ingredient is prepared with, before the first step.

    Attributes:
      tokenizer: the policy's.
      prompts: of the training problems.
      test_prompts: of the evaluation problems.
      stops: tokens at which completions end.
      forwards: how the learner runs the model of each role.
      objectives: names of all objectives of the run.
      scorer: scores completions; an ingredient may add to its ``models``.
      where: the mesh that samples.
      answers: how answers to the evaluation problems are sampled.
      peers: the run's processes.
      progress: receives progress messages.
    """

    tokenizer: Any
    prompts: Prompts
    test_prompts: Prompts
    stops: Sequence[int]
    forwards: Mapping[str, Forward]
    objectives: Sequence[str]
    scorer: Scorer
    where: Mesh
    answers: Sampling
    peers: Peers
    progress: Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ingredient:
    """An ingredient of a run; a new one overrides the hooks that it needs, and is listed in ``INGREDIENTS``.

    Attributes:
      name: the key under which its memory is saved with that of the rules.
      objectives: added to the policy's.
      coefficients: initial values of numbers that a rule updates from step to step.
      rules: rules between steps.
      loads: names of the models that it loads in addition to the policy.
      fingerprints: fingerprints of its data, once it is prepared.
      notes: lines for people before the first step, once it is prepared.
    """

    name: ClassVar[str]
    objectives: Sequence[Objective] = ()
    coefficients: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    loads: Sequence[str] = ()
    fingerprints: Fingerprints = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """Return the ingredient for these settings without loading anything; None if the run does not use it."""
        raise NotImplementedError

    def prepared(self, around: Around) -> Self:
        """Load its data and models.

        Raises:
          InputError: data or models that the run cannot use.
        """
        return self

    # What the devices compute.

    def role(
        self, policy: ModelConfig, forward: Forward, tokenizer: Any, find: Architectures
    ) -> tuple[Training, Forward] | None:
        """Return the training of a role of its own and how its model is run; None without such a role.

        Args:
          policy: the architecture of the policy.
          forward: how the policy is run.
          tokenizer: the policy's; None if nothing will be loaded.
          find: maps the name of a model to its architecture.
        """
        return None

    def teachers(self, forward: Forward, find: Architectures) -> dict[str, Any] | None:
        """Return models that are run with each microbatch of the policy's update, as shapes; None for none.

        The arguments are those of ``role``; see ``learner.objectives``.
        """
        return None

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Add its own data to the samples of a step, at their longest; ``updates``: optimiser updates of the step."""
        return samples

    def passes(
        self, samples: Sequence[Sample], forwards: Mapping[str, Forward], where: Any, find: Architectures
    ) -> Sequence[Pass]:
        """Return passes over the completions of a step, for the plan; ``where``: the mesh that samples."""
        return ()

    # What a step does.

    def learning(self, step: int, training: Sequence[Training]) -> Sequence[Training]:
        """Select the roles that learn in this step."""
        return training

    def batch(self, batch: RolloutBatch, left: Carryover) -> RolloutBatch:
        """Add to the metrics or the carryover of a step's batch; ``left``: the carryover of the step before."""
        return batch

    def models(self, state: TrainState) -> Mapping[str, Any]:
        """Return models for estimators of advantages, by name (``learner.samples.Models``)."""
        return {}

    def rewards(self, rewards: np.ndarray, groups: Sequence[Group], coefficients: Mapping[str, float]) -> np.ndarray:
        """Change the rewards float[P, G] that advantages are computed from."""
        return rewards

    def samples(self, samples: list[list[Sample]], batch: RolloutBatch) -> list[list[Sample]]:
        """Change the samples of a step, group by group, before the learner gets them."""
        return samples

    def scored(
        self, state: TrainState, samples: list[list[Sample]], batch: RolloutBatch
    ) -> tuple[list[list[Sample]], Mapping[str, float]]:
        """Change the samples by what frozen models tell of them, before ``samples``; return metrics too."""
        return samples, {}

    def remembered(self, measured: Mapping[str, Any], own: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return more metrics of a step, and the memory for later steps: JSON values, saved if there are any metrics.

        Args:
          measured: the metrics of this step.
          own: its memory of the steps before.
        """
        return {}, own

    def tested(self, found: Tested, policy: Any, first: bool) -> Tested:
        """Add to an evaluation; ``first``: whether it is the one before the first step of the run."""
        return found
