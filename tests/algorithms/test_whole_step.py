"""Choices among all tokens of a step: published numbers, loops, ties, and what the rest of a step changes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.batches import ragged
from algorithms.fixture import evaluate, policy
from oracles import FIXTURE, NUMBERS, check, fixture_logp, number

from jaxrl_llm.algorithms import PRESETS, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.advantages import GroupZScore
from jaxrl_llm.algorithms.loss import clipped_tokens, whole_step
from jaxrl_llm.algorithms.ratios import Token
from jaxrl_llm.algorithms.surrogates import (
    DPPO,
    LOTS,
    M2PO,
    VESPO,
    ClipCov,
    KLCov,
    M2POClip,
    PPOClip,
    TopEntropy,
    lots_of,
)

WIDE = dataclasses.replace(PRESETS["dapo"], surrogate=PPOClip(0.2, 0.2), advantage=GroupZScore(eps=0.0))
ENTROPY = np.zeros((3, 4))
for row, values in enumerate([[0.1, 1.2], [0.3, 0.9, 0.05], [2.0, 0.2, 0.6, 0.4]]):
    ENTROPY[row, : len(values)] = values


def of(surrogate, ratio=Token()):
    return dataclasses.replace(WIDE, surrogate=surrogate, ratio=ratio)


def fixture_batch(dtype=np.float32, **changes):
    """The shared completions, with z-scores as advantages."""
    advantages = np.asarray(WIDE.advantage(jnp.asarray(FIXTURE["R"], dtype)[None])[0])
    given = {"old_logp": policy("old", dtype), "sampler_logp": policy("mu", dtype)} | changes
    return policy("new", dtype), PolicyBatch(advantages, FIXTURE["mask"] > 0, **given)


def chosen(algorithm, logp, batch, entropy=None):
    """The one array of a choice."""
    [found] = jax.jit(functools.partial(whole_step, algorithm))(logp, batch, entropy).values()
    return np.asarray(found)


def test_choices_of_the_published_completions(dtype):
    logp, batch = fixture_batch(dtype)
    check(chosen(of(M2PO()), logp, batch), "M2PO/M", dtype)
    at_rollout = of(M2PO()), policy("old", dtype), batch._replace(old_logp=policy("mu", dtype))
    check(chosen(*at_rollout), "M2PO/M_areal_old_vs_mu", dtype)
    check(chosen(of(M2POClip()), logp, batch)[0, 0], "M2PO/code_cap_tau", dtype)
    check(chosen(of(ClipCov(0.25, 0.2)), logp, batch), "CLIP_COV/eligible", dtype)
    check(chosen(of(KLCov(0.25)), logp, batch), "KL_COV/selected", dtype)
    masks = {"DPPO_TV": DPPO(), "DPPO_KL": DPPO(0.05, 0.05, "kl"), "DPPO_KL_0p1": DPPO(0.1, 0.1, "kl")}
    for name, surrogate in masks.items():
        low, high = (np.asarray(x) for x in clipped_tokens(of(surrogate), logp, batch))
        np.testing.assert_array_equal((FIXTURE["mask"] > 0) & ~low & ~high, number(f"{name}/M"))


def test_the_top_fifth_by_entropy(dtype):
    logp, batch = fixture_batch(dtype)
    filtered = dataclasses.replace(WIDE, token_filter=TopEntropy(NUMBERS["ENTROPY_MASK"]["rho"]))
    entropy = jnp.asarray(ENTROPY, dtype)
    loss = lambda x: policy_loss(filtered, x, batch, entropy=entropy)[0]
    value, grad = jax.jit(jax.value_and_grad(loss))(logp)
    check(value, "ENTROPY_MASK/loss", dtype)
    check(grad, "ENTROPY_MASK/grad", dtype)
    check(chosen(filtered, logp, batch, entropy), "ENTROPY_MASK/kept", dtype)
    with pytest.raises(ValueError, match="entropy must be given"):
        policy_loss(filtered, logp, batch)


def test_the_quantile_of_entropies_is_numpys_and_ties_stay():
    draw = np.random.default_rng(0)
    for share, count in ((0.2, 9), (0.2, 11), (0.5, 8), (0.3, 1), (1.0, 7), (0.2, 16)):
        entropy = draw.permutation(np.arange(count, dtype=np.float32)).reshape(1, -1)
        batch = PolicyBatch(np.float32([1.0]), np.ones((1, count), bool))
        filtered = dataclasses.replace(WIDE, token_filter=TopEntropy(share))
        found = chosen(filtered, -np.ones((1, count), np.float32), batch, entropy)
        # The share as a fraction: in floats, a quantile that is an element may come out above it.
        tenths = round(share * 10)
        least = np.sort(entropy[0])[count - 1 - tenths * (count - 1) // 10]
        np.testing.assert_array_equal(found, entropy >= least)
        assert np.all(entropy[found > 0] >= np.quantile(entropy, 1 - share) - 1e-4)
    assert chosen(filtered, -np.ones((1, 16), np.float32), batch, np.ones((1, 16), np.float32)).all()


def test_a_choice_depends_on_the_rest_of_the_step():
    logp, batch = ragged(2)
    for algorithm in (of(M2PO()), of(KLCov(0.2))):
        whole = chosen(algorithm, logp, batch)
        apart = np.concatenate([chosen(algorithm, logp[i : i + 1], jax.tree.map(lambda x, i=i: x[i : i + 1], batch))
                                for i in range(len(logp))])  # fmt: skip
        assert np.any(whole != apart)
        given = batch._replace(extras=whole_step(algorithm, logp, batch))
        np.testing.assert_array_equal(policy_loss(algorithm, logp, given)[0], policy_loss(algorithm, logp, batch)[0])


def test_equal_tokens_at_the_border_are_left_out_together():
    logp = np.log(np.float32([[0.5, 0.5, 0.5, 0.2]]))
    batch = PolicyBatch(np.float32([1.0]), np.ones((1, 4), bool), old_logp=logp - np.float32([[1, 1, 0, 0]]))
    np.testing.assert_array_equal(chosen(of(M2PO(0.3)), logp, batch), [[0, 0, 1, 1]])
    np.testing.assert_array_equal(chosen(of(M2PO(0.51)), logp, batch), [[1, 1, 1, 1]])
    by_token = batch._replace(advantages=np.float32([[1, 1, -1, -1]]))
    assert chosen(of(KLCov(0.25)), logp, by_token).sum() <= 1
    assert not chosen(of(KLCov(0.25)), logp, batch).any(), "no token has another covariance than the rest"


def test_clip_cov_draws_as_many_as_asked_and_others_by_other_bits():
    draw = np.random.default_rng(0)
    logp = -draw.exponential(1.0, (4, 50)).astype(np.float32)
    batch = PolicyBatch(np.float32([2, -2, 2, -2]), np.ones((4, 50), bool), logp, sampler_logp=logp)
    wide = ClipCov(0.1, 0.1, 100.0)
    found = chosen(of(wide), logp, batch)
    assert found.sum() == 20
    again = chosen(of(wide), logp, batch._replace(sampler_logp=logp + np.float32(1e-3)))
    assert again.sum() == 20 and np.any(found != again)
    assert chosen(of(ClipCov(0.9, 0.1, 100.0)), logp, batch).sum() < 180, "no more than are in the range"


def test_lots_of_tokens_are_the_same_whatever_the_last_digits_of_their_probabilities():
    draw = np.random.default_rng(0)
    logp = -draw.exponential(1.0, (4, 50)).astype(np.float32)
    tokens = draw.integers(0, 5, (4, 50))
    lots = np.stack([lots_of(row, number) for number, row in enumerate(tokens)])
    assert lots.max() < 1 << 24 and len(np.unique(lots)) == 200, "equal tokens elsewhere have other lots"
    np.testing.assert_array_equal(lots[2, :9], lots_of(tokens[2, :9], 2))
    assert not np.array_equal(lots_of(tokens[2], 3), lots[2]) and abs(lots.mean() / (1 << 24) - 0.5) < 0.05
    batch = PolicyBatch(np.float32([2, -2, 2, -2]), np.ones((4, 50), bool), logp, sampler_logp=logp)
    wide = of(ClipCov(0.1, 0.1, 100.0))
    found = chosen(wide, logp, batch._replace(extras={LOTS: lots}))
    again = chosen(wide, logp, batch._replace(sampler_logp=logp + np.float32(1e-3), extras={LOTS: lots}))
    assert found.sum() == 20
    np.testing.assert_array_equal(found, again)
    eligible = chosen(of(ClipCov(0.9, 0.1, 100.0)), logp, batch) > 0
    assert found[np.where(eligible, lots, 1 << 24) < np.sort(lots[eligible])[20]].all(), "the lowest are drawn"


def test_dppo_frees_rare_tokens_and_holds_common_ones_where_ppo_does_the_reverse():
    """By its two published cases, each with the advantage that pushes the token on."""
    example = NUMBERS["DPPO_contrast"]
    for name, advantage, held in (("rare", 1.0, False), ("common", -1.0, True)):
        new, old = (np.full((1, 1), np.log(example[name][key]), np.float32) for key in ("new", "old"))
        batch = PolicyBatch(np.float32([advantage]), np.ones((1, 1), bool), old)
        for surrogate in (DPPO(), DPPO(0.05, 0.05, "kl")):
            assert bool(np.any(clipped_tokens(of(surrogate), new, batch))) == held
        assert bool(np.any(clipped_tokens(WIDE, new, batch))) == (name == "rare")


def test_vespos_weight_is_largest_at_k_by_lambda(dtype):
    logp = np.linspace(-1.5, 1.5, 301).reshape(-1, 1)
    for sign, peak in zip((1.0, -1.0), number("VESPO/phi_peak_w"), strict=True):
        batch = PolicyBatch(np.full(301, sign, dtype), np.ones((301, 1)), np.zeros((301, 1), dtype))
        grad = jax.grad(lambda x, b=batch: policy_loss(of(VESPO()), x, b)[0])(jnp.asarray(logp, dtype))
        weights = np.abs(np.asarray(grad))[:, 0] * 301
        np.testing.assert_allclose(np.exp(logp[weights.argmax()]), peak, rtol=0.01)
        np.testing.assert_allclose(weights[150], 1, rtol=1e-5)


def test_vespos_weight_of_a_sequence_is_clamped():
    """``phi`` of W from 1e-8 to ``e^20``, whatever its tokens' ratios come to; a small lambda keeps it above 0."""
    lam, sizes = 1e-9, np.float32([(-15, -15), (-9, -9), (15, 15), (8, 9)])
    batch = PolicyBatch(np.ones(4, np.float32), np.ones((4, 2)), -sizes)
    grad = jax.grad(lambda x: policy_loss(of(VESPO(0.5, lam, 0.5, lam)), x, batch)[0])(jnp.zeros((4, 2)))
    wanted = [math.exp(0.5 * w + lam * (1 - math.exp(w))) for w in (math.log(1e-8), -18, 20, 17)]
    np.testing.assert_allclose(grad, -np.repeat(np.reshape(wanted, (4, 1)), 2, axis=1) / 8, rtol=1e-4)


@pytest.mark.slow
def test_vespo_with_the_samplers_gap_inside(dtype):
    _, grad = evaluate(dataclasses.replace(PRESETS["vespo"], advantage=GroupZScore(eps=0.0)), dtype)
    advantages = np.asarray(WIDE.advantage(FIXTURE["R"][None])[0])
    phi = -np.asarray(grad)[:, 0] * 3 / advantages
    np.testing.assert_allclose(phi, number("VESPO/phi_mu"), rtol=2e-5)
    assert fixture_logp("mu").shape == grad.shape
