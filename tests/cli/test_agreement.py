"""``jaxrl-llm eval CONFIG --pairs FILE``: agreement of judges with labelled pairs, against a real server."""

import json
import math

import pytest
from commands import assert_refused, commands
from rewards.judge_server import endpoint, honest, serving

from jaxrl_llm.cli.agreement import ask_judge, read_pairs
from jaxrl_llm.rewards import Endpoint, Pairwise, Rubric

ROWS = [
    {"prompt": "q1", "chosen": "red 12", "rejected": "blue", "answer": "red"},
    {"prompt": "q2", "chosen": "blue", "rejected": "red 3"},
    {"prompt": "q3", "chosen": "red 1", "rejected": "red too 2"},
    {"prompt": [{"role": "user", "content": "q4"}], "chosen": "red lost 5", "rejected": "none", "answer": 5},
]
CONFIG = """
from jaxrl_llm.config import Run, Scoring
from jaxrl_llm.rewards import Endpoint, Pairwise, Rubric
from jaxrl_llm.tasks import Task

judge = Endpoint("{url}", "judge", retries=0)
config = Run(
    model="tiny-random",
    task=Task([{{"prompt": "1", "answer": "1"}}]),
    scoring=Scoring((Rubric((("red", 1.0),), judge), Pairwise(judge, weight=0.5))),
)
"""


def lossy(body, number):
    """A judge of whom no verdict can be read where the answer is lost."""
    return "lost" if "lost" in body["messages"][1]["content"] else honest(body)


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def test_agreement_counts_ties_as_half_and_leaves_out_what_has_no_score(pairs):
    rows = read_pairs(pairs, 0)
    assert [problem.answer for problem, *_ in rows] == ["red", "", "", "5"] and rows[3][0].prompt[0]["content"] == "q4"
    with serving(lossy) as server:
        found = ask_judge(Rubric((("red", 1.0),), endpoint(server), weight=2.0), rows)
        compared = ask_judge(Pairwise(endpoint(server)), rows)
    assert found.won[:3].tolist() == [1.0, 0.0, 0.5] and math.isnan(found.won[3])
    assert "which is no verdict" in found.failure
    told = found.metrics()
    assert (
        told["pairs"] == 4 and told["scored"] == 3 and told["agreement"] == 0.5 and told["ties"] == pytest.approx(1 / 3)
    )
    assert told["error"] == pytest.approx(0.5 / 3**0.5) and told["unparsed"] == 1 / 8 and told["tokens"] == 110
    assert compared.won[:3].tolist() == [1.0, 0.0, 0.5] and compared.metrics()["unparsed"] == 1 / 4


REFUSED = {
    "eval quickstart --pairs pairs.jsonl": "quickstart has no judge",
    "eval judged.py --pairs none.jsonl": "none.jsonl not found",
    "eval judged.py --pairs bad.jsonl": "bad.jsonl:1: ",
    "eval judged.py --pairs empty.jsonl": "empty.jsonl has no pairs",
    "eval judged.py --pairs pairs.jsonl --limit -1": "--limit must be at least 0",
}
LINES = ["eval judged.py --pairs pairs.jsonl --json", "eval judged.py --pairs pairs.jsonl --limit 2",
         "eval gone.py --pairs pairs.jsonl"]  # fmt: skip


def test_the_command_reports_each_judge_of_a_configuration(pairs, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "q", "chosen": "a"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "gone.py").write_text(CONFIG.format(url="http://127.0.0.1:9/v1"))
    with serving(lossy) as server:
        (tmp_path / "judged.py").write_text(CONFIG.format(url=endpoint(server).url))
        table, some, gone, *refused = commands([*LINES, *REFUSED], tmp_path)
    found = json.loads(table.out)
    assert (
        found["rubric"]["agreement"] == found["preferred"]["agreement"] == 0.5 and found["preferred"]["disagreed"] == 0
    )
    assert some.out.splitlines()[0] == "rubric on pairs.jsonl:" and some.out.splitlines()[1].split() == ["pairs", "2"]
    assert gone.code == 0 and "cannot be reached" in gone.err and "agreement   unknown" in gone.out
    for answer, words in zip(refused, REFUSED.values(), strict=True):
        assert_refused(answer, words)


def test_an_endpoint_is_a_value():
    assert Endpoint("a", "b", options={"x": 1}) == Endpoint("a", "b", options=(("x", 1),))
