"""Random ragged batches, and losses with their gradients, compiled once for each shape."""

import functools

import jax
import numpy as np

from jaxrl_llm.algorithms import PRESETS, AdvantageContext, PolicyBatch, policy_loss

B, T = 6, 5
LENGTHS = (5, 3, 1, 4, 0, 2)
NAMES = sorted(PRESETS)


def plain(algorithm, logp, batch, token_count=None, sequence_count=None, kl_coef=None):
    """(loss, metrics), gradient."""
    return jax.value_and_grad(
        lambda x: policy_loss(algorithm, x, batch, token_count, sequence_count, kl_coef=kl_coef), has_aux=True
    )(logp)


graded = jax.jit(plain, static_argnums=0)
"""``plain`` as one program for each algorithm and shape."""


@functools.partial(jax.jit, static_argnums=0)
def each(algorithms, logp, batch, *counts):
    """``plain`` of several algorithms (a tuple) as one program."""
    return [plain(algorithm, logp, batch, *counts) for algorithm in algorithms]


def presets(logp, batch, *counts):
    """``plain`` of every preset, by name."""
    return dict(zip(NAMES, each(tuple(PRESETS[n] for n in NAMES), logp, batch, *counts), strict=True))


def ragged(seed, lengths=LENGTHS, by_token=False):
    """Log-probabilities float32[B, T] and a batch with padding at the end of its rows; B is the number of lengths."""
    random, shape = np.random.default_rng(seed), (len(lengths), T)
    logp = -random.exponential(1.0, shape)
    old, ref, sampler = (logp + random.normal(0, 0.3, shape) for _ in range(3))
    mask = np.arange(T) < np.asarray(lengths)[:, None]
    advantages = random.normal(size=shape if by_token else shape[:1])
    floats = [x.astype(np.float32) for x in (logp, advantages, old, ref, sampler)]
    return floats[0], PolicyBatch(floats[1], mask, *floats[2:])


def scored(seed, lengths=LENGTHS, ids=None):
    """Rewards float32[B] and the context of a batch whose every third token ends a step (NaN elsewhere)."""
    random, (logp, batch) = np.random.default_rng(seed + 1), ragged(seed, lengths)
    shape = logp.shape
    values, steps = (random.normal(size=shape).astype(np.float32) for _ in range(2))
    steps = np.where(random.random(shape) < 1 / 3, steps, np.float32(np.nan))
    rewards = random.normal(size=shape[0]).astype(np.float32)
    return rewards, AdvantageContext(batch.mask, batch.old_logp, batch.ref_logp, values, steps, ids)
