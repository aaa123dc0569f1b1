"""ECHO: the likelihood of what environments said, in addition to the policy gradient and apart from it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import T, moved, objective_gradient, padded, rollout, unpacked_logp, unpacked_loss
from oracles import FIXTURE, NUMBERS, fixture_logp
from tiny import largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GroupZScore
from jaxrl_llm.learner import Layout, PolicyGradient, Sample, pack
from jaxrl_llm.learner.forward import microbatch
from jaxrl_llm.stages.ingredients import OBSERVATIONS, ObservationLoss, Observations

DAPO = PRESETS["dapo"]
MOVED = moved(tiny("windows"), tiny("windows", 5), 0.02)
LAYOUTS = (Layout(2, 22, T), Layout(4, 60, T))
BOTH = ("policy", OBSERVATIONS)


def heard():
    """Samples in which about every second token is the environment's; the fourth is all the policy's."""
    random, found = np.random.default_rng(1), []
    for index, sample in enumerate(rollout()):
        said = (random.random(len(sample.tokens)) < 0.5) & (index != 3)
        found.append(dataclasses.replace(sample, mask=sample.mask & ~said).with_arrays(observations=said))
    return found


def test_loss_and_gradient_are_the_published_ones():
    numbers = NUMBERS["ECHO"]
    said = np.zeros((3, 4), bool)
    for row, flags in zip(said, numbers["obs"], strict=True):
        row[: len(flags)] = flags
    advantages = GroupZScore(eps=0.0)(np.float32(FIXTURE["R"])[None]).reshape(-1)
    samples = []
    for row, (mask, own, old) in enumerate(zip(FIXTURE["mask"], said, fixture_logp("old"), strict=True)):
        size = int(mask.sum())
        arrays = {"sampler_logp": old, "old_logp": old, "fresh": np.ones(4, bool), OBSERVATIONS: own}
        arrays = {name: x[:size].astype(bool if x.dtype == bool else np.float32) for name, x in arrays.items()}
        tokens = np.ones(size, np.int32)
        samples.append(Sample(tokens[:1], tokens, ~own[:size], {"advantages": float(advantages[row])}, arrays))
    packed = pack(samples, Layout(1, 16, 4), BOTH)
    batch = jax.tree.map(jnp.asarray, microbatch(packed, 0))
    given = jnp.zeros(batch.mask.shape, jnp.float32).at[:3].set(fixture_logp("new").astype(np.float32))

    def loss(logp):
        total = 0.0
        for one in (PolicyGradient(DAPO, several=True), ObservationLoss(numbers["lam"])):
            own = batch._replace(mask=batch.by_token.get(one.name, batch.mask) & batch.counted[one.name][:, None])
            outputs = {"logp": logp, "entropy": jnp.zeros_like(logp)}
            total += one(outputs, own, packed.counts[one.name], {})[0]
        return total

    found, gradient = jax.value_and_grad(loss)(given)
    np.testing.assert_allclose(found, numbers["loss"], rtol=2e-5)
    for row, wanted in enumerate(numbers["grad"]):
        np.testing.assert_allclose(gradient[row, : len(wanted)], wanted, rtol=2e-5, atol=2e-7)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_gradient_is_that_of_both_losses_without_packing_each_over_its_own_tokens(layout):
    samples = heard()
    found, metrics = objective_gradient(
        MOVED, pack(samples, layout, BOTH), (PolicyGradient(DAPO), ObservationLoss(0.3))
    )
    _, without = objective_gradient(MOVED, pack(samples, layout), (PolicyGradient(DAPO),))
    policy, alone = jax.grad(lambda m: unpacked_loss(DAPO, m, samples), has_aux=True)(MOVED)
    said = padded(samples, OBSERVATIONS)
    mean, slope = jax.value_and_grad(lambda m: -jnp.sum(said * unpacked_logp(m, samples)) / said.sum())(MOVED)
    assert largest_difference(found, jax.tree.map(lambda a, b: a + 0.3 * b, policy, slope)) < 1e-5
    np.testing.assert_allclose(metrics["observations/loss"], mean, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"], alone["loss"] + 0.3 * mean, rtol=1e-5, atol=1e-6)
    assert metrics["observations/tokens"] == said.sum() > 0
    for name in ("ratio", "clip_fraction/high", "policy_kl", "sampler/logp_abs_diff_mean"):
        np.testing.assert_array_equal(metrics[name], without[name])


@pytest.mark.slow
def test_with_coefficient_0_or_where_nothing_was_said_the_gradient_is_the_policys_bit_for_bit():
    samples = heard()
    silent = [sample.with_arrays(observations=np.zeros(len(sample.tokens), bool)) for sample in samples]
    bare = [dataclasses.replace(s, arrays={n: x for n, x in s.arrays.items() if n != OBSERVATIONS}) for s in samples]
    wanted, _ = objective_gradient(MOVED, pack(bare, LAYOUTS[0]), (PolicyGradient(DAPO),))
    for given, coef in ((samples, 0.0), (silent, 0.3)):
        objectives = (PolicyGradient(DAPO), ObservationLoss(coef))
        found, metrics = objective_gradient(MOVED, pack(given, LAYOUTS[0], BOTH), objectives)
        jax.tree.map(np.testing.assert_array_equal, found, wanted)
        assert np.isnan(metrics["observations/loss"]) == (given is silent)
    assert (
        ObservationLoss(0.3).finalize({"observations/tokens": 0.0, "observations/loss": 0.0, "loss": 0.0})["loss"] == 0
    )


def test_planned_samples_have_the_arrays_of_a_step():
    planned = Observations().planned_samples(list(rollout()), 1)
    assert all(
        one.arrays[OBSERVATIONS].shape == one.mask.shape and one.arrays[OBSERVATIONS].dtype == bool for one in planned
    )
