"""Runs that watch more than they learn from, through the command line: how far the policy is from its beginning."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import assert_refused, commands
from learner.rollouts import one_device

from jaxrl_llm.checkpoint import Checkpoints, flatten
from jaxrl_llm.config import load_json
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.state import abstract_state
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.telemetry import diagnose

CONFIG = Path(__file__).parent / "fixtures" / "runs" / "ruled.py"
PLAIN = f"train {CONFIG} --recipe dapo --output.checkpoint_every 2"
LORA = "--learner.lora.rank 2 --learner.lora.targets attn/q mlp/down --learner.optimiser.learning_rate 1e-2 --steps 2"
LINES = {
    "off": f"{PLAIN} --run_dir off",
    "on": f"{PLAIN} --run_dir on --monitor_kl",
    "half": f"{PLAIN} --run_dir half --monitor_kl --steps 2",
    "rest": f"{PLAIN} --run_dir half --output.monitor_kl",
    "off lora": f"{PLAIN} {LORA} --run_dir lora-off",
    "on lora": f"{PLAIN} {LORA} --run_dir lora-on --monitor-kl",
    "from": f"{PLAIN} --run_dir from --from off@4 --steps 1 --monitor_kl",
    "begun without": f"{PLAIN} --run_dir off --monitor_kl",
    "begun with": f"{PLAIN} --run_dir on --steps 9",
    "measured": f"train {CONFIG} --run_dir no --monitor_kl",
    "from data": "train sft_quickstart --run_dir no --monitor_kl",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("watched")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def rows(folder):
    """Rows of all steps without what the clock decides, and without evaluations."""
    clock = ("time/", "throughput/", "event/resumed", "eval/")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: x for name, x in json.loads(line).items() if not name.startswith(clock)} for line in lines]


def saved(folder, step):
    """Arrays by name of one checkpoint."""
    run = load_json(folder / "config.json")
    model, _ = load_pretrained(run.model)
    like = abstract_state(model, build(run.learner.optimiser), run.output.monitor_kl, run.learner.lora)
    with Checkpoints(folder / "checkpoints") as store:
        state, _ = store.restore(step, like, one_device(), model)
    return {name: np.asarray(array) for name, array in jax.device_get(flatten(state)).items()}


@pytest.mark.parametrize(("one", "other", "steps"), [("off", "on", 4), ("lora-off", "lora-on", 2)])
def test_a_watched_kl_changes_nothing_that_a_run_learns(folder, answers, one, other, steps):
    for name in ("off", "on", "off lora", "on lora"):
        assert answers[name].code == 0, answers[name].err
    plain, watched = (rows(folder / name) for name in (one, other))
    assert len(plain) == steps + 1 and not any(row.pop("kl", None) for row in plain)
    found = [row.pop("kl", None) for row in watched]
    assert plain == watched, "all that is measured beside it is the same to the last bit"
    assert found[0] is None and found[1] == 0 < min(found[2:]), found
    before, after = (saved(folder / name, steps) for name in (one, other))
    references = {name: after.pop(name) for name in list(after) if name.startswith("reference/")}
    assert before.keys() == after.keys() and references
    for name in before:
        np.testing.assert_array_equal(before[name], after[name], name)


def test_the_reference_is_the_first_policy(folder, answers):
    first = load_pretrained("tiny-random")[0]
    kept = {name: x for name, x in saved(folder / "on", 4).items() if name.startswith("reference/")}
    weights = [np.asarray(x) for x in jax.tree.leaves(first)]
    assert len(weights) == len(kept)
    for array in kept.values():
        assert any(array.shape == x.shape and np.array_equal(array, x) for x in weights)


def test_a_run_that_watches_goes_on_bit_for_bit(folder, answers):
    assert (answers["half"].code, answers["rest"].code) == (0, 0), answers["rest"].err
    assert rows(folder / "half") == rows(folder / "on")


def test_a_run_from_another_ones_weights_watches_how_far_it_is_from_those(folder, answers):
    assert answers["from"].code == 0, answers["from"].err
    assert [row.get("kl") for row in rows(folder / "from")] == [None, 0.0]


def test_the_diagnosis_reads_it(folder, answers):
    """A KL that a recipe does not hold is one that can run away."""
    written = [json.loads(line) for line in (folder / "on" / "metrics.jsonl").read_text().splitlines()]
    later = [written[-1] | {"step": step, "kl": 0.01 + 0.001 * step + (step > 40) * 2.0} for step in range(5, 80)]
    assert "kl_runaway" in {finding.kind for finding in diagnose(later)}
    assert "kl_runaway" not in {finding.kind for finding in diagnose([row | {"kl": None} for row in later])}


def test_what_cannot_be_watched_is_refused(folder, answers):
    for name, words in {
        "begun without": ("off was begun with other settings (output.monitor_kl: False -> True)", "--fresh"),
        "begun with": ("on was begun with other settings (output.monitor_kl: True -> False)", "--fresh"),
        "measured": ("output.monitor_kl True has nothing to add: recipe.algorithm.kl_coef 0.04", "leave it out"),
        "from data": ("output.monitor_kl is for reinforcement learning", "leave it out"),
    }.items():
        assert_refused(answers[name], *words)
