"""Rewards that depend on the group or on how far the run is, against published numbers."""

import dataclasses

import numpy as np
import pytest
from oracles import NUMBERS

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.shaping import LengthCycle, RelativeLength, StopProperly
from jaxrl_llm.system.setting import check_fields
from jaxrl_llm.types import Completion, Group, Problem

PROBLEM = Problem("1", ({"role": "user", "content": "?"},), "3", "test")


def group(lengths, rewards, reasons=None, accuracy=None):
    completions = tuple(
        Completion(np.zeros(n, np.int32), np.zeros(n), reason, np.ones(n, bool), np.zeros(n, np.int32))
        for n, reason in zip(lengths, reasons or ["stop"] * len(lengths), strict=True)
    )
    rewards = np.asarray(rewards, np.float64)
    return Group(
        PROBLEM, np.zeros(2, np.int32), completions, rewards, rewards if accuracy is None else np.asarray(accuracy)
    )


def test_the_relative_length_is_kimis():
    numbers = NUMBERS["Kimi_length"]
    given = group([int(n) for n in numbers["lens"]], numbers["correct"])
    found = RelativeLength()(given, 0, 1000)
    np.testing.assert_allclose(found.rewards - given.rewards, numbers["len_reward"])
    np.testing.assert_allclose(found.parts["relative_length"], numbers["len_reward"])
    np.testing.assert_array_equal(found.accuracy, given.accuracy)


def test_equal_lengths_are_not_told_apart():
    given = group([7, 7, 7], [1, 0, 1])
    np.testing.assert_array_equal(RelativeLength()(given, 0, 10).rewards, given.rewards)


def test_the_length_reward_waits_for_its_warm_up():
    given = group([2, 4], [1, 1])
    shape = RelativeLength(weight=0.2, warmup=3)
    np.testing.assert_array_equal(shape(given, 2, 10).rewards, given.rewards)
    np.testing.assert_allclose(shape(given, 3, 10).rewards, [1.1, 0.9])


@pytest.mark.parametrize(("scale", "key"), [(0.0, "coef0"), (0.5, "coef0p5")])
def test_answers_that_were_cut_off_lose_their_reward(scale, key):
    numbers = NUMBERS["ProRLv2_stop_properly"]
    reasons = ["length" if cut else "stop" for cut in numbers["truncated"]]
    given = group([1, 2, 3], numbers["R"], reasons)
    found = StopProperly(scale)(given, 0, 10)
    np.testing.assert_allclose(found.rewards, numbers[key])
    np.testing.assert_array_equal(found.accuracy, given.accuracy)


@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 2.0, -1.0])
def test_being_cut_off_never_gains(scale):
    rewards = np.array([-1.0, -0.25, 0.0, 0.5, 2.0])
    found = StopProperly(scale)(group([1] * 5, rewards, ["length"] * 5), 0, 10).rewards
    assert np.all(found <= rewards) and found[0] == min(-1.0, -scale)
    np.testing.assert_array_equal(StopProperly(scale)(group([1] * 5, rewards), 0, 10).rewards, rewards)


def test_a_part_that_is_added_leaves_a_reward_of_its_name_alone():
    given = dataclasses.replace(group([2, 4], [1, 1]), parts={"relative_length": np.array([7.0, 8.0])})
    once = RelativeLength()(given, 0, 10)
    twice = RelativeLength()(once, 0, 10)
    assert list(twice.parts) == ["relative_length", "relative_length_2", "relative_length_3"]
    assert twice.parts["relative_length"].tolist() == [7, 8] and twice.parts["relative_length_2"].tolist() == [
        0.5,
        -0.5,
    ]


def test_the_cosine_comes_and_goes_with_the_updates():
    numbers = NUMBERS["ProRLv2_cosine"]
    given = group(numbers["t"], [1.0] * 4)
    shape = LengthCycle(numbers["eta_min"], numbers["eta_max"], weight=1.0, on=2, off=3)
    for updates in range(12):
        found = shape(given, updates, numbers["T"])
        added = np.asarray(numbers["r"]) if updates % 5 < 2 else 0.0
        np.testing.assert_allclose(found.rewards - given.rewards, np.broadcast_to(added, 4), atol=1e-12)
        np.testing.assert_allclose(found.parts["cosine_length"], numbers["r"], atol=1e-12)


@pytest.mark.parametrize(("shape", "words"), [
    (LengthCycle(on=0), "LengthCycle.on must be at least 1, got 0"),
    (LengthCycle(off=-1), "LengthCycle.off must be at least 0, got -1"),
    (RelativeLength(warmup=-2), "RelativeLength.warmup must be at least 0, got -2"),
    (StopProperly(float("nan")), "StopProperly.scale must be finite, got nan"),
])  # fmt: skip
def test_a_shaping_that_cannot_work_is_refused(shape, words):
    with pytest.raises(InputError, match=words):
        check_fields(shape, f"{type(shape).__name__}.")
    check_fields(StopProperly())
