"""Runs jaxrl-llm for tests: a process for each command, or for several, which begins with everything imported."""

import atexit
import dataclasses
import functools
import json
import os
import subprocess
import sys
import tempfile
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
NURSERY = """
import json, os, sys
from jaxrl_llm.system.paths import prepare_libraries
prepare_libraries()
import jax, orbax.checkpoint, tensorboardX, transformers
import jaxrl_llm.cli.train, jaxrl_llm.trainer.launch, jaxrl_llm.trainer.loop
while line := sys.stdin.readline():
    folder, program, changes, paths = json.loads(line)
    child = os.fork()
    if not child:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()
os.chdir(folder)
os.environ.update(changes)
if count := changes.get("JAX_NUM_CPU_DEVICES"):
    jax.config.update("jax_num_cpu_devices", int(count))  # JAX has read its environment already
for number, path in enumerate(paths):
    file = os.open(path, os.O_RDWR)
    os.dup2(file, number)
    os.close(file)
sys.stdin = open(0, closefd=False)
exec(program)
"""
"""Imports all that a command needs, once, and forks a process for each line of its standard input; prints exit codes.

No thread of JAX has started by then.
"""
LATE = {"COLUMNS", "JAX_NUM_CPU_DEVICES", "WANDB_MODE"}
"""Variables that are read after the imports, or are given to JAX by the nursery."""


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


@functools.cache
def nursery(variables: frozenset[tuple[str, str]]) -> subprocess.Popen:
    """One for each environment in a process of tests; it ends with it. Packages may read theirs when imported."""
    program = [sys.executable, "-c", NURSERY]
    process = subprocess.Popen(program, env=dict(variables), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def forked(program: str, given: str, folder: Path, **changes: str) -> Answer:
    """A Python program as a process of its own that begins with everything imported."""
    with tempfile.TemporaryDirectory() as place:
        files = [Path(place) / name for name in ("in", "out", "err")]
        for file, text in zip(files, (given, "", ""), strict=True):
            file.write_text(text)
        # pytest names the current test in the environment.
        process = nursery(frozenset(one for one in environment().items() if not one[0].startswith("PYTEST_")))
        process.stdin.write(json.dumps([str(folder), program, changes, list(map(str, files))]) + "\n")
        process.stdin.flush()
        code = int(process.stdout.readline())
        return Answer(code, *(file.read_text() for file in files[1:]))


def commands(lines: list[str | tuple[str, str]], folder: Path, **changes: str) -> list[Answer]:
    """Command lines (split at spaces), one after the other in one process; with a pair, the second is what is typed."""
    pairs = [line if isinstance(line, tuple) else (line, "") for line in lines]
    given = json.dumps([(line.split(" "), typed) for line, typed in pairs])
    if changes.keys() <= LATE:
        done = forked(MANY, given, folder, **changes)
    else:
        program = [sys.executable, "-c", MANY]
        ran = subprocess.run(
            program,
            cwd=folder,
            env=environment(**changes),
            input=given,
            capture_output=True,
            text=True,
            check=False,
        )
        done = Answer(ran.returncode, ran.stdout, ran.stderr)
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
