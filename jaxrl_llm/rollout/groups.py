"""Groups from their place in the stream of prompts: what is asked, what is left unfinished, what it scores."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rewards.group_shaping import GroupShaping
from jaxrl_llm.tasks import Task, encode, problem_index
from jaxrl_llm.types import Completion, Group, Problem


@dataclasses.dataclass(frozen=True)
class Unfinished:
    """A group under way.

    Attributes:
      place: of its prompt in the stream.
      completions: G of them; None where no token has been sampled yet.
      problem: what was asked; None where nothing was asked yet, and in checkpoints of old.
      prompt: int32 token ids that the completions follow, kept from the moment they are asked: templates may read the
        clock, and data may change.
    """

    place: int
    completions: tuple[Completion | None, ...]
    problem: Problem | None = None
    prompt: np.ndarray | None = None

    @property
    def begun(self) -> bool:
        """Whether any token has been sampled."""
        return any(c is not None for c in self.completions)


@dataclasses.dataclass(frozen=True)
class Backlog:
    """What one step leaves to the next.

    Attributes:
      cursor: prompts consumed.
      carried: surplus groups, scored, in the order in which they are learned from.
      unfinished: groups to go on with, by place.
      good: informative groups among the last ones scored.
      seen: how many those are; both fade (see ``remember``).
    """

    cursor: int = 0
    carried: tuple[Group, ...] = ()
    unfinished: tuple[Unfinished, ...] = ()
    good: float = 0.0
    seen: float = 0.0


@dataclasses.dataclass(frozen=True)
class Collected:
    """One step's groups.

    Attributes:
      groups: what the step learns from; each token knows the version of the policy that sampled it.
      sampled: every group finished in this step, kept or not, by place.
      backlog: what is left to the next step.
      tokens: sampled in this step.
      version: of the policy that sampled them.
      metrics: seconds and counts, and what the groups sampled were like.
    """

    groups: list[Group]
    sampled: list[Group]
    backlog: Backlog
    tokens: int
    version: int
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Source:
    """What it takes to ask for a group and to score it.

    Attributes:
      tokenizer: encodes prompts, decodes completions.
      task: how prompts are templated.
      problems: the training prompts.
      scorer: rewards.
      group: G.
      seed: the run's; with the prompt's place in the stream it decides every random number.
      shaping: changes of a group's rewards, in order.
      note: hears what should stay visible.
    """

    tokenizer: Any
    task: Task
    problems: Sequence[Problem]
    scorer: Scorer
    group: int
    seed: int
    shaping: tuple[GroupShaping, ...]
    note: Callable[[str], None]

    def ask(self, place: int) -> tuple[Problem, np.ndarray, list[int]]:
        """The problem at a place of the stream, its prompt (token ids), and the seeds of its G completions."""
        problem = self.problems[problem_index(self.seed, place, len(self.problems))]
        return problem, np.asarray(encode(problem, self.task, self.tokenizer), np.int32), self.seeds(place)

    def seeds(self, place: int) -> list[int]:
        """The seeds of the G completions at a place of the stream."""
        return [request_seed(self.seed, place * self.group + g) for g in range(self.group)]

    def finish(self, whole: Sequence[Unfinished], version: int, budget: int) -> tuple[list[Group], dict[str, int]]:
        """Groups whose completions are all there, with texts and scores of what was asked; how many rewards failed.

        ``version``: optimiser updates so far; ``budget``: the longest completion. Schedules of rewards read both.
        """
        done = [c for group in whole for c in group.completions]
        texts = self.tokenizer.batch_decode([c.tokens for c in done], skip_special_tokens=True)
        done = [dataclasses.replace(c, text=text) for c, text in zip(done, texts, strict=True)]
        scores = self.scorer.score([(whole[i // self.group].problem, c) for i, c in enumerate(done)])
        if scores.message:
            self.note(f"{scores.errors} rewards failed, {scores.timeouts} timed out: {scores.message}")
        groups = [
            Group(asked.problem, asked.prompt, tuple(done[at]), scores.reward[at], scores.accuracy[at], {k: v[at] for k, v in scores.parts.items()})
            for i, asked in enumerate(whole)
            for at in [slice(i * self.group, (i + 1) * self.group)]
        ]
        for shape in self.shaping:
            groups = [shape(group, version, budget) for group in groups]
        return groups, {"reward/errors": scores.errors, "reward/timeouts": scores.timeouts}


def request_seed(run_seed: int, number: int) -> int:
    """The 64-bit seed of one completion: no two requests of a run share one."""
    return (run_seed & 0xFFFFFF) << 40 | number


def informative(group: Group) -> bool:
    """Whether some but not all completions are correct: only then do their rewards teach."""
    return 0 < np.mean(group.accuracy >= 1) < 1


def whole(completion: Completion | None, longest: int) -> bool:
    """Whether sampling it came to its end; if not it was interrupted, or reached the budget of a step below ``longest``."""
    if completion is None or completion.finish_reason == "aborted":
        return False
    return completion.finish_reason != "length" or len(completion.tokens) >= longest


def tokens_in(groups: Sequence[Group]) -> int:
    """Tokens of all their completions."""
    return sum(len(c.tokens) for g in groups for c in g.completions)


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of the groups finished in a step, before any filter; without a group there is nothing to measure."""
    if not groups:
        return {"reward/mean": math.nan, "reward/std": math.nan}
    scores = np.stack([g.rewards for g in groups])
    completions = [c for g in groups for c in g.completions]
    parts = {f"reward/{name}": float(np.nanmean([g.parts[name] for g in groups])) for name in groups[0].parts}
    return parts | {
        "reward/mean": float(np.nanmean(scores)),
        "reward/std": float(np.nanstd(scores)),
        "reward/zero_std_fraction": float(np.mean(np.nanmax(scores, axis=1) == np.nanmin(scores, axis=1))),
        "reward/accuracy": float(np.mean([g.accuracy >= 1 for g in groups])),
        "completions/mean_length": float(np.mean([len(c.tokens) for c in completions])),
        "completions/truncated_fraction": float(np.mean([c.finish_reason == "length" for c in completions])),
    }
