"""Rows of files: JSON lines, JSON, CSV and Parquet."""

import contextlib
import csv
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError, one_line, require
from jaxrl_llm.tasks.rows import BadRow

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
NOT_UTF8 = "{} has text that is not UTF-8 ({}); write it again in UTF-8"
LONGEST_CELL = 2**31 - 1
"""Characters of one cell of a CSV file; Python's own limit is 131072, which a long solution may pass."""


def rows_of(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a file, each after its place; a row that is not well-formed does not end the iterator.

    Raises:
      InputError: the file is missing, its suffix is unknown, or it is not what the suffix says.
      BadRow: one row cannot be read; the next one may be.
    """
    known = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
    require(path.suffix in SUFFIXES, f"{path} has the suffix {path.suffix!r}; tables are {known} files")
    require(path.is_file(), f"{path} not found; paths start at the current folder, {Path.cwd()}")
    if path.suffix == ".jsonl":
        return itertools.starmap(_parsed, _lines(path))
    if path.suffix == ".csv":
        return itertools.starmap(_named, _cells(path))
    return _json_rows(path) if path.suffix == ".json" else _parquet_rows(path)


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    with path.open("rb") as lines:
        yield from ((f"{path}:{count}", line) for count, line in enumerate(lines, start=1) if line.strip())


def _parsed(where: str, line: bytes) -> tuple[str, Any]:
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
    csv.field_size_limit(LONGEST_CELL)
    before = 0
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, [])
            wrong = f"{path}:1 must name the columns, each once, such as prompt,answer"
            require(bool(names) and all(names) and len({*names}) == len(names), wrong)
            before = reader.line_num
            for cells in reader:
                if cells:
                    yield f"{path}:{before + 1}", names, cells
                before = reader.line_num
    except UnicodeDecodeError as error:
        raise InputError(NOT_UTF8.format(path, one_line(error, 200))) from error
    except csv.Error as error:
        raise InputError(
            f"{path}:{before + 1} is not CSV ({one_line(error, 200)}); put text with commas, quotes or line ends in "
            "double quotes, and double each quote in it"
        ) from error


def _named(where: str, names: list[str], cells: list[str]) -> tuple[str, Any]:
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
            found = (row for batch in table.iter_batches() for row in batch.to_pylist(maps_as_pydicts="strict"))
            rows = _written_in(found, table.schema_arrow)
            yield from ((f"{path}:{count}", row) for count, row in enumerate(rows, start=1))
    except (pyarrow.ArrowException, OSError) as error:  # its readers raise either for a damaged file
        raise InputError(f"{path} is not a Parquet file ({one_line(error, 200)}); write it again") from error
    except UnicodeDecodeError as error:
        raise InputError(NOT_UTF8.format(path, one_line(error, 200))) from error


def as_written(rows: Any) -> Iterator[Any]:
    """Yield rows, those of a ``datasets.Dataset`` with their numbers as they were written."""
    schema = getattr(getattr(rows, "features", None), "arrow_schema", None)
    return iter(rows) if schema is None else _written_in(rows, schema)


def _written_in(rows: Iterable[Any], schema: Any) -> Iterator[Any]:
    import pyarrow

    kind = pyarrow.struct(list(schema))
    return (_as_written(row, kind) for row in rows) if "float" in str(kind) else iter(rows)


def _as_written(value: Any, kind: Any) -> Any:
    """Return a value of an Arrow type; numbers of less than 64 bits are the decimals that were written: a float32 0.1
    is 0.1 and not 0.10000000149.
    """
    from pyarrow import types

    if types.is_float32(kind) or types.is_float16(kind):
        return value if value is None else float(str((np.float32 if types.is_float32(kind) else np.float16)(value)))
    if isinstance(value, list) and (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        return [_as_written(item, kind.value_type) for item in value]
    if isinstance(value, dict) and types.is_map(kind):
        return {name: _as_written(item, kind.item_type) for name, item in value.items()}
    if isinstance(value, dict):
        kinds = {field.name: field.type for field in kind}
        return {name: _as_written(item, kinds[name]) if name in kinds else item for name, item in value.items()}
    return value
