"""A run before its first step here: what makes its steps, and a state that is fresh, restored, or another run's."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm import config as configs
from jaxrl_llm import learner, tasks
from jaxrl_llm.checkpoint import Checkpoints, holds, parts_of_policy, restore_parts
from jaxrl_llm.config import Configuration, Start
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.state import NewRole, abstract_state, reset_reference
from jaxrl_llm.models.heads import split
from jaxrl_llm.rules import OF_LESSONS, OF_PHASES, PhaseEnds, TeachesNothing
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.snapshots import SNAPSHOTS, kept
from jaxrl_llm.stages import stage_of
from jaxrl_llm.stages.stage import Fingerprints, Stage
from jaxrl_llm.step import LoopState
from jaxrl_llm.telemetry.header import model_line
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.trained import as_trained, load_model
from jaxrl_llm.types import Role, TrainState


def load(
    whole: Configuration,
    number: int,
    mesh: Any,
    store: Checkpoints,
    start: int | None,
    resources: Any,
    progress: Progress,
    peers: Peers,
    weights: Start | None,
) -> tuple[Stage, TrainState, LoopState, Any]:
    """What makes the run's steps, its state before its first step here, and the tokenizer; all that may refuse the run
    is tried before it speaks.

    The arguments are those of ``train``; ``number`` is that of the phase that the run is in, ``start`` the step whose
    checkpoint is gone on from, or None.
    """
    run = configs.in_phase(whole, number)
    progress.status(f"loading {run.model}")
    model, tokenizer = load_model(run.model, run.learner.dtype, mesh)
    trained = as_trained(run, model)
    stage = stage_of(run).prepare(run, model, tokenizer, mesh, resources, progress, peers)
    stage = with_phase(stage, whole, number)
    look_ahead(whole, number, model.config, tokenizer, progress.status)
    if start is not None:
        progress.status(f"restoring step {start}")
    parameters = count_of(trained)
    state, host = begin(run, stage, trained, store, start, mesh, weights, progress.note)
    check_problems(host.problems, stage.problems, stage.label)
    host.problems = stage.problems
    device = jax.devices()[0].device_kind
    progress.note(model_line(run.model, parameters, count_of(state.policy.params), jax.device_count(), device))
    for line in (*configs.unreached(whole), *stage.notes):
        progress.note(line)
    return stage, state, host, tokenizer


def load_phase(
    whole: Configuration,
    state: TrainState,
    host: LoopState,
    tokenizer: Any,
    mesh: Any,
    resources: Any,
    progress: Progress,
    peers: Peers,
) -> Stage:
    """What makes the steps of a phase that begins while the run goes on; ``host.phase`` is its number.

    The arguments are those of ``load``.
    """
    run = configs.in_phase(whole, host.phase)
    model = jax.eval_shape(base_of_policy, state)
    stage = stage_of(run).prepare(run, model, tokenizer, mesh, resources, progress, peers)
    stage = with_phase(stage, whole, host.phase)
    host.problems = stage.problems
    host.coefficients = dict(stage.coefficients) | host.coefficients
    for line in stage.notes:
        progress.note(line)
    return stage


def base_of_policy(state: TrainState) -> Any:
    """What a stage is made of: the policy, or the frozen model beside its adapter."""
    policy = state.policy
    return policy.params if policy.base is None else policy.base


def with_phase(stage: Stage, run: Configuration, number: int) -> Stage:
    """The stage with the rule that ends its phase, where another one follows: so does what would end the run as
    solved."""
    phases = configs.phases_of(run)
    if number + 1 == len(phases):
        return stage
    test = configs.evaluation_key(configs.in_phase(run, number))
    ends = PhaseEnds(phases[number], phases[number + 1], run.evaluation.every, test)
    rules = {**stage.rules, OF_PHASES: ends}
    lessons = rules.get(OF_LESSONS)
    if isinstance(lessons, TeachesNothing):
        rules[OF_LESSONS] = dataclasses.replace(lessons, ended=ends.ended)
    return dataclasses.replace(stage, rules=rules)


def look_ahead(run: Configuration, number: int, model: Any, tokenizer: Any, status: Callable[[str], None]) -> None:
    """Refuse a run of which a later phase than this one could not begin: its data, prompts and rewards are tried now.

    ``model``: the architecture.
    """
    for later in range(number + 1, len(configs.phases_of(run))):
        before, after = configs.in_phase(run, later - 1), configs.in_phase(run, later)
        try:
            stage_of(after).check_ahead(before, after, model, tokenizer, status)
        except InputError as error:
            raise InputError(f"phase {configs.phases_of(run)[later].name!r}: {error}") from None


def check_problems(before: Fingerprints, now: Fingerprints, label: str) -> None:
    """Refuse to go on with other problems than those that the run began with.

    Raises:
      InputError: says what has changed.
    """
    for name, found in now.items():
        changed = tasks.difference(before.get(name, found), found)
        configs.require(
            not changed,
            f"the {name.split()[0]} problems of {label} are not those that the run began with ({changed}): put the "
            "old ones back, or begin a new run with --from RUN (on from its weights) or --fresh",
        )


def count_of(model: Any) -> int:
    """Parameters of a model, or of an adapter."""
    return sum(leaf.size for leaf in jax.tree.leaves(model))


def begin(
    run: Configuration,
    stage: Stage,
    model: Any,
    store: Checkpoints,
    start: int | None,
    mesh: Any,
    weights: Start | None,
    note: Callable[[str], None],
) -> tuple[TrainState, LoopState]:
    """A fresh state, or that of step ``start``; the model is taken, or read for its shapes only."""
    optimiser = build(run.learner.optimiser)
    lora = run.learner.lora
    others = [one.begins for one in stage.training if one.begins is not None]
    if start is None:
        state = learner.create_state(model, optimiser, stage.reference, mesh, lora, run.seed, others)
        host = LoopState()
        if weights is not None:
            state = borrowed(state, run, weights, mesh, note)
            state = with_others(state, others, kept(Path(weights.run))[weights.step], mesh, note)
    else:
        like = abstract_state(model, optimiser, stage.reference, lora, others)
        state, data = store.restore(start, like, mesh, split(model)[0])
        host = LoopState.from_json(data, stage.records)
    host.coefficients = dict(stage.coefficients) | host.coefficients
    return state, host


def borrowed(
    state: TrainState, run: Configuration, weights: Start, mesh: Any, note: Callable[[str], None]
) -> TrainState:
    """A fresh state whose policy and reference are those of another run's checkpoint or snapshot, and its optimiser
    where that is there and its settings are the same.

    Raises:
      InputError: the other run's model or adapter is of another kind.
    """
    other = configs.read(Path(weights.run) / "config.json", own=False).run
    old = configs.whole(other.learner)
    shown = f"step {weights.step} of {weights.run}"
    kinds = [isinstance(one, configs.RewardModel) for one in (other, run)]
    if kinds[0] != kinds[1]:
        names = [type(one).__name__ for one in (other, run)]
        raise InputError(f"{shown} is of a {names[0]}, and this is a {names[1]}: give it as --model, not as --from")
    if old.lora != run.learner.lora:
        raise InputError(f"{shown} has {old.lora}, this run {run.learner.lora}: set learner.lora to what it is there")
    place = kept(Path(weights.run))[weights.step]
    snapshot = place.parent.name == SNAPSHOTS
    same = old.optimiser == run.learner.optimiser and not snapshot
    policy = state.policy
    like = jax.eval_shape(parts_of_policy, policy.params, policy.opt_state if same else None)
    for array in jax.tree.leaves((policy.params, policy.opt_state if same else None)):
        array.delete()  # there need not be room for both
    found = restore_parts(place, like, mesh, policy.base).policy
    why = "a snapshot keeps none" if snapshot else "its settings are"
    note(f"begins with {shown}: its weights" + (" and its optimiser" if same else f"; the optimiser is new, as {why}"))
    return reset_reference(
        state.with_role("policy", params=found.params, opt_state=found.opt_state if same else policy.opt_state)
    )


def with_others(
    state: TrainState, others: Sequence[NewRole], step_directory: Path, mesh: Any, note: Callable[[str], None]
) -> TrainState:
    """The state whose other roles are those of the checkpoint that its policy was borrowed from, with optimisers of
    their own; one that the checkpoint has not, or of other shapes, begins from the borrowed policy, unless it names a
    model.
    """
    for other in others:
        params = state.roles[other.name].params
        layout = jax.tree.map(lambda x: x.sharding, params)
        wanted = jax.eval_shape(lambda p, name=other.name: TrainState({name: Role(p, None, None)}, {}), params)
        if holds(step_directory, wanted):
            found = restore_parts(step_directory, wanted, mesh, state.policy.base).roles[other.name].params
            note(f"the {other.name} begins with its weights there too")
        elif other.load is None and state.policy.base is None:
            found = jax.jit(lambda p, first=other.first: jax.tree.map(jnp.copy, first(p)), out_shardings=layout)(
                state.policy.params
            )
        else:
            continue
        state = state.with_role(other.name, params=found)
    return state
