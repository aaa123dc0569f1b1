"""The soak: what it measures of processes, and that a run that grows or slows down is found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.config import in_phase, load_config, resolved, validate

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import soak

pytestmark = pytest.mark.slow

STEPS = 2000
STEADY = {"memory": lambda step: 600.0, "files": lambda step: 30, "threads": lambda step: 20}


def looks(**changes):
    """A look every second step."""
    of = STEADY | changes
    return [
        soak.Seen(step, step / 10, of["memory"](step), 100.0, of["files"](step), of["threads"](step))
        for step in range(1, STEPS + 1, 2)
    ]


def durations(slower=1.0):
    """Steps of deep phases take twice as long; all of the second half ``slower`` times as long."""
    kinds = {step: (step - 1) // soak.EVERY % 2 for step in range(1, STEPS + 1)}
    return {step: 0.1 * (1 + kind) * (slower if step > STEPS / 2 else 1.0) for step, kind in kinds.items()}


def failing(seen, times):
    return [words.split()[0] for holds, words in soak.verdicts(seen, times) if not holds]


def test_a_steady_run_passes():
    assert failing(looks(), durations()) == [] and len(soak.verdicts(looks(), durations())) == 5


@pytest.mark.parametrize(
    "changes, names",
    [
        ({"memory": lambda step: 600 + 0.03 * step}, ["memory"]),
        ({"memory": lambda step: 300.0 + 300 * (step > 100)}, []),
        ({"files": lambda step: 30 + step // 400}, ["files"]),
        ({"threads": lambda step: 20 + step // 400}, ["threads"]),
    ],
)
def test_what_grows_after_the_first_hundred_steps_fails(changes, names):
    assert failing(looks(**changes), durations()) == names


def test_steps_are_compared_with_those_of_phases_of_their_kind():
    assert failing(looks(), durations(slower=1.06)) == ["a", "a"]
    assert failing(looks(), durations(slower=1.04)) == []


def test_the_table_has_a_line_for_each_part():
    shown = soak.table(looks(), durations())
    lines = shown.splitlines()
    assert len(lines) == 2 + soak.PARTS
    assert lines[2] == "| 1 to 200 | 600 | 100 | 30 to 30 | 20 to 20 | 150.0 | 100.0 |"
    assert soak.picture([0.0, 4.0, 8.0]) == " ▄█"


def test_processes_are_measured_and_the_last_row_is_found(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 7}\n{"st')
    worker = "print(flush=True); input()"
    child = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{worker}'])"]
    both = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(child, **both, start_new_session=True) as process:
        process.stdout.readline()  # from here on the worker is an interpreter, and no longer its parent's copy
        assert len(soak.group_of(process.pid)) == 2
        seen = soak.look(process.pid, 0.0, tmp_path)
        process.communicate(b"\n")
    assert seen.step == 7 and seen.memory > 1 and seen.workers > 1 and seen.files >= 3 and seen.threads == 1
    assert soak.group_of(process.pid) == [] and soak.resident(os.getpid()) > 10
    assert soak.last_step(tmp_path / "nothing") == -1


def test_its_run_has_phases_of_two_kinds_for_all_its_steps():
    run = resolved(load_config(str(soak.CONFIG))[1])
    validate(run)
    assert soak.EVERY * len(run.rules.phases) == run.steps == 5000
    groups = [in_phase(run, number).rollout.group for number in range(4)]
    assert groups == [8, 16, 8, 16]
