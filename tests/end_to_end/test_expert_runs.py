"""A run of a model with experts: GSPO's configuration at toy size, with replay, and its export."""

import json

import numpy as np
import pytest
from commands import commands

from jaxrl_llm.config import load_config
from jaxrl_llm.models import load_pretrained

TOY = """
import dataclasses
from jaxrl_llm.config import load_config
paper, toy = (load_config(name)[1] for name in ("gspo_qwen3_30b_a3b", "moe_smoke"))
sizes = {name: getattr(toy, name) for name in ("model", "task", "scoring", "rollout", "mesh", "evaluation", "output")}
learner = dataclasses.replace(paper.learner, compute=toy.learner.compute, optimiser=toy.learner.optimiser)
config = dataclasses.replace(paper, **sizes, learner=learner, steps=2)
"""
SMALL = "--rollout.prompts 4 --rollout.group 4 --task.source.size 40"
LINES = {
    "gspo": f"train toy.py {SMALL} --learner.routing_replay R3 --run_dir gspo",
    "export": "export gspo --out model",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    (folder / "toy.py").write_text(TOY)
    return folder


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_configuration_of_the_paper_runs(folder, answers):
    assert answers["gspo"].code == 0, answers["gspo"].err
    for row in rows(folder / "gspo" / "metrics.jsonl")[1:]:
        assert row["updates"] == load_config("gspo_qwen3_30b_a3b")[1].learner.minibatches
        assert row["sampler/logp_abs_diff_max"] < 1e-5 and row["sampler/rerouted_fraction"] == 0
        assert 0 < row["experts/load_entropy"] <= 1 and row["experts/busiest_share"] <= 0.5
        assert row["experts/bytes_per_token"] == 2 * 2


def test_it_is_exported_with_its_experts(folder, answers):
    assert answers["export"].code == 0, answers["export"].err
    model, _ = load_pretrained(folder / "model")
    begun, _ = load_pretrained("tiny-random-moe")
    assert model.config.experts == begun.config.experts
    moved = model.weights.blocks.experts
    for name in ("router", "gate", "up", "down"):
        before = getattr(begun.weights.blocks.experts, name)[...]
        assert np.abs(np.asarray(getattr(moved, name)[...]) - np.asarray(before)).max() > 1e-4, name
