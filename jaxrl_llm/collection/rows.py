"""Rows of data from verified answers to one problem, in the formats of TRL's data sets. Nothing is sampled here."""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_llm.data.datasets import Collected, Kind, step_lengths
from jaxrl_llm.data.formats import CUT_OFF, END_CUT_OFF, LABEL
from jaxrl_llm.tasks.messages import OPTIONS, TOOLS
from jaxrl_llm.types import Problem

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One sampled and verified answer.

    Attributes:
      text: without special tokens and without the token that ended it; of an episode its messages as JSON.
      length: tokens, that one included.
      ended: whether it was finished; otherwise it was cut off.
      right: the verifier's result.
      messages: of an episode, up to the model's last one; empty for a single answer.
    """

    text: str
    length: int
    ended: bool
    right: bool
    messages: Sequence[dict[str, Any]] = ()


def rows_from(problem: Problem, answers: Sequence[Answer], data: Collected, kind: Kind) -> list[Row]:
    """Return rows of texts, of pairs or of unpaired answers: none, one, or all that the distinct answers give.

    Texts are right answers. Pairs are right answers, each preferred to a wrong one, and with ``cut_off`` to one that
    was cut off as well. No wrong answer is used twice. With ``match_length`` the two nearest in length are paired
    first, the earlier sampled ones on a tie. Unpaired are right answers and as many wrong ones as there are, or one of
    each kind.
    """
    usable = [answers[index] for index in distinct(answers)]
    right = [answer for answer in usable if answer.right]
    if data.keep == "shortest":
        right.sort(key=lambda answer: answer.length)
    if kind == "texts":
        kept = right if data.keep == "all" else right[:1]
        return [row_of(problem, completion=answer.messages or answer.text) for answer in kept]
    wrong = [answer for answer in usable if not answer.right]
    # Those that have no end, and are not right as far as they go; each text once.
    cut = {a.text: a for a in answers if data.cut_off and not a.ended and not a.right and a.text.strip()}
    if kind == "unpaired":
        most = None if data.keep == "all" else 1
        return [
            row_of(
                problem,
                completion=answer.text,
                **{LABEL: answer.right},
                **({} if answer.ended else {END_CUT_OFF: True}),
            )
            for some in (right, wrong, list(cut.values()))
            for answer in some[:most]
        ]
    couples = _coupled(right, wrong, data) + _coupled(right, list(cut.values()), data)
    return [
        row_of(problem, chosen=better.text, rejected=worse.text, **({} if worse.ended else {CUT_OFF: True}))
        for better, worse in couples
    ]


def _coupled(right: Sequence[Answer], wrong: Sequence[Answer], data: Collected) -> list[tuple[Answer, Answer]]:
    """Pair right and wrong answers, without an answer in common: one pair, or as many as possible."""
    couples = list(zip(right, wrong, strict=False))
    if data.match_length:  # the nearest in length first
        some = right[:1] if data.keep == "shortest" else right
        near = sorted((abs(a.length - b.length), i, j) for i, a in enumerate(some) for j, b in enumerate(wrong))
        taken: list[tuple[int, int]] = []
        for _, i, j in near:
            if all(i != one and j != other for one, other in taken):
                taken.append((i, j))
        couples = [(some[i], wrong[j]) for i, j in taken]
    return couples if data.keep == "all" else couples[:1]


def distinct(answers: Sequence[Answer]) -> list[int]:
    """Return the indices of the answers that can be rows, with text and not cut off; the first of each text."""
    first: dict[str, int] = {}
    for index, answer in enumerate(answers):
        if answer.ended and answer.text.strip():
            first.setdefault(answer.text, index)
    return list(first.values())


def prefix_tokens(
    tokens: Any, steps: Sequence[str], separator: str, decode: Callable[[Sequence[int]], str]
) -> list[int]:
    """Return, for each step but the last, the number of first tokens up to its end, the separator after it included.

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


def row_of(problem: Problem, **columns: Any) -> Row:
    """Make a row: the prompt (a string if it is one user message) with its options, the columns, and the problem's
    id.
    """
    chat = [dict(message) for message in problem.prompt]
    alone = len(chat) == 1 and chat[0]["role"] == "user"
    others = {name: value for name, value in problem.options.items() if name != TOOLS}
    options = {name: problem.options[name] for name in (TOOLS,) if name in problem.options}
    options |= {OPTIONS: others} if others else {}
    return {"prompt": chat[0]["content"] if alone else chat} | options | columns | {"id": problem.id}
