"""A run that is killed, then stopped, then finished equals one that nobody touched, bit for bit."""

import json
import re
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import logged
from learner.rollouts import one_device

from jaxrl_llm import codec
from jaxrl_llm.checkpoints.store import Checkpoints, flatten, steps_in
from jaxrl_llm.config import load_config
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.system.signals import STOPPING

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "fixtures" / "runs" / "resume.py"
PREEMPTED = 75


def start(folder, *flags):
    """The command line, training in ``folder``; on two devices, over which the weights are divided unless flags say
    else.
    """
    command = ["train", str(CONFIG), "--run_dir", str(folder), *flags]
    return logged(folder.with_suffix(".log"), *command, folder=folder.parent, JAX_NUM_CPU_DEVICES="2")


def rows(folder):
    """The whole lines of metrics.jsonl."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def stop_after(folder, step, number, *flags):
    """Start, send the signal once the step's row is there; returns the exit code."""
    process = start(folder, *flags)
    while process.poll() is None and not any(row["step"] >= step for row in rows(folder)):
        time.sleep(0.002)
    for _ in range(2 if number == signal.SIGHUP else 1):  # the shell tells of a lost terminal, and so does the kernel
        process.send_signal(number)
    return process.wait()


def finish(folder, *flags):
    process = start(folder, *flags)
    assert process.wait() == 0, folder.with_suffix(".log").read_text()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """An undisturbed run; one killed before its first checkpoint and later, and asked to stop at once and after a step;
    its exit codes.
    """
    folder = tmp_path_factory.mktemp("runs")
    finish(folder / "whole")
    lives = (
        (0, signal.SIGKILL),
        (3, signal.SIGKILL),
        (4, signal.SIGTERM, "--output.grace_s", "0.01"),
        (5, signal.SIGHUP, "--output.grace_s", "1000"),
    )
    codes = [stop_after(folder / "broken", *life) for life in lives]
    between = max(row["step"] for row in rows(folder / "broken"))
    finish(folder / "broken")
    return folder / "whole", folder / "broken", codes, between


def plain(row):
    """A step's metrics but for what the clock decides."""
    return {
        name: value
        for name, value in row.items()
        if not name.startswith(("time/", "throughput/", "event/resumed", "rollout/utilisation"))
    }


def restored(folder):
    """Arrays by name and host values of the last checkpoint."""
    _, run = load_config(str(CONFIG))
    model, _ = load_pretrained(run.model)
    like = abstract_state(model, build(run.learner.optimiser), True)
    store = Checkpoints(folder / "checkpoints")
    assert max(steps_in(folder / "checkpoints")) == run.steps
    state, host = store.restore(run.steps, like, one_device())
    store.close()
    return jax.device_get(flatten(state)), host


def test_the_signals_came_in_the_middle(folders):
    whole, _, codes, between = folders
    assert codes == [-signal.SIGKILL, -signal.SIGKILL, PREEMPTED, PREEMPTED]
    assert 5 <= between < 8
    said = folders[1].with_suffix(".log").read_text()
    assert (
        STOPPING in said and f"stopped after step {between}, state saved: run the same command again to resume" in said
    )
    # A signal in an update, or after it, ends the run after that step.
    assert len(re.findall(r"stopped (within|after) step \d+, state (and samples )?saved", said)) == 2
    assert any(row.get("dynamic_sampling/carried_in") for row in rows(whole)), "no group was ever carried over"
    assert any(row.get("rollout/resumed") for row in rows(whole)), "no group was ever interrupted"
    assert any(row.get("replay/replaced") for row in rows(whole)), "no stored success was ever taken"
    assert any(row.get("curriculum/dropped_unsolved") for row in rows(whole)), "no problem was ever dropped"


def test_arrays_and_host_values_are_the_same_bit_for_bit(folders):
    (arrays, host), (others, other_host) = restored(folders[0]), restored(folders[1])
    assert arrays.keys() == others.keys()
    assert {name.split("/")[0] for name in arrays} == {"policy", "opt_state", "reference", "updates"}
    for name, value in arrays.items():
        assert np.asarray(value).tobytes() == np.asarray(others[name]).tobytes(), name
    assert json.dumps(codec.to_json(host)) == json.dumps(codec.to_json(other_host))
    assert arrays["updates"] > 8


def test_every_step_stands_once_with_the_same_metrics(folders):
    whole, broken = rows(folders[0]), rows(folders[1])
    assert [row["step"] for row in broken] == [row["step"] for row in whole] == list(range(9))
    for one, other in zip(whole, broken, strict=True):
        assert plain(one) == plain(other)
    assert [row["step"] for row in whole if "event/resumed" in row] == []
    assert next(row["step"] for row in broken if "event/resumed" in row) == 1
    assert sum("event/resumed" in row for row in broken) == 4
    assert any(row.get("kl", 0) for row in whole), "the reference was never left behind"


def documented():
    """Patterns of the metrics that docs/metrics.md names."""
    first_cells = [line.split(" | ")[0] for line in (ROOT / "docs" / "metrics.md").read_text().splitlines()]
    for name in re.findall(r"`([^`]+)`", " ".join(first_cells)):
        yield re.sub("<[a-z]+>", "[^/]+", name).replace("@k", "@[0-9]+")


def test_every_metric_is_documented(folders):
    known = list(documented())
    names = {name for row in rows(folders[0]) for name in row if not name.startswith("event/")}
    assert {"rollout/resumed", "dynamic_sampling/carried_out", "sampler/logp_abs_diff_max"} <= names
    assert not [name for name in names if not any(re.fullmatch(pattern, name) for pattern in known)]


def test_samples_are_the_same(folders):
    whole, broken = ((folder / "samples.jsonl").read_text() for folder in folders[:2])
    assert whole == broken and whole.count("\n") >= 8


def test_a_finished_run_is_left_alone(folders):
    before = rows(folders[0])
    finish(folders[0])
    assert rows(folders[0]) == before
    assert "is finished: 8 of 8 steps" in folders[0].with_suffix(".log").read_text()
