"""Log-probabilities by chunks: equal to log-softmax, and never all logits at one time."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from oracles import number
from tiny import VOCAB, equations, largest_difference, logprob_and_entropy, tiny

from jaxrl_llm.models.config import Attention, Embeddings, ModelConfig
from jaxrl_llm.models.decoder import Decoder, initialise, unembed
from jaxrl_llm.models.heads import token_logprobs
from jaxrl_llm.sharding import BATCH, MeshShape, fit_spec, make_mesh, shardings

P, N, D = 2, 23, 16
HIDDEN = 3 * jax.random.normal(jax.random.key(0), (P, N, D))
TARGETS = np.random.default_rng(0).integers(0, VOCAB, (P, N)).astype(np.int32)
KEPT = (np.random.default_rng(1).random((P, N, VOCAB)) < 0.3) | (np.arange(VOCAB) == TARGETS[..., None])
KEPT[0, 4] = np.arange(VOCAB) == TARGETS[0, 4]  # nothing but the target
KEPT[[0, 1], [0, 22]] = True


def plain(model, hidden, targets, temperature):
    """Both values from all logits."""
    return logprob_and_entropy(unembed(model, hidden) / temperature, targets)


def words(kept):
    """Kept sets bool[..., V] as uint32[..., ceil(V / 32)]; a full one as zeros."""
    cut = kept & ~kept.all(axis=-1, keepdims=True)
    wide = np.pad(cut, (*[(0, 0)] * (kept.ndim - 1), (0, -kept.shape[-1] % 32))).reshape(*kept.shape[:-1], -1, 32)
    return np.sum(wide << np.arange(32, dtype=np.uint32), axis=-1).astype(np.uint32)


def plain_kept(model, hidden, targets, temperature):
    """Both values with the logits of all other tokens at -inf, and the whole distribution's entropy."""
    scaled = unembed(model, hidden) / temperature
    among = jax.nn.log_softmax(jnp.where(KEPT, scaled, -jnp.inf))
    return jnp.take_along_axis(among, targets[..., None], axis=-1)[..., 0], logprob_and_entropy(scaled, targets)[1]


@pytest.mark.parametrize("kind", ["plain", "gemma"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_equals_log_softmax_and_the_definition_of_entropy(kind, temperature):
    model = tiny(kind)
    for found, wanted in zip(
        token_logprobs(model, HIDDEN, TARGETS, temperature), plain(model, HIDDEN, TARGETS, temperature), strict=True
    ):
        assert found.dtype == jnp.float32 and found.shape == (P, N)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def graded(function, model, hidden=HIDDEN, bonus=0.3):
    """A loss of both values, and its gradients to the model and to the hidden states."""

    def loss(model, hidden):
        logp, entropy = function(model, hidden, TARGETS, 0.8)
        return jnp.sum(jnp.sin(logp) + bonus * entropy**2)

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(model, hidden)


@pytest.mark.slow
@pytest.mark.parametrize(("chunk", "keep"), [(1, 0), (7, 0), (512, 0), (512, 2**20)])
@pytest.mark.parametrize("kept", [None, words(KEPT)], ids=["all", "kept"])
@pytest.mark.parametrize("kind", ["plain", "gemma"])  # a head of its own, and a tied one with a soft cap
def test_the_chunk_changes_neither_values_nor_gradients(kind, chunk, keep, kept):
    whole = graded(plain if kept is None else plain_kept, tiny(kind))
    found = graded(functools.partial(token_logprobs, chunk=chunk, kept_tokens=kept, keep=keep), tiny(kind))
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-5)
    assert largest_difference(found[1], whole[1]) < 1e-5


def test_small_logits_are_computed_once():
    def products(keep, chunk=N):
        asked = lambda model: sum(map(jnp.sum, token_logprobs(model, HIDDEN, TARGETS, 1.0, chunk, keep=keep)))
        traced = jax.make_jaxpr(jax.grad(asked))(tiny("gemma"))
        return sum(e.primitive.name == "dot_general" for e in equations(traced.jaxpr))

    size = 4 * N * VOCAB
    assert (products(size - 1), products(size), products(size, chunk=12)) == (4, 3, 4)


def test_positions_that_are_not_asked_cost_nothing_and_give_nothing():
    model, count = tiny("gemma"), 9
    plain_form = lambda *args: [jnp.where(np.arange(N)[None] < count, x, 0) for x in plain(*args)]
    asked = functools.partial(token_logprobs, chunk=3, count=count)
    found, whole = graded(asked, model), graded(plain_form, model)
    np.testing.assert_allclose(found[0], whole[0], rtol=1e-5)
    assert largest_difference(found[1], whole[1]) < 1e-5
    broken = HIDDEN.at[:, count:].set(jnp.nan)
    again = graded(asked, model, broken)
    assert largest_difference(again, found) == 0 and np.isfinite(again[0])


def test_without_its_gradient_the_entropy_moves_nothing():
    model = tiny("gemma")
    still = graded(functools.partial(token_logprobs, entropy_gradient=False), model)
    assert largest_difference(still[1], graded(plain, model, bonus=0.0)[1]) < 1e-5
    np.testing.assert_allclose(still[0], graded(plain, model)[0], rtol=1e-5)


@pytest.mark.parametrize("kept", [None, words(KEPT)], ids=["all", "kept"])
def test_the_gradient_written_by_hand_is_the_slope(kept):
    """In float64, against finite differences; the soft cap and both values included."""
    with jax.enable_x64(True):
        model, hidden = jax.tree.map(lambda x: x.astype(jnp.float64), tiny("gemma")), HIDDEN.astype(jnp.float64)
        given = functools.partial(token_logprobs, chunk=7, kept_tokens=kept)

        @jax.jit
        def loss(embed, hidden):
            moved = jax.tree.map_with_path(lambda path, x: embed if "embed" in jax.tree_util.keystr(path) else x, model)
            logp, entropy = given(moved, hidden, TARGETS, 0.8)
            return jnp.sum(jnp.sin(logp) + 0.3 * entropy**2)

        at = (model.weights.embed[...], hidden)
        gradients, random = jax.jit(jax.grad(loss, argnums=(0, 1)))(*at), np.random.default_rng(0)
        for _ in range(4):
            way = [jnp.asarray(random.normal(size=x.shape)) for x in at]
            up, down = (loss(*(x + s * w for x, w in zip(at, way, strict=True))) for s in (1e-5, -1e-5))
            slope = sum(jnp.vdot(g, w) for g, w in zip(gradients, way, strict=True))
            np.testing.assert_allclose(slope, (up - down) / 2e-5, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("replayed", [False, True])
def test_memory_does_not_grow_with_positions_times_vocabulary(replayed):
    vocab, chunk, counts = 4000, 64, (1024, 4096)
    model = initialise(ModelConfig("llama", vocab, D, 1, 8, Attention(1, 1, 8)), jax.random.key(0))

    def loss(model, hidden, targets, kept):
        logp, entropy = token_logprobs(model, hidden, targets, 1.0, chunk, kept, keep=0)
        return jnp.sum(logp) + jnp.sum(entropy)

    peaks = []
    for count in counts:
        kept = jnp.ones((1, count, vocab // 32), jnp.uint32) if replayed else None
        inputs = jnp.zeros((1, count, D)), jnp.zeros((1, count), jnp.int32), kept
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(model, *inputs)
        widest = max(v.aval.size for e in equations(traced.jaxpr.jaxpr) for v in e.outvars if hasattr(v.aval, "size"))
        assert widest <= max(chunk * vocab, D * vocab, kept.size if replayed else 0)
        peaks.append(traced.lower().compile().memory_analysis().temp_size_in_bytes)
    one_chunk, all_logits = chunk * vocab * 4, counts[1] * vocab * 4
    assert peaks[1] - peaks[0] < one_chunk / 2, peaks
    assert peaks[1] < 8 * one_chunk < all_logits, peaks


def test_a_large_vocabulary_takes_a_third_of_what_all_its_logits_take():
    count, vocab, width = 4096, 152064, 64
    model = jax.eval_shape(
        lambda: initialise(ModelConfig("llama", vocab, width, 1, 8, Attention(1, 1, 8)), jax.random.key(0))
    )
    inputs = jax.ShapeDtypeStruct((1, count, width), jnp.float32), jax.ShapeDtypeStruct((1, count), jnp.int32)

    def peak(function):
        def loss(model, hidden, targets):
            logp, entropy = function(model, hidden, targets, 1.0)
            return jnp.sum(jnp.sin(logp)), jnp.sum(entropy)

        graded = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
        return graded.lower(model, *inputs).compile().memory_analysis().temp_size_in_bytes

    whole = peak(plain)
    assert whole > count * vocab * 4
    assert peak(token_logprobs) <= 0.35 * whole


COLLECTIVES = r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\("


def moved_in_loops(program):
    """The largest array, in entries, that a collective inside a loop of a compiled program moves."""
    bodies = set(re.findall(r"body=%?([\w.\-]+)", program))
    inside = [part for part in program.split("\n\n") if re.match(r"\s*%?([\w.\-]*)", part).group(1) in bodies]
    shapes = [
        shape
        for part in inside
        for found in re.findall(COLLECTIVES, part)
        for shape in re.findall(r"\[([\d,]+)\]", found)
    ]
    return max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_on_a_mesh_the_head_moves_once_and_not_for_each_chunk(tied):
    config = ModelConfig("llama", 640, D, 1, 8, Attention(1, 1, 8), embeddings=Embeddings(tied=tied))
    model, mesh = initialise(config, jax.random.key(0), scale=0.3), make_mesh(MeshShape(2, 2, 2))
    hidden, targets = jnp.tile(HIDDEN, (2, 1, 1)), np.tile(TARGETS, (2, 1))

    @jax.jit
    def loss(model, hidden):
        logp, entropy = token_logprobs(model, hidden, targets, 0.8, 8)
        return jnp.sum(jnp.sin(logp) + 0.3 * entropy**2)

    graded = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    with jax.set_mesh(mesh):
        rows = jax.device_put(hidden, NamedSharding(mesh, fit_spec(hidden.shape, (BATCH,), mesh)))
        given = jax.device_put(model, shardings(model, mesh)), rows
        compiled = graded.lower(*given).compile()
        found = compiled(*given)
    assert largest_difference(found, graded(model, hidden)) < 1e-5
    assert moved_in_loops(compiled.as_text()) <= 8 * D


@pytest.mark.slow
def test_the_kept_sets_of_the_paper():
    """DeepSeek-V3.2's ratio over the tokens that the sampler kept, and the wrong one without them."""
    policies = np.log(np.array([number("V32_keep_sampling_mask/p_old_full"), [0.45, 0.35, 0.1, 0.1]], np.float32))[None]
    kept = np.tile(number("V32_keep_sampling_mask/kept") > 0, (1, 2, 1))
    target = np.full((1, 2), int(number("V32_keep_sampling_mask/token")), np.int32)
    identity = Decoder(ModelConfig("llama", 4, 4, 1, 8, Attention(1, 1, 8)), {"head": jnp.eye(4)})
    among = np.exp(token_logprobs(identity, policies, target, 1.0, kept_tokens=words(kept))[0])[0]
    alone = np.exp(token_logprobs(identity, policies, target, 1.0)[0])[0]
    for found, name in {
        among[0]: "p_old_masked", among[1]: "p_new_masked", alone[1]: "p_new_unmasked",
        among[1] / among[0]: "ratio_right", alone[1] / among[0]: "ratio_wrong",
    }.items():  # fmt: skip
        np.testing.assert_allclose(found, number(f"V32_keep_sampling_mask/{name}"), rtol=1e-5, err_msg=name)


def test_bfloat16_hidden_states_give_float32_values():
    model = tiny("plain", dtype="bfloat16")
    logp, entropy = token_logprobs(model, HIDDEN.astype(jnp.bfloat16), TARGETS, 1.0)
    assert (logp.dtype, entropy.dtype) == (jnp.float32, jnp.float32)
    wanted = plain(model, HIDDEN.astype(jnp.bfloat16), TARGETS, 1.0)[0]
    np.testing.assert_allclose(logp, wanted, rtol=1e-5, atol=1e-5)
