"""A run of thousands of steps, watched from outside: it takes no more and more memory, files or threads.

The smoke model with phases, resets with snapshots, a curriculum, replay, evaluations with their report, checkpoints and
TensorBoard (``configs/soak.py``). Each second it is noted what /proc says of the process. ``CAMPAIGN_TIMES=4`` is what
docs/reliability.md reports.
"""

import contextlib
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from campaigns.extent import PATIENCE_S, TIMES
from commands import MAIN, ROOT

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(PATIENCE_S)]
STEPS = 1200 * TIMES
SETTLED = 100
"""Steps after which a run should have all that it needs."""
SPAN = 500
"""Steps of which the first ones after that are compared with the last ones of the run."""
MEMORY = 0.08
"""By which memory may grow: Orbax keeps something of each checkpoint."""
MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Seen:
    """One look at a process: the last step written, its MiB in memory, open files, and threads but for the workers of
    TensorStore's pool, which begins one whenever as many as it has are busy, up to a limit of its own.
    """

    step: int
    memory: float
    files: int
    threads: int


def look(pid, metrics):
    """What /proc says of a process; raises OSError once it is gone."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    count = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
    threads = [Path(f"/proc/{pid}/task/{task}/comm").read_text().strip() for task in os.listdir(f"/proc/{pid}/task")]
    files = len(os.listdir(f"/proc/{pid}/fd"))
    others = len(threads) - threads.count("ts_pool_worker")
    return Seen(count - 1, pages * os.sysconf("SC_PAGE_SIZE") / MIB, files, others)


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """All looks at a run, and its rows."""
    folder, seen = tmp_path_factory.mktemp("soak"), []
    config = ROOT / "tests" / "campaigns" / "configs" / "soak.py"
    command = [
        sys.executable,
        "-c",
        MAIN,
        "train",
        str(config),
        "--run_dir",
        str(folder / "run"),
        "--steps",
        str(STEPS),
    ]
    variables = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "JAX_NUM_CPU_DEVICES": "1"}
    with (
        open(folder / "log", "wb") as log,
        subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            while process.poll() is None:
                time.sleep(1.0)
                with contextlib.suppress(OSError):
                    seen.append(look(process.pid, folder / "run" / "metrics.jsonl"))
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, (folder / "log").read_text()[-2000:]
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    return seen, rows


def medians(seen, name):
    """Of the first looks after the run has settled, and of its last ones."""
    early = [getattr(one, name) for one in seen if SETTLED <= one.step < SETTLED + SPAN]
    late = [getattr(one, name) for one in seen if one.step > STEPS - SPAN]
    return statistics.median(early), statistics.median(late)


def test_memory_files_and_threads_stay(watched):
    before, after = medians(watched[0], "memory")
    print(f"memory {before:.0f} to {after:.0f} MiB")
    assert after <= (1 + MEMORY) * before
    for name in ("files", "threads"):
        before, after = medians(watched[0], name)
        assert after <= before, name
