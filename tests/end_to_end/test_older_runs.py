"""Run directories that f57c779 wrote, the last commit before modules and settings moved: they resume, evaluate, report,
export, and serve as model, judge and first weights.
"""

import json
import tarfile
from pathlib import Path

import pytest
from commands import commands

OLD = Path(__file__).parents[1] / "fixtures" / "older_runs.tar.xz"
KINDS = ("sft", "dpo", "rm", "prm", "rl", "ppo")
JUDGED = """
import dataclasses
from jaxrl_llm.config import Scoring, load_config
from jaxrl_llm.rewards import ModelReward

run = load_config("rl.py")[1]
collect = dataclasses.replace(run.rollout.collect, replay=None)
config = dataclasses.replace(
    run,
    scoring=Scoring((ModelReward("rm"), *run.scoring.rewards)),
    rollout=dataclasses.replace(run.rollout, collect=collect),
)
"""
LINES = [
    *(f"train {kind} --steps 3 --quiet" for kind in KINDS),
    "eval sft",
    "eval rl",
    "report rl sft --out report.html",
    "export dpo --out exported",
    "train rl.py --model sft --run_dir on_sft --steps 1 --quiet",
    "train rl.py --from rl@3 --run_dir after_rl --steps 1 --quiet",
    "train judged.py --run_dir judged --steps 1 --quiet",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("older")
    with tarfile.open(OLD) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.3 and older have none
        archive.extractall(place)
    (place / "judged.py").write_text(JUDGED)
    return place


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(LINES, folder), strict=True))


@pytest.mark.parametrize("line", LINES)
def test_an_older_run_serves(answers, line):
    assert answers[line].code == 0, answers[line].err


@pytest.mark.parametrize("kind", KINDS)
def test_an_older_run_resumes_after_its_last_step(folder, answers, kind):
    rows = [json.loads(line) for line in (folder / kind / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and rows[-1]["event/resumed"]
    assert (folder / kind / "checkpoints" / "3").is_dir()
