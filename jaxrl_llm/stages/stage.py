"""The interface of a kind of training to the training loop and to the planner.

A module of ``stages/`` has two functions. ``resources(run, peers, directory)`` is a context manager with ``close()``;
it is closed when the run ends, for whatever reason. ``prepare(run, model, tokenizer, mesh, resources, progress,
peers)`` reads the data and returns a ``Stage``: it makes all checks that may refuse the run, and computes nothing
large. A module with runs that can be planned has two more functions: ``groups(run)``, the size of a step's batch, and
``outline(run, model, mesh, where, find)``, the computation on the devices, which the planner lays out and compiles. The
latter uses the functions of ``prepare``, so the plan matches the training.
"""

import dataclasses
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import tasks
from jaxrl_llm.config import Configuration, Part
from jaxrl_llm.engine import Sampling
from jaxrl_llm.errors import require
from jaxrl_llm.learner import Forward, Learner, Sample, Training
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.platform import compute_for, layout_for
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.evaluate import Tested
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.rules import Memory, Rule
from jaxrl_llm.sharding import batch_parts, compiler_options, platform_of
from jaxrl_llm.types import Group, TrainState

Fingerprints = dict[str, Any]
"""Fingerprints of the data, by use: JSON values."""


class Batch(Protocol):
    """The data of one step.

    Attributes:
      left: the carryover to the next step.
      metrics: measured while the batch was made.
      examples: groups for people to look at: some of them go to samples.jsonl, others in each step.
      common: arrays that must be the same on every process.
    """

    left: Any
    metrics: Mapping[str, float] = types.MappingProxyType({})
    examples: Sequence[Group] = ()
    common: Iterable[np.ndarray] = ()

    def __len__(self) -> int:
        """Return the number of groups to learn from; 0 if there is nothing to learn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A kind of training, ready to make steps; a new kind adds fields and overrides methods.

    Attributes:
      training: of each role, the policy first.
      forward: how the learner runs its models.
      label: of its data, for people.
      problems: fingerprints of the data that it trains and tests on.
      reference: whether a frozen copy of the initial policy is kept: for the loss, the reward, or monitoring.
      coefficients: initial values of the numbers that objectives read and rules may change.
      rules: rules between steps, by name; if several stop the run, the first gives the reason.
      notes: lines for people before the first step: sizes of the data and of a step, settings without effect.
      ahead: whether the next batch is made with the weights from before this step's update.
      apart: whether making a batch and learning may run at the same time.
      measures_kl: whether a rule needs the policy's KL after each step.
      records: the dataclasses of a batch and its carryover; the run saves them.
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

    def next(self, weights: Any, version: int, left: Any, late: Callable[[], bool] = lambda: False) -> Batch:
        """Return the next batch.

        Args:
          weights: the result of ``weights`` for the policy.
          version: optimiser updates of the policy so far.
          left: the carryover of the batch before; None before the first.
          late: whether the run has to stop now; a batch that takes long to make asks now and then.

        Raises:
          OutOfTime: the run has to stop before the batch is made.
        """
        raise NotImplementedError

    def samples(
        self, state: TrainState, batch: Any, coefficients: Mapping[str, float]
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Return the learner's samples of a batch, group by group, and metrics measured on the way."""
        raise NotImplementedError

    def learning(self, step: int) -> Sequence[Training]:
        """Return the training of the roles that learn in this step."""
        return self.training

    def remembered(self, measured: Mapping[str, Any], memory: Memory) -> tuple[dict[str, Any], Memory]:
        """Return more metrics of a step, and the updated memory of rules.

        They are computed from the step's metrics and from the memory that earlier steps have left.
        """
        return {}, memory

    def let_go(self, left: Any) -> Any:
        """Return the carryover for the next step after a rollback of the policy."""
        return left

    def carried_over(self, left: Any, before: Configuration, after: Configuration, anew: bool = False) -> Any:
        """Return the carryover from a phase with the settings ``before`` to one with those of ``after``.

        ``anew``: the latter is another run, whose policy counts its versions from 0.
        """
        return left

    def weights(self, policy: Any) -> Any:
        """Return the weights that make batches: the policy itself, or a copy laid out for sampling."""
        return policy

    def followed(self, state: TrainState, samples: list[Sample]) -> list[Sample]:
        """Add per-token results of the updates since, for people; unchanged unless a stage overrides it."""
        return samples

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each token of an example, for people; an empty list omits the texts."""
        return []

    def test(self, policy: Any, first: bool = False) -> Tested | None:
        """Evaluate the live model; None without anything to test on. ``first``: whether it is before the first step."""
        return None


SCORED_AT_ONCE = 256
"""Samples of each scoring call."""
AFTER = 0
"""A placeholder token after the last one: the prediction there is the value of the whole text; it is never read."""


def check_problems(
    before: Fingerprints,
    now: Fingerprints,
    label: str,
    origin: str = "that the run began with",
    otherwise: str = "begin a new run with --from RUN (on from its weights) or --fresh",
) -> None:
    """Refuse problems that are not those that were asked before.

    Args:
      before: fingerprints of its problems; missing ones are not compared.
      now: fingerprints of the problems as they are.
      label: of the data, for people.
      origin: completes "those", for people.
      otherwise: what to do without the old problems.

    Raises:
      InputError: names the change.
    """
    for name, found in now.items():
        changed = tasks.difference(before.get(name, found), found)
        require(
            not changed,
            f"the {name.split()[0]} problems of {label} are not those {origin} ({changed}): put the old ones back, or "
            f"{otherwise}",
        )


def check_positions(length: int, config: ModelConfig, field: str) -> None:
    """Refuse sequences longer than the model's positions, before anything is compiled."""
    positions = config.attention.rope.max_positions
    require(
        length <= positions,
        f"{field} needs {length} positions, and the model was made for {positions}: lower it by {length - positions}",
    )


def read_parts(
    parts: Sequence[Part], verifies: Callable[[Part], bool], status: Callable[[str], None]
) -> list[tasks.Loaded]:
    """Read the problems of each part; ``verifies``: whether the run reads which answers to it are right."""
    found = []
    for part in parts:
        status(f"reading task {part.task.label}")
        found.append(tasks.load(part.task, verifies(part)))
    return found


def run_by(
    learner: Learner, config: ModelConfig, mesh: Any, longest: int, completion: int, temperature: float = 1.0
) -> Forward:
    """Return how a model that does not learn is run on a mesh, such as the one that samples.

    Args:
      learner: how the learner computes.
      config: the model's architecture.
      mesh: of its devices; may be abstract.
      longest: tokens of a prompt with its completion.
      completion: tokens of a completion.
      temperature: of its log-probabilities.
    """
    parts = batch_parts(mesh)
    rows = -(-learner.compute.microbatch_rows // parts) * parts
    settings = learner.computing(microbatch_rows=rows, attention="auto", row_tokens=0)
    compute = compute_for(settings, config, platform_of(mesh), compiler_options(mesh))
    return Forward(layout_for(settings, compute, longest, completion, mesh, config), compute, temperature, mesh)


def scored(
    forward: Forward, model: Any, samples: Sequence[Sample], output: str, status: Callable[[str], None]
) -> list[np.ndarray]:
    """Compute one output of many samples, float32[t] each, in chunks: their arrays need not all fit the devices."""
    found: list[np.ndarray] = []
    for begin in range(0, len(samples), SCORED_AT_ONCE):
        status(f"scoring {begin}/{len(samples)}")
        found += forward.by_sample(model, samples[begin : begin + SCORED_AT_ONCE], output)
    return found


def scored_sample(
    prompt: np.ndarray, tokens: np.ndarray, scalars: dict[str, float], number: int | None = None, counted: bool = True
) -> Sample:
    """Return a sample of a completion with its score read at its ``last`` place, one behind its last token."""
    mask = np.zeros(len(tokens) + 1, bool)
    mask[-1] = counted
    return Sample(prompt, np.append(tokens, AFTER), mask, scalars | {"last": float(len(tokens))}, together=number)


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
