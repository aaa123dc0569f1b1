"""``report.html``: one page that opens without a network. During a run, a separate process writes the page. A report
reads all files of the run. In the run's own process that would take memory that grows with its steps, and time without
training.
"""

import base64
import dataclasses
import datetime
import gzip
import html
import itertools
import json
import logging
import os
import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from jaxrl_llm.codec import flat, jsonable
from jaxrl_llm.diagnosis import diagnose
from jaxrl_llm.errors import InputError
from jaxrl_llm.system.json_lines import number, read_rows
from jaxrl_llm.system.paths import new_file
from jaxrl_llm.system.signals import child, interpreter

MOST_POINTS = 90_000
"""Most points of all curves of a report together: about 600 KB of it."""
MOST_COMPLETIONS = 25_000
MOST_BYTES = 24_000_000
"""Most bytes of the completions in a report, before compression."""

Curves = dict[str, tuple[list[int], list[float]]]


def read_files(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]], Curves]:
    """Read the files of a run, finished or not: its settings by dotted names, the rows of metrics.jsonl, and their
    curves. Without a config.json there are no settings.
    """
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        started = (directory / "config.json").is_file()
        remedy = (
            "it has no metrics.jsonl yet: wait for its first step" if started else "give a folder with metrics.jsonl"
        )
        raise InputError(f"{directory} is not a run: {remedy}")
    rows = list(read_rows(metrics))
    if not rows:
        raise InputError(f"{metrics} is empty: wait for the run's first step")
    largest = 2**53  # that the page's numbers hold
    if any(not isinstance(row.get("step"), int) or abs(row["step"]) > largest for row in rows):
        raise InputError(f"{metrics} holds a row without a step: give the folder of a run")
    config: dict[str, Any] = {}
    if (path := directory / "config.json").is_file():
        try:
            config = flat(json.loads(path.read_bytes()), whole_lists=True)
        except (ValueError, RecursionError):
            raise InputError(f"{path} is not JSON: give the folder of a run") from None
    return config, rows, collect_curves(rows)


def collect_curves(rows: list[dict[str, Any]]) -> Curves:
    """Return steps and values of each numeric metric; null, NaN and infinity are left out."""
    curves: Curves = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and (measured := number(value)) is not None:
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(measured)
    return curves


def step_events(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the events of a step, each with its explanation, which may be empty: ``("reference reset", "")``."""
    events = [(name, value) for name, value in metrics.items() if name.startswith("event/") and value]
    return [
        (name.removeprefix("event/").replace("_", " "), value if isinstance(value, str) else "")
        for name, value in events
    ]


def page_data(directories: Sequence[Path], runs: Sequence[Any], samples: Sequence[Any]) -> dict[str, Any]:
    """Return the data of the page as JSON values: for each run its settings, curves, events and findings. ``runs``,
    ``samples``: of each, as ``read_files`` and ``choose_lines`` return them.
    """
    count = sum(len(curves) + 1 for *_, curves in runs)
    most = max(100, MOST_POINTS // max(count, 1))
    names = [directory.resolve().name for directory in directories]
    if len(set(names)) < len(names):
        names = [str(directory) for directory in directories]
    return {
        "runs": [
            {"name": name, "directory": str(directory), "samples": [len(lines), total]} | _run_data(*files, most)
            for name, directory, files, (lines, total) in zip(names, directories, runs, samples, strict=True)
        ]
    }


def _run_data(config: dict[str, Any], rows: list[dict[str, Any]], curves: Curves, most: int) -> dict[str, Any]:
    seconds = {row["step"]: 0.0 for row in rows}
    for name in ("time/step_s", "time/evaluation_s"):
        for step, value in zip(*curves.get(name, ([], [])), strict=True):
            seconds[step] += value
    clock = list(seconds), list(itertools.accumulate(seconds.values()))  # the work up to the end of each step
    return {
        "config": config,
        "last": rows[-1]["step"],
        "curves": {name: _compact(*thin_curve(*curve, most)) for name, curve in curves.items()},
        "means": {name: [float(f"{sum(y) / len(y):.5g}"), len(y)] for name, (_, y) in curves.items()},
        "clock": _compact(*thin_curve(*clock, most)),
        "thinned": [most, max(map(len, (steps for steps, _ in curves.values())), default=0)],
        "events": [[row["step"], *event] for row in rows for event in step_events(row)],
        "findings": [dataclasses.asdict(finding) for finding in diagnose(rows)],
    }


def _compact(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Return differences of steps, which compress to almost nothing, and values of five digits."""
    gaps = [step - before for before, step in zip([0, *steps], steps, strict=False)]
    return gaps, [float(f"{value:.5g}") for value in values]


def thin_curve(steps: list[int], values: list[float], most: int) -> tuple[list[int], list[float]]:
    """Return at most about ``most`` points of a curve: its ends, and the lowest and the highest of each stretch."""
    count = len(steps)
    if count <= most:
        return steps, values
    stretch = -(-count // max(most // 2 - 1, 1))
    indices = {0, count - 1}
    for begin in range(0, count, stretch):
        places = range(begin, min(begin + stretch, count))
        indices |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
    order = sorted(indices)
    return [steps[place] for place in order], [values[place] for place in order]


def choose_lines(path: Path, runs: int = 1) -> tuple[list[bytes], int]:
    """Return the lines of a samples.jsonl and their number; of a long file those of evenly spaced steps, with first and
    last. Lines are distinguished unparsed, so that hundreds of megabytes take a second. ``runs`` share the report.
    """
    batches: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for begin, size, key in _index_lines(path):
        batches.setdefault(key, []).append((begin, size))
    total = sum(map(len, batches.values()))
    kinds = [[batch for (of, _), batch in batches.items() if of == kind] for kind in {of for of, _ in batches}]
    stride = 1
    while True:
        # One of ``stride`` batches of a kind, and the last.
        chosen = [batch for kind in kinds for batch in (*kind[:-1][::stride], kind[-1])]
        places = sorted(place for batch in chosen for place in batch)
        fits = len(places) * runs <= MOST_COMPLETIONS and sum(size for _, size in places) * runs <= MOST_BYTES
        if fits or stride > len(batches):
            break
        stride *= 2
    lines = []
    with open(path, "rb") if places else nullcontext() as file:
        for begin, size in places:
            file.seek(begin)
            lines.append(file.read(size).rstrip(b"\n"))
    return lines, total


def _index_lines(path: Path) -> Iterator[tuple[int, int, tuple[str, int]]]:
    """Yield the offset, the length, and (kind, step) of each line."""
    if not path.is_file():  # nor a device
        return
    begin = 0
    pattern = re.compile(rb'\{"step": (\d+), "kind": "(\w+)"')
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            head = pattern.match(line) if line.endswith(b"}\n") else None
            try:
                row = {} if head else json.loads(line)
                key = (head[2].decode(), int(head[1])) if head else (str(row["kind"]), int(row["step"]))
                yield begin, len(line), key
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                if line.endswith(b"\n"):
                    raise InputError(f"{path}: line {number} is not a sample; remove that line and run again") from None
            begin += len(line)


NAME = "report.html"

log = logging.getLogger(__name__)


def write_report(directories: Sequence[Path], path: Path) -> None:
    """Write the report of one or several runs to ``path``, atomically."""
    text = render_page(directories)
    with new_file(path) as part:
        part.write_text(text, encoding="utf-8")


def render_page(directories: Sequence[Path]) -> str:
    """Return the report of some runs as HTML; foreign text is embedded as base64 or escaped."""
    try:
        runs = [read_files(directory) for directory in directories]
        samples = [choose_lines(directory / "samples.jsonl", len(directories)) for directory in directories]
        data = page_data(directories, runs, samples)
        data["written"] = datetime.datetime.now().isoformat(" ", "minutes")
        blobs = {"history": json.dumps(jsonable(data), allow_nan=False).encode()}
    except (OSError, RecursionError) as error:
        names = ", ".join(map(str, directories))
        raise InputError(f"a file of {names} cannot be read: {error}") from error
    blobs |= {f"samples-{number}": b"\n".join(lines) for number, (lines, _) in enumerate(samples)}
    elements = []  # with data that browsers neither run nor show
    for name, blob in blobs.items():
        # Level 4 is a tenth larger than the smallest, at a third of the time, since runs wait for it.
        packed = base64.b64encode(gzip.compress(blob, 4, mtime=0)).decode()
        elements.append(f'<script type="application/octet-stream" id="{name}">{packed}</script>')
    assets = Path(__file__).with_name("page")
    scripts = ("uplot.js", "values.js", "charts.js", "sections.js", "settings.js", "completions.js", "begin.js")
    parts = {
        "title": html.escape(", ".join(run["name"] for run in data["runs"])),
        "style": "\n".join((assets / name).read_text("utf-8") for name in ("uplot.css", "style.css")),
        "script": "\n".join((assets / name).read_text("utf-8") for name in scripts),
        "licence": (assets / "uplot.LICENSE").read_text("utf-8"),
        "data": "\n".join(elements),
    }
    return re.sub(r"\[\[(\w+)\]\]", lambda mark: parts[mark[1]], (assets / "page.html").read_text("utf-8"))


class Reporter:
    """Writer of one run's report. A failure is logged: it never ends the run."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._reported_step = -1
        self._due = 0.0
        self._process: subprocess.Popen | None = None
        self._block = ExitStack()

    def begin(self, step: int) -> None:
        """Start writing the report up to this step, unless one is being written or the next is not yet due."""
        if self._process is not None and self._process.poll() is None:
            return
        self.wait()
        if self._reported_step == step or time.monotonic() < self._due:
            return
        command = interpreter("jaxrl_llm.telemetry.report", str(self._run_dir))
        try:
            self._process = self._block.enter_context(
                child(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            )
        except OSError as error:
            log.warning("%s was not written: %s", NAME, error)
            return
        self._reported_step = step

    def wait(self) -> None:
        """Wait for the report that is being written, if any."""
        if self._process is None:
            return
        output, _ = self._process.communicate()
        code, self._process = self._process.returncode, None
        self._block.close()
        answer = json.loads(output) if code == 0 else {"seconds": 0.0, "error": f"its process ended with {code}"}
        if answer["error"]:
            log.warning("%s was not written: %s", NAME, answer["error"])
            self._reported_step = -1
        self._due = time.monotonic() + answer["seconds"] / 0.02  # the largest share of a run's time for reports

    def finish(self, step: int) -> None:
        """Write the report of the run's last step, in this process."""
        self.wait()
        if self._reported_step != step and (error := try_write_report(self._run_dir)):
            log.warning("%s was not written: %s", NAME, error)

    def close(self) -> None:
        """Abort the report that is being written; after ``finish`` there is never one."""
        if self._process is not None:
            self._block.close()
            (self._run_dir / f".{NAME}.part").unlink(missing_ok=True)


def try_write_report(run_dir: Path) -> str:
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
    error = try_write_report(Path(run_dir))
    print(json.dumps({"seconds": time.monotonic() - began, "error": error}))
