"""The loss reads its batch a few times at most: the compiler's own count of bytes, which does not depend on the
machine.
"""

import json

import pytest
from commands import tool

pytestmark = pytest.mark.slow


def test_the_losses_that_most_runs_use_move_at_most_five_times_their_inputs():
    rows = [
        json.loads(line)
        for line in tool("bench_loss", "--presets", "grpo,dapo,dr_grpo,gspo,cispo,prorl").out.splitlines()
    ]
    assert [row["preset"] for row in rows] == ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "prorl"]
    for row in rows:
        assert row["within_goal"] and 1 <= row["passes"] <= row["goal"] == 5.0, row
        assert row["moved_mb"] == pytest.approx(row["passes"] * row["least_mb"], rel=0.01)


def test_an_unknown_preset_is_one_line():
    done = tool("bench_loss", "--presets", "grppo")
    assert done.code == 1 and done.err.startswith("bench_loss: no preset 'grppo': there are reinforce, ")
