"""Data of the supervised stages: texts to learn, preferences, completions or steps with labels."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np

from jaxrl_llm.data import formats
from jaxrl_llm.data.token_rows import Example, Judged, Ranked, Stepped, Text
from jaxrl_llm.errors import InputError
from jaxrl_llm.system.setting import Range
from jaxrl_llm.tasks.chats import Writer
from jaxrl_llm.tasks.prompts import prompt_key
from jaxrl_llm.tasks.sources import HubDataset, Rows, Table
from jaxrl_llm.tasks.task import Task

Row = TypeVar("Row", bound=Example, covariant=True)


@dataclasses.dataclass(frozen=True)
class Data(Generic[Row]):
    """Base of the data of the supervised stages.

    Attributes:
      source: of the rows: a table, a data set of the hub, rows in memory (a list of dictionaries, a
        ``datasets.Dataset``), or a frozen dataclass of your own with ``read()`` and ``label``.
      template, system, suffix, date: as in Task; prompts are written as those of a Task with equal settings.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
      overlong: handling of a row that is too long for the run: ``refuse``, ``drop``, or ``truncate`` it at its end.
      bad_rows: handling of a row that cannot be used: ``refuse`` or ``drop``.
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
        """Name of the data in metrics."""
        return self.name or getattr(self.source, "label", type(self.source).__name__)

    def example(self, row: dict[str, Any], where: str, writer: Writer) -> Row:
        """Encode one row as token ids.

        Raises:
          InputError: the row cannot be used.
        """
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Texts(Data[Text]):
    """Texts to learn by heart. A row has ``messages``, or ``prompt`` and ``completion``, or ``text``; if it has several
    of these, the first is read.

    Attributes:
      source: of the rows: a table, a data set of the hub, rows in memory (a list of dictionaries, a
        ``datasets.Dataset``), or a frozen dataclass of your own with ``read()`` and ``label``.
      template, system, suffix, date: as in Task; prompts are written as those of a Task with equal settings.
      holdout: share of the distinct prompts, in [0, 1), that is held out for evaluation.
      name: in metrics; None means the source's.
      overlong, bad_rows: handling of a row that is too long for the run, or that cannot be used.
      learn: ``completion``, the assistant's text in all its turns; ``all``, every token but the first; or ``trl``, the
        tokens that TRL's ``SFTTrainer`` learns from a row: no template wraps a ``prompt`` and ``completion`` that are
        text, all of ``messages`` is learned, and so is the template's text after the last turn. A row with ``text`` is
        learned as a whole.
    """

    learn: Literal["completion", "all", "trl"] = "completion"

    def example(self, row: dict[str, Any], where: str, writer: Writer) -> Text:
        """Encode one row as token ids; see ``Data``."""
        columns = formats.columns_of(row, formats.TEXTS)
        if formats.flag_of(row, formats.LABEL) is False:
            raise InputError(
                f"{formats.LABEL} is false, so the text is a bad one, and texts are learned; leave the row out"
            )
        if columns == ("text",):
            text = formats.plain_text(row["text"], "text")
            tokens = writer.text(text)
            key = prompt_key([{"role": "text", "content": text}])
            return Text(key[:16], tokens[:1], tokens[1:], np.ones(len(tokens) - 1, bool), where)
        if columns == ("messages",):
            prompt, rest = formats.split_chat(formats.chat_of(row["messages"], "messages"))
        else:
            prompt = formats.prompt_of(row["prompt"])
            rest = formats.answer_of(row["completion"], "completion")
        if self.learn != "completion" and any(formats.WEIGHT in message for message in (*prompt, *rest)):
            raise InputError(
                f"a message has {formats.WEIGHT} 0, and learn {self.learn!r} learns all: take learn 'completion'"
            )
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
            raise InputError(
                f"every message of the assistant has {formats.WEIGHT} 0: nothing is learned; leave the row out"
            )
        return Text(prompt_key(prompt)[:16], asked, tokens, mask, where)


@dataclasses.dataclass(frozen=True)
class Pairs(Data[Ranked]):
    """Preferences. A row has ``prompt``, ``chosen`` and ``rejected``; or only the last two, as chats that share their
    beginning; or ``prompt`` and ``completions``, the best first. It may have a ``margin``, a number, and mark with
    ``rejected_cut_off`` that the rejected one was truncated and has no end.

    Attributes:
      source, template, system, suffix, holdout, name, date, overlong, bad_rows: as in Texts.
    """

    def example(self, row: dict[str, Any], where: str, writer: Writer) -> Ranked:
        """Encode one row as token ids; see ``Data``."""
        columns = formats.columns_of(row, formats.PAIRS)
        prompt, answers, names = formats.ranking_of(row, columns)
        before, asked = writer.prompt(prompt)
        tokens = tuple(writer.answer(prompt, before, answer) for answer in answers)
        if formats.flag_of(row, formats.CUT_OFF):
            tokens = (*tokens[:-1], tokens[-1][: len(tokens[-1]) - len(writer.ending)])
        for (one, first), (other, second) in itertools.combinations(zip(names, tokens, strict=True), 2):
            if np.array_equal(first, second):
                raise InputError(f"{one} and {other} are equal; leave the row out, it prefers nothing")
        return Ranked(prompt_key(prompt)[:16], asked, tokens, formats.margin_of(row), where)


@dataclasses.dataclass(frozen=True)
class Unpaired(Data[Judged]):
    """Completions with labels. A row has ``prompt``, ``completion`` and ``label``, true or false; it may mark with
    ``completion_cut_off`` that the completion was truncated and has no end.

    Attributes:
      source, template, system, suffix, holdout, name, date, overlong, bad_rows: as in Texts.
    """

    def example(self, row: dict[str, Any], where: str, writer: Writer) -> Judged:
        """Encode one row as token ids; see ``Data``."""
        formats.columns_of(row, formats.UNPAIRED)
        prompt = formats.prompt_of(row["prompt"])
        before, asked = writer.prompt(prompt)
        answer = formats.answer_of(row["completion"], "completion")
        if len(answer) > 1:
            raise InputError("completion has several messages, and one answer of the assistant is judged; give one")
        tokens = writer.answer(prompt, before, answer[0])
        if formats.flag_of(row, formats.END_CUT_OFF):
            tokens = tokens[: len(tokens) - len(writer.ending)]
        return Judged(prompt_key(prompt)[:16], asked, tokens, bool(formats.flag_of(row, formats.LABEL)), where)


@dataclasses.dataclass(frozen=True)
class Steps(Data[Stepped]):
    """Solutions with labelled steps. A row has ``prompt``, ``completions`` (the steps) and ``labels``.

    Attributes:
      source, template, system, suffix, holdout, name, date, overlong, bad_rows: as in Texts.
      separator: text between two steps, counted with the first.
    """

    separator: str = "\n"

    def example(self, row: dict[str, Any], where: str, writer: Writer) -> Stepped:
        """Encode one row as token ids; see ``Data``."""
        formats.columns_of(row, formats.STEPS)
        prompt = formats.prompt_of(row["prompt"])
        steps, labels = formats.steps_of(row)
        before, asked = writer.prompt(prompt)
        steps[0] = writer.opened(before, steps[0], self.separator.join(steps))
        last = writer.once(steps[-1])
        written = writer.after(before, *(step + self.separator for step in steps[:-1]), last)
        tokens = np.asarray([*itertools.chain(*written), *writer.turn], np.int32)
        ends = np.cumsum([len(step) for step in written]).astype(np.int32) - np.int32(1)
        return Stepped(prompt_key(prompt)[:16], asked, tokens, ends, np.asarray(labels, np.float32), where)


def split_steps(text: str, separator: str) -> list[str]:
    """Split the text at each separator; joined by it, the steps are the text again.

    No step is blank: a blank one joins the step before, or the first one. A blank text has no steps.

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
    """Return, for each step, the length of the text up to its end, the separator after it included.

    >>> step_lengths(["a = 1\\n", "b = 2"], "\\n")
    [7, 12]
    """
    lengths = [len(separator.join(steps[:count])) for count in range(1, len(steps) + 1)]
    return [length + len(separator) for length in lengths[:-1]] + lengths[-1:]


Kind = Literal["texts", "pairs", "unpaired", "steps"]
"""Kinds of rows that are made of collected answers: ``Texts``, ``Pairs``, ``Unpaired`` or ``Steps``."""
KINDS: dict[type, Kind] = {Texts: "texts", Pairs: "pairs", Unpaired: "unpaired", Steps: "steps"}


@dataclasses.dataclass(frozen=True)
class Collected:
    """Answers of the run's own model, sampled before its first step and kept in the run's directory.

    As ``Texts`` they are right answers (rejection sampling), as ``Pairs`` a right one and a wrong one of one problem,
    as ``Unpaired`` right ones and wrong ones with their labels, as ``Steps`` answers with steps labelled by the share
    of continuations that reach the right result. Unfinished answers never count as right. An episode is right by the
    verifier; without one if its environment's reward is 1.

    Attributes:
      task: the problems, and their verifier; held-out problems are not asked. Its template, system
        message and suffix are those of the data.
      samples: K answers to each problem.
      temperature: of the sampling, above 0.
      top_p: keep the smallest set of most likely tokens that reaches this mass; 1 keeps all.
      limit: maximum number of problems asked; 0 for all.
      keep: of each problem's right answers the ``first``, the ``shortest``, or ``all`` that differ; of pairs, one with
        that answer, or as many as can be made without using an answer twice; of unpaired ones, likewise of the wrong.
      match_length: of pairs: pair answers of similar length, so that length is not a preference; if not, right and
        wrong ones in the order in which they were sampled.
      cut_off: of pairs and unpaired answers: whether truncated ones are among the worse. Their rows are marked
        (``rejected_cut_off``, ``completion_cut_off``), and their end is not learned.
      continuations: of steps: k, sampled from the end of each step but the last.
    """

    task: Task
    samples: int = 8
    temperature: Annotated[float, Range("(0, inf]", words="above 0, so that answers differ")] = 1.0
    top_p: Annotated[float, Range("(0, 1]")] = 1.0
    limit: Annotated[int, Range("[0, inf]")] = 0
    keep: Literal["first", "shortest", "all"] = "first"
    match_length: bool = False
    cut_off: bool = False
    continuations: Annotated[int, Range("[1, inf]")] = 8

    @property
    def label(self) -> str:
        """Name of the data if it has no name of its own."""
        return self.task.label

    def read(self) -> Iterator[tuple[str, Any]]:
        """Refuse to read rows, since a model has to answer first.

        Raises:
          InputError: always.
        """
        raise InputError(f"the answers to {self.label} are collected by a run: train one, or use jaxrl-llm collect")
