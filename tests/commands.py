"""Runs jaxrl-llm for tests: one process for each command, or several commands in one process that imports JAX once."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

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


def command(*arguments: str, folder: Path, before: str = "", **changes: str) -> Answer:
    """``jaxrl-llm ARGUMENTS`` as a process of its own; ``before`` is Python that it runs first."""
    program = [sys.executable, "-c", f"{before}\n{MAIN}", *arguments]
    done = subprocess.run(
        program,
        cwd=folder,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def commands(lines: list[str | tuple[str, str]], folder: Path, **changes: str) -> list[Answer]:
    """Command lines (split at spaces), one after the other in one process; with a pair, the second is what is typed."""
    pairs = [line if isinstance(line, tuple) else (line, "") for line in lines]
    given = json.dumps([(line.split(" "), typed) for line, typed in pairs])
    done = subprocess.run(
        [sys.executable, "-c", MANY],
        cwd=folder,
        env=environment(**changes),
        input=given,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [Answer(*answer) for answer in json.loads(done.stdout.splitlines()[-1])]


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
