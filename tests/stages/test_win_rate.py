"""Answers against those of the first policy."""

import dataclasses
import json

import numpy as np
import pytest
from rewards.judge_server import endpoint, serving

from jaxrl_llm.config import JUDGED, Evaluation, Run
from jaxrl_llm.rewards import Accuracy, ModelReward, Pairwise, Scorer
from jaxrl_llm.rollout.evaluate import TaskEvaluation
from jaxrl_llm.sharding.distributed import ALONE
from jaxrl_llm.stages.ingredients import FIRST_ANSWERS, WinRate
from jaxrl_llm.tasks import Task
from jaxrl_llm.types import Completion, Problem

PROBLEMS = tuple(Problem(str(i), ({"role": "user", "content": f"{i}?"},), "3", "sums") for i in range(3))
JUDGE = ModelReward("a judge")
seen = []


def longer(items):
    """Judges by length, as a model on the devices would; what begins with a question mark cannot be judged."""
    seen.extend((problem.id, one.text, one.tokens.tolist(), one.finish_reason) for problem, one in items)
    return np.array([np.nan if one.text.startswith("?") else len(one.text) for _, one in items])


def answer(text, extra=0):
    tokens = np.array([*map(ord, text), extra], np.int32)
    size = len(tokens)
    return Completion(
        tokens, np.full(size, -0.5, np.float32), "length", np.ones(size, bool), np.full(size, 7, np.int32), text=text
    )


def evaluated(*texts, problems=PROBLEMS, extra=0):
    """An evaluation with these answers, a row for each problem."""
    rows = tuple(tuple(answer(text, extra) for text in row) for row in texts)
    return TaskEvaluation("sums", problems, rows, np.zeros((len(texts), len(texts[0])), bool), np.zeros(len(texts)))


def judged(contest, found):
    return contest.compared(tuple(found), False)


@pytest.fixture
def contest(tmp_path):
    seen.clear()
    with Scorer((Accuracy(),), on_request={JUDGED: JUDGE}, folder=tmp_path) as scorer:
        scorer.models = {JUDGE: longer}
        yield WinRate(tmp_path / FIRST_ANSWERS, scorer, ALONE, lambda problem: f"{problem.id} at 1")


def test_better_answers_win_and_equal_ones_share(contest):
    contest.begin([evaluated(["abc", "ab"], ["abc", ""], ["abc", "x"])])
    (found,) = judged(contest, [evaluated(["abcd", "a"], ["xyz", "?"], ["abc", "yy"])])
    np.testing.assert_array_equal(found.won, [[1.0, 0.0], [0.5, np.nan], [0.5, 1.0]])
    assert found.metrics()["eval/sums/win_rate"] == 3 / 5, "what cannot be judged is left out"
    assert ("0", "abc", [97, 98, 99, 0], "length") in seen and ("0", "abcd", [97, 98, 99, 100, 0], "length") in seen
    assert not [one for one in seen if one[0] == "2" and one[1] == "abc"], "nobody is asked about the same answer"


def test_answers_of_the_same_words_in_other_tokens_are_judged(contest):
    contest.begin([evaluated(["a"], ["b"], ["c"])])
    assert judged(contest, [evaluated(["a"], ["b"], ["c"], extra=1)])[0].won.tolist() == [[0.5]] * 3 and len(seen) == 6


def test_only_answers_to_the_same_problems_are_compared(contest):
    contest.begin([evaluated(["aaa"], ["bbb"], problems=PROBLEMS[:2])])
    (found,) = judged(contest, [evaluated(["a", "a"], ["cccc", "c"], problems=PROBLEMS[1:])])
    np.testing.assert_array_equal(found.won, [[0.0, np.nan], [np.nan, np.nan]])
    assert found.metrics()["eval/sums/win_rate"] == 0.0


def test_answers_to_other_prompts_or_of_another_sampling_are_not_compared(contest):
    contest.begin([evaluated(["abc"], ["abc"], ["abc"])])
    cooler = dataclasses.replace(contest, made_from=lambda problem: f"{problem.id} at {int(problem.id != '1')}")
    np.testing.assert_array_equal(judged(cooler, [evaluated(["a"], ["a"], ["a"])])[0].won, [[0], [np.nan], [0]])


def test_the_answers_of_an_attempt_before_give_way(contest):
    contest.begin([evaluated(["aaa"], ["b"], ["c"])])
    contest.begin([evaluated(["a"], ["b"], ["c"])])
    kept = [json.loads(line) for line in contest.path.read_text().splitlines()]
    assert [row["completion"] for row in kept] == ["a", "b", "c"] and kept[0]["tokens"] == [97, 0]
    assert judged(contest, [evaluated(["aa"], ["b"], ["c"])])[0].won.tolist() == [[1.0], [0.5], [0.5]]


def test_without_the_file_nobody_wins(contest):
    metrics = judged(contest, [evaluated(["a"], ["b"], ["c"])])[0].metrics()
    assert np.isnan(metrics["eval/sums/win_rate"]) and not seen


def test_nothing_is_told_without_a_judge():
    assert not [name for name in evaluated(["a"], ["b"], ["c"]).metrics() if "win" in name or "refus" in name]


def test_a_pairwise_judge_sees_both_answers(tmp_path):
    with serving() as server:
        judge = Pairwise(endpoint(server))
        with Scorer((Accuracy(),), on_request={JUDGED: judge}, folder=tmp_path) as scorer:
            contest = WinRate(tmp_path / FIRST_ANSWERS, scorer, ALONE, lambda problem: problem.id, pairwise=True)
            contest.begin([evaluated(["12", ""], ["1", "3"], ["2", "x"])])
            (found,) = judged(contest, [evaluated(["123", "4"], ["5", "y"], ["2", "x"])])
        np.testing.assert_array_equal(found.won, [[1.0, 1.0], [0.5, 0.0], [0.5, 0.5]])
        assert len(server.asked) == 2 * 4, "nobody is asked about the same answer"
    run = Run("a", Task([{"prompt": "1", "answer": "1"}]), evaluation=Evaluation(judge=judge))
    assert WinRate.of(run).pairwise
    assert not WinRate.of(dataclasses.replace(run, evaluation=Evaluation(judge=JUDGE))).pairwise
