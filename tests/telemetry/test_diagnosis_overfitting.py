"""What is learned by heart, and what pleases a reward model alone, are found by what training itself measures."""

import numpy as np
import pytest
from histories import change, kinds, of, rise, rows

from jaxrl_llm.telemetry import diagnose


def test_what_is_learned_by_heart_is_found_by_the_accuracy_in_training_or_a_reward_that_stands_for_it():
    flat = np.full(100, 0.4)
    for name in ("reward/accuracy", "reward/mean"):
        columns = {"reward/mean": np.full(100, 0.5), name: rise(100, 0.4, 0.95)}
        found = of("overfitting", diagnose(rows(columns, flat)))
        assert found.step <= 5 and "to 93 %" in found.what and "sums stays at 40 %" in found.what
        assert of("overfitting", diagnose(rows(columns, 0.5 * columns[name]))) is None, "it rises half as fast"
        assert of("overfitting", diagnose(rows(columns, flat + 0.45))) is None, "it is not far behind"
    learned_to_write_digits = {"reward/mean": rise(100, 0.3, 0.9), "reward/accuracy": np.full(100, 0.02)}
    assert of("overfitting", diagnose(rows(learned_to_write_digits, np.full(100, 0.02)))) is None
    other = rows({"reward/accuracy": rise(100, 0.4, 0.95), "reward/mean": rise(100, 0.4, 0.95)}, flat)
    for row in other[::10]:
        row["eval/others/pass@1"] = 0.2 + 0.005 * row["step"]
    assert of("overfitting", diagnose(other)) is None, "another task is learned meanwhile"
    few = [row if row["step"] < 70 else {k: v for k, v in row.items() if "others" not in k} for row in other[1:]]
    few = [row if row["step"] > 40 else {k: v for k, v in row.items() if "others" not in k} for row in few]
    assert of("overfitting", diagnose(few)) is None, "of another one too little is known"


def test_a_few_noisy_evaluations_are_not_surely_flat():
    for seed in range(40):
        rng = np.random.default_rng(seed)
        made = rows(
            {"reward/accuracy": rise(100, 0.4, 0.95), "reward/mean": rise(100, 0.4, 0.95)}, rise(100, 0.3, 0.8), 15
        )
        noisy = [{k: v + 0.08 * rng.normal() if "eval" in k else v for k, v in row.items()} for row in made]
        assert of("overfitting", diagnose(noisy)) is None, f"seed {seed}"


@pytest.mark.parametrize(("trained", "held_out"), [
    ("pairs/accuracy", "eval/pairs/accuracy"), ("steps/accuracy", "eval/steps/accuracy"), ("loss", "eval/text/loss"),
])  # fmt: skip
def test_rows_that_are_learned_by_heart_are_found_where_there_is_no_reward(trained, held_out):
    good = rise(100, 0.5, 0.95)
    for late, wanted in ((np.minimum(good, good[49]), {"overfitting"}), (good - 0.05, set())):
        columns = {trained: good, held_out: late}
        made = rows({name: -np.log(values) if "loss" in name else values for name, values in columns.items()})
        for row in made:
            if row["step"] % 10:
                del row[held_out]
        found = diagnose(made)
        assert kinds(found) == wanted and all(abs(finding.step - 50) <= 5 for finding in found)


def test_a_modelled_reward_that_rises_while_accuracy_falls_is_hacked_without_any_evaluation():
    rng = np.random.default_rng(0)
    right = 0.7 - 0.4 * change(120, 60, "ramp") + 0.05 * rng.normal(size=120)
    for name in ("reward/mean", "reward_model/mean"):
        columns = {"reward/mean": right, "reward/accuracy": right, name: rise(120, -1, 4)}
        found = of("reward_hacking", diagnose(rows(columns)))
        assert abs(found.step - 60) <= 12 and "while the accuracy in training fell from" in found.what
        assert of("reward_hacking", diagnose(rows(columns | {"reward/accuracy": 0.7 + 0 * right}))) is None
    assert of("reward_hacking", diagnose(rows({"reward/mean": right, "reward/accuracy": right}))) is None
