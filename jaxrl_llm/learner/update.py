"""The pure functions of learning: the gradient of a role's objectives, and one optimiser update."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.learner.batch import Packed
from jaxrl_llm.learner.forward import microbatch, outputs_of
from jaxrl_llm.learner.objectives import Objective, Scalars
from jaxrl_llm.learner.optimiser import moved
from jaxrl_llm.models.config import ComputeOptions
from jaxrl_llm.models.decoder import cast
from jaxrl_llm.models.lora import attached, base_of
from jaxrl_llm.types import Role, TrainState

Update = Callable[[TrainState, Packed, dict[str, Any]], tuple[TrainState, Scalars]]
"""Coefficients by name: ``temperature`` always; ``kl_coef`` and ``entropy_coef`` of the loss's terms; ``target_kl``."""


def accumulate(
    role: Role, packed: Packed, objectives: Sequence[Objective], coefficients: Scalars, compute: ComputeOptions
) -> tuple[Any, Scalars]:
    """Sum gradients of a role's parameters, and metrics, over the microbatches of a whole optimiser step.

    The sum is float32 whatever the weights' dtype: bfloat16 would round away a microbatch's share in a sum of many. The
    loop runs ``packed.microbatches`` times: ragged steps of one padded shape share one compiled program.
    """

    names = {name for objective in objectives for name in objective.outputs}
    entropy_gradient = any(objective.entropy_gradient for objective in objectives)
    ahead = [objective for objective in objectives if objective.looks_ahead]
    if ahead:
        packed = packed.with_tokens(**looked_ahead(role, packed, ahead, coefficients, compute))

    def share(params: Any, batch: Packed) -> tuple[jax.Array, dict[str, Scalars]]:
        """Return one microbatch's share of the step's loss, and each objective's metrics: sums over the counts."""
        model = cast(attached(role.base, params), compute.dtype)
        outputs = outputs_of(model, batch, names, coefficients["temperature"], compute, entropy_gradient)
        total: Any = 0
        metrics = {}
        for objective in objectives:
            own = batch.counting(objective.name)
            counts = packed.counts[objective.name]
            loss, metrics[objective.name] = objective(outputs, own, counts, coefficients)
            total += loss
        return total, jax.lax.stop_gradient(metrics)

    gradient = jax.grad(share, has_aux=True)
    # The gradient has the shapes of the parameters; tracing it to find them would take as long as tracing the loop.
    _, metrics = jax.eval_shape(share, role.params, microbatch(packed, jnp.int32(0)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (role.params, metrics))

    def body(index: jax.Array, total: tuple[Any, dict[str, Scalars]]) -> tuple[Any, dict[str, Scalars]]:
        grads, metrics = gradient(role.params, microbatch(packed, index))
        summed = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total[0], grads)
        combined = {}
        for objective, new in metrics.items():
            before = total[1][objective]
            combined[objective] = {
                name: jnp.maximum(before[name], x) if name.endswith("_max") else before[name] + x
                for name, x in new.items()
            }
        return summed, combined

    grads, sums = jax.lax.fori_loop(0, packed.microbatches, body, zeros)
    each = [objective.finalize(sums[objective.name]) for objective in objectives]
    # Losses are added, other names belong to one of them.
    loss: Any = sum(metrics["loss"] for metrics in each)
    return grads, {name: value for metrics in each for name, value in metrics.items()} | {"loss": loss}


def looked_ahead(
    role: Role, packed: Packed, objectives: Sequence[Objective], coefficients: Scalars, compute: ComputeOptions
) -> dict[str, jax.Array]:
    """Return the arrays [M, B, T] that objectives compute over a whole step, by a forward pass without a gradient."""
    model = cast(attached(role.base, role.params), compute.dtype)
    names = sorted({name for objective in objectives for name in objective.outputs})

    def body(index: jax.Array, found: dict[str, jax.Array]) -> dict[str, jax.Array]:
        outputs = outputs_of(model, microbatch(packed, index), names, coefficients["temperature"], compute)
        return {name: found[name].at[index].set(outputs[name]) for name in names}

    zeros = jnp.zeros(packed.mask.shape, jnp.float32)
    outputs = jax.lax.fori_loop(0, packed.microbatches, body, dict.fromkeys(names, zeros))
    shape = packed.mask.shape
    together = [{"mask": packed.mask} | outputs, packed.by_token, packed.by_sequence, packed.counted]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), together)
    whole = packed._replace(mask=flat[0].pop("mask"), by_token=flat[1], by_sequence=flat[2], counted=flat[3])
    found: dict[str, jax.Array] = {}
    for objective in objectives:
        found |= objective.over_step(flat[0], whole.counting(objective.name))
    return {name: jax.lax.stop_gradient(x.reshape(shape)) for name, x in found.items()}


@functools.cache
def make_update(
    objectives: tuple[Objective, ...],
    optimiser: optax.GradientTransformation,
    rate: optax.Schedule,
    compute: ComputeOptions,
) -> Update:
    """Return the jitted update ``(state, packed, coefficients) -> (state, metrics)`` of one role; the state is donated.

    Equal arguments give the same function, so that a second run in one process, or a segment that begins anew, compiles
    nothing. A new value of a coefficient does not recompile it either. An update is refused, and the new state equals
    the old one in all its parts, if no token is in the loss, if loss or gradient are not finite (so the state that a
    guard saves is sound), or if the policy is already further than ``target_kl`` from the old one (k3, nats per token);
    the metrics ``refused/...`` give the reason, as 0 or 1.

    Args:
      objectives: all of the same role.
      optimiser: from ``build``.
      rate: the learning rate, of the updates so far; a coefficient ``lr_scale`` multiplies it.
      compute: how layers are computed.
    """
    (name,) = {objective.role for objective in objectives}

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=dict(compute.compiler))
    def update(state: TrainState, packed: Packed, coefficients: dict[str, Any]) -> tuple[TrainState, Scalars]:
        coefficients = {key: jnp.asarray(value, jnp.float32) for key, value in coefficients.items()}
        role = state.roles[name]
        whole = role._replace(base=base_of(state, name))
        grads, metrics = accumulate(whole, packed, objectives, coefficients, compute)
        norm = optax.tree.norm(grads)
        lr = jnp.asarray(rate(role.updates), jnp.float32) * coefficients.get("lr_scale", 1.0)
        before = role._replace(opt_state=moved(role.opt_state))
        directions, opt_state = optimiser.update(grads, before.opt_state, role.params)
        params = jax.tree.map(lambda w, d: (w.astype(d.dtype) - lr * d).astype(w.dtype), role.params, directions)
        new = Role(params, opt_state, role.updates + 1, role.base)
        counted = sum(packed.counts[objective.name].tokens for objective in objectives)
        refused = {"refused/empty": counted == 0, "refused/not_finite": ~jnp.isfinite(norm + metrics["loss"])}
        if "target_kl" in coefficients and "policy_kl" in metrics:
            refused["refused/far"] = metrics["policy_kl"] > coefficients["target_kl"]
        stays = functools.reduce(jnp.logical_or, refused.values())
        kept = jax.tree.map(lambda a, b: jnp.where(stays, b, a), new, before)
        kept = kept._replace(opt_state=moved(kept.opt_state, role.opt_state))
        told = {reason: value.astype(jnp.float32) for reason, value in refused.items()}
        return state._replace(roles=state.roles | {name: kept}), metrics | told | {"grad_norm": norm, "lr": lr}

    return update
