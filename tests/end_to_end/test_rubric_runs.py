"""Runs that a judge behind an endpoint scores: resumed from its kept verdicts, refused without a judge."""

import json
from pathlib import Path

import pytest
from commands import commands, rows_but_for_the_clock
from rewards.judge_server import endpoint, serving

from jaxrl_llm.config import read, whole

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[1] / "fixtures" / "runs" / "rubric.py"
KEY = "sk-of-the-judge-0123"
LINES = {
    "whole": f"train {CONFIG} --run_dir whole",
    "half": f"train {CONFIG} --run_dir halves --steps 1",
    "resumed": f"train {CONFIG} --run_dir halves --steps 2",
    "nobody": f"train {CONFIG} --run_dir nobody --scoring.rewards.0.judge.url http://127.0.0.1:9/v1",
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The folder, what the commands said, and the requests to the judge, which is elsewhere for a resumed run."""
    folder = tmp_path_factory.mktemp("rubrics")
    whole, half, resumed, nobody = LINES.values()
    with serving() as first, serving() as second:
        answers = commands([whole, half], folder, JUDGE_URL=endpoint(first).url, JUDGE_KEY=KEY)
        answers += commands([resumed, nobody], folder, JUDGE_URL=endpoint(second).url, JUDGE_KEY=KEY)
        return folder, dict(zip(LINES, answers, strict=True)), first.asked, second.asked


def test_a_judge_scores_a_run_and_what_it_costs_is_counted(ran):
    folder, answers, asked, _ = ran
    assert answers["whole"].code == 0, answers["whole"].err
    rows = [json.loads(line) for line in (folder / "whole/metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    assert {headers["Authorization"] for _, headers, _ in asked} == {f"Bearer {KEY}"} and len(asked) > 16
    assert last["step"] == 2 and last["reward/errors"] == 0 and last["reward/rubric/unparsed"] == 0
    items = [last[f"reward/rubric/item_{at}"] for at in (1, 2, 3)]
    assert last["reward/rubric"] == pytest.approx((items[0] + 2 * items[1] - items[2]) / 3)
    assert last["reward/mean"] == pytest.approx(last["reward/rubric"] + last["reward/preferred"] / 2)
    assert rows[1]["reward/preferred/tokens"] > 110 and rows[1]["reward/rubric/cost"] > 0
    assert 0 <= last["eval/rows/win_rate"] <= 1


def test_a_resumed_run_pays_for_no_verdict_twice_and_is_the_same(ran):
    folder, answers, _, again = ran
    assert answers["half"].code == answers["resumed"].code == 0, answers["resumed"].err
    assert again == [], "a verdict was asked for again"
    paid = ("/cached", "/tokens", "/cost")
    one, other = (
        [
            {name: x for name, x in row.items() if not name.endswith(paid)}
            for row in rows_but_for_the_clock(folder / name)
        ]
        for name in ("whole", "halves")
    )
    assert one == other
    assert rows_but_for_the_clock(folder / "halves")[-1]["reward/rubric/cached"] == 1


def test_a_judge_that_is_not_there_is_refused_and_its_key_is_nowhere(ran):
    folder, answers, *_ = ran
    said = "rubric: EndpointError: http://127.0.0.1:9/v1/chat/completions cannot be reached"
    assert answers["nobody"].code == 2 and said in answers["nobody"].err.splitlines()[-1]
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10 and not [path for path in files if KEY.encode() in path.read_bytes()]
    assert not [answer for answer in answers.values() if KEY in answer.out + answer.err]
    assert whole(read(folder / "whole/config.json").run).scoring.rewards[0].judge.key_env == "JUDGE_KEY"
