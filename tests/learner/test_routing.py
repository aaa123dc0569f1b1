"""Routing replay: with the sampler's experts the learner computes what the sampler did, whatever its router says."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util
from learner.rollouts import TEMPERATURE, G, T, forward_on, one_device, policy_gradient
from tiny import largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout, Learner
from jaxrl_llm.learner.forward import EXPERTS_KNOWN, EXPERTS_REPLAYED, expert_load, sampled_routes, with_replayed_routes
from jaxrl_llm.learner.platform import compute_for
from jaxrl_llm.learner.samples import to_samples
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import Decoder, to_parameters
from jaxrl_llm.models.experts import EXPERTS
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.types import Group, Problem

PROMPTS = ([1, 2, 3], [7] * 9)
LAYOUT = Layout(2, 40, T)
FORWARD = forward_on(one_device(), LAYOUT, ComputeOptions(remat="full"))
LOSS = PRESETS["dapo"]


def with_router(model, change):
    """The model with routers [L, D, E] that are a function of its own."""
    flat = traverse_util.flatten_dict(to_parameters(model), sep=".")
    flat["blocks.experts.router"] = change(flat["blocks.experts.router"])
    return Decoder(model.config, traverse_util.unflatten_dict(flat, sep="."))


def noise(size):
    return lambda router: router + size * jax.random.normal(jax.random.key(3), router.shape)


# Experts in pairs of equal scores, and an odd number of them for each token: rounding alone decides which are taken.
MODEL = with_router(tiny("experts"), lambda router: router.at[..., 1::2].set(router[..., ::2]))
OTHER = with_router(MODEL, noise(1e-7))


@functools.cache
def sampled():
    """Groups of completions of the tiny model with experts, and its samples."""
    engine = Engine(MODEL, slots=8, max_length=20, chunk=4, group=G)
    prompts = [p for p in PROMPTS for _ in range(G)]
    rules = Sampling(TEMPERATURE, max_new_tokens=T, stop_ids=(3, 5, 9))
    done = engine.generate(MODEL, prompts, range(len(prompts)), rules)
    problem = Problem("p", (), "", "t")
    groups = [
        Group(problem, np.asarray(p, np.int32), tuple(done[i * G : (i + 1) * G]), np.zeros(G), np.zeros(G))
        for i, p in enumerate(PROMPTS)
    ]
    rewards = np.random.default_rng(0).normal(size=(len(PROMPTS), G))
    samples, _ = to_samples(PRESETS["grpo"], groups, 0, rewards, (), T, {})
    return done, [sample for group in samples for sample in group]


@functools.cache
def packed(mode):
    """The samples with the experts to take; those of R2 are of the model that is not the sampler's."""
    return with_replayed_routes(FORWARD.packed(sampled()[1], ("policy",)), mode, OTHER, FORWARD.compute)


@functools.partial(jax.jit, static_argnums=2)
def gradient(model, given, algorithm=LOSS):
    """Gradient and metrics of an update."""
    return policy_gradient(model, given, algorithm)


def gap(model, given):
    """The largest distance of the model's log-probabilities from the sampler's, nats."""
    logp = FORWARD.score(model, given)
    return float(jnp.max(jnp.abs(jnp.where(given.mask, logp - given.by_token["sampler_logp"], 0))))


def test_a_sample_has_the_experts_of_each_token_that_is_read():
    done, samples = sampled()
    for completion, sample in zip(done, samples, strict=True):
        whole = np.concatenate([completion.prompt_extras[EXPERTS], completion.extras[EXPERTS]])
        read = np.concatenate([sample.prompt_arrays[EXPERTS], sample.arrays[EXPERTS]])
        np.testing.assert_array_equal(read[:-1], whole[1:])
        known = np.concatenate([sample.prompt_arrays[EXPERTS_KNOWN], sample.arrays[EXPERTS_KNOWN]])
        assert known[:-1].all() and not known[-1]
    assert sampled_routes(dataclasses.replace(done[0], extras={})) == ({}, {})


@pytest.mark.slow
def test_noise_in_the_router_is_rounding_once_the_samplers_experts_are_taken():
    """The two models differ by 1e-7 in their routers alone, and disagree on experts where scores are equal."""
    assert gap(MODEL, packed("off")) < 1e-5
    assert gap(OTHER, packed("off")) > 0.1
    assert gap(OTHER, packed("R3")) < 1e-5
    assert gap(MODEL, packed("R3")) < 1e-5


def test_the_experts_of_the_old_policy_make_the_ratio_one_but_leave_the_samplers_gap():
    """R2 takes the experts that the policy chose before its first update."""
    old, moved = (FORWARD.score(model, packed("R2")) for model in (OTHER, with_router(OTHER, noise(1e-7))))
    mask = packed("R2").mask
    assert float(jnp.max(jnp.abs(jnp.where(mask, old - moved, 0)))) < 1e-5
    np.testing.assert_array_equal(old, FORWARD.score(OTHER, packed("off")))
    assert gap(OTHER, packed("R2")) > 0.1


@pytest.mark.slow
def test_updates_replay_too_and_the_router_learns():
    """With weights of experts from the live router, under rematerialisation."""
    wanted, metrics = gradient(MODEL, packed("R3"))
    router = to_parameters(wanted)["blocks"]["experts"]["router"]
    assert float(jnp.abs(router).max()) > 1e-4
    assert float(metrics["sampler/rerouted_fraction"]) == 0
    found, metrics = gradient(OTHER, packed("R3"))
    assert largest_difference(found, wanted) < 1e-4
    assert float(metrics["sampler/logp_abs_diff_max"]) < 1e-5
    assert float(metrics["sampler/rerouted_fraction"]) > 0.2  # what it would choose is watched, replayed or not
    astray, metrics = gradient(OTHER, packed("off"))
    assert largest_difference(astray, wanted) > 0.1
    assert float(metrics["sampler/rerouted_logp_abs_diff_mean"]) > float(metrics["sampler/logp_abs_diff_mean"]) > 0.01


def test_what_was_not_recorded_is_not_replayed():
    """Texts beside completions, for one: the router chooses their experts."""
    bare = [dataclasses.replace(s, arrays={n: x for n, x in s.arrays.items() if n not in (EXPERTS, EXPERTS_KNOWN)},
                                prompt_arrays={}) for s in sampled()[1][:2]]  # fmt: skip
    rows = with_replayed_routes(FORWARD.packed([*bare, *sampled()[1][2:]], ("policy",)), "R3", MODEL, FORWARD.compute)
    taken = np.asarray(rows.by_column[EXPERTS_REPLAYED])
    unknown = (taken < 0).all(axis=(-1, -2))
    tokens = sum(len(s.tokens) for s in bare)
    assert tokens < (unknown & (rows.rows.group > 0)).sum() <= tokens + len(bare) * 3 + len(sampled()[1])
    without = FORWARD.packed(bare, ("policy",))
    assert with_replayed_routes(without, "R3", MODEL, FORWARD.compute) is without


def test_load_is_that_of_a_count_by_hand():
    found = expert_load(sampled()[1], MODEL.config.experts)
    taken = [
        np.concatenate([s.arrays[EXPERTS][s.arrays[EXPERTS_KNOWN]] for s in sampled()[1]])[:, layer] for layer in (0, 1)
    ]
    shares = [[np.mean(layer == e) for e in range(6)] for layer in taken]
    assert found["experts/busiest_share"] == pytest.approx(np.mean([max(one) for one in shares]))
    assert found["experts/dead_fraction"] == np.mean([[share == 0 for share in one] for one in shares])
    entropy = [-sum(p * np.log(p) for p in one if p) / np.log(6) for one in shares]
    assert found["experts/load_entropy"] == pytest.approx(np.mean(entropy))
    assert found["experts/bytes_per_token"] == 2 * 3
    assert expert_load([], MODEL.config.experts) == {}


def test_a_dense_model_has_no_experts_to_replay():
    with pytest.raises(InputError, match="routing_replay 'R3' needs a model with experts"):
        compute_for(dataclasses.replace(Learner(), routing_replay="R3"), tiny("plain").config, "cpu")
