"""Groups by their number in the stream of prompts: requests, unfinished groups, scores, and the admission of new ones.

Admission is a pure decision from counts, so that all processes of a run decide alike.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rewards import Failures, Scorer
from jaxrl_llm.rewards.shaping import GroupShaping
from jaxrl_llm.rollout.episodes import Episodes, Scene, environment_seed
from jaxrl_llm.rollout.replay import Solved, Store, Success, varied
from jaxrl_llm.rollout.respond import SeedSpace, request_seed, with_texts
from jaxrl_llm.rollout.settings import Collect
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
    tool_failed: bool = False
    underway: dict[str, Any] = dataclasses.field(default_factory=dict)


class OutOfTime(Exception):
    """A step is stopped within its sampling; ``left`` is the carryover that it began with, and its progress."""

    def __init__(self, left: Carryover):
        self.left = left


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


class Underway(NamedTuple):
    """Progress of a step.

    Attributes:
      kept: groups to learn from.
      running: groups with some completion being sampled.
      held: groups that have used up their budget for this step.
      waiting: completions that the engine has not returned.
      started: prompts begun in this step.
    """

    kept: int
    running: int
    held: int
    waiting: int
    started: int


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

    def wants(self, now: Underway, share: float) -> bool:
        """Whether to begin one more group, if ``share`` of them are informative.

        Groups that are certain to be needed are begun at once. Others are begun while the step is short of groups and
        those under way are not expected to cover it: as many as keep every slot busy, and as many again waiting, so
        that a slot that ends is filled at once; a group that never ran costs nothing. Held groups count in the steps to
        come.
        """
        # If the last groups are interrupted, more of them run, so that no slot idles, as far as the next step needs
        # them. If they are finished, more would fill slots too, but with tokens that are learned from a step later.
        reach = 2 * self.needed if self.collect.interrupt else self.needed
        if now.kept >= self.needed or now.started >= self.collect.max_rounds * self.needed:
            return False
        found = now.kept + share * now.running
        if found + share * now.held >= self.segments * reach:
            return False
        certain = not self.filter_groups and now.kept + now.running < self.needed
        return certain or (now.waiting < 2 * self.slots and found < reach)
