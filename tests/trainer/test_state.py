"""What a run has before its first step here: fresh, and as it was saved."""

import dataclasses

import numpy as np
from learner.rollouts import forward_on, one_device
from tiny import tiny

from jaxrl_llm.checkpoints.store import Checkpoints
from jaxrl_llm.config import load_config, resolved
from jaxrl_llm.learner import Layout, Learner
from jaxrl_llm.stages.stage import Stage
from jaxrl_llm.trainer.state import create_or_restore


def test_a_coefficient_that_was_moved_is_that_of_the_run_that_goes_on(tmp_path):
    run = dataclasses.replace(resolved(load_config("smoke")[1]), learner=Learner())
    mesh = one_device()
    stage = Stage(
        run=run, training=(), forward=forward_on(mesh, Layout(2, 40, 10)), label="digits", reference=True,
        coefficients={"kl_coef": 0.1, "other": 1.0},
    )  # fmt: skip
    with Checkpoints(tmp_path) as store:
        state, host = create_or_restore(run, stage, tiny("windows"), store, None, mesh, None, print)
        assert host.coefficients == {"kl_coef": 0.1, "other": 1.0} and host.carry is None
        policy = np.asarray(state.policy.params.weights.embed[...])
        host.coefficients = {"kl_coef": 0.4}
        store.save(1, state, vars(host), stage.records)
        again, found = create_or_restore(run, stage, tiny("windows", 5), store, 1, mesh, None, print)
    assert found.coefficients == {"kl_coef": 0.4, "other": 1.0}, "what a new rule moves begins where the stage says"
    np.testing.assert_array_equal(again.policy.params.weights.embed[...], policy)
