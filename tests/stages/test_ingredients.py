"""Ingredients of reinforcement learning: what a run has of them, and that a bare one changes nothing."""

import dataclasses

import numpy as np
from tiny import rules_in

from jaxrl_llm.config import load_config, resolved
from jaxrl_llm.data import Texts
from jaxrl_llm.learner import Critic, Sample
from jaxrl_llm.rewards import Accuracy, ModelReward
from jaxrl_llm.rewards.shaping import Constraint
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.rollout.settings import Ptx
from jaxrl_llm.stages.ingredients import Constraints, CriticRole, Ingredient, Observations, PretrainingMix, WinRate
from jaxrl_llm.stages.programs import coefficients_of, ingredients_of, policy_objectives
from jaxrl_llm.tasks import Table

SMOKE = resolved(load_config("smoke")[1])


@dataclasses.dataclass(frozen=True)
class Bare(Ingredient):
    """An ingredient without any hook."""


def test_a_bare_ingredient_changes_nothing():
    bare = Bare()
    sample = Sample(np.zeros(1, np.int32), np.zeros(2, np.int32), np.ones(2, bool))
    batch = RolloutBatch([], [], Carryover(), 0, 0, {})
    assert bare.prepared(None) is bare and bare.planned_samples([sample], 1) == [sample]
    assert bare.samples([[sample]], batch) == [[sample]]


def test_a_run_has_the_ingredients_that_its_settings_name():
    assert not list(ingredients_of(SMOKE))
    limit = Constraint(Accuracy(), 0.5, 0.1)
    scoring = dataclasses.replace(SMOKE.scoring, constraints=(limit,), rewards=(Accuracy(), ModelReward("runs/rm")))
    recipe = dataclasses.replace(SMOKE.recipe, critic=Critic(model="runs/rm"), observation_coef=0.1)
    collect = dataclasses.replace(SMOKE.rollout.collect, ptx=Ptx(Texts(Table("texts.jsonl"))))
    rollout = dataclasses.replace(SMOKE.rollout, collect=collect)
    evaluation = dataclasses.replace(SMOKE.evaluation, judge=ModelReward("runs/judge"))
    run = dataclasses.replace(SMOKE, scoring=scoring, recipe=recipe, rollout=rollout, evaluation=evaluation)
    ingredients, none = ingredients_of(run), ingredients_of(SMOKE)
    kinds = [type(ingredient) for ingredient in ingredients]
    assert kinds == [CriticRole, Observations, Constraints, PretrainingMix, WinRate], "in the order of their hooks"
    assert [one.name for one in policy_objectives(run, ingredients)] == ["policy", "observations", "text"]
    assert coefficients_of(run, ingredients).keys() - coefficients_of(SMOKE, none).keys() == {limit.coefficient}
    assert rules_in(run).keys() - rules_in(SMOKE).keys() == {"critic_not_a_number", limit.coefficient}
    assert list(rules_in(run))[:2] == ["not_a_number", "critic_not_a_number"]
