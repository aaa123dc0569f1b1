"""The shared fixture of three completions as arrays, and what an algorithm makes of it."""

import functools

import jax
import jax.numpy as jnp
from oracles import FIXTURE, fixture_logp

from jaxrl_llm.algorithms import AdvantageContext, PolicyBatch, policy_loss


def policy(name, dtype):
    """Log-probabilities [3, 4] of the fixture's policy ``new``, ``old``, ``ref`` or ``mu``."""
    return jnp.asarray(fixture_logp(name), dtype)


def context(dtype, **more):
    """What estimators may need of the fixture."""
    return AdvantageContext(FIXTURE["mask"], policy("old", dtype), policy("ref", dtype), **more)


def advantages_of(estimator, dtype, **more):
    """Advantages of the fixture's rewards: [3], or [3, 4] by token."""
    found = jax.jit(estimator)(jnp.asarray(FIXTURE["R"], dtype)[None], context(dtype, **more))
    return found[0] if found.shape[0] == 1 else found


def evaluate(algorithm, dtype, logp=None, advantages=None, mask=None, **given):
    """Loss and gradient on the fixture."""
    if advantages is None:
        advantages = advantages_of(algorithm.advantage, dtype)
    others = {f"{name}_logp": policy(key, dtype) for name, key in (("old", "old"), ("ref", "ref"), ("sampler", "mu"))}
    batch = PolicyBatch(jnp.asarray(advantages, dtype), FIXTURE["mask"] if mask is None else mask, **others | given)
    logp = policy("new", dtype) if logp is None else jnp.asarray(logp, dtype)
    return _graded(algorithm, logp, batch)


@functools.partial(jax.jit, static_argnums=0)
def _graded(algorithm, logp, batch):
    return jax.value_and_grad(lambda x: policy_loss(algorithm, x, batch)[0])(logp)
