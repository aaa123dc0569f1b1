"""PPO's value loss and total, preferences, reward models and pretraining against numbers worked out by hand."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import NUMBERS, check, number
from tiny import logprob_and_entropy

from jaxrl_llm.algorithms import PRESETS, AdvantageContext, PolicyBatch, advantages, policy_loss, preference
from jaxrl_llm.algorithms.advantages import GAE
from jaxrl_llm.algorithms.preference import DPO, IPO, KTO, ORPO, SimPO


def row(path, dtype):
    return jnp.asarray(number(path)[None], dtype)


def ppo_policy(dtype, entropy_coef=0.0):
    """Loss and gradient [3] of PPO's published completion, with advantages that are not whitened."""
    algorithm = dataclasses.replace(PRESETS["ppo"], entropy_coef=entropy_coef)
    batch = PolicyBatch(row("PPO/A", dtype), np.ones((1, 3)), jnp.zeros((1, 3), dtype))
    loss = lambda logp: policy_loss(algorithm, logp, batch, entropy=row("PPO/H", dtype))[0]
    value, grad = jax.jit(jax.value_and_grad(loss))(jnp.log(row("PPO/ratio", dtype)))
    return value, grad[0]


@functools.partial(jax.jit, static_argnames="clip")
def graded_values(new, targets, mask, old=None, clip=None):
    return jax.value_and_grad(advantages.value_loss)(new, targets, mask, old, clip)


def ppo_value(dtype, clip=0.2):
    """Value loss and its gradient [3]."""
    targets, old, mask = row("PPO/returns", dtype), row("PPO/V", dtype), np.ones((1, 3))
    loss, grad = graded_values(row("PPO/vpred", dtype), targets, mask, old, clip)
    return loss, grad[0]


def test_ppos_policy_loss(dtype):
    loss, grad = ppo_policy(dtype)
    check(loss, "PPO/pg_loss", dtype)
    check(grad, "PPO/grad_logp", dtype)
    surrogate, batch = PRESETS["ppo"].surrogate, np.log(number("PPO/ratio"))
    np.testing.assert_allclose(np.mean(number("PPO/pg_tokens")), number("PPO/pg_loss"), atol=1e-7)
    assert (surrogate.low, surrogate.high, batch.shape) == (0.2, 0.2, (3,))


def test_the_value_loss(dtype):
    loss, grad = ppo_value(dtype)
    check(loss, "PPO/v_loss", dtype)
    check(grad, "PPO/grad_v", dtype)
    np.testing.assert_allclose(np.mean(number("PPO/v_tokens")), number("PPO/v_loss"), atol=1e-7)
    unclipped, _ = ppo_value(dtype, clip=None)
    np.testing.assert_allclose(unclipped, 0.5 * np.mean((number("PPO/vpred") - number("PPO/returns")) ** 2), rtol=2e-5)
    held = jnp.asarray(number("PPO/vclipped")[None], dtype)
    assert float(ppo_value(dtype)[0]) >= float(advantages.value_loss(held, row("PPO/returns", dtype), np.ones((1, 3))))


def test_ppos_total_adds_the_value_loss_and_subtracts_the_entropy(dtype):
    total = ppo_policy(dtype, entropy_coef=0.01)[0] + 0.1 * ppo_value(dtype)[0]
    check(total, "PPO/total_cv0p1_cent0p01", dtype)


@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_the_value_loss_reads_no_padding_and_adds_up_over_microbatches(garbage):
    random = np.random.default_rng(0)
    mask = np.arange(4) < np.array([4, 2, 0, 1])[:, None]
    new, targets, old = (random.normal(size=(4, 4)).astype(np.float32) for _ in range(3))
    spoiled = [np.where(mask, x, np.float32(garbage)) for x in (new, targets, old)]
    loss, grad = graded_values(new, targets, mask, old, 0.2)
    other, dirty = graded_values(spoiled[0], spoiled[1], mask, spoiled[2], 0.2)
    chex.assert_trees_all_equal((loss, grad), (other, dirty))
    assert not np.any(np.asarray(grad)[~mask]) and np.any(grad)
    parts = [advantages.value_loss(new[i], targets[i], mask[i], old[i], 0.2, 7) for i in (slice(0, 1), slice(1, 4))]
    np.testing.assert_allclose(sum(parts), loss, rtol=1e-6)
    assert not graded_values(spoiled[0], spoiled[1], np.zeros((4, 4), bool), spoiled[2], 0.2)[0]


@pytest.mark.parametrize("gamma", ["total_tokenmean", "total_gamma0p1"])
def test_pretraining_adds_its_negative_log_likelihood(gamma, dtype):
    coef = NUMBERS["PPO_ptx"]["gamma"] if gamma == "total_tokenmean" else 0.1
    graded = jax.jit(jax.value_and_grad(lambda logp, mask: coef * preference.pretraining_loss(logp, mask)))
    loss, grad = graded(row("PPO_ptx/ptx_logp", dtype), np.ones((1, 4)))
    check(number("PPO_ptx/ppo_loss").astype(dtype) + loss, f"PPO_ptx/{gamma}", dtype)
    np.testing.assert_allclose(grad, np.full((1, 4), -coef / 4), rtol=1e-6)
    padded = jnp.concatenate([row("PPO_ptx/ptx_logp", dtype), jnp.full((1, 2), jnp.nan, dtype)], axis=1)
    mask = np.arange(6) < 4
    np.testing.assert_allclose(coef * preference.pretraining_loss(padded, mask[None]), loss, rtol=1e-6)
    np.testing.assert_allclose(coef * preference.pretraining_loss(padded, mask[None], 8), loss / 2, rtol=1e-6)


def margin(chosen, rejected, dtype):
    better, worse = (jnp.asarray([x], dtype) for x in NUMBERS["DPO"]["ref"])
    return jnp.asarray([chosen], dtype) - jnp.asarray([rejected], dtype) - (better - worse)


@pytest.mark.parametrize(("loss", "value", "slopes"), [
    (DPO(0.1), "loss", ("grad_w", "grad_l")),
    (IPO(0.1), "ipo_loss_sumlogp", ("ipo_grad_w", None)),
])  # fmt: skip
def test_dpo_and_ipo_on_sequence_sums(loss, value, slopes, dtype):
    logp = NUMBERS["DPO"]["logp"]
    check(margin(*logp, dtype)[0], "DPO/h", dtype)
    graded = jax.jit(jax.value_and_grad(lambda x: jnp.mean(loss(margin(*x, dtype)))))
    found, grads = graded([jnp.asarray(x, dtype) for x in logp])
    check(found, f"DPO/{value}", dtype)
    for grad, name in zip(grads, slopes, strict=True):
        if name is not None:
            check(grad, f"DPO/{name}", dtype)
    np.testing.assert_allclose(grads[0], -grads[1], rtol=1e-6)


def test_implicit_rewards_are_beta_times_the_log_ratio():
    example = NUMBERS["DPO"]
    rewards = [example["beta"] * (new - ref) for new, ref in zip(example["logp"], example["ref"], strict=True)]
    np.testing.assert_allclose(rewards, [example["reward_w"], example["reward_l"]], atol=1e-12)
    assert (rewards[0] > rewards[1]) is example["acc"]


def test_ipo_on_averages_by_token(dtype):
    mask = np.arange(5) < np.array([4, 5])[:, None]
    mean = lambda totals: preference.sequence_logp(
        jnp.asarray(np.where(mask, np.asarray(totals)[:, None] / mask.sum(axis=1, keepdims=True), np.nan), dtype),
        mask) / mask.sum(axis=1).astype(dtype)  # fmt: skip
    new, ref = mean(NUMBERS["DPO"]["logp"]), mean(NUMBERS["DPO"]["ref"])
    gap = new[:1] - new[1:] - (ref[:1] - ref[1:])
    check(jnp.mean(IPO(0.1)(gap)), "DPO/ipo_avg_len4_5", dtype)
    whole = preference.sequence_logp(jnp.asarray(np.where(mask, -1.5, np.inf), dtype), mask)
    np.testing.assert_array_equal(whole, [-6.0, -7.5])


def test_simpo_on_means_without_a_reference(dtype):
    example = NUMBERS["SIMPO"]
    loss = SimPO(example["beta"], example["gamma"])

    def of_sums(better, worse):
        return jnp.mean(loss((better / example["len_w"] - worse / example["len_l"])[None]))

    sums = [jnp.asarray(example[name], dtype) for name in ("sum_w", "sum_l")]
    found, slopes = jax.jit(jax.value_and_grad(of_sums, (0, 1)))(*sums)
    check(found, "SIMPO/loss", dtype)
    check(slopes[0], "SIMPO/d_sum_w", dtype)
    check(slopes[1], "SIMPO/d_sum_l", dtype)


def test_orpos_odds_ratio(dtype):
    example = NUMBERS["ORPO"]
    loss = ORPO(example["beta"])
    lo = lambda better, worse: (loss.value(better) - loss.value(worse))[None]
    means = [jnp.asarray(example[name], dtype) for name in ("avg_w", "avg_l")]
    check(lo(*means)[0], "ORPO/log_odds", dtype)
    found, slopes = jax.jit(jax.value_and_grad(lambda *a: jnp.mean(loss(lo(*a))), (0, 1)))(*means)
    check(found, "ORPO/or_term", dtype)
    check(slopes[0], "ORPO/d_avg_w", dtype)
    check(slopes[1], "ORPO/d_avg_l", dtype)
    sure = jnp.asarray([0.0, -1e-12], dtype)
    chex.assert_tree_all_finite(jax.vjp(loss.value, sure)[1](jnp.ones(2, dtype)))


def test_kto_with_its_reference_point(dtype):
    example = NUMBERS["KTO"]
    loss = KTO(example["beta"], example["lam_D"], example["lam_U"])
    good, unrelated = np.array(example["label"]) > 0, jnp.asarray(example["kl_logratio"], dtype)
    whole = loss.point(unrelated, np.ones(4, bool))
    check(whole, "KTO/z_batch4", dtype)
    gap = jnp.asarray(example["logratio"], dtype)
    terms, back = jax.vjp(lambda x: loss(x, good, whole), gap)
    check(terms, "KTO/terms_batch4", dtype)
    check(jnp.mean(terms), "KTO/loss_batch4", dtype)
    check(back(jnp.full(4, 0.25, dtype))[0], "KTO/grad_batch4", dtype)
    halves = jnp.stack([loss.point(unrelated, np.arange(4) // 2 == half) for half in (0, 1)])
    check(halves, "KTO/z_two_batches", dtype)
    apart = loss(gap, good, jnp.repeat(halves, 2))
    check(jnp.mean(apart), "KTO/loss_two_batches", dtype)
    slope = jax.grad(lambda x: jnp.sum(loss(gap, good, loss.point(x, np.ones(4, bool)))))(unrelated + 1)
    assert not np.any(slope), "the reference point has no gradient"


def test_bradley_terry(dtype):
    difference = jnp.asarray([NUMBERS["BT"]["r"][0]], dtype) - jnp.asarray([NUMBERS["BT"]["r"][1]], dtype)
    loss, grad = jax.jit(jax.value_and_grad(lambda x: jnp.mean(preference.bradley_terry(x))))(difference)
    check(loss, "BT/loss", dtype)
    check(grad[0], "BT/grad_w", dtype)
    for gap in (0.5, np.array([0.5], dtype)):
        check(jnp.mean(preference.bradley_terry(difference, gap)), "BT/margin0p5", dtype)


ENDS = np.array([[False, True, False, True, True, False]])


def at_ends(steps, dtype, elsewhere=np.nan):
    """Numbers of three steps [1, 6] at the tokens where they end."""
    found = np.full((1, 6), elsewhere)
    found[ENDS] = steps
    return jnp.asarray(found, dtype)


def test_a_process_reward_model(dtype):
    scores = number("PRM/s")
    values, labels = jnp.asarray(np.log(scores / (1 - scores)), dtype), jnp.asarray(NUMBERS["PRM"]["labels"], dtype)
    loss, grad = jax.jit(jax.value_and_grad(lambda x: jnp.mean(preference.step_entropy(x, labels))))(values)
    check(loss, "PRM/loss", dtype)
    np.testing.assert_allclose(np.mean(number("PRM/ce_tokens")), number("PRM/loss"), atol=1e-7)
    chex.assert_tree_all_finite(grad)


def test_scores_of_solutions(dtype):
    scores = number("PRM/s").astype(dtype)
    check(preference.solution_score(scores, "product"), "PRM/prod", dtype)
    check(preference.solution_score(scores, "minimum"), "PRM/min", dtype)
    assert preference.solution_score(scores, "last") == scores[-1]
    assert preference.solution_score(scores[:0], "last") == 0


def test_differences_of_scores_as_rewards(dtype):
    scores, places = number("PRM/s").astype(dtype), np.flatnonzero(ENDS)
    differences = preference.step_differences(scores)
    check(differences, "PRM/r_diff_s0_0", dtype)
    check(np.sum(differences), "PRM/sum_diff", dtype)
    check(preference.step_differences(scores, 0.5), "PRM/r_diff_s0_half", dtype)
    found = at_ends(differences, dtype)
    context = AdvantageContext(np.arange(6)[None] < 5, values=jnp.zeros((1, 6), dtype), step_rewards=found)
    # Looking no further than the token itself, the advantage is the token's reward, the outcome at the last one.
    check(GAE(0.0, 0.0)(jnp.ones((1, 1), dtype), context)[0, places], "PRM/with_terminal_R1", dtype)


def test_entropy_and_its_gradient(dtype):
    logits = jnp.asarray(number("ENTROPY/logits"), dtype)
    entropy, grad = jax.jit(jax.value_and_grad(lambda x: logprob_and_entropy(x, jnp.int32(0))[1]))(logits)
    check(entropy, "ENTROPY/H", dtype)
    check(grad, "ENTROPY/dH_dlogits", dtype)


class Variants(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    def test_losses_of_data_are_one_number_compiled_and_not(self):
        better, worse = np.float32([1.2, -0.3]), np.float32([0.4, 0.1])
        found = self.variant(
            lambda gaps: {
                "dpo": jnp.mean(DPO(0.3)(gaps)),
                "ipo": jnp.mean(IPO(0.3)(gaps)),
                "bradley_terry": jnp.mean(preference.bradley_terry(gaps, 0.25)),
            }
        )(better - worse)
        log_loss = lambda gaps: np.mean(np.log1p(np.exp(-np.asarray(gaps, np.float64))))
        gaps = better - worse
        wanted = {
            "dpo": log_loss(0.3 * gaps),
            "ipo": np.mean((gaps - 1 / 0.6) ** 2),
            "bradley_terry": log_loss(gaps - 0.25),
        }
        chex.assert_shape([*found.values()], ())
        chex.assert_trees_all_close(found, {name: np.float32(value) for name, value in wanted.items()}, rtol=1e-5)


@pytest.mark.parametrize("kind", [DPO, IPO, SimPO, ORPO])
@pytest.mark.parametrize("beta", [0.0, -0.1])
def test_a_temperature_that_turns_preferences_around_is_refused(kind, beta):
    with pytest.raises(ValueError, match="beta must be above 0"):
        kind(beta)
    np.testing.assert_allclose(kind()(np.float32(1.5)), kind()(np.full(3, 1.5, np.float32)), rtol=1e-6)
