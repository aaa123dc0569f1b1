"""Replay of successes: where a whole group has failed, one of its members gives way to an answer that once was right.

GUI-ARPO (arXiv 2505.16282). A stored answer keeps the log-probabilities of the policy that sampled it, so that its
importance ratio is the true one; the paper's code computes them anew, so that its ratio is 1.
"""

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from jaxrl_llm.rewards.bounds import REJECTED
from jaxrl_llm.rollout.settings import Replay
from jaxrl_llm.types import Completion, Group, Problem

PLACE = 0
"""The member of a group that gives way: the first, as in the paper."""


@dataclasses.dataclass(frozen=True)
class Success:
    """A completion that was right, with what it scored then, before any shaping of its group.

    Attributes:
      completion: as it was sampled.
      reward: the weighted sum.
      accuracy: the verifier's, at least 1.
      parts: each reward by name, unweighted, and what was watched.
    """

    completion: Completion
    reward: float
    accuracy: float
    parts: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Solved:
    """What is stored of one problem.

    Attributes:
      prompt: int32 token ids that its completions follow.
      successes: the oldest first.
      number: the prompt, in the stream, that was last answered right.
      share: mean credit of the answers to the latest prompt.
    """

    prompt: np.ndarray
    successes: tuple[Success, ...]
    number: int
    share: float


Store = dict[str, Solved]
"""By task and id of the problem. It is never changed, only replaced."""


def place_of(problem: Problem) -> str:
    """Where a problem's successes are stored."""
    return f"{problem.task}/{problem.id}"


def replay(
    settings: Replay, store: Store, scored: Mapping[int, Group], seed: int, left_out: Collection[str]
) -> tuple[Store, dict[int, Group]]:
    """The store with the successes of these groups, and those of the groups that failed, with a member replaced.

    Args:
      settings: how much is stored.
      store: so far; a group is replaced from what was there before it.
      scored: groups by their number in the stream, before shaping.
      seed: with the number it decides which success is taken.
      left_out: finish reasons of completions that the loss does not count: none of them is stored.
    """
    store = dict(store)
    replaced = {}
    for number in sorted(scored):
        group = scored[number]
        place = place_of(group.problem)
        known = store.get(place)
        if known is not None and not _fits(known, group):
            del store[place]
            known = None
        if known is not None and failed(group):
            replaced[number] = with_success(group, chosen(known.successes, seed, number))
        found = _updated(known, number, group, settings.per_prompt, left_out)
        if found is not None:
            store[place] = found
    while len(store) > settings.prompts:
        del store[max(store, key=lambda place: (store[place].share, -store[place].number))]
    return store, replaced


def failed(group: Group) -> bool:
    """Whether no answer was right, nor any more so than another, and one that stays was found wrong."""
    scored = ~np.isnan(group.rewards)
    wrong = (group.accuracy < 1) & scored
    teaches = (group.accuracy >= 1).any() or varied(group.accuracy[scored])
    return not teaches and bool(np.delete(wrong, PLACE).any())


def varied(values: np.ndarray) -> bool:
    """Whether those that are known differ, in the precision that advantages are computed in."""
    return len(np.unique(values[~np.isnan(values)].astype(np.float32))) > 1


def chosen(successes: tuple[Success, ...], seed: int, number: int) -> Success:
    """One of them, each as likely, a function of seed and number."""
    bits = np.random.PCG64(np.random.SeedSequence((seed, number, 1))).random_raw()
    return successes[int(bits % len(successes))]


def with_success(group: Group, success: Success) -> Group:
    """The group with the success in the place of one member, scores and all."""

    def put(values: np.ndarray, value: float) -> np.ndarray:
        values = values.copy()
        values[PLACE] = value
        return values

    # Arrays of its own: completions of one step are told apart by them.
    taken = dataclasses.replace(success.completion, tokens=success.completion.tokens.copy())
    completions = list(group.completions)
    completions[PLACE] = taken
    return dataclasses.replace(
        group,
        completions=tuple(completions),
        rewards=put(group.rewards, success.reward),
        accuracy=put(group.accuracy, success.accuracy),
        parts={name: put(part, success.parts[name]) for name, part in group.parts.items()},
    )


def stored(store: Store) -> int:
    """Completions in all."""
    return sum(len(solved.successes) for solved in store.values())


def no_longer_than(store: Store, limits: Mapping[str, int], names: Mapping[str, str]) -> Store:
    """What is stored of these tasks, by label, in completions of at most so many tokens; stored by the names that the
    tasks have from here on."""
    kept = {}
    for place, solved in store.items():
        label, _, problem = place.rpartition("/")
        fitting = tuple(one for one in solved.successes if len(one.completion.tokens) <= limits.get(label, 0))
        if fitting:
            kept[f"{names[label]}/{problem}"] = dataclasses.replace(solved, successes=fitting)
    return kept


def _fits(solved: Solved, group: Group) -> bool:
    """Whether what is stored follows this very prompt, and was scored by the same rewards."""
    return np.array_equal(solved.prompt, group.prompt) and solved.successes[0].parts.keys() == group.parts.keys()


def _updated(known: Solved | None, number: int, group: Group, most: int, left_out: Collection[str]) -> Solved | None:
    """What is stored of a problem after one more group; None where it was never solved."""
    new = tuple(
        Success(c, float(group.rewards[i]), float(group.accuracy[i]), {n: float(x[i]) for n, x in group.parts.items()})
        for i, c in enumerate(group.completions)
        if group.accuracy[i] >= 1 and _teaches(group, i, left_out)
    )
    earlier = () if known is None else known.successes
    if not new and not earlier:
        return None
    last = known.number if known is not None and not new else number
    return Solved(group.prompt, (*earlier, *new)[-most:], last, float(np.mean(np.nan_to_num(group.credit))))


def _teaches(group: Group, i: int, left_out: Collection[str]) -> bool:
    """Whether a member could be learned from: it has a reward and tokens that count, and no gate rejects it."""
    completion = group.completions[i]
    rejected = REJECTED in group.parts and bool(group.parts[REJECTED][i])
    counts = completion.finish_reason not in left_out and bool(completion.mask.any())
    return counts and not rejected and not np.isnan(group.rewards[i])
