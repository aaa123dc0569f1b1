"""The benchmark of replay: what it counts, and that runs differ by what is replayed alone."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import bench_replay

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs():
    """Twelve steps without and with replay."""
    options = bench_replay.Options(steps=12)
    return [bench_replay.run(options, "grpo", 0, replay) for replay in (False, True)]


def test_every_step_after_the_first_success_has_something_to_learn_from(runs):
    plain, replayed = runs
    assert 1 < plain.begun == replayed.begun < 12 and abs(plain.success[0] - 1 / 200) < 1e-4
    same = slice(0, plain.begun)
    np.testing.assert_allclose(plain.success[same], replayed.success[same], rtol=1e-5)
    assert all(replayed.later) and len(replayed.later) == 12 - replayed.begun
    assert np.mean(plain.later) < 0.6
    assert replayed.success[-1] > plain.success[-1]


def test_a_row_counts_over_all_runs():
    one = bench_replay.Found([0.005, 0.008, 0.02, 0.95], [True, False, True], 1)
    none = bench_replay.Found([0.005, 0.006], [False], None)
    assert (one.solved_at, one.early, one.later) == (3, [True, False], [False, True])
    assert (none.solved_at, none.early, none.later) == (None, [False], [])
    assert bench_replay.row("grpo", True, [one, none, one]) == "| grpo with replay | 0.40 | 0.50 | 3, -, 3 | 3 |"
