"""Runs that are killed, preempted, and hindered by disks, files and clocks end as if nothing had happened."""

import json
import os
import subprocess
import sys

import pytest
from campaigns.extent import PATIENCE_S, SEED, TIMES
from campaigns.faults import STOPPED
from commands import ROOT

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(PATIENCE_S)]
CONFIGS = (
    "phased",
    "ahead",
    "hardest",
    "guarded",
    "pairs",
    "several",
    "branches",
    "loops",
    "mixed",
    "raced",
    *["dynamic"] * (TIMES > 1),
)
"""All of ``dynamic`` is in ``hardest`` too."""
KILLS = 2
"""Of each configuration; of those of ``STOPPED``, stops within a step."""
OWN_MOUNTS = ["unshare", "--map-root-user", "--mount"]


def mounts():
    """Whether a mount namespace can be had, and so full disks and read-only folders."""
    try:
        return subprocess.run([*OWN_MOUNTS, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_under_faults_equals_an_undisturbed_one_bit_for_bit(name, tmp_path):
    first = SEED + CONFIGS.index(name)  # each configuration begins with other faults
    config = ROOT / "tests" / "campaigns" / "configs" / f"{name}.py"
    inside = OWN_MOUNTS if mounts() else []
    command = [*inside, sys.executable, "-m", "campaigns.faults", str(config), str(tmp_path), str(first)]
    own = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "FAULT_MOUNTS": "own" if inside else ""}
    done = subprocess.run(
        [*command, str(KILLS * TIMES)], env=os.environ | own, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    passes = [json.loads(line) for line in done.stdout.splitlines()]
    hits = [hit for one in passes for hit in one["hits"]]
    print(*(f"{hit['kind']} after {hit['step']} ({hit['doing']})" for hit in hits), sep="; ")
    assert [one["wrong"] for one in passes] == [""] * len(passes)
    counted = sum(hit["within" if name in STOPPED else "counts"] for hit in hits)
    assert counted >= KILLS * TIMES, "kills that the run resumed from above step 0, or stops within steps"
