"""What a person sees while a run goes on: a live table on a terminal, plain lines in a log file. All on stderr."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from jaxrl_llm.telemetry import columns, memory
from jaxrl_llm.telemetry.compiling import Compiling
from jaxrl_llm.telemetry.pace import EVALUATION, STEP, Pace, Schedule, time_left
from jaxrl_llm.telemetry.panel import Panel
from jaxrl_llm.telemetry.screens import LogFile, Quiet, Screen, Terminal
from jaxrl_llm.telemetry.status import Status, patience
from jaxrl_llm.telemetry.watch import Watch
from jaxrl_llm.types import Group

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
      compiling: what JAX compiles meanwhile.
      now: what is being done.
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
        self._block = contextlib.ExitStack()
        self.compiling = Compiling()
        self.now = Status(first_step, schedule.steps, self.compiling)
        self.pace = Pace(lambda: self.compiling.seconds)
        self._panel = Panel()
        self._warned: set[str] = set()
        self._screen: Screen
        if quiet:
            self._screen = Quiet(console)
        elif console.is_terminal and not console.is_dumb_terminal:
            self._screen = Terminal(console, self.now.describe, self._panel)
        else:
            durations = self.pace.durations
            self._screen = LogFile(console, self.now.describe, lambda: patience(self.now.text, durations.get(STEP, ())))

    def __enter__(self) -> "Progress":
        self._block.enter_context(self.compiling)
        self._screen.start()
        self._block.callback(self._screen.stop)
        if self.now.step > 1:
            self.note(f"continuing at step {self.now.step} of {self._schedule.steps}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._block.close()

    def begin(self) -> None:
        """All is loaded: from now on time goes into evaluations and steps, and memory counts."""
        self.pace.begin()
        self._panel.memory = memory.now

    def status(self, text: str) -> None:
        """Say what is being done now: ``sampling 120/400 tokens``, ``loading smollm2-135m``."""
        self.now.say(text)

    def step(self, metrics: dict[str, Any]) -> None:
        """Keep one line for the step ``metrics["step"]``, which has learned; its evaluation is still to come."""
        self.pace.took(STEP)
        step = int(metrics["step"])
        left = time_left(self.pace.durations, self._schedule.ahead(step))
        shown = f"{step}/{self._schedule.steps}", columns.seconds(left or 0.0), metrics
        self._panel.step(metrics)
        self._screen.row(*shown)
        log.info("%s", columns.plain(*shown))
        self.now.step = step + 1
        self.status("writing down")

    def tested(self, step: int, metrics: dict[str, Any]) -> None:
        """Keep one line for what the evaluation after ``step`` has found."""
        self.pace.took(EVALUATION)
        self._panel.tested(metrics)
        if found := columns.evaluation(metrics):
            self.note(f"evaluation at step {step}:  {found}")

    def happened(self, step: int, metrics: dict[str, Any], groups: Sequence[Group] = ()) -> None:
        """Keep one line for each event of the step's row, the whole of which this is, and for each new finding.

        An event that has a reason is a warning when it happens first. ``groups``: what the step has learned from, of
        which a terminal shows a completion now and then.
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
        self._panel.learned(step, groups)

    def note(self, text: str) -> None:
        """Keep one line of text."""
        self._screen.line(text)
        log.info("%s", text)

    def warn(self, text: str) -> None:
        """Keep one line of text that whoever wants to see no progress wants to see too."""
        self._screen.warn(text)
        log.info("%s", text)
