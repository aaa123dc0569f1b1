"""What a critic does to a policy's gradient, exactly; its targets, and the value of the state after the last token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms import enumeration as exact
from algorithms.batches import B, T, scored
from algorithms.enumeration import Drawn, expected, grow, reached, slope, worth
from oracles import check, number

from jaxrl_llm.algorithms import AdvantageContext, Algorithm, advantages
from jaxrl_llm.algorithms.advantages import GAE, Estimator, GroupMean, KLInReward, Whitened
from jaxrl_llm.algorithms.kl import K1
from jaxrl_llm.algorithms.ratios import Token
from jaxrl_llm.algorithms.reduce import SequenceSum
from jaxrl_llm.algorithms.surrogates import Likelihood

TREE = grow(3, stop=2)
NODES = TREE.visits.shape[1]
LAMBDAS = (0.0, 0.5, 1.0)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


def on_policy(critic=None, seed=0):
    """A policy, and what a step has that it sampled itself; the critic's values [N] are random where none are given."""
    draw = np.random.default_rng(seed)
    live = 0.8 * draw.normal(size=(NODES, 3))
    rewards = draw.normal(size=len(TREE.tokens))
    return live, Drawn(live, live, live, rewards, draw.normal(size=NODES) if critic is None else critic)


def ascent(lam, live, data):
    """What the loss climbs in expectation, [N, 3], with advantages of this critic."""
    algorithm = Algorithm(GAE(1.0, lam), Token(), Likelihood(), SequenceSum())
    return -expected(algorithm, TREE, live, data)[1]


def wanted(live, data):
    found = slope(exact.mean_reward, live, TREE, data.rewards)
    assert np.abs(found).max() > 0.01
    return found


def same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lam", LAMBDAS)
def test_an_exact_critic_gives_the_exact_gradient_at_every_lambda(lam, float64):
    live, data = on_policy()
    state, _ = worth(live, TREE, data.rewards)
    same(ascent(lam, live, data._replace(values=state)), wanted(live, data))


def test_any_critic_gives_the_exact_gradient_at_lambda_1(float64):
    live, data = on_policy()
    same(ascent(1.0, live, data), wanted(live, data))
    same(ascent(1.0, live, data._replace(values=100 * data.values)), wanted(live, data))


@pytest.mark.parametrize("lam", [0.0, 0.5])
def test_a_wrong_critic_is_biased_by_its_errors_at_the_states_to_come(lam, float64):
    """``A_t`` expects ``sum_{l >= 1} (1 - lam) lam^(l - 1) e(s_{t + l})`` too much, and the gradient follows it."""
    live, data = on_policy()
    state, _ = worth(live, TREE, data.rewards)
    error = np.where(TREE.mask, (data.values - state)[TREE.nodes], 0.0)
    size = TREE.mask.shape[1]
    too_much = np.zeros(TREE.mask.shape)
    for t in range(size):
        for later in range(t + 1, size):
            too_much[:, t] += (1 - lam) * lam ** (later - t - 1) * error[:, later]
    _, by_action = worth(live, TREE, too_much)
    bias = slope(exact.local_objective, live, reached(live, TREE), by_action)
    assert np.abs(bias).max() > 0.01
    same(ascent(lam, live, data), wanted(live, data) + bias)


def by_hand(rewards, guesses, mask, gamma, lam, after):
    """Advantages [B, T], token by token: the sum over all later ones of discounted temporal differences."""
    found = np.zeros(mask.shape)
    for row in range(len(mask)):
        places = np.flatnonzero(mask[row])
        later = [*guesses[row, places[1:]], after[row]]
        delta = [rewards[row, p] + gamma * v - guesses[row, p] for p, v in zip(places, later, strict=False)]
        for first, place in enumerate(places):
            found[row, place] = sum((gamma * lam) ** (k - first) * delta[k] for k in range(first, len(places)))
    return found


def one_batch():
    """Rewards, a context with gaps in its mask, and the values after the last tokens: half of them are 0."""
    rewards, context = scored(3)
    random = np.random.default_rng(0)
    mask = context.mask & (random.random((B, T)) > 0.2)
    after = np.where(np.arange(B) % 2, random.normal(size=B), 0).astype(np.float32)
    return rewards, context._replace(mask=mask, step_rewards=None, bootstrap=after)


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (0.9, 0.0)])
def test_what_was_cut_off_is_worth_what_the_critic_expects_of_the_rest(gamma, lam):
    rewards, context = one_batch()
    ends = np.zeros((B, T))
    for row in range(B):
        ends[row, np.flatnonzero(context.mask[row])[-1:]] = rewards[row]
    for bootstrap in (False, True):
        after = context.bootstrap if bootstrap else np.zeros(B)
        advantages = by_hand(ends, context.values, context.mask, gamma, lam, after)
        found, targets = GAE(gamma, lam, bootstrap=bootstrap).with_returns(rewards, context)
        np.testing.assert_allclose(found, advantages, rtol=1e-5, atol=1e-5)
        returns = np.where(context.mask, advantages + context.values, 0)
        np.testing.assert_allclose(targets, returns, rtol=1e-5, atol=1e-5)


def test_a_value_after_the_last_token_must_be_given_for_each_completion():
    rewards, context = one_batch()
    with pytest.raises(ValueError, match=r"GAE needs context.bootstrap"):
        GAE(bootstrap=True)(rewards, context._replace(bootstrap=None))
    with pytest.raises(ValueError, match=r"context.bootstrap must have shape \(6,\)"):
        GAE(bootstrap=True)(rewards, context._replace(bootstrap=np.zeros((B, T), np.float32)))


def test_whitening_leaves_the_returns_alone(dtype):
    context = AdvantageContext(np.ones((1, 3), bool), values=jnp.asarray(number("PPO/V")[None], dtype))
    rewards = jnp.ones((1, 1), dtype)
    whitened, returns = GAE(whiten=True).with_returns(rewards, context)
    check(whitened[0], "PPO/A_whitened_ddof1", dtype)
    check(returns[0], "PPO/returns", dtype)
    plain, same_returns = GAE().with_returns(rewards, context)
    check(plain[0], "PPO/A", dtype)
    np.testing.assert_array_equal(same_returns, returns)
    np.testing.assert_array_equal(advantages.returns(plain, context.values), returns)


def test_a_kl_in_the_reward_is_in_the_returns_too():
    rewards, context = one_batch()
    penalised = KLInReward(GAE(whiten=True), K1(), 0.3)
    advantages, returns = penalised.with_returns(rewards, context)
    np.testing.assert_array_equal(advantages, penalised(rewards, context))
    costs = np.where(context.mask, -0.3 * (context.old_logp - context.ref_logp), 0)
    alone = GAE().with_returns(rewards, context._replace(step_rewards=costs.astype(np.float32)))[1]
    np.testing.assert_allclose(returns, alone, rtol=1e-5, atol=1e-6)
    moved = GAE().with_returns(*penalised.penalised(rewards, context, np.float32(0.0)))[1]
    np.testing.assert_allclose(moved, GAE().with_returns(rewards, context)[1], rtol=1e-5, atol=1e-6)


def test_a_completion_that_could_not_be_scored_has_neither():
    rewards, context = one_batch()
    rewards[2] = np.nan
    advantages, returns = GAE().with_returns(rewards, context)
    assert not np.any(advantages[2]) and not np.any(returns[2]) and np.all(np.isfinite(returns))


def test_an_estimator_says_whether_it_compares_completions_of_one_prompt():
    assert not GAE().compares and not Whitened().compares and not KLInReward(GAE(), K1(), 0.1).compares
    assert GroupMean().compares and Whitened("group").compares and KLInReward(GroupMean(), K1(), 0.1).compares
    assert Estimator.compares, "one that says nothing may compare"
