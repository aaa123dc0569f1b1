"""Distillation's terms: published numbers, finite differences, enumeration over all tokens, limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import FIXTURE, fixture_logp

from jaxrl_llm.algorithms import Algorithm, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.advantages import GroupMean
from jaxrl_llm.algorithms.kl import JensenShannon, SampledKL, spread_slopes, top_classes
from jaxrl_llm.algorithms.ratios import Sequence, Token, TruncatedIS
from jaxrl_llm.algorithms.reduce import SequenceMean, TokenMean
from jaxrl_llm.algorithms.surrogates import PPOClip, Unclipped

STUDENT = np.float32([[2, 1, 0, -1, 0.5], [0.2, -0.3, 1.5, 0.1, 0]])
TEACHER = np.float32([[1, 2, 0.5, -2, 0], [0.5, 0, 1, 1.2, -1]])
TOP = np.array([[1, 0], [3, 2]])
"""The teacher's two most likely tokens at each position."""
P_NU = np.ones((3, 4))
for _row, _values in zip(P_NU, ([0.7, 0.6], [0.2, 0.5, 0.4], [0.6, 0.1, 0.9, 0.5]), strict=True):
    _row[: len(_values)] = _values
WHOLE = {0: [0.39485808, 0.24286289], 0.1: [0.03498074, 0.02140298], 0.5: [0.09448604, 0.05657003],
         0.9: [0.03470184, 0.02020617], 1: [0.39076572, 0.225522]}  # fmt: skip
BUCKET = {0: [0.36287033, 0.20179595], 0.5: [0.08634634, 0.04508454], 1: [0.35645866, 0.17110428]}
MEAN_GRADIENT = [[0.03942788, -0.03770407, -0.0073725, 0.001963, 0.00368569],
                 [-0.00668254, -0.00405316, 0.02383695, -0.02294201, 0.00984075]]  # fmt: skip


def of_logits(divergence, logits, teacher=TEACHER, temperature=1.0):
    """The divergence at each position, over all tokens or the teacher's top ones."""
    ours, theirs = (jax.nn.log_softmax(jnp.asarray(x) / temperature) for x in (logits, teacher))
    if divergence.top_k:
        ours, theirs = top_classes(ours, TOP), top_classes(theirs, TOP)
    return divergence(ours, theirs)


@pytest.mark.parametrize("beta", WHOLE)
def test_whole_distributions_give_the_published_numbers(beta):
    np.testing.assert_allclose(of_logits(JensenShannon(beta), STUDENT), WHOLE[beta], atol=1e-6)


@pytest.mark.parametrize("beta", BUCKET)
def test_top_tokens_with_the_others_as_one_class_give_the_published_numbers(beta):
    found = of_logits(JensenShannon(beta, 2), STUDENT)
    np.testing.assert_allclose(found, BUCKET[beta], atol=1e-6)
    assert (found < of_logits(JensenShannon(beta), STUDENT)).all(), "a lower bound"


def test_the_temperature_divides_both_and_nothing_multiplies_back():
    np.testing.assert_allclose(of_logits(JensenShannon(0.5), STUDENT, temperature=2.0), [0.022948, 0.015404], atol=1e-6)


@pytest.mark.parametrize("beta", [0, 0.1, 0.5, 0.9, 1])
@pytest.mark.parametrize("top_k", [0, 2])
def test_the_slopes_are_the_gradient_by_the_logits(beta, top_k):
    divergence = JensenShannon(beta, top_k)
    wanted = jax.grad(lambda x: jnp.sum(of_logits(divergence, x)))(STUDENT)
    logp, teacher = jax.nn.log_softmax(STUDENT), jax.nn.log_softmax(TEACHER)
    if top_k:
        ours = top_classes(logp, TOP)
        found = spread_slopes(divergence.slopes(ours, top_classes(teacher, TOP)), logp, ours, TOP)
    else:
        found = divergence.slopes(logp, teacher)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    if beta == 0.5 and not top_k:
        np.testing.assert_allclose(found / 2, MEAN_GRADIENT, atol=1e-7)
    ours, theirs = (x.astype(np.float64) for x in (STUDENT, TEACHER))
    for place in np.ndindex(STUDENT.shape):  # by the definition, in NumPy
        way = np.zeros(ours.shape)
        way[place] = 1e-5
        up, down = (dense(beta, top_k, ours + sign * way, theirs) for sign in (1, -1))
        np.testing.assert_allclose(found[place], (up - down) / 2e-5, atol=1e-6)


def dense(beta, top_k, logits, teacher):
    """The sum over positions as plain NumPy, token by token."""
    total = 0.0
    for row, other, top in zip(logits, teacher, TOP, strict=True):
        p, q = (np.exp(x) / np.exp(x).sum() for x in (row, other))
        if top_k:
            p, q = (np.append(x[top], 1 - x[top].sum()) for x in (p, q))
        m = (1 - beta) * p + beta * q
        if beta in (0, 1):
            total += (q * np.log(q / p)).sum() if beta == 0 else (p * np.log(p / q)).sum()
        else:
            total += beta * (q * np.log(q / m)).sum() + (1 - beta) * (p * np.log(p / m)).sum()
    return total


@pytest.mark.parametrize("beta", [0, 0.3, 1])
@pytest.mark.parametrize("top_k", [0, 2])
def test_two_equal_models_are_at_0_and_stay_there(beta, top_k):
    divergence = JensenShannon(beta, top_k)
    np.testing.assert_allclose(of_logits(divergence, TEACHER), 0, atol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: jnp.sum(of_logits(divergence, x)))(TEACHER), 0, atol=1e-6)


def test_at_both_ends_the_formula_is_beta_times_the_kl():
    forward, reverse = (of_logits(JensenShannon(beta), STUDENT) for beta in (0, 1))
    np.testing.assert_allclose(of_logits(JensenShannon(1e-3), STUDENT) / 1e-3, forward, rtol=5e-3)
    np.testing.assert_allclose(of_logits(JensenShannon(1 - 1e-3), STUDENT) / 1e-3, reverse, rtol=5e-3)


def advantages(scale=1.0):
    """Of the fixture's tokens, by the policy ``new``."""
    one = SampledKL(scale)
    return np.float32(one.advantages(fixture_logp("new"), np.log(P_NU), fixture_logp("ref") if scale != 1 else None))


def graded(algorithm, scale=1.0, old="old"):
    batch = PolicyBatch(advantages(scale), FIXTURE["mask"].astype(bool), fixture_logp(old), None, fixture_logp("mu"))
    return jax.value_and_grad(lambda logp: policy_loss(algorithm, logp, batch)[0])(fixture_logp("new"))


PLAIN = Algorithm(GroupMean(), Token(), Unclipped(), TokenMean())


def test_the_policy_gradient_form_gives_the_published_numbers():
    np.testing.assert_allclose(advantages()[2], [0.08701138, -0.91629073, 0.22314355, 0.69314718], atol=1e-6)
    loss, gradient = graded(PLAIN)
    np.testing.assert_allclose(loss, -0.03011863, atol=1e-6)
    np.testing.assert_allclose(gradient[0, :2], [-0.02569178, -0.04192195], atol=1e-6)
    np.testing.assert_allclose(gradient[2], [-0.01063472, 0.1272626, -0.02231436, -0.07701635], atol=1e-6)
    clipped = Algorithm(GroupMean(), Token(), PPOClip(0.2, 0.2), TokenMean())
    np.testing.assert_allclose(graded(clipped)[0], -0.00759025, atol=1e-6)
    np.testing.assert_allclose(graded(clipped)[1][1, :3], [0, 0, 0.02479373], atol=1e-6)


def test_a_larger_scale_leads_past_the_teacher_as_published():
    assert SampledKL(1.25).needs_reference and not SampledKL().needs_reference
    np.testing.assert_allclose(advantages(1.25)[1, :3], [-0.63453779, 0.26352212, -0.22314355], atol=1e-6)
    loss, gradient = graded(PLAIN, 1.25)
    np.testing.assert_allclose(loss, -0.05618061, atol=1e-6)
    np.testing.assert_allclose(gradient[0, :2], [-0.03971146, -0.04980599], atol=1e-6)


def test_stale_tokens_and_sequence_ratios_weight_a_fixed_advantage():
    """Token by token: weight times ratio times advantage; a ratio of a whole sequence meets each token's advantage."""
    mask, new, old, mu = FIXTURE["mask"] > 0, fixture_logp("new"), fixture_logp("old"), fixture_logp("mu")
    corrected = Algorithm(GroupMean(), Token(), Unclipped(), TokenMean(), correction=TruncatedIS(2.0))
    terms = np.minimum(np.exp(old - mu), 2.0) * np.exp(new - old) * advantages()
    loss, gradient = graded(corrected)
    np.testing.assert_allclose(loss, -terms[mask].sum() / mask.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient[mask], -terms[mask] / mask.sum(), rtol=1e-5)
    by_sequence = Algorithm(GroupMean(), Sequence(), PPOClip(9.0, 9.0), SequenceMean())
    rows = []
    for row, counted in enumerate(mask):
        ratio = np.exp(np.mean((new - old)[row, counted]))
        rows.append(-ratio * advantages()[row, counted].mean())
    np.testing.assert_allclose(graded(by_sequence)[0], np.mean(rows), rtol=1e-5)


def test_its_expectation_is_the_reverse_kl_and_so_is_its_gradient():
    """Over all tokens of a position, weighted by the policy."""
    logp, teacher = jax.nn.log_softmax(STUDENT[0]), jax.nn.log_softmax(TEACHER[0])
    each = SampledKL().advantages(logp, teacher)
    np.testing.assert_allclose(-jnp.sum(jnp.exp(logp) * each), of_logits(JensenShannon(1), STUDENT)[0], rtol=1e-5)
    found = jax.grad(lambda x: -jnp.sum(jnp.exp(logp) * each * jax.nn.log_softmax(x)))(STUDENT[0])
    np.testing.assert_allclose(found, JensenShannon(1).slopes(logp, teacher), atol=1e-6)
