"""Groups by their number in the stream of prompts: requests, unfinished groups, scores, and the admission of new ones.

Admission is a pure decision from counts, so that all processes of a run decide alike.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards import Failures, Scorer
from jaxrl_llm.rewards.shaping import REJECTED, GroupShaping
from jaxrl_llm.rollout.episodes import Episodes, Scene, environment_seed
from jaxrl_llm.rollout.respond import SeedSpace, request_seed, with_texts
from jaxrl_llm.rollout.settings import Collect, Replay
from jaxrl_llm.tasks import Prompts, PromptStream
from jaxrl_llm.tasks.stream import Memory
from jaxrl_llm.types import Completion, Episode, Group, Problem, Turn

STEP_REWARDS = "step_rewards"
"""Name of the extra of a completion that holds the rewards of its steps (``Scores.steps``)."""


@dataclasses.dataclass(frozen=True)
class PartialGroup:
    """A group that is not finished.

    Attributes:
      number: of its prompt in the stream, which determines its random numbers.
      completions: G entries; None where no token has been sampled yet.
      problem: the problem asked.
      prompt: int32 token ids that the completions follow, kept from the moment they are asked: templates may read the
        clock, and data may change. None for episodes that have not begun.
      age: steps since the one that sampled its first token.
    """

    number: int
    completions: tuple[Completion | None, ...]
    problem: Any = None
    prompt: Any = None
    age: int = 0

    @property
    def begun(self) -> bool:
        """Whether any token has been sampled."""
        return any(c is not None for c in self.completions)


PLACE = 0
"""Index of the member of a group that is replaced: the first, as in the paper."""


@dataclasses.dataclass(frozen=True)
class Success:
    """A completion that was right, with its scores before any shaping of its group.

    It keeps the log-probabilities of the policy that sampled it, so that its importance ratio is the true one where it
    is replayed; the code of GUI-ARPO (arXiv 2505.16282) computes them anew, so that its ratio is 1.

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


@dataclasses.dataclass(frozen=True)
class Carryover:
    """State that one step passes to the next.

    Attributes:
      cursor: prompts consumed.
      carried: surplus groups, scored, in the order in which they are learned from.
      unfinished: groups to resume, by number.
      good: informative groups among the last ones scored.
      seen: number of groups last scored; both fade (see ``judging.remember``).
      stream: memory of the stream of prompts.
      texts: texts drawn in addition to the groups.
      successes: stored for replay.
      critic: numbers of the critic's last steps (``learner.samples.pooled``).
      tool_failed: whether a call of a tool has failed in the run.
      underway: progress of the next step (``dynamic_sampling.Step.progress``) if the run was stopped within it; else
        empty.
    """

    cursor: int = 0
    carried: tuple[Group, ...] = ()
    unfinished: tuple[PartialGroup, ...] = ()
    good: float = 0.0
    seen: float = 0.0
    stream: dict[str, Any] = dataclasses.field(default_factory=dict)
    texts: int = 0
    successes: Store = dataclasses.field(default_factory=dict)
    critic: list[list[float]] = dataclasses.field(default_factory=list)
    tool_failed: bool = False
    underway: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """One step's groups.

    Attributes:
      groups: the step learns from them; each token is marked with the version of the policy that sampled it.
      sampled: every group finished in this step, kept or not, by number.
      left: carryover for the next step.
      tokens: sampled in this step.
      version: of the policy that sampled them.
      metrics: seconds, counts, and statistics of the sampled groups.
      texts: to learn from in addition.
    """

    groups: list[Group]
    sampled: list[Group]
    left: Carryover
    tokens: int
    version: int
    metrics: dict[str, float]
    texts: int = 0

    def __len__(self) -> int:
        """Return the number of groups and texts to learn from."""
        return len(self.groups) + self.texts

    @property
    def examples(self) -> list[Group]:
        """Groups to show to people."""
        return self.groups

    @property
    def common(self) -> Iterator[np.ndarray]:
        """Arrays that must be equal on every process: rewards, also those of steps, and tokens."""
        for group in self.groups:
            yield group.rewards
            for completion in group.completions:
                yield completion.tokens
                yield from (array for name, array in completion.extras.items() if name == STEP_REWARDS)


RECORDS = (RolloutBatch, Carryover, PartialGroup, Group, Completion, Episode, Turn, Problem, Solved, Success, Failures)
"""Types that checkpoints hold to save groups."""


@dataclasses.dataclass(frozen=True)
class GroupSource:
    """Prompts and scoring of groups.

    Attributes:
      tokenizer: decodes completions.
      prompts: token ids.
      stream: the training prompts, in their order.
      judge: of the completions.
      group: G.
      seed: the run's; with a prompt's number in the stream it determines every random number.
      shaping: changes of a group's rewards, in order.
      episodes: of tasks with environments or tools; None without such tasks.
      stop_ids: end a completion, and are no part of its text; () means the tokenizer's own end.
    """

    tokenizer: Any
    prompts: Prompts
    stream: PromptStream
    judge: Scorer
    group: int
    seed: int
    shaping: tuple[GroupShaping, ...]
    episodes: Episodes | None = None
    stop_ids: tuple[int, ...] = ()

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels of the tasks of a mixture; empty for a single task, since it holds all groups."""
        tasks = self.prompts.tasks
        return tuple(task.label for task in tasks) if len(tasks) > 1 else ()

    def ask(self, number: int, memory: Memory) -> tuple[PartialGroup, Memory]:
        """Return the group of this number, not begun yet, and the new memory of the stream."""
        problem, memory = self.stream.next(number, memory)
        asked = PartialGroup(number, (None,) * self.group, problem)
        prompt = None if self.plays(problem) else self.prompts[problem]
        return dataclasses.replace(asked, prompt=prompt), memory

    def plays(self, problem: Problem) -> bool:
        """Whether completions of this problem are episodes with an environment or tools."""
        return self.episodes is not None and self.episodes.plays(problem)

    def scenes(self, group: PartialGroup, places: Iterable[int]) -> list[Scene]:
        """Return the episodes of some completions of a group."""
        seed = environment_seed(self.seeds(group.number)[0])
        return [Scene((group.number, place), group.problem, seed) for place in places]

    def seeds(self, number: int) -> list[int]:
        """Return the seeds of the G completions of a prompt."""
        first = SeedSpace.TRAINING + number * self.group
        return [request_seed(self.seed, first + g) for g in range(self.group)]

    def score(self, whole: Sequence[PartialGroup]) -> Callable[[], tuple[dict[int, Group], Failures]]:
        """Begin to score finished groups; return a function that waits for them: by number, with texts and scores, and
        the failures of rewards.
        """
        completions = [completion for group in whole for completion in group.completions]
        done = with_texts(dict(enumerate(completions)), self.tokenizer, self.stop_ids)
        coming = self.judge.begin([(whole[i // self.group].problem, c) for i, c in done.items()])

        def finish() -> tuple[dict[int, Group], Failures]:
            scores = coming()
            for i, steps in enumerate(scores.steps):
                done[i] = dataclasses.replace(done[i], extras=done[i].extras | {STEP_REWARDS: steps})
            groups = {}
            for index, asked in enumerate(whole):
                at = slice(index * self.group, (index + 1) * self.group)
                parts = {name: values[at] for name, values in scores.parts.items()}
                groups[asked.number] = Group(
                    asked.problem, asked.prompt, tuple(done.values())[at], scores.reward[at], scores.accuracy[at], parts
                )
            return groups, scores.failures

        return finish

    def shaped(self, groups: Mapping[int, Group], version: int, budget: Callable[[str], int]) -> dict[int, Group]:
        """Return the groups with their rewards shaped.

        ``version``: optimiser updates so far; ``budget``: the longest completion of a task, by its label. Schedules of
        rewards read both.
        """
        found = dict(groups)
        for shape in self.shaping:
            found = {number: shape(group, version, budget(group.problem.task)) for number, group in found.items()}
        return found


def informative(group: Group, reads: str | bool = "accuracy") -> bool:
    """Whether a group can teach: the values that a filter reads differ among the members that could be scored.

    "accuracy": of answers that are right or wrong, some but not all are right (DAPO, arXiv 2503.14476, eq. 11); if a
    verifier returns the share that is right, the shares differ (verl's ``acc``). "reward": the rewards differ.
    """
    values = group.rewards if reads == "reward" else group.accuracy
    return varied(values[~np.isnan(group.rewards)])


def whole(completion: Completion | None, longest: int) -> bool:
    """Whether a completion is finished.

    If not, it was interrupted, or reached the budget of a step below ``longest``.
    """
    if completion is None or completion.finish_reason == "aborted":
        return False
    if completion.episode is not None and completion.episode.end:
        return True
    return completion.finish_reason != "length" or len(completion.tokens) >= longest


def tokens_in(groups: Sequence[Group | PartialGroup]) -> int:
    """Count the tokens that were sampled for all their completions."""
    return sum(c.length for g in groups for c in g.completions if c is not None)


@dataclasses.dataclass(frozen=True)
class AdmissionPolicy:
    """Rules that decide which groups a step starts.

    Attributes:
      needed: P, groups to learn from.
      slots: the engine's.
      longest: maximum number of tokens of a completion, of any task.
      filter_groups: values that make a group informative, "accuracy" or "reward"; False if all groups count.
      collect: the run's settings.
      limits: maximum number of tokens of a completion, by the label of its task; ``longest`` for others.
      left_out: finish reasons of completions that the loss does not count.
    """

    needed: int
    slots: int
    longest: int
    filter_groups: str | bool
    collect: Collect
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def segments(self) -> int:
        """Number of steps that the longest completion takes under the token budget."""
        return -(-self.longest // self.collect.token_budget) if self.collect.token_budget else 1

    @property
    def oldest(self) -> float:
        """Maximum number of steps that a group may take after its first one, with those of a token budget."""
        return self.collect.max_age + self.segments - 1 if self.collect.max_age else math.inf

    def longest_of(self, task: str) -> int:
        """Return the maximum number of tokens of a completion to a problem of this task."""
        return self.limits.get(task, self.longest)

    def limit(self, begun: int, task: str) -> int:
        """Return the maximum length, at the end of this step, of a completion that has ``begun`` tokens."""
        budget = self.collect.token_budget
        longest = self.longest_of(task)
        return min(begun + budget, longest) if budget else longest

    def wants(self, kept: int, running: int, held: int, waiting: int, started: int, share: float) -> bool:
        """Whether to begin one more group, if ``share`` of them are informative.

        Groups that are certain to be needed are begun at once. Others are begun while the step is short of groups and
        those under way are not expected to cover it: as many as keep every slot busy, and as many again waiting, so
        that a slot that ends is filled at once; a group that never ran costs nothing. Held groups count in the steps to
        come.

        Args:
          kept: groups to learn from.
          running: groups with some completion being sampled.
          held: groups that have used up their budget for this step.
          waiting: completions that the engine has not returned.
          started: prompts begun in this step.
          share: of informative groups.
        """
        # If the last groups are interrupted, more of them run, so that no slot idles, as far as the next step needs
        # them. If they are finished, more would fill slots too, but with tokens that are learned from a step later.
        reach = 2 * self.needed if self.collect.interrupt else self.needed
        if kept >= self.needed or started >= self.collect.max_rounds * self.needed:
            return False
        found = kept + share * running
        if found + share * held >= self.segments * reach:
            return False
        certain = not self.filter_groups and kept + running < self.needed
        return certain or (waiting < 2 * self.slots and found < reach)


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
