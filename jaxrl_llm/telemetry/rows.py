"""JSON lines on disk: one row per line, valid JSON always, and a torn last line survives nobody's crash."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import new_file


def jsonable(value: Any) -> Any:
    """``value`` as JSON can hold it: NumPy and JAX scalars and arrays become Python's, NaN and infinity become None."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(entry) for entry in value]
    return value


def number(value: Any) -> float | None:
    """A finite number, of Python or NumPy; None for all else, truth values among it."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)


def encode_row(row: dict[str, Any]) -> bytes:
    """One line of JSON in UTF-8, its newline included."""
    return (json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) + "\n").encode()


def append_rows(file: BinaryIO, rows: list[dict[str, Any]]) -> None:
    """Append ``rows`` in one write and wait until they are on the disk."""
    file.write(b"".join(encode_row(row) for row in rows))
    file.flush()
    os.fsync(file.fileno())


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file in order; none if there is no such file.

    A last line without an end is what a killed process leaves behind: it is passed over.

    Raises:
      InputError: another line is no JSON object.
    """
    if not Path(path).exists():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            row = _parse(line)
            if row is not None:
                yield row
            elif line.endswith(b"\n"):
                raise InputError(f"{path}: line {number} is no JSON object; remove that line and run again")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def cut_after(path: str | Path, step: int) -> None:
    """Keep only rows whose ``step`` is at most the given one; the file is replaced in one move, or left as it is."""
    path = Path(path)
    if not path.exists():
        return
    write_rows(path, (row for row in read_rows(path) if row["step"] <= step))


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Make the file of these rows, in one move: whole, or as it was."""
    with new_file(path) as part, open(part, "wb") as file:
        for row in rows:
            file.write(encode_row(row))
        file.flush()
        os.fsync(file.fileno())
