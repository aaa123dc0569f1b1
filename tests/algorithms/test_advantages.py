"""Outcome advantages: published numbers, and the ways in which other trainers lose rewards."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.test_critic import by_hand
from algorithms.test_successes import by_sets
from algorithms.test_turns import by_loop, context_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import NUMBERS

from jaxrl_llm.algorithms import PRESETS, AdvantageContext
from jaxrl_llm.algorithms.advantages import (
    GAE,
    MTGRPO,
    GiGPO,
    GroupMean,
    GroupZScore,
    LeaveOneOut,
    MaxRL,
    PassAtK,
    Whitened,
)

ADV = NUMBERS["ADV"]
REWARDS = np.array([NUMBERS["F"]["R"]])
EQUAL = np.concatenate([[0.0, 1.0, 0.9, -1.3, 1e-3, 1e6], np.arange(1, 100) / 100]).astype(np.float32)
"""Rewards of groups in which all are equal."""
ESTIMATORS = (GroupMean(), GroupZScore(), LeaveOneOut())


@functools.partial(jax.jit, static_argnums=0)
def run(estimator, rewards):
    return estimator(rewards)


@pytest.mark.parametrize(("estimator", "name"), [
    (GroupMean(), "A_center"),
    (GroupZScore(eps=0.0), "A_ddof1_eps0"),
    (GroupZScore(ddof=0, eps=0.0), "A_ddof0_eps0"),
    (GroupZScore(), "A_ddof1_eps1e6"),
    (GroupZScore(eps=1e-4), "A_ddof1_eps1e4"),
    (LeaveOneOut(), "RLOO"),
])  # fmt: skip
def test_published_numbers(estimator, name):
    with jax.enable_x64(True):
        np.testing.assert_allclose(run(estimator, REWARDS)[0], ADV[name], rtol=0, atol=1e-7)
    np.testing.assert_allclose(run(estimator, REWARDS.astype(np.float32))[0], ADV[name], rtol=2e-5)


def test_leave_one_out_by_its_definition():
    rewards = np.random.default_rng(0).normal(size=(5, 7))
    wanted = [[r[i] - np.delete(r, i).mean() for i in range(7)] for r in rewards]
    np.testing.assert_allclose(LeaveOneOut()(rewards), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_exactly_zero(estimator):
    for count in (2, 3, 7, 64):
        rewards = np.repeat(EQUAL[:, None], count, axis=1)
        assert not np.any(run(estimator, rewards)), count


def test_the_mean_of_equal_rewards_need_not_equal_them():
    # What is left over would be divided by a deviation as small as itself, and make advantages of order 1.
    rewards = np.repeat(EQUAL[:, None], 7, axis=1)
    assert np.any(rewards.sum(axis=1, keepdims=True) / np.float32(7) != rewards)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_fractional_rewards_count(estimator):
    halves = np.asarray(run(estimator, np.array([[0.5, 0.9, 0.0, 0.0]])))
    assert np.all(halves[0, :2] > 0) and halves[0, 1] > halves[0, 0]
    whole = run(estimator, np.array([[1, 0, 1]]))
    assert whole.dtype == jnp.float32
    np.testing.assert_allclose(whole, run(estimator, np.array([[1.0, 0.0, 1.0]])))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_unscorable_reward_is_left_out(estimator):
    with_nan = np.asarray(run(estimator, np.array([[1.0, np.nan, 0.0, 1.0], [0.5, 0.5, np.nan, 0.5], [np.nan] * 4])))
    # One score: n / (n - 1) must not make it infinite.
    assert not np.any(run(estimator, np.array([[np.nan, 1.0, np.nan]])))
    without = np.asarray(run(estimator, np.array([[1.0, 0.0, 1.0]])))[0]
    np.testing.assert_allclose(with_nan[0, [0, 2, 3]], without, rtol=1e-6)
    assert with_nan[0, 1] == 0 and not with_nan[1:].any()


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_groups_of_one_get_zero(estimator):
    assert not np.any(run(estimator, np.array([[3.0], [0.2]])))


def test_groups_do_not_mix():
    rewards = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
    for estimator in ESTIMATORS:
        whole = np.asarray(run(estimator, rewards))
        for row in range(4):
            np.testing.assert_array_equal(run(estimator, rewards[row : row + 1])[0], whole[row])


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-160, 160), min_size=5, max_size=5), st.permutations(range(5)))
def test_a_permuted_group_has_permuted_advantages_that_sum_to_zero(rewards, order):
    rewards = np.asarray([rewards], np.float32) / 16
    for estimator in ESTIMATORS:
        found = np.asarray(run(estimator, rewards))[0]
        np.testing.assert_allclose(
            np.asarray(run(estimator, rewards[:, order]))[0], found[list(order)], rtol=1e-3, atol=1e-4
        )
        assert abs(found.sum()) < 1e-3 * (1 + np.abs(found).max())
        assert np.all(np.isfinite(found))


def test_scale_and_shift():
    rewards = np.array([[1.0, 0.0, 0.25, 0.5]])
    np.testing.assert_allclose(GroupMean()(3 * rewards + 7), 3 * GroupMean()(rewards), rtol=1e-5)
    np.testing.assert_allclose(GroupZScore(eps=0.0)(3 * rewards + 7), GroupZScore(eps=0.0)(rewards), rtol=1e-5)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_flat_list_of_rewards_is_refused(estimator):
    with pytest.raises(ValueError, match=r"rewards must be \[P, G\], got shape \(3,\)"):
        estimator(np.array([1.0, 0.0, 1.0]))


def test_presets_use_the_estimators_of_their_papers():
    kinds = {name: type(algorithm.advantage) for name, algorithm in PRESETS.items()}
    assert {kinds[n] for n in ("grpo", "dapo", "gspo", "gspo_token", "cispo", "prorl")} == {GroupZScore}
    assert (kinds["dr_grpo"], kinds["reinforce"], kinds["rloo"]) == (GroupMean, GroupMean, LeaveOneOut)


EPISODES = [
    [[(0, 2, 1.0, "a"), (1, 1, -0.5, "b")], [(0, 1, 0.25, "a"), (2, 2, 1.0, "b"), (1, 1, 0.5, "c")],
     [(0, 3, 0.5, "a")], [(0, 1, 0.0, "a"), (1, 2, 0.25, "b")]],
    [[(0, 1, -1.0, "d"), (1, 2, 0.25, "e")], [(0, 2, -2.0, "d")], [(0, 1, 0.0, "d"), (2, 1, 1.0, "e")],
     [(0, 2, -1.0, "d"), (1, 1, 0.5, "f"), (1, 1, -1.0, "e")]],
    [[(0, 2, 1.0, "g")], [(0, 1, 0.0, "g")], [(0, 4, 1.0, "g")], [(0, 2, 0.0, "g"), (1, 1, 0.0, "h")]],
]  # fmt: skip
"""Groups of episodes as in ``context_of``: of a positive and of a negative mean, and with equal rewards."""
REWARD = np.array([[sum(turn[2] for turn in one) for one in group] for group in EPISODES])
CONTEXT = context_of([one for group in EPISODES for one in group])
GUESSES = np.random.default_rng(5).normal(size=CONTEXT.mask.shape)


def by_groups(formula):
    """The formula's advantages of each group by itself."""
    return [formula(group) for group in REWARD]


def whitened(baseline, ddof):
    """The rewards less a baseline, whitened over all tokens."""
    mask = CONTEXT.mask
    every = np.repeat((REWARD - baseline).reshape(-1), mask.sum(axis=1))
    found = np.zeros(mask.shape)
    found[mask] = (every - every.mean()) / np.std(every, ddof=ddof)
    return found


def last_rewards():
    """The reward of each episode at its last sampled token."""
    return np.where(
        np.cumsum(CONTEXT.mask, axis=1) == CONTEXT.mask.sum(axis=1, keepdims=True), REWARD.reshape(-1, 1), 0
    )


ORACLES = {
    GroupMean(): lambda one: by_groups(lambda r: r - r.mean()),
    GroupZScore(): lambda one: by_groups(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6)),
    LeaveOneOut(): lambda one: by_groups(lambda r: [x - (r.sum() - x) / (len(r) - 1) for x in r]),
    MaxRL(): lambda one: by_groups(lambda r: r / r.mean() - 1 if r.mean() > 0 else 0 * r),
    PassAtK(): lambda one: by_groups(lambda r: by_sets(r, None)),
    Whitened(): lambda one: whitened(0, 1),
    Whitened("group", ddof=0): lambda one: whitened(REWARD.mean(axis=1, keepdims=True), 0),
    GAE(): lambda one: by_hand(last_rewards(), GUESSES, CONTEXT.mask, 1.0, 0.95, np.zeros(12)),
    GiGPO(): lambda one: by_loop(one, EPISODES),
    MTGRPO(): lambda one: by_loop(one, EPISODES),
}
"""Advantages of the episodes by every estimator that a preset has, as its paper states them, without the package."""


@functools.cache
def compared(estimator):
    """Found and wanted advantages."""
    given = AdvantageContext() if not estimator.needs else CONTEXT._replace(values=np.float32(GUESSES))
    return np.asarray(jax.jit(estimator)(np.float32(REWARD), given)), np.asarray(ORACLES[estimator](estimator))


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_estimator_is_compared_with_an_oracle(name):
    estimator = PRESETS[name].advantage
    assert estimator in ORACLES, f"{name}: no oracle knows {estimator}: write its formula down here, from its paper"
    found, wanted = compared(estimator)
    assert np.abs(wanted).max() > 0.1
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
