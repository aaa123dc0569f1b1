"""What a step hands to the learner, without a model."""

import dataclasses

import jax
import numpy as np

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GDPO
from jaxrl_llm.rewards import Format, Scorer
from jaxrl_llm.rewards.shaping import named
from jaxrl_llm.step import separately
from jaxrl_llm.types import Completion, Group, Problem

REWARDS = (Format("a+", weight=2.0), Format("[ab]+", weight=-1.0))
TEXTS = (("a", "b", "c", "ab"), ("aa", "c", "c", "b"))


def scored(scorer, texts):
    problem = Problem("1", ({"role": "user", "content": "?"},), "3", "test")
    size = np.zeros(1)
    completions = tuple(Completion(size, size, "stop", size == 0, size, text=text) for text in texts)
    scores = scorer.score([(problem, completion) for completion in completions])
    return Group(problem, size, completions, scores.reward, scores.accuracy, scores.parts)


def normal(values, axis=None):
    deviation = values - values.mean(axis, keepdims=True)
    count = values.size if axis is None else values.shape[axis]
    return deviation / np.sqrt((deviation**2).sum(axis, keepdims=True) / (count - 1))


def test_an_estimator_of_several_rewards_sees_two_of_one_name_and_applies_their_weights():
    with Scorer(REWARDS) as scorer:
        groups = [scored(scorer, texts) for texts in TEXTS]
    algorithm = dataclasses.replace(PRESETS["grpo"], advantage=GDPO(eps=0.0))
    algorithm, rewards = separately(algorithm, named(REWARDS), groups)
    columns = [np.array([[1, 0, 0, 0], [1, 0, 0, 0]]), np.array([[1, 1, 0, 1], [1, 0, 0, 1]])]
    np.testing.assert_array_equal(rewards, np.stack(columns, axis=-1))
    expected = normal(2.0 * normal(columns[0], 1) - normal(columns[1], 1))
    np.testing.assert_allclose(jax.jit(algorithm.advantage)(rewards.astype(np.float32)), expected, atol=1e-5)


def test_weights_of_the_estimator_come_before_those_of_the_rewards():
    with Scorer(REWARDS) as scorer:
        groups = [scored(scorer, TEXTS[0])]
    given = dataclasses.replace(PRESETS["grpo"], advantage=GDPO((1.0, 3.0)))
    assert separately(given, named(REWARDS), groups)[0] == given
