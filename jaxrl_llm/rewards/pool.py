"""Isolated calls of functions that may hang, crash or leak: one item is lost, never the run.

``Pool`` calls them in worker processes, which can be killed. ``Inside`` calls those that only this process has in a
thread, which can be abandoned.

The program of a worker is ``main``: a fresh interpreter without JAX. Protocol over one connection: the parent sends a
``Call``. The worker sends JSON lists: ``["ready"]`` when it has started, then for each call ``["received"]``,
``["started"]`` once the function is imported, and ``["done", outcomes]``, one for each item, or one for all if it could
not be called. The parent therefore never unpickles a worker's messages.
"""

import asyncio
import collections
import contextlib
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Generator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.calls import Call, Outcome, in_one_line, overdue, perform, place_in
from jaxrl_llm.system.signals import interpreter, while_read
from jaxrl_llm.tasks.filters import resolve

START_TIMEOUT_S = 60.0
"""Seconds allowed to start a worker, and to import the function of a call; they do not count against the item."""

MOST_STUCK = 4
"""Number of threads still in abandoned calls at which no further call starts."""
GRACE_S = 1.0
BOUNDED = ("jaxrl_llm.rewards.math_answer", "jaxrl_llm.rewards.gym_answer")
"""Modules of verifiers whose memory is bounded: a formula may stand for a number of any size."""
VERIFIER_BYTES = 1 << 30
"""Bytes of memory that they may take for one call, on Linux."""
_MAX_FAILED_STARTS = 3


class Pool:
    """Owner of ``workers`` processes, started at the first call; used from one thread at a time.

    A call has ``limit_s`` seconds of wall-clock time, counted from when its function is imported. At the deadline its
    process group is killed and replaced. No process outlives ``close``, the interpreter's exit, or (by more than the
    call's limit and a second) a killed parent.
    """

    def __init__(self, workers: int):
        self._size = workers
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._handed_over_again: set[int] = set()
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid())

    def map(self, calls: Sequence[Call]) -> list[list[Outcome]]:
        """Make the calls and return the outcomes of each one's items, in order.

        Raises:
          RuntimeError: three workers in a row did not start.
        """
        outcomes: dict[int, list[Outcome]] = {}
        pending = collections.deque(range(len(calls)))
        self._handed_over_again.clear()
        try:
            while len(outcomes) < len(calls):
                while len(self._workers) < min(self._size, len(calls) - len(outcomes)):
                    self._workers.append(_Worker())
                for worker in [worker for worker in self._workers if worker.state == "idle"]:
                    index = pending.popleft() if pending else None
                    if index is not None and not worker.send(index, calls[index]):
                        pending.appendleft(index)  # it died while idle: the item is not to blame
                        self._drop(worker)
                outcomes.update(self._wait(pending))
        except BaseException:  # an interrupt: answers still on their way would be taken for those of the next calls
            self.close()
            raise
        return [outcomes[index] for index in range(len(calls))]

    def close(self) -> None:
        """Kill the workers; a later ``map`` starts new ones."""
        _kill_all(self._workers, os.getpid())

    def _wait(self, pending: collections.deque[int]) -> dict[int, list[Outcome]]:
        """Wait for the next message, death or deadline; return the outcomes of the calls that ended.

        A call that a dead worker had not read yet becomes pending again, once: the item is not to blame.
        """
        now = time.monotonic()
        limits = [worker.deadline - now for worker in self._workers if worker.deadline is not None]
        connections = [worker.connection for worker in self._workers]
        said = multiprocessing.connection.wait(connections, timeout=max(0.0, min(limits, default=0.0)))
        ended: dict[int, list[Outcome]] = {}
        for worker in list(self._workers):
            index = worker.index
            unread = worker.state == "sent"
            outcomes = worker.hear() if worker.connection in said else worker.overdue()
            if unread and worker.state == "dead" and index not in self._handed_over_again:
                self._handed_over_again.add(index)
                pending.appendleft(index)
            elif outcomes and index is not None:
                ended[index] = outcomes
            if worker.state == "dead":
                self._drop(worker)
            elif worker.state != "starting":
                self._failed_starts = 0
        return ended

    def _drop(self, worker: "_Worker") -> None:
        self._workers.remove(worker)
        code = worker.kill()
        self._failed_starts += not worker.started
        if self._failed_starts >= _MAX_FAILED_STARTS:
            raise RuntimeError(
                f"{_MAX_FAILED_STARTS} reward workers in a row did not start (the last: exit code "
                f"{code}); their messages are on the error output"
            )


class _Worker:
    """The parent's side of one process: its connection, its state, its call and its deadline."""

    def __init__(self):
        self.connection, theirs = multiprocessing.Pipe()
        # Not multiprocessing's own start methods: fork hangs under JAX's threads, and spawn and forkserver run the
        # user's main script again in every worker (JAX included).
        command = interpreter("jaxrl_llm.rewards.pool", str(theirs.fileno()))
        with contextlib.closing(theirs):
            self.process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward function prints goes to the error output
                start_new_session=True,  # its own process group: Ctrl-C does not reach it, and its children die with it
                env={**os.environ, "JAX_PLATFORMS": "cpu"},  # a reward that uses JAX must not take the accelerator
            )
        self.started = False
        self.state = "starting"
        self.call: Call | None = None
        self.index: int | None = None
        self.deadline: float | None = time.monotonic() + START_TIMEOUT_S

    def send(self, index: int, call: Call) -> bool:
        """Send a call to the process; return False if the process is gone."""
        if self.process.poll() is not None:  # its end of the pipe may stay open for a moment longer
            return False
        try:
            self.connection.send(call)
        except OSError:
            return False
        self.index = index
        self.call = call
        self.state = "sent"
        self.deadline = time.monotonic() + START_TIMEOUT_S
        return True

    def hear(self) -> list[Outcome]:
        """Read one message; return the outcomes if it ends the call, as the process's death also does."""
        try:
            word, *rest = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.state = "dead"
            return self._all(Outcome("error", message=f"the worker died (exit code {self.kill()})"))
        if word == "received":
            self.state = "loading"
            return []
        if word == "started":
            self.state = "running"
            self.deadline = time.monotonic() + self.call.limit_s
            return []
        self.started = True
        self.state = "idle"
        self.index = None
        self.deadline = None
        if word == "ready":
            return []
        outcomes = [Outcome(*outcome) for outcome in rest[0]]
        return outcomes if len(outcomes) == len(self.call.items) else self._all(outcomes[0])

    def overdue(self) -> list[Outcome]:
        """Return the timeout if the deadline has passed, else an empty list."""
        if self.deadline is None or time.monotonic() < self.deadline:
            return []
        running = self.state == "running"
        self.state = "dead"
        said = overdue(self.call.limit_s) if running else overdue(START_TIMEOUT_S, "import")
        return self._all(Outcome("timeout", message=said))

    def _all(self, outcome: Outcome) -> list[Outcome]:
        return [outcome] * len(self.call.items) if self.call else []

    def kill(self) -> int:
        """Kill the process with its children, wait for it, and return its exit code."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


def _kill_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # a forked child that exits must leave its parent's workers alone
        while workers:
            workers.pop().kill()


def main(handle: str) -> None:
    """Serve calls until the parent closes the connection.

    A call that is still running ``GRACE_S`` after its deadline ends the process from a thread that needs no
    interpreter lock: a parent that was killed itself cannot do it.
    """
    connection = Connection(int(handle))
    sys.stdout, sys.stderr = while_read(sys.stdout), while_read(sys.stderr)  # no reward fails for what it prints
    with contextlib.suppress(EOFError, ConnectionError), open(os.devnull, "w") as nowhere, asyncio.Runner() as runner:
        _say(connection, "ready")
        while True:
            said = connection.recv_bytes()
            _say(connection, "received")
            try:
                call: Call = pickle.loads(said)  # from the parent that started this process
                function = resolve(call.path)
            except BaseException as error:  # noqa: BLE001  whatever a person's module raises at import, SystemExit too
                _say(connection, "done", [Outcome("error", message=in_one_line(error))])
                continue
            _say(connection, "started")
            faulthandler.dump_traceback_later(call.limit_s + GRACE_S, exit=True, file=nowhere)
            with _bounded(call.path):
                outcomes = perform(function, call, runner.run)
            faulthandler.cancel_dump_traceback_later()
            _say(connection, "done", outcomes)


@contextlib.contextmanager
def _bounded(path: str) -> Generator[None]:
    """Bound the memory of the block by ``VERIFIER_BYTES`` more than now if it runs a verifier of ``BOUNDED``."""
    statm = Path("/proc/self/statm")
    before = resource.getrlimit(resource.RLIMIT_AS)
    if path.partition(":")[0] not in BOUNDED or not statm.exists():
        yield
        return
    most = int(statm.read_text().split()[0]) * resource.getpagesize() + VERIFIER_BYTES
    most = most if before[1] == resource.RLIM_INFINITY else min(most, before[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _say(connection: Connection, *words: Any) -> None:
    connection.send_bytes(json.dumps(words).encode())


class Inside:
    """Owner of a thread, started at the first call, that makes one call after the other on one event loop.

    It is not the main thread: a notebook's event loop runs there, and a call that hangs there would stop the run. A
    call that ran out of time keeps its thread, and the next ones get another. No thread blocks the interpreter's exit.
    """

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._stuck: list[threading.Thread] = []

    def run(self, call: Call) -> list[Outcome]:
        """Make the call and return the outcomes of its items."""
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MOST_STUCK:
            ended = f"not called, since {MOST_STUCK} earlier calls have not ended"
            said = f"{ended}; in a module of its own it could be killed"
            return [Outcome("timeout", message=said)] * len(call.items)
        if self._thread is None:
            self._asked: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
            self._answered: queue.SimpleQueue[list[Outcome]] = queue.SimpleQueue()
            ends = self._asked, self._answered
            self._thread = threading.Thread(target=_serve, args=ends, name="rewards", daemon=True)
            self._thread.start()
        self._asked.put(call)
        try:
            return self._answered.get(timeout=call.limit_s)
        except queue.Empty:
            frame = sys._current_frames().get(self._thread.ident)
            function: Any = call.function
            place = place_in(traceback.extract_stack(frame) if frame else [], function)
            self._stuck.append(self._thread)
            self.close()
            return [Outcome("timeout", message=overdue(call.limit_s), place=place)] * len(call.items)

    def close(self) -> None:
        """Let the thread end once its call is over; a later ``run`` starts another."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread = None


def _serve(asked: queue.SimpleQueue, answered: queue.SimpleQueue) -> None:
    with asyncio.Runner() as runner:
        while (call := asked.get()) is not None:
            answered.put(perform(call.function, call, runner.run))
