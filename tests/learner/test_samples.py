"""What each token is worth: advantages of the whole batch, by completion and by token, on their way into packed
rows.
"""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import (
    G,
    T,
    changed,
    forward_on,
    moved,
    one_device,
    padded,
    policy_gradient,
    rollout,
    unpacked_logp,
)
from tiny import largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.advantages import GAE, GDPO, GiGPO, GroupZScore, KLInReward, ProcessSupervised, Whitened
from jaxrl_llm.algorithms.kl import K1
from jaxrl_llm.algorithms.surrogates import PPOClip
from jaxrl_llm.learner import Layout, Sample, pack, to_samples
from jaxrl_llm.learner.batch import sample_rows
from jaxrl_llm.learner.samples import (
    advantage_of,
    equal_state_fraction,
    estimate_advantages,
    estimator_bytes,
    shard_rows,
    turn_arrays,
)
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.sharding import MeshShape, make_mesh
from jaxrl_llm.types import AdvantageContext, Completion, Episode, Group, Problem, Turn

PROBLEM = Problem("1", ({"role": "user", "content": "?"},), "3", "test")
MODEL = tiny("windows")
REFERENCE = moved(MODEL, tiny("windows", 6), 0.1)
LAYOUT = Layout(2, 22, T)
ENDED = {2: "length", 7: "repetition"}
REWARDS = np.random.default_rng(3).normal(size=(3, G))


def versions(group, index, size):
    return np.full(size, 6) if group == 1 else np.where(np.arange(size) < index, 5, 7)


def made():
    """Groups of the tiny model's rollout; one was cut off, one repeated itself. Version 7 sampled all but the second
    and some first tokens.
    """
    found = []
    for p, rewards in enumerate(REWARDS):
        members = rollout()[p * G : (p + 1) * G]
        completions = tuple(
            Completion(
                s.tokens, s.arrays["sampler_logp"], ENDED.get(p * G + i, "stop"), s.mask, versions(p, i, len(s.tokens))
            )
            for i, s in enumerate(members)
        )
        found.append(Group(PROBLEM, members[0].prompt, completions, rewards, rewards))
    return found


def reference(samples):
    return forward_on(one_device(), LAYOUT, ComputeOptions()).by_sample(REFERENCE, samples)


def samples_of(algorithm, rewards=REWARDS, drop=(), score=reference, earlier=True):
    groups, measured = to_samples(algorithm, made(), 7, rewards, drop, T, {"ref_logp": score}, learn_earlier=earlier)
    return [s for group in groups for s in group], measured


def refuse(samples):
    raise AssertionError("nothing here reads the reference")


def test_an_outcome_advantage_is_one_number():
    samples, measured = samples_of(PRESETS["dr_grpo"], score=refuse)
    wanted = REWARDS - REWARDS.mean(axis=1, keepdims=True)
    np.testing.assert_allclose([advantage_of(s) for s in samples], wanted.reshape(-1), rtol=1e-5, atol=1e-6)
    assert not measured
    for number, s in enumerate(samples):
        np.testing.assert_array_equal(s.arrays["fresh"], versions(*divmod(number, G), len(s.tokens)) == 7)


def test_tokens_of_earlier_policies_are_counted_unless_they_are_not_to_be():
    counted, left_out = (samples_of(PRESETS["dr_grpo"], earlier=earlier)[0] for earlier in (True, False))
    for s, kept, present in zip(rollout(), counted, left_out, strict=True):
        assert kept.mask.tobytes() == s.mask.tobytes() and advantage_of(kept) == advantage_of(present)
        np.testing.assert_array_equal(present.mask, s.mask & present.arrays["fresh"])
    assert sum(s.mask.sum() for s in left_out) < sum(s.mask.sum() for s in counted)


@pytest.mark.parametrize(("reason", "number"), [("length", 2), ("repetition", 7)])
def test_what_ended_so_is_not_counted_where_that_is_dropped(reason, number):
    kept, dropped = (samples_of(PRESETS["dr_grpo"], drop=drop)[0] for drop in ((), (reason,)))
    for at, (one, other) in enumerate(zip(kept, dropped, strict=True)):
        assert other.mask.tolist() == ([False] * len(one.mask) if at == number else one.mask.tolist())
        assert advantage_of(one) == advantage_of(other)
    assert kept[number].mask.any()


def test_several_rewards_reach_their_estimator():
    algorithm = dataclasses.replace(PRESETS["dapo"], advantage=GDPO())
    rewards = np.random.default_rng(0).normal(size=(3, G, 2))
    samples, _ = samples_of(algorithm, rewards)
    z = (rewards - rewards.mean(axis=1, keepdims=True)) / rewards.std(axis=1, ddof=1, keepdims=True)
    total = z.sum(axis=-1)
    np.testing.assert_allclose([advantage_of(s) for s in samples], (total / total.std(ddof=1)).reshape(-1), rtol=1e-4)


def test_logps_come_back_in_the_order_of_the_samples():
    samples = rollout()
    found = reference(samples)
    wanted = np.asarray(unpacked_logp(REFERENCE, samples))
    for s, values, row in zip(samples, found, wanted, strict=True):
        np.testing.assert_allclose(values, row[: len(s.tokens)], atol=1e-5)
    spots = sample_rows(samples, LAYOUT)
    assert len(set(spots)) == len(samples) and max(m for m, _ in spots) > 0


def test_a_kl_in_the_reward_of_each_token():
    """REINFORCE++ written out: returns of R and -beta k1, whitened over the counted tokens of the batch."""
    algorithm = dataclasses.replace(PRESETS["reinforce_pp"], kl_coef=0.1)
    samples, measured = samples_of(algorithm)
    ref, returns, gaps = reference(rollout()), [], []
    for s, r, reward in zip(rollout(), ref, REWARDS.reshape(-1), strict=True):
        gap = np.where(s.mask, s.arrays["sampler_logp"] - r, 0.0)
        returns.append(reward - 0.1 * np.cumsum(gap[::-1])[::-1])
        gaps.append(gap[s.mask])
    valid = np.concatenate([x[s.mask] for x, s in zip(returns, samples, strict=True)])
    for s, x in zip(samples, returns, strict=True):
        wanted = np.where(s.mask, (x - valid.mean()) / valid.std(ddof=1), 0.0)
        np.testing.assert_allclose(advantage_of(s), wanted, rtol=1e-4, atol=1e-5)
    assert measured["kl"] == pytest.approx(np.concatenate(gaps).mean(), rel=1e-4)


def test_a_kl_in_the_reward_of_a_sequence():
    samples, _ = samples_of(dataclasses.replace(PRESETS["rloo"], kl_coef=0.1))
    gaps = [
        np.sum((s.arrays["sampler_logp"] - r)[s.mask]) for s, r in zip(rollout(), reference(rollout()), strict=True)
    ]
    rewards = REWARDS - 0.1 * np.reshape(gaps, REWARDS.shape)
    wanted = (rewards - rewards.mean(axis=1, keepdims=True)) * G / (G - 1)
    np.testing.assert_allclose([advantage_of(s) for s in samples], wanted.reshape(-1), rtol=1e-4, atol=1e-5)


def test_advantages_by_token_survive_packing():
    algorithm = PRESETS["prorl_v2"]
    samples, _ = samples_of(dataclasses.replace(algorithm, kl_coef=0.0))
    samples = [changed(s, fresh=True, advantages=advantage_of(s) * (1 + np.arange(len(s.tokens)))) for s in samples]
    packed = pack(samples, LAYOUT)
    ref = np.zeros(packed.mask.shape, np.float32)
    for (m, b), values in zip(sample_rows(samples, LAYOUT), reference(samples), strict=True):
        ref[m, b, : len(values)] = values
    wide = np.zeros((len(samples), T), np.float32)
    for row, values in zip(wide, reference(samples), strict=True):
        row[: len(values)] = values
    found, _ = jax.jit(lambda m, p: policy_gradient(m, p, algorithm, ComputeOptions()))(
        MODEL, packed.with_tokens(ref_logp=ref)
    )

    def loss(model):
        batch = PolicyBatch(padded(samples, "advantages"), padded(samples, "mask"), None, wide)
        return policy_loss(algorithm, unpacked_logp(model, samples), batch)[0]

    assert largest_difference(found, jax.grad(loss)(MODEL)) < 1e-5


def episode(words, *turns, **more):
    """A completion of these tokens (negative ones are the environment's), and turns of an end, a reward and a state."""
    tokens = np.asarray(words, np.int32)
    found = tuple(Turn(end, {}, reward=reward, state=state) for end, reward, state in turns)
    arrays = np.zeros(len(tokens), np.float32), "stop", tokens > 0, np.full(len(tokens), 7)
    return Completion(np.abs(tokens), *arrays, episode=Episode(found, **more))


def test_turns_have_their_rewards_and_the_states_in_which_they_began():
    """By the environment's name of it or else by all tokens before, in one group; what no turn gave is the last's."""
    group = (
        episode([1, -2, 3, -4, 5], (1, 0.1, "door"), (3, 0.2, "door"), (5, 0.0, "")),
        episode([9, 9, -2, 3, -4, 5], (2, 0.25, ""), (4, 0.0, "door"), (6, 1.0, "")),
        episode([9, 9, -2, 5], (2, 0.25, ""), (4, 1.0, "")),
        episode([9, 9, -3, 5], (2, 0.5, ""), (4, math.nan, "")),
    )
    rewards = np.array([[0.1 + 0.2, 2.0, 1.25, np.nan]] * 2)
    groups = [Group(PROBLEM, np.array([1]), group, row, row) for row in rewards]
    found = turn_arrays(groups, rewards, T)
    wanted = np.full((4, T), np.nan, np.float32)
    wanted[0, [0, 2, 4]], wanted[1, [1, 3, 5]], wanted[2, [1, 3]] = (0.1, 0.2, 0), (0.25, 0, 1.75), (0.25, 1)
    wanted[3, 1] = 0.5
    np.testing.assert_array_equal(found["turn_rewards"], np.tile(wanted, (2, 1)))
    states = found["states"]
    first = states[[0, 1, 2, 3], [0, 1, 1, 1]]
    assert len(set(first)) == 1, "all begin at the prompt"
    assert states[0, 2] == states[0, 4] == states[1, 5], "named by the environment"
    assert states[1, 3] == states[2, 3] != states[3, 3], "equal words, and others"
    assert len({first[0], states[0, 2], states[1, 3], states[3, 3]}) == 4
    assert not set(states[:4][~np.isnan(wanted)]) & set(states[4:][~np.isnan(wanted)]), "of one group alone"
    assert states.min() == 0 and states.max() < states.size
    assert equal_state_fraction(**found) == 1, "the later turns are three behind the door, and two after equal words"
    assert equal_state_fraction(found["turn_rewards"][:2], states[:2]) == 3 / 4
    assert math.isnan(equal_state_fraction(found["turn_rewards"][3:4], states[3:4])), "a first turn alone"


def test_a_turns_tokens_have_its_advantage():
    group = (episode([1, 1, -2, 3], (2, 0.5, "a"), (4, 0.0, "")), episode([1, -2, 3, 3], (1, 0.0, "a"), (4, 1.0, "")))
    rewards = np.array([[0.5, 1.0]])
    algorithm = dataclasses.replace(PRESETS["gigpo"], advantage=GiGPO(gamma=0.5, std=False))
    [found], _ = to_samples(
        algorithm, [Group(PROBLEM, np.array([1]), group, rewards[0], rewards[0])], 7, rewards, (), T, {}
    )
    # Returns 0.5, 0 and 0.5, 1: the first turns are alike, of the second ones the second is better by one.
    np.testing.assert_allclose(found[0].arrays["advantages"], [-0.25, -0.25, 0, -0.75])
    np.testing.assert_allclose(found[1].arrays["advantages"], [0.25, 0, 0.75, 0.75])
    assert not found[0].scalars


@pytest.mark.slow
def test_an_episode_in_three_rows_counts_once():
    """In the baseline, and in the ratio, the mean and the denominator of a sequence; rows of a pass by themselves."""
    read = {2: tuple(range(30, 37)), 5: (8, 9)}
    turns = tuple(Turn(end, {}, fork=read.get(end, ())) for end in (2, 5, 6))
    forked = dataclasses.replace(episode([4, 5, 6, -7, 8, 9]), episode=Episode(turns))
    members = (forked, episode([11, -12, 13, 14], (1, 0.0, ""), (4, 0.0, "")))
    rewards = np.array([[1.0, 0.0]])
    groups = [Group(PROBLEM, np.array([1, 2, 3], np.int32), members, rewards[0], rewards[0])]
    [centred], _ = to_samples(PRESETS["dr_grpo"], groups, 7, rewards, (), T, {})
    assert [advantage_of(one) for one in centred] == [0.5, -0.5], "the baseline is 0.5"
    algorithm = dataclasses.replace(PRESETS["gspo"], surrogate=PPOClip(0.9, 9.0))
    [samples], _ = to_samples(algorithm, groups, 7, rewards, (), T, {})
    packed = pack(samples, Layout(3, 22, T))
    assert packed.counts["policy"] == (5 + 3, 2) and packed.microbatches == 1
    rows = [
        Sample(np.asarray(given, np.int32), forked.tokens[start:stop], forked.mask[start:stop])
        for (start, given), stop in zip({0: groups[0].prompt, **read}.items(), (2, 5, 6), strict=True)
    ]

    def unpacked(model):
        whole = unpacked_logp(model, [*rows, samples[1]])
        one = jnp.concatenate([whole[0, :2], whole[1, :3], whole[2, :1], jnp.zeros(T - 6)])
        return jnp.stack([one, whole[3]])

    def loss(model):
        batch = PolicyBatch(np.array([advantage_of(s) for s in samples]), padded(samples, "mask"), old)
        return policy_loss(algorithm, unpacked(model), batch)[0]

    old = np.asarray(unpacked(REFERENCE))
    places = [b for _, b in sample_rows(samples, Layout(3, 22, T))]
    found, measured = jax.jit(lambda m, p: policy_gradient(m, p, algorithm, ComputeOptions()))(
        MODEL, packed.with_tokens(old_logp=old[np.argsort(places)][None])
    )
    value, gradient = jax.value_and_grad(loss)(MODEL)
    assert float(measured["loss"]) == pytest.approx(float(value), abs=1e-5)
    assert largest_difference(found, gradient) < 1e-5


ESTIMATORS = {
    "gae": GAE(),
    "gae whitened": GAE(whiten=True),
    "reinforce++": Whitened(),
    "steps": ProcessSupervised(),
    "kl in the reward": KLInReward(GroupZScore(), K1(), 0.1),
}


def estimated(estimator, groups, length, mesh):
    """What is estimated on a mesh of this many devices on data and fsdp, and the bytes of a device that it takes."""
    random = np.random.default_rng(0)
    rows = groups * 4
    draw = lambda *shape: random.normal(size=shape).astype(np.float32)
    given = {"values": draw(rows, length), "old_logp": draw(rows, length), "ref_logp": draw(rows, length)}
    given["step_rewards"] = np.where(random.random((rows, length)) < 0.1, draw(rows, length), np.nan)
    given |= {"bootstrap": draw(rows), "mask": np.arange(length) < random.integers(3, length, (rows, 1))}
    context = AdvantageContext(**{name: given[name] for name in estimator.needs})
    rewards = draw(groups, 4)
    rewards[1, 2] = np.nan
    with jax.set_mesh(make_mesh(MeshShape(*mesh), jax.devices()[: math.prod(mesh)])):
        laid = shard_rows(context)
        used = estimate_advantages.lower(estimator, rewards, laid).compile().memory_analysis()
        found = jax.device_get(estimate_advantages(estimator, rewards, laid))
    return found, used.argument_size_in_bytes + used.output_size_in_bytes + used.temp_size_in_bytes


@pytest.mark.slow(but=("gae whitened", "kl in the reward"))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_are_estimated_by_rows_on_the_devices_that_divide_a_batch(name):
    estimator = ESTIMATORS[name]
    whole, alone = estimated(estimator, 16, 256, (1, 1, 1))
    assert alone < 1.15 * estimator_bytes(estimator, 64, 256)
    for mesh, parts in (((2, 2, 2), 4), ((8, 1, 1), 8)):
        divided, each = estimated(estimator, 16, 256, mesh)
        chex.assert_trees_all_close(divided, whole, rtol=0, atol=2e-6)
        assert each < 1.1 * alone / parts
    odd = [estimated(estimator, 3, 64, mesh)[0] for mesh in ((8, 1, 1), (1, 1, 1))]
    chex.assert_trees_all_close(*odd, rtol=0, atol=2e-6)


def test_where_nothing_is_read_by_token_nothing_is_counted():
    assert estimator_bytes(GDPO(), 8192, 8192) == 0 == estimator_bytes(GroupZScore(), 8192, 8192)
    assert estimator_bytes(GAE(), 8192, 8192) == 8192 * 8192 * 25
