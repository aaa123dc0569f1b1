"""Snapshots: models that a run keeps for good, in ``snapshots/STEP``, saved at a reset or a new phase.

A snapshot has only the parameters of every role, and the fingerprint of its weights in place of a frozen base. It is
written as a checkpoint is, and read by the same functions.
"""

import json
from pathlib import Path

from jaxrl_llm.checkpoints.store import Checkpoints, host_file, steps_in
from jaxrl_llm.types import TrainState

CHECKPOINTS, SNAPSHOTS = "checkpoints", "snapshots"


def keep(directory: Path, step: int, state: TrainState, phase: int = 0) -> None:
    """Write ``RUN/snapshots/STEP``; it is complete when this returns.

    ``phase``: the number of the phase that begins with it, or that it is in.

    An existing snapshot of the step, from before the run was resumed at an earlier one, is replaced. No checkpoint
    may be in writing.
    """
    for name in state.roles:
        state = state.with_role(name, opt_state=None)
    with Checkpoints(directory / SNAPSHOTS, None) as snapshots:
        snapshots.save(step, state._replace(frozen={}), {"phase": phase})


def kept(directory: Path) -> dict[int, Path]:
    """Return the directories of the steps that a run keeps, in order; a checkpoint precedes a snapshot of the same
    step."""
    found = {step: directory / SNAPSHOTS / str(step) for step in steps_in(directory / SNAPSHOTS)}
    found |= {step: directory / CHECKPOINTS / str(step) for step in steps_in(directory / CHECKPOINTS)}
    return dict(sorted(found.items()))


def phase_of(place: Path) -> int:
    """Return the phase of the run from this checkpoint or snapshot on; 0 in those of earlier versions."""
    return json.loads(host_file(place).read_text()).get("phase", 0)


def listed(directory: Path) -> str:
    """List the steps that a run keeps, for people: ``20, 30 and snapshots of 8, 16``."""
    checkpoints = ", ".join(map(str, steps_in(directory / CHECKPOINTS)))
    snapshots = ", ".join(map(str, steps_in(directory / SNAPSHOTS)))
    return " and ".join([checkpoints] * bool(checkpoints) + [f"snapshots of {snapshots}"] * bool(snapshots))
