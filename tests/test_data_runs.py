"""Runs that learn from data, through the command line: their numbers by hand, broken off and gone on with, in two
processes.
"""

import json

import pytest
from commands import commands

from jaxrl_llm.models import load_pretrained
from jaxrl_llm.tasks import Pairs, Steps, Table, Texts, load_texts

CONFIG = """
from jaxrl_llm.config import *
from jaxrl_llm.learner import Learner, Lora, Optimiser
from jaxrl_llm.tasks import *
config = {kind}(
    "tiny-random", {data}, batch=BatchSize({rows}, 24),
    learner=Learner(Optimiser(learning_rate=3e-3, weight_decay=0.1), lora=Lora({rank})), steps=3,
    evaluation=Evaluation(every=1), output=Output(checkpoint_every=1, keep=9, tensorboard=False),
)
"""
SUMS = [(1, 2), (3, 4), (50, 6), (7, 8), (2, 20), (9, 9), (8, 1), (6, 6), (4, 13), (5, 5), (3, 9), (70, 1)]
TABLES = {
    "sft": [{"prompt": f"{a}+{b}=", "completion": f"{a + b}"} for a, b in SUMS],
    "dpo": [{"prompt": f"{a}+{b}=", "chosen": f"{a + b}", "rejected": f"{100 * a}"} for a, b in SUMS],
    "rm": [
        {"prompt": f"{a}+{b}=", "completions": [f"{a + b}", f"{a + b + 1}", f"{100 * a}"][: 2 + a % 2], "margin": 0.5}
        for a, b in SUMS
    ],
    "prm": [{"prompt": f"{a}+{b}=", "completions": [f"{a}", f"{a + b}"], "labels": [1, b / 20]} for a, b in SUMS],
}
DATA = {
    name: kind(Table(f"{name}.jsonl"), template="plain", holdout=0.25)
    for name, kind in {"sft": Texts, "dpo": Pairs, "rm": Pairs, "prm": Steps}.items()
}
KINDS = {"sft": ("Supervised", 2), "dpo": ("Preference", 0), "rm": ("RewardModel", 0), "prm": ("RewardModel", 0)}
"""And the rank of their adapters."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, rows in TABLES.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        kind, rank = KINDS[name]
        whole = CONFIG.format(kind=kind, data=DATA[name], rows=train_rows(name, folder), rank=rank)
        (folder / f"{name}.py").write_text(whole)
    return folder


def loaded(name, folder):
    """The rows of a table in two parts."""
    data = DATA[name]
    placed = type(data)(Table(str(folder / f"{name}.jsonl")), template="plain", holdout=0.25)
    model, tokenizer = load_pretrained("tiny-random")
    return load_texts(placed, tokenizer, model.config.tokens.eos)


def train_rows(name, folder):
    """So many that each step learns from all of them."""
    return len(loaded(name, folder).train)


@pytest.fixture(scope="module")
def whole(folder):
    """Every stage, undisturbed."""
    answers = commands([f"train {name}.py --run_dir whole/{name}" for name in TABLES], folder)
    assert [answer.code for answer in answers] == [0] * len(TABLES), answers
    return folder / "whole"
