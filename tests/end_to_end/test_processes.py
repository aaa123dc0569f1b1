"""The whole trainer in 1, 2 and 4 processes: the same samples, gradients and weights; and what ends one ends all."""

import json
import signal
import time
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from end_to_end.test_resume import rows
from several import codes, launch, said

from jaxrl_llm.config import load_config
from jaxrl_llm.tasks import load

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[1] / "fixtures" / "runs" / "several.py"
PREEMPTED = 75
COMPARED = 3
"""Steps whose samples are compared."""


HEARTBEAT_S = 20
"""After which a process that does not answer counts as dead."""


def start(folder, count, steps):
    flags = f"--run_dir {folder / 'run'} --steps {steps} --json --distributed.heartbeat_s {HEARTBEAT_S}"
    return launch(count, "train", str(CONFIG), *flags.split(), folder=folder)


def signalled(folder, count, victim, step, number):
    """Exit codes of a run of which one process gets a signal once a step is written, and the seconds that it took."""
    processes = start(folder, count, 60)
    while all(p.poll() is None for p in processes) and not any(row["step"] >= step for row in rows(folder / "run")):
        time.sleep(0.01)
    processes[victim].send_signal(number)
    began = time.monotonic()
    return codes(processes), time.monotonic() - began


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def alone(folder):
    """One process, undisturbed."""
    assert codes(start(folder / "alone", 1, COMPARED)) == [0], said(folder / "alone", 0)
    return folder / "alone"


@pytest.fixture(scope="module")
def killed(folder):
    """Two processes, of which the second is killed; how they ended. A checkpoint is whole when that after it begins."""
    return folder / "killed", *signalled(folder / "killed", 2, 1, COMPARED + 2, signal.SIGKILL)


@pytest.fixture(scope="module")
def stopped(folder):
    """Four processes, of which the third is asked to stop after the third step; how they ended."""
    return folder / "stopped", *signalled(folder / "stopped", 4, 2, COMPARED, signal.SIGTERM)


def held_out():
    return {problem.id for problem in load(load_config(str(CONFIG))[1].task).held_out}


def trained_on(folder):
    """[policy version, problem, tokens] of every completion of the first steps, sorted; one process scored each.

    What no policy sampled was invented, to call the reward on before the run.
    """
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sorted(line for line in lines if 0 <= line[0] < COMPARED)


def arrays(folder, step):
    """The weights and first moments of a checkpoint, by name, read without the trainer."""
    with ocp.PyTreeCheckpointer() as reader:
        place = folder / "run" / "checkpoints" / str(step) / "state"
        names = reader.metadata(place).item_metadata.tree
        names = [name for name in names if name.startswith("policy/") or "/mu/" in name]
        target, plain = dict.fromkeys(names, 0), dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
        return reader.restore(place, args=ocp.args.PyTreeRestore(target, plain, partial_restore=True))


@pytest.mark.parametrize("several", ["killed", "stopped"])
def test_the_first_steps_are_those_of_one_process(several, alone, request):
    other = request.getfixturevalue(several)[0]
    found = trained_on(alone)
    assert len(found) == COMPARED * 64 and trained_on(other) == found
    assert not {problem for _, problem, _ in found} & held_out(), "evaluations ask the verifier alone"
    # The last step of the one is evaluated.
    for one, many in zip(rows(alone / "run")[:COMPARED], rows(other / "run")[:COMPARED], strict=True):
        same = {name for name in one if name.startswith(("reward/", "completions/", "eval/", "curriculum/"))}
        assert same and {name: one[name] for name in same} == {name: many[name] for name in same}
    # The first moments after one update are the accumulated gradient, times 0.1.
    first, others = arrays(alone, 1), arrays(other, 1)
    gradients = [name for name in first if "/mu/" in name]
    assert len(gradients) > 5
    for name in gradients:
        assert np.abs(first[name] - others[name]).max() <= 1e-5 * np.abs(first[name]).max(), name
    rate = load_config(str(CONFIG))[1].learner.optimiser.learning_rate
    last, others = arrays(alone, COMPARED), arrays(other, COMPARED)
    for name in last:
        assert np.abs(last[name] - others[name]).max() <= 2 * rate * COMPARED, name


def test_scores_are_divided_among_the_processes(stopped):
    files = [path.read_text().splitlines() for path in stopped[0].glob("*.jsonl")]
    assert len(files) == 4 and len({len(lines) for lines in files}) == 1


def test_a_process_that_is_killed_stops_the_other_with_one_line(killed):
    folder, (first, second), seconds = killed
    # JAX may abort the process before it can leave by itself.
    assert first in (1, -signal.SIGABRT) and second == -signal.SIGKILL and seconds < 3 * HEARTBEAT_S
    told = [line for line in said(folder, 0) if line.startswith("jaxrl-llm: ")]
    assert len(told) == 1 and "run the same command again, on fewer if need be, to resume" in told[0]
    assert "Traceback" not in "".join(said(folder, 0))


def test_one_process_goes_on_where_two_were_stopped(killed):
    folder = killed[0]
    before = rows(folder / "run")[-1]["step"]
    again = start(folder, 1, before + 1)
    assert codes(again) == [0], said(folder, 0)
    steps = rows(folder / "run")
    assert [row["step"] for row in steps] == list(range(before + 2))
    resumed = [row["step"] for row in steps if "event/resumed" in row]
    assert len(resumed) == 1 and COMPARED <= resumed[0] <= before + 1


def test_asking_one_process_to_stop_stops_all_after_the_same_step(stopped):
    folder, ended, _ = stopped
    assert ended == [PREEMPTED] * 4
    last = rows(folder / "run")[-1]["step"]
    assert COMPARED <= last < 60
    assert max(int(path.name) for path in (folder / "run" / "checkpoints").iterdir()) == last
    assert f"stopped after step {last}, state saved: run the same command again to resume" in said(folder, 0)
    printed = [json.loads(line) for line in said(folder, 0) if line.startswith('{"step": ')]
    assert printed == rows(folder / "run")
    for number in (1, 2, 3):  # they write nothing, and say nothing
        assert not [line for line in said(folder, number) if "[Gloo]" not in line]
    assert [row["step"] for row in rows(folder / "run")] == list(range(last + 1))
