"""Log-probabilities by chunks: equal to log-softmax, and never all logits at one time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models.config import Attention, ModelConfig
from jaxrl_llm.models.decoder import initialise, unembed
from jaxrl_llm.models.logprobs import logprob_and_entropy, token_logprobs, unpack_kept
from oracles import number
from tiny import VOCAB, equations, largest_difference, tiny

N, D = 23, 16
HIDDEN = 3 * jax.random.normal(jax.random.key(0), (N, D))
TARGETS = np.random.default_rng(0).integers(0, VOCAB, N).astype(np.int32)
KEPT = (np.random.default_rng(1).random((N, VOCAB)) < 0.3) | (np.arange(VOCAB) == TARGETS[:, None])
KEPT[4] = np.arange(VOCAB) == TARGETS[4]  # nothing but the target
KEPT[[0, 22]] = True


def plain(model, hidden, targets, temperature):
    """Both values from all logits."""
    logp = jax.nn.log_softmax(unembed(model, hidden) / temperature)
    return logp[np.arange(len(targets)), targets], -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def words(kept):
    """Kept sets bool[N, V] as uint32[N, ceil(V / 32)]; a full one as zeros."""
    wide = np.pad(kept & ~kept.all(axis=1, keepdims=True), ((0, 0), (0, -kept.shape[1] % 32))).reshape(len(kept), -1, 32)
    return np.sum(wide << np.arange(32, dtype=np.uint32), axis=-1).astype(np.uint32)


def plain_kept(model, hidden, targets, temperature):
    """Both values with the logits of all other tokens at -inf, and the whole distribution's entropy."""
    scaled = unembed(model, hidden) / temperature
    among = jax.nn.log_softmax(jnp.where(KEPT, scaled, -jnp.inf))
    return among[np.arange(len(targets)), targets], plain(model, hidden, targets, temperature)[1]


@pytest.mark.parametrize("kind", ["plain", "gemma"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 2.0])
def test_equals_log_softmax_and_the_definition_of_entropy(kind, temperature):
    model = tiny(kind)
    for found, wanted in zip(
        token_logprobs(model, HIDDEN, TARGETS, temperature), plain(model, HIDDEN, TARGETS, temperature), strict=True
    ):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 22, 23, 512])
@pytest.mark.parametrize("kept", [None, words(KEPT)], ids=["all", "kept"])
def test_the_chunk_changes_neither_values_nor_gradients(chunk, kept):
    model, plain_form = tiny("gemma"), plain if kept is None else plain_kept

    def loss(function, model, hidden):
        logp, entropy = function(model, hidden, TARGETS, 0.8)
        return jnp.sum(jnp.sin(logp) + 0.3 * entropy**2)

    whole = jax.value_and_grad(functools.partial(loss, plain_form), argnums=(0, 1))(model, HIDDEN)
    chunked = functools.partial(token_logprobs, chunk=chunk, kept=kept)
    parts = jax.value_and_grad(functools.partial(loss, chunked), argnums=(0, 1))(model, HIDDEN)
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    assert largest_difference(parts[1], whole[1]) < 1e-5


@pytest.mark.parametrize("replayed", [False, True])
def test_memory_does_not_grow_with_positions_times_vocabulary(replayed):
    vocab, chunk, counts = 4000, 64, (1024, 4096)
    model = initialise(ModelConfig("llama", vocab, D, 1, 8, Attention(1, 1, 8)), jax.random.key(0))

    def loss(model, hidden, targets, kept):
        logp, entropy = token_logprobs(model, hidden, targets, 1.0, chunk, kept)
        return jnp.sum(logp) + jnp.sum(entropy)

    peaks = []
    for count in counts:
        kept = jnp.ones((count, vocab // 32), jnp.uint32) if replayed else None
        inputs = jnp.zeros((count, D)), jnp.zeros(count, jnp.int32), kept
        traced = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(model, *inputs)
        widest = max(v.aval.size for e in equations(traced.jaxpr.jaxpr) for v in e.outvars if hasattr(v.aval, "size"))
        assert widest <= max(chunk * vocab, D * vocab, kept.size if replayed else 0)
        peaks.append(traced.lower().compile().memory_analysis().temp_size_in_bytes)
    one_chunk, all_logits = chunk * vocab * 4, counts[1] * vocab * 4
    assert peaks[1] - peaks[0] < one_chunk / 2, peaks
    assert peaks[1] < 8 * one_chunk < all_logits, peaks


def test_the_kept_sets_of_the_paper():
    """DeepSeek-V3.2's ratio over the tokens that the sampler kept, and the wrong one without them."""
    policies = jnp.log(jnp.asarray([number("V32_keep_sampling_mask/p_old_full"), [0.45, 0.35, 0.1, 0.1]], jnp.float32))
    kept = np.tile(number("V32_keep_sampling_mask/kept") > 0, (2, 1))
    target = jnp.full(2, int(number("V32_keep_sampling_mask/token")))
    among = np.exp(logprob_and_entropy(policies, target, unpack_kept(jnp.asarray(words(kept)), 4))[0])
    alone = np.exp(logprob_and_entropy(policies, target)[0])
    for found, name in {
        among[0]: "p_old_masked", among[1]: "p_new_masked", alone[1]: "p_new_unmasked",
        among[1] / among[0]: "ratio_right", alone[1] / among[0]: "ratio_wrong",
    }.items():  # fmt: skip
        np.testing.assert_allclose(found, number(f"V32_keep_sampling_mask/{name}"), rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("kept", [None, np.array([[0, 1, 0, 1, 0, 1], [1, 0, 0, 0, 0, 0], [1] * 6]) > 0])
def test_gradient_of_both_values_against_finite_differences(kept):
    with jax.enable_x64(True):
        logits = jnp.asarray(np.random.default_rng(1).normal(size=(3, 6)) * 2)
        targets = jnp.asarray([5, 0, 3])

        def loss(x):
            logp, entropy = logprob_and_entropy(x, targets, kept)
            return jnp.sum(logp * jnp.array([1.0, -2.0, 0.5])) + jnp.sum(entropy * jnp.array([0.3, 1.0, -1.0]))

        grad = np.asarray(jax.grad(loss)(logits))
        for row in range(3):
            for column in range(6):
                step = np.zeros((3, 6))
                step[row, column] = 1e-6
                np.testing.assert_allclose(
                    (loss(logits + step) - loss(logits - step)) / 2e-6, grad[row, column], atol=1e-8
                )


def test_impossible_tokens_add_nothing():
    logits = jnp.array([[1.0, 2.0, -jnp.inf, 0.5]])
    logp, entropy = logprob_and_entropy(logits, jnp.array([1]))
    three = jax.nn.log_softmax(jnp.array([1.0, 2.0, 0.5]))
    np.testing.assert_allclose([logp[0], entropy[0]], [three[1], -jnp.sum(jnp.exp(three) * three)], rtol=1e-6)
    assert logprob_and_entropy(logits, jnp.array([2]))[0][0] == -jnp.inf


def test_bfloat16_hidden_states_give_float32_values():
    model = tiny("plain", dtype="bfloat16")
    logp, entropy = token_logprobs(model, HIDDEN.astype(jnp.bfloat16), TARGETS, 1.0)
    assert (logp.dtype, entropy.dtype) == (jnp.float32, jnp.float32)
    wanted = plain(model, HIDDEN.astype(jnp.bfloat16), TARGETS, 1.0)[0]
    np.testing.assert_allclose(logp, wanted, rtol=1e-5, atol=1e-5)
