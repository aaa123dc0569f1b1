"""The loop: next batch, learn, evaluate, decide, record, save. What a step does is in ``step``,
where its batch comes from in ``stages``, what is decided in ``rules``.
"""

import functools
import hashlib
import shlex
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm import requests, snapshots
from jaxrl_llm.begin import load, load_phase
from jaxrl_llm.checkpoint import Checkpoints
from jaxrl_llm.config import Configuration, Start
from jaxrl_llm.models.lora import policy_model
from jaxrl_llm.recovery import check_writable, newest_whole
from jaxrl_llm.rules import DONE, Decision, decide
from jaxrl_llm.session import At, Place, Told, due_of, go_back, sight_of, watching, writing
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.signals import PREEMPTED, Preemption, farewell
from jaxrl_llm.stages import stage_of
from jaxrl_llm.stages.stage import Batch, Stage
from jaxrl_llm.step import LoopState, apply, next_phase, take_step, written_down
from jaxrl_llm.telemetry.logs import logged
from jaxrl_llm.telemetry.pace import SAVE, Schedule
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.telemetry.records import Learned, record
from jaxrl_llm.telemetry.voice import Voice
from jaxrl_llm.types import TrainState


def train(
    run: Configuration,
    directory: Path,
    say: Callable[[str], None],
    peers: Peers = ALONE,
    weights: Start | None = None,
    voice: Voice = Voice(),
) -> int:
    """Train, or go on where the directory's newest checkpoint stands; returns the exit code.

    Every process makes the same decisions from the same numbers; what only one of them knows (a file, a signal, a
    score) comes through ``peers``. Process 0 alone writes and speaks.

    Args:
      run: validated.
      directory: the run's; made by the caller, with config.json in it.
      say: prints a line that should stay visible.
      peers: the other processes of the run.
      weights: whose the first ones are; None for the model's own.
      voice: how much is said on the way.
    """
    for number in range(len(configs.phases_of(run))):
        configs.validate_on_devices(configs.in_phase(run, number), jax.device_count(), peers.count)
    mesh = make_mesh(run.mesh)
    start, first = going_on(directory, peers, say)
    due = due_of(Schedule(run.steps, run.evaluation.every, run.output.checkpoint_every), directory, start, peers)
    store = Checkpoints(directory / snapshots.CHECKPOINTS, run.output.keep, due)
    with (
        store,
        jax.set_mesh(mesh),
        logged(directory / "log.txt") if peers.leads else nullcontext(),
        watching(directory, due.schedule, start, peers, voice.quiet) as progress,
        writing(run, directory, (-1 if start is None else start) if first else None, peers, voice) as writer,
        ExitStack() as stack,
    ):
        asked = functools.partial(peers.first, functools.partial(requests.asked, directory))
        told = Told(due.schedule, progress, writer, asked, sight_of(run, directory, start), peers)
        place = Place(run, directory, store, mesh, peers, told, due, Preemption(progress.warn))
        at = None
        number = phase_at(run, directory, start, peers)
        while at is None or at.goes_on:
            settings = configs.in_phase(run, number if at is None else at.host.phase)
            with (
                stage_of(settings).resources(settings, peers, directory) as resources,
                farewell(lambda *reason, resources=resources: resources.close()),
            ):
                if at is None:
                    *begun, tokenizer = load(run, number, mesh, store, start, resources, progress, peers, weights)
                    before_steps(*begun, told, start is None)
                    stack.enter_context(place.stop)  # from here on there is a step to finish
                    at = At(*begun, start or 0, first)
                    del begun  # a stage has its sampler's cache, and the next phase needs the room
                else:
                    at.stage = load_phase(run, at.state, at.host, tokenizer, mesh, resources, progress, peers)
                make_steps(place, settings, at)
        store.close()
        settle(peers, directory, at.host)
    if at.last_words:
        say(at.last_words)
    return at.code


def phase_at(run: Configuration, directory: Path, start: int | None, peers: Peers) -> int:
    """The number of the phase in which the run goes on from the checkpoint of this step; the first where it is new."""
    if start is None or len(configs.phases_of(run)) == 1:
        return 0
    return peers.first(lambda: snapshots.phase_of(snapshots.kept(directory)[start]))


def make_steps(place: Place, settings: Configuration, at: At) -> None:
    """The steps of one phase, up to its end or that of the run; ``at`` moves with them.

    ``settings``: those of the phase.
    """
    run, directory, peers, told = place.run, place.directory, place.peers, place.told
    at.goes_on = False
    for step in range(at.step + 1, run.steps + 1):
        row, batch, decision = make_step(place, settings, at, step)
        at.row = {}
        at.step = step
        asked = agreed_to_stop(peers, place.stop, step, batch.common, row)
        records = at.stage.records
        if decision.next_phase:
            at.state = next_phase(run, at.stage, at.state, at.host)
        keep_models(decision, place.store, directory, step, at.state, at.host.phase)
        settle(peers, directory, at.host)
        moved = decision.next_phase or decision.rollback is not None
        if moved:
            place.due.moved.add(step)
        if place.due(step) or decision.stop is not None or asked:
            save(place.store, step, at.state, at.host.to_json(records, packed=False), told.progress)
        at.code, at.last_words = ending(decision, asked and step < run.steps, step, directory)
        if at.last_words or decision.next_phase:
            at.goes_on = not at.last_words and step < run.steps
            return


def going_on(directory: Path, peers: Peers, say: Callable[[str], None]) -> tuple[int | None, dict[str, Any]]:
    """The step whose checkpoint the run goes on from, None where it has none, and what the row of its next step says of
    that: nothing where the run is new.

    Raises:
      InputError: none of its checkpoints is whole, or no other could be written.
    """

    def look() -> tuple[int | None, str, bool]:
        check_writable(directory)
        return *newest_whole(directory), (directory / "metrics.jsonl").exists()

    start, passed_over, begun = peers.first(look)
    if passed_over:
        say(passed_over)
    return start, {"event/resumed": passed_over or True} if start is not None or begun else {}


def before_steps(stage: Stage, state: TrainState, host: LoopState, told: Told, new: bool) -> None:
    """Say what is to come; a ``new`` run is evaluated first."""
    told.progress.begin()
    if new:
        test_first(stage, state, host, told)
    if line := told.progress.compiling.slower(told.progress.now.step):
        told.progress.note(line)


def test_first(stage: Stage, state: TrainState, host: LoopState, told: Told) -> None:
    """The evaluation before training: row 0, which rules may remember."""
    began = time.perf_counter()
    found = stage.test_first(policy_model(state))
    row: dict[str, Any] = {"step": 0}
    if found is not None:
        row |= found.metrics() | {"time/evaluation_s": time.perf_counter() - began}
    told.progress.tested(0, row)
    _, host.memory = decide(stage.rules, row, host.memory)
    told.progress.happened(0, row)
    record(told.writer, 0, found, row)


def make_step(place: Place, settings: Configuration, at: At, step: int) -> tuple[dict[str, Any], Batch, Decision]:
    """Make a batch, learn, evaluate, decide, record; ``at`` has the state after what was decided.

    Args:
      place: what stays.
      settings: of the phase.
      at: where the run is.
      step: the one to make.

    Returns:
      The whole row, the batch, and the decision.
    """
    stage, host, told = at.stage, at.host, place.told
    began = time.perf_counter()
    told.progress.status("sampling")
    at.state, measured, batch, samples = take_step(stage, settings, at.state, host, step, told.progress.status)
    row = measured | {"step": step} | at.row
    row["time/step_s"] = time.perf_counter() - began
    told.progress.step(row)

    found = stage.test(policy_model(at.state)) if told.schedule.evaluates(step) else None
    if found is not None:
        row |= found.metrics() | {"time/evaluation_s": time.perf_counter() - began - row["time/step_s"]}
        told.progress.tested(step, row)

    decision, host.memory = decide(stage.rules, row | told.asked() | told.seen(row), host.memory)
    if decision.rollback is not None:
        decision = go_back(place, at, decision)
        told.went_back(decision.events)
    at.state = apply(decision, at.state, settings)
    host.coefficients |= decision.coefficients
    row |= decision.events
    told.progress.happened(step, row, batch.examples)
    examples = written_down(batch, settings.output.samples, step)
    record(told.writer, step, found, row, Learned(examples, samples, stage.spell))
    return row, batch, decision


def keep_models(
    decision: Decision, store: Checkpoints, directory: Path, step: int, state: TrainState, phase: int
) -> None:
    """Write the snapshot of this step where one is decided: whole before the checkpoint of the step is begun."""
    if decision.snapshot:
        store.wait()
        snapshots.keep(directory, step, state, phase)


def save(store: Checkpoints, step: int, state: TrainState, host: dict[str, Any], progress: Progress) -> None:
    """Begin to write a checkpoint."""
    progress.status("saving")
    store.save(step, state, host)
    progress.pace.took(SAVE)


def settle(peers: Peers, directory: Path, host: LoopState) -> None:
    """Take away what was asked for and is safe by now."""
    if peers.leads:
        requests.forget(directory, host.memory)


def ending(decision: Decision, asked: bool, step: int, directory: Path) -> tuple[int, str]:
    """Exit code and last words where the run ends after this step; without words it goes on."""
    if decision.stop is not None:
        return decision.stop, f"step {step}: {decision.reason}{advice(decision.remedy, directory)}"
    if asked:
        return PREEMPTED, f"stopped after step {step}, state saved: run the same command again to go on"
    return DONE, ""


def advice(remedy: str, directory: Path) -> str:
    """How to go on from a stopped run under other settings; empty where no settings help."""
    name = shlex.quote(str(directory))
    return f"; go on from it with jaxrl-llm train {name} --from {name} {remedy}" if remedy else ""


def agreed_to_stop(
    peers: Peers, stop: Preemption, step: int, common: Iterable[np.ndarray], row: dict[str, Any]
) -> bool:
    """Whether any process was asked to stop after this step; ``common``: arrays that all of them should have alike.

    Raises:
      Disagreement: the processes have sampled, scored or learned differently.
    """
    learned = hashlib.sha256(repr([row.get(name) for name in ("loss", "grad_norm", "kl_coef", "critic/loss")]).encode())
    for array in common:
        learned.update(array.tobytes())
    peers.check_same(f"samples, scores or gradients in step {step}", learned.hexdigest()[:16])
    return any(peers.gather(stop.asked))
