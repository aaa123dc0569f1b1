"""What of two runs is not equal bit for bit, by name: metrics, samples, and all of the last saved state.

Nothing of the package is used: the two runs may be of two revisions.
"""

import itertools
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

CLOCK = ("time/", "throughput/", "memory", "event/resumed", "rollout/utilisation")
"""How the names of metrics begin that depend on the clock or on the machine's load."""
NO_NAMES: Mapping[str, str] = {}
CLOCKS = (
    (r"(tokens/s|seconds|left|took|in) +[\d.]+( ?(k|M))?( ?(s|ms|min|h)\b|m\d+)?", r"\1 CLOCK"),
    (r"\b\d+(\.\d+)? ?(s|ms|min|MB|GB|MiB|GiB)\b", "CLOCK"),
)
"""What the clock decides in a line of a command, and what is read in its place."""


def difference(whole: Path, other: Path) -> str:
    """Return the first difference of the other run, in a few words; empty if there is none."""
    return next(differences(whole, other), "")


def differences(whole: Path, other: Path, renamed: Mapping[str, str] = NO_NAMES) -> Iterator[str]:
    """Yield what differs between two runs' directories: metrics.jsonl, samples.jsonl, last checkpoint, snapshots.

    Args:
      whole: the directory of the run to compare with.
      other: the directory of the other run.
      renamed: new names of metrics, arrays and host values by the names that the first run has.
    """
    yield from of_rows(*(_rows(run / "metrics.jsonl") for run in (whole, other)), renamed)
    samples = [_rows(run / "samples.jsonl") for run in (whole, other)]
    for number, pair in enumerate(itertools.zip_longest(*samples), 1):
        if json.dumps(pair[0]) != json.dumps(pair[1]):
            yield f"samples.jsonl, line {number}"
            break
    for place, last in (("checkpoints", slice(-1, None)), ("snapshots", slice(None))):
        saved = [_steps(run / place) for run in (whole, other)]
        if saved[0][last] != saved[1][last]:
            yield f"{place}: {saved[0]}, {saved[1]}"
            continue
        for step in saved[0][last]:
            yield from of_steps(*(run / place / str(step) for run in (whole, other)), renamed)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []


def _steps(directory: Path) -> list[int]:
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())


def of_rows(
    rows: list[dict[str, Any]], others: list[dict[str, Any]], renamed: Mapping[str, str] = NO_NAMES
) -> Iterator[str]:
    """Yield what differs in the metrics."""
    steps = [[row["step"] for row in all_rows] for all_rows in (rows, others)]
    if steps[0] != steps[1]:
        yield f"steps of metrics.jsonl: {_ends(steps[0])}, {_ends(steps[1])}"
    for row, other in zip(rows, others, strict=False):
        row = {renamed.get(name, name): value for name, value in row.items()}
        for name in [name for name in row | other if not name.startswith(CLOCK)]:
            one, two = (json.dumps(values.get(name, "nothing")) for values in (row, other))
            if one != two:
                yield f"metrics.jsonl, step {row['step']}, {name}: {one}, {two}"


def _ends(steps: list[int]) -> str:
    return f"{len(steps)} from {steps[0]} to {steps[-1]}" if steps else "none"


def of_steps(step: Path, other: Path, renamed: Mapping[str, str] = NO_NAMES) -> Iterator[str]:
    """Yield what differs in two checkpoints or snapshots: host values, then arrays by name with their largest
    difference.
    """
    where = f"{step.parent.name}/{step.name}"
    hosts = [json.loads((place / "host" / "metadata").read_text()) for place in (step, other)]
    yield from of_values(_renamed(hosts[0], renamed), _renamed(hosts[1], renamed), f"{where}, host")
    files = [place / "host" / "arrays.zlib" for place in (step, other)]
    stored = [zlib.decompress(path.read_bytes()) if path.exists() else b"" for path in files]
    if stored[0] != stored[1]:
        yield f"{where}, arrays of the host state"
    arrays = {renamed.get(name, name): array for name, array in arrays_of(step).items()}
    others = arrays_of(other)
    for name in sorted(arrays.keys() | others.keys()):
        if name not in arrays or name not in others:
            yield f"{where}, {name} is in one only"
        elif (arrays[name].dtype, arrays[name].shape) != (others[name].dtype, others[name].shape):
            yield f"{where}, {name}: another shape or type"
        elif arrays[name].tobytes() != others[name].tobytes():
            apart = np.abs(arrays[name].astype(np.float64) - others[name].astype(np.float64)).max(initial=0.0)
            yield f"{where}, {name}: differs by up to {apart:.3g}"


def _new_name(key: str, renamed: Mapping[str, str]) -> str:
    while key in renamed:  # a name that was given up may have been given to another value
        key = renamed[key]
    return re.sub(r"^evaluation [0-9a-f]{16}$", "evaluation", key)


def _renamed(value: Any, renamed: Mapping[str, str]) -> Any:
    """Return the values by their new names, and fingerprints of evaluations without the digest of their settings: it
    holds the modules of classes, which move.
    """
    if isinstance(value, dict):
        return {_new_name(key, renamed): _renamed(inner, renamed) for key, inner in value.items()}
    return [_renamed(inner, renamed) for inner in value] if isinstance(value, list) else value


def of_said(said: list[dict[str, Any]], others: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what differs in the exit codes and lines of commands, each a dictionary of command, code and lines."""
    for one, other in zip(said, others, strict=True):
        if one["code"] != other["code"]:
            yield f"exit code of {one['command']}: {one['code']}, {other['code']}"
        for stream, lines, theirs in zip(("stdout", "stderr"), one["lines"], other["lines"], strict=False):
            if lines != theirs:
                apart = next((pair for pair in zip(lines, theirs, strict=False) if pair[0] != pair[1]), None)
                yield f"{stream} of {one['command']}: {apart or f'{len(lines)}, {len(theirs)} lines'}"


def without_clocks(line: str) -> str:
    """Return a line without the times, rates and sizes that no two runs have in common."""
    for pattern, instead in CLOCKS:
        line = re.sub(pattern, instead, line)
    return line


def of_values(one: Any, other: Any, where: str) -> Iterator[str]:
    """Yield what differs in two values of JSON, by the way there; a batch that was made ahead holds metrics, too."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in [key for key in one if not key.startswith(CLOCK)]:
            yield from of_values(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from of_values(*pair, f"{where}/{number}")
    elif json.dumps(one) != json.dumps(other):
        yield f"{where}: {json.dumps(one)[:80]}, {json.dumps(other)[:80]}"


def arrays_of(step: Path) -> dict[str, np.ndarray]:
    """Return all arrays of a checkpoint or snapshot by name."""
    import tensorstore as ts

    place = {"driver": "ocdbt", "base": f"file://{step.absolute()}/state/"}
    keys = [key.decode() for key in ts.KvStore.open(place).result().list().result()]
    names = [key.removesuffix("/.zarray") for key in keys if key.endswith("/.zarray")]
    specs = {name: {"driver": "zarr", "kvstore": place | {"path": f"{name}/"}} for name in names}
    return {name: ts.open(spec).result().read().result() for name, spec in specs.items()}
