"""Where a trouble began, and what excuses it, where two things happen at one time."""

import numpy as np
import pytest
from histories import of, rows

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
