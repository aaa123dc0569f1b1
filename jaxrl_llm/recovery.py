"""Which checkpoint a run goes on from: the newest one that is whole."""

import json
import tempfile
from pathlib import Path

from jaxrl_llm import integrity
from jaxrl_llm.checkpoint import steps_in
from jaxrl_llm.errors import InputError
from jaxrl_llm.snapshots import CHECKPOINTS, SNAPSHOTS, kept

DAMAGED = "damaged"
ARRAY = "/.zarray"
"""How the key ends under which Orbax keeps the shape of an array."""


def newest_whole(directory: Path) -> tuple[int | None, str]:
    """The newest whole checkpoint of a run, None where it has none at all; and a line on those that were passed over.

    They are kept aside as ``checkpoints/STEP.damaged``, so that their steps can be saved again. Called by one process.

    Raises:
      InputError: there are checkpoints, and none is whole: all of them stay where they are.
    """
    damaged = {}
    whole = None
    for step in reversed(steps_in(directory / CHECKPOINTS)):
        why = damage(directory / CHECKPOINTS / str(step))
        if not why:
            whole = step
            break
        damaged[step] = why
    if not damaged:
        return whole, ""
    told = "; ".join(f"{CHECKPOINTS}/{step} is damaged ({why})" for step, why in damaged.items())
    if whole is None:
        snapshots = steps_in(directory / SNAPSHOTS)
        begin = f"--from {directory}@{snapshots[-1]} for a new run from that snapshot, or " if snapshots else ""
        raise InputError(f"{directory} has no whole checkpoint: {told}; take {begin}--fresh to start over")
    for step in damaged:
        set_aside(directory / CHECKPOINTS / str(step))
    return whole, f"{told}; going on from {whole}"


def damage(step: Path) -> str:
    """What is wrong with a checkpoint, in a few words; empty where nothing is.

    One without checksums, which an earlier version has written, is as good as its files can be read.
    """
    return integrity.fault(step) if integrity.written(step) else _unreadable(step)


def _unreadable(step: Path) -> str:
    """Why a checkpoint without checksums cannot be read, in a few words; empty where it can be."""
    import tensorstore as ts

    try:
        json.loads((step / "host" / "metadata").read_text())
        place = {"driver": "ocdbt", "base": f"file://{step.absolute()}/state/"}
        keys = [key.decode() for key in ts.KvStore.open(place).result().list().result()]
        names = [key.removesuffix(ARRAY) for key in keys if key.endswith(ARRAY)]
        for name in names:
            ts.open({"driver": "zarr", "kvstore": place | {"path": f"{name}/"}}).result().read().result()
    except Exception as error:  # damaged files fail in ways of their own
        return str(error).splitlines()[0]
    return "" if names else "it holds no arrays"


def set_aside(step: Path) -> None:
    """Give a folder a name that no step has."""
    target = step.with_name(f"{step.name}.{DAMAGED}")
    number = 2
    while target.exists():
        target = step.with_name(f"{step.name}.{DAMAGED}-{number}")
        number = number + 1
    step.rename(target)


def check_whole(step: Path) -> None:
    """Refuse a checkpoint or snapshot that is not what was written.

    Raises:
      InputError: names the first bad file, and the other steps that there are.
    """
    why = integrity.fault(step)
    if why:
        run = step.parents[1]
        others = [f"{run}@{number}" for number, place in kept(run).items() if place != step]
        remedy = f"give another: {', '.join(others)}" if others else f"{run} keeps no other"
        raise InputError(f"{step} is damaged ({why}): {remedy}")


def check_writable(directory: Path) -> None:
    """Refuse a run whose checkpoints could not be written, before it computes anything.

    Raises:
      InputError: says what the system says.
    """
    place = directory / CHECKPOINTS
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise InputError(
            f"{place} cannot be written ({error.strerror}): make it writable and run the same command again; the "
            "checkpoints that are there stay as they are"
        ) from error
