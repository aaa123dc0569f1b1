"""What a run scores beside the sum of its rewards, and what is refused of it."""

import math
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.algorithms.advantages import GAE, ProcessSupervised
from jaxrl_llm.config.mixture import holds_out, limits_of, parts_of_task, tasks_in
from jaxrl_llm.config.run import Run, given_rewards, rewards_of
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import shaping
from jaxrl_llm.rewards.bounds import REJECTED, Constraint, Gate, Threshold, base_of, check_bound
from jaxrl_llm.rewards.models import OF_STEPS, ON_DEVICE, StepReward
from jaxrl_llm.rewards.refusals import REFUSED, REFUSES_FROM
from jaxrl_llm.rewards.shaping import Reward
from jaxrl_llm.types import MEAN_OF_TASKS

JUDGED = "judged"
"""The part that says how good the judge of evaluations finds an answer."""


def watched(run: Run) -> dict[str, Any]:
    """What is scored beside the rewards, by the names of its parts: costs of constraints, the gate, who refuses."""
    scoring = run.scoring
    costs = {constraint.part: constraint.cost for constraint in scoring.constraints}
    gate = {} if scoring.gate is None else {REJECTED: scoring.gate}
    return costs | gate | refusals(run)


def refusals(run: Run) -> dict[str, Any]:
    """What tells which completions refuse, by the name of its part; nothing where the run does not measure it."""
    given = run.scoring.refusals
    return {} if given is None else {REFUSED: Threshold(given, REFUSES_FROM)}


def asked(run: Run) -> dict[str, Any]:
    """What is scored in evaluations alone, by the names of its parts: how good their judge finds an answer."""
    return {} if run.evaluation.judge is None else {JUDGED: run.evaluation.judge}


def bases(run: Run) -> list[Any]:
    """All that is scored, bounds taken off."""
    return [base_of(reward) for reward in (*given_rewards(run), *watched(run).values(), *asked(run).values())]


def of_steps(rewards: Sequence[Reward]) -> list[Any]:
    """Those of the rewards that value steps."""
    return [reward for reward in rewards if isinstance(reward, OF_STEPS)]


def check_scored(run: Run) -> None:
    """Refuse bounds that cannot work, and estimators that would not see what is scored.

    Raises:
      InputError: names the field, its value and the remedy.
    """
    scoring = run.scoring
    estimator = run.recipe.algorithm.advantage
    kind = type(estimator).__name__
    for field, values, wanted in (
        ("constraints", scoring.constraints, Constraint),
        ("gate", () if scoring.gate is None else (scoring.gate,), Gate),
    ):
        for value in values:
            if not isinstance(value, wanted):
                raise InputError(f"scoring.{field} holds {value!r:.80}: give {wanted.__name__}(...)")
            check_bound(value, shaping.check)
    for value in refusals(run).values():
        check_bound(value, shaping.check)
    _check_judge(run)
    labels = [constraint.label for constraint in scoring.constraints]
    twice = {label for label in labels if labels.count(label) > 1}
    if twice:
        raise InputError(f"scoring.constraints has two of the name {min(twice)!r}: give one of them another name")
    if scoring.constraints and (estimator.several or isinstance(estimator, ProcessSupervised)):
        seen = "each reward alone" if estimator.several else "the rewards of steps alone"
        raise InputError(
            f"scoring.constraints changes the sum of the rewards, and {kind} looks at {seen}: set scoring.constraints "
            "(), or take another estimator"
        )
    given = given_rewards(run)
    if "step_rewards" in estimator.needs and not of_steps(given):
        raise InputError(
            f"recipe.algorithm.advantage {kind} needs step_rewards, and no reward values steps: add "
            "StepFunction('module:function') to scoring.rewards, or take an estimator of outcome rewards, such as "
            "GroupZScore"
        )
    rising = [one for one in of_steps(given) if isinstance(one, StepReward) and one.differences]
    if rising and not isinstance(getattr(estimator, "estimator", estimator), GAE):
        raise InputError(
            f"reward {rising[0].name} gives differences between steps, and {kind} is not GAE: centred, they would "
            "leave a sum that depends on how many steps there are; take GAE (--recipe ppo), or differences False"
        )
    if any(isinstance(base, ON_DEVICE) for base in bases(run)):
        _check_wording(run)
    if estimator.several and len(of_steps(given)) == len(given):
        raise InputError(f"{kind} looks at rewards of whole completions, and scoring.rewards has none: add one")


def _check_judge(run: Run) -> None:
    """Refuse a judge of nothing, and one that does not say one number of each answer."""
    judge = run.evaluation.judge
    if judge is None:
        return
    shaping.check(judge)
    if isinstance(base_of(judge), OF_STEPS):
        raise InputError(f"evaluation.judge is the step reward {judge.name}: give a reward with one value a completion")
    if judge.weight != 1:
        raise InputError(f"evaluation.judge has the weight {judge.weight:g}, which nothing reads: leave it out")
    if run.evaluation.task is None and not holds_out(run.task):
        raise InputError(
            f"evaluation.judge {judge.name} has no answers to compare: set task.holdout above 0, or evaluation.task"
        )


def _check_wording(run: Run) -> None:
    """Refuse two tasks that a reward model could not tell apart, and would read in other words than the policy."""
    pairs = [(one, other) for one in tasks_in(run.task) for other in tasks_in(run.evaluation.task)]
    for trained, tested in pairs:
        wording = ("template", "system", "suffix", "date") if tested.label == trained.label else ()
        differ = [name for name in wording if getattr(trained, name) != getattr(tested, name)]
        if differ:
            raise InputError(
                f"task and evaluation.task are both called {trained.label} and differ in {differ[0]}: give "
                "evaluation.task another name, by which reward models tell them apart"
            )


def check_mixture(run: Run) -> None:
    """Refuse tasks that cannot be told apart, and parts that cannot work.

    Raises:
      InputError: names the field, its value and the remedy.
    """
    for field, task in (("task", run.task), ("evaluation.task", run.evaluation.task)):
        parts = parts_of_task(task)
        if task is not None and not parts:
            raise InputError(f"{field}.parts is empty: give at least one Part(Task(...))")
        names = [part.task.label for part in parts]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(f"{field} has two tasks called {twice[0]!r}: give one of them another name (Task.name)")
        if len(parts) > 1 and MEAN_OF_TASKS in names:
            raise InputError(
                f"{field} has a task called {MEAN_OF_TASKS!r}, as the means over tasks are "
                f"(eval/{MEAN_OF_TASKS}/...): give it another name (Task.name)"
            )
        for number, part in enumerate(parts):
            if not isinstance(part.weight, (int, float)) or not 0 < part.weight < math.inf:
                raise InputError(f"{field}.parts[{number}].weight must be above 0, got {part.weight!r}: leave it out")
            if part.rewards == ():
                raise InputError(f"{field}.parts[{number}].rewards is empty: give at least one, or None for scoring's")
        for name, longest in limits_of(parts, run.rollout.max_new_tokens).items():
            if not 1 <= longest <= run.rollout.max_new_tokens:
                raise InputError(
                    f"{field}: max_new_tokens of {name} is {longest}: it must be from 1 to rollout.max_new_tokens "
                    f"{run.rollout.max_new_tokens}"
                )
    _check_own_rewards(run)


def _check_own_rewards(run: Run) -> None:
    """Refuse rewards of some tasks where something reads those of all, column by column."""
    parts = parts_of_task(run.task)
    alike = all(rewards_of(run, part) == rewards_of(run, parts[0]) for part in parts)
    for part in parts:
        for reward in rewards_of(run, part):
            shaping.check(reward)
    if alike:
        return
    kind = type(run.recipe.algorithm.advantage).__name__
    if run.recipe.algorithm.advantage.several:
        raise InputError(
            f"{kind} weighs each reward, and the tasks have different ones: give all parts the same rewards, or take "
            "another estimator"
        )
    steps = of_steps(given_rewards(run))
    if steps:
        raise InputError(
            f"reward {steps[0].name} values steps, and the tasks have different rewards: give all parts the same ones"
        )
