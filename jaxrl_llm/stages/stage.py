"""The interface of a kind of training to the training loop and to the planner.

A module of ``stages/`` has two functions. ``resources(run, peers, directory)`` is a context manager with ``close()``;
it is closed when the run ends, for whatever reason. ``prepare(run, model, tokenizer, mesh, resources, progress,
peers)`` reads the data and returns a ``Stage``: it makes all checks that may refuse the run, and computes nothing
large. A module with runs that can be planned has two more functions: ``groups(run)``, the size of a step's batch, and
``outline(run, model, mesh, where, find)``, the computation on the devices, which the planner lays out and compiles. The
latter uses the functions of ``prepare``, so the plan matches the training.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import tasks
from jaxrl_llm.config import Configuration, Part
from jaxrl_llm.engine import Sampling
from jaxrl_llm.errors import require
from jaxrl_llm.learner import Forward, Learner, Sample, Training, learn
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.platform import compute_for, layout_for, utilisation
from jaxrl_llm.learner.update import abstract_state, compile_ahead, kl_arrays
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.evaluate import EvaluationReport
from jaxrl_llm.rollout.settings import Rollout
from jaxrl_llm.rules import Rule
from jaxrl_llm.sharding import batch_parts, compiler_options, platform_of
from jaxrl_llm.types import Group, TrainState

Fingerprints = dict[str, Any]
"""Fingerprints of the data, by use: JSON values."""


class StepOutcome(NamedTuple):
    """The result of a step.

    Attributes:
      state: after the updates.
      carry: what the step passes to the next one, which checkpoints save.
      row: the metrics; None if the run had to stop before the updates: ``carry`` then resumes within the step.
      groups: the step learned from them; a terminal shows some.
      lines: the lines of samples.jsonl.
      common: arrays that must be equal on all processes.
    """

    state: TrainState
    carry: Any
    row: dict[str, Any] | None = None
    groups: Sequence[Group] = ()
    lines: Sequence[dict[str, Any]] = ()
    common: Sequence[np.ndarray] = ()


MustStop = Callable[..., bool]
"""Whether the run has to stop now, agreed by its processes; with ``before_update=True``: within one more update."""


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
      measures_kl: whether a rule needs the policy's KL after each step.
      records: the dataclasses of what a step passes to the next; checkpoints save them.
    """

    run: Any
    training: Sequence[Training]
    forward: Forward
    label: str
    problems: Fingerprints = dataclasses.field(default_factory=dict)
    reference: bool = False
    coefficients: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()
    measures_kl: bool = False
    status: Callable[[str], None] = lambda text: None
    records: ClassVar[Sequence[type]] = ()

    def step(
        self, state: TrainState, carry: Any, coefficients: Mapping[str, float], number: int, must_stop: MustStop
    ) -> StepOutcome:
        """Make one step, with this number: get its data and learn from them.

        Args:
          state: donated.
          carry: what the step before has passed on; None before the first.
          coefficients: of the objectives, by name.
          must_stop: called before the updates, and now and then while data are made.
        """
        raise NotImplementedError

    def update(
        self,
        state: TrainState,
        samples: list[list[Sample]],
        coefficients: Mapping[str, float],
        number: int,
        began: float,
        training: Sequence[Training] | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Make all updates of a step on its samples, group by group; return the new state and the metrics. ``state`` is
        donated; ``began``: time of the performance counter from which ``time/update_s`` is measured; ``training``: of
        the roles that learn, all by default.
        """
        run, training = self.run, self.training if training is None else training
        self.status("updating")
        if not samples:
            return state, {"updates": 0.0, "time/update_s": 0.0}
        with jax.set_mesh(self.forward.mesh):  # of this thread
            state, metrics = learn(
                state,
                samples,
                run.learner,
                self.forward,
                training,
                dict(coefficients),
                run.seed + number,
                self.measures_kl,
                run.output.monitor_kl,
            )
        metrics["time/update_s"] = time.perf_counter() - began
        devices = list(self.forward.mesh.devices.flat)
        return state, metrics | utilisation(state, samples, training, run.learner.minibatches, metrics, devices)

    def planned_samples(self, state: TrainState) -> list[Sample]:
        """Return the samples of an update, with the names and the shapes that those of a step have; none if unknown."""
        return []

    def compile_ahead(self, state: TrainState, coefficients: Mapping[str, float]) -> None:
        """Begin to compile the updates in threads: the first ones wait for them."""
        others = kl_arrays(state, self.training, self.measures_kl, self.run.output.monitor_kl)
        if samples := self.planned_samples(state):
            numbers = dict(coefficients)
            compile_ahead(state, samples, self.run.learner, self.forward, self.training, numbers, others)

    def evaluate(self, policy: Any, first: bool = False) -> EvaluationReport | None:
        """Evaluate the live model; None without anything to test on. ``first``: whether it is before the first step."""
        return None

    def carry_after_rollback(self, carry: Any) -> Any:
        """Return what is passed on after the policy was rolled back."""
        return carry

    def carry_over(self, carry: Any, before: Configuration, after: Configuration, new_run: bool = False) -> Any:
        """Return what a phase with the settings ``before`` passes to one with those of ``after``; with ``new_run`` to
        another run, whose policy counts its versions from 0.
        """
        return carry


SCORING_CHUNK = 256
"""Samples of each scoring call."""
PLACEHOLDER = 0
"""A placeholder token after the last one: the prediction there is the value of the whole text; it is never read."""


def check_problems(
    before: Fingerprints,
    now: Fingerprints,
    label: str,
    origin: str = "that the run began with",
    otherwise: str = "begin a new run with --from RUN (on from its weights) or --fresh",
) -> None:
    """Refuse (InputError) problems that are not those asked before; missing fingerprints are not compared. The message
    has the data's ``label``, ``origin``, which completes "those", and ``otherwise``: what to do without the old
    problems.
    """
    for name, fingerprint in now.items():
        changed = tasks.difference(before.get(name, fingerprint), fingerprint)
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
    loaded = []
    for part in parts:
        status(f"reading task {part.task.label}")
        loaded.append(tasks.load(part.task, verifies(part)))
    return loaded


def scoring_forward(
    learner: Learner, config: ModelConfig, mesh: Any, longest: int, completion: int, temperature: float = 1.0
) -> Forward:
    """Return how a model that does not learn is run on a mesh, which may be abstract. ``longest``: tokens of a prompt
    with its completion, ``completion``: of that alone; ``temperature``: of its log-probabilities.
    """
    parts = batch_parts(mesh)
    rows = -(-learner.compute.microbatch_rows // parts) * parts
    settings = learner.computing(microbatch_rows=rows, attention="auto", row_tokens=0)
    compute = compute_for(settings, config, platform_of(mesh), compiler_options(mesh))
    return Forward(layout_for(settings, compute, longest, completion, mesh, config), compute, temperature, mesh)


def score_samples(
    forward: Forward, model: Any, samples: Sequence[Sample], output: str, status: Callable[[str], None]
) -> list[np.ndarray]:
    """Compute one output of many samples, float32[t] each, in chunks: their arrays need not all fit the devices."""
    outputs: list[np.ndarray] = []
    for begin in range(0, len(samples), SCORING_CHUNK):
        status(f"scoring {begin}/{len(samples)}")
        outputs += forward.by_sample(model, samples[begin : begin + SCORING_CHUNK], output)
    return outputs


def sample_to_score(
    prompt: np.ndarray, tokens: np.ndarray, scalars: dict[str, float], number: int | None = None, counted: bool = True
) -> Sample:
    """Return a sample of a completion with its score read at its ``last`` place, one behind its last token."""
    mask = np.zeros(len(tokens) + 1, bool)
    mask[-1] = counted
    return Sample(prompt, np.append(tokens, PLACEHOLDER), mask, scalars | {"last": float(len(tokens))}, together=number)


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
      samples: of one call, at their longest.
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
    """The sampling of completions, as planned; ``transfer`` maps two meshes, of real or described devices, to a
    function that lays the policy's weights out.
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


def planned_state(run: Configuration, model: Any, training: Sequence[Training], reference: bool) -> TrainState:
    """Return the run's initial state, as shapes; ``model``: the trained model, as shapes."""
    others = [role.begins for role in training if role.begins is not None]
    return abstract_state(model, build(run.learner.optimiser), reference, run.learner.lora, others)
