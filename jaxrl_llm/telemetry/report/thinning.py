"""What a report leaves out of a long run, so that it opens at once."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path

from jaxrl_llm.errors import InputError

MOST_COMPLETIONS = 25_000
MOST_BYTES = 24_000_000
"""Of the completions of a report, before they are compressed."""
HEAD = re.compile(rb'\{"step": (\d+), "kind": "(\w+)"')


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Lines of samples.jsonl.

    Attributes:
      lines: as they stand there, in order.
      there: how many it has.
    """

    lines: list[bytes]
    there: int


def thinned(steps: list[int], values: list[float], most: int) -> tuple[list[int], list[float]]:
    """At most about ``most`` points of a curve: its ends, and the lowest and the highest of each stretch."""
    count = len(steps)
    if count <= most:
        return steps, values
    stretch = -(-count // max(most // 2 - 1, 1))
    kept = {0, count - 1}
    for begin in range(0, count, stretch):
        places = range(begin, min(begin + stretch, count))
        kept |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
    order = sorted(kept)
    return [steps[place] for place in order], [values[place] for place in order]


def choose_lines(path: Path, runs: int = 1) -> Chosen:
    """All lines of a samples.jsonl, or of a long one those of evenly spaced steps, the first and the last among them.

    Lines are told apart by how they begin and not parsed, so that hundreds of megabytes take a second.

    Args:
      path: a file that may be missing.
      runs: how many share the room.

    Raises:
      InputError: a line that is no JSON object, but for a torn last one.
    """
    batches: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for begin, size, key in _told_apart(path):
        batches.setdefault(key, []).append((begin, size))
    there = sum(map(len, batches.values()))
    kinds = [[batch for (of, _), batch in batches.items() if of == kind] for kind in {of for of, _ in batches}]
    every = 1
    while True:
        kept = sorted(place for kind in kinds for batch in _every(kind, every) for place in batch)
        fits = len(kept) * runs <= MOST_COMPLETIONS and sum(size for _, size in kept) * runs <= MOST_BYTES
        if fits or every > len(batches):
            return Chosen(_read(path, kept), there)
        every *= 2


def _every(batches: list[list[tuple[int, int]]], every: int) -> list[list[tuple[int, int]]]:
    """Each ``every``-th, and the last."""
    return batches[::every] + (batches[-1:] if (len(batches) - 1) % every else [])


def _told_apart(path: Path) -> Iterator[tuple[int, int, tuple[str, int]]]:
    """Where each line begins, its bytes, its kind and step."""
    if not path.is_file():  # a device is none
        return
    begin = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            head = HEAD.match(line) if line.endswith(b"}\n") else None
            key = (head[2].decode(), int(head[1])) if head else _parsed(line)
            if key is not None:
                yield begin, len(line), key
            elif line.endswith(b"\n"):
                raise InputError(f"{path}: line {number} is no sample; remove that line and run again")
            begin += len(line)


def _parsed(line: bytes) -> tuple[str, int] | None:
    try:
        row = json.loads(line)
        return str(row["kind"]), int(row["step"])
    except (ValueError, KeyError, TypeError):
        return None


def _read(path: Path, places: list[tuple[int, int]]) -> list[bytes]:
    if not places:
        return []
    with open(path, "rb") as file:
        lines = []
        for begin, size in places:
            file.seek(begin)
            lines.append(file.read(size).rstrip(b"\n"))
        return lines
