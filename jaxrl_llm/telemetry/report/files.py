"""What a report shows of a run, from the files that the run has left."""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.telemetry.columns import happened
from jaxrl_llm.telemetry.diagnosis import diagnose
from jaxrl_llm.telemetry.report.thinning import Chosen, choose_lines, thinned
from jaxrl_llm.telemetry.rows import number, read_rows

MOST_POINTS = 90_000
"""Points of all curves of a report together: about 600 KB of it."""
LEAST_POINTS = 100
SECONDS = ("time/step_s", "time/evaluation_s")


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """A run's files as they were read.

    Attributes:
      directory: the run's.
      config: its settings by dotted names; empty where it has no config.json.
      rows: of metrics.jsonl.
      curves: steps and values of each metric; what was not measured is left out.
    """

    directory: Path
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    curves: dict[str, tuple[list[int], list[float]]]


def read_files(directory: Path) -> RunFiles:
    """The files of a run that lasts or has ended.

    Raises:
      InputError: there is no run, or it has not made a step; a file that is no JSON.
    """
    metrics = directory / "metrics.jsonl"
    if not metrics.is_file():
        begun = (directory / "config.json").is_file()
        remedy = "it has no metrics.jsonl yet: wait for its first step" if begun else "give a folder with metrics.jsonl"
        raise InputError(f"{directory} is no run to report on: {remedy}")
    rows = list(read_rows(metrics))
    if not rows:
        raise InputError(f"{metrics} is empty: wait for the run's first step")
    if any(not isinstance(row.get("step"), int) for row in rows):
        raise InputError(f"{metrics} holds a row without a step: give the folder of a run")
    return RunFiles(directory, _config(directory / "config.json"), rows, curves_of(rows))


def curves_of(rows: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and values of each metric that is a number; null, NaN and infinity are left out."""
    curves: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and (measured := number(value)) is not None:
                steps, values = curves.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(measured)
    return curves


def described(runs: list[RunFiles], chosen: list[Chosen]) -> dict[str, Any]:
    """What the page reads, as JSON values: of each run settings, curves, events and findings."""
    count = sum(len(run.curves) + 1 for run in runs)
    most = max(LEAST_POINTS, MOST_POINTS // max(count, 1))
    names = [run.directory.resolve().name for run in runs]
    if len(set(names)) < len(names):
        names = [str(run.directory) for run in runs]
    return {"runs": [{"name": name} | _run(*of, most) for name, *of in zip(names, runs, chosen, strict=True)]}


def samples_of(runs: list[RunFiles]) -> list[Chosen]:
    """The lines of samples.jsonl that the page holds, of each run."""
    return [choose_lines(run.directory / "samples.jsonl", len(runs)) for run in runs]


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Settings by dotted names: ``{"task.source.size": 3000}``; lists of plain values stay together."""
    if isinstance(value, list) and any(isinstance(entry, dict) for entry in value):
        value = {str(number): entry for number, entry in enumerate(value)}
    if not isinstance(value, dict):
        return {name: value}
    parts = {f"{name}.{key}" if name else key: entry for key, entry in value.items()}
    return {dotted: plain for key, entry in parts.items() for dotted, plain in flat(entry, key).items()}


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return flat(json.loads(path.read_text()))
    except ValueError:
        raise InputError(f"{path} is no JSON: give the folder of a run") from None


def _run(files: RunFiles, chosen: Chosen, most: int) -> dict[str, Any]:
    rows = files.rows
    curves = {name: thinned(*curve, most) for name, curve in files.curves.items()}
    events = [[row["step"], *event] for row in rows for event in happened(row)]
    return {
        "directory": str(files.directory),
        "config": files.config,
        "last": rows[-1]["step"],
        "curves": {name: _compact(*curve) for name, curve in curves.items()},
        "means": {name: [float(f"{sum(y) / len(y):.5g}"), len(y)] for name, (_, y) in files.curves.items()},
        "clock": _compact(*thinned(*_clock(files), most)),
        "thinned": [most, max(map(len, (steps for steps, _ in files.curves.values())), default=0)],
        "events": events,
        "findings": [dataclasses.asdict(finding) for finding in diagnose(rows)],
        "samples": [len(chosen.lines), chosen.there],
    }


def _clock(files: RunFiles) -> tuple[list[int], list[float]]:
    """Steps, and the seconds of work up to their ends."""
    seconds = {row["step"]: 0.0 for row in files.rows}
    for name in SECONDS:
        for step, value in zip(*files.curves.get(name, ([], [])), strict=True):
            seconds[step] += value
    return list(seconds), list(itertools.accumulate(seconds.values()))


def _compact(steps: list[int], values: list[float]) -> tuple[list[int], list[float]]:
    """Differences of steps, which compress to next to nothing, and values of five digits."""
    gaps = [step - before for before, step in zip([0, *steps], steps, strict=False)]
    return gaps, [float(f"{value:.5g}") for value in values]
