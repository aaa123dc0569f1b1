"""Validation of a configuration before anything is loaded, and notes on settings without effect."""

import dataclasses
import math
import os
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.advantages import ProcessSupervised
from jaxrl_llm.algorithms.ratios import TruncatedIS
from jaxrl_llm.algorithms.reduce import ConstantLength
from jaxrl_llm.config.mixture import given_rewards, has_accuracy, of_steps, overlong_weight, parts_of_task, rewards_of
from jaxrl_llm.config.run import Run
from jaxrl_llm.config.texts import Configuration, Preference, RewardModel, Supervised
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rewards.functions import OF_STEPS
from jaxrl_llm.rewards.shaping import RelativeLength
from jaxrl_llm.sharding import BATCH, batch_parts
from jaxrl_llm.system.setting import annotations, check_settings, is_ours, parts_of, settings_in

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
    """Return the run with a ``Run``'s open settings filled in: the recipe's temperature, the budget as Dr. GRPO's
    constant, a correction if sampling runs ahead, the size of the overlong punishment, and a filter of groups by reward
    in place of accuracy if a task lacks ``Accuracy``: it would drop groups that all can teach.
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
    """Refuse a run without phases that cannot work; InputError names the field, its value and the remedy."""
    run = resolved(run)
    check_settings(run)
    # Last, since the checks of a field say more. Settings and report of a run are JSON, which holds no infinite number.
    for name, setting, hint in _fields_in(run):
        numbers = setting if isinstance(setting, (tuple, list)) else (setting,)
        if any(isinstance(number, Real) and abs(number) == math.inf for number in numbers):
            free = types.NoneType in typing.get_args(hint)
            raise InputError(f"{name} must be finite, got {setting}: give a finite number{' or None' if free else ''}")


def check_types(value: Any, but: type | tuple[()] = ()) -> None:
    """Refuse a field of this dataclass, or of one inside it, if its value matches none of its annotated types;
    InputError names the field, its value, and what it takes. ``but``: a class of unchecked placeholders.
    """
    for name, setting, hint in _fields_in(value):
        if not _fits(setting, hint) and not any(isinstance(part, but) for part in parts_of(setting)):
            text = f"{type(setting).__name__}(...)" if dataclasses.is_dataclass(type(setting)) else f"{setting!r:.80}"
            raise InputError(f"{name} is {text}: give {_described(hint)}")


def _fields_in(value: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield dotted name, value and annotation of the fields of the package's dataclasses, outer ones first."""
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from _fields_in(item, f"{where}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        hints = annotations(type(value)) if is_ours(type(value)) else {}
        for field in dataclasses.fields(value):
            setting = getattr(value, field.name)
            name = f"{where}.{field.name}" if where else field.name
            if field.name in hints:
                yield name, setting, hints[field.name][0]
            yield from _fields_in(setting, name)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value fits an annotation. Functions, protocols and the contents of mappings are not checked."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return any(_fits(value, argument) for argument in arguments)
    if origin is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if hint in SIMPLE:
        return SIMPLE[hint][1](value)
    if origin is tuple:
        if not isinstance(value, (tuple, list)):
            return False
        each = arguments[:1] * len(value) if arguments[1:] == (...,) else arguments
        return len(each) == len(value) and all(_fits(*pair) for pair in zip(value, each, strict=True))
    if origin is Mapping:
        return isinstance(value, Mapping)
    if dataclasses.is_dataclass(hint):
        return isinstance(value, hint) or not (isinstance(value, PLAIN) or is_ours(type(value)))
    return True


def _described(hint: Any) -> str:
    """Describe an annotation for people: ``a whole number or None``."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(_described(argument) for argument in arguments))
    if origin is typing.Literal:
        return " or ".join(repr(choice) for choice in arguments)
    if hint in SIMPLE:
        return SIMPLE[hint][0]
    if origin is tuple:
        if arguments[1:] != (...,):
            return f"({', '.join(map(_described, arguments))})"
        return f"a tuple of {_described(arguments[0])}, of one alone as (x,)"
    return "a dict" if origin is Mapping else f"{hint.__name__}(...)"


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


LEAST_COMPLETIONS = 128
"""The fewest completions per update in the papers' own runs."""
USUAL_MINIBATCHES = 4
"""The suggested number of minibatches where a paper does not publish its updates per batch."""


def notes(run: Run) -> list[str]:
    """Return all notes on a run to print before it begins, one line each."""
    run = resolved(run)
    setting_notes = [line for setting, _ in settings_in(run) for line in setting.notes(run)]
    lines = [*inert(run), *_short_memory(run), *_rewards(run), *setting_notes]
    if run.recipe.overlong.drop and "bootstrap" in run.recipe.algorithm.advantage.needs:
        lines.append(
            "completions that are cut off are left out of the loss: the value of the state after them is never read; "
            "--recipe.overlong.no_drop"
        )
    return lines


def inert(run: Run) -> list[str]:
    """List the pieces of the recipe that cannot act under the run's settings, and the flag under which they would."""
    run = resolved(run)
    recipe, resets = run.recipe, run.recipe.resets
    lines = _at_ratio_one(run)
    correction = recipe.algorithm.correction
    # A loss without a ratio leaves tokens of earlier steps to its correction.
    corrects_earlier = _learns_earlier(run) and not recipe.algorithm.surrogate.reads_ratio
    if correction is not None and not run.rollout.collect.staleness and not corrects_earlier:
        lines.append(
            f"sampler and learner are one policy: the correction {type(correction).__name__} sees no gap but rounding; "
            "--rollout.collect.staleness 1 makes one"
        )
    for name in ("reference_every", "optimiser_every"):
        if (every := getattr(resets, name)) > run.steps:
            lines.append(f"recipe.resets.{name} {every} never comes in {run.steps} steps")
    count = run.steps // resets.reference_every if resets.reference_every else 0
    if resets.snapshots and count > 20:
        lines.append(
            f"recipe.resets.reference_every {resets.reference_every} keeps {count} snapshots of the models for good; "
            "--recipe.resets.no_snapshots keeps none"
        )
    if recipe.critic is not None and recipe.critic.warmup >= run.steps:
        lines.append(f"recipe.critic.warmup {recipe.critic.warmup} leaves the policy none of {run.steps} steps")
    updates = run.steps * run.learner.updates
    for shape in recipe.shaping:
        if isinstance(shape, RelativeLength) and shape.warmup >= updates:
            lines.append(f"the length reward begins after {shape.warmup} updates, and the run makes {updates}")
    return lines


def _at_ratio_one(run: Run) -> list[str]:
    """List the pieces that only act once the live policy differs from the one that it is compared with: in a batch of
    one update it is the old one, and, unless sampling runs ahead, the one that sampled. Tokens of earlier steps are
    compared with the policy of their own time.
    """
    algorithm = run.recipe.algorithm
    stale = run.rollout.collect.staleness > 0
    surrogate = algorithm.surrogate
    against_sampler = algorithm.ratio.anchor == "sampler"
    waiting = {
        getattr(surrogate, "idle", ""): not (stale and against_sampler),
        "the weight against the sampler is 1": surrogate.reads_sampler and not stale,
        "the sequence filter drops nothing": algorithm.sequence_filter is not None and not stale,
    }
    idle = [piece for piece, waits in waiting.items() if piece and waits]
    if _learns_earlier(run):
        idle = [f"{piece} except on tokens of earlier steps" for piece in idle]
    if run.learner.target_kl is not None:
        idle.append("learner.target_kl stops nothing")
    critic = run.recipe.critic
    if critic is not None and critic.clip is not None and critic.epochs < 2:
        idle.append("recipe.critic.clip never binds")
    if not idle or run.learner.updates > 1:
        return []
    paper, prompts = run.recipe.paper, run.rollout.prompts
    published = 1 if paper is None else paper.count
    # Each minibatch has at least two groups.
    minibatches = max(2, min(published if published > 1 else USUAL_MINIBATCHES, prompts // 2))
    flag = "--learner.epochs 2" if prompts == 1 else f"--learner.minibatches {minibatches}"
    alike = ", as in the paper" if paper is not None and published == 1 else ""
    in_paper = few = ""
    if published > 1:
        each = "" if paper.completions is None else f" of {paper.completions} completions"
        in_paper = f" (the paper makes {published} updates{each})"
    size = prompts * run.rollout.group
    if prompts > 1 and size // minibatches < LEAST_COMPLETIONS:
        few = f", but {size} completions are few for it: papers have {LEAST_COMPLETIONS} or more an update"
    return [f"one update a batch{alike}: {', '.join(idle)}; {flag}{in_paper}{few}"]


def _learns_earlier(run: Run) -> bool:
    """Whether a batch may hold an earlier policy's tokens: surplus groups, parts of completions, stored successes."""
    collect = run.rollout.collect
    leaves = bool(run.recipe.filter_groups or collect.token_budget or collect.interrupt or collect.replay)
    return collect.learn_earlier and leaves


def _short_memory(run: Run) -> list[str]:
    """Note an optimiser that is reset before its first moment averages over as many gradients as it can."""
    every = run.recipe.resets.optimiser_every
    optimiser = run.learner.optimiser
    learner = run.learner
    updates = every * run.learner.updates
    memory = round(1 / (1 - optimiser.moments.b1))
    if not 0 < updates < memory or every > run.steps:
        return []
    when = "update" if updates == 1 else f"{updates} updates"
    alone = optimiser.name == "adamw" and updates == 1
    seen = "AdamW's steps are the signs of one gradient" if alone else f"its moments average over {memory}"
    needed = math.ceil(memory / every)
    minibatches = min(needed, run.rollout.prompts)
    epochs = math.ceil(needed / minibatches)
    flags = [f"--learner.minibatches {minibatches}"] if minibatches != learner.minibatches else []
    flags += [f"--learner.epochs {epochs}"] if epochs != learner.epochs else []
    remedy = f"{' '.join(flags)}, or --recipe.resets.optimiser_every {math.ceil(memory / run.learner.updates)}"
    return [f"the optimiser is reset after every {when}, and {seen}; {remedy}"]


def _rewards(run: Run) -> list[str]:
    """Note punishments without effect, filters on rewards for lack of ``Accuracy``, and rewards never read."""
    recipe = run.recipe
    lines = []
    parts = parts_of_task(run.task)
    lacking = [part.task.label for part in parts if not has_accuracy(rewards_of(run, part))]
    if recipe.filter_groups and lacking:
        whose = "" if len(lacking) == len(parts) else f" of {', '.join(lacking)}"
        lines.append(f"no Accuracy among the rewards{whose}: groups are filtered by reward")
    if recipe.overlong.share and recipe.overlong.weight is None:
        lines.append(
            f"no Accuracy among the rewards: recipe.overlong.share {recipe.overlong.share:g} punishes nothing; "
            "--recipe.overlong.weight W takes W away at the end of the budget (half of the distance between "
            "right and wrong)"
        )
    if recipe.overlong.drop and overlong_weight(run):
        lines.append(
            "completions that are cut off are punished but left out of the loss: being cut off is never unlearned; "
            "--recipe.overlong.no_drop"
        )
    rewards = given_rewards(run)
    steps = of_steps(rewards)
    estimator = recipe.algorithm.advantage
    kind = type(estimator).__name__
    if steps and not estimator.by_token:
        lines.append(
            f"{kind} reads outcome rewards: {', '.join(reward.name for reward in steps)} is measured, and nothing "
            "learns from it; estimators of steps are ProcessSupervised, Whitened and GAE"
        )
    mute = [part.task.label for part in parts if part.task.environment is None]
    if "turn_rewards" in estimator.needs and mute:
        lines.append(
            f"{kind} reads the rewards of turns, and task {mute[0]} has tools alone, which give none: only the "
            "end of an episode is rewarded"
        )
    if isinstance(estimator, ProcessSupervised):
        ignored = [reward.name for reward in rewards if not isinstance(reward, OF_STEPS) and reward.weight]
        if ignored:
            lines.append(f"{kind} reads the rewards of steps alone: {', '.join(ignored)} is measured only")
        if recipe.filter_groups:
            lines.append(
                f"{kind} reads the rewards of steps, and groups are filtered by {recipe.filter_groups}: "
                "--recipe.filter_groups False"
            )
    return lines
