"""The shaping rewards against published numbers."""

import dataclasses
import math

import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import (
    Accuracy,
    CosineLength,
    Format,
    Function,
    LengthPenalty,
    RepetitionPenalty,
    Scorer,
    SoftOverlong,
)  # fmt: skip
from jaxrl_llm.types import Completion, Episode, Problem

PROBLEM = Problem("1", ({"role": "user", "content": "?"},), "3", "test")


def completion(length=3, text=""):
    tokens = np.zeros(length, np.int32)
    return Completion(tokens, np.zeros(length), "stop", np.ones(length, bool), tokens, text=text)


@pytest.mark.parametrize(
    ("length", "value"), [(16000, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0), (20481, -1.0)]
)
def test_soft_overlong_is_dapos_equation_13(length, value):
    assert SoftOverlong()(PROBLEM, completion(length, "short text")) == value


@pytest.mark.parametrize(("length", "value"), [(0, 0.0), (2048, -0.146447), (4096, -0.5), (8192, -1.0), (9000, -1.0)])
def test_cosine_length_is_prorls(length, value):
    assert CosineLength(8192)(PROBLEM, completion(length)) == pytest.approx(value, abs=1e-6)


def test_lengths_are_counted_in_tokens_and_not_in_characters():
    assert LengthPenalty(0.01)(PROBLEM, completion(4, "a text of more than four characters")) == -0.04


def test_only_a_completion_that_was_ended_for_repetition_is_punished_for_it():
    ended = {
        reason: dataclasses.replace(completion(), finish_reason=reason) for reason in ("repetition", "length", "stop")
    }
    assert {reason: RepetitionPenalty()(PROBLEM, c) for reason, c in ended.items()} == {
        "repetition": -1,
        "length": 0,
        "stop": 0,
    }


def test_format_matches_the_whole_text():
    form = Format(r"<think>.*</think>\s*\d+")
    assert Format("(a+)+b")(PROBLEM, completion(text="a" * 60)) == 0.0, "a pattern that would take forever"
    assert form(PROBLEM, completion(text="<think>a\nb</think> 3")) == 1.0
    assert form(PROBLEM, completion(text="<think>a\nb</think> 3.")) == 0.0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (SoftOverlong(max_length=100, cache=200), "0 < cache <= max_length"),
        (SoftOverlong(cache=0), "0 < cache <= max_length"),
        (CosineLength(0), "CosineLength.max_length must be at least 1, got 0"),
        (Format("("), "is not a regular expression"),
        (Function("brevity"), "names no function"),
        (Function("jaxrl_llm.rewards.shaping:Accuracies"), "did you mean Accuracy"),
        (Accuracy(weight=math.nan), "weight nan; give a finite number"),
    ],
)
def test_a_reward_that_cannot_work_is_refused_before_anything_runs(reward, message):
    with pytest.raises(InputError, match=message):
        Scorer((reward,))


@pytest.mark.parametrize(
    "numbers", [{"workers": 0}, {"timeout_s": 0.0}, {"timeout_s": math.nan}, {"on_error": math.inf}]
)
def test_scorer_numbers_out_of_range_are_refused(numbers):
    with pytest.raises(InputError, match="at least 1 worker"):
        Scorer((Accuracy(),), **numbers)


def test_the_world_adds_its_reward_to_the_others_and_an_episode_that_it_lost_is_not_scored():
    episodes = [Episode(end="completed", reward=2.0), Episode(end="timeout", reward=math.nan, error="too slow"), None]
    items = [(PROBLEM, dataclasses.replace(completion(4), episode=episode)) for episode in episodes]
    with Scorer((LengthPenalty(0.5),), 1) as scorer:
        scores = scorer.score(items)
    np.testing.assert_array_equal(scores.reward, [0.0, np.nan, -2.0])
    np.testing.assert_array_equal(scores.parts["environment"], [2.0, np.nan, np.nan])
    assert scores.failures.metrics()["reward/environment/failed_fraction"] == 0.5
    assert scores.failures.message == "too slow"
    with Scorer((), 1) as scorer:
        np.testing.assert_array_equal(scorer.score(items).reward, [2.0, np.nan, 0.0])


def test_an_episode_without_a_token_is_wrong_and_no_reward_sees_it():
    over = dataclasses.replace(completion(0, "3"), episode=Episode(end="context_overflow"))
    unverified = dataclasses.replace(PROBLEM, verifier="none")
    with Scorer((Accuracy(), CosineLength(1)), 1) as scorer:
        scores = scorer.score([(PROBLEM, over), (PROBLEM, completion(1, "3")), (unverified, over)])
        alone = scorer.score([(PROBLEM, over)])
        assert scorer.verify([(PROBLEM, over)]).tolist() == [0.0]
    np.testing.assert_array_equal(scores.reward, [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(scores.accuracy, [0.0, 1.0, np.nan])
    np.testing.assert_array_equal(scores.parts["accuracy"], [np.nan, 1.0, np.nan])
    np.testing.assert_array_equal(scores.parts["environment"], [0.0, np.nan, 0.0])
    assert alone.reward.tolist() == [0.0] and alone.parts.keys() == scores.parts.keys()
