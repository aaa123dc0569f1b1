"""Integrity of saved steps: sizes and checksums of their files, in a file next to them.

The checksums are CRC-32, against accidents of disks and copies: a truncated file, a flipped bit, a missing file.
"""

import hashlib
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NAME = "checksums.json"
CHUNK = 1 << 22
READERS = 8
"""The number of threads that compute checksums of files, in parallel with each other and with the interpreter."""


Sums = dict[str, list[int]]
"""The size in bytes and CRC-32 of files, by name."""


def seal(step: Path) -> None:
    """Write the checksums of the files in a step's folders; files next to those folders are the writer's own."""
    names = sorted(str(path.relative_to(step)) for path in step.glob("*/**/*") if path.is_file())
    (step / NAME).write_text(json.dumps(sums(step, names)))


def fault(step: Path) -> str:
    """Describe the first bad file of a sealed step; return an empty string if all are intact, or the step has no
    checksums.
    """
    wanted = written(step)
    missing = next((name for name in wanted if not (step / name).is_file()), None)
    if missing is not None:
        return f"file {missing} is missing"
    for name, (was, _) in wanted.items():
        size = os.path.getsize(step / name)
        if size != was:
            more = "missing" if size < was else "too many"
            count = abs(size - was)
            return f"file {name}: {count} byte{'s' * (count > 1)} {more}"
    for name, found in sums(step, list(wanted)).items():
        if found != wanted[name]:
            return f"file {name} is not what was written: its checksum differs"
    return ""


def written(step: Path) -> Sums:
    """Return the recorded sizes and checksums of a step, by file; {} if the record is missing or unreadable."""
    try:
        return {name: [size, crc] for name, (size, crc) in json.loads((step / NAME).read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def mark(step: Path) -> str:
    """Return 16 hexadecimal digits that identify the files of a sealed step; empty for one without checksums."""
    found = dict(sorted(written(step).items()))
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16] if found else ""


def sums(step: Path, names: list[str]) -> Sums:
    """Compute the sizes and checksums of these files."""

    def of_file(name: str) -> list[int]:
        crc = size = 0
        with open(step / name, "rb") as file:
            while chunk := file.read(CHUNK):
                crc = zlib.crc32(chunk, crc)
                size += len(chunk)
        return [size, crc]

    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(names, readers.map(of_file, names), strict=True))
