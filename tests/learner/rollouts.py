"""Samples as training sees them, from a real engine and a tiny model, and the unpacked loss that packing must equal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from tiny import logprob_and_entropy, tiny

from jaxrl_llm.algorithms import PolicyBatch, policy_loss
from jaxrl_llm.learner import Forward, PolicyGradient, Sample, Training, make_update
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.update import Update, accumulate
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import causal_rows, forward, logits
from jaxrl_llm.models.heads import with_scalar_head
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.types import Role

PROMPTS, G, T, WIDTH = ([1, 2, 3], [7] * 9, [5, 6]), 4, 10, 20
TEMPERATURE = 0.8


class UpdateBy(Update):
    """An update by a function that nobody compiles."""

    def __call__(self, *given):
        return self.program(*given)


def sample(prompt, tokens, mask, sampler_logp, advantage, fresh=True, kept=None):
    """A sample of reinforcement learning; ``fresh``: of all tokens, or of each."""
    arrays = {"sampler_logp": sampler_logp, "fresh": np.broadcast_to(fresh, len(tokens))}
    if kept is not None:
        arrays["kept"] = kept
    return Sample(np.asarray(prompt, np.int32), tokens, mask, {"advantages": advantage}, arrays)


def changed(sample, **arrays):
    """The sample with other arrays, or without those that are None; a number is every token's."""
    given = {
        name: np.broadcast_to(x, len(sample.tokens)) if np.ndim(x) == 0 else x
        for name, x in arrays.items()
        if x is not None
    }
    kept = {name: x for name, x in sample.arrays.items() if name not in arrays}
    return dataclasses.replace(sample, arrays=kept | given)


def moved(model, other, by):
    """The model with so much of another one's weights added; NumPy adds them, so nothing compiles."""
    return jax.tree.map(lambda a, b: jnp.asarray(np.asarray(a) + np.float32(by) * np.asarray(b)), model, other)


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
        advantage, kept = float(random.normal()), c.extras.get("kept")
        samples.append(sample(PROMPTS[index // G], c.tokens, mask, c.sampler_logp, advantage, kept=kept))
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


def critic_of(model, seed=1):
    """A scalar model of these layers whose head matters."""
    head = 0.3 * np.random.default_rng(seed).normal(size=model.config.width).astype(np.float32)
    made = with_scalar_head(model)
    return type(made)(made.decoder, {"scalar": jnp.asarray(head)})


def unpacked_values(model, samples, more=0):
    """Values [B, T + more] of the state before each token, and after the last one; one row for each completion."""
    rows = np.zeros((len(samples), WIDTH), np.int32)
    for row, s in zip(rows, samples, strict=True):
        row[: len(s.prompt) + len(s.tokens)] = [*s.prompt, *s.tokens]
    hidden = forward(model.decoder, causal_rows(rows))
    starts = np.array([len(s.prompt) for s in samples])
    at = np.minimum(starts[:, None] + np.arange(T + more)[None] - 1, WIDTH - 1)
    return jnp.take_along_axis(hidden, at[..., None], axis=1) @ model.weights.scalar[...]


def padded(samples, name):
    """A per-token field as [B, T]."""
    out = np.zeros((len(samples), T), np.float32)
    for row, s in enumerate(samples):
        out[row, : len(s.tokens)] = s.arrays[name] if name in s.arrays else getattr(s, name)
    return out


def unpacked_loss(algorithm, model, samples, old_logp=None, ref_logp=None):
    """The step's loss without packing and microbatches; other tokens than fresh ones take ``sampler_logp`` as their old
    policy.
    """
    logp = unpacked_logp(model, samples)
    fresh = padded(samples, "fresh").astype(bool)
    old = jnp.where(
        fresh, jax.lax.stop_gradient(logp) if old_logp is None else old_logp, padded(samples, "sampler_logp")
    )
    advantages = np.array([s.scalars["advantages"] for s in samples], np.float32)
    return policy_loss(algorithm, logp, PolicyBatch(advantages, padded(samples, "mask"), old, ref_logp))


def one_device():
    """A mesh of a single device."""
    return jax.make_mesh(
        (1, 1, 1), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=jax.devices()[:1]
    )


def objective_gradient(params, packed, objectives, **coefficients):
    """Gradient and metrics of an optimiser step of a role with these parameters."""
    role = Role(params, None, jnp.int32(0))
    given = {"temperature": jnp.float32(TEMPERATURE)} | coefficients
    return jax.jit(lambda role: accumulate(role, packed, objectives, given, ComputeOptions(remat="full")))(role)


def policy_gradient(params, packed, algorithm, compute=ComputeOptions(remat="full"), base=None, **coefficients):
    """Gradient and metrics of an optimiser step of a policy's parameters."""
    objective = PolicyGradient(algorithm, "old_logp" in packed.by_token)
    given = {"temperature": jnp.float32(TEMPERATURE)} | coefficients
    return accumulate(Role(params, None, jnp.int32(0), base), packed, (objective,), given, compute)


def policy_training(algorithm, optimiser, compute=ComputeOptions(remat="full"), several=False):
    """How a policy is trained by an algorithm."""
    objectives = (PolicyGradient(algorithm, several),)
    return Training(objectives, make_update(objectives, build(optimiser), learning_rate(optimiser), compute))


def policy_update(algorithm, optimiser, compute=ComputeOptions(remat="full"), several=False):
    """``(state, packed) -> (state, metrics)``: an update at the temperature of the rollout, or another one."""
    update = policy_training(algorithm, optimiser, compute, several).update
    return lambda state, packed, temperature=TEMPERATURE: update(state, packed, {"temperature": temperature})


def forward_on(mesh, layout, compute=ComputeOptions(remat="full")):
    """How the learner runs models there."""
    return Forward(layout, compute, TEMPERATURE, mesh)
