"""bfloat16 weights are trained only where their steps are not rounded away."""

import dataclasses

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Compute, Learner, Optimiser
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.settings import MIN_BFLOAT16_STEP
from jaxrl_llm.models.config import Lora
from jaxrl_llm.sharding import MeshShape

RUN = configs.load_config("smoke")[1]


def checked(**learner):
    configs.validate(dataclasses.replace(RUN, learner=Learner(**learner)))


def test_smaller_steps_leave_weights_where_they_are():
    near = np.arange(2**-5 + 2**-12, 2**-4, 2**-12).astype(ml_dtypes.bfloat16)
    assert len(near) == 127 == len(set(near.tolist())), "every number of the type from 1/32 to 1/16"
    for factor, moves in ((1.001, True), (0.999, False)):
        for step in (MIN_BFLOAT16_STEP * factor, -MIN_BFLOAT16_STEP * factor):
            after = (near.astype(np.float32) - np.float32(step)).astype(ml_dtypes.bfloat16)
            assert np.all((after != near) == moves)


@pytest.mark.parametrize(
    ("name", "least"), [("adamw", MIN_BFLOAT16_STEP), ("adafactor", MIN_BFLOAT16_STEP), ("muon", 5 * MIN_BFLOAT16_STEP)]
)
def test_rates_whose_steps_are_rounded_away_are_refused(name, least):
    checked(dtype="bfloat16", optimiser=Optimiser(name, least * 1.01))
    small = Optimiser(name, least * 0.99)
    with pytest.raises(
        InputError, match=r"rounds away steps of .*: set learner.dtype float32 and learner.compute.dtype bfloat16"
    ):
        checked(dtype="bfloat16", optimiser=small)
    checked(compute=Compute(dtype="bfloat16"), optimiser=small)
    checked(optimiser=small, lora=Lora(4, base="bf16"))
    with pytest.raises(
        InputError, match=r"learner.dtype 'bfloat16' is of weights that are trained.*: set learner.lora.base"
    ):
        checked(dtype="bfloat16", optimiser=small, lora=Lora(4))


@pytest.mark.parametrize(("name", "size"), [("adamw", 1.0), ("adafactor", 1.0), ("muon", 0.2)])
def test_steps_are_about_as_large_as_is_assumed(name, size):
    chain = build(Optimiser(name, clip_norm=0.0))
    random = np.random.default_rng(0)
    tree = {"weights": {"blocks": {"mlp": {"up": jnp.asarray(random.normal(size=(2, 16, 24)).astype(np.float32))}}}}
    directions, _ = chain.update(tree, chain.init(tree), tree)
    step = np.sqrt(np.mean(np.square(directions["weights"]["blocks"]["mlp"]["up"])))
    np.testing.assert_allclose(step, size, rtol=0.2)


def test_a_row_that_tensor_does_not_divide_is_refused():
    on = lambda tokens, tensor: dataclasses.replace(
        RUN,
        mesh=MeshShape(1, -1, tensor),
        learner=RUN.learner.computing(row_tokens=tokens, microbatch_rows=4),
    )
    configs.validate_on_devices(on(256, 2), 8)
    configs.validate_on_devices(on(0, 2), 8)
    with pytest.raises(
        InputError,
        match=r"learner.compute.row_tokens 255 does not divide over mesh tensor 2, .*: make it a multiple of 2",
    ):
        configs.validate_on_devices(on(255, 2), 8)
