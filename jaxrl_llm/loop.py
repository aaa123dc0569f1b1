"""The loop: next batch, learn, evaluate, decide, record, save. What a step does is in ``step``,
where its batch comes from in ``stages``, what is decided in ``rules``.
"""

import dataclasses
import hashlib
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxrl_llm import config as configs
from jaxrl_llm import learner
from jaxrl_llm.checkpoint import Checkpoints, parts_of_policy, restore_parts
from jaxrl_llm.config import Run, Start
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.state import abstract_state, reset_reference
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import policy_model
from jaxrl_llm.rules import DONE, Decision, Rule, decide
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.signals import PREEMPTED, Preemption, farewell
from jaxrl_llm.stages import stage_of
from jaxrl_llm.stages.stage import Batch, Stage
from jaxrl_llm.step import LoopState, apply, check_problems, take_step
from jaxrl_llm.telemetry.logs import logged
from jaxrl_llm.telemetry.pace import SAVE, Schedule
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.telemetry.records import record
from jaxrl_llm.telemetry.writers import RunWriter
from jaxrl_llm.types import TrainState


@dataclasses.dataclass(frozen=True)
class Told:
    """Who hears of a run's steps.

    Attributes:
      schedule: when the run tests and saves.
      progress: people.
      writer: the files; None on all processes but the first.
    """

    schedule: Schedule
    progress: Progress
    writer: RunWriter | None


def train(
    run: Run, directory: Path, say: Callable[[str], None], peers: Peers = ALONE, weights: Start | None = None
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
    """
    configs.validate_on_devices(run, jax.device_count(), peers.count)
    mesh = make_mesh(run.mesh)
    store = Checkpoints(directory / "checkpoints", run.output.keep)
    start, begun = peers.first(lambda: (store.latest(), (directory / "metrics.jsonl").exists()))
    resumed = start is not None or begun
    schedule = Schedule(run.steps, run.evaluation.every, run.output.checkpoint_every)
    code = DONE
    last_words = ""
    with (
        store,
        jax.set_mesh(mesh),
        logged(directory / "log.txt") if peers.leads else nullcontext(),
        Progress(schedule, (start or 0) + 1, None if peers.leads else Console(quiet=True)) as progress,
        writing(run, directory, (-1 if start is None else start) if resumed else None, peers) as writer,
        stage_of(run).resources(run, peers, directory) as resources,
        farewell(lambda *reason: resources.close()),
        ExitStack() as stack,
    ):
        told = Told(schedule, progress, writer)
        stage, state, host = load(run, mesh, store, start, resources, progress, peers, weights)
        rules = stage.rules()
        progress.pace.begin()
        if start is None:
            test_first(stage, rules, state, host, told)
        stop = stack.enter_context(Preemption(progress.note))  # from here on there is a step to finish
        for step in range((start or 0) + 1, run.steps + 1):
            first = {"event/resumed": True} if resumed and step == (start or 0) + 1 else {}
            state, row, batch, decision = make_step(stage, run, rules, state, host, step, told, first)
            asked = agreed_to_stop(peers, stop, step, stage.common(batch), row)
            if schedule.saves(step) or decision.stop is not None or asked:
                progress.status("saving")
                store.save(step, state, host.to_json(stage))
                progress.pace.took(SAVE)
            code, last_words = ending(decision, asked and step < run.steps, step, directory)
            if last_words:
                break
        progress.status("saving")
        store.close()
    if last_words:
        say(last_words)
    return code


def load(
    run: Run,
    mesh: Any,
    store: Checkpoints,
    start: int | None,
    resources: Any,
    progress: Progress,
    peers: Peers,
    weights: Start | None,
) -> tuple[Stage, TrainState, LoopState]:
    """What makes the run's steps, and its state before its first step here; all that may refuse the run is tried before
    it speaks.

    The arguments are those of ``train``; ``start`` is the step whose checkpoint is gone on from, or None.
    """
    progress.status(f"loading {run.model}")
    model, tokenizer = load_pretrained(run.model, run.learner.dtype, mesh)
    stage = stage_of(run).prepare(run, model, tokenizer, mesh, resources, progress, peers)
    if start is not None:
        progress.status(f"restoring step {start}")
    parameters = count_of(model)
    state, host = begin(run, stage, model, store, start, mesh, weights, progress.note)
    check_problems(host.problems, stage.problems, run.task.label)
    host.problems = stage.problems
    for line in [*stage.header(parameters, count_of(state.policy.params)), *configs.notes(run)]:
        progress.note(line)
    return stage, state, host


def test_first(stage: Stage, rules: Mapping[str, Rule], state: TrainState, host: LoopState, told: Told) -> None:
    """The evaluation before training: row 0, which rules may remember."""
    found = stage.test(stage.weights(policy_model(state)))
    row = {"step": 0} | (found.metrics() if found else {})
    told.progress.tested(0, row)
    _, host.memory = decide(rules, row, host.memory)
    record(told.writer, 0, found, row, [])


def make_step(
    stage: Stage,
    run: Run,
    rules: Mapping[str, Rule],
    state: TrainState,
    host: LoopState,
    step: int,
    told: Told,
    row: dict[str, Any],
) -> tuple[TrainState, dict[str, Any], Batch, Decision]:
    """Make a batch, learn, evaluate, decide, record.

    Args:
      stage: what makes batches and tests.
      run: its settings.
      rules: what decides, by name.
      state: donated.
      host: told what this step leaves to the next.
      step: its number.
      told: who hears of it.
      row: what its row begins with.

    Returns:
      The state after what was decided, the whole row, the batch, and the decision.
    """
    began = time.perf_counter()
    told.progress.status("sampling")
    state, measured, batch = take_step(stage, run, state, host, step)
    row = measured | {"step": step} | row
    row["time/step_s"] = time.perf_counter() - began
    told.progress.step(row)

    found = stage.test(stage.weights(policy_model(state))) if told.schedule.evaluates(step) else None
    if found is not None:
        row |= found.metrics() | {"time/evaluation_s": time.perf_counter() - began - row["time/step_s"]}
        told.progress.tested(step, row)

    decision, host.memory = decide(rules, row, host.memory)
    state = apply(decision, state, run)
    host.coefficients |= decision.coefficients
    row |= decision.events
    told.progress.happened(step, row)
    record(told.writer, step, found, row, stage.examples(batch))
    return state, row, batch, decision


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


def count_of(model: Any) -> int:
    """Parameters of a model, or of an adapter."""
    return sum(leaf.size for leaf in jax.tree.leaves(model))


def begin(
    run: Run,
    stage: Stage,
    model: Decoder,
    store: Checkpoints,
    start: int | None,
    mesh: Any,
    weights: Start | None,
    note: Callable[[str], None],
) -> tuple[TrainState, LoopState]:
    """A fresh state, or that of step ``start``; the model is taken, or read for its shapes only."""
    optimiser = build(run.learner.optimiser)
    reference = run.recipe.algorithm.needs_reference
    lora = run.learner.lora
    others = [one.begins for one in stage.training if one.begins is not None]
    if start is None:
        state = learner.create_state(model, optimiser, reference, mesh, lora, run.seed, others)
        host = LoopState()
        if weights is not None:
            state = borrowed(state, run, weights, mesh, note)
    else:
        like = abstract_state(model, optimiser, reference, lora, others)
        state, data = store.restore(start, like, mesh, model)
        host = LoopState.from_json(data, stage)
    if run.recipe.controller is not None:
        host.coefficients.setdefault("kl_coef", run.recipe.algorithm.kl_coef)
    return state, host


def borrowed(state: TrainState, run: Run, weights: Start, mesh: Any, note: Callable[[str], None]) -> TrainState:
    """A fresh state whose policy and reference are those of another run's checkpoint, and its optimiser where its
    settings are the same.

    Raises:
      InputError: the other run's model or adapter is of another kind.
    """
    old = configs.whole(configs.read(Path(weights.run) / "config.json", own=False).run.learner)
    shown = f"step {weights.step} of {weights.run}"
    if old.lora != run.learner.lora:
        raise InputError(f"{shown} has {old.lora}, this run {run.learner.lora}: set learner.lora to what it is there")
    same = old.optimiser == run.learner.optimiser
    policy = state.policy
    like = jax.eval_shape(parts_of_policy, policy.params, policy.opt_state if same else None)
    for array in jax.tree.leaves((policy.params, policy.opt_state if same else None)):
        array.delete()  # there need not be room for both
    found = restore_parts(Path(weights.run) / "checkpoints" / str(weights.step), like, mesh, policy.base).policy
    note(
        f"begins with {shown}: its weights"
        + (" and its optimiser" if same else "; the optimiser is new, as its settings are")
    )
    return reset_reference(
        state.with_role("policy", params=found.params, opt_state=found.opt_state if same else policy.opt_state)
    )


def writing(
    run: Run, directory: Path, resumed_at: int | None, peers: Peers
) -> AbstractContextManager[RunWriter | None]:
    """The run's records, on process 0; the others write none."""
    if not peers.leads:
        return nullcontext()
    return RunWriter(directory, resumed_at, run.output.tensorboard, run.output.wandb, configs.to_json(run))


def agreed_to_stop(
    peers: Peers, stop: Preemption, step: int, common: Iterable[np.ndarray], row: dict[str, Any]
) -> bool:
    """Whether any process was asked to stop after this step; ``common``: arrays that all of them should have alike.

    Raises:
      Disagreement: the processes have sampled, scored or learned differently.
    """
    learned = hashlib.sha256(repr([row.get(name) for name in ("loss", "grad_norm", "kl_coef")]).encode())
    for array in common:
        learned.update(array.tobytes())
    peers.check_same(f"samples, scores or gradients in step {step}", learned.hexdigest()[:16])
    return any(peers.gather(stop.asked))
