"""Every optimiser against its formulas written out for one matrix at a time, on any mesh, in either memory."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import T, one_device, policy_update, rollout
from tiny import tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.checkpoints.store import Checkpoints
from jaxrl_llm.config.phases import remembered
from jaxrl_llm.learner import Layout, Moments, Optimiser, create_state, pack
from jaxrl_llm.learner.forward import put_on_mesh
from jaxrl_llm.learner.optimiser import build, move_memory
from jaxrl_llm.learner.update import abstract_state, reset_optimiser
from jaxrl_llm.models.config import ComputeOptions, Lora
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings

KINDS = {
    "adamw": Optimiser(learning_rate=1e-2, weight_decay=0.1),
    "adamw, bfloat16 momentum": Optimiser(learning_rate=1e-2, moments=Moments(dtype="bfloat16")),
    "adafactor": Optimiser("adafactor", 1e-2, weight_decay=0.1),
    "adafactor, no momentum": Optimiser("adafactor", 1e-2, moments=Moments(b1=0.0)),
    "muon": Optimiser("muon", 1e-2, moments=Moments(b1=0.95), weight_decay=0.1),
    "muon, bfloat16 momentum": Optimiser("muon", 1e-2, moments=Moments(b1=0.95, dtype="bfloat16")),
    "offloaded": Optimiser(learning_rate=1e-2, weight_decay=0.1, moments=Moments(offload=True)),
}
MATRICES = {"blocks/attn/q": 1, "blocks/attn/o": 2, "blocks/mlp/down": 1}
"""Axes that each one sums over."""
SHAPES = MATRICES | {"blocks/norms/attn": None, "blocks/attn/k_bias": None, "embed": None}
STEPS = 3


@functools.cache
def arrays(seed):
    """Parameters or gradients large enough to be factored, by path."""
    random = np.random.default_rng(seed)
    sizes = {"blocks/attn/q": (2, 136, 4, 33), "blocks/attn/o": (2, 4, 33, 136), "blocks/mlp/down": (2, 140, 136)}
    sizes |= {"blocks/norms/attn": (2, 136), "blocks/attn/k_bias": (2, 4, 33), "embed": (150, 136)}
    return {path: random.normal(size=size).astype(np.float32) for path, size in sizes.items()}


def nested(flat):
    """A tree whose paths are those of a model."""
    tree = {}
    for path, value in flat.items():
        *parents, last = ["weights", *path.split("/")]
        node = tree
        for name in parents:
            node = node.setdefault(name, {})
        node[last] = jnp.asarray(value)
    return tree


def directions(config):
    """What the optimiser says of three gradients in turn, by path, after clipping."""
    here = dataclasses.replace(config.moments, offload=False)
    chain = build(dataclasses.replace(config, clip_norm=0.0, weight_decay=0.0, moments=here))
    state, found = chain.init(nested(arrays(0))), []
    update = jax.jit(chain.update)
    for step in range(1, STEPS + 1):
        out, state = update(nested(arrays(step)), state, nested(arrays(0)))
        found.append(
            {
                path: np.asarray(functools.reduce(dict.__getitem__, ["weights", *path.split("/")], out))
                for path in SHAPES
            }
        )
    return found


def narrow(x, dtype):
    return np.asarray(jnp.asarray(np.asarray(x, np.float32)).astype(dtype).astype("float32"), np.float64)


def adam(config, grads):
    m = v = 0.0
    for t, g in enumerate(grads, start=1):
        exact = config.moments.b1 * m + (1 - config.moments.b1) * g
        v = config.moments.b2 * v + (1 - config.moments.b2) * g**2
        yield exact / (1 - config.moments.b1**t) / (np.sqrt(v / (1 - config.moments.b2**t)) + config.moments.eps)
        m = narrow(exact, config.moments.dtype)


def adafactor(config, grads):
    rows = columns = m = 0.0
    for t, g in enumerate(grads, start=1):
        decay, square = min(1 - t**-0.8, config.moments.b2), g**2 + config.moments.eps**2
        rows = decay * rows + (1 - decay) * square.mean(axis=1)
        columns = decay * columns + (1 - decay) * square.mean(axis=0)
        step = g / np.sqrt(np.outer(rows, columns) / rows.mean())
        m = config.moments.b1 * m + (1 - config.moments.b1) * step
        yield m / (1 - config.moments.b1**t)


def whole_moments(config, grads):
    """Adafactor where nothing is factored."""
    v = m = 0.0
    for t, g in enumerate(grads, start=1):
        decay = min(1 - t**-0.8, config.moments.b2)
        v = decay * v + (1 - decay) * (g**2 + config.moments.eps**2)
        m = config.moments.b1 * m + (1 - config.moments.b1) * g / np.sqrt(v)
        yield m / (1 - config.moments.b1**t)


def muon(config, grads):
    m = 0.0
    for t, g in enumerate(grads, start=1):
        exact = config.moments.b1 * m + (1 - config.moments.b1) * g
        x = config.moments.b1 * exact / (1 - config.moments.b1 ** (t + 1)) + (1 - config.moments.b1) * g / (
            1 - config.moments.b1**t
        )
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        yield 0.2 * np.sqrt(max(x.shape)) * x
        m = narrow(exact, config.moments.dtype)


ORACLES = {"adamw": (adam, adam), "adafactor": (adafactor, whole_moments), "muon": (muon, adam)}
"""Of matrices, and of all else."""


@pytest.mark.slow(but=("adamw", "adafactor", "muon"))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "offloaded"])
def test_directions_are_the_formulas_for_one_matrix_at_a_time(kind):
    config, found = KINDS[kind], directions(KINDS[kind])
    of_matrices, of_the_rest = ORACLES[config.name]
    for path, inputs in SHAPES.items():
        grads = [arrays(step)[path].astype(np.float64) for step in range(1, STEPS + 1)]
        if inputs is None:
            factored = path == "embed" and config.name == "adafactor"
            wanted = (adafactor if factored else of_the_rest)(config, grads)
        else:
            height = int(np.prod(grads[0].shape[1 : 1 + inputs]))
            layers = [of_matrices(config, [g[layer].reshape(height, -1) for g in grads]) for layer in (0, 1)]
            wanted = [np.stack(pair) for pair in zip(*layers, strict=True)]
        for step, value in enumerate(wanted):
            scale = np.abs(value).max()
            got = found[step][path].reshape(value.shape)
            np.testing.assert_allclose(got, value, atol=2e-4 * scale, err_msg=f"{path}, step {step}")


def test_muon_moves_every_direction_of_a_matrix_alike():
    step = directions(KINDS["muon"])[0]["blocks/attn/o"][1].reshape(132, 136)
    values = np.linalg.svd(step / (0.2 * np.sqrt(136)), compute_uv=False)
    assert values.min() > 0.3 and values.max() < 1.3
    np.testing.assert_allclose(np.sqrt(np.mean(step**2)), 0.2, rtol=0.2)


def sizes(state):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))


def test_what_each_remembers():
    held = {kind: sizes(jax.eval_shape(build(config).init, nested(arrays(0)))) for kind, config in KINDS.items()}
    weights = sizes(nested(arrays(0)))
    for kind, wanted in {
        "adamw": 2.0, "adamw, bfloat16 momentum": 1.5, "adafactor": 1.0, "adafactor, no momentum": 0.0,
    }.items():  # fmt: skip
        np.testing.assert_allclose(held[kind] / weights, wanted, atol=0.05, err_msg=kind)
    assert held["muon"] < held["adamw"] and held["offloaded"] == held["adamw"]


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_moments_of_bfloat16_weights_are_float32(name):
    chain = build(Optimiser(name))
    narrow = jax.tree.map(lambda x: x.astype("bfloat16"), nested(arrays(0)))
    directions, state = jax.eval_shape(chain.update, narrow, jax.eval_shape(chain.init, narrow), narrow)
    assert {x.dtype for x in jax.tree.leaves((directions, state))} <= {jnp.dtype("float32"), jnp.dtype("int32")}


def same_layout(tree, mesh):
    """Every array lies as the rules say, in the memory that they say."""
    for (path, leaf), wanted in zip(
        jax.tree.leaves_with_path(tree), jax.tree.leaves(shardings(tree, mesh)), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), (name, leaf.sharding, wanted)
        assert (leaf.sharding.memory_kind == "pinned_host") == ("on_host" in name), name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["adamw, bfloat16 momentum", "adafactor", "muon"])
def test_the_mesh_changes_nothing(kind):
    chain, mesh = build(KINDS[kind]), make_mesh(MeshShape(2, 2, 2))
    weights, grads = nested(arrays(0)), nested(arrays(1))
    update = jax.jit(chain.update)
    wanted, _ = update(grads, jax.jit(chain.init)(weights), weights)
    with jax.set_mesh(mesh):
        weights, grads = (jax.device_put(tree, shardings(tree, mesh)) for tree in (weights, grads))
        before = jax.eval_shape(chain.init, weights)
        before = jax.jit(chain.init, out_shardings=shardings(before, mesh))(weights)
        found, after = update(grads, before, weights)
    for state in (before, after):
        same_layout(state, mesh)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * float(jnp.abs(b).max()))


@functools.partial(jax.jit, static_argnums=0)
def stepped(config, state):
    """The state after an update whose gradients are the weights themselves."""
    _, after = build(config).update(state.policy.params, move_memory(state.policy.opt_state), state.policy.params)
    return state.with_role("policy", opt_state=move_memory(after, state.policy.opt_state))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "lora"), [("adafactor", Lora()), ("muon", Lora(rank=2)), ("offloaded", Lora())])
def test_a_state_is_divided_saved_and_reset(kind, lora, tmp_path):
    config, mesh, model = KINDS[kind], make_mesh(MeshShape(2, 2, 2)), tiny("windows")
    fresh = create_state(jax.tree.map(jnp.copy, model), build(config), False, mesh, lora)
    with jax.set_mesh(mesh):
        state = stepped(config, fresh)
    for one in (fresh, state):
        same_layout(one, mesh)
    with Checkpoints(tmp_path) as store:
        store.save(1, state, {})
    with Checkpoints(tmp_path) as store:
        for where in (mesh, one_device()):
            found, _ = store.restore(1, abstract_state(model, build(config), False, lora), where, model)
            same_layout(found, where)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
                assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    again = reset_optimiser(state, build(config))
    same_layout(again, mesh)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    chex.assert_trees_all_equal(again.policy.opt_state, fresh.policy.opt_state)
    assert not all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True))
    for other in KINDS.values():
        changed = reset_optimiser(state, build(other))
        same_layout(changed, mesh)
        assert jax.tree.structure(changed) == jax.tree.structure(abstract_state(model, build(other), False, lora))


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_what_an_optimiser_remembers_has_a_form_that_these_settings_alone_decide(name):
    model = tiny("plain")
    before = Optimiser(name, moments=Moments(b1=0.9), weight_decay=0.0)

    def form(optimiser):
        state = jax.eval_shape(build(optimiser).init, model)
        return jax.tree.structure(state), [x.dtype for x in jax.tree.leaves(state)]

    for changes in (
        {"weight_decay": 0.1}, {"clip_norm": 0.0}, {"warmup": 3},
        *({"moments": dataclasses.replace(before.moments, **moment)} for moment in (
            {"b2": 0.9}, {"eps": 1e-3}, {"b1": 0.0}, {"dtype": "bfloat16"}, {"offload": True},
        )),
    ):  # fmt: skip
        after = dataclasses.replace(before, **changes)
        assert (form(before) == form(after)) == (remembered(before) == remembered(after)), changes


@pytest.mark.slow
def test_where_moments_lie_changes_nothing():
    mesh, states = one_device(), []
    for kind in ("adamw", "offloaded"):
        config = KINDS[kind]
        update = policy_update(PRESETS["dapo"], config, ComputeOptions())
        with jax.set_mesh(mesh):
            state = create_state(tiny("plain"), build(config), False, mesh)
            states.append(update(state, put_on_mesh(pack(rollout("plain"), Layout(8, 22, T)), mesh))[0])
        same_layout(states[-1], mesh)
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert (
        int(states[0].policy.updates) == 1
        and float(jnp.abs(states[0].policy.opt_state[1].mu.weights.embed[...]).max()) > 0
    )
