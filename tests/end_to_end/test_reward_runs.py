"""Rewards of one's own in whole runs: refused before anything is compiled, counted, stopped where all calls fail."""

import json
from pathlib import Path

import pytest
from commands import assert_refused, commands

from jaxrl_llm.config import read, whole
from jaxrl_llm.rewards import Function
from jaxrl_llm.rewards.functions import Lost

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[1] / "fixtures" / "runs" / "rewarded.py"
LINES = {
    "refused": f"train {CONFIG} --run_dir refused --scoring.rewards.1.path my_rewards:broken",
    "fails": f"train {CONFIG} --run_dir fails",
    "elsewhere": "train fails/config.json --run_dir elsewhere",
}
MY_REWARDS = """def length(problem, completion, row):
    return len(completion.tokens) + 0 * len(row)


def broken(problem, completion):
    return 1 / 0
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("rewards")
    (made / "my_rewards.py").write_text(MY_REWARDS)
    return made


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def test_a_reward_that_raises_ends_the_run_before_it_begins_and_says_where(folder, answers):
    line = "jaxrl-llm: my_rewards.py:6: ZeroDivisionError: division by zero (traceback in refused/reward_error.txt)"
    assert answers["refused"].code == 2 and answers["refused"].err.splitlines()[-1] == line
    assert "Traceback" not in answers["refused"].err
    text = (folder / "refused/reward_error.txt").read_text()
    assert "Traceback" in text and "return 1 / 0" in text
    assert [path.name for path in (folder / "refused").iterdir()] == ["reward_error.txt"], "nothing is half-written"


def test_a_step_in_which_all_calls_of_a_reward_fail_stops_the_run(folder, answers):
    answer = answers["fails"]
    assert answer.code == 3, answer.err
    rows = [json.loads(line) for line in (folder / "fails/metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    assert [row["step"] for row in rows] == [0, 1, 2] and "reward/judged/failed_fraction" not in rows[1]
    assert last["reward/judged/failed_fraction"] == 1 and "reward/length/failed_fraction" not in last
    assert last["reward/errors"] == 16 and rows[1]["reward/errors"] == 0
    number = CONFIG.read_text().splitlines().index('        raise ConnectionError("the judge is gone")') + 1
    line = f"{CONFIG}:{number}: ConnectionError: the judge is gone (traceback in fails/reward_error.txt)"
    assert last["event/reward_failed"] == line and answer.err.splitlines()[-1].endswith(line)
    assert "the judge is gone" in (folder / "fails/reward_error.txt").read_text()


def test_rewards_are_called_for_what_is_learned_from_only(folder, answers):
    counts = [int(line) for line in (folder / "scored.txt").read_text().split()]
    # A rehearsal of each run, and one step; the evaluation before it asks the verifier alone.
    assert counts[:2] == [1, 1] and sum(counts[2:]) == 16


def test_a_configuration_that_cannot_hold_its_reward_loads_and_says_so_where_it_is_to_be_called(folder, answers):
    reason = "it belongs to a file that was run, not imported"
    assert whole(read(folder / "fails/config.json").run).scoring.rewards == (
        Lost("judged", 1.0, reason),
        Function("my_rewards:length", 0.0),
    )
    assert_refused(
        answers["elsewhere"], f"reward judged is not in config.json, since {reason}: train from the Python file"
    )
