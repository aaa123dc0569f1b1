"""One device or eight: the same gradients, the same tokens, and weights that are really divided."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from learner.rollouts import PROMPTS, WIDTH, T, one_device, policy_gradient, policy_update, rollout
from tiny import KINDS, Compilations, largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout, Optimiser, create_state, pack
from jaxrl_llm.learner.forward import put_on_mesh
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import causal_rows, forward, initialise, unstack_layers
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.sharding import (
    BATCH,
    MeshShape,
    batch_parts,
    constrain,
    fit_spec,
    gather_layer,
    layout_of,
    make_mesh,
    shardings,
)
from jaxrl_llm.sharding.rules import parameter_path, rule_of, sampling_shardings

pytestmark = pytest.mark.slow

SHAPES = [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4), (1, 1, 8)]
LAYOUT = Layout(8, 24, T)  # positions that every size of ``tensor`` divides


@functools.cache
def mesh_of(shape):
    return make_mesh(MeshShape(*shape))


def gradient(model, mesh):
    compute = functools.partial(policy_gradient, algorithm=PRESETS["dapo"])
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, shardings(model, mesh))
        return jax.device_get(jax.jit(compute)(placed, put_on_mesh(pack(rollout(), LAYOUT), mesh)))


@functools.cache
def alone():
    return gradient(tiny("windows"), one_device())


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_and_metrics_do_not_depend_on_the_mesh(shape):
    grads, metrics = gradient(tiny("windows"), mesh_of(shape))
    wanted, others = alone()
    assert largest_difference(grads, wanted) < 1e-5
    for name, value in others.items():
        if name == "sampler/logp_abs_diff_max":  # is rounding and nothing else
            assert max(value, metrics[name]) < 1e-5
        else:
            np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 2, 4)])
def test_tokens_do_not_depend_on_the_mesh(shape):
    model, mesh, rules = tiny("windows"), mesh_of(shape), Sampling(max_new_tokens=6, stop_ids=(3, 11))
    prompts, seeds = [p for p in PROMPTS for _ in range(4)], range(12)
    wanted = Engine(model, 8, WIDTH, 3).generate(model, prompts, seeds, rules)
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, shardings(model, mesh))
        found = Engine(placed, 8, WIDTH, 3, mesh).generate(placed, prompts, seeds, rules)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_allclose(a.sampler_logp, b.sampler_logp, atol=1e-5)


def test_weights_by_layer_are_divided_as_stacked_ones():
    model = tiny("windows")
    stacked = sampling_shardings(model, mesh_of((2, 2, 2))).weights.blocks
    apart = sampling_shardings(unstack_layers(model), mesh_of((2, 2, 2))).weights.blocks
    for layer in range(model.config.layers):
        for part, name in (("attn", "q"), ("attn", "o"), ("mlp", "gate"), ("mlp", "down")):
            whole = getattr(getattr(stacked, part), name).get_value().spec
            one = getattr(getattr(getattr(apart, str(layer)), part), name).get_value().spec
            assert "tensor" in one and tuple(one) == tuple(whole)[1:], name


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)])
def test_an_update_leaves_the_state_where_it_was(shape):
    mesh, optimiser = mesh_of(shape), Optimiser(learning_rate=1e-2)
    with jax.set_mesh(mesh):
        state = create_state(tiny("windows"), build(optimiser), True, mesh)
        layout = shardings(state, mesh)
        data = put_on_mesh(pack(rollout(), LAYOUT), mesh)
        update = policy_update(PRESETS["dapo"], optimiser)
        state, _ = update(state, data)
        for (path, leaf), wanted in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(layout), strict=True):
            assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), jax.tree_util.keystr(path)
        with Compilations() as compilations:
            state, _ = update(state, data)
    assert compilations.heard == [] and int(state.policy.updates) == 2


def share(leaf):
    """The part of an array that one device holds."""
    return leaf.addressable_shards[0].data.size / leaf.size


def test_matrices_and_their_moments_are_divided_over_fsdp():
    mesh = mesh_of((1, 8, 1))
    with jax.set_mesh(mesh):
        state = create_state(tiny("plain"), build(Optimiser()), True, mesh)
    for tree in (state.policy.params, state.reference, state.policy.opt_state):
        for path, leaf in jax.tree.leaves_with_path(tree):
            name = parameter_path(path)
            if rule_of(name) and name != "embed":  # 50 rows do not divide by 8
                assert share(leaf) == 1 / 8, name


def kept_of_a_layer(mesh, columns):
    """Bytes by which a device's memory grows with each further layer of a backward pass that keeps the layers'
    inputs.
    """
    found = []
    for count in (2, 10):
        config = dataclasses.replace(KINDS["plain"], width=32, layers=count)
        model = jax.eval_shape(lambda key, c=config: initialise(c, key), jax.random.key(0))
        like = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), model, shardings(model, mesh)
        )
        layout = NamedSharding(mesh, fit_spec((8, columns), (BATCH,), mesh))
        tokens = jax.ShapeDtypeStruct((8, columns), jnp.int32, sharding=layout)
        loss = lambda m, t: jnp.sum(jnp.square(forward(m, causal_rows(t), ComputeOptions(remat="full"))))
        with jax.set_mesh(mesh):
            made = jax.jit(jax.grad(loss), out_shardings=shardings(model, mesh)).lower(like, tokens).compile()
        found.append(made.memory_analysis().temp_size_in_bytes)
    return (found[1] - found[0]) / 8


def test_what_is_kept_of_a_layer_is_divided_over_tensor():
    columns = 128
    residual = 8 * columns * 32 * 4
    weights = 4 * (2 * 32 * (4 + 2) * 8 + 3 * 32 * 24)
    grown = kept_of_a_layer(mesh_of((1, 1, 8)), columns)
    assert residual / 8 <= grown <= residual / 8 + weights
    assert kept_of_a_layer(mesh_of((1, 1, 8)), columns + 1) > residual, "129 positions do not divide"


@pytest.mark.parametrize("shape", [(1, 8, 1), (2, 2, 2)])
def test_a_layers_weights_are_gathered_once_for_its_products_and_its_gradients_are_divided(shape):
    mesh = mesh_of(shape)
    model = jax.device_put(tiny("plain"), shardings(tiny("plain"), mesh))
    tokens = causal_rows(np.zeros((8, T)))
    constraints = lambda: str(jax.make_jaxpr(forward)(model, tokens)).count("sharding_constraint")
    with jax.set_mesh(mesh_of((8, 1, 1))):
        others = constraints()  # of activations
    with jax.set_mesh(mesh):
        layer = jax.tree.map(lambda x: x[0], model.weights.blocks)
        name, x = "blocks/0/mlp/up", layer.mlp.up[...]
        divided, whole = (layout_of(name, x.shape, mesh, axes) for axes in ((), ("fsdp",)))
        loss = lambda layer: jnp.sum(jnp.sin(gather_layer(layer).mlp.up[...]))
        found = jax.jit(gather_layer)(layer).mlp.up[...].sharding
        gradient = jax.jit(jax.grad(loss))(layer).mlp.up[...]
        assert constraints() == others + len(jax.tree.leaves(layer))
    assert found.is_equivalent_to(whole, 2) and gradient.sharding.is_equivalent_to(divided, 2)
    np.testing.assert_allclose(gradient, np.cos(x), rtol=1e-5)
    assert not whole.is_equivalent_to(divided, 2)


def test_a_model_that_lies_as_it_should_becomes_the_policy():
    mesh = mesh_of((1, 8, 1))
    # Memory of NumPy's, which a device may read in place, cannot be given away.
    model = jax.tree.map(jnp.copy, jax.device_put(tiny("plain"), shardings(tiny("plain"), mesh)))
    where = lambda tree: [
        s.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards
    ]
    before, values = where(model), jax.device_get(tiny("plain"))
    with jax.set_mesh(mesh):
        state = create_state(model, build(Optimiser()), True, mesh)
    assert where(state.policy.params) == before and not set(where(state.reference)) & set(before)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(model))
    for tree in (state.policy.params, state.reference):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(tree), values)


def test_both_axes_divide_a_matrix():
    mesh = mesh_of((2, 2, 2))
    model = jax.device_put(tiny("plain"), shardings(tiny("plain"), mesh))
    for path, leaf in jax.tree.leaves_with_path(model):
        name = parameter_path(path)
        wanted = 1 / 2 if name == "embed" else 1 / 4 if rule_of(name) else 1  # 50 rows divide by 2, not by 4
        assert share(leaf) == wanted, name


def test_heads_that_do_not_divide_stay_whole():
    mesh = mesh_of((1, 1, 8))
    model = jax.device_put(tiny("plain"), shardings(tiny("plain"), mesh))  # 4 query heads, 2 key/value heads
    shares = {parameter_path(path): share(leaf) for path, leaf in jax.tree.leaves_with_path(model)}
    assert shares["blocks/attn/q"] == shares["blocks/attn/k"] == 1
    assert shares["blocks/mlp/gate"] == shares["blocks/mlp/down"] == 1 / 8


def test_every_matrix_of_every_family_has_a_rule():
    for kind in ("plain", "bias", "full_norm", "gemma", "gemma4"):
        for path, leaf in jax.tree.leaves_with_path(tiny(kind)):
            name = parameter_path(path)
            assert rule_of(name) or "norm" in name or name in ("blocks/experts/router", "blocks/experts/expert_scale")
            assert len(rule_of(name)) in (0, leaf.ndim)
    for name in ("attn/q", "attn/o/b", "mlp/down/codes"):
        part, _, rest = name.partition("/")
        assert rule_of(f"blocks/shared_kv_global_{part}/{rest}") == rule_of(f"blocks/{name}") != ()


def test_paths_are_found_inside_whatever_holds_the_model():
    model = tiny("plain")
    wanted = {parameter_path(path) for path, _ in jax.tree.leaves_with_path(model)}
    assert "blocks/attn/q" in wanted and "embed" in wanted
    assert {parameter_path(path) for path, _ in jax.tree.leaves_with_path({"a": (model, model)})} == wanted
    assert {parameter_path(path) for path, _ in jax.tree.leaves_with_path({"embed": 1, "count": 2})} == {""}


@pytest.mark.parametrize(("given", "devices", "wanted"), [
    ((1, -1, 1), 8, (1, 8, 1)), ((-1, 2, 2), 8, (2, 2, 2)), ((2, 2, 2), 8, (2, 2, 2)), ((1, 1, -1), 1, (1, 1, 1)),
])  # fmt: skip
def test_sizes_of_the_mesh(given, devices, wanted):
    assert tuple(MeshShape(*given).sizes(devices).values()) == wanted


@pytest.mark.parametrize(("given", "message"), [
    ((-1, -1, 1), r"one of them may be -1: got data, fsdp, tensor = \(-1, -1, 1\)"),
    ((0, 1, 1), "mesh sizes must be positive"), ((-2, 1, 1), "mesh sizes must be positive"),
    ((3, -1, 1), r"\(3, -1, 1\) does not fit 8 devices: the others must divide 8"),
    ((1, 1, 1), "does not fit 8 devices: set one of them to -1"),
    ((16, 1, 1), "does not fit 8 devices"),
])  # fmt: skip
def test_meshes_that_cannot_be(given, message):
    with pytest.raises(InputError, match=message):
        MeshShape(*given).sizes(8)


def test_layouts_fit_the_shape():
    mesh = mesh_of((2, 2, 2))
    assert batch_parts(mesh) == 4
    assert fit_spec((8, 9), (("data", "fsdp"), "tensor"), mesh) == PartitionSpec(("data", "fsdp"), None)
    assert fit_spec((6, 4), (("data", "fsdp"), "tensor"), mesh) == PartitionSpec("data", "tensor")
    assert fit_spec((5, 4), (("data", "fsdp"), "tensor"), mesh) == PartitionSpec(None, "tensor")
    assert constrain(np.ones(3), "data").shape == (3,)  # without a mesh nothing is asked for
    with jax.set_mesh(mesh):
        laid = jax.jit(lambda x: constrain(x, ("data", "fsdp"), None))(jnp.ones((8, 3)))
    assert share(laid) == 1 / 4 and math.isclose(float(laid.sum()), 24)
