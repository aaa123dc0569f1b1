"""What rules decide happens in a run: to its state, its records, its end and its exit code."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import commands
from learner.rollouts import one_device

from jaxrl_llm.checkpoints.store import Checkpoints, flatten
from jaxrl_llm.config import evaluation_key, read, whole
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.models import load_pretrained

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[1] / "fixtures" / "runs" / "ruled.py"
LINES = {
    "ruled": f"train {CONFIG} --run_dir ruled",
    "stalled": f"train {CONFIG} --run_dir stalled --steps 3 --recipe.resets.on_stall 1 --recipe.resets.with_optimiser "
    "--recipe.resets.reference_every 0 --recipe.resets.optimiser_every 0 --evaluation.every 1",
    "broken": f"train {CONFIG} --run_dir broken --learner.optimiser.learning_rate 1e38",
    "flat": f"train {CONFIG} --run_dir flat --recipe grpo --recipe.algorithm.kl_coef 0 "
    "--scoring.rewards.0.pattern .* --steps 9 --rollout.collect.patience 2 --output.checkpoint_every 9",
}
DONE, GUARD = 0, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ruled")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved(folder, step):
    """Arrays by name and host values of one checkpoint."""
    run = whole(read(folder / "config.json").run)
    model, _ = load_pretrained(run.model)
    like = abstract_state(model, build(run.learner.optimiser), run.recipe.algorithm.needs_reference)
    with Checkpoints(folder / "checkpoints") as store:
        state, host = store.restore(step, like, one_device())
    return jax.device_get(flatten(state)), host


def part(arrays, name):
    return {key.removeprefix(name): np.asarray(value) for key, value in arrays.items() if key.startswith(name)}


def same(one, other):
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def moments(arrays):
    return [value for key, value in part(arrays, "opt_state/").items() if value.ndim]


def test_resets_on_schedule_change_the_state_and_are_told(folder, answers):
    assert answers["ruled"].code == DONE, answers["ruled"].err
    events = {row["step"]: {name for name in row if name.startswith("event/")} for row in rows(folder / "ruled")}
    both = {2: {"event/optimiser_reset"}, 3: {"event/reference_reset"}, 4: {"event/optimiser_reset"}}
    assert events == {0: set(), 1: set()} | both
    states = {step: saved(folder / "ruled", step)[0] for step in (1, 2, 3, 4)}
    references = {step: part(arrays, "reference/") for step, arrays in states.items()}
    assert same(references[1], references[2]) and not same(references[2], references[3])
    assert same(references[3], part(states[3], "policy/")) and same(references[3], references[4])
    assert [any(np.any(x) for x in moments(arrays)) for arrays in states.values()] == [True, False, True, False]
    assert [int(arrays["updates"]) for arrays in states.values()] == [2, 4, 6, 8]


def test_a_controller_acts_on_the_next_step_and_is_saved(folder, answers):
    metrics = rows(folder / "ruled")[1:]
    # The target is far below any KL: doubled after each step whose KL was above it, halved where the reference was just
    # set.
    used = [row["kl_coef"] for row in metrics]
    for before, after, row in zip(used, used[1:], metrics, strict=False):
        assert after == before * (2 if row["controller/kl"] > 1e-9 else 0.5)
    assert used[0] == 0.04 and used[2] > used[1]
    last = metrics[-1]
    next_one = last["kl_coef"] * (2 if last["controller/kl"] > 1e-9 else 0.5)
    assert saved(folder / "ruled", 4)[1]["coefficients"] == {"kl_coef": next_one}


def test_a_stall_resets_reference_and_optimiser(folder, answers):
    assert answers["stalled"].code == DONE, answers["stalled"].err
    metrics = rows(folder / "stalled")
    results = [row["eval/digits/pass@1"] for row in metrics]
    assert max(results) == results[0], "the tiny model should not get better at sums"
    assert all(row["event/reference_reset"] and row["event/optimiser_reset"] for row in metrics[1:])
    arrays, host = saved(folder / "stalled", 2)
    assert same(part(arrays, "reference/"), part(arrays, "policy/")) and not any(np.any(x) for x in moments(arrays))
    key = evaluation_key(whole(read(folder / "stalled" / "config.json").run))
    assert host["memory"]["stall"] == {"best": results[0], "stalled": 0, "test": key}


def test_a_gradient_that_is_no_number_ends_the_run_with_the_state_before_it(folder, answers):
    answer = answers["broken"]
    assert answer.code == GUARD, answer.err
    line = answer.err.splitlines()[-1]
    assert "the gradient is not a number; the state before it is saved" in line
    assert "jaxrl-llm train broken --from broken --learner.optimiser.learning_rate 1e+37" in line
    last = rows(folder / "broken")[-1]
    assert last["event/not_a_number"] and last["step"] < 4
    arrays, _ = saved(folder / "broken", last["step"])
    assert int(arrays["updates"]) < 2 * last["step"], "the update of that gradient was not applied"


def test_a_reward_without_differences_is_told_and_ends_the_run(folder, answers):
    answer = answers["flat"]
    assert answer.code == GUARD, answer.err
    metrics = rows(folder / "flat")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert all("all advantages are 0" in row["event/teaches_nothing"] for row in metrics[1:])
    assert "2 steps in a row taught nothing" in answer.err.splitlines()[-1]
    assert saved(folder / "flat", 2)[1]["memory"]["teaches_nothing"] == {"empty": 2}
