"""State of a run in progress: the parts fixed while it trains, its position, the host state in its checkpoints, and
requests to it. The state of a phase is fresh, another run's, restored, or carried over; a rollback restores as a resume
does.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from rich.console import Console

from jaxrl_llm import codec, learner, rules
from jaxrl_llm import config as configs
from jaxrl_llm.checkpoints.snapshots import BEST, CHECKPOINTS, SNAPSHOTS, keep_only, kept, phase_of
from jaxrl_llm.checkpoints.step_files import fault, mark
from jaxrl_llm.checkpoints.store import Checkpoints, holds, parts_of, restore_parts, steps_in
from jaxrl_llm.config import Configuration, Start, to_json
from jaxrl_llm.config.origin import recorded_best
from jaxrl_llm.diagnosis import FindingTracker
from jaxrl_llm.diagnosis.history import ROLLED_BACK
from jaxrl_llm.errors import InputError, naming, one_line, require
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import NewRole, reset_optimiser, reset_reference, with_reference
from jaxrl_llm.models.decoder import initialise, parameter_shapes
from jaxrl_llm.models.heads import split_head
from jaxrl_llm.models.lora import BasePacker, freeze_base
from jaxrl_llm.models.peft import precision_warnings
from jaxrl_llm.plan.planning import choose_slots
from jaxrl_llm.rules import ASKED, BY_HAND, PHASE, Memory
from jaxrl_llm.rules.guards import ENDED
from jaxrl_llm.runs import as_trained, find_run, host_state, load_model, needs_base
from jaxrl_llm.sharding import make_mesh
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages import stage_of
from jaxrl_llm.stages.stage import Fingerprints, Stage, check_problems, planned_state
from jaxrl_llm.system import lease, storage
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.system.paths import new_file
from jaxrl_llm.system.signals import Preemption
from jaxrl_llm.telemetry import Verbosity
from jaxrl_llm.telemetry.progress import Progress, Schedule, model_line
from jaxrl_llm.telemetry.records import RunWriter, log_to_file
from jaxrl_llm.types import TrainState


@dataclasses.dataclass
class LoopState:
    """The host state of the loop, saved with the device state. ``carry``: what the last step passes to the next one;
    None before the first. ``memory``: of each rule. ``coefficients``: of the loss, for the next step, where a rule
    moves them. ``problems``: fingerprints of those that the run, or its phase, began with; empty between two phases.
    ``phase``: its number, from 0.
    """

    carry: Any = None
    memory: Memory = dataclasses.field(default_factory=dict)
    coefficients: dict[str, float] = dataclasses.field(default_factory=dict)
    problems: Fingerprints = dataclasses.field(default_factory=dict)
    phase: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any], records: Sequence[type]) -> "LoopState":
        """Rebuild the state from the JSON values in a checkpoint. ``records``: the dataclasses in it. InputError: it
        cannot be read.
        """
        try:
            return cls(**codec.from_json(data, records))
        except (ValueError, TypeError) as error:
            reason = one_line(error, 200)
            raise InputError(f"the checkpoint's host state cannot be read ({reason}): remove it") from None


@dataclasses.dataclass
class RunContext:
    """The parts of a run that stay the same through its phases. ``start``: the step of the checkpoint that it resumes
    from; None for a new run. ``weights``: the checkpoint that a new run takes its first weights from; None for its
    model's. ``schedule``: of evaluations and checkpoints. ``store``: of checkpoints. ``progress``: the display for
    people. ``writer``: of the files; None but on the first process. ``tracker``: the input of guards, on process 0;
    None without guards. ``stop``: whether the run was asked to stop. ``update_s``: seconds of the last step's updates;
    infinite before the first one of this process.
    """

    run: Configuration
    directory: Path
    start: int | None
    weights: Start | None
    peers: Peers
    mesh: Any
    schedule: Schedule
    store: Checkpoints
    progress: Progress
    writer: RunWriter | None
    tracker: FindingTracker | None
    stop: Preemption
    update_s: float = math.inf

    def must_stop(self, before_update: bool = False) -> bool:
        """Whether any process was asked to stop and has no time left; ``before_update``: for updates like the last."""
        return any(self.peers.gather(self.stop.late(self.update_s if before_update else 0.0)))


@dataclasses.dataclass
class Cursor:
    """The current position of a run. ``settings``: of its phase, whose steps ``stage`` makes. ``state``: on the
    devices; ``host``: the host state. ``step``: the last one that is made. ``row``: the first entries of the next row.
    """

    settings: Configuration
    tokenizer: Any
    stage: Stage
    state: TrainState
    host: LoopState
    step: int
    row: dict[str, Any]


def rows_until(directory: Path, step: int | None, having: tuple[str, ...] = ()) -> Iterator[dict[str, Any]]:
    """Yield the run's rows up to a step; none if the step is None. ``having``: as in ``read_rows``."""
    rows = () if step is None else read_rows(directory / "metrics.jsonl", having)
    return (row for row in rows if row["step"] <= step)


def steps_moved(directory: Path, step: int | None, peers: Peers) -> set[int]:
    """Return the run's steps up to this one after which it went back or into another phase; none if it is None."""
    rows = rows_until(directory, step, (PHASE, ROLLED_BACK))
    return set(peers.first(lambda: [row["step"] for row in rows if PHASE in row or ROLLED_BACK in row]))


@contextlib.contextmanager
def open_context(
    run: Configuration,
    directory: Path,
    start: int | None,
    resumed: bool,
    weights: Start | None,
    peers: Peers,
    voice: Verbosity,
) -> Generator[RunContext]:
    """Open a run's devices, files and terminal output while it trains; only the first process writes and prints. The
    arguments are fields of ``RunContext``; ``resumed``: it has begun before, with a checkpoint or without one.
    """
    mesh = make_mesh(run.mesh)
    moved = steps_moved(directory, start, peers)
    schedule = Schedule(run.steps, run.evaluation.every, run.output.checkpoint_every, moved)
    first_step = (start or 0) + 1
    with (
        Checkpoints(directory / CHECKPOINTS, run.output.keep, schedule.saves) as store,
        jax.set_mesh(mesh),
        contextlib.ExitStack() as stack,
    ):
        writer = None
        if peers.leads:
            stack.enter_context(log_to_file(directory / "log.txt"))
            tracker = FindingTracker(run.steps, rows_until(directory, start))
            progress = stack.enter_context(Progress(schedule, first_step, tracker=tracker, quiet=voice.quiet))
            cut = (-1 if start is None else start) if resumed else None
            warn = functools.partial(progress.note, warning=True)
            writer = RunWriter(directory, cut, run.output.trackers, to_json(run), voice.rows, warn)
            stack.enter_context(writer)
        else:
            progress = stack.enter_context(Progress(schedule, first_step, Console(quiet=True)))
        guard_tracker = progress.tracker if run.rules.guards else None
        stop = Preemption(functools.partial(progress.note, warning=True), run.output.grace_s)
        yield RunContext(
            run, directory, start, weights, peers, mesh, schedule, store, progress, writer, guard_tracker, stop
        )


STEP_PROGRESS = "underway.json"
"""A file in the run's folder: the host state of a step that was stopped within its sampling, and the checkpoint that
the step begins with.
"""


def write_step_progress(directory: Path, step: int, host: dict[str, Any]) -> None:
    """Write the host state for the step after ``step``, which has a checkpoint without it."""
    with new_file(directory / STEP_PROGRESS) as part:
        part.write_text(json.dumps({"checkpoint": checkpoint_mark(directory, step), "host": host}))


def read_step_progress(directory: Path, step: int) -> dict[str, Any] | None:
    """Return the host state that was written for the step after this one; None without it. It belongs to one
    checkpoint: a run that went back further may have saved this step anew, with other weights.
    """
    progress = parse_step_progress(directory)
    return progress.get("host") if progress.get("checkpoint") == checkpoint_mark(directory, step) else None


def remove_step_progress(directory: Path) -> None:
    """Remove the host state of a stopped step once there is a later checkpoint."""
    step, _ = parse_step_progress(directory).get("checkpoint", (math.inf, ""))
    if step < math.inf and max(steps_in(directory / CHECKPOINTS), default=0) > step:
        (directory / STEP_PROGRESS).unlink(missing_ok=True)


def parse_step_progress(directory: Path) -> dict[str, Any]:
    """Return the saved progress of an unfinished step; {} without any."""
    path = directory / STEP_PROGRESS
    return json.loads(path.read_bytes()) if path.exists() else {}


def checkpoint_mark(directory: Path, step: int) -> list[Any]:
    """Return the step of a checkpoint and what identifies its files."""
    return [step, mark(directory / CHECKPOINTS / str(step))]


def remove_old_best(directory: Path) -> None:
    """Remove the models of earlier best evaluations, but for those that were the best as of a checkpoint: a run that
    resumes or rolls back to it still has them.
    """
    if steps_in(directory / BEST) and recorded_best(directory) in (0, *kept(directory)):
        if storage.address(directory):  # its row is there too before an older one goes
            lease.before_commit(directory)
        ends = (*steps_in(directory / CHECKPOINTS), math.inf)
        keep_only(directory / BEST, [recorded_best(directory, last=last) for last in ends])


REQUEST = "reset.json"
"""A file in the run's folder: a request to the run in training, kept until the result is in a checkpoint."""


def request_reset(directory: Path, with_optimiser: bool) -> None:
    """Request a reset of the reference after the current step of the run, or after its next one once it is resumed."""
    request = {"id": f"{time.time_ns()}-{os.getpid()}", "with_optimiser": with_optimiser}
    with new_file(directory / REQUEST) as part:
        part.write_text(json.dumps(request))


def read_reset_request(directory: Path) -> dict[str, Any]:
    """Return the pending request, if any, as input of the rules, which know whether it is new."""
    try:
        return {ASKED: json.loads((directory / REQUEST).read_text())}
    except FileNotFoundError:
        return {}


def remove_settled(directory: Path, memory: Memory) -> None:
    """Remove a request and a stopped step's host state that a complete checkpoint has settled."""
    remove_reset_request(directory, memory)
    remove_step_progress(directory)


def remove_reset_request(directory: Path, memory: Memory) -> None:
    """Remove the request once a complete checkpoint has its result. A run that is killed before that resumes without
    the result, and finds the file again. ``memory``: of the run's rules.
    """
    done_request = memory.get(BY_HAND, {})
    request = read_reset_request(directory).get(ASKED)
    same = request is not None and request["id"] == done_request.get("id")
    if same and max(steps_in(directory / CHECKPOINTS), default=0) >= done_request["step"]:
        (directory / REQUEST).unlink(missing_ok=True)


def load_phase(context: RunContext, number: int, cursor: Cursor | None, resources: Any) -> Cursor:
    """Return the position before the first step of phase ``number``; everything that may refuse the run is tried before
    any output. ``cursor``: where the phase before has ended, None for this process's first; ``resources``: of the
    stage.
    """
    all_phases, mesh, progress, start = context.run, context.mesh, context.progress, context.start
    run = configs.in_phase(all_phases, number)
    if cursor is None:
        progress.status(f"loading {run.model}")
        weights = start is None or needs_base(run, context.directory)
        first_weights = context.weights if start is None and not run.learner.lora.rank else None
        name = run.model if first_weights is None or first_weights.step else f"{first_weights.run}@0"
        packer = BasePacker(run.learner.lora) if weights and run.learner.lora.packed else None
        model, tokenizer = load_model(name, run.learner.initial_dtype, mesh if weights else mesh.abstract_mesh, packer)
        trained = as_trained(run, model)
    else:
        model, tokenizer = policy_base(cursor.state), cursor.tokenizer
    chosen, choices = choose_slots(run, model.config)
    stage = stage_of(run).prepare(chosen, model, tokenizer, mesh, resources, progress, context.peers)
    stage = add_phase_rule(stage, all_phases, number)
    notes = (*stage.notes, *choices)
    if cursor is None:
        for later in range(number + 1, len(configs.phases_of(all_phases))):  # it must be able to begin
            before, after = configs.in_phase(all_phases, later - 1), configs.in_phase(all_phases, later)
            with naming(f"phase {configs.phases_of(all_phases)[later].name!r}"):
                stage_of(after).check_phase(before, after, model.config, tokenizer, progress.status)
        if start is not None:
            progress.status(f"restoring step {start}")
        # of shapes, or of arrays which are consumed below
        parameters = sum(map(math.prod, parameter_shapes(split_head(trained)[0].config).values()))
        checksums = packer.checksums if packer else None
        places = context.store, start, mesh, context.weights
        state, host = create_or_restore(run, stage, trained, *places, progress.note, checksums)
        if start is not None and (progress_json := read_step_progress(context.directory, start)):
            host = LoopState.from_json(progress_json, stage.records)
        check_problems(host.problems, stage.problems, stage.label)
        sizes = parameters, optax.tree.size(state.policy.params), jax.device_count()
        progress.note(model_line(run.model, *sizes, jax.devices()[0].device_kind))
        if start is None:
            for line in precision_warnings(storage.folder(run.model), run.learner.lora):
                progress.note(line, warning=True)
            if packer and packer.repacked:
                progress.note(f"{run.model} holds {', '.join(sorted(packer.repacked))} packed in another form than "
                              f"{run.learner.lora.base}: they are widened, and packed again")  # fmt: skip
        notes = (*configs.unreached(all_phases), *notes)
        cursor = Cursor(run, tokenizer, stage, state, host, start or 0, {})
    cursor.settings, cursor.stage = run, stage
    cursor.host.problems = stage.problems
    cursor.host.coefficients = dict(stage.coefficients) | cursor.host.coefficients
    for line in notes:
        progress.note(line)
    return cursor


def policy_base(state: TrainState) -> Any:
    """Return the model that a stage is made of, as shapes: the policy, or its adapter's base as it was read."""
    policy = state.policy
    if policy.base is None:
        return jax.eval_shape(lambda model: model, policy.params)
    dtype = policy.base.weights.embed.dtype
    return jax.eval_shape(functools.partial(initialise, policy.base.config, dtype=dtype), jax.random.key(0))


def add_phase_rule(stage: Stage, run: configs.Configuration, number: int) -> Stage:
    """Return the stage with the rule that ends its phase, or the run in its last one; if another phase follows, the end
    of a solved run ends only the phase.
    """
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
        phase_ended = functools.partial(rules.phase_ended, phase, following)
        deciding[rules.OF_LESSONS] = functools.partial(deciding[rules.OF_LESSONS], ended=phase_ended)
    return dataclasses.replace(stage, rules=deciding)


def create_or_restore(
    run: configs.Configuration,
    stage: Stage,
    model: Any,
    store: Checkpoints,
    start: int | None,
    mesh: Any,
    weights: configs.Start | None,
    note: Callable[[str], None],
    checksums: Mapping[str, Any] | None = None,
) -> tuple[TrainState, LoopState]:
    """Return a fresh state, or that of step ``start``; ``model`` is consumed, or read for its shapes only.
    ``checksums``: of a model that was packed as it was read.
    """
    if start is not None:
        like = planned_state(run, model, stage.training, stage.reference)
        state, host = restore_state(store, start, like, mesh, (split_head(model)[0], checksums or None), stage)
        return freeze_base(state, run.learner.lora, mesh), host
    others = [role.begins for role in stage.training if role.begins is not None]
    optimiser = build(run.learner.optimiser)
    state = learner.create_state(model, optimiser, stage.reference, mesh, run.learner.lora, run.seed, others, checksums)
    if weights is not None:
        state = take_weights(state, run, weights, mesh, note)
        if weights.step:
            state = take_other_roles(state, others, kept(weights.directory)[weights.step], mesh, note)
    carry = None if weights is None or not weights.carry else load_carry(run, stage, weights, note)
    return state, LoopState(carry, coefficients=dict(stage.coefficients))


def load_carry(run: configs.Configuration, stage: Stage, weights: configs.Start, note: Callable[[str], None]) -> Any:
    """Return what the other run's checkpoint leaves to the first step of this one. InputError: the same task has other
    problems than it had there.
    """
    host = LoopState.from_json(host_state(weights), stage.records)
    config = configs.read(weights.directory / "config.json", own=False)
    before: Any = configs.in_phase(config.pinned, host.phase)
    origin = f"step {weights.step} of {weights.run}"
    if before.task == getattr(run, "task", None):
        training = {"training": stage.problems["training"]}
        check_problems(host.problems, training, stage.label, f"of {origin}", "leave --carry out")
    note(f"continues the data, curriculum and stored successes of {origin} too")
    return stage.carry_over(host.carry, before, run, new_run=True)


def restore_state(
    store: Checkpoints, step: int, like: TrainState, mesh: Any, frozen: tuple[Any, Any], stage: Stage
) -> tuple[TrainState, LoopState]:
    """Return the device state and the host state of a checkpoint; missing coefficients are the stage's own. The
    arguments are those of ``Checkpoints.restore``, ``frozen`` the base and its checksums; and the stage of the steps
    that follow.
    """
    state, host_values = store.restore(step, like, mesh, *frozen)
    host = LoopState.from_json(host_values, stage.records)
    host.coefficients = dict(stage.coefficients) | host.coefficients
    host.memory.pop(ENDED, None)
    return state, host


def take_weights(
    state: TrainState, run: configs.Configuration, weights: configs.Start, mesh: Any, note: Callable[[str], None]
) -> TrainState:
    """Return a fresh state with the policy and reference of another run's checkpoint or snapshot, and with its
    optimiser state if that exists and has the same settings. InputError: the other run's model or adapter is of another
    kind.
    """
    other = configs.read(weights.directory / "config.json", own=False).run
    old = configs.whole(other.learner)
    origin = f"step {weights.step} of {weights.run}"
    kinds = [isinstance(config, configs.RewardModel) for config in (other, run)]
    if kinds[0] != kinds[1]:
        names = [type(config).__name__ for config in (other, run)]
        raise InputError(f"{origin} is of a {names[0]}, and this is a {names[1]}: give it as --model, not as --from")
    if old.lora != run.learner.lora:
        raise InputError(f"{origin} has {old.lora}, this run {run.learner.lora}: set learner.lora to what it is there")
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
    restored = restore_parts(place, like, mesh, policy.checksums).policy
    why = "a snapshot keeps none" if snapshot else "its settings are"
    note(f"begins with {origin}: its weights" + (" and its optimiser" if same else f"; the optimiser is new, as {why}"))
    return reset_reference(
        state.with_role("policy", params=restored.params, opt_state=restored.opt_state if same else policy.opt_state)
    )


def take_other_roles(
    state: TrainState, others: Sequence[NewRole], step_directory: Path, mesh: Any, note: Callable[[str], None]
) -> TrainState:
    """Return the state with its other roles taken from the same checkpoint as the policy, with fresh optimisers. A role
    that the checkpoint lacks, or has in other shapes, begins from the borrowed policy, unless it names a model.
    """
    for other in others:
        params = state.roles[other.name].params
        layout = jax.tree.map(lambda array: array.sharding, params)
        shapes = jax.eval_shape(lambda p, role=other.name: parts_of(p, role=role), params)
        if holds(step_directory, shapes):
            role_params = restore_parts(step_directory, shapes, mesh, state.policy.checksums).roles[other.name].params
            note(f"the {other.name} begins with its weights there too")
        elif other.load is None and state.policy.base is None:
            role_params = jax.jit(lambda p, first=other.first: jax.tree.map(jnp.copy, first(p)), out_shardings=layout)(
                state.policy.params
            )
        else:
            continue
        state = state.with_role(other.name, params=role_params)
    return state


def roll_back(context: RunContext, cursor: Cursor, decision: rules.Decision) -> rules.Decision:
    """Roll back to the newest whole checkpoint of this phase before the step that a guard names; return the decision
    with the result: to stop, without such a checkpoint. Data and update counts continue from here, so that no two
    policies share a version. Groups of the abandoned policy are dropped; for the rules' memory see
    ``memory_after_rollback``.
    """
    host, before = cursor.host, int(decision.rollback or 0)
    context.store.wait()
    folder = context.directory / CHECKPOINTS
    step = context.peers.first(lambda: newest_before(folder, before, host.phase, context.schedule.saves))
    if step is None:
        why = explain_no_rollback(context.run, context.directory, before, host.phase)
        return rules.Decision(rules.GUARD, f"{decision.reason}; {why}", events={"event/guard": decision.reason})
    updates = {name: role.updates for name, role in cursor.state.roles.items()}
    policy = cursor.state.policy
    like = jax.eval_shape(lambda x: x, cursor.state)
    trained = [(role.params, role.opt_state) for role in cursor.state.roles.values()]
    for array in jax.tree.leaves((trained, cursor.state.frozen)):
        array.delete()  # there need not be room for both
    frozen = policy.base, policy.checksums
    state, checkpoint_host = restore_state(context.store, step, like, context.mesh, frozen, cursor.stage)
    for name, count in updates.items():
        state = state.with_role(name, updates=count)
    cursor.state = state
    cursor.host = dataclasses.replace(
        host,
        carry=cursor.stage.carry_after_rollback(host.carry),
        memory=memory_after_rollback(checkpoint_host.memory, host.memory, cursor.step + 1 - step),
        coefficients=checkpoint_host.coefficients,
    )
    message = (
        f"to step {step}, with {decision.coefficients[rules.LR_SCALE]:g} times the learning rate: {decision.reason}"
    )
    events = decision.events | {"event/rollback": message, ROLLED_BACK: step}
    return dataclasses.replace(decision, events=events)


def explain_no_rollback(run: configs.Configuration, directory: Path, step: int, phase: int) -> str:
    """Explain why no checkpoint before this step is available for a rollback."""
    first_step = min((number for number, path in kept(directory).items() if phase_of(path) == phase), default=0)
    if phase and step <= first_step:
        return f"this phase began after step {first_step}, and no run goes back into an earlier one"
    which = " of this phase" * (len(configs.phases_of(run)) > 1)
    return f"no checkpoint{which} from before it is kept to go back to: set --output.keep higher"


def newest_before(checkpoints: Path, step: int, phase: int, due: Callable[[int], bool]) -> int | None:
    """Return the newest whole checkpoint of this phase before a step, among those that are ``due``, or None."""
    for number in reversed(steps_in(checkpoints)):
        place = checkpoints / str(number)
        if number < step and due(number) and phase_of(place) == phase and not fault(place):
            return number
    return None


def memory_after_rollback(then: rules.Memory, now: rules.Memory, undone: int) -> rules.Memory:
    """Return the rules' memory after a rollback of ``undone`` steps: that of the checkpoint, with the current memory of
    guards, phase length and new requests. The reference is as old as at the checkpoint, and later requests are still
    pending.
    """
    memory = dict(then)
    if rules.OF_GUARDS in now:
        memory[rules.OF_GUARDS] = now[rules.OF_GUARDS]
    if rules.OF_PHASES in now:
        memory[rules.OF_PHASES] = then.get(rules.OF_PHASES, {}) | {"steps": now[rules.OF_PHASES]["steps"]}
    last = then.get(rules.LAST, {})
    memory[rules.LAST] = last | {rules.UNDONE: last.get(rules.UNDONE, 0) + undone}
    request = now.get(rules.BY_HAND, {})
    if request.get("id") != then.get(rules.BY_HAND, {}).get("id"):
        memory[rules.BY_HAND] = request | {rules.AGAIN: True}
    return memory


KEPT_ACROSS_PHASES = (rules.LAST, rules.BY_HAND, rules.OF_GUARDS)
"""Entries of the rules' memory that outlive a phase: the last reset, the last request, the actions of guards."""


def next_phase(run: configs.Configuration, stage: Stage, state: TrainState, host: LoopState) -> TrainState:
    """Return the state at the start of the run's next phase: with a reference if it needs one, reset if it says so.
    ``stage``: of the phase that has ended. ``state``: donated. ``host``: updated: the rules' memory is
    cleared, except for ``KEPT_ACROSS_PHASES``; if recipe and constraints stay equal, coefficients moved by rules and
    the memory of the entropy's controller are kept too; always the learning rate scale after a rollback.
    """
    before: Any = configs.in_phase(run, host.phase)
    host.phase += 1
    after: Any = configs.in_phase(run, host.phase)
    phase = configs.phases_of(run)[host.phase]
    host.carry = stage.carry_over(host.carry, before, after)
    host.problems = {}  # the next phase may have others
    same = (before.recipe, before.scoring.constraints) == (after.recipe, after.scoring.constraints)
    stay = (*KEPT_ACROSS_PHASES, rules.OF_ENTROPY) if same else KEPT_ACROSS_PHASES
    host.memory = {name: memory for name, memory in host.memory.items() if name in stay}
    if not same:
        host.coefficients = {
            name: coefficient for name, coefficient in host.coefficients.items() if name == rules.LR_SCALE
        }
    resets = rules.Decision(reset_reference=phase.reset, reset_optimiser=phase.reset_optimiser)
    return apply_resets(resets, with_reference(state, configs.keeps_reference(after)), after)


def apply_resets(decision: rules.Decision, state: TrainState, run: configs.Configuration) -> TrainState:
    """Return the state after a decision's resets of reference and optimiser."""
    if decision.reset_reference:
        state = reset_reference(state, decision.mix)
    if decision.reset_optimiser:
        state = reset_optimiser(state, build(run.learner.optimiser))
    return state
