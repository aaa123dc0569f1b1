"""A command on a terminal of its own, where Ctrl-C reaches the command and its children as it does for a person."""

import os
import pty
import re
import select
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from commands import environment
from nursery import Forked

CTRL_C = b"\x03"
PATIENCE_S = 240
OWN = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
sys.stdout.reconfigure(line_buffering=True)
"""
"""Python by which a process leads a session, whose terminal is its standard input, and writes there line by line."""


class Terminal:
    """Owner of a pseudo-terminal and of the process on it.

    Attributes:
      screen: all that was written there, escape codes too.
      process: its leader.
    """

    def __init__(
        self, program: str, arguments: Sequence[str] = (), folder: Path | None = None, columns: int = 80, **changes: str
    ):
        ours, theirs = pty.openpty()
        changes = {"COLUMNS": str(columns), "LINES": "40", "TERM": "xterm"} | changes
        self.screen, self._seen, self._ours = "", 0, ours
        files = [os.ttyname(theirs)] * 3
        self.process = Forked(OWN + program, arguments, folder or Path.cwd(), files, environment(), changes)
        os.close(theirs)

    def wait_for(self, text: str) -> None:
        """Read until the screen holds ``text`` after what was last waited for."""
        limit = time.monotonic() + PATIENCE_S
        while (found := self.screen.find(text, self._seen)) < 0:
            more, _, _ = select.select([self._ours], [], [], max(limit - time.monotonic(), 0))
            assert more and self._read(), f"no {text!r} on:\n{self.screen}"
        self._seen = found + len(text)

    def press(self, key: bytes) -> None:
        """Type."""
        os.write(self._ours, key)

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed and gives it on line by line, as where no program edits lines."""
        wanted = termios.ECHO | termios.ICANON
        return termios.tcgetattr(self._ours)[3] & wanted == wanted

    def finish(self) -> int:
        """Read to the end; returns the exit code."""
        while self._read():
            pass
        os.close(self._ours)
        return self.process.wait()

    def lines(self) -> list[str]:
        """What stays to be read of the lines: without escape codes, and without what a live line was overwritten by."""
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.screen.replace("\x1b[2K", "\r"))
        return [line.rstrip("\r").rpartition("\r")[2] for line in plain.split("\n")]

    def _read(self) -> bool:
        try:
            chunk = os.read(self._ours, 65536)
        except OSError:  # nobody has the other end open: on Linux an error
            time.sleep(0.01)
            return self.process.poll() is None
        self.screen += chunk.decode(errors="replace")
        return bool(chunk)
