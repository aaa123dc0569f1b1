"""Texts that steps of reinforcement learning learn from beside their groups: PPO-ptx (arXiv 2203.02155)."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import tasks
from jaxrl_llm.config import Run
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Forward, Sample
from jaxrl_llm.learner.likelihood import TEXT
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.stages.stage import Fingerprints
from jaxrl_llm.stages.supervised import sample_of, text_numbers
from jaxrl_llm.tasks import Text
from jaxrl_llm.telemetry.progress import Progress


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Texts to learn from, in the order of a seed, and those to test on.

    Attributes:
      texts: to learn from.
      held_out: to test on.
      count: of each step.
      seed: of the order: each epoch is a fresh permutation.
      others: names of the objectives that count completions, and not texts.
      forward: how the model is run to test it, at temperature 1.
      status: hears what is going on.
    """

    texts: Sequence[Text]
    held_out: Sequence[Text]
    count: int
    seed: int
    others: tuple[str, ...]
    forward: Forward
    status: Callable[[str], None]

    def mixed(self, groups: Sequence[Sequence[Sample]], drawn: int) -> list[list[Sample]]:
        """The groups with the step's texts between them, evenly, so that every minibatch gets its share.

        ``drawn``: texts that the run has drawn up to this step, its own included.
        """
        counted = [[sample.counting(self.others) for sample in group] for group in groups]
        numbers = range(drawn - self.count, drawn)
        places = [tasks.problem_index(self.seed, number, len(self.texts)) for number in numbers]
        texts = [[sample_of(self.texts[place]).counting((TEXT,))] for place in places]
        # Of equal parts of a line the middles: a group's before a text's where they meet.
        order = [((at + 0.5) / len(counted), 0, group) for at, group in enumerate(counted)]
        order += [((at + 0.5) / len(texts), 1, text) for at, text in enumerate(texts)]
        return [group for _, _, group in sorted(order, key=lambda placed: placed[:2])]

    def numbers(self, model: Decoder) -> dict[str, float]:
        """``eval/text/loss`` and its perplexity on what is held out."""
        return text_numbers(self.forward, model, self.held_out, self.status) if self.held_out else {}


def mixture_of(
    run: Run, tokenizer: Any, stops: Sequence[int], forward: Forward, objectives: Sequence[str], progress: Progress
) -> tuple[Mixture | None, Fingerprints, Sequence[str]]:
    """The texts of a run, their fingerprints, and lines that say what was dropped; None for a run without any.

    Args:
      run: with its settings resolved.
      tokenizer: of the model.
      stops: tokens at which completions end.
      forward: how the learner runs the model.
      objectives: names of all that the run trains towards.
      progress: is told what is read.

    Raises:
      InputError: a row that cannot be used, or that is too long for the run's rows.
    """
    ptx = run.rollout.collect.ptx
    if ptx is None:
        return None, {}, ()
    progress.status(f"reading {ptx.texts.label}")
    layout = forward.layout
    loaded = tasks.load_texts(
        ptx.texts, tokenizer, stops, lambda text: room(text, layout.row_tokens, layout.completion_tokens)
    )
    parts = [
        [piece for text in texts for piece in pieces(text, layout.row_tokens, layout.completion_tokens)]
        for texts in (loaded.train, loaded.held_out)
    ]
    others = tuple(name for name in objectives if name != TEXT)
    plain = dataclasses.replace(forward, temperature=1.0)
    prints = {"text": tasks.fingerprint(loaded.train), "held-out text": tasks.fingerprint(loaded.held_out)}
    return Mixture(parts[0], parts[1], ptx.rows, run.seed, others, plain, progress.status), prints, loaded.notes


def room(text: Text, row_tokens: int, tokens: int) -> float:
    """Tokens that a text may have in a row, and after its prompt; infinite for a plain one, which may be in pieces."""
    return math.inf if len(text.prompt) == 1 else min(row_tokens, len(text.prompt) + tokens)


def pieces(text: Text, row_tokens: int, tokens: int) -> list[Text]:
    """A text that fits a row, or a plain one in pieces that do, each after the last token of the one before.

    Raises:
      InputError: a text that is not plain, and longer than a row or a completion may be.
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
            text,
            prompt=whole[at - 1 : at],
            tokens=whole[at : at + size],
            mask=text.mask[at - 1 : at - 1 + size],
        )
        for at in begins
    ]
