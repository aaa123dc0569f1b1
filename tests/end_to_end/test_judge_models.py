"""Judges on the run's own devices: greedy answers, rewards from them, runs that resume, agreement with pairs."""

import functools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from commands import assert_refused, commands
from learner.rollouts import one_device
from rewards.judge_server import honest
from rewards.test_rubric import ITEMS, item

from jaxrl_llm.config import load_config
from jaxrl_llm.errors import InputError
from jaxrl_llm.models import load_pretrained, logits, save_pretrained
from jaxrl_llm.rewards import JudgeModel, Pairwise, Rubric, Scorer
from jaxrl_llm.rewards.endpoint import JudgeAnswer
from jaxrl_llm.rewards.shaping import check_reward
from jaxrl_llm.stages.judges import judge_completions, load_judge_model
from jaxrl_llm.tasks.template import render_chat
from jaxrl_llm.types import Message

pytestmark = pytest.mark.slow

SMOKE = load_config("smoke")[1]
DIGITS = Path(__file__).parents[1] / "fixtures" / "runs" / "digits.jsonl"
JUDGE = JudgeModel("tiny-random", slots=2, max_prompt_tokens=120, max_new_tokens=5)
RUN = """
import dataclasses
from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.config import *
from jaxrl_llm.learner import Learner, Optimiser
from jaxrl_llm.recipes import Recipe
from jaxrl_llm.rewards import *
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.data import *
from jaxrl_llm.tasks import *
from jaxrl_llm.rewards import rubric
# a random judge writes no verdict: here any reply is one
rubric.parse_verdicts = lambda text, code, count: (sum(map(ord, text)) % 2 == 1,) * count
rubric.parse_comparison = lambda text, code: "AB"[sum(map(ord, text)) % 2]
judge = JudgeModel("judge", slots=4, max_prompt_tokens=1000, max_new_tokens=8)
config = Run(
    "tiny-random", Task(Table("digits.jsonl"), template="chatml"),
    scoring=Scoring((Rubric((("right", 1.0),), judge),)),
    recipe=Recipe("own", dataclasses.replace(PRESETS["grpo"], kl_coef=0.0)),
    rollout=Rollout(prompts=2, group=2, max_prompt_tokens=32, max_new_tokens=8,
                    engine=EngineOptions(slots=16, chunk=8)),
    learner=Learner(Optimiser(learning_rate=2e-3)),
    evaluation=Evaluation(limit=2, judge=Pairwise(judge), task=Task(Table("digits.jsonl"), template="chatml")),
    output=Output(checkpoint_every=1, trackers=()), steps=2,
)
"""
LINES = {  # one after the other in one process, in which judged.py stays as it is
    "unread": "train unread.py --run_dir unread",
    "pairs": "eval unread.py --pairs pairs.jsonl --json",
    "whole": "train judged.py --run_dir whole",
    "half": "train judged.py --run_dir broken --steps 1",
    "rest": "train judged.py --run_dir broken",
    "plan": "plan judged.py --topology v5e:2x2 --quick",
}
OWN = "train unread.py --run_dir refused --scoring.rewards.0"
REFUSED = {
    f"{OWN}.judge.model nowhere": ["reward rubric: judge.model: no such model: nowhere"],
    f"{OWN}.judge.slots 0": ["Rubric.judge.slots must be at least 1"],
    f"{OWN}.judge.max_new_tokens 100": ["judge was made for 1024 positions", "are 1100: lower them"],
    f"{OWN}.column none": ["column 'none' holds no list of items for rubric"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("judge_models")
    (made / "judged.py").write_text(RUN)
    (made / "unread.py").write_text("\n".join(line for line in RUN.splitlines() if not line.startswith("rubric.")))
    save_pretrained(*load_pretrained("tiny-random"), made / "judge")
    (made / "digits.jsonl").write_bytes(DIGITS.read_bytes())
    pairs = [{"prompt": f"1+{n}=", "chosen": str(n + 1), "rejected": "0", "answer": str(n + 1)} for n in range(2)]
    (made / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    return made


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip((*LINES, *REFUSED), commands([*LINES.values(), *REFUSED], folder), strict=True))


def chat(*texts: str) -> list[Message]:
    return [{"role": role, "content": text} for role, text in zip(("system", "user"), texts, strict=True)]


def test_an_answer_is_the_most_likely_text_whoever_is_asked_beside():
    """The loop takes the most likely token of whole rows, one after the other."""
    judge = load_judge_model(JUDGE, SMOKE, "reward rubric", one_device(), lambda text: None)
    model, tokenizer = load_pretrained("tiny-random")
    first, second = chat("judge", "is it red?"), chat("be strict", "a?")
    found = judge.ask([first, second, first, chat("long", "x" * 200)])
    for place, asked in ((0, first), (1, second)):
        row = judge.prompt(asked).tolist()
        assert tokenizer.decode(row) == render_chat(asked, JUDGE, tokenizer)
        start = len(row)
        while len(row) < start + 5 and row[-1:] != [model.config.tokens.eos[0]]:
            padded = np.int32([row + [0] * (126 - len(row))])
            row.append(int(np.argmax(logits(model, padded)[0, len(row) - 1])))
        text = tokenizer.decode(row[start:], skip_special_tokens=True)
        assert found[place] == JudgeAnswer(text, float(start), float(len(row) - start))
    assert found[2] == JudgeAnswer(found[0].text, cached=True)
    assert str(found[3]).endswith("and the judge reads 120: raise judge.max_prompt_tokens")
    assert judge.ask([second]) == [found[1]], "with nobody beside it"


class Honest:
    """A judge that answers by the rules of the test server."""

    @staticmethod
    def ask(chats):
        return [JudgeAnswer(honest({"messages": one})) for one in chats]


def test_rewards_score_what_a_judge_on_the_devices_says():
    """The two of unequal length: a row's items count with the rubric's own."""
    rubric, pairs = Rubric(ITEMS, JUDGE, column="wanted"), Pairwise(JUDGE)
    items = [item("red warm"), item("blue 12"), item("rude")]
    for (problem, _), wanted in zip(items, (["warm"], [["12", 3]], [{"criterion": "kind", "points": -2}]), strict=True):
        problem.metadata["wanted"] = wanted
    with Scorer((rubric, pairs)) as scorer:
        scorer.models = {one: functools.partial(judge_completions, one, Honest) for one in (rubric, pairs)}
        scorer.dry_run(items[0][0], load_pretrained("tiny-random")[1])  # asks nobody
        assert scorer.check([problem for problem, _ in items]) == []
        found = scorer.score(items)
        refused = item("x")[0]
        with pytest.raises(InputError, match="column 'wanted' holds no list of items for rubric"):
            scorer.check([refused])
        too_long = functools.partial(judge_completions, rubric, LongAgo)
        scorer.models |= {rubric: too_long}
        lost = scorer.score(items)
    assert found.parts["rubric"].tolist() == [3 / 4, 4 / 6, -1 / 3]
    assert found.parts["rubric/item_1"].tolist() == [1, 0, 0] and found.parts["preferred"].tolist() == [0, 1, 0]
    assert np.isnan(lost.reward).all() and lost.failures.errors == 3 and "no answer" in lost.failures.message


class LongAgo:
    """A judge that answers nothing."""

    @staticmethod
    def ask(chats):
        return [ValueError("no answer")] * len(chats)


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        (Rubric(ITEMS, JudgeModel("")), "Rubric.judge.model is empty: give a run, a directory, or a hub id"),
        (Rubric(ITEMS, JudgeModel("a", date="today")), "Rubric.judge.date 'today' is not a date"),
        (Rubric((("a", 0),), JUDGE, column="b"), "Rubric.items has the weight 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(reward, words):
    with pytest.raises(InputError, match=words):
        check_reward(reward)


def rows(folder, name):
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]


def test_a_stopped_run_resumes_to_the_same_answers(folder, answers):
    assert all(answers[name].code == 0 for name in ("whole", "half", "rest")), answers["rest"].err
    names = ("reward/rubric/tokens", "reward/rubric/unparsed", "loss")
    whole, broken = ([[row.get(name) for name in names] for row in rows(folder, run)] for run in ("whole", "broken"))
    assert whole[1:] == broken[1:] and all(row[0] > 500 and row[1] == 0 for row in whole[1:])
    assert rows(folder, "whole")[-1]["eval/digits/win_rate"] == rows(folder, "broken")[-1]["eval/digits/win_rate"]
    assert "judge" in json.loads((folder / "whole" / "config.json").read_text())["origin"]["models"]


def test_a_judge_whose_replies_nobody_can_read_is_refused_with_its_reply(folder, answers):
    assert_refused(answers["unread"], "the judge replied", 'which is no verdict: wanted {"code"')
    assert "which is no verdict" in (folder / "unread" / "reward_error.txt").read_text()


def test_agreement_is_measured_as_of_an_endpoint(answers):
    assert answers["pairs"].code == 0, answers["pairs"].err
    found = json.loads(answers["pairs"].out)["rubric"]
    assert (found["pairs"], found["scored"], found["agreement"], found["unparsed"]) == (2, 0, None, 1.0)
    assert not math.isnan(found["tokens"]) and json.loads(answers["pairs"].out)["preferred"]["pairs"] == 2


def test_the_plan_counts_the_judge(answers):
    assert answers["plan"].code == 0 and "judge model 1" in answers["plan"].out, answers["plan"].err


def test_what_cannot_judge_is_refused(answers):
    for line, words in REFUSED.items():
        assert_refused(answers[line], *words)
