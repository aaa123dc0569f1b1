"""Losses against those of TRL and of verl on a random batch: ``python -m bench losses`` made the files."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxrl_llm.algorithms.surrogates import Unclipped

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench.losses import LOSSES, VERL_LOSSES, on_random  # noqa: E402

pytestmark = pytest.mark.slow

THEIRS = {
    peer: json.loads((ROOT / "tests" / "fixtures" / "peers" / f"{peer}_losses.json").read_text())
    for peer in ("trl", "verl")
}
COMPARED = [("trl", name, LOSSES[name][0]) for name in LOSSES]
COMPARED += [("verl", name, VERL_LOSSES[name][0]) for name in VERL_LOSSES]


@pytest.mark.parametrize(("peer", "name", "algorithm"), COMPARED, ids=lambda one: one if isinstance(one, str) else "")
def test_value_and_gradient_are_those_of_the_library(peer, name, algorithm):
    given, theirs = THEIRS[peer]["batch"], THEIRS[peer]["losses"][name]
    loss, gradient = on_random(algorithm, given)
    np.testing.assert_allclose(loss, theirs["loss"], atol=1e-6)
    np.testing.assert_allclose(gradient, theirs["gradient"], atol=1e-6)
    assert np.abs(gradient).max() > 0.01, "it teaches something"
    _, unclipped = on_random(dataclasses.replace(algorithm, surrogate=Unclipped()), given)
    assert np.abs(gradient - unclipped).max() > 1e-3, "what makes it differ from the plain ratio acts on this batch"


@pytest.mark.parametrize("peer", THEIRS)
def test_the_batch_has_tokens_that_bounds_cut_and_padding(peer):
    batch = THEIRS[peer]["batch"]
    ratio = np.exp(np.float64(batch["logp"]) - batch["old_logp"])
    mask = np.array(batch["mask"])
    assert (ratio[mask] < 0.8).any() and (ratio[mask] > 1.28).any() and not mask.all()
