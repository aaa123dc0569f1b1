"""Replay of successes: in a group that failed as a whole, one member is replaced by an answer that once was right.

GUI-ARPO (arXiv 2505.16282). A stored answer keeps the log-probabilities of the policy that sampled it, so that its
importance ratio is the true one; the paper's code computes them anew, so that its ratio is 1.
"""

import dataclasses
from collections.abc import Collection, Mapping

import numpy as np

from jaxrl_llm.rewards.shaping import REJECTED
from jaxrl_llm.rollout.settings import Replay
from jaxrl_llm.types import Completion, Group

PLACE = 0
"""Index of the member of a group that is replaced: the first, as in the paper."""


@dataclasses.dataclass(frozen=True)
class Success:
    """A completion that was right, with its scores before any shaping of its group.

    Attributes:
      completion: as it was sampled.
      reward: the weighted sum.
      accuracy: the verifier's, at least 1.
      parts: each reward by name, unweighted, and the watched scores.
    """

    completion: Completion
    reward: float
    accuracy: float
    parts: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Solved:
    """Stored successes of one problem.

    Attributes:
      prompt: int32 token ids that its completions follow.
      successes: the oldest first.
      number: number, in the stream, of the prompt that was last answered right.
      share: mean credit of the answers to the latest prompt.
    """

    prompt: np.ndarray
    successes: tuple[Success, ...]
    number: int
    share: float


Store = dict[str, Solved]
"""Stored successes by task and id of the problem. A store is never changed, only replaced."""


def replay(
    settings: Replay, store: Store, scored: Mapping[int, Group], seed: int, left_out: Collection[str]
) -> tuple[Store, dict[int, Group]]:
    """Return the store with the successes of these groups added, and the failed groups with a member replaced.

    Args:
      settings: limits of the store.
      store: so far; a group is replaced from the successes stored before it.
      scored: groups by their number in the stream, before shaping.
      seed: with the number it determines which success is taken.
      left_out: finish reasons of completions that the loss does not count; they are not stored.
    """
    store = dict(store)
    replaced = {}
    for number in sorted(scored):
        group = scored[number]
        place = f"{group.problem.task}/{group.problem.id}"
        known = store.get(place)
        if known is not None and not (  # what is stored follows this very prompt, and was scored by the same rewards
            np.array_equal(known.prompt, group.prompt) and known.successes[0].parts.keys() == group.parts.keys()
        ):
            del store[place]
            known = None
        if known is not None and failed(group):
            success = chosen(known.successes, seed, number)
            here = np.arange(len(group.completions)) == PLACE
            completions = list(group.completions)
            completions[PLACE] = success.completion
            replaced[number] = dataclasses.replace(
                group,
                completions=tuple(completions),
                rewards=np.where(here, success.reward, group.rewards),
                accuracy=np.where(here, success.accuracy, group.accuracy),
                parts={name: np.where(here, success.parts[name], part) for name, part in group.parts.items()},
            )
        found = _updated(known, number, group, settings.per_prompt, left_out)
        if found is not None:
            store[place] = found
    while len(store) > settings.prompts:
        del store[max(store, key=lambda place: (store[place].share, -store[place].number))]
    return store, replaced


def failed(group: Group) -> bool:
    """Whether no answer was right or better than another, and a member that stays was found wrong."""
    scored = ~np.isnan(group.rewards)
    wrong = (group.accuracy < 1) & scored
    teaches = (group.accuracy >= 1).any() or varied(group.accuracy[scored])
    return not teaches and bool(np.delete(wrong, PLACE).any())


def varied(values: np.ndarray) -> bool:
    """Whether the values that are not NaN differ, in the precision that advantages are computed in."""
    return len(np.unique(values[~np.isnan(values)].astype(np.float32))) > 1


def chosen(successes: tuple[Success, ...], seed: int, number: int) -> Success:
    """Choose one success uniformly, as a function of seed and number."""
    bits = np.random.PCG64(np.random.SeedSequence((seed, number, 1))).random_raw()
    return successes[int(bits % len(successes))]


def no_longer_than(store: Store, limits: Mapping[str, int], names: Mapping[str, str]) -> Store:
    """Return the store's successes of these tasks, by label, in completions of at most so many tokens; stored by the
    names that the tasks have from here on.
    """
    kept = {}
    for place, solved in store.items():
        label, _, problem = place.rpartition("/")
        fitting = tuple(one for one in solved.successes if len(one.completion.tokens) <= limits.get(label, 0))
        if fitting:
            kept[f"{names[label]}/{problem}"] = dataclasses.replace(solved, successes=fitting)
    return kept


def of_another_policy(store: Store) -> Store:
    """Return the store for a run whose policy has sampled none of it: tokens get version -1, of no policy."""
    marked = {}
    for place, solved in store.items():
        successes = []
        for one in solved.successes:
            version = np.full_like(one.completion.version, -1)
            completion = dataclasses.replace(one.completion, version=version)
            successes.append(dataclasses.replace(one, completion=completion))
        marked[place] = dataclasses.replace(solved, successes=tuple(successes))
    return marked


def _updated(known: Solved | None, number: int, group: Group, most: int, left_out: Collection[str]) -> Solved | None:
    """Return the stored successes of a problem after one more group; None if it was never solved."""
    new = []
    for i, completion in enumerate(group.completions):
        # It could be learned from: it has a reward and tokens that count, and no gate rejects it.
        counts = completion.finish_reason not in left_out and bool(completion.mask.any())
        rejected = REJECTED in group.parts and bool(group.parts[REJECTED][i])
        if group.accuracy[i] >= 1 and counts and not rejected and not np.isnan(group.rewards[i]):
            parts = {name: float(part[i]) for name, part in group.parts.items()}
            new.append(Success(completion, float(group.rewards[i]), float(group.accuracy[i]), parts))
    earlier = () if known is None else known.successes
    if not new and not earlier:
        return None
    last = known.number if known is not None and not new else number
    return Solved(group.prompt, (*earlier, *new)[-most:], last, float(np.mean(np.nan_to_num(group.credit))))
