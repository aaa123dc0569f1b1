"""A segment of a run: its stage, and its state, which is fresh, another run's, restored, or carried over.

A run begins or resumes with a segment, and each further phase is one; a rollback restores a state as a resume does.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm import config as configs
from jaxrl_llm import learner, rules
from jaxrl_llm.checkpoints.integrity import fault
from jaxrl_llm.checkpoints.snapshots import BEST, CHECKPOINTS, SNAPSHOTS, kept, phase_of
from jaxrl_llm.checkpoints.store import Checkpoints, holds, parts_of, restore_parts, steps_in
from jaxrl_llm.diagnosis.history import ROLLED_BACK
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import NewRole, reset_reference
from jaxrl_llm.models.heads import split
from jaxrl_llm.rules.decision import ENDED
from jaxrl_llm.runs.load import as_trained, find_run, host_state, load_model
from jaxrl_llm.runs.pins import needs_base
from jaxrl_llm.stages import stage_of
from jaxrl_llm.stages.stage import Stage, check_problems, state_of
from jaxrl_llm.telemetry.progress import model_line
from jaxrl_llm.trainer.context import Cursor, LoopState, RunContext, underway_after
from jaxrl_llm.types import TrainState


def load(context: RunContext, number: int, cursor: Cursor | None, resources: Any) -> Cursor:
    """Return the position before the first step of a phase; everything that may refuse the run is tried before any
    output.

    Args:
      context: of the run.
      number: the phase's.
      cursor: where the phase before has ended; None for the first one of this process.
      resources: of the phase's stage.
    """
    whole, mesh, progress, start = context.run, context.mesh, context.progress, context.start
    run = configs.in_phase(whole, number)
    if cursor is None:
        progress.status(f"loading {run.model}")
        weights = start is None or needs_base(run, context.directory)
        first = context.weights if start is None and not run.learner.lora.rank else None
        name = run.model if first is None or first.step else f"{first.run}@0"
        model, tokenizer = load_model(name, run.learner.dtype, mesh if weights else mesh.abstract_mesh)
        trained = as_trained(run, model)
    else:
        model, tokenizer = jax.eval_shape(base_of_policy, cursor.state), cursor.tokenizer
    stage = stage_of(run).prepare(run, model, tokenizer, mesh, resources, progress, context.peers)
    stage = with_phase(stage, whole, number)
    notes = stage.notes
    if cursor is None:
        for later in range(number + 1, len(configs.phases_of(whole))):  # it must be able to begin
            before, after = configs.in_phase(whole, later - 1), configs.in_phase(whole, later)
            try:
                stage_of(after).check_ahead(before, after, model.config, tokenizer, progress.status)
            except InputError as error:
                raise InputError(f"phase {configs.phases_of(whole)[later].name!r}: {error}") from None
        if start is not None:
            progress.status(f"restoring step {start}")
        parameters = sum(x.size for x in jax.tree.leaves(trained))  # of shapes, or of arrays which are consumed below
        state, host = begin(run, stage, trained, context.store, start, mesh, context.weights, progress.note)
        if start is not None and (underway := underway_after(context.directory, start)):
            host = LoopState.from_json(underway, stage.records)
        check_problems(host.problems, stage.problems, stage.label)
        sizes = parameters, optax.tree.size(state.policy.params), jax.device_count()
        progress.note(model_line(run.model, *sizes, jax.devices()[0].device_kind))
        notes = (*configs.unreached(whole), *notes)
        cursor = Cursor(run, tokenizer, stage, state, host, start or 0, {})
    cursor.settings, cursor.stage = run, stage
    cursor.host.problems = stage.problems
    cursor.host.coefficients = dict(stage.coefficients) | cursor.host.coefficients
    for line in notes:
        progress.note(line)
    return cursor


def base_of_policy(state: TrainState) -> Any:
    """Return the model that a stage is made of: the policy, or the frozen base of its adapter."""
    policy = state.policy
    return policy.params if policy.base is None else policy.base


def with_phase(stage: Stage, run: configs.Configuration, number: int) -> Stage:
    """Return the stage with the rule that ends its phase, or the run in its last one; if another phase follows, the end
    of a solved run ends only the phase."""
    if not isinstance(run, configs.Run):
        return stage
    phase, *later = configs.phases_of(run)[number:]
    following = later[0] if later else None
    if following is None and phase.until is None:
        return stage
    test = configs.evaluation_key(configs.in_phase(run, number))
    ends = functools.partial(
        rules.phase_ends, phase=phase, following=following, evaluation_every=run.evaluation.every, test=test
    )
    deciding = {**stage.rules, rules.OF_PHASES: ends}
    if following is not None and rules.OF_LESSONS in deciding:
        ended = functools.partial(rules.phase_ended, phase, following)
        deciding[rules.OF_LESSONS] = functools.partial(deciding[rules.OF_LESSONS], ended=ended)
    return dataclasses.replace(stage, rules=deciding)


def begin(
    run: configs.Configuration,
    stage: Stage,
    model: Any,
    store: Checkpoints,
    start: int | None,
    mesh: Any,
    weights: configs.Start | None,
    note: Callable[[str], None],
) -> tuple[TrainState, LoopState]:
    """Return a fresh state, or that of step ``start``; ``model`` is consumed, or read for its shapes only."""
    if start is not None:
        like = state_of(run, model, stage.training, stage.reference)
        return restored(store, start, like, mesh, split(model)[0], stage)
    others = [one.begins for one in stage.training if one.begins is not None]
    optimiser = build(run.learner.optimiser)
    state = learner.create_state(model, optimiser, stage.reference, mesh, run.learner.lora, run.seed, others)
    if weights is not None:
        state = borrowed(state, run, weights, mesh, note)
        if weights.step:
            state = with_others(state, others, kept(weights.directory)[weights.step], mesh, note)
    left = None if weights is None or not weights.carry else carried(run, stage, weights, note)
    return state, LoopState(left, coefficients=dict(stage.coefficients))


def carried(run: configs.Configuration, stage: Stage, weights: configs.Start, note: Callable[[str], None]) -> Any:
    """Return what the other run's checkpoint leaves to the first step of this one.

    Raises:
      InputError: the same task has other problems than it had there.
    """
    host = LoopState.from_json(host_state(weights), stage.records)
    found = configs.read(weights.directory / "config.json", own=False)
    before: Any = configs.in_phase(found.pinned, host.phase)
    shown = f"step {weights.step} of {weights.run}"
    if before.task == getattr(run, "task", None):
        asked = {"training": stage.problems["training"]}
        check_problems(host.problems, asked, stage.label, f"of {shown}", "leave --carry out")
    note(f"continues the data, curriculum and stored successes of {shown} too")
    return stage.carried_over(host.carried, before, run, anew=True)


def restored(
    store: Checkpoints, step: int, like: TrainState, mesh: Any, base: Any, stage: Stage
) -> tuple[TrainState, LoopState]:
    """Return the device state and the host state of a checkpoint; missing coefficients are the stage's own.

    The arguments are those of ``Checkpoints.restore``, and the stage of the steps that follow.
    """
    state, saved = store.restore(step, like, mesh, base)
    host = LoopState.from_json(saved, stage.records)
    host.coefficients = dict(stage.coefficients) | host.coefficients
    host.memory.pop(ENDED, None)
    return state, host


def borrowed(
    state: TrainState, run: configs.Configuration, weights: configs.Start, mesh: Any, note: Callable[[str], None]
) -> TrainState:
    """Return a fresh state with the policy and reference of another run's checkpoint or snapshot.

    The optimiser state is taken over too if it exists and has the same settings.

    Raises:
      InputError: the other run's model or adapter is of another kind.
    """
    other = configs.read(weights.directory / "config.json", own=False).run
    old = configs.whole(other.learner)
    shown = f"step {weights.step} of {weights.run}"
    kinds = [isinstance(one, configs.RewardModel) for one in (other, run)]
    if kinds[0] != kinds[1]:
        names = [type(one).__name__ for one in (other, run)]
        raise InputError(f"{shown} is of a {names[0]}, and this is a {names[1]}: give it as --model, not as --from")
    if old.lora != run.learner.lora:
        raise InputError(f"{shown} has {old.lora}, this run {run.learner.lora}: set learner.lora to what it is there")
    if weights.step == 0:
        base = find_run(f"{weights.run}@0")  # without an adapter loaded in place of the run's model
        other = f"{weights.run} has adapters of another model than {run.model}: give that with --model"
        require(not run.learner.lora.rank or (base is not None and base.run.model == run.model), other)
        note(f"begins with the model that {weights.run} began with; the optimiser is new")
        return state
    place = kept(weights.directory)[weights.step]
    snapshot = place.parent.name in (SNAPSHOTS, BEST)
    same = old.optimiser == run.learner.optimiser and not snapshot
    policy = state.policy
    like = jax.eval_shape(parts_of, policy.params, policy.opt_state if same else None)
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
    """Return the state with its other roles taken from the same checkpoint as the policy, with fresh optimisers. A role
    that the checkpoint lacks, or has in other shapes, begins from the borrowed policy, unless it names a model.
    """
    for other in others:
        params = state.roles[other.name].params
        layout = jax.tree.map(lambda x: x.sharding, params)
        wanted = jax.eval_shape(lambda p, role=other.name: parts_of(p, role=role), params)
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


def go_back(context: RunContext, cursor: Cursor, decision: rules.Decision) -> rules.Decision:
    """Roll back to the newest whole checkpoint of this phase before the step that a guard names.

    Returns the decision with the result, which is to stop if no such checkpoint exists. Data and update counts continue
    from here, so that no two policies share a version. Groups of the abandoned policy are dropped, and the rules'
    memory is restored (see ``remembered``).
    """
    host, before = cursor.host, int(decision.rollback or 0)
    context.store.wait()
    folder = context.directory / CHECKPOINTS
    step = context.peers.first(lambda: newest_before(folder, before, host.phase, context.schedule.saves))
    if step is None:
        why = why_not_back(context.run, context.directory, before, host.phase)
        return rules.Decision(rules.GUARD, f"{decision.reason}; {why}", events={"event/guard": decision.reason})
    updates = {name: role.updates for name, role in cursor.state.roles.items()}
    base = cursor.state.policy.base
    like = jax.eval_shape(lambda x: x, cursor.state)
    trained = [(role.params, role.opt_state) for role in cursor.state.roles.values()]
    for array in jax.tree.leaves((trained, cursor.state.frozen)):
        array.delete()  # there need not be room for both
    state, then = restored(context.store, step, like, context.mesh, base, cursor.stage)
    for name, count in updates.items():
        state = state.with_role(name, updates=count)
    cursor.state = state
    cursor.host = dataclasses.replace(
        host,
        left=cursor.stage.let_go(host.carried),
        ready=None,
        memory=remembered(then.memory, host.memory, cursor.step + 1 - step),
        coefficients=then.coefficients,
    )
    said = f"to step {step}, with {decision.coefficients[rules.LR_SCALE]:g} times the learning rate: {decision.reason}"
    events = decision.events | {"event/rollback": said, ROLLED_BACK: step}
    return dataclasses.replace(decision, events=events)


def why_not_back(run: configs.Configuration, directory: Path, step: int, phase: int) -> str:
    """Explain why no checkpoint before this step is available for a rollback."""
    begun = min((number for number, found in kept(directory).items() if phase_of(found) == phase), default=0)
    if phase and step <= begun:
        return f"this phase began after step {begun}, and no run goes back into an earlier one"
    which = " of this phase" * (len(configs.phases_of(run)) > 1)
    return f"no checkpoint{which} from before it is kept to go back to: set --output.keep higher"


def newest_before(checkpoints: Path, step: int, phase: int, due: Callable[[int], bool]) -> int | None:
    """Return the newest whole checkpoint of this phase before a step, among those that are ``due``, or None."""
    for number in reversed(steps_in(checkpoints)):
        place = checkpoints / str(number)
        if number < step and due(number) and phase_of(place) == phase and not fault(place):
            return number
    return None


def remembered(then: rules.Memory, now: rules.Memory, undone: int) -> rules.Memory:
    """Return the rules' memory after a rollback of ``undone`` steps: that of the checkpoint, with the current memory of
    guards, phase length and new requests. The reference is as old as at the checkpoint, and later requests are still
    pending."""
    memory = dict(then)
    if rules.OF_GUARDS in now:
        memory[rules.OF_GUARDS] = now[rules.OF_GUARDS]
    if rules.OF_PHASES in now:
        memory[rules.OF_PHASES] = then.get(rules.OF_PHASES, {}) | {"steps": now[rules.OF_PHASES]["steps"]}
    last = then.get(rules.LAST, {})
    memory[rules.LAST] = last | {rules.UNDONE: last.get(rules.UNDONE, 0) + undone}
    asked = now.get(rules.BY_HAND, {})
    if asked.get("id") != then.get(rules.BY_HAND, {}).get("id"):
        memory[rules.BY_HAND] = asked | {rules.AGAIN: True}
    return memory
