"""Runs of a model whose layers have states: whole and below adapters, resumed, exported, and learning from pairs."""

import json
from pathlib import Path

import numpy as np
import pytest
from commands import commands

from jaxrl_llm.models import load_pretrained

pytestmark = pytest.mark.slow

PAIRS = Path(__file__).parents[1] / "golden" / "runs" / "dpo.py"
SMALL = "--rollout.prompts 4 --rollout.group 4 --task.source.size 40 --output.checkpoint_every 1 --evaluation.every 0"
LINES = {
    "whole": f"train hybrid_smoke --steps 2 {SMALL} --run_dir whole",
    "again": "train whole/config.json --run_dir whole --steps 3",
    "lora": f"train hybrid_smoke --steps 2 {SMALL} --learner.lora.rank 4 --learner.lora.base nf4 --run_dir lora",
    "pairs": f"train {PAIRS} --model tiny-random-hybrid --steps 2 --evaluation.every 0 --run_dir pairs",
    "adapter": "export lora --adapter --out adapter",
    "export": "export lora --out model",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("hybrid")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


@pytest.mark.parametrize("name", ["whole", "lora"])
def test_sampler_and_learner_agree(name, folder, answers):
    assert answers[name].code == 0, answers[name].err
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "sampler/logp_abs_diff_max" in row]
    assert len(rows) >= 2 and all(row["sampler/logp_abs_diff_max"] < 1e-4 for row in rows)


def test_it_resumes_and_learns_from_pairs(answers):
    for name in ("again", "pairs"):
        assert answers[name].code == 0, answers[name].err


def test_every_layer_is_changed_and_exported(folder, answers):
    for name in ("adapter", "export"):
        assert answers[name].code == 0, answers[name].err
    modules = json.loads((folder / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert {"in_proj_qkv", "in_proj_z", "out_proj", "q_proj", "up_proj"} < set(modules)
    model, _ = load_pretrained(folder / "model")
    begun, _ = load_pretrained("tiny-random-hybrid")
    assert model.config.recurrent == begun.config.recurrent
    for part, name in (("delta", "q"), ("delta", "o"), ("attn", "q"), ("mlp", "up")):
        after, before = (getattr(getattr(m.weights.blocks, part), name)[...] for m in (model, begun))
        assert np.abs(np.asarray(after) - np.asarray(before)).max(axis=tuple(range(1, after.ndim))).min() > 1e-5
