"""Training on one rollout: the state on the device, the gradient of a role's objectives, updates in epochs."""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.learner.batch import Packed, Sample
from jaxrl_llm.learner.forward import Forward, load_by_expert, microbatch, outputs_of, replaying, without_routes
from jaxrl_llm.learner.objectives import BEFORE, CLIPPED, Objective, Scalars, divergence
from jaxrl_llm.learner.optimiser import moved
from jaxrl_llm.learner.settings import Learner
from jaxrl_llm.models.config import ComputeOptions, Lora
from jaxrl_llm.models.decoder import Decoder, cast
from jaxrl_llm.models.heads import ScalarModel, split_head
from jaxrl_llm.models.lora import create_adapter, frozen_base, model_of, with_adapter
from jaxrl_llm.sharding import shardings
from jaxrl_llm.types import NOT_FINITE, Role, TrainState

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
        model = cast(with_adapter(role.base, params), compute.dtype)
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
    model = cast(with_adapter(role.base, role.params), compute.dtype)
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
        whole = role._replace(base=frozen_base(state, name))
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


class NewRole(NamedTuple):
    """The initialisation of a role other than the policy.

    Attributes:
      name: the role's.
      first: maps the run's initial model, or ``load``'s, to the role's first parameters; they may share its arrays,
        which are copied. An adapter is based on the policy's base, if that has one.
      optimiser: from ``build``.
      load: reads its initial model; None if that is the run's.
      shapes: of ``load``'s result.
    """

    name: str
    first: Callable[[Any], Any]
    optimiser: optax.GradientTransformation
    load: Callable[[], Any] | None = None
    shapes: Any = None


def create_state(
    model: Decoder | ScalarModel,
    optimiser: optax.GradientTransformation,
    reference: bool,
    mesh: Mesh,
    lora: Lora = Lora(),
    seed: int = 0,
    others: Sequence[NewRole] = (),
) -> TrainState:
    """Create a state laid out on the mesh; the reference and every role have buffers of their own.

    Args:
      model: the policy, or with ``lora`` the base; of a scalar model the decoder is the base, and the head is trained
        with the adapter. Donated: arrays with the right layout become the state's.
      optimiser: the policy's, from ``build``.
      reference: whether the state has one.
      mesh: where it lives.
      lora: size of the adapter, if any.
      seed: of the adapter's first values.
      others: roles in addition to the policy.
    """
    layout = shardings(abstract_state(model, optimiser, reference, lora, others), mesh)

    models = model, {other.name: other.load() for other in others if other.load is not None}
    # Each result of a compiled program has a buffer of its own.
    make = functools.partial(_fresh, optimiser, reference, lora, seed, others)
    made = jax.jit(make, out_shardings=layout, donate_argnums=(0, 1))
    return made(*jax.device_put(models, shardings(models, mesh)))


def abstract_state(
    model: Decoder | ScalarModel,
    optimiser: optax.GradientTransformation,
    reference: bool,
    lora: Lora = Lora(),
    others: Sequence[NewRole] = (),
) -> TrainState:
    """Return shapes and dtypes of the state, without arrays."""
    shapes = {other.name: other.shapes for other in others if other.load is not None}
    return jax.eval_shape(functools.partial(_fresh, optimiser, reference, lora, 0, others), model, shapes)


def _fresh(
    optimiser: optax.GradientTransformation,
    reference: bool,
    lora: Lora,
    seed: int,
    others: Sequence[NewRole],
    model: Any,
    loaded: dict[str, Any],
) -> TrainState:
    """Return the state of the run's initial model and of those loaded for other roles."""
    decoder, scalar = split_head(model)
    params: Any = create_adapter(decoder.config, lora, jax.random.key(seed), scalar) if lora.rank else model
    roles = {"policy": Role(params, optimiser.init(params), jnp.int32(0), decoder if lora.rank else None)}
    for other in others:
        first = other.first(loaded.get(other.name, model))
        roles[other.name] = Role(first, other.optimiser.init(first), jnp.int32(0))
    return TrainState(roles, {"reference": params} if reference else {})


def with_reference(state: TrainState, kept: bool) -> TrainState:
    """Return the state with a reference, if missing a copy of the current policy; or the state without one."""
    if not kept:
        return state._replace(frozen={name: x for name, x in state.frozen.items() if name != "reference"})
    if state.reference is not None:
        return state
    return state._replace(frozen=state.frozen | {"reference": _copied(state.policy.params)})


def reset_reference(state: TrainState, share: float = 1.0) -> TrainState:
    """Return the state with ``(1 - share) reference + share policy`` as the reference, in buffers of its own, by
    weight.

    A share of 1 copies the policy. Below, the reference is donated; it is computed in float32, and the dtype of each
    weight stays. Unchanged without a reference.
    """
    if state.reference is None:
        return state
    policy = state.policy.params
    mixed = _copied(policy) if share == 1 else _mixed(state.reference, policy, jnp.float32(share))
    return state._replace(frozen=state.frozen | {"reference": mixed})


@jax.jit
def _copied(params: Any) -> Any:
    """Return equal parameters in buffers of their own, by one program for all of them."""
    return jax.tree.map(jnp.copy, params)


@functools.partial(jax.jit, donate_argnums=0)
def _mixed(reference: Any, policy: Any, share: jax.Array) -> Any:
    before, now = optax.tree.cast((reference, policy), jnp.float32)
    return jax.tree.map(lambda old, x, y: (x + share * (y - x)).astype(old.dtype), reference, before, now)


def reset_optimiser(state: TrainState, optimiser: optax.GradientTransformation) -> TrainState:
    """Return the state with a fresh state of this optimiser for the policy; its kind may differ from the one before.

    It is on the policy's mesh, or on its device without one.
    """
    params = state.policy.params
    layout = jax.tree.leaves(params)[0].sharding
    if isinstance(layout, NamedSharding):
        layout = shardings(jax.eval_shape(optimiser.init, params), layout.mesh)
    fresh = jax.jit(optimiser.init, out_shardings=layout)(params)
    return state.with_role("policy", opt_state=fresh)


Row = dict[str, float]
"""Numbers by name, on the host."""


@dataclasses.dataclass(frozen=True)
class Training:
    """The training of one role.

    Attributes:
      objectives: the terms of its loss.
      update: of ``make_update``, for them.
      begins: the initialisation of the role; None for the policy, which is the model of the run.
      epochs: passes over each rollout; 0 takes the learner's setting.
      teachers: models that its objectives run with each microbatch, by name; see ``learner.objectives``.
    """

    objectives: tuple[Objective, ...]
    update: Update
    begins: NewRole | None = None
    epochs: int = 0
    teachers: dict[str, Any] | None = None

    @property
    def role(self) -> str:
        """Return the role with the parameters that are updated."""
        return self.objectives[0].role

    @property
    def needs(self) -> set[str]:
        """Return the names of the arrays that its objectives need before the first update."""
        return {name for objective in self.objectives for name in objective.needs}

    def passes(self, settings: Learner) -> int:
        """Return the number of passes over each rollout."""
        return self.epochs or settings.epochs

    def reads(self, packed: Packed) -> Packed:
        """Return the data with the teachers, and without what only other roles need, so that the update is the same
        program without them."""
        own = {objective.name for objective in self.objectives}
        return packed._replace(
            by_token={name: x for name, x in packed.by_token.items() if name in self.needs or name not in BEFORE},
            by_column=packed.by_column if self.role == "policy" else without_routes(packed).by_column,
            counted={name: x for name, x in packed.counted.items() if name in own},
            counts={name: x for name, x in packed.counts.items() if name in own},
            teachers=self.teachers,
        )


def learn(
    state: TrainState,
    groups: Sequence[Sequence[Sample]],
    settings: Learner,
    forward: Forward,
    training: Sequence[Training],
    coefficients: dict[str, Any],
    seed: int,
    measure_kl: bool = False,
    monitor_kl: bool = False,
) -> tuple[TrainState, Row]:
    """Update each role on every minibatch of the groups, in every epoch that the role makes.

    The passes end with the first update of the policy that is refused for its distance from the old one (early
    stopping), and with any update refused for a non-finite loss or gradient; an update without tokens is skipped. The
    first update is never too far: nothing has changed before it.

    Args:
      state: donated.
      groups: samples of each prompt.
      settings: epochs, minibatches, ``target_kl``.
      forward: how models are run.
      training: of each role that learns, in the order of updates; the policy first, if it learns.
      coefficients: numbers that objectives read, by name.
      seed: of the groups' order in each epoch after the first.
      measure_kl: whether to measure the KL over the whole batch after the policy's last update, for a controller; see
        ``kl_of_policy``.
      monitor_kl: whether the reference is in no objective, and the policy's KL to it is measured before the first
        update; see ``kl_to_reference``.

    Returns:
      The new state, and metrics averaged over the applied updates (``sampler/`` ones from the first, the only on-policy
      one), NaN without any; ``updates`` counts them, ``updates/not_finite`` those refused for their loss or
      gradient, and ``not_finite/...`` is what was not finite. Names of
      other roles' metrics begin with the role's name.
    """
    objectives = tuple(objective.name for one in training for objective in one.objectives)
    needed = set().union(*(one.needs for one in training))
    of_policy = any(one.role == "policy" for one in training)
    measure_kl = measure_kl and of_policy
    held = state.reference is not None and not monitor_kl
    kl_to = {"ref_logp" if held else "old_logp"} if measure_kl else set()
    batches = []
    for samples in _split(groups, settings.minibatches):
        packed = forward.packed(samples, objectives)
        packed = replaying(packed, settings.routing_replay, model_of(state), forward.compute)
        batches.append(packed.with_tokens(**before(state, packed, forward, (needed | kl_to) - set(packed.by_token))))
    watched = _watched(state, groups, batches, forward, monitor_kl) if of_policy else {}
    coefficients = {"temperature": forward.temperature} | coefficients
    rows: dict[str, list[Row]] = {one.role: [] for one in training}
    for epoch, packed in _passes(batches, max(one.passes(settings) for one in training), seed):
        learning = [one for one in training if epoch < one.passes(settings)]
        state, refused = _update_each(state, packed, settings, learning, coefficients, rows)
        if refused:
            break
    measured = watched | (kl_of_policy(state, batches, forward) if measure_kl else {})
    found = (
        {"updates": 0.0}
        | wrong_samples(groups)
        | {name: float(value) for name, value in jax.device_get(measured).items()}
    )
    for one in training:
        prefix = "" if one.role == "policy" else f"{one.role}/"
        found |= {prefix + name: value for name, value in _summary(rows[one.role], settings).items()}
    return state, found


def wrong_samples(groups: Sequence[Sequence[Sample]]) -> Row:
    """Return how many samples have numbers that count and are not finite, by the names of such numbers."""
    found: collections.Counter[str] = collections.Counter()
    for sample in itertools.chain.from_iterable(groups):
        counted = {name: x[sample.mask] for name, x in sample.arrays.items() if x.ndim == 1 and x.dtype.kind == "f"}
        numbers = (sample.scalars if sample.mask.any() else {}) | counted
        found.update(NOT_FINITE + name for name, x in numbers.items() if not np.isfinite(x).all())
    return {name: float(count) for name, count in found.items()}


def _update_each(
    state: TrainState,
    packed: Packed,
    settings: Learner,
    training: Sequence[Training],
    coefficients: dict[str, Any],
    rows: dict[str, list[Row]],
) -> tuple[TrainState, bool]:
    """Update every role on one minibatch, and append each update's metrics to ``rows``.

    Returns the state, and whether the passes end here. Frozen models are kept out of the updates, so that these are
    the same programs with and without them.
    """
    frozen = state.frozen
    state = state._replace(frozen={})
    for one in training:
        seen = rows[one.role]
        own = coefficients
        if settings.target_kl is not None and one.role == "policy":
            own = own | {"target_kl": settings.target_kl if any(map(_applied, seen)) else math.inf}
        state, metrics = one.update(state, one.reads(packed), own)
        seen.append({name: float(value) for name, value in jax.device_get(metrics).items()})
        if seen[-1]["refused/not_finite"] or seen[-1].get("refused/far"):
            return state._replace(frozen=frozen), True
    return state._replace(frozen=frozen), False


def _watched(
    state: TrainState, groups: Sequence[Sequence[Sample]], batches: Sequence[Packed], forward: Forward, kl: bool
) -> dict[str, Any]:
    """Return metrics of the policy and its data before the first update; ``kl``: also ``kl_to_reference``."""
    load = load_by_expert([sample for group in groups for sample in group], model_of(state).config.experts)
    return load | (kl_to_reference(state, batches, forward) if kl else {})


def before(state: TrainState, packed: Packed, forward: Forward, names: set[str]) -> dict[str, jax.Array]:
    """Compute the arrays [M, B, T] of these names, at the shapes that the updates use. Experts are replayed for the
    policy alone.
    """
    found = {}
    for name in sorted(names):
        whose, output = BEFORE[name]
        given = packed if whose == "policy" else without_routes(packed)
        found[name] = forward.score(model_of(state, whose), given, output)
    return found


def kl_of_policy(state: TrainState, batches: Sequence[Packed], forward: Forward) -> dict[str, Any]:
    """Return the policy's KL for a controller, by one forward pass over all data that it learned from.

    ``controller/kl``: nats per token; ``controller/kl_sequence``: nats per sequence, summed over its tokens; NaN if no
    token is in the loss. It is the KL to the reference if the batches have its log-probabilities, else to the old
    policy.
    """
    model = model_of(state, "policy")
    far = sum(divergence(packed, forward.score(model, packed)) for packed in batches)
    counts = [packed.counts["policy"] for packed in batches]
    return {
        "controller/kl": far / sum(one.tokens for one in counts),
        "controller/kl_sequence": far / sum(one.sequences for one in counts),
    }


def kl_to_reference(state: TrainState, batches: Sequence[Packed], forward: Forward) -> dict[str, Any]:
    """Return ``kl``, the policy's distance in nats per token to a reference that no objective reads.

    It uses forward passes of its own, so that learning is the same bit for bit without it. The estimate is unbiased k3,
    weighted by policy over sampler; 0 while the policy equals the reference; NaN if no token is in the loss.
    """
    far: Any = 0
    for packed in batches:
        lacking = {"old_logp", "ref_logp"} - set(packed.by_token)
        both = packed.with_tokens(**before(state, packed, forward, lacking))
        far += divergence(both, both.by_token["old_logp"])
    return {"kl": far / sum(packed.counts["policy"].tokens for packed in batches)}


def _passes(batches: list[Packed], epochs: int, seed: int) -> Iterator[tuple[int, Packed]]:
    """Yield the number and the minibatches of every epoch: in order in the first, shuffled in each later one."""
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(batches)) if epoch else range(len(batches))
        yield from ((epoch, batches[index]) for index in order)


def _split(groups: Sequence[Sequence[Sample]], parts: int) -> list[list[Sample]]:
    """Split the groups into minibatches as evenly as possible, whole and in order."""
    bounds = np.linspace(0, len(groups), min(parts, len(groups)) + 1).round().astype(int)
    return [[s for group in groups[a:b] for s in group] for a, b in itertools.pairwise(bounds)]


def _applied(row: Row) -> bool:
    return not any(value for name, value in row.items() if name.startswith("refused/"))


def _summary(rows: list[Row], settings: Learner) -> Row:
    """Combine the metrics of one role's updates; see ``learn``."""
    if not rows:  # the passes ended before its first update
        return {"updates": 0.0}
    applied = [row for row in rows if _applied(row)]
    names = [name for name in rows[0] if not name.startswith("refused/")]
    means = {name: float(np.mean([row[name] for row in applied])) if applied else math.nan for name in names}
    # The updates measure shares of all tokens, of which the mean over those that are clipped is made here.
    for side in ("low", "high"):
        if (name := f"{CLIPPED}/{side}") in means:
            share = means[f"clip_fraction/{side}"]
            means[name] = means[name] / share if share else math.nan
    first = {name: value for name, value in applied[0].items() if name.startswith("sampler/")} if applied else {}
    counts = {"updates": float(len(applied)), "updates/not_finite": sum(row["refused/not_finite"] for row in rows)}
    if counts["updates/not_finite"]:
        wrong = {"loss", "grad_norm"} & rows[-1].keys()
        counts |= {NOT_FINITE + name: 1.0 for name in sorted(wrong) if not math.isfinite(rows[-1][name])}
    if settings.target_kl is not None and "refused/far" in rows[-1]:
        counts["target_kl/early_stops"] = rows[-1]["refused/far"]
    return means | first | counts
