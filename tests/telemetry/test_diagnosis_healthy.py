"""A diagnosis leaves healthy runs alone, whatever the scale of their rewards."""

import itertools

import numpy as np
import pytest
from histories import flat_then, healthy, kinds, rise, rows, sick

from jaxrl_llm.telemetry import diagnose


def converged(steps, noise, seed):
    reward = flat_then(0.3, steps, 0.93)
    columns = healthy(steps, min(noise, 0.05), seed, reward)
    return columns | {
        "entropy": 0.8 * np.exp(-5 * np.minimum(np.arange(steps) / (0.3 * steps), 1)),
        "reward/zero_std_fraction": np.clip(reward, 0, 0.9),
    }, reward


def perfect(steps, noise, seed):
    columns = healthy(steps, noise, seed, np.ones(steps))
    columns["reward/mean"] = np.ones(steps)
    columns |= {"reward/zero_std_fraction": np.ones(steps), "entropy": np.full(steps, 0.01)}
    return columns | {"grad_norm": np.where(np.arange(steps) % 7, 0.0, 0.05)}, np.ones(steps)


def changing_lengths(factor):
    def made(steps, noise, seed):
        columns = healthy(steps, noise, seed)
        columns["completions/mean_length"] = 300 * factor ** np.linspace(0, 1, steps)
        return columns, rise(steps)

    return made


def learning(steps, noise, seed):
    return healthy(steps, noise, seed), rise(steps)


def sure_of_itself(steps, noise, seed):
    """Entropy falls to next to nothing while reward and evaluation rise to the end."""
    return healthy(steps, noise, seed) | {"entropy": 0.9 * np.exp(-5 * np.linspace(0, 1, steps))}, rise(steps)


def unsteady(steps, noise, seed):
    """A setback that the run recovers from, and a single odd gradient."""
    dent = 0.25 * np.exp(-(((np.arange(steps) - 0.5 * steps) / (0.05 * steps)) ** 2))
    columns = healthy(steps, noise, seed, rise(steps) - dent)
    columns["grad_norm"][steps // 3] *= 4
    return columns, rise(steps) - dent


def held_out_only(steps, noise, seed):
    """The training reward stays, since its problems grow harder; evaluation rises."""
    return healthy(steps, noise, seed) | {"reward/mean": np.full(steps, 0.5)}, rise(steps)


def heavy_tailed(steps, noise, seed):
    """Gradients with Student's t of 2 degrees of freedom: some are far above most, and none stands apart."""
    tails = np.abs(np.random.default_rng([seed, steps]).standard_t(2, size=steps))
    return {"grad_norm": 0.4 * (1 + tails), "reward/mean": rise(steps)}, rise(steps)


def behind(steps, noise, seed):
    """What is held out rises more slowly than what is trained on."""
    right = rise(steps) + noise * np.random.default_rng([seed, steps]).normal(size=steps)
    return {"reward/mean": right, "reward/accuracy": right}, rise(steps, 0.15, 0.65)


HEALTHY = (learning, sure_of_itself, converged, perfect, changing_lengths(0.2), changing_lengths(8.0), unsteady,
           held_out_only, heavy_tailed, behind)  # fmt: skip


@pytest.mark.parametrize("make", HEALTHY, ids=lambda make: make.__qualname__.split(".")[0])
@pytest.mark.parametrize("steps", [5, 12, 30, 100, 1000])
def test_healthy_runs_are_left_alone(make, steps):
    # In a long run each noise is seen often enough as it is.
    seeds = itertools.product(range(3), range(3)) if steps < 1000 else ((0, 0), (1, 1), (2, 2))
    for seed, level in seeds:
        noise = (0.0, 0.03, 0.06)[level]
        columns, tested = make(steps, noise, seed)
        assert diagnose(rows(columns, tested, (1, 10, 50)[seed], noise, seed)) == [], f"noise {noise}, seed {seed}"


def test_gradients_with_heavy_tails_are_no_spikes_and_spikes_among_them_are_found():
    for seed in range(20):
        rng = np.random.default_rng(seed)
        steps = (60, 200, 800)[seed % 3]
        assert diagnose(rows({"grad_norm": 0.4 * (1 + rng.pareto(2.0, size=steps))})) == [], f"seed {seed}"
        for heights in (0.12 * rng.standard_t(3, size=steps), 0.5 * rng.normal(size=steps)):
            gradients = 0.4 * np.exp(heights)
            assert diagnose(rows({"grad_norm": gradients})) == [], f"seed {seed}"
            gradients[steps // 2 :: steps // 10] = 400 * np.exp(0.3 * rng.normal(size=5))
            assert kinds(diagnose(rows({"grad_norm": gradients}))) == {"gradient_spikes"}, f"seed {seed}"


@pytest.mark.parametrize("make", [learning, sure_of_itself, converged, perfect, changing_lengths(0.2)])
def test_a_healthy_run_is_left_alone_from_its_first_step_to_its_last(make):
    columns, tested = make(120, 0.03, 0)
    every = rows(columns, tested, 10, 0.03)
    for end in range(0, 121, 3):
        assert diagnose(every[:end]) == [], f"after {end} rows"


@pytest.mark.parametrize(("factor", "shift"), [(100, 0), (2, -1), (1000, 0), (1, -1), (40, -40), (0.01, 0)])
def test_rewards_have_any_scale(factor, shift):
    # What the best reward is cannot be known where it is 0.01.
    for make in (learning, converged) if factor >= 1 else (learning,):
        columns, _ = make(150, 0.02, 1)
        columns["reward/mean"] = factor * columns["reward/mean"] + shift
        assert diagnose(rows(columns)) == []
    for kind in ("stalled", "entropy_collapse", "length_collapse", "length_explosion", "no_signal"):
        columns, _ = sick(kind, 150, 60, "step", 0.02)
        columns["reward/mean"] = factor * columns["reward/mean"] + shift
        assert kind in kinds(diagnose(rows(columns))), kind
    columns, tested = sick("reward_hacking", 150, 60)
    columns["reward/mean"] = factor * columns["reward/mean"] + shift
    assert "reward_hacking" in kinds(diagnose(rows(columns, tested)))
