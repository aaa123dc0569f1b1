"""Loads the data of the supervised stages: rows as token ids, in a part to learn from and one that is held out."""

import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Iterator, Sequence
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
    found: dict[str, Row] = {}
    count = 0
    for made in _usable(data, tokenizer, stop_ids, closes):
        found.setdefault(hashlib.sha256(content(made).encode()).hexdigest(), made)
        count += 1
    notes = []
    if len(found) < count:
        notes.append(f"{count - len(found)} duplicates of a row merged, {len(found)} distinct rows left")
    return _parted(data, tuple(found.values()), notes)


def _usable(data: Data[Row], tokenizer: Any, stop_ids: Sequence[int], closes: bool) -> Iterator[Row]:
    """Rows as token ids."""
    writer = functools.cache(lambda options: Writer(data, tokenizer, stop_ids, json.loads(options), closes))

    def made(where: str, given: dict[str, Any]) -> Row:
        row = unboxed(given)
        try:
            options = json.dumps(options_of(row), sort_keys=True)
            return data.learned(row, where, writer(options))
        except InputError as error:
            raise BadRow(f"{where}: {error}") from error

    return itertools.starmap(made, sound(data.source.read()))


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
