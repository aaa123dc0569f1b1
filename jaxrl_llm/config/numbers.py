"""Numbers that every kind of run has, and what is refused of them."""

import math
from collections.abc import Mapping

from jaxrl_llm.config.run import Configuration, Evaluation
from jaxrl_llm.errors import require
from jaxrl_llm.folders import local

MAX_SEED = 1 << 24
"""Seeds from here on would repeat the random numbers of smaller ones."""


def check_numbers(run: Configuration, counts: Mapping[str, int], others: Mapping[str, int]) -> None:
    """Refuse counts that are too small, a seed that is too large, and a run without a model.

    Args:
      run: of any kind.
      counts: of this kind, at least 1 each, by field.
      others: of this kind, at least 0 each, by field.

    Raises:
      InputError: names field and value.
    """
    counts = {
        "steps": run.steps,
        **counts,
        "learner.epochs": run.learner.epochs,
        "learner.minibatches": run.learner.minibatches,
        "evaluation.samples": run.evaluation.samples,
        "output.checkpoint_every": run.output.checkpoint_every,
        "output.keep": run.output.keep,
    }
    others = {
        "evaluation.every": run.evaluation.every,
        "evaluation.limit": run.evaluation.limit,
        "output.samples": run.output.samples,
        "learner.microbatch_rows": run.learner.microbatch_rows,
        "learner.row_tokens": run.learner.row_tokens,
        **others,
    }
    for least, values in ((1, counts), (0, others)):
        for name, value in values.items():
            require(value >= least, f"{name} must be at least {least}, got {value}")
    check_seed("seed", run.seed)
    local(run.run_dir or "", "run_dir")
    require(run.run_dir != "", "run_dir is empty: give a folder, or leave it out for runs/NAME")
    require(
        bool(run.model),
        "model is empty: give a Hugging Face directory, a .gguf file, a built-in name, a hub id or RUN",
    )


def check_seed(name: str, seed: int) -> None:
    """InputError where a seed cannot be told from another; ``name`` is its field or flag."""
    require(0 <= seed < MAX_SEED, f"{name} must be from 0 to {MAX_SEED - 1}, got {seed}")


def check_answers_asked(evaluation: Evaluation) -> None:
    """Refuse a test whose answers cannot be sampled so.

    Raises:
      InputError: names field, value and remedy.
    """
    require(
        0 <= evaluation.temperature < math.inf,
        f"evaluation.temperature must be at least 0 (0 is greedy), and finite, got {evaluation.temperature}",
    )
    require(0 < evaluation.top_p <= 1, f"evaluation.top_p must be above 0 and at most 1, got {evaluation.top_p}")
    require(
        evaluation.samples == 1 or evaluation.temperature > 0,
        f"evaluation.samples {evaluation.samples} at temperature 0 would all be the same: set "
        "evaluation.temperature above 0",
    )
