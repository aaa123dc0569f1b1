"""Runs that are killed, stopped and hindered again and again, and what is left of them at the end.

    python tools/fault_injection.py [--kills 20 | --minutes 60] [--configs dynamic hardest] [--seed 0] [--json]

Each configuration (``tools/fault_configs``) is run twice undisturbed, and then over and over under faults until it
finishes. Faults fall at moments drawn evenly from the measured duration of the undisturbed run, or are aimed: kill -9
while it samples, scores, updates, writes a checkpoint or a snapshot, after a reset, at a phase's start, while it
starts; SIGTERM; the newest checkpoint truncated or with one bit flipped; a wall clock that jumps by seven hours forth
or back (``time.time`` of the process; its monotonic clock goes on); a disk without a free byte; a read-only folder of
checkpoints; of several processes one that is killed. A kill counts where the run went on above step 0.

At the end the run has to equal the undisturbed one bit for bit: every array and host value of the last checkpoint and
of all snapshots, every row of metrics.jsonl (but for what the clock decides), samples.jsonl. The first difference is
said by name, and that run is kept; exit code 1.

What a run was doing is read from the stack of its main thread, for which it is asked just before. Full disks
are small ones in memory, and read-only folders are mounts: the tool starts itself anew in a mount namespace of its own
(``unshare``), which needs no rights where user namespaces are allowed; elsewhere these two are left out, and it says
so. Ctrl-C stops, and shows what is known by then.
"""

import collections
import contextlib
import dataclasses
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import tyro
from fault_compare import difference
from fault_kinds import (
    DAMAGES,
    KILLS,
    OF_MOUNTS,
    OTHERS,
    Fault,
    Hit,
    Wrong,
    can_mount,
    damage,
    disk,
    expect,
    moment,
    planned,
    strike,
)
from fault_lives import Life

CONFIGS = Path(__file__).parent / "fault_configs"
PROCESSES = {"several": 2}
LACKS = {
    "dynamic": ("reset", "snapshot", "phase"),
    "ahead": ("phase",),
    "guarded": ("reset",),
    "pairs": KILLS[2:4] + KILLS[6:],
}
"""Kills that have nothing to aim at in a configuration."""
LACKS |= {"several": (*KILLS[1:], *OF_MOUNTS)}
KILLS_A_PASS = 6
"""Of which half fall at random; beside them one other fault."""
INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Options:
    """What is tried.

    Attributes:
      kills: to be counted in all; each configuration is run under faults at least once.
      minutes: in place of ``kills``; no pass begins later.
      configs: names in ``tools/fault_configs``, or paths.
      seed: decides moments and kinds.
      folder: where runs lie meanwhile; None for a temporary one.
      json: print a line of JSON for each pass, and the table on stderr.
    """

    kills: int = 20
    minutes: float = 0.0
    configs: tuple[str, ...] = ("dynamic", "phased", "ahead", "hardest", "guarded", "pairs", "several")
    seed: int = 0
    folder: Path | None = None
    json: bool = False


@dataclasses.dataclass
class Whole:
    """An undisturbed run.

    Attributes:
      config: its file.
      run_dir: where it lies.
      moments: seconds after the beginning of its last start, and the step whose row was written then; last its end.
    """

    config: Path
    run_dir: Path
    moments: list[tuple[float, int]]

    @property
    def name(self) -> str:
        """Of the configuration."""
        return self.config.stem


@dataclasses.dataclass
class Pass:
    """One run under faults.

    Attributes:
      config: its name.
      hits: faults that came, in order.
      seconds: that it took.
      wrong: what was not as it should be; empty where nothing was.
    """

    config: str
    hits: list[Hit]
    seconds: float
    wrong: str


def undisturbed(config: Path, folder: Path) -> Whole:
    """A run that nobody touches.

    Raises:
      Wrong: it fails.
    """
    folder.mkdir(parents=True)
    life = Life(config, folder / "run", folder, PROCESSES.get(config.stem, 1))
    with contextlib.closing(life):
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


def under_faults(whole: Whole, faults: Sequence[Fault], folder: Path) -> Pass:
    """The run of ``whole`` under these faults, one in each of its lives, until it is done; compared with it."""
    began = time.monotonic()
    found = Pass(whole.name, [], 0.0, "")
    folder.mkdir(parents=True)
    with disk(folder / "disk"):
        run_dir = folder / "disk" / "run"
        try:
            lives(whole, faults, run_dir, folder, found.hits)
            found.wrong = difference(whole.run_dir, run_dir)
        except (Wrong, TimeoutError, subprocess.TimeoutExpired) as error:
            found.wrong = str(error)
        if found.wrong:
            shutil.copytree(run_dir, folder / "kept", dirs_exist_ok=True)
    found.seconds = time.monotonic() - began
    if not found.wrong:
        shutil.rmtree(folder)
    return found


def lives(whole: Whole, faults: Sequence[Fault], run_dir: Path, folder: Path, hits: list[Hit]) -> None:
    """One start after the other, up to the last; what came is added to ``hits``.

    Raises:
      Wrong: one of them ends in another way than it should.
    """
    broken = None
    said = ""
    for fault in [*faults, None]:
        life = Life(whole.config, run_dir, folder, PROCESSES.get(whole.name, 1), fault.clock if fault else None)
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


def kinds_of(name: str, place: int, number: int, chances: random.Random) -> list[str]:
    """Faults of one pass: in turn all that the configuration has a place for, each configuration with another one
    first; ``place``: of the configuration among all, ``number``: of its pass."""
    lacks = LACKS.get(name, ())
    others = [kind for kind in OTHERS + OF_MOUNTS * can_mount() if kind not in lacks]
    aimed = [kind for kind in KILLS[1:] if kind not in lacks] or ["random"]
    half = KILLS_A_PASS // 2
    kinds = ["random"] * (KILLS_A_PASS - half) + [aimed[(number * half + i) % len(aimed)] for i in range(half)]
    kinds.append(others[(number + place) % len(others)])
    chances.shuffle(kinds)
    return kinds


def start_up(whole: Whole) -> float:
    """Seconds from a start to its first row."""
    return whole.moments[0][0]


def campaign(options: Options, folder: Path, passes: list[Pass], say) -> None:
    """Run until enough kills are counted, or the time is over; each pass is added to ``passes``, and said."""
    began = time.monotonic()
    chances = random.Random(options.seed)
    wholes = []
    for name in options.configs:
        config = Path(name).absolute() if name.endswith(".py") else CONFIGS / f"{name}.py"
        say(f"{config.stem}: undisturbed, twice")
        first = undisturbed(config, folder / f"{config.stem}-first")
        whole = undisturbed(config, folder / f"{config.stem}-whole")
        if wrong := difference(first.run_dir, whole.run_dir):
            raise SystemExit(f"{config.stem}: two undisturbed runs differ: {wrong}")
        shutil.rmtree(first.run_dir.parent)
        wholes.append(whole)
    number = 0
    while number < len(wholes) or not enough(options, passes, time.monotonic() - began):
        whole = wholes[number % len(wholes)]
        kinds = kinds_of(whole.name, number % len(wholes), number // len(wholes), chances)
        faults = planned(chances, whole.moments, kinds, start_up(whole))
        number += 1
        passes.append(under_faults(whole, faults, folder / f"{whole.name}-{number}"))
        say(line_of(passes[-1], counted(passes)))
        if options.json:
            print(json.dumps(dataclasses.asdict(passes[-1])), flush=True)


def enough(options: Options, passes: Sequence[Pass], seconds: float) -> bool:
    """Whether no further pass is to begin."""
    return seconds >= 60 * options.minutes if options.minutes else counted(passes) >= options.kills


def counted(passes: Sequence[Pass]) -> int:
    """Kills after which the run went on above step 0."""
    return sum(hit.counts for one in passes for hit in one.hits)


def line_of(one: Pass, total: int) -> str:
    """A pass in words."""
    hits = ", ".join(f"{hit.kind} after {hit.step} ({hit.doing}{hit.saving * ', saving'})" for hit in one.hits)
    return f"{one.config}: {one.seconds:.0f} s, {total} kills so far; {hits}; {one.wrong or 'equal'}"


def table(passes: Sequence[Pass]) -> str:
    """What is known, by configuration."""
    lines = [
        "| configuration | runs | kills | other faults | killed while | while saving | after steps | min | result |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(one.config for one in passes):
        own = [one for one in passes if one.config == name]
        hits = [hit for one in own for hit in one.hits]
        kills = [hit for hit in hits if hit.counts]
        others = collections.Counter(hit.kind for hit in hits if hit.kind in OTHERS + OF_MOUNTS)
        steps = [hit.step for hit in kills] or [0]
        wrong = [one.wrong.splitlines()[0] for one in own if one.wrong]
        cells = (
            name,
            str(len(own)),
            str(len(kills)),
            ", ".join(f"{kind} {n}" for kind, n in others.items()) or "-",
            ", ".join(f"{doing} {n}" for doing, n in collections.Counter(hit.doing for hit in kills).most_common()),
            str(sum(hit.saving for hit in kills)),
            f"{min(steps)} to {max(steps)}, median {statistics.median(steps):g}",
            f"{sum(one.seconds for one in own) / 60:.1f}",
            "equal" if not wrong else f"{len(wrong)} differ: {wrong[0]}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def with_mounts() -> None:
    """Start anew where mounting is possible; else go on without."""
    inside = ["unshare", "--map-root-user", "--mount"]
    if can_mount():
        return
    if shutil.which("unshare") and subprocess.run([*inside, "true"], capture_output=True, check=False).returncode == 0:
        os.environ["FAULT_MOUNTS"] = "own"
        os.execvp(inside[0], [*inside, sys.executable, *sys.argv])
    print("no mount namespace here: full disks and read-only folders are left out", file=sys.stderr)


def main(options: Options) -> int:
    """Run the campaign, print the table; 1 where anything was not as it should be."""
    with_mounts()
    began = time.monotonic()
    passes: list[Pass] = []
    out = sys.stderr if options.json else sys.stdout
    code = 0
    folder = options.folder or Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        campaign(options, folder.absolute(), passes, lambda line: print(line, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        code = INTERRUPTED
    print(table(passes), file=out)
    failed = any(one.wrong for one in passes)
    print(f"{counted(passes)} kills counted in {(time.monotonic() - began) / 60:.1f} minutes", file=out)
    if failed:
        print(f"what differs is kept in {folder}", file=out)
    else:
        shutil.rmtree(folder, ignore_errors=True)
    return code or int(failed)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
