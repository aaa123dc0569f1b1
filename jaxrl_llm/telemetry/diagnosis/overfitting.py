"""Whether a run learns its training rows by heart: right there ever more often, and no better on what is held out."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import numpy as np

from jaxrl_llm.telemetry.diagnosis.history import History, Series
from jaxrl_llm.telemetry.diagnosis.learning import level, line, recent, risen
from jaxrl_llm.types import MEAN_OF_TASKS

FEWEST_STEPS, FEWEST_TESTS, FEWEST_SINCE = 20, 5, 3
"""Measurements below which nothing is said: of the training, of what is held out, and of that since it is flat."""
RISE, GAP = 0.1, 0.15
"""The least by which training must have risen since, and by which it must be ahead of what is held out."""
SHARE, SURE = 0.5, 2.5
"""The share of that rise which what is held out has surely not made: by so many standard errors."""
MOST = 200
"""Measurements among which a break is looked for."""


@dataclasses.dataclass(frozen=True)
class Gap:
    """What is learned and not what is held out.

    Attributes:
      step: since when.
      tested: what is held out, by name.
      training_then, training_now: the share of right answers in training at that step, and now.
      now: the share of right answers on what is held out.
    """

    step: int
    tested: str
    training_then: float
    training_now: float
    now: float


def overfitted(run: History) -> Gap | None:
    """Where training goes on to rise while what is held out has stopped to, or never did; None where it does not."""
    return next((found for training, tests in _watched(run) if (found := _gap(training, tests))), None)


def _watched(run: History) -> Iterator[tuple[Series, Mapping[str, Series]]]:
    """Training and what is held out, both as shares of right answers; of texts as the mean probability of a token."""
    rewards = run["reward/mean"]
    if len(rewards):
        accuracy = run["reward/accuracy"]
        # A reward from 0 to 1 stands in for the accuracy where that was not measured.
        if len(accuracy) or (rewards.values.min() > -0.2 and rewards.values.max() < 1.2):
            tests = run.evaluations
            mean = {MEAN_OF_TASKS: tests[MEAN_OF_TASKS]} if MEAN_OF_TASKS in tests else tests
            yield accuracy if len(accuracy) else rewards, mean
        return
    for name in ("pairs", "steps"):
        yield run[f"{name}/accuracy"], {f"held-out {name}": run[f"eval/{name}/accuracy"]}
    texts = run["eval/text/loss"]
    if len(texts):
        yield _likelihood(run["loss"]), {"a token of the held-out texts": _likelihood(texts)}


def _likelihood(losses: Series) -> Series:
    return Series(losses.steps, np.exp(-np.clip(losses.values, 0.0, 50.0)))


def _gap(training: Series, tests: Mapping[str, Series]) -> Gap | None:
    if len(training) < FEWEST_STEPS or not tests or min(map(len, tests.values())) < FEWEST_TESTS:
        return None
    started, _ = _break(Series(-training.steps[::-1], training.values[::-1]))
    breaks = {name: _break(test) for name, test in tests.items()}
    step = max([-started, *(at for at, _ in breaks.values())])
    last = int(training.steps[-1])
    if last - step < last / 4 or not risen(training, step):
        return None
    before = training.before(step + 1).values
    width = recent(len(training))
    then = float(np.mean(before[-width:] if len(before) else training.values[: width // 2]))
    now = level(training)
    worst = min(tests, key=lambda name: level(tests[name]))
    if now - then < RISE or now - level(tests[worst]) < GAP:
        return None
    if not all(_flat(test, step, breaks[name][1], now - then) for name, test in tests.items()):
        return None
    return Gap(step, worst, then, now, level(tests[worst]))


def _flat(test: Series, step: int, deviation: float, rise: float) -> bool:
    """Whether what is held out, each measurement with a deviation, has surely made no more than a share of a rise since
    a step."""
    since = test.since(step).values
    if len(since) < FEWEST_SINCE:
        return False
    x = np.arange(len(since)) - (len(since) - 1) / 2
    error = deviation * (len(since) - 1) / float(np.sqrt(x @ x))
    return line(since).amount + SURE * error < SHARE * rise


def _break(series: Series) -> tuple[int, float]:
    """Where a series levels off, and the deviation of one measurement.

    It is the break of the line that is constant after it, by least squares; the first step where it has no slope
    before. Of a series that runs backwards, with negative steps, it is where that begins to rise.
    """
    kept = np.unique(np.linspace(0, len(series) - 1, MOST).astype(int))
    steps = series.steps[kept].astype(float)
    values = series.values[kept] - series.values[kept].mean()
    # One line of ``min(steps, break)`` for each break; the first leaves the constant.
    bent = np.minimum(steps[None, :], steps[:, None])
    bent -= bent.mean(axis=1, keepdims=True)
    sizes = np.maximum(np.sum(bent**2, axis=1), 1e-12)
    explained = (bent @ values) ** 2 / sizes
    best = int(np.argmax(explained))
    variance = max(float(values @ values) - explained[best], 0.0) / (len(values) - 2)
    if explained[best] <= 9 * variance:  # a slope of less than three standard errors
        return int(steps[0]), math.sqrt(float(values @ values) / (len(values) - 1))
    # Of breaks that chance cannot tell apart, the earliest; steps that run backwards are negative.
    alike = steps[explained >= explained[best] - 2 * variance]
    return int(alike[np.argmin(np.abs(alike))]), math.sqrt(variance)
