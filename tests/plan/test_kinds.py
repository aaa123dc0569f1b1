"""Plans of runs with a critic and reward models, and of runs that learn from data."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import commands
from plan.tinyrun import CONFIG, computing, tiny_run, with_learner
from rich.console import Console
from tiny import compiled

from jaxrl_llm import config as configs
from jaxrl_llm import learner
from jaxrl_llm.config import BatchSize, Preference, RewardModel, Scoring, Supervised
from jaxrl_llm.config.origin import Origin
from jaxrl_llm.data import Pairs, Steps, Texts
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Compute, Critic, Learner
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.models.config import Attention, Lora, ModelConfig
from jaxrl_llm.models.decoder import initialise
from jaxrl_llm.models.heads import with_scalar_head
from jaxrl_llm.plan import planning
from jaxrl_llm.plan.machines import describe_devices, parse_topology
from jaxrl_llm.plan.planning import best_plans, plan_run
from jaxrl_llm.plan.programs import (
    architecture_finder,
    find_model_config,
    planned_run,
    program_meshes,
)
from jaxrl_llm.plan.roofline import step_work
from jaxrl_llm.plan.tables import draw_plans, plan_to_json, plans_table, report_lines
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rewards import ModelReward
from jaxrl_llm.sharding import MeshShape, bytes_per_device, make_mesh, shardings
from jaxrl_llm.sharding.distributed import ALONE
from jaxrl_llm.stages import stage_of
from jaxrl_llm.tasks import Rows
from jaxrl_llm.telemetry.progress import Progress, Schedule
from jaxrl_llm.types import Completion, Group, Problem

GPUS = parse_topology("h100:4")
SLICE = parse_topology("v5e:2x2")
OTHER = ModelConfig("llama", 512, 32, 1, 64, Attention(2, 1, 16))
"""Another architecture, which reads the same tokens."""
PPO = dataclasses.replace(RECIPES["ppo"], critic=Critic())
PAIR = {"prompt": "1+2=", "chosen": "3", "rejected": "12"}
DATA = {
    "sft": (Supervised, Texts(Rows(({"prompt": "1+2=", "completion": "3"},)), template="plain")),
    "dpo": (Preference, Pairs(Rows((PAIR,)), template="plain")),
    "rm": (RewardModel, Pairs(Rows((PAIR,)), template="plain")),
    "prm": (
        RewardModel,
        Steps(Rows(({"prompt": "1+2=", "completions": ["1", "3"], "labels": [1, 0]},)), template="plain"),
    ),
}


def four_models(**critic):
    """A run with a policy, a reference, a critic and two reward models that are not there yet."""
    recipe = dataclasses.replace(PPO, critic=Critic(**critic))
    run = tiny_run((1, 4, 1), recipe=recipe)
    return dataclasses.replace(run, scoring=Scoring((ModelReward(("runs/one", "runs/two")),)))


def from_data(name, mesh=(1, 4, 1), rank=0):
    """A run that learns from data, in rows of 64 tokens."""
    kind, data = DATA[name]
    settings = Learner(compute=Compute(microbatch_rows=4, row_tokens=128), lora=Lora(rank))
    return kind("tiny-random", data, batch=BatchSize(8, 64), learner=settings, mesh=MeshShape(*mesh))


def held_by_one(tree):
    """Bytes that really are on the first device."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


@pytest.fixture
def sooner():
    """What a device holds depends on no optimisation of the programs that make it."""
    with compiled(optimised=False):
        yield


@pytest.fixture(scope="module")
def ppo():
    """A plan with four models by the TPU's compiler, for all tests."""
    return plan_run(four_models(epochs=2), CONFIG, SLICE, describe_devices(SLICE), None, True)


@pytest.mark.slow
@pytest.mark.compilers
def test_critic_and_reward_models_are_compiled_for_a_tpu_slice(ppo):
    assert {"values", "critic", "judges"} < set(ppo.compiled) and not ppo.refused and ppo.fits
    sent = {p.name: sum(t.ici for t in p.traffic) for p in ppo.phases}
    assert all(sent[name] > 0 for name in ("judges", "values", "update", "critic")), sent
    assert [p.name for p in ppo.phases if p.samples] == ["weights", "prompts", "decode", "judges"]
    assert [p.name for p in ppo.phases if p.learns] == ["update", "critic"]
    assert {p.name: p.calls for p in ppo.phases}["judges"] == 2  # of the same shapes: one program
    assert ppo.learning.temporary >= max(ppo.compiled[name].temporary for name in ("update", "critic"))


@pytest.mark.compilers
def test_the_report_names_every_model(ppo, tmp_path):
    text = "\n".join(report_lines(ppo, ""))
    for words in ("critic (float32)", "optimiser of the critic", "reward models (float32)", "critic x 2", "values x 1"):
        assert words in text, words
    for path in ("runs/one", "runs/two"):
        assert f"{path} not found: planned as a model of the policy's architecture" in text
    value = plan_to_json(ppo, "")
    assert value["memory"]["learning"]["critic"] == ppo.learning.critic > 0
    assert value["memory"]["sampling"]["judges"] == ppo.learning.judges > 0
    assert set(value["most"]) == {"prompts", "slots", "microbatch_rows"}
    draw_plans([json.loads(json.dumps(value))], tmp_path / "plan.svg")
    assert "reward models" in (tmp_path / "plan.svg").read_text()


@pytest.mark.slow(but=("other", "adapter"))
@pytest.mark.parametrize("critic", ["own", "other", "adapter"])
def test_bytes_of_all_models_are_those_that_a_device_really_holds(critic, sooner):
    run = four_models(adapter=critic == "adapter", model="other" if critic == "other" else None)
    run = with_learner(run, lora=Lora(4 if critic == "adapter" else 0))
    find = {"other": OTHER, "runs/one": CONFIG, "runs/two": OTHER}.__getitem__
    one = planned_run(run, CONFIG, jax.devices()[:4], find)
    begins = one.outline.training[1].begins
    if critic == "other":
        begins = begins._replace(load=lambda: with_scalar_head(initialise(OTHER, jax.random.key(2))))
    settings = build(run.learner.optimiser)
    model = initialise(CONFIG, jax.random.key(0))
    state = learner.create_state(model, settings, True, one.mesh, run.learner.lora, 0, [begins])
    planned = planning.memory_of_learning(run, one.arrays, {})
    roles = state.roles
    assert planned.weights == held_by_one((roles["policy"].params, roles["policy"].base))
    assert planned.optimiser == held_by_one(roles["policy"].opt_state)
    assert planned.reference == held_by_one(state.reference)
    assert planned.critic == held_by_one(roles["critic"].params) > 0
    assert planned.critic_optimiser == held_by_one(roles["critic"].opt_state) > 0
    judges = [with_scalar_head(initialise(config, jax.random.key(1))) for config in (CONFIG, OTHER)]
    assert planned.judges == sum(held_by_one(jax.device_put(j, shardings(j, one.where))) for j in judges)
    assert {"judges", "judges 2"} < set(program_meshes(one))


def test_a_critic_without_a_head_is_less_work_than_the_policy():
    one = planned_run(four_models(), CONFIG, jax.devices()[:4], lambda name: CONFIG)
    todo = step_work(one.run, one.outline, one.arrays.learned)
    policy, critic = one.arrays.learned
    head = 3 * 2 * CONFIG.width * CONFIG.vocab_size * todo.sampled
    assert policy.predicts and not critic.predicts
    without = dataclasses.replace(one.run, recipe=RECIPES["reinforce_pp"])
    alone = planned_run(without, CONFIG, jax.devices()[:4], lambda name: CONFIG)
    mine = step_work(without, alone.outline, alone.arrays.learned).train_flops
    np.testing.assert_allclose(todo.train_flops, 2 * mine - head, rtol=1e-12)


def test_reward_models_on_devices_that_only_sample_take_no_memory_where_the_policy_learns():
    run = four_models()
    run = dataclasses.replace(run, mesh=MeshShape(1, 2, 1, rollout=2))
    found = plan_run(run, CONFIG, GPUS, None, None, False)
    single = dataclasses.replace(run, scoring=Scoring((ModelReward("runs/one"),)))
    assert found.sampling.judges == 2 * plan_run(single, CONFIG, GPUS, None, None, False).sampling.judges
    assert found.sampling.judges > 0 == found.learning.judges and found.sampling.critic == 0 < found.learning.critic


def test_a_model_that_is_there_and_cannot_be_read_is_no_model_of_the_policys_architecture(tmp_path):
    run = dataclasses.replace(four_models(), scoring=Scoring((ModelReward(str(tmp_path)),)))
    with pytest.raises(InputError, match=r"config\.json"):
        plan_run(run, CONFIG, GPUS, None, None, False)


def test_a_run_of_another_model_has_its_architecture(tmp_path):
    directory = tmp_path / "runs" / "rm"
    (directory / "checkpoints" / "1").mkdir(parents=True)
    saved = configs.to_json(from_data("rm")) | Origin(str(tmp_path)).to_json()
    (directory / "config.json").write_text(json.dumps(saved))
    config, source = find_model_config(str(directory))
    assert config == find_model_config("tiny-random")[0] and source == f"of run {directory}: built in"
    find, assumed = architecture_finder(CONFIG)
    assert find(f"{directory}@1") == config != CONFIG and not assumed


def test_samples_of_a_step_with_a_critic_carry_what_is_planned():
    run = four_models()
    tokens = np.arange(5, dtype=np.int32)
    logp = np.zeros(5, np.float32)
    one = Completion(tokens, logp, "stop", np.ones(5, bool), np.zeros(5, np.int32))
    problem = Problem("1", ({"role": "user", "content": "?"},), "3", "test")
    group = Group(problem, tokens, (one, one), np.arange(2.0), np.arange(2.0))
    models = dict.fromkeys(
        ("values", "ref_logp"), lambda samples: [np.zeros(len(s.tokens), np.float32) for s in samples]
    )
    [[made, _]], _ = learner.to_samples(run.recipe.algorithm, [group], 0, group.rewards[None], (), 5, models)
    planned = planned_run(run, CONFIG, jax.devices()[:4], lambda _: CONFIG).outline.samples(5)[0]
    assert made.scalars.keys() == planned.scalars.keys()
    kinds = [{name: (x.shape, x.dtype) for name, x in one.arrays.items()} for one in (made, planned)]
    assert kinds[0] == kinds[1] and {"returns", "old_values", "advantages"} < kinds[0].keys()


@pytest.mark.parametrize("name", DATA)
def test_what_is_planned_is_what_is_trained(name, tmp_path):
    run = from_data(name, (1, 1, 1))
    stage = stage_of(run)
    mesh = make_mesh(run.mesh, jax.devices()[:1])
    model, tokenizer = load_pretrained("tiny-random")
    one = planned_run(run, model.config, jax.devices()[:1])
    with (
        stage.resources(run, ALONE, tmp_path) as resources,
        Progress(Schedule(1), console=Console(quiet=True)) as progress,
    ):
        made = stage.prepare(run, model, tokenizer, mesh, resources, progress, ALONE)
        groups = [made.samples_of(made.rows[0], 0, number) for number in range(run.batch.rows)]
    sizes = ("microbatches", "sequences", "predictions")
    planned, layout = one.outline.forward, made.forward.layout
    room = {name: getattr(planned.layout, name) for name in sizes}
    assert all(getattr(layout, name) <= most for name, most in room.items())
    assert dataclasses.replace(made.forward, layout=dataclasses.replace(layout, **room)) == planned
    assert [t.objectives for t in made.training] == [t.objectives for t in one.outline.training]
    names = tuple(objective.name for t in made.training for objective in t.objectives)
    packed = made.forward.packed([sample for group in groups for sample in group], names)
    assert jax.tree.structure(packed) == jax.tree.structure(one.arrays.packed)
    assert [x.dtype for x in jax.tree.leaves(packed)] == [x.dtype for x in jax.tree.leaves(one.arrays.packed)]
    assert len(groups) == run.batch.rows and len(groups[0]) == one.outline.groups.each


@pytest.mark.parametrize("name, rank", [("sft", 0), ("dpo", 0), ("rm", 4), ("prm", 0)])
def test_bytes_of_a_run_from_data_are_those_that_a_device_really_holds(name, rank, sooner):
    run = from_data(name, rank=rank)
    one = planned_run(run, CONFIG, jax.devices()[:4])
    model = initialise(CONFIG, jax.random.key(0))
    model = with_scalar_head(model) if isinstance(run, RewardModel) else model
    state = learner.create_state(model, build(run.learner.optimiser), False, one.mesh, run.learner.lora)
    planned = planning.memory_of_learning(run, one.arrays, {})
    assert planned.weights == held_by_one((state.policy.params, state.policy.base)) > 0
    assert planned.optimiser == held_by_one(state.policy.opt_state) > 0
    assert planned.reference == planned.critic == planned.judges == planned.sampled == planned.cache == 0
    assert planned.batch == bytes_per_device(one.arrays.packed) > 0
    tokens = 8 * one.outline.groups.each * 64  # rows at their longest
    assert int(np.prod(one.arrays.packed.rows.tokens.shape)) >= tokens


@pytest.mark.slow
@pytest.mark.compilers
@pytest.mark.parametrize("name, wanted", [("dpo", {"reference", "update"}), ("prm", {"update"})])
def test_programs_of_data_are_compiled_for_a_tpu_slice(name, wanted):
    found = plan_run(from_data(name), CONFIG, SLICE, describe_devices(SLICE), None, True)
    assert set(found.compiled) == wanted and found.fits and not found.refused
    assert all(one.temporary > 0 for one in found.compiled.values())
    assert all(any(loop.collectives for loop in one.loops) for one in found.compiled.values())
    assert [p.name for p in found.phases] == ["update"] and sum(t.ici for t in found.phases[0].traffic) > 0
    assert found.sampling is None and "sampling" not in "\n".join(report_lines(found, ""))


def test_data_is_planned_by_formula_and_searched():
    run = from_data("sft")
    longer = dataclasses.replace(run, batch=BatchSize(16, 64))
    base, more = (plan_run(one, CONFIG, GPUS, None, None, False) for one in (run, longer))
    assert more.learning.batch > base.learning.batch and more.work.train_flops == 2 * base.work.train_flops
    shorter = plan_run(run, CONFIG, GPUS, None, 16, False)
    assert shorter.learning == base.learning and shorter.work.train_flops < base.work.train_flops / 3
    value = plan_to_json(base, "")
    assert value["memory"]["sampling"] is None and set(value["most"]) == {"rows", "slots", "microbatch_rows"}
    found = best_plans(run, CONFIG, GPUS, None, None, True, lambda text: None)
    assert found and all(p.fits for p in found) and len(plans_table(found)) == 1 + len(found)


@pytest.mark.slow
def test_the_command_plans_every_kind(tmp_path):
    asked = ["sft_quickstart", "dpo_quickstart", "reward_quickstart"]
    rest = "--model tiny-random --topology h100:1 --quick --json"
    answers = commands([f"plan {name} {rest} {name}.json" for name in asked], tmp_path)
    assert [answer.code for answer in answers] == [0] * len(asked), answers
    for name, answer in zip(asked, answers, strict=True):
        assert "it samples answers too" in answer.out and "FITS" in answer.out
        assert json.loads((tmp_path / f"{name}.json").read_text())["memory"]["sampling"] is None


@pytest.mark.slow
def test_the_model_in_compute_type_is_what_is_scored_with():
    one = planned_run(computing(four_models(), dtype="bfloat16"), CONFIG, jax.devices()[:4], lambda _: CONFIG)
    (judges, _) = one.arrays.passes
    assert {x.dtype for x in jax.tree.leaves(judges.model)} == {jnp.dtype("bfloat16")}
