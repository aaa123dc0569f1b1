"""Whether a saved step is what was written: sizes and checksums of its files, in a file beside them.

The checksums are CRC-32, against accidents of disks and copies: a truncated file, a flipped bit, a file that is gone.
"""

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "checksums.json"
CHUNK = 1 << 22
READERS = 8
"""Threads: checksums of several files are made at one time, and while the interpreter does something else."""


@dataclasses.dataclass(frozen=True)
class Sum:
    """What a file was when it was written.

    Attributes:
      size: bytes.
      crc32: of its content.
    """

    size: int
    crc32: int


def seal(step: Path) -> None:
    """Write down what the files of a step are, those in its folders; what lies beside them is the writer's own."""
    text = json.dumps({name: dataclasses.astuple(found) for name, found in sums(step, _files(step)).items()})
    (step / NAME).write_text(text)


def fault(step: Path) -> str:
    """What is wrong with a sealed step, in a few words, of its first bad file; empty where nothing is, or nothing was
    written down.
    """
    wanted = written(step)
    missing = next((name for name in wanted if not (step / name).is_file()), None)
    if missing is not None:
        return f"file {missing} is missing"
    for name, was in wanted.items():
        size = os.path.getsize(step / name)
        if size != was.size:
            more = "missing" if size < was.size else "too many"
            count = abs(size - was.size)
            return f"file {name}: {count} byte{'s' * (count > 1)} {more}"
    for name, found in sums(step, list(wanted)).items():
        if found != wanted[name]:
            return f"file {name} is not what was written: its checksum differs"
    return ""


def written(step: Path) -> dict[str, Sum]:
    """What was written down of a step, by file; nothing where that is not there or cannot be read itself."""
    try:
        return {name: Sum(*found) for name, found in json.loads((step / NAME).read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def mark(step: Path) -> str:
    """16 hexadecimal digits that say which files a sealed step has; empty for one that is not sealed."""
    found = {name: dataclasses.astuple(one) for name, one in sorted(written(step).items())}
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] if found else ""


def sums(step: Path, names: list[str]) -> Mapping[str, Sum]:
    """Of these files, as they are."""
    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(names, readers.map(lambda name: _sum(step / name), names), strict=True))


def _sum(path: Path) -> Sum:
    crc = size = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
            size += len(chunk)
    return Sum(size, crc)


def _files(step: Path) -> list[str]:
    """Names of all files in the folders of a step."""
    return sorted(str(path.relative_to(step)) for path in step.glob("*/**/*") if path.is_file())
