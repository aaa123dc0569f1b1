"""Rewards of some tasks: each completion scores what its own task's scorer alone would give it."""

import math

import numpy as np
import pytest

from jaxrl_llm.rewards import Accuracy, Format, LengthPenalty, Scorer, Threshold
from jaxrl_llm.rewards.functions import as_reward
from jaxrl_llm.rewards.shaping import TaskReward, name_rewards
from jaxrl_llm.types import Completion, Problem


def item(task, text, answer="3"):
    tokens = np.arange(len(text), dtype=np.int32)
    problem = Problem(text, ({"role": "user", "content": "?"},), answer, task)
    return problem, Completion(tokens, np.zeros(len(text)), "stop", tokens > -1, tokens, {}, text)


ITEMS = [item("sums", "it is 3"), item("forms", "x"), item("sums", "4"), item("forms", "yes 3"), item("both", "3")]
REWARDS = {
    "sums": (Accuracy(2.0), LengthPenalty(0.1)),
    "forms": (Threshold(Format(".*[0-9]"), 1.0, 0.5), LengthPenalty(0.1)),
    "both": (Accuracy(2.0), LengthPenalty(0.1)),
}


@pytest.fixture(scope="module")
def scores():
    rewards = (
        TaskReward(Accuracy(2.0), ("sums", "both")),
        TaskReward(Threshold(Format(".*[0-9]"), 1.0, 0.5), ("forms",)),
        LengthPenalty(0.1),
    )
    with Scorer(rewards) as scorer:
        return scorer.score(ITEMS)


def test_each_task_scores_what_it_would_alone(scores):
    for task in ("sums", "forms", "both"):
        places = [at for at, (problem, _) in enumerate(ITEMS) if problem.task == task]
        with Scorer(REWARDS[task]) as alone:
            own = alone.score([ITEMS[at] for at in places])
        np.testing.assert_array_equal(scores.reward[places], own.reward)
        np.testing.assert_array_equal(scores.accuracy[places], own.accuracy)


def test_other_tasks_have_no_such_part(scores):
    np.testing.assert_array_equal(scores.parts["accuracy/sums+both"], [1, math.nan, 0, math.nan, 1])
    np.testing.assert_array_equal(scores.parts["format/forms"], [math.nan, 0, math.nan, 1, math.nan])
    assert not np.isnan(scores.parts["length_penalty"]).any()


def raises(problem, completion):
    """Fails wherever it is called."""
    raise ValueError(problem.task)


def test_a_function_is_called_for_its_own_tasks_alone():
    rewards = (LengthPenalty(1.0), TaskReward(as_reward(raises), ("forms",)))
    with Scorer(rewards, on_error=-5.0) as scorer:
        found = scorer.score(ITEMS)
    assert found.failures.of["raises/forms"] == (2, 2) and found.failures.fraction("raises/forms") == 1
    np.testing.assert_array_equal(found.reward, [-7, -6, -1, -10, -1])
    np.testing.assert_array_equal(found.parts["raises/forms"], [math.nan, -5, math.nan, -5, math.nan])


def test_names_tell_the_tasks():
    rewards = (TaskReward(Accuracy(), ("a",)), TaskReward(Accuracy(2.0), ("b", "c")), Accuracy())
    assert list(name_rewards(rewards)) == ["accuracy/a", "accuracy/b+c", "accuracy"]
