"""Runs that learn from data: what is refused in one line before anything is left behind, and what is odd and works."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from commands import ROOT, assert_refused, commands
from end_to_end.test_resume import rows

from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.preference import DPO, IPO
from jaxrl_llm.config import BatchSize, Evaluation, Output, Preference, RewardModel, Run, Supervised
from jaxrl_llm.data import Collected, Pairs, Steps, Texts
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.models.config import Lora
from jaxrl_llm.tasks import Table, Task

pytestmark = pytest.mark.slow

CONFIG = """
from jaxrl_llm.algorithms.preference import DPO, IPO, KTO, SimPO
from jaxrl_llm.config import *
from jaxrl_llm.data import *
from jaxrl_llm.tasks import *
table = Table("{0}.jsonl")
config = {1}
"""
REST = "batch=BatchSize(4, 24), steps=1, output=Output(trackers=())"
CONFIGS = {
    "sft": ("sft", f'Supervised("tiny-random", Texts(table, template="plain", holdout=0.3), {REST})'),
    "dpo": ("pairs", f'Preference("tiny-random", Pairs(table, template="plain"), {REST})'),
    "rm": ("pairs", f'RewardModel("tiny-random", Pairs(table, template="plain", holdout=0.01), {REST})'),
    "prm": ("steps", f'RewardModel("tiny-random", Steps(table, template="plain"), {REST})'),
    "mute": ("sft", f'Supervised("mute", Texts(table, template="plain"), {REST})'),
    "alone": ("judged", f'Preference("tiny-random", Unpaired(table, template="plain"), loss=KTO(), {REST})'),
    "unjudged": ("sft", f'Preference("tiny-random", Unpaired(table, template="plain"), loss=KTO(), {REST})'),
    "kto of pairs": ("pairs", 'Preference("tiny-random", Pairs(table), loss=KTO())'),
    "simpo of labels": ("judged", 'Preference("tiny-random", Unpaired(table), loss=SimPO())'),
    "sharp": ("pairs", 'Preference("tiny-random", Pairs(table), loss=DPO(float("nan")))'),
    "other kind": ("pairs", 'Preference("tiny-random", Texts(table))'),
    "no kind": ("pairs", "Texts(table)"),
    "torn": ("torn", f'Preference("tiny-random", Pairs(table, template="plain"), {REST})'),
    "unlabelled": ("unlabelled", f'RewardModel("tiny-random", Steps(table, template="plain"), {REST})'),
    "equal": ("equal", f'Preference("tiny-random", Pairs(table, template="plain"), {REST})'),
    "listed": ("listed", f'Preference("tiny-random", Pairs(table, template="plain"), {REST})'),
    "long": ("long", f'Supervised("tiny-random", Texts(table, template="plain"), {REST})'),
    "empty": ("empty", f'Supervised("tiny-random", Texts(table, template="plain"), {REST})'),
    "one": ("one", f'Preference("tiny-random", Pairs(table, template="plain"), {REST})'),
}
PAIR = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
STEPS = {"prompt": "1+1=", "completions": ["1", "2"], "labels": [True, False]}
TABLES = {
    "sft": [{"prompt": f"{n}+1=", "completion": f"{n + 1}"} for n in range(9)]
    + [["3+1=", "4"], {"prompt": "3+1=", "completion": "1" * 24}],
    "judged": [{"prompt": "1+1=", "completion": answer, "label": answer == "2"} for answer in "23"],
    "pairs": [PAIR | {"prompt": f"{n}+1="} for n in range(3)],
    "steps": [STEPS, STEPS | {"prompt": "2+1="}],
    "torn": [PAIR, {"prompt": "1+2=", "chosen": "3"}],
    "unlabelled": [STEPS, STEPS | {"labels": [True]}],
    "equal": [PAIR, PAIR | {"rejected": "2"}],
    "listed": [PAIR, {"prompt": "1+2=", "completions": ["3", "4", "5"]}],
    "long": [{"prompt": "1+1=", "completion": "2"}, {"prompt": "1+" * 12, "completion": "12"}],
    "empty": [],
    "one": [PAIR],
}
REFUSED = {
    "train sft.py --steps 0": ["steps must be at least 1, got 0"],
    "train sft.py --batch.rows 0": ["batch.rows must be at least 1"],
    "train sft.py --batch.max_tokens 0": ["batch.max_tokens must be at least 1"],
    "train sft.py --data.holdout 1": ["data.holdout is a share from 0 to below 1, got 1.0"],
    "train sft.py --data.learn some": ["--data.learn: expected one of completion, all, trl, got 'some'"],
    "train sft.py --completion_only_loss False": ["--completion_only_loss (nearest: --data.learn) is TRL's name"],
    "train sft.py": ["sft.jsonl:10 is a list; a row is an object with fields"],
    "train sft.py --data.overlong shorten": ["--data.overlong: expected one of refuse, drop, truncate"],
    "train sft.py --answering.timeout_s 0": ["answering.timeout_s must be above 0"],
    "train sft.py --learner.minibatches 5": ["learner.minibatches", "batch.rows"],
    "train sft.py --learner.compute.row_tokens 24": ["learner.compute.row_tokens", "25"],
    "train sft.py --learner.target_kl 0.1": ["learner.target_kl 0.1 is for reinforcement learning: leave it out"],
    "train sft.py --learner.keep_sampling_mask": ["learner.keep_sampling_mask is for tokens that a sampler drew"],
    "train sft.py --mesh.rollout 1": ["mesh.rollout 1 sets devices aside for sampling"],
    "train sft.py --evaluation.samples 2": ["evaluation.samples 2", "set evaluation.temperature above 0"],
    "train sft.py --output.samples -1": ["output.samples must be at least 0, got -1"],
    "train sft.py --recipe grpo": ["--recipe grpo is a method of reinforcement learning", "Supervised"],
    "train sft.py --centre 1": ["no option --centre"],
    "train sft.py --batch.max_tokens 2000": ["batch.max_tokens needs 2000 positions", "made for 1024"],
    "train sft.py --data.source.path nowhere.jsonl": ["nowhere.jsonl not found"],
    "train dpo.py --loss.beta 0": ["DPO.beta must be above 0"],
    "train dpo.py --loss.label_smoothing 0.5": ["DPO.label_smoothing must be from 0 to below 0.5"],
    "train dpo.py --evaluation.every 1": ["nothing to test on: set data.holdout above 0, or evaluation.task"],
    "train dpo.py --from odd/sft": ["--from would begin with other weights", "give them as --model RUN@STEP"],
    "train alone.py": ["judged.jsonl:1: all rows answer one prompt, and KTO compares", "add rows of another"],
    "train unjudged.py": [
        "sft.jsonl:1: the row has the columns prompt, completion; a row has prompt, completion, label"
    ],
    "train kto_of_pairs.py": ["loss KTO learns from answers with labels, and data is Pairs: set data to Unpaired(...)"],
    "train simpo_of_labels.py": ["loss SimPO compares two answers, and data is Unpaired: set loss to KTO()"],
    "train rm.py --centre -1": ["centre must be at least 0, and finite, got -1.0"],
    "train prm.py --centre 1": ["centre 1.0 is of pairs and rankings", "leave it out"],
    "train rm.py --evaluation.temperature 1": ["a reward model gives no answers", "every and limit alone"],
    "train rm.py --from odd/sft": ["odd/sft is of a Supervised, and this is a RewardModel: give it as --model"],
    "train one.py --data.holdout 0.01": ["one has no row left to train on: 1 from the source, 1 held out"],
    "train mute.py": ["mute has no tokenizer"],
    "train sharp.py": ["DPO.beta must be above 0", "correct the configuration"],
    "train other_kind.py": ["other_kind.py: data is Texts(...): give Pairs(...)"],
    "train no_kind.py": ["no_kind.py must set config = Run(...)"],
    "train torn.py": ["torn.jsonl:2: the row has the columns prompt, chosen; a row has prompt, chosen, rejected"],
    "train unlabelled.py": ["unlabelled.jsonl:2", "labels"],
    "train equal.py": ["equal.jsonl:2: chosen and rejected are equal"],
    "train listed.py": ["listed.jsonl:2 ranks 3 completions", "train a RewardModel"],
    "train long.py": ["long.jsonl:2 has 27 tokens: set --batch.max_tokens 27 (now 24), or shorten it"],
    "train empty.py": ["has no row left to train on: 0 from the source"],
}
ODD = {
    "train sft.py --run_dir odd/sft --data.bad_rows drop --data.overlong truncate": "fewer rows than a batch",
    "train one.py --run_dir odd/one": "one row, which stands four times in a batch",
    "train odd/sft --run_dir odd/sft --steps 2 --evaluation.limit 1 --answering.slots 8": "tested on less from now on",
}


def fill(folder: Path) -> None:
    """Tables and configurations, and a model without a tokenizer."""
    for name, found in TABLES.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
    for name, (table, config) in CONFIGS.items():
        (folder / f"{name.replace(' ', '_')}.py").write_text(CONFIG.format(table, config))
    shutil.copytree(ROOT / "tests/fixtures/models/qwen2", folder / "mute", ignore=lambda *_: ["tokenizer.json"])


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """(folder, what was in it before, the answer to each line)."""
    folder = tmp_path_factory.mktemp("refused")
    fill(folder)
    before = set(folder.rglob("*"))
    lines = [*ODD, *REFUSED]
    return folder, before, dict(zip(lines, commands(lines, folder), strict=True))


@pytest.mark.parametrize("line", REFUSED, ids=[line[:70] for line in REFUSED])
def test_wrong_input_is_one_line_that_names_the_thing_and_the_remedy(answers, line):
    assert_refused(answers[2][line], *REFUSED[line])


def test_refused_runs_leave_nothing_behind(answers):
    folder, before, _ = answers
    made = {path.relative_to(folder).parts[0] for path in set(folder.rglob("*")) - before}
    assert made - {"__pycache__"} == {"odd"}
    assert {path.name for path in (folder / "odd").iterdir()} == {"sft", "one"}


@pytest.mark.parametrize("line", ODD, ids=list(ODD.values()))
def test_little_data_is_enough(answers, line):
    folder, _, found = answers
    assert found[line].code == 0, found[line].err
    found = rows(folder / line.split("--run_dir ")[1].split()[0])
    assert [row["step"] for row in found] == list(range(2 + ("sft" in line)))
    assert found[-1]["updates"] == 1 and found[-1]["loss"] > 0
    assert found[-1]["lr"] == pytest.approx(2e-5 if "sft" in line else 1e-6)
    assert ("eval/text/loss" in found[-1]) == ("sft" in line)


def test_rows_that_are_left_out_are_counted_at_the_start_and_in_the_first_row(answers):
    folder, _, found = answers
    left_out = "of 11 rows 1 bad dropped (first: sft.jsonl:10 is a list; a row is an object with fields), 1 truncated "
    told = [row.get("event/data", "") for row in rows(folder / "odd/sft")]
    assert told == ["", f"{left_out}(first: sft.jsonl:11, 29 tokens)", ""]
    line, *_ = ODD
    assert found[line].err.count(left_out) >= 1
    settings = json.loads((folder / "odd/sft/config.json").read_text())["data"]
    assert (settings["bad_rows"], settings["overlong"]) == ("drop", "truncate")


def test_a_row_that_a_batch_repeats_is_compared_with_itself_only(answers):
    row = rows(answers[0] / "odd/one")[-1]
    assert row["epoch"] == 4 and row["pairs/accuracy"] == 0.5
    assert row["loss"] == pytest.approx(0.6931472, rel=1e-6)


RUNS = (
    Supervised("m", Texts(Table("a.jsonl"), learn="all", holdout=0.1), evaluation=Evaluation(every=3)),
    Preference("m", Pairs(Table("a.jsonl")), IPO(0.2, average=True), batch=BatchSize(7, 99), steps=3),
    Preference("m", Pairs(Collected(Task(Table("b.jsonl")), samples=4)), DPO(0.3, 0.1), seed=5),
    RewardModel("m", Pairs(Table("a.jsonl")), 0.01, learner=Learner(Optimiser(warmup=2), lora=Lora(4))),
    RewardModel("m", Steps(Table("a.jsonl"), separator="\n\n"), output=Output(run_dir="there")),
)


RATES = {Supervised: (Texts, 2e-5), Preference: (Pairs, 1e-6), RewardModel: (Pairs, 1e-4)}


@pytest.mark.parametrize("kind", RATES)
def test_a_kind_of_run_has_a_learning_rate_of_its_own_unless_one_is_named(kind):
    data, usual = RATES[kind]
    run = kind("m", data(Table("a.jsonl")))

    def rate(run):
        return run.learner.optimiser.learning_rate

    others = Learner(Optimiser(warmup=2), compute=Compute(microbatch_rows=4))
    assert rate(run) == rate(dataclasses.replace(run, learner=others)) == usual
    for named in (1e-6, 3e-3):
        assert rate(dataclasses.replace(run, learner=Learner(Optimiser(learning_rate=named)))) == named
    assert rate(Run("m", Task(Table("b.jsonl")), learner=run.learner)) == rate(Run("m", Task(Table("b.jsonl")))) == 1e-6
    assert configs.from_json(json.loads(json.dumps(configs.to_json(run)))) == run


@pytest.mark.parametrize("run", RUNS, ids=lambda run: type(run).__name__)
def test_a_configuration_is_sound_and_survives_its_json(run):
    configs.validate(run)
    assert configs.from_json(json.loads(json.dumps(configs.to_json(run)))) == run
    assert run != dataclasses.replace(run, steps=77)
