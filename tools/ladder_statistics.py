"""What ablate tells of runs, from the rows of their metrics.jsonl alone: means over seeds, with intervals."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ladders import Rung
from scipy.special import stdtrit

from jaxrl_llm.errors import InputError, require

LAST = 3
"""Evaluations that the end is the mean of."""
LATE = 10
"""Steps that the end is the mean of."""
MANY = 10
"""The most rungs whose curves one picture can show."""
ACCURACY = ("pass@1", "reward")
"""What is compared: the accuracy, or the mean reward where nothing is verified."""
MEASURES = {
    "accuracy": "of the last 3 evaluations",
    "area": "below the curve of the accuracy, over its length",
    "entropy": "nats, last 10 steps",
    "length": "tokens, in the last 3 evaluations",
    "truncated": "share, last 10 steps",
    "sampled": "thousands of tokens to train on, those of groups that were thrown away among them",
    "seconds": "steps and evaluations",
    "reward": "mean, last 10 steps",
    "learning": "mean reward of all steps",
    "ratio spread": "size of the ratios' logarithms, last 10 steps, nats",
    "cut": "share of tokens that clipping cut, last 10 steps",
    "sampler gap": "learner against sampler, last 10 steps, nats",
    "rerouted": "share of tokens with other experts in the learner, last 10 steps",
}
"""What is told of a run."""

PANELS = {
    "reward": ("reward/mean",),
    "size of the ratio's logarithm, nats": ("ratio_spread",),
    "share of tokens that clipping cut": ("clip_fraction/low", "clip_fraction/high"),
    "learner against sampler, nats a token": ("sampler/logp_abs_diff_mean",),
}
"""What a picture has: metrics, added up where there are several."""

Row = Mapping[str, Any]
Measures = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean over seeds.

    Attributes:
      mean: of the values.
      half: half the width of its 95 % interval by Student's t; NaN with fewer than two values, or where one is NaN.
      n: how many there are.
    """

    mean: float
    half: float
    n: int

    @property
    def holds_zero(self) -> bool:
        """Whether 0 lies within it, or nothing says that it does not."""
        return not abs(self.mean) > self.half


def interval(values: Sequence[float]) -> Interval:
    """The mean with its 95 % interval: mean +- t(0.975, n - 1) s / sqrt(n), s the sample's deviation (ddof 1)."""
    n = len(values)
    if n < 2 or any(map(math.isnan, values)):
        return Interval(math.fsum(values) if n else math.nan, math.nan, n)
    half = float(stdtrit(n - 1, 0.975)) * statistics.stdev(values) / math.sqrt(n)
    return Interval(statistics.fmean(values), half, n)


def accuracy_of(rows: Sequence[Row]) -> str:
    """The name of the accuracy that a run's rows have, or of the reward without one; of a mixture that of the average.

    Raises:
      InputError: there is none.
    """
    measured = [name for row in rows for name in row if name.startswith("eval/")]
    for kind in ACCURACY:
        names = [name for name in measured if name.endswith(f"/{kind}")]
        if names:
            return next((name for name in names if name == f"eval/average/{kind}"), names[0])
    raise InputError("a ladder compares accuracies, and the run has none: set task.holdout above 0, or evaluation.task")


def length_of(accuracy: str) -> str:
    """The name of the mean length of the answers that an accuracy is of."""
    return f"{accuracy.rpartition('/')[0]}/mean_length"


def curve(rows: Sequence[Row], name: str) -> list[tuple[int, float]]:
    """(step, value) wherever a metric was measured."""
    return [(row["step"], row[name]) for row in rows if row.get(name) is not None]


def area(points: Sequence[tuple[int, float]]) -> float:
    """The mean height of a curve: its area by trapezoids over its length."""
    if len(points) < 2:
        return math.nan
    pairs = itertools.pairwise(points)
    return sum((b - a) * (x + y) / 2 for (a, x), (b, y) in pairs) / (points[-1][0] - points[0][0])


def measures_of(rows: Sequence[Row]) -> Measures:
    """``MEASURES`` of one run; NaN for what it did not measure."""
    name = accuracy_of(rows)
    learned = [row for row in rows if row["step"] > 0]
    found = curve(rows, name)
    seconds = [row.get(key) or 0.0 for row in rows for key in ("time/step_s", "time/evaluation_s")]
    return {
        "accuracy": _end(found, LAST),
        "area": area(found),
        "entropy": _end(curve(learned, "entropy"), LATE),
        "length": _end(curve(rows, length_of(name)), LAST),
        "truncated": _end(curve(learned, "completions/truncated_fraction"), LATE),
        "sampled": sum(sampled_in(row) for row in learned) / 1000,
        "seconds": sum(seconds),
        "reward": _end(curve(learned, "reward/mean"), LATE),
        "learning": _end(curve(learned, "reward/mean"), len(learned)),
        "ratio spread": _end(curve(learned, "ratio_spread"), LATE),
        "cut": sum(_end(curve(learned, f"clip_fraction/{side}"), LATE) for side in ("low", "high")),
        "sampler gap": _end(curve(learned, "sampler/logp_abs_diff_mean"), LATE),
        "rerouted": _end(curve(learned, "sampler/rerouted_fraction"), LATE),
    }


def sampled_in(row: Row) -> float:
    """Tokens that a step has sampled; NaN where its row does not say."""
    speed = row.get("throughput/sampled_tokens_per_s", math.nan) or 0.0  # null where nothing was sampled
    return speed * row.get("time/rollout_s", math.nan)


def _end(points: Sequence[tuple[int, float]], count: int) -> float:
    return statistics.fmean([value for _, value in points[-count:]]) if points else math.nan


@dataclasses.dataclass(frozen=True)
class Line:
    """What a table says of a rung.

    Attributes:
      rung: which.
      onto: the rung it is compared with; None for the first one.
      measures: over the seeds.
      gain: of the accuracy over that of ``onto``, by pairs of runs with the same seed; None where nothing is compared.
      total: as ``gain``, over the ladder's first rung.
      equal: as ``gain``, where both had sampled as many tokens (``gain_at_equal_tokens``).
      curves: of each seed, (tokens sampled so far, accuracy) at each evaluation.
    """

    rung: Rung
    onto: str | None
    measures: dict[str, Interval]
    gain: Interval | None
    total: Interval | None
    equal: Interval | None
    curves: dict[int, list[tuple[float, float]]]


def lines_of(rungs: Sequence[Rung], runs: Mapping[str, Mapping[int, Sequence[Row]]]) -> list[Line]:
    """A line for each rung that has finished runs; ``runs`` are rows by the rung's name and the seed."""
    found = {name: {seed: measures_of(rows) for seed, rows in seeds.items()} for name, seeds in runs.items() if seeds}
    lines = []
    for number, rung in enumerate(rungs):
        onto = rung.onto or (rungs[number - 1].name if number else None)
        seeds = found.get(rung.name)
        if seeds is None:
            continue
        means = {name: interval([one[name] for one in seeds.values()]) for name in MEASURES}
        gain = gain_of(seeds, found.get(onto or "", {}))
        total = gain_of(seeds, found.get(rungs[0].name, {})) if number else None
        before = runs.get(onto or "", {})
        equal = [gain_at_equal_tokens(rows, before[seed]) for seed, rows in runs[rung.name].items() if seed in before]
        curves = {seed: by_tokens(rows) for seed, rows in runs[rung.name].items()}
        lines.append(Line(rung, onto, means, gain, total, interval(equal) if equal else None, curves))
    require(bool(lines), "no run of this ladder is finished: run it first, without --draw")
    return lines


def gain_of(seeds: Mapping[int, Measures], before: Mapping[int, Measures]) -> Interval | None:
    """How much higher the accuracy is, by pairs of runs with the same seed; None where there is no pair."""
    gains = [seeds[seed]["accuracy"] - before[seed]["accuracy"] for seed in seeds if seed in before]
    return interval(gains) if gains else None


def gain_at_equal_tokens(rows: Sequence[Row], before: Sequence[Row]) -> float:
    """How much higher the accuracy is than that of ``before`` once both have sampled as many tokens: a mean over those
    at which the run that samples fewer had its last ``LAST`` evaluations, straight lines between evaluations."""
    curves = [by_tokens(rows), by_tokens(before)]
    shorter = min(curves, key=lambda points: points[-1][0])
    tokens = [count for count, _ in shorter[-LAST:]]
    found, base = (np.interp(tokens, *zip(*points, strict=True)) for points in curves)
    return float(np.mean(found - base))


def by_tokens(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(tokens sampled so far, accuracy) at each evaluation."""
    name = accuracy_of(rows)
    sampled = 0.0
    points = []
    for row in rows:
        sampled += sampled_in(row) if row["step"] else 0.0
        if row.get(name) is not None:
            points.append((sampled, row[name]))
    return points


def table(lines: Sequence[Line]) -> str:
    """A Markdown table for people."""
    published = any(line.rung.published is not None for line in lines)
    measured = list(MEASURES)[1:]
    measured = [name for name in measured if not all(math.isnan(line.measures[name].mean) for line in lines)]
    header = [
        "rung",
        "seeds",
        "accuracy",
        "gain, by pairs",
        f"over {lines[0].rung.name}",
        "at equal tokens",
        *measured,
        *["paper"] * published,
    ]
    cells = [header, ["---"] * len(header)]
    for line in lines:
        digits = {"length": 2, "sampled": 0, "seconds": 0, "ratio spread": 5, "sampler gap": 5}
        means = [shown(line.measures[name], digits.get(name, 3)) for name in ("accuracy", *measured)]
        row = [line.rung.name, str(line.measures["accuracy"].n), means[0], told(line.gain, line.onto)]
        row += [told(line.total), told(line.equal)]
        cells.append(
            [*row, *means[1:], *["" if line.rung.published is None else f"{line.rung.published:g}"] * published]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def shown(found: Interval, digits: int = 3) -> str:
    """The mean, and half the width of its interval where there is one."""
    if math.isnan(found.mean):
        return "-"
    return f"{found.mean:.{digits}f}" + ("" if math.isnan(found.half) else f" ± {found.half:.{digits}f}")


def told(gain: Interval | None, onto: str | None = None) -> str:
    """A gain, over which rung where that is said, and whether it is more than noise."""
    if gain is None or math.isnan(gain.mean):
        return ""
    over = f" over {onto}" if onto else ""
    if gain.n < 2:
        return f"{gain.mean:+.3f}{over}: one seed"
    noise = ": within noise" if gain.holds_zero else ""
    return f"{gain.mean:+.3f} ± {gain.half:.3f}{over}{noise}, {gain.n} pairs"


def picture(runs: Mapping[str, Mapping[int, Sequence[Row]]], path: Path) -> None:
    """Draw ``PANELS`` by steps: a line for each rung, the mean over its seeds; ``runs`` are those of ``lines_of``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, PANELS.items(), strict=True):
        for number, (rung, seeds) in enumerate((rung, seeds) for rung, seeds in runs.items() if seeds):
            values: dict[int, list[float]] = {}
            for row in itertools.chain(*seeds.values()):
                if all(row.get(name) is not None for name in names):
                    values.setdefault(row["step"], []).append(sum(row[name] for name in names))
            means = [statistics.fmean(values[step]) for step in sorted(values)]
            axes.plot(sorted(values), means, label=rung, linestyle=("-", "--", ":")[number % 3], linewidth=1.4)
        axes.set_title(title, fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_yscale("log")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.savefig(path, metadata={"Date": None})


def ranking(lines: Sequence[Line], path: Path) -> None:
    """Draw the accuracies in order, with their intervals, that of the first rung as a band: for ladders of many."""
    from matplotlib.figure import Figure

    base = lines[0].measures["accuracy"]
    rising = sorted(lines, key=lambda line: line.measures["accuracy"].mean)
    found = [line.measures["accuracy"] for line in rising]
    figure = Figure(figsize=(8, 1.5 + 0.24 * len(lines)), layout="constrained")
    axes = figure.subplots()
    axes.axvspan(base.mean - base.half, base.mean + base.half, color="0.9")
    axes.axvline(base.mean, color="0.6", linewidth=1)
    means, halves = ([getattr(one, name) for one in found] for name in ("mean", "half"))
    axes.errorbar(means, range(len(found)), xerr=halves, fmt="o", markersize=4, capsize=2, linewidth=1.2)
    axes.set_yticks(range(len(found)), [line.rung.name for line in rising])
    axes.set_xlabel(f"accuracy at the end, mean over seeds with its 95 % interval; band: {lines[0].rung.name}")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
