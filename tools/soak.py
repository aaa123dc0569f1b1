"""A run of thousands of steps, watched from outside: does it take more and more memory, files, threads or time?

    python tools/soak.py [--steps 5000] [--folder DIR]

The smoke model with phases, resets with snapshots, a curriculum and replay (``tools/soak_config.py``); evaluations,
with the report that they write anew, checkpoints, TensorBoard. Each second it is noted what /proc says of the process
and of its workers. Prints a table of ten parts of the run, a small picture, and what it was measured against: memory
within 2 % of what it was after the first hundred steps, as many open files and threads as then, steps as fast as then
within 5 %, by medians of five hundred steps and phases of one kind. Exit code 1 where one of them does not hold.
"""

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import tyro
from soak_config import EVERY, KINDS

from jaxrl_llm.system.json_lines import read_rows

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "tools" / "soak_config.py"
SETTLED = 100
"""Steps after which a run should have all that it needs."""
SPAN = 500
"""Steps of which the first ones after that are compared with the last ones of the run."""
MEMORY, SPEED = 0.02, 0.05
PARTS = 10
PICTURE = " ▁▂▃▄▅▆▇█"
SECONDS = 1.0
ROW = 1 << 16
"""Bytes in which a row has room."""
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Options:
    """What is watched.

    Attributes:
      steps: of the run; at least twice ``SPAN`` after ``SETTLED``.
      folder: where it lies; None for a temporary one, which is removed.
    """

    steps: int = 5000
    folder: Path | None = None


@dataclasses.dataclass(frozen=True)
class Seen:
    """One look.

    Attributes:
      step: the last one written.
      seconds: since the beginning.
      memory: MiB of the process that are in memory.
      workers: MiB of all others of its group.
      files: that the process has open.
      threads: of the process.
    """

    step: int
    seconds: float
    memory: float
    workers: float
    files: int
    threads: int


def look(own: int, began: float, run_dir: Path) -> Seen:
    """What /proc says of a process and its group now.

    Raises:
      OSError: the process is gone.
    """
    others = [pid for pid in group_of(own) if pid != own]
    files = len(os.listdir(f"/proc/{own}/fd"))
    threads = len(os.listdir(f"/proc/{own}/task"))
    seconds = time.monotonic() - began
    return Seen(
        last_step(run_dir / "metrics.jsonl"), seconds, resident(own), sum(map(resident, others)), files, threads
    )


def group_of(leader: int) -> list[int]:
    """The processes that a leader of a group has begun, and itself."""
    found = []
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if os.getpgid(int(entry)) == leader:
                found.append(int(entry))
    return found


def resident(pid: int) -> float:
    """MiB of a process that are in memory; 0 once it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / MIB


def watched(options: Options, folder: Path, say: Callable[[str], None]) -> list[Seen]:
    """All looks at a run, from its first step to its end."""
    seen: list[Seen] = []
    command = ["-c", "from jaxrl_llm.cli import main; main()", "train", str(CONFIG), "--run_dir", str(folder / "run")]
    command += ["--steps", str(options.steps)]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(
            [sys.executable, *command], env=variables, stdout=log, stderr=log, start_new_session=True
        ) as process,
    ):
        began = time.monotonic()
        try:
            while process.poll() is None:
                time.sleep(SECONDS)
                with contextlib.suppress(OSError):
                    if (one := look(process.pid, began, folder / "run")).step > 0:
                        seen.append(one)
                        if len(seen) % 60 == 0:
                            say(f"step {one.step}: {one.memory:.0f} MiB, {one.files} files, {one.threads} threads")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}:\n{(folder / 'log').read_text()[-2000:]}")
    return seen


def last_step(path: Path) -> int:
    """Of the last whole row; -1 for none."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - ROW))
        lines = file.read().split(b"\n")[:-1]
        return json.loads(lines[-1])["step"] if len(lines) > 1 else -1
    return -1


def part(seen: Sequence[Seen], begin: int, end: int) -> list[Seen]:
    """The looks after steps from ``begin`` up to ``end``, excluded."""
    return [one for one in seen if begin <= one.step < end]


def table(seen: Sequence[Seen], durations: dict[int, float]) -> str:
    """Medians of the parts of a run; ``durations``: of its steps, in seconds."""
    last = seen[-1].step
    lines = [
        "| steps | memory, MiB | workers, MiB | files | threads | a step, ms | with all between, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for number in range(PARTS):
        begin, end = (round(last * n / PARTS) for n in (number, number + 1))
        own = part(seen, begin, end)
        if len(own) < 2:
            continue
        middle = [statistics.median(getattr(one, name) for one in own) for name in ("memory", "workers")]
        counts = [f"{min(xs)} to {max(xs)}" for xs in ([one.files for one in own], [one.threads for one in own])]
        steps = 1000 * statistics.median([durations[step] for step in durations if begin < step <= end])
        whole = 1000 * (own[-1].seconds - own[0].seconds) / max(own[-1].step - own[0].step, 1)
        cells = f"{begin + 1} to {end}", *(f"{x:.0f}" for x in middle), *counts, f"{steps:.1f}", f"{whole:.1f}"
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(values: Sequence[float], width: int = 72) -> str:
    """A line from 0 to the largest."""
    size = max(1, len(values) // width)
    means = [statistics.fmean(values[at : at + size]) for at in range(0, len(values) - size + 1, size)]
    return "".join(PICTURE[round(8 * mean / max(means))] for mean in means)


def verdicts(seen: Sequence[Seen], durations: dict[int, float]) -> list[tuple[bool, str]]:
    """Whether each of the promises holds, and in words what was compared."""
    last = seen[-1].step
    early, late = part(seen, SETTLED, SETTLED + SPAN), part(seen, last - SPAN, last + 1)
    found = []
    before, after = (statistics.median(one.memory for one in looks) for looks in (early, late))
    change = after / before - 1
    found.append((abs(change) <= MEMORY, f"memory {before:.0f} to {after:.0f} MiB ({100 * change:+.1f} %)"))
    for name in ("files", "threads"):
        before, after = (statistics.median(getattr(one, name) for one in looks) for looks in (early, late))
        found.append((after <= before, f"{name} {before:g} to {after:g}"))
    for number, kind in enumerate(KINDS):
        own = [step for step in durations if (step - 1) // EVERY % len(KINDS) == number]
        before = statistics.median(durations[step] for step in own if SETTLED < step <= SETTLED + SPAN)
        after = statistics.median(durations[step] for step in own if step > last - SPAN)
        change = after / before - 1
        words = f"a step of {kind} phases {1000 * before:.1f} to {1000 * after:.1f} ms ({100 * change:+.1f} %)"
        found.append((change <= SPEED, words))
    return found


def main(options: Options) -> int:
    """Watch a run, and say what came of it; 1 where a promise does not hold."""
    if options.steps < SETTLED + 2 * SPAN:
        raise SystemExit(f"soak: --steps must be at least {SETTLED + 2 * SPAN}, got {options.steps}")
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        seen = watched(options, folder.absolute(), lambda line: print(line, file=sys.stderr, flush=True))
        rows = [row for row in read_rows(folder / "run" / "metrics.jsonl") if row["step"] > 0]
        kept = subprocess.run(["du", "-sh", str(folder / "run")], capture_output=True, text=True, check=True).stdout
    durations = {row["step"]: row["time/step_s"] for row in rows}
    print(table(seen, durations))
    print(f"memory     {picture([one.memory for one in seen])}")
    print(f"files      {picture([one.files for one in seen])}")
    print(f"step time  {picture(list(durations.values()))}")
    print(f"{len(rows)} steps in {seen[-1].seconds / 60:.1f} minutes, {kept.split()[0]} on disk")
    found = verdicts(seen, durations)
    for holds, words in found:
        print(f"{'holds' if holds else 'FAILS'}  {words}")
    return int(not all(holds for holds, _ in found))


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
