"""Losses against those of TRL's own trainer, on one random batch: ``tools/compare_losses.py`` made the file."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from compare_losses import LOSSES, on_random  # noqa: E402

THEIRS = json.loads((ROOT / "tests" / "fixtures" / "peers" / "trl_losses.json").read_text())


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_those_of_trl(name):
    loss, gradient = on_random(LOSSES[name][0], THEIRS["batch"])
    np.testing.assert_allclose(loss, THEIRS["losses"][name]["loss"], atol=1e-6)
    np.testing.assert_allclose(gradient, THEIRS["losses"][name]["gradient"], atol=1e-6)
    assert np.abs(gradient).max() > 0.01, "it teaches something"


def test_the_batch_has_tokens_that_bounds_cut_and_padding():
    ratio = np.exp(np.float64(THEIRS["batch"]["logp"]) - THEIRS["batch"]["old_logp"])
    mask = np.array(THEIRS["batch"]["mask"])
    assert (ratio[mask] < 0.8).any() and (ratio[mask] > 1.28).any() and not mask.all()
