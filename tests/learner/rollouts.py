"""Samples as training sees them, from a real engine and a tiny model, and the unpacked loss that packing must equal."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from jaxrl_llm.algorithms import PolicyBatch, policy_loss
from jaxrl_llm.learner import Sample
from jaxrl_llm.models.decoder import logits
from jaxrl_llm.rollout import Engine, Sampling
from tiny import logprob_and_entropy, tiny

PROMPTS, G, T, WIDTH = ([1, 2, 3], [7] * 9, [5, 6]), 4, 10, 20
TEMPERATURE = 0.8


@functools.cache
def rollout(kind="windows", seed=0, **rules):
    """Groups of samples that the tiny model made; advantages are drawn at random, some tokens are not counted.

    ``rules``: more of ``Sampling``.
    """
    model = tiny(kind, seed)
    engine = Engine(model, slots=8, max_length=WIDTH, chunk=4)
    rules = Sampling(TEMPERATURE, max_new_tokens=T, stop_ids=(3, 5, 9, 11, 12, 13), **rules)
    found = engine.generate(model, [p for p in PROMPTS for _ in range(G)], range(G * len(PROMPTS)), rules)
    random = np.random.default_rng(0)
    samples = []
    for index, c in enumerate(found):
        mask = c.mask & (random.random(len(c.tokens)) > 0.1) & (index != 5)
        samples.append(
            Sample(
                np.asarray(PROMPTS[index // G], np.int32), c.tokens, mask, c.sampler_logp, float(random.normal()),
                kept=c.extras.get("kept"),
            )
        )  # fmt: skip
    return tuple(samples)


def groups(samples):
    """The samples of each prompt."""
    return [list(samples[i : i + G]) for i in range(0, len(samples), G)]


@functools.partial(jax.jit, static_argnums=0)
def _unpacked(width, model, rows, starts, tokens):
    scaled = logits(model, rows) / TEMPERATURE
    at = jnp.minimum(starts[:, None] + jnp.arange(width)[None] - 1, rows.shape[1] - 1)
    return logprob_and_entropy(jnp.take_along_axis(scaled, at[..., None], axis=1), tokens)[0]


def unpacked_logp(model, samples):
    """Log-probabilities [B, T], one row of the forward pass for each completion."""
    rows, tokens = np.zeros((len(samples), WIDTH), np.int32), np.zeros((len(samples), T), np.int32)
    for row, s in enumerate(samples):
        rows[row, : len(s.prompt) + len(s.tokens)] = [*s.prompt, *s.tokens]
        tokens[row, : len(s.tokens)] = s.tokens
    return _unpacked(T, model, rows, np.array([len(s.prompt) for s in samples]), tokens)


def padded(samples, name):
    """A per-token field as [B, T]."""
    out = np.zeros((len(samples), T), np.float32)
    for row, s in enumerate(samples):
        out[row, : len(s.tokens)] = getattr(s, name)
    return out


def unpacked_loss(algorithm, model, samples, old_logp=None, ref_logp=None):
    """The step's loss without packing and microbatches; other tokens than fresh ones take ``sampler_logp`` as their old policy."""
    logp = unpacked_logp(model, samples)
    fresh = padded(samples, "fresh").astype(bool)
    old = jnp.where(
        fresh, jax.lax.stop_gradient(logp) if old_logp is None else old_logp, padded(samples, "sampler_logp")
    )
    advantages = np.array([s.advantage for s in samples], np.float32)
    return policy_loss(algorithm, logp, PolicyBatch(advantages, padded(samples, "mask"), old, ref_logp))


def one_device():
    """A mesh of a single device."""
    return jax.make_mesh(
        (1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1]
    )
