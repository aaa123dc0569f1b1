"""What a person sees while a run goes on: a live table on a terminal, plain lines in a log file. All on stderr."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from jaxrl_llm.telemetry import columns

WITHIN_A_STEP = ("sampling", "scoring", "updating")
"""First words of the statuses that come and go inside each step."""
QUIET_SECONDS = 5.0
"""A log file is never silent for longer than this, unless an ordinary step takes longer."""
LONGEST_SILENCE = 60.0
"""The waits between two lines of one phase double up to this."""
RECENT_STEPS = 20
HEADING_EVERY = 40


class Progress:
    """Shows a run's progress; a context manager, so that the terminal is left in order whatever happens.

    Args:
      total_steps: the step that the run ends with.
      first_step: the first step that this process runs: 1 for a new run, s + 1 after resuming at s.
      console: where to; stderr if None.
    """

    def __init__(self, total_steps: int, first_step: int = 1, console: Console | None = None):
        console = console or Console(stderr=True, highlight=False)
        self._total, self._next_step = total_steps, first_step
        self._status, self._since = "starting", time.monotonic()
        self._step_began = time.monotonic()
        self._durations: tuple[float, ...] = ()
        live = console.is_terminal and not console.is_dumb_terminal
        self._screen = _Terminal(console, self.describe) if live else _LogFile(console, self)

    def __enter__(self) -> "Progress":
        self._screen.start()
        if self._next_step > 1:
            self.note(f"continuing at step {self._next_step} of {self._total}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._screen.stop()

    def status(self, text: str) -> None:
        """Say what is being done now: ``sampling 120/400 tokens``, ``loading smollm2-135m``.

        The clock beside it starts again when the first word changes.
        """
        if _phase(text) != _phase(self._status):
            self._since = time.monotonic()
        self._status = text

    def step(self, metrics: dict[str, Any]) -> None:
        """Keep one line for the finished step ``metrics["step"]``, and one for its evaluation where it holds one."""
        step, now = int(metrics["step"]), time.monotonic()
        if any(column.metric in metrics for column in columns.COLUMNS):
            self._durations = (*self._durations, now - self._step_began)[-RECENT_STEPS:]
            left = columns.time_left(self._durations, self._total - step)
            self._screen.row(f"{step}/{self._total}", columns.seconds(left or 0.0), metrics)
        evaluation = [f"{name.removeprefix('eval/')} {columns.short(float(value))}"
                      for name, value in metrics.items() if name.startswith("eval/") and value is not None]
        if evaluation:
            self.note(f"evaluation at step {step}:  " + "  ".join(evaluation))
        self._next_step, self._step_began = step + 1, now

    def note(self, text: str) -> None:
        """Keep one line of text."""
        self._screen.line(text)

    def describe(self) -> str:
        """The status line: which step is going on, what is being done, and for how long."""
        where = f"step {self._next_step}/{self._total}  " if _phase(self._status) in WITHIN_A_STEP else ""
        return f"{where}{self._status}  {columns.seconds(time.monotonic() - self._since)}"

    def patience(self) -> float:
        """Seconds that a log file may stay silent now."""
        return patience(self._status, self._durations)


def patience(status: str, durations: Sequence[float]) -> float:
    """Seconds of silence allowed under ``status`` after steps of ``durations`` seconds.

    Inside a step it is twice an ordinary step, so that a log file holds one line for each; otherwise QUIET_SECONDS.
    """
    return max(QUIET_SECONDS, 2 * max(durations, default=0.0) if _phase(status) in WITHIN_A_STEP else 0.0)


def _phase(status: str) -> str:
    return status.split(" ", 1)[0]


class _Terminal:
    """Finished steps scroll by as a table; below them one live line says what is being done."""

    def __init__(self, console: Console, describe: Callable[[], str]):
        self._console, self._describe = console, describe
        self._spinner = Spinner("dots" if console.encoding.lower().startswith("utf") else "line")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5, transient=True)
        self._rows = 0

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def _render(self) -> Spinner:
        self._spinner.update(text=Text(self._describe(), style="dim", overflow="ellipsis", no_wrap=True))
        return self._spinner

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        layout = columns.fitting(self._console.width)
        if self._rows % HEADING_EVERY == 0:
            self._console.print(Text(columns.heading(layout), style="bold"))
        self._rows += 1
        self.line(columns.line(layout, step, left, metrics))

    def line(self, text: str) -> None:
        self._console.print(Text(text))


class _LogFile:
    """One line for each finished step, and a line where a phase goes on for long: no bars, no escape codes."""

    def __init__(self, console: Console, progress: Progress):
        self._console, self._progress = console, progress
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._break_silence, daemon=True)
        self._last, self._repeats = time.monotonic(), 0

    def start(self) -> None:
        self._watch.start()

    def stop(self) -> None:
        self._stopped.set()
        self._watch.join()

    def _break_silence(self) -> None:
        while not self._stopped.wait(0.5):
            shortest = self._progress.patience()
            if time.monotonic() - self._last >= max(shortest, min(shortest * 2**self._repeats, LONGEST_SILENCE)):
                repeats = self._repeats + 1
                self.line(f"... {self._progress.describe()}")
                self._repeats = repeats

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        self.line(columns.plain(step, left, metrics))

    def line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._last, self._repeats = time.monotonic(), 0
