"""``report.html``: one page that opens without a network. During a run, a separate process writes the page.

A report reads all files of the run. In the run's own process that would take memory that grows with its steps, and
time without training.
"""

import base64
import datetime
import gzip
import html
import json
import logging
import os
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from jaxrl_llm.codec import jsonable
from jaxrl_llm.errors import InputError
from jaxrl_llm.system.paths import new_file
from jaxrl_llm.system.signals import child, interpreter
from jaxrl_llm.telemetry.contents import choose_lines, described, read_files

ASSETS = Path(__file__).with_name("page")
SCRIPTS = ("uplot.js", "values.js", "charts.js", "sections.js", "settings.js", "completions.js", "begin.js")
STYLES = ("uplot.css", "style.css")
QUICK = 4
"""Level of gzip: a tenth larger than the smallest, at a third of the time, since runs wait for it."""
REPORT_SHARE = 0.02
"""Largest share of a run's time spent on writing reports."""
NAME = "report.html"
MARK = re.compile(r"\[\[(\w+)\]\]")

log = logging.getLogger(__name__)


def write_report(directories: Sequence[Path], path: Path) -> None:
    """Write the report of one or several runs to ``path``, atomically.

    Raises:
      InputError: a directory is not a run, or has files that cannot be read.
    """
    text = page(directories)
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")


def page(directories: Sequence[Path]) -> str:
    """Return the report of some runs as HTML; foreign text is embedded as base64 or escaped."""
    try:
        runs = [read_files(directory) for directory in directories]
        chosen = [choose_lines(run.directory / "samples.jsonl", len(runs)) for run in runs]
        data = described(runs, chosen)
        data["written"] = datetime.datetime.now().isoformat(" ", "minutes")
        blobs = [_blob("history", json.dumps(jsonable(data), allow_nan=False).encode())]
    except (OSError, RecursionError) as error:
        named = ", ".join(map(str, directories))
        raise InputError(f"a file of {named} cannot be read: {error}") from error
    blobs += [_blob(f"samples-{number}", b"\n".join(one.lines)) for number, one in enumerate(chosen)]
    parts = {
        "title": html.escape(", ".join(run["name"] for run in data["runs"])),
        "style": "\n".join((ASSETS / name).read_text("utf-8") for name in STYLES),
        "script": "\n".join((ASSETS / name).read_text("utf-8") for name in SCRIPTS),
        "licence": (ASSETS / "uplot.LICENSE").read_text("utf-8"),
        "data": "\n".join(blobs),
    }
    return MARK.sub(lambda mark: parts[mark[1]], (ASSETS / "page.html").read_text("utf-8"))


def _blob(name: str, data: bytes) -> str:
    """Return an HTML element with data that browsers neither run nor show."""
    packed = base64.b64encode(gzip.compress(data, QUICK, mtime=0)).decode()
    return f'<script type="application/octet-stream" id="{name}">{packed}</script>'


class Reporter:
    """Writer of one run's report. A failure is logged: it never ends the run.

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
        """Start writing the report up to this step, unless one is being written or the next is not yet due."""
        if self._process is not None and self._process.poll() is None:
            return
        self.wait()
        if self._holds == step or time.monotonic() < self._due:
            return
        command = interpreter("jaxrl_llm.telemetry.report", str(self._run_dir))
        try:
            self._process = self._block.enter_context(
                child(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
        except OSError as error:
            log.warning("%s was not written: %s", NAME, error)
            return
        self._holds = step

    def wait(self) -> None:
        """Wait for the report that is being written, if any."""
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
        """Write the report of the run's last step, in this process."""
        self.wait()
        if self._holds != step and (error := written(self._run_dir)):
            log.warning("%s was not written: %s", NAME, error)

    def close(self) -> None:
        """Abort the report that is being written; after ``finish`` there is never one."""
        if self._process is not None:
            self._block.close()
            (self._run_dir / f".{NAME}.part").unlink(missing_ok=True)


def written(run_dir: Path) -> str:
    """Write the report of a run into its directory; return the reason of a failure, or ""."""
    try:
        write_report([run_dir], run_dir / NAME)
    except Exception as error:  # noqa: BLE001  a run that has ended does not fail by its report
        return str(error) or type(error).__name__
    return ""


def main(run_dir: str) -> None:
    """Write the report at low priority, as a separate process, and print its duration and error as JSON."""
    began = time.monotonic()
    os.nice(10)
    error = written(Path(run_dir))
    print(json.dumps({"seconds": time.monotonic() - began, "error": error}))
