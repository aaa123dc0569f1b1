"""Ingredients of reinforcement learning: what a run has of them, and that a bare one changes nothing."""

import dataclasses

import numpy as np

from jaxrl_llm.config import load_config, resolved
from jaxrl_llm.data import Texts
from jaxrl_llm.learner import Critic, Sample
from jaxrl_llm.rewards import Accuracy, ModelReward
from jaxrl_llm.rewards.shaping import Constraint
from jaxrl_llm.rollout import evaluate
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.rollout.settings import Ptx
from jaxrl_llm.stages.rl.ingredient import Ingredient
from jaxrl_llm.stages.rl.ingredients import ingredients_of, moved_by_rules, objectives_of, rules_for
from jaxrl_llm.stages.rl.reinforcement import Reinforcement
from jaxrl_llm.tasks import Table
from jaxrl_llm.types import TrainState

SMOKE = resolved(load_config("smoke")[1])
ALWAYS = {"judges"}


@dataclasses.dataclass(frozen=True)
class Bare(Ingredient):
    """An ingredient without any hook."""

    name = "bare"


@dataclasses.dataclass(frozen=True)
class Counting(Ingredient):
    """Counts the steps in which something was measured."""

    name = "counting"

    def remembered(self, measured, own):
        if "loss" not in measured:
            return {}, own
        steps = own.get("steps", 0) + 1
        return {"counting/steps": steps}, {"steps": steps}


def stage_with(*ingredients):
    return Reinforcement(
        training=("policy",), forward=None, label="", run=SMOKE, sampler=None, transfer=lambda policy: policy,
        evaluation=lambda weights: (), ingredients=ingredients,
    )  # fmt: skip


def test_a_bare_ingredient_changes_nothing():
    bare = Bare()
    sample = Sample(np.zeros(1, np.int32), np.zeros(2, np.int32), np.ones(2, bool))
    batch, left, found = RolloutBatch([], [], Carryover(), 0, 0, {}), Carryover(cursor=3), evaluate.Tested({"a": 1.0})
    assert bare.prepared(None) is bare and bare.role(None, None, None, None) is None
    assert bare.planned_samples([sample], 1) == [sample] and not bare.passes([sample], {}, None, None)
    assert bare.batch(batch, left) is batch and not bare.models(TrainState({}, {}))
    assert bare.samples([[sample]], batch) == [[sample]] and bare.tested(found, None, True) is found
    assert bare.rewards(np.ones((1, 2)), [], {}).tolist() == [[1.0, 1.0]]
    assert stage_with(bare).learning(1) == ("policy",) and stage_with(bare).test(None) is None
    assert stage_with(bare).remembered({"loss": 1.0}, {"stall": {}}) == ({}, {"stall": {}})


def test_an_ingredient_remembers_under_its_own_name():
    stage, memory = stage_with(Bare(), Counting()), {"stall": {"best": 1.0}}
    for measured, wanted in (({"loss": 1.0}, 1), ({}, 1), ({"loss": 2.0}, 2)):
        found, memory = stage.remembered(measured, memory)
        assert memory == {"stall": {"best": 1.0}, "counting": {"steps": wanted}}
        assert found == ({"counting/steps": wanted} if measured else {})


def test_a_run_has_the_ingredients_that_its_settings_name():
    assert {one.name for one in ingredients_of(SMOKE)} == ALWAYS
    limit = Constraint(Accuracy(), 0.5, 0.1)
    scoring = dataclasses.replace(SMOKE.scoring, constraints=(limit,), rewards=(Accuracy(), ModelReward("runs/rm")))
    recipe = dataclasses.replace(SMOKE.recipe, critic=Critic(model="runs/rm"), observation_coef=0.1)
    collect = dataclasses.replace(SMOKE.rollout.collect, ptx=Ptx(Texts(Table("texts.jsonl"))))
    rollout = dataclasses.replace(SMOKE.rollout, collect=collect)
    evaluation = dataclasses.replace(SMOKE.evaluation, judge=ModelReward("runs/judge"))
    run = dataclasses.replace(SMOKE, scoring=scoring, recipe=recipe, rollout=rollout, evaluation=evaluation)
    found = {one.name: one for one in ingredients_of(run)}
    assert found.keys() == ALWAYS | {"critic", "constraints", "observations", "pretraining_mix", "win_rate"}
    assert found["judges"].loads == ("runs/rm", "runs/judge") and found["critic"].loads == ("runs/rm",)
    assert [one.name for one in objectives_of(run)] == ["policy", "observations", "text"]
    assert moved_by_rules(run).keys() - moved_by_rules(SMOKE).keys() == {limit.coefficient}
    assert rules_for(run).keys() - rules_for(SMOKE).keys() == {"critic_not_a_number", limit.coefficient}
    assert list(rules_for(run))[:2] == ["not_a_number", "critic_not_a_number"]
