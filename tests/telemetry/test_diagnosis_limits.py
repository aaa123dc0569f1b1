"""Each limit of the diagnosis from both sides: a history just below it is left alone, and one just above it is not."""

import numpy as np
import pytest
from histories import change, of, rise, rows

from jaxrl_llm.telemetry import diagnose

STEPS, BEGAN = 80, 40
ENTROPY, LENGTH, ZERO_STD = "entropy", "completions/mean_length", "reward/zero_std_fraction"
CUT_OFF, REPEATED = "completions/truncated_fraction", "completions/repetition_fraction"
CLIPPED, MEAN_GAP, LARGEST_GAP = "clip_fraction/high", "sampler/logp_abs_diff_mean", "sampler/logp_abs_diff_max"
REWARD, GRADIENT = "reward/mean", "grad_norm"
NOTHING, RISING, FLAT, SOLVED = {}, {REWARD: rise(STEPS)}, {REWARD: np.full(STEPS, 0.3)}, {REWARD: np.full(STEPS, 0.95)}
"""Rewards of a run of which it is not known whether it learns, and of one that does, does not, and is done."""


def turned(before, after, steps=STEPS, began=BEGAN):
    """A metric that changes once, at once and for good."""
    return before + (after - before) * change(steps, began, "step")


def found(kind, columns, tested=None, every=10):
    return of(kind, diagnose(rows(columns, tested, every)))


LIMITS = [
    # kind, metric, what it was, the limit of what it becomes, what else was measured
    ("entropy_explosion", ENTROPY, 0.05, 0.5, NOTHING),
    ("entropy_explosion", ENTROPY, 0.2, 0.6, NOTHING),
    ("entropy_explosion", ENTROPY, 1.0, 2.0, NOTHING),
    ("entropy_explosion", ENTROPY, 0.1, 1.5, RISING),
    ("entropy_explosion", ENTROPY, 0.5, 1.7, RISING),
    ("entropy_explosion", ENTROPY, 1.0, 3.0, RISING),
    ("entropy_collapse", ENTROPY, 1.0, 0.2, NOTHING),
    ("entropy_collapse", ENTROPY, 3.0, 0.25, NOTHING),
    ("entropy_collapse", ENTROPY, 0.04, 0.02, NOTHING),
    ("entropy_collapse", ENTROPY, 0.1, 0.03, NOTHING),
    ("length_collapse", LENGTH, 300, 165, FLAT),
    ("length_collapse", LENGTH, 300, 100, NOTHING),
    ("length_explosion", LENGTH, 300, 540, FLAT),
    ("length_explosion", LENGTH, 300, 900, NOTHING),
    ("length_explosion", LENGTH, 300, 1200, SOLVED),
    ("truncation", CUT_OFF, 0.02, 0.2, NOTHING),
    ("truncation", CUT_OFF, 0.2, 0.35, NOTHING),
    ("truncation", CUT_OFF, 0.05, 0.3, RISING),
    ("truncation", CUT_OFF, 0.2, 0.4, RISING),
    ("truncation", CUT_OFF, None, 0.5, FLAT),
    ("repetition", REPEATED, 0.01, 0.15, NOTHING),
    ("repetition", REPEATED, 0.1, 0.22, NOTHING),
    ("repetition", REPEATED, 0.01, 0.25, RISING),
    ("repetition", REPEATED, 0.2, 0.35, RISING),
    ("repetition", REPEATED, None, 0.4, FLAT),
    ("no_signal", ZERO_STD, 0.2, 0.8, FLAT),
    ("kl_runaway", "kl", 0.01, 0.2, NOTHING),
    ("kl_runaway", "kl", 0.1, 0.5, NOTHING),
    ("kl_runaway", "kl", 0.01, 0.4, RISING),
    ("kl_runaway", "kl", 0.1, 0.8, RISING),
    ("clip_saturation", CLIPPED, 0.01, 0.2, RISING),
    ("clip_saturation", CLIPPED, 0.06, 0.24, RISING),
    ("clip_saturation", CLIPPED, 0.2, 0.3, RISING),
    ("sampler_mismatch", MEAN_GAP, 0.001, 0.02, RISING),
    ("sampler_mismatch", MEAN_GAP, 0.01, 0.05, RISING),
    ("sampler_mismatch", MEAN_GAP, 0.05, 0.1, RISING),
    ("sampler_mismatch", LARGEST_GAP, 0.1, 1.5, RISING),
    ("sampler_mismatch", LARGEST_GAP, 0.3, 2.4, RISING),
    ("sampler_mismatch", LARGEST_GAP, 1.0, 5.0, RISING),
    ("gradient_spikes", GRADIENT, 0.4, 4.0, RISING),
    ("gradient_spikes", GRADIENT, 0.001, 0.1, RISING),
    ("stalled", REWARD, None, 0.7, NOTHING),
]
"""Of what falls, and of rewards that are far from the best, what is bad lies below."""


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: "-".join(str(part) for part in limit[:4]))
def test_a_change_is_told_from_its_limit_on(limit):
    kind, metric, before, bound, others = limit
    falls = kind == "stalled" or (before is not None and bound < before)
    for after in (0.98 * bound, 1.02 * bound):
        one = found(kind, {metric: turned(after if before is None else before, after)} | others)
        assert (one is not None) == ((after < bound) == falls), after


def rewards(low, last, change_at=20):
    """Rewards that rise once from their lowest, beside groups that teach nothing later on."""
    return {REWARD: turned(low, last, began=change_at), ZERO_STD: turned(0.2, 0.9)}


def spiked(times, *places, steps=STEPS):
    """Gradients that are one and the same but for those at some places."""
    values = np.full(max(steps, *places) + 1 if max(places) >= steps else steps, 0.5)
    values[list(places)] *= times
    return values


def lost(high, now):
    """Rewards that rise towards ``high``, and are lost after three quarters of the run."""
    return np.where(np.arange(STEPS) < 0.75 * STEPS, rise(STEPS, 0.0, high), now)


def dipped(before, count, low, after):
    """A metric of 1200 steps that is low for some, and other than at first from step 1001 on."""
    values = turned(before, after, 1200, 1001)
    values[300 : 300 + count] = low
    return values


def alternating(middle, size, steps=STEPS):
    return middle + size * np.where(np.arange(steps) % 2, 1.0, -1.0)


OTHERS = {
    # what is varied: the history, a value that makes it no trouble, one that makes it one
    "measurements of a series": ("clip_saturation", lambda n: {CLIPPED: np.full(n, 0.35)}, 7, 8),
    "steps that a gross change has lasted": ("kl_runaway", lambda n: {"kl": turned(0.01, 1.0, began=81 - n)}, 3, 4),
    "steps that a gross change has lasted in a longer run": (
        "kl_runaway", lambda n: {"kl": turned(0.01, 1.0, 250, 251 - n)}, 9, 10,
    ),
    "steps that a gross change has lasted in a long run": (
        "kl_runaway", lambda n: {"kl": turned(0.01, 1.0, 1000, 1001 - n)}, 19, 20,
    ),
    "steps that a change has lasted": ("kl_runaway", lambda n: {"kl": turned(0.01, 0.3, began=81 - n)}, 7, 8),
    "steps that it has lasted in a long run": (
        "kl_runaway", lambda n: {"kl": turned(0.01, 0.3, 1000, 1001 - n)}, 59, 60,
    ),
    "steps that it has lasted in a short run": ("kl_runaway", lambda n: {"kl": turned(0.01, 0.3, 60, 61 - n)}, 7, 8),
    "steps that it has lasted, a tenth of the run": (
        "kl_runaway", lambda n: {"kl": turned(0.01, 0.3, 400, 401 - n)}, 39, 40,
    ),
    "steps since the first in which many were cut off": ("truncation", lambda n: {CUT_OFF: np.full(n, 0.8)}, 11, 12),
    "rewards of a run that has stalled": ("stalled", lambda n: {REWARD: np.full(n, 0.3)}, 19, 20),
    "a reward within 0 and 1": ("no_signal", lambda x: rewards(0.2, x), 0.76, 0.74),
    "a reward that is never below -0.5": ("no_signal", lambda x: rewards(x, 0.6), -0.51, -0.49),
    "a reward that is never below -1": ("no_signal", lambda x: rewards(x, 0.6), -1.04, -1.06),
    "a reward below 0": ("no_signal", lambda x: rewards(-1.0, x), -0.14, -0.16),
    "a reward above 1": ("no_signal", lambda x: rewards(0.2, x), 1.04, 1.06),
    "a reward up to 2": ("no_signal", lambda x: rewards(0.2, x), 1.72, 1.68),
    "a reward above 2": ("no_signal", lambda x: rewards(0.2, x), 2.08, 2.12),
    "a reward above 10": ("no_signal", lambda x: rewards(0.2, x), 10.4, 10.6),
    "groups that teach": (
        "no_signal", lambda x: {ZERO_STD: turned(0.2, x), REWARD: np.full(STEPS, 0.3)}, 0.94, 0.96,
    ),
    "a reward that has risen": (
        "truncation", lambda x: {CUT_OFF: turned(0.02, 0.25), REWARD: turned(0.3, 0.3 + x, began=45)}, 0.031, 0.029,
    ),
    "a reward that is flat for all its noise": ("stalled", lambda x: {REWARD: alternating(0.3, x, 40)}, 0.037, 0.034),
    "a gradient among gradients": ("gradient_spikes", lambda x: {GRADIENT: spiked(x, 10, 40, 60)}, 3.9, 4.1),
    "a gradient among gradients, but for one": ("gradient_spikes", lambda x: {GRADIENT: spiked(x, 10, 40)}, 9.8, 10.2),
    "steps of a run of two spikes": ("gradient_spikes", lambda n: {GRADIENT: spiked(20, 10, 40, steps=n)}, 201, 200),
    "steps between three spikes": ("gradient_spikes", lambda n: {GRADIENT: spiked(9, 10, 60, 10 + n)}, 100, 99),
    "steps between three spikes of a long run": (
        "gradient_spikes", lambda n: {GRADIENT: spiked(9, 10, 60, 10 + n, steps=480)}, 120, 119,
    ),
    "a part of the reward that is lost": ("stalled", lambda x: {REWARD: lost(1.08, x)}, 0.21, 0.19),
    "a part of little that is lost": ("stalled", lambda x: {REWARD: lost(0.33, x)}, 0.045, 0.035),
    "steps that were better once": ("kl_runaway", lambda n: {"kl": dipped(0.1, n, 0.01, 0.3)}, 49, 53),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_what_excuses_a_change_excuses_it_up_to_its_limit(name):
    kind, made, healthy, sick = OTHERS[name]
    tested = rise(STEPS, 0.2, 0.7) if name == "groups that teach" else None
    assert found(kind, made(healthy), tested) is None and found(kind, made(sick), tested) is not None


EVALUATIONS = [(10, 0.4, 0.05), (10, 0.9, 0.09), (16, 0.4, 0.14), (27, 0.5, 0.2)]
"""How often a run of 80 steps is evaluated, its best, and what that must fall by."""


@pytest.mark.parametrize(("every", "best", "least"), EVALUATIONS)
def test_an_evaluation_has_fallen_from_its_limit_on_the_rarer_the_further(every, best, least):
    for drop in (0.97 * least, 1.03 * least):
        hacked = found("reward_hacking", {REWARD: rise(STEPS)}, turned(best, best - drop), every)
        assert (hacked is not None) == (drop > least)


def test_evaluations_alone_tell_of_a_stall_where_there_are_six():
    for every, wanted in ((20, False), (16, True)):
        assert (found("stalled", {"lr": np.ones(STEPS)}, np.full(STEPS, 0.3), every) is not None) == wanted


def test_a_run_that_goes_on_has_stalled_for_half_of_what_it_is_to_make():
    whole = rows({REWARD: np.full(STEPS, 0.3)})
    assert of("stalled", diagnose(whole, 2 * STEPS)) is None
    assert of("stalled", diagnose(whole, 2 * STEPS - 2)).step == 1


def test_an_entropy_near_zero_is_told_of_a_run_that_learned_once_it_has_not_for_a_third():
    reward = np.minimum(rise(STEPS, 0.1, 1.0), 0.5)
    for reached, wanted in ((50, True), (57, False)):
        falling = np.clip(1 - 0.8 * (np.arange(1, STEPS + 1) - 15) / (reached - 15), 0.2, 1.0)
        falling[reached:] = 0.01
        assert (found("entropy_collapse", {ENTROPY: falling, REWARD: reward}) is not None) == wanted


def test_a_change_began_where_it_had_made_a_twentieth_of_itself_and_where_slow_growth_turned_into_fast():
    ramp = np.clip((np.arange(1, 301) - 100) / 100, 0, 1)
    assert found("clip_saturation", {CLIPPED: ramp}).step == 106
    for share, wanted in ((0.35, 25), (0.34, 50)):
        grown = np.interp(np.arange(1, 101), [20, 50, 80], [0, share, 1])
        assert found("kl_runaway", {"kl": 0.01 * 20.0**grown}).step == wanted


def test_a_trouble_that_one_step_in_ten_is_without_goes_on():
    for better, wanted in ((4, 40), (5, 56)):
        values = turned(0.02, 0.6)
        values[50 : 50 + better] = 0.02
        assert found("truncation", {CUT_OFF: values} | FLAT).step == wanted
