"""The curves of a ladder's runs, with intervals, as a picture for ablate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ladder_statistics import Line, Row, accuracy_of, curve, interval, length_of, measures_of

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#9c6b4e", "#6cc5b0", "#97bbf5")
WINDOW = 5
"""Steps that a point of a training curve is the mean of."""


def draw(lines: Sequence[Line], runs: Mapping[str, Mapping[int, Sequence[Row]]], path: Path) -> None:
    """Accuracy, entropy and length by steps, each with its mean over seeds and the 95 % interval; the last panel has
    the accuracy at the end, of each seed too."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    panels = figure.subplots(2, 2).ravel()
    heights: list[list[float]] = [[], [], []]
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        rows = list(runs[line.rung.name].values())
        name = accuracy_of(rows[0])
        for panel, (key, window) in enumerate(((name, 1), ("entropy", WINDOW), (length_of(name), 1))):
            seeds = [averaged(curve(seed, key), window) for seed in rows]
            heights[panel] += [value for points in seeds for value in points.values()]
            _band(panels[panel], seeds, colour, line.rung.name)
        ends = [measures_of(seed)["accuracy"] for seed in rows]
        panels[3].scatter(ends, [number] * len(ends), s=10, color=colour, alpha=0.5)
        end = line.measures["accuracy"]
        panels[3].errorbar(end.mean, number, xerr=end.half, fmt="D", color=colour, capsize=4)
    for axes, title, values in zip(panels, ("accuracy", "entropy, nats", "length, tokens"), heights, strict=False):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        if values:  # of the seeds: intervals of two seeds are wider than the picture
            axes.set_ylim(min(values) - 0.05 * _span(values), max(values) + 0.05 * _span(values))
    low, high = panels[3].get_xlim()
    panels[3].set_xlim(max(low, 0.0), min(high, 1.0))
    panels[3].set_title("accuracy at the end", fontsize=10)
    panels[3].set_yticks(range(len(lines)), [line.rung.name for line in lines], fontsize=8)
    panels[3].invert_yaxis()
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _span(values: Sequence[float]) -> float:
    return max(values) - min(values) or 1.0


def averaged(points: Sequence[tuple[int, float]], window: int) -> dict[int, float]:
    """The means over windows of so many steps, by the last step of each; steps that measured nothing are left out."""
    parts: dict[int, list[float]] = {}
    for step, value in points:
        parts.setdefault(-(-step // window) * window, []).append(value)
    return {step: sum(values) / len(values) for step, values in parts.items()}


def _band(axes: Any, seeds: Sequence[Mapping[int, float]], colour: str, label: str) -> None:
    steps = sorted(set.intersection(*(set(points) for points in seeds)))
    found = [interval([points[step] for points in seeds]) for step in steps]
    axes.plot(steps, [one.mean for one in found], color=colour, label=label, linewidth=1.5)
    low, high = ([one.mean + sign * one.half for one in found] for sign in (-1, 1))
    axes.fill_between(steps, low, high, color=colour, alpha=0.12, linewidth=0)
