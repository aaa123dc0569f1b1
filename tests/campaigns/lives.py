"""One life of a run: its processes from start to end, what they are doing at a moment, and what they say."""

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nursery import Forked

from jaxrl_llm.checkpoints.store import UNFINISHED
from jaxrl_llm.errors import InputError
from jaxrl_llm.system.json_lines import read_rows

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys, threading, time
os.setsid()
if jump := os.environ.get("FAULT_CLOCK"):
    hours, after = map(float, jump.split(","))
    told, began = time.time, time.monotonic()
    time.time = lambda: told() + 3600 * hours * (time.monotonic() > began + after)

def tell():
    main = threading.main_thread().ident
    stacks = os.open(os.environ["FAULT_STACKS"], os.O_WRONLY | os.O_APPEND)
    while os.read(0, 1):
        frame, lines = sys._current_frames().get(main), []
        while frame is not None:
            lines.append(f'File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
            frame = frame.f_back
        os.write(stacks, "\\n".join(lines).encode())

threading.Thread(target=tell, daemon=True).start()
from jaxrl_llm.cli import main
main()
"""
"""For each byte on its standard input a thread writes down where the main thread is. From within a signal's handler it
could be said at once, but a frame that is just being made or left cannot be read there without the danger of a crash.
"""
POLL_S = 0.001
PATIENCE_S = 300.0
"""Nothing is waited for longer, and no process outlives the first one of its run for so long."""
ORPHANS_S = 20.0
GRACE_S = "0.02"
"""A SIGTERM stops a run within its step."""
MAIN = 'File "<string>"'
"""A frame of the main thread alone: the program itself."""
LOADING = "loading"
WHERE = (
    ("writing a snapshot", r"snapshots\.py", ""),
    ("saving", r"checkpoints/store\.py", "save|wait|close"),
    ("recording", r"telemetry/(writers|records|rows|report)", ""),
    ("evaluating", r"jaxrl_llm/rollout/evaluate\.py", ""),
    ("updating", r"jaxrl_llm/learner/", ""),
    ("scoring", r"jaxrl_llm/rewards/", ""),
    ("sampling", r"jaxrl_llm/(engine|rollout)/", ""),
    ("a phase begins", r"trainer/state\.py", "next_phase"),
    ("a reset", r"trainer/state\.py", "apply_resets"),
    (LOADING, r"trainer/state\.py", "load_phase|begin|borrowed|restored|with_others|carried|go_back"),
    ("within a step", r"jaxrl_llm/stages", ""),
    ("between steps", r"trainer/loop\.py", "run_phase|agreed_to_stop|save"),
)
"""What a run is doing, by the innermost frame of its main thread in one of these files and functions."""


class Records:
    """What one start of a run has written and said so far.

    Args:
      run_dir: the run's.
      log: what its first process prints.
    """

    def __init__(self, run_dir: Path, log: Path):
        self._run_dir, self._log = run_dir, log
        self._metrics = run_dir / "metrics.jsonl"
        self._before = self._written()
        self._size = -1
        self._rows: list[dict[str, Any]] = []

    def _written(self) -> int:
        """When the file was last cut or written to, nanoseconds; 0 where there is none."""
        try:
            return os.stat(self._metrics).st_mtime_ns
        except FileNotFoundError:
            return 0

    def rows(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl, once this start has opened it; none before."""
        if self._written() in (0, self._before):
            return []
        if (size := os.path.getsize(self._metrics)) != self._size:
            with contextlib.suppress(InputError):  # the run may cut the file while it is read: once more, then
                self._rows = list(read_rows(self._metrics))
                self._size = size
        return self._rows

    def step(self) -> int:
        """The last step written; -1 for none, or before this start has opened the file."""
        rows = self.rows()
        return rows[-1]["step"] if rows else -1

    def unfinished(self, place: str) -> bool:
        """Whether a checkpoint or a snapshot is being written."""
        return any((self._run_dir / place).glob(UNFINISHED))

    def said(self) -> str:
        """All that its first process has printed."""
        return self._log.read_text(errors="replace")

    def resumed_at(self) -> int | None:
        """The step that it has said it goes on from; None where it has not, or not yet."""
        found = re.search(r"^continuing at step (\d+) of", self.said(), re.MULTILINE)
        return int(found[1]) - 1 if found else None


class Life:
    """Owner of one start of a run, as ``count`` processes.

    Args:
      config: path of its configuration.
      run_dir: where it lies.
      folder: for logs and compiled programs.
      count: processes.
      clock: hours by which its wall clock jumps, and the seconds after which it does; None for none.

    Attributes:
      began: by ``time.monotonic``.
      records: what it has written and said.
      processes: the first one leads.
    """

    def __init__(
        self, config: Path, run_dir: Path, folder: Path, count: int = 1, clock: tuple[float, float] | None = None
    ):
        self.run_dir = run_dir
        self._stacks = folder / "stacks.txt"
        first_log = folder / "life.log"
        first_log.write_text("")
        self.records = Records(run_dir, first_log)
        self._stacks.write_text("")
        variables = os.environ | {
            "PYTHONPATH": str(ROOT),
            "JAX_NUM_CPU_DEVICES": "1",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.02",
            "JAX_PLATFORMS": "cpu",
            "FAULT_STACKS": str(self._stacks),
            "FAULT_CLOCK": "{},{}".format(*clock) if clock else "",
        }
        variables.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder.parent / "compiled"))
        asks = folder / "asks"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(asks)
        self._asks = os.open(asks, os.O_RDWR)
        self.began = time.monotonic()
        self.processes = []
        port = free_port()
        for number in range(count):
            own = f" --distributed.coordinator 127.0.0.1:{port} --distributed.processes {count}"
            own += f" --distributed.process {number} --distributed.heartbeat_s 10"
            arguments = ["train", str(config), "--run_dir", str(run_dir), "--output.grace_s", GRACE_S]
            arguments += own.split() if count > 1 else []
            log = first_log if number == 0 else first_log.with_suffix(f".{number}.log")
            files = [asks if number == 0 else "/dev/null", log, log]
            self.processes.append(Forked(PROGRAM, arguments, folder, files, variables, {}))

    @property
    def over(self) -> bool:
        """Whether any process has ended."""
        return any(process.poll() is not None for process in self.processes)

    def wait(self, until: Callable[[], Any]) -> bool:
        """Until something is so; False where the life ends first.

        Raises:
          TimeoutError: neither comes. What counts is the time in which this process runs: all may be stopped together.
        """
        last, waited = time.monotonic(), 0.0
        while not until():
            if self.over:
                return False
            now = time.monotonic()
            last, waited = now, waited + min(now - last, 1.0)
            if waited > PATIENCE_S:
                raise TimeoutError(
                    f"{self.run_dir} has not moved for {PATIENCE_S:.0f} s:\n{self.records.said()[-2000:]}"
                )
            time.sleep(POLL_S)
        return True

    def pause(self, seconds: float) -> bool:
        """So long; False where the life ends first."""
        end = time.monotonic() + seconds
        return self.wait(lambda: time.monotonic() >= end)

    def doing(self) -> str:
        """What its main thread is doing right now."""
        return named(self.stack())

    def samples(self) -> bool:
        """Whether its main thread samples for a step right now, not for a trial or an evaluation."""
        stack = self.stack()
        return "in next_batch\n" in stack and named(stack) == "sampling"

    def stack(self) -> str:
        """Where its main thread is right now."""
        self._stacks.write_text("")
        os.write(self._asks, b"?")
        limit = time.monotonic() + 0.2
        while time.monotonic() < limit and MAIN not in (text := self._stacks.read_text()):
            time.sleep(POLL_S)
        return text

    def kill(self, number: int, victim: int = 0) -> None:
        """Send a signal to one process."""
        self.processes[victim].send_signal(number)

    def stop(self) -> None:
        """Return once no process runs: each is stopped or has ended."""
        for number, process in enumerate(self.processes):
            self.kill(signal.SIGSTOP, number)
            while process.poll() is None and not halted(process.pid):
                time.sleep(POLL_S)

    def go_on(self) -> None:
        """Let all that are stopped run again."""
        for number in range(len(self.processes)):
            self.kill(signal.SIGCONT, number)

    def end(self) -> list[int]:
        """Exit codes, once all processes and their workers are gone.

        Raises:
          TimeoutError: some do not go.
        """
        limit = time.monotonic() + PATIENCE_S
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > limit:
                raise TimeoutError(f"a process of {self.run_dir} has outlived its first one")
            time.sleep(POLL_S)
        limit = time.monotonic() + ORPHANS_S
        while any(map(alive, self.processes)):
            if time.monotonic() > limit:
                raise TimeoutError(f"workers of {self.run_dir} have outlived it")
            time.sleep(0.01)
        return [process.returncode for process in self.processes]

    def close(self) -> None:
        """Leave nothing behind."""
        for process in self.processes:
            process.kill()  # it may have no group of its own yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(self._asks)


def halted(pid: int) -> bool:
    """Whether a process has been stopped, or is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "TZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def alive(process: Forked) -> bool:
    """Whether anything of a process's group is left; itself is waited for."""
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def named(stack: str) -> str:
    """What is done, from the stack of a thread, the innermost frame first."""
    frames = re.findall(r'File "([^"]*)", line \d+ in (\S+)', stack) if MAIN in stack else []
    for file, function in frames:
        for what, path, names in WHERE:
            if re.search(path, file) and re.fullmatch(names or ".*", function):
                return what
    return LOADING


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
