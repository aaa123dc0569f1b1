"""What a run has at hand while it trains, and where it stands: its files, its processes, who hears of its steps."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxrl_llm import config as configs
from jaxrl_llm.checkpoint import Checkpoints, steps_in
from jaxrl_llm.config import Configuration
from jaxrl_llm.recovery import damage
from jaxrl_llm.rules import (
    AGAIN,
    BY_HAND,
    DONE,
    FOUND,
    GUARD,
    LAST,
    LR_SCALE,
    OF_GUARDS,
    OF_PHASES,
    PHASE,
    UNDONE,
    Decision,
    Memory,
)
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.signals import Preemption
from jaxrl_llm.snapshots import CHECKPOINTS, kept, phase_of
from jaxrl_llm.stages.stage import Stage
from jaxrl_llm.step import LoopState
from jaxrl_llm.telemetry.diagnosis.history import ROLLED_BACK
from jaxrl_llm.telemetry.pace import Schedule
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.telemetry.rows import read_rows
from jaxrl_llm.telemetry.voice import Voice
from jaxrl_llm.telemetry.watch import Sight, Watch
from jaxrl_llm.telemetry.writers import RunWriter
from jaxrl_llm.types import TrainState


@dataclasses.dataclass(frozen=True)
class Told:
    """Who hears of a run's steps, and asks for something between them.

    Attributes:
      schedule: when the run tests and saves.
      progress: people.
      writer: the files; None on all processes but the first.
      asked: what people have asked for, as rules read it; the same on every process.
      sight: what guards see, on process 0; None where there are none.
      peers: the run's processes.
    """

    schedule: Schedule
    progress: Progress
    writer: RunWriter | None
    asked: Callable[[], dict[str, Any]]
    sight: Sight | None
    peers: Peers

    def seen(self, row: dict[str, Any]) -> dict[str, Any]:
        """What is found after the step of this row, as rules read it; the same on every process."""
        if self.sight is None:
            return {}
        sight = self.sight
        found = self.peers.first(lambda: [dataclasses.astuple(one) for one in sight.found(row)])
        return {f"{FOUND}{kind}": (began, what, remedy) for kind, began, what, _, remedy in found}

    def went_back(self, row: dict[str, Any]) -> None:
        """The run goes on from an earlier policy, as this row says."""
        if self.sight is not None:
            self.sight.went_back(row)


@dataclasses.dataclass(frozen=True)
class Due:
    """Which steps have a checkpoint however often the run is interrupted: those of its schedule, and those after which
    it went back or into another phase. Rollbacks go to such alone, and no other is kept for long.

    Attributes:
      schedule: the run's.
      moved: the others so far; added to.
    """

    schedule: Schedule
    moved: set[int]

    def __call__(self, step: int) -> bool:
        """Whether this one has."""
        return self.schedule.saves(step) or step in self.moved


def due_of(schedule: Schedule, directory: Path, start: int | None, peers: Peers) -> Due:
    """The same, of a run that goes on from the checkpoint of this step; None where it is new."""

    def moved() -> list[int]:
        rows = read_rows(directory / "metrics.jsonl", (PHASE, ROLLED_BACK)) if start else ()
        return [row["step"] for row in rows if (PHASE in row or ROLLED_BACK in row) and row["step"] <= start]

    return Due(schedule, set(peers.first(moved)))


@dataclasses.dataclass(frozen=True)
class Place:
    """What stays while a run goes through its phases.

    Attributes:
      run: its settings.
      directory: its own.
      store: of checkpoints.
      mesh: of its devices.
      peers: its processes.
      told: who hears of its steps.
      due: which steps have a checkpoint.
      stop: whether it was asked to.
    """

    run: Configuration
    directory: Path
    store: Checkpoints
    mesh: Any
    peers: Peers
    told: Told
    due: Due
    stop: Preemption


@dataclasses.dataclass
class At:
    """Where a run is.

    Attributes:
      stage: makes the steps of its phase.
      state: on the devices.
      host: beside it.
      step: the last one that is made.
      row: what the next row begins with.
      code: of the exit, once it ends.
      last_words: why it ends before its steps are made; empty where it does not.
      goes_on: whether another phase begins.
    """

    stage: Stage
    state: TrainState
    host: LoopState
    step: int
    row: dict[str, Any]
    code: int = DONE
    last_words: str = ""
    goes_on: bool = False


def go_back(place: Place, at: At, decision: Decision) -> Decision:
    """Go on from the newest whole checkpoint of this phase from before the step that a guard names; returns the
    decision with what came of it, which is to stop where there is none.

    Data goes on where it is, and updates are counted on: no policy has the version of another. Groups of the policy
    that is left are let go, and rules remember what they did then (see ``remembered``).
    """
    place.store.wait()
    folder = place.directory / CHECKPOINTS
    step = place.peers.first(lambda: newest_before(folder, decision.rollback, at.host.phase, place.due))
    if step is None:
        reason = f"{decision.reason}; {why_not_back(place, decision.rollback, at.host.phase)}"
        return Decision(GUARD, reason, events={"event/guard": decision.reason})
    updates = {name: role.updates for name, role in at.state.roles.items()}
    base = at.state.policy.base
    like = jax.eval_shape(lambda x: x, at.state)
    left = at.state.with_role("policy", base=None)
    for name in updates:
        left = left.with_role(name, updates=None)
    for array in jax.tree.leaves(left):
        array.delete()  # there need not be room for both
    state, saved = place.store.restore(step, like, place.mesh, base)
    for name, count in updates.items():
        state = state.with_role(name, updates=count)
    at.state = state
    host = at.host
    then = LoopState.from_json(saved, at.stage.records)
    host.coefficients = dict(at.stage.coefficients) | then.coefficients
    host.memory = remembered(then.memory, host.memory, at.step + 1 - step)
    host.left = at.stage.let_go(host.left if host.ready is None else host.ready.left)
    host.ready = None
    said = f"to step {step}, with {decision.coefficients[LR_SCALE]:g} times the learning rate: {decision.reason}"
    events = decision.events | {"event/rollback": said, ROLLED_BACK: step}
    return dataclasses.replace(decision, events=events)


def why_not_back(place: Place, step: int, phase: int) -> str:
    """Why there is no checkpoint from before this step to go back to."""
    begun = min((number for number, found in kept(place.directory).items() if phase_of(found) == phase), default=0)
    if phase and step <= begun:
        return f"this phase began after step {begun}, and no run goes back into an earlier one"
    which = " of this phase" * (len(configs.phases_of(place.run)) > 1)
    return f"no checkpoint{which} from before it is kept to go back to: set --output.keep higher"


def newest_before(checkpoints: Path, step: int, phase: int, due: Callable[[int], bool]) -> int | None:
    """The newest whole checkpoint from before a step in which the run was in this phase, of those that are ``due``;
    None where there is none."""
    found = [number for number in steps_in(checkpoints) if number < step and due(number)]
    whole = (
        number
        for number in reversed(found)
        if phase_of(checkpoints / str(number)) == phase and not damage(checkpoints / str(number))
    )
    return next(whole, None)


def remembered(then: Memory, now: Memory, undone: int) -> Memory:
    """What rules remember once a run has gone back so many steps: what they did then, and of now what goes on. The
    reference is as old as it was, and what was asked for by hand since is still to come."""
    goes_on = {name: now[name] for name in (OF_GUARDS,) if name in now}
    phase = {OF_PHASES: then.get(OF_PHASES, {}) | {"steps": now[OF_PHASES]["steps"]}} if OF_PHASES in now else {}
    last = then.get(LAST, {})
    age = {LAST: last | {UNDONE: last.get(UNDONE, 0) + undone}}
    asked = now.get(BY_HAND, {})
    again = {BY_HAND: asked | {AGAIN: True}} if asked.get("id") != then.get(BY_HAND, {}).get("id") else {}
    return then | goes_on | phase | age | again


def writing(
    run: Configuration, directory: Path, resumed_at: int | None, peers: Peers, voice: Voice
) -> AbstractContextManager[RunWriter | None]:
    """The run's records, on process 0; the others write none."""
    if not peers.leads:
        return nullcontext()
    return RunWriter(directory, resumed_at, run.output.tensorboard, run.output.wandb, configs.to_json(run), voice.rows)


def watching(directory: Path, schedule: Schedule, start: int | None, peers: Peers, quiet: bool) -> Progress:
    """What a person sees, on process 0; the others say nothing, and look for nothing.

    ``start``: the step that the run goes on from; its rows up to there are part of what is watched.
    ``quiet``: show warnings alone.
    """
    if not peers.leads:
        return Progress(schedule, (start or 0) + 1, Console(quiet=True))
    earlier = () if start is None else (row for row in read_rows(directory / "metrics.jsonl") if row["step"] <= start)
    return Progress(schedule, (start or 0) + 1, watch=Watch(schedule.steps, earlier), quiet=quiet)


def sight_of(run: Configuration, directory: Path, start: int | None) -> Sight | None:
    """What the run's guards see, with the rows up to the step that it goes on from; None where it has no guards."""
    if not configs.rules_of_run(run).guards:
        return None
    earlier = (row for row in read_rows(directory / "metrics.jsonl") if row["step"] <= start) if start else ()
    return Sight(run.steps, earlier)
