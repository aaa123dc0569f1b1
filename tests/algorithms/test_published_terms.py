"""Weights, masks, penalties and controllers, token by token, against numbers worked out by hand."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.fixture import advantages_of, policy
from oracles import FIXTURE, NUMBERS, check, number

from jaxrl_llm.algorithms import PRESETS, PolicyBatch
from jaxrl_llm.algorithms.advantages import GroupMean, GroupZScore
from jaxrl_llm.algorithms.kl import K2, K3, AdaptiveKL, K3Plus, ProportionalKL, UnbiasedK3
from jaxrl_llm.algorithms.ratios import MaskedIS, OffPolicySequenceMask, Sequence, SequenceMask, Token, TruncatedIS
from jaxrl_llm.algorithms.surrogates import CISPO, SAPO, MiniRL, MirrorDescent, PenaltyKL
from jaxrl_llm.algorithms.tokens import clean_tokens
from jaxrl_llm.rewards import CosineLength, SoftOverlong
from jaxrl_llm.types import Completion, Problem


def tokens(dtype, advantage=GroupZScore(eps=0.0), ratio=Token(), kl_coef=0.0, **policies):
    """The fixture as a surrogate, a correction or a filter sees it; ``policies`` puts one in another's place."""
    names = {"old_logp": "old", "sampler_logp": "mu", "ref_logp": "ref"} | policies
    given = {name: policy(which, dtype) for name, which in names.items()}
    batch = PolicyBatch(advantages_of(advantage, dtype), FIXTURE["mask"], **given)
    at = clean_tokens(policy("new", dtype), batch, kl_coef)
    return at._replace(log_ratio=ratio(at))


@pytest.mark.parametrize(("piece", "name"), [
    (TruncatedIS(1e9), "w_token"),
    (TruncatedIS(2.0), "tis2"),
    (MaskedIS(0.5, 2.0), "mis_0p5_2"),
    (MaskedIS(0.5, 5.0), "icepop_0p5_5"),
])  # fmt: skip
def test_weights_of_tokens_for_the_gap_to_the_sampler(piece, name, dtype):
    at = tokens(dtype)
    check(piece(at) * at.mask, f"TIS/{name}", dtype)


@pytest.mark.parametrize(("piece", "name"), [
    (TruncatedIS(1e9, "sequence"), "w_seq_product"),
    (TruncatedIS(1e9, "geometric"), "w_seq_geo"),
    (TruncatedIS(2.0, "sequence"), "seqTIS2"),
    (MaskedIS(0.5, 2.0, "sequence"), "seqmis_product_0p5_2"),
    (SequenceMask(0.999, 1.002), "seqmask_geo_0p999_1p002"),
])  # fmt: skip
def test_weights_of_sequences_for_the_gap_to_the_sampler(piece, name, dtype):
    found = piece(tokens(dtype))
    for column in range(4):
        check(found[:, column], f"TIS/{name}", dtype)


def test_a_sequence_mask_keeps_each_tokens_own_weight(dtype):
    at = tokens(dtype)
    check(SequenceMask(0.5, 5.0)(at) * at.mask, "TIS/w_token", dtype)
    kept = SequenceMask(1.0, 1.01)(at)  # the first alone: 1.006, 1.44 and 0.994
    np.testing.assert_array_equal(np.any(kept, axis=1), [True, False, False])


@pytest.mark.parametrize(("name", "delta", "sampler"), [
    ("M_delta0p1_old", 0.1, "old"), ("M_delta0p5_old", 0.5, "old"), ("M_mu_delta0p1", 0.1, "mu"),
])  # fmt: skip
def test_sequences_far_off_policy(name, delta, sampler, dtype):
    found = OffPolicySequenceMask(delta)(tokens(dtype, GroupMean(), sampler_logp=sampler))
    check(found[:, 0], f"V32_OPSM/{name}", dtype)


@pytest.mark.parametrize(("sampler", "name"), [("old", "meanlog_old_over_new"), ("mu", "meanlog_mu_over_new")])
def test_a_filter_acts_where_the_mean_drift_passes_its_bound(sampler, name, dtype):
    at = tokens(dtype, GroupMean(), sampler_logp=sampler)._replace(advantages=-jnp.ones((3, 4), dtype))
    for row, drift in enumerate(NUMBERS["V32_OPSM"][name]):
        if drift > 0:
            kept = [float(OffPolicySequenceMask(drift + gap)(at)[row, 0]) for gap in (-1e-6, 1e-6)]
            assert kept == [0.0, 1.0]
        else:
            assert OffPolicySequenceMask(0.0)(at)[row, 0] == 1
    for sign in (0.0, 1.0):  # what was good enough is never left out
        kept = OffPolicySequenceMask(0.0)(at._replace(advantages=jnp.full((3, 4), sign, dtype)))
        np.testing.assert_array_equal(kept, np.ones((3, 1)))


def test_gspos_ratios(dtype):
    check(jnp.exp(tokens(dtype, ratio=Sequence()).log_ratio[:, 0]), "GSPO/s", dtype)


def test_cispos_weights_and_minirls(dtype):
    at = tokens(dtype, GroupMean())._replace(advantages=-jnp.ones((3, 4), dtype), logp=jnp.ones((3, 4), dtype))
    check(CISPO(1.28)(at) * at.mask, "CISPO/w", dtype)
    at = tokens(dtype, GroupMean())
    check(jnp.exp(at.log_ratio) * at.mask, "MiniRL/r", dtype)
    check(at.advantages[:, 0], "MiniRL/A", dtype)
    slope = jax.grad(lambda x: jnp.sum(MiniRL()(at._replace(logp=x)) * at.mask))(at.logp)
    weights, kept = number("MiniRL/w"), number("MiniRL/M")
    np.testing.assert_allclose(slope, -weights * kept * np.asarray(at.advantages), rtol=2e-5, atol=1e-7)
    low, high = MiniRL().clipped(jnp.exp(at.log_ratio), at.advantages)
    np.testing.assert_array_equal(~(np.asarray(low) | np.asarray(high)) & (FIXTURE["mask"] > 0), kept > 0)


def test_sapos_gate_and_the_weight_of_its_gradient(dtype):
    at = tokens(dtype)
    check(-SAPO()(at) / at.advantages * at.mask, "SAPO/gate_f", dtype)
    slope = jax.grad(lambda x: jnp.sum(SAPO()(at._replace(log_ratio=x)) * at.mask))(at.log_ratio)
    plain = jnp.where(at.mask > 0, -at.advantages * jnp.exp(at.log_ratio), 1)
    check(slope / plain, "SAPO/weight_4p1mp", dtype)


def test_kimis_log_ratio_is_summed_over_the_sequence(dtype):
    at = tokens(dtype, GroupMean())._replace(advantages=jnp.zeros((3, 4), dtype))
    value = jnp.sum(MirrorDescent(0.5)(at) * at.mask, axis=1)  # (tau sum)^2 / (2 tau)
    np.testing.assert_allclose(4 * value, number("Kimi/log_ratio_seq") ** 2, rtol=2e-5)


def test_k3_plus_has_k3s_value_and_k2s_gradient(dtype):
    new, ref, mask = policy("new", dtype), policy("ref", dtype), jnp.asarray(FIXTURE["mask"], dtype)
    value, pull = jax.vjp(lambda x: K3Plus()(x, ref), new)
    check(value * mask, "KL_tokens/k3", dtype)
    check(pull(mask)[0], "KL_tokens/dk2", dtype)


def test_unbiased_k3_token_by_token(dtype):
    at = tokens(dtype)
    check(UnbiasedK3()(at.logp, at.ref_logp, at.log_ratio) * at.mask, "V32_unbiasedKL/tokens", dtype)
    slope = jax.grad(lambda x: jnp.sum(UnbiasedK3()(x, at.ref_logp, x - at.old_logp)))(at.logp)
    lengths = FIXTURE["mask"].sum(axis=1, keepdims=True)
    check(jnp.asarray(slope / (3 * lengths), dtype), "V32_unbiasedKL/closed_form", dtype)


def test_the_ratio_makes_k3_unbiased_off_policy(dtype):
    pi, ref = np.array([0.6, 0.25, 0.15]), jnp.asarray(np.log([0.3, 0.3, 0.4]), dtype)
    old = np.array([0.3, 0.5, 0.2])

    def expected(logits, estimator):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.asarray(old, dtype) * estimator(logp, ref, logp - jnp.asarray(np.log(old), dtype)))

    logits = jnp.asarray(np.log(pi), dtype)
    value, grad = jax.value_and_grad(expected)(logits, UnbiasedK3())
    check(value, "V32_expect/E_old_unbiased", dtype)
    check(value, "V32_expect/KL", dtype)
    check(grad, "KL_expect/true_grad_reverseKL", dtype)
    check(expected(logits, K3()), "V32_expect/E_old_plain_k3", dtype)


def test_k3s_gradient_is_that_of_the_forward_divergence_and_k3_pluss_is_not(dtype):
    pi, ref = jnp.asarray([0.6, 0.25, 0.15], dtype), jnp.asarray(np.log([0.3, 0.3, 0.4]), dtype)
    slope = lambda kl: jax.grad(lambda x: jnp.sum(pi * kl(jax.nn.log_softmax(x), ref)))(jnp.log(pi))
    check(slope(K3()), "KL_expect/grad_forwardKL_pq", dtype)
    check(slope(K3Plus()), "KL_expect/true_grad_reverseKL", dtype)
    check(slope(K2()), "KL_expect/Egrad_k2", dtype)


def penalty_at(dtype, advantages, kl_coef):
    """PenaltyKL's losses [2, 3] of every action in the two published states, and the old probabilities."""
    old, new = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3]]), np.array([[0.6, 0.25, 0.15], [0.15, 0.6, 0.25]])
    logs = [jnp.asarray(np.log(p), dtype) for p in (new, old)]
    at = clean_tokens(logs[0], PolicyBatch(jnp.asarray(advantages, dtype), np.ones((2, 3)), logs[1]), kl_coef)
    return PenaltyKL()(at._replace(log_ratio=Token()(at))), jnp.asarray(old, dtype)


def test_the_penalty_is_in_expectation_the_exact_divergence_from_the_old_policy(dtype):
    found, old = penalty_at(dtype, np.zeros((2, 3)), 1.0)
    exact = jnp.sum(old * found, axis=1)
    check(exact, "PPO_penalty/kl_states", dtype)
    check(jnp.mean(exact), "PPO_penalty/d", dtype)
    advantages = np.array([[1.0, 0, 0], [0, -0.5, 0]])
    surrogate = -jnp.sum(penalty_at(dtype, advantages, 0.0)[0]) / 2  # the actions taken are the first and the second
    check(surrogate, "PPO_penalty/surrogate", dtype)
    check(jnp.mean(exact) - surrogate, "PPO_penalty/loss", dtype)
    whole = penalty_at(dtype, advantages, 2.0)[0]
    np.testing.assert_allclose(whole, penalty_at(dtype, advantages, 0.0)[0] + 2 * found, rtol=2e-5, atol=1e-7)


def test_controllers_of_the_coefficient():
    example = NUMBERS["PPO_penalty"]
    for target, name in ((example["d_targ"], "beta_next"), (0.03, "beta_next_if_targ_p03"),
                         (0.02, "beta_next_if_targ_p02")):  # fmt: skip
        assert AdaptiveKL(target)(1.0, example["d"], 0) == example[name]
    assert AdaptiveKL(0.03)(1.0, 0.019, 0) == 0.5
    found = ProportionalKL(6.0, 10000)(0.2, 12.0, 256)
    assert math.isclose(found, NUMBERS["KL_adaptive_Ziegler"]["beta"], abs_tol=1e-12)
    assert math.isclose(ProportionalKL(6.0, 10000)(0.2, 5.7, 1000), 0.2 * (1 - 0.05 * 0.1), abs_tol=1e-12)


def test_rewards_of_lengths():
    problem = Problem("1", ({"role": "user", "content": "?"},), "3", "test")

    def of(reward, length):
        empty = np.zeros(int(length), np.int32)
        return reward(problem, Completion(empty, empty, "stop", empty, empty))

    overlong, cosine = NUMBERS["DAPO_length"], NUMBERS["ProRLv2_cosine"]
    assert [of(SoftOverlong(), length) for length in overlong["lens"]] == overlong["r"]
    shape = CosineLength(cosine["T"], cosine["eta_min"], cosine["eta_max"])
    np.testing.assert_allclose([of(shape, length) for length in cosine["t"]], cosine["r"], atol=1e-12)


def test_the_fixture_is_the_one_that_presets_take(dtype):
    rewards = jnp.asarray(FIXTURE["R"], dtype)[None]
    check(dataclasses.replace(PRESETS["grpo"].advantage, eps=0.0)(rewards)[0], "DAPO/A", dtype)
    check(PRESETS["dr_grpo"].advantage(rewards)[0], "DrGRPO/A", dtype)
