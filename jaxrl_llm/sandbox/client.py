"""The parent's side of the sandbox: fork servers, and runs of programs in them."""

import contextlib
import dataclasses
import functools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import IO, Any

from jaxrl_llm.sandbox.server import LEVELS, STARVED_TIMES

OUTPUT_BYTES = 4 << 20
"""Bytes of output, of errors and of a result that a program may write."""
START_S, GRACE_S = 60.0, 5.0


class SandboxError(RuntimeError):
    """The sandbox failed, not the program in it: it could not start, died, or the machine was too busy."""


@dataclasses.dataclass(frozen=True)
class ProgramEnd:
    """A program's end.

    Attributes:
      reason: ``exit timeout threads files output``.
      code: exit code; negative, the number of the signal that ended it.
      result: the JSON that its calls returned, if it came to an end.
    """

    reason: str
    code: int
    stdout: bytes
    stderr: bytes
    result: bytes


class Server:
    """Owner of one fork server, used by one thread at a time; ``level`` is the highest to use, then the one reached."""

    def __init__(self, level: str = LEVELS[-1]):
        self.folder = tempfile.mkdtemp(prefix="sandbox-")
        self.connection, theirs = socket.socketpair()
        program = "import sys; sys.path.append(sys.argv.pop(1)); from jaxrl_llm.sandbox.server import main; "
        program += "main(*sys.argv[1:])"
        root = str(Path(__file__).parents[2])
        command = [sys.executable, "-s", "-S", "-P", "-X", "utf8", "-c", program, root]
        with contextlib.closing(theirs):
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), self.folder, level],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # it outlives a parent that is killed, to remove its folder
                env={"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"},
                cwd=self.folder,
            )
        self._finalizer = weakref.finalize(self, _end_server, self.process, self.connection, self.folder, os.getpid())
        self.connection.settimeout(START_S)
        self.level = self._receive()[1]

    def run(self, request: dict[str, Any], stdin: bytes, timeout_s: float, memory_mb: int) -> ProgramEnd:
        """Run one program; ``request``: of ``program.run_program``. SandboxError: the sandbox failed."""
        with contextlib.ExitStack() as stack:
            inputs = [stack.enter_context(_memory_file(data)) for data in (json.dumps(request).encode(), stdin)]
            pipes = [os.pipe() for _ in range(3)]
            reading = [stack.enter_context(open(ours, "rb", 0)) for ours, _ in pipes]
            limits = json.dumps({"timeout_s": timeout_s, "memory_mb": memory_mb}).encode()
            theirs = [inputs[0].fileno(), inputs[1].fileno(), *(writing for _, writing in pipes)]
            try:
                socket.send_fds(self.connection, [limits], theirs)
            except OSError as error:
                raise SandboxError(f"the sandbox's server is gone ({error})") from None
            finally:
                for _, writing in pipes:
                    os.close(writing)
            outputs, overflowed = self._read(reading, time.monotonic() + STARVED_TIMES * timeout_s + GRACE_S)
            _, reason, code = self._receive()
        stdout, stderr, result = outputs
        if reason in ("broken", "starved"):
            why = {"broken": f"could not confine a program ({stderr.decode(errors='replace'):.200})"}
            raise SandboxError(f"the sandbox {why.get(reason, 'got no processor: the machine is too busy')}")
        return ProgramEnd("output" if overflowed else reason, code, stdout, stderr, result)

    def _read(self, reading: Sequence[IO[bytes]], deadline: float) -> tuple[list[bytes], bool]:
        """Return what the program wrote until all its outputs closed, and whether one was beyond ``OUTPUT_BYTES``."""
        outputs = {file.fileno(): bytearray() for file in reading}
        poll = select.poll()
        for number in outputs:
            poll.register(number, select.POLLIN)
        open_ones, overflowed = len(outputs), False
        while open_ones:
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                self.close()
                raise SandboxError("the sandbox's server does not answer")
            for number, _ in ready:
                piece = os.read(number, 1 << 16)
                if not piece:
                    poll.unregister(number)
                    open_ones -= 1
                elif len(outputs[number]) <= OUTPUT_BYTES:
                    outputs[number] += piece
                    if len(outputs[number]) > OUTPUT_BYTES:
                        overflowed = True
                        self.connection.sendall(b"end")
        return [bytes(output[:OUTPUT_BYTES]) for output in outputs.values()], overflowed

    def _receive(self) -> list[Any]:
        try:
            message = self.connection.recv(4096)
        except OSError:
            message = b""
        if not message:
            self.close()
            raise SandboxError(f"the sandbox's server ended (exit code {self.process.returncode})")
        return json.loads(message)

    def close(self) -> None:
        """End the server with all its processes."""
        self._finalizer()


def _end_server(process: subprocess.Popen, connection: socket.socket, folder: str, owner: int) -> None:
    if os.getpid() != owner:  # a forked child that exits leaves its parent's servers alone
        return
    connection.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _memory_file(data: bytes) -> Generator[IO[bytes]]:
    """Return an open file without a name that holds these bytes."""
    nameless = hasattr(os, "memfd_create")
    with open(os.memfd_create("sandbox"), "w+b") if nameless else tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        yield file


class ServerPool:
    """Fork servers of one level that any number of threads use: at most as many at one time as there are processors."""

    def __init__(self, level: str = LEVELS[-1]):
        self._highest = level
        self._idle: list[Server] = []
        self._free = threading.BoundedSemaphore(os.cpu_count() or 1)

    @functools.cached_property
    def level(self) -> str:
        """The level reached. Raises ``SandboxError``."""
        with self.acquire() as server:
            return server.level

    @contextlib.contextmanager
    def acquire(self) -> Generator[Server]:
        """Hold a server for the block; one that fails is replaced. Raises ``SandboxError``."""
        with self._free:
            server = self._idle.pop() if self._idle else Server(self._highest)
            try:
                yield server
            except BaseException:
                server.close()
                raise
            self._idle.append(server)

    def run(self, request: dict[str, Any], stdin: bytes, timeout_s: float, memory_mb: int) -> ProgramEnd:
        """Run one program as ``Server.run`` does, again if the sandbox failed. SandboxError: it failed twice."""
        try:
            with self.acquire() as server:
                return server.run(request, stdin, timeout_s, memory_mb)
        except SandboxError:
            with self.acquire() as server:
                return server.run(request, stdin, timeout_s, memory_mb)

    def close(self) -> None:
        """End the servers that are idle."""
        while self._idle:
            self._idle.pop().close()
