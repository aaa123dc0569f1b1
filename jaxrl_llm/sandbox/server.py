"""Fork server: a Python without site-packages that forks a confined child for each program.

It never sees a program: the request, the input and the outputs are descriptors that only the child reads and writes, so
that one program finds nothing of another in its memory.

Protocol over one socket: ``["ready", level]`` at the start; then the parent sends the limits as JSON, with the
descriptors of request, input, output, errors and result; ``["done", reason, code]`` ends a run. A closed socket
ends the server, and any other message the running program.
"""

import contextlib
import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from typing import Any

from jaxrl_llm.sandbox import kernel, program

WARM = """
    abc array ast asyncio base64 bisect bz2 calendar cmath collections collections.abc contextlib copy csv ctypes
    dataclasses datetime decimal enum fractions functools graphlib hashlib heapq io inspect itertools json locale lzma
    math numbers operator pickle pprint queue random re secrets statistics string struct tempfile textwrap threading
    time traceback types typing unicodedata unittest uuid warnings weakref zlib concurrent.futures
""".split()
"""Modules that programs import often, and those whose libraries lie outside the standard library's folder."""

LEVELS = "rlimits only", "landlock+seccomp", "full"
FILE_BYTES, FOLDER_BYTES, FOLDER_FILES, THREADS, OPEN_FILES = 8 << 20, 32 << 20, 256, 64, 64
"""Limits of a program: bytes of a file and of all its files, number of files and threads, open files."""
STARVED_TIMES = 10
"""Times its time limit that a program may take on a busy machine; time in which it waits for a processor is not its
own.
"""


def main(handle: str, folder: str, level: str) -> None:
    """Serve the socket ``handle`` until it closes; ``folder`` is for programs' files, ``level`` the highest to use."""
    connection = socket.socket(fileno=int(handle))
    sys.path[:] = [path for path in sys.path if not os.path.exists(os.path.join(path, "jaxrl_llm"))]
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    importlib.util.find_spec("not_there")  # lists the library's folder: programs may open its files, not list it
    private_folder = _enter_namespaces(folder) if level == LEVELS[-1] else ""
    folder = private_folder or folder
    server = _Server(connection, folder, LEVELS.index(level))
    confined = server.rules is not None and server.tries()
    reached = LEVELS[confined + bool(confined and private_folder)]
    gc.collect()
    gc.freeze()
    connection.sendall(json.dumps(["ready", reached]).encode())
    try:
        while server.serve():
            pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _enter_namespaces(folder: str) -> str:
    """Continue as the first process of new namespaces, with which all others there end, and with ``folder`` as root;
    return the programs' folder there, or nothing if the system does not allow it.
    """
    try:
        kernel.leave_namespaces()
    except OSError:
        return ""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    kernel.die_with_parent()
    try:
        return kernel.new_root(folder, os.path.dirname(os.__file__))
    except OSError:
        return ""


class _Server:
    """One program at a time."""

    def __init__(self, connection: socket.socket, folder: str, level: int):
        self.connection = connection
        self.folder = folder
        library = os.path.dirname(os.__file__)  # without installed packages
        names = [name for name in os.listdir(library) if name not in ("site-packages", "dist-packages")]
        paths = [os.path.join(library, name) for name in names]
        self.rules = kernel.ruleset(folder, paths) if level and kernel.landlock_version() else None
        self.base = _address_space()

    def tries(self) -> bool:
        """Whether a child can be confined here."""
        child = os.fork()
        if not child:
            try:
                kernel.confine(self.rules)
                os._exit(0)
            except BaseException:  # noqa: BLE001
                os._exit(1)
        return os.waitpid(child, 0)[1] == 0

    def serve(self) -> bool:
        """Run one program; return False when the parent is gone."""
        message, descriptors, _, _ = socket.recv_fds(self.connection, 4096, 5)
        if not message:
            return False
        limits = json.loads(message)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            self._run_child(descriptors, writing, limits)
        for descriptor in (*descriptors, writing):
            os.close(descriptor)
        confined = os.read(reading, 1)
        os.close(reading)
        reason, status = _ChildWatch(child, self.folder, limits["timeout_s"]).wait(self.connection)
        for entry in os.scandir(self.folder):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
        reason = reason if confined or reason == "gone" else "broken"
        if reason == "gone":
            return False
        self.connection.sendall(json.dumps(["done", reason, os.waitstatus_to_exitcode(status)]).encode())
        return True

    def _run_child(self, descriptors: list[int], confined: int, limits: dict[str, Any]) -> None:
        """Confine this process, say so, run the program, and end."""
        try:
            os.setpgid(0, 0)
            request, *standard, result = descriptors
            with open(request, "rb") as file:
                program_request = file.read()
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            keep = {result, confined, self.rules}
            for number in range(3, max(*descriptors, confined, self.connection.fileno()) + 1):
                if number not in keep:
                    with contextlib.suppress(OSError):
                        os.close(number)
            os.chdir(self.folder)
            os.environ.clear()
            with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
                file.write("1000")
            memory = self.base + (limits["memory_mb"] << 20)
            kernel.limit(memory, int(limits["timeout_s"] * STARVED_TIMES) + 2, FILE_BYTES, OPEN_FILES)
            kernel.confine(self.rules)
            os.write(confined, b"1")
            os.close(confined)
        except BaseException as error:  # noqa: BLE001  it must not go on as a second server
            os.write(2, repr(error).encode())
            os._exit(program.FAILED)
        os._exit(program.run_program(program_request, result))


class _ChildWatch:
    """A running child: its time, threads and files."""

    def __init__(self, child: int, folder: str, timeout_s: float):
        self.child = child
        self.folder = folder
        self.timeout_s = timeout_s
        self.start = time.monotonic()
        self.handle = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
        self.seen = "" if self.handle is None else _process_folder(self.handle)

    def wait(self, connection: socket.socket) -> tuple[str, int]:
        """Return why the run ended, and the child's status: ``exit timeout starved threads files killed gone``."""
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        if self.handle is not None:
            poll.register(self.handle, select.POLLIN)
        look_s, reason = 0.005, ""
        peek = os.WEXITED | os.WNOHANG | os.WNOWAIT
        while not reason:
            ready = {number for number, _ in poll.poll(look_s * 1000)}
            if connection.fileno() in ready:
                reason = "killed" if connection.recv(4096) else "gone"
            elif self.handle in ready or (self.handle is None and os.waitid(os.P_PID, self.child, peek)):
                reason = "exit"
            else:
                reason = self._exceeded_limit()
            look_s = min(2 * look_s, 0.025)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child, signal.SIGKILL)
        status = os.waitpid(self.child, 0)[1]
        if self.handle is not None:
            os.close(self.handle)
        return reason, status

    def _exceeded_limit(self) -> str:
        """Return the limit that the child is beyond, or nothing."""
        threads = _count_threads(self.seen)
        if threads > THREADS:
            return "threads"
        entries = list(os.scandir(self.folder))
        used = 0
        for entry in entries:
            with contextlib.suppress(OSError):
                used += entry.stat(follow_symlinks=False).st_blocks * 512
        if len(entries) > FOLDER_FILES or used > FOLDER_BYTES:
            return "files"
        elapsed = time.monotonic() - self.start
        if elapsed < self.timeout_s:
            return ""
        starved_s = _starved_s(self.seen) if threads == 1 else 0.0  # its own threads cannot starve it
        if elapsed - starved_s < self.timeout_s:
            return "starved" if elapsed > STARVED_TIMES * self.timeout_s else ""
        return "timeout"


def _process_folder(handle: int) -> str:
    """Return the folder below /proc of a process, whose number there may be that of another namespace."""
    with contextlib.suppress(OSError), open(f"/proc/self/fdinfo/{handle}") as file:
        for line in file:
            if line.startswith("Pid:"):
                return f"/proc/{int(line[4:])}"
    return ""


def _count_threads(process: str) -> int:
    with contextlib.suppress(OSError), open(f"{process}/status") as file:
        for line in file:
            if line.startswith("Threads:"):
                return int(line[8:])
    return 1


def _starved_s(process: str) -> float:
    """Return the seconds for which a process was ready to run and had no processor."""
    with contextlib.suppress(OSError), open(f"{process}/schedstat") as file:
        return int(file.read().split()[1]) / 1e9
    return 0.0


def _address_space() -> int:
    """Return the bytes of address space of this process."""
    with contextlib.suppress(OSError), open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    return 64 << 20
