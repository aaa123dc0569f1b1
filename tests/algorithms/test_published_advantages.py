"""Estimators against numbers worked out by hand: by group, by batch, by token, by step."""

import ast
import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.fixture import advantages_of
from oracles import FIXTURE, NUMBERS, check, number

from jaxrl_llm.algorithms import PRESETS, AdvantageContext, advantages
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
from jaxrl_llm.algorithms.kl import K1

BATCH = {
    "centered": GroupMean(),
    "litePPO_TRL_batch": BatchScaled("rewards", eps=0.0),
    "rfpp_baseline_seq_std_ddof1": BatchScaled("advantages", eps=0.0),
    "rfpp_baseline_tokwhiten_verl": Whitened("group"),
    "rfpp_baseline_tokwhiten_pop_nemo": Whitened("group", ddof=0),
}


@pytest.mark.parametrize("name", BATCH)
@pytest.mark.parametrize("by", ["axis", "ids"])
def test_two_groups_in_one_batch(name, by, dtype):
    mask = np.arange(4) < number("ADV_batch/lens")[:, None]
    rewards = jnp.asarray(number("ADV_batch/R"), dtype)
    ids = None if by == "axis" else np.array([7, 7, 7, 2, 2, 2])
    found = BATCH[name](rewards.reshape(2, 3) if by == "axis" else rewards, AdvantageContext(mask, group_ids=ids))
    if BATCH[name].needs:
        np.testing.assert_array_equal(found, np.where(mask, np.asarray(found)[:, :1], 0))
        found = found[:, 0]
    check(found.reshape(-1), f"ADV_batch/{name}", dtype)


def test_the_deviation_of_raw_rewards_over_the_batch():
    ratio = number("ADV_batch/centered") / number("ADV_batch/batch_std_of_raw_R_ddof1")
    np.testing.assert_allclose(ratio, number("ADV_batch/litePPO_TRL_batch"), atol=1e-7)


@pytest.mark.parametrize("key", ["ADV_zero_var/A_eps", "ADV_zero_var_float/f32_mean_minus"])
@pytest.mark.parametrize("estimator", [GroupMean(), GroupZScore(eps=0.0), GroupZScore(eps=1e-8), LeaveOneOut()])
def test_no_variance_gives_zero_whatever_eps_is(estimator, key):
    np.testing.assert_array_equal(estimator(np.full((1, 3), 0.9, np.float32))[0], number(key))


@pytest.mark.parametrize(("name", "value"), [("A_center", GroupMean()), ("RLOO_alt", LeaveOneOut())])
def test_the_fixtures_outcome_advantages(name, value, dtype):
    check(advantages_of(value, dtype), f"ADV/{name}", dtype)
    check(advantages_of(GroupZScore(eps=0.0), dtype), "GRPO/A", dtype)


def test_rloo_sums_the_kl_of_a_sequence_into_its_reward(dtype):
    rloo = dataclasses.replace(PRESETS["rloo"], kl_coef=0.1)
    assert rloo.advantage == KLInReward(LeaveOneOut(), K1(), 0.1)
    check(advantages_of(rloo.advantage, dtype), "RLOO/A", dtype)
    check(advantages_of(PRESETS["rloo"].advantage, dtype), "ADV/RLOO", dtype)


def test_the_kl_of_each_token_in_its_reward(dtype):
    zeros = jnp.zeros((3, 4), dtype)
    # Without a critic, and looking no further than the token itself, the advantage is the token's reward.
    alone, whole = (KLInReward(GAE(gamma, gamma), K1(), 0.1) for gamma in (0.0, 1.0))
    check(advantages_of(alone, dtype, values=zeros), "KL_in_reward/token_rewards", dtype)
    check(advantages_of(alone, dtype, values=zeros), "REINFORCEpp/token_reward", dtype)
    returns = advantages_of(whole, dtype, values=zeros)
    check(returns, "REINFORCEpp/returns", dtype)
    check(returns[:, 0], "KL_in_reward/seq_sum", dtype)


@pytest.mark.parametrize("ddof", [0, 1])
def test_reinforce_pp_whitens_the_returns_of_tokens(ddof, dtype):
    algorithm = dataclasses.replace(PRESETS["reinforce_pp"], kl_coef=0.1, advantage=Whitened(ddof=ddof))
    check(advantages_of(algorithm.advantage, dtype), f"REINFORCEpp/A_ddof{ddof}", dtype)


def test_reinforce_pps_mean_and_deviation_are_those_of_valid_tokens():
    returns = number("REINFORCEpp/returns")[FIXTURE["mask"] > 0]
    found = [returns.mean(), returns.std(ddof=1)]
    np.testing.assert_allclose(found, [NUMBERS["REINFORCEpp"][n] for n in ("mean", "std_ddof1")], atol=1e-7)


def test_prorl_v2_is_the_baseline_variant_with_the_populations_deviation(dtype):
    check(advantages_of(PRESETS["prorl_v2"].advantage, dtype), "ProRLv2/A", dtype)


@pytest.mark.parametrize("ddof", [0, 1])
def test_process_rewards(ddof, dtype):
    steps = np.full((3, 4), np.nan)
    for row, ends in enumerate(ast.literal_eval(NUMBERS["GRPO_process"]["step_rewards"])):
        for end, reward in ends:
            steps[row, end - 1] = reward
    every = steps[~np.isnan(steps)]
    np.testing.assert_allclose(
        [every.mean(), every.std(ddof=ddof)], [number("GRPO_process/mean"), number(f"GRPO_process/std_ddof{ddof}")],
        atol=1e-7)  # fmt: skip
    found = advantages_of(ProcessSupervised(ddof, eps=0.0), dtype, step_rewards=jnp.asarray(steps, dtype))
    check(found, f"GRPO_process/A_ddof{ddof}", dtype)


def single(estimator, dtype, mask=(1, 1, 1), critic="PPO/V"):
    """Advantages [T] of PPO's one published completion, whose reward 1 stands at the end."""
    given = number(critic) if isinstance(critic, str) else np.asarray(critic)
    context = AdvantageContext(np.asarray([mask]), values=jnp.asarray(given[None], dtype))
    return estimator(jnp.ones((1, 1), dtype), context)[0]


@pytest.mark.parametrize(("estimator", "path"), [
    (GAE(), "PPO/A"),
    (GAE(lam=0.0), "PPO/delta"),
    (GAE(gamma=0.99), "PPO_gamma099/A"),
    (GAE(whiten=True), "PPO/A_whitened_ddof1"),
])  # fmt: skip
def test_generalised_advantages(estimator, path, dtype):
    check(single(estimator, dtype), path, dtype)


def test_the_targets_of_the_value_loss(dtype):
    critic = jnp.asarray(number("PPO/V")[None], dtype)
    check(advantages.returns(single(GAE(), dtype)[None], critic)[0], "PPO/returns", dtype)


def test_generalised_advantages_skip_what_a_tool_wrote(dtype):
    found = single(GAE(), dtype, (1, 0, 1), [0.2, 9.9, 0.6])
    check(found, "PPO_gae_skip_tool/A", dtype)
    check(single(GAE(), dtype, (1, 1), [0.2, 0.6]), "PPO_gae_skip_tool/check", dtype)


@pytest.mark.parametrize(("key", "names"), [
    ("GDPO", {"sum": "grpo_sum_norm", "several": "gdpo_batchnorm"}),
    ("GDPO_scale", {"sum": "grpo", "several": "gdpo"}),
])  # fmt: skip
def test_several_rewards(key, names, dtype):
    rewards = jnp.asarray(np.stack([number(f"{key}/r1"), number(f"{key}/r2")], axis=-1)[None], dtype)
    # Exact in float64 only where the smaller reward's own deviation, 0.006, is not lost in its eps.
    check(GDPO(eps=0.0)(rewards)[0], f"{key}/{names['several']}", dtype)
    check(GroupZScore(eps=0.0)(jnp.sum(rewards, axis=-1))[0], f"{key}/{names['sum']}", dtype)


def test_the_weighted_sum_that_is_normalised_last(dtype):
    parts = [GroupZScore(eps=0.0)(jnp.asarray(number(f"GDPO/{name}")[None], dtype))[0] for name in ("r1", "r2")]
    check(parts[0] + parts[1], "GDPO/gdpo_presum", dtype)
    rewards = jnp.asarray(np.stack([number("GDPO/r1"), number("GDPO/r2")], axis=-1)[None], dtype)
    tilted = GDPO((3.0, 1.0), eps=0.0)(rewards)[0]
    total = np.asarray(3 * parts[0] + parts[1], np.float64)
    np.testing.assert_allclose(tilted, total / total.std(ddof=1), rtol=2e-5, atol=2e-7)
