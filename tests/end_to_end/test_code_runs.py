"""Rewards by tests of programs in whole runs: the sandbox's level is reported and saved, bad rows are refused."""

import json
from pathlib import Path

import pytest
from commands import commands

from jaxrl_llm.rewards.sandbox import level

pytestmark = [pytest.mark.slow, pytest.mark.sandbox("landlock+seccomp")]

CONFIG = Path(__file__).parents[1] / "fixtures" / "runs" / "coded.py"
ADDS = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7"]}
ROWS = [{"prompt": f"Add {number}.", "answer": "", "tests": ADDS} for number in range(16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("coded")
    for name, tests in (("programs", ADDS), ("unknown", "words"), ("without", None)):
        rows = [*ROWS, {"prompt": "Add.", "answer": "", "tests": tests}]
        (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return made


@pytest.fixture(scope="module")
def answers(folder):
    lines = [f"train {CONFIG} --run_dir trained --steps 1"]
    lines += [f"train {CONFIG} --run_dir {name} --task.source.path {name}.jsonl" for name in ("unknown", "without")]
    return commands(lines, folder)


def test_a_run_reports_and_saves_the_level_of_its_sandbox(folder, answers):
    assert answers[0].code == 0, answers[0].err
    assert f"programs run in the sandbox, level {level()}" in answers[0].out + answers[0].err
    assert json.loads((folder / "trained/sandbox.json").read_text()) == {"level": level()}
    row = json.loads((folder / "trained/metrics.jsonl").read_text().splitlines()[-1])
    assert row["reward/mean"] == 0 and row["reward/errors"] == 0


def test_a_row_with_tests_of_no_known_form_is_refused_before_anything_compiles(folder, answers):
    for answer, reason in zip(answers[1:], ("column tests: 'words' holds no test", "has no tests"), strict=True):
        assert answer.code == 2
        assert "17" in answer.err.splitlines()[-1] and reason in answer.err.splitlines()[-1]
