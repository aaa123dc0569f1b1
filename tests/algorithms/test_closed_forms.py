"""Where training ends, against closed forms: policies that can be listed, every loss in expectation, no sampling."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from algorithms import enumeration as exact
from algorithms.enumeration import Drawn, grow, probability

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.kl import K1
from jaxrl_llm.algorithms.preference import DPO, IPO

TREE = grow(2)
NODES = TREE.visits.shape[1]
BETA = 0.5
RANDOM = np.random.default_rng(4)
REFERENCE, BEGIN = 0.8 * RANDOM.normal(size=(2, NODES, 3))
REWARDS = RANDOM.normal(size=len(TREE.tokens))


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def tilted():
    """``pi_ref exp(r / beta) / Z`` [S]."""
    weights = np.asarray(probability(REFERENCE, TREE)) * np.exp(REWARDS / BETA)
    return weights / weights.sum()


def distance(logits, wanted):
    """Total variation of what a policy says, and of what it should."""
    return 0.5 * float(np.abs(np.asarray(probability(logits, TREE)) - wanted).sum())


def trained(gradient, steps, rate):
    """Logits after so many steps of gradient descent with momentum."""
    logits = BEGIN
    speed = np.zeros_like(logits)
    for _ in range(steps):
        speed = 0.9 * speed - rate * np.asarray(gradient(logits))
        logits = logits + speed
    return logits


def of_rloo(coefficient, logits):
    """Gradient of RLOO with the KL in the reward, in expectation over groups of two."""
    algorithm = dataclasses.replace(PRESETS["rloo"], kl=K1(), kl_in="reward", kl_coef=coefficient)
    data = Drawn(logits, logits, REFERENCE, REWARDS, np.zeros(NODES))
    return exact.expected(algorithm, TREE, logits, data, 2)[1]


def test_rloo_with_the_kl_in_the_reward_ends_at_the_tilted_reference():
    assert distance(BEGIN, tilted()) > 0.3
    end = trained(functools.partial(of_rloo, BETA), 300, 0.1)
    assert distance(end, tilted()) < 0.02
    assert distance(REFERENCE, tilted()) > 0.2


def margins(logits):
    """h [S, S] of every sequence over every other, as the pairs of a data set would have it."""
    ratios = jnp.nansum(exact.token_logp(logits, TREE) - exact.token_logp(REFERENCE, TREE), axis=1)
    return ratios[:, None] - ratios[None, :]


def of_preferences(loss, chances):
    """Gradient of a loss of pairs, where the first of two sequences is preferred with these chances [S, S]."""
    size = len(TREE.tokens)

    def expected(logits):
        each = loss(margins(logits).reshape(-1)).reshape(size, size)
        return jnp.sum(jnp.where(np.eye(size), 0.0, chances * each))

    return exact.compiled(jax.grad(expected))


def test_dpo_on_bradley_terry_preferences_ends_at_the_tilted_reference():
    """As reinforcement learning of the same reward does (arXiv 2305.18290, eq. 4)."""
    chances = 1 / (1 + np.exp(REWARDS[None, :] - REWARDS[:, None]))
    end = trained(of_preferences(DPO(BETA), chances), 1000, 0.02)
    assert distance(end, tilted()) < 1e-3
    smoothed = trained(of_preferences(DPO(BETA, label_smoothing=0.2), chances), 1000, 0.02)
    assert distance(smoothed, tilted()) > 0.02, "smoothing holds it back"


def test_ipo_ends_at_margins_of_the_preference_by_beta():
    """``h = (2 p - 1) / (2 beta)`` where the preferences allow it; of sure ones ``1 / (2 beta)`` (arXiv 2310.12036)."""
    worth = 0.45 * np.tanh(REWARDS)
    chances = 0.5 + (worth[:, None] - worth[None, :]) / 2
    end = trained(of_preferences(IPO(BETA), chances), 1000, 0.02)
    np.testing.assert_allclose(margins(end), (2 * chances - 1) / (2 * BETA), atol=1e-3)
    sure = np.zeros(chances.shape)
    sure[4, 7] = 1.0
    end = trained(of_preferences(IPO(BETA), sure), 1000, 0.02)
    np.testing.assert_allclose(margins(end)[4, 7], 1 / (2 * BETA), atol=1e-3)
