"""Reads hostile inputs in processes with limits: does any end in a traceback, hang, fill memory, or execute?

    PYTHONPATH=tests python -m campaigns.fuzzing NAME COUNT SEED

A target (``readers.py``) makes inputs from a seed, sound ones with a few changes and texts with code in them, and reads
them as the package does. Right is a value, or an ``InputError``. Inputs are read in a process of their own, with 2
seconds of processor time for each and 1 GiB of memory beyond what the process has at its beginning; an audit hook
(PEP 578) reports programs that are started, sockets, and files written outside of the input's folder. Prints the number
of inputs that were refused, and the findings, as JSON.
"""

import dataclasses
import json
import mmap
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from campaigns.hostile import MARK
from campaigns.readers import TARGETS, Target

from jaxrl_llm.errors import InputError

WAIT_S = 60
"""Seconds that one input may wait."""
MEMORY = 1 << 30
BATCH = 200
"""Inputs read by one process."""
STARTS = (
    "os.system",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "pty.spawn",
)
RENDERS = "jaxrl_llm.tasks.template"
"""In the command of the one program that is meant to be started: it renders chat templates."""
REACHES = ("socket.connect", "socket.bind", "urllib.Request", "ftplib.connect", "smtplib.connect")


@dataclasses.dataclass(frozen=True)
class Finding:
    """An input that went wrong.

    Attributes:
      index: its number.
      kind: traceback, hang, memory, crash or executed.
      told: the exception with the innermost place in this package, the signal, or what was executed.
    """

    index: int
    kind: str
    told: str


def case_of(target: Target, name: str, seed: int, index: int) -> Any:
    """Return the input with this number."""
    return target.make(random.Random(f"{seed} {name} {index}"))


def fuzz(target: Target, name: str, indices: range, seed: int) -> tuple[int, list[Finding]]:
    """Read inputs in processes of their own; return how many were refused, and the findings."""
    target.prepare()
    refused, found, begin = 0, [], indices.start
    while begin < indices.stop:
        end = min(begin + BATCH, indices.stop)
        with mmap.mmap(-1, 1 << 20) as shared, tempfile.TemporaryDirectory() as place:
            child = os.fork()
            if not child:
                _read_all(target, name, range(begin, end), seed, shared, Path(place))
            _, status = os.waitpid(child, 0)
            state = json.loads(shared[:].rstrip(b"\0") or b"{}")
        at = state.get("index", begin)
        refused += state.get("refused", 0)
        found += [Finding(*one) for one in state.get("findings", ())]
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            kind = "hang" if number in (signal.SIGPROF, signal.SIGALRM) else "crash"
            found.append(Finding(at, kind, signal.Signals(number).name))
        elif os.WEXITSTATUS(status):
            found.append(Finding(at, "crash", f"exit code {os.WEXITSTATUS(status)}"))
        begin = end if status == 0 else at + 1
    return refused, found


def _read_all(target: Target, name: str, indices: range, seed: int, shared: mmap.mmap, place: Path) -> None:
    """Read inputs in this process, a child, and end it."""
    executed: list[str] = []
    folder = place / "input"
    _limit(executed, place)
    state: dict[str, Any] = {"refused": 0, "findings": []}
    for index in indices:
        case = case_of(target, name, seed, index)
        state["index"] = index
        _say(shared, state)
        folder.mkdir()
        os.chdir(folder)
        signal.setitimer(signal.ITIMER_PROF, target.seconds)
        signal.alarm(WAIT_S)
        try:
            target.read(case, folder)
        except InputError:
            state["refused"] += 1
        except MemoryError as error:
            state["findings"].append((index, "memory", _told(error)))
        except BaseException as error:  # noqa: BLE001  also what libraries in other languages panic with
            state["findings"].append((index, "traceback", _told(error)))
        signal.setitimer(signal.ITIMER_PROF, 0)
        if executed or (folder / MARK).exists():
            state["findings"].append((index, "executed", "; ".join(executed) or MARK))
            executed.clear()
        os.chdir(place)
        shutil.rmtree(folder)
    _say(shared, state)
    os._exit(0)


def _say(shared: mmap.mmap, state: dict[str, Any]) -> None:
    data = json.dumps(state).encode()[: len(shared) - 1]
    shared[: len(data) + 1] = data + b"\0"


def _limit(executed: list[str], place: Path) -> None:
    """Set the limits of this process, and note what it starts, reaches or writes outside of ``place``."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # where libtpu is loaded, it is ignored
    devices = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(devices, stream)
    own = (str(place), "/dev/", "/tmp/")

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | bytes):
            path = os.fsdecode(arguments[0])
            writes = (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if (writes and os.path.isabs(path) and not path.startswith(own)) or path.endswith(MARK):
                executed.append(f"open {path}")
        elif (event.startswith(STARTS) or event in REACHES) and RENDERS not in repr(arguments[1:2]):
            executed.append(f"{event} {arguments!r:.100}")

    sys.addaudithook(note)


def _told(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "jaxrl_llm/" in frame.filename and "campaigns" not in frame.filename]
    last = (own or frames)[-1]
    return f"{type(error).__name__}: {str(error)[:100]!r} at {Path(last.filename).name}:{last.lineno}"


if __name__ == "__main__":
    name, count, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    refused, findings = fuzz(TARGETS[name], name, range(count), seed)
    print(json.dumps([refused, [dataclasses.astuple(one) for one in findings]]))
