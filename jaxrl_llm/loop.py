"""The loop: next batch, learn, evaluate, decide, record, save. What a step does is in ``step``, what is decided in ``rules``."""

import dataclasses
import hashlib
import shlex
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxrl_llm import config as configs
from jaxrl_llm import learner
from jaxrl_llm.checkpoint import Checkpoints, restore_parts
from jaxrl_llm.config import Run, Start
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.epochs import abstract_state, reset_reference
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import policy_model
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rollout.groups import Collected
from jaxrl_llm.rules import (
    DONE, Controlled, Decision, NotANumber, RewardFails, Rule, TeachesNothing, decide, rules_of,
)  # fmt: skip
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.signals import PREEMPTED, Preemption, farewell
from jaxrl_llm.step import Host, Parts, apply, check_problems, prepare, take_step
from jaxrl_llm.telemetry.header import Header
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


def rules_for(run: Run) -> dict[str, Rule]:
    """What decides between this run's steps, by name; of several that stop it the first says why."""
    algorithm = run.recipe.algorithm
    only_advantages = not (algorithm.kl_in_loss and algorithm.kl_coef) and not algorithm.entropy_coef
    rules: dict[str, Rule] = {
        "not_a_number": NotANumber(run.learner.optimiser.learning_rate),
        "reward_fails": RewardFails(),
        "teaches_nothing": TeachesNothing(
            run.rollout.collect.patience, only_advantages, run.recipe.filter_groups or ""
        ),
    }
    rules |= rules_of(run.recipe.resets, run.evaluation.every)
    return rules if run.recipe.controller is None else rules | {"controller": Controlled(run.recipe.controller)}


def train(
    run: Run, directory: Path, say: Callable[[str], None], peers: Peers = ALONE, weights: Start | None = None
) -> int:
    """Train, or go on where the directory's newest checkpoint stands; returns the exit code.

    Every process makes the same decisions from the same numbers; what only one of them knows (a file, a signal, a score)
    comes through ``peers``. Process 0 alone writes and speaks.

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
    code, last_words = DONE, ""
    with (
        store,
        jax.set_mesh(mesh),
        logged(directory / "log.txt") if peers.leads else nullcontext(),
        Progress(schedule, (start or 0) + 1, None if peers.leads else Console(quiet=True)) as progress,
        writing(run, directory, (-1 if start is None else start) if resumed else None, peers) as writer,
        scorer_of(run, peers, directory) as scorer,
        farewell(lambda *reason: scorer.close()),
        ExitStack() as stack,
    ):
        told, rules = Told(schedule, progress, writer), rules_for(run)
        parts, state, host = load(run, mesh, store, start, scorer, progress, peers, weights)
        progress.pace.begin()
        if start is None:
            test_first(parts, rules, state, host, told)
        stop = stack.enter_context(Preemption(progress.note))  # from here on there is a step to finish
        for step in range((start or 0) + 1, run.steps + 1):
            first = {"event/resumed": True} if resumed and step == (start or 0) + 1 else {}
            state, row, batch, decision = make_step(parts, rules, state, host, step, told, first)
            asked = agreed_to_stop(peers, stop, step, batch, row)
            if schedule.saves(step) or decision.stop is not None or asked:
                progress.status("saving")
                store.save(step, state, host.to_json())
                progress.pace.took(SAVE)
            if decision.stop is not None:
                code, last_words = decision.stop, f"step {step}: {decision.reason}{advice(decision.remedy, directory)}"
                break
            if asked and step < run.steps:
                code, last_words = PREEMPTED, f"stopped after step {step}, state saved: run the same command again to go on"
                break
        progress.status("saving")
        store.close()
    if last_words:
        say(last_words)
    return code


def load(
    run: Run, mesh: Any, store: Checkpoints, start: int | None, scorer: Scorer, progress: Progress, peers: Peers,
    weights: Start | None,
) -> tuple[Parts, TrainState, Host]:
    """What a run is made of, and its state before its first step here; all that may refuse the run is tried before it speaks.

    The arguments are those of ``train``; ``start`` is the step whose checkpoint is gone on from, or None.
    """
    progress.status(f"loading {run.model}")
    model, tokenizer = load_pretrained(run.model, run.learner.dtype, mesh)
    parts = prepare(run, model, tokenizer, mesh, scorer, progress, peers)
    if start is not None:
        progress.status(f"restoring step {start}")
    parameters = count_of(model)
    state, host = begin(run, model, store, start, mesh, weights, progress.note)
    check_problems(host.problems, parts.problems, run.task.label)
    host.problems = parts.problems
    for line in [*header(parts, parameters, count_of(state.policy)).lines(), *configs.notes(run)]:
        progress.note(line)
    return parts, state, host


def test_first(parts: Parts, rules: Mapping[str, Rule], state: TrainState, host: Host, told: Told) -> None:
    """The evaluation before training: row 0, which rules may remember."""
    found = parts.test(parts.weights(policy_model(state)))
    row = {"step": 0} | (found.metrics() if found else {})
    told.progress.tested(0, row)
    _, host.memory = decide(rules, row, host.memory)
    record(told.writer, 0, found, row, [])


def make_step(
    parts: Parts, rules: Mapping[str, Rule], state: TrainState, host: Host, step: int, told: Told, row: dict[str, Any]
) -> tuple[TrainState, dict[str, Any], Collected, Decision]:
    """Sample, learn, evaluate, decide, record.

    Args:
      parts: what the run is made of.
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
    state, measured, batch = take_step(parts, state, host, step)
    row = measured | {"step": step} | row
    row["time/step_s"] = time.perf_counter() - began
    told.progress.step(row)

    found = parts.test(parts.weights(policy_model(state))) if told.schedule.evaluates(step) else None
    if found is not None:
        row |= found.metrics() | {"time/evaluation_s": time.perf_counter() - began - row["time/step_s"]}
        told.progress.tested(step, row)

    decision, host.memory = decide(rules, row, host.memory)
    state = apply(decision, state, parts.run)
    host.coefficients |= decision.coefficients
    row |= decision.events
    told.progress.happened(step, row)
    record(told.writer, step, found, row, batch.groups[: parts.run.output.samples])
    return state, row, batch, decision


def advice(remedy: str, directory: Path) -> str:
    """How to go on from a stopped run under other settings; empty where no settings help."""
    name = shlex.quote(str(directory))
    return f"; go on from it with jaxrl-llm train {name} --from {name} {remedy}" if remedy else ""


def header(parts: Parts, parameters: int, trained: int) -> Header:
    """What the run says of its size."""
    run = parts.run
    return Header(
        run.model, parameters, trained, jax.device_count(), jax.devices()[0].device_kind, run.task.label,
        len(parts.sampler.source.problems), parts.tests, run.rollout.prompts, run.rollout.group,
        run.learner.updates,
    )


def count_of(model: Any) -> int:
    """Parameters of a model, or of an adapter."""
    return sum(leaf.size for leaf in jax.tree.leaves(model))


def begin(
    run: Run, model: Decoder, store: Checkpoints, start: int | None, mesh: Any, weights: Start | None,
    note: Callable[[str], None],
) -> tuple[TrainState, Host]:
    """A fresh state, or that of step ``start``; the model is taken, or read for its shapes only."""
    reference, lora, optimiser = run.recipe.algorithm.needs_reference, run.learner.lora, build(run.learner.optimiser)
    if start is None:
        state, host = learner.create_state(model, optimiser, reference, mesh, lora, run.seed), Host()
        state = state if weights is None else borrowed(state, run, weights, mesh, note)
    else:
        state, data = store.restore(start, abstract_state(model, optimiser, reference, lora), mesh, model)
        host = Host.from_json(data)
    if run.recipe.controller is not None:
        host.coefficients.setdefault("kl_coef", run.recipe.algorithm.kl_coef)
    return state, host


def borrowed(state: TrainState, run: Run, weights: Start, mesh: Any, note: Callable[[str], None]) -> TrainState:
    """A fresh state whose policy and reference are those of another run's checkpoint, and its optimiser where its settings are
    the same.

    Raises:
      InputError: the other run's model or adapter is of another kind.
    """
    old = configs.whole(configs.read(Path(weights.run) / "config.json", own=False).run.learner)
    shown = f"step {weights.step} of {weights.run}"
    if old.lora != run.learner.lora:
        raise InputError(f"{shown} has {old.lora}, this run {run.learner.lora}: set learner.lora to what it is there")
    same = old.optimiser == run.learner.optimiser
    like = jax.eval_shape(lambda s: TrainState(s.policy, s.opt_state if same else None, None, None), state)
    for array in jax.tree.leaves((state.policy, state.opt_state if same else None)):
        array.delete()  # there need not be room for both
    found = restore_parts(Path(weights.run) / "checkpoints" / str(weights.step), like, mesh, state.base)
    note(f"begins with {shown}: its weights" + (" and its optimiser" if same else "; the optimiser is new, as its settings are"))
    return reset_reference(state._replace(policy=found.policy, opt_state=found.opt_state if same else state.opt_state))


def scorer_of(run: Run, peers: Peers, directory: Path) -> Scorer:
    """The run's rewards with their workers."""
    scoring = run.scoring
    return Scorer(configs.rewards(run), scoring.workers, scoring.timeout_s, scoring.on_error, peers, directory)


def writing(run: Run, directory: Path, resumed_at: int | None, peers: Peers) -> AbstractContextManager[RunWriter | None]:
    """The run's records, on process 0; the others write none."""
    if not peers.leads:
        return nullcontext()
    return RunWriter(directory, resumed_at, run.output.tensorboard, run.output.wandb, configs.to_json(run))


def agreed_to_stop(peers: Peers, stop: Preemption, step: int, batch: Collected, row: dict[str, Any]) -> bool:
    """Whether any process was asked to stop after this step.

    Raises:
      Disagreement: the processes have sampled, scored or learned differently.
    """
    learned = hashlib.sha256(repr([row.get(name) for name in ("loss", "grad_norm", "kl_coef")]).encode())
    for group in batch.groups:
        for array in (group.rewards, *(c.tokens for c in group.completions)):
            learned.update(array.tobytes())
    peers.check_same(f"samples, scores or gradients in step {step}", learned.hexdigest()[:16])
    return any(peers.gather(stop.asked))
