"""The files of a step: checksums, recorded at writing and compared before reading, and steps in object storage."""

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxrl_llm.codec import digest
from jaxrl_llm.system import storage

MARKER = "commit_success.txt"
"""The object of a step that is written last, and removed first; the name is Orbax's."""
Sums = dict[str, list[Any]]
"""Bytes and checksum (CRC-32, or the storage's own) of files, by name: against accidents of disks and copies."""


def object_steps(path: Path) -> list[int]:
    """Return the complete steps in a mirror's ``checkpoints`` or ``snapshots``, unsorted. InputError: no connection."""
    url = storage.address(path)
    files = storage.system(url)
    with storage.reaching(url):
        try:
            names = [name.rstrip("/").rpartition("/")[2] for name in files.ls(url, detail=False)]
        except FileNotFoundError:
            return []
        numbers = [int(name) for name in names if name.isdigit()]
        marks: Mapping[str, Any] = files.cat([f"{url}/{number}/{MARKER}" for number in numbers], on_error="return")
        for got in marks.values():
            if isinstance(got, Exception) and not isinstance(got, FileNotFoundError):
                raise got
        complete = {int(name.split("/")[-2]) for name, got in marks.items() if isinstance(got, bytes)}
        return [number for number in numbers if number in complete]


def object_sums(step: Path) -> Sums:
    """Return sizes and checksums of the objects in the folders of a step, as the storage knows them. InputError: the
    storage cannot be reached.
    """
    url = storage.address(step)
    files = storage.system(url)
    with storage.reaching(url):
        begin = len(files._strip_protocol(url)) + 1
        objects = files.find(url, detail=True).items()
        by_name = {name[begin:]: [entry["size"], entry.get("crc32c") or entry.get("ETag")] for name, entry in objects}
        return dict(sorted((name, entry) for name, entry in by_name.items() if "/" in name))


def upload_step(source: Path, step: Path) -> None:
    """Copy a step's files to the address of ``step``, whatever was there; ``complete_step`` completes it."""
    remove_step(step)
    url = storage.address(step)
    names = [str(local.relative_to(source)) for local in sorted(source.rglob("*")) if local.is_file()]
    with storage.reaching(url):
        storage.system(url).put([str(source / name) for name in names], [f"{url}/{name}" for name in names])


def complete_step(step: Path) -> None:
    """Write the marker of a step."""
    storage.place(step / MARKER).write_text(f"{storage.address(step)} is complete")


def move_step(step: Path, to: Path) -> None:
    """Give a step another name: its objects are copied by the storage, and removed under the old one."""
    files = storage.system(storage.address(step))
    source, target = (files._strip_protocol(storage.address(path)) for path in (step, to))
    with storage.reaching(storage.address(step)):
        names = files.find(source)
        files.copy(names, [target + name.removeprefix(source) for name in names])
    remove_step(step)


def remove_step(step: Path) -> None:
    """Remove a step, first its marker."""
    url = storage.address(step)
    files = storage.system(url)
    with storage.reaching(url):
        for name in (f"{url}/{MARKER}", url):
            with contextlib.suppress(FileNotFoundError):
                files.rm(name, recursive=name == url)


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
    """Describe the first bad file of a step; return an empty string if all are intact. Files are read in so many
    ``parts``, of which this call reads number ``part``; all sizes are compared.
    """
    recorded = recorded_sums(step)
    if not recorded:
        return f"its {CHECKSUMS} is missing or unreadable"
    stored = object_sums(step) if storage.address(step) else None
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
