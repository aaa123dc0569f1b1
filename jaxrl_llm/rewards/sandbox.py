"""Programs that a model wrote, run where they can reach nothing: no network, no files, no other processes. Three
levels, of which the highest that the system allows is used: ``full`` (namespaces, Landlock, seccomp and limits),
``landlock+seccomp`` (without namespaces, as in a container) and ``rlimits only``, which is no protection: programs are
refused there unless ``unsafe``. None needs privileges. ``docs/security.md`` has what each stops.
"""

import functools
from typing import NamedTuple

from jaxrl_llm.sandbox.client import ProgramEnd, ServerPool
from jaxrl_llm.sandbox.program import OUT_OF_MEMORY
from jaxrl_llm.sandbox.server import LEVELS

REFUSED = (
    "this system has no Landlock or seccomp to confine a program with: only limits of time and memory would hold it; "
    "run on Linux 5.13 or later, or say unsafe=True for programs that you trust"
)


class Outcome(NamedTuple):
    """End of a program. ``status``: ``ok``, exit code 0; ``error``, another one, a signal, or too many threads;
    ``timeout``; ``memory``; ``output``, it wrote over 4 MiB, or too many files; ``refused``, not run. ``stdout``: what
    it printed, bytes that are no UTF-8 replaced. ``stderr``: its error output, or why it was refused.
    """

    status: str
    stdout: str
    stderr: str


@functools.cache
def servers(judge: bool = False) -> ServerPool:
    """Return this process's fork servers: for programs, or for judges, which see expected values and no
    program; ``judge`` only keeps the two apart.
    """
    return ServerPool()


def level() -> str:
    """Return the level of protection here: ``full``, ``landlock+seccomp`` or ``rlimits only``. SandboxError: none."""
    return servers().level


def run_python(
    code: str, stdin: str = "", timeout_s: float = 2.0, memory_mb: int = 256, unsafe: bool = False
) -> Outcome:
    """Run a Python program, with the standard library, in a fresh process that can reach nothing. It may compute, start
    threads, and write plain files to a folder of its own, emptied afterwards. It has ``timeout_s`` seconds, waits for a
    processor not counted, and ``memory_mb`` MiB beyond the interpreter's. Threads and processes may call this at once.
    SandboxError (``sandbox.client``): the sandbox failed twice, which is no fault of the program.
    """
    if not unsafe and level() == LEVELS[0]:
        return Outcome("refused", "", REFUSED)
    data = stdin.encode("utf-8", "surrogatepass")
    return outcome(servers().run({"code": code}, data, timeout_s, memory_mb))


def outcome(end: ProgramEnd) -> Outcome:
    """Return what a program's end means."""
    texts = [text.decode("utf-8", "replace") for text in (end.stdout, end.stderr)]
    status = {"threads": "error", "files": "output"}.get(end.reason, end.reason)
    if status == "exit":
        status = {0: "ok", OUT_OF_MEMORY: "memory"}.get(end.code, "error")
    return Outcome(status, *texts)
