"""Steps in object storage: listed, checked, downloaded, uploaded and removed; all by the mirror of the run."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.system import storage

MARKER = "commit_success.txt"
"""The object of a step that is written last, and removed first; the name is Orbax's."""
Sums = dict[str, list[Any]]
"""The size in bytes and a checksum of files, by name: against accidents of disks and copies. The checksum is CRC-32, or
the storage's own."""


def object_steps(path: Path) -> list[int]:
    """Return the complete steps in a mirror's ``checkpoints`` or ``snapshots``, unsorted.

    Raises:
      InputError: the storage cannot be reached.
    """
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
    """Return sizes and checksums of the objects in the folders of a step, as the storage knows them.

    Raises:
      InputError: the storage cannot be reached.
    """
    url = storage.address(step)
    files = storage.system(url)
    with storage.reaching(url):
        begin = len(files._strip_protocol(url)) + 1
        objects = files.find(url, detail=True).items()
        by_name = {name[begin:]: [entry["size"], entry.get("crc32c") or entry.get("ETag")] for name, entry in objects}
        return dict(sorted((name, entry) for name, entry in by_name.items() if "/" in name))


def upload(source: Path, step: Path) -> None:
    """Copy the files of a step to the address of ``step``, whatever was there; it is complete with ``complete``."""
    remove(step)
    url = storage.address(step)
    names = [str(local.relative_to(source)) for local in sorted(source.rglob("*")) if local.is_file()]
    with storage.reaching(url):
        storage.system(url).put([str(source / name) for name in names], [f"{url}/{name}" for name in names])


def complete(step: Path) -> None:
    """Write the marker of a step."""
    storage.place(step / MARKER).write_text(f"{storage.address(step)} is complete")


def move(step: Path, to: Path) -> None:
    """Give a step another name: its objects are copied by the storage, and removed under the old one."""
    files = storage.system(storage.address(step))
    source, target = (files._strip_protocol(storage.address(path)) for path in (step, to))
    with storage.reaching(storage.address(step)):
        names = files.find(source)
        files.copy(names, [target + name.removeprefix(source) for name in names])
    remove(step)


def remove(step: Path) -> None:
    """Remove a step, first its marker."""
    url = storage.address(step)
    files = storage.system(url)
    with storage.reaching(url):
        for name in (f"{url}/{MARKER}", url):
            with contextlib.suppress(FileNotFoundError):
                files.rm(name, recursive=name == url)
