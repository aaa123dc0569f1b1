"""Rows in one form, however they are given: by files (JSON lines, JSON, CSV, Parquet), data sets, lists in memory."""

import contextlib
import csv
import itertools
import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, one_line, require

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
NOT_UTF8 = "{} has text that is not UTF-8 ({}); write it again in UTF-8"


class BadRow(InputError):
    """Error in one row; the rows after it are usable."""


def clean_row(where: str, row: Any) -> tuple[str, dict[str, Any]]:
    """Return a row with its values as ``clean_value`` returns them, after its place. BadRow: it is none."""
    if not isinstance(row, dict):
        raise BadRow(f"{where} is a {type(row).__name__}; a row is an object with fields")
    fields = {}
    for name, value in row.items():
        if not isinstance(name, str):
            raise BadRow(f"{where} has a field named {short_repr(name)}; names of fields are text")
        try:
            fields[name] = _without_nan(clean_value(value))
            surrogate = unwritable([name, fields[name]])
        except RecursionError:
            raise BadRow(f"{where}: field {name!a} is nested too deeply to be read; leave the row out") from None
        if surrogate:
            raise BadRow(
                f"{where}: field {name!a} holds {surrogate!a}, half of a surrogate pair, which UTF-8 "
                "cannot hold; write the character, or leave the row out"
            )
    return where, fields


def clean_value(value: Any, depth: int = 0) -> Any:
    """Return a field's value in the form that it has by every way, as values of JSON where it can be. Arrow fills in
    nulls where records of a list differ: names in records that hold None, or a number that is none (NaN), are left out.
    A number of another precision is the decimal that was written, so a float32 0.1 is 0.1. Bytes of UTF-8 are text, and
    arrays and tuples lists. Other values stay. RecursionError: it is nested too deeply.
    """
    if depth > 200:
        raise RecursionError
    if isinstance(value, dict):
        items = ((name, _without_nan(clean_value(item, depth + 1))) for name, item in value.items())
        return {name: item for name, item in items if item is not None}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        return [clean_value(item, depth + 1) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        value = float(str(value)) if np.issubdtype(value.dtype, np.floating) else value.item()
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            text = value.decode()
            return text if all(character.isprintable() or character.isspace() for character in text) else value
    return value


def _without_nan(value: Any) -> Any:
    """Return a field's value; None for the number that stands for a missing one in tables."""
    return None if isinstance(value, float) and math.isnan(value) else value


def short_repr(value: Any) -> str:
    """Format a value for a message: its beginning on one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # a whole number of more digits than Python writes
        text = f"{type(value).__name__} of too many digits to show"
    return text if len(text) <= 60 else f"{text[:60]}..."


def unwritable(value: Any) -> str:
    """Return the first character of a value's texts that UTF-8 cannot hold; empty if it can hold all."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return value[error.start]
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(unwritable, parts)), "")


def nested_field(row: dict[str, Any], name: str) -> Any:
    """Return the value of a field, None if it is missing; a dot reaches into a nested record."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def is_empty(value: Any) -> bool:
    """Whether a field has no value: None, or a text, list or record without content."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def read_table(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file, each after its place; one that is not well-formed is a ``BadRow``."""
    suffixes = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    require(path.suffix in SUFFIXES, f"{path} has the suffix {path.suffix!r}; tables are {suffixes} files")
    require(path.is_file(), f"{path} not found; paths start at the current folder, {Path.cwd()}")
    if path.suffix == ".jsonl":
        return itertools.starmap(_json_line, _lines(path))
    if path.suffix == ".csv":
        return itertools.starmap(_csv_row, _cells(path))
    return _json_rows(path) if path.suffix == ".json" else _parquet_rows(path)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as lines:
        yield from ((f"{path}:{count}", line) for count, line in enumerate(lines, start=1) if line.strip())


def _json_line(where: str, line: bytes) -> tuple[str, Any]:
    try:
        return where, json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRow(
            f"{where} is not JSON ({one_line(error, 200)}); write one object on each line, in UTF-8"
        ) from error


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    remedy = "write a list of objects, in UTF-8; one object a line is a .jsonl file"
    try:
        rows = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({one_line(error, 200)}); {remedy}") from error
    require(isinstance(rows, list), f"{path} holds a {type(rows).__name__}; {remedy}")
    return ((f"{path}:{count}", row) for count, row in enumerate(rows, start=1))


def _cells(path: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield place (its first line), names and cells of each row of a CSV file; a mark of byte order is skipped."""
    csv.field_size_limit(2**31 - 1)  # a long solution may pass Python's own limit of 131072 characters a cell
    last_line = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, [])
            wrong = f"{path}:1 must name the columns, each once, such as prompt,answer"
            require(bool(names) and all(names) and len({*names}) == len(names), wrong)
            last_line = reader.line_num
            for cells in reader:
                if cells:
                    yield f"{path}:{last_line + 1}", names, cells
                last_line = reader.line_num
    except UnicodeDecodeError as error:
        raise InputError(NOT_UTF8.format(path, one_line(error, 200))) from error
    except csv.Error as error:
        raise InputError(
            f"{path}:{last_line + 1} is not CSV ({one_line(error, 200)}); put text with commas, quotes or line ends in "
            "double quotes, and double each quote in it"
        ) from error


def _csv_row(where: str, names: list[str], cells: list[str]) -> tuple[str, Any]:
    if len(cells) != len(names):
        raise BadRow(
            f"{where} has {len(cells)} cells, and the first line names {len(names)} columns; put text with commas in "
            "double quotes"
        )
    return where, dict(zip(names, cells, strict=True))


def _parquet_rows(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with contextlib.closing(pyarrow.parquet.ParquetFile(path)) as table:
            read = (row for batch in table.iter_batches() for row in batch.to_pylist(maps_as_pydicts="strict"))
            rows = _written_rows(read, table.schema_arrow)
            yield from ((f"{path}:{count}", row) for count, row in enumerate(rows, start=1))
    except (pyarrow.ArrowException, OSError) as error:  # its readers raise either for a damaged file
        raise InputError(f"{path} is not a Parquet file ({one_line(error, 200)}); write it again") from error
    except UnicodeDecodeError as error:
        raise InputError(NOT_UTF8.format(path, one_line(error, 200))) from error


def with_written_numbers(rows: Any) -> Iterator[Any]:
    """Yield rows, those of a ``datasets.Dataset`` with their numbers as they were written."""
    schema = getattr(getattr(rows, "features", None), "arrow_schema", None)
    return iter(rows) if schema is None else _written_rows(rows, schema)


def _written_rows(rows: Iterable[Any], schema: Any) -> Iterator[Any]:
    import pyarrow

    kind = pyarrow.struct(list(schema))
    return (_written_value(row, kind) for row in rows) if "float" in str(kind) else iter(rows)


def _written_value(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type; a float32 0.1 is 0.1, the decimal that was written, and not 0.10000000149."""
    from pyarrow import types

    if types.is_float32(kind) or types.is_float16(kind):
        return value if value is None else float(str((np.float32 if types.is_float32(kind) else np.float16)(value)))
    if isinstance(value, list) and (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return [_written_value(item, kind.value_type) for item in value]
    if isinstance(value, dict) and types.is_map(kind):
        return {name: _written_value(item, kind.item_type) for name, item in value.items()}
    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind}
        return {name: _written_value(item, kinds[name]) if name in kinds else item for name, item in value.items()}
    return value
