"""Formulas of work and memory against independent counts of real programs and real arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import NamedSharding, PartitionSpec
from plan.tinyrun import CONFIG, computing, tiny_run, with_learner
from tiny import KINDS, compiled, tiny

from jaxrl_llm import learner
from jaxrl_llm.config import Output
from jaxrl_llm.engine.requests import Request
from jaxrl_llm.engine.sampling import draw_options, to_traced
from jaxrl_llm.engine.scheduler import PROMPT_BYTES, EngineSpec, chunk_rows, chunk_shape
from jaxrl_llm.engine.settings import Sampling
from jaxrl_llm.engine.slots import empty_slots, run_chunk
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.samples import estimator_bytes
from jaxrl_llm.models import experts
from jaxrl_llm.models.decoder import Weights, count_parameters, forward_flops, initialise, visible_pairs
from jaxrl_llm.plan import hlo
from jaxrl_llm.plan.hlo import find_loops
from jaxrl_llm.plan.planning import episode_prompt_bytes, memory_of_learning, state_memory
from jaxrl_llm.plan.programs import abstract_mesh, compile_program, planned_arrays, planned_run
from jaxrl_llm.plan.roofline import (
    Occupancy,
    attention_share,
    completion_lengths,
    expert_exchange,
    occupancy,
    step_work,
    update_flops,
)
from jaxrl_llm.recipes import RECIPES
from jaxrl_llm.rollout import Engine
from jaxrl_llm.sharding import MeshShape, bytes_per_device, make_mesh
from jaxrl_llm.types import Prompt

MESHES = [(1, 8, 1), (2, 2, 2)]


@pytest.fixture(autouse=True, scope="module")
def sooner():
    """Nothing here depends on XLA's optimisations, which are most of its time."""
    with compiled(optimised=False):
        yield


def products(jaxpr):
    """FLOPs of all matrix products of a jaxpr, loops of known length multiplied out, others once."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (left, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * int(np.prod([shape[axis] for axis in left]))
        times = equation.params.get("length", 1) if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            total += times * products(inner)
    return total


@pytest.mark.parametrize("remat", ["full", "none"])
def test_an_update_runs_the_products_that_the_formula_says(remat):
    run = computing(tiny_run((1, 1, 1), prompts=2, group=2), remat=remat)
    one = planned_run(run, CONFIG, jax.devices()[:1])
    held = one.arrays
    (policy,) = held.learned
    assert (
        policy.microbatches == 1 and held.packed.predictions.target.shape[-1] <= 512
    )  # both loops whose bounds are data run once
    given = dict.fromkeys(one.outline.coefficients["policy"], jax.ShapeDtypeStruct((), np.float32))
    jaxpr = jax.make_jaxpr(policy.training.update)(held.state, held.packed, given)
    todo = step_work(run, one.outline, held.learned)
    predicted = update_flops(todo, policy)
    # What is padded to a quarter of a row among the predictions is computed too.
    padding = held.packed.predictions.target.size - todo.sampled
    assert products(jaxpr.jaxpr) == predicted + 3 * forward_flops(CONFIG, 0, 0, padding), "three: logits are kept"


def test_a_decode_step_runs_the_products_that_the_formula_says():
    model = jax.eval_shape(lambda key: initialise(CONFIG, key), jax.random.key(0))
    run = tiny_run((1, 1, 1))
    one = planned_run(run, CONFIG, jax.devices()[:1])
    a = one.arrays
    rules = jax.eval_shape(lambda: to_traced(a.sampler.rules))
    jaxpr = jax.make_jaxpr(lambda m, s, r: run_chunk(m, s, r, 1, draw_options(a.sampler.rules), a.slot_shape.group))(
        model, a.slots, rules
    )
    slots, columns = run.rollout.engine.slots, a.slot_shape.columns + 1
    lanes = a.slot_shape.blocks * a.slot_shape.group * a.slot_shape.prompt_columns
    pairs = CONFIG.layers * (slots * columns + lanes)
    assert products(jaxpr.jaxpr) == forward_flops(CONFIG, slots, pairs, slots)


@pytest.mark.parametrize("windows", [(), (3, 0), (5, 5)])
@pytest.mark.parametrize("first, last", [(0, 7), (4, 9), (2, 3)])
def test_visible_pairs_are_those_of_a_loop(windows, first, last):
    config = dataclasses.replace(CONFIG, attention=dataclasses.replace(CONFIG.attention, windows=windows))
    counted = sum(
        1
        for window in windows or (0, 0)
        for query in range(first, last)
        for key in range(query + 1)
        if not window or query - key < window
    )
    assert visible_pairs(config, first, last) == counted


@pytest.mark.parametrize(("mean", "slots", "parts"), [(120, 40, 1), (400, 24, 4), (90, 20, 8)])
def test_slots_take_the_next_of_the_queue_and_read_what_the_engine_reads(mean, slots, parts):
    """One slot at a time, by loops; the shape of each chunk is the engine's own answer."""
    count, longest, chunk = 90, 400, 16
    queue = completion_lengths(count, mean, longest).tolist()
    assert sum(queue) / count == pytest.approx(mean, rel=0.06) and max(queue) <= longest
    build = EngineSpec(CONFIG, jnp.float32, slots, longest + 24, chunk, None, False, 1)
    held, chunks, read, live, room = [], 0, 0, 0, longest + chunk
    while queue or held:
        held += [[queue.pop(0), 0] for _ in range(min(slots - len(held), len(queue)))]
        asked = [Request(0, Prompt(np.zeros(1, np.int32)), 0, 10**6, num_sampled=done) for _, done in held]
        read += chunk_shape(build, Sampling(max_new_tokens=longest), asked, None, True).columns * chunk_rows(
            len(held), slots, parts
        )
        chunks, live = chunks + 1, live + sum(done for _, done in held)
        held = [[length, done + chunk] for length, done in held if done + chunk < length]
    found = occupancy(count, mean, longest, slots, chunk, room, parts)
    whole = slots * room * chunks
    assert found == Occupancy(chunks, pytest.approx(read / whole), pytest.approx(live / whole))
    alone = chunk_shape(build, Sampling(max_new_tokens=longest), asked, None, True)
    assert alone.rows == chunk_rows(len(asked), slots, 1)


def test_attention_hides_half_at_best():
    assert attention_share("xla", 128) == 1.0 and attention_share("xla", 8192) == 9 / 16
    assert (
        attention_share("cudnn", 8192) == 1.0
        and attention_share("triton", 8192) == 0.5 + 1 / 128
        and attention_share("splash", 8192) == 0.5 + 1 / 32
    )


def test_six_n_per_token_is_the_known_count():
    """Qwen2.5-0.5B by hand: 24 layers of 14,909,440 weights in products, a head of 136,134,656, and short rows."""
    from jaxrl_llm.plan.programs import find_model_config

    config, _ = find_model_config("Qwen/Qwen2.5-0.5B")
    (*_, layers), head = count_parameters(config), 896 * 151936
    assert layers == 24 * (896 * 896 * 2 + 896 * 128 * 2 + 3 * 896 * 4864)
    assert forward_flops(config, 0, 0, 1) == 2 * head
    assert 3 * forward_flops(config, 1, 0, 1) == 6 * (layers + head)


@pytest.mark.parametrize(("mesh", "cache"), [(MESHES[0], "auto"), (MESHES[1], "int8")])
def test_bytes_of_a_device_are_those_that_it_really_holds(mesh, cache):
    run = tiny_run(mesh, cache=cache)
    one = planned_run(run, CONFIG, jax.devices())
    model = initialise(CONFIG, jax.random.key(0))
    held = planned_arrays(one.outline, model, abstract_mesh(run.mesh.sizes(8)), abstract_mesh(run.mesh.sizes(8)))
    state = learner.create_state(model, build(run.learner.optimiser), run.recipe.algorithm.needs_reference, one.mesh)
    slots = empty_slots(CONFIG, held.slot_shape, jnp.int8 if cache == "int8" else jnp.float32, one.where)
    for planned, real in [(held.state, state), (held.slots, slots)]:
        there = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(real))
        assert bytes_per_device(planned) == there


def test_prompts_that_episodes_keep_between_turns_are_counted():
    run = tiny_run(MESHES[1])
    arrays = planned_run(run, CONFIG, jax.devices()).arrays
    assert episode_prompt_bytes(run, arrays) == 0
    playing = dataclasses.replace(run, task=dataclasses.replace(run.task, tools=("json:dumps",)))
    (layers, _, heads, width, columns) = arrays.slots.blocks.k.shape
    kept = 8 * 2 * layers * heads // 2 * width * columns * 4  # keys and values of 8 prompts, heads by tensor 2
    assert episode_prompt_bytes(playing, arrays) == kept < PROMPT_BYTES
    many = dataclasses.replace(playing, rollout=dataclasses.replace(run.rollout, prompts=10**6))
    assert episode_prompt_bytes(many, arrays) == PROMPT_BYTES


def test_prompts_that_are_kept_have_their_states():
    run = tiny_run((1, 8, 1), model="tiny-random-hybrid")
    arrays = planned_run(run, KINDS["delta"], jax.devices()).arrays
    playing = dataclasses.replace(run, task=dataclasses.replace(run.task, tools=("json:dumps",)))
    columns = 2 * 8 * arrays.slots.blocks.columns * 2  # keys and values of the layer with attention, of both heads
    tails, matrices = (2 * (2 * 8) + 4 * 6) * 3, 4 * 8 * 6  # of each of the three layers with a state
    assert episode_prompt_bytes(playing, arrays) == 8 * 4 * (columns + 3 * (tails + matrices))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES[1:])
def test_the_compiler_is_given_as_many_bytes_as_planned(mesh):
    one = planned_run(tiny_run(mesh), CONFIG, jax.devices())
    size = bytes_per_device
    done = compile_program(one, "update")
    given = size(one.arrays.state) + size(one.arrays.packed) + 4 * len(one.outline.coefficients["policy"])
    packed = one.arrays.packed
    unused = size(packed.counts["policy"].sequences) + size(packed.by_token["sampler_logp"])
    assert given - unused <= done.arguments <= given and done.outputs < 0.01 * given
    assert done.temporary > size(one.arrays.state.policy.params)  # the gradient at least


@pytest.mark.slow
def test_slots_are_planned_at_the_largest_that_an_engine_takes():
    run = tiny_run((1, 1, 1), prompts=9, group=4)
    one = planned_run(run, CONFIG, jax.devices()[:1])
    engine, weights = (
        Engine(one.arrays.sampled, 32, run.rollout.max_length, 8, None, group=4),
        initialise(CONFIG, jax.random.key(1)),
    )
    engine.start(one.arrays.sampler.rules)
    prompts = [[i // 4 + 1] * run.rollout.max_prompt_tokens for i in range(36)]
    engine.submit(prompts, range(36))
    while engine.busy:
        engine.step(weights)
    seen = [
        [int(word.strip(",")) for word in shape.split() if word.strip(",").isdigit()]
        for shape in engine.shapes
        if "decode" in shape
    ]
    planned = one.arrays.slot_shape
    most = [max(sizes[i] for sizes in seen) for i in range(4)]
    assert (
        most[:2] == [planned.rows, planned.columns] and most[2] <= planned.blocks and most[3] == planned.prompt_columns
    )


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_watched_reference_is_held_and_read_with_the_policy(minibatches):
    run = with_learner(tiny_run((1, 1, 1), recipe=RECIPES["dapo"]), minibatches=minibatches)
    watched = dataclasses.replace(run, output=Output(monitor_kl=True))
    plain, held = (planned_run(one, CONFIG, jax.devices()[:1]) for one in (run, watched))
    assert state_memory(plain.arrays).reference == 0
    assert state_memory(held.arrays).reference == state_memory(held.arrays).weights > 0
    passes = [step_work(one.run, one.outline, one.arrays.learned).score_passes for one in (plain, held)]
    assert passes == [int(minibatches > 1), 2]


def test_estimated_advantages_are_counted():
    run = tiny_run((1, 1, 1), recipe=RECIPES["ppo"])
    held = planned_run(run, CONFIG, jax.devices()[:1]).arrays
    counted = []
    for prompts in (run.rollout.prompts, 1 << 20):
        more = dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, prompts=prompts))
        counted.append(memory_of_learning(more, held, {}).temporary)
    layout = held.learned[0].forward.layout
    rows = run.rollout.group << 20
    estimate = estimator_bytes(run.recipe.algorithm.advantage, rows, layout.completion_tokens)
    assert counted[1] == estimate - bytes_per_device(held.packed) * run.learner.minibatches > counted[0]


def test_experts_exchange_what_the_formula_says():
    """By the compiled forward and backward pass of a layer whose experts four devices divide."""
    config = tiny("experts").config
    mesh = make_mesh(MeshShape(data=1, fsdp=1, tensor=2, expert=4))
    count, width, inner = 8, config.width, config.expert_width
    config = dataclasses.replace(config, experts=dataclasses.replace(config.experts, count=count))
    shapes = {"gate": (count, width, inner), "up": (count, width, inner), "down": (count, inner, width)}
    weights = {name: jnp.zeros(shape) for name, shape in (shapes | {"router": (width, count)}).items()}

    def loss(weights, x):
        return jnp.sum(experts.mixture(Weights(weights), config, x)[0] ** 2)

    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((8, 6, width), np.float32, sharding=NamedSharding(mesh, PartitionSpec("expert")))
        text = jax.jit(jax.grad(loss, (0, 1))).lower(weights, x).compile().as_text()
    found = {"all-gather": 0.0, "reduce-scatter": 0.0}
    for loop in find_loops(hlo.parse_hlo(text, 8), ()):
        for one in loop.collectives:
            if one.kind in found and one.groups.shape[1] == 4:
                found[one.kind] += one.times * one.size
    axes = {"expert": np.arange(8).reshape(4, 2).T}
    wanted = {one.kind: one.size for one in expert_exchange(config, 12, 4, axes, 1)}
    total = sum(found.values())
    assert 0.95 < total / (2 * sum(wanted.values())) <= 1, (found, wanted)
    assert expert_exchange(tiny("plain").config, 12, 4, axes, 1) == expert_exchange(config, 12, 4, {}, 1) == []
