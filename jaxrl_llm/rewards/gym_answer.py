"""Scoring by reasoning-gym itself. For the pool: some of its data sets evaluate the expression that the model wrote."""

import functools
import json
from typing import Any

import reasoning_gym

from jaxrl_llm.tasks.extract import normalised
from jaxrl_llm.types import Problem


def score(answer: str, problem: Problem) -> float:
    """Score an answer by the problem's data set: 1 is right, less is partial credit."""
    metadata = problem.metadata
    dataset = _dataset(metadata["generator"], json.dumps(metadata["options"], sort_keys=True))
    return float(dataset.score_answer(normalised(answer), metadata["entry"]))


@functools.lru_cache(maxsize=64)
def _dataset(name: str, options: str) -> Any:
    return reasoning_gym.create_dataset(name, size=1, seed=0, **json.loads(options))
