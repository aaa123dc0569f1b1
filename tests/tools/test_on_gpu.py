"""The command that checks a GPU, rehearsed on the CPU with shapes of a laptop."""

import json
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import on_gpu  # noqa: E402
from commands import environment  # noqa: E402

pytestmark = pytest.mark.slow


def on_cpu(folder, *flags, **changes):
    """The command's exit code, its results and its table."""
    command = [sys.executable, str(TOOLS / "on_gpu.py"), "--small", "--out", str(folder), *flags]
    # What stands for cuDNN's kernel is JAX's, which mixes types in bfloat16.
    changes = {"JAX_NUMPY_DTYPE_PROMOTION": "standard"} | changes
    done = subprocess.run(command, env=environment(**changes), capture_output=True, text=True, check=False)
    results = json.loads((folder / "results.json").read_text())
    assert (folder / "table.md").read_text() in done.stdout
    return done.returncode, results, done.stdout


def test_checks_are_run_recorded_and_shown(tmp_path):
    code, results, shown = on_cpu(tmp_path / "on_gpu", "--only", "device,attention,decode_0.5b")
    assert code == 0 and [row["ok"] for row in results.values()] == [True] * 3, results
    assert results["device"]["device"] == results["device"]["platform"] == "cpu"
    assert results["device"]["jax"] == version("jax") and results["device"]["jaxlib"] == version("jaxlib")
    assert 0 < results["attention"]["logp"] < 0.1 and results["attention"]["attention"] == "triton"
    assert 0 < results["attention"]["decoded"] <= 1.5 * results["attention"]["plain_decoded"] < 0.1
    assert 0 < results["decode_0.5b"]["mbu"] < 1
    assert "| decode_0.5b | right: " in shown and "mbu 0.5: **missed**" in shown


def test_updates_are_rehearsed_by_the_notebook():
    notebook = json.loads((TOOLS.parent / "notebooks" / "accelerator_check.ipynb").read_text())
    tables = [output["data"] for cell in notebook["cells"] for output in cell.get("outputs", []) if "data" in output]
    (table,) = ["".join(data["text/markdown"]) for data in tables if "text/markdown" in data]
    assert re.search(r"\| device \| right: device cpu.*\n\| update_0.5b \| right: .*mfu 0\.\d+", table)


def test_a_goal_is_met_or_missed():
    results = {"update_1.5b": {"mfu": 0.39, "ok": True}, "decode_1.5b": {"mbu": 0.5, "ok": False}}
    first, second = on_gpu.table(results).splitlines()[2:]
    assert first == "| update_1.5b | right: mfu 0.39 | mfu 0.4: **missed** |"
    assert second == "| decode_1.5b | **WRONG**: mbu 0.5 | mbu 0.5: met |"


def test_what_fails_and_what_there_is_no_time_for_is_said(tmp_path):
    code, results, shown = on_cpu(tmp_path / "failing", "--only", "device", JAX_PLATFORMS="abacus")
    assert code == 1 and results["device"]["failed"].startswith("exit code 1: ") and "abacus" in shown
    code, results, _ = on_cpu(tmp_path / "late", "--minutes", "-1", "--only", "device,resume")
    assert code == 0 and {row["missing"] for row in results.values()} == {"no time was left"}


def test_a_run_that_learns_nothing_or_samples_otherwise_is_wrong():
    def rows(last, gap):
        row = {"step": 1, "reward/mean": 0.3, "sampler/logp_abs_diff_mean": gap, "time/step_s": 2.0}
        return [{"step": 0}, row, row | {"step": 2, "reward/mean": last}]

    def stale(first):
        return [{"step": 0}, rows(0.9, first)[1], rows(0.9, 0.4)[2]]

    assert on_gpu.learned(rows(0.9, 0.001))["ok"]
    assert not on_gpu.learned(rows(0.3, 0.001))["ok"] and not on_gpu.learned(rows(0.9, 0.1))["ok"]
    assert on_gpu.learned(stale(0.001), staleness=1)["ok"] and not on_gpu.learned(stale(0.1), staleness=1)["ok"]
