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
    tools = run["episode/tools"]
    calls = _where(_tried(run), tools.steps[tools.values > 0])
    return _idle("tools_unused", run, calls, lambda past: np.maximum(FEW_CALLS, SHARE_LEFT * past), up=False)


def tools_failing(run: History) -> Finding | None:
    """Find calls of tools that nearly all fail, or cannot be read, while nothing is learned."""
    tried, errors = _tried(run), run["episode/tool_errors"]
    tried = _where(tried, np.intersect1d(tried.steps[tried.values > FEW_CALLS], errors.steps))
    shares = Series(tried.steps, _where(errors, tried.steps).values / tried.values)
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


def _tried(run: History) -> Series:
    """Return the calls of an episode, with those that could not be read: they are errors, and no calls."""
    calls, errors = run["episode/tool_calls"], run["episode/tool_errors"]
    failed = dict(zip(errors.steps.tolist(), errors.values.tolist(), strict=True))
    values = [max(call, failed.get(step, 0.0)) for step, call in zip(calls.steps.tolist(), calls.values, strict=True)]
    return Series(calls.steps, np.array(values, float))


def _where(series: Series, steps: np.ndarray) -> Series:
    """Return the measurements at these steps."""
    kept = np.isin(series.steps, steps)
    return Series(series.steps[kept], series.values[kept])
