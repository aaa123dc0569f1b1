"""What each loss does in expectation, against the exact objective: unbiased where so said, else biased as derived.

Every sequence (every group of sequences) of a three-token policy is run through ``Algorithm.advantage`` and
``policy_loss`` in float64, weighted by its probability. Losses descend: their gradient is minus the objective's.
"""

import dataclasses
import math

import jax
import numpy as np
import pytest
from algorithms import enumeration as exact
from algorithms.enumeration import Drawn, expected, grow, probability, reached, slope, worth

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.algorithms.advantages import GAE, Estimator, GroupMean, GroupZScore, LeaveOneOut
from jaxrl_llm.algorithms.kl import K1, K2, K3, K3Plus, UnbiasedK3
from jaxrl_llm.algorithms.ratios import Sequence, SequenceToken, Token, TruncatedIS
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, SequenceSum, TokenMean
from jaxrl_llm.algorithms.surrogates import (
    CISPO,
    SAPO,
    Likelihood,
    MiniRL,
    MirrorDescent,
    PenaltyKL,
    PPOClip,
    Unclipped,
)

WORD, PAIR, TRIPLE, RAGGED = grow(1), grow(2), grow(3), grow(3, stop=2)
LENGTHS = RAGGED.mask.sum(axis=1)
BASELINE, BETA = 0.7, 0.3


@dataclasses.dataclass(frozen=True)
class Minus(Estimator):
    """Rewards less a constant baseline."""

    baseline: float = BASELINE

    def __call__(self, rewards, context=None):
        return rewards - self.baseline


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def drawn(tree, seed=0, **given):
    """The live policy and three others, and rewards and values without any order."""
    draw = np.random.default_rng(seed)
    nodes = tree.visits.shape[1]
    live, sampler, old, ref = 0.8 * draw.normal(size=(4, nodes, 3))
    return live, Drawn(sampler, old, ref, draw.normal(size=len(tree.tokens)), draw.normal(size=nodes))._replace(**given)


def on_policy(tree, seed=0, **given):
    """The same, where the live policy is the old one and the sampler."""
    live, data = drawn(tree, seed, **given)
    return live, data._replace(sampler=live, old=live)


def from_old(tree, seed=0, **given):
    """The same, where the old policy is the sampler, and the live one has moved."""
    live, data = drawn(tree, seed, **given)
    return live, data._replace(sampler=data.old)


def reward_slope(tree, live, rewards):
    """Gradient [N, 3] of the expected reward."""
    found = slope(exact.mean_reward, live, tree, rewards)
    assert np.abs(found).max() > 0.01
    return found


def ascent(*args, **kwargs):
    """What the loss climbs in expectation, [N, 3]."""
    return -expected(*args, **kwargs)[1]


def same(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-12)


def apart(found, wanted):
    assert np.abs(found - wanted).max() > 0.01


def cosine(x, y):
    return float(np.sum(x * y) / np.linalg.norm(x) / np.linalg.norm(y))


def of(surrogate=Likelihood(), **changes):
    """REINFORCE with a constant baseline, and changes."""
    return dataclasses.replace(Algorithm(Minus(), Token(), surrogate, SequenceSum()), **changes)


@pytest.mark.slow(but="up to three")
@pytest.mark.parametrize("tree", [PAIR, TRIPLE, RAGGED], ids=["two tokens", "three", "up to three"])
def test_reinforce_is_unbiased_with_a_constant_baseline(tree):
    live, data = on_policy(tree)
    same(ascent(of(), tree, live, data), reward_slope(tree, live, data.rewards))


@pytest.mark.slow(but="3")
@pytest.mark.parametrize("size", [2, 3])
def test_leaving_oneself_out_is_unbiased_and_counting_oneself_shrinks(size):
    live, data = on_policy(PAIR)
    wanted = reward_slope(PAIR, live, data.rewards)
    same(ascent(of(advantage=LeaveOneOut()), PAIR, live, data, size), wanted)
    same(ascent(of(advantage=GroupMean()), PAIR, live, data, size), (1 - 1 / size) * wanted)


SURROGATES = [Unclipped(), PPOClip(dual=3.0), CISPO(), SAPO(0.7, 1.3), MirrorDescent(0.4), MiniRL(), PenaltyKL()]


@pytest.mark.slow(but=("PPOClip", "SAPO", "PenaltyKL"))
@pytest.mark.parametrize("surrogate", SURROGATES, ids=lambda s: type(s).__name__)
def test_at_the_old_policy_every_surrogate_is_reinforce(surrogate):
    live, data = on_policy(PAIR)
    algorithm = of(surrogate, kl_coef=BETA if surrogate.reads_kl_coef else 0.0)
    same(ascent(algorithm, PAIR, live, data), reward_slope(PAIR, live, data.rewards))


LOCAL = {
    "Unclipped": (of(Unclipped()), from_old),
    "CISPO without bounds": (of(CISPO(math.inf)), from_old),
    "MiniRL without bounds": (of(MiniRL(1.0, math.inf, math.inf)), drawn),
    "anchored to the sampler": (of(Unclipped(), ratio=Token("sampler")), drawn),
    "corrected by token": (of(Unclipped(), correction=TruncatedIS(math.inf, "token")), drawn),
}


@pytest.mark.slow(but=("MiniRL without bounds", "corrected by token"))
@pytest.mark.parametrize("name", LOCAL)
def test_a_token_ratio_climbs_the_local_objective_of_the_policy_that_sampled(name):
    """Not the expected reward: prefixes, and what follows a token, stay the sampler's (Kakade and Langford 2002)."""
    algorithm, case = LOCAL[name]
    live, data = case(PAIR)
    state, action = worth(data.sampler, PAIR, data.rewards)
    wanted = slope(exact.local_objective, live, reached(data.sampler, PAIR), action - state[:, None])
    found = ascent(algorithm, PAIR, live, data)
    same(found, wanted)
    apart(found, reward_slope(PAIR, live, data.rewards))


def test_a_token_ratio_is_unbiased_off_policy_for_a_single_token():
    live, data = from_old(WORD)
    same(ascent(of(Unclipped()), WORD, live, data), reward_slope(WORD, live, data.rewards))


@pytest.mark.parametrize("advantage, size", [(Minus(), 1), (LeaveOneOut(), 2)], ids=["constant", "leave one out"])
def test_the_samplers_gap_is_undone_exactly_by_the_product_over_a_sequence(advantage, size):
    live, data = drawn(PAIR)
    corrected = lambda level: of(Unclipped(), advantage=advantage, correction=TruncatedIS(math.inf, level))
    first, wanted = data._replace(old=live), reward_slope(PAIR, live, data.rewards)
    same(ascent(corrected("sequence"), PAIR, live, first, size), wanted)
    for level in ("token", "geometric"):
        apart(ascent(corrected(level), PAIR, live, first, size), wanted)
    # Later in the batch too: as if the old policy had sampled.
    later = ascent(of(Unclipped(), advantage=advantage), PAIR, live, data._replace(sampler=data.old), size)
    same(ascent(corrected("sequence"), PAIR, live, data, size), later)


def test_mirror_descent_rests_at_the_old_policy_tilted_by_the_reward():
    """With A = R - tau log Z, ``old exp(R / tau) / Z`` has loss 0 and no gradient (arXiv 2501.12599, eq. 2)."""
    tau, (_, data) = 0.6, from_old(PAIR)
    weights = probability(data.old, PAIR) * np.exp(data.rewards / tau)
    takes = PAIR.mask & (PAIR.nodes == np.arange(4)[:, None, None, None]) & (PAIR.tokens == np.arange(3)[:, None, None])
    tilted = np.log(np.einsum("s,nvst->nv", weights, takes))
    algorithm = of(MirrorDescent(tau), advantage=Minus(tau * math.log(weights.sum())))
    value, gradient = expected(algorithm, PAIR, tilted, data)
    same(value, 0)
    same(gradient, 0)
    assert expected(algorithm, PAIR, data.old, data)[0] > 0.1


def penalised(tree, live, data):
    """Gradient of the expected reward less the KL of whole sequences."""
    return reward_slope(tree, live, data.rewards) - BETA * slope(exact.sequence_kl, live, tree, data.ref)


def in_reward(estimator, advantage):
    return of(advantage=advantage, kl=estimator, kl_in="reward", kl_coef=BETA)


def test_k1_in_the_reward_of_a_sequence_is_the_sequence_kl():
    live, data = on_policy(RAGGED)
    same(ascent(in_reward(K1(), LeaveOneOut()), RAGGED, live, data, 2), penalised(RAGGED, live, data))


def test_k1_in_the_reward_of_each_token_is_the_sequence_kl():
    """By returns less any baseline of the prefix; with a shorter trace, only where the critic is exact."""
    live, data = on_policy(RAGGED)
    wanted = penalised(RAGGED, live, data)
    full, half = (in_reward(K1(), GAE(1.0, lam)) for lam in (1.0, 0.5))
    same(ascent(full, RAGGED, live, data), wanted)
    apart(ascent(half, RAGGED, live, data), wanted)
    costs = np.where(RAGGED.mask, exact.token_logp(live, RAGGED) - exact.token_logp(data.ref, RAGGED), 0)
    to_come = np.flip(np.cumsum(np.flip(costs, 1), axis=1), 1)
    critic, _ = worth(live, RAGGED, data.rewards[:, None] - BETA * to_come)
    same(ascent(half, RAGGED, live, data._replace(values=critic)), wanted)


def test_k3_in_the_reward_misses_the_slope_that_only_a_loss_would_give_it():
    """As a value it is as good as k1, but the gradient of KL(reference || policy) at fixed prefixes is left out."""
    live, data = on_policy(RAGGED)
    missed = slope(exact.held_kl_from, live, reached(live, RAGGED), data.ref)
    found = ascent(in_reward(K3(), LeaveOneOut()), RAGGED, live, data, 2)
    same(found, penalised(RAGGED, live, data) + BETA * missed)


def kl_only(estimator, **changes):
    """The KL in the loss, and nothing else: with ``pays_nothing``."""
    return of(advantage=Minus(0.0), kl=estimator, kl_coef=1.0, **changes)


def pays_nothing(tree, data):
    return data._replace(rewards=np.zeros(len(tree.tokens)))


@pytest.mark.slow(but=("K1", "K2", "UnbiasedK3"))
@pytest.mark.parametrize("estimator", [K1(), K2(), K3(), K3Plus(), UnbiasedK3()], ids=lambda k: type(k).__name__)
def test_a_kl_in_the_loss_on_policy(estimator):
    """The table of ``kl.py``: all but k2 have the value of KL(policy || reference), not all its gradient."""
    live, data = on_policy(RAGGED)
    prefixes = reached(live, RAGGED)
    value, gradient = expected(kl_only(estimator), RAGGED, live, pays_nothing(RAGGED, data))
    wanted = slope(exact.held_kl, live, prefixes, data.ref)
    forward = slope(exact.held_kl_from, live, prefixes, data.ref)
    apart(forward, wanted)
    same(gradient, {K1: 0, K3: forward}.get(type(estimator), wanted))
    (apart if isinstance(estimator, K2) else same)(value, exact.sequence_kl(live, RAGGED, data.ref))


@pytest.mark.slow(but="sampler-drawn")
@pytest.mark.parametrize("anchor, case", [("old", from_old), ("sampler", drawn)])
def test_a_kl_in_the_loss_off_policy_needs_the_ratio(anchor, case):
    live, data = case(PAIR)
    data, prefixes = pays_nothing(PAIR, data), reached(data.sampler, PAIR)
    value, gradient = expected(kl_only(UnbiasedK3(), ratio=Token(anchor)), PAIR, live, data)
    wanted = slope(exact.held_kl, live, prefixes, data.ref)
    same(value, exact.held_kl(live, prefixes, data.ref))
    same(gradient, wanted)
    for estimator in (K2(), K3()):
        apart(expected(kl_only(estimator), PAIR, live, data)[1], wanted)


def test_a_kl_in_the_loss_misses_what_the_prefixes_do_to_the_sequence_kl():
    """On-policy, the slope of the prefixes' probabilities; off-policy, the samples also count other prefixes."""
    live, data = from_old(PAIR, seed=1)
    data, before, now = pays_nothing(PAIR, data), reached(data.old, PAIR), reached(live, PAIR)
    whole = slope(exact.sequence_kl, live, PAIR, data.ref)
    through_prefixes = slope(exact.mean_at_nodes, live, PAIR, exact.node_kl(live, data.ref))
    other_prefixes = slope(exact.held_kl, live, now - before, data.ref)
    first = whole - expected(kl_only(K2()), PAIR, live, data._replace(sampler=live, old=live))[1]
    later = whole - expected(kl_only(UnbiasedK3()), PAIR, live, data)[1]
    same(first, through_prefixes)
    same(later, through_prefixes + other_prefixes)
    np.testing.assert_allclose([np.linalg.norm(x) for x in (whole, first, later)], [0.5179, 0.0969, 0.1757], atol=5e-5)


def test_the_penalty_of_ppo_is_the_exact_kl_from_the_old_policy():
    """Of whole sequences too: the prefixes are the old policy's, which does not move."""
    live, data = from_old(RAGGED)
    algorithm = of(PenaltyKL(), advantage=Minus(0.0), kl_coef=1.0)
    value, gradient = expected(algorithm, RAGGED, live, pays_nothing(RAGGED, data))
    same(value, exact.sequence_kl_from(live, RAGGED, data.old))
    same(gradient, slope(exact.sequence_kl_from, live, RAGGED, data.old))


@pytest.mark.slow(but=("Token", "Sequence"))
@pytest.mark.parametrize("ratio", [Token(), Sequence(), SequenceToken()], ids=lambda r: type(r).__name__)
def test_a_mean_over_each_sequence_climbs_reward_by_length(ratio):
    """``E[(R - b) / L]``: the baseline, harmless in a sum, is paid by length and changes the objective."""
    live, data = on_policy(RAGGED)
    found = ascent(of(PPOClip(), ratio=ratio, reduce=SequenceMean()), RAGGED, live, data)
    same(found, reward_slope(RAGGED, live, (data.rewards - BASELINE) / LENGTHS))
    apart(found, reward_slope(RAGGED, live, data.rewards / LENGTHS))
    assert cosine(found, reward_slope(RAGGED, live, data.rewards)) < 0.99


def test_a_mean_over_tokens_climbs_reward_by_length_of_the_group():
    """``E[(R - b) / mean length]``, in which each sequence moves its own share of the length only."""
    live, data = on_policy(RAGGED)
    found = ascent(of(reduce=TokenMean()), RAGGED, live, data, 2)
    share = 2 / (LENGTHS[:, None] + LENGTHS) @ np.asarray(probability(live, RAGGED))
    same(found, reward_slope(RAGGED, live, (data.rewards - BASELINE) * share))
    assert cosine(found, reward_slope(RAGGED, live, data.rewards)) < 0.999


def test_a_constant_length_is_unbiased_up_to_the_constant():
    live, data = on_policy(RAGGED)
    algorithm = of(advantage=LeaveOneOut(), reduce=ConstantLength(5))
    same(ascent(algorithm, RAGGED, live, data, 2), reward_slope(RAGGED, live, data.rewards) / 5)


def z_score(*rewards):
    """Of the first; 0 where all are equal."""
    return 0.0 if min(rewards) == max(rewards) else (rewards[0] - np.mean(rewards)) / np.std(rewards, ddof=1)


def z_slopes(rewards):
    """By GroupZScore in groups of 3; of the z-score expected among two others, which stay put; of the reward."""
    live, data = on_policy(PAIR, rewards=np.array(rewards, float))
    p = np.asarray(probability(live, PAIR))
    among = [[[z_score(r, second, third) for third in rewards] for second in rewards] for r in rewards]
    found = ascent(of(advantage=GroupZScore(eps=0.0)), PAIR, live, data, 3)
    return found, reward_slope(PAIR, live, among @ p @ p), reward_slope(PAIR, live, data.rewards)


def test_dividing_by_the_groups_deviation_turns_the_gradient_unless_there_are_but_two_rewards():
    found, ranked, wanted = z_slopes([0, 0.1, 0.2, 0, 5, 0.1, 0.2, 0, 0.1])
    same(found, ranked)
    assert cosine(found, wanted) < 0.95
    found, ranked, wanted = z_slopes([0, 1, 0, 0, 1, 0, 0, 0, 1])
    same(found, ranked)
    # A right answer scores 2 / sqrt(3) above a wrong one in every group of three that has both, and on average.
    same(found, 2 / math.sqrt(3) * wanted)
