"""Where a trouble began, and what excuses it, where two things happen at one time."""

import numpy as np
import pytest
from histories import change, healthy, kinds, of, rise, rows

from jaxrl_llm.telemetry import diagnose


@pytest.mark.parametrize("steps", [60, 200, 1000])
def test_slow_growth_before_is_not_where_a_run_left_its_reference(steps):
    half = steps // 2
    at = np.arange(1, steps + 1)
    slow = 0.05 * at / steps
    fast = 0.02 * np.exp((at - half) / (steps / 12))
    found = of("kl_runaway", diagnose(rows({"kl": np.where(at < half, slow, fast)})))
    assert half <= found.step <= half + 0.2 * steps


def test_groups_that_never_differ_teach_nothing_though_evaluation_rises():
    at = np.arange(1, 101)
    columns = {"reward/zero_std_fraction": np.where(at < 50, 0.2, 0.98), "reward/mean": np.where(at < 50, 0.3, 0.02)}
    found = diagnose(rows(columns, 0.3 + 0.4 * at / 100))
    assert abs(of("no_signal", found).step - 50) <= 2
    columns["reward/mean"] = 0.3 + 0.4 * at / 100
    assert of("no_signal", diagnose(rows(columns, 0.3 + 0.4 * at / 100))) is None


def test_one_task_that_is_solved_says_nothing_of_the_others():
    rng = np.random.default_rng(1)
    columns = {"reward/mean": 0.47 + 0.02 * rng.normal(size=200), "reward/zero_std_fraction": np.full(200, 0.97)}
    both = rows(columns, np.full(200, 0.92))
    for row in both:
        if "eval/sums/pass@1" in row:
            row["eval/hard/pass@1"] = 0.03
    averaged = [row | {"eval/average/pass@1": 0.475} if "eval/hard/pass@1" in row else row for row in both]
    assert kinds(diagnose(rows(columns, np.full(200, 0.92)))) == set()
    assert kinds(diagnose(both)) == kinds(diagnose(averaged)) == {"no_signal", "stalled"}


@pytest.mark.parametrize("peak", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("tested", [True, False])
def test_a_run_that_has_lost_what_it_had_learned_is_told_from_where_it_was_best(peak, tested):
    rng = np.random.default_rng(2)
    best = round(400 * peak)
    reward = np.where(np.arange(400) < best, 0.05 + 0.8 * np.arange(400) / best, 0.02) + 0.02 * rng.normal(size=400)
    found = diagnose(rows({"reward/mean": reward}, np.clip(reward, 0, 1) if tested else None))
    assert kinds(found) == {"stalled"} and "what was learned is lost" in found[0].what
    assert abs(found[0].step - best) <= 40 and "--from RUN@STEP" in found[0].remedy


def test_a_few_bad_steps_are_no_loss_of_what_was_learned():
    for bad, wanted in ((10, set()), (40, {"stalled"})):
        reward = np.where(np.arange(400) < 400 - bad, rise(400), 0.02)
        assert kinds(diagnose(rows({"reward/mean": reward}))) == wanted


def test_what_one_measure_alone_has_lost_or_half_of_both_is_not_all_that_was_learned():
    low = 0.2 + 0.6 * rise(200, 0, 1) - 0.75 * change(200, 150, "step")
    for reward, tested in ((low, rise(200)), (rise(200), rise(200)), (rise(200) - 0.4 * change(200, 150, "step"),) * 2):
        said = [one.what for one in diagnose(rows({"reward/mean": reward}, tested))]
        assert not any("what was learned is lost" in what for what in said)


@pytest.mark.parametrize(
    ("places", "wanted"), [((400, 1900), False), ((400, 450, 1900), False), ((1500, 1600, 1700), True)]
)
def test_spikes_of_a_long_run_are_many_where_they_are_close_together(places, wanted):
    columns = healthy(2000, 0.03)
    columns["grad_norm"][list(places)] *= 40
    found = of("gradient_spikes", diagnose(rows(columns, rise(2000))))
    assert (found is not None) == wanted
    assert found is None or found.step == places[0] + 1
