"""The best of a model's answers, by a reward model: ``jaxrl-llm eval --rerank``."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.cli.asking import Desk, as_asked
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks import Pairs, Steps
from jaxrl_llm.trained import find_run
from jaxrl_llm.types import Problem

if TYPE_CHECKING:  # a command line that is wrong should say so before JAX is imported
    from jaxrl_llm.evaluate import Evaluated


def check_rerank(options: Any) -> None:
    """Refuse what leaves nothing to choose, or a reward model that learned to score something else.

    Raises:
      InputError: names the flag, its value and the remedy.
    """
    if options.rerank is None:
        configs.require(
            options.rerank_by == "score",
            f"--rerank_by {options.rerank_by} needs a process reward model: add --rerank RUN_OR_MODEL",
        )
        return
    configs.require(
        options.samples >= 2,
        f"--rerank chooses one of several answers, and --samples is {options.samples}: set it to at least 2",
    )
    data = _learned_from(options.rerank)
    by_steps = options.rerank_by != "score"
    if data is not None and by_steps != isinstance(data, Steps):
        raise InputError(
            f"--rerank {options.rerank} learned to score "
            + (
                "whole answers: set --rerank_by score"
                if by_steps
                else "steps: set --rerank_by product, minimum or last"
            )
        )


def check_verified(options: Any, problems: Sequence[Problem]) -> None:
    """Refuse problems of which nobody knows whether the chosen answer is right."""
    configs.require(
        options.rerank is None or problems[0].verifier != "none",
        f"--rerank has nothing to measure on task {options.task.label}, which verifies no answers: give a task with "
        "answers and a verifier",
    )


def reranker(
    options: Any, desk: Desk, settings: configs.Run, status: Callable[[str], None]
) -> Callable[["Evaluated"], "Evaluated"]:
    """What adds the reward model's choice to an evaluation; nothing where none is asked for.

    Raises:
      InputError: a reward model that is not there, is none, or cannot read what the model writes.
    """
    if options.rerank is None:
        return lambda found: found
    from jaxrl_llm.evaluate import reranked
    from jaxrl_llm.stages.judges import load_judge, solution_scores

    policy = desk.policy
    asked = as_asked(policy.name, settings, (), desk.engine.max_length - options.max_new_tokens, options.max_new_tokens)
    prompts = {options.task.label: desk.prompts}
    model = load_judge(asked, options.rerank, "--rerank", policy.mesh, policy.tokenizer, prompts, status)
    separator = getattr(_learned_from(options.rerank), "separator", "\n")

    def choose(found: "Evaluated") -> "Evaluated":
        items = [(problem, c) for problem, row in zip(found.problems, found.completions, strict=True) for c in row]
        scores = solution_scores(model, items, options.rerank_by, separator, policy.tokenizer)
        scores = scores.reshape(found.correct.shape)
        weights = 1 / (1 + np.exp(-scores)) if options.rerank_by == "score" else scores
        return reranked(found, scores, weights)

    return choose


def _learned_from(name: str) -> Pairs | Steps | None:
    """The data of a reward model's run; None for a directory.

    Raises:
      InputError: there is nothing of this name.
    """
    try:
        trained = find_run(name)
    except InputError as error:
        raise InputError(f"--rerank: {error}") from None
    run = trained and trained.run
    return run.data if isinstance(run, configs.RewardModel) and isinstance(run.data, Pairs | Steps) else None
