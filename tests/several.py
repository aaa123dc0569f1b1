"""Runs one command in several processes, each a host with a device of its own."""

import signal
import socket
import time
from pathlib import Path

from commands import MAIN, ROOT, logged
from nursery import Forked

PATIENCE_S = 240
"""On a busy machine a run may be slow; none hangs for longer."""


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(count: int, *arguments: str, folder: Path, program: str = MAIN, **changes: str) -> list[Forked]:
    """The command as ``count`` processes; each writes what it says to ``folder/NUMBER.log``."""
    flags = ["--distributed.coordinator", f"127.0.0.1:{free_port()}", "--distributed.processes", str(count)]
    folder.mkdir(parents=True, exist_ok=True)
    changes |= {"NOTES": str(folder), "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"}
    begun = []
    for number in range(count):
        many = [*flags, "--distributed.process", str(number)] if count > 1 else []
        log = folder / f"{number}.log"
        log.unlink(missing_ok=True)
        begun.append(logged(log, *arguments, *many, folder=folder.parent, program=program, **changes))
    return begun


def codes(processes: list[Forked], seconds: float = PATIENCE_S) -> list[int]:
    """Their exit codes; one that is still there after so many seconds is killed."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and any(process.poll() is None for process in processes):
        time.sleep(0.02)
    late = [process for process in processes if process.poll() is None]
    for process in late:
        process.send_signal(signal.SIGKILL)
    return [process.wait() for process in processes]


def said(folder: Path, number: int) -> list[str]:
    """The lines of one process."""
    return (folder / f"{number}.log").read_text(errors="replace").splitlines()
