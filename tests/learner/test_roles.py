"""Several roles in one state: each with its own objectives, optimiser and buffers."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import (
    T,
    critic_of,
    forward_on,
    groups,
    objective_gradient,
    one_device,
    padded,
    rollout,
    unpacked_values,
)
from tiny import largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import value_loss
from jaxrl_llm.checkpoints.store import Checkpoints
from jaxrl_llm.learner import (
    Layout,
    Learner,
    Optimiser,
    PolicyGradient,
    Training,
    ValueLoss,
    create_state,
    learn,
    make_update,
    pack,
)
from jaxrl_llm.learner.forward import compute_outputs
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.update import NewRole, abstract_state
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.heads import with_scalar_head

MODEL = tiny("windows")
LAYOUTS = (Layout(2, 22, T), Layout(4, 60, T))
COMPUTE = ComputeOptions(remat="full")
OPTIMISER = Optimiser(learning_rate=1e-2)


def with_returns():
    return [
        dataclasses.replace(
            s, arrays=s.arrays | {"returns": np.random.default_rng(i).normal(size=len(s.tokens)).astype(np.float32)}
        )
        for i, s in enumerate(rollout())
    ]


def test_a_critic_is_trained_through_the_same_rows():
    samples = with_returns()
    layout = LAYOUTS[0]
    packed = pack(samples, layout, ("values",))
    packed = packed.with_tokens(old_values=forward_on(one_device(), layout).score(critic_of(MODEL), packed, "values"))
    found, metrics = objective_gradient(critic_of(MODEL), packed, (ValueLoss(0.5),))
    mask, targets = padded(samples, "mask").astype(bool), padded(samples, "returns")
    old = jax.jit(lambda model: unpacked_values(model, samples))(critic_of(MODEL))

    def loss(model):
        return value_loss(unpacked_values(model, samples), targets, mask, old, 0.5)

    wanted, slope = jax.jit(jax.value_and_grad(loss))(critic_of(MODEL))
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    assert largest_difference(found, slope) < 1e-5


def one_training(objectives, begins=None):
    return Training(objectives, make_update(objectives, build(OPTIMISER), learning_rate(OPTIMISER), COMPUTE), begins)


@pytest.mark.slow
def test_two_roles_learn_in_one_state(tmp_path):
    begins = NewRole("critic", with_scalar_head, build(OPTIMISER))
    training = (one_training((PolicyGradient(PRESETS["grpo"], True),)), one_training((ValueLoss(0.5),), begins))
    mesh = one_device()
    state = create_state(jax.tree.map(jnp.copy, MODEL), build(OPTIMISER), True, mesh, others=[begins])
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers), "no two parts share a buffer"
    donated = jax.tree.leaves(state.policy)
    state, metrics = learn(
        state, groups(with_returns()), Learner(epochs=2), forward_on(mesh, LAYOUTS[1]), training, {}, 0
    )
    assert all(x.is_deleted() for x in donated)
    assert metrics["updates"] == 2 == metrics["critic/updates"] and metrics["critic/grad_norm"] > 0
    assert int(state.policy.updates) == 2 == int(state.roles["critic"].updates)
    assert largest_difference(state.policy.params, MODEL) > 1e-3
    assert largest_difference(state.roles["critic"].params.decoder, MODEL) > 1e-4
    assert float(jnp.abs(state.roles["critic"].params.weights.scalar[...]).min()) > 0
    chex.assert_trees_all_equal(state.reference, MODEL)
    with Checkpoints(tmp_path) as store:
        store.save(1, state, {})
    with Checkpoints(tmp_path) as store:
        again, _ = store.restore(1, abstract_state(MODEL, build(OPTIMISER), True, others=[begins]), mesh)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_the_policy_learns_the_same_whoever_learns_beside_it():
    begins = NewRole("critic", with_scalar_head, build(OPTIMISER))
    policy, value = one_training((PolicyGradient(PRESETS["dapo"]),)), one_training((ValueLoss(0.5),), begins)
    found = []
    for training, others in (((policy,), []), ((policy, value), [begins])):
        state = create_state(jax.tree.map(jnp.copy, MODEL), build(OPTIMISER), False, one_device(), others=others)
        state, _ = learn(
            state, groups(with_returns()), Learner(), forward_on(one_device(), LAYOUTS[0]), training, {}, 0
        )
        found.append(state.policy.params)
    assert largest_difference(*found) < 1e-6


@pytest.mark.slow
def test_an_unread_output_is_not_computed():
    packed = jax.tree.map(lambda x: x[0], pack(rollout(), LAYOUTS[0])._replace(microbatches=None, counts=None))
    found = compute_outputs(critic_of(MODEL), packed, ("values",), jnp.float32(1), COMPUTE)
    assert set(found) == {"values"} and found["values"].shape == packed.mask.shape
