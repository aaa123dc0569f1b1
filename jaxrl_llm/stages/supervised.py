"""Supervised fine-tuning: the model learns to continue prompts as texts do."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxrl_llm.config.texts import Supervised
from jaxrl_llm.data import Text
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.objectives import NextToken
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.dataset import DatasetStage, outline_of, programs_of, read, resources
from jaxrl_llm.stages.stage import Groups, Outline, scored
from jaxrl_llm.telemetry.progress import Progress

__all__ = ["groups", "outline", "prepare", "resources"]


def sample_of(text: Text) -> Sample:
    """Return the learner's sample of a text."""
    return Sample(text.prompt, text.tokens, text.mask)


def groups(run: Supervised) -> Groups:
    """Return the size of a step's batch."""
    return Groups(run.group_field, run.batch.rows, 1, run.batch.max_tokens, "texts of")


def outline(run: Supervised, model: Decoder, mesh: Any, *_: Any) -> Outline:
    """Outline the run's computation on its devices."""

    def samples(prompt: np.ndarray, tokens: np.ndarray, number: int) -> list[Sample]:
        return [sample_of(Text("", prompt, tokens, np.ones(len(tokens), bool), str(number)))]

    return outline_of(run, model, mesh, NextToken(), groups(run), samples)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedStage(DatasetStage):
    """A run of supervised fine-tuning, once its files are read."""

    def samples_of(self, row: Text, place: int, number: int) -> list[Sample]:
        """Return one sample: each text is independent."""
        return [sample_of(row)]

    def numbers(self, policy: Decoder) -> dict[str, float]:
        """Return loss and perplexity on the held-out texts."""
        return text_numbers(self.forward, policy, self.held_out, self.status)


def text_numbers(forward: Any, model: Decoder, texts: Any, status: Callable[[str], None]) -> dict[str, float]:
    """Return ``eval/text/loss``, nats per token, and ``eval/text/perplexity``."""
    samples = [sample_of(text) for text in texts]
    found = scored(forward, model, samples, "logp", lambda text: status(f"evaluating: {text}"))
    total = sum(float(np.sum(logp[sample.mask], dtype=np.float64)) for logp, sample in zip(found, samples, strict=True))
    count = sum(int(sample.mask.sum()) for sample in samples)
    loss = -total / max(count, 1)
    return {"eval/text/loss": loss, "eval/text/perplexity": math.exp(min(loss, 700.0))}


def prepare(
    run: Supervised, model: Decoder, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> SupervisedStage:
    """Read or collect the texts; build training and evaluation.

    Raises:
      InputError: data that the run cannot use.
    """
    _, fields = read(run, model, tokenizer, mesh, scorer, progress, peers, "texts")
    forward, training = programs_of(run, model, mesh, NextToken())
    return SupervisedStage(forward=forward, training=training, **fields)
