"""Checksums of the files of a step, recorded when it is written and compared before it is read, and the way to its
arrays.
"""

import json
import os
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoints import objects
from jaxrl_llm.checkpoints.objects import Sums
from jaxrl_llm.codec import digest
from jaxrl_llm.system import storage

CHECKSUMS = "checksums.json"
"""The file of a step with the sizes and checksums of its other files."""
READERS = 8
"""The number of threads that compute checksums of files, in parallel with each other and with the interpreter."""


def file_sums(step: Path, names: list[str]) -> Sums:
    """Compute the sizes and checksums of these files."""

    def of_file(name: str) -> list[int]:
        crc = size = 0
        with open(step / name, "rb") as file:
            while chunk := file.read(1 << 22):
                crc = zlib.crc32(chunk, crc)
                size += len(chunk)
        return [size, crc]

    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(names, readers.map(of_file, names), strict=True))


def recorded_sums(step: Path) -> Sums:
    """Return the recorded sizes and checksums of a step, by file; {} if the record is missing or unreadable."""
    try:
        text = storage.place(step / CHECKSUMS).read_text()
        recorded = {name: [size, crc] for name, (size, crc) in json.loads(text).items()}
        return recorded if all(type(size) is int for size, _ in recorded.values()) else {}
    except (FileNotFoundError, ValueError, TypeError, AttributeError, RecursionError):
        return {}
    except OSError:
        if storage.address(step):  # away for a moment, which says nothing about the record
            raise
        return {}


def mark(step: Path) -> str:
    """Return 16 hexadecimal digits that identify the files of a step; empty if its checksums are missing."""
    recorded = dict(sorted(recorded_sums(step).items()))
    return digest(recorded) if recorded else ""


def fault(step: Path, part: int = 0, parts: int = 1) -> str:
    """Describe the first bad file of a step; return an empty string if all are intact.

    Files are read in so many ``parts``, of which this call reads number ``part``; all sizes are compared.
    """
    recorded = recorded_sums(step)
    if not recorded:
        return f"its {CHECKSUMS} is missing or unreadable"
    stored = objects.object_sums(step) if storage.address(step) else None
    if stored is None:
        sizes = {name: os.path.getsize(step / name) for name in recorded if os.path.isfile(step / name)}
    else:
        sizes = {name: size for name, (size, _) in stored.items()}
    missing = next((name for name in recorded if name not in sizes), None)
    if missing is not None:
        return f"file {missing} is missing"
    for name, (was, _) in recorded.items():
        if sizes[name] != was:
            more = "missing" if sizes[name] < was else "too many"
            count = abs(sizes[name] - was)
            return f"file {name}: {count} byte{'s' * (count > 1)} {more}"
    read = list(recorded)[part::parts]
    current = file_sums(step, read) if stored is None else stored
    for name in read:
        if current[name] != recorded[name]:
            return f"file {name} is not what was written: its checksum differs"
    return ""


def readable(step: Path) -> Any:
    """Return the folder from which Orbax reads the arrays of a step; those of ``s3://`` are downloaded once."""
    if storage.written_directly(step):
        return storage.place(step)
    target = step.parents[1] / ".steps" / f"{step.parent.name}-{step.name}-{mark(step)}"
    if not target.exists():
        url = storage.address(step)
        part = target.with_name(f"{target.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        with storage.reaching(url):
            storage.system(url).get(f"{url}/", f"{part}/", recursive=True)
        part.rename(target)
    return target
