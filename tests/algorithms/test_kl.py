"""KL estimators: values and gradients token by token, and in expectation against the exact divergence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import FIXTURE, NUMBERS, fixture_logp

from jaxrl_llm.algorithms.kl import K1, K2, K3

TOKENS, EXPECT = NUMBERS["KL_tokens"], NUMBERS["KL_expect"]
ESTIMATORS = {"k1": K1(), "k2": K2(), "k3": K3()}
Q, P = np.array([0.6, 0.25, 0.15]), np.array([0.3, 0.3, 0.4])
"""The policy and the reference of the published expectations."""


@pytest.mark.parametrize("name", ESTIMATORS)
def test_values_and_gradients_by_token(name):
    logp, ref, mask = fixture_logp("new"), fixture_logp("ref"), FIXTURE["mask"]
    with jax.enable_x64(True):
        value, pull = jax.vjp(lambda x: ESTIMATORS[name](x, jnp.asarray(ref)), jnp.asarray(logp))
        (slope,) = pull(jnp.asarray(mask))
        np.testing.assert_allclose(value * mask, TOKENS[name], rtol=0, atol=1e-7)
        np.testing.assert_allclose(slope, TOKENS[f"d{name}"], rtol=0, atol=1e-7)
        np.testing.assert_allclose((value * mask).sum() / 9, TOKENS[f"mean_{name}"], rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_expectations_over_a_softmax_policy(name):
    """The sampled tokens are weighted by their probability, which a sampled loss does not differentiate."""

    def loss(logits):
        return jnp.sum(jnp.asarray(Q) * ESTIMATORS[name](jax.nn.log_softmax(logits), jnp.asarray(np.log(P))))

    with jax.enable_x64(True):
        value, grad = jax.value_and_grad(loss)(jnp.asarray(np.log(Q)))
        np.testing.assert_allclose(value, EXPECT[f"E{name}"], rtol=0, atol=1e-7)
        np.testing.assert_allclose(grad, EXPECT[f"Egrad_{name}"], rtol=0, atol=1e-7)


def test_the_published_expectations_are_those_of_these_two_policies():
    exact = np.sum(Q * np.log(Q / P))
    np.testing.assert_allclose([exact, np.sum(P * np.log(P / Q))], [EXPECT["KL_qp"], EXPECT["KL_pq"]], atol=1e-7)
    np.testing.assert_allclose(Q * (np.log(Q / P) - exact), EXPECT["true_grad_reverseKL"], atol=1e-7)


def test_clipped_k3_is_verls():
    published = NUMBERS["k3_clipped_verl"]
    gaps = jnp.asarray(published["log_ref_minus_logp"], jnp.float32)
    np.testing.assert_allclose(K3(clip=10.0)(jnp.zeros_like(gaps), gaps), published["k3"], rtol=2e-5)


def test_clipped_k2_stops_growing():
    np.testing.assert_allclose(K2(clip=10.0)(jnp.array([-50.0, 0.5]), jnp.zeros(2)), [50.0, 0.125])


def test_k3_keeps_its_digits_near_zero_and_is_never_negative():
    gaps = np.array([0.0, 1e-7, -1e-5, 1e-4, -3e-3, 0.02], np.float32)
    found = np.asarray(K3()(jnp.zeros(6), jnp.asarray(gaps)))
    wide = gaps.astype(np.float64)
    # exp(d) - d - 1 is wrong by the spacing of float32 at 1, some 6e-8, whatever d is.
    assert (
        np.abs(found - (np.expm1(wide) - wide)).max()
        < 5e-9
        < np.abs(np.exp(gaps) - gaps - 1 - (np.expm1(wide) - wide)).max()
    )
    assert np.all(K3()(jnp.zeros(2001), jnp.linspace(-60, 60, 2001)) >= 0)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_equal_policies_have_no_divergence(name):
    assert not np.any(ESTIMATORS[name](jnp.array([-3.0, -0.1]), jnp.array([-3.0, -0.1])))
