"""A run of several phases: what its settings are in each, and what is refused of them."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from typing import Any, TypeVar

from jaxrl_llm.algorithms.reduce import ConstantLength
from jaxrl_llm.config.field_types import check_types
from jaxrl_llm.config.numbers import MAX_SEED
from jaxrl_llm.config.run import Configuration, Run, overlong_weight, resolved
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.learner.settings import Optimiser
from jaxrl_llm.rules.settings import Phase, Reaches, Rules, Stalls

Kind = TypeVar("Kind", bound=Configuration)

FIXED = (
    "model", "mesh", "seed", "steps", "output", "rules", "evaluation.every", "evaluation.judge", "learner.dtype",
    "learner.lora", "recipe.critic",
)  # fmt: skip
"""Settings (and all below them) that are the same in all phases: what a state is made of, and when the run tests and
saves."""
OF_THE_OPTIMISER = ("name", "momentum_dtype", "offload")
"""Settings of the optimiser that decide what it remembers: they may change where it begins anew. So does
adafactor's ``b1``, where it is 0 or not: then it has no momentum."""


def rules_of_run(run: Configuration) -> Rules:
    """What the run says of what decides between its steps; runs from data say nothing."""
    return getattr(run, "rules", Rules())


def phases_of(run: Configuration) -> tuple[Phase, ...]:
    """The run's phases in turn; a run of one piece is one without a name."""
    return rules_of_run(run).phases or (Phase(""),)


def in_phase(run: Kind, number: int) -> Kind:
    """The run's settings in one phase, counted from 0: with the changes of all phases up to it, and resolved.

    A phase has random numbers of its own: its seed is the run's, shifted.

    Raises:
      InputError: a change names no setting, or one that no phase changes.
    """
    if not isinstance(run, Run) or not run.rules.phases:
        return run
    found = dataclasses.replace(run, rules=dataclasses.replace(run.rules, phases=()))
    for phase in run.rules.phases[: number + 1]:
        found = resolved(changed(found, phase.changes))
    return dataclasses.replace(found, seed=shifted(run.seed, number))


SHIFT = 1 << 16
"""Between the seeds of two phases."""


def shifted(seed: int, number: int) -> int:
    """The seed of a phase: below ``MAX_SEED``, and for the first one the run's own."""
    return (seed + number * SHIFT) % MAX_SEED


def shared_by_phases(seed: int) -> int:
    """What the seeds of all phases of a run have in common: below ``SHIFT``. The order of a task's problems is of it,
    so that no phase begins it anew."""
    return seed % SHIFT


def changed(run: Run, changes: Mapping[str, Any]) -> Run:
    """The run with other values of some settings, by their dotted names.

    What was filled in from a setting that changes is filled in anew: the temperature of a recipe, the budget as Dr.
    GRPO's constant, and the weight of an overlong punishment.
    """
    before = run
    for name, value in changes.items():
        run = _with(run, name.split("."), value, name)
    check_types(run)
    algorithm = run.recipe.algorithm
    longest = before.rollout.max_new_tokens
    if run.rollout.max_new_tokens != longest and algorithm.reduce == ConstantLength(longest):
        algorithm = dataclasses.replace(algorithm, reduce=ConstantLength(None))
        run = dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, algorithm=algorithm))
    follows = before.rollout.temperature == before.recipe.temperature and "rollout.temperature" not in changes
    if follows and run.recipe.temperature != before.recipe.temperature:
        run = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, temperature=None))
    own = {"recipe", "recipe.overlong_weight"} & changes.keys()
    filled_in = overlong_weight(_without_weight(before))  # nothing where it is 0
    if not own and filled_in and before.recipe.overlong_weight == filled_in:
        run = _without_weight(run)
    return run


def _without_weight(run: Run) -> Run:
    """Whose recipe leaves the weight of its overlong punishment open."""
    return dataclasses.replace(run, recipe=dataclasses.replace(run.recipe, overlong_weight=None))


def _with(value: Any, path: list[str], new: Any, name: str) -> Any:
    """A dataclass with one field, or one below it, replaced."""
    known = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    if path[0] not in known:
        close = difflib.get_close_matches(path[0], known, 1, 0.5)
        meant = (
            f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}" if known else "it has no parts"
        )
        raise InputError(f"a phase changes {name}, and there is no {path[0]} in {type(value).__name__}: {meant}")
    inner = new if len(path) == 1 else _with(getattr(value, path[0]), path[1:], new, name)
    return dataclasses.replace(value, **{path[0]: inner})


def check_phases(run: Run, check: Any) -> None:
    """Refuse phases that cannot work, all of them before the first one begins.

    ``check``: refuses what cannot work of a run of one piece.

    Raises:
      InputError: names the phase, its field or change, and the remedy.
    """
    phases = run.rules.phases
    names = [phase.name for phase in phases]
    for number, phase in enumerate(phases):
        where = f"rules.phases[{number}]"
        require(bool(phase.name), f"{where}.name is empty: say what it is, for the summary and the report")
        require(
            names.count(phase.name) == 1, f"{where}.name {phase.name!r} is another phase's too: give it one of its own"
        )
        _check_end(phase, where, last=number == len(phases) - 1)
        try:
            _check_changes(run, number, where)
            check(in_phase(run, number))
        except InputError as error:
            raise InputError(f"phase {phase.name!r}: {error}") from None


def unreached(run: Configuration) -> list[str]:
    """A note where the run's steps end before its last phase can begin."""
    phases = phases_of(run)
    known = 0
    for number, phase in enumerate(phases[1:], start=1):
        known += phases[number - 1].steps or 0
        if known >= run.steps:
            return [f"phase {phase.name} does not begin in {run.steps} steps: those before it take {known}"]
    return []


def _check_end(phase: Phase, where: str, last: bool) -> None:
    require(phase.steps is None or phase.steps >= 1, f"{where}.steps must be at least 1, got {phase.steps}")
    require(
        not last or (phase.steps is None and phase.until is None),
        f"{where} is the last phase, which lasts until the run's steps are made: leave out its steps and until",
    )
    require(
        last or phase.steps is not None or phase.until is not None,
        f"{where} never ends, and others come after it: give it steps, or until",
    )
    until = phase.until
    if isinstance(until, Reaches):
        bounds = [bound for bound in (until.above, until.below) if bound is not None]
        require(
            len(bounds) == 1 and math.isfinite(bounds[0]),
            f"{where}.until needs one finite bound, above or below, got {until}",
        )
        require(until.times >= 1, f"{where}.until.times must be at least 1, got {until.times}")
        require(bool(until.metric), f"{where}.until.metric is empty: give a metric's name (docs/metrics.md)")
    if isinstance(until, Stalls):
        require(until.evaluations >= 1, f"{where}.until.evaluations must be at least 1, got {until.evaluations}")


def remembered(optimiser: Optimiser) -> dict[str, Any]:
    """What decides on the form of what an optimiser remembers, by the names of its settings."""
    form = {field: getattr(optimiser, field) for field in OF_THE_OPTIMISER}
    return form | {"b1": optimiser.name == "adafactor" and optimiser.b1 > 0}


def _check_changes(run: Run, number: int, where: str) -> None:
    """Refuse changes of what all phases share, and a wait for evaluations that never come."""
    phase = run.rules.phases[number]
    for name in phase.changes:
        require(isinstance(name, str), f"{where} changes {name!r}: give a setting by its dotted name, as text")
        fixed = [
            other for other in FIXED if name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.")
        ]
        if name in ("learner", "recipe", "evaluation"):
            continue  # a whole part: what it holds is compared below
        require(not fixed, f"{where} changes {name}, which is the same in all phases: set it for the run")
    require(
        not isinstance(phase.until, Stalls) or run.evaluation.every > 0,
        f"{where}.until waits for evaluations: set evaluation.every above 0",
    )
    before, after = in_phase(run, max(number - 1, 0)), in_phase(run, number)
    for name, one, other in (
        ("learner.dtype", before.learner.dtype, after.learner.dtype),
        ("learner.lora", before.learner.lora, after.learner.lora),
        ("recipe.critic", before.recipe.critic, after.recipe.critic),
        ("evaluation.every", before.evaluation.every, after.evaluation.every),
        ("evaluation.judge", before.evaluation.judge, after.evaluation.judge),
    ):
        require(one == other, f"{where} changes {name}, which is the same in all phases: set it for the run")
    warmup = after.learner.optimiser.warmup
    require(
        number == 0 or warmup in (0, before.learner.optimiser.warmup),
        f"{where} changes learner.optimiser.warmup to {warmup}, which counts the updates of the whole run, not "
        "of a phase: set it for the run, or give the phase a lower learning_rate",
    )
    then, now = remembered(before.learner.optimiser), remembered(after.learner.optimiser)
    for field, value in then.items():
        require(
            value == now[field] or phase.reset_optimiser,
            f"{where} changes learner.optimiser.{field}, which decides what the optimiser remembers: set its "
            "reset_optimiser True",
        )
    require(
        not phase.reset or after.recipe.algorithm.needs_reference or run.output.monitor_kl,
        f"{where}.reset True has no reference to reset: give the recipe a KL, or set reset False",
    )
    require(
        run.evaluation.judge is None or after.task == before.task,
        f"{where} changes task, and evaluation.judge compares answers to the problems of the first phase: set one of "
        "them only",
    )
