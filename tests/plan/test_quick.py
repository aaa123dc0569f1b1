"""Memory by formula, beside what the compiler said of the same runs."""

import dataclasses
import functools

import jax
import pytest
from plan.tinyrun import CONFIG, tiny_run, with_learner

from jaxrl_llm import config as configs
from jaxrl_llm.cli.plan import smallest_change
from jaxrl_llm.learner import Compute
from jaxrl_llm.models.config import Lora
from jaxrl_llm.plan.machines import parse_topology
from jaxrl_llm.plan.planning import choose_slots, plan_run, with_engine
from jaxrl_llm.plan.programs import find_model_config
from jaxrl_llm.sharding import MeshShape

GRPO, GIB = "grpo_qwen2_5_1_5b_gsm8k", 2**30
ONE, CPU = {"rows": 1}, {"rows": 4, "dtype": "float32", "tokens": 128}
COMPILED = [
    (GRPO, "h100:1", {"model": "Qwen/Qwen3-8B", "base": "bf16"} | ONE, 26.68, 31.52),
    (GRPO, "h100:1", {"model": "Qwen/Qwen3-32B", "base": "bf16"} | ONE, 82.27, 68.99),
    (GRPO, "h100:1", {"model": "Qwen/Qwen3-8B", "base": "nf4"} | ONE, 17.07, 8.98),
    (GRPO, "l4:1", {"model": "Qwen/Qwen3-4B", "base": "nf4", "slots": 32} | ONE, 8.79, 4.82),
    (GRPO, "l4:1", {"model": "Qwen/Qwen2.5-0.5B"} | ONE, 9.20, 11.71),
    (GRPO, "l4:1", {"model": "openai/gpt-oss-20b", "base": "mxfp4", "slots": 32} | ONE, 16.71, 16.77),
    (GRPO, "rtx4090:1", {"model": "Qwen/Qwen3-30B-A3B", "base": "nf4", "slots": 32} | ONE, 20.84, 19.62),
    (GRPO, "v5e:1x1", {"model": "Qwen/Qwen3-1.7B", "base": "bf16"} | ONE, 12.14, 5.79),
    (GRPO, "v5e:1x1", {"model": "google/gemma-3-1b-it", "base": "bf16", "slots": 32} | ONE, 3.21, 3.74),
    (GRPO, "v5e:4x4", {"rows": 16, "slots": 256}, 6.47, 5.49),
    (GRPO, "h100:8", {"rows": 8, "slots": 256, "remat": "none"}, 6.81, 26.12),
    (GRPO, "cpu", {"model": "Qwen/Qwen2.5-0.5B", "remat": "none"} | CPU, 9.82, 72.14),
    (GRPO, "cpu", {"model": "Qwen/Qwen2.5-0.5B", "remat": "dots", "base": "bf16"} | CPU, 2.62, 24.07),
    pytest.param("dapo_qwen2_5_32b", "v5p:8x8x4", {}, None, 10.70, marks=pytest.mark.slow),
    pytest.param("quickstart", "cpu", {}, 2.46, 6.64, marks=pytest.mark.slow),
    pytest.param("quickstart", "v5e:2x2", {}, 1.40, 1.82, marks=pytest.mark.slow),
    pytest.param("sft_quickstart", "v5e:1x1", {}, None, 7.35, marks=pytest.mark.slow),
    pytest.param("ppo_quickstart", "cpu", {}, 3.93, 5.94, marks=pytest.mark.slow),
]
"""GiB while sampling and learning, by ``plan CONFIG --topology NAME`` with XLA of jax 0.10.2: adapters of rank 16 on a
``base``, ``learner.compute.microbatch_rows``, ``rollout.engine.slots``, ``tokens`` of a prompt and of a completion.
None: not compiled, or nothing is sampled.
"""


def settings(name, model=None, base=None, rows=None, slots=64, remat="full", dtype="bfloat16", tokens=None):
    run = configs.resolved(configs.find_config(name).run)
    if rows is None:
        return run
    compute = Compute(dtype=dtype, remat=remat, microbatch_rows=rows, row_tokens=run.learner.compute.row_tokens)
    lora = Lora(16, base=base) if base else Lora()
    lengths = {"max_prompt_tokens": tokens, "max_new_tokens": tokens} if tokens else {}
    engine = dataclasses.replace(run.rollout.engine, slots=slots)
    rollout = dataclasses.replace(run.rollout, engine=engine, **lengths)
    learner = dataclasses.replace(run.learner, lora=lora, compute=compute)
    return dataclasses.replace(run, model=model or run.model, learner=learner, rollout=rollout)


@functools.cache
def planned(name, topology, **changes):
    """A plan by formula; of one of this machine's processors for "cpu"."""
    run, cpu = settings(name, **changes), topology == "cpu"
    machine = parse_topology("h100:1" if cpu else topology)
    return plan_run(run, find_model_config(run.model)[0], machine, jax.devices()[:1] if cpu else None, None, False)


@pytest.mark.parametrize(("name", "topology", "changes", "sampling", "learning"), COMPILED)
def test_the_formula_is_near_what_the_compiler_said(name, topology, changes, sampling, learning):
    compiled = {"sampling": sampling, "learning": learning}
    for half, memory in planned(name, topology, **changes).halves.items():
        known = compiled[half]
        assert known is None or known / 1.3 < memory.total / GIB < 1.3 * known, half


def test_the_frozen_model_is_there_once_and_the_sampler_has_adapters_alone():
    plan, packed = (planned(GRPO, "h100:1", model="Qwen/Qwen3-8B", base=base, rows=1) for base in ("bf16", "nf4"))
    assert 15 < plan.sampling.weights / GIB < 16
    assert plan.sampling.sampled < 0.01 * plan.sampling.weights
    assert 5.5 < packed.sampling.weights / GIB < 6, "embedding and head stay as they are"
    assert packed.parameters == plan.parameters == (8_190_735_360,) * 2, "weights, not what they are packed in"


@pytest.mark.filterwarnings("ignore:get_parser")
@pytest.mark.parametrize(
    ("slots", "remat", "change"),
    [(128, "full", "--rollout.engine.slots 64"), (8, "none", "--learner.compute.remat full")],
)
def test_a_run_that_does_not_fit_is_told_the_smallest_change(slots, remat, change):
    run = tiny_run((1, 1, 1), slots=slots)
    machine = parse_topology("h100:1")
    run = with_learner(run, compute=dataclasses.replace(run.learner.compute, remat=remat, microbatch_rows=1))
    peak = plan_run(run, CONFIG, machine, None, None, False).peak
    small = dataclasses.replace(machine, chip=dataclasses.replace(machine.chip, memory=0.95 * peak))
    line = smallest_change(plan_run(run, CONFIG, small, None, None, False), CONFIG, None)
    assert line == f"it fits with {change} (by formula)"


@pytest.mark.filterwarnings("ignore:get_parser")
def test_a_change_is_proposed_also_where_the_formula_says_that_it_fits():
    """The compiler may need far more than the formula."""
    run, machine = tiny_run((1, 1, 1), slots=8), parse_topology("h100:1")
    plan = plan_run(run, CONFIG, machine, None, None, False)
    compiled = dataclasses.replace(plan, learning=dataclasses.replace(plan.learning, temporary=machine.chip.memory))
    assert smallest_change(compiled, CONFIG, None).startswith("it fits with --learner.")


def test_slots_left_open_are_as_many_as_fit():
    run, machine = tiny_run((1, 1, 1), slots=0), parse_topology("h100:1")
    usual, half = (
        plan_run(with_engine(run, slots=n), CONFIG, machine, None, None, False).sampling.total for n in (64, 32)
    )

    def chosen(memory):
        small = dataclasses.replace(machine, chip=dataclasses.replace(machine.chip, memory=memory))
        plan = plan_run(run, CONFIG, small, None, None, False)
        return plan.run.rollout.engine.slots, [note for note in plan.chosen if " slots" in note and "GiB" in note]

    assert chosen(usual) == (64, [])
    assert chosen(usual - 1)[0] == chosen(half)[0] == 32 and chosen(half - 1)[0] == 16
    ((_, (line,)), (most, (none,))) = chosen(half), chosen(1)
    words = "32 slots, microbatch_rows 2, remat full; --rollout.engine.kv_cache_dtype int8 leaves room for 64 slots"
    assert line == f"chosen for 0.0 GiB: {words}"
    assert (most, none) == (64, "no number of slots fits 0.0 GiB by formula")
    assert choose_slots(with_engine(run, slots=7), CONFIG, machine=machine)[0].rollout.engine.slots == 7
    here = dataclasses.replace(run, mesh=MeshShape())
    assert choose_slots(here, CONFIG) == (with_engine(here, slots=64), []), "a processor's memory is not known"


def test_layers_are_separate_only_where_their_stack_fits_too():
    """On a GPU the learner stacks separate layers: of 8B there is room for both, of 32B there is not."""
    models = ("Qwen/Qwen3-8B", "Qwen/Qwen3-32B")
    small, large = (planned(GRPO, "h100:1", model=model, base="bf16", rows=1) for model in models)
    assert hasattr(small.state.policy.base.weights.blocks, "0")
    assert hasattr(large.state.policy.base.weights.blocks, "attn")
    assert small.learning.temporary > 13 * GIB and large.learning.temporary < 13 * GIB
