"""Loading of the data of the supervised stages: rows as token ids, in a part to learn from and a held-out part."""

import functools
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jaxrl_llm.codec import digest
from jaxrl_llm.data.datasets import Collected, Data, Row, RowKind
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.models.tokenizer import text_of
from jaxrl_llm.system.setting import check_fields
from jaxrl_llm.tasks.chats import ChatEncoder
from jaxrl_llm.tasks.messages import options_of
from jaxrl_llm.tasks.prompts import content
from jaxrl_llm.tasks.tables import BadRow, clean_row
from jaxrl_llm.tasks.task import Loaded, check, check_split, check_template_name, held_out_keys, nearly_equal


def load_texts(
    data: Data[Row],
    tokenizer: Any,
    stop_ids: Sequence[int],
    room: Callable[[Row], float] | None = None,
    closes: bool = False,
) -> Loaded[Row]:
    """Read the rows, merge equal ones, then split by a hash of the prompt; equal on every machine.

    Args:
      data: Texts, Pairs or Steps.
      tokenizer: of the model.
      stop_ids: tokens at which the model's completions end, ``ModelConfig.tokens.eos``.
      room: maximum number of tokens of a row; longer ones are dropped or truncated as ``data.overlong`` says, or left
        for the caller to refuse. None: no limit.
      closes: whether answers end as the chat template writes them, for models that score them; no policy learns that.

    Raises:
      InputError: settings are wrong, the source cannot be read, a row cannot be used and is not to be dropped (with
        file and line), or no row is left to train on.
    """
    check_texts(data)
    bad: list[str] = []
    overlong: list[str] = []
    truncated: list[str] = []
    rows_by_key: dict[str, Any] = {}
    read = 0
    for example in _read_rows(data, tokenizer, stop_ids, closes, bad):
        read += 1
        fitted: Any = example
        most = math.inf if room is None else room(example)
        if example.length > most and data.overlong != "refuse":
            fitted = example.cut(int(most)) if data.overlong == "truncate" else None
            (overlong if fitted is None else truncated).append(f"{example.where}, {example.length} tokens")
        if fitted is not None:
            rows_by_key.setdefault(digest(content(fitted), 64), fitted)
    parts = {"bad dropped": bad, "overlong dropped": overlong, "truncated": truncated}
    counts = [f"{len(rows)} {what} (first: {rows[0]})" for what, rows in parts.items() if rows]
    left_out = f"of {read + len(bad)} rows {', '.join(counts)}" if counts else ""
    notes = [left_out] if left_out else []
    duplicates = read - len(overlong) - len(rows_by_key)
    if duplicates:
        notes.append(f"{duplicates} duplicates of a row merged, {len(rows_by_key)} distinct rows left")
    keys = set(held_out_keys({row.id for row in rows_by_key.values()}, data.holdout))
    train = tuple(row for row in rows_by_key.values() if row.id not in keys)
    held_out = tuple(sorted((row for row in rows_by_key.values() if row.id in keys), key=lambda row: row.id))
    if held_out:
        prompts = []
        for rows in (train, held_out):
            tokens = ([*row.prompt] if len(row.prompt) > 1 else [*row.prompt, *row.tokens] for row in rows)
            prompts.append([text_of(tokenizer, ids) for ids in tokens])
        notes += nearly_equal(*prompts)
    if not train:
        raise InputError(
            f"{data.label} has no row left to train on: {len(rows_by_key)} from the source, {len(held_out)} held out"
            f"{''.join('; ' + note for note in notes)}; give it more rows"
        )
    return Loaded(train, held_out, tuple(notes), left_out)


def _read_rows(data: Data[Row], tokenizer: Any, stop_ids: Sequence[int], closes: bool, bad: list[str]) -> Iterator[Row]:
    """Yield rows as token ids; if the data drops unusable rows, add the reasons to ``bad`` instead of raising."""
    encoder = functools.cache(lambda options: ChatEncoder(data, tokenizer, stop_ids, json.loads(options), closes))
    rows = itertools.starmap(clean_row, data.source.read())
    while True:
        try:
            where, row = next(rows)
            try:
                options = json.dumps(options_of(row))  # templates write schemas in their order
                yield data.example(row, where, encoder(options))
            except InputError as error:
                raise BadRow(f"{where}: {error}") from error
        except StopIteration:
            return
        except BadRow as error:
            if data.bad_rows == "refuse":
                raise
            bad.append(str(error))


def check_texts(data: Data[Any]) -> None:
    """Refuse data of a supervised stage that cannot work, before anything is loaded."""
    if not hasattr(data.source, "read"):
        raise InputError(
            f"a {type(data.source).__name__} makes problems, and {type(data).__name__} needs rows: give a Table, a "
            "HubDataset, rows in memory, or a dataclass with read()"
        )
    check_template_name(data.template)
    check_split(data.holdout, data.date)


def check_collected(source: Collected, kind: RowKind, where: str) -> None:
    """Refuse settings that cannot collect, before anything is loaded.

    ``where``: prefix of the names of the fields in messages, such as ``--``.

    Raises:
      InputError: names field, value and remedy.
    """
    check(source.task)
    check_fields(source, where)
    least = 2 if kind == "pairs" else 1
    require(source.samples >= least, f"{where}samples must be at least {least} to collect {kind}, got {source.samples}")
    task = source.task
    require(
        not task.plays or (kind == "texts" and task.template != "plain"),
        f"{where}task {task.label} has an environment or tools, and whole episodes are collected: as texts, with a "
        f"chat template (got {kind}, {where}task.template {task.template:.20})",
    )
    if task.verifier == "none" and task.environment is None:
        raise InputError(
            f"{where}task.verifier none leaves nothing to collect by: give the task its answers and a verifier"
        )
