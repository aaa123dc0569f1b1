"""A run of a model with experts: GSPO's configuration at toy size, with replay, and its export."""

import json

import numpy as np
import pytest
from commands import commands

from jaxrl_llm.config import load_config
from jaxrl_llm.models import load_pretrained

pytestmark = pytest.mark.slow

SMALL = "--steps 2 --rollout.prompts 4 --rollout.group 4 --task.source.size 40"
NOISE = "--rollout.engine.router_bits 3"
LINES = {
    "gspo": f"train gspo_qwen3_30b_a3b --sizes moe_smoke {SMALL} {NOISE} --learner.routing_replay R3 --run_dir gspo",
    "unknown": "train gspo_qwen3_30b_a3b --sizes moe_smok",
    "text": "train gspo_qwen3_30b_a3b --sizes sft_quickstart",
    "export": "export gspo --out model",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_configuration_of_the_paper_runs(folder, answers):
    assert answers["gspo"].code == 0, answers["gspo"].err
    for row in rows(folder / "gspo" / "metrics.jsonl")[1:]:
        assert row["updates"] == load_config("gspo_qwen3_30b_a3b")[1].learner.minibatches
        # The sampler takes others of nearly equal experts, and the learner the same.
        assert row["sampler/logp_abs_diff_max"] < 1e-5 and 0.1 < row["sampler/rerouted_fraction"] < 1
        assert 0 < row["experts/load_entropy"] <= 1 and row["experts/busiest_share"] <= 0.5
        assert row["experts/bytes_per_token"] == 2 * 2


def test_sizes_are_those_of_a_run_of_the_same_kind(answers):
    assert answers["unknown"].code == 2 and "did you mean moe_smoke" in answers["unknown"].err
    assert answers["text"].code == 2 and "not a Supervised" in answers["text"].err


def test_it_is_exported_with_its_experts(folder, answers):
    assert answers["export"].code == 0, answers["export"].err
    model, _ = load_pretrained(folder / "model")
    begun, _ = load_pretrained("tiny-random-moe")
    assert model.config.experts == begun.config.experts
    moved = model.weights.blocks.experts
    for name in ("router", "gate", "up", "down"):
        before = getattr(begun.weights.blocks.experts, name)[...]
        assert np.abs(np.asarray(getattr(moved, name)[...]) - np.asarray(before)).max() > 1e-4, name
