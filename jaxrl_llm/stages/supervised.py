"""Supervised fine-tuning: the model learns to continue prompts as texts do."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.config.texts import Supervised
from jaxrl_llm.evaluate import Tested
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.likelihood import NextToken
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.answering import Resources
from jaxrl_llm.stages.dataset import DatasetStage, Drawn, groups_of, made, outline_of, programs_of, read
from jaxrl_llm.stages.outline import Groups, Outline
from jaxrl_llm.stages.reading import scored
from jaxrl_llm.tasks import Text
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import TrainState


def resources(run: Supervised, peers: Peers, directory: Path) -> Resources:
    """The verifiers' processes."""
    return Resources(run, peers, directory)


def sample_of(text: Text) -> Sample:
    """A text as the learner sees it."""
    return Sample(text.prompt, text.tokens, text.mask)


def groups(run: Supervised) -> Groups:
    """What a step learns from."""
    return groups_of(run, 1, "texts of")


def outline(run: Supervised, model: Decoder, mesh: Any, *_: Any) -> Outline:
    """What the run computes on its devices."""

    def samples(prompt: np.ndarray, tokens: np.ndarray, number: int) -> list[Sample]:
        return [sample_of(Text("", prompt, tokens, np.ones(len(tokens), bool), str(number)))]

    return outline_of(run, model, mesh, NextToken(), groups(run), samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedStage(DatasetStage):
    """A run of supervised fine-tuning once its files are read."""

    def samples(
        self, state: TrainState, batch: Drawn, coefficients: Mapping[str, float]
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Each text by itself."""
        samples = [sample_of(text) for text in batch.rows]
        learned = float(sum(sample.mask.sum() for sample in samples))
        return [[sample] for sample in samples], {"tokens": learned}

    def test(self, policy: Decoder) -> Tested | None:
        """The loss on the texts that are held out, and answers to a task's problems."""
        numbers = text_numbers(self.forward, policy, self.held_out, self.status) if self.held_out else {}
        answers = () if self.exam is None else self.exam(policy)
        return Tested(numbers, answers) if numbers or answers else None


def text_numbers(forward: Any, model: Decoder, texts: Any, status: Callable[[str], None]) -> dict[str, float]:
    """``eval/text/loss``, nats per token, and the perplexity of it."""
    samples = [sample_of(text) for text in texts]
    found = scored(forward, model, samples, "logp", lambda text: status(f"evaluating: {text}"))
    total = sum(float(np.sum(logp[sample.mask], dtype=np.float64)) for logp, sample in zip(found, samples, strict=True))
    count = sum(int(sample.mask.sum()) for sample in samples)
    loss = -total / max(count, 1)
    return {"eval/text/loss": loss, "eval/text/perplexity": math.exp(min(loss, 700.0))}


def prepare(
    run: Supervised, model: Decoder, tokenizer: Any, mesh: Any, resources: Resources, progress: Progress, peers: Peers
) -> SupervisedStage:
    """Read the texts, or collect them; build what learns and tests.

    Raises:
      InputError: data that the run cannot work with.
    """
    data = read(run, model, tokenizer, mesh, resources, progress, peers)
    return made(SupervisedStage, run, data, *programs_of(run, model, mesh, NextToken()), "texts")
