"""Where two algorithms are one: limits, on-policy gradients, bounds that do not bind."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from algorithms.batches import B, T, each, ragged
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.algorithms import PRESETS, Algorithm
from jaxrl_llm.algorithms.advantages import GroupMean
from jaxrl_llm.algorithms.kl import K2, K3, K3Plus, UnbiasedK3
from jaxrl_llm.algorithms.ratios import MaskedIS, Sequence, SequenceMask, SequenceToken, Token, TruncatedIS
from jaxrl_llm.algorithms.reduce import SequenceMean, SequenceSum, TokenMean
from jaxrl_llm.algorithms.surrogates import (
    CISPO,
    SAPO,
    Likelihood,
    MiniRL,
    MirrorDescent,
    PenaltyKL,
    PPOClip,
    Unclipped,
)

BATCHES = (st.integers(0, 10**6), st.lists(st.integers(0, T), min_size=B, max_size=B))
many = settings(max_examples=10, deadline=None)


def of(surrogate, reduce=TokenMean(), ratio=Token(), **more):
    return Algorithm(GroupMean(), ratio, surrogate, reduce, **more)


def same(found, wanted, value=True, rtol=2e-5, atol=2e-6):
    """Two results have the same gradient, and the same loss where it is said."""
    np.testing.assert_allclose(found[1], wanted[1], rtol=rtol, atol=atol)
    if value:
        np.testing.assert_allclose(found[0][0], wanted[0][0], rtol=rtol, atol=atol)


def near(seed, lengths, spread):
    """A batch whose ratios lie in ``1 ± spread``, at random."""
    logp, batch = ragged(seed, lengths)
    gap = np.random.default_rng(seed).uniform(-spread, spread, logp.shape)
    return logp, batch._replace(old_logp=(logp - np.log1p(gap)).astype(np.float32))


@many
@given(*BATCHES)
def test_on_policy_every_token_surrogate_has_reinforces_gradient(seed, lengths):
    logp, batch = ragged(seed, lengths)
    batch = batch._replace(old_logp=logp, sampler_logp=logp)
    clips = PPOClip(0.2, 0.28), PPOClip(dual=3.0), CISPO(), SAPO(), SAPO(0.3, 7.0), MiniRL()
    first, *others = each(tuple(of(s) for s in (Likelihood(), Unclipped(), *clips)), logp, batch)
    for other in others:
        same(other, first, value=False)


def test_on_policy_presets_are_one_method_up_to_the_reducer():
    logp, batch = ragged(3)
    batch = batch._replace(old_logp=None, sampler_logp=logp)
    plain = dataclasses.replace(PRESETS["grpo"], kl_coef=0.0)
    reinforce = [of(Likelihood(), r) for r in (TokenMean(), SequenceMean(), SequenceSum())]
    groups = (
        ("dapo", "cispo", "dppo_tv", "dppo_kl", "m2po", "m2po_clip", "kl_cov"),
        (plain, "sapo", "gmpo"),
        ("minirl", "kimi_k1_5", "rloo", "vespo", "luspo", "pass_at_k"),
    )
    for wanted, names in zip(reinforce, groups, strict=True):
        found = each((wanted, *(PRESETS[n] if isinstance(n, str) else n for n in names)), logp, batch)
        assert np.any(found[0][1])
        for other in found[1:]:
            same(other, found[0], value=False)


@many
@given(*BATCHES)
def test_mirror_descent_at_the_old_policy_is_reinforce(seed, lengths):
    logp, batch = ragged(seed, lengths)
    algorithms = of(Likelihood(), SequenceSum()), *(of(MirrorDescent(tau), SequenceSum()) for tau in (0.1, 1.0, 5.0))
    first, *others = each(algorithms, logp, batch._replace(old_logp=logp))
    for other in others:
        same(other, first, value=False)


@many
@given(*BATCHES)
def test_inside_the_band_nothing_is_clipped(seed, lengths):
    logp, batch = near(seed, lengths, 0.19)
    batch = batch._replace(sampler_logp=batch.old_logp)
    surrogates = Unclipped(), PPOClip(0.2, 0.2), PPOClip(0.2, 0.28, 3.0), PenaltyKL()
    wanted, *others = each(tuple(of(s) for s in surrogates), logp, batch)
    for other in others:
        same(other, wanted)
    cispo, minirl = each((of(CISPO()), of(MiniRL(0.2, 0.2))), logp, batch)
    same(minirl, cispo)
    same(cispo, wanted, value=False)


@many
@given(*BATCHES)
def test_gspo_token_is_gspo_for_one_advantage_by_sequence(seed, lengths):
    logp, batch = near(seed, lengths, 0.4)
    ratios = SequenceToken(), Sequence()
    token, whole = each(tuple(of(PPOClip(0.1, 0.1), SequenceMean(), r) for r in ratios), logp, batch)
    same(token, whole)


@many
@given(*BATCHES)
def test_one_token_makes_a_sequence(seed, lengths):
    """Ratios and corrections by token, by sequence and by geometric mean are the same there."""
    logp, batch = ragged(seed, [min(length, 1) for length in lengths])
    ratios = Token(), Sequence(), SequenceToken()
    first, *others = each(tuple(of(PPOClip(), SequenceMean(), r) for r in ratios), logp, batch)
    for other in others:
        same(other, first)
    for kind in (TruncatedIS, MaskedIS):
        levels = tuple(of(PPOClip(), correction=kind(level=level)) for level in ("token", "sequence", "geometric"))
        first, *others = each(levels, logp, batch)
        for other in others:
            same(other, first)


@pytest.mark.parametrize("correction", [
    *(kind(level=level) for kind in (TruncatedIS, MaskedIS) for level in ("token", "sequence", "geometric")),
    SequenceMask(),
])  # fmt: skip
def test_a_correction_of_no_gap_changes_nothing(correction):
    logp, batch = ragged(4)
    algorithms = of(PPOClip()), of(PPOClip(), correction=correction)
    plain, corrected = each(algorithms, logp, batch._replace(sampler_logp=batch.old_logp))
    np.testing.assert_array_equal(corrected[1], plain[1])
    np.testing.assert_array_equal(corrected[0][0], plain[0][0])
    _, other = each(algorithms, logp, batch)
    assert np.any(np.asarray(other[1]) != np.asarray(plain[1])), "with a gap it does"


@many
@given(*BATCHES)
def test_the_sampler_as_the_old_policy(seed, lengths):
    logp, batch = ragged(seed, lengths)
    algorithms = of(PPOClip()), of(PPOClip(), ratio=Token("sampler"))
    _, sampler = each(algorithms, logp, batch)
    old, _ = each(algorithms, logp, batch._replace(old_logp=batch.sampler_logp))
    same(sampler, old, rtol=0, atol=0)


@dataclasses.dataclass(frozen=True)
class Probable:
    """A weight that somebody else wrote, and that reads the live policy."""

    def __call__(self, at):
        return jnp.exp(at.logp)


def test_weights_carry_no_gradient():
    logp, batch = ragged(5)
    correction, filtered = (of(Likelihood(), **{name: Probable()}) for name in ("correction", "sequence_filter"))
    wanted, *others = each((of(Likelihood()), correction, filtered), logp, batch)
    for found in others:
        np.testing.assert_allclose(found[1], np.exp(logp) * wanted[1], rtol=2e-5, atol=1e-7)


@many
@given(*BATCHES)
def test_k3_plus_and_unbiased_k3_on_policy_have_k3s_value_and_k2s_gradient(seed, lengths):
    logp, batch = ragged(seed, lengths)
    batch = batch._replace(advantages=np.zeros_like(batch.advantages), old_logp=None)
    kinds = (K3(), K2(), K3Plus(), UnbiasedK3())
    k3, k2, *others = each(tuple(of(PPOClip(), kl=kl, kl_coef=1.0) for kl in kinds), logp, batch)
    for other in others:
        np.testing.assert_allclose(other[0][0], k3[0][0], rtol=2e-5, atol=1e-7)
        same(other, k2, value=False)
    assert not batch.mask.any() or np.any(k3[1] != k2[1])


@many
@given(*BATCHES)
def test_the_penalty_has_no_gradient_at_the_old_policy(seed, lengths):
    logp, batch = ragged(seed, lengths)
    wanted, found = each((of(Unclipped()), of(PenaltyKL(), kl_coef=3.0)), logp, batch._replace(old_logp=logp))
    same(found, wanted)


def test_a_small_temperature_of_sapo_is_the_unclipped_ratio():
    logp, batch = ragged(6)
    wanted, found, sharp = each((of(Unclipped()), of(SAPO(1e-3, 1e-3)), of(SAPO(9.0, 9.0))), logp, batch)
    same(found, wanted, value=False, rtol=1e-4)
    assert np.abs(np.asarray(sharp[1])).sum() < 0.7 * np.abs(np.asarray(wanted[1])).sum()
