"""The rule of branches by the paper's own loop, what members of a group share, and the advantage of that."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import NUMBERS

from jaxrl_llm.algorithms import PRESETS, PolicyBatch, policy_loss
from jaxrl_llm.recipes import ARPO
from jaxrl_llm.rollout import Branching
from jaxrl_llm.rollout.episodes import branch_points, common_lengths, entropy_rise, shared_credit
from jaxrl_llm.types import Completion, Episode, Turn


def test_the_rule_is_that_of_the_paper():
    known = NUMBERS["ARPO_branch"]
    rule = Branching()
    np.testing.assert_allclose([rule.probability(rise) for rise in known["dH"]], known["P"])
    assert [rule.branches_at(rise) for rise in known["dH"]] == known["branch_tau0p5"]
    assert ARPO.branch == rule and rule.whole_of(16) == 8 and rule.credit == "soft"


def test_entropies_are_compared_over_the_first_tokens_that_both_turns_have():
    entropy = np.float32([1.0, 2.0, 4.0, 0.0, 0.0, 8.0, 16.0, 0.0, 3.0])
    mask = np.array([1, 1, 1, 0, 0, 1, 1, 0, 1], bool)
    whole = Completion(np.zeros(9, np.int32), entropy, "stop", mask, np.zeros(9), {"entropy": entropy})

    def rise(count, tokens):
        cut = dataclasses.replace(whole, tokens=whole.tokens[:count], mask=mask[:count])
        return entropy_rise(dataclasses.replace(cut, extras={"entropy": entropy[:count]}), tokens, 100)

    for count, tokens, wanted in ((3, 2, 0), (7, 1, 8 - 1), (7, 2, 24 - 3), (7, 20, 24 - 3), (9, 20, 3 - 1)):
        assert rise(count, tokens) == pytest.approx(wanted / math.log(100))


def episode(rises, over=True):
    turns = tuple(Turn(9 * i + 9, {}, entropy_rise=rise) for i, rise in enumerate(rises))
    return Episode(turns, "completed" if over else "")


def in_step(stories, first, rule):
    """All paths side by side, an answer at a time: the same members by the paper's own loop."""
    active = [(i, 0) for i in range(first)]
    found = [None] * first
    for turn in range(1, 9):
        born = []
        for member, begun in active:
            if (
                begun < turn < len(stories[member])
                and rule.branches_at(stories[member][turn])
                and len(found) < len(stories)
            ):
                found.append((member, turn))
                born.append((len(found) - 1, turn))
        active += born
    return found + [None] * (len(stories) - len(found))


@pytest.mark.parametrize("seed", range(40))
def test_members_begin_where_the_papers_loop_begins_them_whatever_is_known_first(seed):
    random = np.random.default_rng(seed)
    rule = Branching(whole=int(random.integers(1, 5)))
    size = 8
    # A branch has at least one turn more than it begins with, and here all have the turns of the longest.
    stories = [[0.0, *random.normal(-0.3, 1, random.integers(0, 4))] for _ in range(size)]
    while True:
        wanted = in_step(stories, rule.whole_of(size), rule)
        short = [i for i, point in enumerate(wanted) if point and len(stories[i]) <= point[1]]
        if not short:
            break
        stories[short[0]] += [float(x) for x in random.normal(-0.3, 1, wanted[short[0]][1])]
    assert branch_points([episode(story) for story in stories], rule) == wanted
    known = [0] * size
    begun = rule.whole_of(size)
    while begun < size:
        part = [episode(story[:count], count == len(story)) for story, count in zip(stories, known, strict=True)]
        part = [one if known[i] else None for i, one in enumerate(part)]
        found = branch_points(part, rule)
        assert found == wanted[: len(found)] and len(found) >= begun, "what is decided stays"
        begun = len(found)
        going = [i for i in range(begun) if known[i] < len(stories[i])]
        assert going or begun == size, "once all have ended, all are decided"
        if going:
            known[random.choice(going)] += 1


def test_lengths_that_members_share_follow_their_ancestors():
    def member(tokens, parent=None, shared=0):
        ids = np.asarray(tokens, np.int32)
        mask = np.ones(len(ids), bool)
        return Completion(ids, mask, "stop", mask, ids, episode=Episode(end="completed", parent=parent, shared=shared))

    members = [
        member([1, 2, 3, 4, 5]),
        member([1, 2, 9, 9, 9]),
        member([1, 2, 3, 6], 0, 3),
        member([1, 2, 3, 6, 7, 8], 2, 4),
        member([1, 2, 3, 7], 3, 2),
        member([1, 5], 1, 2),
    ]
    common = common_lengths(members)
    wanted = [
        [5, 0, 3, 3, 2, 0],
        [0, 5, 0, 0, 0, 1],
        [3, 0, 4, 4, 2, 0],
        [3, 0, 4, 6, 2, 0],
        [2, 0, 2, 2, 4, 0],
        [0, 1, 0, 0, 0, 2],
    ]
    assert common.tolist() == wanted
    random = np.random.default_rng(0)
    own = [np.float32(random.normal(size=len(one.tokens))) for one in members]
    for i, found in enumerate(shared_credit(own, common)):
        for t, x in enumerate(found):
            assert x == pytest.approx(np.mean([own[j][t] for j in range(6) if common[i, j] > t]), rel=1e-5)


@pytest.mark.slow
def test_hard_credit_is_the_mean_of_those_who_share_and_moves_the_prefix_as_the_soft_one_does():
    known = NUMBERS["ARPO_adv"]
    own = np.asarray(PRESETS["grpo"].advantage(np.float32([known["R"]])))[0]
    np.testing.assert_allclose(own, known["A_ddof1"], atol=1e-5)
    common = 3 * np.eye(4, dtype=int)
    common[0, 1] = common[1, 0] = 1
    soft = np.repeat(own[:, None], 3, 1)
    hard = np.stack(shared_credit(list(soft), common))
    np.testing.assert_allclose(hard[:2, 0], known["hard_shared_prefix_ddof1"], atol=1e-5)
    np.testing.assert_array_equal(hard[:, 1:], soft[:, 1:])
    np.testing.assert_array_equal(hard[2:], soft[2:])

    @jax.grad
    def slope(logp, advantages):
        return policy_loss(ARPO.algorithm, logp, PolicyBatch(advantages, np.ones((4, 3), bool)))[0]

    logp = jnp.full((4, 3), -1.0)
    for advantages, name in ((soft, "soft_prefix_grad_sum"), (hard, "hard_prefix_grad_sum")):
        assert float(slope(logp, advantages)[:2, 0].sum()) == pytest.approx(NUMBERS["ARPO_soft_equiv"][name], abs=1e-6)
