"""Recipes: each is what its paper fixes, says where that stands, and leaves to the run what is the run's."""

import ast
import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm import recipes
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GAE, GDPO, KLInReward, Whitened
from jaxrl_llm.algorithms.kl import K1, K2, AdaptiveKL
from jaxrl_llm.algorithms.reduce import ConstantLength
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import RECIPES, Overlong
from jaxrl_llm.rewards import Accuracy, LengthPenalty
from jaxrl_llm.rewards.shaping import LengthCycle, StopProperly
from jaxrl_llm.rollout import Repetition
from jaxrl_llm.rules import Resets
from jaxrl_llm.stages.programs import dropped_endings
from jaxrl_llm.types import Completion, Problem

SMOKE = configs.load_config("smoke")[1]
PRESET = {"prorl_v1": "prorl", "arpo": "grpo", "top_entropy": "dapo"}
"""The presets of recipes with names of their own."""


def with_algorithm(run=SMOKE, **pieces):
    recipe = dataclasses.replace(run.recipe, algorithm=dataclasses.replace(run.recipe.algorithm, **pieces))
    return dataclasses.replace(run, recipe=recipe)


def docstrings():
    """The text below each recipe, by the name of its variable."""
    body = ast.parse(Path(recipes.__file__).read_text()).body
    pairs = itertools.pairwise(body)
    return {
        node.targets[0].id: text.value.value
        for node, text in pairs
        if isinstance(node, ast.Assign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def test_every_recipe_cites_its_paper():
    texts = docstrings()
    names = {name: value for name, value in vars(recipes).items() if isinstance(value, recipes.Recipe)}
    assert {id(r) for r in names.values()} == {id(r) for r in RECIPES.values()}
    for name in names:
        assert "arXiv" in texts[name] or name == "PRORL_V2", name
        assert len(texts[name]) > 60, name


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_its_preset_and_survives_its_json(name):
    recipe = RECIPES[name]
    changed = {
        "dr_grpo": {"reduce": PRESETS["dr_grpo"].reduce},
        "reinforce_pp": {"kl_coef": 0.0},
        "ppo": {"advantage": GAE(), "kl": None, "kl_in": "loss", "kl_coef": 0.0},
        "arpo": {"kl": PRESETS["grpo"].kl, "kl_coef": 0.04},
        "top_entropy": {"token_filter": None},
    }.get(name, {})
    assert dataclasses.replace(recipe.algorithm, **changed) == PRESETS[PRESET.get(name, name)]
    run = configs.resolved(configs.with_recipe(SMOKE, name))
    assert configs.from_json(configs.to_json(run)) == run


def test_what_the_papers_fix_around_the_loss():
    filtering = {name for name, r in RECIPES.items() if r.filter_groups}
    assert filtering == {"dapo", "cispo", "prorl_v1", "prorl_v2", "top_entropy"}
    assert {n for n, r in RECIPES.items() if r.overlong.share} == {"dapo", "cispo", "top_entropy"}
    assert RECIPES["dapo"].overlong.share * 20480 == 4096
    # What a punishment of long completions is for is never unlearned where those are left out of the loss.
    assert not any(r.overlong.drop for r in RECIPES.values())
    updates = {n: (r.paper.count, r.paper.completions) for n, r in RECIPES.items() if r.paper}
    assert updates == {
        "grpo": (1, 1024), "dr_grpo": (8, 128), "dapo": (16, 512), "gspo": (4, None), "cispo": (16, None),
        "sapo": (4, None),
        "prorl_v1": (4, 1024), "prorl_v2": (8, 1024), "minirl": (1, 1024), "ppo": (8, 64), "mt_grpo": (2, None),
        "arpo": (8, 256),
    }  # fmt: skip
    assert {n: r.temperature for n, r in RECIPES.items() if r.temperature != 1} == {"prorl_v1": 1.2}
    one, two = RECIPES["prorl_v1"], RECIPES["prorl_v2"]
    assert one.resets.on_stall and one.resets.with_optimiser and not one.resets.reference_every
    assert 200 <= two.resets.reference_every <= 500 and not two.resets.with_optimiser
    assert two.shaping == (StopProperly(0.0), LengthCycle(on=100, off=500))
    assert RECIPES["kimi_k1_5"].resets == Resets(optimiser_every=1) and RECIPES["kimi_k1_5"].shaping[0].warmup > 0
    assert isinstance(RECIPES["reinforce_pp"].algorithm.advantage, KLInReward)


def test_a_filter_reads_the_reward_where_accuracy_is_no_part_of_it():
    own = dataclasses.replace(SMOKE, recipe=RECIPES["dapo"], scoring=configs.Scoring((LengthPenalty(0.1),)))
    assert RECIPES["dapo"].filter_groups == "accuracy" and configs.resolved(own).recipe.filter_groups == "reward"
    mixed = dataclasses.replace(own, scoring=configs.Scoring((LengthPenalty(0.1), Accuracy(0.0))))
    assert configs.resolved(mixed).recipe.filter_groups == "accuracy"
    off = dataclasses.replace(own, recipe=RECIPES["grpo"])
    assert configs.resolved(off).recipe.filter_groups is False


def test_the_recipe_and_the_repetition_rule_say_which_endings_the_loss_leaves_out():
    silent = dataclasses.replace(
        SMOKE, rollout=dataclasses.replace(SMOKE.rollout, repetition=Repetition(4, 3, learn=False))
    )
    cut = dataclasses.replace(RECIPES["grpo"], overlong=Overlong(drop=True))
    assert dropped_endings(SMOKE) == () and dropped_endings(silent) == ("repetition",)
    assert dropped_endings(dataclasses.replace(SMOKE, recipe=cut)) == ("length",)
    assert dropped_endings(dataclasses.replace(silent, recipe=cut)) == ("length", "repetition")


def test_a_run_fills_in_temperature_and_generation_budget():
    run = configs.resolved(configs.with_recipe(SMOKE, "prorl_v1"))
    assert run.rollout.temperature == 1.2
    own = dataclasses.replace(SMOKE, rollout=dataclasses.replace(SMOKE.rollout, temperature=0.7))
    assert configs.resolved(configs.with_recipe(own, "prorl_v1")).rollout.temperature == 0.7
    reduce = configs.resolved(configs.with_recipe(SMOKE, "dr_grpo")).recipe.algorithm.reduce
    assert reduce == ConstantLength(SMOKE.rollout.max_new_tokens)
    fixed = with_algorithm(reduce=ConstantLength(500))
    assert configs.resolved(fixed).recipe.algorithm.reduce == ConstantLength(500)


@pytest.mark.parametrize(("pieces", "words"), [
    ({"advantage": GAE()}, "GAE needs values, and recipe.critic is None"),
    ({"advantage": GDPO((1.0, 2.0))}, "weights has 2 entries for 1 rewards"),
])  # fmt: skip
def test_an_estimator_that_the_trainer_cannot_feed_is_refused(pieces, words):
    with pytest.raises(InputError, match=words):
        configs.validate(with_algorithm(**pieces))
    configs.validate(with_algorithm(advantage=Whitened()))


def test_a_controller_without_a_coefficient_is_refused():
    recipe = dataclasses.replace(RECIPES["dapo"], controller=AdaptiveKL(0.1))
    with pytest.raises(InputError, match=r"recipe.controller has no coefficient to move"):
        configs.validate(dataclasses.replace(SMOKE, recipe=recipe))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "cispo"])
@pytest.mark.parametrize("worth", [1.0, 2.0, 10.0])
def test_the_overlong_punishment_weighs_what_it_weighs_in_its_paper(name, worth):
    rollout = dataclasses.replace(SMOKE.rollout, max_new_tokens=100)
    run = dataclasses.replace(
        configs.with_recipe(SMOKE, name), rollout=rollout, scoring=configs.Scoring((Accuracy(worth),))
    )
    problem = Problem("1", ({"role": "user", "content": "2 + 2 ="},), "4", "sums")

    def score(text, length):
        tokens = np.zeros(length, np.int32)
        completion = Completion(tokens, tokens, "stop", tokens == 0, tokens, text=text)
        return sum(reward.weight * reward(problem, completion) for reward in configs.rewards(run))

    # Right and short, right in the middle of the punished part, right at the cap, wrong and short: rewards of +1 and -1
    # with a punishment of 1 score them 1, 0.5, 0 and -1; rewards of 1 and 0 with the same punishment cannot tell the
    # last two apart.
    rewards = [score("4", 10), score("4", 90), score("4", 100), score("5", 10)]
    advantage = np.asarray(run.recipe.algorithm.advantage(np.float32([rewards])))[0]
    np.testing.assert_allclose(advantage, [1.025, 0.439, -0.146, -1.317], atol=5e-4)


def test_a_k1_in_the_loss_is_refused_since_it_pulls_nowhere():
    with pytest.raises(InputError, match=r"recipe.algorithm.kl K1 .* its expected gradient is 0: take kl.K2"):
        configs.validate(with_algorithm(kl=K1()))
    for fine in ({"kl": K1(), "kl_in": "reward"}, {"kl": K1(), "kl_coef": 0.0}, {"kl": K2()}):
        configs.validate(with_algorithm(**fine))


def test_the_runs_of_prorl_are_reset_where_the_papers_are():
    run = configs.load_config("prorl_v1_runs")[1]
    phases = run.rules.phases
    assert [number for number, phase in enumerate(phases, 1) if phase.reset] == [2, 6, 7]
    assert all(phase.reset == phase.reset_optimiser for phase in phases)
    shares = {part.task.label: part.weight for part in phases[2].changes["task"].parts}
    assert shares.pop("mathematics") == 4.0 and shares.pop("instructions") == 1.0
    assert sum(shares.values()) == pytest.approx(3.7) and set(shares) <= {part.task.label for part in run.task.parts}
    assert {part.task.extractor for part in phases[2].changes["task"].parts} == {
        "boxed",
        "tag:answer",
        "after:</think>",
    }
    cycles = configs.load_config("prorl_v2_cycles")[1]
    assert cycles.rollout.max_new_tokens == 8192 and 200 <= cycles.recipe.resets.reference_every <= 500
    assert cycles.recipe.resets.on_stall and not any(phase.reset for phase in cycles.rules.phases)
