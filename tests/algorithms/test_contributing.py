"""The example of CONTRIBUTING.md is true: its three pieces, run as they stand, agree with each other."""

import ast
import dataclasses
import re
import textwrap
import unittest
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from algorithms.batches import ragged
from oracles import SEQUENCE_MEANS

from jaxrl_llm import algorithms as pieces
from jaxrl_llm.algorithms import PRESETS, PolicyBatch, policy_loss, surrogates

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_example_of_a_new_surrogate_works_as_printed():
    surrogate, preset, oracle, test = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[:4]
    names = vars(surrogates) | vars(pieces)
    exec(surrogate, names)
    algorithm = eval("{" + preset + "}", names)["spo"]
    assert "spo" not in SEQUENCE_MEANS, "SPO is there already: print another example"
    assert ast.get_docstring(ast.parse(surrogate).body[0])
    by_hand = {}
    exec(f"def terms(name, ratios, advantage):\n{textwrap.indent(oracle, '    ')}", by_hand)
    logp, batch = ragged(0)
    wanted = []
    for row, valid in enumerate(batch.mask):
        ratios = np.exp(np.float64(logp[row] - batch.old_logp[row]))[valid]
        if valid.any():
            wanted.append(np.mean(by_hand["terms"]("spo", ratios, float(batch.advantages[row]))))
    np.testing.assert_allclose(policy_loss(algorithm, logp, batch)[0], np.mean(wanted), rtol=2e-5)
    given = {"chex": chex, "dataclasses": dataclasses, "jax": jax, "np": np, "policy_loss": policy_loss}
    given |= {"PRESETS": PRESETS, "PolicyBatch": PolicyBatch, "SPO": names["SPO"]}
    exec(test, given)
    outcome = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(given["OwnLoss"]).run(outcome)
    assert outcome.testsRun == 2 and outcome.wasSuccessful(), outcome
