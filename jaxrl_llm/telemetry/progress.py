"""Progress of a run on stderr: a live table on a terminal, plain lines in a log file."""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from jaxrl_llm.diagnosis import FindingTracker
from jaxrl_llm.system.text import count, seconds
from jaxrl_llm.telemetry.contents import happened
from jaxrl_llm.telemetry.pace import EVALUATION, STEP, Compiling, Pace, Schedule, time_left
from jaxrl_llm.telemetry.panel import Panel, memory_now
from jaxrl_llm.telemetry.screens import Screen, evaluation, plain
from jaxrl_llm.types import Group

WITHIN_A_STEP = ("sampling", "scoring", "updating")
"""First words of statuses within a step."""
QUIET_SECONDS = 5.0
"""Longest silence of a log file in seconds, unless an ordinary step takes longer."""

log = logging.getLogger(__name__)


def patience(status: str, durations: Sequence[float]) -> float:
    """Return the seconds of silence allowed under ``status`` after steps of ``durations`` seconds.

    Within a step it is twice an ordinary step, so that a log file holds one line for each; otherwise QUIET_SECONDS.
    """
    return max(QUIET_SECONDS, 2 * max(durations, default=0.0) if _phase(status) in WITHIN_A_STEP else 0.0)


def _phase(status: str) -> str:
    return status.split(" ", 1)[0].rstrip(":")


class Progress:
    """Shows a run's progress; a context manager, so that the terminal is restored in any case.

    Args:
      schedule: the run's.
      first_step: the first step that this process runs: 1 for a new run, s + 1 after resuming at s.
      console: where to print; stderr if None.
      tracker: looks for findings; None for none.
      quiet: show warnings alone.

    Attributes:
      pace: durations of each kind of work; the loop adds those of checkpoints.
      compiling: JAX's current compilation.
      at: the current step.
      tracker: as given.
    """

    def __init__(
        self,
        schedule: Schedule,
        first_step: int = 1,
        console: Console | None = None,
        tracker: FindingTracker | None = None,
        quiet: bool = False,
    ):
        console = console or Console(stderr=True, highlight=False)
        self._schedule = schedule
        self.tracker = tracker
        self._block = contextlib.ExitStack()
        self.compiling = Compiling()
        self.at = first_step
        self.pace = Pace(lambda: self.compiling.seconds)
        self._status = "starting"
        self._since = time.monotonic()
        self._panel = Panel()
        self._warned: set[str] = set()
        allowed = lambda: patience(self._status, self.pace.durations.get(STEP, ()))  # noqa: E731
        self._screen = Screen(console, self.describe, allowed, self._panel, quiet)

    def __enter__(self) -> "Progress":
        self._block.enter_context(self.compiling)
        self._block.enter_context(self._screen)
        if self.at > 1:
            self.note(f"continuing at step {self.at} of {self._schedule.steps}")
        return self

    def __exit__(self, *exception: object) -> None:
        self._block.close()

    def begin(self) -> None:
        """Start the clock once everything is loaded: time now counts for evaluations and steps, and memory is shown."""
        self.pace.begin()
        self._panel.memory = memory_now

    def status(self, text: str) -> None:
        """Set the current status, such as ``sampling 120/400 tokens``; another first word starts its clock again."""
        if _phase(text) != _phase(self._status):
            self._since = time.monotonic()
        self._status = text

    def describe(self) -> str:
        """Return one line: the current step, the activity and its duration."""
        where = f"step {self.at}/{self._schedule.steps}  " if _phase(self._status) in WITHIN_A_STEP else ""
        if (compiling := self.compiling.now()) is not None:
            name, since = compiling
            return f"{where}compiling {name}  {seconds(since)}"
        return f"{where}{self._status}  {seconds(time.monotonic() - self._since)}"

    def step(self, metrics: dict[str, Any]) -> None:
        """Print a line for the step ``metrics["step"]`` after its update; its evaluation is still to come."""
        self.pace.took(STEP)
        step = int(metrics["step"])
        left = time_left(self.pace.durations, self._schedule.ahead(step))
        shown = f"{step}/{self._schedule.steps}", seconds(left or 0.0), metrics
        self._panel.step(metrics)
        self._screen.row(*shown)
        log.info("%s", plain(*shown))
        self.at = step + 1
        self.status("writing down")

    def tested(self, step: int, metrics: dict[str, Any]) -> None:
        """Print a line with the metrics of the evaluation after ``step``."""
        self.pace.took(EVALUATION)
        self._panel.tested(metrics)
        if found := evaluation(metrics):
            self.note(f"evaluation at step {step}:  {found}")

    def happened(self, step: int, metrics: dict[str, Any], groups: Sequence[Group] = ()) -> None:
        """Print a line for each event in the step's complete row, and lines for each new finding.

        An event that has a reason is a warning when it first happens. ``groups``: the data of the step; a terminal
        shows one of its completions now and then.
        """
        for name, reason in happened(metrics):
            warning = bool(reason) and name not in self._warned
            self.note(f"step {step}: {f'{name}: {reason}' if reason else name}", warning)
            self._warned.add(name)
        for found in self.tracker.new(metrics) if self.tracker else ():
            told = f"{found.kind.replace('_', ' ')} since step {found.step}: {found.what}"
            self._panel.finding = told
            self.note(f"step {step}: {told}", warning=True)
            self.note(f"  {found.why} Try {found.remedy}", warning=True)
        self._panel.learned(step, groups)

    def note(self, text: str, warning: bool = False) -> None:
        """Print a line of text; a ``warning`` is shown even without progress."""
        self._screen.line(text, warning=warning)
        log.info("%s", text)


def model_line(model: str, parameters: int, trained: int, devices: int, device: str) -> str:
    """Return the line about the model and the machine.

    Args:
      model: its name.
      parameters: number of the model's parameters.
      trained: number of trained parameters; smaller for an adapter.
      devices: number of devices of all processes.
      device: kind of device.
    """
    adapter = "" if trained == parameters else f", an adapter of {count(trained)} is trained"
    on = "one device" if devices == 1 else f"{devices} devices"
    return f"{model}: {count(parameters)} parameters{adapter}, on {on} ({device})"
