"""A file of rows in the making: what is done of it survives whatever ends the process."""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxrl_llm.collection.counts import Counts
from jaxrl_llm.collection.rows import Row
from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import HELD, InUse, new_file, open_nofollow, writable
from jaxrl_llm.telemetry.rows import append_rows, encode_row, read_rows

COLLECTED = "collected.jsonl"
"""In a run's directory: what its data was collected to."""
ELSEWHERE = "give another file with --out"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One problem that is done.

    Attributes:
      rows: that it gave, perhaps none.
      counts: what became of it.
    """

    rows: Sequence[Row]
    counts: Counts


def part_of(path: Path) -> Path:
    """Where the problems that are done stand, a line each after one with the settings, until all of them are."""
    return path.with_name(f"{path.name}.part")


def check_free(path: Path) -> None:
    """Refuses a file that is there, unless it was being put in its place when an earlier attempt ended.

    Raises:
      InputError: it is.
    """
    if path.exists() and not part_of(path).exists():
        raise InputError(f"{path} is there already: {ELSEWHERE}, or remove it first")


class Ledger:
    """Owner of a file in the making.

    Attributes:
      done: problems that are in it.
      counts: of these.
    """

    def __init__(self, path: Path, file: BinaryIO, done: int, counts: Counts):
        self.done = done
        self.counts = counts
        self._path = path
        self._file = file

    def add(self, entries: Sequence[Entry]) -> None:
        """The next problems; they are on the disk when this returns."""
        append_rows(self._file, [{"rows": e.rows, "counts": dataclasses.asdict(e.counts)} for e in entries])
        self.done += len(entries)
        self.counts = sum((entry.counts for entry in entries), self.counts)

    def finish(self) -> None:
        """All problems are done: the rows become the file, in one move."""
        with new_file(self._path) as whole, open(whole, "wb") as file:
            for line in read_rows(part_of(self._path)):
                file.write(b"".join(encode_row(row) for row in line.get("rows", ())))
            file.flush()
            os.fsync(file.fileno())
        part_of(self._path).unlink()


@contextlib.contextmanager
def opened(path: Path, settings: dict[str, Any]) -> Generator[Ledger]:
    """The ledger of a file, begun or gone on with, and held for this process alone.

    Args:
      path: of the file of rows, which is not there before all problems are done.
      settings: all that decides its rows, as JSON values.

    Raises:
      InputError: the file is there, it was begun with other settings, another process is at it, or it cannot be
        written.
    """
    check_free(path)
    part = part_of(path)
    with writable(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_nofollow(part)
    with file:
        _hold(file, part)
        os.truncate(part, _whole_lines(part))
        lines = read_rows(part)
        before = next(lines, None)
        if before is None:
            append_rows(file, [{"settings": settings}])
        else:
            _refuse_other(before.get("settings"), settings, part)
        counts = [Counts(**line["counts"]) for line in lines]
        yield Ledger(path, file, len(counts), sum(counts, Counts()))


def _hold(file: BinaryIO, part: Path) -> None:
    """Refuse a file that another process writes; the kernel lets go of it when that process ends."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in HELD:
            raise InUse(f"{part} is being written by another process: wait until it ends, or {ELSEWHERE}") from None


def _whole_lines(part: Path) -> int:
    """Bytes up to the end of the last line that has one: what comes after it was being written."""
    size = 0
    with open(part, "rb") as file:
        for line in file:
            size += len(line) if line.endswith(b"\n") else 0
    return size


def _refuse_other(before: Any, now: dict[str, Any], part: Path) -> None:
    if not isinstance(before, dict):
        raise InputError(f"{part} is no file of a collection: {ELSEWHERE}, or remove it first")
    now = json.loads(json.dumps(now))
    names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if names:
        shown = "; ".join(f"{name}: {before.get(name)} -> {now.get(name)}" for name in names[:3])
        raise InputError(
            f"{part} was begun with other settings ({shown}): take the old ones, {ELSEWHERE}, or remove it first"
        )
