"""Branches of episodes: ARPO, Agentic Reinforced Policy Optimization (arXiv 2507.19849).

A group of M members begins with N whole episodes. After each answer of the environment, the entropy of the first k
tokens of the model's next turn is compared with that of its first turn,

    dH = sum_{j <= k} (H_j - H_j of the first turn) / log V,    P = alpha + beta dH,

and if P > tau, another member begins there: a branch. Entropies are the policy's, in nats, at the sampling temperature.
A branch has its parent's tokens and turns up to the answer, a copy of the environment in that state, and a seed of its
own. It samples the whole next turn anew, which is another draw from the distribution at the point of branching; the
tokens that were measured stay the parent's.

Members begin in an order that no clock decides. Points of branching are looked at turn by turn, and those of one turn
by the number of the member, one branch at each, until M members are there; a branch may branch in its turn, at later
turns than that of its own beginning. A point is decided once the turn after the answer has ended, and all points before
it are decided. So the start of a member follows from the turns of the others alone, and a run that is stopped finds
them again. If all episodes end before there are M members, the others are whole episodes.

Departures: the paper divides by V, its code by log V, as here. The code draws a random number where the paper compares
P with tau, and measures the turn before the answer; here it is the paper's. Points that are reached at one time have no
order in the paper.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.engine.requests import first_tokens
from jaxrl_llm.rollout.settings import Branching
from jaxrl_llm.types import Completion, Episode


class Start(NamedTuple):
    """The beginning of a member of a group.

    Attributes:
      parent: member that it branches from; None for a whole episode.
      turns: of the parent's that it has.
    """

    parent: int | None = None
    turns: int = 0


def entropy_rise(completion: Completion, tokens: int, vocabulary: int) -> float:
    """Return dH of the last turn, which has ended: 0 for the first.

    Turns with less than ``tokens`` tokens are compared over those that both have.

    Args:
      completion: with the entropy of each token.
      tokens: k.
      vocabulary: V.
    """
    entropies = completion.extras["entropy"].astype(np.float64)
    last = entropies[completion.last_turn :][:tokens]
    ends = [*np.flatnonzero(~completion.mask)[:1], *completion.forks]
    first = entropies[: min(ends, default=None)][:tokens]
    both = min(len(first), len(last))
    return float(np.sum(last[:both] - first[:both])) / math.log(vocabulary)


def starts(episodes: Sequence[Episode | None], rule: Branching) -> list[Start]:
    """Return the beginnings of a group's members, as many as are decided, by the rule of the module's docstring.

    ``episodes``: of the M members, as far as they are; None for one that has no answer yet.
    """
    found = [Start()] * rule.whole_of(len(episodes))
    turn, going = 1, True
    while going and len(found) < len(episodes):
        going = False
        for member in range(len(found)):  # those that begin at this turn are looked at from the next one on
            episode = episodes[member] or Episode()
            over = len(episode.turns) <= turn
            if over and not episode.end:
                return found
            if not over:
                going = True
                if rule.at(episode.turns[turn].entropy_rise) and len(found) < len(episodes):
                    found.append(Start(member, turn))
        turn += 1
    return found + [Start()] * (len(episodes) - len(found))


def branch(parent: Completion, start: Start) -> Completion:
    """Return a completion that goes on after some turns of its parent and the answer to the last of them."""
    turns = parent.episode.turns[: start.turns]
    after = int(np.argmax(parent.mask[turns[-1].end :]))
    shared = turns[-1].end + after
    reward = sum(turn.reward for turn in turns)
    episode = Episode(turns, reward=reward, parent=start.parent, shared=shared, tools=parent.episode.tools)
    return dataclasses.replace(first_tokens(parent, shared), episode=episode)


def common_lengths(completions: Sequence[Completion]) -> np.ndarray:
    """Return the number of first tokens that each two members of a group have from one beginning, int64[G, G].

    That is what their records say, as far as their tokens are equal: a parent may have begun anew.
    """
    found = np.diag([len(one.tokens) for one in completions])
    for member, one in enumerate(completions):
        parent = None if one.episode is None else one.episode.parent
        if parent is None or parent >= member:
            continue
        shared = min(one.episode.shared, len(completions[parent].tokens))
        differ = np.flatnonzero(one.tokens[:shared] != completions[parent].tokens[:shared])
        shared = int(differ[0]) if len(differ) else shared
        found[member, :member] = found[:member, member] = np.minimum(shared, found[parent, :member])
    return found


def shared_credit(advantages: Sequence[np.ndarray], common: np.ndarray) -> list[np.ndarray]:
    """Return each token's advantage, float[T] by member: the mean over the members that share the token, ARPO's "hard".

    Args:
      advantages: of the tokens of each member, float[T].
      common: lengths that members share, int[G, G], as of ``common_lengths``.
    """
    found = []
    for member, own in enumerate(advantages):
        total, count = np.zeros(len(own)), np.zeros(len(own))
        for other, shared in enumerate(common[member]):
            total[:shared] += advantages[other][:shared]
            count[:shared] += 1
        found.append((total / np.maximum(count, 1)).astype(own.dtype))
    return found
