"""A run without reference answers, and whether it goes on only with the problems, and the date, that it began with."""

import json

import pytest
from commands import forked

from jaxrl_llm.models.pretrained import tiny_tokenizer
from jaxrl_llm.stages.problems import unstopped_notes
from jaxrl_llm.tasks import Task

PROGRAM = """
import contextlib, dataclasses, io, json, pathlib, sys
from jaxrl_llm import train
from jaxrl_llm.cli import run as command
from jaxrl_llm.config import Evaluation, Output, Run, Scoring
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Learner
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rewards import Format
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import Table, Task

rows = [{"prompt": f"Say {n}", "level": n} for n in range(10)]
table, config = pathlib.Path("rows.jsonl"), pathlib.Path("runs/x/config.json")
template = "{{ strftime_now('%d.%m.%Y') }} {{ messages[0]['content'] }}"
run = Run(
    "tiny-random", Task(Table("rows.jsonl"), template=template, holdout=0.4), Scoring((Format(".*[0-9].*"),)), GRPO,
    Rollout(prompts=4, group=4, max_prompt_tokens=32, max_new_tokens=8, engine=EngineOptions(slots=16, chunk=8)),
    Learner(),
    evaluation=Evaluation(limit=4), output=Output(checkpoint_every=1, trackers=()), steps=1,
)
answers = {}


def said(name, call):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = call()
        except InputError as error:
            code = str(error)
    answers[name] = [code, out.getvalue()]


def with_rows(given):
    table.write_text("".join(json.dumps(row) + chr(10) for row in given))


def train_on(steps=2):
    return train(dataclasses.replace(run, steps=steps), "x")


with_rows(rows)
long = dataclasses.replace(run.rollout, max_new_tokens=1000)
said("too long", lambda: train(dataclasses.replace(run, rollout=long), "y"))
said("train", lambda: train(run, "x"))
config.write_text(config.read_text().replace(json.loads(config.read_text())["task"]["date"], "2001-02-03"))
with_rows(rows[:-1])
said("cut", train_on)
with_rows([*rows[:-1], {"prompt": "Say 9", "level": 0}])
said("edited", train_on)
with_rows(rows[::-1])
said("turned", train_on)
with_rows(rows)
said("again", train_on)
run = dataclasses.replace(run, task=dataclasses.replace(run.task, date="2001-02-04"))
said("other date", lambda: train_on(3))
said("eval", lambda: command(["eval", "runs/x", "--json"]))
said("eval table", lambda: command(["eval", "runs/x"]))
said("eval too long", lambda: command(["eval", "runs/x", "--max_new_tokens", "1020"]))
said("eval by the verifier", lambda: command(["eval", "runs/x", "--config", "quickstart", "--task.verifier", "none"]))
print(json.dumps(answers))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("problems")


@pytest.fixture(scope="module")
def answers(folder):
    done = forked(PROGRAM, "", folder)
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_without_answers_is_tested_by_its_reward(folder, answers):
    assert answers["train"][0] == answers["again"][0] == 0, answers
    metrics = rows(folder / "runs/x/metrics.jsonl")
    tested = [row["eval/rows/reward"] for row in metrics]
    assert len(tested) == 3 and all(0 <= reward <= 1 for reward in tested)
    assert not [name for row in metrics for name in row if "pass@" in name or "maj@" in name]
    assert [row["reward/accuracy"] for row in metrics[1:]] == [None, None] and metrics[1]["reward/mean"] is not None
    evaluated = [line for line in rows(folder / "runs/x/samples.jsonl") if line["kind"] == "evaluation"]
    assert len(evaluated) == 12 and all(line["reward"] in (0.0, 1.0) and "correct" not in line for line in evaluated)
    out = answers["again"][1]
    assert "no problem of rows has a reference answer: nothing is verified" in out
    assert f"reward before     {tested[0]:.3f}" in out and "got a higher reward" in out
    assert "accuracy" not in out.split("finished")[-1]


@pytest.mark.slow
def test_eval_speaks_of_the_reward_too(folder, answers):
    code, out = answers["eval"]
    found = json.loads(out.splitlines()[-1])
    reward = rows(folder / "runs/x/metrics.jsonl")[-1]["eval/rows/reward"]
    assert code == 0 and found["eval/rows/reward"] == reward and "eval/rows/pass@1" not in found
    assert f"  {'reward':<16}{reward:8.3f}  +- " in answers["eval table"][1]
    assert "task.verifier none leaves the reward Accuracy nothing to compare" in answers["eval by the verifier"][1]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("cut", "there were 6 and there are 5"),
        ("edited", "the prompts are the same, but answers or other fields have changed"),
        ("turned", "they are the same in another order"),
    ],
)
def test_a_run_goes_on_with_its_own_problems_only(answers, name, change):
    refusal = answers[name][0]
    assert refusal.startswith(
        f"the training problems of rows are not those that the run began with ({change}): put the"
    )
    assert "begin a new run with --from RUN" in refusal and "--fresh" in refusal and "\n" not in refusal


def test_the_date_that_templates_see_is_that_of_the_runs_beginning(folder, answers):
    assert json.loads((folder / "runs/x/config.json").read_text())["task"]["date"] == "2001-02-03"
    assert "runs/x was begun with other settings (task.date: 2001-02-03 -> 2001-02-04)" in answers["other date"][0]


def test_what_is_longer_than_the_model_was_made_for_is_refused(answers):
    assert "need 1032 positions, and the model was made for 1024: lower one by 8" in answers["too long"][0]
    code, out = answers["eval too long"]
    assert code == 2 and "--max_new_tokens 1020 after a prompt of" in out
    assert "the model was made for 1024: lower it by" in out


ENDED = "{% for m in messages %}[{{ m.role }}]{{ m.content }}END\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "stops", "said"),
    [
        ("tokenizer", (257,), ""),
        ("chatml", (258, 257), ""),
        ("plain", (258,), ""),
        ("{{ messages[0].content }}", (258,), ""),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}", (258,), ""),
        ("{{ raise_exception('no') }}", (258,), ""),
        ("tokenizer", (258,), "ends a turn with <|im_end|>, which stops no completion (stop tokens: <pad>)"),
        ("chatml", (), "ends a turn with <|im_end|>, which stops no completion (stop tokens: none)"),
        (ENDED, (257, 258), "ends a turn with END, which stops no completion (stop tokens: <|im_end|> or <pad>)"),
    ],
)
def test_a_template_whose_end_of_turn_stops_nothing_is_said(template, stops, said):
    (line,) = unstopped_notes(Task([], template=template), tiny_tokenizer(), stops) or [""]
    assert said in line and bool(said) == bool(line) and "\n" not in line
