"""Isolated calls of functions that may hang, crash or leak: one item is lost, never the run.

``Pool`` calls them in worker processes, which can be killed. ``InProcessCalls`` calls those that only this process has
in threads, which can be abandoned.

The program of a worker is ``main``: a fresh interpreter without JAX. Protocol over one connection: the parent sends a
``RewardCall``. The worker sends JSON lists: ``["ready"]`` when it has started, then for each call ``["received"]``,
``["started"]`` once the function is imported, and ``["done", outcomes]``, one for each item, or one for all if it could
not be called. The parent therefore never unpickles a worker's messages.
"""

import asyncio
import collections
import contextlib
import dataclasses
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
from concurrent.futures import CancelledError, Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxrl_llm.rewards.functions import (
    RewardCall,
    RewardOutcome,
    call_concurrently,
    error_location,
    in_one_line,
    perform,
    timeout_message,
)
from jaxrl_llm.system.copies import COPIES, import_copies
from jaxrl_llm.system.signals import interpreter, while_read
from jaxrl_llm.tasks.filters import resolve

START_TIMEOUT_S = 60.0
"""Seconds allowed to start a worker, and to import the function of a call; they do not count against the item."""

GRACE_S = 1.0
_MAX_FAILED_STARTS = 3


def workers_for_cores() -> int:
    """Return the number of cores that this process may use, from 2 to 32: each worker takes some 50 MB."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 2
    return min(max(cores, 2), 32)


@dataclasses.dataclass(eq=False)
class _Job:
    """A call that waits for a worker, or is with one; ``retried`` once it went to a second worker."""

    call: RewardCall
    outcomes: Future[list[RewardOutcome]] = dataclasses.field(default_factory=Future)
    retried: bool = False


class Pool:
    """Owner of ``workers`` processes, started at the first call; any thread may submit calls, and none waits for it. A
    call has ``limit_s`` seconds of wall-clock time, counted from when its function is imported. At the deadline its
    process group is killed and replaced. No process outlives ``close``, the interpreter's exit, or (by more than the
    call's limit and a second) a killed parent.
    """

    def __init__(self, workers: int):
        self._size = workers
        self._workers: list[_Worker] = []
        self._waiting: collections.deque[_Job] = collections.deque()
        self._lock = threading.RLock()
        self._driver: threading.Thread | None = None  # while calls are open
        self._closing = threading.Event()
        self._woken, self._wake = multiprocessing.Pipe(duplex=False)
        self._failed_starts = 0
        self._finalizer = weakref.finalize(self, _kill_all, self._workers, os.getpid(), self._closing)

    def submit(self, calls: Sequence[RewardCall]) -> list[Future[list[RewardOutcome]]]:
        """Begin calls in their order; return the outcomes of each one's items to come. ``close`` cancels them."""
        jobs = [_Job(call) for call in calls]
        with self._lock:
            self._waiting += jobs
            if jobs and self._driver is None:
                self._driver = threading.Thread(target=self._drive, name="reward workers", daemon=True)
                self._driver.start()
            elif jobs:
                self._wake.send_bytes(b"")
        return [job.outcomes for job in jobs]

    def close(self) -> None:
        """Kill the workers, and cancel the calls that are open; a later ``submit`` starts new ones."""
        self._closing.set()
        with self._lock:
            driver = self._driver
            if driver is not None:
                self._wake.send_bytes(b"")
        if driver is not None:
            driver.join(GRACE_S)  # no longer: a signal's handler may have interrupted ``submit``, which it waits for
        _kill_all(self._workers, os.getpid())
        self._closing.clear()

    def _drive(self) -> None:
        """Hand calls to workers until none is open."""
        try:
            while self._has_open_jobs():
                self._dispatch()
                self._wait()
        except BaseException as error:  # noqa: BLE001  for those who wait for the outcomes
            for job in self._take_open_jobs():
                job.outcomes.set_exception(error)
            _kill_all(self._workers, os.getpid())

    def _has_open_jobs(self) -> bool:
        """Whether a call is open; if none is, or the pool is being closed, the work of this thread is done."""
        with self._lock:
            if not self._closing.is_set() and (self._waiting or any(worker.job for worker in self._workers)):
                return True
            for job in self._take_open_jobs():
                job.outcomes.cancel()
            return False

    def _take_open_jobs(self) -> list[_Job]:
        """Return the open calls, whose outcomes will not come, and let the next one start another thread."""
        with self._lock:
            self._driver = None
            jobs = [worker.job for worker in self._workers if worker.job is not None] + [*self._waiting]
            self._waiting.clear()
            return jobs

    def _dispatch(self) -> None:
        """Send calls to workers that are idle, and start others as far as calls wait for them."""
        for worker in [worker for worker in self._workers if worker.state == "idle"]:
            job = self._waiting.popleft() if self._waiting else None
            if job is not None and not worker.send(job):
                self._waiting.appendleft(job)  # it died while idle: the item is not to blame
                self._drop(worker)
        busy = sum(worker.job is not None for worker in self._workers)
        while len(self._workers) < min(self._size, busy + len(self._waiting)):
            self._workers.append(_Worker())

    def _wait(self) -> None:
        """Wait for a message, death, deadline or call; a call that a dead worker had not read goes to another, once."""
        now = time.monotonic()
        limits = [worker.deadline - now for worker in self._workers if worker.deadline is not None]
        connections = [self._woken, *(worker.connection for worker in self._workers)]
        ready = multiprocessing.connection.wait(connections, timeout=max(0.0, min(limits)) if limits else None)
        if self._woken in ready:
            self._woken.recv_bytes()
        for worker in list(self._workers):
            job = worker.job
            unread = worker.state == "sent"
            outcomes = worker.receive() if worker.connection in ready else worker.check_deadline()
            if job is not None and unread and worker.state == "dead" and not job.retried:
                job.retried = True
                self._waiting.appendleft(job)
            elif outcomes and job is not None:
                job.outcomes.set_result(outcomes)
            if worker.state == "dead":
                worker.job = None
                self._drop(worker)
            elif worker.state != "starting":
                self._failed_starts = 0

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
        command = interpreter("jaxrl_llm.rewards.pool", str(theirs.fileno()), json.dumps(COPIES))
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
        self.job: _Job | None = None
        self.deadline: float | None = time.monotonic() + START_TIMEOUT_S

    def send(self, job: _Job) -> bool:
        """Send a call to the process; return False if the process is gone."""
        if self.process.poll() is not None:  # its end of the pipe may stay open for a moment longer
            return False
        try:
            self.connection.send(job.call)
        except OSError:
            return False
        self.job = job
        self.state = "sent"
        self.deadline = time.monotonic() + START_TIMEOUT_S
        return True

    def receive(self) -> list[RewardOutcome]:
        """Read one message; return the outcomes if it ends the call, as the process's death also does."""
        job = self.job
        try:
            word, *rest = json.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            self.state = "dead"
            died = RewardOutcome("error", message=f"the worker died (exit code {self.kill()})")
            return [died] * len(job.call.items) if job else []
        if word == "received":
            self.state = "loading"
            return []
        if word == "started":
            self.state = "running"
            self.deadline = time.monotonic() + job.call.limit_s
            return []
        self.started = True
        self.state = "idle"
        self.job = None
        self.deadline = None
        if word == "ready":
            return []
        outcomes = [RewardOutcome(*outcome) for outcome in rest[0]]
        return outcomes if len(outcomes) == len(job.call.items) else outcomes[:1] * len(job.call.items)

    def check_deadline(self) -> list[RewardOutcome]:
        """Return the timeout if the deadline has passed, else an empty list."""
        if self.deadline is None or time.monotonic() < self.deadline:
            return []
        running = self.state == "running"
        self.state = "dead"
        message = timeout_message(self.job.call.limit_s) if running else timeout_message(START_TIMEOUT_S, "import")
        return [RewardOutcome("timeout", message=message)] * len(self.job.call.items) if self.job else []

    def kill(self) -> int:
        """Kill the process with its children, wait for it, and return its exit code."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.connection.close()
        return self.process.wait()


def _kill_all(workers: list[_Worker], owner: int, closing: threading.Event | None = None) -> None:
    if os.getpid() == owner:  # a forked child that exits must leave its parent's workers alone
        if closing is not None:
            closing.set()  # nobody replaces them
        while workers:
            workers.pop().kill()


def main(handle: str, copies: str) -> None:
    """Serve calls until the parent closes the connection; own modules are imported from the same ``copies`` as there. A
    call that is still running ``GRACE_S`` after its deadline ends the process from a thread that needs no interpreter
    lock: a parent that was killed itself cannot do it.
    """
    connection = Connection(int(handle))
    import_copies(json.loads(copies))
    sys.stdout, sys.stderr = while_read(sys.stdout), while_read(sys.stderr)  # no reward fails for what it prints
    with contextlib.suppress(EOFError, ConnectionError), open(os.devnull, "w") as nowhere, asyncio.Runner() as runner:
        _send(connection, "ready")
        while True:
            message = connection.recv_bytes()
            _send(connection, "received")
            try:
                call: RewardCall = pickle.loads(message)  # from the parent that started this process
                function = resolve(call.path)
            except BaseException as error:  # noqa: BLE001  whatever a person's module raises at import, SystemExit too
                _send(connection, "done", [RewardOutcome("error", message=in_one_line(error))])
                continue
            _send(connection, "started")
            faulthandler.dump_traceback_later(call.limit_s + GRACE_S, exit=True, file=nowhere)
            with _memory_limit(call.path):
                outcomes = perform(function, call, runner.run)
            faulthandler.cancel_dump_traceback_later()
            _send(connection, "done", outcomes)


@contextlib.contextmanager
def _memory_limit(path: str) -> Generator[None]:
    """Limit memory, on Linux, to 1 GiB more than now for verifiers of formulas, which may stand for any number."""
    statm = Path("/proc/self/statm")
    limits = resource.getrlimit(resource.RLIMIT_AS)
    verifiers = ("jaxrl_llm.rewards.math_answer", "jaxrl_llm.rewards.gym_answer")
    if path.partition(":")[0] not in verifiers or not statm.exists():
        yield
        return
    most = int(statm.read_text().split()[0]) * resource.getpagesize() + (1 << 30)
    most = most if limits[1] == resource.RLIM_INFINITY else min(most, limits[1])
    resource.setrlimit(resource.RLIMIT_AS, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def _send(connection: Connection, *words: Any) -> None:
    connection.send_bytes(json.dumps(words).encode())


MOST_STUCK = 4
"""Number of threads still in abandoned calls at which no further call starts."""


class InProcessCalls:
    """Owner of two threads, started when first needed; neither blocks the interpreter's exit. One makes one call after
    the other, as submitted; on the other's event loop all calls of ``async`` functions wait at one time. Neither is the
    main thread, where a notebook's event loop runs and a call that hangs would stop the run. A call that ran out of
    time keeps its thread, and the next ones get another.
    """

    def __init__(self):
        self._stuck: list[threading.Thread] = []
        self._queue: _CallQueue | None = None
        self._loop: _EventLoop | None = None

    def submit(self, call: RewardCall) -> "Future[list[RewardOutcome]] | _AsyncCall":
        """Begin the call, in its turn; return its outcomes to come (``result`` waits, within the limit)."""
        if call.form.waits and not call.form.batch:
            self._loop = self._loop if self._loop is not None and not self._loop.blocked else _EventLoop(self._stuck)
            return _AsyncCall(call, self._loop)
        self._queue = self._queue or _CallQueue(self._stuck)
        return self._queue.submit(call)

    def close(self) -> None:
        """Cancel calls that have not begun, and let the threads end with the one that they are in."""
        if self._queue is not None:
            self._queue.close()
        if self._loop is not None:
            self._loop.close()
        self._queue = self._loop = None


def refusal_outcomes(stuck: list[threading.Thread], call: RewardCall) -> list[RewardOutcome]:
    """Return the outcomes of a call that does not begin, since too many threads are stuck; else an empty list."""
    stuck[:] = [thread for thread in stuck if thread.is_alive()]
    reason = f"not called, since {MOST_STUCK} earlier calls have not ended"
    message = f"{reason}; in a module of its own it could be killed"
    return [RewardOutcome("timeout", message=message)] * len(call.items) if len(stuck) >= MOST_STUCK else []


def timeout_outcomes(thread: threading.Thread, call: RewardCall) -> list[RewardOutcome]:
    """Return the outcomes of a call that ran out of time, with the place that its thread is at."""
    frame = sys._current_frames().get(thread.ident)
    function: Any = call.function
    place = error_location(traceback.extract_stack(frame) if frame else [], function)
    return [RewardOutcome("timeout", message=timeout_message(call.limit_s), place=place)] * len(call.items)


class _CallQueue:
    """Owner of a queue of calls: a thread makes them, and another one gives up those that take too long."""

    def __init__(self, stuck: list[threading.Thread]):
        self._stuck = stuck
        self._open: queue.SimpleQueue[tuple[RewardCall, Future[list[RewardOutcome]]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="reward turns", daemon=True).start()

    def submit(self, call: RewardCall) -> Future[list[RewardOutcome]]:
        outcomes: Future[list[RewardOutcome]] = Future()
        self._open.put((call, outcomes))
        return outcomes

    def close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (waiting := self._open.get_nowait()) is not None:
                waiting[1].cancel()
        self._open.put(None)

    def _watch(self) -> None:
        thread: threading.Thread | None = None
        requests: queue.SimpleQueue[RewardCall | None] = queue.SimpleQueue()
        answers: queue.SimpleQueue[list[RewardOutcome]] = queue.SimpleQueue()
        while (turn := self._open.get()) is not None:
            call, future = turn
            if not future.set_running_or_notify_cancel():
                continue
            outcomes = refusal_outcomes(self._stuck, call)
            if not outcomes:
                if thread is None:
                    requests, answers = queue.SimpleQueue(), queue.SimpleQueue()
                    thread = threading.Thread(target=_run_calls, args=(requests, answers), name="rewards", daemon=True)
                    thread.start()
                requests.put(call)
                try:
                    outcomes = answers.get(timeout=call.limit_s)
                except queue.Empty:
                    outcomes = timeout_outcomes(thread, call)
                    self._stuck.append(thread)
                    requests.put(None)
                    thread = None
            future.set_result(outcomes)
        requests.put(None)


def _run_calls(requests: queue.SimpleQueue, answers: queue.SimpleQueue) -> None:
    with asyncio.Runner() as runner:
        while (call := requests.get()) is not None:
            answers.put(perform(call.function, call, runner.run))


class _EventLoop:
    """Owner of a thread with an event loop, which all calls of ``async`` functions share."""

    def __init__(self, stuck: list[threading.Thread]):
        self.stuck = stuck
        self.blocked = False
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)


class _AsyncCall:
    """A call of an ``async`` function, which waits from now on."""

    def __init__(self, call: RewardCall, loop: _EventLoop):
        self._call = call
        self._loop = loop
        self._until = time.monotonic() + call.limit_s
        self._refused = refusal_outcomes(loop.stuck, call)
        self._outcomes: Future[list[RewardOutcome]] = Future()
        function: Any = call.function
        if not self._refused:
            self._outcomes = asyncio.run_coroutine_threadsafe(call_concurrently(function, call), loop.loop)

    def result(self) -> list[RewardOutcome]:
        """Wait for the outcomes; a call that blocks the loop is abandoned with it."""
        if self._refused:
            return self._refused
        try:
            return self._outcomes.result(max(0.0, self._until - time.monotonic()))
        except (TimeoutError, CancelledError):
            outcomes = timeout_outcomes(self._loop.thread, self._call)
            if not self._loop.blocked:
                self._loop.blocked = True
                self._loop.stuck.append(self._loop.thread)
                self._loop.close()
            return outcomes
