"""Answers in runs that learn from data: to the problems of a task that they are tested on, and to collect data from."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.collection.sampling import Answerer
from jaxrl_llm.collection.source import collected
from jaxrl_llm.config.texts import FromData
from jaxrl_llm.engine import Engine, Sampling
from jaxrl_llm.engine.weight_transfer import for_sampling, weights_for_sampling
from jaxrl_llm.evaluate import Evaluated, Questions, evaluate_tasks
from jaxrl_llm.learner.platform import compute_for
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, cast
from jaxrl_llm.rewards import Accuracy, Scorer
from jaxrl_llm.sharding import platform_of
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.problems import read_parts
from jaxrl_llm.tasks import Collected
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import Problem


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

    def __call__(self, model: Decoder) -> tuple[Evaluated, ...]:
        """Answers to the problems of each task; none where there are none."""
        if not self.asked.problems:
            return ()
        weights = self.transfer(model)
        return evaluate_tasks(self.engine, weights, self.tokenizer, self.asked, self.scorer, self.sampling, self.status)


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
    questions: Sequence[Problem] = ()
    longest = 0
    if collects:
        progress.status(f"reading task {source.task.label}")
        loaded = tasks.load(source.task)
        problems = loaded.train[: source.limit or None]
        questions = loaded.held_out
        longest = tasks.Prompts(source.task, tokenizer).longest(problems)
    tested = configs.parts_of_task(run.evaluation.task)
    if not tested:
        tested = configs.parts_of_task(source.task)
        questions = questions[: run.evaluation.limit or None]
    else:
        loaded_parts = read_parts(tested, lambda part: True, progress.status)
        questions = [problem for one in loaded_parts for problem in one.train[: run.evaluation.limit or None]]
    test_prompts = tasks.Prompts([part.task for part in tested], tokenizer)
    length = max(longest, test_prompts.longest(questions)) + run.answering.max_new_tokens
    check_positions(length, model.config, "answering.max_new_tokens")
    compute = compute_for(run.learner, model.config, platform_of(mesh))
    shapes = jax.eval_shape(lambda m: for_sampling(cast(m, compute.dtype), platform_of(mesh)), model)
    engine = Engine(shapes, run.answering.slots, length, run.answering.chunk, mesh)
    limits = configs.limits_of(tested, run.answering.max_new_tokens)
    asked = Questions(test_prompts, questions, run.evaluation.samples, run.seed, limits)
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


def check_positions(length: int, config: ModelConfig, field: str) -> None:
    """Refuse what is longer than the model was made for; before anything is compiled."""
    positions = config.attention.max_positions
    configs.require(
        length <= positions,
        f"{field} needs {length} positions, and the model was made for {positions}: lower it by {length - positions}",
    )
