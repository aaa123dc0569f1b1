"""A run's ``report.html`` while it lasts: written by a process beside it.

A report reads all that the run has written. In the run's own process that would be memory that grows with its steps,
and time in which nothing is learned.
"""

import json
import logging
import os
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

from jaxrl_llm.signals import child, interpreter

REPORT_SHARE = 0.02
"""Of a run's time, at most, in which a report of it is being written."""
NAME = "report.html"

log = logging.getLogger(__name__)


class Reporter:
    """Writes the report of one run. A failure is logged: no run ends for its report.

    Args:
      run_dir: the run's directory.
    """

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._holds = -1
        self._due = 0.0
        self._process: subprocess.Popen | None = None
        self._block = ExitStack()

    def begin(self, step: int) -> None:
        """Begin to write it, up to this step; not while one is being written, nor before that is due again."""
        if self._process is not None and self._process.poll() is None:
            return
        self.wait()
        if self._holds == step or time.monotonic() < self._due:
            return
        command = interpreter("jaxrl_llm.telemetry.reporter", str(self._run_dir))
        try:
            self._process = self._block.enter_context(
                child(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
        except OSError as error:
            log.warning("%s was not written: %s", NAME, error)
            return
        self._holds = step

    def wait(self) -> None:
        """Wait for the one that is being written, if any."""
        if self._process is None:
            return
        said, _ = self._process.communicate()
        code, self._process = self._process.returncode, None
        self._block.close()
        answer = json.loads(said) if code == 0 else {"seconds": 0.0, "error": f"its process ended with {code}"}
        if answer["error"]:
            log.warning("%s was not written: %s", NAME, answer["error"])
            self._holds = -1
        self._due = time.monotonic() + answer["seconds"] / REPORT_SHARE

    def finish(self, step: int) -> None:
        """Write the one of the run's last step, in this process."""
        self.wait()
        if self._holds != step and (error := written(self._run_dir)):
            log.warning("%s was not written: %s", NAME, error)

    def close(self) -> None:
        """Leave off the one that is being written; after ``finish`` none is."""
        if self._process is not None:
            self._block.close()
            (self._run_dir / f".{NAME}.part").unlink(missing_ok=True)


def written(run_dir: Path) -> str:
    """Write the report of a run into its directory; returns why it could not be, empty where it was."""
    from jaxrl_llm.telemetry.report import write_report

    try:
        write_report([run_dir], run_dir / NAME)
    except Exception as error:
        return str(error) or type(error).__name__
    return ""


def main(run_dir: str) -> None:
    """What the process beside a run does: write, behind all other work; it says how long that took, and what failed."""
    began = time.monotonic()
    os.nice(10)
    error = written(Path(run_dir))
    print(json.dumps({"seconds": time.monotonic() - began, "error": error}))
