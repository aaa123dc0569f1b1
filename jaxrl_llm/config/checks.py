"""Validation of a configuration before anything is loaded."""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.ratios import TruncatedIS
from jaxrl_llm.algorithms.reduce import ConstantLength
from jaxrl_llm.config.mixture import has_accuracy, overlong_weight, parts_of_task, rewards_of
from jaxrl_llm.config.run import Run
from jaxrl_llm.config.texts import Configuration, Preference, RewardModel, Supervised
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.sharding import BATCH, batch_parts
from jaxrl_llm.system.setting import annotations, check_settings, is_ours, parts_of

KINDS = (Run, Supervised, Preference, RewardModel)
"""The types of configurations: a file sets ``config`` to one of them; ``stages.STAGES`` maps each to its training."""
SIMPLE: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, bool)),
    int: (
        "a whole number",
        lambda value: not isinstance(value, bool) and hasattr(value, "__index__") and not np.ndim(value),
    ),
    float: ("a number", lambda value: not isinstance(value, bool) and hasattr(value, "__float__")),
    str: ("text", lambda value: isinstance(value, (str, os.PathLike))),
    types.NoneType: ("None", lambda value: value is None),
}
"""The names of simple types in messages for people, and whether a value fits them."""
PLAIN = (*SIMPLE, tuple, list, dict, type)
"""Types that cannot take the place of a dataclass; an object of a class from outside this package can."""
UNIONS = (typing.Union, types.UnionType)


def resolved(run: Any) -> Any:
    """Return the run with its open settings filled in; only a ``Run`` has open settings.

    Filled in are the recipe's temperature, the budget as Dr. GRPO's constant, a correction for tokens sampled by an
    older policy if sampling runs ahead, and the size of the overlong punishment. A filter of groups by accuracy
    becomes one by reward if a task lacks an ``Accuracy`` reward: it would drop groups that all can teach.
    """
    if not isinstance(run, Run):
        return run
    rollout = run.rollout
    recipe = run.recipe
    algorithm = run.recipe.algorithm
    reads = run.recipe.filter_groups
    if reads == "accuracy" and not all(has_accuracy(rewards_of(run, part)) for part in parts_of_task(run.task)):
        reads = "reward"
    if rollout.temperature is None:
        rollout = dataclasses.replace(rollout, temperature=run.recipe.temperature)
    if algorithm.reduce == ConstantLength(None):
        algorithm = dataclasses.replace(algorithm, reduce=ConstantLength(rollout.max_new_tokens))
    if rollout.collect.staleness and not (algorithm.corrects_sampler or algorithm.ratio.anchor == "sampler"):
        algorithm = dataclasses.replace(algorithm, correction=TruncatedIS())
    overlong = dataclasses.replace(recipe.overlong, weight=overlong_weight(run) or recipe.overlong.weight)
    recipe = dataclasses.replace(recipe, algorithm=algorithm, filter_groups=reads, overlong=overlong)
    return dataclasses.replace(run, rollout=rollout, recipe=recipe)


def check_run(run: Configuration) -> None:
    """Refuse settings that cannot work, in a run without phases; InputError names the field, its value and the
    remedy."""
    run = resolved(run)
    check_settings(run)
    # Last, since the checks of a field say more. Settings and report of a run are JSON, which holds no infinite number.
    for name, found, hint in _fields_in(run):
        numbers = found if isinstance(found, (tuple, list)) else (found,)
        if any(isinstance(one, Real) and abs(one) == math.inf for one in numbers):
            free = types.NoneType in typing.get_args(hint)
            raise InputError(f"{name} must be finite, got {found}: give a finite number{' or None' if free else ''}")


def check_types(value: Any, but: type | tuple[()] = ()) -> None:
    """Refuse a field of this dataclass, or of a dataclass inside it, if its value matches none of its annotated types.

    ``but``: a class of placeholders; fields with one in their values are not checked.

    Raises:
      InputError: names the field, its value, and what it takes.
    """
    for name, found, hint in _fields_in(value):
        if not _fits(found, hint) and not any(isinstance(part, but) for part in parts_of(found)):
            shown = f"{type(found).__name__}(...)" if dataclasses.is_dataclass(type(found)) else f"{found!r:.80}"
            raise InputError(f"{name} is {shown}: give {_described(hint)}")


def _fields_in(value: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the fields of the package's dataclasses in a value, outer ones first: dotted name, value and annotation.
    ``where``: the field that has the value."""
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _fields_in(item, f"{where}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = annotations(type(value)) if is_ours(type(value)) else {}
        for field in dataclasses.fields(value):
            found = getattr(value, field.name)
            name = f"{where}.{field.name}" if where else field.name
            if field.name in hints:
                yield name, found, hints[field.name][0]
            yield from _fields_in(found, name)


def _fits(value: Any, wanted: Any) -> bool:
    """Whether a value fits an annotation. Functions, protocols and the contents of mappings are not checked."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in UNIONS:
        return any(_fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if wanted in SIMPLE:
        return SIMPLE[wanted][1](value)
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        each = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return len(each) == len(value) and all(_fits(*pair) for pair in zip(value, each, strict=True))
    if origin is Mapping:
        return isinstance(value, Mapping)
    if dataclasses.is_dataclass(wanted):
        return isinstance(value, wanted) or not (isinstance(value, PLAIN) or is_ours(type(value)))
    return True


def _described(wanted: Any) -> str:
    """Describe an annotation for people: ``a whole number or None``."""
    origin, arguments = typing.get_origin(wanted), typing.get_args(wanted)
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(_described(one) for one in arguments))
    if origin is typing.Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if wanted in SIMPLE:
        return SIMPLE[wanted][0]
    if origin is tuple:
        if arguments[1:] != (...,):
            return f"({', '.join(map(_described, arguments))})"
        return f"a tuple of {_described(arguments[0])}, of one alone as (x,)"
    return "a dict" if origin is Mapping else f"{wanted.__name__}(...)"


def validate_on_processes(run: Any, processes: int) -> None:
    """Refuse devices set aside for sampling in a run of several processes."""
    require(
        processes == 1 or not run.mesh.rollout,
        f"mesh.rollout {run.mesh.rollout} sets devices aside within one process, and this run has {processes}, one on "
        "each host: set it to 0",
    )


def validate_on_devices(run: Any, devices: int, processes: int = 1) -> None:
    """Refuse a mesh that does not fit the devices or the batch, before any weight is loaded."""
    validate_on_processes(run, processes)
    sizes = run.mesh.sizes(devices)
    tensor, parts = sizes["tensor"], batch_parts(sizes)
    axes = [axis for axis in BATCH if axis in sizes]
    rows = run.learner.compute.microbatch_rows
    row_tokens = run.learner.compute.row_tokens
    require(
        row_tokens % tensor == 0,
        f"learner.compute.row_tokens {row_tokens} does not divide over mesh tensor {tensor}, so each of these devices "
        f"would hold all positions: make it a multiple of {tensor}, or 0 to choose",
    )
    require(
        rows % parts == 0,
        f"learner.compute.microbatch_rows {rows} does not divide over mesh {' x '.join(axes)} = "
        f"{' x '.join(str(sizes[axis]) for axis in axes)}: make it a multiple of {parts}, or 0 to choose",
    )


def validate_on_model(run: Run, positions: int) -> None:
    """Refuse prompts and completions longer than the model's ``positions``, before anything is compiled."""
    rollout = run.rollout
    require(
        rollout.max_length <= positions,
        f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} and rollout.max_new_tokens {rollout.max_new_tokens} "
        f"need {rollout.max_length} positions, and the model was made for {positions}: lower one by "
        f"{rollout.max_length - positions}",
    )
