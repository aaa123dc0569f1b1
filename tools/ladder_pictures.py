"""The curves of a ladder's runs, with intervals, as a picture for ablate."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ladder_statistics import Line, Row, accuracy_of, curve, interval, length_of, measures_of

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#3ca951", "#a463f2", "#9c6b4e", "#6cc5b0", "#97bbf5")
WINDOW = 5
"""Steps that a point of a training curve is the mean of."""


def draw(lines: Sequence[Line], runs: Mapping[str, Mapping[int, Sequence[Row]]], path: Path) -> None:
    """Accuracy, entropy, length and, where a rung has one, the KL to the reference by steps, each with its mean over
    seeds and the 95 % interval; the last panel has the accuracy at the end, of each seed too."""
    from matplotlib.figure import Figure

    seeds = [list(runs[line.rung.name].values()) for line in lines]
    colours = [COLOURS[number % len(COLOURS)] for number in range(len(lines))]
    name = accuracy_of(seeds[0][0])
    shown = [(name, "accuracy", 1), ("entropy", "entropy, nats", WINDOW), (length_of(name), "length, tokens", 1)]
    if any(curve(rows, "kl") for rung in seeds for rows in rung):
        shown.append(("kl", "KL to the reference, nats a token", 1))
    columns = len(shown) // 2 + 1
    figure = Figure(figsize=(5 * columns, 7), layout="constrained")
    panels = list(figure.subplots(2, columns).ravel())
    while len(panels) > len(shown) + 1:
        panels.pop().remove()
    for axes, (key, title, window) in zip(panels, shown, strict=False):
        _curves(axes, [[averaged(curve(rows, key), window) for rows in rung] for rung in seeds], colours, lines)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
    _ends(panels[-1], seeds, colours, lines)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    panels[0].legend(fontsize=8, frameon=False, loc="lower right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _curves(
    axes: Any, rungs: Sequence[Sequence[Mapping[int, float]]], colours: Sequence[str], lines: Sequence[Line]
) -> None:
    """One curve for each rung that has measured this, with its band; ``rungs``: by step, of each seed of each rung."""
    measured = []
    for seeds, colour, line in zip(rungs, colours, lines, strict=True):
        if any(seeds):
            _band(axes, seeds, colour, line.rung.name)
        measured += [value for points in seeds for value in points.values()]
    if measured:  # of the seeds: intervals of two seeds are wider than the picture
        room = 0.05 * _span(measured)
        axes.set_ylim(min(measured) - room, max(measured) + room)


def _ends(axes: Any, seeds: Sequence[Sequence[Sequence[Row]]], colours: Sequence[str], lines: Sequence[Line]) -> None:
    """The accuracy at the end of each rung, with its interval, and of each seed."""
    for number, (rung, colour, line) in enumerate(zip(seeds, colours, lines, strict=True)):
        ends = [measures_of(rows)["accuracy"] for rows in rung]
        axes.scatter(ends, [number] * len(ends), s=10, color=colour, alpha=0.5)
        end = line.measures["accuracy"]
        axes.errorbar(end.mean, number, xerr=end.half, fmt="D", color=colour, capsize=4)
    low, high = axes.get_xlim()
    axes.set_xlim(max(low, 0.0), min(high, 1.0))
    axes.set_title("accuracy at the end", fontsize=10)
    axes.set_yticks(range(len(lines)), [line.rung.name for line in lines], fontsize=8)
    axes.invert_yaxis()


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
