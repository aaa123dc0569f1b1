"""What of two runs is not the same, bit for bit, said by name: their last checkpoint, snapshots, metrics, samples."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.checkpoints.snapshots import CHECKPOINTS, SNAPSHOTS
from jaxrl_llm.checkpoints.store import read_host, steps_in
from jaxrl_llm.system.json_lines import read_rows

OF_THE_CLOCK = ("time/", "throughput/", "memory", "event/resumed", "rollout/utilisation")
"""How the names of metrics begin that no two runs have in common."""
ARRAY = "/.zarray"
"""The end of the key under which Orbax stores the shape of an array."""


def difference(whole: Path, other: Path) -> str:
    """The first thing in which the other run is not the whole one, in a few words; empty where there is none.

    Compared are the arrays (parameters, optimiser, reference) and host values (data order, statistics, stored answers,
    what rules remember) of the last checkpoint, all snapshots, every row of metrics.jsonl but for what the clock
    decides, and samples.jsonl.
    """
    return next(_differences(whole, other), "")


def _differences(whole: Path, other: Path) -> Iterator[str]:
    yield from of_rows(list(read_rows(whole / "metrics.jsonl")), list(read_rows(other / "metrics.jsonl")))
    ends = [max(steps_in(run / CHECKPOINTS), default=None) for run in (whole, other)]
    if ends[0] != ends[1]:
        yield f"last checkpoint: {ends[0]}, {ends[1]}"
        return
    yield from of_steps(*(run / CHECKPOINTS / str(ends[0]) for run in (whole, other)))
    kept = [steps_in(run / SNAPSHOTS) for run in (whole, other)]
    if kept[0] != kept[1]:
        yield f"snapshots: {kept[0]}, {kept[1]}"
        return
    for step in kept[0]:
        yield from of_steps(*(run / SNAPSHOTS / str(step) for run in (whole, other)))
    samples = [
        (run / "samples.jsonl").read_bytes() if (run / "samples.jsonl").exists() else b"" for run in (whole, other)
    ]
    if samples[0] != samples[1]:
        lines = itertools.zip_longest(*(text.split(b"\n") for text in samples))
        yield f"samples.jsonl, line {next(n for n, (a, b) in enumerate(lines, 1) if a != b)}"


def of_rows(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> Iterator[str]:
    """What differs in the metrics."""
    steps = [[row["step"] for row in all_rows] for all_rows in (rows, others)]
    if steps[0] != steps[1]:
        yield f"steps of metrics.jsonl: {_ends(steps[0])}, {_ends(steps[1])}"
    for row, other in zip(rows, others, strict=False):
        for name in [name for name in row | other if not name.startswith(OF_THE_CLOCK)]:
            one, two = (json.dumps(found.get(name, "nothing")) for found in (row, other))
            if one != two:
                yield f"metrics.jsonl, step {row['step']}, {name}: {one}, {two}"


def _ends(steps: list[int]) -> str:
    return f"{len(steps)} from {steps[0]} to {steps[-1]}" if steps else "none"


def of_steps(step: Path, other: Path) -> Iterator[str]:
    """What differs in two checkpoints or snapshots: of the host first, then arrays by name."""
    name = f"{step.parent.name}/{step.name}"
    hosts = [codec.to_json(read_host(place)) for place in (step, other)]
    yield from of_values(*hosts, f"{name}, host")
    arrays, others = arrays_of(step), arrays_of(other)
    for key in sorted(arrays.keys() | others.keys()):
        if key not in arrays or key not in others:
            yield f"{name}, {key} is in one only"
        elif (arrays[key].dtype, arrays[key].shape) != (others[key].dtype, others[key].shape):
            yield f"{name}, {key}: another shape or type"
        elif arrays[key].tobytes() != others[key].tobytes():
            count = int((arrays[key].view(np.uint8) != others[key].view(np.uint8)).sum()) if arrays[key].ndim else 1
            yield f"{name}, {key}: {count} bytes differ"


def of_values(one: Any, other: Any, where: str) -> Iterator[str]:
    """What differs in two values of JSON, by the way there; a batch that was made ahead holds metrics, too."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key in [key for key in one if not key.startswith(OF_THE_CLOCK)]:
            yield from of_values(one[key], other[key], f"{where}/{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from of_values(*pair, f"{where}/{number}")
    elif json.dumps(one) != json.dumps(other):
        yield f"{where}: {json.dumps(one)[:80]}, {json.dumps(other)[:80]}"


def arrays_of(step: Path) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint or snapshot by name, read without the trainer."""
    import tensorstore as ts

    place = {"driver": "ocdbt", "base": f"file://{step.absolute()}/state/"}
    keys = [key.decode() for key in ts.KvStore.open(place).result().list().result()]
    names = [key.removesuffix(ARRAY) for key in keys if key.endswith(ARRAY)]
    specs = {name: {"driver": "zarr", "kvstore": place | {"path": f"{name}/"}} for name in names}
    return {name: ts.open(spec).result().read().result() for name, spec in specs.items()}
