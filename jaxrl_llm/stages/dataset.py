"""What the stages that learn from data have in common: rows in the order of a seed, a task to test on, resources."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.collection.sampling import Answerer
from jaxrl_llm.collection.source import collected
from jaxrl_llm.config.texts import Preference, RewardModel, Supervised
from jaxrl_llm.engine import Engine, Sampling
from jaxrl_llm.engine.weight_transfer import for_sampling, weights_for_sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.evaluate import Evaluated, Questions, evaluate
from jaxrl_llm.learner import Forward, Sample, Training, make_update
from jaxrl_llm.learner.batch import Layout
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.packing import rows_of
from jaxrl_llm.learner.platform import compute_for, layout_for
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, cast
from jaxrl_llm.rewards import Accuracy, Scorer
from jaxrl_llm.sharding import platform_of
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.outline import Groups, Outline, state_of
from jaxrl_llm.stages.stage import Fingerprints, Stage
from jaxrl_llm.tasks import Collected, LoadedTexts
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import Problem

FromData = Supervised | Preference | RewardModel
"""Configurations of these stages."""


class Resources:
    """What a run from data has beside its model; close it, or use ``with``.

    Attributes:
      directory: the run's.
      peers: its processes.
      scorer: verifies answers.
    """

    def __init__(self, run: FromData, peers: Peers, directory: Path):
        answering = run.answering
        self.directory = directory
        self.peers = peers
        self.scorer = Scorer((Accuracy(),), answering.workers, answering.timeout_s, 0.0, peers, directory)

    def __enter__(self) -> "Resources":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the verifiers' processes."""
        self.scorer.close()


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The rows of one step.

    Attributes:
      rows: as ``tasks.load_texts`` gives them.
      places: of each among those to learn from.
      left: rows drawn so far in the run.
      metrics: ``epoch``: how often all rows have been drawn.
    """

    rows: Sequence[Any]
    places: Sequence[int]
    left: int
    metrics: Mapping[str, float]
    examples: Sequence[Any] = ()
    common: Iterable[np.ndarray] = ()

    def __len__(self) -> int:
        """Rows to learn from."""
        return len(self.rows)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetStage(Stage):
    """A stage whose steps learn from rows; one of a kind says what samples they become.

    Attributes:
      rows: to learn from.
      held_out: to test on.
      count: rows of a step.
      seed: of their order: each epoch is a fresh permutation.
      exam: answers to a task's problems; None where there is no task.
    """

    rows: Sequence[Any]
    held_out: Sequence[Any]
    count: int
    seed: int
    exam: "Exam | None" = None

    def next(self, weights: Any, version: int, left: int | None) -> Drawn:
        """The rows of one step."""
        begin = left or 0
        end = begin + self.count
        places = [tasks.problem_index(self.seed, number, len(self.rows)) for number in range(begin, end)]
        return Drawn([self.rows[place] for place in places], places, end, {"epoch": end / len(self.rows)})


@dataclasses.dataclass(frozen=True)
class Exam:
    """A task's problems, and what it takes to ask a model.

    Attributes:
      engine: samples.
      transfer: from the model to weights to sample from.
      tokenizer: of the model.
      scorer: verifies.
      asked: the problems; those of none are not asked.
      sampling: how answers are sampled.
      status: hears what is going on.
    """

    engine: Engine
    transfer: Callable[[Decoder], Decoder]
    tokenizer: Any
    scorer: Scorer
    asked: Questions
    sampling: Sampling
    status: Callable[[str], None]

    def __call__(self, model: Decoder) -> Evaluated | None:
        """Answers to the problems; None where there are none."""
        if not self.asked.problems:
            return None
        weights = self.transfer(model)
        return evaluate(self.engine, weights, self.tokenizer, self.asked, self.scorer, self.sampling, self.status)


def examination(
    run: FromData, model: Decoder, tokenizer: Any, mesh: Any, resources: Resources, progress: Progress
) -> tuple[Exam | None, Sequence[Problem]]:
    """The task that the run is tested on, and the problems that data is collected for; none where it has neither."""
    source = run.data.source
    collects = isinstance(source, Collected)
    configs.require(
        not collects or isinstance(model, Decoder),
        f"{run.model} is a reward model, which gives no answers to collect: give a language model",
    )
    if run.evaluation.task is None and not collects:
        return None, ()
    problems: Sequence[Problem] = ()
    prompts = []
    if collects:
        progress.status(f"reading task {source.task.label}")
        loaded = tasks.load(source.task)
        problems = loaded.train[: source.limit or None]
        prompts = [tasks.Prompts(source.task, tokenizer)]
    longest = [prompts[0].longest(problems)] if collects else []
    tested = source.task if run.evaluation.task is None else run.evaluation.task
    if run.evaluation.task is None:
        questions = loaded.held_out
    else:
        questions = tasks.load(tested).train
    questions = questions[: run.evaluation.limit or None]
    test_prompts = tasks.Prompts(tested, tokenizer)
    length = max([*longest, test_prompts.longest(questions)]) + run.answering.max_new_tokens
    check_positions(length, model.config, "answering.max_new_tokens")
    compute = compute_for(run.learner, model.config, platform_of(mesh))
    shapes = _decoder_shapes(model, compute.dtype, platform_of(mesh))
    engine = Engine(shapes, run.answering.slots, length, run.answering.chunk, mesh)
    asked = Questions(test_prompts, questions, run.evaluation.samples, run.seed)
    transfer = weights_for_sampling(model, compute.dtype, mesh, mesh, keep=False)
    sampling = Sampling(
        run.evaluation.temperature,
        0,
        run.evaluation.top_p,
        run.answering.max_new_tokens,
        model.config.tokens.eos,
    )
    return Exam(engine, transfer, tokenizer, resources.scorer, asked, sampling, progress.status), problems


def gathered(
    run: FromData,
    exam: Exam | None,
    problems: Sequence[Problem],
    model: Decoder,
    resources: Resources,
    status: Callable[[str], None],
) -> Any:
    """The run's data; what is to be collected has been, from this model, before its first step."""
    if not isinstance(run.data.source, Collected):
        return run.data

    def answerer() -> Answerer:
        return Answerer(exam.engine, exam.transfer(model), exam.tokenizer, exam.scorer)

    longest = run.answering.max_new_tokens
    return collected(run.data, problems, answerer, longest, run.seed, resources.directory, resources.peers, status)


def _decoder_shapes(model: Decoder, dtype: Any, platform: str) -> Decoder:
    import jax

    return jax.eval_shape(lambda m: for_sampling(cast(m, dtype), platform), model)


def check_positions(length: int, config: ModelConfig, field: str) -> None:
    """Refuse what is longer than the model was made for; before anything is compiled."""
    positions = config.attention.max_positions
    configs.require(
        length <= positions,
        f"{field} needs {length} positions, and the model was made for {positions}: lower it by {length - positions}",
    )


def check_tokenizer(run: FromData, tokenizer: Any) -> None:
    """Refuse a model without a tokenizer."""
    if tokenizer is None:
        raise InputError(
            f"{run.model} has no tokenizer: put tokenizer.json and tokenizer_config.json beside its weights"
        )


def read_data(run: FromData, data: Any, tokenizer: Any, stops: Sequence[int], progress: Progress) -> LoadedTexts:
    """The rows; what was dropped is told.

    Raises:
      InputError: a row that cannot be used, or one that is too long.
    """
    progress.status(f"reading {data.label}")
    loaded = tasks.load_texts(data, tokenizer, stops)
    for note in loaded.notes:
        progress.note(note)
    length, where = tasks.longest((*loaded.train, *loaded.held_out))
    configs.require(
        length <= run.batch.max_tokens,
        f"{where} has {length} tokens: set --batch.max_tokens {length} (now {run.batch.max_tokens}), or shorten it",
    )
    return loaded


def to_test(run: FromData, loaded: LoadedTexts) -> Sequence[Any]:
    """Of the rows that are held out those that the run is tested on."""
    return loaded.held_out[: run.evaluation.limit or None]


def check_together(groups: Iterable[tuple[str, Sequence[Sample]]], layout: Layout) -> None:
    """Refuse samples that are compared with each other and do not fit one microbatch, before anything is compiled.

    ``groups``: where the row stands, and its samples.

    Raises:
      InputError: names the row and the remedy.
    """
    for where, samples in groups:
        try:
            rows_of(samples, layout)
        except InputError as error:
            raise InputError(f"{where}: {error}") from None


def prints_of(loaded: LoadedTexts) -> Fingerprints:
    """Fingerprints of what the run learns from and tests on."""
    return {"training": tasks.fingerprint(loaded.train), "held-out": tasks.fingerprint(loaded.held_out)}


def programs_of(run: FromData, model: Any, mesh: Any, objective: Objective) -> tuple[Forward, tuple[Training, ...]]:
    """How the model is run, and how it is trained."""
    compute = compute_for(run.learner, config_of(model), platform_of(mesh))
    longest = run.batch.max_tokens + 1  # a scalar model reads its score where one more token would be predicted
    layout = layout_for(run.learner, compute, longest, longest, mesh)
    optimiser = run.learner.optimiser
    update = make_update((objective,), build(optimiser), learning_rate(optimiser), compute)
    return Forward(layout, compute, 1.0, mesh), (Training((objective,), update),)


def groups_of(run: FromData, each: int, words: str) -> Groups:
    """What a step learns from."""
    return Groups("batch.rows", run.batch.rows, each, run.batch.max_tokens, words)


def outline_of(
    run: FromData, model: Any, mesh: Any, objective: Objective, groups: Groups, samples_of: Callable[..., list[Sample]]
) -> Outline:
    """What the run computes, where rows are at their longest and all but the first token of each is learned.

    Args:
      run: with its settings resolved.
      model: what it trains, as shapes.
      mesh: learns; may be abstract.
      objective: of the model.
      groups: what a step learns from.
      samples_of: from a prompt, what follows it and a row's number to what the learner sees of the row.
    """
    forward, training = programs_of(run, model, mesh, objective)

    def samples(tokens: int) -> list[Sample]:
        rows = range(-(-groups.count // run.learner.minibatches))
        follows = np.zeros(max(tokens - 1, 1), np.int32)
        return [sample for row in rows for sample in samples_of(np.full(1, row, np.int32), follows, row)]

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


def config_of(model: Any) -> ModelConfig:
    """The architecture of a decoder, or of a scalar model's."""
    return getattr(model, "decoder", model).config


def size_line(run: FromData, loaded: LoadedTexts, what: str) -> str:
    """How much the run learns from, for people."""
    epochs = run.steps * run.batch.rows / len(loaded.train)
    return (
        f"{run.data.label}: {len(loaded.train):,} {what}, {len(loaded.held_out):,} to test on; each step "
        f"{run.batch.rows} of them, {run.steps} steps are {epochs:.1f} epochs"
    )
