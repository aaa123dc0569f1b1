"""Files of rows in the making: finished problems survive any end of the process."""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from jaxrl_llm.collection.rows import Row
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.system.json_lines import append_rows, encode_row, read_rows
from jaxrl_llm.system.paths import HELD, InUse, new_file, open_nofollow, part_of, writable

ELSEWHERE = "give another file with --out"


@dataclasses.dataclass(frozen=True)
class Tally:
    """Sums over the problems asked; those of several parts add up.

    Attributes:
      problems: asked.
      solved: of these, with at least one right answer.
      answers: sampled, K to each problem.
      right: of these.
      ended: of these, those that were not cut off.
      rows: written.
      length: tokens of the answers.
      tokens: sampled, those of continuations too.
      seconds: taken.
      failed: answers that could not be verified; they count as wrong.
    """

    problems: int = 0
    solved: int = 0
    answers: int = 0
    right: int = 0
    ended: int = 0
    rows: int = 0
    length: int = 0
    tokens: int = 0
    seconds: float = 0.0
    failed: int = 0

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*(one + more for one, more in zip(dataclasses.astuple(self), dataclasses.astuple(other))))  # noqa: B905  both are of one class

    def numbers(self) -> dict[str, Any]:
        """Return the sums by name, with the usual shares and means."""
        return (
            dataclasses.asdict(self)
            | {
                "pass@1": self.right / max(self.answers, 1),
                "solved_fraction": self.solved / max(self.problems, 1),
                "mean_length": self.length / max(self.answers, 1),
            }
            | ({"failed_fraction": self.failed / self.answers} if self.failed else {})
        )

    def lines(self) -> list[str]:
        """Format the sums as lines for people."""
        found = self.numbers()
        return [
            f"  {'pass@1':<12}{100 * found['pass@1']:6.1f} %  {self.right:,} of {self.answers:,} answers are right, "
            f"{self.ended:,} came to their end" + (f", {self.failed:,} could not be verified" if self.failed else ""),
            f"  {'solved':<12}{100 * found['solved_fraction']:6.1f} %  {self.solved:,} of {self.problems:,} problems "
            "have a right answer",
            f"  {'length':<12}{found['mean_length']:6.1f} tokens",
            f"  {'sampled':<12}{self.tokens:,} tokens in {self.seconds:,.1f} s",
            f"  {'rows':<12}{self.rows:,}",
        ]


Entry = tuple[Sequence[Row], Tally]
"""The rows that a finished problem gave, perhaps none, and its share of the sums."""


def check_free(path: Path) -> None:
    """Refuse an existing file, unless an earlier attempt ended while it was put in its place.

    Raises:
      InputError: the file exists.
    """
    if path.exists() and not part_of(path).exists():
        raise InputError(f"{path} is there already: {ELSEWHERE}, or remove it first")


class Ledger:
    """Owner of a file in the making.

    Attributes:
      counts: of the finished problems.
    """

    def __init__(self, path: Path, file: BinaryIO, counts: Tally):
        self.counts = counts
        self._path = path
        self._file = file

    def add(self, entries: Sequence[Entry]) -> None:
        """Append the next problems; they are on the disk when this returns."""
        append_rows(self._file, [{"rows": rows, "counts": dataclasses.asdict(counts)} for rows, counts in entries])
        self.counts = sum((counts for _, counts in entries), self.counts)

    def finish(self) -> None:
        """Write the final file, atomically, after all problems are done."""
        with new_file(self._path) as whole, open(whole, "wb") as file:
            for line in read_rows(part_of(self._path)):
                file.write(b"".join(encode_row(row) for row in line.get("rows", ())))
            file.flush()
            os.fsync(file.fileno())
        part_of(self._path).unlink()


@contextlib.contextmanager
def opened(path: Path, settings: dict[str, Any]) -> Generator[Ledger]:
    """Open the ledger of a file, new or to resume, locked for this process.

    Args:
      path: of the file of rows, which does not exist before all problems are done.
      settings: all that decides its rows, as JSON values.

    Raises:
      InputError: the file exists, was begun with other settings, is locked by another process, or cannot be written.
    """
    check_free(path)
    part = part_of(path)
    with writable(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open_nofollow(part)
    with file:
        try:  # the kernel lets go of it when this process ends
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                raise InUse(f"{part} is being written by another process: wait until it ends, or {ELSEWHERE}") from None
        with open(part, "rb") as written:  # what comes after the last line that has an end was being written
            size = sum(len(line) for line in written if line.endswith(b"\n"))
        os.truncate(part, size)
        lines = read_rows(part)
        before = next(lines, None)
        if before is None:
            append_rows(file, [{"settings": settings}])
        elif not isinstance(begun := before.get("settings"), dict):
            raise InputError(f"{part} is not a file of a collection: {ELSEWHERE}, or remove it first")
        else:
            now = json.loads(json.dumps(settings))
            names = sorted(name for name in begun.keys() | now.keys() if begun.get(name) != now.get(name))
            shown = "; ".join(f"{name}: {begun.get(name)} -> {now.get(name)}" for name in names[:3])
            require(
                not names,
                f"{part} was begun with other settings ({shown}): take the old ones, {ELSEWHERE}, or remove it first",
            )
        yield Ledger(path, file, sum((Tally(**line["counts"]) for line in lines), Tally()))
