"""Signals, child processes and lost readers. Ctrl-C, SIGTERM and a lost terminal are handled at once: a command quits
with one line, a training stops after its step. Child processes leave that to their parent. A closed output ends no
command.
"""

import contextlib
import errno
import io
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn, TextIO

PREEMPTED = 75
"""Exit code of a training that was stopped by a signal: its state is saved, and the same command resumes it."""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPING = "stopping after this step, or within it if it takes long; again to quit now"
BETWEEN_STEPS = "stopped between steps, nothing is lost: run the same command again to resume"
QUIT = "quit within a step: run the same command again to resume from the last checkpoint"
LAST_WORDS = "\r\x1b[2K\x1b[?25h"
"""The escape sequence that clears a terminal's live line and shows its cursor."""

UNHEARD = "nobody reads the error output any more; further output is in this file"

log = logging.getLogger(__name__)

ExitCall = Callable[[int, str], None]
Answer = Callable[[int], None]
_exit_calls: list[ExitCall] = []
_answers: list[Answer] = []
_beginning = threading.Lock()


def listen() -> None:
    """Handle signals until the process ends; called once, by a command that owns its process. Python runs handlers
    between two instructions of the main thread, which may be minutes away while XLA compiles: the number of a signal is
    therefore written to a pipe as it arrives, and a thread that reads it answers.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    _answers.append(lambda number: quit_now(128 + number, "interrupted"))
    threading.Thread(target=_answer, args=(reading,), daemon=True).start()
    signal.set_wakeup_fd(writing)
    for number in wanted():
        signal.signal(number, _heard)


def wanted() -> list[signal.Signals]:
    """Return the signals to handle; not SIGHUP if ignored: a program under ``nohup`` outlives its terminal."""
    return [number for number in SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]


def _heard(number: int, frame: Any) -> None:
    """Do nothing: a thread handles the signal, but without a handler Python writes no number to the pipe."""


def _answer(reading: int) -> None:
    while True:
        for number in os.read(reading, 64):
            if number in SIGNALS:
                _answers[-1](number)


@contextlib.contextmanager
def answering(answer: Answer) -> Generator[None]:
    """Handle signals with ``answer(number)`` within the block."""
    _answers.append(answer)
    try:
        yield
    finally:
        _answers.remove(answer)


@contextlib.contextmanager
def on_exit(call: ExitCall) -> Generator[None]:
    """Call ``call(code, line)`` if the process quits within the block, since the end of the block is not reached then.
    It runs in another thread, so it must not wait for anything that the block may hold. Once the last of these calls
    has run, no block begins: its thread waits for the end of the process.
    """
    with _beginning:
        _exit_calls.append(call)
    try:
        yield
    finally:
        if call not in _exit_calls:  # another thread is quitting the process, and this one has nothing more to say
            threading.Event().wait()
        _exit_calls.remove(call)


def quit_now(code: int, line: str) -> NoReturn:
    """End the process at once, from any thread, with one line, after the calls of ``on_exit``, innermost first."""
    while _exit_calls or not _last_has_run():
        with contextlib.suppress(Exception):  # the next one may still succeed
            _exit_calls.pop()(code, line)
    words = f"{LAST_WORDS if os.isatty(2) else ''}jaxrl-llm: {' '.join(line.split())}\n"
    ours = 2
    with contextlib.suppress(OSError):  # where no file can be opened any more
        ours = os.dup(2)
        for output in (1, 2):  # other threads have nothing to say after this
            let_go(output)
    with contextlib.suppress(OSError):  # where nobody reads them
        os.write(ours, words.encode())  # past Python's buffers
    os._exit(code)


def _last_has_run() -> bool:
    """Let no further block of ``on_exit`` begin, unless one has begun just now."""
    _beginning.acquire()
    if not _exit_calls:
        return True
    _beginning.release()
    return False


def let_go(output: int) -> None:
    """Discard further output to a file descriptor of a closed reader: else Python complains when it closes the file."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, output)
    os.close(nowhere)


def while_read(file: TextIO) -> TextIO:
    """Return an output like ``file`` that drops what is written once its reader is gone, and logs that."""
    return io.TextIOWrapper(
        _WhileRead(file.fileno(), "w", closefd=False), file.encoding, file.errors, line_buffering=True
    )


class _WhileRead(io.FileIO):
    """The bytes of that output; child processes started after the reader has gone inherit one that drops them too."""

    _untold = False

    def write(self, data: Any, /) -> int:
        remaining = memoryview(data)
        count = len(remaining)
        try:
            while remaining:
                remaining = remaining[os.write(self.fileno(), remaining) :]
        except OSError as error:
            # Error numbers of a write to a pipe without a reader, or to a terminal that is gone.
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            let_go(self.fileno())
            self._untold = True
        if self._untold and logging.getLogger("jaxrl_llm").handlers:  # a run's log may begin only later
            self._untold = False
            log.warning(UNHEARD)
        return count


class Preemption:
    """A handler of signals: within the block the first asks to stop after the current step (``asked``), and the second
    quits. Repeated SIGHUPs of one lost terminal, from the shell and the kernel, count once. Each of several processes
    gets its own signals only: they exchange them between steps. ``say``: called in another thread with a line at the
    first signal. ``grace_s``: seconds from then until the sender may kill the process; half of them are for saving.
    """

    def __init__(self, say: Callable[[str], None], grace_s: float = math.inf):
        self._say = say
        self._grace_s = grace_s
        self._limit = math.inf
        self.asked = False
        self._block = contextlib.ExitStack()

    def __enter__(self) -> "Preemption":
        if signal.getsignal(signal.SIGINT) is _heard:
            self._block.enter_context(answering(self._answer))
        elif threading.current_thread() is threading.main_thread():
            for number in wanted():
                self._block.callback(signal.signal, number, signal.signal(number, self._answer))
        return self

    def __exit__(self, *exception: object) -> None:
        self._block.close()

    def late(self, seconds: float = 0.0) -> bool:
        """Whether there was a signal, and work of this duration would end in the time for saving."""
        return self.asked and time.monotonic() + seconds > self._limit

    def _answer(self, number: int, *frame: Any) -> None:
        """Handle a signal, with a frame in a process that this package does not own: there the second goes to the
        owner, and another thread prints, since a handler must not.
        """
        if self.asked and number == signal.SIGHUP:
            return
        if self.asked and not frame:
            quit_now(128 + number, QUIT)
        if self.asked:
            self._block.close()
            signal.raise_signal(number)
        self._limit = time.monotonic() + self._grace_s / 2
        self.asked = True
        if frame:
            threading.Thread(target=self._say, args=(STOPPING,)).start()
        else:
            self._say(STOPPING)


_PROGRAM = (
    "import importlib, json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "sys.exit(importlib.import_module(sys.argv[2]).main(*sys.argv[3:]))"
)


def interpreter(module: str, *arguments: str) -> list[str]:
    """Return the command of another interpreter with our module path; it exits with what ``main`` there returns."""
    return [sys.executable, "-c", _PROGRAM, json.dumps([str(folder) for folder in sys.path]), module, *arguments]


@contextlib.contextmanager
def child(command: Sequence[str], **options: Any) -> Generator[subprocess.Popen]:
    """Start a process that gets no Ctrl-C and ends with the block or this process; ``options`` are those of Popen."""
    starting = threading.Lock()
    started: list[subprocess.Popen] = []

    def end() -> None:
        for process in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    def end_for_good(*reason: object) -> None:
        starting.acquire()  # a process that is just being started would outlive this one, and so would a later one
        end()

    with on_exit(end_for_good):
        with starting:
            started.append(subprocess.Popen(command, start_new_session=True, **options))
        with started[0] as process:
            try:
                yield process
            finally:
                if process.poll() is None:
                    end()
