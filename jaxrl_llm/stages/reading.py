"""Reading what models say of many samples, a part at a time."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.learner import Forward, Sample

SCORED_AT_ONCE = 256
"""Samples of each call that scores many."""
AFTER = 0
"""Stands behind the last token: what is predicted there is the value of all that was read. No token is read there."""


def scored(
    forward: Forward, model: Any, samples: Sequence[Sample], output: str, status: Callable[[str], None]
) -> list[np.ndarray]:
    """One output of many samples, float32[t] each, some at a time: their arrays need not all fit the devices."""
    found: list[np.ndarray] = []
    for begin in range(0, len(samples), SCORED_AT_ONCE):
        status(f"scoring {begin}/{len(samples)}")
        found += forward.by_sample(model, samples[begin : begin + SCORED_AT_ONCE], output)
    return found


def scored_sample(
    prompt: np.ndarray, tokens: np.ndarray, scalars: dict[str, float], number: int | None = None, counted: bool = True
) -> Sample:
    """A completion whose score is the value at its ``last`` place, one behind its last token."""
    mask = np.zeros(len(tokens) + 1, bool)
    mask[-1] = counted
    return Sample(prompt, np.append(tokens, AFTER), mask, scalars | {"last": float(len(tokens))}, together=number)
