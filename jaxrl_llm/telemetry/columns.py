"""The columns that a finished step is shown in, and how numbers are written for people."""

import dataclasses
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of the progress table.

    Attributes:
      title: its heading.
      metric: the metric that it shows.
      width: characters, the gap before it not counted.
      style: float -> str.
      rank: columns of a higher rank are left out first where the terminal is narrow.
    """

    title: str
    metric: str
    width: int
    style: Callable[[float], str]
    rank: int


def seconds(value: float) -> str:
    """A duration: ``8.2 s``, ``3m05``, ``2h07``, ``4d03h``."""
    if value < 99.95:
        return f"{value:.1f} s"
    minutes = int(value // 60)
    hours = int(value // 3600)
    if hours < 1:
        return f"{minutes}m{int(value % 60):02d}"
    if hours < 48:
        return f"{hours}h{minutes % 60:02d}"
    return f"{hours // 24}d{hours % 24:02d}h"


def short(value: float) -> str:
    """A number of any size in at most 8 characters: ``0.312``, ``0.0312``, ``12.3``, ``1.2e+07``."""
    size = abs(value)
    if size == 0 or 0.1 <= size < 10:
        return f"{value:.3f}"
    if 0.001 <= size < 0.1:
        return f"{value:.4f}"
    return f"{value:.1f}" if 10 <= size < 1e5 else f"{value:.1e}"


def count(value: int) -> str:
    """How many, for people: ``960``, ``90.6 k``, ``134.5 M``, ``32.8 B``."""
    for size, unit in ((1e9, " B"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return str(value)


COLUMNS = (
    Column("reward", "reward/mean", 7, short, 0),
    Column("accuracy", "reward/accuracy", 8, lambda value: f"{100 * value:.1f} %", 1),
    Column("pairs", "pairs/accuracy", 7, lambda value: f"{100 * value:.1f} %", 1),
    Column("steps right", "steps/accuracy", 11, lambda value: f"{100 * value:.1f} %", 1),
    Column("loss", "loss", 7, short, 8),
    Column("length", "completions/mean_length", 7, lambda value: f"{value:.1f}", 4),
    Column("entropy", "entropy", 7, short, 6),
    Column("grad norm", "grad_norm", 9, short, 7),
    Column("tokens/s", "throughput/sampled_tokens_per_s", 8, lambda value: f"{value:.0f}", 5),
    Column("seconds", "time/step_s", 7, lambda value: f"{value:.1f}", 3),
)
STEP_WIDTH, LEFT_WIDTH = 9, 7


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns that are shown, and the characters between them."""

    columns: tuple[Column, ...] = COLUMNS
    gap: int = 2

    @property
    def width(self) -> int:
        """Characters of one line."""
        return STEP_WIDTH + LEFT_WIDTH + self.gap + sum(column.width + self.gap for column in self.columns)

    def join(self, step: str, cells: Sequence[str], left: str) -> str:
        """One line of right-aligned cells."""
        widths = (STEP_WIDTH, *(column.width for column in self.columns), LEFT_WIDTH)
        texts = (step, *cells, left)
        return (" " * self.gap).join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))


def columns_for(width: int, metrics: Collection[str]) -> Columns:
    """The widest layout within ``width`` characters: narrow gaps first, then without columns of high rank.

    ``metrics``: names of those that the run has; a column of another one is not there.
    """
    there = tuple(column for column in COLUMNS if column.metric in metrics)
    layout = Columns(there)
    if layout.width > width:
        layout = Columns(there, gap=1)
    while layout.width > width and layout.columns:
        least = max(layout.columns, key=lambda column: column.rank)
        layout = Columns(tuple(column for column in layout.columns if column is not least), gap=1)
    return layout


def heading(layout: Columns) -> str:
    """The titles, each over its column."""
    return layout.join("step", [column.title for column in layout.columns], "left")


def line(layout: Columns, step: str, left: str, metrics: dict[str, Any]) -> str:
    """A step's values under ``heading``."""
    return layout.join(step, [cell(column, metrics) for column in layout.columns], left)


def plain(step: str, left: str, metrics: dict[str, Any]) -> str:
    """A step's values with their names, for log files."""
    values = "".join(f"  {column.title} {cell(column, metrics)}" for column in COLUMNS if column.metric in metrics)
    return f"step {step}{values}  left {left}"


def cell(column: Column, metrics: dict[str, Any]) -> str:
    """One value as its column shows it: ``-`` where nothing was measured, infinity as it is."""
    return shown(metrics.get(column.metric), column.style)


def shown(value: float | None, style: Callable[[float], str] = short) -> str:
    """A number in its style; ``-`` where there is none, which is None or NaN."""
    if value is None or math.isnan(value):
        return "-"
    return style(float(value)) if math.isfinite(value) else str(float(value))


def evaluation(metrics: dict[str, Any]) -> str:
    """What a step's evaluation found: ``chain_sum  pass@1 0.987  mean length 8.000``; empty where there was none."""
    told: dict[str, str] = {}
    for name, value in metrics.items():
        _, _, measured = name.partition("eval/")
        task, _, metric = measured.rpartition("/")
        if task and metric != "problems":  # which the run has said before
            told[task] = f"{told.get(task, task)}  {metric.replace('_', ' ')} {shown(value)}"
    return "  ".join(told.values())


def happened(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """What happened in a step, and what is said of it, if anything is: ``("reference reset", "")``."""
    there = [(name, value) for name, value in metrics.items() if name.startswith("event/") and value]
    return [
        (name.removeprefix("event/").replace("_", " "), value if isinstance(value, str) else "")
        for name, value in there
    ]


def event(name: str, text: str) -> str:
    """One of them in a line: ``reference reset``, ``teaches nothing: all advantages are 0``."""
    return f"{name}: {text}" if text else name
