"""What can befall a run: kills at moments that are waited for, and what is done to its disk, files and clock."""

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from fault_lives import Life

from jaxrl_llm.checkpoints.snapshots import CHECKPOINTS, SNAPSHOTS
from jaxrl_llm.checkpoints.store import steps_in

KILLS = ("random", "start-up", "sampling", "scoring", "updating", "checkpoint", "snapshot", "reset", "phase")
"""Moments of a kill -9: any at all, in a start, or what is aimed at."""
DAMAGES = ("truncated", "bit flip")
"""Of the newest checkpoint, after a kill."""
OTHERS = ("SIGTERM", *DAMAGES, "clock")
OF_MOUNTS = ("full disk", "read-only")
WRITTEN = {"checkpoint": CHECKPOINTS, "snapshot": SNAPSHOTS}
"""A kill comes while this folder of the run is being written."""
EVENTS = {"reset": "event/reference_reset", "phase": "event/phase"}
SPREAD_S = {"checkpoint": 0.03, "snapshot": 0.03, "reset": 0.3, "phase": 1.0}
"""A kill comes up to so long after what it is aimed at has begun."""
AIM_S = 0.01
"""Between two looks at what a run is doing."""
PREEMPTED, REFUSED = 75, 2
QUIT = (PREEMPTED, 128 + signal.SIGTERM, -signal.SIGTERM, 0)
"""Exit codes after a SIGTERM: between steps, while it loads, before Python hears it, in the last step."""
DISK = "64m"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One that is to come.

    Attributes:
      kind: of ``KILLS``, ``OTHERS`` or ``OF_MOUNTS``.
      step: once its row is written, the moment is waited for.
      delay: seconds from then on.
      chance: from 0 to 1, for what the kind leaves open.
    """

    kind: str
    step: int
    delay: float
    chance: float

    @property
    def clock(self) -> tuple[float, float] | None:
        """Hours by which the clock of its life jumps, and after how many seconds."""
        return ((-7.0, 7.0)[self.chance < 0.5], 2 + 4 * self.chance) if self.kind == "clock" else None


@dataclasses.dataclass
class Hit:
    """One that came.

    Attributes:
      kind: as planned.
      step: the last one written then.
      doing: what the run was doing.
      killed: whether by kill -9.
      saving: whether a checkpoint was under way.
      resumed_at: the step that the run went on from; 0 for its beginning, None until that is known.
    """

    kind: str
    step: int
    doing: str
    killed: bool
    saving: bool
    resumed_at: int | None = None

    @property
    def counts(self) -> bool:
        """Whether it was a kill after which the run went on above step 0."""
        return self.killed and bool(self.resumed_at)


class Wrong(Exception):
    """A run that did not bear a fault as it should; the text says how."""


def moment(life: Life, fault: Fault) -> bool:
    """Wait for it; False where the life ends first."""
    if fault.kind == "start-up":
        return life.pause(fault.delay)
    if not life.wait(lambda: life.records.step() >= fault.step):
        return False
    if fault.kind in EVENTS:
        since, event = life.records.step(), EVENTS[fault.kind]
        came = life.wait(lambda: any(row["step"] > since and event in row for row in life.records.rows()))
        return came and life.pause(SPREAD_S[fault.kind] * fault.chance)
    if place := WRITTEN.get(fault.kind):
        return life.wait(lambda: life.records.unfinished(place)) and life.pause(SPREAD_S[fault.kind] * fault.chance)
    if fault.kind in KILLS[2:5]:
        return life.wait(lambda: life.doing() == fault.kind or time.sleep(AIM_S))
    return life.pause(fault.delay)


def strike(life: Life, fault: Fault) -> Hit:
    """Have it happen to a life that waits for it, and wait for the end of that.

    Raises:
      Wrong: the life ends in another way than it should.
    """
    doing = life.doing()
    kills = fault.kind not in ("SIGTERM", *OF_MOUNTS)
    if kills:
        stop(life, WRITTEN.get(fault.kind))
    hit = Hit(fault.kind, max(life.records.step(), 0), doing, kills, life.records.unfinished(CHECKPOINTS))
    if fault.kind == "SIGTERM":
        life.kill(signal.SIGTERM)
        expect(life, *QUIT)
    elif fault.kind == "full disk":
        with full(life.run_dir.parent):
            expect(life, REFUSED, 0, says="the disk is full")
    elif fault.kind == "read-only":
        with read_only(life.run_dir / CHECKPOINTS):
            expect(life, REFUSED, 0, says="read-only file system")
    else:
        victim = int(fault.chance * len(life.processes))
        life.kill(signal.SIGKILL, victim)
        life.go_on()
        codes = life.end()
        if codes[victim] not in (-signal.SIGKILL, 0):
            raise Wrong(f"a killed process ended with {codes[victim]}")
    return hit


def stop(life: Life, place: str | None) -> None:
    """Stop a life where it is; with a place, the next time that it is caught writing there, or has ended."""
    life.stop()
    while place and not life.records.unfinished(place):
        life.go_on()
        if not life.wait(lambda: life.records.unfinished(place)):
            return
        life.stop()


def expect(life: Life, *codes: int, says: str = "") -> None:
    """Wait for the end of a life.

    Raises:
      Wrong: it ends with another code, or without these words.
    """
    life.wait(lambda: False)
    code = life.end()[0]
    if code not in codes or (code and says not in life.records.said().lower()):
        raise Wrong(
            f"ended with {code} in place of {codes[0]}{says and f' and {says!r}'}:\n{life.records.said()[-1500:]}"
        )


def damage(run_dir: Path, fault: Fault) -> int | None:
    """Cut or flip the largest file of the newest checkpoint; returns its step, None where no other would be left."""
    steps = steps_in(run_dir / CHECKPOINTS)
    if len(steps) < 2:
        return None
    files = [path for path in (run_dir / CHECKPOINTS / str(steps[-1]) / "state").rglob("*") if path.is_file()]
    path = max(files, key=os.path.getsize)
    size = os.path.getsize(path)
    at = int(fault.chance * size)
    if fault.kind == "truncated":
        os.truncate(path, at)
    else:
        with open(path, "r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1 << random.Random(at).randrange(8)]))
    return steps[-1]


def can_mount() -> bool:
    """Whether this process may mount: it is in a mount namespace of its own."""
    return os.environ.get("FAULT_MOUNTS") == "own"


@contextlib.contextmanager
def disk(place: Path) -> Generator[None]:
    """A file system of ``DISK`` bytes at this folder, where mounting is possible; else the folder as it is."""
    place.mkdir(parents=True)
    if not can_mount():
        yield
        return
    mount("-t", "tmpfs", "-o", f"size={DISK}", "none", str(place))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


@contextlib.contextmanager
def full(place: Path) -> Generator[None]:
    """No byte is left there within the block."""
    ballast = place / "ballast"
    end = time.monotonic() + 0.5
    with open(ballast, "wb", buffering=0) as file:
        while time.monotonic() < end:  # what is removed meanwhile is taken too
            with contextlib.suppress(OSError):
                file.write(b"0" * 4096)
    try:
        yield
    finally:
        ballast.unlink()


@contextlib.contextmanager
def read_only(place: Path) -> Generator[None]:
    """Nothing there can be written within the block: a mount, since root may write whatever a mode says."""
    mount("--bind", str(place), str(place))
    try:
        mount("-o", "remount,bind,ro", str(place))
        yield
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def mount(*arguments: str) -> None:
    """As root of a namespace."""
    subprocess.run(["mount", *arguments], check=True)


def planned(
    chances: random.Random, moments: Sequence[tuple[float, int]], kinds: Sequence[str], start_up: float
) -> list[Fault]:
    """Faults of these kinds at moments that are drawn evenly from a run's duration, in the order in which they come.

    Args:
      chances: where the moments come from.
      moments: of an undisturbed run: seconds after its beginning, and the step whose row was written then; the last one
        is its end.
      kinds: in any order.
      start_up: seconds that a start takes.
    """
    begin, end = moments[0][0], moments[-1][0]
    faults = []
    for at, kind in zip(sorted(chances.uniform(begin, end) for _ in kinds), kinds, strict=True):
        seconds, step = max(one for one in moments if one[0] <= at)
        delay = chances.uniform(0, start_up) if kind == "start-up" else at - seconds
        faults.append(Fault(kind, step, delay, chances.random()))
    return faults
