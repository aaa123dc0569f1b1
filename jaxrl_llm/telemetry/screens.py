"""Where a run's lines go: a terminal with live lines below a table, a log file, or almost nowhere."""

import threading
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from jaxrl_llm.telemetry import columns
from jaxrl_llm.telemetry.panel import Panel

LONGEST_SILENCE = 60.0
"""The waits between two lines of one phase double up to this."""
HEADING_EVERY = 40


class Screen:
    """Where lines go; this one shows none."""

    def start(self) -> None:
        """Begin to show."""

    def stop(self) -> None:
        """Leave the place in order."""

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        """Show a finished step: ``3/9``, the time left, and what was measured."""

    def line(self, text: str) -> None:
        """Show what is good to know."""

    def warn(self, text: str) -> None:
        """Show what one must know."""


class Quiet(Screen):
    """Warnings alone."""

    def __init__(self, console: Console):
        self._console = console

    def warn(self, text: str) -> None:
        """A line of its own."""
        self._console.print(Text(text), soft_wrap=True)


class Terminal(Screen):
    """Finished steps scroll by as a table; below them live lines show how it goes, and say what is being done."""

    def __init__(self, console: Console, describe: Callable[[], str], panel: Panel):
        self._console = console
        self._describe = describe
        self._panel = panel
        self._spinner = Spinner("dots" if console.encoding.lower().startswith("utf") else "line")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5, transient=True)
        self._rows = 0

    def start(self) -> None:
        """Show the live lines."""
        self._live.start()

    def stop(self) -> None:
        """Take the live lines away."""
        self._live.stop()

    def _render(self) -> Group:
        self._spinner.update(text=Text(self._describe(), style="dim", overflow="ellipsis", no_wrap=True))
        return Group(*self._panel.lines(self._console.width, self._console.encoding), self._spinner)

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        """A row of the table, under its heading now and then."""
        layout = columns.columns_for(self._console.width, metrics)
        if self._rows % HEADING_EVERY == 0:
            self._console.print(Text(columns.heading(layout), style="bold"))
        self._rows += 1
        self.line(columns.line(layout, step, left, metrics))

    def line(self, text: str) -> None:
        """Above the live lines."""
        self._console.print(Text(text))

    def warn(self, text: str) -> None:
        """In colour."""
        self._console.print(Text(text, style="yellow"))


class LogFile(Screen):
    """One line for each finished step, and a line where a phase goes on for long: no bars, no escape codes.

    Args:
      console: of the file.
      describe: what is being done.
      patience: seconds that the file may stay silent now.
    """

    def __init__(self, console: Console, describe: Callable[[], str], patience: Callable[[], float]):
        self._console = console
        self._describe = describe
        self._patience = patience
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._break_silence, daemon=True)
        self._last = time.monotonic()
        self._repeats = 0

    def start(self) -> None:
        """Watch for long silences."""
        self._watch.start()

    def stop(self) -> None:
        """End the watch."""
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
        """One line."""
        self.line(columns.plain(step, left, metrics))

    def warn(self, text: str) -> None:
        """As every line."""
        self.line(text)

    def line(self, text: str) -> None:
        """One line, which ends a silence."""
        self._console.print(Text(text), soft_wrap=True)
        self._last = time.monotonic()
        self._repeats = 0
