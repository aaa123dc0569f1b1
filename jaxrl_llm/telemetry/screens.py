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
    """An output for lines; the base class prints only warnings."""

    def __init__(self, console: Console):
        self._console = console

    def start(self) -> None:
        """Start the display."""

    def stop(self) -> None:
        """Stop the display and restore the terminal."""

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        """Show a finished step: ``3/9``, the time left, and its metrics."""

    def line(self, text: str) -> None:
        """Show an informative line."""

    def warn(self, text: str) -> None:
        """Show a warning."""
        self._console.print(Text(text), soft_wrap=True)


class Terminal(Screen):
    """A terminal: finished steps scroll by as a table; live lines below show progress and the current activity."""

    def __init__(self, console: Console, describe: Callable[[], str], panel: Panel):
        super().__init__(console)
        self._describe = describe
        self._panel = panel
        self._spinner = Spinner("dots" if console.encoding.lower().startswith("utf") else "line")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5, transient=True)
        self._rows = 0

    def start(self) -> None:
        """Show the live lines."""
        self._live.start()

    def stop(self) -> None:
        """Remove the live lines."""
        self._live.stop()

    def _render(self) -> Group:
        self._spinner.update(text=Text(self._describe(), style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*self._panel.lines(self._console.width, self._console.encoding), self._spinner)

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        """Print a row of the table, with a heading now and then."""
        layout = table.columns_for(self._console.width, metrics)
        if self._rows % HEADING_EVERY == 0:
            self._console.print(Text(table.heading(layout), style="bold"))
        self._rows += 1
        self.line(table.line(layout, step, left, metrics))

    def line(self, text: str) -> None:
        """Print a line above the live lines."""
        self._console.print(Text(text))

    def warn(self, text: str) -> None:
        """Print a line in colour."""
        self._console.print(Text(text, style="yellow"))


class LogFile(Screen):
    """A log file: one line for each finished step, and a line when a phase takes long: no bars, no escape codes.

    Args:
      console: of the file.
      describe: returns the current activity.
      patience: returns the seconds that the file may stay silent now.
    """

    def __init__(self, console: Console, describe: Callable[[], str], patience: Callable[[], float]):
        super().__init__(console)
        self._describe = describe
        self._patience = patience
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._break_silence, daemon=True)
        self._last = time.monotonic()
        self._repeats = 0

    def start(self) -> None:
        """Start the thread that breaks long silences."""
        self._watch.start()

    def stop(self) -> None:
        """Stop the thread."""
        self._stopped.set()
        self._watch.join()

    def _break_silence(self) -> None:
        while not self._stopped.wait(0.5):
            shortest = self._patience()
            if time.monotonic() - self._last >= max(shortest, min(shortest * 2**self._repeats, LONGEST_SILENCE)):
                repeats = self._repeats + 1
                self.line(f"... {self._describe()}")
                self._repeats = repeats

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        """Print a step as one line."""
        self.line(table.plain(step, left, metrics))

    def warn(self, text: str) -> None:
        """Print a warning as an ordinary line."""
        self.line(text)

    def line(self, text: str) -> None:
        """Print one line, which ends a silence."""
        self._console.print(Text(text), soft_wrap=True)
        self._last = time.monotonic()
        self._repeats = 0
