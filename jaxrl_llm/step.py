"""What one step does: sample and score groups, learn from them, test the policy. The loop says when."""

import dataclasses
import functools
import hashlib
import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm import learner, tasks
from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.checkpoint import backlog_from_json, backlog_to_json, collected_from_json, collected_to_json
from jaxrl_llm.config import Run
from jaxrl_llm.errors import InputError
from jaxrl_llm.evaluate import Evaluated, evaluate
from jaxrl_llm.learner.epochs import reset_optimiser, reset_reference
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import policy_model, reference_model
from jaxrl_llm.programs import build_programs
from jaxrl_llm.rewards import Reward, Scorer
from jaxrl_llm.rewards.shaping import named
from jaxrl_llm.rollout.collect import Sampler, collect
from jaxrl_llm.rollout.demand import Demand
from jaxrl_llm.rollout.groups import Backlog, Collected, Source
from jaxrl_llm.rules import Decision, Memory
from jaxrl_llm.sharding import rollout_mesh
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import Group, Problem, TrainState

Fingerprints = dict[str, tasks.Fingerprint]
"""Of problems, by what they are for."""


@dataclasses.dataclass
class Host:
    """What lives beside the device state and is saved with it.

    Attributes:
      backlog: what the last step's sampling left to the next: prompts consumed, surplus and unfinished groups.
      ready: groups that were sampled ahead, for the next step; None where sampling does not run ahead.
      memory: what each rule remembers.
      coefficients: of the loss, for the next step, where a rule moves them.
      problems: fingerprints of the problems that the run began with.
    """

    backlog: Backlog = Backlog()
    ready: Collected | None = None
    memory: Memory = dataclasses.field(default_factory=dict)
    coefficients: dict[str, float] = dataclasses.field(default_factory=dict)
    problems: Fingerprints = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain values; exact."""
        return {**vars(self), "backlog": backlog_to_json(self.backlog), "ready": collected_to_json(self.ready)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "Host":
        """The inverse of ``to_json``; also reads what was saved before rules had a memory, and problems a fingerprint."""
        backlog = backlog_from_json(data["backlog"])
        values = data if "memory" in data else {
            "memory": {"stall": {"best": data["best"], "stalled": data["stalled"]}},
            "coefficients": {} if data["kl_coef"] is None else {"kl_coef": data["kl_coef"]},
        }
        ready = collected_from_json(data["ready"], backlog)
        return cls(backlog, ready, values["memory"], values["coefficients"], data.get("problems", {}))


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a run is made of once its files are read.

    Attributes:
      run: its settings.
      mesh: learns.
      update: of the optimiser.
      layout: shapes of a microbatch.
      compute: how forward passes are computed.
      sampler: fills steps with groups.
      weights: from the policy to what is sampled from.
      test: evaluates weights; None where there is nothing to test on.
      problems: fingerprints of what it trains and tests on.
      tests: problems to test on.
    """

    run: Run
    mesh: Any
    update: Callable[..., Any]
    layout: learner.Layout
    compute: Compute
    sampler: Sampler
    weights: Callable[[Decoder], Decoder]
    test: Callable[[Decoder], Evaluated | None]
    problems: Fingerprints
    tests: int


def prepare(
    run: Run, model: Decoder, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> Parts:
    """Read the task and build what samples, scores, learns and tests; nothing large is computed yet."""
    if tokenizer is None:
        raise InputError(f"{run.model} has no tokenizer: put tokenizer.json and tokenizer_config.json beside its weights")
    configs.validate_on_model(run, model.config)
    loaded, test_task, problems = read_problems(run, progress)
    prints = problems_of(run, loaded, problems)
    peers.check_same(f"problems of {run.task.label}", " ".join(found["order"] for found in prints.values()))
    problems = problems[: run.evaluation.limit or None]
    check_prompts(run, run.task, loaded.train, tokenizer)
    check_prompts(run, test_task, problems, tokenizer)
    progress.status("calling each reward once")
    scorer.rehearse(loaded.train[0], tokenizer)
    rollout, stops = run.rollout, model.config.tokens.eos
    programs = build_programs(run, model, mesh, rollout_mesh(run.mesh))
    engine = programs.engine
    source = Source(tokenizer, run.task, loaded.train, scorer, rollout.group, run.seed, run.recipe.shaping)
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

    return Parts(
        run, mesh, programs.update, programs.layout, programs.compute, sampler, programs.weights, test, prints, len(problems)
    )


def read_problems(run: Run, progress: Progress) -> tuple[tasks.Loaded, tasks.Task, tuple[Problem, ...]]:
    """The task, the one that is tested on, and that one's problems; what was dropped is told.

    Raises:
      InputError: there is no answer where something of the run reads which answers are right.
    """
    progress.status(f"reading task {run.task.label}")
    loaded = tested = tasks.load(run.task, configs.verifies(run))
    if run.evaluation.task:
        tested = tasks.load(run.evaluation.task, configs.verifies(run))
    for found in (loaded, tested):
        if not found.verified:
            configs.refuse_readers(run, f"task {found.train[0].task} without reference answers")
    for note in dict.fromkeys((*loaded.notes, *tested.notes)):
        progress.note(note)
    return loaded, run.evaluation.task or run.task, tested.train if run.evaluation.task else loaded.held_out


def problems_of(run: Run, loaded: tasks.Loaded, tested: tuple[Problem, ...]) -> Fingerprints:
    """What the run trains and tests on; the latter by its settings, since a run may be continued with another test."""
    name = "held-out"
    if run.evaluation.task:
        settings = json.dumps(configs.to_json(run.evaluation.task))
        name = f"evaluation {hashlib.sha256(settings.encode()).hexdigest()[:16]}"
    return {"training": tasks.fingerprint(loaded.train), name: tasks.fingerprint(tested)}


def check_problems(before: Fingerprints, now: Fingerprints, label: str) -> None:
    """Refuse to go on with other problems than those that the run began with.

    Raises:
      InputError: says what has changed.
    """
    for name, found in now.items():
        changed = tasks.difference(before.get(name, found), found)
        configs.require(
            not changed,
            f"the {name.split()[0]} problems of {label} are not those that the run began with ({changed}): put the old ones "
            "back, or begin a new run with --from RUN (on from its weights) or --fresh",
        )


def check_prompts(run: Run, task: tasks.Task, problems: Any, tokenizer: Any) -> None:
    """Refuse a task whose longest prompt does not fit."""
    longest = max((len(tasks.encode(p, task, tokenizer)) for p in problems), default=0)
    limit = run.rollout.max_prompt_tokens
    remedy = f"set --rollout.max_prompt_tokens {longest} (now {limit})"
    configs.require(longest <= limit, f"the longest prompt of {task.label} has {longest} tokens: {remedy}")


def take_step(parts: Parts, state: TrainState, host: Host, step: int) -> tuple[TrainState, dict[str, Any], Collected]:
    """Sample a batch, or take the one that is ready, and learn from it; where the run says so, sample the next one meanwhile.

    ``host`` is told what the batch leaves to the next step.

    Returns:
      The new state, the step's row and the batch.
    """
    run, kl_coef = parts.run, host.coefficients.get("kl_coef")
    sample = functools.partial(collect, parts.sampler, parts.weights(policy_model(state)), int(state.updates))
    batch = host.ready or sample(host.backlog)
    host.backlog, host.ready = batch.backlog, None
    parts.sampler.status("updating")
    learn = functools.partial(learn_from, parts, state, batch, kl_coef, step)
    if run.rollout.collect.staleness:
        # In the last step too: should the run be given more, the next one's groups are of these weights, which the update
        # replaces. A run that is given no more pays for one collection that it does not need.
        apart = run.mesh.rollout > 0 or parts.mesh.size == 1
        (state, measured), host.ready = both(learn, lambda: sample(batch.backlog), apart)
        host.backlog = host.ready.backlog
    else:
        del sample  # and with it the weights that it sampled from
        state, measured = learn()
    coefficient = {} if kl_coef is None else {"kl_coef": kl_coef}
    return state, batch.metrics | {"kl": math.nan} | measured | coefficient, batch


def learn_from(
    parts: Parts, state: TrainState, batch: Collected, kl_coef: float | None, step: int
) -> tuple[TrainState, dict[str, Any]]:
    """Every update that a batch is worth; returns the new state and what was measured."""
    began = time.perf_counter()
    run = parts.run
    if not batch.groups:
        return state, {"updates": 0.0, "time/update_s": 0.0}
    in_loss = run.recipe.algorithm.kl_in_loss
    with jax.set_mesh(parts.mesh):  # of this thread
        samples, measured = to_samples(parts, batch.groups, batch.version, reference_model(state), kl_coef)
        update = functools.partial(parts.update, kl_coef=kl_coef if in_loss else None)
        state, metrics = learner.learn(
            state, samples, run.learner, parts.layout, parts.compute, update, run.rollout.temperature, run.seed + step,
            parts.mesh, in_loss, judge=run.recipe.controller is not None,
        )
    measured |= metrics
    measured["completions"] = len(batch.groups) * run.rollout.group
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
    parts: Parts, groups: list[Group], version: int, reference: Decoder | None, kl_coef: float | None
) -> tuple[list[list[learner.Sample]], dict[str, float]]:
    """Groups as the learner sees them: what each token is worth, and whether the loss counts it."""
    run = parts.run
    algorithm = run.recipe.algorithm
    rewards = np.stack([g.rewards for g in groups])
    if algorithm.advantage.several:
        algorithm, rewards = separately(algorithm, named(configs.rewards(run)), groups)
    score = lambda samples: learner.completion_logps(
        reference, samples, parts.layout, parts.compute, run.rollout.temperature, parts.mesh
    )
    length, earlier = parts.layout.completion_tokens, run.rollout.collect.learn_earlier
    samples, measured = learner.to_samples(
        algorithm, groups, version, rewards, dropped_endings(run), length, score, kl_coef, earlier
    )
    teaching = [bool(np.any(sample.advantage)) for group in samples for sample in group]
    return samples, measured | {"advantage/nonzero_fraction": float(np.mean(teaching))}


def dropped_endings(run: Run) -> tuple[str, ...]:
    """Finish reasons of the completions that the loss leaves out."""
    cut_off = ("length",) if run.recipe.drop_truncated else ()
    return cut_off if run.rollout.repetition.learn else (*cut_off, "repetition")


def separately(algorithm: Algorithm, parts: dict[str, Reward], groups: list[Group]) -> tuple[Algorithm, np.ndarray]:
    """For an estimator of several rewards: each of them, float64[P, G, n], and their weights, which it applies itself."""
    weights = algorithm.advantage.weights or tuple(float(reward.weight) for reward in parts.values())
    rewards = np.stack([np.stack([group.parts[name] for group in groups]) for name in parts], axis=-1)
    return dataclasses.replace(algorithm, advantage=dataclasses.replace(algorithm.advantage, weights=weights)), rewards


def apply(decision: Decision, state: TrainState, run: Run) -> TrainState:
    """The state after what the rules have decided: the one place where their decisions act on it."""
    if decision.reset_reference:
        state = reset_reference(state)
    if decision.reset_optimiser:
        state = reset_optimiser(state, build(run.learner.optimiser))
    return state
