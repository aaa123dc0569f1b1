"""Runs that are killed, stopped and hindered again and again, and what is left of them at the end.

    PYTHONPATH=tests python -m campaigns.faults CONFIG FOLDER FIRST KILLS

Runs a configuration undisturbed, and then over and over under faults until it finishes. Faults fall at moments drawn
evenly from the measured duration of the undisturbed run, or are aimed: kill -9 while it samples, scores, updates,
writes a checkpoint or a snapshot, after a reset, at a phase's start, while it starts; SIGTERM; the newest checkpoint
truncated or with one bit flipped; a wall clock that jumps by seven hours forth or back (``time.time`` of the process;
its monotonic clock goes on); a disk without a free byte; a read-only folder of checkpoints; of several processes one
that is killed. At the end the run has to equal the undisturbed one bit for bit. Prints a line of JSON for each pass:
its faults, and what was wrong. A kill counts where the run went on above step 0.

Full disks are small ones in memory, and read-only folders are mounts: these two need a mount namespace
(``unshare --map-root-user --mount``), and are left out where ``FAULT_MOUNTS`` is not ``own``.
"""

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from campaigns.lives import Life
from golden.differences import difference

from jaxrl_llm.checkpoints.snapshots import CHECKPOINTS, SNAPSHOTS
from jaxrl_llm.checkpoints.store import steps_in

KILLS = ("random", "start-up", "sampling", "scoring", "updating", "checkpoint", "snapshot", "reset", "phase")
"""Moments of a kill -9: any at all, in a start, or what is aimed at."""
DAMAGES = ("truncated", "bit flip")
"""Of the newest checkpoint, after a kill."""
OTHERS = ("SIGTERM", *DAMAGES, "clock")
STOPS = ("stop", "stop again", "kill after a stop", "stop", "stop again", "stop")
"""Of a pass of ``STOPPED``, in this order: SIGTERM while it samples; the others come in the step that was stopped."""
STOPPED = ("branches", "loops", "mixed", "raced", "apart")
"""Configurations that are stopped within their steps."""
RACED = ("raced",)
"""Of these what ends first decides, so that after a stop they need only come to their end."""
OF_MOUNTS = ("full disk", "read-only")
WRITTEN = {"checkpoint": CHECKPOINTS, "snapshot": SNAPSHOTS}
"""A kill comes while this folder of the run is being written."""
EVENTS = {"reset": "event/reference_reset", "phase": "event/phase"}
SPREAD_S = dict.fromkeys(STOPS, 0.3) | {"checkpoint": 0.03, "snapshot": 0.03, "reset": 0.3, "phase": 1.0}
"""A kill comes up to so long after what it is aimed at has begun."""
AIM_S = 0.01
"""Between two looks at what a run is doing."""
PREEMPTED, REFUSED = 75, 2
QUIT = (PREEMPTED, 128 + signal.SIGTERM, -signal.SIGTERM, 0)
"""Exit codes after a SIGTERM: between steps, while it loads, before Python hears it, in the last step."""
DISK = "64m"
PROCESSES = {"several": 2, "apart": 2}
LACKS = {
    "dynamic": ("reset", "snapshot", "phase", "SIGTERM"),
    "hardest": ("SIGTERM",),
    "ahead": ("phase",),
    "guarded": ("reset",),
    "pairs": KILLS[2:4] + KILLS[6:],
    "several": (*KILLS[1:], *OF_MOUNTS),
}
"""Faults that have nothing to aim at in a configuration, or after which it need not be the same: a signal within a step
of one with ``interrupt`` or ``token_budget``, which take what ends first."""
KILLS_A_PASS = 4
"""Of which half fall at random; beside them one other fault."""
PASSES_A_KILL = 3
"""At most: a run may end before what a kill is aimed at has come, and a kill before the first checkpoint counts not."""


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
      within: whether it was a SIGTERM that stopped the run within a step.
      resumed_at: the step that the run went on from; 0 for its beginning, None until that is known.
    """

    kind: str
    step: int
    doing: str
    killed: bool
    saving: bool
    within: bool = False
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
    if fault.kind in STOPS:
        came = life.wait(lambda: life.samples() or time.sleep(AIM_S))
        return came and life.pause(SPREAD_S[fault.kind] * fault.chance)
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
    signals = fault.kind in ("SIGTERM", "stop", "stop again")
    kills = not signals and fault.kind not in OF_MOUNTS
    if kills:
        stop(life, WRITTEN.get(fault.kind))
    hit = Hit(fault.kind, max(life.records.step(), 0), doing, kills, life.records.unfinished(CHECKPOINTS))
    if signals:
        life.kill(signal.SIGTERM)
        expect(life, *QUIT)
        hit.within = "stopped within step" in life.records.said()
    elif fault.kind == "full disk":
        with full(life.run_dir.parent):
            expect(life, REFUSED, 0, says="the disk is full")
    elif fault.kind == "read-only":
        life.stop()  # what it opened meanwhile would keep the mount busy
        with read_only(life.run_dir / CHECKPOINTS):
            life.go_on()
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
    """Faults of these kinds at moments that are drawn evenly from a run's duration, in the order in which they come;
    ``STOPS`` each in its own part of it.

    Args:
      chances: where the moments come from.
      moments: of an undisturbed run: seconds after its beginning, and the step whose row was written then; the last one
        is its end.
      kinds: in any order.
      start_up: seconds that a start takes.
    """
    begin, end = moments[0][0], moments[-1][0]
    faults = []
    shares = [chances.random() for _ in kinds]
    shares = [(i + x) / len(kinds) for i, x in enumerate(shares)] if kinds[0] in STOPS else sorted(shares)
    for at, kind in zip((begin + (end - begin) * share for share in shares), kinds, strict=True):
        seconds, step = max(one for one in moments if one[0] <= at)
        if kinds[0] in STOPS:  # each in a later step, or in that in which the life before was stopped
            step = -1 if kind in STOPS[1:3] else max(step, len(faults) // 2)
        delay = chances.uniform(0, start_up) if kind == "start-up" else at - seconds
        faults.append(Fault(kind, step, delay, chances.random()))
    return faults


@dataclasses.dataclass(frozen=True)
class Whole:
    """An undisturbed run.

    Attributes:
      config: its file.
      run_dir: where it lies.
      moments: seconds after its beginning, and the step whose row was written then; last its end.
    """

    config: Path
    run_dir: Path
    moments: list[tuple[float, int]]


def undisturbed(config: Path, folder: Path) -> Whole:
    """A run that nobody touches.

    Raises:
      Wrong: it fails.
    """
    folder.mkdir(parents=True)
    with contextlib.closing(Life(config, folder / "run", folder, PROCESSES.get(config.stem, 1))) as life:
        moments: list[tuple[float, int]] = []

        def watch() -> bool:
            step = life.records.step()
            if step >= 0 and (not moments or step > moments[-1][1]):
                moments.append((time.monotonic() - life.began, step))
            return False

        life.wait(watch)
        watch()
        expect(life, 0)
        return Whole(config, life.run_dir, [*moments, (time.monotonic() - life.began, moments[-1][1])])


def under_faults(whole: Whole, faults: Sequence[Fault], folder: Path) -> tuple[list[Hit], str]:
    """The run of ``whole`` under these faults, one in each of its lives, until it is done.

    Returns:
      The faults that came, and what was not as it should be; empty where nothing was. The last checkpoints, snapshots,
      metrics and samples have to equal those of ``whole``.
    """
    hits: list[Hit] = []
    folder.mkdir(parents=True)
    with disk(folder / "disk"):
        run_dir = folder / "disk" / "run"
        try:
            lives(whole, faults, run_dir, folder, hits)
            return hits, "" if whole.config.stem in RACED else difference(whole.run_dir, run_dir)
        except (Wrong, TimeoutError) as error:
            return hits, str(error)


def lives(whole: Whole, faults: Sequence[Fault], run_dir: Path, folder: Path, hits: list[Hit]) -> None:
    """One start after the other, up to the last; what came is added to ``hits``.

    Raises:
      Wrong: one of them ends in another way than it should.
    """
    broken = None
    said = ""
    for fault in [*faults, None]:
        life = Life(whole.config, run_dir, folder, PROCESSES.get(whole.config.stem, 1), fault.clock if fault else None)
        with contextlib.closing(life):
            came = fault is not None and moment(life, fault)
            since = life.records.resumed_at()
            hit = strike(life, fault) if came and fault else None
            if hit is None:
                expect(life, 0)
            resumed(hits, since if since is not None else life.records.resumed_at(), begun=life.records.step() >= 0)
            if broken is not None:
                said += life.records.said()
                if life.records.resumed_at() is not None:
                    if f"checkpoints/{broken} is damaged (" not in said or "; resuming from" not in said:
                        raise Wrong(f"nothing was said of the damage of checkpoint {broken}:\n{said[-1500:]}")
                    broken = None
            if hit is None:
                return
            hits.append(hit)
        if hit.kind in DAMAGES and broken is None:
            broken = damage(run_dir, fault)
            said = ""  # a life may end between its word on the damage and its first step


def resumed(hits: Sequence[Hit], at: int | None, begun: bool) -> None:
    """Write down where the run went on from after those hits for which that was not known yet.

    ``at``: what this life has said, None where it has not; ``begun``: whether it has come as far as its first row.
    """
    if at is None and not begun:
        return
    for hit in hits:
        if hit.resumed_at is None:
            hit.resumed_at = at or 0


def kinds_of(name: str, number: int, chances: random.Random) -> list[str]:
    """Faults of one pass; ``number``: passes with numbers that follow each other have all that there is a place for."""
    if name in STOPPED:
        return [*STOPS]
    lacks = LACKS.get(name, ())
    others = [kind for kind in OTHERS + OF_MOUNTS * can_mount() if kind not in lacks]
    aimed = [kind for kind in KILLS[1:] if kind not in lacks] or ["random"]
    half = KILLS_A_PASS // 2
    kinds = ["random"] * (KILLS_A_PASS - half) + [aimed[(number * half + i) % len(aimed)] for i in range(half)]
    kinds.append(others[number % len(others)])
    chances.shuffle(kinds)
    return kinds


def main(config: Path, folder: Path, first: int, kills: int) -> None:
    """Run one configuration in passes, from the one with the number ``first``, until so many kills have counted; a
    line for each pass.
    """
    whole = undisturbed(config, folder / "whole")
    counted = 0
    for number in range(first, first + PASSES_A_KILL * kills):
        chances = random.Random(f"{config.stem} {number}")
        faults = planned(chances, whole.moments, kinds_of(config.stem, number, chances), whole.moments[0][0])
        hits, wrong = under_faults(whole, faults, folder / str(number))
        print(json.dumps({"hits": [vars(hit) | {"counts": hit.counts} for hit in hits], "wrong": wrong}), flush=True)
        counted += sum(hit.within if config.stem in STOPPED else hit.counts for hit in hits)
        if wrong or counted >= kills:
            return


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
