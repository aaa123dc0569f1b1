"""Killable worker processes for code that may hang, crash or leak: one item is lost, never the run."""

import collections
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Sequence

from jaxrl_llm.rewards.calls import Call, Outcome, overdue
from jaxrl_llm.signals import interpreter

START_TIMEOUT_S = 60.0
"""Time to start a worker, and to import the function of a call; it does not count against the item."""

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
        """The outcomes of each call's items, in order.

        Raises:
          RuntimeError: three workers in a row did not start.
        """
        outcomes: dict[int, list[Outcome]] = {}
        pending = collections.deque(range(len(calls)))
        self._handed_over_again.clear()
        try:
            while len(outcomes) < len(calls):
                self._grow(len(calls) - len(outcomes))
                self._dispatch(pending, calls)
                outcomes.update(self._wait(pending))
        except BaseException:  # an interrupt: answers still on their way would be taken for those of the next calls
            self.close()
            raise
        return [outcomes[index] for index in range(len(calls))]

    def close(self) -> None:
        """Kills the workers; a later ``map`` starts new ones."""
        _kill_all(self._workers, os.getpid())

    def _grow(self, unfinished: int) -> None:
        while len(self._workers) < min(self._size, unfinished):
            self._workers.append(_Worker())

    def _dispatch(self, pending: collections.deque[int], calls: Sequence[Call]) -> None:
        for worker in list(self._workers):
            if pending and worker.state == "idle":
                index = pending.popleft()
                if not worker.send(index, calls[index]):  # it died while idle: the item is not to blame
                    pending.appendleft(index)
                    self._drop(worker)

    def _wait(self, pending: collections.deque[int]) -> dict[int, list[Outcome]]:
        """Waits for the next message, death or deadline; returns the calls that it ended.

        A call that a dead worker had not read yet is pending again, once: the item is not to blame.
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
    """The parent's side of one process: its connection, what it is doing, and until when it may."""

    def __init__(self):
        self.connection, theirs = multiprocessing.Pipe()
        # Not multiprocessing's own start methods: fork hangs under JAX's threads, and spawn and forkserver run the
        # user's main script again in every worker (JAX included).
        command = interpreter("jaxrl_llm.rewards.worker", str(theirs.fileno()))
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
        """Hands a call over; False where the process is gone."""
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
        """Reads one message; returns the outcomes where it ends the call, the process's death included."""
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
        """The timeout where the deadline has passed, else nothing."""
        if self.deadline is None or time.monotonic() < self.deadline:
            return []
        loading = self.state in ("sent", "loading")
        self.state = "dead"
        said = (
            f"import not finished after {START_TIMEOUT_S:g} s"
            if loading or self.call is None
            else overdue(self.call.limit_s)
        )
        return self._all(Outcome("timeout", message=said))

    def _all(self, outcome: Outcome) -> list[Outcome]:
        return [outcome] * len(self.call.items) if self.call else []

    def kill(self) -> int:
        """Kills the process with its children, waits for it, and returns its exit code."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


def _kill_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() == owner:  # a forked child that exits must leave its parent's workers alone
        while workers:
            workers.pop().kill()
