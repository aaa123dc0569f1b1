"""Stages that learn from rows of data in a seeded order, and their programs; supervised fine-tuning is one of them."""

import dataclasses
import functools
import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.collection.rejection_sampling import collect_data
from jaxrl_llm.config.texts import FromData
from jaxrl_llm.data import Collected, Pairs, Steps, Text, Texts, Unpaired, load_texts, longest
from jaxrl_llm.engine import Sampling
from jaxrl_llm.engine.engine import backend_for
from jaxrl_llm.errors import naming
from jaxrl_llm.learner import Forward, Sample, Training, make_update
from jaxrl_llm.learner.batch import count_compared_rows, sample_rows
from jaxrl_llm.learner.objectives import NextToken, Objective
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import compute_for, layout_for
from jaxrl_llm.learner.update import split_minibatches
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import policy_shapes
from jaxrl_llm.rewards import Accuracy, Scorer
from jaxrl_llm.rewards.shaping import TaskReward
from jaxrl_llm.rollout.episodes import Episodes, episodes_of
from jaxrl_llm.rollout.evaluate import EvaluationReport, EvaluationSet, TaskEvaluation, evaluate
from jaxrl_llm.rollout.generation import Answerer
from jaxrl_llm.rules import not_a_number, reward_fails
from jaxrl_llm.sharding import compiler_options, platform_of
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.stage import (
    Groups,
    MustStop,
    Outline,
    Stage,
    StepOutcome,
    check_positions,
    planned_state,
    read_parts,
    score_samples,
)
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import Problem, TrainState

DROPPED_ROWS = "event/data"
"""The metric in the first step's row that reports how many data rows were dropped or truncated."""


def resources(run: FromData, peers: Peers, directory: Path) -> Scorer:
    """Return what verifies answers to a task, with its worker processes."""
    answering = run.answering
    source = run.data.source
    answered = configs.tasks_in(run.evaluation.task) or ([source.task] if isinstance(source, Collected) else [])
    verified = tuple(task.label for task in answered if task.verifier != "none")  # others have an environment's reward
    rewards = (TaskReward(Accuracy(), verified),) if 0 < len(verified) < len(answered) else (Accuracy(),)
    return Scorer(
        () if answered and not verified else rewards, answering.workers, answering.timeout_s, 0.0, peers, directory
    )


def groups(run: FromData) -> Groups:
    """Return the size of a step's batch, with two completions per ranking; there may be more."""
    kinds = {
        Texts: (1, "texts of"),
        Steps: (1, "solutions of"),
        Pairs: (2, "pairs of completions of"),
        Unpaired: (2, "completions, each with that of another prompt, of"),
    }
    each, words = next(size for kind, size in kinds.items() if isinstance(run.data, kind))
    return Groups(run.group_field, run.batch.rows, each, run.batch.max_tokens, words)


Exam = Callable[[Decoder], tuple[TaskEvaluation, ...]]
"""A function that evaluates a model on each task's problems; the result is empty without problems."""


def build_exam(
    run: FromData, model: Decoder, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> tuple[Exam | None, Any]:
    """Return the evaluation on a task (None without one) and the run's data; the model samples data to collect."""
    source = run.data.source
    collects = isinstance(source, Collected)
    configs.require(
        not collects or isinstance(model, Decoder),
        f"{run.model} is a reward model, which gives no answers to collect: give a language model",
    )
    if run.evaluation.task is None and not collects:
        return None, run.data
    answering, status = run.answering, progress.status
    tested = configs.parts_of_task(run.evaluation.task or source.task)
    limit = run.evaluation.limit or None
    problems: Sequence[Problem] = ()
    questions: Sequence[Problem] = ()
    longest = 0
    if collects:
        status(f"reading task {source.task.label}")
        loaded = tasks.load(source.task)
        problems = loaded.train[: source.limit or None]
        questions = loaded.held_out[:limit]
        longest = tasks.Prompts(source.task, tokenizer).longest(problems)
    if run.evaluation.task is not None:
        tasks_read = read_parts(tested, lambda part: True, status)
        questions = [problem for task in tasks_read for problem in task.train[:limit]]
    scorer.check([*problems, *questions])
    prompts = tasks.Prompts([part.task for part in tested], tokenizer)
    stops = model.config.tokens.eos
    playing = [
        episodes_of(task_prompts, answering, stops, peers)
        for task_prompts in (prompts, tasks.Prompts(source.task if collects else (), tokenizer))
    ]
    longest = max(longest, prompts.longest(questions), answering.max_prompt_tokens if any(playing) else 0)
    length = longest + answering.max_new_tokens
    check_positions(length, model.config, "answering.max_new_tokens")
    dtype = compute_for(run.learner, model.config, platform_of(mesh)).dtype
    engine, prepared = backend_for(
        policy_shapes(model, run.learner.lora, mesh),
        dtype,
        mesh,
        mesh,
        slots=answering.slots,
        max_length=length,
        chunk=answering.chunk,
    )
    limits = configs.limits_of(tested, answering.max_new_tokens)
    evaluation_set = EvaluationSet(prompts, questions, run.evaluation.samples, run.seed, limits)
    sampling = Sampling(run.evaluation.temperature, 0, run.evaluation.top_p, answering.max_new_tokens, stops)

    def by(model: Decoder, episodes: Episodes | None) -> Answerer:
        return Answerer(engine, prepared(model), tokenizer, scorer, episodes)

    def exam(model: Decoder) -> tuple[TaskEvaluation, ...]:
        return evaluate(by(model, playing[0]), evaluation_set, sampling, status) if questions else ()

    if not collects:
        return exam, run.data
    place: Any = (scorer.folder, peers, status, answering.episode)
    longest = answering.max_new_tokens
    return exam, collect_data(run.data, problems, lambda: by(model, playing[1]), longest, run.seed, *place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetStage(Stage):
    """A stage that learns from rows of data.

    Attributes:
      samples_of: maps a row, its index among all training rows, and its index in the step to the row's samples.
      numbers: returns the metrics ``eval/...`` of a model on at least one row.
      exam: evaluates answers to a task's problems; None without a task.
      learned: returns the number of tokens of a sample that the step reports as learned.
      left_out: a line about rows that were dropped or truncated; empty without any.
    """

    rows: Sequence[Any]
    held_out: Sequence[Any]
    samples_of: Callable[[Any, int, int], list[Sample]]
    numbers: Callable[[Any, Sequence[Any]], dict[str, float]]
    exam: Exam | None
    learned: Callable[[Sample], int] = lambda sample: int(sample.mask.sum())
    left_out: str = ""

    def step(
        self, state: TrainState, carry: int | None, coefficients: Mapping[str, float], number: int, must_stop: MustStop
    ) -> StepOutcome:
        """Learn from the next rows, which stay together; each epoch is a fresh permutation of all rows."""
        if must_stop(before_update=True):
            return StepOutcome(state, carry)
        begin = carry or 0
        end = begin + self.run.batch.rows
        groups = self.samples_between(begin, end)
        state, metrics = self.update(state, groups, coefficients, number, time.perf_counter())
        row: dict[str, Any] = {DROPPED_ROWS: self.left_out} if self.left_out and carry is None else {}
        row |= {"epoch": end / len(self.rows)} | metrics
        row["tokens"] = float(sum(self.learned(sample) for group in groups for sample in group))
        return StepOutcome(state, end, row)

    def samples_between(self, begin: int, end: int) -> list[list[Sample]]:
        """Return the samples of each row of a range of the run's order."""
        places = [tasks.problem_index(self.run.seed, index, len(self.rows)) for index in range(begin, end)]
        return [self.samples_of(self.rows[place], place, row) for row, place in enumerate(places)]

    def planned_samples(self, state: TrainState) -> list[Sample]:
        """Return the samples of the first update."""
        return split_minibatches(self.samples_between(0, self.run.batch.rows), self.run.learner.minibatches)[0]

    def evaluate(self, policy: Any, first: bool = False) -> EvaluationReport | None:
        """Evaluate the model on the held-out rows and on a task's problems."""
        numbers = self.numbers(policy, self.held_out) if self.held_out else {}
        answers = () if self.exam is None else self.exam(policy)
        return EvaluationReport(numbers, answers) if numbers or answers else None


def read_rows_of(
    run: FromData, model: Any, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers, what: str
) -> tuple[tasks.Loaded, dict[str, Any]]:
    """Collect or read the data; return its rows, and the fields of a ``DatasetStage`` except how it learns. The
    arguments are those of ``prepare``, and the plural noun for its rows.

    Raises:
      InputError: a model without a tokenizer or with too few positions, a row that is unusable or too long.
    """
    check_tokenizer(tokenizer, run.model)
    check_positions(run.batch.max_tokens, model.config, "batch.max_tokens")
    exam, data = build_exam(run, model, tokenizer, mesh, scorer, progress, peers)
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
    epochs = run.steps * run.batch.rows / len(loaded.train)
    size = (
        f"{run.data.label}: {len(loaded.train):,} {what}, {len(loaded.held_out):,} to test on; each step "
        f"{run.batch.rows} of them, {run.steps} steps are {epochs:.1f} epochs"
    )
    return loaded, {
        "run": run,
        "label": data.label,
        "problems": prints,
        "rules": {
            "not_a_number": functools.partial(not_a_number, learning_rate=run.learner.optimiser.learning_rate),
            "reward_fails": reward_fails,
        },
        "notes": [*loaded.notes, size],
        "rows": loaded.train,
        "held_out": loaded.held_out[: run.evaluation.limit or None],
        "exam": exam,
        "left_out": loaded.left_out,
        "status": progress.status,
    }


def fit_microbatch(forward: Forward, groups: Iterable[tuple[str, Sequence[Sample]]], rows: int) -> Forward:
    """Return the forward pass with microbatches large enough for samples that are compared with each other: ``groups``
    of them, each with its row's location. ``rows``: ``learner.compute.microbatch_rows``; 0 takes as many as needed.

    Raises:
      InputError: they do not fit; names the row and the remedy. Nothing is compiled yet.
    """
    layout = forward.layout
    for where, samples in groups:
        needed = count_compared_rows(samples, layout)
        if needed > layout.rows and not rows:
            layout = dataclasses.replace(layout, rows=-(-needed // layout.parts) * layout.parts)
        with naming(where):
            sample_rows(samples, layout)
    return dataclasses.replace(forward, layout=layout)


def build_programs(
    run: FromData, model: Any, mesh: Any, objective: Objective, groups: Iterable[tuple[str, Sequence[Sample]]]
) -> tuple[Forward, tuple[Training, ...]]:
    """Return how the model is run, and how it is trained; ``groups``: as for ``fit_microbatch``, with the longest rows
    among them.
    """
    compute = compute_for(run.learner, model.config, platform_of(mesh), compiler_options(mesh))
    longest = run.batch.max_tokens + 1  # a scalar model reads its score where one more token would be predicted
    rows = -(-run.batch.rows // run.learner.minibatches)
    tokens = rows * longest
    layout = layout_for(run.learner, compute, longest, longest, mesh, model.config, tokens)
    optimiser = run.learner.optimiser
    update = make_update((objective,), build(optimiser), learning_rate(optimiser), compute)
    groups = list(groups)
    forward = fit_microbatch(Forward(layout, compute, 1.0, mesh), groups, run.learner.compute.microbatch_rows)
    largest = heapq.nlargest(rows, (samples for _, samples in groups), key=count_tokens)
    apart = [
        dataclasses.replace(sample, together=None if sample.together is None else row)
        for row, samples in enumerate(largest)
        for sample in samples
    ]
    forward = dataclasses.replace(forward, layout=forward.layout.with_room(apart))
    return forward, (Training((objective,), update),)


def count_tokens(samples: Sequence[Sample]) -> int:
    """Return the number of tokens of samples, with their prompts."""
    return sum(len(sample.prompt) + len(sample.tokens) for sample in samples)


def outline_dataset(
    run: FromData, model: Any, mesh: Any, objective: Objective, samples_of: Callable[..., list[Sample]]
) -> Outline:
    """Outline the run's computation for the longest rows, all but the first token of each learned. ``model`` is shapes,
    ``mesh`` may be abstract, and ``samples_of`` maps a prompt, its continuation and a row's number to samples.
    """

    def rows(tokens: int) -> list[list[Sample]]:
        follows = np.zeros(max(tokens - 1, 1), np.int32)
        count = -(-run.batch.rows // run.learner.minibatches)
        return [samples_of(np.full(1, row, np.int32), follows, row) for row in range(count)]

    longest = [("the longest row", samples) for samples in rows(run.batch.max_tokens)]
    forward, training = build_programs(run, model, mesh, objective, longest)
    answers = run.evaluation.task is not None or isinstance(run.data.source, Collected)
    return Outline(
        state=planned_state(run, model, training, False),
        training=training,
        forwards={"policy": forward},
        groups=groups(run),
        samples=lambda tokens: [sample for samples in rows(tokens) for sample in samples],
        coefficients={"policy": ("temperature",)},
        notes=("it samples answers too (a task to test on, or data to collect): that is not planned",) * answers,
    )


# Supervised fine-tuning: the model learns to continue prompts as texts do.


def text_sample(text: Text) -> Sample:
    """Return the learner's sample of a text."""
    return Sample(text.prompt, text.tokens, text.mask)


def outline(run: configs.Supervised, model: Decoder, mesh: Any, *_: Any) -> Outline:
    """Outline the run's computation on its devices."""

    def samples(prompt: np.ndarray, tokens: np.ndarray, number: int) -> list[Sample]:
        return [text_sample(Text("", prompt, tokens, np.ones(len(tokens), bool), str(number)))]

    return outline_dataset(run, model, mesh, NextToken(), samples)


def evaluate_texts(forward: Any, model: Decoder, texts: Any, status: Callable[[str], None]) -> dict[str, float]:
    """Return ``eval/text/loss``, nats per token, and ``eval/text/perplexity``."""
    samples = [text_sample(text) for text in texts]
    logps = score_samples(forward, model, samples, "logp", lambda text: status(f"evaluating: {text}"))
    total = sum(float(np.sum(logp[sample.mask], dtype=np.float64)) for logp, sample in zip(logps, samples, strict=True))
    count = sum(int(sample.mask.sum()) for sample in samples)
    loss = -total / max(count, 1)
    return {"eval/text/loss": loss, "eval/text/perplexity": math.exp(min(loss, 700.0))}


def prepare(
    run: configs.Supervised, model: Decoder, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> DatasetStage:
    """Read or collect the texts; build training and evaluation. InputError: data that the run cannot use."""
    loaded, fields = read_rows_of(run, model, tokenizer, mesh, scorer, progress, peers, "texts")
    longest = heapq.nlargest(run.batch.rows, loaded.train, key=lambda text: text.length)
    groups = ((text.where, [text_sample(text)]) for text in longest)
    forward, training = build_programs(run, model, mesh, NextToken(), groups)
    return DatasetStage(
        forward=forward,
        training=training,
        samples_of=lambda text, place, number: [text_sample(text)],
        numbers=lambda policy, texts: evaluate_texts(forward, policy, texts, progress.status),
        **fields,
    )
