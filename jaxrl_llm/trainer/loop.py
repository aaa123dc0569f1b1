"""The training loop: a run is a sequence of segments, and a segment is load, steps, ending.

A step is in ``step``, the load in ``segment``; batches come from ``stages``, decisions from ``rules``.
"""

import contextlib
import dataclasses
import hashlib
import shlex
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import codec
from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints import snapshots
from jaxrl_llm.checkpoints.store import steps_in
from jaxrl_llm.errors import InputError, Stopped
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rules import DONE, GUARD, decide
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.sharding.mesh import all_devices
from jaxrl_llm.stages import stage_of
from jaxrl_llm.system.paths import PROFILE
from jaxrl_llm.system.signals import PREEMPTED, Preemption, on_exit
from jaxrl_llm.telemetry import Verbosity
from jaxrl_llm.telemetry.progress import SAVE
from jaxrl_llm.telemetry.records import record
from jaxrl_llm.trainer.context import Cursor, LoopState, RunContext, forget_best, forget_settled, keep_underway, opened
from jaxrl_llm.trainer.segment import load
from jaxrl_llm.trainer.step import make_step, next_phase
from jaxrl_llm.types import TrainState

AGAIN = "run the same command again to resume"


def train(
    run: configs.Configuration,
    directory: Path,
    say: Callable[[str], None],
    peers: Peers = ALONE,
    weights: configs.Start | None = None,
    voice: Verbosity = Verbosity(),
) -> int:
    """Train, or resume from the directory's newest whole checkpoint; return the exit code.

    Every process makes the same decisions from the same numbers; values of one process (a file, a signal, a
    score) come through ``peers``. Only process 0 writes and prints.

    Args:
      run: validated.
      directory: the run's; made by the caller, with config.json in it.
      say: prints a line that should stay visible.
      peers: the other processes of the run.
      weights: the step of another run with the first weights; None for the model's own.
      voice: how much is printed on the way.
    """
    phases = range(len(configs.phases_of(run)))
    devices = len(all_devices())
    for number in phases:
        configs.validate_on_devices(configs.in_phase(run, number), devices, peers.count)
    start, first, row = resume_point(run, directory, peers, say)
    with opened(run, directory, start, bool(row), weights, peers, voice) as context, contextlib.ExitStack() as stack:
        cursor = ending = None
        for number in phases[first:]:
            settings = configs.in_phase(run, number)
            with (
                stage_of(settings).resources(settings, peers, directory) as resources,
                on_exit(lambda *reason, resources=resources: resources.close()),
            ):
                cursor = load(context, number, cursor, resources)
                if number == first:
                    cursor.row = row
                    before_steps(context, cursor)
                    stack.enter_context(context.stop)  # from here on there is a step to finish
                ending = make_steps(context, cursor)
            if ending is not None:
                break
        context.store.close()
        if peers.leads:
            forget_settled(directory, cursor.host.memory)
            forget_best(directory)
    code, reason = ending
    if reason:
        say(reason)
    return code


def resume_point(
    run: configs.Configuration, directory: Path, peers: Peers, say: Callable[[str], None]
) -> tuple[int | None, int, dict[str, Any]]:
    """Return the step of the checkpoint to resume from (None without one), the number of its phase, and the entries in
    the row of the next step that record the resumption (empty for a new run).

    Raises:
      InputError: none of its checkpoints is whole, or no other could be written.
    """

    peers.first(lambda: snapshots.check_writable(directory))
    start, passed_over = snapshots.newest_whole(directory, peers)

    def look() -> tuple[int, bool, str]:
        phased = start is not None and len(configs.phases_of(run)) > 1
        phase = snapshots.phase_of(snapshots.kept(directory)[start]) if phased else 0
        begun = (directory / "metrics.jsonl").exists()
        return phase, begun, configs.changed_since(directory, start)

    phase, begun, changed = peers.first(look)
    if passed_over:
        say(passed_over)
    told = {"event/settings": changed} if changed else {}
    return start, phase, {"event/resumed": passed_over or True} | told if start is not None or begun else {}


def before_steps(context: RunContext, cursor: Cursor) -> None:
    """Announce the steps. A run without a checkpoint is evaluated first: row 0, which rules may remember."""
    progress, stage, host = context.progress, cursor.stage, cursor.host
    progress.begin()
    if context.start is None:
        began = time.perf_counter()
        found = stage.test(model_of(cursor.state), first=True)
        row: dict[str, Any] = {"step": 0}
        if found is not None:
            found.check()
            row |= found.metrics() | {"time/evaluation_s": time.perf_counter() - began}
        progress.tested(0, row)
        _, host.memory = decide(stage.rules, row, host.memory)
        progress.happened(0, row)
        record(context.writer, 0, row, answered=None if found is None else found.lines())
    if line := progress.compiling.slower(progress.at):
        progress.note(line)


def make_steps(context: RunContext, cursor: Cursor) -> tuple[int, str] | None:
    """Make and save a phase's steps, moving ``cursor``.

    Returns None if the next phase begins; else the exit code, and why the run ends before its steps are made, or "".
    """
    run, directory, store, schedule = context.run, context.directory, context.store, context.schedule
    saved = time.monotonic()
    for step in range(cursor.step + 1, run.steps + 1):
        host, updates = dataclasses.replace(cursor.host), updates_of(cursor.state)
        try:
            with profiled(context, step):
                made = make_step(context, cursor, step)
        except InputError as error:
            return broken_off(context, cursor, host, updates, f"step {step}: {error}")
        if made is None:
            save_underway(context, cursor)
            return PREEMPTED, f"stopped within step {step}, state and samples saved: {AGAIN}"
        row, batch, decision = made
        asked = agreed_to_stop(context.peers, context.stop, step, batch.common, row)
        minutes = context.peers.first(lambda since=saved: (time.monotonic() - since) / 60)
        overdue = 0 < run.output.checkpoint_minutes <= minutes
        if decision.next_phase:
            cursor.state = next_phase(run, cursor.stage, cursor.state, cursor.host)
        if decision.snapshot:
            store.wait()  # it is whole before the checkpoint of the step is begun
            snapshots.keep(directory, step, cursor.state, cursor.host.phase)
        if context.peers.leads:
            forget_settled(directory, cursor.host.memory)
        if decision.next_phase or decision.rollback is not None:
            schedule.moved.add(step)
        if schedule.saves(step) or decision.stop is not None or asked or overdue:
            saved = time.monotonic()
            context.progress.status("saving")
            store.save(step, cursor.state, vars(cursor.host), cursor.stage.records)
            context.progress.pace.took(SAVE)
        if decision.stop is not None:
            words = f"step {step}: {decision.reason}"
            if decision.remedy:
                name = shlex.quote(str(directory))
                words += f"; resume from it with jaxrl-llm train {name} --from {name} {decision.remedy}"
            return decision.stop, words
        if asked and step < run.steps:
            return PREEMPTED, f"stopped after step {step}, state saved: {AGAIN}"
        if decision.next_phase and step < run.steps:
            return None
    return DONE, ""


def updates_of(state: TrainState) -> list[int]:
    """Return the number of updates of each role."""
    return [int(role.updates) for role in state.roles.values()]


def broken_off(
    context: RunContext, cursor: Cursor, host: LoopState, updates: list[int], reason: str
) -> tuple[int, str]:
    """Save the state before a step that failed, if no update has replaced it; return the exit code, and why it ends.

    Args:
      context: of the run.
      cursor: as the step has left it.
      host, updates: as they were before the step.
      reason: of the failure.

    Raises:
      Stopped: the run has several processes, of which the others may not be there to save.
    """
    there = not any(x.is_deleted() for x in jax.tree.leaves(cursor.state)) and updates == updates_of(cursor.state)
    lost = f"{reason}; the steps since its last checkpoint are lost: {AGAIN}"
    if context.peers.count > 1:
        raise Stopped(lost)
    if not there:
        return GUARD, lost
    cursor.host = host
    save_underway(context, cursor)
    return GUARD, f"{reason}; state saved: {AGAIN}"


@contextlib.contextmanager
def profiled(context: RunContext, step: int) -> Generator[None]:
    """Write a trace of the step in which JAX's profiler shall run; each host writes its own."""
    if step != context.run.output.profile:
        yield
        return
    with jax.profiler.trace(context.directory / PROFILE):
        yield


def save_underway(context: RunContext, cursor: Cursor) -> None:
    """Save the state before a step that was begun, with its samples so far: as a checkpoint, or, if that step has one
    already, beside it."""
    store, records = context.store, cursor.stage.records
    context.progress.status("saving")
    store.wait()
    if context.peers.first(lambda: cursor.step in steps_in(context.directory / snapshots.CHECKPOINTS)):
        if context.peers.leads:
            keep_underway(context.directory, cursor.step, codec.to_json(vars(cursor.host), records))
    else:
        store.save(cursor.step, cursor.state, vars(cursor.host), records)


def agreed_to_stop(
    peers: Peers, stop: Preemption, step: int, common: Iterable[np.ndarray], row: dict[str, Any]
) -> bool:
    """Whether any process was asked to stop after this step; ``common``: arrays that must be equal on all processes.

    Raises:
      Disagreement: the processes have sampled, scored or learned differently.
    """
    learned = hashlib.sha256(repr([row.get(name) for name in ("loss", "grad_norm", "kl_coef", "critic/loss")]).encode())
    for array in common:
        learned.update(array.tobytes())
    peers.check_same(f"samples, scores or gradients in step {step}", learned.hexdigest()[:16])
    return any(peers.gather(stop.asked))
