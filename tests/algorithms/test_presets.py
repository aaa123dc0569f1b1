"""Every preset against numbers worked out by hand from the papers: values and gradients, in both precisions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms import PRESETS, AdvantageContext, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.advantages import GroupZScore
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceSum
from jaxrl_llm.algorithms.surrogates import CISPO, PPOClip
from oracles import FIXTURE, NUMBERS, fixture_logp

Z, POPULATION = GroupZScore(eps=0.0), GroupZScore(ddof=0, eps=0.0)
WIDE = PPOClip(0.2, 0.2)


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
}  # fmt: skip


def number(path):
    head, _, tail = path.partition("/")
    return np.asarray(NUMBERS[head][tail], np.float64)


def evaluate(algorithm, dtype, logp=None, advantages=None, mask=None, old=None):
    """Loss and gradient on the fixture."""
    logp = jnp.asarray(fixture_logp("new") if logp is None else logp, dtype)
    if advantages is None:
        advantages = algorithm.advantage(jnp.asarray(FIXTURE["R"], dtype)[None])[0]
    batch = PolicyBatch(
        jnp.asarray(advantages, dtype), FIXTURE["mask"] if mask is None else mask,
        None if old is False else fixture_logp("old") if old is None else old, fixture_logp("ref"))  # fmt: skip
    return jax.value_and_grad(lambda x: policy_loss(algorithm, x, batch)[0])(logp)


def check(found, path, dtype):
    assert found.dtype == dtype
    bounds = {"rtol": 2e-5, "atol": 2e-7} if dtype == jnp.float32 else {"rtol": 0, "atol": 1e-7}
    np.testing.assert_allclose(found, number(path), **bounds)


@pytest.fixture(params=["float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"):
        yield jnp.dtype(request.param)


@pytest.mark.parametrize("path", CASES)
def test_loss_and_gradient_are_the_published_ones(path, dtype):
    algorithm, gradient = CASES[path]
    loss, grad = evaluate(algorithm, dtype)
    check(loss, path, dtype)
    if gradient is not None:
        check(grad, gradient, dtype)


def test_on_policy_loss_is_zero_and_its_gradient_is_not(dtype):
    loss, grad = evaluate(variant("grpo", kl_coef=0.0), dtype, old=False)
    assert abs(float(loss)) < 1e-7
    check(grad, "GRPO/on_policy_grad", dtype)


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


def test_rloo_with_the_kl_in_its_rewards(dtype):
    rewards = jnp.asarray(number("RLOO/R_kl"), dtype)
    advantages = PRESETS["rloo"].advantage(rewards[None])[0]
    check(advantages, "RLOO/A", dtype)
    loss, grad = evaluate(PRESETS["rloo"], dtype, advantages=advantages)
    check(loss, "RLOO/loss", dtype)
    check(grad, "RLOO/grad", dtype)


def test_reducers_on_one_matrix(dtype):
    from jaxrl_llm.algorithms.reduce import SequenceMean, TokenMean

    loss, mask = (jnp.asarray(x, dtype) for x in (number("AGG/loss_matrix"), FIXTURE["mask"]))
    tokens, rows = jnp.asarray(9.0, dtype), jnp.asarray(3.0, dtype)
    reducers = {
        "seq_mean_token_mean": SequenceMean(), "token_mean": TokenMean(), "seq_mean_token_sum": SequenceSum(),
        "norm8": ConstantLength(8),
    }  # fmt: skip
    for name, reducer in reducers.items():
        check(reducer(loss, mask, tokens, rows), f"AGG/{name}", dtype)


def test_every_preset_is_a_hashable_value_that_takes_a_context():
    for name, algorithm in PRESETS.items():
        twin = dataclasses.replace(algorithm)
        assert twin == algorithm and hash(twin) == hash(algorithm) and twin is not algorithm, name
        rewards, ones = np.array([[1.0, 0.0]]), np.ones((2, 3), np.float32)
        if algorithm.advantage.needs:
            assert algorithm.advantage(rewards, AdvantageContext(mask=ones, values=ones)).shape == (2, 3)
        else:
            given = algorithm.advantage(rewards, AdvantageContext())
            np.testing.assert_array_equal(given, algorithm.advantage(rewards))
