"""A target for the entropy: what its controller makes of rows alone, and the runs that may have one."""

import dataclasses
import json
import math
from functools import partial

import pytest
from tiny import rules_in

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.kl import AdaptiveEntropy, AdaptiveKL, ProportionalKL
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rules import Decision, entropy_controlled
from jaxrl_llm.rules.guards import teaches_nothing
from jaxrl_llm.stages.programs import coefficients_of, ingredients_of, policy_objectives

SMOKE = configs.load_config("smoke")[1]


def used(controller, entropies, first=0.0):
    """The coefficient of each step, and of the one after; what the rule remembers goes through JSON."""
    rule, own, found = partial(entropy_controlled, controller=controller), {}, [first]
    for step, entropy in enumerate(entropies, start=1):
        row = {"step": step, "entropy": entropy, "entropy_coef": found[-1]}
        decision, own = rule(row, json.loads(json.dumps(own)))
        found.append(decision.coefficients.get("entropy_coef", found[-1]))
    return found


def test_the_coefficient_grows_below_the_target_and_is_off_above_it():
    controller = AdaptiveEntropy(target=0.5, rate=0.25, largest=1.0)
    assert used(controller, [0.4, 0.4, 0.4]) == [0.0, 0.25, 0.5, 0.75]
    # Above the target c goes on falling unseen: 0.75 - 0.25, then up again from there.
    assert used(controller, [0.4, 0.4, 0.4, 0.6, 0.4]) == [0.0, 0.25, 0.5, 0.75, 0.0, 0.75]
    assert used(controller, [0.4, 0.4, 0.4, 0.6, 0.6, 0.4])[-1] == 0.5
    assert used(controller, [0.4, 0.5, 0.5]) == [0.0, 0.25, 0.25, 0.25], "at the target it stays, and acts"
    assert used(controller, [0.6, 0.6, 0.4]) == [0.0, 0.0, 0.0, 0.25], "c is never negative"
    assert used(controller, [0.1] * 6)[-2:] == [1.0, 1.0], "nor above its bound"
    assert used(controller, [0.4], first=0.5) == [0.5, 0.75], "it begins as the algorithm's"
    assert used(controller, [0.4, math.nan, 0.4]) == [0.0, 0.25, 0.25, 0.5], "no update, no verdict"
    assert entropy_controlled({"step": 0, "eval/x/pass@1": 1.0}, {}, controller) == (Decision(), {})


def test_a_flat_batch_still_teaches_while_there_is_a_bonus():
    flat = {"step": 1, "updates": 1.0, "advantage/nonzero_fraction": 0.0}
    rule = partial(teaches_nothing, patience=1, only_advantages=True, filter_reads="")
    assert rule(flat | {"entropy_coef": 0.1}, {})[0] == Decision()
    assert rule(flat | {"entropy_coef": 0.0}, {})[0].stop is not None


def with_controller(controller, **changes):
    algorithm = dataclasses.replace(PRESETS["grpo"], **changes)
    recipe = dataclasses.replace(RECIPES["grpo"], algorithm=algorithm, controller=controller)
    return dataclasses.replace(SMOKE, recipe=recipe)


def test_a_run_may_have_one_for_the_kl_and_one_for_the_entropy():
    kl, entropy = AdaptiveKL(0.1), AdaptiveEntropy(0.3)
    cases = {None: (), kl: ("kl_coef",), entropy: ("entropy_coef",), (entropy, kl): ("kl_coef", "entropy_coef")}
    for controller, moved in cases.items():
        names, terms = set(moved), {"kl_coef", "entropy_coef"}
        run = with_controller(controller, entropy_coef=0.01)
        configs.validate(run)
        assert coefficients_of(run, ingredients_of(run)).keys() == terms
        rules = rules_in(run)
        assert ("controller" in rules, "entropy" in rules) == ("kl_coef" in names, "entropy_coef" in names)
        assert policy_objectives(run, ingredients_of(run))[0].entropy_moves == ("entropy_coef" in names)
        assert configs.from_json(json.loads(json.dumps(configs.to_json(run)))) == run
    assert rules["controller"].keywords == {"reads": kl.reads, "controller": kl}
    assert rules["entropy"].keywords == {"controller": entropy}
    assert coefficients_of(run, ingredients_of(run))["entropy_coef"] == 0.01
    assert policy_objectives(with_controller(entropy), ingredients_of(with_controller(entropy)))[0].entropy_gradient


@pytest.mark.parametrize(
    "controller, changes, words",
    [
        ((AdaptiveKL(0.1), ProportionalKL()), {}, "AdaptiveKL, ProportionalKL moves one coefficient twice"),
        ((AdaptiveEntropy(), AdaptiveEntropy(1.0)), {}, "moves one coefficient twice"),
        ((AdaptiveKL(0.1), AdaptiveEntropy()), {"kl_coef": 0.0}, "recipe.controller has no coefficient to move"),
        (AdaptiveEntropy(largest=0.1), {"entropy_coef": 0.2}, "entropy_coef 0.2 exceeds recipe.controller.largest 0.1"),
    ],
)
def test_controllers_that_cannot_work_are_refused(controller, changes, words):
    with pytest.raises(InputError, match=words):
        configs.validate(with_controller(controller, **changes))


def test_its_numbers_are_checked():
    for wrong in ({"rate": 0.0}, {"target": -1.0}, {"largest": math.inf}):
        with pytest.raises(ValueError):
            AdaptiveEntropy(**wrong)
