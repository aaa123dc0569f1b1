"""The main job, top to bottom: sample, score, advantage, update, log, evaluate, checkpoint.

This is the only place where the rooms meet.
"""

import dataclasses
import functools
import hashlib
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from jaxrl_llm import config as configs
from jaxrl_llm import learner, tasks
from jaxrl_llm.checkpoint import Checkpoints, backlog_from_json, backlog_to_json, collected_from_json, collected_to_json
from jaxrl_llm.config import Run
from jaxrl_llm.errors import InputError
from jaxrl_llm.evaluate import Evaluated, evaluate
from jaxrl_llm.learner.epochs import abstract_state, reset_optimiser
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import policy_model, reference_model
from jaxrl_llm.programs import build_programs
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rollout.collect import Sampler, collect
from jaxrl_llm.rollout.demand import Demand
from jaxrl_llm.rollout.groups import Backlog, Collected, Source
from jaxrl_llm.sharding import make_mesh, rollout_mesh
from jaxrl_llm.sharding.distributed import ALONE, Peers, Preemption
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.telemetry.records import record
from jaxrl_llm.telemetry.writers import RunWriter
from jaxrl_llm.types import Group, TrainState

DONE, GUARD, PREEMPTED = 0, 3, 75
"""Exit codes: finished; stopped by a guard with state saved; preempted with state saved, run again to go on."""


@dataclasses.dataclass
class Host:
    """What lives beside the device state and is saved with it.

    Attributes:
      backlog: what the last step's sampling left to the next: prompts consumed, surplus and unfinished groups.
      ready: groups that were sampled ahead, for the next step; None where sampling does not run ahead.
      best: the best evaluation so far.
      stalled: evaluations since.
      kl_coef: the KL coefficient of the next step, where a controller moves it; None where none does.
    """

    backlog: Backlog = Backlog()
    ready: Collected | None = None
    best: float = -1.0
    stalled: int = 0
    kl_coef: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values; exact."""
        return {**vars(self), "backlog": backlog_to_json(self.backlog), "ready": collected_to_json(self.ready)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Host":
        """The inverse of ``to_json``."""
        backlog = backlog_from_json(data["backlog"])
        return cls(**data | {"backlog": backlog, "ready": collected_from_json(data["ready"], backlog)})


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of once its files are read."""

    update: Callable[..., Any]
    layout: learner.Layout
    compute: Compute
    sampler: Sampler
    weights: Callable[[Decoder], Decoder]
    test: Callable[[Decoder], Evaluated | None]


def train(run: Run, directory: Path, say: Callable[[str], None], peers: Peers = ALONE) -> int:
    """Train, or go on where the directory's newest checkpoint stands; returns the exit code.

    Every process makes the same decisions from the same numbers; what only one of them knows (a file, a signal, a score)
    comes through ``peers``. Process 0 alone writes and speaks.

    Args:
      run: validated.
      directory: the run's; made by the caller, with config.json in it.
      say: prints a line that should stay visible.
      peers: the other processes of the run.
    """
    configs.validate_on_devices(run, jax.device_count(), peers.count)
    mesh = make_mesh(run.mesh)
    store = Checkpoints(directory / "checkpoints", run.output.keep)
    start, begun = peers.first(lambda: (store.latest(), (directory / "metrics.jsonl").exists()))
    resumed = start is not None or begun
    with (
        store,
        jax.set_mesh(mesh),
        Preemption() as stop,
        Progress(run.steps, (start or 0) + 1, None if peers.leads else Console(quiet=True)) as progress,
        writing(run, directory, (-1 if start is None else start) if resumed else None, peers) as writer,
        Scorer(configs.rewards(run), run.scoring.workers, run.scoring.timeout_s, run.scoring.on_error, peers) as scorer,
    ):
        progress.status(f"loading {run.model}")
        model, tokenizer = load_pretrained(run.model, run.learner.dtype, mesh)
        parts = prepare(run, model, tokenizer, mesh, scorer, progress, peers)
        optimiser = build(run.learner.optimiser)
        if start is not None:
            progress.status(f"restoring step {start}")
        state, host = begin(run, model, optimiser, store, start, mesh)
        del model  # its arrays are the state's now, or were read for their shapes only
        if start is None:
            start = 0
            found = parts.test(parts.weights(policy_model(state)))
            host.best = found.accuracy if found else host.best
            record(writer, progress, 0, found, {}, [])
        code = DONE
        for step in range(start + 1, run.steps + 1):
            began = time.perf_counter()
            row: dict[str, Any] = {"event/resumed": True} if resumed and step == start + 1 else {}

            last = step == run.steps
            sample = functools.partial(collect, parts.sampler, parts.weights(policy_model(state)), int(state.updates))
            batch = host.ready or sample(host.backlog)
            host.backlog, host.ready = batch.backlog, None
            row |= batch.metrics | {"kl": math.nan}
            progress.status("updating")
            learn = functools.partial(learn_from, run, state, batch, host, parts, mesh, step)
            if run.rollout.collect.staleness and not last:
                apart = run.mesh.rollout > 0 or mesh.size == 1
                (state, measured), host.ready = both(learn, lambda: sample(batch.backlog), apart)
                host.backlog = host.ready.backlog
            else:
                del sample  # and with it the weights that it sampled from
                state, measured = learn()
            row |= measured
            if step == start + 1:
                progress.note("compiled for sampling: " + "; ".join(parts.sampler.engine.shapes))

            if last or (run.evaluation.every and step % run.evaluation.every == 0):
                found = parts.test(parts.weights(policy_model(state)))
                state, events = after_evaluation(run, state, host, found, optimiser)
                row |= events
            else:
                found = None
            state, events = reset_on_schedule(run, state, optimiser, step)
            row |= events

            broken = not math.isfinite(row.get("grad_norm", 0.0))
            row |= {"event/not_a_number": True} if broken else {}
            row["time/step_s"] = time.perf_counter() - began
            row["throughput/sampled_tokens_per_s"] = batch.tokens / max(row.get("time/rollout_s", 0.0), 1e-9)
            record(writer, progress, step, found, row, batch.groups[: run.output.samples])
            asked = agreed_to_stop(peers, stop, step, batch, row)
            if last or broken or asked or step % run.output.checkpoint_every == 0:
                progress.status("saving")
                store.save(step, state, host.to_json())
            if broken or (asked and not last):
                code = GUARD if broken else PREEMPTED
                break
        progress.status("saving")
        store.close()
    if code == GUARD:
        remedy = "Lower learner.optimiser.learning_rate and go on with --fresh"
        say(f"step {step}: the gradient is not a number; the state before it is saved. {remedy}")
    if code == PREEMPTED:
        say(f"stopped after step {step}, state saved: run the same command again to go on")
    return code


def begin(
    run: Run, model: Decoder, optimiser: Any, store: Checkpoints, start: int | None, mesh: Any
) -> tuple[TrainState, Host]:
    """A fresh state, or that of step ``start``; the model is taken, or read for its shapes only."""
    reference, lora = run.recipe.algorithm.needs_reference, run.learner.lora
    if start is None:
        state, host = learner.create_state(model, optimiser, reference, mesh, lora, run.seed), Host()
    else:
        state, data = store.restore(start, abstract_state(model, optimiser, reference, lora), mesh, model)
        host = Host.from_json(data)
    if run.recipe.controller is not None and host.kl_coef is None:
        host.kl_coef = run.recipe.algorithm.kl_coef
    return state, host


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


def prepare(
    run: Run, model: Decoder, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> Parts:
    """Read the task and build what samples, scores, learns and tests; nothing large is computed yet."""
    if tokenizer is None:
        raise InputError(f"{run.model} has no tokenizer: put tokenizer.json and tokenizer_config.json beside its weights")
    progress.status(f"reading task {run.task.label}")
    loaded = tasks.load(run.task)
    test_task = run.evaluation.task or run.task
    problems = tasks.load(test_task).train if run.evaluation.task else loaded.held_out
    problems = problems[: run.evaluation.limit or None]
    ids = "".join(problem.id for part in (loaded.train, problems) for problem in part)
    peers.check_same(f"problems of {run.task.label}", hashlib.sha256(ids.encode()).hexdigest()[:16])
    check_prompts(run, run.task, loaded.train, tokenizer)
    check_prompts(run, test_task, problems, tokenizer)
    for note in loaded.notes:
        progress.note(note)
    rollout, stops = run.rollout, model.config.tokens.eos
    programs = build_programs(run, model, mesh, rollout_mesh(run.mesh))
    engine = programs.engine
    source = Source(tokenizer, run.task, loaded.train, scorer, rollout.group, run.seed, run.recipe.shaping, progress.note)
    demand = Demand(rollout.prompts, rollout.slots, rollout.max_new_tokens, run.recipe.filter_groups, rollout.collect)
    sampler = Sampler(engine, source, rollout.sampling(stops, run.learner.keep_sampling_mask), demand, progress.status)
    answers = dataclasses.replace(
        rollout.sampling(stops), temperature=run.evaluation.temperature, top_p=run.evaluation.top_p, top_k=0, repetition=None
    )

    def test(weights: Decoder) -> Evaluated | None:
        if not problems:
            return None
        return evaluate(
            engine, weights, tokenizer, test_task, problems, scorer, answers, run.evaluation.samples, run.seed, progress.status
        )

    return Parts(programs.update, programs.layout, programs.compute, sampler, programs.weights, test)


def check_prompts(run: Run, task: tasks.Task, problems: Any, tokenizer: Any) -> None:
    """Refuse a task whose longest prompt does not fit."""
    longest = max((len(tasks.encode(p, task, tokenizer)) for p in problems), default=0)
    limit = run.rollout.max_prompt_tokens
    remedy = f"set --rollout.max_prompt_tokens {longest} (now {limit})"
    configs.require(longest <= limit, f"the longest prompt of {task.label} has {longest} tokens: {remedy}")


def learn_from(
    run: Run, state: TrainState, batch: Collected, host: Host, parts: Parts, mesh: Any, step: int
) -> tuple[TrainState, dict[str, Any]]:
    """Every update that a batch is worth; returns the new state and what was measured."""
    began = time.perf_counter()
    if not batch.groups:
        return state, {"event/no_informative_groups": True, "time/update_s": 0.0}
    with jax.set_mesh(mesh):  # of this thread
        samples, measured = to_samples(run, batch.groups, batch.version, reference_model(state), parts, mesh, host.kl_coef)
        update = functools.partial(parts.update, kl_coef=host.kl_coef if run.recipe.algorithm.kl_in_loss else None)
        state, metrics = learner.learn(
            state, samples, run.learner, parts.layout, parts.compute, update, run.rollout.temperature, run.seed + step, mesh,
            run.recipe.algorithm.kl_in_loss,
        )
    measured |= metrics
    measured |= control(run, host, measured, len(batch.groups) * run.rollout.group)
    return state, measured | {"time/update_s": time.perf_counter() - began}


def both(learn: Callable[[], Any], sample: Callable[[], Any], apart: bool) -> tuple[Any, Any]:
    """The results of both calls, at the same time where their devices are ``apart``.

    Two threads may start programs in another order on each device of a mesh that they share, and wait for each other.
    """
    if not apart:
        return learn(), sample()
    with ThreadPoolExecutor(1) as other:
        learned = other.submit(learn)
        sampled = sample()
        return learned.result(), sampled


def to_samples(
    run: Run, groups: list[Group], version: int, reference: Decoder | None, parts: Parts, mesh: Any,
    kl_coef: float | None,
) -> tuple[list[list[learner.Sample]], dict[str, float]]:
    """Groups as the learner sees them: what each token is worth, and whether the loss counts it."""
    algorithm = run.recipe.algorithm
    rewards = np.stack([g.rewards for g in groups])
    if algorithm.advantage.several:
        scored = [np.stack([part.weight * g.parts[part.name] for g in groups]) for part in configs.rewards(run)]
        rewards = np.stack(scored, axis=-1)
    score = lambda samples: learner.completion_logps(reference, samples, parts.layout, parts.compute, run.rollout.temperature, mesh)
    dropped, length = run.recipe.drop_truncated, parts.layout.completion_tokens
    return learner.to_samples(algorithm, groups, version, rewards, dropped, length, score, kl_coef, run.rollout.collect.learn_earlier)


def control(run: Run, host: Host, metrics: dict[str, float], completions: int) -> dict[str, float]:
    """Let the recipe's controller, if any, choose the next step's KL coefficient; returns this step's, to be logged."""
    if run.recipe.controller is None:
        return {}
    used = host.kl_coef
    # A penalty on the distance from the old policy has no reference: how far this step moved is its KL.
    measured = metrics["kl"] if "kl" in metrics else metrics["policy_kl"]
    host.kl_coef = float(run.recipe.controller(used, measured, completions))
    return {"kl_coef": used}


def after_evaluation(
    run: Run, state: TrainState, host: Host, found: Evaluated | None, optimiser: Any
) -> tuple[TrainState, dict[str, Any]]:
    """Keep the best accuracy; where the recipe says so, reset the reference once evaluations have stopped improving."""
    if found is None:
        return state, {}
    host.stalled = 0 if found.accuracy > host.best else host.stalled + 1
    host.best = max(host.best, found.accuracy)
    if not run.recipe.reset_on_stall or host.stalled < run.recipe.reset_on_stall:
        return state, {}
    host.stalled = 0
    return reset_reference(state, run, optimiser), {"event/reference_reset": True}


def reset_on_schedule(run: Run, state: TrainState, optimiser: Any, step: int) -> tuple[TrainState, dict[str, Any]]:
    """The resets that the recipe makes every so many steps, and the events that tell of them."""
    events: dict[str, Any] = {}
    if run.recipe.reference_reset and step % run.recipe.reference_reset == 0:
        state, events["event/reference_reset"] = reset_reference(state, run, optimiser), True
    if run.recipe.optimiser_reset and step % run.recipe.optimiser_reset == 0:
        state, events["event/optimiser_reset"] = reset_optimiser(state, optimiser), True
    return state, events


def reset_reference(state: TrainState, run: Run, optimiser: Any) -> TrainState:
    """The policy as it is becomes the reference, in buffers of its own; the optimiser starts anew if the recipe says so."""
    reference = jax.tree.map(jnp.copy, state.policy) if state.reference is not None else None
    state = state._replace(reference=reference)
    return reset_optimiser(state, optimiser) if run.recipe.reset_optimiser else state
