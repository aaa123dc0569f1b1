"""The pure functions of learning: score a batch, and one optimiser update."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.algorithms import Algorithm, PolicyBatch, policy_loss
from jaxrl_llm.algorithms.kl import K3, UnbiasedK3
from jaxrl_llm.algorithms.tokens import clamped_log_ratio
from jaxrl_llm.learner.batch import Packed
from jaxrl_llm.learner.optimiser import as_before, on_device
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.decoder import Decoder, cast, forward
from jaxrl_llm.models.logprobs import token_logprobs
from jaxrl_llm.models.lora import attached
from jaxrl_llm.sharding import BATCH, constrain
from jaxrl_llm.types import TrainState

Metrics = dict[str, jax.Array]


def completion_logprobs(
    model: Decoder, batch: Packed, temperature: jax.Array, compute: Compute, entropy_gradient: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy (nats, float32[B, T]) of one microbatch's completions; 0 at padding.

    ``batch`` has no microbatch axis here.
    """
    rows = jax.tree.map(lambda x: constrain(x, BATCH), batch.rows)
    hidden = forward(model, rows, compute)
    hidden = hidden.reshape(len(batch.source), -1, hidden.shape[-1])
    hidden = constrain(jax.vmap(lambda part, at: part[at])(hidden, batch.source), BATCH)
    asked = jnp.max(jnp.sum(batch.place < batch.mask.size, axis=1))
    values = token_logprobs(
        model, hidden, batch.target, temperature, kept=batch.kept, count=asked, entropy_gradient=entropy_gradient
    )
    flat = jnp.zeros(batch.mask.size, jnp.float32)
    logp, entropy = (flat.at[batch.place].set(x, mode="drop").reshape(batch.mask.shape) for x in values)
    return logp, entropy


def microbatch(packed: Packed, index: jax.Array) -> Packed:
    """Microbatch ``index``, without the leading axis."""
    take = lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False)
    return jax.tree.map(take, packed._replace(totals=None))


@functools.partial(jax.jit, static_argnames="compute")
def score(model: Decoder, packed: Packed, temperature: jax.Array, compute: Compute) -> jax.Array:
    """Log-probabilities float32[M, B, T] of a whole step's completions under a model that is not differentiated."""
    model = cast(model, compute.dtype)

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        return out.at[index].set(completion_logprobs(model, microbatch(packed, index), temperature, compute)[0])

    return jax.lax.fori_loop(0, packed.totals.microbatches, body, jnp.zeros(packed.mask.shape, jnp.float32))


@jax.jit
def divergence(packed: Packed, logp: jax.Array) -> jax.Array:
    """How far a policy of these log-probabilities is from what it is held to; nats, summed over the tokens that count.

    ``KL(policy || reference)`` where there is a reference, weighted by policy / sampler since another policy drew the tokens;
    ``KL(old || policy)`` otherwise, whose tokens they are. Of each token given those before it.
    """
    if packed.ref_logp is None:
        estimate = K3()(_anchor(packed, packed.old_logp), logp)
    else:
        estimate = UnbiasedK3()(logp, packed.ref_logp, clamped_log_ratio(logp, packed.sampler_logp))
    return jnp.sum(jnp.where(packed.mask, estimate, 0.0))


def _anchor(batch: Packed, old: jax.Array) -> jax.Array:
    """The old policy of each token: that of an earlier step's token is the one that sampled it."""
    return jnp.where(batch.fresh, old, batch.sampler_logp)


def old_policy(
    algorithm: Algorithm, logp: jax.Array, old_logp: jax.Array | None, sampler_logp: jax.Array, fresh: jax.Array
) -> jax.Array:
    """The log-probabilities [B, T] that ratios are taken against; every token is weighted for all that lies behind it.

    On-policy the ratio is 1 by construction. The old policy of an earlier step's token is the one that sampled it, so that the
    ratio leads from there and the correction has nothing to add. Where a loss has a correction and no ratio, it is the
    correction that leads from there, and the old policy is the learner's.
    """
    old = jax.lax.stop_gradient(logp) if old_logp is None else old_logp
    if algorithm.correction is not None and not algorithm.surrogate.reads_ratio:
        return old
    return jnp.where(fresh, old, sampler_logp)


def microbatch_loss(
    policy: Decoder, batch: Packed, algorithm: Algorithm, temperature: jax.Array, tokens: jax.Array, sequences: jax.Array,
    kl_coef: jax.Array | None, compute: Compute,
) -> tuple[jax.Array, Metrics]:
    """One microbatch's share of the step's loss and metrics: sums divided by the step's global counts."""
    logp, entropy = completion_logprobs(cast(policy, compute.dtype), batch, temperature, compute, algorithm.entropy_coef != 0)
    old = old_policy(algorithm, logp, batch.old_logp, batch.sampler_logp, batch.fresh)
    inputs = PolicyBatch(batch.advantages, batch.mask, old, batch.ref_logp, batch.sampler_logp)
    loss, metrics = policy_loss(algorithm, logp, inputs, tokens, sequences, entropy, kl_coef)
    gap = jnp.abs(logp - batch.sampler_logp)
    fresh = (batch.mask & batch.fresh).astype(jnp.float32)
    moved = jnp.where(batch.mask, logp - old, 0.0)
    metrics |= {
        "sampler/gap_sum": jnp.sum(gap * fresh),
        "sampler/fresh_tokens": jnp.sum(fresh),
        "sampler/logp_abs_diff_max": jnp.max(gap * fresh),
        # Tokens are the old policy's, so this k3 estimates KL(old || policy).
        "policy_kl": jnp.sum(jnp.expm1(moved) - moved) / jnp.maximum(tokens, 1),
    }
    return loss, jax.lax.stop_gradient(metrics)


def combine(total: Metrics, new: Metrics) -> Metrics:
    """Metrics of two microbatches: largest for names ending in ``_max``, sum for the rest."""
    return {name: (jnp.maximum if name.endswith("_max") else jnp.add)(total[name], new[name]) for name in total}


def accumulate(
    policy: Any, packed: Packed, temperature: jax.Array, algorithm: Algorithm, compute: Compute,
    kl_coef: jax.Array | None = None, base: Decoder | None = None,
) -> tuple[Any, Metrics]:
    """Gradient and metrics of a whole optimiser step, summed over its microbatches; ``base`` has no gradient.

    The sum is float32 whatever the weights are: bfloat16 would round away what a microbatch adds to a sum of many. The loop
    runs ``packed.totals.microbatches`` times: ragged steps of one padded shape share one compiled program.
    """
    loss = functools.partial(
        microbatch_loss, algorithm=algorithm, temperature=temperature, tokens=packed.totals.tokens,
        sequences=packed.totals.sequences, kl_coef=kl_coef, compute=compute,
    )
    gradient = jax.grad(lambda policy, batch: loss(attached(base, policy), batch), has_aux=True)
    shapes = jax.eval_shape(gradient, policy, microbatch(packed, jnp.int32(0)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), shapes)

    def body(index: jax.Array, total: tuple[Decoder, Metrics]) -> tuple[Decoder, Metrics]:
        grads, metrics = gradient(policy, microbatch(packed, index))
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total[0], grads), combine(total[1], metrics)

    grads, metrics = jax.lax.fori_loop(0, packed.totals.microbatches, body, zeros)
    fresh = metrics.pop("sampler/fresh_tokens")
    metrics["sampler/logp_abs_diff_mean"] = metrics.pop("sampler/gap_sum") / fresh  # 0 / 0: nothing was measured
    metrics["sampler/logp_abs_diff_max"] = jnp.where(fresh > 0, metrics["sampler/logp_abs_diff_max"], jnp.nan)
    return grads, metrics


def make_update(
    algorithm: Algorithm, optimiser: optax.GradientTransformation, rate: optax.Schedule, compute: Compute
) -> Callable[[TrainState, Packed, Any], tuple[TrainState, Metrics]]:
    """The jitted update ``(state, packed, temperature, kl_coef=None, target_kl=None) -> (state, metrics)``; the state is donated.

    ``kl_coef`` is used in place of the algorithm's, without compiling anew when it or ``target_kl`` changes.
    An update is refused, and the new state is the old one in all its parts, where no token is in the loss, where the
    gradient is not finite (what a guard then saves is sound), and where the policy is further than ``target_kl`` from the old
    one already (k3, nats per token); the metrics ``refused/...`` say which, as 0 or 1.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def update(
        state: TrainState, packed: Packed, temperature: jax.Array, kl_coef: Any = None, target_kl: Any = None
    ) -> tuple[TrainState, Metrics]:
        temperature = jnp.asarray(temperature, jnp.float32)
        kl_coef = None if kl_coef is None else jnp.asarray(kl_coef, jnp.float32)
        grads, metrics = accumulate(state.policy, packed, temperature, algorithm, compute, kl_coef, state.base)
        norm, lr = optax.tree.norm(grads), jnp.asarray(rate(state.updates), jnp.float32)
        before = state._replace(opt_state=on_device(state.opt_state))
        directions, opt_state = optimiser.update(grads, before.opt_state, state.policy)
        policy = jax.tree.map(lambda w, d: (w.astype(d.dtype) - lr * d).astype(w.dtype), state.policy, directions)
        new = TrainState(policy, opt_state, state.reference, state.updates + 1, state.base)
        refused = {"refused/empty": packed.totals.tokens == 0, "refused/not_finite": ~jnp.isfinite(norm)}
        if target_kl is not None:
            refused["refused/far"] = metrics["policy_kl"] > jnp.asarray(target_kl, jnp.float32)
        stays = functools.reduce(jnp.logical_or, refused.values())
        kept = jax.tree.map(lambda a, b: jnp.where(stays, b, a), new, before)
        kept = kept._replace(opt_state=as_before(kept.opt_state, state.opt_state))
        told = {name: value.astype(jnp.float32) for name, value in refused.items()}
        return kept, metrics | told | {"grad_norm": norm, "lr": lr}

    return update
