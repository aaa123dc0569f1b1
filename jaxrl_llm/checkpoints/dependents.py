"""Steps that other runs depend on: a run keeps those of other runs that it needs, and leaves a note beside each.

``RUN/needs/OTHER-MARK`` is a run to all who read it: the config.json of the other run, and the step of it whose files
have this mark (``step_files.mark``), as hard links where the disk allows it. ``OTHER/dependents`` holds a note for each
such step of each run, so that it stays as long as the dependent run exists.
"""

import contextlib
import json
import math
import os
import shutil
import zlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from jaxrl_llm.checkpoints.step_files import (
    CHECKSUMS,
    MARKER,
    complete_step,
    file_sums,
    mark,
    object_sums,
    recorded_sums,
    remove_step,
    upload_step,
)
from jaxrl_llm.errors import InputError
from jaxrl_llm.system import storage
from jaxrl_llm.system.paths import cache_directory

NEEDS, DEPENDENTS = "needs", "dependents"
MOST_COPIED = 20 * 10**9
"""The most bytes of a step that are copied where no hard link is possible."""


def kept_copy(holder: Path, run: Path, step: int, was: str) -> Path | None:
    """Return the copy of a run's step that a run keeps, itself a run's folder; None without a whole one. ``holder``:
    its folder, or a copy, which has its own needs beside it.
    """
    place = storage.refreshed(_shelf(holder) / _name(run, step, was))
    return place if (place / "config.json").is_file() else None


def _shelf(holder: Path) -> Path:
    return holder.parent if holder.parent.name == NEEDS else holder / NEEDS


def _name(run: Path, step: int, was: str) -> str:
    return f"{run.name}-{was or step}"


def keep_copy(holder: Path, run: Path, source: Path, step: int, was: str, most: float = MOST_COPIED) -> str:
    """Keep a copy of a run's step, whole or not at all; return why it is only named, or an empty string. ``holder``: as
    for ``kept_copy``. ``run``: by whose name it is kept. ``source``: the folder of ``step``; that of step 0, of which
    config.json is all, does not exist. ``was``: the mark of its files. ``most``: bytes to copy, where there can be no
    hard links.
    """
    final = _shelf(holder) / _name(run, step, was)
    needed, stored, uploaded = recorded_sums(source), storage.address(source), storage.address(final)
    part = (cache_directory() / final.name if uploaded else final).with_name(f".{final.name}.part")
    there, target = part.joinpath(*source.parts[-2:]), final.joinpath(*source.parts[-2:])
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        (part / "config.json").write_bytes(storage.place(source.parents[1] / "config.json").read_bytes())
        linked = False
        with contextlib.suppress(OSError):  # of a disk without hard links
            if not (stored or uploaded):
                os.link(source / CHECKSUMS, part / CHECKSUMS)
                (part / CHECKSUMS).unlink()
                linked = True
        size = sum(length for length, _ in needed.values())
        if size > most and not linked:
            return f"its {size / 1e9:.1f} GB can only be copied, and the most is {most / 1e9:.0f} GB"
        if step:
            _fill(there, source, os.link if linked else shutil.copyfile)
        if mark(there) != was or not all((there / name).is_file() for name in needed):
            return "it went away meanwhile"
        if stored and step:  # whose checksums are the storage's
            (there / CHECKSUMS).write_text(json.dumps(file_sums(there, list(needed))))
        if not uploaded:
            part.rename(final)
            return ""
        if step:
            upload_step(there, target)
            storage.place(target / CHECKSUMS).write_text(json.dumps(object_sums(target)))
            complete_step(target)
        storage.place(final / "config.json").write_bytes((part / "config.json").read_bytes())  # with which it is whole
        storage.fetch(final)
        return ""
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _fill(there: Path, step: Path, copy: Callable[[Path, Path], object]) -> None:
    """Copy the files of a step to a new folder."""
    if url := storage.address(step):
        with storage.reaching(url):
            storage.system(url).get(f"{url}/", f"{there}/", recursive=True)
        (there / MARKER).unlink(missing_ok=True)
    for path in [path for path in step.rglob("*") if path.is_file() and not url]:
        (there / path.relative_to(step)).parent.mkdir(parents=True, exist_ok=True)
        copy(path, there / path.relative_to(step))


def drop_copies(holder: Path, marks: Collection[str]) -> None:
    """Remove the copies that a run keeps of steps other than those with these marks, and parts of copies."""
    place = storage.place(holder / NEEDS)
    for copy in list(place.iterdir()) if place.exists() else ():
        if copy.name.rpartition("-")[2] not in marks:
            if storage.address(holder):
                remove_step(holder / NEEDS / copy.name)
            shutil.rmtree(holder / NEEDS / copy.name, ignore_errors=True)


def write_note(run: Path, was: str, dependent: Path, there: bool = True) -> None:
    """Leave a note in a run's folder, where it can be written, that another one depends on the step with this mark; not
    ``there``: take it away again.
    """
    name, url = storage.named(dependent.absolute()), storage.address(run)
    with contextlib.suppress(OSError, InputError), storage.reaching(url) if url else contextlib.nullcontext():
        place = storage.place(run / DEPENDENTS / f"{was}-{zlib.crc32(name.encode()):08x}")
        if there:
            (run / DEPENDENTS).mkdir(exist_ok=True)
            place.write_text(name)
        else:
            place.unlink()
            (run / DEPENDENTS).rmdir()


def noted(run: Path) -> set[str]:
    """Return the marks of the steps of a run that runs which are still there depend on."""
    place = storage.place(run / DEPENDENTS)
    notes = [(note.name.partition("-")[0], note.read_text()) for note in place.iterdir()] if place.exists() else ()
    # One without a name is being written.
    return {was for was, name in notes if not name or storage.place(storage.mirror(name) / "config.json").exists()}


def depended_on(folder: Path, steps: Sequence[int]) -> set[int]:
    """Return the steps in a folder of a run that others depend on."""
    marks = noted(folder.parent)
    return {step for step in steps if marks and mark(folder / str(step)) in marks}


def set_aside(place: Path) -> None:
    """Keep a step that is about to be replaced, and that others depend on, as a copy of the run's own."""
    run, step = place.parents[1], int(place.name)
    if depended_on(place.parent, [step]) and kept_copy(run, run, step, was := mark(place)) is None:
        keep_copy(run, run, place, step, was, math.inf)
