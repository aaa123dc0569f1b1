"""Texts that steps of reinforcement learning learn from in addition to their groups: PPO-ptx (arXiv 2203.02155), or
those whose completions a teacher values (GKD, arXiv 2306.13649)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.config import Run, samples_groups
from jaxrl_llm.data import Text, load_texts
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Sample
from jaxrl_llm.learner.objectives import DISTILLATION, TEXT, NextToken
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.evaluate import Tested
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.stages.rl.ingredient import Around, Ingredient
from jaxrl_llm.stages.supervised import sample_of, text_numbers


@dataclasses.dataclass(frozen=True)
class PretrainingMix(Ingredient):
    """Texts that each step learns from in addition to its groups, in a seeded order, and held-out texts.

    Attributes:
      texts: training texts. Only ``count``, ``seed`` and ``ptx`` are set before it is prepared.
      held_out: evaluation texts.
      count: texts of each step.
      alone: nothing is sampled; a step learns from the texts alone.
      seed: of the order: each epoch is a fresh permutation.
      objective: the name of the one that counts texts.
      others: names of the objectives that count completions.
      forward: how the model is run to evaluate it, at temperature 1.
      status: receives progress messages.
      source: where the texts come from.
    """

    texts: Sequence[Text] = ()
    held_out: Sequence[Text] = ()
    count: int = 0
    alone: bool = False
    seed: int = 0
    objective: str = TEXT
    others: tuple[str, ...] = ()
    forward: Any = None
    status: Callable[[str], None] = print
    source: Any = None
    name = "pretraining_mix"

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        ptx, taught = run.rollout.collect.ptx, run.scoring.distillation
        if taught is not None and taught.texts is not None:
            count = taught.rows_of(run.rollout.prompts * run.rollout.group)
            alone = not samples_groups(run)
            return cls(count=count, alone=alone, seed=run.seed, source=taught.texts, objective=DISTILLATION)
        if ptx is None:
            return None
        return cls(count=ptx.rows, seed=run.seed, source=ptx.texts, objectives=(NextToken(ptx.coef, "text/"),))

    def prepared(self, around: Around) -> Self:
        """Read the texts.

        Raises:
          InputError: a row that is unusable, or too long for the run's rows.
        """
        source = self.source
        around.progress.status(f"reading {source.label}")
        forward = around.forwards["policy"]
        size = forward.layout.row_tokens, forward.layout.completion_tokens
        loaded = load_texts(source, around.tokenizer, around.stops, lambda text: room(text, *size))
        train, held_out = (
            [piece for text in texts for piece in pieces(text, *size)] for texts in (loaded.train, loaded.held_out)
        )
        return dataclasses.replace(
            self,
            texts=train,
            held_out=held_out,
            others=tuple(name for name in around.objectives if name != TEXT),  # a teacher values completions too
            forward=dataclasses.replace(forward, temperature=1.0),
            status=around.progress.status,
            fingerprints={"text": tasks.fingerprint(loaded.train), "held-out text": tasks.fingerprint(loaded.held_out)},
            notes=loaded.notes,
        )

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Append the texts of one update to the samples."""
        first = samples[0]
        text = Sample(first.prompt[:1], first.tokens, first.mask).counting((self.objective,))
        return [*([] if self.alone else samples), *[text] * -(-self.count // updates)]

    def batch(self, batch: RolloutBatch, left: Carryover) -> RolloutBatch:
        """Add the number of texts that the run has drawn to the carryover."""
        drawn = dataclasses.replace(batch.left, texts=left.texts + self.count)
        return dataclasses.replace(batch, left=drawn, texts=self.count if self.alone else 0)

    def samples(self, samples: list[list[Sample]], batch: RolloutBatch) -> list[list[Sample]]:
        """Distribute the step's texts evenly between the groups, so that every minibatch gets its share."""
        counted = [[sample.counting(self.others) for sample in group] for group in samples]
        numbers = range(batch.left.texts - self.count, batch.left.texts)
        places = [tasks.problem_index(self.seed, number, len(self.texts)) for number in numbers]
        texts = [[sample_of(self.texts[place]).counting((self.objective,))] for place in places]
        # Of equal parts of a line the middles: a group's before a text's where they meet.
        order = [((at + 0.5) / len(counted), 0, group) for at, group in enumerate(counted)]
        order += [((at + 0.5) / len(texts), 1, text) for at, text in enumerate(texts)]
        return [group for _, _, group in sorted(order, key=lambda placed: placed[:2])]

    def tested(self, found: Tested, policy: Decoder, first: bool) -> Tested:
        """Add ``eval/text/loss`` and its perplexity on the held-out texts to an evaluation."""
        numbers = text_numbers(self.forward, policy, self.held_out, self.status) if self.held_out else {}
        return Tested({**found.numbers, **numbers}, found.answers)


def room(text: Text, row_tokens: int, tokens: int) -> float:
    """Return the most tokens that a text may have; infinite for one without a prompt, which may be split."""
    return math.inf if len(text.prompt) == 1 else min(row_tokens, len(text.prompt) + tokens)


def pieces(text: Text, row_tokens: int, tokens: int) -> list[Text]:
    """Return a text that fits a row, or the pieces of one without a prompt, each after the last token of the one
    before.

    Raises:
      InputError: a text with a prompt that is longer than a row, or than a completion may be.
    """
    size = min(tokens, row_tokens - 1)
    if len(text.tokens) <= tokens and text.length <= row_tokens:
        return [text]
    if len(text.prompt) > 1:
        raise InputError(
            f"{text.where} has a prompt of {len(text.prompt)} and a completion of {len(text.tokens)} tokens, and rows "
            f"have {row_tokens}, completions {tokens}: raise rollout.max_new_tokens, or leave it out of "
            "rollout.collect.ptx (Texts.overlong drops or truncates such texts)"
        )
    whole = np.concatenate([text.prompt, text.tokens])
    begins = range(1, len(whole), size)
    return [
        dataclasses.replace(
            text, prompt=whole[at - 1 : at], tokens=whole[at : at + size], mask=text.mask[at - 1 : at - 1 + size]
        )
        for at in begins
    ]
