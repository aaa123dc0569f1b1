"""Every preset against numbers worked out by hand from the papers: values and gradients, in both precisions."""

import ast
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.fixture import advantages_of, evaluate, policy
from oracles import FIXTURE, NUMBERS, check, fixture_logp, number

from jaxrl_llm.algorithms import PRESETS, AdvantageContext, Algorithm
from jaxrl_llm.algorithms.advantages import GroupMean, GroupZScore, ProcessSupervised
from jaxrl_llm.algorithms.kl import K3, UnbiasedK3
from jaxrl_llm.algorithms.ratios import MaskedIS, OffPolicySequenceMask, SequenceMask, Token, TruncatedIS
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, SequenceSum, TokenMean
from jaxrl_llm.algorithms.surrogates import CISPO, GMPO, LUSPO, ClipCov, KLCov, MirrorDescent, PPOClip

Z, POPULATION = GroupZScore(eps=0.0), GroupZScore(ddof=0, eps=0.0)
WIDE = PPOClip(0.2, 0.2)
CENTRED = Algorithm(GroupMean(), Token(), WIDE, SequenceMean())
"""DeepSeek-V3.2's advantage with the ratio against the old policy, as its published numbers have it."""

STEPS = np.full((3, 4), np.nan)
for row, ends in enumerate(ast.literal_eval(NUMBERS["GRPO_process"]["step_rewards"])):
    for end, reward in ends:
        STEPS[row, end - 1] = reward


def variant(name, **changes):
    return dataclasses.replace(PRESETS[name], **{"advantage": Z} | changes)


CASES = {
    "GRPO/loss_nokl": (variant("grpo", kl_coef=0.0), "GRPO/grad_nokl"),
    "GRPO/loss_kl": (variant("grpo"), "GRPO/grad_kl"),
    "GRPO/loss_A_pop_std": (variant("grpo", kl_coef=0.0, advantage=POPULATION), None),
    "GRPO_seed002_no_length_norm/loss": (
        variant("grpo", kl_coef=0.0, reduce=SequenceSum()), "GRPO_seed002_no_length_norm/grad"),
    "DrGRPO/loss_norm8": (dataclasses.replace(PRESETS["dr_grpo"], reduce=ConstantLength(8)), "DrGRPO/grad"),
    "DrGRPO/loss_paper_sum": (dataclasses.replace(PRESETS["dr_grpo"], reduce=SequenceSum()), None),
    "DAPO/loss": (variant("dapo"), "DAPO/grad"),
    "GSPO/loss_3e4_4e4": (variant("gspo"), "GSPO/grad_3e4_4e4"),
    "GSPO/loss_eps0p2": (variant("gspo", surrogate=WIDE), "GSPO/grad_eps0p2"),
    "GSPO/tok_loss": (variant("gspo_token"), "GSPO/tok_grad"),
    "CISPO/loss": (variant("cispo", surrogate=CISPO(1.28)), "CISPO/grad"),
    "CISPO/loss_cap5": (variant("cispo"), "CISPO/grad_cap5"),
    "ProRLv1/loss_tokenmean_b1e4": (variant("prorl"), None),
    "ProRLv1/loss_tokenmean_b0p01": (variant("prorl", kl_coef=0.01), "ProRLv1/grad_b0p01"),
    "REINFORCE_baseline_mean/loss": (PRESETS["reinforce"], "REINFORCE_baseline_mean/grad"),
    "RLOO/loss": (dataclasses.replace(PRESETS["rloo"], kl_coef=0.1), "RLOO/grad"),
    "REINFORCEpp/loss_seqmean": (dataclasses.replace(PRESETS["reinforce_pp"], kl_coef=0.1), "REINFORCEpp/grad"),
    "REINFORCEpp/loss_tokenmean": (
        dataclasses.replace(PRESETS["reinforce_pp"], kl_coef=0.1, reduce=TokenMean()), None),
    "SAPO/loss": (variant("sapo"), "SAPO/grad"),
    "ProRLv2/loss": (PRESETS["prorl_v2"], None),
    "ProRLv2/loss_b0p01": (dataclasses.replace(PRESETS["prorl_v2"], kl_coef=0.01), None),
    # The paper's loss is 2 tau times ours, and tau is 1/2 here.
    "Kimi/loss_meanbaseline": (dataclasses.replace(PRESETS["kimi_k1_5"], surrogate=MirrorDescent(0.5)), "Kimi/grad"),
    "V32_OPSM/loss_nomask": (CENTRED, None),
    "MiniRL/loss": (PRESETS["minirl"], "MiniRL/grad"),
    "TIS/loss_none": (variant("dapo", surrogate=WIDE), None),
    "TIS/loss_tis2": (variant("dapo", surrogate=WIDE, correction=TruncatedIS(2.0)), None),
    "TIS/loss_mis": (variant("dapo", surrogate=WIDE, correction=MaskedIS(0.5, 2.0)), None),
    "TIS/loss_seqtis": (variant("dapo", surrogate=WIDE, correction=TruncatedIS(2.0, "sequence")), None),
    # A published description of GSPO that is not GSPO: CISPO with two bounds, averaged by sequence.
    "MAXRL/loss_tokenmean": (PRESETS["maxrl"], None),
    # Published with the old policy as anchor; verl's form of the loss has the frozen ratio on the log-probability.
    "DPPO_TV/loss_sg_form": (variant("dppo_tv", ratio=Token()), "DPPO_TV/grad"),
    "DPPO_KL/loss_sg_form": (variant("dppo_kl", ratio=Token()), "DPPO_KL/grad"),
    "VESPO/loss_seqsum": (variant("vespo", ratio=Token()), "VESPO/grad_seqsum"),
    "VESPO/loss_tokenmean": (variant("vespo", ratio=Token(), reduce=TokenMean()), "VESPO/grad_tokenmean"),
    "GMPO/loss": (variant("gmpo"), "GMPO/grad"),
    "GMPO/loss_eps0p2": (variant("gmpo", surrogate=GMPO(0.2, 0.2)), None),
    "LUSPO/loss_paper_eps": (variant("luspo"), None),
    "LUSPO/loss_eps0p2": (variant("luspo", surrogate=LUSPO(0.2, 0.2)), "LUSPO/grad_eps0p2"),
    "M2PO/loss_N_all": (variant("m2po", ratio=Token()), "M2PO/grad_N_all"),
    "M2PO/code_loss": (variant("m2po_clip"), None),
    "CLIP_COV/loss": (variant("clip_cov", surrogate=ClipCov(0.25, 0.2)), "CLIP_COV/grad"),
    "KL_COV/loss": (variant("kl_cov", surrogate=KLCov(0.25)), "KL_COV/grad"),
    "GSPO_seed_wrong/loss": (
        variant("cispo", surrogate=CISPO(1.2, 0.8), reduce=SequenceMean()), "GSPO_seed_wrong/grad",
    ),
}  # fmt: skip


@functools.cache
def cases(dtype):
    """Loss and gradient of every case, as one program."""
    found = jax.jit(lambda logp: [evaluate(algorithm, dtype, logp) for algorithm, _ in CASES.values()])
    return dict(zip(CASES, found(policy("new", dtype)), strict=True))


@pytest.mark.parametrize("path", CASES)
def test_loss_and_gradient_are_the_published_ones(path, dtype):
    _, gradient = CASES[path]
    loss, grad = cases(dtype)[path]
    check(loss, path, dtype)
    if gradient is not None:
        check(grad, gradient, dtype)


@pytest.mark.parametrize("name", ["GRPO", "SAPO"])
def test_the_gradient_on_policy_is_that_of_every_sequence_alike(name, dtype):
    loss, grad = evaluate(variant(name.lower(), kl_coef=0.0), dtype, old_logp=None)
    # The value says nothing about progress. SAPO's is 2 A / tau, with two temperatures.
    assert name == "SAPO" or abs(float(loss)) < 1e-7
    check(grad, f"{name}/on_policy_grad", dtype)


def test_a_dropped_completion_leaves_numerator_and_denominator(dtype):
    mask = FIXTURE["mask"] * np.array([[1], [1], [0]])
    assert mask.sum() == NUMBERS["DAPO_overlong_filter"]["kept_tokens"]
    loss, grad = evaluate(variant("dapo"), dtype, mask=mask)
    check(loss, "DAPO_overlong_filter/loss", dtype)
    check(grad, "DAPO_overlong_filter/grad", dtype)


def test_gspo_inside_and_outside_its_narrow_band(dtype):
    logp = fixture_logp("old") + number("GSPO_small/dlog")
    for name, key in (("gspo", "grad"), ("gspo_token", "tok_grad")):
        loss, grad = evaluate(variant(name), dtype, logp=logp)
        check(loss, "GSPO_small/loss", dtype)
        check(grad, f"GSPO_small/{key}", dtype)


def test_gspo_token_takes_an_advantage_for_each_token(dtype):
    logp = fixture_logp("old") + number("GSPO_small/dlog")
    loss, grad = evaluate(variant("gspo_token"), dtype, logp=logp, advantages=number("GSPO_token_adv/A_token"))
    check(loss, "GSPO_token_adv/loss", dtype)
    check(grad, "GSPO_token_adv/grad", dtype)


def test_gspo_token_has_the_gradient_of_gspo(dtype):
    _, grad = evaluate(variant("gspo_token", surrogate=WIDE), dtype)
    check(grad, "GSPO/tok_grad_eps0p2", dtype)


def test_gspo_is_not_a_clipped_weight_on_the_log_probability(dtype):
    _, grad = evaluate(variant("gspo", surrogate=WIDE), dtype)
    check(grad, "GSPO/grad_eps0p2", dtype)
    assert np.abs(np.asarray(grad) - number("GSPO_seed_wrong/grad")).max() > 0.01


def test_the_least_of_clipped_and_unclipped_is_taken_token_by_token(dtype):
    example = NUMBERS["GSPO_seed_example"]
    logp = np.zeros((3, 4))
    logp[0, :2] = np.log(example["rho"])
    mask = np.array([[1, 1, 0, 0], [0] * 4, [0] * 4])
    loss, _ = evaluate(variant("grpo", kl_coef=0.0), dtype, logp, np.ones(3), mask, old_logp=jnp.zeros((3, 4), dtype))
    check(-loss, "GSPO_seed_example/grpo_correct", dtype)
    assert example["grpo_correct"] != example["seed_claim"]


def test_process_rewards_through_the_loss(dtype):
    steps = jnp.asarray(STEPS, dtype)
    advantages = advantages_of(ProcessSupervised(eps=0.0), dtype, step_rewards=steps)
    loss, grad = evaluate(variant("grpo", kl_coef=0.0), dtype, advantages=advantages)
    check(loss, "GRPO_process/loss_ddof1", dtype)
    check(grad, "GRPO_process/grad", dtype)


def test_kimis_gradient_is_minus_two_tau_times_the_papers_equation_three(dtype):
    mirror = dataclasses.replace(PRESETS["kimi_k1_5"], surrogate=MirrorDescent(0.5))
    _, grad = evaluate(mirror, dtype)
    check(-grad, "Kimi/eq3_ascent", dtype)
    check(grad, "Kimi/closed_form", dtype)


def test_kimis_partition_function_in_place_of_the_mean(dtype):
    rewards, tau = FIXTURE["R"], 0.5
    centre = tau * np.log(np.mean(np.exp(rewards / tau)))
    np.testing.assert_allclose(centre, number("Kimi/tau_logZ"), atol=1e-7)
    mirror = dataclasses.replace(PRESETS["kimi_k1_5"], surrogate=MirrorDescent(tau))
    check(evaluate(mirror, dtype, advantages=rewards - centre)[0], "Kimi/loss_logZ", dtype)


@pytest.mark.parametrize(("kl", "loss", "grad"), [(UnbiasedK3(), "loss", "grad"), (K3(), None, "biased_k3_grad")])
def test_the_kl_term_alone(kl, loss, grad, dtype):
    found = evaluate(dataclasses.replace(CENTRED, kl=kl, kl_coef=1.0), dtype, advantages=np.zeros(3))
    if loss is not None:
        check(found[0], f"V32_unbiasedKL/{loss}", dtype)
        check(found[1], "V32_unbiasedKL/closed_form", dtype)
    check(found[1], f"V32_unbiasedKL/{grad}", dtype)


def test_a_sequence_far_off_policy_leaves_the_policy_term_and_stays_in_the_counts(dtype):
    filtered = dataclasses.replace(CENTRED, sequence_filter=OffPolicySequenceMask(0.1))
    old = jnp.asarray(fixture_logp("old"), dtype)
    loss, grad = evaluate(filtered, dtype, sampler_logp=old)
    check(loss, "V32_OPSM/loss_M_old_delta0p1", dtype)
    assert not np.any(grad[1]) and np.any(grad[2])
    check(evaluate(filtered, dtype)[0], "V32_OPSM/loss_nomask", dtype)


def test_a_mask_on_sequences_that_drops_all_of_them_leaves_nothing(dtype):
    loss, grad = evaluate(variant("dapo", correction=SequenceMask(0.999, 1.002)), dtype)
    assert float(loss) == 0 and not np.any(grad)


def test_reducers_on_one_matrix(dtype):
    loss, mask = (jnp.asarray(x, dtype) for x in (number("AGG/loss_matrix"), FIXTURE["mask"]))
    tokens, rows = jnp.asarray(9.0, dtype), jnp.asarray(3.0, dtype)
    reducers = {
        "seq_mean_token_mean": SequenceMean(), "token_mean": TokenMean(), "seq_mean_token_sum": SequenceSum(),
        "norm8": ConstantLength(8),
    }  # fmt: skip
    for name, reducer in reducers.items():
        check(reducer(loss, mask, tokens, rows), f"AGG/{name}", dtype)
    # verl's variant of the last divides by the constant alone.
    check(ConstantLength(4)(loss, mask, tokens, 1), "AGG/verl_seq_mean_token_sum_norm_T4", dtype)


@pytest.mark.slow
def test_every_preset_is_a_hashable_value_that_takes_a_context():
    for name, algorithm in PRESETS.items():
        twin = dataclasses.replace(algorithm)
        assert twin == algorithm and hash(twin) == hash(algorithm) and twin is not algorithm, name
        rewards, ones = np.array([[1.0, 0.0]]), np.ones((2, 3), np.float32)
        if algorithm.advantage.needs:
            given = AdvantageContext(mask=ones, values=ones, turn_rewards=ones, states=ones.astype(int))
            assert algorithm.advantage(rewards, given).shape == (2, 3)
        else:
            given = algorithm.advantage(rewards, AdvantageContext())
            np.testing.assert_array_equal(given, algorithm.advantage(rewards))
