"""What a run is doing at the moment, and how long a log may say nothing of it."""

import time
from collections.abc import Sequence

from jaxrl_llm.telemetry import columns
from jaxrl_llm.telemetry.compiling import Compiling

WITHIN_A_STEP = ("sampling", "scoring", "updating")
"""First words of the statuses that come and go inside each step."""
QUIET_SECONDS = 5.0
"""A log file is never silent for longer than this, unless an ordinary step takes longer."""


class Status:
    """The step that goes on, what is being done in it, and since when.

    Args:
      step: the first one.
      steps: of the run.
      compiling: hears what is compiled.

    Attributes:
      step: the one that goes on.
      text: what was said last: ``sampling 120/400 tokens``.
    """

    def __init__(self, step: int, steps: int, compiling: Compiling):
        self.step = step
        self.text = "starting"
        self._steps = steps
        self._compiling = compiling
        self._since = time.monotonic()

    def say(self, text: str) -> None:
        """The clock starts again when the first word changes."""
        if _phase(text) != _phase(self.text):
            self._since = time.monotonic()
        self.text = text

    def describe(self) -> str:
        """One line: which step is going on, what is being done, and for how long."""
        where = f"step {self.step}/{self._steps}  " if _phase(self.text) in WITHIN_A_STEP else ""
        if (compiling := self._compiling.now()) is not None:
            name, since = compiling
            return f"{where}compiling {name}  {columns.seconds(since)}"
        return f"{where}{self.text}  {columns.seconds(time.monotonic() - self._since)}"


def patience(status: str, durations: Sequence[float]) -> float:
    """Seconds of silence allowed under ``status`` after steps of ``durations`` seconds.

    Inside a step it is twice an ordinary step, so that a log file holds one line for each; otherwise QUIET_SECONDS.
    """
    return max(QUIET_SECONDS, 2 * max(durations, default=0.0) if _phase(status) in WITHIN_A_STEP else 0.0)


def _phase(status: str) -> str:
    return status.split(" ", 1)[0].rstrip(":")
