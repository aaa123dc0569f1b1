"""What must hold for every estimator: ids as the axis, order, padding, rewards that are missing or all equal."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.batches import B, T, scored
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms.advantages import (
    GAE,
    GDPO,
    BatchScaled,
    GroupMean,
    GroupZScore,
    KLInReward,
    LeaveOneOut,
    ProcessSupervised,
    Whitened,
)
from jaxrl_llm.algorithms.kl import K1, K3

ESTIMATORS = {
    "group_mean": GroupMean(),
    "group_z_score": GroupZScore(),
    "leave_one_out": LeaveOneOut(),
    "batch_scaled": BatchScaled(),
    "batch_scaled_centred": BatchScaled("advantages", ddof=0),
    "gdpo": GDPO((1.0, 0.5)),
    "whitened": Whitened(),
    "whitened_group": Whitened("group", ddof=0),
    "process": ProcessSupervised(),
    "gae": GAE(0.9, 0.8),
    "gae_whitened": GAE(whiten=True),
    "leave_one_out_kl": KLInReward(LeaveOneOut(), K1(), 0.1),
    "whitened_kl": KLInReward(Whitened(), K3(), 0.1),
    "gae_kl": KLInReward(GAE(), K1(), 0.1),
}
BY_TOKEN = [n for n in ESTIMATORS if n.startswith(("whitened", "process", "gae"))]
OUTCOME = [n for n in ESTIMATORS if n not in BY_TOKEN]
GROUPS = np.repeat([4, 9], B // 2)


@functools.partial(jax.jit, static_argnums=0)
def every(names, rewards, context):
    """Advantages of several estimators as one program, each [B, ...]; rewards are [P, G] or, with ids, [B]."""
    several = jnp.stack([rewards, rewards**2], axis=-1)
    found = {n: ESTIMATORS[n](several if n == "gdpo" else rewards, context) for n in names}
    return {n: x if n in BY_TOKEN else x.reshape(-1) for n, x in found.items()}


def by_axis(rewards, context):
    return every(tuple(ESTIMATORS), rewards.reshape(2, -1), context._replace(group_ids=None))


def by_ids(rewards, context, ids=GROUPS):
    return every(tuple(ESTIMATORS), rewards, context._replace(group_ids=ids))


def same(found, wanted, order=slice(None)):
    for name, x in wanted.items():
        np.testing.assert_allclose(found[name], np.asarray(x)[order], rtol=1e-4, atol=2e-5, err_msg=name)


BATCHES = (st.integers(0, 10**6), st.lists(st.integers(0, T), min_size=B, max_size=B))
many = settings(max_examples=15, deadline=None)


@many
@given(*BATCHES, st.permutations(range(B)))
def test_ids_are_the_axis_and_order_does_not_matter(seed, lengths, order):
    rewards, context = scored(seed, lengths)
    wanted = by_axis(rewards, context)
    same(by_ids(rewards, context), wanted)
    order = np.asarray(order)
    moved = type(context)(*(None if x is None else x[order] for x in context))
    same(by_ids(rewards[order], moved, GROUPS[order]), wanted, order)


@many
@given(*BATCHES, st.sampled_from([np.nan, np.inf, -np.inf, 1e30]))
def test_padding_is_read_nowhere(seed, lengths, garbage):
    rewards, context = scored(seed, lengths)
    spoil = lambda x: np.where(context.mask, x, np.float32(garbage))
    dirty = context._replace(**{n: spoil(getattr(context, n)) for n in context._fields[1:5]})
    clean, found = by_axis(rewards, context), by_axis(rewards, dirty)
    chex.assert_trees_all_equal(found, clean)
    chex.assert_tree_all_finite(clean)
    for name, x in clean.items():
        assert name in OUTCOME or not np.any(np.asarray(x)[~context.mask]), name


@many
@given(st.integers(0, 10**6), st.sets(st.integers(0, B - 1), max_size=B))
def test_a_missing_reward_is_left_out_and_gets_zero(seed, missing):
    rewards, context = scored(seed)
    missing = sorted(missing)
    rewards[missing] = np.nan
    found = by_ids(rewards, context)
    chex.assert_tree_all_finite(found)
    for name, x in found.items():
        assert name == "process" or not np.any(np.asarray(x)[missing]), name
    # The others are what they are where the missing ones are a prompt of their own, whose rows hold no token.
    alone = np.where(np.isin(np.arange(B), missing), 100 + np.arange(B), GROUPS)
    empty = context._replace(mask=context.mask & ~np.isnan(rewards)[:, None])
    others = by_ids(rewards, empty, alone)
    kept = np.setdiff1d(np.arange(B), missing)
    same({n: np.asarray(x)[kept] for n, x in found.items()}, others, kept)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.9, -1.3, 1e-3, 1e6])
@pytest.mark.parametrize("group", [by_axis, by_ids])
def test_equal_rewards_give_exactly_zero(reward, group):
    _, context = scored(0)
    rewards, ends = np.full(B, reward, np.float32), context.step_rewards * 0  # NaN where no step ends
    found = group(rewards, context._replace(step_rewards=ends))
    for name in ("group_mean", "group_z_score", "leave_one_out", "batch_scaled", "batch_scaled_centred", "gdpo",
                 "whitened", "whitened_group", "process"):  # fmt: skip
        assert not np.any(found[name]), name
    assert not np.any(group(rewards, context._replace(step_rewards=ends + np.float32(reward)))["process"])


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if "gae" not in n and "kl" not in n and "whitened" not in n])
def test_one_group_without_a_difference_among_others_is_exactly_zero(name):
    rewards, context = scored(1, (5, 3, 1, 4, 2, 2))
    rewards[:3] = np.float32(0.9)
    other = np.isnan(context.step_rewards) | (np.arange(B) >= 3)[:, None]
    steps = np.where(other, context.step_rewards, np.float32(0.9))
    found = np.asarray(by_axis(rewards, context._replace(step_rewards=steps))[name])
    assert not np.any(found[:3]) and np.any(found[3:])


def test_rewards_that_cancel_leave_no_residue():
    first = np.array([[0.3, 0.1, 0.9], [1.0, 0.0, 0.7]], np.float32)
    cancelled = GDPO()(np.stack([first, 1 - first], axis=-1))
    np.testing.assert_array_equal(cancelled, np.zeros((2, 3)))


@pytest.mark.parametrize("lengths", [(0,) * B, (1, 0, 0, 0, 0, 0), (1,) * B])
def test_batches_of_hardly_a_token_are_finite(lengths):
    rewards, context = scored(2, lengths)
    found = by_axis(rewards, context)
    chex.assert_tree_all_finite(found)
    for name, x in found.items():
        assert name in OUTCOME or sum(lengths) or not np.any(x), name


@pytest.mark.parametrize("arrays", [("old_logp",), ("ref_logp",), ("old_logp", "ref_logp")])
@pytest.mark.parametrize("value", [-np.inf, -50.0, 50.0])
def test_a_kl_of_impossible_tokens_leaves_rewards_finite(arrays, value):
    rewards, context = scored(3)
    at = np.zeros((B, T), bool)
    at[[0, 1, 3], [1, 0, 2]] = True
    odd = context._replace(**{n: np.where(at, np.float32(value), getattr(context, n)) for n in arrays})
    chex.assert_tree_all_finite(by_axis(rewards, odd))


def test_a_coefficient_given_to_a_kl_in_the_reward_replaces_its_own():
    rewards, context = scored(4)
    estimator = ESTIMATORS["leave_one_out_kl"]
    wanted = dataclasses.replace(estimator, coef=0.7)(rewards.reshape(2, 3), context)
    found = estimator.estimator(*estimator.penalised(rewards.reshape(2, 3), context, 0.7))
    np.testing.assert_array_equal(found, wanted)
    assert np.any(wanted != estimator(rewards.reshape(2, 3), context))


def test_a_kl_in_the_reward_comes_on_top_of_step_rewards():
    """Returns written out: the outcome, the steps from here on, and minus the coefficient times k1 from here on."""
    rewards, context = scored(5)
    rewards = rewards.reshape(2, 3)
    found = np.asarray(KLInReward(GAE(gamma=1.0, lam=1.0), K1(), 0.3)(rewards, context))
    mask, values = np.asarray(context.mask, bool), np.asarray(context.values, np.float64)
    steps = np.where(mask & ~np.isnan(context.step_rewards), context.step_rewards, 0.0)
    gaps = np.where(mask, np.float64(context.old_logp) - context.ref_logp, 0.0)
    later = np.flip(np.cumsum(np.flip(steps - 0.3 * gaps, 1), axis=1), 1)
    wanted = np.where(mask, rewards.reshape(-1, 1) + later - values, 0.0)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    assert np.any(steps) and np.any(gaps)
