"""Learning from a truncated sampler: the same tokens are left out, so a ratio of 1 means 1."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import (
    TEMPERATURE,
    WIDTH,
    G,
    T,
    changed,
    forward_on,
    moved,
    one_device,
    padded,
    policy_gradient,
    rollout,
)  # fmt: skip
from tiny import VOCAB, largest_difference, tiny

from jaxrl_llm.algorithms import PRESETS, PolicyBatch, policy_loss
from jaxrl_llm.learner import Layout, pack
from jaxrl_llm.learner.samples import to_samples
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import logits
from jaxrl_llm.types import Completion, Group, Problem

MODEL = tiny("windows")
MOVED, REFERENCE = (moved(MODEL, tiny("windows", seed), 0.02) for seed in (5, 6))
LAYOUT = Layout(2, 22, T)


def truncated_rollout():
    """Samples under top-k and top-p together, each with its kept sets; the last one's first token came from a tool."""
    *others, last = rollout(top_k=30, top_p=0.8, keep_mask=True)
    mask, kept = last.mask.copy(), last.arrays["kept"].copy()
    mask[0], kept[0] = False, 0
    return [*others, dataclasses.replace(changed(last, kept=kept), mask=mask)]


def kept_tokens_of(samples):
    """bool[B, T, V], everything where nothing was sampled."""
    kept = np.ones((len(samples), T, VOCAB), bool)
    for row, s in zip(kept, samples, strict=True):
        for t, words in enumerate(s.arrays["kept"]):
            row[t] = [not words.any() or words[v // 32] >> (v % 32) & 1 for v in range(VOCAB)]
    return kept


@jax.jit
def dense_logp(model, rows, starts, tokens, kept):
    """Log-probabilities [B, T] from whole rows of logits, of which what was cut off is -inf."""
    at = jnp.minimum(starts[:, None] + jnp.arange(T)[None] - 1, WIDTH - 1)
    scaled = jnp.take_along_axis(logits(model, rows) / TEMPERATURE, at[..., None], axis=1)
    return jnp.take_along_axis(jax.nn.log_softmax(jnp.where(kept, scaled, -jnp.inf)), tokens[..., None], axis=2)[..., 0]


def dense(model, samples):
    """The same, of samples."""
    rows = np.zeros((len(samples), WIDTH), np.int32)
    for row, s in zip(rows, samples, strict=True):
        row[: len(s.prompt) + len(s.tokens)] = [*s.prompt, *s.tokens]
    starts, tokens = np.array([len(s.prompt) for s in samples]), padded(samples, "tokens").astype(np.int32)
    return dense_logp(model, rows, starts, tokens, kept_tokens_of(samples))


@functools.partial(jax.jit, static_argnums=2)
def packed_gradient(model, packed, algorithm):
    return policy_gradient(model, packed, algorithm, ComputeOptions())


@pytest.mark.slow
def test_the_sampler_really_cut_tokens_off():
    samples = truncated_rollout()
    sizes = kept_tokens_of(samples)[padded(samples, "mask") > 0].sum(axis=-1)
    assert sizes.min() >= 1 and sizes.max() <= 30 and len(set(sizes)) > 5
    assert all(
        s.arrays["kept"].dtype == np.uint32 and s.arrays["kept"].shape == (len(s.tokens), -(-VOCAB // 32))
        for s in samples
    )


def test_on_policy_a_ratio_is_one_and_the_learner_agrees_with_the_sampler():
    _, metrics = packed_gradient(MODEL, pack(truncated_rollout(), LAYOUT), PRESETS["dapo"])
    assert 0 <= metrics["sampler/logp_abs_diff_max"] < 1e-5 and metrics["policy_kl"] == 0
    np.testing.assert_allclose(metrics["ratio"], 1.0, rtol=1e-6)
    # Ratios against the sampler itself, and carried groups, are 1 too; without the kept sets they are the kept mass.
    carried = [changed(s, fresh=False) for s in truncated_rollout()]
    np.testing.assert_allclose(
        packed_gradient(MODEL, pack(carried, LAYOUT), PRESETS["dapo"])[1]["ratio"], 1.0, rtol=1e-5
    )
    forgotten = [changed(s, kept=None) for s in carried]
    assert packed_gradient(MODEL, pack(forgotten, LAYOUT), PRESETS["dapo"])[1]["ratio"] < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dapo", "grpo"])
def test_packed_gradients_are_those_of_dense_masked_logits(name):
    algorithm = dataclasses.replace(PRESETS[name], entropy_coef=0.0)
    samples = [changed(s, fresh=False) for s in truncated_rollout()]
    reference = dense(REFERENCE, samples)

    def loss(model):
        batch = PolicyBatch(
            np.array([s.scalars["advantages"] for s in samples], np.float32),
            padded(samples, "mask"),
            padded(samples, "sampler_logp"),
            reference,
        )
        return policy_loss(algorithm, dense(model, samples), batch)[0]

    scored = forward_on(one_device(), LAYOUT, ComputeOptions()).by_sample(REFERENCE, samples)
    for row, values in zip(np.asarray(reference), scored, strict=True):
        np.testing.assert_allclose(values, row[: len(values)], atol=1e-5)
    wide = Layout(2, 60, T)
    packed = pack(samples, wide)
    assert packed.microbatches == 1, "one microbatch, in the order of the samples"
    ref = np.zeros(packed.mask.shape, np.float32)
    ref[0, : len(samples)] = reference
    found, metrics = packed_gradient(MOVED, packed.with_tokens(ref_logp=ref), algorithm)
    assert largest_difference(found, jax.grad(loss)(MOVED)) < 1e-5
    assert abs(metrics["ratio"] - 1) > 1e-4


def test_a_sample_that_nothing_was_cut_from_may_stand_beside_others():
    first, *others = truncated_rollout()
    full = np.full((len(first.tokens), 2), 0xFFFFFFFF, np.uint32)
    found = [pack([changed(first, kept=kept), *others], LAYOUT) for kept in (None, full)]
    a, b = (packed_gradient(MOVED, packed, PRESETS["dapo"])[0] for packed in found)
    assert largest_difference(a, b) < 1e-6
    assert pack([changed(s, kept=None) for s in others], LAYOUT).by_prediction == {}


def test_kept_sets_travel_from_completion_to_sample():
    problem = Problem("0", ({"role": "user", "content": "?"},), "", "sums")
    samples = truncated_rollout()[:G]
    completions = tuple(
        Completion(
            s.tokens,
            s.arrays["sampler_logp"],
            "stop",
            s.mask,
            np.zeros(len(s.tokens), np.int32),
            {"kept": s.arrays["kept"]},
        )
        for s in samples
    )
    group = Group(problem, samples[0].prompt, completions, np.arange(G) * 1.0, np.arange(G) * 1.0)
    found, _ = to_samples(PRESETS["grpo"], [group], 0, np.arange(G)[None] * 1.0, (), T, {})
    for sample, wanted in zip(found[0], samples, strict=True):
        np.testing.assert_array_equal(sample.arrays["kept"], wanted.arrays["kept"])
