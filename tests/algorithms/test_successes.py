"""Advantages of success: published numbers, sums over all sets of k, and what they climb in expectation."""

import itertools
import math

import jax
import numpy as np
import pytest
from algorithms import enumeration as exact
from algorithms.enumeration import grow, probability, slope
from algorithms.fixture import advantages_of
from algorithms.test_enumeration import of, on_policy
from oracles import NUMBERS, check, number

from jaxrl_llm.algorithms import PRESETS, AdvantageContext
from jaxrl_llm.algorithms.advantages import MaxRL, PassAtK

TREE = grow(2)
RIGHT = np.array([0, 1, 0, 0, 1, 0, 0, 0, 1.0])


def by_sets(rewards, k):
    """The advantages of one group, by listing the sets."""
    n = len(rewards)
    found = np.zeros(n)
    for chosen in itertools.combinations(range(n), min(k or n, n)):
        for i in chosen:
            others = [rewards[j] for j in chosen if j != i]
            found[i] += max(rewards[j] for j in chosen) - (max(others) if others else rewards[i])
    return found / math.comb(n - 1, min(k or n, n) - 1)


def test_published_advantages(dtype):
    rewards = np.asarray(NUMBERS["PASSK"]["R"], dtype)
    check(PRESETS["pass_at_k"].advantage(rewards), "PASSK/LOO", dtype)
    for successes, wanted in NUMBERS["PASSK"]["n4_k2"].items():
        four = np.asarray([[1.0] * int(successes) + [0.0] * (4 - int(successes))], dtype)
        np.testing.assert_allclose(PassAtK(2)(four)[0], wanted, atol=2e-7)
    check(advantages_of(MaxRL(), dtype), "MAXRL/A1", dtype)
    for row, wanted in (("R2", "A2"), ("R3", "A3")):
        check(MaxRL()(np.asarray([NUMBERS["MAXRL"][row]], dtype))[0], f"MAXRL/{wanted}", dtype)


@pytest.mark.parametrize("k", [2, 3, 5, None, 9])
def test_pass_at_k_is_the_mean_over_all_sets(k):
    draw = np.random.default_rng(0)
    rewards = np.stack([draw.normal(size=5), draw.integers(0, 2, 5), np.ones(5), [2, 2, 1, 0, 0]]).astype(np.float32)
    found = np.asarray(PassAtK(k)(rewards))
    np.testing.assert_allclose(found, [by_sets(row, k) for row in rewards], rtol=1e-5, atol=1e-6)
    order = draw.permutation(5)
    np.testing.assert_allclose(PassAtK(k)(rewards[:, order]), found[:, order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("estimator", [MaxRL(), PassAtK(2), PassAtK()])
def test_groups_by_id_and_unscorable_rewards(estimator):
    rewards = np.float32([1, 0, 1, 1, 0, 0, np.nan, 0])
    ids = np.array([0, 1, 0, 1, 0, 1, 0, 1])
    found = np.asarray(estimator(rewards, AdvantageContext(group_ids=ids)))
    alone = [np.asarray(estimator(rewards[ids == group][None])[0]) for group in (0, 1)]
    np.testing.assert_allclose([found[ids == group] for group in (0, 1)], alone, rtol=1e-6)
    assert found[6] == 0
    scorable = np.asarray(estimator(np.float32([[1, 1, 0]]))[0])
    np.testing.assert_allclose(alone[0][:3], scorable, rtol=1e-6)
    assert not np.any(estimator(np.zeros((1, 4), np.float32))) and not np.any(estimator(np.ones((1, 1), np.float32)))


def test_maxrl_is_silent_where_the_mean_is_not_above_0():
    """Divided by a negative mean, the better completion would be made less likely."""
    found = MaxRL()(np.float32([[-1, -1, 0.5], [0, -2, 1], [-3, -2, -1], [-0.5, 0.5, 0], [2, 0, 1]]))
    np.testing.assert_allclose(found, [*[[0, 0, 0]] * 4, [1, -1, 0]], rtol=1e-6)


def test_k_is_at_least_2():
    with pytest.raises(ValueError, match=r"PassAtK.k must be at least 2"):
        PassAtK(1)


def best_of(logits, tree, highest):
    """Expected best of as many draws as ``highest`` has axes."""
    for _ in range(highest.ndim):
        highest = highest @ probability(logits, tree)
    return highest


def any_right(logits, tree, rewards, k):
    """Probability of a success among k draws."""
    return 1 - (1 - exact.mean_reward(logits, tree, rewards)) ** k


@pytest.mark.parametrize(("k", "size"), [(2, 2), (2, 3), (3, 3)])
@pytest.mark.parametrize("rewards", [RIGHT, np.linspace(-1, 1, 9)], ids=["right or wrong", "of any size"])
def test_pass_at_k_climbs_the_expected_best_of_k(k, size, rewards):
    with jax.enable_x64(True):
        live, data = on_policy(TREE, rewards=rewards)
        highest = rewards
        for _ in range(k - 1):
            highest = np.maximum(highest[..., None], rewards)
        found = -exact.expected(of(advantage=PassAtK(k)), TREE, live, data, size)[1]
        np.testing.assert_allclose(found, slope(best_of, live, TREE, highest) / k, atol=1e-12)


def test_the_preset_is_unbiased_too():
    with jax.enable_x64(True):
        live, data = on_policy(TREE, rewards=RIGHT)
        wanted = slope(best_of, live, TREE, np.maximum(RIGHT[:, None], RIGHT)) / 2
        found = -exact.expected(PRESETS["pass_at_k"], TREE, live, data, 2)[1]
        np.testing.assert_allclose(found, wanted, atol=1e-12)
        assert np.isclose(number("PASSK/E_sum_A_score"), number("PASSK/n_over_k_dpassk"))


@pytest.mark.parametrize("size", [2, 3])
def test_maxrl_climbs_the_mean_of_pass_at_k_over_k(size):
    """``sum_{k < G} pass@k / k``: the mean reward for G = 2, and nearer to log pass@1 with each completion more."""
    with jax.enable_x64(True):
        live, data = on_policy(TREE, rewards=RIGHT)
        terms = [slope(any_right, live, TREE, RIGHT, k) / k for k in range(1, size)]
        found = -exact.expected(of(advantage=MaxRL()), TREE, live, data, size)[1]
        np.testing.assert_allclose(found, sum(terms), atol=1e-12)
