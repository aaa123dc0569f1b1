"""Output of a run's lines: a terminal or a notebook with live lines below a table of steps, a log file, or warnings
only.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from jaxrl_llm.system.text import short, shown
from jaxrl_llm.telemetry.cell import CellOutput
from jaxrl_llm.telemetry.panel import Panel

LONGEST_SILENCE = 60.0
"""Longest wait in seconds between two lines of one phase; the waits double up to this."""


class Column(NamedTuple):
    """One column of the table of steps.

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
    Column("MFU", "throughput/mfu", 6, lambda value: f"{100 * value:.1f} %", 9),
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
    while len(in_columns(columns, gap, "step", "left")) > width and (gap > 1 or columns):
        if gap > 1:
            gap = 1
        else:
            least = max(columns, key=lambda column: column.rank)
            columns = tuple(column for column in columns if column is not least)
    return columns, gap


def in_columns(columns: Sequence[Column], gap: int, step: str, left: str, metrics: dict[str, Any] | None = None) -> str:
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
        if task and metric != "problems":  # the run printed their number before
            told[task] = f"{told.get(task, task)}  {metric.replace('_', ' ')} {shown(value)}"
    return "  ".join(told.values())


class Screen:
    """Output of a run's lines; a context manager, so that a terminal is restored in any case.

    On a terminal finished steps scroll by as a table above live lines; in a notebook both are one output of the cell,
    updated in place. A log file has one line for each step, and a line when a phase takes long: no bars, no escape
    codes.

    Args:
      console: of the terminal or file.
      describe: returns the current activity.
      patience: returns the seconds that a file may stay silent now.
      panel: the live lines above the activity.
      quiet: print only warnings.
    """

    def __init__(
        self,
        console: Console,
        describe: Callable[[], str],
        patience: Callable[[], float],
        panel: Panel,
        quiet: bool,
    ):
        self._console = console
        self._describe = describe
        self._patience = patience
        self._panel = panel
        self._quiet = quiet
        self._live: Live | None = None
        self._cell: CellOutput | None = None
        if not quiet and console.is_terminal and not console.is_dumb_terminal:
            self._spinner = Spinner("dots" if console.encoding.lower().startswith("utf") else "line")
            self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5, transient=True)
        self._rows = 0
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._break_silence, daemon=True)
        self._last = time.monotonic()
        self._repeats = 0

    def __enter__(self) -> "Screen":
        if self._console.is_jupyter and not self._quiet:
            self._cell = CellOutput()
        if self._live is not None:
            self._live.start()
        elif not self._quiet:
            self._watch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif not self._quiet:
            self._stopped.set()
            self._watch.join()
            if self._cell is not None:
                self._cell.show([])

    def _render(self) -> Group:
        self._spinner.update(text=Text(self._describe(), style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*self._panel.lines(self._console.width, self._console.encoding), self._spinner)

    def _break_silence(self) -> None:
        while not self._stopped.wait(0.5):
            if self._cell is not None:
                panel = self._panel.lines(self._console.width)
                self._cell.show([*(line.plain for line in panel), f"... {self._describe()}"])
                continue
            shortest = self._patience()
            if time.monotonic() - self._last >= max(shortest, min(shortest * 2**self._repeats, LONGEST_SILENCE)):
                repeats = self._repeats + 1
                self.line(f"... {self._describe()}")
                self._repeats = repeats

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        """Print a finished step: ``3/9``, the time left, and its metrics; except in a file with a heading at times."""
        if self._live is None and self._cell is None:
            self.line(plain(step, left, metrics))
            return
        layout = columns_for(self._console.width, metrics)
        if self._rows % 40 == 0:
            self._print(in_columns(*layout, "step", "left"), "bold")
        self._rows += 1
        self.line(in_columns(*layout, step, left, metrics))

    def line(self, text: str, warning: bool = False) -> None:
        """Print a line, which ends a silence; warnings are coloured on a terminal."""
        if self._quiet and not warning:
            return
        self._print(text, "yellow" if warning and (self._live or self._cell) else "")
        self._last = time.monotonic()
        self._repeats = 0

    def _print(self, text: str, style: str) -> None:
        if self._cell is not None:
            self._cell.add(text, bool(style))
        else:
            self._console.print(Text(text, style=style), soft_wrap=self._live is None)
