"""Verified answers to one problem as rows of data, in the formats of TRL's data sets. Nothing is sampled here."""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.tasks.collected import Collected
from jaxrl_llm.tasks.columns import CUT_OFF
from jaxrl_llm.types import Problem

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What was sampled once, and verified.

    Attributes:
      text: without special tokens and without the token that ended it.
      length: tokens, that one included.
      ended: whether it came to its end; if not it was cut off.
      right: the verifier's word.
    """

    text: str
    length: int
    ended: bool
    right: bool

    @property
    def usable(self) -> bool:
        """Whether it can be a row: it says something, and ends."""
        return self.ended and bool(self.text.strip())


def text_rows(problem: Problem, answers: Sequence[Answer], keep: str) -> list[Row]:
    """Right answers as texts to learn: none, one, or all that differ."""
    right = _of(answers, True, keep)
    return [_about(problem, completion=answer.text) for answer in (right if keep == "all" else right[:1])]


def pair_rows(problem: Problem, answers: Sequence[Answer], data: Collected) -> list[Row]:
    """Right answers, each preferred to a wrong one, and with ``cut_off`` to one that was cut off as well.

    No wrong answer is used twice. With ``match_length`` the two that are nearest in length are put together first,
    those sampled earlier where several are as near.
    """
    right = _of(answers, True, data.keep)
    couples = _coupled(right, _of(answers, False, "all"), data)
    if data.cut_off:
        couples += _coupled(right, _cut_off(answers), data)
    return [
        _about(problem, chosen=better.text, rejected=worse.text, **({} if worse.ended else {CUT_OFF: True}))
        for better, worse in couples
    ]


def _coupled(right: Sequence[Answer], wrong: Sequence[Answer], data: Collected) -> list[tuple[Answer, Answer]]:
    """Couples without an answer in common: one, or as many as there are."""
    couples = list(zip(right, wrong, strict=False))
    if data.match_length:
        couples = _nearest(right[:1] if data.keep == "shortest" else right, wrong)
    return couples if data.keep == "all" else couples[:1]


def step_row(problem: Problem, steps: Sequence[str], labels: Sequence[float]) -> Row:
    """An answer in steps, each with its label in [0, 1]."""
    return _about(problem, completions=list(steps), labels=[float(label) for label in labels])


def distinct(answers: Sequence[Answer]) -> list[int]:
    """Indices of the usable answers, the first of each text."""
    first: dict[str, int] = {}
    for index, answer in enumerate(answers):
        if answer.usable:
            first.setdefault(answer.text, index)
    return list(first.values())


def split_steps(text: str, separator: str) -> list[str]:
    """The text cut at each separator; joined by it, the steps are the text again.

    No step is blank: a blank one is part of the step before, or of the first. Empty where all of the text is blank.

    >>> split_steps("a = 1\\n\\nb = 2", "\\n")
    ['a = 1\\n', 'b = 2']
    """
    steps: list[str] = []
    for piece in text.split(separator):
        if steps and (not piece.strip() or not steps[0].strip()):
            steps[-1] += separator + piece
        else:
            steps.append(piece)
    return steps if steps[0].strip() else []


def step_lengths(steps: Sequence[str], separator: str) -> list[int]:
    """How many first characters of a text hold each of its steps, the separator after it included.

    >>> step_lengths(["a = 1\\n", "b = 2"], "\\n")
    [7, 12]
    """
    lengths = [len(separator.join(steps[:count])) for count in range(1, len(steps) + 1)]
    return [length + len(separator) for length in lengths[:-1]] + lengths[-1:]


def prefix_tokens(
    tokens: Sequence[int], steps: Sequence[str], separator: str, decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """How many first tokens hold the steps up to each but the last, the separator after it included.

    A token that holds both the end of a step and the beginning of the next belongs to the former.

    Args:
      tokens: of the answer.
      steps: of its text.
      separator: between two steps.
      decode: first tokens as text.
    """
    ends = step_lengths(steps, separator)[:-1]
    counts = range(len(tokens) + 1)
    return [bisect.bisect_left(counts, end, key=lambda count: len(decode(tokens[:count]))) for end in ends]


def _cut_off(answers: Sequence[Answer]) -> list[Answer]:
    """The answers that have no end, and are not right as far as they go; each text once."""
    found = {answer.text: answer for answer in answers if not answer.ended and not answer.right and answer.text.strip()}
    return list(found.values())


def _of(answers: Sequence[Answer], right: bool, keep: str) -> list[Answer]:
    """The usable answers of one kind, the shortest first or in the order in which they were sampled."""
    found = [answers[index] for index in distinct(answers) if answers[index].right == right]
    return sorted(found, key=lambda answer: answer.length) if keep == "shortest" else found


def _nearest(right: Sequence[Answer], wrong: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Couples without an answer in common, the nearest in length first."""
    couples = sorted(
        (abs(better.length - worse.length), i, j) for i, better in enumerate(right) for j, worse in enumerate(wrong)
    )
    taken: list[tuple[int, int]] = []
    for _, i, j in couples:
        if all(i != one and j != other for one, other in taken):
            taken.append((i, j))
    return [(right[i], wrong[j]) for i, j in taken]


def _about(problem: Problem, **columns: Any) -> Row:
    """A row: the prompt, text where it is one message of the user; its columns; the problem's id."""
    chat = [dict(message) for message in problem.prompt]
    alone = len(chat) == 1 and chat[0]["role"] == "user"
    return {"prompt": chat[0]["content"] if alone else chat} | columns | {"id": problem.id}
