"""Checks for a gap between training and held-out data: reward hacking and overfitting."""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from jaxrl_llm.diagnosis.findings import Finding, make_finding
from jaxrl_llm.diagnosis.history import History, Series, noise
from jaxrl_llm.diagnosis.trends import FEW, fallen, level, line, recent, risen
from jaxrl_llm.system.text import percent, short
from jaxrl_llm.types import MEAN_OF_TASKS

FEWEST_STEPS, FEWEST_TESTS, FEWEST_SINCE = 20, 5, 3
"""The fewest measurements for a finding: of training, of held-out data, and of the latter since it is flat."""
RISE, GAP = 0.1, 0.15
"""The least rise of training since then, and the least lead of training over held-out data."""
SHARE, SURE = 0.5, 2.5
"""The share of that rise that held-out data surely stays below, and the standard errors that make it sure."""
MOST = 200
"""The most measurements that are searched for a break."""


def reward_hacking(run: History) -> Finding | None:
    """Find a falling evaluation, or training accuracy, while a training reward rises or keeps its rise.

    The reward is the training reward or the reward model's score; another evaluation that rises excuses it.
    """
    rewards = {"training reward": run["reward/mean"], "reward model's score": run["reward_model/mean"]}
    for task, test in (run.evaluations | {"the accuracy in training": _in_blocks(run["reward/accuracy"])}).items():
        at = _peak(test)
        if at is None:
            continue
        step = int(test.steps[at])
        if any(risen(other, step + 1) for name, other in run.evaluations.items() if name != task):
            continue
        for name, series in rewards.items():
            if not len(series):
                continue
            stays = risen(series, int(series.steps[0])) and not fallen(series, step + 1)
            if stays or risen(series, step + 1):
                return make_finding(
                    "reward_hacking",
                    step,
                    task=task,
                    best=percent(float(test.values[at])),
                    now=percent(level(test)),
                    reward=name,
                    reward_then=short(_level_before(series, step + 1, recent(len(series)))),
                    reward_now=short(level(series)),
                )
    return None


def _level_before(series: Series, step: int, first: int) -> float:
    """Return the mean of the last measurements before a step; without any, the mean of the ``first`` of all."""
    before = series.before(step).values
    return float(np.mean(before[-recent(len(series)) :] if len(before) else series.values[:first]))


def _in_blocks(series: Series) -> Series:
    """Return means of up to 20 blocks of a series, of at least 5 measurements, at the blocks' last steps.

    Empty for a series shorter than four blocks.
    """
    count = min(len(series) // 5, 20)
    if count < 4:
        return Series(series.steps[:0], series.values[:0])
    parts = np.array_split(np.arange(len(series)), count)
    ends = [part[-1] for part in parts]
    return Series(series.steps[ends], np.array([series.values[part].mean() for part in parts]))


def _peak(test: Series) -> int | None:
    """Return the index of an evaluation's last best value before a sure fall by a tenth; None without a fall.

    Levels are means of several values: the best of many noisy values is biased.
    """
    values = test.values
    count = len(values)
    if count < 2:
        return None
    width = 3 if count >= FEW else 2 if count > 4 else 1
    means = np.convolve(values, np.ones(width) / width, "valid")
    best = float(means.max())
    drop = best - float(means[-1])
    error = noise(values) * math.sqrt(2 / width) if count > 4 else 0.0
    # Of few values it cannot be told what is noise.
    least = {1: 0.2, 2: 0.14, 3: 0.05}[width]
    if drop <= max((2 if count < FEW else 4) * error, least, 0.1 * best):
        return None
    # It may have been as good for long: the fall begins where it was for the last time.
    last = int(np.flatnonzero(means >= best - max(error, 0.1 * drop))[-1])
    return last + width - 1 - int(np.argmax(values[last : last + width][::-1]))


def overfitting(run: History) -> Finding | None:
    """Find training that still rises while held-out data no longer rises, or never did; reward hacking has
    precedence.
    """
    found = next((found for training, tests in _watched(run) if (found := _gap(training, tests))), None)
    return found if found is not None and reward_hacking(run) is None else None


def _watched(run: History) -> Iterator[tuple[Series, Mapping[str, Series]]]:
    """Yield training and held-out series as shares of right answers; for texts as the mean probability of a token."""
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
        training, tested = (Series(of.steps, np.exp(-np.clip(of.values, 0.0, 50.0))) for of in (run["loss"], texts))
        yield training, {"a token of the held-out texts": tested}


def _gap(training: Series, tests: Mapping[str, Series]) -> Finding | None:
    """Find learning on training data without learning on held-out data; None without it."""
    if len(training) < FEWEST_STEPS or not tests or min(map(len, tests.values())) < FEWEST_TESTS:
        return None
    started, _ = _break(Series(-training.steps[::-1], training.values[::-1]))
    breaks = {name: _break(test) for name, test in tests.items()}
    step = max([-started, *(at for at, _ in breaks.values())])
    last = int(training.steps[-1])
    if last - step < last / 4 or not risen(training, step):
        return None
    then = _level_before(training, step + 1, recent(len(training)) // 2)
    now = level(training)
    worst = min(tests, key=lambda name: level(tests[name]))
    if now - then < RISE or now - level(tests[worst]) < GAP:
        return None
    if not all(_flat(test, step, breaks[name][1], now - then) for name, test in tests.items()):
        return None
    held_out = percent(level(tests[worst]))
    return make_finding("overfitting", step, tested=worst, then=percent(then), training=percent(now), now=held_out)


def _flat(test: Series, step: int, deviation: float, rise: float) -> bool:
    """Whether held-out data has surely made no more than a share of ``rise`` since a step.

    ``deviation``: of each of its measurements.
    """
    since = test.since(step).values
    if len(since) < FEWEST_SINCE:
        return False
    x = np.arange(len(since)) - (len(since) - 1) / 2
    error = deviation * (len(since) - 1) / float(np.sqrt(x @ x))
    return line(since)[0] + SURE * error < SHARE * rise


def _break(series: Series) -> tuple[int, float]:
    """Return the step where a series levels off, and the deviation of one measurement.

    It is the break of a line that is constant after it, by least squares; the first step if the line has no slope
    before. For a reversed series, with negative steps, it is the step where the original begins to rise.
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
