"""The data of the supervised stages: texts to learn, preferences, steps with labels; and what a row of each becomes."""

import dataclasses
import itertools
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.columns import (
    CUT_OFF,
    LABEL,
    PAIRS,
    STEPS,
    TEXTS,
    WEIGHT,
    answer_of,
    chat_of,
    columns_of,
    flag_of,
    margin_of,
    plain_text,
    prompt_of,
    ranking_of,
    split_chat,
    steps_of,
)
from jaxrl_llm.tasks.learned import Learned, Ranked, Stepped, Text
from jaxrl_llm.tasks.rows import prompt_key
from jaxrl_llm.tasks.sources import HubDataset, Rows, Table
from jaxrl_llm.tasks.turns import Writer

Row = TypeVar("Row", bound=Learned, covariant=True)


class Data(Protocol[Row]):
    """What ``load_texts`` loads: Texts, Pairs or Steps."""

    source: Any
    template: str
    system: str | None
    suffix: str
    holdout: float
    date: str | None
    overlong: str
    bad_rows: str

    @property
    def label(self) -> str:
        """Names it in metrics."""

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Row:
        """One row as token ids."""


@dataclasses.dataclass(frozen=True)
class _Data:
    """What all data of the supervised stages have.

    Attributes:
      source: of the rows: a table, a data set of the hub, rows in memory (a list of dictionaries, a
        ``datasets.Dataset``), or a frozen dataclass of your own with ``read()`` and ``label``.
      template, system, suffix, date: as in Task; a prompt is written as that of a Task with the same.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
      overlong: what becomes of a row that is too long for the run: ``refuse``, ``drop``, or ``truncate`` it at its end.
      bad_rows: what becomes of a row that cannot be used: ``refuse`` or ``drop``.
    """

    source: Table | HubDataset | Rows | Any  # Any: flags leave a class of yours as it is
    template: str = "tokenizer"
    system: str | None = None
    suffix: str = ""
    holdout: float = 0.0
    name: str | None = None
    date: str | None = None
    overlong: Literal["refuse", "drop", "truncate"] = dataclasses.field(default="refuse", kw_only=True)
    bad_rows: Literal["refuse", "drop"] = dataclasses.field(default="refuse", kw_only=True)

    def __post_init__(self) -> None:
        if not hasattr(self.source, "read") and not hasattr(self.source, "problems"):
            object.__setattr__(self, "source", Rows(self.source))

    @property
    def label(self) -> str:
        """Names it in metrics."""
        return self.name or getattr(self.source, "label", type(self.source).__name__)


@dataclasses.dataclass(frozen=True)
class Texts(_Data):
    """Texts to learn by heart. A row has ``messages``, or ``prompt`` and ``completion``, or ``text``; where it has
    several of these, the first is read.

    Attributes:
      source: of the rows: a table, a data set of the hub, rows in memory (a list of dictionaries, a
        ``datasets.Dataset``), or a frozen dataclass of your own with ``read()`` and ``label``.
      template, system, suffix, date: as in Task; a prompt is written as that of a Task with the same.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
      overlong, bad_rows: what becomes of a row that is too long for the run, or that cannot be used.
      learn: ``completion``, what the assistant says, all of its turns; ``all``, every token but the first; or ``trl``,
        what TRL's ``SFTTrainer`` learns of the same row: no template wraps a ``prompt`` and ``completion`` that are
        text, all of ``messages`` is learned, and so is what the template writes behind the last turn. A row with
        ``text`` is learned as a whole.
    """

    learn: Literal["completion", "all", "trl"] = "completion"

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Text:
        """One row as token ids.

        Raises:
          InputError: it cannot be used.
        """
        columns = columns_of(row, TEXTS)
        if flag_of(row, LABEL) is False:
            raise InputError(f"{LABEL} is false, so the text is a bad one, and texts are learned; leave the row out")
        if columns == ("text",):
            text = plain_text(row["text"], "text")
            tokens = writer.text(text)
            key = prompt_key([{"role": "text", "content": text}])
            return Text(key[:16], tokens[:1], tokens[1:], np.ones(len(tokens) - 1, bool), where)
        if columns == ("messages",):
            prompt, rest = split_chat(chat_of(row["messages"], "messages"))
        else:
            prompt = prompt_of(row["prompt"])
            rest = answer_of(row["completion"], "completion")
        if self.learn != "completion" and any(WEIGHT in message for message in (*prompt, *rest)):
            raise InputError(f"a message has {WEIGHT} 0, and learn {self.learn!r} learns all: take learn 'completion'")
        if self.learn == "trl":
            plain = all(isinstance(row.get(name), str) for name in columns)
            tokens, begins = writer.joined(prompt, rest, plain)
            begins = 1 if columns == ("messages",) else max(begins, 1)
            asked, tokens = tokens[:begins], tokens[begins:]
            mask = np.ones(len(tokens), bool)
        else:
            asked, tokens, mask = writer.turns(prompt, rest)
        if self.learn == "all":
            tokens = np.concatenate([asked[1:], tokens])
            asked, mask = asked[:1], np.ones(len(tokens), bool)
        if not mask.any():
            raise InputError(f"every message of the assistant has {WEIGHT} 0: nothing is learned; leave the row out")
        return Text(prompt_key(prompt)[:16], asked, tokens, mask, where)


@dataclasses.dataclass(frozen=True)
class Pairs(_Data):
    """Preferences. A row has ``prompt``, ``chosen`` and ``rejected``; or only the last two, as chats that share their
    beginning; or ``prompt`` and ``completions``, the best first. It may have a ``margin``, a number, and say with
    ``rejected_cut_off`` that the rejected one has no end.

    Attributes:
      source, template, system, suffix, holdout, name, date, overlong, bad_rows: as in Texts.
    """

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Ranked:
        """One row as token ids.

        Raises:
          InputError: it cannot be used.
        """
        columns = columns_of(row, PAIRS)
        prompt, answers, names = ranking_of(row, columns)
        before, asked = writer.prompt(prompt)
        tokens = tuple(writer.answer(prompt, before, answer) for answer in answers)
        if flag_of(row, CUT_OFF):
            tokens = (*tokens[:-1], tokens[-1][: len(tokens[-1]) - len(writer.ending)])
        for (one, first), (other, second) in itertools.combinations(zip(names, tokens, strict=True), 2):
            if np.array_equal(first, second):
                raise InputError(f"{one} and {other} are equal; leave the row out, it prefers nothing")
        return Ranked(prompt_key(prompt)[:16], asked, tokens, margin_of(row), where)


@dataclasses.dataclass(frozen=True)
class Steps(_Data):
    """Solutions whose steps are labelled. A row has ``prompt``, ``completions`` (the steps) and ``labels``.

    Attributes:
      source, template, system, suffix, holdout, name, date, overlong, bad_rows: as in Texts.
      separator: stands between two steps, and belongs to the first.
    """

    separator: str = "\n"

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Stepped:
        """One row as token ids.

        Raises:
          InputError: it cannot be used.
        """
        columns_of(row, STEPS)
        prompt = prompt_of(row["prompt"])
        steps, labels = steps_of(row)
        before, asked = writer.prompt(prompt)
        last = writer.ends.once(steps[-1])
        written = writer.pieces.after(before, *(step + self.separator for step in steps[:-1]), last)
        tokens = np.asarray([*itertools.chain(*written), *writer.ends.turn], np.int32)
        ends = np.cumsum([len(step) for step in written]).astype(np.int32) - np.int32(1)
        return Stepped(prompt_key(prompt)[:16], asked, tokens, ends, np.asarray(labels, np.float32), where)
