"""Calls of functions that only this process has, on threads: a call that hangs is abandoned with its thread."""

import asyncio
import contextlib
import queue
import sys
import threading
import time
import traceback
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol

from jaxrl_llm.rewards.calls import Call, Outcome, overdue, perform, place_in, together

MOST_STUCK = 4
"""Number of threads still in abandoned calls at which no further call starts."""


class Coming(Protocol):
    """The outcomes of a call's items, which may not have come yet."""

    def result(self) -> list[Outcome]:
        """Wait for them, within the call's limit, and return them."""
        ...


class Inside:
    """Owner of two threads, started when first needed. No thread blocks the interpreter's exit.

    One makes one call after the other, in the order of their submission. On the other's event loop wait the calls of
    ``async`` functions, all at one time. Neither is the main thread: a notebook's event loop runs there, and a call
    that hangs there would stop the run. A call that ran out of time keeps its thread, and the next ones get another.
    """

    def __init__(self):
        self._stuck: list[threading.Thread] = []
        self._turns: _Turns | None = None
        self._loop: _Loop | None = None

    def submit(self, call: Call) -> Coming:
        """Begin the call, in its turn; return its outcomes to come."""
        if call.form.waits and not call.form.batch:
            self._loop = self._loop if self._loop is not None and not self._loop.blocked else _Loop(self._stuck)
            return _Waiting(call, self._loop)
        self._turns = self._turns or _Turns(self._stuck)
        return self._turns.submit(call)

    def close(self) -> None:
        """Cancel calls that have not begun, and let the threads end with the one that they are in."""
        if self._turns is not None:
            self._turns.close()
        if self._loop is not None:
            self._loop.close()
        self._turns = self._loop = None


def refused(stuck: list[threading.Thread], call: Call) -> list[Outcome]:
    """Return the outcomes of a call that does not begin, since too many threads are stuck; else an empty list."""
    stuck[:] = [thread for thread in stuck if thread.is_alive()]
    ended = f"not called, since {MOST_STUCK} earlier calls have not ended"
    said = f"{ended}; in a module of its own it could be killed"
    return [Outcome("timeout", message=said)] * len(call.items) if len(stuck) >= MOST_STUCK else []


def late(thread: threading.Thread, call: Call) -> list[Outcome]:
    """Return the outcomes of a call that ran out of time, with the place that its thread is at."""
    frame = sys._current_frames().get(thread.ident)
    function: Any = call.function
    place = place_in(traceback.extract_stack(frame) if frame else [], function)
    return [Outcome("timeout", message=overdue(call.limit_s), place=place)] * len(call.items)


class _Turns:
    """Owner of a queue of calls: a thread makes them, and another one gives up those that take too long."""

    def __init__(self, stuck: list[threading.Thread]):
        self._stuck = stuck
        self._open: queue.SimpleQueue[tuple[Call, Future[list[Outcome]]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="reward turns", daemon=True).start()

    def submit(self, call: Call) -> Coming:
        outcomes: Future[list[Outcome]] = Future()
        self._open.put((call, outcomes))
        return outcomes

    def close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while (left := self._open.get_nowait()) is not None:
                left[1].cancel()
        self._open.put(None)

    def _watch(self) -> None:
        thread: threading.Thread | None = None
        asked: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        answered: queue.SimpleQueue[list[Outcome]] = queue.SimpleQueue()
        while (turn := self._open.get()) is not None:
            call, outcomes = turn
            if not outcomes.set_running_or_notify_cancel():
                continue
            found = refused(self._stuck, call)
            if not found:
                if thread is None:
                    asked, answered = queue.SimpleQueue(), queue.SimpleQueue()
                    thread = threading.Thread(target=_serve, args=(asked, answered), name="rewards", daemon=True)
                    thread.start()
                asked.put(call)
                try:
                    found = answered.get(timeout=call.limit_s)
                except queue.Empty:
                    found = late(thread, call)
                    self._stuck.append(thread)
                    asked.put(None)
                    thread = None
            outcomes.set_result(found)
        asked.put(None)


def _serve(asked: queue.SimpleQueue, answered: queue.SimpleQueue) -> None:
    with asyncio.Runner() as runner:
        while (call := asked.get()) is not None:
            answered.put(perform(call.function, call, runner.run))


class _Loop:
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


class _Waiting:
    """A call of an ``async`` function, which waits from now on."""

    def __init__(self, call: Call, loop: _Loop):
        self._call = call
        self._loop = loop
        self._until = time.monotonic() + call.limit_s
        self._refused = refused(loop.stuck, call)
        self._outcomes: Future[list[Outcome]] = Future()
        function: Any = call.function
        if not self._refused:
            self._outcomes = asyncio.run_coroutine_threadsafe(together(function, call), loop.loop)

    def result(self) -> list[Outcome]:
        """Wait for the outcomes; a call that blocks the loop is abandoned with it."""
        if self._refused:
            return self._refused
        try:
            return self._outcomes.result(max(0.0, self._until - time.monotonic()))
        except (TimeoutError, CancelledError):
            found = late(self._loop.thread, self._call)
            if not self._loop.blocked:
                self._loop.blocked = True
                self._loop.stuck.append(self._loop.thread)
                self._loop.close()
            return found
