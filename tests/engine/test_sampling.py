"""One token at a time: the distribution that is drawn from is the one that is reported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import kept_tokens
from tiny import Compilations, equations

from jaxrl_llm.engine.sampling import DrawOptions, draw, draw_options, to_traced, uniforms
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.errors import InputError

OPTIMISED = True  # a hundred thousand draws take longer than their program
VOCAB, DRAWS, BATCH = 150, 100_000, 10_000
LOGITS = np.random.default_rng(0).normal(0, 2, VOCAB).astype(np.float32)
"""Spread over two blocks of the inverse distribution function, the second one not full."""
NEARLY_ONE = np.float32(1) - np.float32(2**-24)
RULES = {
    "plain": Sampling(), "cool": Sampling(temperature=0.7), "top-k": Sampling(top_k=5), "top-p": Sampling(top_p=0.8),
    "min-p": Sampling(min_p=0.05), "all": Sampling(1.5, top_k=60, top_p=0.95, min_p=0.03),
}  # fmt: skip
EVERYTHING = DrawOptions(truncates=True, kept=True)

drawn = jax.jit(draw, static_argnums=3)


def unpacked(words, vocab):
    """Kept sets uint32[B, W] as bool[B, V]."""
    bits = np.asarray(words)[:, :, None] >> np.arange(32, dtype=np.uint32) & 1
    return bits.reshape(len(words), -1)[:, :vocab].astype(bool)


def distribution(logits, sampling):
    """Float64[V] twice: the policy at the sampling temperature, and what is left of it, by enumeration."""
    p = np.exp((np.float64(logits) - np.max(logits)) / sampling.temperature)
    p /= p.sum()
    kept = kept_tokens(p, sampling.top_k, sampling.top_p, sampling.min_p)
    return p, np.where(kept, p, 0) / p[kept].sum()


def chosen(p, u):
    """The tokens that the numbers u [B] draw from weights [B, V]."""
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(p))
    return np.asarray(drawn(logits, jnp.asarray(u), to_traced(Sampling()), DrawOptions()).token)


def rows(logits, count):
    return jnp.broadcast_to(jnp.asarray(logits)[None], (count, len(logits)))


@functools.partial(jax.jit, static_argnums=3)
def batch_of_draws(logits, rule, first, wanted):
    seeds = jnp.stack([first + jnp.arange(BATCH, dtype=jnp.uint32), jnp.zeros(BATCH, jnp.uint32)], axis=1)
    return draw(rows(logits, BATCH), uniforms(seeds, jnp.full(BATCH, 7, jnp.int32)), rule, wanted)


@pytest.mark.slow(but=("all", "cool"))
@pytest.mark.parametrize("name", RULES)
def test_a_hundred_thousand_draws_follow_the_distribution(name):
    from scipy import stats  # which takes a second

    sampling = RULES[name]
    _, wanted = distribution(LOGITS, sampling)
    rule, need = to_traced(sampling), draw_options(sampling)
    tokens = np.concatenate([
        batch_of_draws(LOGITS, rule, jnp.uint32(start), need).token for start in range(0, DRAWS, BATCH)
    ])  # fmt: skip
    counts = np.bincount(tokens, minlength=VOCAB)
    assert not counts[wanted == 0].any()
    common = wanted * DRAWS >= 5
    observed, expected = (
        np.append(counts[common], counts[~common].sum()),
        DRAWS * np.append(wanted[common], wanted[~common].sum()),
    )
    statistic = np.sum((observed - expected) ** 2 / np.maximum(expected, 1e-9))
    assert stats.chi2.sf(statistic, common.sum() - 1) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_the_share_of_the_unit_interval_that_gives_a_token_is_its_probability(name):
    """All of u in steps of 1 / BATCH: no chance is left."""
    sampling = RULES[name]
    p, wanted = distribution(LOGITS, sampling)
    u = jnp.asarray(((np.arange(BATCH) + 0.5) / BATCH).astype(np.float32))
    found = drawn(rows(LOGITS, BATCH), u, to_traced(sampling), EVERYTHING)
    tokens = np.asarray(found.token)
    # Each token has one interval of u, whose ends fall between two steps.
    np.testing.assert_allclose(np.bincount(tokens, minlength=VOCAB) / BATCH, wanted, atol=1.01 / BATCH)
    assert np.all(np.diff(tokens) >= 0)
    np.testing.assert_array_equal(unpacked(found.extras["kept"][:2], VOCAB), np.tile(wanted > 0, (2, 1)))
    np.testing.assert_allclose(found.logp, np.log(wanted[tokens]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.extras["entropy"], -np.sum(p * np.log(p)), rtol=1e-5)
    policy = np.float64(LOGITS) - np.log(np.sum(np.exp(np.float64(LOGITS))))
    np.testing.assert_allclose(found.extras["policy_logp"], policy[tokens], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_temperature_zero_takes_the_most_likely_token_with_certainty():
    logits = np.random.default_rng(0).normal(size=(4, VOCAB)).astype(np.float32)
    logits[2, [20, 140]] = 9  # the first of equals, as argmax does
    sampling = Sampling(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5)
    found = drawn(
        jnp.asarray(logits), jnp.array([0.0, 0.3, 0.9, NEARLY_ONE]), to_traced(sampling), draw_options(sampling)
    )
    np.testing.assert_array_equal(found.token, np.argmax(logits, axis=-1))
    np.testing.assert_array_equal(found.logp, 0)
    policy = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(found.extras["policy_logp"], policy.max(axis=-1), rtol=1e-5)
    np.testing.assert_allclose(found.extras["entropy"], -np.sum(np.exp(policy) * policy, axis=-1), rtol=1e-5)
    assert not sampling.truncates and sampling.alters_policy and not Sampling().alters_policy


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-30, 1e-8, 0.5, float(NEARLY_ONE)]), st.integers(1, VOCAB))
def test_a_token_of_probability_zero_is_never_drawn(seed, u, nonzero):
    random = np.random.default_rng(seed)
    p = np.zeros((4, VOCAB), np.float32)
    for row in p:
        row[random.choice(VOCAB, nonzero, replace=False)] = random.exponential(1, nonzero) ** 6 + 1e-12
    token = chosen(p, np.full(4, u, np.float32))
    assert np.all(p[np.arange(4), token] > 0)
    if nonzero == 1:
        np.testing.assert_array_equal(token, np.argmax(p, axis=1))


def test_the_inverse_of_the_running_sum():
    p = np.random.default_rng(3).exponential(1, (200, VOCAB)).astype(np.float32)
    u = np.random.default_rng(4).random(200).astype(np.float32)
    wanted = [
        np.searchsorted(np.cumsum(np.float64(row)), x * np.float64(row).sum(), side="right")
        for row, x in zip(p, u, strict=True)
    ]
    found = chosen(p, u)
    # Float32 sums may land on the neighbour where u falls within rounding of a border.
    assert np.mean(found == wanted) > 0.99 and np.abs(found - wanted).max() <= 1


def test_edges_of_the_unit_interval():
    p = np.eye(1, VOCAB, 140, dtype=np.float32) + np.eye(1, VOCAB, 3, dtype=np.float32)
    assert chosen(p, np.zeros(1, np.float32)) == 3 and chosen(p, np.full(1, NEARLY_ONE)) == 140


def kept_of(p, sampling):
    """The kept set bool[B, V] of a draw from probabilities [B, V], and the draw."""
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(np.asarray(p, np.float32)))
    found = drawn(logits, jnp.full(len(p), 0.5), to_traced(sampling), EVERYTHING)
    return unpacked(found.extras["kept"], len(p[0])), found


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 14), st.floats(0.05, 1.0), st.floats(0.0, 1.0))
def test_truncation_keeps_the_enumerated_set(seed, top_k, top_p, min_p):
    p = np.random.default_rng(seed).dirichlet(np.full(12, 0.5)).astype(np.float32)
    kept, found = kept_of(p[None], Sampling(top_k=top_k, top_p=top_p, min_p=min_p))
    wanted = kept_tokens(p.astype(np.float64), top_k, top_p, min_p)
    ordered = np.sort(p)[::-1].astype(np.float64)[: top_k or None]
    borders = np.append(np.abs(np.cumsum(ordered) / ordered.sum() - top_p), np.abs(p / p.max() - min_p))
    if (top_p == 1 or borders[: len(ordered)].min() > 1e-5) and borders[len(ordered) :].min() > 1e-5:
        np.testing.assert_array_equal(kept[0], wanted & (p > 0))
        token = int(found.token[0])
        np.testing.assert_allclose(found.logp[0], np.log(p[token]) - np.log(p[wanted].sum()), atol=1e-5, rtol=1e-5)
    assert kept[0, np.argmax(p)] and kept[0, found.token[0]]


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.7501, 3), (1.0, 4), (1e-6, 1)])
def test_top_p_stops_as_soon_as_the_mass_is_reached(top_p, kept):
    found, _ = kept_of([[0.5, 0.25, 0.1875, 0.0625]], Sampling(top_p=top_p))
    np.testing.assert_array_equal(found, np.arange(4)[None] < kept)


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.6)])
def test_a_hair_less_likely_than_the_last_one_kept_is_cut_off(sampling):
    """The two in the middle differ by a few units in the last place; the first two hold 0.62 of the mass."""
    logits = jnp.array([[1.0, 0.5, 0.5 - 3e-7, -2.0]])
    found = drawn(logits, jnp.full(1, 0.5), to_traced(sampling), EVERYTHING)
    np.testing.assert_array_equal(unpacked(found.extras["kept"], 4), [[True, True, False, False]])


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.5), Sampling(top_k=3, top_p=0.5)])
def test_ties_at_the_border_are_all_kept(sampling):
    assert kept_of([[0.4, 0.2, 0.2, 0.2]], sampling)[0].all()


@pytest.mark.parametrize(("sampling", "kept"), [
    (Sampling(top_k=9), [True, True, True, False]), (Sampling(top_k=1), [True, False, False, False]),
    (Sampling(top_p=1e-9), [True, False, False, False]), (Sampling(min_p=1.0), [True, False, False, False]),
    (Sampling(min_p=0.5), [True, True, False, False]), (Sampling(top_k=2, top_p=0.6), [True, False, False, False]),
])  # fmt: skip
def test_impossible_tokens_more_than_there_are_and_only_one(sampling, kept):
    """The last token's logit is -inf; top-p 0.6 is of the mass 0.8 that top-k left: 0.5 reaches it."""
    found, all_of_it = kept_of([[0.5, 0.3, 0.2, 0.0]], sampling)
    np.testing.assert_array_equal(found, [kept])
    assert np.isfinite(all_of_it.logp[0]) and np.isfinite(all_of_it.extras["entropy"][0])
    if sum(kept) == 1:
        assert int(all_of_it.token[0]) == 0 and abs(float(all_of_it.logp[0])) < 1e-6


def test_a_tail_too_thin_to_add_anything_is_kept_where_nothing_is_cut():
    p = np.full((1, VOCAB), 1e-20)
    p[0, 3] = 1.0
    assert kept_of(p, Sampling(top_k=VOCAB))[0].all()
    assert kept_of(p, Sampling(top_p=0.999999))[0].sum() == 1


def test_nothing_is_sorted_and_numbers_compile_nothing():
    logits, u = rows(LOGITS, 3), jnp.full(3, 0.2)
    jaxpr = jax.make_jaxpr(draw, static_argnums=3)(logits, u, to_traced(Sampling(top_p=0.5)), EVERYTHING)
    assert not {"sort", "top_k"} & {equation.primitive.name for equation in equations(jaxpr.jaxpr)}
    needs = [draw_options(s) for s in (Sampling(), Sampling(0.0), Sampling(0.7), Sampling(top_p=0.3))]
    assert needs[0] == needs[1] == needs[2] != needs[3]
    drawn(logits, u, to_traced(Sampling()), EVERYTHING)
    with Compilations() as compilations:
        for sampling in (Sampling(0.7), Sampling(1.2, 3), Sampling(top_p=0.3, min_p=0.1)):
            drawn(logits, u, to_traced(sampling), EVERYTHING)
    assert compilations.heard == []


def test_uniform_numbers_are_functions_of_seed_and_position():
    seeds = np.array([[1, 0], [1, 1], [2, 0], [0xFFFFFFFF, 0xFFFFFFFF]], np.uint32)
    u = np.asarray(uniforms(jnp.asarray(seeds), jnp.array([5, 5, 5, 5])))
    assert len(set(u)) == 4
    np.testing.assert_array_equal(np.asarray(uniforms(jnp.asarray(seeds[[2, 0]]), jnp.array([5, 5]))), u[[2, 0]])
    assert not np.any(np.asarray(uniforms(jnp.asarray(seeds), jnp.array([6, 6, 6, 6]))) == u)


def test_uniform_numbers_are_uniform_along_positions_and_seeds():
    from scipy import stats  # which takes a second

    many = jnp.arange(20_000)
    same_seed = uniforms(jnp.zeros((20_000, 2), jnp.uint32), many)
    same_place = uniforms(jnp.stack([many.astype(jnp.uint32)] * 2, axis=1), jnp.zeros(20_000, jnp.int32))
    for u in (same_seed, same_place):
        assert stats.kstest(np.asarray(u), "uniform").pvalue > 1e-3
        assert u.min() >= 0 and u.max() < 1
    assert abs(np.corrcoef(same_seed[:-1], same_seed[1:])[0, 1]) < 0.03


@pytest.mark.parametrize(("field", "value", "rule"), [
    ("temperature", -0.1, "at least 0"), ("top_k", -1, "at least 0"), ("top_p", 0.0, "above 0 and at most 1"),
    ("top_p", 1.5, "above 0 and at most 1"), ("max_new_tokens", 0, "at least 1"),
    ("stop_ids", tuple(range(9)), "at most 8 ids"), ("min_p", 1.1, "from 0"), ("min_p", -0.1, "to 1"),
    ("keep_mask", True, "False where nothing is cut off"),
])  # fmt: skip
def test_settings_that_cannot_work_are_refused(field, value, rule):
    with pytest.raises(InputError, match=f"{field} must be .*{rule}"):
        Sampling(**{field: value})
