"""Answers to some problems at a time, verified, and what is made of them."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.collection.counts import Counts
from jaxrl_llm.collection.ledger import Entry
from jaxrl_llm.collection.rows import (
    Answer,
    Row,
    distinct,
    pair_rows,
    prefix_tokens,
    split_steps,
    step_row,
    text_rows,
)
from jaxrl_llm.engine.engine import Engine
from jaxrl_llm.engine.requests import first_tokens
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rollout.completions import drain
from jaxrl_llm.rollout.groups import request_seed
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.tasks.collected import Collected, Kind
from jaxrl_llm.types import Completion, Problem

SEED_SPACE = 3 << 38
"""Collections draw the request numbers of answers from here on, evaluation below and training from 0: what is tested
and what is learned never share a random number."""
CONTINUED = 7 << 37
"""And those of continuations from here on."""
FILL = 4
"""Answers of each call, in slots: what runs at its end leaves few of them empty for long."""


@dataclasses.dataclass(frozen=True)
class Answerer:
    """A model that answers, and what says which answers are right.

    Attributes:
      engine: samples.
      model: weights to sample from.
      tokenizer: of the model.
      scorer: verifies.
    """

    engine: Engine
    model: Any
    tokenizer: Any
    scorer: Scorer


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is asked, and what the answers are to become.

    Attributes:
      prompts: of the task, as token ids.
      problems: in the order of the rows.
      data: how many answers, how they are sampled, which are kept.
      kind: of the rows.
      max_new_tokens: longest answer, the stop token included.
      seed: decides every random number.
      separator: of steps: stands between two.
    """

    prompts: Prompts
    problems: Sequence[Problem]
    data: Collected
    kind: Kind
    max_new_tokens: int
    seed: int
    separator: str = "\n"

    def __post_init__(self) -> None:
        each = self.max_new_tokens * self.data.continuations if self.kind == "steps" else 1
        most = CONTINUED - SEED_SPACE
        if len(self.problems) * self.data.samples * each > most:
            raise InputError(
                f"{len(self.problems)} problems with {self.data.samples} samples may need more than {most} random "
                "numbers: ask fewer at a time (limit), each part with another seed"
            )

    def sampling(self, stops: tuple[int, ...]) -> Sampling:
        """How answers are sampled; ``stops``: the tokens at which they end."""
        return Sampling(self.data.temperature, 0, self.data.top_p, self.max_new_tokens, stops)

    def at_once(self, slots: int) -> int:
        """Problems whose answers are sampled together. Each answer in steps gives many requests more."""
        return max(1, (slots if self.kind == "steps" else FILL * slots) // self.data.samples)

    def answer_seed(self, number: int, sample: int) -> int:
        """The seed of an answer to the problem of this number."""
        return request_seed(self.seed, SEED_SPACE + number * self.data.samples + sample)

    def continuation_seed(self, number: int, sample: int, begin: int, index: int) -> int:
        """The seed of a continuation of an answer's first ``begin`` tokens."""
        place = (number * self.data.samples + sample) * self.max_new_tokens + begin
        return request_seed(self.seed, CONTINUED + place * self.data.continuations + index)


@dataclasses.dataclass(frozen=True)
class Cut:
    """An answer in steps.

    Attributes:
      at: the answer: index of its problem among those asked together, and of its sample.
      steps: their texts.
      begins: tokens up to the end of each step but the last.
    """

    at: tuple[int, int]
    steps: list[str]
    begins: list[int]


def ask(by: Answerer, asked: Asked, first: int, status: Callable[[str], None]) -> list[Entry]:
    """Answers to the problems from number ``first`` on, as many as are asked together, and their rows.

    They depend on the weights, on what is asked and on the engine's slots, on nothing that was asked before.
    """
    problems = asked.problems[first : first + asked.at_once(by.engine.slots)]
    count = asked.data.samples
    places = list(itertools.product(range(len(problems)), range(count)))
    by.engine.start(asked.sampling(by.model.config.tokens.eos))
    handles = by.engine.submit(
        [asked.prompts[problems[i]] for i, _ in places],
        [asked.answer_seed(first + i, sample) for i, sample in places],
        keep=asked.kind == "steps",
    )
    done = drain(by.engine, by.model, by.tokenizer, handles, status=status)
    right = by.scorer.verify([(problems[i], c) for (i, _), c in zip(places, done, strict=True)]) >= 1
    flat = [answer_of(by.tokenizer, c, bool(true)) for c, true in zip(done, right, strict=True)]
    answers = [flat[i * count : (i + 1) * count] for i in range(len(problems))]
    more = [0] * len(problems)
    if asked.kind == "steps":
        completions = {place: c for place, c in zip(places, done, strict=True)}
        rows, more = _labelled(by, asked, first, answers, completions, status)
    elif asked.kind == "pairs":
        data = asked.data
        rows = [pair_rows(p, a, data) for p, a in zip(problems, answers, strict=True)]
    else:
        rows = [text_rows(p, a, asked.data.keep) for p, a in zip(problems, answers, strict=True)]
    return [Entry(r, _counts(a, r, m)) for a, r, m in zip(answers, rows, more, strict=True)]


def _labelled(
    by: Answerer,
    asked: Asked,
    first: int,
    answers: Sequence[Sequence[Answer]],
    completions: dict[tuple[int, int], Completion],
    status: Callable[[str], None],
) -> tuple[list[list[Row]], list[int]]:
    """Rows of steps for each problem, and the tokens that their labels took.

    A step's label is the share of k continuations of all up to its end that are right (arXiv 2312.08935, the soft
    estimation of section 3.3); the last step's is the answer's own.
    """
    cuts = [cut for i in range(len(answers)) for cut in _cuts(by.tokenizer, asked, i, answers[i], completions)]
    k = asked.data.continuations
    wanted = [(cut, begin, index) for cut in cuts for begin in cut.begins for index in range(k)]
    handles = by.engine.submit(
        [asked.prompts[asked.problems[first + cut.at[0]]] for cut, _, _ in wanted],
        [asked.continuation_seed(first + cut.at[0], cut.at[1], begin, index) for cut, begin, index in wanted],
        begun=[first_tokens(completions[cut.at], begin) for cut, begin, _ in wanted],
    )
    done = drain(
        by.engine, by.model, by.tokenizer, handles, status=lambda text: status(text.replace("sampling", "labelling", 1))
    )
    items = [(asked.problems[first + cut.at[0]], c) for (cut, _, _), c in zip(wanted, done, strict=True)]
    shares = iter(np.mean((by.scorer.verify(items) >= 1).reshape(-1, k), axis=1) if items else ())
    rows: list[list[Row]] = [[] for _ in answers]
    for cut in cuts:
        i, sample = cut.at
        labels = [float(next(shares)) for _ in cut.begins] + [float(answers[i][sample].right)]
        rows[i].append(step_row(asked.problems[first + i], cut.steps, labels))
    tokens = [0] * len(answers)
    for (cut, begin, _), completion in zip(wanted, done, strict=True):
        tokens[cut.at[0]] += len(completion.tokens) - begin
    return rows, tokens


def _cuts(
    tokenizer: Any, asked: Asked, i: int, answers: Sequence[Answer], completions: dict[tuple[int, int], Completion]
) -> list[Cut]:
    """The answers to one problem that can be rows, in steps."""
    found = []
    for sample in distinct(answers):
        steps = split_steps(answers[sample].text, asked.separator)
        tokens = completions[i, sample].tokens[:-1]
        begins = prefix_tokens(tokens, steps, asked.separator, lambda ids: _text(tokenizer, ids))
        found.append(Cut((i, sample), steps, begins))
    return found


def answer_of(tokenizer: Any, completion: Completion, right: bool) -> Answer:
    """A completion once it is verified; the token that ended it is no part of its text, special or not."""
    ended = completion.finish_reason == "stop"
    text = _text(tokenizer, completion.tokens[:-1] if ended else completion.tokens)
    return Answer(text, len(completion.tokens), ended, right)


def _text(tokenizer: Any, tokens: Sequence[int]) -> str:
    """Word for word, so that it becomes these tokens again."""
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _counts(answers: Sequence[Answer], rows: Sequence[Row], more: int) -> Counts:
    """Of one problem, but for the time; ``more``: tokens sampled beside the answers."""
    right = sum(answer.right for answer in answers)
    length = sum(answer.length for answer in answers)
    return Counts(
        problems=1,
        solved=int(right > 0),
        answers=len(answers),
        right=right,
        ended=sum(answer.ended for answer in answers),
        rows=len(rows),
        length=length,
        tokens=length + more,
    )
