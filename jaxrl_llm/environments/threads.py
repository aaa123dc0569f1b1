"""Calls with a time limit on daemon threads: one that hangs costs its episode alone."""

import asyncio
import ctypes
import inspect
import os
import queue
import threading
import time
import traceback
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

LONGEST = 500
"""Maximum number of characters of an exception's text."""
HERE = str(Path(__file__).parent) + os.sep

NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Call(NamedTuple):
    """Call of a function by name.

    Attributes:
      function: may be ``async``, or return something to await.
      arguments: by name.
      apart: whether it runs on a thread of its own, at the same time as the others.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any] = NOTHING
    apart: bool = False


class Outcome(NamedTuple):
    """Outcome of a call: ``ok`` with a value, ``error`` (it raised) or ``timeout``.

    Attributes:
      status: one of these.
      value: what it returned.
      error: the exception; None if it raised none.
    """

    status: str
    value: Any = None
    error: BaseException | None = None

    def reason(self, limit_s: float) -> str:
        """Return one line about a failure."""
        return f"not finished after {limit_s:g} s" if self.error is None else told(self.error)


class Overdue(BaseException):
    """Raised in a thread that is abandoned, so that a loop of Python code ends."""


def told(error: BaseException | None, kind: bool = True) -> str:
    """Format an exception of foreign code on one line, even if its own text cannot be made; with its class if ``kind``
    or if it has no text."""
    name = type(error).__name__
    try:
        text = " ".join(str(error).split())[:LONGEST]
    except Exception:  # noqa: BLE001  a person's exception may have a __str__ that raises
        text = ""
    text = text.encode("utf-8", "backslashreplace").decode()
    return f"{name}: {text}" if kind and text else text or name


def place(error: BaseException | None) -> str:
    """Return the file and line where foreign code raised, in parentheses; empty if it did not."""
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if not frame.filename.startswith(HERE)]
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


class Loop:
    """Owner of an event loop on a daemon thread, which all episodes share: ``async`` clients belong to one loop.

    A call that blocks the loop is left with it, and the calls after it get another.

    Args:
      grace_s: seconds after its limit in which a call must have been cancelled; then it is abandoned. A value that
        comes until then counts: another call may have held the loop.
    """

    def __init__(self, grace_s: float = 1.0):
        self.grace_s = grace_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, awaitable: Any, limit_s: float, finish: Callable[[Any], Any]) -> Future[Outcome]:
        """Begin to wait for an awaitable."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()
            return asyncio.run_coroutine_threadsafe(_awaited(awaitable, limit_s, finish), self._loop)

    def abandon_if_blocked(self) -> None:
        """Let the next calls have another loop, unless this one answers."""
        with self._lock:
            loop = self._loop
            alive = threading.Event()
            if loop is not None:
                loop.call_soon_threadsafe(alive.set)
                self._loop = loop if alive.wait(self.grace_s) else None


LOOP = Loop()
_LEFT: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads of calls that ran out of time


def hanging() -> int:
    """Return the number of threads whose calls ran out of time and have not ended yet."""
    return sum(thread.is_alive() for thread in _LEFT)


async def _awaited(awaitable: Any, limit_s: float, finish: Callable[[Any], Any]) -> Outcome:
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return Outcome("ok", finish(await awaitable))
    except BaseException as error:  # noqa: BLE001  SystemExit too: it must not end the loop
        return Outcome("timeout") if limit.expired() else Outcome("error", error=error)


class Threads:
    """Pool of daemon threads: unlike those of ``concurrent.futures``, a call that hangs does not hold the exit of the
    program.

    Args:
      most: threads at one time.
    """

    def __init__(self, most: int):
        self._jobs: queue.SimpleQueue[tuple[Future, Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._left = most

    def submit(self, call: Callable[..., Any], *given: Any) -> Future:
        """Begin a call."""
        self._jobs.put((future := Future(), call, given))
        if not self._idle.acquire(blocking=False) and self._left:
            self._left -= 1
            threading.Thread(target=self._work, name="environment", daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            future, call, given = self._jobs.get()
            try:
                future.set_result(call(*given))
            except BaseException as error:  # noqa: BLE001  for whoever waits
                future.set_exception(error)
            del future, call, given
            self._idle.release()


class _Slot:
    """Place of one outcome."""

    def __init__(self, call: Call, limit_s: float, finish: Callable[[Any], Any], loop: Loop):
        self.call = call
        self.loop = loop
        self.limit_s = limit_s
        self.finish = finish
        self.ended = threading.Event()
        self.outcome = Outcome("timeout")
        self.awaitable: Any = None
        self.future: Future[Outcome] | None = None
        self.late = False

    def run(self) -> None:
        """Call the function; what is to be awaited is kept, and begins at once if the call is apart."""
        try:
            result = self.call.function(**self.call.arguments)
            if inspect.isawaitable(result):
                self.awaitable = result
                if self.call.apart:
                    self.wait_for_it()
            else:
                self.outcome = Outcome("ok", self.finish(result))
        except BaseException as error:  # noqa: BLE001  SystemExit too: a tool must not end the program
            self.outcome = Outcome("error", error=error)
        self.ended.set()

    def wait_for_it(self) -> None:
        """Begin to wait for what the function returned."""
        if self.awaitable is not None and self.future is None and not self.late:
            self.future = self.loop.submit(self.awaitable, self.limit_s, self.finish)

    def result(self) -> Outcome:
        """Return the outcome."""
        if self.late:
            return Outcome("timeout")
        if self.future is None:
            return self.outcome
        try:
            return self.future.result(self.limit_s + self.loop.grace_s)
        except TimeoutError:
            self.future.cancel()
            self.loop.abandon_if_blocked()
            return Outcome("timeout")


class Caller:
    """Owner of an episode's thread, started at its first call; used from one thread at a time.

    All calls run there, one after the other, since many resources belong to one thread; those ``apart`` have threads of
    their own. What they return to await runs at the same time, on the loop. A call that ran out of time keeps its
    thread, and the next ones get another. No thread blocks the interpreter's exit.
    """

    def __init__(self, loop: Loop = LOOP):
        self._loop = loop
        self._thread: threading.Thread | None = None
        self._jobs: queue.SimpleQueue[_Slot | None] = queue.SimpleQueue()
        self._finalizer: Any = None

    def call(self, function: Callable[..., Any], limit_s: float, arguments: Mapping[str, Any] = NOTHING) -> Outcome:
        """Call one function."""
        return self.each([Call(function, arguments)], limit_s)[0]

    def each(self, calls: Sequence[Call], limit_s: float, finish: Callable[[Any], Any] = lambda x: x) -> list[Outcome]:
        """Make calls, each with a limit in seconds; return their outcomes in order.

        ``finish`` makes the value of what a call returned, within its limit.
        """
        slots = [_Slot(call, limit_s, finish, self._loop) for call in calls]
        apart = [(slot, Caller()) for slot in slots if slot.call.apart]
        began = time.monotonic()
        for slot, caller in apart:
            caller._begin(slot)
        for slot in slots:
            if not slot.call.apart:
                self._begin(slot)
                self._end(slot, limit_s)
        for slot, caller in apart:
            caller._end(slot, max(0.0, began + limit_s - time.monotonic()))
            caller.close()
        for slot in slots:
            slot.wait_for_it()
        return [slot.result() for slot in slots]

    def close(self) -> None:
        """Let the thread end once its call is over; a later call starts another."""
        if self._thread is not None:
            self._finalizer()
            self._thread = None

    def _begin(self, slot: _Slot) -> None:
        if self._thread is None:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name="episode", daemon=True)
            self._finalizer = weakref.finalize(self, self._jobs.put, None)
            self._finalizer.atexit = False
            self._thread.start()
        self._jobs.put(slot)

    def _end(self, slot: _Slot, limit_s: float) -> None:
        """Wait until the function returns; if it does not in time, leave its thread to it."""
        if not slot.ended.wait(limit_s):
            slot.late = True
            _interrupt(self._thread)
            self.close()


def _serve(jobs: queue.SimpleQueue) -> None:
    try:
        while (slot := jobs.get()) is not None:
            slot.run()
    except Overdue:  # it came after the call's end
        return


def _interrupt(thread: threading.Thread | None) -> None:
    """Raise ``Overdue`` in a thread, at its next step of Python code."""
    if thread is not None and thread.ident is not None:
        _LEFT.add(thread)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Overdue))
