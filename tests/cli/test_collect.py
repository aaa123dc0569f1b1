"""``jaxrl-llm collect``: what it writes, what it refuses, and that it goes on after Ctrl-C and after a kill."""

import json
import os
import signal
import time

import pytest
from commands import MAIN, assert_refused, commands
from talkative import LONGEST, talkative, task_in
from terminals import CTRL_C, PATIENCE_S, Terminal

from jaxrl_llm.models import save_pretrained

pytestmark = pytest.mark.slow

CONFIG = """
import dataclasses
from jaxrl_llm.config import load_config
from jaxrl_llm.tasks import Table, Task
task = Task(Table("numbers.jsonl"), template="chatml", suffix="!", holdout=0.2)
base = load_config("smoke")[1]
engine = dataclasses.replace(base.rollout.engine, slots=8)
rollout = dataclasses.replace(base.rollout, engine=engine, max_new_tokens=%d)
config = dataclasses.replace(base, task=task, rollout=rollout)
"""
ASK = "collect model --config counting.py --samples 4 --out"
LINES = {
    "texts": f"{ASK} texts.jsonl --keep all --json",
    "again": f"{ASK} texts.jsonl --keep all",
    "pairs": f"{ASK} data/pairs.jsonl --kind pairs --match_length --seed 1 --limit 30",
    "steps": f"{ASK} steps.jsonl --kind steps --limit 5 --continuations 2 --json",
    "nothing": f"{ASK} nothing.jsonl --limit 1 --max_new_tokens 1",
}
REFUSED = {
    "collect": ["collect needs a run or a model", "--out answers.jsonl"],
    "collect model --config counting.py": ["collect needs a file to write: jaxrl-llm collect model --out"],
    f"{ASK} rows.txt": ["--out rows.txt is written as JSON lines", "ending .jsonl"],
    f"{ASK} folder.jsonl": ["--out folder.jsonl is a folder"],
    f"{ASK} /proc/nowhere/a.jsonl": ["/proc/nowhere/a.jsonl cannot be written", "another folder with --out"],
    "collect nowhere --out a.jsonl": ["no such model: nowhere"],
    "collect model --config nowhere --out a.jsonl": ["no configuration 'nowhere'"],
    f"{ASK} a.jsonl --samples 0": ["--samples must be at least 1 to collect texts, got 0"],
    f"{ASK} a.jsonl --kind pairs --samples 1": ["--samples must be at least 2 to collect pairs, got 1"],
    f"{ASK} a.jsonl --kind rows": ["--kind: expected one of texts, pairs, unpaired, steps, got 'rows'"],
    f"{ASK} a.jsonl --kind steps --continuations 0": ["--continuations must be at least 1"],
    f"{ASK} a.jsonl --temperature 0": ["--temperature must be above 0, so that answers differ, got 0.0"],
    f"{ASK} a.jsonl --top_p 0": ["--top_p must be above 0 and at most 1"],
    f"{ASK} a.jsonl --limit -1": ["--limit must be at least 0"],
    f"{ASK} a.jsonl --slots 0": ["--slots must be at least 1"],
    f"{ASK} a.jsonl --sampels 3": ["no option --sampels", "did you mean --samples?"],
    f"{ASK} a.jsonl --task.verifier none": ["--task.verifier none leaves nothing to collect by"],
    f"{ASK} a.jsonl --task.holdout 2": ["holdout is 2.0"],
    f"{ASK} a.jsonl --max_new_tokens 2000": ["--max_new_tokens 2000 after a prompt of", "lower it by"],
    f"{ASK.replace('model', 'mute')} a.jsonl": ["mute has no tokenizer"],
    f"{ASK} begun.jsonl --temperature 0.5": ["begun.jsonl.part was begun with other settings", "--out, or remove it"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("collect")
    task_in(found, 400)
    (found / "counting.py").write_text(CONFIG % LONGEST)
    model, tokenizer = talkative()
    save_pretrained(model, tokenizer, found / "model")
    save_pretrained(model, tokenizer, found / "mute")
    for path in (found / "mute").glob("*token*"):
        path.unlink()
    (found / "folder.jsonl").mkdir()
    (found / "begun.jsonl.part").write_text('{"settings": {"temperature": 1.0}}\n')
    return found


@pytest.fixture(scope="module")
def answers(folder):
    lines = {**LINES, **{line: line for line in REFUSED}, "usage": "collect --help", "help": "collect model --help"}
    return dict(zip(lines, commands(list(lines.values()), folder), strict=True))


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_right_answers_are_written_and_counted(folder, answers):
    assert answers["texts"].code == 0, answers["texts"].err
    said = json.loads(answers["texts"].out)
    written = rows(folder / "texts.jsonl")
    assert (said["model"], said["step"], said["kind"], said["problems"], said["answers"]) == (
        "model",
        None,
        "texts",
        320,  # 80 of 400 are held out
        1280,
    )
    assert said["rows"] == len(written) > 100 and said["pass@1"] == said["right"] / 1280
    assert all(row.keys() == {"prompt", "completion", "id"} for row in written)
    assert_refused(answers["again"], "texts.jsonl is there already", "remove it first")


def test_people_see_a_table_and_how_to_read_the_file(folder, answers):
    assert answers["pairs"].code == 0, answers["pairs"].err
    lines = answers["pairs"].out.splitlines()
    assert lines[0] == "model on numbers: 30 problems, 4 each, temperature 1, top_p 1"
    assert [line.split()[0] for line in lines[1:-1]] == ["pass@1", "solved", "length", "sampled", "rows"]
    wanted = "data/pairs.jsonl is written: Pairs(Table('data/pairs.jsonl'), template='chatml', suffix='!')"
    assert lines[-1] == wanted and lines[-2].split()[1] == str(len(rows(folder / "data/pairs.jsonl")))
    assert answers["nothing"].out.splitlines()[-1].startswith("nothing.jsonl is empty: ask a better model")
    assert (folder / "nothing.jsonl").read_bytes() == b""


def test_steps_have_labels(folder, answers):
    assert answers["steps"].code == 0, answers["steps"].err
    assert json.loads(answers["steps"].out)["problems"] == 5
    for row in rows(folder / "steps.jsonl"):
        assert len(row["completions"]) == len(row["labels"]) and {0, 0.5, 1}.issuperset(row["labels"])


@pytest.mark.parametrize("line", REFUSED, ids=[line[:70] for line in REFUSED])
def test_wrong_input_is_one_line(answers, line):
    assert_refused(answers[line], *REFUSED[line])


def test_help_tells_the_options(folder, answers):
    for name in ("usage", "help"):
        assert answers[name].code == 0 and "--out FILE.jsonl" in answers[name].out and not answers[name].err
    for flag in ("--samples", "--keep", "--kind", "--match_length", "--continuations", "those of one part: mesh, task"):
        assert flag in " ".join(answers["help"].out.split())
    assert not (folder / "a.jsonl").exists() and not (folder / "a.jsonl.part").exists()


def started(arguments, folder, problems):
    """The command on a terminal, once so many problems are done."""
    terminal = Terminal(MAIN, arguments, folder, columns=120)
    limit = time.monotonic() + PATIENCE_S
    while done(folder / "stopped.jsonl.part") < problems:
        assert terminal.process.poll() is None and time.monotonic() < limit
        time.sleep(0.002)
    return terminal


def done(part):
    """Problems in a file that is not complete."""
    return part.read_bytes().count(b"\n") - 1 if part.exists() else 0


def test_after_ctrl_c_and_after_a_kill_it_goes_on_to_the_same_file(folder, answers):
    arguments = LINES["texts"].replace("texts.jsonl", "stopped.jsonl").split()
    first = started(arguments, folder, 8)
    first.press(CTRL_C)
    assert first.finish() == 130
    assert first.lines()[-2:] == ["jaxrl-llm: interrupted: run the same command again to resume", ""]
    second = started(arguments, folder, done(folder / "stopped.jsonl.part") + 8)
    os.kill(second.process.pid, signal.SIGKILL)
    assert second.finish() == -signal.SIGKILL
    assert 16 <= done(folder / "stopped.jsonl.part") < 320 and not (folder / "stopped.jsonl").exists()
    [third] = commands([" ".join(arguments)], folder)
    assert third.code == 0, third.err
    assert (folder / "stopped.jsonl").read_bytes() == (folder / "texts.jsonl").read_bytes()
    told, whole = json.loads(third.out), json.loads(answers["texts"].out)
    assert {**told, "seconds": 0, "out": ""} == {**whole, "seconds": 0, "out": ""}
    assert not list(folder.glob("*stopped.jsonl.part"))
