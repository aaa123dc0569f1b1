"""The steps that a run keeps: its checkpoints, the newest whole one of which it resumes from, and its snapshots.

Snapshots are models that it keeps for good, in ``snapshots/STEP``, saved at a reset or a new phase; and in
``best/STEP`` the one of its best evaluation, as of its end and as of each checkpoint that it may resume from. A
snapshot has only the parameters of every role, and the fingerprint of its weights in place of a frozen base. It is
written as a checkpoint is, and read by the same functions.
"""

import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxrl_llm.checkpoints.dependents import depended_on, kept_copy
from jaxrl_llm.checkpoints.step_files import fault, mark, move_step, remove_step
from jaxrl_llm.checkpoints.store import UNFINISHED, Checkpoints, host_file, steps_in
from jaxrl_llm.errors import InputError, one_line, require
from jaxrl_llm.rules.guards import ENDED
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.system import storage
from jaxrl_llm.types import TrainState

CHECKPOINTS, SNAPSHOTS, BEST = "checkpoints", "snapshots", "best"
DAMAGED = "damaged"


def keep(directory: Path, step: int, state: TrainState, phase: int = 0, folder: str = SNAPSHOTS) -> None:
    """Write ``RUN/snapshots/STEP``, or another folder's; it is complete when this returns. ``phase``: the number of the
    phase that begins with it, or that it is in. An existing snapshot of the step, from before the run was resumed at an
    earlier one, is replaced. No checkpoint may be in writing.
    """
    with Checkpoints(directory / folder, None) as snapshots:
        snapshots.save(step, snapshot_of(state), {"phase": phase})


def keep_only(folder: Path, needed: Collection[int | None]) -> None:
    """Remove the steps of a folder that neither this run nor another needs, whole: names or markers go first."""
    for step in set(steps_in(folder)) - set(needed) - depended_on(folder, steps_in(folder)):
        place = folder / str(step)
        if storage.address(place):
            remove_step(place)
        else:
            shutil.rmtree(place.rename(f"{place}{UNFINISHED.replace('*', '-')}"))


def snapshot_of(state: TrainState) -> TrainState:
    """Return the part of a state that a snapshot holds."""
    for name in state.roles:
        state = state.with_role(name, opt_state=None)
    return state._replace(frozen={})


def kept(directory: Path) -> dict[int, Path]:
    """Return the directories of the steps that a run keeps, a checkpoint before a snapshot of the same step."""
    folders = (directory / BEST, directory / SNAPSHOTS, directory / CHECKPOINTS)
    return dict(sorted({step: folder / str(step) for folder in folders for step in steps_in(folder)}.items()))


def standing(run: Path, step: int, was: str, *holders: Path) -> Path | None:
    """Return the folder with a step of a run as it was: in ``run``, a folder that may be gone, or a copy; None without
    any. ``step``: 0 for the model that it began with. ``was``: the mark of its files then. ``holders``: runs, or copies
    of runs, that may keep one.
    """
    with contextlib.suppress(InputError):  # its storage cannot be reached
        if (storage.refreshed(run) / "config.json").is_file():
            place = kept(run).get(step)
            if step == 0 or (place is not None and mark(place) == was):
                return run
    return next(filter(None, (kept_copy(holder, run, step, was) for holder in (*holders, run))), None)


def phase_of(place: Path) -> int:
    """Return the phase of the run from this checkpoint or snapshot on. InputError: its host state cannot be read."""
    try:
        phase = json.loads(host_file(place).read_text())["phase"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InputError(f"{place} cannot be read ({one_line(error, 200)}): remove it") from None
    require(type(phase) is int, f"{place} has phase {phase!r:.40}, which is no number: remove it")
    return phase


def ended_at(place: Path) -> dict[str, Any]:
    """Return the rules' memory in a checkpoint whose step ended its run as done (``ENDED``); {} for others."""
    try:
        memory = json.loads(host_file(place).read_text())["memory"]
        return memory if memory[ENDED]["step"] == int(place.name) else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):  # a damaged one is passed over later
        return {}


def listed(directory: Path) -> str:
    """List the steps that a run keeps, for people: ``20, 30 and snapshots of 8, 16``."""
    found = {name: ", ".join(map(str, steps_in(directory / name))) for name in (CHECKPOINTS, SNAPSHOTS, BEST)}
    words = {CHECKPOINTS: "", SNAPSHOTS: "snapshots of ", BEST: "the best models of "}
    return " and ".join(words[name] + steps for name, steps in found.items() if steps)


def newest_whole(directory: Path, peers: Peers = ALONE) -> tuple[int | None, str]:
    """Return the newest whole checkpoint of a run, None without any, and a line about the damaged ones. Damaged ones
    are renamed to ``checkpoints/STEP.damaged``, so that their steps can be saved again. ``peers``: processes that call
    this together; each reads a part of the files. InputError: all checkpoints are damaged: they stay where they are.
    """
    damaged = {}
    newest = None
    for step in reversed(peers.first(lambda: steps_in(directory / CHECKPOINTS))):
        faults = peers.gather(fault(directory / CHECKPOINTS / str(step), peers.index, peers.count))
        why = next(filter(None, faults), "")
        if not why:
            newest = step
            break
        damaged[step] = why
    if not damaged:
        return newest, ""
    message = "; ".join(f"{CHECKPOINTS}/{step} is damaged ({why})" for step, why in damaged.items())
    if newest is None:
        snapshots = steps_in(directory / SNAPSHOTS)
        begin = f"--from {directory}@{snapshots[-1]} for a new run from that snapshot, or " if snapshots else ""
        raise InputError(f"{directory} has no whole checkpoint: {message}; take {begin}--fresh to start over")
    peers.first(lambda: [_put_aside(directory / CHECKPOINTS / str(step)) for step in damaged])
    return newest, f"{message}; resuming from {newest}"


def _put_aside(place: Path) -> None:
    names = (f"{place.name}.{DAMAGED}" + (f"-{number}" if number > 1 else "") for number in itertools.count(1))
    aside = next(aside for aside in map(place.with_name, names) if not storage.place(aside).exists())
    if storage.address(place):
        move_step(place, aside)
    else:
        place.rename(aside)


def check_whole(step: Path) -> None:
    """Refuse a checkpoint or snapshot that differs from its checksums. InputError: names the first bad file, and the
    other steps that the run keeps.
    """
    why = fault(step)
    if why:
        run = step.parents[1]
        other_steps = [f"{run}@{number}" for number, place in kept(run).items() if place != step]
        remedy = f"give another: {', '.join(other_steps)}" if other_steps else f"{run} keeps no other"
        raise InputError(f"{step} is damaged ({why}): {remedy}")


def check_writable(directory: Path) -> None:
    """Refuse a run that cannot write its checkpoints, before it computes. InputError: quotes the system's error."""
    if storage.address(directory):  # where the run's lock has been written
        return
    place = directory / CHECKPOINTS
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        raise InputError(
            f"{place} cannot be written ({error.strerror}): make it writable and run the same command again; "
            "existing checkpoints stay as they are"
        ) from error
