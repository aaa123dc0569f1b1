"""Contents of a report, from the files of a run."""

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.codec import flat
from jaxrl_llm.diagnosis import diagnose
from jaxrl_llm.errors import InputError
from jaxrl_llm.system.json_lines import number, read_rows

MOST_POINTS = 90_000
"""Most points of all curves of a report together: about 600 KB of it."""
MOST_COMPLETIONS = 25_000
MOST_BYTES = 24_000_000
"""Most bytes of the completions in a report, before compression."""
LAST_STEP = 2**53
"""The largest number of a step that the page's numbers hold."""
HEAD = re.compile(rb'\{"step": (\d+), "kind": "(\w+)"')
SECONDS = ("time/step_s", "time/evaluation_s")


class SampleLines(NamedTuple):
    """Lines of samples.jsonl.

    Attributes:
      lines: as in the file, in order.
      there: number of lines in the file.
    """

    lines: list[bytes]
    there: int


class RunFiles(NamedTuple):
    """A run's files as they were read.

    Attributes:
      directory: the run's.
      config: its settings by dotted names; empty where it has no config.json.
      rows: of metrics.jsonl.
      curves: steps and values of each metric; missing values are left out.
    """

    directory: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    curves: dict[str, tuple[list[int], list[float]]]


def read_files(directory: Path) -> RunFiles:
    """Read the files of a run, finished or not.

    Raises:
      InputError: the run does not exist or has not finished a step; a file is not valid JSON.
    """
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        begun = (directory / "config.json").is_file()
        remedy = "it has no metrics.jsonl yet: wait for its first step" if begun else "give a folder with metrics.jsonl"
        raise InputError(f"{directory} is not a run: {remedy}")
    rows = list(read_rows(metrics))
    if not rows:
        raise InputError(f"{metrics} is empty: wait for the run's first step")
    if any(not isinstance(row.get("step"), int) or abs(row["step"]) > LAST_STEP for row in rows):
        raise InputError(f"{metrics} holds a row without a step: give the folder of a run")
    config: dict[str, Any] = {}
    if (path := directory / "config.json").is_file():
        try:
            config = flat(json.loads(path.read_bytes()), whole_lists=True)
        except (ValueError, RecursionError):
            raise InputError(f"{path} is not JSON: give the folder of a run") from None
    return RunFiles(directory, config, rows, curves_of(rows))


def curves_of(rows: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Return steps and values of each numeric metric; null, NaN and infinity are left out."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and (measured := number(value)) is not None:
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(measured)
    return curves


def happened(metrics: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the events of a step, each with its explanation, which may be empty: ``("reference reset", "")``."""
    there = [(name, value) for name, value in metrics.items() if name.startswith("event/") and value]
    return [
        (name.removeprefix("event/").replace("_", " "), value if isinstance(value, str) else "")
        for name, value in there
    ]


def described(runs: list[RunFiles], chosen: list[SampleLines]) -> dict[str, Any]:
    """Return the data of the page as JSON values: for each run its settings, curves, events and findings."""
    count = sum(len(run.curves) + 1 for run in runs)
    most = max(100, MOST_POINTS // max(count, 1))
    names = [run.directory.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.directory) for run in runs]
    shown = zip(names, runs, chosen, strict=True)
    return {"runs": [{"name": name} | _run(run, samples, most) for name, run, samples in shown]}


def _run(files: RunFiles, chosen: SampleLines, most: int) -> dict[str, Any]:
    rows = files.rows
    seconds = {row["step"]: 0.0 for row in rows}
    for name in SECONDS:
        for step, value in zip(*files.curves.get(name, ([], [])), strict=True):
            seconds[step] += value
    clock = list(seconds), list(itertools.accumulate(seconds.values()))  # the work up to the end of each step
    return {
        "directory": str(files.directory),
        "config": files.config,
        "last": rows[-1]["step"],
        "curves": {name: _compact(*thinned(*curve, most)) for name, curve in files.curves.items()},
        "means": {name: [float(f"{sum(y) / len(y):.5g}"), len(y)] for name, (_, y) in files.curves.items()},
        "clock": _compact(*thinned(*clock, most)),
        "thinned": [most, max(map(len, (steps for steps, _ in files.curves.values())), default=0)],
        "events": [[row["step"], *event] for row in rows for event in happened(row)],
        "findings": [dataclasses.asdict(finding) for finding in diagnose(rows)],
        "samples": [len(chosen.lines), chosen.there],
    }


def _compact(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Return differences of steps, which compress to almost nothing, and values of five digits."""
    gaps = [step - before for before, step in zip([0, *steps], steps, strict=False)]
    return gaps, [float(f"{value:.5g}") for value in values]


def thinned(steps: list[int], values: list[float], most: int) -> tuple[list[int], list[float]]:
    """Return at most about ``most`` points of a curve: its ends, and the lowest and the highest of each stretch."""
    count = len(steps)
    if count <= most:
        return steps, values
    stretch = -(-count // max(most // 2 - 1, 1))
    kept = {0, count - 1}
    for begin in range(0, count, stretch):
        places = range(begin, min(begin + stretch, count))
        kept |= {min(places, key=values.__getitem__), max(places, key=values.__getitem__)}
    order = sorted(kept)
    return [steps[place] for place in order], [values[place] for place in order]


def choose_lines(path: Path, runs: int = 1) -> SampleLines:
    """Return all lines of a samples.jsonl; of a long file those of evenly spaced steps, with the first and the last.

    Lines are distinguished by their beginning and not parsed, so that hundreds of megabytes take a second.

    Args:
      path: a file that may be missing.
      runs: number of runs that share the report.

    Raises:
      InputError: a line is not a JSON object, except a torn last one.
    """
    batches: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for begin, size, key in _told_apart(path):
        batches.setdefault(key, []).append((begin, size))
    there = sum(map(len, batches.values()))
    kinds = [[batch for (of, _), batch in batches.items() if of == kind] for kind in {of for of, _ in batches}]
    every = 1
    while True:
        # One of ``every`` batches of a kind, and the last.
        batches_kept = [batch for kind in kinds for batch in (*kind[:-1][::every], kind[-1])]
        kept = sorted(place for batch in batches_kept for place in batch)
        fits = len(kept) * runs <= MOST_COMPLETIONS and sum(size for _, size in kept) * runs <= MOST_BYTES
        if fits or every > len(batches):
            break
        every *= 2
    lines = []
    with open(path, "rb") if kept else nullcontext() as file:
        for begin, size in kept:
            file.seek(begin)
            lines.append(file.read(size).rstrip(b"\n"))
    return SampleLines(lines, there)


def _told_apart(path: Path) -> Iterator[tuple[int, int, tuple[str, int]]]:
    """Yield the offset, the length, and (kind, step) of each line."""
    if not path.is_file():  # nor a device
        return
    begin = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            head = HEAD.match(line) if line.endswith(b"}\n") else None
            try:
                row = {} if head else json.loads(line)
                key = (head[2].decode(), int(head[1])) if head else (str(row["kind"]), int(row["step"]))
                yield begin, len(line), key
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                if line.endswith(b"\n"):
                    raise InputError(f"{path}: line {number} is not a sample; remove that line and run again") from None
            begin += len(line)
