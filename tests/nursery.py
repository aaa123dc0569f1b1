"""Processes of tests that begin with everything imported: each is forked from one that has imported it once."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

NURSERY = """
import gc, json, os, sys
begun = set(os.environ)
from jaxrl_llm.system.paths import prepare_libraries
prepare_libraries()
import jax, jaxlib.mlir.dialects.mhlo, orbax.checkpoint, tensorboardX, transformers, typeguard
import jaxrl_llm.cli.train, jaxrl_llm.stages.rl, jaxrl_llm.trainer.launch, jaxrl_llm.trainer.loop
from jaxrl_llm.cli.flags import parse_flags
from jaxrl_llm.config import Run
from jaxrl_llm.tasks import ReasoningGym, Task
parse_flags(Run, [], "", "", Run("", Task(ReasoningGym(""))))  # the texts of all settings are looked up once
gc.set_threshold(100_000, 20, 100)  # as in conftest.py
gc.freeze()
while line := sys.stdin.readline():
    if not os.fork():
        break
    while os.waitpid(-1, os.WNOHANG)[0]:
        pass
else:
    sys.exit()
folder, program, arguments, variables, changes, files, ending = json.loads(line)
if child := os.fork():
    with open(ending, "w", buffering=1) as told:
        print(child, file=told)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=told)
    os._exit(0)
os.chdir(folder)
for name in begun - set(variables):
    os.environ.pop(name, None)
changes = {name: text for name, text in variables.items() if os.environ.get(name) != text} | changes
os.environ.update(changes)
sys.path[1:1] = [path for path in changes.get("PYTHONPATH", "").split(":") if path and path not in sys.path]
for name, text in changes.items():
    if name.startswith("JAX_"):  # JAX has read its environment already
        kind = type(jax.config.values[name.lower()])
        jax.config.update(name.lower(), text in ("1", "true") if kind is bool else kind(text))
for number, path in enumerate(files):
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    os.dup2(file, number)
    os.close(file)
sys.stdin = open(0, closefd=False)
sys.argv = ["-c", *arguments]
exec(program)
"""
"""Imports all that a command needs, and parses flags, once, and forks a process for each line of its standard input.

No thread of JAX has started by then, and no backend. Between the two is a process that waits: it writes down the number
of the program's process, and then its exit code.
"""
EARLY = ("HF_", "LANG", "LC_", "PYTHON", "TRANSFORMERS_")
"""How variables begin that are read by an import, or before; a path of imports may be added to."""
PREPARED = ("HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_NO_ADVISORY_WARNINGS", "TRANSFORMERS_VERBOSITY")
"""Those of them that ``prepare_libraries`` sets: a process of tests has them once something has called it there."""
NURSERIES: dict[frozenset[tuple[str, str]], subprocess.Popen] = {}
"""One for all environments of a process of tests that are equal in what an import reads; it ends with that process."""


def nursery(variables: dict[str, str]) -> subprocess.Popen:
    """Return the process that forks those with this environment; it takes 3 seconds to begin."""
    early = {name for name in variables if name.startswith(EARLY)} - {*PREPARED}
    key = frozenset((name, variables[name]) for name in early)
    if key not in NURSERIES:
        program = [sys.executable, "-c", NURSERY]
        NURSERIES[key] = subprocess.Popen(program, env=variables, stdin=subprocess.PIPE, text=True)
        atexit.register(NURSERIES[key].communicate)
    return NURSERIES[key]


class Forked:
    """A Python program as a process of its own, with the methods of ``subprocess.Popen``.

    Args:
      program: its text.
      arguments: ``sys.argv`` from the second on.
      folder: where it runs.
      files: its standard input, output and error.
      variables: its environment.
      changes: variables that it has besides.

    Attributes:
      pid: its number.
      returncode: None while it runs.
    """

    def __init__(
        self, program: str, arguments: Sequence[str], folder: Path, files: Sequence[Path | str],
        variables: dict[str, str], changes: dict[str, str],
    ):  # fmt: skip
        early = [name for name in changes if name.startswith(EARLY) and name != "PYTHONPATH"]
        assert not early, f"{early} would come too late"
        self.returncode: int | None = None
        self._place = tempfile.TemporaryDirectory()
        self._ending = Path(self._place.name) / "ending"
        # pytest names the current test in the environment.
        variables = {name: text for name, text in variables.items() if not name.startswith("PYTEST_")}
        parent = nursery(variables)
        given = [list(arguments), variables, changes, list(map(str, files))]
        asked = [str(folder), program, *given, str(self._ending)]
        parent.stdin.write(json.dumps(asked) + "\n")
        parent.stdin.flush()
        while not (told := self._told()):
            assert parent.poll() is None, "the nursery has ended"
            time.sleep(0.002)
        self.pid = told[0]

    def _told(self) -> list[int]:
        """What is known: its number, and its exit code."""
        text = self._ending.read_text() if self._ending.exists() else ""
        return [int(line) for line in text[: text.rfind("\n") + 1].split()]

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""
        if self.returncode is None and len(told := self._told()) == 2:
            self.returncode = told[1]
            self._place.cleanup()
        return self.returncode

    def wait(self) -> int:
        """Return its exit code once it has ended."""
        while self.poll() is None:
            time.sleep(0.02)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)
