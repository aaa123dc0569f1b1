"""Whole runs whose completions are episodes with an environment of one's own and a tool."""

import json

import pytest
from commands import commands

from jaxrl_llm.models import load_pretrained, save_pretrained

pytestmark = pytest.mark.slow

WORLD = '''
import os
import tempfile

from jaxrl_llm import Environment, Step

HOME = os.getcwd()


class Guess(Environment):
    """Says whether the model's last reply was longer than the row wants."""

    def reset(self, row, seed):
        self.row, self.turn = row, 0
        return [{"role": "user", "content": f"say {row['length']} characters"}]

    def step(self, reply):
        self.turn += 1
        right = len(reply["content"]) <= self.row["length"]
        said = [{"role": "user", "content": "shorter" if not right else "again"}]
        return Step(said, float(right), self.turn == 3, {"right": float(right)}, said[0]["content"])


class Copied(Guess):
    def copy(self):
        other = Copied()
        other.row, other.turn = self.row, self.turn
        return other


class Unsure(Guess):
    """Says what cannot be saved in half of the rows, and changes the current folder."""

    def step(self, reply):
        os.chdir(HOME if self.turn else tempfile.gettempdir())
        if self.row["length"] % 2 and self.turn == 1:
            return Step([{"role": "user", "content": "?", "of": object()}])
        return super().step(reply)


class Silent(Guess):
    def step(self, reply):
        raise OSError("nobody answers")


class Broken(Guess):
    def reset(self, row, seed):
        raise OSError("no server")


def untyped(a):
    return a
'''
CONFIG = """
from jaxrl_llm.config import Evaluation, Output, Run, Scoring
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.recipes import GRPO
from jaxrl_llm.rollout import EngineOptions, Rollout
from jaxrl_llm.tasks import Task
from world import Guess

ROWS = [{"prompt": f"Please {n}", "length": n} for n in range(3, 11)]
config = Run(
    model="model",
    task=Task(ROWS, environment=Guess, template="chatml", verifier="none", holdout=0.25, name="guess"),
    scoring=Scoring(rewards=()),
    recipe=GRPO,
    rollout=Rollout(
        prompts=2, group=4, max_prompt_tokens=160, max_new_tokens=260, temperature=0.6, engine=EngineOptions(slots=8)
    ),
    learner=Learner(optimiser=Optimiser(learning_rate=1e-3), compute=Compute(row_tokens=512)),
    evaluation=Evaluation(samples=2, temperature=0.6),
    output=Output(checkpoint_every=1, samples=2),
    steps=1,
)
"""
TAUGHT = """
from jaxrl_llm.config import Answering, BatchSize, Evaluation, Output, Supervised
from jaxrl_llm.data import Collected, Texts
from jaxrl_llm.learner import Compute, Learner
from mine import config as played

config = Supervised(
    "model",
    Texts(Collected(played.task, samples=8, temperature=0.6), template="chatml", overlong="drop", bad_rows="drop"),
    batch=BatchSize(2, 420),
    learner=Learner(compute=Compute(row_tokens=512)),
    answering=Answering(max_new_tokens=260, max_prompt_tokens=160, slots=8),
    evaluation=Evaluation(temperature=0.6),
    output=Output(run_dir="runs/taught"),
    steps=1,
)
"""
FORKED = """
import dataclasses
from mine import config as played

TEMPLATE = (
    "{{ messages | length // 4 }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
config = dataclasses.replace(played, task=dataclasses.replace(played.task, template=TEMPLATE))
"""
"""A template that rewrites its first line before the third reply."""
MIXED = """
import dataclasses
from jaxrl_llm.config import Mixture, Part
from jaxrl_llm.rewards import Format
from jaxrl_llm.tasks import Task
from mine import config as played

ROWS = [{"prompt": f"Say {n}", "answer": str(n)} for n in range(10)]
plain = Task(ROWS, template="chatml", holdout=0.2, name="plain")
config = dataclasses.replace(
    played,
    task=Mixture((Part(played.task), Part(plain))),
    scoring=dataclasses.replace(played.scoring, rewards=(Format(".*[0-9].*"),)),
)
"""
HUGE = """
import dataclasses
from jaxrl_llm.config import Scoring
from mine import config as played


def large(completion):
    with open("calls", "ab") as calls:
        calls.write(b".")
        return 9e14 if 24 < calls.tell() < 10_000 else 0.0


def larger(completion):
    return large(completion)


config = dataclasses.replace(
    played, scoring=Scoring((large, larger)), evaluation=dataclasses.replace(played.evaluation, every=0)
)
"""
"""Rewards that add up to more than any may, after a while."""
UNTESTED = "--evaluation.every 0"
LINES = {
    "mixed": "train mixed.py --steps 2 --run_dir runs/mixed",
    "unsure": "train mine.py --task.environment world:Unsure --steps 2 --run_dir runs/unsure",
    "silent": "train mine.py --task.environment world:Silent --run_dir runs/silent",
    "huge": "train huge.py --steps 4 --run_dir runs/huge",
    "train": "train mine.py",
    "on": "train mine.py --steps 2",
    "eval": "eval runs/mine --json",
    "whole": "train mine.py --steps 2 --run_dir runs/whole",
    "gigpo": f"train mine.py {UNTESTED} --steps 2 --recipe gigpo --recipe.observation_coef 0.1 --run_dir runs/gigpo",
    "mt_grpo": f"train forked.py {UNTESTED} --steps 2 --recipe mt_grpo --rollout.episode.history fork "
    "--run_dir runs/mt_grpo",
    "rows": "train mine.py --rollout.episode.history fork --learner.compute.microbatch_rows 2 --run_dir runs/rows",
    "no turns": "train smoke --recipe mt_grpo --run_dir runs/smoke",
    "nothing said": "train smoke --recipe.observation_coef 0.1 --run_dir runs/smoke",
    "reset": "train mine.py --task.environment world:Broken --run_dir runs/broken",
    "tool": "train mine.py --task.tools world:untyped --run_dir runs/tool",
    "budget": "train mine.py --rollout.collect.token_budget 20 --run_dir runs/budget",
    "branches": f"train mine.py {UNTESTED} --recipe arpo --task.environment world:Copied --run_dir runs/branches",
    "branches_on": f"train mine.py {UNTESTED} --recipe arpo --task.environment world:Copied --run_dir runs/branches "
    "--steps 2",
    "forest": f"train mine.py {UNTESTED} --recipe arpo --task.environment world:Copied --run_dir runs/forest --steps 2",
    "hard": f"train mine.py {UNTESTED} --recipe arpo --recipe.branch.credit hard --task.environment world:Copied "
    "--run_dir runs/hard",
    "copyless": "train mine.py --recipe arpo --run_dir runs/copyless",
    "single": "train smoke --recipe arpo --run_dir runs/single",
    "nobody": "train mine.py --recipe arpo --recipe.branch.whole 4 --task.environment world:Copied "
    "--run_dir runs/nobody",
    "collect": "collect runs/mine --out rows.jsonl --limit 3 --temperature 0.6 --json",
    "pairs": "collect runs/mine --out pairs.jsonl --kind pairs",
    "taught": "train taught.py",
    "template": "train mine.py --task.template tokenizer --task.tools jaxrl_llm.environments.examples:multiply "
    "--run_dir runs/template",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a model whose turns are short, since it has eight stop tokens."""
    folder = tmp_path_factory.mktemp("episodes")
    model, tokenizer = load_pretrained("tiny-random")
    save_pretrained(model, tokenizer, folder / "model")
    path = folder / "model" / "config.json"
    stops = [183, 185, 122, 86, 239, 186, 74, 257]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": stops}))
    (folder / "world.py").write_text(WORLD)
    (folder / "mine.py").write_text(CONFIG)
    (folder / "forked.py").write_text(FORKED)
    (folder / "mixed.py").write_text(MIXED)
    (folder / "huge.py").write_text(HUGE)
    (folder / "taught.py").write_text(TAUGHT)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def rows_of(directory):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def without_clocks(row):
    """When a slot is free depends on how fast the environments answer."""
    clocks = ("time/", "throughput/", "memory/", "event/", "rollout/utilisation")
    return {k: v for k, v in row.items() if not k.startswith(clocks)}


def test_a_run_learns_from_episodes_and_resumes_to_the_same_rows(folder, answers):
    for name in ("train", "on", "eval", "whole"):
        assert answers[name].code == 0, (name, answers[name].err)
    resumed, whole = rows_of(folder / "runs" / "mine"), rows_of(folder / "runs" / "whole")
    assert [row["step"] for row in resumed if "reward/mean" in row] == [1, 2]
    last = whole[-1]
    assert without_clocks(resumed[-1]) == without_clocks(last)
    assert last["episode/turns"] > 1.5 and last["updates"] == 1 and last["environment/right"] > 0
    assert last["reward/environment"] == last["reward/mean"] and last["time/environment_s"] >= 0


def test_a_mixture_has_a_task_with_episodes_beside_one_without(folder, answers):
    assert answers["mixed"].code == 0, answers["mixed"].err
    last = rows_of(folder / "runs" / "mixed")[-1]
    assert last["step"] == 2 and last["task/guess/mean_length"] > 0 and last["task/plain/mean_length"] > 0
    assert 0 <= last["eval/guess/reward"] <= 4 and 0 <= last["eval/plain/pass@1"] <= 1
    assert last["episode/turns"] > 1.5


def test_an_environment_that_says_what_cannot_be_saved_and_moves_away_costs_its_episodes_alone(folder, answers):
    assert answers["unsure"].code == 0, answers["unsure"].err
    rows = rows_of(folder / "runs" / "unsure")
    assert [row["step"] for row in rows] == [0, 1, 2] and "which is no JSON value" in answers["unsure"].err
    shares = [row.get("reward/environment/failed_fraction", 0.0) for row in rows[1:]]
    assert 0 < max(shares) <= 1 and (folder / "runs" / "unsure" / "checkpoints" / "2").is_dir()
    assert any("event/evaluation_failed" in row and 0 < row["eval/guess/failed_fraction"] < 1 for row in rows)


def test_a_failure_within_a_step_saves_the_state_before_it_and_ends_with_3(folder, answers):
    answer = answers["huge"]
    assert answer.code == 3 and "weights add up to 1.8e+15" in answer.err and "state saved" in answer.err
    last = rows_of(folder / "runs" / "huge")[-1]["step"]
    assert 1 <= last < 4 and (folder / "runs" / "huge" / "checkpoints" / str(last)).is_dir()
    with open(folder / "calls", "ab") as calls:
        calls.write(b"." * 10_000)
    [on] = commands(["train huge.py --steps 4 --run_dir runs/huge"], folder)
    assert on.code == 0 and [row["step"] for row in rows_of(folder / "runs" / "huge")] == list(range(5))


def test_a_run_with_branches_resumes_to_the_same_rows(folder, answers):
    for name in ("branches", "branches_on", "forest"):
        assert answers[name].code == 0, (name, answers[name].err)
    resumed, whole = rows_of(folder / "runs" / "branches"), rows_of(folder / "runs" / "forest")
    assert without_clocks(resumed[-1]) == without_clocks(whole[-1])
    assert 0 < whole[-1]["episode/branches"] <= 2 and 0 < whole[-1]["episode/shared_fraction"] < 1
    assert whole[-1]["updates"] == 1 and whole[-1]["completions"] == 8


def test_hard_credit_changes_the_update_and_not_what_is_sampled(folder, answers):
    assert answers["hard"].code == 0, answers["hard"].err
    soft, hard = (rows_of(folder / "runs" / name)[1] for name in ("forest", "hard"))
    assert soft["step"] == hard["step"] == 1 and soft["episode/branches"] == hard["episode/branches"] > 0
    assert soft["reward/mean"] == hard["reward/mean"] and soft["advantage/abs_mean"] > hard["advantage/abs_mean"]
    assert soft["grad_norm"] != hard["grad_norm"]


@pytest.mark.parametrize("name", ["gigpo", "mt_grpo"])
def test_turns_are_credited_and_what_the_environment_says_is_learned(folder, answers, name):
    assert answers[name].code == 0, answers[name].err
    rows = [row for row in rows_of(folder / "runs" / name) if "reward/mean" in row]
    assert [row["updates"] for row in rows] == [1, 1] and all(row["advantage/abs_mean"] > 0 for row in rows)
    if name == "gigpo":
        said = [row["observations/tokens"] for row in rows]
        # "again" and "shorter": five to seven tokens after each turn but the last.
        assert all(
            8 * (row["episode/turns"] - 1) * 5 <= n <= 8 * row["episode/turns"] * 7
            for n, row in zip(said, rows, strict=True)
        )
        assert 0 < rows[1]["observations/loss"] < rows[0]["observations/loss"]
    else:
        assert not any(key.startswith("observations/") for row in rows for key in row)
        assert all(row["episode/forks"] > 0.5 for row in rows)
    # The environment names its state by what it last said, one of two words.
    assert all(row["episode/equal_states_fraction"] > 0.5 for row in rows)
    lines = [json.loads(line) for line in (folder / "runs" / name / "samples.jsonl").read_text().splitlines()]
    learned = [line["advantage"] for line in lines if line["kind"] == "training"]
    assert len(set(learned)) > 2


def test_an_evaluation_reports_the_reward_of_episodes(answers):
    found = json.loads(answers["eval"].out)
    assert 0 <= found["eval/guess/reward"] <= 3 and found["eval/guess/problems"] == 2


def test_right_episodes_are_collected_and_a_run_learns_from_its_own(folder, answers):
    assert answers["collect"].code == 0, answers["collect"].err
    found = json.loads(answers["collect"].out)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert found["problems"] == 3 and found["rows"] == len(rows) > 0
    for row in rows:
        assert [message["role"] for message in row["completion"]][::2] == ["assistant"] * 3
        assert "say " in row["prompt"] and "characters" in row["prompt"]
    assert answers["taught"].code == 0, answers["taught"].err
    first, last = rows_of(folder / "runs" / "taught")
    assert last["step"] == 1 and last["tokens"] > 0 and 0 <= first["eval/guess/reward"] <= 3


def test_samples_show_who_spoke(folder, answers):
    lines = [json.loads(line) for line in (folder / "runs" / "mine" / "samples.jsonl").read_text().splitlines()]
    shown = [line for line in lines if line["kind"] == "training" and "[user] " in line["completion"]]
    assert shown and all(line["completion"].startswith("[assistant] ") for line in shown)
    assert all(0 in line["by_token"]["mask"] for line in shown if "by_token" in line)
    for line in shown:
        turns = line["episode"]["turns"]
        assert [turn["role"] for turn in turns][::2] == ["assistant"] * len(turns[::2]) and line["episode"]["end"]
        assert sum(turn.get("reward", 0) for turn in turns) == line["parts"]["environment"]


@pytest.mark.parametrize(("name", "words"), [
    ("silent", "guess: 4 of 4 answers could not be scored: Silent: step: OSError"),
    ("reset", "cannot begin an episode: Broken: reset: OSError: no server"),
    ("tool", "untyped"),
    ("nothing said", "recipe.observation_coef 0.1 has nothing to learn from, since task"),
    ("no turns", "MTGRPO compares turns of episodes, and task"),
    ("budget", "rollout.collect.token_budget 20 cuts answers in the middle of a turn"),
    ("rows", "learner.compute.microbatch_rows 2 is less than rollout.episode.max_turns 8, and with"),
    ("copyless", "that of task guess has no copy(): give it one, or set recipe.branch None"),
    ("single", "recipe.branch has nothing to branch"),
    ("nobody", "recipe.branch.whole 4 leaves none of rollout.group 4 for branches"),
    ("pairs", "has an environment or tools, and whole episodes are collected: as texts"),
    ("template", "the chat template cannot write tools; set --task.template chatml"),
])  # fmt: skip
def test_what_cannot_work_is_refused_in_one_line(answers, name, words):
    answer = answers[name]
    assert answer.code == 2 and words in answer.err, answer.err
    assert "Traceback" not in answer.err
