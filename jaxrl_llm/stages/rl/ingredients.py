"""The ingredients of reinforcement learning, and the objectives, rules and coefficients of a run's settings."""

from functools import partial
from typing import Any

from jaxrl_llm import config as configs
from jaxrl_llm.learner import PolicyGradient
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.rules import (
    BY_HAND,
    LR_SCALE,
    OF_ENTROPY,
    Rule,
    by_hand,
    decide_by_own,
    entropy_controlled,
    guards_of,
    kl_controlled,
    rules_of,
)
from jaxrl_llm.stages.rl.constraints import Constraints
from jaxrl_llm.stages.rl.critic import CriticRole
from jaxrl_llm.stages.rl.ingredient import Ingredient
from jaxrl_llm.stages.rl.judges import Judges
from jaxrl_llm.stages.rl.observations import Observations
from jaxrl_llm.stages.rl.pretraining_mix import PretrainingMix
from jaxrl_llm.stages.rl.shared_credit import SharedCredit
from jaxrl_llm.stages.rl.teachers import Teachers
from jaxrl_llm.stages.rl.win_rate import WinRate

INGREDIENTS: list[type[Ingredient]] = [
    *(Judges, CriticRole, SharedCredit, Constraints, Observations, PretrainingMix, Teachers, WinRate),
]
"""All ingredients, in the order of their hooks' calls."""


def ingredients_of(run: configs.Run) -> tuple[Ingredient, ...]:
    """Return the ingredients of a run, with nothing loaded yet."""
    found = [kind.of(run) for kind in INGREDIENTS]
    return tuple(one for one in found if one is not None)


def objectives_of(run: configs.Run) -> tuple[Objective, ...]:
    """Return the training objectives of the policy; its gradient needs completions of its own."""
    algorithm, moves = run.recipe.algorithm, run.recipe.of_entropy is not None
    teacher = run.scoring.distillation
    others = algorithm.kl_in_loss or algorithm.entropy_coef or moves
    idle = teacher is not None and configs.without_rewards(run) and not (teacher.by_policy_gradient or others)
    policy = PolicyGradient(algorithm, run.learner.updates > 1, moves, idle)
    own = (policy,) if configs.samples_groups(run) else ()
    return (*own, *(objective for one in ingredients_of(run) for objective in one.objectives))


def moved_by_rules(run: configs.Run) -> dict[str, float]:
    """Return the initial values of the coefficients of loss and reward that a rule updates from step to step."""
    found = {name: number for one in ingredients_of(run) for name, number in one.coefficients.items()}
    if run.rules.guards and run.rules.on_guard == "rollback":
        found[LR_SCALE] = 1.0
    algorithm = run.recipe.algorithm
    if run.recipe.of_kl is not None:
        found["kl_coef"] = algorithm.kl_coef
    if run.recipe.of_entropy is not None:
        found["entropy_coef"] = algorithm.entropy_coef
    return found


def coefficients_of(run: configs.Run) -> dict[str, Any]:
    """Return the initial values of the numbers that objectives and updates are given in addition to data."""
    found: dict[str, Any] = {"temperature": run.rollout.temperature} | moved_by_rules(run)
    if run.learner.target_kl is not None:
        found["target_kl"] = run.learner.target_kl
    return found


def rules_for(run: configs.Run) -> dict[str, Rule]:
    """Return the rules between this run's steps, by name; if several stop it, the first gives the reason."""
    kl_coef, test = run.recipe.algorithm.kl_coef, configs.evaluation_key(run)
    own = {name: rule for one in ingredients_of(run) for name, rule in one.rules.items()}
    rules = guards_of(run, own, len(objectives_of(run)) > 1)
    rules |= rules_of(run.recipe.resets, run.evaluation.every, kl_coef, test)
    if configs.keeps_reference(run):
        rules[BY_HAND] = partial(by_hand, resets=run.recipe.resets)
    if run.recipe.of_kl is not None:
        rules["controller"] = partial(kl_controlled, reads=run.recipe.of_kl.reads, controller=run.recipe.of_kl)
    if run.recipe.of_entropy is not None:
        rules[OF_ENTROPY] = partial(entropy_controlled, controller=run.recipe.of_entropy)
    return rules | {f"own/{rule.name}": partial(decide_by_own, rule=rule) for rule in run.rules.own}


def dropped_endings(run: configs.Run) -> tuple[str, ...]:
    """Return the finish reasons of completions that the loss excludes."""
    cut_off = ("length",) if run.recipe.overlong.drop else ()
    return cut_off if run.rollout.repetition.learn else (*cut_off, "repetition")
