"""What a person sees while a run goes on: a live table on a terminal, plain lines in a log file. All on stderr."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rich import console as rich_console
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from jaxrl_llm.telemetry import columns, memory
from jaxrl_llm.telemetry.compiling import Compiling
from jaxrl_llm.telemetry.pace import EVALUATION, STEP, Pace, Schedule, time_left
from jaxrl_llm.telemetry.panel import Panel
from jaxrl_llm.telemetry.watch import Watch
from jaxrl_llm.types import Group

WITHIN_A_STEP = ("sampling", "scoring", "updating")
"""First words of the statuses that come and go inside each step."""
QUIET_SECONDS = 5.0
"""A log file is never silent for longer than this, unless an ordinary step takes longer."""
LONGEST_SILENCE = 60.0
"""The waits between two lines of one phase double up to this."""
HEADING_EVERY = 40

log = logging.getLogger(__name__)


class Progress:
    """Shows a run's progress; a context manager, so that the terminal is left in order whatever happens.

    Args:
      schedule: the run's.
      first_step: the first step that this process runs: 1 for a new run, s + 1 after resuming at s.
      console: where to; stderr if None.
      watch: looks for what goes wrong; None for nobody.
      quiet: show warnings alone.

    Attributes:
      pace: how long each kind of work takes; the loop tells it of checkpoints.
    """

    def __init__(
        self,
        schedule: Schedule,
        first_step: int = 1,
        console: Console | None = None,
        watch: Watch | None = None,
        quiet: bool = False,
    ):
        console = console or Console(stderr=True, highlight=False)
        self._schedule = schedule
        self._watch = watch
        self._next_step = first_step
        self._status = "starting"
        self._since = time.monotonic()
        self._block = contextlib.ExitStack()
        self._compiling = Compiling()
        self.pace = Pace(lambda: self._compiling.seconds)
        self._panel = Panel()
        self._warned: set[str] = set()
        self._screen: _Screen
        if quiet:
            self._screen = _Quiet(console)
        elif console.is_terminal and not console.is_dumb_terminal:
            self._screen = _Terminal(console, self.describe, self._panel)
        else:
            self._screen = _LogFile(console, self)

    def __enter__(self) -> "Progress":
        self._block.enter_context(self._compiling)
        self._screen.start()
        self._block.callback(self._screen.stop)
        if self._next_step > 1:
            self.note(f"continuing at step {self._next_step} of {self._schedule.steps}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._block.close()

    def begin(self) -> None:
        """All is loaded: from now on time goes into evaluations and steps, and memory counts."""
        self.pace.begin()
        self._panel.memory = memory.now

    def first_step(self) -> None:
        """Say that the first step of this process takes longer, unless all before it was there compiled."""
        if not self._compiling.warm:
            self.note(
                f"step {self._next_step} takes longer than those after it: it also compiles its programs, unless JAX's "
                "cache has them"
            )

    def status(self, text: str) -> None:
        """Say what is being done now: ``sampling 120/400 tokens``, ``loading smollm2-135m``.

        The clock beside it starts again when the first word changes.
        """
        if _phase(text) != _phase(self._status):
            self._since = time.monotonic()
        self._status = text

    def step(self, metrics: dict[str, Any]) -> None:
        """Keep one line for the step ``metrics["step"]``, which has learned; its evaluation is still to come."""
        self.pace.took(STEP)
        step = int(metrics["step"])
        left = time_left(self.pace.durations, self._schedule.ahead(step))
        shown = f"{step}/{self._schedule.steps}", columns.seconds(left or 0.0), metrics
        self._panel.step(metrics)
        self._screen.row(*shown)
        log.info("%s", columns.plain(*shown))
        self._next_step = step + 1
        self.status("writing down")

    def tested(self, step: int, metrics: dict[str, Any]) -> None:
        """Keep one line for what the evaluation after ``step`` has found."""
        self.pace.took(EVALUATION)
        self._panel.tested(metrics)
        if found := columns.evaluation(metrics):
            self.note(f"evaluation at step {step}:  {found}")

    def learned(self, step: int, groups: Sequence[Group]) -> None:
        """Show on a terminal, now and then, a completion that ``step`` has learned from."""
        self._panel.learned(step, groups)

    def happened(self, step: int, metrics: dict[str, Any]) -> None:
        """Keep one line for each event of the step's row, the whole of which this is, and for each new finding.

        An event that has a reason is a warning when it happens first.
        """
        for name, reason in columns.happened(metrics):
            tell = self.warn if reason and name not in self._warned else self.note
            tell(f"step {step}: {columns.event(name, reason)}")
            self._warned.add(name)
        for found in self._watch.see(metrics) if self._watch else ():
            told = f"{found.kind.replace('_', ' ')} since step {found.step}: {found.what}"
            self._panel.found(told)
            self.warn(f"step {step}: {told}")
            self.warn(f"  {found.why} Try {found.remedy}")

    def note(self, text: str) -> None:
        """Keep one line of text."""
        self._screen.line(text)
        log.info("%s", text)

    def warn(self, text: str) -> None:
        """Keep one line of text that whoever wants to see no progress wants to see too."""
        self._screen.warn(text)
        log.info("%s", text)

    def describe(self) -> str:
        """The status line: which step is going on, what is being done, and for how long."""
        where = f"step {self._next_step}/{self._schedule.steps}  " if _phase(self._status) in WITHIN_A_STEP else ""
        if (compiling := self._compiling.now()) is not None:
            name, since = compiling
            return f"{where}compiling {name}  {columns.seconds(since)}"
        return f"{where}{self._status}  {columns.seconds(time.monotonic() - self._since)}"

    def patience(self) -> float:
        """Seconds that a log file may stay silent now."""
        return patience(self._status, self.pace.durations.get(STEP, ()))


def patience(status: str, durations: Sequence[float]) -> float:
    """Seconds of silence allowed under ``status`` after steps of ``durations`` seconds.

    Inside a step it is twice an ordinary step, so that a log file holds one line for each; otherwise QUIET_SECONDS.
    """
    return max(QUIET_SECONDS, 2 * max(durations, default=0.0) if _phase(status) in WITHIN_A_STEP else 0.0)


def _phase(status: str) -> str:
    return status.split(" ", 1)[0].rstrip(":")


class _Screen(Protocol):
    """Where lines go."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        """A finished step."""

    def line(self, text: str) -> None:
        """What is good to know."""

    def warn(self, text: str) -> None:
        """What one must know."""


class _Quiet:
    """Warnings alone."""

    def __init__(self, console: Console):
        self._console = console

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        pass

    def line(self, text: str) -> None:
        pass

    def warn(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


class _Terminal:
    """Finished steps scroll by as a table; below them live lines show how it goes, and say what is being done."""

    def __init__(self, console: Console, describe: Callable[[], str], panel: Panel):
        self._console = console
        self._describe = describe
        self._panel = panel
        self._spinner = Spinner("dots" if console.encoding.lower().startswith("utf") else "line")
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=5, transient=True)
        self._rows = 0

    def start(self) -> None:
        self._live.start()

    def stop(self) -> None:
        self._live.stop()

    def _render(self) -> rich_console.Group:
        self._spinner.update(text=Text(self._describe(), style="dim", overflow="ellipsis", no_wrap=True))
        return rich_console.Group(*self._panel.lines(self._console.width, self._console.encoding), self._spinner)

    def row(self, step: str, left: str, metrics: dict[str, Any]) -> None:
        layout = columns.columns_for(self._console.width, metrics)
        if self._rows % HEADING_EVERY == 0:
            self._console.print(Text(columns.heading(layout), style="bold"))
        self._rows += 1
        self.line(columns.line(layout, step, left, metrics))

    def line(self, text: str) -> None:
        self._console.print(Text(text))

    def warn(self, text: str) -> None:
        self._console.print(Text(text, style="yellow"))


class _LogFile:
    """One line for each finished step, and a line where a phase goes on for long: no bars, no escape codes."""

    def __init__(self, console: Console, progress: Progress):
        self._console = console
        self._progress = progress
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._break_silence, daemon=True)
        self._last = time.monotonic()
        self._repeats = 0

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

    def warn(self, text: str) -> None:
        self.line(text)

    def line(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)
        self._last = time.monotonic()
        self._repeats = 0
