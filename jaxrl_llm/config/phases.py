"""Runs of several phases: the settings in each phase, and their validation."""

import dataclasses
import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from jaxrl_llm.algorithms.reduce import ConstantLength
from jaxrl_llm.config.checks import check_run, check_types, resolved
from jaxrl_llm.config.mixture import overlong_weight
from jaxrl_llm.config.run import MAX_SEED, Run, keeps_reference
from jaxrl_llm.config.texts import Configuration
from jaxrl_llm.errors import InputError, did_you_mean, naming, require
from jaxrl_llm.learner.settings import Optimiser
from jaxrl_llm.rules.settings import Phase, Stalls, Until
from jaxrl_llm.system.setting import FIXED, check_fields, names_marked

Kind = TypeVar("Kind", bound=Configuration)

OF_THE_OPTIMISER = ("name", "moments.dtype", "moments.offload")
"""Settings that decide the form of the optimiser's state: they, and adafactor's momentum, may change at its reset."""


def phases_of(run: Configuration) -> tuple[Phase, ...]:
    """Return the run's phases in order; a run without phases has one, with an empty name."""
    return run.rules.phases or (Phase("", until=run.rules.until),)


def in_phase(run: Kind, number: int) -> Kind:
    """Return the run's settings in one phase, counted from 0: with all changes up to it, resolved, and a seed shifted
    from the run's, below ``MAX_SEED``. InputError: a change names no setting, or one that no phase changes.
    """
    if not isinstance(run, Run) or not run.rules.phases:
        return run
    *_, settings = itertools.islice(_by_phase(run), number + 1)
    return settings


def _by_phase(run: Any) -> Iterator[Any]:
    """Yield the settings of each phase in order; those of one are made from those of the phase before it."""
    settings = dataclasses.replace(run, rules=dataclasses.replace(run.rules, phases=()))
    for number, phase in enumerate(run.rules.phases):
        settings = resolved(changed(settings, phase.changes))
        yield dataclasses.replace(settings, seed=(run.seed + number * SHIFT) % MAX_SEED)


SHIFT = 1 << 16
"""The difference between the seeds of two consecutive phases; what is left of a seed below it, all of them share."""


def changed(run: Run, changes: Mapping[str, Any]) -> Run:
    """Return the run with new values of some settings, by their dotted names. Settings derived from them are derived
    again: a recipe's temperature, the budget as Dr. GRPO's constant, the weight of an overlong punishment.
    """
    before = run
    for name, value in changes.items():
        run = _with(run, name, value)
    check_types(run)
    longest = before.rollout.max_new_tokens
    if run.rollout.max_new_tokens != longest and run.recipe.algorithm.reduce == ConstantLength(longest):
        run = _with(run, "recipe.algorithm.reduce", ConstantLength(None))
    follows = before.rollout.temperature == before.recipe.temperature and "rollout.temperature" not in changes
    if follows and run.recipe.temperature != before.recipe.temperature:
        run = _with(run, "rollout.temperature", None)
    replaced = {"recipe", "recipe.overlong", "recipe.overlong.weight"} & changes.keys()
    filled_in = overlong_weight(_with(before, "recipe.overlong.weight", None))  # nothing where it is 0
    if not replaced and filled_in and before.recipe.overlong.weight == filled_in:
        run = _with(run, "recipe.overlong.weight", None)
    return run


def _with(value: Any, name: str, new: Any, path: str = "") -> Any:
    """Return a dataclass with another value of a field, nested ones by dotted name; messages name ``path``."""
    field, dot, rest = name.partition(".")
    fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    if field not in fields:
        alternatives = f"there are {', '.join(fields)}" if fields else "it has no parts"
        meant = did_you_mean(field, fields, alternatives, near=0.5)
        raise InputError(f"a phase changes {path or name}, and there is no {field} in {type(value).__name__}: {meant}")
    inner = _with(getattr(value, field), rest, new, path or name) if dot else new
    return dataclasses.replace(value, **{field: inner})


def validate(run: Configuration) -> None:
    """Refuse settings that cannot work, before anything is loaded; all phases are checked before the first begins.
    InputError names the phase, the field, its value and the remedy.
    """
    if not isinstance(run, Run) or not run.rules.phases:
        check_run(run)
        if isinstance(run, Run) and run.rules.until is not None:
            _check_until(run, run.rules.until, "rules.until")
        return
    settings = _by_phase(run)
    before = None
    for number, phase in enumerate(run.rules.phases):
        where = f"rules.phases[{number}]"
        phase.check(run, f"{where}.")
        if phase.until is not None:
            _check_until(run, phase.until, f"{where}.until")
        with naming(f"phase {phase.name!r}"):
            _check_names(run, phase, where)
            after = next(settings)
            _check_changes(run, phase, before, after, where)
            check_run(after)
            before = after


def unreached(run: Configuration) -> list[str]:
    """Return a note if the run's steps end before its last phase can begin."""
    phases = phases_of(run)
    steps_before = 0
    for number, phase in enumerate(phases[1:], start=1):
        steps_before += phases[number - 1].steps or 0
        if steps_before >= run.steps:
            return [f"phase {phase.name} does not begin in {run.steps} steps: those before it take {steps_before}"]
    return []


def remembered(optimiser: Optimiser) -> dict[str, Any]:
    """Return the settings that decide the form of the optimiser's state, by name."""
    form = {field: operator.attrgetter(field)(optimiser) for field in OF_THE_OPTIMISER}
    return form | {"moments.b1": optimiser.name == "adafactor" and optimiser.moments.b1 > 0}


def _check_until(run: Run, until: Until, where: str) -> None:
    """Refuse a condition that cannot hold."""
    check_fields(until, f"{where}.")
    until.check(run, f"{where}.")
    if isinstance(until, Stalls) and not until.metric and run.evaluation.every <= 0:
        raise InputError(f"{where} waits for evaluations: set evaluation.every above 0")


def _check_names(run: Run, phase: Phase, where: str) -> None:
    """Refuse changes that name settings that all phases share."""
    fixed = names_marked(type(run), FIXED)
    parents = {name.rpartition(".")[0] for name in fixed}
    for name in phase.changes:
        require(isinstance(name, str), f"{where} changes {name!r}: give a setting by its dotted name, as text")
        if name in parents:
            continue  # a whole part: what it holds is compared below
        near = [part for part in fixed if f"{name}.".startswith(f"{part}.") or part.startswith(f"{name}.")]
        require(not near, f"{where} changes {name}, which is the same in all phases: set it for the run")


def _check_changes(run: Run, phase: Phase, before: Run | None, after: Run, where: str) -> None:
    """Refuse changes of settings that all phases share, from the settings before the phase, if it is not the first."""
    first = before is None
    before = before or after
    for name in names_marked(type(run), FIXED):
        if "." in name:
            same = operator.attrgetter(name)(before) == operator.attrgetter(name)(after)
            require(same, f"{where} changes {name}, which is the same in all phases: set it for the run")
    warmup = after.learner.optimiser.warmup
    require(
        first or warmup in (0, before.learner.optimiser.warmup),
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
        not phase.reset or keeps_reference(after),
        f"{where}.reset True has no reference to reset: give the recipe a KL, or set reset False",
    )
    require(
        run.evaluation.judge is None or after.task == before.task,
        f"{where} changes task, and evaluation.judge compares answers to the problems of the first phase: set one of "
        "them only",
    )
