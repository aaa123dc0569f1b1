"""Fault injection: five kills and a flipped bit in the hardest mix of settings, and that what differs is found."""

import random
import shutil
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from learner.rollouts import one_device
from tiny import tiny

from jaxrl_llm.checkpoints.integrity import fault as fault_of
from jaxrl_llm.checkpoints.snapshots import keep
from jaxrl_llm.checkpoints.store import Checkpoints, steps_in
from jaxrl_llm.learner import Optimiser, create_state
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.system.json_lines import read_rows

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from fault_compare import difference
from fault_injection import Pass, kinds_of, resumed, table, under_faults, undisturbed
from fault_kinds import KILLS, OTHERS, Fault, Hit, damage, planned
from fault_lives import named

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[1] / "fixtures" / "runs" / "hardest.py"
FAULTS = (
    Fault("random", 2, 0.1, 0.5),
    Fault("checkpoint", 3, 0.0, 0.5),
    Fault("phase", 4, 0.0, 0.5),
    Fault("reset", 6, 0.0, 0.5),
    Fault("bit flip", 12, 0.1, 0.5),
)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """An undisturbed run, and one that was killed five times."""
    folder = tmp_path_factory.mktemp("faults")
    whole = undisturbed(CONFIG, folder / "whole")
    return whole, under_faults(whole, FAULTS, folder / "killed")


def test_a_run_that_is_killed_five_times_equals_one_that_nobody_touched(campaign):
    _whole, found = campaign
    assert found.wrong == ""
    assert [hit.kind for hit in found.hits] == [fault.kind for fault in FAULTS]
    assert sum(hit.counts for hit in found.hits) == 5
    for hit, fault in zip(found.hits, FAULTS, strict=True):
        assert hit.step >= fault.step and 0 < hit.resumed_at <= hit.step
    assert found.hits[1].saving, "killed while a checkpoint was written"


def test_the_hardest_mix_has_all_that_a_run_must_keep(campaign):
    whole, _ = campaign
    measured = {name for row in read_rows(whole.run_dir / "metrics.jsonl") for name, value in row.items() if value}
    assert {"event/phase", "event/reference_reset", "event/optimiser_reset", "rollout/resumed"} <= measured
    assert {"replay/stored", "task/letters/groups", "entropy_coef", "dynamic_sampling/carried_in"} <= measured
    assert [step for _, step in whole.moments] == [*range(17), 16]


@pytest.fixture(scope="module")
def state():
    return create_state(tiny(), build(Optimiser()), True, one_device())


@pytest.fixture
def run(state, tmp_path):
    """A run of two checkpoints and a snapshot."""
    return written(tmp_path / "run", state)


def written(run, state, host=0, row=0.5, sample="a"):
    with Checkpoints(run / "checkpoints", 2) as store:
        store.save(1, state, {"left": {"order": [1, 2, host]}})
        store.save(2, state, {"left": {"order": [1, 2, host]}, "ready": {"metrics": {"time/s": random.random()}}})
    keep(run, 1, state)
    (run / "metrics.jsonl").write_text(f'{{"step": 1, "loss": {row}, "time/step_s": {random.random()}}}\n')
    (run / "samples.jsonl").write_text(f"x\n{sample}\n")
    return run


def flipped(state):
    """With the lowest bit of one number changed."""
    leaves, treedef = jax.tree.flatten(state)
    number = next(n for n, leaf in enumerate(leaves) if leaf.dtype == np.float32 and leaf.ndim == 2)
    changed = np.asarray(leaves[number]).copy()
    changed.view(np.uint32)[1, 2] ^= 1
    leaves[number] = jax.device_put(changed, leaves[number].sharding)
    return jax.tree.unflatten(treedef, leaves)


def test_equal_runs_are_equal_but_for_the_clock(run, state, tmp_path):
    assert difference(run, written(tmp_path / "other", state)) == ""


def test_one_bit_of_an_array_is_found_by_its_name(run, state, tmp_path):
    other = written(tmp_path / "other", flipped(state))
    found = difference(run, other)
    assert found.startswith("checkpoints/2, policy/") and found.endswith(": 1 bytes differ")
    shutil.rmtree(other / "checkpoints")
    shutil.copytree(run / "checkpoints", other / "checkpoints")
    assert difference(run, other).startswith("snapshots/1, policy/")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"host": 3}, "checkpoints/2, host/left/order/2: 0, 3"),
        ({"row": 0.25}, "metrics.jsonl, step 1, loss: 0.5, 0.25"),
        ({"sample": "b"}, "samples.jsonl, line 2"),
    ],
)
def test_another_value_is_found_by_its_name(run, state, tmp_path, change, words):
    assert difference(run, written(tmp_path / "other", state, **change)) == words


def test_what_is_missing_is_found(run, tmp_path):
    other = Path(shutil.copytree(run, tmp_path / "other"))
    shutil.rmtree(other / "snapshots" / "1")
    assert difference(run, other) == "snapshots: [1], []"
    shutil.rmtree(other / "checkpoints" / "2")
    assert difference(run, other) == "last checkpoint: 2, 1"
    (other / "metrics.jsonl").write_text("")
    assert difference(run, other) == "steps of metrics.jsonl: 1 from 1 to 1, none"


@pytest.mark.parametrize("kind", ["bit flip", "truncated"])
def test_only_the_newest_of_several_checkpoints_is_damaged(run, kind):
    fault = Fault(kind, 0, 0.0, 0.4)
    assert damage(run, fault) == 2
    steps = [fault_of(run / "checkpoints" / str(step)) for step in (1, 2)]
    assert steps[0] == "" and steps[1] != ""
    shutil.rmtree(run / "checkpoints" / "2")
    assert damage(run, fault) is None and steps_in(run / "checkpoints") == [1]


def test_moments_are_spread_over_the_measured_duration():
    moments = [(5.0, 0), (6.0, 1), (10.0, 2), (11.0, 2)]
    faults = planned(random.Random(0), moments, ["random"] * 600, 1.0)
    counts = [sum(fault.step == step for fault in faults) for step in range(3)]
    assert np.abs(np.array(counts) / 600 - [1 / 6, 4 / 6, 1 / 6]).max() < 0.06
    assert all(0 <= fault.delay <= 4 for fault in faults)
    assert [fault.step for fault in faults] == sorted(fault.step for fault in faults)


def test_a_kill_counts_where_the_run_went_on_above_its_beginning():
    hits = [Hit("random", 1, "sampling", True, False), Hit("SIGTERM", 2, "sampling", False, False)]
    resumed(hits, None, begun=False)
    assert hits[0].resumed_at is None and not hits[0].counts
    resumed(hits[:1], None, begun=True)
    assert hits[0].resumed_at == 0 and not hits[0].counts
    hits.append(Hit("start-up", 4, "loading", True, False))
    resumed(hits, 3, begun=False)
    assert [hit.resumed_at for hit in hits] == [0, 3, 3] and [hit.counts for hit in hits] == [False, False, True]
    shown = table([Pass("dynamic", hits, 60.0, ""), Pass("dynamic", [], 60.0, "loss: 1, 2\nmore")])
    assert "| dynamic | 2 | 1 | SIGTERM 1 | loading 1 | 0 | 4 to 4, median 4 | 2.0 | 1 differ: loss: 1, 2 |" in shown


def test_every_kind_has_its_turn_where_it_has_a_place():
    chances = random.Random(0)
    kinds = {kind for number in range(8) for kind in kinds_of("hardest", 3, number, chances)}
    assert set(KILLS + OTHERS) <= kinds
    assert "phase" not in {kind for number in range(8) for kind in kinds_of("ahead", 2, number, chances)}


STACK = """Current thread 0x00007f (most recent call first):
  File "/lib/jax/_src/api.py", line 9 in block
  File "/x/jaxrl_llm/{}", line 3 in {}
  File "/x/jaxrl_llm/trainer/loop.py", line 8 in make_steps
  File "<string>", line 2 in <module>
"""


@pytest.mark.parametrize(
    "file, function, what",
    [
        ("learner/update.py", "update", "updating"),
        ("rewards/pool.py", "score", "scoring"),
        ("engine/engine.py", "run", "sampling"),
        ("snapshots.py", "keep", "writing a snapshot"),
        ("trainer/step.py", "next_phase", "a phase begins"),
        ("trainer/segment.py", "load", "loading"),
    ],
)
def test_a_stack_says_what_is_done(file, function, what):
    assert named(STACK.format(file, function)) == what
    assert named(STACK.format(file, function).replace("<string>", "thread.py")) == "loading"
