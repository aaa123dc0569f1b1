"""Runs with guards on findings: they stop, or go back to before the trouble began, the same however often they were
interrupted.
"""

import dataclasses
import functools
import json
import shutil
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from commands import assert_refused, commands
from commands import rows_but_for_the_clock as rows
from histories import rows as made_up
from histories import sick
from learner.rollouts import one_device

from jaxrl_llm.checkpoints.store import Checkpoints, flatten, host_file
from jaxrl_llm.config import load_config, resolved, validate
from jaxrl_llm.diagnosis.detectors import EVERY, FindingTracker, looks
from jaxrl_llm.diagnosis.history import ROLLED_BACK
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.rules import (
    ASKED,
    BY_HAND,
    FOUND,
    GUARD,
    LR_SCALE,
    Decision,
    Resets,
    Rules,
    by_hand,
    decide,
    rules_of,
)
from jaxrl_llm.rules.guards import on_finding
from jaxrl_llm.sharding.distributed import ALONE
from jaxrl_llm.telemetry.progress import Schedule
from jaxrl_llm.trainer.state import explain_no_rollback, memory_after_rollback, newest_before, steps_moved

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[1] / "fixtures" / "runs" / "guarded.py"
GUARDED = f"train {CONFIG} --guard kl_runaway"
BACK = f"{GUARDED} --rules.on_guard rollback"
LINES = {
    "stop": f"{GUARDED} --run_dir stop",
    "back": f"{BACK} --run_dir back",
    "to 9": f"{BACK} --run_dir parts --steps 9",
    "to 10": f"{BACK} --run_dir parts --steps 10",
    "rest": f"{BACK} --run_dir parts",
    "lost": f"{BACK} --run_dir lost --output.keep 1",
    "phases": f"train {CONFIG.with_name('guarded_phases.py')} --run_dir phases",
    "nonsense": f"train {CONFIG} --guard entropy_colapse",
    "no guard": f"train {CONFIG} --rules.on_guard rollback",
    "from data": "train sft_quickstart --guard truncation",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("guarded")


@pytest.fixture(scope="module")
def answers(folder):
    return dict(zip(LINES, commands(list(LINES.values()), folder), strict=True))


def saved(folder, step):
    run = load_config(str(CONFIG))[1]
    model, _ = load_pretrained(run.model)
    like = abstract_state(model, build(run.learner.optimiser), True)
    with Checkpoints(folder / "checkpoints") as store:
        state, _ = store.restore(step, like, one_device())
    return {name: np.asarray(array) for name, array in jax.device_get(flatten(state)).items()}


def test_a_guard_stops_with_its_finding_and_the_state_saved(folder, answers):
    said = answers["stop"]
    assert said.code == GUARD and (folder / "stop" / "checkpoints" / "10").is_dir()
    assert "step 10: kl runaway since step 3: the KL to the reference rose from" in said.err and "; try " in said.err
    assert rows(folder / "stop")[-1]["event/guard"].startswith("kl runaway since step 3")


def test_a_rollback_goes_on_from_before_the_trouble_at_half_the_rate(folder, answers):
    assert answers["back"].code == 0, answers["back"].err
    found = rows(folder / "back")
    back = found[10]
    assert back[ROLLED_BACK] == 2 and back["event/rollback"].startswith(
        "to step 2, with 0.5 times the learning rate: kl"
    )
    assert found[2]["kl"] < 2 < 9 < found[9]["kl"] and found[11]["kl"] < 5
    np.testing.assert_allclose([row["lr"] for row in found[1:]], [0.05] * 10 + [0.025] * 3, rtol=1e-6)
    assert [row["lr_scale"] for row in found[1:]] == [1.0] * 10 + [0.5] * 3
    prompts = [row["prompts"] for row in found[1:]]
    assert prompts == sorted(set(prompts)), "data goes on where it is"
    host = json.loads(host_file(folder / "back" / "checkpoints" / "10").read_text())
    assert host["memory"]["last"] == {"undone": 8}, "the reference is as old as it was"


def test_its_weights_and_optimiser_are_those_of_then_and_its_version_is_new(folder, answers):
    then, now = saved(folder / "back", 2), saved(folder / "back", 10)
    assert (then.pop("updates"), now.pop("updates")) == (4, 20)
    for name, array in then.items():
        assert array.tobytes() == now[name].tobytes(), name
    left = saved(folder / "stop", 10)
    assert any(array.tobytes() != left[name].tobytes() for name, array in then.items())


def test_an_interrupted_run_goes_back_at_the_same_step_to_the_same_state(folder, answers):
    assert [answers[name].code for name in ("to 9", "to 10", "rest")] == [0] * 3
    assert rows(folder / "parts") == rows(folder / "back")
    one, other = saved(folder / "parts", 13), saved(folder / "back", 13)
    assert all(array.tobytes() == other[name].tobytes() for name, array in one.items())


def test_a_rollback_goes_to_the_first_checkpoint_of_its_phase_and_its_rate_outlives_the_phase(folder, answers):
    assert answers["phases"].code == 0, answers["phases"].err
    found = rows(folder / "phases")
    assert found[10][ROLLED_BACK] == 2 and found[2]["event/phase"] and found[11]["event/phase"]
    np.testing.assert_allclose([row["lr"] for row in found[1:]], [0.05] * 10 + [0.025] * 3, rtol=1e-6)
    assert found[12]["kl_coef"] == 0.003 and found[10]["kl_coef"] != 0.002, "what a controller moves begins anew"


def test_what_was_sampled_ahead_is_let_go_with_its_phase_and_its_policy_and_data_goes_on(folder, answers):
    assert answers["phases"].code == 0, answers["phases"].err
    found = rows(folder / "phases")[1:]
    anew = [row["step"] for row in found if row["sampler/logp_abs_diff_mean"] < 1e-5]
    assert anew == [1, 3, 11, 12], "the weights that learn have sampled it: after each phase, and after the rollback"
    assert np.diff([row["prompts"] for row in found]).tolist() == [8 if step in anew else 4 for step in range(2, 14)]


def test_no_run_goes_back_into_an_earlier_phase(folder, answers):
    run = load_config(str(CONFIG.with_name("guarded_phases.py")))[1]
    directory = folder / "phases"
    assert steps_moved(directory, 13, ALONE) == {2, 10, 11}
    assert steps_moved(directory, 10, ALONE) == {2, 10} and steps_moved(directory, None, ALONE) == set()
    assert (
        explain_no_rollback(run, directory, 2, 1)
        == "this phase began after step 2, and no run goes back into an earlier one"
    )
    assert explain_no_rollback(run, directory, 3, 1).startswith("no checkpoint of this phase from before it is kept")


def test_without_a_checkpoint_to_go_back_to_it_stops_and_says_so(answers):
    assert answers["lost"].code == GUARD
    assert "no checkpoint from before it is kept to go back to: set --output.keep higher" in answers["lost"].err


def test_what_cannot_work_is_refused(answers):
    assert_refused(answers["nonsense"], "entropy_colapse", "did you mean entropy_collapse?")
    assert_refused(answers["no guard"], "rules.on_guard rollback", "--guard KIND")
    assert_refused(answers["from data"], "--guard", "Supervised")


FINDING = {f"{FOUND}truncation": (7, "what", "this")}


def test_a_finding_is_acted_on_once_and_anew_after_a_rollback():
    rule = partial(on_finding, rules=Rules((), ("truncation",), "rollback", 0.5, 2))
    decision, own = rule({"step": 10, "lr_scale": 0.5, **FINDING}, {})
    assert decision.rollback == 7 and decision.coefficients == {LR_SCALE: 0.25}
    decision, own = rule({"step": 20, **FINDING}, own)
    assert decision.rollback == 7 and own["times"] == 2
    decision, own = rule({"step": 30, **FINDING}, own)
    assert decision.stop == GUARD and "truncation since step 7: what; try this" in decision.reason
    assert rule({"step": 40, **FINDING}, own)[0] == Decision()


def test_other_findings_are_none_of_its_business():
    rule = partial(on_finding, rules=Rules((), ("stalled",)))
    assert rule({"step": 10, **FINDING}, {}) == (Decision(), {})
    assert on_finding({"step": 10, **FINDING}, {}, Rules((), ("all",)))[0].stop == GUARD


def test_it_looks_at_the_same_steps_whether_it_was_interrupted_or_not():
    history = made_up(*sick("truncation", 60, 20))
    whole = FindingTracker(60)
    seen = {row["step"]: [one.kind for one in whole.found(row)] for row in history}
    assert any(seen.values()) and not any(kinds for step, kinds in seen.items() if not looks(step))
    for cut in (11, 25, 40):
        resumed = FindingTracker(60, history[:cut])
        assert all([one.kind for one in resumed.found(row)] == seen[row["step"]] for row in history[cut:])
    assert [step for step in range(1, 41) if looks(step)] == [EVERY, 2 * EVERY, 3 * EVERY, 4 * EVERY]


def test_what_a_policy_did_that_was_left_is_forgotten():
    history = made_up(*sick("truncation", 60, 20))
    sight = FindingTracker(60, [*history[:40], {"step": 41, ROLLED_BACK: 10}])
    assert not sight.found(history[50]), "ten healthy rows, and one that is not"


def test_what_guards_see_after_a_rollback_does_not_depend_on_when_the_run_was_interrupted():
    sick_rows = made_up(*sick("gradient_spikes", 60, 20))
    history = [*sick_rows[:40], sick_rows[40] | {ROLLED_BACK: 10}, *sick_rows[1:19]]
    history = [row | {"step": number} for number, row in enumerate(history)]
    live = FindingTracker(90)
    seen = []
    for row in history[:41]:
        seen += live.found({name: value for name, value in row.items() if name != ROLLED_BACK})
    live.take({ROLLED_BACK: 10})
    assert {one.kind for one in seen} == {"gradient_spikes"}, "which are told when they are over, too"
    resumed = FindingTracker(90, history[:41])
    looked = [row for row in history[41:] if any(name.startswith("eval/") for name in row)]
    assert looked
    for row in history[41:]:
        assert live.found(row) == resumed.found(row) == [], row["step"]


def test_a_damaged_checkpoint_is_not_gone_back_to(folder, answers, tmp_path):
    assert answers["back"].code == 0
    kept = shutil.copytree(folder / "back" / "checkpoints", tmp_path / "checkpoints")
    due = Schedule(13, 0, 2).saves
    assert newest_before(kept, 7, 0, due) == 6 and newest_before(kept, 6, 0, due) == 4
    assert newest_before(kept, 7, 1, due) is None and newest_before(kept, 2, 0, due) is None
    assert newest_before(kept, 7, 0, Schedule(13, 0, 4).saves) == 4, "6 is one at which the run was stopped"
    assert newest_before(kept, 7, 0, Schedule(13, 0, 4, {6}).saves) == 6, "or at which it went back"
    next(path for path in (kept / "6").rglob("*") if path.parent.name == "d").write_bytes(b"")
    assert newest_before(kept, 7, 0, due) == 4


def test_rules_remember_what_they_did_when_the_run_was_where_it_goes_back_to():
    then = {"entropy": {"moved": 0.01}, "phase": {"steps": 2, "times": 1}, "last": {"event/reference_reset": 2}}
    now = {"entropy": {"moved": 0.1}, "phase": {"steps": 8, "times": 3}, "last": {"event/reference_reset": 7}}
    assert memory_after_rollback(then, now | {"guard": {"times": 2}}, 5) == {
        **then,
        "guard": {"times": 2},
        "phase": {"steps": 8, "times": 1},
        "last": {"event/reference_reset": 2, "undone": 5},
    }
    assert memory_after_rollback({}, {"guard": {"times": 1}}, 1) == {"guard": {"times": 1}, "last": {"undone": 1}}


def test_a_reference_is_no_older_for_steps_that_were_undone():
    """Of 20 steps the run went back to 10, then from 24 to 22: the reference of step 6 was 4 steps old, then 4 + 2."""
    rules = rules_of(Resets(on_kl_jump=3.0, kl_window=4), 1)
    quiet = lambda steps, memory: functools.reduce(
        lambda m, s: decide(rules, {"step": s, "kl": 0.1}, m)[1], steps, memory
    )
    then = quiet(range(7, 11), {"last": {"event/reference_reset": 6}})
    memory = memory_after_rollback(then, quiet(range(11, 21), then), 10)
    ages = lambda step, memory: decide({"age": Aged()}, {"step": step}, memory)[0].coefficients["age"]
    assert ages(21, memory) == 5
    jumped, _ = decide(rules, {"step": 21, "kl": 0.4}, memory)
    assert jumped.reset_reference, "the KLs of before are of the same reference"
    later = quiet([21, 22], memory)
    assert ages(25, memory_after_rollback(later, quiet([23, 24], later), 2)) == 7
    reset, after = decide(
        {"by_hand": partial(by_hand, resets=Resets())},
        {"step": 25, ASKED: {"id": "a", "with_optimiser": False}},
        memory,
    )
    assert reset.reset_reference and ages(26, after) == 1


@dataclasses.dataclass(frozen=True)
class Aged:
    """Tells how old the reference is."""

    def __call__(self, row, own):
        return Decision(coefficients={"age": row["reference/age"]}), own


def test_a_reset_by_hand_that_is_undone_is_made_again_once():
    rules, ask = (
        {BY_HAND: partial(by_hand, resets=Resets())},
        lambda name: {ASKED: {"id": name, "with_optimiser": name == "b"}},
    )
    _, then = decide(rules, {"step": 8} | ask("a"), {})
    assert memory_after_rollback(then, then, 3)[BY_HAND] == then[BY_HAND], "this one was before"
    _, now = decide(rules, {"step": 12} | ask("b"), then)
    memory = json.loads(json.dumps(memory_after_rollback(then, now, 5)))
    for asked in ({}, ask("b")):
        decision, after = decide(rules, {"step": 16} | asked, memory)
        assert decision.reset_reference and decision.reset_optimiser and not after[BY_HAND].get("again")
        assert decision.events["event/reference_reset"] == "by hand, again after a rollback"
        assert not decide(rules, {"step": 17} | asked, after)[0].reset_reference
    both, _ = decide(rules, {"step": 16} | ask("c"), memory)
    assert both.reset_optimiser and both.events["event/reference_reset"] == "by hand"
    assert decide(rules, {"step": 16}, memory_after_rollback(memory, after, 1))[0].reset_reference, (
        "undone a second time"
    )


def test_bounds_of_a_rollback_are_refused_with_and_without_one():
    run = load_config(str(CONFIG))[1]
    for changes, words in (
        ({"slower": 0.0}, "rules.slower must be above 0 and at most 1, got 0.0"),
        ({"slower": 1.5, "guards": ("all",), "on_guard": "rollback"}, "rules.slower must be above 0 and at most 1"),
        ({"rollbacks": 0}, "rules.rollbacks must be at least 1, got 0"),
    ):
        with pytest.raises(InputError, match=words):
            validate(resolved(dataclasses.replace(run, rules=Rules(**changes))))
