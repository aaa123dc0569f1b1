"""The loss reads its batch a few times at most: the compiler's own count of bytes, which does not depend on the
machine.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_loss.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True)


def test_the_losses_that_most_runs_use_move_at_most_five_times_their_inputs():
    rows = [json.loads(line) for line in run("--presets", "grpo,dapo,dr_grpo,gspo,cispo,prorl").stdout.splitlines()]
    assert [row["preset"] for row in rows] == ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "prorl"]
    for row in rows:
        assert row["within_goal"] and 1 <= row["passes"] <= row["goal"] == 5.0, row
        assert row["moved_mb"] == pytest.approx(row["passes"] * row["least_mb"], rel=0.01)


def test_an_unknown_preset_is_one_line():
    done = run("--presets", "grppo")
    assert done.returncode == 1 and done.stderr.startswith("bench_loss: no preset 'grppo': there are reinforce, ")
