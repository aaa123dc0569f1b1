"""Every trouble is found near where it began, in runs of any length, noisy or not; healthy runs are left alone."""

import copy
import dataclasses
import functools
import math
import operator
import re
import time
import warnings

import numpy as np
import pytest
from histories import change, flat_then, healthy, kinds, of, rise, rows, sick

from jaxrl_llm import config, recipes, rewards
from jaxrl_llm.diagnosis.history import MEASURED, ROLLED_BACK, history
from jaxrl_llm.tasks import Task
from jaxrl_llm.telemetry import Finding, diagnose

MATTERS = {
    "entropy_collapse": ["entropy", "reward/mean"],
    "entropy_explosion": ["entropy"],
    "length_collapse": ["completions/mean_length", "reward/mean"],
    "length_explosion": ["completions/mean_length", "reward/mean"],
    "truncation": ["completions/truncated_fraction"],
    "reward_hacking": ["reward/mean"],
    "no_signal": ["reward/zero_std_fraction", "reward/mean"],
    "kl_runaway": ["kl"],
    "clip_saturation": ["clip_fraction/high"],
    "sampler_mismatch": ["sampler/logp_abs_diff_mean"],
    "gradient_spikes": ["grad_norm"],
    "stalled": ["reward/mean"],
    "repetition": ["completions/repetition_fraction"],
    "overfitting": ["reward/mean", "reward/accuracy"],
    "tools_unused": ["episode/tools", "episode/tool_calls", "reward/mean"],
    "tools_failing": ["episode/tool_calls", "episode/tool_errors", "reward/mean"],
    "turns_growing": ["episode/turns", "reward/mean"],
}
"""What alone must be there for a kind to be found."""
AT_ONCE = {"gradient_spikes", "reward_hacking", "stalled", "overfitting"}
TESTED = {"reward_hacking", "overfitting"}
"""Kinds that take evaluations."""
"""Kinds whose histories have one shape."""


def sick_rows(kind, steps, began, shape, noise, seed):
    columns, tested = sick(kind, steps, began, shape, noise, seed)
    return rows(columns, tested, 5 if steps < 100 else 10, noise, seed)


@pytest.mark.slow(but={f"{steps}-{kind}" for steps in (30, 400) for kind in MATTERS})
@pytest.mark.parametrize("kind", MATTERS)
@pytest.mark.parametrize("steps", [30, 100, 400, 2000])
def test_each_trouble_is_found_near_where_it_began(kind, steps):
    for shape in ("step",) if kind in AT_ONCE or steps == 2000 else ("step", "ramp", "exp"):
        for noise in (0.0, 0.03):
            for seed in (0, 1) if steps < 2000 else (0,):
                began = round(steps * (0.4 if kind == "stalled" else 0.5 if seed else 0.6))
                found = of(kind, diagnose(sick_rows(kind, steps, began, shape, noise, seed)))
                assert found is not None, f"{shape} at {began} with noise {noise}, seed {seed}"
                assert abs(found.step - began) <= max(5, 0.1 * steps), f"{shape} at {began}: {found}"


@pytest.mark.parametrize("kind", MATTERS)
def test_the_metrics_that_matter_are_enough(kind):
    columns, tested = sick(kind, 120, 48, "step", 0.02)
    few = {name: columns[name] for name in MATTERS[kind]}
    found = diagnose(rows(few, tested if kind in TESTED else None))
    assert kind in kinds(found) and kinds(found) <= {kind, "stalled"}


@pytest.mark.parametrize(
    "kind", ["entropy_explosion", "kl_runaway", "clip_saturation", "sampler_mismatch", "truncation"]
)
def test_a_slow_drift_began_with_the_run(kind):
    columns, tested = sick(kind, 300, 1, "step", 0.02)
    drift = np.arange(1, 301) / 300
    name = MATTERS[kind][0]
    columns[name] = columns[name][-1] * drift + 0.02 * (1 - drift)
    found = of(kind, diagnose(rows(columns, tested)))
    assert found is not None and found.step <= 60


def test_what_was_not_measured_is_no_trouble():
    columns, tested = sick("kl_runaway", 100, 50)
    whole = rows(columns, tested)
    wanted = of("kl_runaway", diagnose(whole))
    torn = []
    for place, row in enumerate(whole):
        holes = {"entropy": None, "kl": None if place % 9 == 4 else row.get("kl"), "grad_norm": math.nan}
        holes |= {"loss": "none", "reward/mean": math.inf, "clip_fraction/low": True, "event/resumed": True}
        torn.append(row | holes)
    (found,) = diagnose([*torn, {}, {"step": None}, {"kl": 0.1}])
    assert found.kind == "kl_runaway" and abs(found.step - wanted.step) <= 1
    for few in ([], [{"step": 0}], whole[:1], whole[:2], [{}, {"step": 1, "kl": None}]):
        assert diagnose(few) == []


def test_rows_that_stand_there_twice_count_once_and_the_later_one_stands():
    columns, tested = sick("truncation", 60, 30)
    whole = rows(columns, tested)
    lost = [row | {"completions/truncated_fraction": 0.0} for row in whole[25:45]]
    assert diagnose([*whole[:45], *whole[25:]]) == diagnose(whole) == diagnose([*lost, *whole])
    assert of("truncation", diagnose(whole[::-1])).step == of("truncation", diagnose(whole)).step


def test_it_reads_the_pinned_names_alone_and_changes_nothing():
    columns, tested = sick("repetition", 80, 40)
    whole = rows(columns, tested)
    before = copy.deepcopy(whole)
    other = {"eval/sums/reward": 0.0, "reward/accuracy": 1.0, "eval/text/loss": 9.0, "policy_kl": 50.0, "tokens": 0}
    assert diagnose([row | other for row in whole]) == diagnose(whole) == diagnose(iter(whole))
    assert whole == before


def strange(rng, count):
    """Values that no run should have, or any may."""
    return rng.choice([
        np.zeros(count), rng.normal(size=count), np.exp(100 * rng.normal(size=count)), np.full(count, 1e300),
        np.full(count, -1.0), rng.integers(0, 2, count) * 1.0, np.cumsum(rng.normal(size=count)),
        rng.random(count) * (rng.random(count) < 0.2), np.where(rng.random(count) < 0.5, np.nan, -1e-300),
    ])  # fmt: skip


@pytest.mark.slow
def test_whatever_the_numbers_are_it_says_something_or_nothing():
    for seed in range(200):
        rng = np.random.default_rng(seed)
        names = [name for name in (*MEASURED, "eval/a/pass@1", "eval/b/pass@8") if rng.random() < 0.6]
        columns = {name: strange(rng, rng.integers(1, 60)) for name in names}
        most = max((len(values) for values in columns.values()), default=0)
        some = [
            {"step": step} | {name: float(values[step]) for name, values in columns.items() if step < len(values)}
            for step in range(most)
        ]
        with warnings.catch_warnings(action="error"):
            found = diagnose(some)
        assert kinds(found) <= {*MATTERS, "not_a_number"} and all(0 <= finding.step < most for finding in found)


def test_the_pass_rate_of_many_answers_stands_in_for_that_of_one():
    columns, tested = sick("reward_hacking", 100, 50)
    for name in ("eval/sums/pass@8", "eval/sums/pass@k", "eval/a/b/pass@1"):
        renamed = [
            {name if key == "eval/sums/pass@1" else key: value for key, value in row.items()}
            for row in rows(columns, tested)
        ]
        assert "reward_hacking" in kinds(diagnose(renamed))


def test_of_several_pass_rates_that_of_the_fewest_answers_tells():
    columns, tested = sick("reward_hacking", 100, 50)
    both = [row | {"eval/sums/pass@1": 0.2 + 0.003 * row["step"]} for row in rows(columns)]
    for row in both[9::10]:
        row["eval/sums/pass@8"] = tested[row["step"] - 1]
    assert "reward_hacking" not in kinds(diagnose(both))


def test_a_stall_lasts_half_of_the_run_of_all_that_is_evaluated():
    steps = np.arange(1, 101)
    reward = np.where(steps <= 60, 0.2 + steps / 150, 0.6 - 0.3 * (steps - 60) / 40)
    assert "stalled" not in kinds(diagnose(rows({"reward/mean": reward})))
    early, late = np.minimum(0.2 + 0.02 * steps, 0.4), np.minimum(0.1 + 0.01 * steps, 0.5)
    both = rows({"lr": np.ones(100)}, early, 5)
    for row in both[5::5]:
        row["eval/late/pass@1"] = late[row["step"] - 1]
    assert abs(of("stalled", diagnose(both)).step - 40) <= 5


def test_a_trouble_that_is_over_is_not_told():
    columns = healthy(120, 0.02)
    columns["completions/truncated_fraction"][40:70] = 0.8
    assert diagnose(rows(columns, rise(120))) == []


def test_a_trouble_of_a_policy_that_was_left_is_not_told():
    sick_one = sick_rows("gradient_spikes", 60, 20, "step", 0.0, 0)
    went_on = [row | {"step": 41 + number} for number, row in enumerate(sick_one[1:16])]
    assert "gradient_spikes" in kinds(diagnose([*sick_one[:41], *went_on])), "what is over is told of spikes"
    left = [*sick_one[:40], sick_one[40] | {ROLLED_BACK: 15}]
    assert diagnose([*left, *went_on]) == []
    kept = history([*left, *went_on])["grad_norm"].steps.tolist()
    assert kept == [*range(1, 16), *range(41, 56)]


def test_lengths_alone_tell_only_where_they_change_grossly():
    for factor, wanted in ((0.4, set()), (2.5, set()), (0.1, {"length_collapse"}), (8.0, {"length_explosion"})):
        assert kinds(diagnose(rows({"completions/mean_length": 300 * factor ** change(80, 40, "ramp")}))) == wanted


def test_an_entropy_that_has_fallen_far_is_not_near_zero():
    fallen = 3.0 - 2.5 * change(80, 40, "step")
    assert diagnose(rows({"entropy": fallen})) == []
    assert kinds(diagnose(rows({"entropy": 3.0 - 2.8 * change(80, 40, "step")}))) == {"entropy_collapse"}


def test_what_is_high_from_the_start_is_told_where_it_is_high_by_any_measure():
    assert kinds(diagnose(rows({"clip_fraction/low": np.full(40, 0.2), "clip_fraction/high": np.full(40, 0.15)}))) == {
        "clip_saturation"
    }
    assert diagnose(rows({"clip_fraction/high": np.full(40, 0.2)})) == []
    assert of("sampler_mismatch", diagnose(rows({"sampler/logp_abs_diff_mean": np.full(40, 0.15)}))).step == 1
    assert diagnose(rows({"sampler/logp_abs_diff_mean": np.full(40, 0.03)})) == []
    assert diagnose(rows({"completions/truncated_fraction": np.full(10, 0.9)})) == [], "a run may begin so"


def test_the_largest_difference_tells_where_the_mean_does_not():
    columns = {"sampler/logp_abs_diff_mean": np.full(60, 0.001)}
    columns["sampler/logp_abs_diff_max"] = 0.1 + 6 * change(60, 30, "step")
    assert of("sampler_mismatch", diagnose(rows(columns))).step == 30


def test_a_few_better_steps_do_not_end_a_trouble():
    columns, tested = sick("truncation", 100, 40)
    columns["completions/truncated_fraction"][70:75] = 0.02
    assert abs(of("truncation", diagnose(rows(columns, tested))).step - 40) <= 2


def test_what_grows_by_factors_began_with_the_first_of_them():
    columns = {"kl": 0.01 * 1.15 ** np.maximum(np.arange(1, 101) - 50, 0)}
    assert abs(of("kl_runaway", diagnose(rows(columns))).step - 50) <= 4


def test_one_odd_gradient_is_no_trouble_and_gradients_that_grow_for_good_are():
    columns = healthy(100, 0.02)
    columns["grad_norm"][60] *= 50
    assert diagnose(rows(columns, rise(100))) == []
    columns["grad_norm"] = np.where(np.arange(100) % 9, 1e-4, 2e-2)
    assert diagnose(rows(columns, rise(100))) == [], "next to none"
    columns["grad_norm"] = 0.4 * (1 + 60 * change(100, 50, "step"))
    assert of("gradient_spikes", diagnose(rows(columns, rise(100)))).step == 50


def test_much_is_cut_off_from_the_start_without_end():
    columns = {"completions/truncated_fraction": np.full(30, 0.8), "reward/mean": np.full(30, 0.3)}
    assert of("truncation", diagnose(rows(columns))).step == 1
    falling = {"completions/truncated_fraction": np.linspace(0.95, 0.6, 30), "reward/mean": np.full(30, 0.3)}
    assert of("truncation", diagnose(rows(falling))) is None
    assert of("truncation", diagnose(rows(columns | {"reward/mean": rise(30)}))) is None


def test_a_reward_that_rises_while_evaluation_falls_excuses_nothing():
    columns, tested = sick("reward_hacking", 200, 80)
    columns["completions/mean_length"] = 300 * (1 - 0.8 * change(200, 80, "ramp"))
    assert {"reward_hacking", "length_collapse"} <= kinds(diagnose(rows(columns, tested)))
    assert diagnose(rows(columns, rise(200))) == []


def test_a_reward_that_stays_high_while_evaluation_falls_is_hacked_and_one_that_falls_too_is_not():
    tested = 0.6 - 0.35 * change(120, 60, "ramp")
    reward = flat_then(0.3, 120, 0.9)
    assert abs(of("reward_hacking", diagnose(rows({"reward/mean": reward}, tested))).step - 60) <= 10
    for other in (reward - 0.5 * change(120, 60, "ramp"), np.full(120, 0.9)):
        assert of("reward_hacking", diagnose(rows({"reward/mean": other}, tested))) is None
    both = rows({"reward/mean": reward}, tested)
    for row in both:
        if "eval/sums/pass@1" in row:
            row["eval/others/pass@1"] = 0.2 + 0.005 * row["step"]
    assert of("reward_hacking", diagnose(both)) is None, "another task is learned meanwhile"


def test_what_was_learned_before_a_trouble_excuses_nothing_and_rare_evaluations_tell_enough():
    reward = np.minimum(0.02 * np.arange(1, 101), 0.7) - 0.1
    lengths = 300 * (1 - 0.8 * change(100, 36, "step"))
    columns = {"completions/mean_length": lengths, "reward/mean": reward}
    assert of("length_collapse", diagnose(rows(columns))).step == 36, "the reward rose up to that step"
    tested = np.minimum(0.2 + 0.02 * np.arange(1, 41), 0.6)
    shrinking = {"completions/mean_length": 300 * 0.2 ** np.linspace(0, 1, 40)}
    assert diagnose(rows(shrinking, tested, 20)) == [], "evaluated three times: 0.22, 0.6, 0.6"
    assert kinds(diagnose(rows(shrinking, np.full(40, 0.6), 20))) == {"length_collapse"}


def test_noise_is_no_stall():
    rng = np.random.default_rng(3)
    for steps in (24, 40):
        reward = 0.3 + 0.1 * np.arange(steps) / steps + 0.2 * rng.normal(size=steps)
        assert diagnose(rows({"reward/mean": reward})) == [], "it may rise as well"


def test_an_evaluation_that_falls_by_less_than_a_tenth_is_no_hacking():
    for lost, wanted in ((0.07, set()), (0.2, {"reward_hacking"})):
        tested = 0.95 - lost * change(200, 100, "ramp")
        assert kinds(diagnose(rows({"reward/mean": rise(200)}, tested))) == wanted


def test_texts_have_no_reward_and_their_loss_excuses_a_low_entropy():
    columns = {"entropy": 1.5 * np.exp(-5 * np.linspace(0, 1, 60)), "loss": np.linspace(2.0, 0.2, 60)}
    assert diagnose(rows(columns)) == []
    assert kinds(diagnose(rows({"entropy": columns["entropy"], "loss": np.full(60, 2.0)}))) == {"entropy_collapse"}


def test_findings_come_in_the_order_in_which_they_began_one_of_each_kind():
    columns, tested = sick("truncation", 200, 150)
    columns["kl"] = 0.01 * 300.0 ** change(200, 50, "step")
    found = diagnose(rows(columns, tested))
    assert [finding.kind for finding in found] == ["kl_runaway", "truncation"]
    assert all(isinstance(finding.step, int) for finding in found)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found[0].step = 3


def test_five_thousand_rows_take_well_below_a_second():
    columns, tested = sick("stalled", 5000, 2000, noise=0.03)
    whole = rows(columns, tested, 10, 0.03)
    began = time.process_time()
    diagnose(whole)
    assert time.process_time() - began < 1.0


@functools.cache
def every_finding():
    found = [of(kind, diagnose(rows(*sick(kind, 100, 40)))) for kind in MATTERS]
    columns = {"grad_norm": 0.4 * (1 + 60 * change(100, 50, "step"))}
    lost = {"reward/mean": rise(100) - 0.88 * change(100, 80, "step")}
    return [*found, *diagnose(rows(columns)), *diagnose(rows(lost))]


def test_what_is_said_holds_the_numbers():
    by_kind = {finding.kind: finding for finding in every_finding()}
    assert by_kind["truncation"].what == "60 % of the completions are cut off at the limit, 2.0 % before"
    assert "while sums fell from 58 % to 25 %" in by_kind["reward_hacking"].what
    assert by_kind["entropy_collapse"].what.startswith("entropy fell from 0.800 to 0.0100 nats (reward 0.2")
    for finding in every_finding():
        assert re.search(r"\d", finding.what) and finding.why.endswith(".") and finding.why.count(". ") == 0
        assert all("\n" not in text for text in dataclasses.astuple(finding) if isinstance(text, str))


def fields(kind):
    return {field.name: field for field in dataclasses.fields(kind)}


def test_every_setting_that_is_advised_exists():
    run = config.Run("tiny-random", Task([{"prompt": "1", "answer": "1"}]), recipe=recipes.DAPO)
    advised = {flag for finding in every_finding() for flag in re.findall(r"--([a-z_.]+[a-z_])", finding.remedy)}
    assert len(advised) > 20
    for flag in advised - {"recipe", "from", "guard"}:
        home, _, name = flag.rpartition(".")
        assert name in fields(operator.attrgetter(home)(run)), flag
    said = " ".join(finding.remedy for finding in every_finding())
    assert all(name in recipes.RECIPES for name in re.findall(r"--recipe ([a-z_]+)", said))
    assert all(hasattr(rewards, name) for name in re.findall(r"\b([A-Z][a-z]+Penalty)\b", said))
    assert isinstance(every_finding()[0], Finding)
