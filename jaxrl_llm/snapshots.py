"""Models that a run keeps for good, in ``snapshots/STEP``: what it was when something began anew.

A snapshot has what models are made of and nothing else: the parameters of every role, and in place of a frozen base the
fingerprint of its weights. It is written as a checkpoint is, and read by the same functions.
"""

import json
from pathlib import Path

from jaxrl_llm.checkpoint import Checkpoints, host_file, steps_in
from jaxrl_llm.types import TrainState

CHECKPOINTS, SNAPSHOTS = "checkpoints", "snapshots"


def models_of(state: TrainState) -> TrainState:
    """The state without optimisers and without what is frozen beside a base."""
    for name in state.roles:
        state = state.with_role(name, opt_state=None)
    return state._replace(frozen={})


def keep(directory: Path, step: int, state: TrainState, phase: int = 0) -> None:
    """Write ``RUN/snapshots/STEP``; it is there, whole, when this returns.

    ``phase``: the number of the one that begins with it, or that it is in.

    One of the same step, of a run that went on from before it, is replaced. No checkpoint may be under way.
    """
    with Checkpoints(directory / SNAPSHOTS, None) as snapshots:
        snapshots.save(step, models_of(state), {"phase": phase})


def kept(directory: Path) -> dict[int, Path]:
    """Where the steps lie that a run keeps, in order; its checkpoints come before its snapshots of the same step."""
    found = {step: directory / SNAPSHOTS / str(step) for step in steps_in(directory / SNAPSHOTS)}
    found |= {step: directory / CHECKPOINTS / str(step) for step in steps_in(directory / CHECKPOINTS)}
    return dict(sorted(found.items()))


def phase_of(place: Path) -> int:
    """The phase that the run is in from this checkpoint or snapshot on; the first in those of old."""
    return json.loads(host_file(place).read_text()).get("phase", 0)


def listed(directory: Path) -> str:
    """The steps that a run keeps, for people: ``20, 30 and snapshots of 8, 16``."""
    checkpoints = ", ".join(map(str, steps_in(directory / CHECKPOINTS)))
    snapshots = ", ".join(map(str, steps_in(directory / SNAPSHOTS)))
    return " and ".join([checkpoints] * bool(checkpoints) + [f"snapshots of {snapshots}"] * bool(snapshots))
