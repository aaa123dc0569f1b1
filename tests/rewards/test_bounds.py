"""Rewards made of others, and what is scored beside their sum, against published numbers."""

import json
import math

import numpy as np
import pytest
from oracles import number
from rewards.test_scorer import item

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import (
    Accuracy,
    Constraint,
    Format,
    Function,
    Gate,
    Hinge,
    LengthPenalty,
    Scorer,
    StepFunction,
    Threshold,
)
from jaxrl_llm.rewards.functions import Lost
from jaxrl_llm.rewards.shaping import REJECTED, check_reward, inner_reward, reward_values

LAM, EPS = number("MULTI/lam").item(), number("MULTI/eps").item()
PLACES = [item(str(at)) for at in range(3)]


def helps(problem, completion):
    return number("MULTI/help")[int(completion.text)]


OWN = Function("rewards.sample_rewards:length")


def harms(problem, completion):
    """Fails for other texts than the places of the published example."""
    return number("MULTI/harm")[int(completion.text)]


HELP = Function(helps)


def scored(rewards, items=PLACES, **settings):
    with Scorer(rewards, **settings) as scorer:
        return scorer.score(items)


def test_a_hinge_punishes_what_lies_above_its_limit():
    scores = scored((helps, Hinge(harms, EPS, LAM)))
    np.testing.assert_allclose(scores.reward, number("MULTI/hinge"), atol=1e-12)
    assert list(scores.parts) == ["helps", "harms"]
    np.testing.assert_allclose(scores.parts["harms"], [0.0, -0.3, -0.1], atol=1e-12)


@pytest.mark.slow
def test_a_weighted_sum_is_that_of_the_published_example():
    scores = scored((helps, Function(harms, -0.5)))
    np.testing.assert_allclose(scores.reward, number("MULTI/weighted_1_m0p5"), atol=1e-12)


def test_a_threshold_is_reached_at_its_value():
    scores = scored((Threshold(harms, at=0.3, weight=2.0),))
    np.testing.assert_array_equal(scores.reward, [0.0, 2.0, 2.0])
    np.testing.assert_array_equal(reward_values(Threshold(Accuracy(), 0.5), np.array([math.nan, 0.5])), [math.nan, 1.0])


def test_bounds_are_made_of_bounds_of_the_verifier_and_of_what_is_built_in():
    twice = Threshold(Hinge(LengthPenalty(-1.0), 2.0), at=-1.0)
    assert inner_reward(twice) == LengthPenalty(-1.0)
    scores = scored((twice, Threshold(Accuracy(), 1.0, 5.0)), [item("3", length=3), item("2", length=4)])
    assert list(scores.parts) == ["length_penalty", "accuracy_2"], "accuracy is the verifier's own"
    np.testing.assert_array_equal(scores.reward, [6.0, 0.0])
    np.testing.assert_array_equal(scores.accuracy, [1.0, 0.0])


@pytest.mark.slow
def test_what_is_watched_is_no_part_of_the_sum_and_unknown_where_it_fails():
    watched = {"constraint/harm/cost": Function(harms), REJECTED: Gate(harms, at=0.3), "verified": Accuracy()}
    scores = scored((Format(".*"),), [*PLACES, item("fails")], watched=watched, on_error=1.0)
    np.testing.assert_array_equal(scores.reward, [1.0, 1.0, 1.0, 1.0])
    np.testing.assert_array_equal(scores.parts["constraint/harm/cost"], [0.1, 0.5, 0.3, math.nan])
    np.testing.assert_array_equal(scores.parts[REJECTED], [1.0, 0.0, 0.0, 1.0])
    assert scores.failures.of["constraint/harm/cost"] == (4, 1) and scores.failures.of[REJECTED] == (4, 1)
    assert list(scores.parts) == ["format", *watched]


def test_a_gate_passes_at_its_value_and_rejects_what_cannot_be_scored():
    np.testing.assert_array_equal(reward_values(Gate(Accuracy()), np.array([0.4, 0.5, math.nan])), [1.0, 0.0, 1.0])


def test_a_constraint_is_called_as_it_says_or_as_its_cost():
    one, other = Constraint(harms, 0.2, 1.0), Constraint(LengthPenalty(-1.0), 8, 1, name="length")
    assert (one.part, one.coefficient) == ("constraint/harms/cost", "constraint/harms/multiplier")
    assert other.part == "constraint/length/cost"


@pytest.mark.parametrize(
    "value",
    [Hinge(OWN, 0.2, 3.0), Threshold(Accuracy(), 0.5), Gate(Format("a")), Constraint(Hinge(OWN, 1.0), 2.0, 0.1)],
)
def test_bounds_survive_config_json(value):
    assert configs.from_json(json.loads(json.dumps(configs.to_json(value)))) == value


def test_what_config_json_cannot_hold_inside_a_bound_is_said_where_it_is_to_be_called():
    found = configs.from_json(configs.to_json(Hinge(lambda p, c: 1.0, 0.5)))
    assert found.of == Lost("lambda", 1.0, "it is a lambda")
    with pytest.raises(InputError, match=r"reward lambda is not in config.json, since it is a lambda"):
        check_reward(found)


STEPS = StepFunction("rewards.sample_steps:words")


@pytest.mark.parametrize(
    ("bound", "told"),
    [
        (Hinge(harms, math.nan), "Hinge.limit must be a finite number, got nan"),
        (Hinge(harms, "much"), "Hinge.limit must be a finite number, got 'much'"),
        (Hinge(harms, 0.1, math.inf), "has the weight inf; give a finite number"),
        (Threshold(Accuracy(2.0), 0.5), "accuracy in Threshold has the weight 2, which nothing reads: leave it out"),
        (Threshold(Function("my:missing"), 0.5), "my:missing cannot be imported"),
        (Gate(STEPS), "Gate holds the step reward steps: give a reward with one value a completion"),
        (Gate(Threshold(STEPS, 1.0)), "Gate holds the step reward steps"),
        (Gate(Accuracy(), None), "Gate.at must be a finite number, got None"),
        (Constraint(harms, 0.1, 0.0), "rate 0 and multiplier 0; give a rate above 0"),
        (Constraint(harms, 0.1, 1.0, -1.0), "rate 1 and multiplier -1; give a rate above 0"),
        (Constraint(harms, 0.1, 1.0, name="a/b"), "has the name 'a/b': give one without a slash"),
    ],
)
def test_a_bound_that_cannot_work_is_refused_in_one_line(bound, told):
    with pytest.raises(InputError) as raised:
        check_reward(bound)
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_a_bound_of_nothing_is_refused_where_it_is_written():
    for made in (lambda: Hinge(3.0, 1.0), lambda: Constraint("harm", 1.0, 1.0), lambda: Hinge(Gate(harms), 1.0)):
        with pytest.raises(InputError, match="which is not a reward"):
            made()
