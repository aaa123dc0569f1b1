"""One token at a time: the distribution that is drawn from is the one that is reported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, kstest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rollout.sampling import as_rule, draw, inverse_cdf, truncated, uniforms
from jaxrl_llm.rollout.settings import Sampling
from oracles import kept_tokens

VOCAB, DRAWS, BATCH = 150, 100_000, 10_000
LOGITS = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
"""Spread over two blocks of the inverse distribution function, the second one not full."""
NEARLY_ONE = np.float32(1) - np.float32(2**-24)


@functools.partial(jax.jit, static_argnames="truncate")
def batch_of_draws(logits, rule, first, truncate):
    seeds = jnp.stack([first + jnp.arange(BATCH, dtype=jnp.uint32), jnp.zeros(BATCH, jnp.uint32)], axis=1)
    return draw(
        jnp.broadcast_to(logits, (BATCH, VOCAB)), uniforms(seeds, jnp.full(BATCH, 7, jnp.int32)), rule, truncate
    )


@pytest.mark.parametrize("sampling", [
    Sampling(), Sampling(temperature=0.7), Sampling(top_k=5), Sampling(top_p=0.8), Sampling(1.5, top_k=40, top_p=0.9),
])  # fmt: skip
def test_a_hundred_thousand_draws_follow_the_distribution(sampling):
    p = np.exp(np.float64(LOGITS) / sampling.temperature)
    p /= p.sum()
    kept = kept_tokens(p, sampling.top_k, sampling.top_p)
    wanted = np.where(kept, p, 0) / p[kept].sum()
    rule = as_rule(sampling)
    draws = [
        batch_of_draws(LOGITS[None], rule, jnp.uint32(start), sampling.truncates) for start in range(0, DRAWS, BATCH)
    ]
    tokens = np.concatenate([d.token for d in draws])
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[~kept].any()
    common = wanted * DRAWS >= 5
    observed, expected = (
        np.append(counts[common], counts[~common].sum()),
        DRAWS * np.append(wanted[common], wanted[~common].sum()),
    )
    statistic = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
    assert chi2.sf(statistic, common.sum() - 1) > 1e-4
    np.testing.assert_allclose(draws[0].logp, np.log(wanted[np.asarray(draws[0].token)]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(draws[0].entropy, -np.sum(p * np.log(p)), rtol=1e-5)


def test_temperature_zero_takes_the_most_likely_token_with_certainty():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(4, VOCAB)), jnp.float32)
    drawn = draw(logits, jnp.array([0.0, 0.3, 0.9, NEARLY_ONE]), as_rule(Sampling(temperature=0.0)), False)
    np.testing.assert_array_equal(drawn.token, np.argmax(logits, axis=-1))
    np.testing.assert_array_equal(drawn.logp, 0)
    assert not Sampling(temperature=0.0, top_k=3, top_p=0.5).truncates


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-30, 1e-8, 0.5, float(NEARLY_ONE)]), st.integers(1, VOCAB))
def test_a_token_of_probability_zero_is_never_drawn(seed, u, nonzero):
    random = np.random.default_rng(seed)
    p = np.zeros((4, VOCAB), np.float32)
    for row in p:
        row[random.choice(VOCAB, nonzero, replace=False)] = random.exponential(1, nonzero) ** 6 + 1e-12
    token = np.asarray(inverse_cdf(jnp.asarray(p), jnp.full(4, u, jnp.float32)))
    assert np.all(p[np.arange(4), token] > 0)
    np.testing.assert_array_equal(
        token[p[np.arange(4)].max(axis=1) == p.sum(axis=1)], np.argmax(p, 1)[p.max(axis=1) == p.sum(axis=1)]
    )


def test_the_inverse_of_the_running_sum():
    p = np.random.default_rng(3).exponential(1, (200, VOCAB)).astype(np.float32)
    u = np.random.default_rng(4).random(200).astype(np.float32)
    wanted = [
        np.searchsorted(np.cumsum(np.float64(row)), x * np.float64(row).sum(), side="right")
        for row, x in zip(p, u, strict=True)
    ]
    found = np.asarray(inverse_cdf(jnp.asarray(p), jnp.asarray(u)))
    # Float32 sums may land on the neighbour where u falls within rounding of a border.
    assert np.mean(found == wanted) > 0.99 and np.abs(found - wanted).max() <= 1


def test_edges_of_the_unit_interval():
    p = jnp.asarray(np.eye(1, VOCAB, 140, dtype=np.float32) + np.eye(1, VOCAB, 3, dtype=np.float32))
    assert int(inverse_cdf(p, jnp.array([0.0]))[0]) == 3
    assert int(inverse_cdf(p, jnp.array([NEARLY_ONE]))[0]) == 140


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12), st.floats(0.05, 1.0))
def test_truncation_keeps_the_enumerated_set(seed, top_k, top_p):
    p = np.random.default_rng(seed).dirichlet(np.full(12, 0.5)).astype(np.float32)
    found = np.asarray(truncated(jnp.asarray(p)[None], jnp.int32(top_k), jnp.float32(top_p)))[0]
    wanted = kept_tokens(p.astype(np.float64), top_k, top_p)
    ordered = np.sort(p)[::-1].astype(np.float64)[: top_k or None]
    border = np.abs(np.cumsum(ordered) / ordered.sum() - top_p).min()
    if border > 1e-5:
        np.testing.assert_array_equal(found > 0, wanted & (p > 0))
    np.testing.assert_array_equal(found[found > 0], p[found > 0])
    assert found[np.argmax(p)] > 0


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.7501, 3), (1.0, 4), (1e-6, 1)])
def test_top_p_stops_as_soon_as_the_mass_is_reached(top_p, kept):
    p = jnp.array([[0.5, 0.25, 0.1875, 0.0625]])
    found = truncated(p, jnp.int32(0), jnp.float32(top_p)) > 0
    np.testing.assert_array_equal(found, np.arange(4)[None] < kept)


def test_ties_at_the_border_are_all_kept():
    p = jnp.array([[0.4, 0.2, 0.2, 0.2]])
    np.testing.assert_array_equal(truncated(p, jnp.int32(2), jnp.float32(1.0)) > 0, [[True] * 4])


def test_uniform_numbers_are_functions_of_seed_and_position():
    seeds = np.array([[1, 0], [1, 1], [2, 0], [0xFFFFFFFF, 0xFFFFFFFF]], np.uint32)
    u = np.asarray(uniforms(jnp.asarray(seeds), jnp.array([5, 5, 5, 5])))
    assert len(set(u)) == 4
    np.testing.assert_array_equal(np.asarray(uniforms(jnp.asarray(seeds[[2, 0]]), jnp.array([5, 5]))), u[[2, 0]])
    assert not np.any(np.asarray(uniforms(jnp.asarray(seeds), jnp.array([6, 6, 6, 6]))) == u)


def test_uniform_numbers_are_uniform_along_positions_and_seeds():
    many = jnp.arange(20_000)
    same_seed = uniforms(jnp.zeros((20_000, 2), jnp.uint32), many)
    same_place = uniforms(jnp.stack([many.astype(jnp.uint32)] * 2, axis=1), jnp.zeros(20_000, jnp.int32))
    for u in (same_seed, same_place):
        assert kstest(np.asarray(u), "uniform").pvalue > 1e-3
        assert 0 <= u.min() and u.max() < 1
    assert abs(np.corrcoef(same_seed[:-1], same_seed[1:])[0, 1]) < 0.03


@pytest.mark.parametrize(("field", "value", "rule"), [
    ("temperature", -0.1, "at least 0"), ("top_k", -1, "at least 0"), ("top_p", 0.0, "above 0 and at most 1"),
    ("top_p", 1.5, "above 0 and at most 1"), ("max_new_tokens", 0, "at least 1"),
    ("stop_ids", tuple(range(9)), "at most 8 ids"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(field, value, rule):
    with pytest.raises(InputError, match=f"{field} must be .*{rule}"):
        Sampling(**{field: value})
