"""Advantages of turns: published numbers, and loops over episodes, turns and tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import FIXTURE, NUMBERS

from jaxrl_llm.algorithms import PRESETS, AdvantageContext
from jaxrl_llm.algorithms.advantages import MTGRPO, GiGPO

T = 12
TOKENS = {"float32": {"rtol": 2e-5, "atol": 2e-7}, "float64": {"rtol": 0, "atol": 1e-7}}


@functools.partial(jax.jit, static_argnums=0)
def run(estimator, rewards, context):
    return estimator(rewards, context)


def context_of(episodes, dtype=np.float32, width=T):
    """The context of episodes: lists of turns (tokens of the environment, of the policy, reward, state)."""
    shape = (len(episodes), width)
    mask, rewards, states = np.zeros(shape, bool), np.full(shape, np.nan, dtype), np.zeros(shape, np.int32)
    names = []
    for row, turns in enumerate(episodes):
        at = 0
        for read, sampled, reward, state in turns:
            names = names if state in names else [*names, state]
            mask[row, at + read : at + read + sampled] = True
            at += read + sampled
            rewards[row, at - 1], states[row, at - 1] = reward, names.index(state)
    return AdvantageContext(mask, turn_rewards=rewards, states=states)


def z_score(values, value, std=True):
    """The z-score of one of the values (sample deviation, 1e-6); 0 if they are equal."""
    if len(values) < 2 or max(values) == min(values):
        return 0.0
    return (value - np.mean(values)) / ((np.std(values, ddof=1) + 1e-6) if std else 1.0)


def by_loop(estimator, groups):
    """Advantages [B, T] of groups of episodes, by turn and token; rewards are sums over turns, None is unscorable."""
    rows = []
    for group in groups:
        scored = [turns for turns in group if turns is not None]
        totals = [sum(turn[2] for turn in turns) for turns in scored]
        for turns in group:
            row, at = np.zeros(T), 0
            for number, (read, sampled, _, _) in enumerate(turns or ()):
                row[at + read : at + read + sampled] = credit(estimator, scored, totals, turns, number)
                at += read + sampled
            rows.append(row)
    return np.stack(rows)


def credit(estimator, scored, totals, turns, number):
    total = sum(turn[2] for turn in turns)
    if isinstance(estimator, GiGPO):
        worth = lambda turns, k: sum(estimator.gamma ** (j - k) * turns[j][2] for j in range(k, len(turns)))
        alike = [worth(one, k) for one in scored for k in range(len(one)) if one[k][3] == turns[number][3]]
        of_state = z_score(alike, worth(turns, number), estimator.std)
        return z_score(totals, total, estimator.std) + estimator.omega * of_state
    if len(turns) == 1:
        return z_score(totals, total)
    found = z_score([one[-1][2] for one in scored], turns[-1][2])
    if number < len(turns) - 1:
        others = [one[number][2] if number < len(one) - 1 else 0.0 for one in scored]
        found += estimator.coef * z_score(others, turns[number][2])
    return found


def test_gigpo_has_the_published_numbers(dtype):
    numbers = NUMBERS["GIGPO"]
    rewards = [[0, 0, 1], [0, 0], [0, 1]]
    episodes = [
        [(0, 1, reward, state) for reward, state in zip(*one, strict=True)]
        for one in zip(rewards, numbers["states"], strict=True)
    ]
    context = context_of(episodes, dtype, 3)
    outcome = jnp.asarray(FIXTURE["R"], dtype)[None]
    for std, key in ((False, "paper_mean_A"), (True, "paper_std_A")):
        found = run(GiGPO(gamma=0.5, std=std), outcome, context)
        assert found.dtype == dtype
        for row, wanted in zip(np.asarray(found), numbers[key], strict=True):
            np.testing.assert_allclose(row, [*wanted, *[0] * (3 - len(wanted))], **TOKENS[dtype.name])
    # An episode counts once in the mean of A_E, however many turns it has.
    assert numbers["paper_mean_AE"][0] == pytest.approx(1 / 3) != numbers["code_mean_cross_AE"][0]


def test_mt_grpo_has_the_published_numbers(dtype):
    numbers = NUMBERS["MTGRPO"]
    lengths = FIXTURE["mask"].sum(axis=1).astype(int)
    episodes = [
        [(0, first, turn, "a"), (0, length - first, outcome, "b")]
        for first, length, turn, outcome in zip(
            numbers["first_turn_tokens"], lengths, numbers["R_turn"], numbers["R_outcome"], strict=True
        )
    ]
    rewards = jnp.asarray([np.add(numbers["R_turn"], numbers["R_outcome"])], dtype)
    found = run(MTGRPO(eps=0.0), rewards, context_of(episodes, dtype, 4))
    assert found.dtype == dtype
    for row, wanted in zip(np.asarray(found), numbers["A"], strict=True):
        np.testing.assert_allclose(row, [*wanted, *[0] * (4 - len(wanted))], **TOKENS[dtype.name])


def test_an_episode_of_one_turn_has_the_z_score_of_its_whole_reward():
    """MT-GRPO where some episodes call nothing: the published numbers of the sums, 1.091, -0.873 and -0.218."""
    wanted = [row[0] for row in NUMBERS["MTGRPO"]["cae"]]
    for single in range(3):
        episodes = [[(0, 2, turn, "a"), (2, 2, 1.0, "b")] for turn in (1.0, -0.5, 0.0)]
        total = [2.0, 0.5, 1.0]
        episodes[single] = [(0, 3, total[single], "a")]
        found = np.asarray(run(MTGRPO(eps=0.0), np.float32([total]), context_of(episodes)))
        np.testing.assert_allclose(found[single, :3], wanted[single], rtol=1e-5)


REWARDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0])
TURN = st.tuples(st.integers(1, 2), st.integers(1, 2), REWARDS, st.sampled_from("abc"))
TURNS = st.lists(TURN, min_size=1, max_size=3)
GROUPS = st.lists(st.lists(st.tuples(TURNS, st.booleans()), min_size=3, max_size=3), min_size=2, max_size=2)


@settings(max_examples=40, deadline=None)
@given(GROUPS)
def test_turns_are_credited_as_by_a_loop(groups):
    """Of groups of episodes, some unscorable; equal names of states in two groups are two states."""
    groups = [[([(0, *turns[0][1:]), *turns[1:]], scored) for turns, scored in group] for group in groups]
    known = [[turns if scored else None for turns, scored in group] for group in groups]
    apart = [
        [(read, sampled, reward, (place, state)) for read, sampled, reward, state in turns]
        for place, group in enumerate(groups)
        for turns, _ in group
    ]
    context = context_of(apart)
    rewards = np.float32([[sum(turn[2] for turn in one) if one else np.nan for one in group] for group in known])
    for estimator in (GiGPO(omega=0.7, gamma=0.5), GiGPO(std=False), MTGRPO(0.5)):
        wanted = by_loop(estimator, known)
        found = run(estimator, rewards, context)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        ids = run(estimator, rewards.reshape(-1), context._replace(group_ids=np.repeat([4, 2], 3)))
        np.testing.assert_allclose(ids, wanted, rtol=1e-4, atol=1e-5)
        # Completions that the loss leaves out count in the others' statistics.
        others = (np.arange(6) != 1)[:, None]
        without = run(estimator, rewards, context._replace(mask=context.mask & others))
        np.testing.assert_array_equal(without, np.where(others, found, 0))


@pytest.mark.parametrize("estimator", [GiGPO(gamma=1.0), GiGPO(std=False), MTGRPO()])
def test_equal_rewards_give_exactly_zero(estimator):
    """Though the mean of seven equal numbers need not equal them."""
    for reward in np.arange(1, 40, dtype=np.float32) / 100:
        episodes = [[(0, 2, reward, "a"), (1, 1, 2 * reward, "b"), (1, 2, reward, "c")]] * 7
        rewards = np.full((1, 7), 4 * reward, np.float32)
        assert not np.any(run(estimator, rewards, context_of(episodes))), reward


@pytest.mark.parametrize(("estimator", "field"), [
    (GiGPO(), "mask"), (GiGPO(), "turn_rewards"), (GiGPO(), "states"), (MTGRPO(), "mask"), (MTGRPO(), "turn_rewards"),
])  # fmt: skip
def test_an_estimator_names_what_is_missing_or_of_another_shape(estimator, field):
    whole = context_of([[(0, 2, 0.1, "a")]] * 3)
    for bad in (None, np.ones((3, T + 1), np.float32)):
        context = whole._replace(**{field: bad})
        with pytest.raises(ValueError, match=rf"context\.({field}|turn_rewards)"):
            estimator(np.ones((1, 3), np.float32), context)


@pytest.mark.parametrize("estimator", [GiGPO(), MTGRPO()])
def test_a_kl_in_the_reward_is_refused(estimator):
    with pytest.raises(ValueError, match="has no one reward to put a KL in"):
        dataclasses.replace(PRESETS["rloo"], advantage=estimator, kl_coef=0.1)
