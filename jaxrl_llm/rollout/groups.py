"""Groups from their number in the stream of prompts: what is asked, what is left unfinished, what it scores."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards import Failures, Judge
from jaxrl_llm.rewards.bounds import REJECTED
from jaxrl_llm.rewards.group_shaping import GroupShaping
from jaxrl_llm.rewards.refusals import REFUSED
from jaxrl_llm.rollout.loops import loops, written
from jaxrl_llm.rollout.replay import Solved, Store, Success, varied
from jaxrl_llm.tasks import Prompts, PromptStream, answer_of
from jaxrl_llm.tasks.stream import Memory
from jaxrl_llm.types import Completion, Group, Problem

STEP_REWARDS = "step_rewards"
"""The extra of a completion that holds the rewards of its steps (``Scores.steps``)."""


@dataclasses.dataclass(frozen=True)
class PartialGroup:
    """A group under way.

    Attributes:
      number: of its prompt in the stream, which decides its random numbers.
      completions: G of them; None where no token has been sampled yet.
      problem: what was asked; None where nothing was asked yet, and in checkpoints of old.
      prompt: int32 token ids that the completions follow, kept from the moment they are asked: templates may read the
        clock, and data may change.
      age: steps since the one that sampled its first token.
    """

    number: int
    completions: tuple[Completion | None, ...]
    problem: Problem | None = None
    prompt: np.ndarray | None = None
    age: int = 0

    @property
    def begun(self) -> bool:
        """Whether any token has been sampled."""
        return any(c is not None for c in self.completions)


@dataclasses.dataclass(frozen=True)
class Carryover:
    """What one step leaves to the next.

    Attributes:
      cursor: prompts consumed.
      carried: surplus groups, scored, in the order in which they are learned from.
      unfinished: groups to go on with, by number.
      good: informative groups among the last ones scored.
      seen: how many those are; both fade (see ``remember``).
      stream: what the stream of prompts remembers.
      texts: texts drawn beside the groups.
      successes: stored for replay.
    """

    cursor: int = 0
    carried: tuple[Group, ...] = ()
    unfinished: tuple[PartialGroup, ...] = ()
    good: float = 0.0
    seen: float = 0.0
    stream: dict[str, Any] = dataclasses.field(default_factory=dict)
    texts: int = 0
    successes: Store = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """One step's groups.

    Attributes:
      groups: what the step learns from; each token knows the version of the policy that sampled it.
      sampled: every group finished in this step, kept or not, by number.
      left: what is left to the next step.
      tokens: sampled in this step.
      version: of the policy that sampled them.
      metrics: seconds and counts, and what the groups sampled were like.
    """

    groups: list[Group]
    sampled: list[Group]
    left: Carryover
    tokens: int
    version: int
    metrics: dict[str, float]

    def __len__(self) -> int:
        """Groups to learn from."""
        return len(self.groups)

    @property
    def examples(self) -> list[Group]:
        """What people may want to look at."""
        return self.groups

    @property
    def common(self) -> Iterator[np.ndarray]:
        """What must be the same on every process: rewards, those of steps too, and tokens."""
        for group in self.groups:
            yield group.rewards
            for completion in group.completions:
                yield completion.tokens
                yield from (array for name, array in completion.extras.items() if name == STEP_REWARDS)


RECORDS = (RolloutBatch, Carryover, PartialGroup, Group, Completion, Problem, Solved, Success)
"""What checkpoints hold of groups."""


@dataclasses.dataclass(frozen=True)
class GroupSource:
    """What it takes to ask for a group and to score it.

    Attributes:
      tokenizer: decodes completions.
      prompts: token ids.
      stream: the training prompts, in their order.
      judge: of the completions.
      group: G.
      seed: the run's; with a prompt's number in the stream it decides every random number.
      shaping: changes of a group's rewards, in order.
    """

    tokenizer: Any
    prompts: Prompts
    stream: PromptStream
    judge: Judge
    group: int
    seed: int
    shaping: tuple[GroupShaping, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Of the tasks of a mixture; of a single one none, since it is all there is."""
        tasks = self.prompts.tasks
        return tuple(task.label for task in tasks) if len(tasks) > 1 else ()

    def ask(self, number: int, memory: Memory) -> tuple[PartialGroup, Memory]:
        """The group of this number, not begun yet, and what the stream remembers then."""
        problem, memory = self.stream.next(number, memory)
        return PartialGroup(number, (None,) * self.group, problem, self.prompts[problem]), memory

    def seeds(self, number: int) -> list[int]:
        """The seeds of the G completions of a prompt."""
        return [request_seed(self.seed, number * self.group + g) for g in range(self.group)]

    def told(self, memory: Memory, groups: Sequence[Group]) -> Memory:
        """What the stream remembers once these groups are scored."""
        return self.stream.told(memory, groups)

    def measured(self, before: Memory, after: Memory) -> dict[str, Any]:
        """What the stream measures of a step, from what it remembered before and after it."""
        return self.stream.measured(before, after)

    def score(self, whole: Sequence[PartialGroup]) -> tuple[dict[int, Group], Failures]:
        """Groups whose completions are all there, by number, with texts and scores of what was asked; and what
        failed.
        """
        done = [c for group in whole for c in group.completions]
        texts = self.tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True)
        done = [dataclasses.replace(c, text=text) for c, text in zip(done, texts, strict=True)]
        scores = self.judge.score([(whole[i // self.group].problem, c) for i, c in enumerate(done)])
        for i, steps in enumerate(scores.steps):
            done[i] = dataclasses.replace(done[i], extras=done[i].extras | {STEP_REWARDS: steps})
        groups = {}
        for index, asked in enumerate(whole):
            at = slice(index * self.group, (index + 1) * self.group)
            parts = {name: values[at] for name, values in scores.parts.items()}
            groups[asked.number] = Group(
                asked.problem, asked.prompt, tuple(done[at]), scores.reward[at], scores.accuracy[at], parts
            )
        return groups, scores.failures

    def shaped(self, groups: Mapping[int, Group], version: int, budget: Callable[[str], int]) -> dict[int, Group]:
        """The groups with their rewards shaped.

        ``version``: optimiser updates so far; ``budget``: the longest completion of a task, by its label. Schedules of
        rewards read both.
        """
        found = dict(groups)
        for shape in self.shaping:
            found = {number: shape(group, version, budget(group.problem.task)) for number, group in found.items()}
        return found


def request_seed(run_seed: int, number: int) -> int:
    """The 64-bit seed of one completion: no two requests of a run share one."""
    return (run_seed & 0xFFFFFF) << 40 | number


def informative(group: Group, reads: str = "accuracy") -> bool:
    """Whether a group can teach: what a filter reads of the members that could be scored is not the same for all.

    "accuracy": where each is right or wrong, some but not all are right (DAPO, arXiv 2503.14476, eq. 11); where a
    verifier tells the share that is right, the shares differ (verl's ``acc``). "reward": their rewards.
    """
    values = group.rewards if reads == "reward" else group.accuracy
    return varied(values[~np.isnan(group.rewards)])


def whole(completion: Completion | None, longest: int) -> bool:
    """Whether sampling it came to its end.

    If not it was interrupted, or reached the budget of a step below ``longest``.
    """
    if completion is None or completion.finish_reason == "aborted":
        return False
    return completion.finish_reason != "length" or len(completion.tokens) >= longest


def tokens_in(groups: Sequence[Group | PartialGroup]) -> int:
    """Tokens of all their completions."""
    return sum(len(c.tokens) for g in groups for c in g.completions if c is not None)


QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
"""Of rewards and lengths, by what their metrics' names end with."""
MEASURED = (
    "reward/mean", "reward/std", "reward/zero_std_fraction", "reward/accuracy",
    "completions/mean_length", "completions/truncated_fraction", "completions/repetition_fraction",
    "completions/distinct_fraction",
    *(f"reward/{name}" for name in QUANTILES), *(f"completions/length_{name}" for name in QUANTILES),
)  # fmt: skip
"""What ``describe`` says of any groups; where there is none it is NaN."""


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the groups finished in a step, before any filter."""
    if not groups:
        return dict.fromkeys(MEASURED, math.nan)
    scores = np.stack([g.rewards for g in groups])
    completions = [c for g in groups for c in g.completions]
    ended = [c.finish_reason for c in completions]
    lengths = np.array([len(c.tokens) for c in completions])
    looping = loops([written(c) for c in completions]) | (np.array(ended) == "repetition")
    shared = [name for name in groups[0].parts if all(name in g.parts for g in groups)]  # older ones may lack some
    parts = {_metric(name): _known(np.nanmean, np.stack([g.parts[name] for g in groups])) for name in shared}
    return parts | {
        "reward/mean": _known(np.nanmean, scores),
        "reward/std": _known(np.nanstd, scores),
        "reward/zero_std_fraction": _share_without_differences(groups),
        "reward/accuracy": share_correct(groups),
        "completions/mean_length": float(lengths.mean()),
        "completions/truncated_fraction": ended.count("length") / len(ended),
        "completions/repetition_fraction": float(looping.mean()),
        "completions/distinct_fraction": _known(np.nanmean, np.array([_distinct(group) for group in groups])),
        **_quantiles("reward/", scores[~np.isnan(scores)]),
        **_quantiles("completions/length_", lengths),
    }


def _distinct(group: Group) -> float:
    """How many different answers a group has, over its completions; what holds no answer counts as one. NaN of one
    completion. Where nothing is verified the answers are the texts."""
    extractor = "whole" if group.problem.verifier == "none" else group.problem.extractor
    answers = [answer_of(completion.text, extractor) for completion in group.completions]
    return len(set(answers)) / len(answers) if len(answers) > 1 else math.nan


OF_A_TASK = {
    "reward": "reward/mean",
    "accuracy": "reward/accuracy",
    "zero_std_fraction": "reward/zero_std_fraction",
    "mean_length": "completions/mean_length",
    "truncated_fraction": "completions/truncated_fraction",
}
"""What is said of each task of a mixture, ``task/<label>/<name>``, and as which metric of all groups."""


def describe_tasks(labels: Sequence[str], sampled: Sequence[Group], learned: Sequence[Group]) -> dict[str, float]:
    """Metrics of each task of a mixture: its groups that were finished in the step, before any filter, and how many of
    those that are learned from are its own."""
    found = {}
    for label in labels:
        own = describe([group for group in sampled if group.problem.task == label])
        found |= {f"task/{label}/{name}": own[metric] for name, metric in OF_A_TASK.items()}
        found[f"task/{label}/groups"] = sum(group.problem.task == label for group in learned)
    return found


def _quantiles(prefix: str, values: np.ndarray) -> dict[str, float]:
    """Each of ``QUANTILES``, between two values where it falls between them; NaN where there is none."""
    found = np.quantile(values, list(QUANTILES.values())) if values.size else [math.nan] * len(QUANTILES)
    return {prefix + name: float(value) for name, value in zip(QUANTILES, found, strict=True)}


def _metric(part: str) -> str:
    """What a part's mean is called."""
    if part in (REJECTED, REFUSED):
        return f"{part}_fraction"
    return part if part.startswith("constraint/") else f"reward/{part}"


def _share_without_differences(groups: Sequence[Group]) -> float:
    """The share of groups whose rewards are all equal, of those that have any: a single one is like itself.

    NaN where there is one completion of each prompt, or no reward at all.
    """
    scored = [g for g in groups if not np.isnan(g.rewards).all()]
    if not scored or len(groups[0].completions) == 1:
        return math.nan
    return float(np.mean([not informative(g, "reward") for g in scored]))


def share_correct(groups: Sequence[Group]) -> float:
    """The share of completions that the verifier calls correct; NaN where nothing is verified."""
    accuracy = np.stack([g.accuracy for g in groups])
    return _known(np.nanmean, np.where(np.isnan(accuracy), np.nan, accuracy >= 1))


def _known(statistic: Callable[[np.ndarray], Any], values: np.ndarray) -> float:
    """A statistic of the numbers that are there; NaN where none is, which NumPy would warn of."""
    return math.nan if np.isnan(values).all() else float(statistic(values))
