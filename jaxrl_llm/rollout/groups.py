"""Groups by number in the stream of prompts. Admission decides from counts alone: all processes decide alike."""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards import Failures, Scorer
from jaxrl_llm.rewards.shaping import REJECTED, GroupShaping
from jaxrl_llm.rollout.episodes import Episodes, EpisodeSpec, environment_seed
from jaxrl_llm.rollout.generation import SeedSpace, request_seed, with_texts
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
      prompt: int32 ids as first asked, since templates and data may change; None for episodes that have not begun.
      age: steps since the one that sampled its first token.
    """

    number: int
    completions: tuple[Completion | None, ...]
    problem: Any = None
    prompt: Any = None
    age: int = 0

    @property
    def has_tokens(self) -> bool:
        """Whether any token has been sampled."""
        return any(c is not None for c in self.completions)

    def with_completions(self, changed: Mapping[int, Completion | None]) -> "PartialGroup":
        """Return the group with these members' completions, by index."""
        completions = tuple(changed.get(i, c) for i, c in enumerate(self.completions))
        return dataclasses.replace(self, completions=completions)


REPLACED_MEMBER = 0
"""Index of the member of a group that is replaced: the first, as in the paper."""


@dataclasses.dataclass(frozen=True)
class Success:
    """A completion that was right, with its scores before any shaping, and its sampler's log-probabilities, for the
    true importance ratio; the code of GUI-ARPO (arXiv 2505.16282) computes them anew, so that its ratio is 1.

    Attributes:
      reward: the weighted sum.
      accuracy: the verifier's, at least 1.
      parts: each reward by name, unweighted, and the watched scores.
    """

    completion: Completion
    reward: float
    accuracy: float
    parts: dict[str, float]


@dataclasses.dataclass(frozen=True)
class ProblemSuccesses:
    """Stored successes of one problem, the oldest first, with its prompt as int32 token ids. ``number``: that of the
    prompt, in the stream, that was last answered right; ``mean_credit``: of the answers to the latest prompt.
    """

    prompt: np.ndarray
    successes: tuple[Success, ...]
    number: int
    mean_credit: float


SuccessStore = dict[str, ProblemSuccesses]
"""Stored successes by task and id of the problem. A store is never changed, only replaced."""


@dataclasses.dataclass(frozen=True)
class Carryover:
    """State that one step passes to the next.

    Attributes:
      cursor: prompts consumed.
      surplus: scored groups beyond those that a step needs, in the order in which they are learned from.
      unfinished: groups to resume, by number.
      recent_informative: number of informative groups among the last ones scored.
      recent_scored: number of groups last scored; both fade (see ``collect.fade_counts``).
      texts: number of texts drawn in addition to the groups.
      successes: stored for replay.
      critic: numbers of the critic's last steps (``learner.samples.pool_explained_variance``).
      tool_failed: whether a call of a tool has failed in the run.
      step_progress: of the next step (``StepCollector.suspend``) if the run was stopped within it; else empty.
    """

    cursor: int = 0
    surplus: tuple[Group, ...] = ()
    unfinished: tuple[PartialGroup, ...] = ()
    recent_informative: float = 0.0
    recent_scored: float = 0.0
    stream_memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    texts: int = 0
    successes: SuccessStore = dataclasses.field(default_factory=dict)
    critic: list[list[float]] = dataclasses.field(default_factory=list)
    tool_failed: bool = False
    step_progress: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """One step's groups.

    Attributes:
      groups: the step learns from them; each token is marked with the version of the policy that sampled it.
      sampled: every group finished in this step, kept or not, by number.
      tokens: sampled in this step.
      metrics: seconds, counts, and statistics of the sampled groups.
      texts: to learn from in addition.
    """

    groups: list[Group]
    sampled: list[Group]
    carryover: Carryover
    tokens: int
    version: int
    metrics: dict[str, float]
    texts: int = 0

    def __len__(self) -> int:
        """Return the number of groups and texts to learn from."""
        return len(self.groups) + self.texts

    @property
    def common(self) -> Iterator[np.ndarray]:
        """Arrays that must be equal on every process: rewards, also those of steps, and tokens."""
        for group in self.groups:
            yield group.rewards
            for completion in group.completions:
                yield completion.tokens
                yield from (array for name, array in completion.extras.items() if name == STEP_REWARDS)


GROUP_RECORDS = (
    RolloutBatch,
    Carryover,
    PartialGroup,
    Group,
    Completion,
    Episode,
    Turn,
    Problem,
    ProblemSuccesses,
    Success,
    Failures,
)
"""Types that checkpoints hold to save groups."""


@dataclasses.dataclass(frozen=True)
class GroupSource:
    """Prompts and scoring of groups.

    Attributes:
      stream: the training prompts, in their order.
      group: G.
      seed: the run's; with a prompt's number in the stream it determines every random number.
      shaping: changes of a group's rewards, in order.
      episodes: of tasks with environments or tools; None without such tasks.
      stop_ids: end a completion, and are no part of its text; () means the tokenizer's own end.
    """

    tokenizer: Any
    prompts: Prompts
    stream: PromptStream
    scorer: Scorer
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

    def new_group(self, number: int, memory: Memory) -> tuple[PartialGroup, Memory]:
        """Return the group of this number, without tokens, and the new memory of the stream."""
        problem, memory = self.stream.next(number, memory)
        prompt = None if self.plays(problem) else self.prompts[problem]
        return PartialGroup(number, (None,) * self.group, problem, prompt), memory

    def plays(self, problem: Problem) -> bool:
        """Whether completions of this problem are episodes with an environment or tools."""
        return self.episodes is not None and self.episodes.plays(problem)

    def episode_specs(self, group: PartialGroup, members: Iterable[int]) -> list[EpisodeSpec]:
        """Return the episodes of some completions of a group."""
        seed = environment_seed(self.seeds(group.number)[0])
        return [EpisodeSpec((group.number, member), group.problem, seed) for member in members]

    def seeds(self, number: int) -> list[int]:
        """Return the seeds of the G completions of a prompt."""
        first = SeedSpace.TRAINING + number * self.group
        return [request_seed(self.seed, first + g) for g in range(self.group)]

    def score(self, groups: Sequence[PartialGroup]) -> Callable[[], tuple[dict[int, Group], Failures]]:
        """Start to score finished groups; return a function that waits for them by number, and for the failures."""
        completions = [completion for group in groups for completion in group.completions]
        answers = with_texts(dict(enumerate(completions)), self.tokenizer, self.stop_ids)
        wait = self.scorer.begin([(groups[i // self.group].problem, c) for i, c in answers.items()])

        def finish() -> tuple[dict[int, Group], Failures]:
            scores = wait()
            for i, steps in enumerate(scores.steps):
                answers[i] = dataclasses.replace(answers[i], extras=answers[i].extras | {STEP_REWARDS: steps})
            scored = {}
            for index, group in enumerate(groups):
                at = slice(index * self.group, (index + 1) * self.group)
                parts = {name: rewards[at] for name, rewards in scores.parts.items()}
                members = tuple(answers.values())[at]
                scored[group.number] = Group(
                    group.problem, group.prompt, members, scores.reward[at], scores.accuracy[at], parts
                )
            return scored, scores.failures

        return finish

    def shape_rewards(
        self, groups: Mapping[int, Group], version: int, budget: Callable[[str], int]
    ) -> dict[int, Group]:
        """Return the groups with their rewards shaped. Schedules read ``version``, optimiser updates so far, and
        ``budget``, which maps a task's label to its longest completion.
        """
        groups = dict(groups)
        for shape in self.shaping:
            groups = {number: shape(group, version, budget(group.problem.task)) for number, group in groups.items()}
        return groups


def informative(group: Group, filter_groups: str | bool = "accuracy") -> bool:
    """Whether a group can teach: the scores that the filter reads differ among the members that have any.

    "accuracy": some answers but not all are right (DAPO, arXiv 2503.14476, eq. 11); if a verifier returns the share
    that is right, the shares differ (verl's ``acc``). "reward": the rewards differ.
    """
    scores = group.rewards if filter_groups == "reward" else group.accuracy
    return values_differ(scores[~np.isnan(group.rewards)])


def is_finished(completion: Completion | None, longest: int) -> bool:
    """Whether a completion is finished, not interrupted or at the budget of a step below ``longest``."""
    if completion is None or completion.finish_reason == "aborted":
        return False
    if completion.episode is not None and completion.episode.end:
        return True
    return completion.finish_reason != "length" or len(completion.tokens) >= longest


def count_sampled_tokens(groups: Sequence[Group | PartialGroup]) -> int:
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
    def max_steps(self) -> int:
        """Number of steps that the longest completion takes under the token budget."""
        return -(-self.longest // self.collect.token_budget) if self.collect.token_budget else 1

    @property
    def max_age(self) -> float:
        """Maximum number of steps that a group may take after its first one, with those of a token budget."""
        return self.collect.max_age + self.max_steps - 1 if self.collect.max_age else math.inf

    def longest_of(self, task: str) -> int:
        """Return the maximum number of tokens of a completion to a problem of this task."""
        return self.limits.get(task, self.longest)

    def limit(self, length: int, task: str) -> int:
        """Return the maximum length, at the end of this step, of a completion that has ``length`` tokens."""
        budget = self.collect.token_budget
        longest = self.longest_of(task)
        return min(length + budget, longest) if budget else longest

    def should_start(
        self, collected: int, running: int, unfinished: int, waiting: int, started: int, share: float
    ) -> bool:
        """Whether to begin one more group, if ``share`` of them are informative.

        Certainly needed groups are begun at once, others while those under way are not expected to cover the step's
        need: as many as keep every slot busy, and as many again waiting. Unfinished groups count in later steps.

        Args:
          collected: groups to learn from.
          running: groups with some completion being sampled.
          unfinished: groups that have used up their budget for this step.
          waiting: completions that the engine has not returned.
          started: prompts begun in this step.
        """
        # If the last groups are interrupted, more of them run, so that no slot idles, as far as the next step needs
        # them. If they are finished, more would fill slots too, but with tokens that are learned from a step later.
        target = 2 * self.needed if self.collect.interrupt else self.needed
        if collected >= self.needed or started >= self.collect.max_rounds * self.needed:
            return False
        expected = collected + share * running
        if expected + share * unfinished >= self.max_steps * target:
            return False
        certain = not self.filter_groups and collected + running < self.needed
        return certain or (waiting < 2 * self.slots and expected < target)


def replay_successes(
    settings: Replay, store: SuccessStore, scored: Mapping[int, Group], seed: int, left_out: Collection[str]
) -> tuple[SuccessStore, dict[int, Group]]:
    """Return the store with the successes of these groups added, and the failed groups with a member replaced.

    Args:
      store: so far; a group is replaced from the successes stored before it.
      scored: groups by their number in the stream, before shaping.
      seed: with the number it determines which success is taken.
      left_out: finish reasons of completions that the loss does not count; they are not stored.
    """
    store = dict(store)
    replaced = {}
    for number in sorted(scored):
        group = scored[number]
        key = f"{group.problem.task}/{group.problem.id}"
        stored = store.get(key)
        if stored is not None and not (  # what is stored follows this very prompt, and was scored by the same rewards
            np.array_equal(stored.prompt, group.prompt) and stored.successes[0].parts.keys() == group.parts.keys()
        ):
            del store[key]
            stored = None
        if stored is not None and is_replaceable(group):
            success = pick_success(stored.successes, seed, number)
            at_member = np.arange(len(group.completions)) == REPLACED_MEMBER
            completions = list(group.completions)
            completions[REPLACED_MEMBER] = success.completion
            replaced[number] = dataclasses.replace(
                group,
                completions=tuple(completions),
                rewards=np.where(at_member, success.reward, group.rewards),
                accuracy=np.where(at_member, success.accuracy, group.accuracy),
                parts={name: np.where(at_member, success.parts[name], part) for name, part in group.parts.items()},
            )
        updated = update_successes(stored, number, group, settings.per_prompt, left_out)
        if updated is not None:
            store[key] = updated
    while len(store) > settings.prompts:
        del store[max(store, key=lambda key: (store[key].mean_credit, -store[key].number))]
    return store, replaced


def is_replaceable(group: Group) -> bool:
    """Whether no answer was right or better than another, and a member that stays was found wrong."""
    scored = ~np.isnan(group.rewards)
    wrong = (group.accuracy < 1) & scored
    teaches = (group.accuracy >= 1).any() or values_differ(group.accuracy[scored])
    return not teaches and bool(np.delete(wrong, REPLACED_MEMBER).any())


def values_differ(values: np.ndarray) -> bool:
    """Whether the values that are not NaN differ, in the precision that advantages are computed in."""
    return len(np.unique(values[~np.isnan(values)].astype(np.float32))) > 1


def pick_success(successes: tuple[Success, ...], seed: int, number: int) -> Success:
    """Choose one success uniformly, as a function of seed and number."""
    bits = np.random.PCG64(np.random.SeedSequence((seed, number, 1))).random_raw()
    return successes[int(bits % len(successes))]


def drop_long_successes(store: SuccessStore, limits: Mapping[str, int], names: Mapping[str, str]) -> SuccessStore:
    """Return the successes of these tasks, by label, of at most so many tokens, under the tasks' new ``names``."""
    shorter = {}
    for key, stored in store.items():
        label, _, problem = key.rpartition("/")
        limit = limits.get(label, 0)
        successes = tuple(success for success in stored.successes if len(success.completion.tokens) <= limit)
        if successes:
            shorter[f"{names[label]}/{problem}"] = dataclasses.replace(stored, successes=successes)
    return shorter


def mark_off_policy(store: SuccessStore) -> SuccessStore:
    """Return the store for a run whose policy has sampled none of it: tokens get version -1, of no policy."""
    marked = {}
    for key, stored in store.items():
        successes = []
        for success in stored.successes:
            version = np.full_like(success.completion.version, -1)
            completion = dataclasses.replace(success.completion, version=version)
            successes.append(dataclasses.replace(success, completion=completion))
        marked[key] = dataclasses.replace(stored, successes=tuple(successes))
    return marked


def update_successes(
    stored: ProblemSuccesses | None, number: int, group: Group, per_prompt: int, left_out: Collection[str]
) -> ProblemSuccesses | None:
    """Return the stored successes of a problem after one more group; None if it was never solved."""
    new = []
    for i, completion in enumerate(group.completions):
        # It could be learned from: it has a reward and tokens that count, and no gate rejects it.
        counts = completion.finish_reason not in left_out and bool(completion.mask.any())
        rejected = REJECTED in group.parts and bool(group.parts[REJECTED][i])
        if group.accuracy[i] >= 1 and counts and not rejected and not np.isnan(group.rewards[i]):
            parts = {name: float(part[i]) for name, part in group.parts.items()}
            new.append(Success(completion, float(group.rewards[i]), float(group.accuracy[i]), parts))
    earlier = () if stored is None else stored.successes
    if not new and not earlier:
        return None
    last = stored.number if stored is not None and not new else number
    mean_credit = float(np.mean(np.nan_to_num(group.credit)))
    return ProblemSuccesses(group.prompt, (*earlier, *new)[-per_prompt:], last, mean_credit)
