"""Rules, each by itself: what they decide from rows alone, and that their decisions act on a state."""

import dataclasses
import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import Compilations, rules_in

from jaxrl_llm import codec
from jaxrl_llm import config as configs
from jaxrl_llm.algorithms.kl import AdaptiveKL, ProportionalKL
from jaxrl_llm.codec import jsonable
from jaxrl_llm.data import Texts
from jaxrl_llm.diagnosis.detectors import FindingTracker, diagnose
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rollout.settings import Ptx
from jaxrl_llm.rules import (
    DONE,
    FOUND,
    GUARD,
    LAST,
    Decision,
    Phase,
    Resets,
    Rules,
    decide,
    not_a_number,
)  # fmt: skip
from jaxrl_llm.rules.guards import (
    few_kept,
    kl_controlled,
    on_finding,
    on_schedule,
    on_stall,
    phase_ends,
    reward_fails,
    teaches_nothing,
)
from jaxrl_llm.tasks import Table
from jaxrl_llm.trainer.state import LoopState, apply_resets
from jaxrl_llm.types import Role, TrainState

SMOKE = configs.load_config("smoke")[1]
TAUGHT = {"updates": 1.0, "reward/mean": 0.5, "advantage/nonzero_fraction": 0.5, "grad_norm": 1.0}


def run_through(rule, rows):
    """The decision of each row; what the rule remembers goes through JSON, as in a checkpoint."""
    own, decisions = {}, []
    for row in rows:
        decision, own = rule(row, json.loads(json.dumps(own)))
        decisions.append(decision)
    return decisions


def resets_at(rule, results, steps=None):
    """Steps at which the reference is reset, where evaluations found these results."""
    steps = range(len(results)) if steps is None else steps
    rows = [
        {"step": step} | ({} if x is None else {"eval/sums/pass@1": x}) for step, x in zip(steps, results, strict=True)
    ]
    return [
        row["step"] for row, decision in zip(rows, run_through(rule, rows), strict=True) if decision.reset_reference
    ]


def stalls_at(count, every, **settings):
    return partial(on_stall, resets=Resets(on_stall=count, **settings), every=every)


def controlled(controller):
    return partial(kl_controlled, reads=controller.reads, controller=controller)


def teaching(patience, only_advantages, reads):
    return partial(teaches_nothing, patience=patience, only_advantages=only_advantages, filter_reads=reads)


def checked(rate):
    return partial(not_a_number, learning_rate=rate)


def test_a_schedule_acts_at_its_multiples_and_never_at_step_0():
    rows = [{"step": step} for step in range(7)]
    for reference, optimiser in ((True, False), (False, True), (True, True)):
        resets = Resets(with_optimiser=optimiser)
        decisions = run_through(partial(on_schedule, resets=resets, every=3, reference=reference), rows)
        assert [d.reset_reference for d in decisions] == [reference and s in (3, 6) for s in range(7)]
        assert [d.reset_optimiser for d in decisions] == [optimiser and s in (3, 6) for s in range(7)]
        events = {"event/reference_reset": reference, "event/optimiser_reset": optimiser}
        assert decisions[3].events == {name: True for name, made in events.items() if made}
        assert decisions[4] == Decision()


def test_a_stall_is_so_many_evaluations_without_a_better_result():
    rule = stalls_at(2, 1, with_optimiser=True)
    assert resets_at(rule, [0.1, 0.2, 0.2, 0.1, 0.2, 0.3, 0.3, 0.3]) == [3, 7]
    assert resets_at(rule, [0.1, None, 0.1, None, None, 0.1]) == [5], "steps without an evaluation do not count"
    assert resets_at(rule, [0.0, 0.0, 0.0]) == [2], "the evaluation before training is the first to beat"
    assert all(d.reset_optimiser == d.reset_reference for d in run_through(rule, [{"step": 0, "eval/x/pass@1": 0}] * 3))
    assert not any(d.reset_optimiser for d in run_through(stalls_at(2, 1), [{"step": 0, "eval/x/pass@1": 0}] * 3))


def test_an_evaluation_that_is_only_the_last_of_a_shorter_run_does_not_count():
    longer = resets_at(stalls_at(2, 4), [0.5, 0.4, 0.3, 0.2], [0, 4, 8, 12])
    extended = resets_at(stalls_at(2, 4), [0.5, 0.4, 0.9, 0.3, 0.2], [0, 4, 6, 8, 12])
    assert extended == longer == [8]


def test_where_nothing_is_verified_the_reward_of_an_evaluation_decides():
    rows = [{"step": 0, "eval/x/reward": 0.5}, {"step": 1, "eval/x/reward": 0.4}]
    assert [d.reset_reference for d in run_through(stalls_at(1, 1), rows)] == [
        False,
        True,
    ]


def test_a_controller_moves_the_coefficient_of_the_next_step():
    rule, used, coefficient = controlled(AdaptiveKL(0.1)), [], 0.04
    for kl in (0.2, 0.1, 0.01, math.nan):
        row = {"step": 1, "kl_coef": coefficient, "controller/kl": kl, "completions": 64}
        coefficient = rule(row, {})[0].coefficients.get("kl_coef", coefficient)
        used.append(coefficient)
    assert used == [0.08, 0.08, 0.04, 0.04]
    row = {"step": 1, "kl_coef": 0.2, "controller/kl": 0.1, "controller/kl_sequence": 12.0, "completions": 256}
    assert controlled(ProportionalKL())(row, {})[0].coefficients["kl_coef"] == pytest.approx(0.201024)
    assert controlled(AdaptiveKL(0.1))({"step": 1}, {})[0] == Decision(), "no update, no verdict"


def test_a_gradient_that_is_no_number_stops_the_run_with_advice():
    rule = checked(2e-5)
    for updates in (0.0, 1.0):
        decision, _ = rule(TAUGHT | {"step": 4, "updates": updates, "updates/not_finite": 1.0}, {})
        assert (decision.stop, decision.remedy) == (GUARD, "--learner.optimiser.learning_rate 2e-06")
        assert decision.events["event/not_a_number"] == decision.reason
    assert rule(TAUGHT | {"step": 4, "updates/not_finite": 0.0}, {})[0] == Decision()
    nothing = {"step": 4, "updates": 0.0, "updates/not_finite": 0.0, "grad_norm": math.nan}
    assert rule(nothing, {})[0] == Decision() == rule({"step": 4, "updates": 0.0}, {})[0], "no update, no gradient"


BROKEN = {
    "loss": {"loss": math.nan},
    "infinite loss": {"loss": -math.inf},
    "log-probabilities": {"policy_kl": math.nan},
    "ratios": {"ratio": math.inf},
    "entropy": {"entropy": math.nan},
    "advantages": {"advantage/abs_mean": math.nan},
    "samples": {"not_finite/sampler_logp": 2.0},
    "reward": {"reward/mean": math.inf},
    "one of several rewards": {"reward/mine": -math.inf},
    "held-out texts": {"eval/text/loss": math.nan},
    "gap to the sampler": {"sampler/logp_abs_diff_max": math.inf},
}
MISSING = {
    "reward": {"reward/mean": math.nan, "reward/mine": math.nan},
    "no fresh token": {"sampler/logp_abs_diff_mean": math.nan, "sampler/logp_abs_diff_max": math.nan},
    "no reference": {"kl": math.nan},
    "nothing clipped": {"clip_probability/low": math.nan},
    "no update": {"updates": 0.0, "loss": math.nan, "grad_norm": math.nan, "entropy": math.nan},
    "an exponential": {"eval/text/perplexity": math.inf},
    "another role's": {"critic/loss": math.nan, "critic/updates": 1.0},
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_number_stops_the_run_and_says_its_name(name):
    row = TAUGHT | {"step": 4, "updates": 1.0, "loss": 0.5} | BROKEN[name]
    decision, _ = checked(1e-5)(row, {})
    named = next(iter(BROKEN[name])).removeprefix("not_finite/")
    assert decision.stop == GUARD and decision.reason == f"{named} is not a number; the state after it is saved"
    assert decision.events == {"event/not_a_number": decision.reason}
    for written in (row | decision.events, jsonable(row | decision.events)):
        (finding,) = diagnose([{"step": 3}, written, {"step": 5}])
        assert (finding.kind, finding.step) == ("not_a_number", 4) and named in finding.what
    assert [finding.kind for finding in FindingTracker(10).found(row | {"step": 10} | decision.events)] == [
        "not_a_number"
    ]


@pytest.mark.parametrize("name", MISSING)
def test_what_was_not_measured_stops_nothing(name):
    row = TAUGHT | {"step": 4, "updates": 1.0, "loss": 0.5} | MISSING[name]
    assert checked(1e-5)(row, {})[0] == Decision()


def test_the_first_number_to_blame_is_named_and_a_rollback_undoes_it():
    refused = TAUGHT | {"step": 4, "updates/not_finite": 1.0}
    for names, said in (
        (("loss",), "loss"),
        (("grad_norm", "loss"), "the gradient"),
        (("advantages", "loss"), "advantages"),
    ):
        row = refused | {f"not_finite/{name}": 1.0 for name in names}
        assert checked(1e-5)(row, {})[0].reason == f"{said} is not a number; the state before it is saved"
    critic = {"step": 4, "critic/updates": 1.0, "critic/loss": math.nan, "critic/grad_norm": 1.0}
    rule = partial(not_a_number, learning_rate=1e-5, prefix="critic/")
    assert rule(critic, {})[0].reason == "critic/loss is not a number; the state after it is saved"
    assert [finding.what for finding in diagnose([critic])] == ["step 4: critic/loss is not a number"]
    assert diagnose([critic, {"step": 5, "rollback/to_step": 3}]) == []


def test_a_critics_gradient_has_a_guard_and_a_remedy_of_its_own():
    run = configs.resolved(configs.with_recipe(SMOKE, "ppo"))
    broken = TAUGHT | {"step": 4, "critic/updates/not_finite": 1.0}
    decision, _ = decide(rules_in(run), broken, {})
    assert decision.stop == GUARD and "the gradient of the critic is not a number" in decision.reason
    assert decision.remedy == "--recipe.critic.optimiser.learning_rate 9e-07"
    assert decide(rules_in(SMOKE), broken, {})[0].stop is None


def test_a_reward_that_fails_for_all_stops_the_run():
    row = {"step": 1, "reward/mine/failed_fraction": 1.0, "event/reward_failed": "mine.py:7: KeyError: 'x'"}
    decision, _ = reward_fails(row, {})
    assert decision.stop == GUARD and "mine" in decision.reason and "mine.py:7: KeyError" in decision.reason
    assert reward_fails(row | {"reward/mine/failed_fraction": 0.9}, {})[0] == Decision()


def test_an_evaluation_of_which_nothing_could_be_scored_stops_the_run():
    row = {"step": 4, "eval/sums/failed_fraction": 1.0, "event/evaluation_failed": "sums: 2 of 2 answers: no server"}
    decision, _ = reward_fails(row, {})
    assert decision.stop == GUARD and "no server" in decision.reason
    assert reward_fails(row | {"eval/sums/failed_fraction": 0.5}, {})[0] == Decision()


EMPTY = {
    "updates": 0.0,
    "completions/mean_length": 5.0,
    "reward/zero_std_fraction": 0.2,
    "dynamic_sampling/kept_fraction": 0.02,
}
CASES = {
    "the filter": ("accuracy", False, EMPTY, "2 % of groups kept: your reward varies, accuracy does not"),
    "all equal": ("reward", False, EMPTY | {"reward/zero_std_fraction": 1.0}, "reward is the same for all completions"),
    "masked": ("", False, EMPTY, "no token is in the loss"),
    "kept and masked": ("accuracy", False, EMPTY | {"completions": 16}, "no token is in the loss"),
    "carried and masked": (
        "accuracy",
        False,
        EMPTY | {"dynamic_sampling/kept_fraction": math.nan},
        "no token is in the loss",
    ),
    "flat": ("", True, TAUGHT | {"advantage/nonzero_fraction": 0.0}, "all advantages are 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_that_teach_nothing_are_told_and_end_the_run(case):
    reads, only_advantages, empty, words = CASES[case]
    rule = teaching(3, only_advantages, reads)
    rows = [empty, empty, TAUGHT, empty, empty, empty]
    decisions = run_through(rule, [row | {"step": step} for step, row in enumerate(rows, start=1)])
    assert [d.stop for d in decisions] == [None] * 5 + [GUARD]
    assert all(words in d.events["event/teaches_nothing"] for d in decisions if d != decisions[2])
    assert words in decisions[5].reason and decisions[2] == Decision()
    never = run_through(partial(rule, patience=0), [empty | {"step": 1}] * 9)
    assert all(d.stop is None and d.events for d in never)


def test_a_gradient_that_is_no_number_is_another_rules_matter():
    assert teaching(1, True, "")(EMPTY | {"step": 1, "updates/not_finite": 1.0}, {})[0] == Decision()


def test_a_flat_batch_still_teaches_where_something_else_is_in_the_loss():
    flat = TAUGHT | {"step": 1, "advantage/nonzero_fraction": 0.0}
    assert teaching(1, False, "")(flat, {})[0] == Decision()
    assert teaching(1, True, "")(flat, {})[0].stop == GUARD
    at_the_reference, _ = teaching(1, False, "")(flat | {"grad_norm": 0.0}, {})
    assert at_the_reference.stop == GUARD and "the rewards of each group are equal" in at_the_reference.reason
    moving = TAUGHT | {"step": 1, "grad_norm": 0.0}
    assert teaching(1, False, "")(moving, {})[0] == Decision(), "advantages that cancel are advantages"
    texts = Ptx(Texts(Table("texts.jsonl")))
    for ptx in (None, texts):
        collect = dataclasses.replace(SMOKE.rollout.collect, ptx=ptx)
        rollout = dataclasses.replace(SMOKE.rollout, collect=collect)
        run = dataclasses.replace(SMOKE, recipe=RECIPES["dapo"], rollout=rollout)
        assert rules_in(run)["teaches_nothing"].keywords["only_advantages"] == (ptx is None)


@pytest.mark.parametrize("reads", ["", "accuracy"])
def test_a_step_without_any_reward_says_so(reads):
    none = {"step": 1, "reward/mean": math.nan, "reward/zero_std_fraction": math.nan, "completions/mean_length": 5.0}
    flat = TAUGHT | none | {"advantage/nonzero_fraction": 0.0, "reward/accuracy": 1.0}
    row = EMPTY | none if reads else flat
    decision, _ = teaching(1, False, reads)(row, {})
    assert decision.stop == GUARD and "no completion could be scored: the reward is NaN for all" in decision.reason
    carried = flat | {"advantage/nonzero_fraction": 0.5}
    assert teaching(1, False, reads)(carried, {})[0] == Decision(), "groups of earlier steps teach"


def test_a_filter_that_keeps_few_groups_is_told_with_the_setting_that_helps():
    def told(shares, groups=12, reads="accuracy", alike=0.9):
        rows = [
            {
                "dynamic_sampling/kept_fraction": x,
                "dynamic_sampling/finished": groups,
                "reward/zero_std_fraction": alike,
            }
            for x in shares
        ]
        decisions = run_through(
            partial(few_kept, filter_reads=reads, group=8),
            [{"step": step} | row for step, row in enumerate(rows, start=1)],
        )
        return {step: d.events["event/few_kept"] for step, d in enumerate(decisions, start=1) if d.events}

    assert told([1 / 12] * 9) == {
        3: "8.3 % of groups kept: accuracy is the same for all completions of the others; --rollout.group 16 makes "
        "more of them differ, rollout.collect.curriculum asks others"
    }, "once, and of no fewer than 32 groups"
    assert told([0.1] * 9) == {} == told([0.0, 0.5, 0.0, 0.5]) == told([math.nan] * 9)
    assert list(told([0.0] * 3 + [0.15] * 9 + [0.0] * 3)) == [3], "a share about the bound is not told again and again"
    assert list(told([0.0] * 3 + [0.5] * 9 + [0.0] * 9)) == [3, 17]
    by_reward = told([0.05], 512, alike=0.4)
    assert by_reward[1].endswith("; rewards differ in 60 %: --recipe.filter_groups reward keeps those")
    assert "--rollout.group 16" in told([0.05], 512, "reward", alike=0.4)[1]


def test_a_step_in_which_only_the_critic_learns_teaches():
    rule = teaching(1, True, "")
    warming = {"step": 1, "updates": 0.0, "completions/mean_length": 5.0, "critic/updates": 4.0, "critic/loss": 0.1}
    flat = TAUGHT | {"step": 1, "advantage/nonzero_fraction": 0.0, "critic/updates": 4.0}
    assert rule(warming, {}) == (Decision(), {"empty": 0}) == rule(flat | {"critic/loss": 0.1}, {})
    decision, _ = rule(flat | {"critic/loss": 0.0}, {})
    assert decision.stop == GUARD and "the critic predicts every reward" in decision.reason
    empty = {"critic/updates": 0.0, "critic/loss": math.nan}
    assert "no token is in the loss" in rule(warming | empty, {})[0].reason


def test_a_task_that_is_solved_ends_well():
    rule, row = (
        teaching(3, True, "accuracy"),
        EMPTY | {"step": 1, "reward/accuracy": 1.0, "reward/zero_std_fraction": 1.0},
    )
    last = run_through(rule, [row] * 3)[-1]
    assert last.stop == DONE and last.reason.startswith("solved: every completion of the last 3 steps")
    assert run_through(rule, [row, row, row | {"reward/accuracy": 0.99}])[-1].stop == GUARD
    again = run_through(rule, [row | {"reward/accuracy": 0.0}] + [row] * 3)
    assert [d.stop for d in again] == [None, None, GUARD, DONE], "one that a guard has stopped may be resumed"
    assert again[-1].reason.startswith("solved: every completion of the last 3 steps")


@pytest.mark.parametrize(
    "shares",
    [(0.0, 0.0, 1.0), (1.0, 0.0, 1.0), (0.0, 1.0, 1.0), (0.99, 1.0, 1.0), (math.nan, 1.0, 1.0), ("fails", 1.0, 1.0)],
)
def test_a_task_is_solved_by_all_steps_of_the_window_not_by_its_last(shares):
    flat = EMPTY | {"reward/zero_std_fraction": 1.0, "completions/mean_length": 3.0}
    failing = {"reward/accuracy": 1.0, "reward/checker/failed_fraction": 0.25}
    rows = [
        flat | {"step": step} | (failing if share == "fails" else {"reward/accuracy": share})
        for step, share in enumerate(shares, start=1)
    ]
    waiting = {"step": 9, "updates": 0.0, "completions/mean_length": math.nan}
    for known in (rows, [rows[0], waiting, *rows[1:]]):
        last = run_through(teaching(3, True, "accuracy"), known)[-1]
        assert last.stop == GUARD and last.reason.startswith("3 steps in a row taught nothing")


def test_a_step_that_only_waits_for_its_groups_is_told_and_does_not_count():
    waiting = {"step": 1, "updates": 0.0, "completions/mean_length": math.nan}
    decisions = run_through(
        teaching(2, True, "accuracy"), [waiting] * 9 + [EMPTY | {"step": 1}, waiting, EMPTY | {"step": 1}]
    )
    assert [d.stop for d in decisions] == [None] * 11 + [GUARD]
    assert all(d.events for d in decisions)
    assert teaching(1, True, "")({"step": 0}, {})[0] == Decision(), "before training there is nothing to teach"


EVERY_2 = partial(on_schedule, resets=Resets(), every=2)


def test_decisions_become_one_and_a_guard_comes_before_resets():
    rules = {
        "a": EVERY_2,
        "b": partial(on_schedule, resets=Resets(), every=3, reference=False),
        "guard": checked(1.0),
    }
    decision, memory = decide(rules, TAUGHT | {"step": 6}, {})
    assert decision.reset_reference and decision.reset_optimiser and decision.stop is None
    assert decision.events == {"event/reference_reset": True, "event/optimiser_reset": True}
    assert memory.keys() == rules.keys() | {"last"}
    broken, _ = decide(rules, TAUGHT | {"step": 6, "updates/not_finite": 1.0}, {})
    assert broken.stop == GUARD and not broken.reset_reference and not broken.reset_optimiser
    assert broken.events.keys() == {"event/not_a_number"}


@pytest.mark.slow
def test_apply_copies_the_policy_and_empties_the_optimiser():
    run = dataclasses.replace(SMOKE, recipe=dataclasses.replace(SMOKE.recipe, resets=Resets(reference_every=1)))
    policy, seen = {"w": jnp.full((4, 4), 2.0)}, {"w": jnp.ones((4, 4))}
    optimiser = build(run.learner.optimiser)
    _, used = optimiser.update(seen, optimiser.init(policy), policy)
    state = TrainState({"policy": Role(policy, used, jnp.int32(3))}, {"reference": seen})
    unchanged = apply_resets(Decision(), state, run)
    assert unchanged is state
    moved = apply_resets(Decision(reset_reference=True), state, run)
    np.testing.assert_array_equal(moved.reference["w"], policy["w"])
    assert moved.reference["w"].unsafe_buffer_pointer() != policy["w"].unsafe_buffer_pointer()
    assert moved.policy.opt_state is used
    anew = apply_resets(Decision(reset_optimiser=True), state, run)
    assert anew.reference is seen and not any(np.any(x) for x in jax.tree.leaves(anew.policy.opt_state))
    assert any(np.any(x) for x in jax.tree.leaves(used)) and int(anew.policy.updates) == 3
    assert apply_resets(Decision(reset_reference=True), state._replace(frozen={}), run).reference is None


def test_what_rules_remember_is_saved():
    host = LoopState(memory={"stall": {"best": 0.3, "stalled": 2}}, coefficients={"kl_coef": 0.08})
    assert LoopState.from_json(json.loads(json.dumps(codec.to_json(vars(host)))), ()) == host


def test_resets_after_the_first_compile_nothing():
    policy = {"w": jnp.full((3, 5), 2.0)}
    state = TrainState({"policy": Role(policy, build(SMOKE.learner.optimiser).init(policy), jnp.int32(0))}, {})
    apply_resets(Decision(reset_optimiser=True), state, SMOKE)
    with Compilations() as compilations:
        for _ in range(2):
            again = dataclasses.replace(SMOKE, learner=dataclasses.replace(SMOKE.learner))
            apply_resets(Decision(reset_optimiser=True), state, again)
    assert not compilations.heard


def test_what_rules_remember_that_are_not_there_stays():
    before = {"by_hand": {"id": "a", "step": 3}, "controller": {}}
    _, memory = decide({"controller": controlled(AdaptiveKL(0.1))}, {"step": 4}, before)
    assert memory == before


def test_nothing_else_acts_on_a_run_that_goes_back_or_is_stopped():
    rules = {
        "guard": partial(on_finding, rules=Rules((), ("truncation",), "rollback", 0.5, 2)),
        "reference": partial(on_schedule, resets=Resets(with_optimiser=True), every=1),
        "controller": controlled(AdaptiveKL(0.1)),
        "phase": partial(phase_ends, phase=Phase("a", steps=1), following=Phase("b"), evaluation_every=0),
    }
    row = {"step": 9, "kl_coef": 0.04, "controller/kl": 0.2, "completions": 64, "lr_scale": 1.0, "updates": 1.0}
    row[f"{FOUND}truncation"] = (7, "what", "this")
    decision, memory = decide(rules, row, {})
    assert decision == Decision(rollback=7, reason=decision.reason, coefficients={"lr_scale": 0.5})
    assert memory["guard"] == {"times": 1} and memory["phase"] == {} and LAST not in memory
    stopped, memory = decide(rules | {"stop": checked(0.1)}, row | {"updates/not_finite": 1.0}, {})
    assert stopped.stop == GUARD and stopped.rollback is None and memory["guard"] == {}, "it has not gone back"
