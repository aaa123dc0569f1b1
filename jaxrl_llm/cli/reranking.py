"""``jaxrl-llm eval --rerank``: a reward model chooses among several answers to each problem."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm.cli.asking import Policy, as_asked
from jaxrl_llm.errors import require
from jaxrl_llm.stages.taught import DEFAULT_SEPARATOR, Reader, taught
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.types import Problem

if TYPE_CHECKING:  # a command line that is wrong should say so before JAX is imported
    from jaxrl_llm.rollout.evaluate import TaskEvaluation
    from jaxrl_llm.stages.judges import FallingSteps


def check_rerank(options: Any) -> None:
    """Refuse options without a choice to make, or a reward model that learned to score something else.

    Raises:
      InputError: names the flag, its value and the remedy.
    """
    by_steps = options.rerank_by != "score"
    if options.rerank is None:
        for flag, given in (("rerank_by", by_steps), ("give_up_after", options.give_up_after)):
            needs = f"--{flag} {getattr(options, flag)} needs a process reward model: add --rerank RUN_OR_MODEL"
            require(not given, needs)
        return
    require(
        options.samples >= 2,
        f"--rerank chooses one of several answers, and --samples is {options.samples}: set it to at least 2",
    )
    require(
        by_steps or not options.give_up_after,
        f"--give_up_after {options.give_up_after} reads the scores of steps: set --rerank_by product, minimum or last",
    )
    reader_of(options).check(options.rerank)


def reader_of(options: Any) -> Reader:
    """Return the role of the reward model under ``--rerank_by``."""
    if options.rerank_by == "score":
        return Reader("--rerank", "ranking", "set --rerank_by product, minimum or last")
    return Reader("--rerank", "steps", "set --rerank_by score")


def reranker(
    options: Any,
    policy: Policy,
    prompts: Prompts,
    problems: Sequence[Problem],
    longest: int,
    settings: configs.Run,
    status: Callable[[str], None],
) -> tuple["FallingSteps | None", Callable[["TaskEvaluation"], "TaskEvaluation"]]:
    """Load the reward model; return a watcher that ends hopeless answers (None without ``--give_up_after``), and a
    function that reranks the answers of an evaluation.

    ``longest``: most tokens of a prompt.

    Raises:
      InputError: the reward model does not exist, is a language model, or cannot read the model's texts.
    """
    from jaxrl_llm.rollout.evaluate import reranked
    from jaxrl_llm.stages.judges import FallingSteps, load_judge, solution_scores

    by, falls, tokenizer = options.rerank_by, options.give_up_after, policy.tokenizer
    asked = as_asked(policy.name, settings, configs.Scoring(()), longest, options.max_new_tokens)
    known_prompts = {options.task.label: prompts}
    model = load_judge(asked, options.rerank, "--rerank", policy.mesh, tokenizer, known_prompts, status)
    known = taught(options.rerank)
    separator = DEFAULT_SEPARATOR if known is None else known.separator or DEFAULT_SEPARATOR

    def choose(found: "TaskEvaluation") -> "TaskEvaluation":
        items = [(problem, c) for problem, row in zip(found.problems, found.completions, strict=True) for c in row]
        scores = solution_scores(model, items, by, separator, tokenizer).reshape(found.correct.shape)
        return reranked(found, scores, 1 / (1 + np.exp(-scores)) if by == "score" else scores)

    answered = [problem for problem in problems for _ in range(options.samples)]
    return FallingSteps(model, answered, separator, falls, tokenizer) if falls else None, choose
