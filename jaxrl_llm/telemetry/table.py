"""The table of finished steps, and lines about evaluations and events in a step's row."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.system.text import short, shown


class Column(NamedTuple):
    """One column of the progress table.

    Attributes:
      title: its heading.
      metric: the metric that it shows.
      width: characters, without the gap before it.
      style: float -> str.
      rank: columns of a higher rank are left out first where the terminal is narrow.
    """

    title: str
    metric: str
    width: int
    style: Callable[[float], str]
    rank: int

    def cell(self, metrics: dict[str, Any]) -> str:
        """Return the value as the column shows it: ``-`` for a missing value; infinity is shown."""
        return shown(metrics.get(self.metric), self.style)


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


def columns_for(width: int, metrics: Collection[str]) -> tuple[tuple[Column, ...], int]:
    """Return the columns within ``width`` characters, and the characters between them.

    Gaps are narrowed first, then columns of high rank are left out.

    ``metrics``: names of the run's metrics; columns of others are left out.
    """
    columns = tuple(column for column in COLUMNS if column.metric in metrics)
    gap = 2
    while len(line(columns, gap, "step", "left")) > width and (gap > 1 or columns):
        if gap > 1:
            gap = 1
        else:
            least = max(columns, key=lambda column: column.rank)
            columns = tuple(column for column in columns if column is not least)
    return columns, gap


def line(columns: Sequence[Column], gap: int, step: str, left: str, metrics: dict[str, Any] | None = None) -> str:
    """Return a step's values in right-aligned columns; without ``metrics`` the titles, each over its column."""
    cells = [column.title if metrics is None else column.cell(metrics) for column in columns]
    widths = (STEP_WIDTH, *(column.width for column in columns), LEFT_WIDTH)
    texts = (step, *cells, left)
    return (" " * gap).join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))


def plain(step: str, left: str, metrics: dict[str, Any]) -> str:
    """Return a step's values with their names, for log files."""
    values = "".join(f"  {column.title} {column.cell(metrics)}" for column in COLUMNS if column.metric in metrics)
    return f"step {step}{values}  left {left}"


def evaluation(metrics: dict[str, Any]) -> str:
    """Return the metrics of a step's evaluation: ``chain_sum  pass@1 0.987  mean length 8.000``; empty without one."""
    told: dict[str, str] = {}
    for name, value in metrics.items():
        _, _, measured = name.partition("eval/")
        task, _, metric = measured.rpartition("/")
        if task and metric != "problems":  # which the run has said before
            told[task] = f"{told.get(task, task)}  {metric.replace('_', ' ')} {shown(value)}"
    return "  ".join(told.values())


def happened(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the events of a step, each with its explanation, which may be empty: ``("reference reset", "")``."""
    there = [(name, value) for name, value in metrics.items() if name.startswith("event/") and value]
    return [
        (name.removeprefix("event/").replace("_", " "), value if isinstance(value, str) else "")
        for name, value in there
    ]
