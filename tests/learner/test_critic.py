"""A critic: its loss by hand, its values through packed rows, what it is trained towards, and that it learns."""

import dataclasses
import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import (
    G,
    T,
    critic_of,
    forward_on,
    groups,
    objective_gradient,
    one_device,
    policy_training,
    rollout,
    unpacked_values,
)
from tiny import Compilations, largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.algorithms.advantages import GAE
from jaxrl_llm.data import Text
from jaxrl_llm.learner import (
    Layout,
    Learner,
    Optimiser,
    Training,
    ValueLoss,
    create_state,
    learn,
    make_update,
    pack,
    to_samples,
)
from jaxrl_llm.learner.batch import Counts
from jaxrl_llm.learner.forward import microbatch, put_on_mesh
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.samples import POOLING_STEPS, pool_explained_variance, value_metrics
from jaxrl_llm.learner.update import NewRole, abstract_state
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.heads import with_scalar_head
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rollout.groups import Carryover, RolloutBatch
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
from jaxrl_llm.stages.ingredients import PretrainingMix
from jaxrl_llm.types import Completion, Group, Problem

MODEL = tiny("windows")
LAYOUT = Layout(4, 60, T + 1)
PROBLEM = Problem("1", ({"role": "user", "content": "?"},), "3", "test")
CUT_OFF = (1, 6, 11)
PPO = PRESETS["ppo"]


def critic_training(optimiser, clip=0.2, epochs=0):
    """How a critic that begins as the policy's layers is trained."""
    objectives = (ValueLoss(clip),)
    update = make_update(objectives, build(optimiser), learning_rate(optimiser), ComputeOptions(remat="full"))
    return Training(objectives, update, NewRole("critic", with_scalar_head, build(optimiser)), epochs)


def made(seed=3):
    """Groups of the tiny model's rollout with random rewards, some of them cut off; and the rewards."""
    rewards = np.random.default_rng(seed).normal(size=(3, G))
    found = []
    for p, row in enumerate(rewards):
        completions = tuple(
            Completion(
                s.tokens,
                s.arrays["sampler_logp"],
                "length" if p * G + i in CUT_OFF else "stop",
                s.mask,
                np.zeros(len(s.tokens), np.int32),
            )
            for i, s in enumerate(rollout()[p * G : (p + 1) * G])
        )
        found.append(Group(PROBLEM, rollout()[p * G].prompt, completions, row, row))
    return found, rewards


def valued(estimator, rewards=None, critic=critic_of(MODEL)):
    """Samples of ``made`` with advantages and returns of this critic, and what was measured."""
    batch, drawn = made()
    forward = forward_on(one_device(), LAYOUT)
    models = {"values": lambda samples: forward.by_sample(critic, samples, "values")}
    algorithm = dataclasses.replace(PPO, advantage=estimator)
    rewards = drawn if rewards is None else rewards
    found, measured = to_samples(algorithm, batch, 0, rewards, (), T + 1, models)
    return [s for group in found for s in group], measured


@pytest.mark.slow
def test_old_values_are_those_of_an_unpacked_forward_pass():
    samples, _ = valued(GAE())
    wanted = np.asarray(unpacked_values(critic_of(MODEL), samples))
    for s, row in zip(samples, wanted, strict=True):
        np.testing.assert_allclose(s.arrays["old_values"], row[: len(s.tokens)], atol=1e-5)


@pytest.mark.parametrize("bootstrap", [False, True])
def test_only_what_was_cut_off_has_a_value_after_its_last_token(bootstrap):
    """At lambda 0 the return of the last token that counts is its reward and the value of the state after it."""
    samples, _ = valued(GAE(0.9, 0.0, bootstrap=bootstrap))
    _, rewards = made()
    values = np.asarray(unpacked_values(critic_of(MODEL), samples, 1))
    for number, (s, reward) in enumerate(zip(samples, rewards.reshape(-1), strict=True)):
        if not s.mask.any():
            continue
        last = np.flatnonzero(s.mask)[-1]
        after = values[number, len(s.tokens)] if bootstrap and number in CUT_OFF else 0.0
        np.testing.assert_allclose(s.arrays["returns"][last], reward + 0.9 * after, atol=1e-4)


def test_whitened_advantages_come_with_returns_that_are_not():
    plain, whitened = valued(GAE())[0], valued(GAE(whiten=True))[0]
    every = np.concatenate([s.arrays["advantages"][s.mask] for s in plain])
    for one, other in zip(plain, whitened, strict=True):
        np.testing.assert_array_equal(one.arrays["returns"], other.arrays["returns"])
        held = one.arrays["advantages"] + one.arrays["old_values"]
        np.testing.assert_allclose(one.arrays["returns"], np.where(one.mask, held, 0), atol=1e-6)
        scaled = (one.arrays["advantages"] - every.mean()) / every.std(ddof=1)
        np.testing.assert_allclose(other.arrays["advantages"], np.where(one.mask, scaled, 0), atol=1e-4)


def test_a_critic_does_not_learn_from_what_could_not_be_scored():
    _, rewards = made()
    rewards[0, 2] = math.nan
    samples, measured = valued(GAE(), rewards)
    assert [s.counted_by for s in samples] == [("policy",) if n == 2 else None for n in range(len(samples))]
    counts = pack(samples, LAYOUT, ("policy", "values")).counts
    assert counts["policy"].tokens - counts["values"].tokens == samples[2].mask.sum() > 0
    text = Text("1", samples[0].prompt, samples[0].tokens, np.ones(len(samples[0].tokens), bool), "rows.jsonl:1")
    beside = PretrainingMix([text], (), 1, 0, others=("policy", "values"), forward=forward_on(one_device(), LAYOUT))
    batch = RolloutBatch([], [], Carryover(texts=1), 0, 0, {})
    mixed = [s for group in beside.samples(groups(samples), batch) for s in group]
    again = pack(mixed, LAYOUT, ("policy", "values", "text")).counts
    assert {name: again[name] for name in counts} == counts, "nor where texts stand beside it"
    assert again["text"].tokens == len(text.tokens)
    known = [s for n, s in enumerate(samples) if n != 2]
    returns = np.concatenate([s.arrays["returns"][s.mask] for s in known])
    assert measured["critic/returns_mean"] == pytest.approx(returns.mean(), abs=1e-6)


def test_explained_variance():
    random = np.random.default_rng(0)
    returns, values = random.normal(size=(2, 5, 4)).astype(np.float32)
    counts = random.random((5, 4)) > 0.4
    found = value_metrics(returns, values, counts)
    r, v = returns[counts], values[counts]
    residue = sum((r - v - np.mean(r - v)) ** 2) / sum((r - np.mean(r)) ** 2)
    assert found["critic/explained_variance"] == pytest.approx(1 - residue, rel=1e-5)
    assert found["critic/values_mean"] == pytest.approx(v.mean(), rel=1e-5)
    assert value_metrics(returns, returns, counts)["critic/explained_variance"] == 1
    assert value_metrics(returns, 0 * returns, counts)["critic/explained_variance"] == 0
    # Equal up to what adding an advantage to a value in float32 leaves.
    flat = (np.float32(1) - values) + values
    assert math.isnan(value_metrics(flat, values, counts)["critic/explained_variance"])
    nothing = value_metrics(returns, values, counts & False)
    assert nothing.pop("critic/tokens") == 0 and all(math.isnan(x) for x in nothing.values())


def around_its_mean(x):
    """The sum of squares."""
    return sum((one - sum(x) / len(x)) ** 2 for one in x)


def test_explained_variance_is_pooled_over_the_last_steps():
    random = np.random.default_rng(1)
    own, seen = [], []
    assert pool_explained_variance({"loss": 1.0}, own) == ({}, []), "a step without a critic"
    for step in range(POOLING_STEPS + 3):
        returns, values = (step + (1 + step) * random.normal(size=(2, 6, 3))).astype(np.float32)
        counts = random.random((6, 3)) > (1 if step == 2 else 0.3)
        if counts.any():
            seen.append((returns[counts].astype(float), values[counts].astype(float)))
        found, own = pool_explained_variance(value_metrics(returns, values, counts), json.loads(json.dumps(own)))
        left = sum(around_its_mean(r - v) for r, v in seen[-POOLING_STEPS:])
        explained = 1 - left / sum(around_its_mean(r) for r, _ in seen[-POOLING_STEPS:])
        assert found == {"critic/explained_variance_pooled": pytest.approx(explained, rel=1e-9)}
    assert len(seen) > POOLING_STEPS == len(own)


def test_a_mean_that_rises_from_step_to_step_is_no_merit_of_the_critic():
    own = []
    for step in range(3):
        returns = np.float32([[step, step + 1]])
        found, own = pool_explained_variance(value_metrics(returns, 0 * returns + step, returns > -1), own)
    assert found["critic/explained_variance_pooled"] == 0
    flat = np.ones((1, 2), np.float32)
    for counts in (flat > 0, flat < 0):
        assert math.isnan(
            pool_explained_variance(value_metrics(flat, 0 * flat, counts), [])[0]["critic/explained_variance_pooled"]
        )


def loss_by_hand(values, old, returns, mask, clip):
    """The mean over the tokens that count of half the larger of two squared errors."""
    total = []
    for at in zip(*np.nonzero(mask), strict=True):
        error = (values[at] - returns[at]) ** 2
        if clip is not None:
            moved = max(-clip, min(clip, values[at] - old[at]))
            error = max(error, (old[at] + moved - returns[at]) ** 2)
        total.append(error / 2)
    return sum(total) / len(total)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_the_loss_of_values_and_its_slope_by_finite_differences(clip):
    packed = jax.tree.map(lambda x: x, pack(valued(GAE())[0], LAYOUT, ("values",)))
    batch = jax.tree.map(np.asarray, microbatch(packed, jnp.int32(0)))
    given = batch.by_token
    random = np.random.default_rng(1)
    values = (given["old_values"] + 0.4 * random.normal(size=batch.mask.shape)).astype(np.float32)
    counts = Counts(jnp.float32(batch.mask.sum()), jnp.float32(0))

    def loss(x):
        found, metrics = ValueLoss(clip)({"values": x}, batch, counts, {})
        return found, metrics

    (found, metrics), slope = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(values))
    hand = lambda x: loss_by_hand(x, given["old_values"], given["returns"], batch.mask, clip)
    np.testing.assert_allclose(found, hand(values), rtol=1e-5)
    exact = values.astype(np.float64)
    for at in zip(*np.nonzero(batch.mask), strict=True):
        step = np.zeros_like(exact)
        step[at] = 1e-6
        np.testing.assert_allclose(slope[at], (hand(exact + step) - hand(exact - step)) / 2e-6, atol=1e-6)
    assert not np.any(slope[~batch.mask])
    still = np.sum((np.asarray(slope) == 0) & batch.mask) / batch.mask.sum()
    assert ("clip_fraction" in metrics) == (clip is not None)
    if clip is not None:
        assert 0 < still < 1
        np.testing.assert_allclose(metrics["clip_fraction"], still, rtol=1e-6)


@pytest.mark.slow
def test_the_mesh_changes_nothing():
    samples = valued(GAE())[0]
    critic = critic_of(MODEL)
    found = []
    for mesh in (one_device(), make_mesh(MeshShape(2, 2, 2))):
        layout = dataclasses.replace(LAYOUT, parts=mesh.shape["data"] * mesh.shape["fsdp"])
        with jax.set_mesh(mesh):
            packed = put_on_mesh(pack(samples, layout, ("values",)), mesh)
            model = jax.device_put(critic, shardings(critic, mesh))
            values = forward_on(mesh, layout).by_sample(model, samples, "values")
            found.append((*objective_gradient(model, packed, (ValueLoss(0.2),)), values))
    (one, metrics, values), (other, more, others) = jax.device_get(found)
    assert largest_difference(other, one) < 1e-5
    for name, x in metrics.items():
        np.testing.assert_allclose(more[name], x, rtol=1e-5, err_msg=name)
    for a, b in zip(values, others, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_while_the_critic_warms_up_the_policy_stays():
    optimiser = Optimiser(learning_rate=1e-2)
    training = critic_training(optimiser, epochs=3)
    samples = groups(valued(GAE())[0])
    mesh = one_device()
    state = create_state(jax.tree.map(jnp.copy, MODEL), build(optimiser), False, mesh, others=[training.begins])
    forward = forward_on(mesh, LAYOUT)
    state, metrics = learn(state, samples, Learner(epochs=2), forward, (training,), {}, 0, True)
    assert metrics["updates"] == 0 == int(state.policy.updates)
    assert metrics["critic/updates"] == 3 == int(state.roles["critic"].updates), "epochs of its own"
    assert not any(name.startswith("controller/") for name in metrics), "the policy has not moved"
    chex.assert_trees_all_equal(state.policy.params, MODEL)
    both = (policy_training(PPO, optimiser, several=True), training)
    with Compilations() as compilations:
        state, metrics = learn(state, samples, Learner(epochs=2), forward, both, {}, 0, True)
    assert metrics["updates"] == 2 and metrics["controller/kl"] > 0 and metrics["critic/updates"] == 3
    # The policy's own: the critic's is there, and what scores the policy before its updates does so after them too.
    assert [compilations.heard.count(f"jit({name})") for name in ("update", "_score")] == [1, 1]


def test_a_model_that_a_role_begins_as_is_read_once_and_never_on_resume():
    other = critic_of(tiny("plain"), 2)
    reads = []
    shapes = jax.eval_shape(lambda: other)

    def load():
        reads.append(1)
        return jax.tree.map(jnp.copy, other)

    optimiser = build(Optimiser())
    begins = NewRole("critic", lambda model: model, optimiser, load, shapes)
    like = abstract_state(MODEL, optimiser, False, others=[begins])
    assert not reads
    state = create_state(jax.tree.map(jnp.copy, MODEL), optimiser, False, one_device(), others=[begins])
    assert reads == [1]
    assert [x.shape for x in jax.tree.leaves(like)] == [x.shape for x in jax.tree.leaves(state)]
    chex.assert_trees_all_equal(state.roles["critic"].params, other)


WORTH = {"start": 0.75, "right": 1.0, "wrong": 0.0}


def test_a_critic_learns_what_states_are_worth():
    """Three of four answers begin with the token 4, which pays 1; the others begin with 7 and pay nothing."""
    optimiser = Optimiser(learning_rate=5e-3)
    training = critic_training(optimiser)
    first = [4, 4, 4, 7]
    completions = tuple(
        Completion(np.array([t, 2], np.int32), np.zeros(2, np.float32), "stop", np.ones(2, bool), np.zeros(2, np.int32))
        for t in first
    )
    rewards = np.array([[1.0, 1.0, 1.0, 0.0]])
    batch = [Group(PROBLEM, np.array([1, 2, 3], np.int32), completions, rewards[0], rewards[0])]
    algorithm = dataclasses.replace(PPO, advantage=GAE(1.0, 0.5))
    mesh = one_device()
    forward = forward_on(mesh, Layout(1, 16, 2))
    state = create_state(jax.tree.map(jnp.copy, MODEL), build(optimiser), False, mesh, others=[training.begins])
    begun = None
    for _ in range(60):
        critic = model_of(state, "critic")
        models = {"values": lambda samples, critic=critic: forward.by_sample(critic, samples, "values")}
        samples, measured = to_samples(algorithm, batch, 0, rewards, (), 2, models)
        begun = measured if begun is None else begun
        state, _ = learn(state, samples, Learner(epochs=2), forward, (training,), {}, 0)
    seen = [s.arrays["old_values"] for s in samples[0]]
    # At the start, half of the tokens, chance is all that is left, and it is all of the variance there.
    assert begun["critic/explained_variance"] == 0
    assert measured["critic/explained_variance"] == pytest.approx(0.5, abs=0.02)
    np.testing.assert_allclose([seen[0][0], seen[0][1], seen[3][1]], list(WORTH.values()), atol=0.03)
