"""The best of a model's answers, by a reward model: ``jaxrl-llm eval --rerank``."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.cli.asking import Desk, as_asked
from jaxrl_llm.stages.taught import DEFAULT_SEPARATOR, Reader, taught
from jaxrl_llm.types import Problem

if TYPE_CHECKING:  # a command line that is wrong should say so before JAX is imported
    from jaxrl_llm.evaluate import Evaluated


def check_rerank(options: Any) -> None:
    """Refuse what leaves nothing to choose, or a reward model that learned to score something else.

    Raises:
      InputError: names the flag, its value and the remedy.
    """
    configs.require(options.give_up_after >= 0, f"--give_up_after must be at least 0, got {options.give_up_after}")
    if options.rerank is None:
        configs.require(
            options.rerank_by == "score",
            f"--rerank_by {options.rerank_by} needs a process reward model: add --rerank RUN_OR_MODEL",
        )
        configs.require(
            not options.give_up_after,
            f"--give_up_after {options.give_up_after} needs a process reward model: add --rerank RUN_OR_MODEL",
        )
        return
    configs.require(
        options.samples >= 2,
        f"--rerank chooses one of several answers, and --samples is {options.samples}: set it to at least 2",
    )
    by_steps = options.rerank_by != "score"
    configs.require(
        by_steps or not options.give_up_after,
        f"--give_up_after {options.give_up_after} reads the scores of steps: set --rerank_by product, minimum or last",
    )
    reader_of(options).check(options.rerank)


def reader_of(options: Any) -> Reader:
    """What ``--rerank_by`` takes the reward model for."""
    if options.rerank_by == "score":
        return Reader("--rerank", "ranking", "set --rerank_by product, minimum or last")
    return Reader("--rerank", "steps", "set --rerank_by score")


def untold_rerank(options: Any) -> list[str]:
    """A line where the reward model does not say what it was taught; none without one."""
    return [] if options.rerank is None else reader_of(options).untold(options.rerank)


def check_verified(options: Any, problems: Sequence[Problem]) -> None:
    """Refuse problems of which nobody knows whether the chosen answer is right."""
    configs.require(
        options.rerank is None or problems[0].verifier != "none",
        f"--rerank has nothing to measure on task {options.task.label}, which verifies no answers: give a task with "
        "answers and a verifier",
    )


@dataclasses.dataclass(frozen=True)
class Reranker:
    """A reward model that chooses, and that may end what it gives no chance.

    Attributes:
      model: where it scores.
      by: "score", "product", "minimum" or "last".
      give_up_after: steps in a row whose scores have each fallen; 0 never.
      separator: ends a step.
      tokenizer: the policy's.
    """

    model: Any
    by: str
    give_up_after: int
    separator: str
    tokenizer: Any

    def watch(self, problems: Sequence[Problem], samples: int) -> Any:
        """What ends answers while they are sampled, so many to each problem; None where nothing does."""
        from jaxrl_llm.stages.falling import FallingSteps

        if not self.give_up_after:
            return None
        asked = [problem for problem in problems for _ in range(samples)]
        return FallingSteps(self.model, asked, self.separator, self.give_up_after, self.tokenizer)

    def choose(self, found: "Evaluated") -> "Evaluated":
        """The evaluation with what it makes of the answers."""
        from jaxrl_llm.evaluate import reranked
        from jaxrl_llm.stages.judges import solution_scores

        items = [(problem, c) for problem, row in zip(found.problems, found.completions, strict=True) for c in row]
        scores = solution_scores(self.model, items, self.by, self.separator, self.tokenizer)
        scores = scores.reshape(found.correct.shape)
        weights = 1 / (1 + np.exp(-scores)) if self.by == "score" else scores
        return reranked(found, scores, weights)


def reranker(options: Any, desk: Desk, settings: configs.Run, status: Callable[[str], None]) -> Reranker | None:
    """What chooses among the answers; None where nothing is asked to.

    Raises:
      InputError: a reward model that is not there, is none, or cannot read what the model writes.
    """
    if options.rerank is None:
        return None
    from jaxrl_llm.stages.judges import load_judge

    policy = desk.policy
    longest = desk.engine.max_length - options.max_new_tokens
    asked = as_asked(policy.name, settings, configs.Scoring(()), longest, options.max_new_tokens)
    prompts = {options.task.label: desk.prompts}
    model = load_judge(asked, options.rerank, "--rerank", policy.mesh, policy.tokenizer, prompts, status)
    known = taught(options.rerank)
    separator = (known and known.separator) or DEFAULT_SEPARATOR
    return Reranker(model, options.rerank_by, options.give_up_after, separator, policy.tokenizer)
