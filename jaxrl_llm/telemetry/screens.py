"""Output of a run's lines: a terminal with live lines below a table, a log file, or warnings only."""

import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from jaxrl_llm.telemetry import table
from jaxrl_llm.telemetry.panel import Panel

LONGEST_SILENCE = 60.0
"""Longest wait in seconds between two lines of one phase; the waits double up to this."""
HEADING_EVERY = 40


class Screen:
    """Output of a run's lines; a context manager, so that a terminal is restored in any case.

    On a terminal finished steps scroll by as a table above live lines. A log file has one line for each step, and a
    line when a phase takes long: no bars, no escape codes.

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
        if not quiet and console.is_terminal and not console.is_dumb_terminal:
            self._spinner = Spinner("dots" if console.encoding.lower().startswith("utf") else "line")
            self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5, transient=True)
        self._rows = 0
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._break_silence, daemon=True)
        self._last = time.monotonic()
        self._repeats = 0

    def __enter__(self) -> "Screen":
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

    def _render(self) -> Group:
        self._spinner.update(text=Text(self._describe(), style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*self._panel.lines(self._console.width, self._console.encoding), self._spinner)

    def _break_silence(self) -> None:
        while not self._stopped.wait(0.5):
            shortest = self._patience()
            if time.monotonic() - self._last >= max(shortest, min(shortest * 2**self._repeats, LONGEST_SILENCE)):
                repeats = self._repeats + 1
                self.line(f"... {self._describe()}")
                self._repeats = repeats

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        """Print a finished step: ``3/9``, the time left, and its metrics; on a terminal with a heading now and then."""
        if self._live is None:
            self.line(table.plain(step, left, metrics))
            return
        layout = table.columns_for(self._console.width, metrics)
        if self._rows % HEADING_EVERY == 0:
            self._console.print(Text(table.line(*layout, "step", "left"), style="bold"))
        self._rows += 1
        self.line(table.line(*layout, step, left, metrics))

    def line(self, text: str, warning: bool = False) -> None:
        """Print a line, which ends a silence; warnings are coloured on a terminal."""
        if self._quiet and not warning:
            return
        style = "yellow" if warning and self._live is not None else ""
        self._console.print(Text(text, style=style), soft_wrap=self._live is None)
        self._last = time.monotonic()
        self._repeats = 0
