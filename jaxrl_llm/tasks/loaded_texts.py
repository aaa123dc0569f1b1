"""Loads the data of the supervised stages: rows as token ids, in a part to learn from and one that is held out."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.columns import options_of, unboxed
from jaxrl_llm.tasks.fingerprint import content
from jaxrl_llm.tasks.rows import BadRow, sound
from jaxrl_llm.tasks.task import check_split, check_template, held_out_keys
from jaxrl_llm.tasks.texts import Data, Row
from jaxrl_llm.tasks.turns import Writer


@dataclasses.dataclass(frozen=True)
class LoadedTexts(Generic[Row]):
    """The rows: none twice, and no prompt in both parts.

    Attributes:
      train: in the source's order.
      held_out: in the order of their prompts' hashes, so that the first n are a fair sample.
      notes: a line for each thing that happened to them, with counts.
      left_out: the one of these that tells of rows that were dropped or truncated; empty where there are none.
    """

    train: tuple[Row, ...]
    held_out: tuple[Row, ...]
    notes: tuple[str, ...]
    left_out: str = ""


@dataclasses.dataclass
class RowCounts:
    """What became of rows that could not be learned as they are; each list is of where they stand, or why.

    Attributes:
      rows: that were read.
      bad: dropped, since they cannot be used.
      overlong: dropped, since they are too long, or nothing to learn was left of them.
      truncated: at their ends.
    """

    rows: int = 0
    bad: list[str] = dataclasses.field(default_factory=list)
    overlong: list[str] = dataclasses.field(default_factory=list)
    truncated: list[str] = dataclasses.field(default_factory=list)

    def line(self) -> str:
        """For people, with the first of each; empty where all rows are learned as they are."""
        parts = {"bad dropped": self.bad, "overlong dropped": self.overlong, "truncated": self.truncated}
        found = [f"{len(rows)} {what} (first: {rows[0]})" for what, rows in parts.items() if rows]
        return f"of {self.rows} rows {', '.join(found)}" if found else ""


def load_texts(
    data: Data[Row],
    tokenizer: Any,
    stop_ids: Sequence[int],
    room: Callable[[Row], float] | None = None,
    closes: bool = False,
) -> LoadedTexts[Row]:
    """Reads the rows, merges equal ones, then splits by a hash of the prompt: the same on every machine.

    Args:
      data: Texts, Pairs or Steps: what is read, and how it is written.
      tokenizer: of the model.
      stop_ids: tokens at which the model's completions end, ``ModelConfig.tokens.eos``.
      room: how many tokens a row may have; longer ones are dropped or truncated where the data says so, and are the
        caller's to refuse where it does not. None: as many as it likes.
      closes: whether answers end as the chat template writes them, for what scores them; no policy learns that.

    Raises:
      InputError: wrong settings, a source that cannot be read, a row that cannot be used and is not to be dropped (with
        file and line), or nothing left to train on.
    """
    check_texts(data)
    counted = RowCounts()
    found: dict[str, Row] = {}
    count = 0
    for made in _fitting(data, _usable(data, tokenizer, stop_ids, counted, closes), room, counted):
        found.setdefault(hashlib.sha256(content(made).encode()).hexdigest(), made)
        count += 1
    left_out = counted.line()
    notes = [left_out] if left_out else []
    if len(found) < count:
        notes.append(f"{count - len(found)} duplicates of a row merged, {len(found)} distinct rows left")
    return dataclasses.replace(_parted(data, tuple(found.values()), notes), left_out=left_out)


def _usable(
    data: Data[Row], tokenizer: Any, stop_ids: Sequence[int], counted: RowCounts, closes: bool
) -> Iterator[Row]:
    """Rows as token ids, without those that cannot be used where the data drops them."""
    writer = functools.cache(lambda options: Writer(data, tokenizer, stop_ids, json.loads(options), closes))

    def made(where: str, given: dict[str, Any]) -> Row:
        row = unboxed(given)
        try:
            options = json.dumps(options_of(row), sort_keys=True)
            return data.learned(row, where, writer(options))
        except InputError as error:
            raise BadRow(f"{where}: {error}") from error

    rows = itertools.starmap(made, sound(data.source.read()))
    while True:
        counted.rows += 1
        try:
            yield next(rows)
        except StopIteration:
            counted.rows -= 1
            return
        except BadRow as error:
            if data.bad_rows == "refuse":
                raise
            counted.bad.append(str(error))


def _fitting(
    data: Data[Row], rows: Iterable[Row], room: Callable[[Row], float] | None, counted: RowCounts
) -> Iterator[Row]:
    """The rows, without those that are too long, or without their ends, where the data drops or truncates them."""
    for row in rows:
        most = math.inf if room is None else room(row)
        if row.length <= most or data.overlong == "refuse":
            yield row
            continue
        cut: Any = row.cut(int(most)) if data.overlong == "truncate" else None
        (counted.overlong if cut is None else counted.truncated).append(f"{row.where}, {row.length} tokens")
        if cut is not None:
            yield cut


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
