"""Shutdown of a run's processes together: the first to fail gives the reason, all exit alike, and none hangs."""

import contextlib
import json
import subprocess
import threading
import time
from typing import Any

from jaxrl_llm.system.signals import quit_now

FOREVER_MS = 7 * 24 * 3600 * 1000
"""The time limit in milliseconds of waits that end when the coordination service notices a dead process, not by the
clock."""
PARTING_MS = 5000
"""Milliseconds in which the others can receive this process's reason to stop."""
LAST_WORDS_S, SERVICE_S = 3.0, 1.0
"""Seconds for a failing process to report its reason after its connections close; and to receive process 0's reason."""
AGAIN = "run the same command again, on fewer if need be, to go on"
LOST = f"another process of this run died or cannot be reached: {AGAIN}"
KILLED = f"this process was killed, or lost another one of its run: {AGAIN}"


class Shutdown:
    """Owner of this process's exit, in agreement with the other processes of JAX's coordination service.

    Its methods may be called by any process at any time, from any thread; ``close`` by all.

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
        """Finish: all processes have reached the end of the run, and each now exits by itself."""
        if self._index == 0:
            self._client.key_value_set("stopped", "null")
        self._watch.join()
        dismiss(self._witness)

    def lost(self, reason: str) -> None:
        """End this process after its collectives have failed, with the reason of the process that ended first, if it
        gave one."""
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
        """Call ``stop`` for a process that is being quit, unless it is stopping already, which quits it too."""
        if not self._leaving.locked():
            self.stop(code, line)

    def _hear(self) -> None:
        """Wait, in a thread, until a process reports its reason to stop or the service misses a process."""
        try:
            said = json.loads(self._client.blocking_key_value_get("stopped", FOREVER_MS))
        except Exception:  # noqa: BLE001  of JAX's own kinds; whatever it is, the others are out of reach
            with self._leaving:
                self._exit(1, LOST)  # before JAX aborts the process, which it does on the same news
        if said is None or said[0] == self._index:
            return
        with self._leaving:
            number, code, line = said
            self._part(code, f"process {number} stopped: {line}")

    def _part(self, code: int, line: str) -> None:
        """Exit once all processes have the reason; process 0 last, since the others are aborted when its service
        ends."""
        with contextlib.suppress(Exception):  # some are gone already
            self._client.wait_at_barrier("stopped", PARTING_MS)
        time.sleep(self._service_s)
        self._exit(code, line)

    def _exit(self, code: int, line: str) -> None:
        """Exit without Python's exit handlers, which would wait for every process."""
        dismiss(self._witness)
        quit_now(code, line)


def witness(line: str) -> subprocess.Popen:
    """Start a shell that prints ``line`` if this process ends without ``dismiss``, as when JAX aborts it."""
    command = ["/bin/sh", "-c", 'read farewell || echo "$0" >&2', f"jaxrl-llm: {line}"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def dismiss(shell: subprocess.Popen) -> None:
    """End a witness without output."""
    with contextlib.suppress(BrokenPipeError):
        shell.communicate(b"\n")
