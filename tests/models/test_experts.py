"""Experts: every form agrees with the dense one, forward and backward, and nothing is dropped."""

import dataclasses
import functools
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from tiny import KINDS, largest_difference, tiny

from jaxrl_llm.errors import InputError
from jaxrl_llm.models import experts
from jaxrl_llm.models.config import Attention, ComputeOptions, Experts, Lora, ModelConfig
from jaxrl_llm.models.decoder import Decoder, Weights, causal_rows, forward, routed, to_parameters
from jaxrl_llm.models.decoding import FEW
from jaxrl_llm.models.lora import create_adapter, merge, with_adapter
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
from jaxrl_llm.sharding.mesh import without_compilation_cache

WIDTH, INNER = 8, 12


def inputs(tokens, count, active, seed=0):
    """Tokens, the three matrices of each expert, and weights and numbers of the experts of each token."""
    random = np.random.default_rng(seed)
    shapes = ((count, WIDTH, INNER), (count, WIDTH, INNER), (count, INNER, WIDTH))
    shapes += ((count, INNER), (count, INNER))
    matrices = experts.Matrices(*(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes))
    taken = np.stack([random.permutation(count)[:active] for _ in range(tokens)])
    weights = random.uniform(size=taken.shape)
    return matrices, jnp.float32(random.normal(size=(tokens, WIDTH))), jnp.float32(weights), jnp.int32(taken)


def by_hand(matrices, x, weights, taken):
    """Token by token, expert by expert, in float64."""
    gate, up, down, *biases = (np.float64(m) for m in matrices[:5])
    out = np.zeros(x.shape)
    for t, (own, row) in enumerate(zip(np.float64(weights), taken, strict=True)):
        for weight, e in zip(own, row, strict=True):
            a, b = (np.float64(x[t]) @ m[e] + bias[e] for m, bias in zip((gate, up), biases, strict=True))
            out[t] += weight * ((a / (1 + np.exp(-a)) * b) @ down[e])
    return out


GATED = experts.gating(KINDS["experts"])
FORMS = experts.FORMS | {"megablox": functools.partial(experts.megablox, interpret=True)}


@functools.cache
def computed(form):
    return jax.jit(lambda matrices, *given: FORMS[form](matrices, GATED, *given))


SIZES = [(1, 4, 2), (5, 3, 3), (40, 6, 2), (33, 2, 1)]


@pytest.mark.slow(but={f"size{number}-{form}" for number in (1, 3) for form in experts.FORMS})
@pytest.mark.parametrize("form", experts.FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_each_form_is_the_sum_by_hand(form, size):
    given = inputs(*size)
    found = computed(form)(given[0], *given[1:])
    np.testing.assert_allclose(found, by_hand(*given), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("form", [form for form in experts.FORMS if form != "dense"])
def test_gradients_are_those_of_the_dense_form(form):
    matrices, x, weights, taken = inputs(40, 6, 2)
    weigh = jnp.float32(np.random.default_rng(1).normal(size=x.shape))

    def loss(form, matrices, x, weights):
        return jnp.sum(weigh * FORMS[form](matrices, GATED, x, weights, taken))

    with jax.numpy_dtype_promotion("standard"):  # which the kernel's own code relies on
        found, wanted = (jax.jit(jax.grad(functools.partial(loss, one), (0, 1, 2)))(matrices, x, weights)
                         for one in (form, "dense"))  # fmt: skip
    assert largest_difference(found, wanted) < 1e-5


@pytest.mark.slow
def test_all_tokens_at_one_expert_are_computed():
    """There is no capacity; experts without a token get gradient 0."""
    matrices, x, weights, _ = inputs(70, 5, 1)
    taken = jnp.full((70, 1), 3)
    found = computed("blocks")(matrices, x, weights, taken)
    np.testing.assert_allclose(found, by_hand(matrices, x, weights, taken), rtol=1e-5, atol=1e-5)
    gradient = jax.jit(jax.grad(lambda m: jnp.sum(experts.blocks(m, GATED, x, weights, taken))))(matrices)
    assert [bool(jnp.any(gradient[0][e])) for e in range(5)] == [False, False, False, True, False]


@pytest.mark.parametrize("block", [1, 4, 8])
def test_pairs_are_sorted_into_blocks_of_one_expert(block):
    *_, taken = inputs(29, 5, 2)
    at = jax.tree.map(np.asarray, experts.sort_by_expert(taken, 5, block))
    flat = np.asarray(taken).ravel()
    assert sorted(at.row.ravel()) == sorted(np.flatnonzero(at.pair < 58)) and len(set(at.row.ravel())) == 58
    for pair, row in enumerate(at.row.ravel()):
        assert at.pair[row] == pair and at.token[row] == pair // 2 and at.owner[row // block] == flat[pair]
    assert (at.token[at.pair == 58] == 29).all()
    assert at.used == sum(-(-np.sum(flat == e) // block) for e in range(5)) == at.sizes.sum() // block


@pytest.mark.slow
def test_blocks_in_turn_and_at_once_are_one():
    """CPUs take the first form, other platforms the second one; values of unused blocks are anyone's."""
    matrices, x, _, taken = inputs(29, 5, 2)
    at = experts.sort_by_expert(taken, 5, 8)
    own = experts.gather_rows(x, at.token, at.row).reshape(-1, 8, WIDTH)
    g = jnp.float32(np.random.default_rng(1).normal(size=own.shape))
    g = jnp.where(jnp.arange(len(g))[:, None, None] < at.used, g, 0)
    found, wanted = (
        form(GATED, own, matrices, at.owner, at.used) for form in (experts.loop_forward, experts.batched_forward)
    )
    assert len(own) % experts.TOGETHER == 0 and at.used < len(own)
    assert largest_difference([t[: at.used] for t in found], [t[: at.used] for t in wanted]) < 1e-5
    given = (own, wanted[1:], g, matrices, at.owner, at.used)
    found, wanted = (form(GATED, *given) for form in (experts.loop_backward, experts.batched_backward))
    assert largest_difference(found, wanted) < 1e-5
    program = str(jax.make_jaxpr(functools.partial(experts.batched_backward, GATED))(*given))
    assert "scatter" not in program  # one whose order is fixed takes a GPU four times the rest of the update


@pytest.mark.parametrize(
    ("pairs", "count", "tokens"), [(4, 32, 8), (32, 4, 16), (128, 4, 32), (4096, 32, 64), (1 << 20, 8, 512)]
)
def test_a_block_is_half_of_an_experts_tokens_or_more_of_few(pairs, count, tokens):
    assert experts.block_of(pairs, count) == tokens


def test_choosing_by_fewer_bits_leaves_the_weights():
    """Nearly equal probabilities are one number to the choice, which then takes the first."""
    x, router = jnp.ones((1, 1)), jnp.float32([[0, 0.001, 0.002, -1]])
    probabilities = jax.nn.softmax(x @ router)[0]
    for bits, wanted in ((0, [2, 1]), (22, [2, 1]), (7, [0, 1])):
        weights, taken, own = experts.route(router, Experts(4, 2, bits=bits), x)
        assert taken.tolist() == own.tolist() == [wanted]
        np.testing.assert_array_equal(weights[0], probabilities[jnp.asarray(wanted)])


@pytest.mark.parametrize("renormalise", [True, False])
def test_weights_are_the_largest_probabilities(renormalise):
    random = np.random.default_rng(0)
    x, router = random.normal(size=(7, WIDTH)), random.normal(size=(WIDTH, 5))
    weights, taken, own = experts.route(jnp.float32(router), Experts(5, 2, renormalise=renormalise), jnp.float32(x))
    np.testing.assert_array_equal(taken, own)
    scores = np.exp(x @ router)
    probabilities = scores / scores.sum(axis=1, keepdims=True)
    for t in range(7):
        order = np.argsort(-probabilities[t])[:2]
        np.testing.assert_array_equal(own[t], order)
        largest = probabilities[t, order]
        np.testing.assert_allclose(weights[t], largest / (largest.sum() if renormalise else 1), rtol=1e-5)


@pytest.mark.slow
def test_replayed_experts_are_weighed_by_the_live_router():
    random = np.random.default_rng(0)
    x, router = jnp.float32(random.normal(size=(4, WIDTH))), jnp.float32(random.normal(size=(WIDTH, 5)))
    given = jnp.int16([[4, 0], [1, 2], [-1, -1], [3, 1]])
    settings = Experts(5, 2, renormalise=True)
    weights, taken, own = experts.route(router, settings, x, given)
    np.testing.assert_array_equal(taken, np.where(given < 0, own, given))
    probabilities = jax.nn.softmax(x @ router)
    largest = np.take_along_axis(np.asarray(probabilities), np.asarray(taken), 1)
    np.testing.assert_allclose(weights, largest / largest.sum(axis=1, keepdims=True), rtol=1e-5)
    slope = jax.grad(lambda r: experts.route(r, settings, x, given)[0][0, 0])(router)
    assert float(jnp.abs(slope).max()) > 0


def test_the_router_is_float32_in_bfloat16_models():
    """Scores that bfloat16 would round to one number decide as they are."""
    router = jnp.zeros((WIDTH, 4), jnp.bfloat16).at[0].set(jnp.bfloat16([1, 1, 1, 1]))
    router = router.at[1].set(jnp.bfloat16([0, 2**-7, 2**-6, 0]))
    x = jnp.zeros((1, WIDTH), jnp.bfloat16).at[0, :2].set(jnp.bfloat16([256, 1]))
    assert experts.route(router, Experts(4, 2), x)[2].tolist() == [[2, 1]]


@pytest.mark.slow
def test_a_decoder_replays_its_own_choice_and_no_other_form_moves_it():
    model, rows = tiny("experts"), causal_rows(np.random.default_rng(0).integers(0, 50, (2, 7)))
    hidden, own = routed(model, rows)
    count = model.config.experts
    assert own.shape == (2, 7, 2, count.active) and own.dtype == jnp.uint8
    np.testing.assert_allclose(hidden, routed(model, rows, ComputeOptions(experts="dense"))[0], atol=1e-4)
    np.testing.assert_array_equal(routed(model, rows, replayed=own.astype(jnp.int16))[0], hidden)
    other = (own.astype(jnp.int16) + 1) % count.count
    moved, still = routed(model, rows, replayed=other)
    assert float(jnp.abs(moved - hidden).max()) > 0.01
    np.testing.assert_array_equal(still[:, :, 0], own[:, :, 0])
    assert set(to_parameters(model)["blocks"]["experts"]) >= {"router", "gate", "up", "down"}
    np.testing.assert_array_equal(forward(model, rows), hidden)


def test_the_clamped_gate_is_its_formula():
    gate, up = (jnp.float32(x) for x in np.random.default_rng(0).normal(size=(2, 50)))
    found = experts.gating(KINDS["sinks"])(gate, up)
    below, within = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5)
    np.testing.assert_allclose(found, below / (1 + np.exp(-1.702 * below)) * (within + 1), rtol=1e-5)


@jax.jit
def graded(model):
    """A loss of 8 rows, and its gradient."""
    rows = causal_rows(np.random.default_rng(0).integers(0, 50, (8, 6)))
    weigh = np.random.default_rng(1).normal(size=(8, 6, 16)).astype(np.float32)
    return jax.value_and_grad(lambda m: jnp.sum(weigh * forward(m, rows, ComputeOptions(remat="full"))))(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("experts", MeshShape(data=2, fsdp=2, tensor=2)),
        ("experts", MeshShape(data=2, fsdp=1, tensor=2, expert=2)),
        ("sinks", MeshShape(data=1, fsdp=1, tensor=4, expert=2)),
    ],
)
def test_gradients_do_not_depend_on_the_mesh(kind, shape):
    """Each device sorts its own tokens; over the axis of experts they are gathered, and the sums scattered."""
    model, mesh = tiny(kind), make_mesh(shape)
    wanted = graded(model)
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, shardings(model, mesh))
        found = jax.device_get(graded(placed))
    assert largest_difference(found, wanted) < 1e-5
    parts = mesh.shape["tensor"] * mesh.shape.get("expert", mesh.shape["fsdp"])
    gate = placed.weights.blocks.experts.gate[...]
    assert gate.addressable_shards[0].data.size == gate.size // parts


@pytest.mark.slow
def test_an_adapter_leaves_experts_alone():
    """Attention is adapted, and the MLP of a shared expert."""
    config = tiny("experts").config
    alone = dataclasses.replace(config, family="qwen3_moe", experts=dataclasses.replace(config.experts, shared_width=0))
    adapted = lambda config: to_parameters(
        jax.eval_shape(lambda: create_adapter(config, Lora(rank=2), jax.random.key(0)))
    )
    assert set(adapted(config)["blocks"]) == {"attn", "mlp"} and set(adapted(alone)["blocks"]) == {"attn"}
    chosen = Lora(rank=2, targets=("experts/gate", "experts/down"))
    model, rows = tiny("experts"), causal_rows(np.random.default_rng(0).integers(0, 50, (2, 7)))
    adapter = create_adapter(config, chosen, jax.random.key(0))
    assert set(to_parameters(adapter)["blocks"]) == {"experts"}
    np.testing.assert_array_equal(forward(with_adapter(model, adapter), rows), forward(model, rows))
    random = np.random.default_rng(0)
    adapter = jax.tree.map(lambda x: jnp.float32(0.3 * random.normal(size=x.shape)), adapter)
    parameters = to_parameters(model)
    for name, factors in to_parameters(adapter)["blocks"]["experts"].items():
        for layer, e in np.ndindex(2, 6):
            change = chosen.alpha / chosen.rank * factors["a"][layer, e] @ factors["b"][layer, e]
            parameters["blocks"]["experts"][name] = parameters["blocks"]["experts"][name].at[layer, e].add(change)
    whole = Decoder(model.config, parameters)
    np.testing.assert_allclose(forward(with_adapter(model, adapter), rows), forward(whole, rows), atol=1e-4)
    assert largest_difference(to_parameters(merge(with_adapter(model, adapter))), parameters) < 1e-5
    with pytest.raises(InputError, match="mlp/up: a qwen3_moe model has none of them"):
        create_adapter(alone, Lora(rank=2, targets=("mlp/up",)), jax.random.key(0))


@pytest.fixture(scope="module")
def on_tpu():
    """A config, and shapes of its experts on a TPU and of so many tokens, which need not be there."""
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost"}
    found = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1))
    chip = jax.sharding.SingleDeviceSharding(found.devices[0])
    width = 256
    config = ModelConfig("qwen3_moe", 50, width, 1, width, Attention(4, 2, 64), experts=Experts(32, 4, width, True))
    given = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=chip)
    weights = {name: given(32, width, width) for name in ("gate", "up", "down")} | {"router": given(width, 32)}
    with without_compilation_cache():  # which cannot read programs for machines that are not there
        yield config, weights, lambda tokens: given(1, tokens, width)


@pytest.mark.slow
@pytest.mark.compilers
def test_a_tpus_products_cost_what_the_active_experts_cost(on_tpu):
    """Read from the compiled program: 1 for the forward pass and 1 for each gradient, where all experts would be 8."""
    config, weights, rows = on_tpu
    tokens, width = 1024, 256

    def loss(weights, x):
        out, _ = experts.mixture(Weights(weights), config, x, compute=ComputeOptions(experts="megablox"))
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    with jax.numpy_dtype_promotion("standard"):  # which the kernel's own code relies on
        program = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(weights, rows(tokens)).compile()
    active = 2 * 3 * tokens * config.experts.active * width * width
    assert 3.0 < program.cost_analysis()["flops"] / active < 3.2


@pytest.mark.slow
@pytest.mark.compilers
def test_a_tpu_reads_each_expert_once_in_a_decode_step(on_tpu):
    """No program holds more matrices than there are experts, where each block of tokens would have a copy."""
    config, weights, rows = on_tpu
    step = lambda weights, x: experts.mixture(Weights(weights), config, x, compute=FEW)[0]
    text = jax.jit(step).lower(weights, rows(16)).compile().as_text()
    assert max(map(int, re.findall(r"\[(\d+),256,256\]", text))) == 32
