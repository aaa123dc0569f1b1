"""The training loop: a run is a sequence of phases, and a phase is a loop of steps. A stage makes the steps, rules
decide between them; this module evaluates, applies decisions, records and saves.
"""

import contextlib
import dataclasses
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
from jaxrl_llm.config.origin import recorded_best
from jaxrl_llm.errors import InputError, Stopped
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rules import DONE, FOUND, GUARD, Decision, decide
from jaxrl_llm.rules.guards import ENDED, EVENT_ENDED
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.sharding.mesh import all_devices, check_dtype
from jaxrl_llm.stages import stage_of
from jaxrl_llm.system.paths import PROFILE
from jaxrl_llm.system.signals import PREEMPTED, Preemption, on_exit
from jaxrl_llm.telemetry import Verbosity
from jaxrl_llm.telemetry.progress import SAVE
from jaxrl_llm.telemetry.records import record_step
from jaxrl_llm.trainer.state import (
    Cursor,
    LoopState,
    RunContext,
    apply_resets,
    load_phase,
    next_phase,
    open_context,
    read_reset_request,
    remove_old_best,
    remove_settled,
    roll_back,
    write_step_progress,
)
from jaxrl_llm.types import TrainState

RESUME_HINT = "run the same command again to resume"


def train(
    run: configs.Configuration,
    directory: Path,
    say: Callable[[str], None],
    peers: Peers = ALONE,
    weights: configs.Start | None = None,
    voice: Verbosity = Verbosity(),
) -> int:
    """Train, or resume from the directory's newest whole checkpoint; return the exit code. Every process makes the same
    decisions from the same numbers; values of one process (a file, a signal, a score) come through ``peers``. Only
    process 0 writes and prints. ``run``: validated. ``directory``: made by the caller, with config.json in it. ``say``:
    prints a line that should stay visible. ``weights``: the step of another run with the first weights; None for the
    model's own. ``voice``: how much is printed on the way.
    """
    phases = range(len(configs.phases_of(run)))
    devices = all_devices()
    for number in phases:
        settings = configs.in_phase(run, number)
        check_dtype(settings.learner.compute.dtype, devices[0])
        configs.validate_on_devices(settings, len(devices), peers.count)
    start, first_phase, resume_events = resume_point(run, directory, peers, say)
    with (
        open_context(run, directory, start, bool(resume_events), weights, peers, voice) as context,
        contextlib.ExitStack() as stack,
    ):
        cursor = ending = None
        for number in phases[first_phase:]:
            settings = configs.in_phase(run, number)
            with (
                stage_of(settings).resources(settings, peers, directory) as resources,
                on_exit(lambda *reason, resources=resources: resources.close()),
            ):
                cursor = load_phase(context, number, cursor, resources)
                if number == first_phase:
                    cursor.row = resume_events
                    begin_steps(context, cursor)
                    stack.enter_context(context.stop)  # from here on there is a step to finish
                ending = run_phase(context, cursor)
            if ending is not None:
                break
        context.store.close()
        if peers.leads:
            remove_settled(directory, cursor.host.memory)
            remove_old_best(directory)
    code, reason = ending
    if reason:
        say(reason)
    return code


def resume_point(
    run: configs.Configuration, directory: Path, peers: Peers, say: Callable[[str], None]
) -> tuple[int | None, int, dict[str, Any]]:
    """Return the step of the checkpoint to resume from (None without one), the number of its phase, and the entries in
    the row of the next step that record the resumption (empty for a new run). InputError: none of its checkpoints is
    whole, or no other could be written.
    """

    peers.first(lambda: snapshots.check_writable(directory))
    start, passed_over = snapshots.newest_whole(directory, peers)

    def look() -> tuple[int, bool, str]:
        phased = start is not None and len(configs.phases_of(run)) > 1
        phase = snapshots.phase_of(snapshots.kept(directory)[start]) if phased else 0
        has_rows = (directory / "metrics.jsonl").exists()
        return phase, has_rows, configs.changed_since(directory, start)

    phase, has_rows, changed = peers.first(look)
    if passed_over:
        say(passed_over)
    settings = {"event/settings": changed} if changed else {}
    return start, phase, {"event/resumed": passed_over or True} | settings if start is not None or has_rows else {}


def begin_steps(context: RunContext, cursor: Cursor) -> None:
    """Begin to show progress. A new run is evaluated as row 0, which the rules remember; they decide nothing yet."""
    progress, row = context.progress, {"step": 0}
    progress.begin()
    if context.peers.count == 1:
        cursor.stage.compile_ahead(cursor.state, cursor.host.coefficients)
    if context.start is None:
        answers = evaluate(context, cursor, row, first=True)
        _, cursor.host.memory = decide(cursor.stage.rules, row, cursor.host.memory)
        progress.show_events(0, row)
        record_step(context.writer, 0, row, evaluation_rows=answers)
    if line := progress.compiling.slower(progress.at):
        progress.note(line)


def run_phase(context: RunContext, cursor: Cursor) -> tuple[int, str] | None:
    """Make, evaluate, record and save steps, moving ``cursor``, until a rule ends the phase or the run ends. Returns
    None when the next phase begins; otherwise the exit code and the reason for ending early, which is empty if all
    steps were made.
    """
    run, stage, last_save = context.run, cursor.stage, time.monotonic()
    for step in range(cursor.step + 1, run.steps + 1):
        step_began, answers = time.perf_counter(), None
        host_before, updates_before = dataclasses.replace(cursor.host), count_updates(cursor.state)
        try:
            with profile_step(context, step):
                cursor.state, cursor.host.carry, row, groups, lines, common = stage.step(
                    cursor.state, cursor.host.carry, cursor.host.coefficients, step, context.must_stop
                )
                if row is None:  # it had to stop before its updates
                    save_partial(context, cursor)
                    return PREEMPTED, f"stopped within step {step}, state and samples saved: {RESUME_HINT}"
                row |= cursor.host.coefficients | {"step": step} | cursor.row
                row["time/step_s"] = time.perf_counter() - step_began
                row |= context.progress.compiling.take()
                context.update_s = row["time/update_s"]
                context.progress.step(row)
                if context.schedule.evaluates(step):
                    answers = evaluate(context, cursor, row)
                decision = decide_after(context, cursor, row)
                better = answers is not None and decision.rollback is None and keep_if_best(context, cursor, row)
                cursor.state = apply_resets(decision, cursor.state, cursor.settings)
                cursor.host.coefficients = cursor.host.coefficients | decision.coefficients
                row |= decision.events
                context.progress.show_events(step, row, groups)
                row |= {EVENT_ENDED: decision.reason} if decision.stop == DONE else {}
                record_step(context.writer, step, row, lines, answers)
                cursor.row, cursor.step = {}, step
                if better and context.peers.leads:
                    remove_old_best(context.directory)
        except InputError as error:
            return save_after_failure(context, cursor, host_before, updates_before, f"step {step}: {error}")
        stop_requested = agreed_to_stop(context.peers, context.stop, step, common, row)
        if decision.next_phase:
            cursor.state = next_phase(run, stage, cursor.state, cursor.host)
        if save(context, cursor, decision, stop_requested, last_save):
            last_save = time.monotonic()
        if decision.stop is not None:
            return decision.stop, stop_message(context.directory, step, decision)
        if stop_requested and step < run.steps:
            return PREEMPTED, f"stopped after step {step}, state saved: {RESUME_HINT}"
        if decision.next_phase and step < run.steps:
            return None
    return DONE, ""


def evaluate(
    context: RunContext, cursor: Cursor, row: dict[str, Any], first: bool = False
) -> list[dict[str, Any]] | None:
    """Evaluate the model, add the metrics to the row, and return the answers to write down; None without a test.
    InputError: it is the first evaluation, and no answer of a task could be scored.
    """
    began = time.perf_counter()
    tested = cursor.stage.evaluate(model_of(cursor.state), first)
    if tested is not None:
        if first:
            tested.check()
        row |= tested.metrics() | {"time/evaluation_s": time.perf_counter() - began}
    if tested is not None or first:
        context.progress.show_evaluation(row["step"], row)
    return None if tested is None else tested.lines()


def decide_after(context: RunContext, cursor: Cursor, row: dict[str, Any]) -> Decision:
    """Return the decision of the rules after a step, and update their memory; a rollback is made at once."""

    def requests() -> dict[str, Any]:
        findings = [] if context.tracker is None else context.tracker.found(row)
        by_kind = {f"{FOUND}{finding.kind}": [finding.step, finding.what, finding.remedy] for finding in findings}
        return read_reset_request(context.directory) | by_kind

    # The requests and findings of process 0 are those of all.
    decision, cursor.host.memory = decide(cursor.stage.rules, row | context.peers.first(requests), cursor.host.memory)
    if decision.rollback is not None:
        decision = roll_back(context, cursor, decision)
        if context.tracker is not None:
            context.tracker.take(decision.events)
    if decision.stop == DONE:
        cursor.host.memory[ENDED] = {"step": row["step"], "rule": decision.rule, "reason": decision.reason}
    return decision


def keep_if_best(context: RunContext, cursor: Cursor, row: dict[str, Any]) -> bool:
    """Keep the model if this row has the best evaluation so far and the run keeps the best; return whether it has. On
    disk the snapshot is complete first, then the row is written, and only then is the older best one removed.
    """
    step, directory = row["step"], context.directory
    if not context.run.output.keep_best or not context.peers.first(lambda: recorded_best(directory, row) == step):
        return False
    context.progress.status("saving")
    context.store.wait()
    snapshots.keep(directory, step, cursor.state, cursor.host.phase, snapshots.BEST)
    return True


def save(context: RunContext, cursor: Cursor, decision: Decision, stop_requested: bool, last_save: float) -> bool:
    """Save what is due after a step, or at the start of the next phase: a snapshot, a checkpoint; return whether a
    checkpoint was begun. ``decision``: after the step. ``stop_requested``: whether the run was asked to stop.
    ``last_save``: time of the last checkpoint, by the monotonic clock of process 0.
    """
    step, store, schedule = cursor.step, context.store, context.schedule
    minutes = context.peers.first(lambda: (time.monotonic() - last_save) / 60)
    overdue = 0 < context.run.output.checkpoint_minutes <= minutes
    if decision.snapshot:
        store.wait()  # it is whole before the checkpoint of the step is begun
        snapshots.keep(context.directory, step, cursor.state, cursor.host.phase)
    if context.peers.leads:
        remove_settled(context.directory, cursor.host.memory)
    if decision.next_phase or decision.rollback is not None:
        schedule.moved.add(step)  # which makes a checkpoint due
    due = schedule.saves(step) or decision.stop is not None or stop_requested or overdue
    if due:
        context.progress.status("saving")
        store.save(step, cursor.state, vars(cursor.host), cursor.stage.records)
        context.progress.pace.took(SAVE)
    return due


def stop_message(directory: Path, step: int, decision: Decision) -> str:
    """Return why a rule has stopped the run after this step, and the command that may help."""
    name = shlex.quote(str(directory))
    more = f"; resume from it with jaxrl-llm train {name} --from {name} {decision.remedy}" if decision.remedy else ""
    return f"step {step}: {decision.reason}{more}"


def count_updates(state: TrainState) -> list[int]:
    """Return the number of updates of each role."""
    return [int(role.updates) for role in state.roles.values()]


def save_after_failure(
    context: RunContext, cursor: Cursor, host: LoopState, updates: list[int], reason: str
) -> tuple[int, str]:
    """Save the state before a step that failed, if no update has replaced it; return the exit code, and why it ends.
    ``cursor``: as the step has left it. ``host``, ``updates``: as before it. ``reason``: of the failure. Stopped: the
    run has several processes, of which the others may not be there to save.
    """
    intact = not any(x.is_deleted() for x in jax.tree.leaves(cursor.state)) and updates == count_updates(cursor.state)
    message = f"{reason}; the steps since its last checkpoint are lost: {RESUME_HINT}"
    if context.peers.count > 1:
        raise Stopped(message)
    if not intact:
        return GUARD, message
    cursor.host = host
    save_partial(context, cursor)
    return GUARD, f"{reason}; state saved: {RESUME_HINT}"


@contextlib.contextmanager
def profile_step(context: RunContext, step: int) -> Generator[None]:
    """Write a trace of the step in which JAX's profiler shall run; each host writes its own."""
    if step != context.run.output.profile:
        yield
        return
    with jax.profiler.trace(context.directory / PROFILE):
        yield


def save_partial(context: RunContext, cursor: Cursor) -> None:
    """Save the state before a step that was begun, and what it carries so far: as a checkpoint, or, if that state has
    one already, beside it.
    """
    store, records = context.store, cursor.stage.records
    context.progress.status("saving")
    store.wait()
    if context.peers.first(lambda: cursor.step in steps_in(context.directory / snapshots.CHECKPOINTS)):
        if context.peers.leads:
            write_step_progress(context.directory, cursor.step, codec.to_json(vars(cursor.host), records))
    else:
        store.save(cursor.step, cursor.state, vars(cursor.host), records)


def agreed_to_stop(
    peers: Peers, stop: Preemption, step: int, common: Iterable[np.ndarray], row: dict[str, Any]
) -> bool:
    """Whether any process was asked to stop after this step; ``common``: arrays that must be equal on all processes.
    Disagreement: the processes have sampled, scored or learned differently.
    """
    learned = repr([row.get(name) for name in ("loss", "grad_norm", "kl_coef", "critic/loss")])
    peers.check_same(f"samples, scores or gradients in step {step}", codec.digest_of_parts([learned, *common]))
    return any(peers.gather(stop.asked))
