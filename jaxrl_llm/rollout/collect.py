"""Groups for one step: sample, score, and keep those that can teach."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rewards.group_shaping import GroupShaping
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.settings import Sampling
from jaxrl_llm.tasks import Task, encode, problem_index
from jaxrl_llm.types import Completion, Group, Problem

Status = Callable[[str], None]


def complete(
    engine: Engine, model: Any, tokenizer: Any, prompts: Sequence[np.ndarray], seeds: Sequence[int], sampling: Sampling,
    version: int = 0, status: Status = lambda text: None,
) -> list[Completion]:
    """One completion with its text for each prompt (token ids) and seed, in order; ``status`` hears how far it is."""
    engine.start(sampling)
    handles = engine.submit(prompts, seeds)
    done: dict[int, Completion] = {}
    tokens = 0
    while engine.busy:
        status(f"sampling {len(done)}/{len(handles)} completions, {tokens} tokens")
        tokens += engine.step(model, version)
        done |= dict(engine.collect())
    texts = tokenizer.batch_decode([done[h].tokens for h in handles], skip_special_tokens=True)
    return [dataclasses.replace(done[h], text=text) for h, text in zip(handles, texts, strict=True)]


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What it takes to turn a position in the stream of prompts into scored groups.

    Attributes:
      engine: the sampler of tokens.
      tokenizer: encodes prompts, decodes completions.
      task: how prompts are templated.
      problems: the training prompts.
      scorer: rewards.
      sampling: rules.
      group: G.
      seed: the run's; with the prompt's place in the stream it decides every random number.
      shaping: changes of a group's rewards, in order.
      status: hears what is going on.
      note: hears what should stay visible.
    """

    engine: Engine
    tokenizer: Any
    task: Task
    problems: Sequence[Problem]
    scorer: Scorer
    sampling: Sampling
    group: int
    seed: int
    shaping: tuple[GroupShaping, ...]
    status: Status
    note: Status

    def __call__(self, model: Any, version: int, cursor: int, count: int) -> tuple[list[Group], dict[str, float]]:
        """Groups of ``count`` prompts from place ``cursor`` of the stream, and the seconds it took."""
        start = time.perf_counter()
        numbers = range(cursor, cursor + count)
        problems = [self.problems[problem_index(self.seed, n, len(self.problems))] for n in numbers]
        prompts = [encode(problem, self.task, self.tokenizer) for problem in problems]
        seeds = [request_seed(self.seed, n * self.group + g) for n in numbers for g in range(self.group)]
        each = [prompt for prompt in prompts for _ in range(self.group)]
        done = complete(self.engine, model, self.tokenizer, each, seeds, self.sampling, version, self.status)
        sampled = time.perf_counter()
        self.status("scoring")
        scores = self.scorer.score([(problems[i // self.group], c) for i, c in enumerate(done)])
        if scores.message:
            self.note(f"{scores.errors} rewards failed, {scores.timeouts} timed out: {scores.message}")
        groups = [
            Group(problem, prompt, tuple(done[at]), scores.reward[at], scores.accuracy[at], {k: v[at] for k, v in scores.parts.items()})
            for i, (problem, prompt) in enumerate(zip(problems, prompts, strict=True))
            for at in [slice(i * self.group, (i + 1) * self.group)]
        ]
        for shape in self.shaping:
            groups = [shape(group, version, self.sampling.max_new_tokens) for group in groups]
        counts = {"reward/errors": scores.errors, "reward/timeouts": scores.timeouts}
        return groups, {"time/rollout_s": sampled - start, "time/reward_s": time.perf_counter() - sampled} | counts


def request_seed(run_seed: int, number: int) -> int:
    """The 64-bit seed of one completion: no two requests of a run share one."""
    return (run_seed & 0xFFFFFF) << 40 | number


@dataclasses.dataclass(frozen=True)
class Collected:
    """One step's groups.

    Attributes:
      groups: what the step learns from.
      fresh: for each group, whether this step's policy sampled it (if not, the step before did).
      sampled: every group sampled in this step, kept or not.
      carried: surplus groups for the next step.
      cursor: prompts consumed so far.
      metrics: seconds and counts.
    """

    groups: list[Group]
    fresh: list[bool]
    sampled: list[Group]
    carried: list[Group]
    cursor: int
    metrics: dict[str, float]


def informative(group: Group) -> bool:
    """Whether some but not all completions are correct: only then do their rewards teach."""
    return 0 < np.mean(group.accuracy >= 1) < 1


def collect(
    sample: Callable[[int, int], tuple[list[Group], dict[str, float]]],
    needed: int, per_round: int, cursor: int, carried: Sequence[Group], filter_groups: bool, max_rounds: int,
) -> Collected:
    """Fill a step with groups.

    Without the filter: one round of ``needed`` prompts. With it (DAPO's dynamic sampling, arXiv 2503.14476 section 3.2):
    what the step before left over comes first, then rounds of ``per_round`` prompts until enough informative groups are
    there. Surplus is carried to the next step, and dropped after that. When ``max_rounds`` are used up the step learns
    from the groups it has.

    Args:
      sample: (cursor, count) -> groups of the next ``count`` prompts, and seconds and counts, which are summed.
      needed: P.
      per_round: prompts sampled at a time; enough to fill the engine's slots.
      cursor: prompts consumed before this step.
      carried: the step before's surplus.
      filter_groups: whether only informative groups are kept.
      max_rounds: the budget.
    """
    kept, fresh = list(carried[:needed]), [False] * min(len(carried), needed)
    expired, sampled, rounds = len(carried) - len(kept), [], 0
    sums: dict[str, float] = {"time/rollout_s": 0.0, "time/reward_s": 0.0}
    while len(kept) < needed and rounds < (max_rounds if filter_groups else 1):
        count = max(per_round, needed - len(kept)) if filter_groups else needed
        groups, numbers = sample(cursor, count)
        cursor, rounds = cursor + count, rounds + 1
        sampled += groups
        sums = {name: sums.get(name, 0) + value for name, value in numbers.items()}
        good = [g for g in groups if informative(g)] if filter_groups else groups
        kept, fresh = kept + good, fresh + [True] * len(good)
    metrics = sums | {"prompts": float(cursor)}
    if filter_groups:
        metrics |= {
            "dynamic_sampling/rounds": rounds,
            "dynamic_sampling/kept_fraction": float(np.mean([informative(g) for g in sampled])) if sampled else 0.0,
            "dynamic_sampling/carried_in": min(len(carried), needed),
            "dynamic_sampling/carried_out": len(kept[needed:]),
            "dynamic_sampling/expired": expired,
            "dynamic_sampling/missing": max(needed - len(kept), 0),
        }
    return Collected(kept[:needed], fresh[:needed], sampled, kept[needed:], cursor, metrics)
