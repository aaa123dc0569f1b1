"""How the processes of a run end together: the first to fail says why, all exit alike, and none waits for ever."""

import contextlib
import json
import subprocess
import threading
import time
from typing import Any

from jaxrl_llm.signals import quit_now

FOREVER_MS = 7 * 24 * 3600 * 1000
"""Waiting ends when a process dies, which the coordination service notices; not by the clock."""
PARTING_MS = 5000
"""For the others to hear why this process stops."""
LAST_WORDS_S, SERVICE_S = 3.0, 1.0
"""For a failing process to say why, once its connections are seen to close; and for others to hear process 0."""
AGAIN = "run the same command again, on fewer if need be, to go on"
LOST = f"another process of this run died or cannot be reached: {AGAIN}"
KILLED = f"this process was killed, or lost another one of its run: {AGAIN}"


class Departure:
    """Owner of this process's end, beside the others that JAX's coordination service knows.

    Its methods are called by any process at any time, from any thread; ``close`` by all.

    Args:
      index: this process's number; 0 has the service.
      client: of the service.
    """

    def __init__(self, index: int, client: Any):
        self._index = index
        self._client = client
        self._service_s = SERVICE_S if index == 0 else 0.0
        self._leaving = threading.Lock()
        self._witness = witness(KILLED)
        self._watch = threading.Thread(target=self._hear, daemon=True)
        self._watch.start()

    def close(self) -> None:
        """All have come to the end of the run: what follows is this process's own affair."""
        if self._index == 0:
            self._client.key_value_set("stopped", "null")
        self._watch.join()
        dismiss(self._witness)

    def lost(self, reason: str) -> None:
        """End this process, whose collectives fail; if the one that ended first says why, that is told instead."""
        self._watch.join(LAST_WORDS_S + self._service_s)
        with self._leaving:
            self._exit(1, f"{LOST} ({' '.join(reason.split())[:200]})")

    def stop(self, code: int, line: str) -> None:
        """End this process at once, and the others with it: they print ``line`` too and exit with ``code``."""
        with self._leaving:  # for good: the first thread to know of an end speaks alone
            with contextlib.suppress(Exception):  # another was faster, or nobody is there to hear it
                self._client.key_value_set("stopped", json.dumps([self._index, code, line]))
            self._part(code, line)

    def quit(self, code: int, line: str) -> None:
        """``stop`` for a process that is being quit; does nothing where it is stopping already, which quits it too."""
        if not self._leaving.locked():
            self.stop(code, line)

    def _hear(self) -> None:
        """Wait, in a thread of its own, for one process to say why it stops, or for the service to miss one."""
        try:
            said = json.loads(self._client.blocking_key_value_get("stopped", FOREVER_MS))
        except Exception:  # of JAX's own kinds; whatever it is, the others are out of reach
            with self._leaving:
                self._exit(1, LOST)  # before JAX aborts the process, which it does on the same news
        if said is None or said[0] == self._index:
            return
        with self._leaving:
            number, code, line = said
            self._part(code, f"process {number} stopped: {line}")

    def _part(self, code: int, line: str) -> None:
        """Exit once all have heard; process 0 last, since the others are aborted when its service goes."""
        with contextlib.suppress(Exception):  # some are gone already
            self._client.wait_at_barrier("stopped", PARTING_MS)
        time.sleep(self._service_s)
        self._exit(code, line)

    def _exit(self, code: int, line: str) -> None:
        """Without Python's farewells, which would wait for every process."""
        dismiss(self._witness)
        quit_now(code, line)


def witness(line: str) -> subprocess.Popen:
    """A shell that says ``line`` where this process ends without a word; JAX aborts one that loses the others."""
    command = ["/bin/sh", "-c", 'read farewell || echo "$0" >&2', f"jaxrl-llm: {line}"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def dismiss(shell: subprocess.Popen) -> None:
    """End a witness that has nothing to say."""
    with contextlib.suppress(BrokenPipeError):
        shell.communicate(b"\n")
