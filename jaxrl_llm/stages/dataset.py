"""The common part of stages that learn from data: rows in a seeded order, read once, and their programs."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.config.texts import FromData
from jaxrl_llm.data import Collected, load_texts, longest
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Forward, Sample, Training, make_update
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.packing import rows_of, rows_together
from jaxrl_llm.learner.platform import compute_for, layout_for
from jaxrl_llm.rollout.evaluate import Tested
from jaxrl_llm.rules import NotANumber
from jaxrl_llm.sharding import platform_of
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.answering import Exam, Resources, answers_of, check_positions
from jaxrl_llm.stages.outline import Groups, Outline, state_of
from jaxrl_llm.stages.stage import Fingerprints, Stage
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import TrainState

LEFT_OUT = "event/data"
"""The metric in the first step's row that reports how many data rows were dropped or truncated."""

Ready = TypeVar("Ready", bound="DatasetStage")


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The rows of one step.

    Attributes:
      rows: as ``data.load_texts`` returns them.
      places: the index of each among the training rows.
      left: rows drawn so far in the run.
      metrics: ``epoch``, how often all rows have been drawn; in the first step also a line about rows left out.
    """

    rows: Sequence[Any]
    places: Sequence[int]
    left: int
    metrics: Mapping[str, Any]
    examples: Sequence[Any] = ()
    common: Iterable[np.ndarray] = ()

    def __len__(self) -> int:
        """Return the number of rows of the step."""
        return len(self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetStage(Stage):
    """A stage that learns from rows of data; a kind of it defines the samples of a row.

    Attributes:
      rows: training rows.
      held_out: evaluation rows.
      count: rows of a step.
      seed: of their order: each epoch is a fresh permutation.
      exam: evaluates answers to a task's problems; None without a task.
      status: receives progress messages.
      left_out: a line about rows that were dropped or truncated; empty without any.
    """

    rows: Sequence[Any]
    held_out: Sequence[Any]
    count: int
    seed: int
    exam: Exam | None
    status: Callable[[str], None]
    left_out: str = ""

    def samples_of(self, row: Any, place: int, number: int) -> list[Sample]:
        """Return the learner's samples of a row.

        Args:
          row: to learn from.
          place: its index among all training rows.
          number: its index in the step, shared by its samples.
        """
        raise NotImplementedError

    def numbers(self, policy: Any) -> dict[str, float]:
        """Return the metrics ``eval/...`` on the held-out rows, at least one."""
        raise NotImplementedError

    def learned(self, sample: Sample) -> int:
        """Return the number of tokens of a sample that the step reports as learned."""
        return int(sample.mask.sum())

    def samples(
        self, state: TrainState, batch: Drawn, coefficients: Mapping[str, float]
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Return the samples of each row, which stay together."""
        rows = enumerate(zip(batch.rows, batch.places, strict=True))
        groups = [self.samples_of(row, place, number) for number, (row, place) in rows]
        return groups, {"tokens": float(sum(self.learned(sample) for group in groups for sample in group))}

    def test(self, policy: Any, first: bool = False) -> Tested | None:
        """Evaluate the model on the held-out rows and on a task's problems."""
        numbers = self.numbers(policy) if self.held_out else {}
        answers = () if self.exam is None else self.exam(policy)
        return Tested(numbers, answers) if numbers or answers else None

    def next(self, weights: Any, version: int, left: int | None) -> Drawn:
        """Return the rows of one step."""
        begin = left or 0
        end = begin + self.count
        places = [tasks.problem_index(self.seed, number, len(self.rows)) for number in range(begin, end)]
        told = {LEFT_OUT: self.left_out} if self.left_out and left is None else {}
        return Drawn([self.rows[place] for place in places], places, end, told | {"epoch": end / len(self.rows)})


@dataclasses.dataclass(frozen=True)
class Read:
    """The data of a run, once it is read.

    Attributes:
      label: of the data.
      loaded: its rows.
      prints: their fingerprints.
      exam: evaluates on a task; None without one.
      status: receives progress messages.
    """

    label: str
    loaded: tasks.Loaded
    prints: Fingerprints
    exam: Exam | None
    status: Callable[[str], None]

    @property
    def rows(self) -> tuple[Any, ...]:
        """Return all rows: the training rows, then the held-out ones."""
        return (*self.loaded.train, *self.loaded.held_out)


def read(
    run: FromData, model: Any, tokenizer: Any, mesh: Any, resources: Resources, progress: Progress, peers: Peers
) -> Read:
    """Collect the data or read it. The arguments are those of a stage's ``prepare``.

    Raises:
      InputError: a model without a tokenizer or with too few positions, a row that is unusable or too long.
    """
    check_tokenizer(tokenizer, run.model)
    check_positions(run.batch.max_tokens, model.config, "batch.max_tokens")
    exam, data = answers_of(run, model, tokenizer, mesh, resources, progress)
    progress.status(f"reading {data.label}")
    closes = isinstance(run, configs.RewardModel) and run.score_at != "stop"
    loaded = load_texts(data, tokenizer, model.config.tokens.eos, lambda row: run.batch.max_tokens, closes)
    length, where = longest((*loaded.train, *loaded.held_out))
    configs.require(
        length <= run.batch.max_tokens,
        f"{where} has {length} tokens: set --batch.max_tokens {length} (now {run.batch.max_tokens}), or shorten it; "
        "--data.overlong drop leaves such rows out, truncate cuts their ends off",
    )
    prints = {"training": tasks.fingerprint(loaded.train), "held-out": tasks.fingerprint(loaded.held_out)}
    peers.check_same(f"rows of {data.label}", str(prints))
    return Read(data.label, loaded, prints, exam, progress.status)


def made(
    kind: Callable[..., Ready],
    run: FromData,
    data: Read,
    forward: Forward,
    training: tuple[Training, ...],
    what: str,
    **own: Any,
) -> Ready:
    """Return a stage of this kind, ready to make steps.

    Args:
      kind: a ``DatasetStage``.
      run: with its settings resolved.
      data: its rows.
      forward: how the model is run.
      training: how it is trained.
      what: the plural noun for its rows.
      own: fields of the kind.
    """
    return kind(
        training=training,
        forward=forward,
        label=data.label,
        problems=data.prints,
        rules={"not_a_number": NotANumber(run.learner.optimiser.learning_rate)},
        notes=[*data.loaded.notes, size_line(run, data.loaded, what)],
        rows=data.loaded.train,
        held_out=data.loaded.held_out[: run.evaluation.limit or None],
        count=run.batch.rows,
        seed=run.seed,
        exam=data.exam,
        status=data.status,
        left_out=data.loaded.left_out,
        **own,
    )


def with_room(forward: Forward, groups: Iterable[tuple[str, Sequence[Sample]]], rows: int) -> Forward:
    """Return the forward pass with microbatches large enough for samples that are compared with each other.

    Args:
      forward: as laid out without them.
      groups: the location of each row in the data, and its samples.
      rows: ``learner.microbatch_rows``; 0 takes as many as it needs.

    Raises:
      InputError: they do not fit; names the row and the remedy. Nothing is compiled yet.
    """
    layout = forward.layout
    for where, samples in groups:
        needed = rows_together(samples, layout)
        if needed > layout.rows and not rows:
            layout = dataclasses.replace(layout, rows=-(-needed // layout.parts) * layout.parts)
        try:
            rows_of(samples, layout)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None
    return dataclasses.replace(forward, layout=layout)


def programs_of(run: FromData, model: Any, mesh: Any, objective: Objective) -> tuple[Forward, tuple[Training, ...]]:
    """Return how the model is run, and how it is trained."""
    compute = compute_for(run.learner, model.config, platform_of(mesh))
    longest = run.batch.max_tokens + 1  # a scalar model reads its score where one more token would be predicted
    tokens = -(-run.batch.rows // run.learner.minibatches) * longest
    layout = layout_for(run.learner, compute, longest, longest, mesh, model.config, tokens)
    optimiser = run.learner.optimiser
    update = make_update((objective,), build(optimiser), learning_rate(optimiser), compute)
    return Forward(layout, compute, 1.0, mesh), (Training((objective,), update),)


def groups_of(run: FromData, each: int, words: str) -> Groups:
    """Return the size of a step's batch."""
    return Groups("batch.rows", run.batch.rows, each, run.batch.max_tokens, words)


def outline_of(
    run: FromData, model: Any, mesh: Any, objective: Objective, groups: Groups, samples_of: Callable[..., list[Sample]]
) -> Outline:
    """Outline the run's computation for the longest rows, with all but the first token of each learned.

    Args:
      run: with its settings resolved.
      model: the trained model, as shapes.
      mesh: learns; may be abstract.
      objective: of the model.
      groups: the size of a step's batch.
      samples_of: maps a prompt, its continuation and a row's number to the samples of the row.
    """
    forward, training = programs_of(run, model, mesh, objective)

    def samples(tokens: int) -> list[Sample]:
        rows = range(-(-groups.count // run.learner.minibatches))
        follows = np.zeros(max(tokens - 1, 1), np.int32)
        return [sample for row in rows for sample in samples_of(np.full(1, row, np.int32), follows, row)]

    whole = samples_of(np.zeros(1, np.int32), np.zeros(groups.longest - 1, np.int32), 0)
    forward = with_room(forward, [("the longest row", whole)], run.learner.microbatch_rows)
    answers = run.evaluation.task is not None or isinstance(run.data.source, Collected)
    return Outline(
        state=state_of(run, model, training, False),
        training=training,
        forwards={"policy": forward},
        groups=groups,
        samples=samples,
        coefficients={"policy": ("temperature",)},
        notes=("it samples answers too (a task to test on, or data to collect): that is not planned",) * answers,
    )


def size_line(run: FromData, loaded: tasks.Loaded, what: str) -> str:
    """Return a line for people with the amount of training data and the number of epochs."""
    epochs = run.steps * run.batch.rows / len(loaded.train)
    return (
        f"{run.data.label}: {len(loaded.train):,} {what}, {len(loaded.held_out):,} to test on; each step "
        f"{run.batch.rows} of them, {run.steps} steps are {epochs:.1f} epochs"
    )
