"""What must hold for every algorithm: loops, finite differences, padding, order, microbatches, limits, refusals."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.batches import NAMES, B, T, graded, presets, ragged
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import NUMBERS, loop_loss

from jaxrl_llm.algorithms import PRESETS, Algorithm, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.advantages import GroupZScore
from jaxrl_llm.algorithms.loss import log_ratios, whole_step
from jaxrl_llm.algorithms.ratios import Sequence, SequenceToken, Token
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, SequenceSum, TokenMean
from jaxrl_llm.algorithms.surrogates import CISPO, PPOClip
from jaxrl_llm.algorithms.tokens import Tokens

FROZEN = ("cispo", "gspo_token", "minirl", "dppo_tv", "dppo_kl", "vespo", "m2po_clip")
SMOOTH = [name for name in PRESETS if name not in FROZEN]
"""Presets without a stop-gradient inside: their gradient is that of their value."""


@pytest.mark.parametrize("name", PRESETS)
def test_equals_a_loop_over_rows_and_tokens(name):
    for seed in range(3):
        logp, batch = ragged(seed)
        wanted = loop_loss(
            name.removesuffix("_token"), *(np.float64(x) for x in (logp, batch.old_logp, batch.advantages)), batch.mask,
            *(np.float64(x) for x in (batch.ref_logp, batch.sampler_logp)))  # fmt: skip
        (loss, metrics), _ = presets(logp, batch)[name]
        np.testing.assert_allclose(loss, wanted, rtol=2e-5, atol=1e-7)
        np.testing.assert_array_equal(metrics["loss"], loss)


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_is_that_of_finite_differences(name):
    with jax.enable_x64(True):
        logp, batch = (jax.tree.map(lambda x: np.float64(x) if x.dtype == np.float32 else x, v) for v in ragged(4))
        if name in ("gspo", "luspo"):  # most sequences would be outside the narrow band, where the gradient is 0
            batch = batch._replace(old_logp=logp + 1e-4 * np.sign(batch.old_logp - logp))
        _, grad = graded(PRESETS[name], logp, batch)
        for row, column in ((0, 0), (1, 2), (3, 3), (5, 1)):
            step = np.zeros((B, T))
            step[row, column] = 1e-7
            up, down = (graded(PRESETS[name], logp + s, batch)[0][0] for s in (step, -step))
            np.testing.assert_allclose((up - down) / 2e-7, grad[row, column], rtol=1e-5, atol=1e-7)


LENGTHS = st.lists(st.integers(0, T), min_size=B, max_size=B)


@settings(max_examples=10, deadline=None)
@given(LENGTHS, st.permutations(range(B)))
def test_a_permuted_batch_gives_a_permuted_gradient(lengths, order):
    logp, batch = ragged(1, lengths)
    order = np.asarray(order)
    whole, moved = presets(logp, batch), presets(logp[order], jax.tree.map(lambda x: x[order], batch))
    for name, ((loss, _), grad) in whole.items():
        np.testing.assert_allclose(moved[name][0][0], loss, rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(moved[name][1], np.asarray(grad)[order], rtol=1e-5, atol=1e-8, err_msg=name)


@jax.jit
def choices(logp, batch):
    """The choices among all tokens of a step, of every preset that makes one."""
    chosen = {}
    for name in NAMES:
        chosen |= whole_step(PRESETS[name], logp, batch)
    return chosen


@settings(max_examples=10, deadline=None)
@given(LENGTHS, st.lists(st.integers(0, 2), min_size=B, max_size=B))
def test_microbatches_add_up_to_the_whole(lengths, parts):
    logp, batch = ragged(2, lengths)
    counts = np.float32(batch.mask.sum()), np.float32(batch.mask.any(axis=1).sum())
    batch = batch._replace(extras=choices(logp, batch))
    whole, pieces = presets(logp, batch._replace(extras=None)), []
    for part in range(3):
        rows = np.flatnonzero(np.asarray(parts) == part)
        # As a packer does: the microbatch keeps its shape, and rows of padding hold whatever was there.
        index = np.concatenate([rows, np.zeros(B - len(rows), int)])
        piece = jax.tree.map(lambda x, i=index: x[i], batch)
        piece = piece._replace(mask=piece.mask & (np.arange(B) < len(rows))[:, None])
        pieces.append((index, presets(logp[index], piece, *counts)))
    for name, ((_, metrics), grad) in whole.items():
        grads = np.zeros((B, T))
        for index, found in pieces:
            np.add.at(grads, index, np.asarray(found[name][1], np.float64))
        np.testing.assert_allclose(grads, grad, rtol=1e-5, atol=1e-7, err_msg=name)
        for key, value in metrics.items():
            total = sum(float(found[name][0][1][key]) for _, found in pieces)
            np.testing.assert_allclose(total, value, rtol=1e-5, atol=1e-6, err_msg=f"{name}: {key}")


def test_a_fully_masked_batch_has_loss_zero_and_no_gradient():
    logp, batch = ragged(3, (0,) * B)
    for name, ((loss, metrics), grad) in presets(np.full_like(logp, np.nan), batch).items():
        assert float(loss) == 0 and not np.any(grad), name
        chex.assert_tree_all_finite(metrics)


def token_loss(surrogate, ratio, advantage):
    """Loss and gradient of one token with old log-probability -1."""
    algorithm = Algorithm(GroupZScore(), Token(), surrogate, TokenMean())
    logp = jnp.asarray([[-1.0 + np.log(ratio)]], jnp.float32)
    batch = PolicyBatch(np.array([advantage], np.float32), np.ones((1, 1), bool), np.full((1, 1), -1.0, np.float32))
    (loss, metrics), grad = graded(algorithm, logp, batch)
    return float(loss), float(grad[0, 0]), {k: float(v) for k, v in metrics.items()}


def test_clipping_takes_the_smaller_objective_and_is_no_plain_clip():
    example = NUMBERS["GSPO_seed_example"]
    losses = [token_loss(PPOClip(), ratio, 1.0)[0] for ratio in example["rho"]]
    np.testing.assert_allclose(losses, [-1.2, -0.4], rtol=1e-6)
    np.testing.assert_allclose(-np.mean(losses), example["grpo_correct"], rtol=1e-6)


@pytest.mark.parametrize(("ratio", "advantage", "loss", "grad", "low", "high"), [
    (0.4, 1.0, -0.4, -0.4, 0, 0),
    (5.0, 1.0, -1.2, 0.0, 0, 1),
    (5.0, -1.0, 5.0, 5.0, 0, 0),
    (0.4, -1.0, 0.8, 0.0, 1, 0),
    (1.0, -1.0, 1.0, 1.0, 0, 0),
])  # fmt: skip
def test_the_cases_of_ppos_clip(ratio, advantage, loss, grad, low, high):
    found, slope, metrics = token_loss(PPOClip(), ratio, advantage)
    np.testing.assert_allclose([found, slope], [loss, grad], rtol=1e-5)
    assert (metrics["clip_fraction/low"], metrics["clip_fraction/high"]) == (low, high)
    np.testing.assert_allclose(metrics["ratio"], ratio, rtol=1e-5)


def test_dual_clip_bounds_negative_advantages_only():
    example = NUMBERS["PPO_dualclip"]
    np.testing.assert_allclose(token_loss(PPOClip(), 5.0, -1.0)[0], example["std"], rtol=1e-5)
    dual = PPOClip(dual=3.0)
    np.testing.assert_allclose(token_loss(dual, 5.0, -1.0)[:2], [example["dual"], 0.0], rtol=1e-5)
    assert token_loss(dual, 0.4, 1.0) == token_loss(PPOClip(), 0.4, 1.0)
    np.testing.assert_allclose(token_loss(dual, 2.0, -1.0)[0], 2.0, rtol=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("logp", [-2.0, -0.1])
def test_cispos_gradient_is_minus_the_weight_times_the_advantage(advantage, logp):
    algorithm = PRESETS["cispo"]
    batch = PolicyBatch(np.array([advantage], np.float32), np.ones((1, 1), bool))
    _, grad = graded(algorithm, jnp.full((1, 1), logp), batch)
    np.testing.assert_allclose(grad, [[-advantage]], rtol=1e-6)
    _, grad = graded(algorithm, jnp.full((1, 1), logp), batch._replace(old_logp=np.full((1, 1), logp - 2, np.float32)))
    np.testing.assert_allclose(grad, [[-advantage * 5.0]], rtol=1e-6)


def test_equal_bounds_are_ppos():
    logp, batch = ragged(0)
    ppo = dataclasses.replace(PRESETS["dapo"], surrogate=PPOClip(0.28, 0.28))
    both = [
        graded(a, logp, batch)
        for a in (ppo, dataclasses.replace(ppo, surrogate=PPOClip(low=0.28, high=0.28, dual=1e9)))
    ]
    np.testing.assert_array_equal(both[0][1], both[1][1])
    higher, _ = graded(PRESETS["dapo"], logp, batch)
    assert float(higher[0]) != float(both[0][0][0])


def test_gspo_token_is_gspo_where_the_advantage_is_constant():
    logp, batch = ragged(5)
    batch = batch._replace(old_logp=logp + np.float32(1e-4) * np.sign(batch.old_logp - logp))
    plain, token = (graded(PRESETS[name], logp, batch) for name in ("gspo", "gspo_token"))
    np.testing.assert_allclose(token[0][0], plain[0][0], rtol=1e-5)
    np.testing.assert_allclose(token[1], plain[1], rtol=1e-4, atol=1e-7)
    assert np.any(plain[1])


def test_log_ratios_are_those_of_tokens_or_of_their_sequences():
    logp, batch = ragged(3)
    moved = np.where(batch.mask, logp - batch.old_logp, 0)
    np.testing.assert_allclose(log_ratios(PRESETS["grpo"], logp, batch), moved, atol=1e-6)
    means = moved.sum(1) / np.maximum(batch.mask.sum(1), 1)
    np.testing.assert_allclose(log_ratios(PRESETS["gspo"], logp, batch), means[:, None] * batch.mask, atol=1e-6)


def test_gspos_ratio_is_the_geometric_mean():
    zeros, ones = jnp.zeros((1, 2)), jnp.ones((1, 2))
    logs = jnp.log(jnp.asarray([NUMBERS["GSPO_seed_example"]["rho"]], jnp.float32))
    np.testing.assert_allclose(
        jnp.exp(Sequence()(Tokens(logs, ones, ones, zeros))), [[NUMBERS["GSPO_seed_example"]["gspo"]]], rtol=2e-5
    )


def test_old_logp_none_means_a_ratio_of_exactly_one():
    logp, batch = ragged(0)
    implied, said = (presets(logp, batch._replace(old_logp=old)) for old in (None, logp))
    for name in PRESETS:
        np.testing.assert_allclose(implied[name][1], said[name][1], rtol=1e-6, atol=1e-8, err_msg=name)
        if PRESETS[name].ratio.anchor == "old":
            np.testing.assert_allclose(implied[name][0][1]["ratio"], 1.0, rtol=1e-6)


def test_advantages_by_row_and_by_token_agree():
    logp, batch = ragged(0)
    wide = batch._replace(advantages=np.repeat(batch.advantages[:, None], T, axis=1))
    by_row, by_token = presets(logp, batch), presets(logp, wide)
    for name in PRESETS:
        np.testing.assert_allclose(by_token[name][1], by_row[name][1], rtol=1e-6, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("kind", [np.bool_, np.float32, np.int32])
def test_masks_of_any_kind(kind):
    logp, batch = ragged(0)
    (loss, _), _ = graded(PRESETS["grpo"], logp, batch)
    np.testing.assert_array_equal(
        graded(PRESETS["grpo"], logp, batch._replace(mask=batch.mask.astype(kind)))[0][0], loss
    )


@pytest.mark.parametrize("counts", [(15, 5), (15.0, 5.0), (np.int64(15), np.int32(5)), (jnp.float32(15), jnp.int32(5))])
def test_counts_of_any_kind(counts):
    logp, batch = ragged(0)
    for name in ("grpo", "dapo", "dr_grpo"):
        wanted = policy_loss(PRESETS[name], logp, batch)[0]
        np.testing.assert_allclose(policy_loss(PRESETS[name], logp, batch, *counts)[0], wanted, rtol=1e-6)


def test_coefficients_may_be_traced_and_do_not_recompile():
    logp, batch = ragged(0)
    entropy = jnp.asarray(-logp)

    @jax.jit
    @chex.assert_max_traces(n=1)
    def loss(kl_coef, entropy_coef):
        return policy_loss(PRESETS["grpo"], logp, batch, entropy=entropy, kl_coef=kl_coef, entropy_coef=entropy_coef)[0]

    values = [loss(jnp.float32(k), jnp.float32(h)) for k, h in ((0.0, 0.0), (0.04, 0.0), (0.04, 0.1), (0.5, 0.01))]
    np.testing.assert_allclose(values[1], policy_loss(PRESETS["grpo"], logp, batch)[0], rtol=1e-6)
    fixed = dataclasses.replace(PRESETS["grpo"], kl_coef=0.5, entropy_coef=0.01)
    np.testing.assert_allclose(values[3], policy_loss(fixed, logp, batch, entropy=entropy)[0], rtol=1e-6)
    assert float(values[2]) < float(values[1])


def test_the_entropy_bonus_raises_entropy():
    logp, batch = ragged(0)
    algorithm = dataclasses.replace(PRESETS["dapo"], entropy_coef=0.1)
    slope = jax.grad(lambda h: policy_loss(algorithm, logp, batch, entropy=h)[0])(jnp.ones((B, T)))
    np.testing.assert_allclose(slope, np.where(batch.mask, -0.1 / 15, 0), rtol=1e-6)


def test_metrics_have_no_gradient_and_the_pinned_names():
    logp, batch = ragged(0)
    _, metrics = policy_loss(PRESETS["grpo"], logp, batch, entropy=-logp)
    assert {"loss", "kl", "entropy", "ratio", "clip_fraction/low", "clip_fraction/high"} == set(metrics)
    slope = jax.grad(lambda x: policy_loss(PRESETS["grpo"], x, batch)[1]["kl"])(jnp.asarray(logp))
    assert not np.any(slope)


def test_what_is_missing_is_named():
    logp, batch = ragged(0)
    with pytest.raises(ValueError, match=r"batch.ref_logp must be given"):
        policy_loss(PRESETS["grpo"], logp, batch._replace(ref_logp=None))
    with pytest.raises(ValueError, match="entropy must be given"):
        policy_loss(dataclasses.replace(PRESETS["dapo"], entropy_coef=0.1), logp, batch)
    policy_loss(PRESETS["dapo"], logp, batch._replace(ref_logp=None))


@pytest.mark.parametrize("zero", [0, 0.0, np.float32(0)])
def test_a_coefficient_of_zero_needs_nothing(zero):
    logp, batch = ragged(0)
    algorithm = dataclasses.replace(PRESETS["grpo"], entropy_coef=0.1)
    found, _ = policy_loss(algorithm, logp, batch._replace(ref_logp=None), kl_coef=zero, entropy_coef=zero)
    wanted, _ = policy_loss(dataclasses.replace(PRESETS["grpo"], kl_coef=0.0), logp, batch)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("reducer", [TokenMean(), SequenceSum(), ConstantLength(8)])
@pytest.mark.parametrize("ratio", [Sequence(), SequenceToken()])
def test_a_sequence_ratio_refuses_reducers_that_weight_by_length(ratio, reducer):
    with pytest.raises(ValueError, match="SequenceMean"):
        Algorithm(GroupZScore(), ratio, PPOClip(), reducer)
    assert Algorithm(GroupZScore(), ratio, PPOClip(), SequenceMean())


def test_a_kl_coefficient_without_an_estimator_is_refused():
    with pytest.raises(ValueError, match=r"kl_coef=0.1 needs an estimator"):
        dataclasses.replace(PRESETS["dapo"], kl_coef=0.1)


def test_cispos_bound_is_an_absolute_ratio():
    _, grad, metrics = token_loss(CISPO(1.28), 5.0, 1.0)
    np.testing.assert_allclose(grad, -1.28, rtol=1e-6)
    assert metrics["clip_fraction/high"] == 1
    assert token_loss(CISPO(ratio_min=0.5), 0.1, 1.0)[1] == -0.5
