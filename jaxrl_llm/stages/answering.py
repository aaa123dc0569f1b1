"""Sampled answers in runs that learn from data: for evaluation on a task, and for collecting training data."""

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.collection.collect import collected
from jaxrl_llm.config.texts import FromData
from jaxrl_llm.data import Collected
from jaxrl_llm.engine import Sampling
from jaxrl_llm.engine.backend import backend_for
from jaxrl_llm.learner.platform import compute_for
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rewards import Accuracy, Scorer
from jaxrl_llm.rollout.evaluate import Evaluated, Questions, evaluate
from jaxrl_llm.rollout.respond import Answerer
from jaxrl_llm.sharding import platform_of
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.rl.problems import read_parts
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import Problem


class Resources(contextlib.AbstractContextManager):
    """The resources of a run from data besides its model; close it, or use ``with``.

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

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the verifiers' processes."""
        self.scorer.close()


Exam = Callable[[Decoder], tuple[Evaluated, ...]]
"""A function that evaluates a model on each task's problems; the result is empty without problems."""


def answers_of(
    run: FromData, model: Decoder, tokenizer: Any, mesh: Any, resources: Resources, progress: Progress
) -> tuple[Exam | None, Any]:
    """Return the evaluation on a task, None without one, and the run's data.

    Data to collect is sampled from this model, before the run's first step.
    """
    source = run.data.source
    collects = isinstance(source, Collected)
    configs.require(
        not collects or isinstance(model, Decoder),
        f"{run.model} is a reward model, which gives no answers to collect: give a language model",
    )
    if run.evaluation.task is None and not collects:
        return None, run.data
    answering, status = run.answering, progress.status
    problems: Sequence[Problem] = ()
    questions: Sequence[Problem] = ()
    longest = 0
    if collects:
        status(f"reading task {source.task.label}")
        loaded = tasks.load(source.task)
        problems = loaded.train[: source.limit or None]
        questions = loaded.held_out[: run.evaluation.limit or None]
        longest = tasks.Prompts(source.task, tokenizer).longest(problems)
    tested = configs.parts_of_task(run.evaluation.task)
    if tested:
        read = read_parts(tested, lambda part: True, status)
        questions = [problem for one in read for problem in one.train[: run.evaluation.limit or None]]
    else:
        tested = configs.parts_of_task(source.task)
    prompts = tasks.Prompts([part.task for part in tested], tokenizer)
    length = max(longest, prompts.longest(questions)) + answering.max_new_tokens
    check_positions(length, model.config, "answering.max_new_tokens")
    dtype = compute_for(run.learner, model.config, platform_of(mesh)).dtype
    sizes = {"slots": answering.slots, "max_length": length, "chunk": answering.chunk}
    engine, prepared = backend_for(model, dtype, mesh, mesh, **sizes)
    limits = configs.limits_of(tested, answering.max_new_tokens)
    asked = Questions(prompts, questions, run.evaluation.samples, run.seed, limits)
    stops = model.config.tokens.eos
    sampling = Sampling(run.evaluation.temperature, 0, run.evaluation.top_p, answering.max_new_tokens, stops)

    def by(model: Decoder) -> Answerer:
        return Answerer(engine, prepared(model), tokenizer, resources.scorer)

    def exam(model: Decoder) -> tuple[Evaluated, ...]:
        return evaluate(by(model), asked, sampling, status) if questions else ()

    if not collects:
        return exam, run.data
    place = (resources.directory, resources.peers, status)
    return exam, collected(run.data, problems, lambda: by(model), answering.max_new_tokens, run.seed, *place)


def check_positions(length: int, config: ModelConfig, field: str) -> None:
    """Refuse sequences longer than the model's positions, before anything is compiled."""
    positions = config.attention.max_positions
    configs.require(
        length <= positions,
        f"{field} needs {length} positions, and the model was made for {positions}: lower it by {length - positions}",
    )
