"""Adapters: the base stays as it is, all else has the adapter's size, and sampler and learner still agree."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import (
    TEMPERATURE,
    WIDTH,
    T,
    one_device,
    policy_gradient,
    policy_training,
    policy_update,
    rollout,
    sample,
)
from tiny import KINDS, largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS
from jaxrl_llm.checkpoints.store import Checkpoints, flatten, restore_policy
from jaxrl_llm.engine.engine import weights_for_sampling
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout, Optimiser, create_state, pack
from jaxrl_llm.learner.forward import put_on_mesh, score
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.models.config import ComputeOptions, Embeddings, Lora, ModelConfig
from jaxrl_llm.models.decoder import Decoder, cast, initialise, logits, to_parameters, unstack_layers
from jaxrl_llm.models.layers import project_frozen
from jaxrl_llm.models.lora import create_adapter, merge, model_of, policy_shapes, with_adapter
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
from jaxrl_llm.sharding.rules import RULES, checksums_by_name, parameter_path, weight_checksums

LORA = Lora(rank=2, alpha=3.0)
LAYOUT, COMPUTE = Layout(8, 22, T), ComputeOptions(remat="full")
MODEL = tiny("windows")
OPTIMISER = Optimiser(learning_rate=1e-2, weight_decay=0.1)


def adapter(seed=1, lora=LORA, kind="windows"):
    """An adapter that matters: both factors are random."""
    made = jax.eval_shape(lambda: create_adapter(KINDS[kind], lora, jax.random.key(seed)))
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * random.normal(size=x.shape).astype(np.float32)), made)


def state_on(mesh, reference=True, **given):
    state = create_state(jax.tree.map(jnp.copy, MODEL), build(OPTIMISER), reference, mesh, LORA, seed=5)
    params = jax.device_put(given.get("policy", state.policy.params), shardings(state.policy.params, mesh))
    return state.with_role("policy", params=params)


@jax.jit
def gradient(policy, packed, base=None):
    return policy_gradient(policy, packed, PRESETS["dapo"], COMPUTE, base)


@functools.cache
def updater():
    return policy_update(PRESETS["dapo"], OPTIMISER, COMPUTE)


def leaves(tree):
    """Copies of the arrays of a model or adapter by path (a view would keep a buffer from being donated)."""
    return {parameter_path(path): np.array(x) for path, x in jax.tree.leaves_with_path(tree)}


@pytest.mark.slow
@pytest.mark.parametrize("targets", [LORA.targets, ("attn/o", "mlp/up")])
def test_the_policy_begins_as_the_base_exactly(targets):
    fresh = create_adapter(MODEL.config, Lora(2, 3.0, targets), jax.random.key(0))
    present = {f"blocks/{target}" for target in targets} & leaves(MODEL).keys()
    assert {path.rpartition("/")[0] for path in leaves(fresh)} == present and len(present) in (2, 7)
    tokens = np.arange(24).reshape(2, 12)
    np.testing.assert_array_equal(logits(with_adapter(MODEL, fresh), tokens), logits(MODEL, tokens))
    random = [np.std(x) * np.sqrt(np.prod(x.shape[1:-1])) for path, x in leaves(fresh).items() if path.endswith("/a")]
    np.testing.assert_allclose(random, 1.0, atol=0.3)


def test_weights_and_gradients_are_those_of_the_sum_written_out():
    policy = adapter()
    factors, before, packed = leaves(policy), leaves(MODEL), pack(rollout(), LAYOUT)
    model = jax.jit(merge)(with_adapter(MODEL, policy))
    found = leaves(gradient(policy, packed, MODEL)[0])
    whole = leaves(gradient(model, packed)[0])
    assert found.keys() == factors.keys()
    for path, weight in leaves(model).items():
        if f"{path}/a" not in factors:
            np.testing.assert_array_equal(weight, before[path])
            continue
        rank = factors[f"{path}/a"].shape[-1]
        for layer in range(len(weight)):
            a, b = factors[f"{path}/a"][layer].reshape(-1, rank), factors[f"{path}/b"][layer].reshape(rank, -1)
            shape = (a.shape[0], b.shape[1])
            np.testing.assert_allclose(
                weight[layer].reshape(shape), before[path][layer].reshape(shape) + 1.5 * a @ b, atol=1e-6
            )
            g = whole[path][layer].reshape(shape)
            for name, wanted in {"a": 1.5 * g @ b.T, "b": 1.5 * a.T @ g}.items():
                got = found[f"{path}/{name}"][layer].reshape(wanted.shape)
                np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max(), err_msg=f"{path}/{name}")


@pytest.mark.slow
def test_an_update_moves_the_adapter_alone():
    state = state_on(one_device(), policy=adapter())
    before, pointers = (
        leaves(state.policy.base),
        [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.policy.base)],
    )
    old, reference = leaves(state.policy.params), leaves(state.reference)
    assert {x.size for x in jax.tree.leaves(state.policy.opt_state)} == {1} | {x.size for x in old.values()}
    data = put_on_mesh(pack(rollout(), LAYOUT), one_device())
    for _ in range(2):
        state, metrics = updater()(state, data)
    assert metrics["grad_norm"] > 0 and int(state.policy.updates) == 2
    assert all(np.abs(x - old[path]).max() > 1e-3 for path, x in leaves(state.policy.params).items())
    for path, x in leaves(state.policy.base).items():
        assert x.tobytes() == before[path].tobytes() == leaves(MODEL)[path].tobytes(), path
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state.policy.base)] == pointers, "the base was copied"
    chex.assert_trees_all_equal(leaves(state.reference), reference)


@pytest.mark.slow
def test_the_reference_is_the_base():
    state = state_on(one_device(), policy=adapter())
    packed = pack(rollout(), LAYOUT)
    scored = lambda model: np.asarray(score(model, packed, jnp.float32(TEMPERATURE), COMPUTE))
    np.testing.assert_array_equal(scored(model_of(state, "reference")), scored(MODEL))
    assert np.abs(scored(model_of(state)) - scored(MODEL)).max() > 1e-2
    assert sum(x.size for x in jax.tree.leaves(state.reference)) == sum(
        x.size for x in jax.tree.leaves(state.policy.params)
    )


@pytest.mark.slow
def test_sampler_and_learner_agree():
    state = state_on(one_device(), policy=adapter())
    policy = policy_shapes(MODEL, LORA, one_device())
    weights = weights_for_sampling(policy, "float32", one_device(), one_device(), keep=True)(model_of(state))
    rules = Sampling(TEMPERATURE, max_new_tokens=T)
    prompts = [list(s.prompt) for s in rollout()]
    found = Engine(policy, 8, WIDTH, 4).generate(weights, prompts, range(len(prompts)), rules)
    samples = [sample(s.prompt, c.tokens, c.mask, c.sampler_logp, 1.0) for s, c in zip(rollout(), found, strict=True)]
    _, metrics = gradient(state.policy.params, pack(samples, LAYOUT), state.policy.base)
    assert 0 <= metrics["sampler/logp_abs_diff_mean"] <= metrics["sampler/logp_abs_diff_max"] < 1e-5
    _, base = gradient(create_adapter(MODEL.config, LORA, jax.random.key(0)), pack(samples, LAYOUT), MODEL)
    assert base["sampler/logp_abs_diff_max"] > 1e-2


def test_sampler_and_learner_read_the_same_arrays():
    """One copy of the frozen model for both, through updates, and for all steps where the sampler's layout differs."""
    mesh = one_device()
    state = state_on(mesh)
    place = lambda model: [x.unsafe_buffer_pointer() for x in jax.tree.leaves(to_parameters(model))]
    held = place(state.policy.base)
    transfer = weights_for_sampling(policy_shapes(MODEL, LORA, one_device()), "float32", mesh, mesh, keep=False)
    earlier = transfer(model_of(state))
    assert place(earlier) == held
    state, _ = updater()(state, put_on_mesh(pack(rollout(), LAYOUT), mesh))
    assert place(state.policy.base) == held == place(transfer(model_of(state)))
    assert np.isfinite(logits(earlier, np.arange(24).reshape(2, 12))).all(), "an update took the base with it"
    other = transfer(with_adapter(jax.tree.map(jnp.copy, MODEL), adapter()))
    assert not set(place(other)) & set(held), "the base of another policy is not the one before"


def test_changes_below_the_rounding_of_the_base_count():
    base = tiny("windows", dtype="bfloat16")
    tokens = np.arange(24).reshape(2, 12)
    small = jax.tree.map(lambda x: 0.002 * jnp.sign(x), adapter())  # changes of a weight by about 1e-5
    of = lambda model: np.asarray(logits(cast(model, "float32"), tokens))
    model = with_adapter(base, small)
    changed, wanted = of(model) - of(base), of(merge(model)) - of(base)
    assert np.abs(wanted).max() > 1e-4
    np.testing.assert_allclose(changed, wanted, atol=0.02 * np.abs(wanted).max())
    rounded = merge(model, "bfloat16")
    assert np.mean(np.asarray(rounded.weights.blocks.mlp.up) == np.asarray(base.weights.blocks.mlp.up)) > 0.95
    assert np.abs(of(rounded) - of(base)).max() < 0.5 * np.abs(wanted).max(), "merged, they vanish"


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_gradient_of_a_frozen_product_is_that_of_the_sum(inputs, dtype):
    keys = jax.random.split(jax.random.key(inputs), 5)
    sizes = (6, 4)[:inputs]
    draw = lambda key, *shape: jax.random.normal(key, shape)
    x, w = draw(keys[0], 2, 5, *sizes), draw(keys[1], *sizes, 3, 7).astype(dtype)
    a, b, g = draw(keys[2], *sizes, 2), draw(keys[3], 2, 3, 7), draw(keys[4], 2, 5, 3, 7)
    product = lambda x, a, b: jnp.sum(g * project_frozen(inputs, 1.5, x, w, (a, b)))
    summed = lambda x, a, b: jnp.sum(g * jnp.tensordot(x, w.astype("float32") + 1.5 * jnp.tensordot(a, b, 1), inputs))
    for found, wanted in zip(*(jax.grad(f, (0, 1, 2))(x, a, b) for f in (product, summed)), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    alone = jax.grad(lambda x: jnp.sum(g * project_frozen(inputs, 1.5, x, w, None)))(x)
    np.testing.assert_allclose(alone, jax.grad(summed)(x, a, 0 * b), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "experts", "gemma4"])
def test_separate_layers_compute_the_same(kind):
    """The form in which GPUs hold the frozen model, on this machine."""
    model = tiny(kind)
    policy, packed = adapter(kind=kind), pack(rollout(), LAYOUT)
    separate = with_adapter(unstack_layers(model), policy)
    tokens = np.arange(24).reshape(2, 12)
    np.testing.assert_array_equal(logits(separate, tokens), logits(with_adapter(model, policy), tokens))
    both = [gradient(policy, packed, base)[0] for base in (unstack_layers(model), model)]
    assert largest_difference(*both) == 0
    rules = Sampling(TEMPERATURE, max_new_tokens=T)
    prompts = [list(s.prompt) for s in rollout()]
    sampled = [
        Engine(m, 8, WIDTH, 4).generate(m, prompts, range(len(prompts)), rules)
        for m in (separate, with_adapter(model, policy))
    ]
    for ours, theirs in zip(*sampled, strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_allclose(ours.sampler_logp, theirs.sampler_logp, atol=1e-5)


def test_a_merged_adapter_is_sampled_and_learned_merged():
    lora = dataclasses.replace(LORA, merged=True)
    policy, base = adapter(lora=lora), tiny("windows", dtype="bfloat16")
    model = with_adapter(base, policy)
    shapes, mesh = policy_shapes(base, lora, one_device()), one_device()
    weights = weights_for_sampling(shapes, "bfloat16", mesh, mesh, keep=False)(model)
    assert jax.tree.structure(weights) == jax.tree.structure(base)
    tokens = np.arange(24).reshape(2, 12)
    np.testing.assert_allclose(logits(weights, tokens), logits(cast(model, "bfloat16"), tokens), atol=1e-6)
    plain = gradient(adapter(), pack(rollout(), LAYOUT), MODEL)[0]
    assert largest_difference(gradient(policy, pack(rollout(), LAYOUT), MODEL)[0], plain) < 1e-5


@pytest.mark.slow
def test_in_bfloat16_both_round_the_same_sum():
    policy, base = adapter(), tiny("windows", dtype="bfloat16")
    weights = weights_for_sampling(
        policy_shapes(base, LORA, one_device()), "bfloat16", one_device(), one_device(), keep=False
    )(with_adapter(base, policy))
    tokens = np.arange(24).reshape(2, 12)
    inside = logits(with_adapter(base, jax.tree.map(lambda x: x.astype("bfloat16"), policy)), tokens)
    np.testing.assert_allclose(logits(weights, tokens), inside, atol=1e-6)
    packed = pack(rollout(), LAYOUT)
    grads, _ = jax.eval_shape(
        lambda p, b: policy_gradient(p, packed, PRESETS["dapo"], ComputeOptions("bfloat16"), b), policy, base
    )
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype(jnp.float32)}


@functools.cache
def memory(lora):
    """Bytes of the compiled update of a model that is large beside its activations: (temporary, model, trained)."""
    config = ModelConfig("llama", 4096, 256, 4, 768, KINDS["plain"].attention, embeddings=Embeddings(tied=True))
    model = jax.eval_shape(lambda: initialise(config, jax.random.key(0)))
    state = abstract_state(model, build(OPTIMISER), False, lora)
    packed = pack(rollout(), Layout(1, 20, T))
    update = policy_training(PRESETS["dapo"], OPTIMISER, COMPUTE).update
    made = update.lower(state, packed, {"temperature": TEMPERATURE}).compile()
    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    return made.memory_analysis().temp_size_in_bytes, size(model), size(state.policy.params)


@pytest.mark.slow
def test_no_gradient_of_the_base_is_ever_held():
    whole, model, _ = memory(Lora())
    small, _, trained = memory(LORA)
    assert trained < model / 50
    assert whole > model, "without an adapter there is a gradient of everything"
    assert small < 0.5 * model, (small / model, whole / model)


@pytest.mark.slow
def test_the_mesh_changes_nothing():
    mesh, alone = make_mesh(MeshShape(2, 2, 2)), one_device()
    moments = []
    for where in (alone, mesh):
        with jax.set_mesh(where):
            state = jax.block_until_ready(state_on(where, policy=adapter()))
            state, _ = jax.block_until_ready(updater()(state, put_on_mesh(pack(rollout(), LAYOUT), where)))
        moments.append(jax.device_get(state.policy.opt_state[1].mu))
        for (path, leaf), layout in zip(
            jax.tree.leaves_with_path(state), jax.tree.leaves(shardings(state, where)), strict=True
        ):
            assert leaf.sharding.is_equivalent_to(layout, leaf.ndim), jax.tree_util.keystr(path)
    assert largest_difference(moments[1], moments[0]) < 1e-5  # the gradients, clipped, times 1 - b1


def test_an_adapter_is_divided_as_its_weight():
    for path in leaves(adapter()):
        weight, name = path.rpartition("/")[::2]
        layers, *rest = RULES[weight]
        inputs = 2 if weight.endswith("attn/o") else 1
        wanted = [layers, *rest[:inputs], None] if name == "a" else [layers, None, *rest[inputs:]]
        assert list(RULES[path]) == wanted, path


@pytest.mark.slow
def test_a_fingerprint_is_of_the_content_wherever_it_lies():
    model = tiny("gemma")
    wanted = leaves(weight_checksums(model))
    for shape in ((1, 8, 1), (2, 2, 2)):
        mesh = make_mesh(MeshShape(*shape))
        found = leaves(weight_checksums(jax.device_put(model, shardings(model, mesh))))
        assert all(np.array_equal(found[path], wanted[path]) for path in wanted)
    assert len({x.tobytes() for x in wanted.values()}) == len(wanted)

    def of(change):
        values = np.array(to_parameters(model)["embed"])
        change(values)
        return leaves(weight_checksums({"weights": {"embed": jnp.asarray(values)}}))["embed"].tobytes()

    def swap(x):
        x[[0, 7]] = x[[7, 0]]

    def nudge(x):
        x[3, 4] = np.nextafter(x[3, 4], np.float32(9))

    same, *others = of(lambda x: None), of(swap), of(nudge)
    assert same == wanted["embed"].tobytes() and len({same, *others}) == 3


@pytest.mark.slow
def test_a_checkpoint_holds_the_adapter_and_knows_its_base(tmp_path):
    mesh, other = make_mesh(MeshShape(1, 8, 1)), make_mesh(MeshShape(2, 2, 2))
    state = state_on(mesh, policy=adapter())
    like = abstract_state(MODEL, build(OPTIMISER), True, LORA)
    saved = flatten(state)
    assert {"policy/blocks/attn/q/a", "reference/blocks/mlp/down/b", "base/embed"} <= saved.keys()
    assert max(x.size for x in saved.values()) < MODEL.weights.blocks.mlp.gate[...].size
    assert all(x.shape == (2,) for name, x in saved.items() if name.startswith("base/"))
    with Checkpoints(tmp_path) as store:
        store.save(3, state, {"cursor": 1})
    with Checkpoints(tmp_path) as store:
        for where in (mesh, other, one_device()):
            found, host = store.restore(3, like, where, jax.tree.map(jnp.copy, MODEL))
            assert host == {"cursor": 1} and jax.tree.structure(found) == jax.tree.structure(state)
            for a, b, layout in zip(
                jax.tree.leaves(found), jax.tree.leaves(state), jax.tree.leaves(shardings(found, where)), strict=True
            ):
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
                assert a.sharding.is_equivalent_to(layout, a.ndim)
        with pytest.raises(InputError, match=r"trained on another model.*blocks/attn/k differs") as refused:
            store.restore(3, like, mesh, other_base())
        assert "\n" not in str(refused.value)
        with pytest.raises(InputError, match="start over with --fresh"):
            store.restore(3, abstract_state(MODEL, build(OPTIMISER), True), mesh)
    alone = restore_policy(tmp_path / "3", jax.eval_shape(lambda: state.policy.params), other, checksums_by_name(MODEL))
    chex.assert_trees_all_equal(leaves(alone), leaves(state.policy.params))
    with pytest.raises(InputError, match="trained on another model"):
        restore_policy(
            tmp_path / "3", jax.eval_shape(lambda: state.policy.params), other, checksums_by_name(other_base())
        )


def other_base():
    """The base with a single number changed."""
    parameters = to_parameters(MODEL)
    parameters["blocks"]["attn"]["k"] = parameters["blocks"]["attn"]["k"].at[1, 2, 0, 3].add(1e-6)
    return Decoder(MODEL.config, parameters)
