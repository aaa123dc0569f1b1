"""Runs of several tasks, through the command line: shares, limits, rewards and tests of each, and resuming."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from commands import commands
from commands import rows_but_for_the_clock as rows

from jaxrl_llm.config import (
    Evaluation,
    Mixture,
    Part,
    from_json,
    load_config,
    notes,
    resolved,
    rewards,
    to_json,
    validate,
)
from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import DAPO
from jaxrl_llm.rewards import Accuracy, Format, LengthPenalty
from jaxrl_llm.tasks import Table, Task

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "tests" / "fixtures" / "runs" / "mixed.py"
LINES = {
    "whole": f"train {CONFIG} --run_dir whole",
    "half": f"train {CONFIG} --run_dir half --steps 2",
    "rest": f"train {CONFIG} --run_dir half",
    "eval": "eval whole --json --out answers.jsonl",
    "table": "eval whole --limit 1",
    "less": "eval whole --json --max_new_tokens 3 --limit 2",
    "rerank": "eval whole --rerank tiny-random --samples 2 --temperature 1",
    "collect": "collect whole --out rows.jsonl",
}
TASKS = ("digits", "letters", "one")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mixed")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def host(folder, step):
    return json.loads((folder / "checkpoints" / str(step) / "host" / "metadata").read_text())


def test_prompts_have_their_exact_shares(folder, answers):
    assert answers["whole"].code == 0, answers["whole"].err
    assert "prompts of each task: digits 50 % (8 problems), letters 25 % (7 problems), one 25 %" in answers["whole"].err
    asked = host(folder / "whole", 4)["carry"]["$Carryover"]["stream_memory"]["asked"]
    total = sum(asked.values())
    assert total == rows(folder / "whole")[-1]["prompts"] > 12
    for task, share in zip(TASKS, (0.5, 0.25, 0.25), strict=True):
        assert abs(asked[task] - share * total) < 1


def test_each_task_has_metrics_of_its_own(folder, answers):
    for row in rows(folder / "whole")[1:]:
        assert sum(row[f"task/{task}/groups"] for task in TASKS) == row["completions"] / 4
        # what has no format, no length penalty or no verifier of its own is not counted in their means
        assert -0.0501 <= row["reward/length_penalty/letters"] <= -0.0099
        assert row["task/letters/mean_length"] <= 5
        assert 0 <= row["task/digits/reward"] <= 1
    assert any(row["task/digits/mean_length"] > 5 for row in rows(folder / "whole")[1:])


def test_the_test_is_by_task_and_on_average(folder, answers):
    row = rows(folder / "whole")[-1]
    assert row["eval/average/pass@1"] == row["eval/digits/pass@1"], "letters verifies nothing"
    assert row["eval/average/reward"] == row["eval/letters/reward"]
    lengths = [row[f"eval/{task}/mean_length"] for task in TASKS[:2]]
    assert row["eval/average/mean_length"] == pytest.approx(sum(lengths) / 2)
    assert (row["eval/digits/problems"], row["eval/letters/problems"]) == (2, 3)
    assert "eval/one/problems" not in row, "nothing of it is held out"
    assert row["eval/letters/mean_length"] <= 5
    assert next(name for name in row if name.startswith("eval/")).startswith("eval/average/")


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(folder, answers):
    assert (answers["half"].code, answers["rest"].code) == (0, 0)
    assert rows(folder / "half") == rows(folder / "whole")
    assert host(folder / "half", 4) == host(folder / "whole", 4)


def test_eval_asks_each_task_with_its_template_and_limit(folder, answers):
    found = json.loads(answers["eval"].out)
    row = rows(folder / "whole")[-1]
    for name in ("eval/digits/pass@1", "eval/letters/reward", "eval/average/reward", "eval/letters/mean_length"):
        assert found[name] == pytest.approx(row[name]), name
    written = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert [row["task"] for row in written] == ["digits"] * 2 + ["letters"] * 3
    assert all(row["tokens"] <= 5 for row in written if row["task"] == "letters")
    less = json.loads(answers["less"].out)
    assert less["eval/digits/mean_length"] <= 3 and less["eval/letters/problems"] == 2
    table = answers["table"].out
    assert "on digits: 1 problems" in table and "on letters: 1 problems" in table


def test_what_takes_one_task_says_so(answers):
    for name in ("rerank", "collect"):
        assert answers[name].code == 2
        assert re.search(r"one task|answers to one task", answers[name].err), answers[name].err
        assert "--config" in answers[name].err


def mixture(*parts, **changes):
    """A resolved run of these parts."""
    run = load_config(str(CONFIG))[1]
    return resolved(dataclasses.replace(run, **({"task": Mixture(parts)} | changes)))


ROWS = [{"prompt": "?", "answer": "1"}, {"prompt": "!", "answer": "2"}]


def named(name, **fields):
    return Task(ROWS, name=name, **fields)


WRONG = {
    "parts is empty": mixture(evaluation=Evaluation()),
    "task has a task called 'average'": mixture(Part(named("a")), Part(named("average")), evaluation=Evaluation()),
    "two tasks called 'a'": mixture(Part(named("a")), Part(named("a")), evaluation=Evaluation()),
    "parts\\[0\\].weight must be above 0": mixture(Part(named("a"), 0.0), evaluation=Evaluation()),
    "parts\\[1\\].rewards is empty": mixture(Part(named("a")), Part(named("b"), rewards=()), evaluation=Evaluation()),
    "max_new_tokens of b is 9: it must be from 1 to rollout.max_new_tokens 8": mixture(
        Part(named("a")), Part(named("b"), max_new_tokens=9), evaluation=Evaluation()
    ),
    "task.parts\\[1\\].task.verifier none leaves the reward Accuracy nothing": mixture(
        Part(named("a")), Part(named("b", verifier="none"), rewards=(Accuracy(),)), evaluation=Evaluation()
    ),
    "evaluation.every 2 has nothing to test on": mixture(Part(named("a")), Part(named("b"))),
    "extractor": mixture(Part(named("a", extractor="nothing")), evaluation=Evaluation()),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_cannot_work_is_refused(words):
    with pytest.raises(InputError, match=words):
        validate(WRONG[words])


def test_it_is_saved_and_read_again():
    run = dataclasses.replace(load_config(str(CONFIG))[1], evaluation=Evaluation())
    two = dataclasses.replace(run, task=dataclasses.replace(run.task, parts=run.task.parts[:2]))
    assert from_json(json.loads(json.dumps(to_json(two)))) == two
    assert isinstance(two.task.parts[0].task.source, Table)


def test_rewards_that_all_tasks_have_stay_one_reward():
    run = mixture(
        Part(named("a"), rewards=(Format("x"), LengthPenalty(0.1))),
        Part(named("b"), rewards=(LengthPenalty(0.1), Accuracy())),
        evaluation=Evaluation(),
    )
    assert [reward.name for reward in rewards(run)] == ["format/a", "length_penalty", "accuracy/b"]
    alike = mixture(Part(named("a")), Part(named("b"), max_new_tokens=4), evaluation=Evaluation(), recipe=DAPO)
    alike = dataclasses.replace(alike, scoring=dataclasses.replace(alike.scoring, rewards=(Accuracy(),)))
    found = {reward.name: reward for reward in rewards(resolved(alike))}
    assert found["accuracy"] == Accuracy()
    assert found["soft_overlong/a"].of.max_length == 8 and found["soft_overlong/b"].of.max_length == 4


def test_a_filter_reads_rewards_where_one_task_verifies_nothing():
    both = mixture(Part(named("a"), rewards=(Accuracy(),)), Part(named("b")), evaluation=Evaluation())
    assert both.recipe.filter_groups == "reward"
    assert any("no Accuracy among the rewards of b: groups are filtered by reward" in line for line in notes(both))
    right = mixture(Part(named("a"), rewards=(Accuracy(),)), Part(named("b"), rewards=(Accuracy(),)))
    assert right.recipe.filter_groups == "accuracy"
