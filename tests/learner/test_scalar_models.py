"""Scalar models in training: whole or by an adapter, as the model of a run or as a critic on the policy's base."""

import dataclasses
import functools
from typing import ClassVar

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learner.rollouts import TEMPERATURE, WIDTH, T, one_device, padded, rollout
from tiny import largest_difference, tiny

from jaxrl_llm.checkpoints.store import Checkpoints, flatten, restore_policy
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Layout, Optimiser, create_state, make_update, pack
from jaxrl_llm.learner.forward import put_on_mesh, score
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.update import NewRole, abstract_state, accumulate
from jaxrl_llm.models import scores
from jaxrl_llm.models.config import ComputeOptions, Lora
from jaxrl_llm.models.decoder import Decoder, causal_rows, forward, to_parameters
from jaxrl_llm.models.heads import ScalarModel, split_head, with_scalar_head
from jaxrl_llm.models.lora import create_adapter, merge, model_of, with_adapter
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
from jaxrl_llm.sharding.rules import checksums_by_name, parameter_path, weight_checksums
from jaxrl_llm.types import Role

pytestmark = pytest.mark.slow

LORA = Lora(rank=2, alpha=3.0)
LAYOUT, COMPUTE = Layout(8, 22, T), ComputeOptions(remat="full")
BASE = tiny("plain")
OPTIMISER = Optimiser(learning_rate=1e-2, weight_decay=0.1)
TOKENS, LENGTHS = np.arange(24).reshape(2, 12), (12, 5)


def head(seed=3):
    return jnp.asarray(np.random.default_rng(seed).normal(size=BASE.config.width).astype(np.float32))


def whole():
    """A scalar model with buffers of its own."""
    return jax.tree.map(jnp.copy, with_scalar_head(BASE, head()))


def adapter(seed=1):
    """An adapter with a head; all of it matters."""
    made = create_adapter(BASE.config, LORA, jax.random.key(seed), head())
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * random.normal(size=x.shape).astype(np.float32)), made)


def leaves(tree):
    return {parameter_path(path): np.array(x) for path, x in jax.tree.leaves_with_path(tree)}


@dataclasses.dataclass(frozen=True)
class Regression(Objective):
    """Half the squared distance of every value from the sampler's log-probability there."""

    role: str = "policy"
    name: ClassVar[str] = "regression"
    outputs: ClassVar[tuple[str, ...]] = ("values",)

    def __call__(self, outputs, batch, counts, coefficients):
        off = jnp.where(batch.mask, outputs["values"] - batch.by_token["sampler_logp"], 0.0)
        loss = 0.5 * jnp.sum(off**2) / counts.tokens
        return loss, {"loss": loss}


def packed():
    return pack(rollout("plain"), LAYOUT, (Regression.name,))


@functools.cache
def updater(role):
    update = make_update((Regression(role),), build(OPTIMISER), learning_rate(OPTIMISER), COMPUTE)
    return lambda state, data: update(state, data, {"temperature": TEMPERATURE})


def summed(policy):
    """The scalar model with ``1.5 a b`` added to each stack of matrices, written out."""
    parameters, trained = to_parameters(BASE), to_parameters(policy)
    blocks = {part: dict(names) for part, names in parameters["blocks"].items()}
    for part, names in trained["blocks"].items():
        for name, factors in names.items():
            w = blocks[part][name]
            product = factors["a"].reshape(len(w), -1, LORA.rank) @ factors["b"].reshape(len(w), LORA.rank, -1)
            blocks[part][name] = w + 1.5 * product.reshape(w.shape)
    decoder = Decoder(BASE.config, parameters | {"blocks": blocks})
    return ScalarModel(decoder, {"scalar": trained["scalar"]})


def unpacked_values(model, samples):
    """Values [B, T] from one row of the forward pass for each completion: of the state before each token."""
    rows = np.zeros((len(samples), WIDTH), np.int32)
    for row, s in zip(rows, samples, strict=True):
        row[: len(s.prompt) + len(s.tokens)] = [*s.prompt, *s.tokens]
    at = np.array([len(s.prompt) for s in samples])[:, None] + np.arange(T)[None] - 1
    everywhere = forward(model.decoder, causal_rows(rows)) @ model.weights.scalar[...]
    return jnp.take_along_axis(everywhere, np.minimum(at, WIDTH - 1), axis=1)


@jax.jit
def unpacked_loss(policy):
    samples = rollout("plain")
    mask = padded(samples, "mask")
    off = mask * (unpacked_values(summed(policy), samples) - padded(samples, "sampler_logp"))
    return 0.5 * jnp.sum(off**2) / mask.sum()


@jax.jit
def gradient(policy, data):
    role = Role(policy, None, jnp.int32(0), BASE)
    return accumulate(role, data, (Regression(),), {"temperature": jnp.float32(TEMPERATURE)}, COMPUTE)


def test_a_fresh_adapter_scores_as_the_model_that_it_began_with():
    fresh = create_adapter(BASE.config, LORA, jax.random.key(0), head().astype("bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(fresh)} == {"float32"}
    fresh = create_adapter(BASE.config, LORA, jax.random.key(0), head())
    model = with_adapter(BASE, fresh)
    assert isinstance(model, ScalarModel) and with_adapter(None, model) is model
    np.testing.assert_array_equal(scores(model, TOKENS, LENGTHS), scores(whole(), TOKENS, LENGTHS))
    language = with_adapter(BASE, create_adapter(BASE.config, LORA, jax.random.key(0)))
    assert not isinstance(language, ScalarModel)


def test_merged_weights_score_the_same():
    model = with_adapter(BASE, adapter())
    together = jax.jit(merge)(model)
    assert jax.tree.structure(together) == jax.tree.structure(whole())
    for path, weight in leaves(summed(adapter())).items():
        if path != "head":
            np.testing.assert_allclose(leaves(together)[path], weight, atol=1e-6, err_msg=path)
    wanted = scores(summed(adapter()), TOKENS, LENGTHS)
    np.testing.assert_allclose(scores(together, TOKENS, LENGTHS), wanted, atol=1e-5)
    np.testing.assert_allclose(scores(model, TOKENS, LENGTHS), wanted, atol=1e-5)
    assert np.abs(wanted - scores(with_scalar_head(BASE, adapter().weights.scalar[...]), TOKENS, LENGTHS)).min() > 1e-2
    assert merge(together) is together
    half = jax.eval_shape(lambda: merge(with_adapter(tiny("plain", dtype="bfloat16"), adapter()), "bfloat16"))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(half)} == {"bfloat16"}


def test_the_gradient_is_that_of_the_sum_written_out():
    policy = adapter()
    found, metrics = gradient(policy, packed())
    loss, wanted = jax.value_and_grad(unpacked_loss)(policy)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    assert {"scalar", "blocks/attn/q/a"} <= leaves(found).keys() == leaves(policy).keys()
    assert largest_difference(found, wanted) < 1e-4
    norm = optax.tree.norm(found)
    ahead, behind = (jax.tree.map(lambda w, g, s=s: w + s * 1e-2 * g / norm, policy, found) for s in (1, -1))
    np.testing.assert_allclose((unpacked_loss(ahead) - unpacked_loss(behind)) / 2e-2, norm, rtol=1e-3)


CRITIC = NewRole(
    "critic", lambda model: create_adapter(model.config, LORA, jax.random.key(7), head(4)), build(OPTIMISER)
)


def state_on(mesh, lora=LORA, others=(CRITIC,)):
    """A run's scalar model, and beside it a critic on the same base."""
    return create_state(whole(), build(OPTIMISER), True, mesh, lora, seed=5, others=others)


def like(lora=LORA, others=(CRITIC,)):
    return abstract_state(whole(), build(OPTIMISER), True, lora, others)


def assert_same(found, wanted, mesh):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    layouts = jax.tree.leaves(shardings(wanted, mesh))
    for (path, a), b, layout in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), layouts, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
        assert a.sharding.is_equivalent_to(layout, a.ndim), jax.tree_util.keystr(path)


def test_a_state_begins_with_the_head_that_it_is_given():
    state = state_on(one_device())
    assert "head" not in leaves(state.policy.base) and state.roles["critic"].base is None
    for name, wanted in (("policy", head()), ("reference", head()), ("critic", head(4))):
        model = model_of(state, name)
        np.testing.assert_array_equal(split_head(model)[1], wanted)
        np.testing.assert_array_equal(model.decoder.weights.embed[...], BASE.weights.embed[...])
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers), "no two parts share a buffer"


def places(tree):
    return [x.addressable_shards[0].data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)]


def test_a_critic_learns_on_the_base_of_the_policy():
    mask = padded(rollout("plain"), "mask")
    wanted = np.asarray(unpacked_values(summed(adapter()), rollout("plain"))) * mask
    moments = []
    for where in (one_device(), make_mesh(MeshShape(2, 2, 2))):
        with jax.set_mesh(where):
            state = state_on(where).with_role("critic", params=jax.device_put(adapter(), shardings(adapter(), where)))
            data = put_on_mesh(packed(), where)
            values = score(model_of(state, "critic"), data, jnp.float32(1), COMPUTE, "values")
            np.testing.assert_allclose(np.asarray(values)[0, : len(mask)] * mask, wanted, atol=1e-5)
            before, lay = jax.tree.map(np.array, state.policy), places(state.policy.base)
            state, metrics = jax.block_until_ready(updater("critic")(state, data))
        assert places(state.policy.base) == lay, "the base was copied"
        chex.assert_trees_all_equal(state.policy, before)
        assert metrics["grad_norm"] > 0 and state.roles["critic"].base is None
        old = leaves(adapter())
        assert all(np.abs(x - old[path]).max() > 1e-3 for path, x in leaves(state.roles["critic"].params).items())
        moments.append(jax.tree.map(np.array, state.roles["critic"].opt_state[1].mu))
    assert largest_difference(moments[1], moments[0]) < 1e-5
    slope, _ = gradient(adapter(), packed())
    scale = 0.1 / max(1.0, float(optax.tree.norm(slope)))  # 1 - b1 of what is clipped to a norm of 1
    assert largest_difference(moments[0], jax.tree.map(lambda g: scale * g, slope)) < 1e-4


@pytest.mark.parametrize("lora", [Lora(), LORA])
def test_the_model_of_a_run_learns_and_is_saved(lora, tmp_path):
    mesh, other = one_device(), make_mesh(MeshShape(2, 2, 2))
    others = (CRITIC,) if lora.rank else ()
    state, metrics = updater("policy")(state_on(mesh, lora, others), put_on_mesh(packed(), mesh))
    assert metrics["grad_norm"] > 0 and np.abs(leaves(state.policy.params)["scalar"] - head()).max() > 1e-3
    np.testing.assert_array_equal(leaves(state.reference)["scalar"], head())
    saved = flatten(state).keys()
    if lora.rank:
        assert {"policy/scalar", "policy/blocks/attn/q/a", "base/embed", "roles/critic/params/scalar"} <= saved
        assert not {name for name in saved if name.startswith("roles/critic/base")}
    else:
        assert {"policy/scalar", "policy/decoder/embed", "policy/decoder/blocks/attn/q"} <= saved
    base = jax.tree.map(jnp.copy, split_head(whole())[0]) if lora.rank else None
    with Checkpoints(tmp_path) as store:
        store.save(1, state, {})
        for where in (mesh, other):
            assert_same(store.restore(1, like(lora, others), where, base)[0], state, where)
    params = jax.eval_shape(lambda: state.policy.params)
    assert_same(restore_policy(tmp_path / "1", params, other, checksums_by_name(base)), state.policy.params, other)
    if lora.rank:
        with pytest.raises(InputError, match="trained on another model"):
            restore_policy(
                tmp_path / "1", params, mesh, checksums_by_name(split_head(with_scalar_head(tiny("plain", seed=1)))[0])
            )


@pytest.mark.parametrize("name", ["adamw", "adafactor", "muon"])
def test_a_head_is_scaled_by_element_and_decays(name):
    """The first step of each is the gradient's sign, since both moments are the gradient's own."""
    config = Optimiser(name, 1e-2, weight_decay=0.1, clip_norm=0.0)
    optimiser, random, params = build(config), np.random.default_rng(0), adapter()
    grads = jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape).astype(np.float32)), params)
    step = jax.jit(lambda grads, params: optimiser.update(grads, optimiser.init(params), params)[0])
    wanted = np.sign(leaves(grads)["scalar"]) + 0.1 * leaves(params)["scalar"]
    np.testing.assert_allclose(leaves(step(grads, params))["scalar"], wanted, atol=1e-4)


def test_a_fingerprint_is_of_the_head_too():
    mesh = make_mesh(MeshShape(2, 2, 2))
    found = leaves(weight_checksums(jax.device_put(whole(), shardings(whole(), mesh))))
    wanted = leaves(weight_checksums(whole()))
    chex.assert_trees_all_equal(found, wanted)
    changed = leaves(weight_checksums(with_scalar_head(BASE, head().at[0].add(1e-6))))
    assert {path for path, x in changed.items() if not np.array_equal(x, wanted[path])} == {"scalar"}
