"""Histories of runs, healthy and sick: columns of numbers for every step, with noise, as rows of metrics."""

import numpy as np

SEVERAL = {
    "entropy_collapse", "length_collapse", "length_explosion", "no_signal", "stalled",
    "tools_unused", "tools_failing", "turns_growing",
}  # fmt: skip
"""Kinds that take a run which does not learn."""


def rise(steps, low=0.2, high=0.9):
    """A reward or an accuracy that grows steadily, for steps 1 to ``steps``."""
    return low + (high - low) * np.arange(1, steps + 1) / steps


def flat_then(share, steps, high):
    """A reward that has reached ``high`` after a share of the run."""
    return np.minimum(0.2 + (high - 0.2) * np.arange(1, steps + 1) / (share * steps), high)


def change(steps, began, shape):
    """0 before a step, 1 in the end: at once, along a ramp, or ever more slowly."""
    after = np.arange(1, steps + 1) - began + 1
    span = max((steps - began) / 3, 2)
    shapes = {"step": after > 0, "ramp": np.clip(after / span, 0, 1), "exp": 1 - np.exp(-np.maximum(after, 0) / span)}
    return shapes[shape] * 1.0


def healthy(steps, noise=0.0, seed=0, reward=None):
    """Columns of a run that learns: entropy falls and lengths grow meanwhile."""
    rng = np.random.default_rng(seed)
    reward = rise(steps) if reward is None else reward
    learned = (reward - reward[0]) / max(np.ptp(reward), 0.3)
    added = lambda size=1.0: size * noise * rng.normal(size=steps)
    times = lambda size=1.0: np.exp(added(size))
    return {
        "reward/mean": reward + added(),
        "reward/std": np.sqrt(np.clip(reward * (1 - reward), 0, 1)),
        "reward/zero_std_fraction": np.clip(0.2 + 0.4 * learned + added(), 0, 1),
        "completions/mean_length": 200 * np.exp(0.8 * learned) * times(2),
        "completions/truncated_fraction": np.clip(0.04 + added(0.3), 0, 1),
        "completions/repetition_fraction": np.clip(0.01 + added(0.2), 0, 1),
        "entropy": 0.9 * np.exp(-1.5 * learned) * times(2),
        "kl": (0.001 + 0.08 * learned) * times(2),
        "clip_fraction/low": np.abs(0.004 + added(0.03)),
        "clip_fraction/high": np.abs(0.01 + added(0.05)),
        "sampler/logp_abs_diff_mean": 0.002 * times(2),
        "sampler/logp_abs_diff_max": 0.2 * times(4),
        "grad_norm": 0.4 * times(4),
        "loss": added(0.1),
        "lr": np.full(steps, 1e-6),
    }


def sick(kind, steps, began, shape="step", noise=0.0, seed=0):
    """Columns and evaluations of a run that falls ill of ``kind`` at a step."""
    rng = np.random.default_rng([seed, steps])
    turned = change(steps, began, shape)
    times = lambda size=1.0: np.exp(size * noise * rng.normal(size=steps))
    added = lambda size=1.0: size * noise * rng.normal(size=steps)
    to = lambda before, after: before + (after - before) * turned
    factor = lambda before, after: before * (after / before) ** turned
    reward = rise(steps, 0.1, 0.6)
    if kind in SEVERAL:
        reward = np.minimum(reward, reward[began - 1])
    columns = healthy(steps, noise, seed, reward)
    tested = reward
    match kind:
        case "entropy_collapse":
            columns["entropy"] = to(0.8, 0.01) * times(2)
        case "entropy_explosion":
            columns["entropy"] = factor(0.6, 5.0) * times(2)
        case "length_collapse":
            columns["completions/mean_length"] = to(300, 40) * times(2)
        case "length_explosion":
            columns["completions/mean_length"] = factor(300, 1500) * times(2)
        case "truncation":
            columns["completions/truncated_fraction"] = np.clip(to(0.02, 0.6) + added(), 0, 1)
        case "reward_hacking":
            tested = 0.3 + 0.3 * np.minimum(np.arange(1, steps + 1) / began, 1) - 0.35 * change(steps, began, "ramp")
        case "no_signal":
            columns["reward/zero_std_fraction"] = np.clip(to(0.3, 0.97) + added(0.5), 0, 1)
        case "kl_runaway":
            columns["kl"] = factor(0.01, 4.0) * times(2)
        case "clip_saturation":
            columns["clip_fraction/high"] = np.clip(to(0.01, 0.5) + added(), 0, 1)
        case "sampler_mismatch":
            columns["sampler/logp_abs_diff_mean"] = factor(0.002, 0.4) * times(2)
        case "gradient_spikes":
            columns["grad_norm"][began - 1 :: max((steps - began) // 5, 2)] *= 30
        case "overfitting":
            by_heart = np.clip((np.arange(1, steps + 1) - began) / (steps - began), 0, 1)
            columns["reward/accuracy"] = np.clip(0.4 + 0.55 * by_heart + added(), 0, 1)
            tested = np.full(steps, 0.4)
        case "repetition":
            columns["completions/repetition_fraction"] = np.clip(to(0.01, 0.5) + added(), 0, 1)
        case "tools_unused":
            columns |= {"episode/tools": np.full(steps, 2.0), "episode/tool_calls": to(1.5, 0.0) * times(2)}
        case "tools_failing":
            calls = 1.5 * times(2)
            columns |= {
                "episode/tool_calls": calls,
                "episode/tool_errors": calls * np.clip(to(0.1, 0.97) + added(0.5), 0, 1),
            }
        case "turns_growing":
            columns["episode/turns"] = to(2.0, 6.0) * times(2)
    return columns, tested


def rows(columns, tested=None, every=10, noise=0.0, seed=0):
    """Rows of metrics; ``tested``: shares of right answers, evaluated at step 0 and every so often."""
    steps = len(next(iter(columns.values())))
    rng = np.random.default_rng([seed, 1])
    made = [{"step": 0}] if tested is not None else []
    made += [
        {"step": step + 1} | {name: float(values[step]) for name, values in columns.items()} for step in range(steps)
    ]
    for row in made if tested is not None else ():
        if row["step"] % every == 0 or row["step"] == steps:
            share = tested[max(row["step"] - 1, 0)] + min(noise, 0.03) * rng.normal()
            row["eval/sums/pass@1"] = float(np.clip(share, 0, 1))
    return made


def kinds(found):
    """The kinds of findings."""
    return {finding.kind for finding in found}


def of(kind, found):
    """The finding of a kind; None where there is none."""
    return next((finding for finding in found if finding.kind == kind), None)
