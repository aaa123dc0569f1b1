"""The data of the supervised stages: texts to learn, preferences, steps with labels; loaded as token ids."""

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.columns import (
    CUT_OFF,
    PAIR_COLUMNS,
    STEP_COLUMNS,
    TEXT_COLUMNS,
    answer_of,
    chat_of,
    columns_of,
    margin_of,
    plain_text,
    prompt_of,
    ranking_of,
    split_chat,
    steps_of,
)
from jaxrl_llm.tasks.fingerprint import content
from jaxrl_llm.tasks.learned import Learned, Ranked, Stepped, Text
from jaxrl_llm.tasks.rows import prompt_key, sound
from jaxrl_llm.tasks.sources import HubDataset, Rows, Table
from jaxrl_llm.tasks.task import check_split, check_template, held_out_keys
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
    """

    source: Table | HubDataset | Rows | Any  # Any: flags leave a class of yours as it is
    template: str = "tokenizer"
    system: str | None = None
    suffix: str = ""
    holdout: float = 0.0
    name: str | None = None
    date: str | None = None

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
      learn: ``completion``, what the assistant says, all of its turns; or ``all``, every token but the first. A row
        with ``text`` is learned as a whole.
    """

    learn: Literal["completion", "all"] = "completion"

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Text:
        """One row as token ids.

        Raises:
          InputError: it cannot be used.
        """
        columns = columns_of(row, TEXT_COLUMNS)
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
        asked, tokens, mask = writer.turns(prompt, rest)
        if self.learn == "all":
            tokens = np.concatenate([asked[1:], tokens])
            asked, mask = asked[:1], np.ones(len(tokens), bool)
        return Text(prompt_key(prompt)[:16], asked, tokens, mask, where)


@dataclasses.dataclass(frozen=True)
class Pairs(_Data):
    """Preferences. A row has ``prompt``, ``chosen`` and ``rejected``; or only the last two, as chats that share their
    beginning; or ``prompt`` and ``completions``, the best first. It may have a ``margin``, a number, and say with
    ``rejected_cut_off`` that the rejected one has no end.

    Attributes:
      source, template, system, suffix, holdout, name, date: as in Texts.
    """

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Ranked:
        """One row as token ids.

        Raises:
          InputError: it cannot be used.
        """
        columns = columns_of(row, PAIR_COLUMNS)
        prompt, answers, names = ranking_of(row, columns)
        before, asked = writer.prompt(prompt)
        tokens = tuple(writer.answer(prompt, before, answer) for answer in answers)
        if row.get(CUT_OFF):
            tokens = (*tokens[:-1], tokens[-1][: len(tokens[-1]) - len(writer.ending)])
        for (one, first), (other, second) in itertools.combinations(zip(names, tokens, strict=True), 2):
            if np.array_equal(first, second):
                raise InputError(f"{one} and {other} are equal; leave the row out, it prefers nothing")
        return Ranked(prompt_key(prompt)[:16], asked, tokens, margin_of(row), where)


@dataclasses.dataclass(frozen=True)
class Steps(_Data):
    """Solutions whose steps are labelled. A row has ``prompt``, ``completions`` (the steps) and ``labels``.

    Attributes:
      source, template, system, suffix, holdout, name, date: as in Texts.
      separator: stands between two steps, and belongs to the first.
    """

    separator: str = "\n"

    def learned(self, row: dict[str, Any], where: str, writer: Writer) -> Stepped:
        """One row as token ids.

        Raises:
          InputError: it cannot be used.
        """
        columns_of(row, STEP_COLUMNS)
        prompt = prompt_of(row["prompt"])
        steps, labels = steps_of(row)
        before, asked = writer.prompt(prompt)
        written = writer.pieces.after(before, *(step + self.separator for step in steps[:-1]), steps[-1])
        tokens = np.asarray([*itertools.chain(*written), *writer.ends.turn], np.int32)
        ends = np.cumsum([len(step) for step in written]).astype(np.int32) - np.int32(1)
        return Stepped(prompt_key(prompt)[:16], asked, tokens, ends, np.asarray(labels, np.float32), where)


@dataclasses.dataclass(frozen=True)
class LoadedTexts(Generic[Row]):
    """The rows: none twice, and no prompt in both parts.

    Attributes:
      train: in the source's order.
      held_out: in the order of their prompts' hashes, so that the first n are a fair sample.
      notes: a line for each thing that happened to them, with counts.
    """

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    notes: tuple[str, ...]


def load_texts(data: Data[Row], tokenizer: Any, stop_ids: Sequence[int], closes: bool = False) -> LoadedTexts[Row]:
    """Reads the rows, merges equal ones, then splits by a hash of the prompt: the same on every machine.

    Args:
      data: Texts, Pairs or Steps: what is read, and how it is written.
      tokenizer: of the model.
      stop_ids: tokens at which the model's completions end, ``ModelConfig.tokens.eos``.
      closes: whether answers end as the chat template writes them, for what scores them; no policy learns that.

    Raises:
      InputError: wrong settings, a source that cannot be read, a row that cannot be used (with file and line), or
        nothing left to train on.
    """
    check_texts(data)
    writer = Writer(data, tokenizer, stop_ids, closes)
    found: dict[str, Row] = {}
    count = 0
    for where, row in sound(data.source.read()):
        try:
            made = data.learned(row, where, writer)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        found.setdefault(hashlib.sha256(content(made).encode()).hexdigest(), made)
        count += 1
    notes = []
    if len(found) < count:
        notes.append(f"{count - len(found)} duplicates of a row merged, {len(found)} distinct rows left")
    return _parted(data, tuple(found.values()), notes)


def check_texts(data: Data[Any]) -> None:
    """Refuses data of a supervised stage that cannot work, before anything is loaded.

    Raises:
      InputError: a source that has no rows, an unknown template, a holdout outside [0, 1), a bad date.
    """
    if not hasattr(data.source, "read"):
        raise InputError(
            f"a {type(data.source).__name__} makes problems, and {type(data).__name__} needs rows: give a Table, a "
            "HubDataset, rows in memory, or a dataclass with read()"
        )
    check_template(data.template)
    check_split(data.holdout, data.date)


def _parted(data: Data[Row], rows: tuple[Row, ...], notes: list[str]) -> LoadedTexts[Row]:
    """The rows in two parts, those of one prompt in one of them.

    Raises:
      InputError: nothing is left to train on.
    """
    keys = set(held_out_keys({row.id for row in rows}, data.holdout))
    train = tuple(row for row in rows if row.id not in keys)
    held_out = tuple(sorted((row for row in rows if row.id in keys), key=lambda row: row.id))
    if not train:
        raise InputError(
            f"{data.label} has no row left to train on: {len(rows)} from the source, {len(held_out)} held out"
            f"{''.join('; ' + note for note in notes)}; give it more rows"
        )
    return LoadedTexts(train, held_out, tuple(notes))
