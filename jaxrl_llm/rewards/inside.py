"""Calls of functions that only this process has: they can be given up, not ended."""

import queue
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from jaxrl_llm.rewards.calls import Call, Outcome, Runner, overdue, perform, place_in

MOST_STUCK = 4
"""Threads that may go on with calls that were given up, before no further one is begun."""


class Inside:
    """Owner of a thread, started at the first call, that makes one call after the other on one event loop.

    It is not the main thread: a notebook's event loop runs there, and a call that hangs there would stop the run. A
    call that ran out of time keeps its thread, and the next ones get another. No thread keeps the interpreter from its
    exit.
    """

    def __init__(self):
        self._line: _Line | None = None
        self._stuck: list[_Line] = []

    def run(self, function: Callable[..., Any], call: Call) -> list[Outcome]:
        """The outcomes of the call's items."""
        self._stuck = [line for line in self._stuck if line.thread.is_alive()]
        if len(self._stuck) >= MOST_STUCK:
            ended = f"not called, since {MOST_STUCK} earlier calls have not ended"
            said = f"{ended}; in a module of its own it could be killed"
            return [Outcome("timeout", message=said)] * len(call.items)
        self._line = self._line or _Line()
        outcomes = self._line.ask(function, call)
        if outcomes is None:
            frame = sys._current_frames().get(self._line.thread.ident)
            place = place_in(traceback.extract_stack(frame) if frame else [], function)
            self._stuck.append(self._line)
            self.close()
            return [Outcome("timeout", message=overdue(call.limit_s), place=place)] * len(call.items)
        return outcomes

    def close(self) -> None:
        """Lets the thread end once its call is over; a later ``run`` starts another."""
        if self._line is not None:
            self._line.asked.put(None)
            self._line = None


class _Line:
    """A thread, what it is asked, and what it answers."""

    def __init__(self):
        self.asked: queue.SimpleQueue[tuple[Callable[..., Any], Call] | None] = queue.SimpleQueue()
        self.answered: queue.SimpleQueue[list[Outcome]] = queue.SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(self.asked, self.answered), name="rewards", daemon=True)
        self.thread.start()

    def ask(self, function: Callable[..., Any], call: Call) -> list[Outcome] | None:
        """The outcomes; None where they are not there in time."""
        self.asked.put((function, call))
        try:
            return self.answered.get(timeout=call.limit_s)
        except queue.Empty:
            return None


def _serve(asked: queue.SimpleQueue, answered: queue.SimpleQueue) -> None:
    with Runner() as runner:
        while (job := asked.get()) is not None:
            answered.put(perform(*job, runner.run))
