"""Runs jaxrl-llm for tests: a process for each command, or for several, which begins with everything imported."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from nursery import EARLY, Forked

ROOT = Path(__file__).parents[1]
MAIN = "from jaxrl_llm.cli import main; main()"
MANY = """
import contextlib, gc, io, json, sys
from jaxrl_llm.cli import run
gc.set_threshold(100_000, 20, 100)  # as in conftest.py
answers = []
for arguments, typed in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.TextIOWrapper(io.BytesIO(typed.encode("utf-8", "surrogateescape")), encoding="utf-8")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = run(arguments)
        except SystemExit as stop:
            code = stop.code
    answers.append([code, out.getvalue(), err.getvalue()])
print(json.dumps(answers))
"""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str


def environment(**changes: str) -> dict[str, str]:
    """One device, and this tree's package whatever is installed; compiling is most of what so short a run does."""
    own = {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "COLUMNS": "120"}
    own["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.02"  # the next process needs the same small programs
    return os.environ | own | changes


def command(*arguments: str, folder: Path, before: str = "", anew: bool = False, **changes: str) -> Answer:
    """``jaxrl-llm ARGUMENTS`` as a process of its own; ``before`` is Python that it runs first.

    ``anew``: nothing is imported before that.
    """
    program = f"{before}\n{MAIN}"
    if not anew:
        return forked(program, "", folder, arguments, **changes)
    return started(program, "", folder, arguments, **changes)


def started(program: str, given: str, folder: Path, arguments: Sequence[str] = (), **changes: str) -> Answer:
    """A Python program as a process that begins with nothing imported; ``given`` is its standard input."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder,
        env=environment(**changes),
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def forked(program: str, given: str, folder: Path, arguments: Sequence[str] = (), **changes: str) -> Answer:
    """A Python program as a process of its own that begins with everything imported."""
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / name for name in ("in", "out", "err")]
        files[0].write_text(given)
        code = Forked(program, arguments, folder, files, environment(), changes).wait()
        return Answer(code, *(file.read_text() for file in files[1:]))


def logged(log: Path, *arguments: str, folder: Path, program: str = MAIN, **changes: str) -> Forked:
    """``jaxrl-llm ARGUMENTS``, or another program, as a process that runs on; what it prints is added to a file."""
    return Forked(program, arguments, folder, ["/dev/null", log, log], environment(), changes)


def commands(lines: list[str | tuple[str, str]], folder: Path, **changes: str) -> list[Answer]:
    """Command lines (split at spaces), one after the other in one process; with a pair, the second is what is typed."""
    pairs = [line if isinstance(line, tuple) else (line, "") for line in lines]
    given = json.dumps([(line.split(" "), typed) for line, typed in pairs])
    early = any(name.startswith(EARLY) for name in changes)
    done = (started if early else forked)(MANY, given, folder, **changes)
    assert done.code == 0, done.err
    return [Answer(*answer) for answer in json.loads(done.out.splitlines()[-1])]


def assert_refused(answer: Answer, *words: str) -> None:
    """Exit code 2, and nothing but one line that holds all the words; on a busy machine, after lines that say what goes
    on.
    """
    assert (answer.code, answer.out) == (2, ""), answer
    lines = [line for line in answer.err.splitlines() if not line.startswith("... ")]
    assert len(lines) == 1 and lines[0].startswith("jaxrl-llm: "), answer.err
    for word in words:
        assert word in lines[0], f"{word!r} is not in {answer.err!r}"


def rows_but_for_the_clock(run_dir: Path) -> list[dict]:
    """The rows of metrics.jsonl without what the clock and the machine decide."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    clock = ("time/", "throughput/", "memory", "event/resumed")
    return [{name: x for name, x in json.loads(line).items() if not name.startswith(clock)} for line in lines]
