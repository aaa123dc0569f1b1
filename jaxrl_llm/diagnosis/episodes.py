"""Checks of episodes: tools that are never called, or in vain, and turns that bring nothing."""

import numpy as np

from jaxrl_llm.diagnosis.findings import Finding, of_change
from jaxrl_llm.diagnosis.history import History, Limit, Series, change_point
from jaxrl_llm.diagnosis.trends import improved, learned

FEW_CALLS, SHARE_LEFT = 0.02, 0.2
"""The calls in an episode that count as none, and the share of the past calls at which they are given up."""
MOSTLY = 0.8
"""The share of failed calls that is much."""
TIMES, MORE = 1.5, 1.0
"""The growth of turns that is much: as a multiple of the past, and in turns."""


def tools_unused(run: History) -> Finding | None:
    """Find episodes with tools that are not called, or hardly any more, while nothing is learned."""
    calls = _where(run["episode/tool_calls"], run["episode/tools"], 0.0)
    return _idle("tools_unused", run, calls, lambda past: np.maximum(FEW_CALLS, SHARE_LEFT * past), up=False)


def tools_failing(run: History) -> Finding | None:
    """Find calls of tools that nearly all fail, or cannot be read, while nothing is learned."""
    calls, errors = run["episode/tool_calls"], run["episode/tool_errors"]
    made = dict(zip(calls.steps.tolist(), calls.values.tolist(), strict=True))
    tried = np.array([max(made.get(step, 0.0), error) for step, error in zip(errors.steps.tolist(), errors.values)])  # noqa: B905  of one series
    known = tried > FEW_CALLS
    shares = Series(errors.steps[known], errors.values[known] / tried[known])
    return _idle("tools_failing", run, shares, lambda past: np.full_like(past, MOSTLY), up=True)


def turns_growing(run: History) -> Finding | None:
    """Find episodes of ever more turns, while nothing is learned."""
    return _idle(
        "turns_growing", run, run["episode/turns"], lambda past: np.maximum(TIMES * past, past + MORE), up=True
    )


def _idle(kind: str, run: History, series: Series, limit: Limit, up: bool) -> Finding | None:
    """Return the finding of a lasting change in a run that has not learned since."""
    found = change_point(series, limit, up)
    if found is None or learned(run) or improved(run, found.step):
        return None
    return of_change(kind, found.steep, found, run)


def _where(series: Series, other: Series, least: float) -> Series:
    """Return the measurements at steps where another series is above ``least``."""
    kept = np.isin(series.steps, other.steps[other.values > least])
    return Series(series.steps[kept], series.values[kept])
