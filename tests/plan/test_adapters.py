"""The memory of adapters on one card: by formula, beside what the compiler said of the same runs."""

import dataclasses

import pytest

from jaxrl_llm import config as configs
from jaxrl_llm.models.config import Lora
from jaxrl_llm.plan.machines import parse_topology
from jaxrl_llm.plan.planning import plan_run
from jaxrl_llm.plan.programs import find_model_config

H100, GIB = parse_topology("h100:1"), 2**30
COMPILED = {("Qwen/Qwen3-8B", "bf16"): (26.68, 31.52), ("Qwen/Qwen3-32B", "bf16"): (82.27, 68.99)}
"""GiB while sampling and learning: ``plan grpo_qwen2_5_1_5b_gsm8k --topology h100:1 --model MODEL --learner.lora.rank
16 --learner.compute.microbatch_rows 1 --rollout.engine.slots 64``, by XLA of jax 0.10.2.
"""


def planned(model, base):
    run = configs.resolved(configs.find_config("grpo_qwen2_5_1_5b_gsm8k").run)
    learner = dataclasses.replace(run.learner, lora=Lora(16, base=base)).computing(microbatch_rows=1)
    engine = dataclasses.replace(run.rollout.engine, slots=64)
    rollout = dataclasses.replace(run.rollout, engine=engine)
    run = dataclasses.replace(run, model=model, learner=learner, rollout=rollout)
    run = dataclasses.replace(run, mesh=dataclasses.replace(run.mesh, data=1, fsdp=1, tensor=1))
    return plan_run(run, find_model_config(model)[0], H100, None, None, False)


@pytest.mark.parametrize(("model", "base"), COMPILED)
def test_the_formula_is_near_what_the_compiler_said(model, base):
    plan = planned(model, base)
    for half, compiled in zip((plan.sampling, plan.learning), COMPILED[model, base], strict=True):
        assert compiled / 1.3 < half.total / GIB < 1.3 * compiled


def test_the_frozen_model_is_there_once_and_the_sampler_has_adapters_alone():
    plan = planned("Qwen/Qwen3-8B", "bf16")
    assert 15 < plan.sampling.weights / GIB < 16
    assert plan.sampling.sampled < 0.01 * plan.sampling.weights
    packed = planned("Qwen/Qwen3-8B", "nf4")
    assert 5.5 < packed.sampling.weights / GIB < 6, "embedding and head stay as they are"


def test_layers_are_separate_only_where_their_stack_fits_too():
    """On a GPU the learner stacks separate layers: of 8B there is room for both, of 32B there is not."""
    small, large = planned("Qwen/Qwen3-8B", "bf16"), planned("Qwen/Qwen3-32B", "bf16")
    assert hasattr(small.state.policy.base.weights.blocks, "0")
    assert hasattr(large.state.policy.base.weights.blocks, "attn")
    assert small.learning.temporary > 13 * GIB and large.learning.temporary < 13 * GIB
