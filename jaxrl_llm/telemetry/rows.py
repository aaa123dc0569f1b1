"""JSON lines on disk: one row per line, valid JSON always, and a torn last line survives nobody's crash."""

import json
import math
import os
from collections.abc import Iterable, Iterator
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import new_file, open_nofollow

BLOCK = 1 << 16
"""Bytes that are read at one time from the end of a file."""


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


def read_rows(path: str | Path, having: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """The rows of a JSON-lines file in order; none if there is no such file.

    With ``having`` those that hold one of these words at least, as a name perhaps: the others are not parsed.

    A last line without an end is what a killed process leaves behind: it is passed over.

    Raises:
      InputError: another line is no JSON object.
    """
    if not Path(path).exists():
        return
    with open(path, "rb") as file:
        words = [word.encode() for word in having]
        for number, line in enumerate(file, start=1):
            if words and not any(word in line for word in words):
                continue
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
    """Keep only rows whose ``step`` is at most the given one; steps rise from row to row.

    What is cut off is read from the end on, and nothing before it: a long run goes on as soon as a short one.

    Raises:
      InputError: a line on the way is no JSON object, or the file is a symbolic link; it is left as it is.
    """
    path = Path(path)
    if not path.exists():
        return
    with open_nofollow(path, "r+b") as file:
        keep, whole = 0, True
        for start, line in _backwards(file) if step >= 0 else ():
            row = _parse(line)
            if row is None and line.endswith(b"\n"):
                file.seek(0)
                number = file.read(start).count(b"\n") + 1
                raise InputError(f"{path}: line {number} is no JSON object; remove that line and run again")
            if row is not None and row["step"] <= step:
                keep, whole = start + len(line), line.endswith(b"\n")
                break
        file.truncate(keep)
        if not whole:
            file.seek(keep)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


def last_row(path: str | Path) -> dict[str, Any] | None:
    """The last whole row of a file; None where there is none, or no such file."""
    if not Path(path).exists():
        return None
    with open(path, "rb") as file:
        return next((row for _, line in _backwards(file) if (row := _parse(line)) is not None), None)


def _backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines of a file, the last one first, each with where it begins."""
    begin = file.seek(0, os.SEEK_END)
    text = b""
    while begin:
        size = min(BLOCK, begin)
        begin = begin - size
        file.seek(begin)
        text = file.read(size) + text
        # The first of these lines may begin further up.
        while (found := text.rfind(b"\n", 0, len(text) - 1)) >= 0:
            yield begin + found + 1, text[found + 1 :]
            text = text[: found + 1]
    if text:
        yield 0, text


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Make the file of these rows, in one move: whole, or as it was."""
    with new_file(path) as part, open(part, "wb") as file:
        for row in rows:
            file.write(encode_row(row))
        file.flush()
        os.fsync(file.fileno())
