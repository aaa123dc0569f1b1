"""JSON lines on disk: one row of valid JSON per line; a torn last line, left by a crash, is skipped."""

import json
import math
import os
from collections.abc import Iterator
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO

from jaxrl_llm.codec import jsonable
from jaxrl_llm.errors import InputError
from jaxrl_llm.system.paths import open_nofollow

BLOCK = 1 << 16
"""Bytes per read when a file is read from its end."""


def number(value: Any) -> float | None:
    """Convert a finite number, of Python or NumPy, to a float; return None for anything else, including booleans."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond all floats
        return None


def encode_row(row: dict[str, Any]) -> bytes:
    """Encode a row as one line of JSON in UTF-8, with its newline."""
    return (json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) + "\n").encode()


def append_rows(file: BinaryIO, rows: list[dict[str, Any]]) -> None:
    """Append ``rows`` in one write and wait until they are on the disk."""
    file.write(b"".join(encode_row(row) for row in rows))
    file.flush()
    os.fsync(file.fileno())


def read_rows(path: str | Path, having: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON-lines file in order; a missing file has no rows. With ``having``, yield only rows with
    at least one of these words in their line, such as a name; the others are not parsed. An unterminated last line, as
    a killed process leaves it, is skipped. InputError: another line is not a JSON object.
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
                raise InputError(f"{path}: line {number} is not a JSON object; remove that line and run again")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def cut_after(path: str | Path, step: int) -> None:
    """Keep only the rows up to ``step``; steps rise. The file is read from its end, as far as it is cut: a long run
    resumes as fast as a short one. InputError: a line read is no JSON object, or the file is a symbolic link; the file
    is unchanged.
    """
    path = Path(path)
    if not path.exists():
        return
    with open_nofollow(path, "r+b") as file:
        keep, complete = 0, True
        for start, line in lines_backwards(file) if step >= 0 else ():
            row = _parse(line)
            if row is None and line.endswith(b"\n"):
                file.seek(0)
                number = file.read(start).count(b"\n") + 1
                raise InputError(f"{path}: line {number} is not a JSON object; remove that line and run again")
            if row is not None and row["step"] <= step:
                keep, complete = start + len(line), line.endswith(b"\n")
                break
        file.truncate(keep)
        if not complete:
            file.seek(keep)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


def last_row(path: str | Path) -> dict[str, Any] | None:
    """Return the last whole row of a file; None if it has no rows or does not exist."""
    if not Path(path).exists():
        return None
    with open(path, "rb") as file:
        return next((row for _, line in lines_backwards(file) if (row := _parse(line)) is not None), None)


def lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their offsets, the last one first."""
    begin = file.seek(0, os.SEEK_END)
    text = b""
    while begin:
        size = min(BLOCK, begin)
        begin = begin - size
        file.seek(begin)
        text = file.read(size) + text
        # The first of these lines may begin further up.
        while (at := text.rfind(b"\n", 0, len(text) - 1)) >= 0:
            yield begin + at + 1, text[at + 1 :]
            text = text[: at + 1]
    if text:
        yield 0, text
