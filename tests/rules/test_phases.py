"""When phases end, from rows alone."""

import dataclasses
import math
from functools import partial

import pytest
from tiny import rules_in

from jaxrl_llm import config as configs
from jaxrl_llm.rules import DONE, PHASE, Decision, Phase, Reaches, Resets, Rules, Stalls, decide
from jaxrl_llm.rules.guards import WAITS, best_step, evaluation_result, on_stall, phase_ends, surviving_rows

SMOKE = configs.load_config("smoke")[1]


def ending(phase, following, every, test=""):
    return partial(phase_ends, phase=phase, following=following, evaluation_every=every, test=test)


def ends_at(phase, rows, every=2):
    """The step after which the phase has ended, and what is said; None where it has not."""
    memory = {}
    rules = {"phase": ending(phase, Phase("next"), every)}
    for row in rows:
        decision, memory = decide(rules, row, memory)
        if decision.next_phase:
            assert decision.snapshot
            return row["step"], decision.events[PHASE]
        assert decision == Decision()
    return None


def rows(*values, metric="kl", first=1):
    return [{"step": first + at} | ({} if value is None else {metric: value}) for at, value in enumerate(values)]


def test_after_its_steps_wherever_it_began():
    assert ends_at(Phase("a", 3), [{"step": 0}, *rows(1, 1, 1, 1)]) == (3, "next (a ended after 3 steps)")
    assert ends_at(Phase("a", 1), rows(1, first=41)) == (41, "next (a ended after 1 step)")
    assert ends_at(Phase("a", 5), rows(1, 1, 1)) is None


def test_once_a_metric_was_beyond_its_bound_so_many_times_in_a_row():
    above = Phase("a", until=Reaches("kl", above=0.5, times=2))
    assert ends_at(above, rows(0.6, 0.4, 0.6, 0.7))[0] == 4
    assert ends_at(above, rows(0.5, 0.5, 0.5)) is None, "at the bound is not above it"
    unmeasured = ends_at(above, rows(0.6, None, math.nan, 0.6))
    assert unmeasured == (4, "next (a ended since kl was above 0.5 in 2 measured steps in a row)")
    below = Phase("a", until=Reaches("entropy", below=0.1))
    found = ends_at(below, rows(0.3, 0.05, metric="entropy"))
    assert found == (2, "next (a ended since entropy was below 0.1)")


def test_the_condition_of_the_last_phase_ends_the_run():
    rule = ending(Phase("a", until=Reaches("kl", above=0.5)), None, 0)
    decision, _ = decide({"phase": rule}, {"step": 1, "kl": 0.6}, {})
    assert decision == Decision(DONE, "the phase a ends since kl was above 0.5")
    assert decide({"phase": rule}, {"step": 1, "kl": 0.4}, {})[0] == Decision()
    whole = dataclasses.replace(SMOKE, rules=Rules(until=Reaches("kl", above=0.5)))
    rule = ending(configs.phases_of(whole)[0], None, 0)
    assert decide({"phase": rule}, {"step": 1, "kl": 0.6}, {})[0].reason == "the run ends since kl was above 0.5"


@pytest.mark.parametrize("lower", [False, True])
def test_early_stopping_on_a_metric_by_patience(lower):
    """Every measurement counts, the first one too; what was not measured says nothing."""
    values = [3.0, 4.0, None, math.nan, 4.0, 3.5, 5.0, 4.0]
    values = [value if value is None or not lower else -value for value in values]
    rule = ending(Phase("", until=Stalls(2, "eval/loss", lower)), None, 0)
    memory, found = {}, []
    for row in rows(*values, 0.0, metric="eval/loss"):
        decision, memory = decide({"phase": rule}, row, memory)
        found.append(decision.stop)
    assert found[:8] == [None] * 5 + [DONE, None, None]
    assert (
        "the run ends since 2 measurements of eval/loss found nothing better"
        in decide({"phase": rule}, {"step": 9, "eval/loss": 9.0 if lower else -9.0}, memory)[0].reason
    )


BASELINES = {
    "nothing better than before training": ((0.5, 0.4, 0.5), 4),
    "better once": ((0.5, 0.6, 0.6, 0.6), 6),
    "unmeasured before training": ((None, 0.4, 0.4, 0.4), 6),
    "not a number before training": ((math.nan, 0.4, 0.4, 0.4), 6),
    "rising": ((0.1, 0.2, 0.3, 0.4), None),
}


@pytest.mark.parametrize("case", BASELINES)
@pytest.mark.parametrize("metric", ["", "eval/x/pass@1"])
def test_early_stopping_and_resets_by_stalls_have_one_baseline_the_evaluation_before_training(case, metric):
    results, step = BASELINES[case]
    rows = [{"step": 2 * at} | ({} if x is None else {"eval/x/pass@1": x}) for at, x in enumerate(results)]
    found = ends_at(Phase("a", until=Stalls(2, metric)), rows)
    assert (found and found[0]) == step
    own, resets = {}, []
    for row in rows:
        decision, own = on_stall(row, own, resets=Resets(on_stall=2), every=2)
        resets += [row["step"]] * decision.reset_reference
    assert resets[:1] == [step] * (step is not None)


@pytest.mark.parametrize("unmeasured", [None, math.nan])
def test_an_evaluation_that_is_not_a_number_has_no_result_live_or_read_from_a_file(unmeasured):
    row = {"step": 2, "eval/average/pass@1": unmeasured, "eval/a/pass@1": 0.9, "eval/a/reward": 1.0}
    assert evaluation_result(row) is None and evaluation_result(row | {"eval/average/pass@1": 0.3}) == 0.3


def test_where_a_rollback_went_and_phases_or_evaluations_changed_other_rows_last():
    row = lambda step, result=None, **more: (
        {"step": step} | ({} if result is None else {"eval/x/pass@1": result}) | more
    )
    back = {"rollback/to_step": 2}
    cases = {
        "nothing evaluated": ([row(1), row(2)], (), [[1, 2]], None),
        "the first of equal ones": ([row(0, 0.1), row(2, 0.5), row(4, 0.5)], (), [[0, 2, 4]], 2),
        "not a number": ([row(0, 0.1), row(2, None), row(3, math.nan)], (), [[0, 2, 3]], 0),
        "undone": ([row(0, 0.1), row(2, 0.3), row(3, 0.9), row(4, 0.8, **back), row(5, 0.2)], (), [[0, 2, 5]], 2),
        "a phase": ([row(0, 0.9), row(2, 0.8, **{PHASE: "b"}), row(4, 0.2), row(6, 0.3)], (), [[0, 2], [4, 6]], 6),
        "a phase to be evaluated": ([row(0, 0.4), row(2, 0.8, **{PHASE: "b"}), row(3)], (), [[0, 2], [3]], 2),
        "another evaluation": ([row(0, 0.9), row(2, 0.8), row(4, 0.2)], (2,), [[0, 2], [4]], 4),
        "undone in both": ([row(2, 0.3), row(4, 0.8), row(6, 0.9), row(7, **back)], (4,), [[2], []], 2),
    }  # fmt: skip
    for case, (history, tests, groups, best) in cases.items():
        assert [[one["step"] for one in group] for group in surviving_rows(history, tests)] == groups, case
        assert best_step(history, tests) == best, case


def test_whichever_comes_first():
    phase = Phase("a", 3, Reaches("kl", above=1.0))
    assert ends_at(phase, rows(2.0, 0.0))[0] == 1
    assert ends_at(phase, rows(0.0, 0.0, 0.0)) == (3, "next (a ended after 3 steps)")


@pytest.mark.parametrize(
    ("results", "step"), [([0.1, 0.2, 0.2, 0.1], 8), ([0.1, 0.1, 0.3, 0.2, 0.3], 10), ([0.1, 0.2, 0.3], None)]
)
def test_once_evaluations_found_nothing_better(results, step):
    tested = [{"step": 2 * at, "eval/average/pass@1": result} for at, result in enumerate(results, start=1)]
    between = [{"step": 2 * at - 1, "eval/average/pass@1": 0.0} for at in range(1, len(results) + 1)]
    found = ends_at(Phase("a", until=Stalls(2)), sorted(tested + between, key=lambda row: row["step"]))
    assert (found and found[0]) == step


@pytest.mark.parametrize(("every", "step"), [(2, 10), (8, 16)])
def test_a_metric_that_nobody_measures_is_said_once(every, step):
    def events(metric):
        memory, found = {}, {}
        rules = {"phase": ending(Phase("a", until=Reaches("kl_", above=1.0)), Phase("next"), every)}
        for row in rows(*[0.5] * 40, metric=metric):
            decision, memory = decide(rules, row, memory)
            if decision.events:
                found[row["step"]] = decision.events[WAITS]
        return found

    assert events("kl") == {step: "a waits for kl_, which no step so far has measured"}
    assert events("kl_") == {}, "below its bound it is measured"


def test_a_phase_that_a_guard_stops_is_still_to_end():
    class Stops:
        def __call__(self, row, own):
            return Decision(stop=3, reason="x"), own

    rules = {"phase": ending(Phase("a", 2), Phase("next"), 0), "guard": Stops()}
    decision, memory = decide(rules, {"step": 2}, {"phase": {"steps": 1}})
    assert decision.stop == 3 and not decision.next_phase and memory["phase"] == {"steps": 1}


def test_the_best_of_another_test_is_nothing_to_beat():
    other = dataclasses.replace(SMOKE.task, name="other")
    changed = [
        dataclasses.replace(SMOKE.evaluation, **change)
        for change in ({"task": other}, {"limit": 3}, {"samples": 2}, {"temperature": 0.5}, {"top_p": 0.5})
    ]
    runs = [dataclasses.replace(SMOKE, evaluation=one) for one in (SMOKE.evaluation, *changed)]
    tests = [rules_in(configs.with_recipe(run, "prorl_v1"))["stall"].keywords["test"] for run in runs]
    assert len(set(tests)) == len(tests)
    often = dataclasses.replace(SMOKE.evaluation, every=7, judge=None)
    assert configs.evaluation_key(dataclasses.replace(SMOKE, evaluation=often)) == tests[0]
    easy, hard = (partial(on_stall, resets=Resets(on_stall=1), every=1, test=test) for test in tests[:2])
    row = lambda step, result: {"step": step, "eval/x/pass@1": result}
    _, own = easy(row(0, 0.9), {})
    first, own = hard(row(1, 0.2), own)
    assert not first.reset_reference and own["best"] == 0.2, "it begins anew"
    assert not hard(row(2, 0.3), own)[0].reset_reference and hard(row(2, 0.2), own)[0].reset_reference
    assert easy(row(1, 0.8), {"best": 0.9, "stalled": 0})[0].reset_reference, "what was saved before tests had a name"
    phase = Phase("a", until=Stalls(1))
    ends = [ending(phase, Phase("b"), 1, test) for test in tests[:2]]
    _, own = ends[0](row(1, 0.9), {})
    assert ends[0](row(2, 0.2), own)[0].next_phase and not ends[1](row(2, 0.2), own)[0].next_phase
