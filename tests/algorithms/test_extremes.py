"""Whatever the arrays hold: padding of garbage, tokens that a policy cannot produce, ratios of fifty nats."""

import itertools

import chex
import numpy as np
import pytest
from algorithms.batches import LENGTHS, NAMES, B, T, plain, presets, ragged
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms import PRESETS

ARRAYS = ("logp", "old_logp", "ref_logp", "sampler_logp")
GARBAGE = st.sampled_from([np.nan, np.inf, -np.inf, 1e30, -1e30])


def put(logp, batch, names, change):
    """The arrays of these names changed."""
    if "logp" in names:
        logp = change(logp)
    return logp, batch._replace(**{name: change(getattr(batch, name)) for name in names if name != "logp"})


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 99),
    st.lists(st.integers(0, T), min_size=B, max_size=B),
    st.lists(GARBAGE, min_size=5, max_size=5),
)
def test_padding_is_read_nowhere(seed, lengths, garbage):
    logp, batch = ragged(seed, lengths, by_token=True)
    spoil = {name: np.where(batch.mask, getattr(batch, name), np.float32(value))
             for name, value in zip((*ARRAYS[1:], "advantages"), garbage[1:], strict=True)}  # fmt: skip
    clean = presets(np.where(batch.mask, logp, np.float32(0)), batch)
    dirty = presets(np.where(batch.mask, logp, np.float32(garbage[0])), batch._replace(**spoil))
    chex.assert_trees_all_equal(dirty, clean)
    for name, (_, grad) in clean.items():
        assert not np.any(np.asarray(grad)[~batch.mask]), name


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_padding_is_read_nowhere_without_a_compiler_either(name):
    # Compiled, x * mask may have become a choice, which hides a NaN that is multiplied by 0.
    logp, batch = ragged(0, by_token=True)
    spoil = lambda x: np.where(batch.mask, x, np.float32(np.nan))
    dirty = put(spoil(logp), batch, ("old_logp", "ref_logp", "sampler_logp", "advantages"), spoil)
    (loss, metrics), grad = plain(PRESETS[name], *dirty)
    (wanted, _), slope = plain(PRESETS[name], np.where(batch.mask, logp, np.float32(0)), batch)
    chex.assert_trees_all_equal((loss, grad), (wanted, slope))
    chex.assert_tree_all_finite(metrics)


@pytest.mark.parametrize("garbage", [np.nan, -np.inf])
def test_a_row_without_a_token_may_have_any_advantage(garbage):
    logp, batch = ragged(0)
    odd = np.where(batch.mask.any(axis=1), batch.advantages, np.float32(garbage))
    clean, dirty = (presets(logp, batch._replace(advantages=a)) for a in (batch.advantages, odd))
    graded = lambda found: {name: (loss, grad) for name, ((loss, _), grad) in found.items()}
    chex.assert_trees_all_equal(graded(dirty), graded(clean))


@pytest.mark.parametrize("names", [s for n in range(1, 5) for s in itertools.combinations(ARRAYS, n)])
def test_impossible_tokens_leave_all_finite(names):
    logp, batch = ragged(0)
    impossible = np.zeros((B, T), bool)
    impossible[[0, 0, 1, 2, 3], [0, 3, 1, 0, 2]] = True  # one row is all of it
    assert np.all(batch.mask[impossible]) and len(set(np.sign(batch.advantages[:4]))) == 2
    change = lambda x: np.where(impossible, np.float32(-np.inf), x)
    for changed in (change, lambda x: np.full_like(x, -np.inf)):
        chex.assert_tree_all_finite(presets(*put(logp, batch, names, changed)))


@pytest.mark.parametrize("names", [*((name,) for name in ARRAYS), ARRAYS[1:]])
@pytest.mark.parametrize("gap", [-50, 50])
def test_log_ratios_of_fifty_nats_leave_all_finite(names, gap):
    logp, batch = ragged(0, (5,) * B)
    chex.assert_tree_all_finite(presets(*put(logp, batch, names, lambda x: x + np.float32(gap))))


@pytest.mark.parametrize("name", ARRAYS[1:])
@pytest.mark.parametrize("sign", [-1, 1])
def test_log_ratios_are_clamped_at_twenty_nats(name, sign):
    logp, batch = ragged(0)
    at = lambda gap: presets(*put(logp, batch, (name,), lambda _: logp + np.float32(sign * gap)))
    near, beyond, far = at(19), at(25), at(50)
    for preset in NAMES:
        np.testing.assert_array_equal(beyond[preset][0][0], far[preset][0][0], err_msg=preset)
        np.testing.assert_array_equal(beyond[preset][1], far[preset][1], err_msg=preset)
    if name == "old_logp":
        old = [preset for preset in NAMES if PRESETS[preset].ratio.anchor == "old"]
        for found, bound in ((near, 19), (far, 20)):
            np.testing.assert_allclose([found[p][0][1]["ratio"] for p in old], np.exp(-sign * bound), rtol=1e-5)


def test_beyond_the_clamp_a_ratio_has_no_gradient():
    logp, batch = ragged(0)
    pieces = [n for n in ("grpo", "dapo", "gspo", "sapo", "kimi_k1_5", "ppo", "reinforce_pp")]
    found = presets(logp, batch._replace(old_logp=logp - np.float32(25), ref_logp=logp))
    for name in pieces:
        assert not np.any(found[name][1]), name


def test_a_batch_of_one_token():
    logp, batch = ragged(0, (0, 0, 1, 0, 0, 0))
    found = presets(logp, batch)
    chex.assert_tree_all_finite(found)
    alone, _ = ragged(0, LENGTHS)
    for name in NAMES:
        assert np.count_nonzero(found[name][1]) <= 1, name
    assert np.any(found["reinforce"][1]) and alone.shape == (B, T)
