"""Training on one rollout: the state on the device, the gradient of a role's objectives, updates in epochs."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.learner.batch import Packed, Sample, packed_shapes
from jaxrl_llm.learner.forward import (
    Forward,
    Output,
    batch_shardings,
    compute_outputs,
    expert_load,
    microbatch,
    with_replayed_routes,
    without_routes,
)
from jaxrl_llm.learner.objectives import CLIP_PROBABILITY, PRECOMPUTED, Objective, Scalars, summed_kl
from jaxrl_llm.learner.optimiser import move_memory
from jaxrl_llm.learner.settings import Learner
from jaxrl_llm.models.config import ComputeOptions, Lora
from jaxrl_llm.models.decoder import Decoder, cast
from jaxrl_llm.models.heads import ScalarModel, split_head
from jaxrl_llm.models.lora import create_adapter, freeze_base, frozen_base, model_of, with_adapter
from jaxrl_llm.sharding import as_shapes, replicated, shardings
from jaxrl_llm.sharding.rules import checksums_by_name
from jaxrl_llm.types import NOT_FINITE, Role, TrainState


class Update:
    """The update of one role, ``(state, packed, coefficients) -> (state, metrics)``, of the jitted ``program``. The
    state is donated, but for the frozen base of adapters, which samplers may read meanwhile.

    Coefficients by name: ``temperature`` always; ``kl_coef`` and ``entropy_coef`` of the loss's terms; ``target_kl``.
    """

    def __init__(self, program: Any):
        self.program = program
        self._compiling: threading.Thread | None = None

    def __call__(self, state: TrainState, packed: Packed, coefficients: dict[str, Any]) -> tuple[TrainState, Scalars]:
        """Return the state after the update, and its metrics."""
        policy = state.policy
        self.compiled()
        state, metrics = self.program(*self.arguments(state, packed, coefficients))
        return state.with_role("policy", base=policy.base, checksums=policy.checksums), metrics

    def arguments(self, state: TrainState, *others: Any) -> tuple[Any, ...]:
        """Return the arguments of ``program``."""
        return state.with_role("policy", base=None, checksums=None), state.policy.base, *others

    def lower(self, state: TrainState, packed: Packed, coefficients: dict[str, Any]) -> jax.stages.Lowered:
        """Lower ``program``."""
        return self.program.lower(*self.arguments(state, packed, coefficients))

    def compile_ahead(self, programs: Sequence[Callable[[], jax.stages.Lowered]], mesh: Mesh) -> None:
        """Begin to compile in a thread what these lower, the update or what comes before it: the first call waits for
        it. What fails there is raised by the call.
        """

        def compile_them() -> None:
            for lower in programs:
                with contextlib.suppress(Exception), jax.set_mesh(mesh):
                    lower().compile()

        self.compiled()
        self._compiling = threading.Thread(target=compile_them)
        self._compiling.start()

    def compiled(self) -> None:
        """Wait for the thread, if any."""
        if self._compiling is not None:
            self._compiling.join()
            self._compiling = None


def accumulate(
    role: Role, packed: Packed, objectives: Sequence[Objective], coefficients: Scalars, compute: ComputeOptions
) -> tuple[Any, Scalars]:
    """Sum gradients of a role's parameters, and metrics, over the microbatches of a whole optimiser step. The sum is
    float32: bfloat16 would round away a microbatch's share in a sum of many. The loop runs ``packed.microbatches``
    times: ragged steps of one padded shape share one compiled program.
    """

    names = {name for objective in objectives for name in objective.outputs}
    entropy_gradient = any(objective.entropy_gradient for objective in objectives)
    ahead = [objective for objective in objectives if objective.looks_ahead]
    if ahead:
        packed = packed.with_tokens(**compute_ahead(role, packed, ahead, coefficients, compute))

    def share(params: Any, batch: Packed) -> tuple[jax.Array, dict[str, Scalars]]:
        """Return one microbatch's share of the step's loss, and each objective's metrics: sums over the counts."""
        model = cast(with_adapter(role.base, params), compute.dtype)
        outputs = compute_outputs(model, batch, names, coefficients["temperature"], compute, entropy_gradient)
        total: Any = 0
        metrics = {}
        for objective in objectives:
            counted = batch.counting(objective.name)
            counts = packed.counts[objective.name]
            loss, metrics[objective.name] = objective(outputs, counted, counts, coefficients)
            total += loss
        return total, jax.lax.stop_gradient(metrics)

    gradient = jax.grad(share, has_aux=True)
    # The gradient has the shapes of the parameters; tracing it to find them would take as long as tracing the loop.
    _, metrics = jax.eval_shape(share, role.params, microbatch(packed, jnp.int32(0)))
    zeros = jax.tree.map(lambda number: jnp.zeros(number.shape, jnp.float32), (role.params, metrics))

    def body(index: jax.Array, total: tuple[Any, dict[str, Scalars]]) -> tuple[Any, dict[str, Scalars]]:
        grads, metrics = gradient(role.params, microbatch(packed, index))
        summed = jax.tree.map(lambda a, b: a + b.astype(a.dtype), total[0], grads)
        combined = {}
        for objective, new in metrics.items():
            earlier = total[1][objective]
            combined[objective] = {
                name: jnp.maximum(earlier[name], number) if name.endswith("_max") else earlier[name] + number
                for name, number in new.items()
            }
        return summed, combined

    grads, sums = jax.lax.fori_loop(0, packed.microbatches, body, zeros)
    finalized = [objective.finalize(sums[objective.name]) for objective in objectives]
    # Losses are added, other names belong to one of them.
    loss: Any = sum(metrics["loss"] for metrics in finalized)
    return grads, {name: metric for metrics in finalized for name, metric in metrics.items()} | {"loss": loss}


def compute_ahead(
    role: Role, packed: Packed, objectives: Sequence[Objective], coefficients: Scalars, compute: ComputeOptions
) -> dict[str, jax.Array]:
    """Return the arrays [M, B, T] that objectives compute over a whole step, by a forward pass without a gradient."""
    model = cast(with_adapter(role.base, role.params), compute.dtype)
    names = sorted({name for objective in objectives for name in objective.outputs})

    def body(index: jax.Array, arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        outputs = compute_outputs(model, microbatch(packed, index), names, coefficients["temperature"], compute)
        return {name: arrays[name].at[index].set(outputs[name]) for name in names}

    zeros = jnp.zeros(packed.mask.shape, jnp.float32)
    outputs = jax.lax.fori_loop(0, packed.microbatches, body, dict.fromkeys(names, zeros))
    shape = packed.mask.shape
    together = [{"mask": packed.mask} | outputs, packed.by_token, packed.by_sequence, packed.counted]
    flat = jax.tree.map(lambda array: array.reshape(-1, *array.shape[2:]), together)
    step = packed._replace(mask=flat[0].pop("mask"), by_token=flat[1], by_sequence=flat[2], counted=flat[3])
    arrays: dict[str, jax.Array] = {}
    for objective in objectives:
        arrays |= objective.over_step(flat[0], step.counting(objective.name))
    return {name: jax.lax.stop_gradient(array.reshape(shape)) for name, array in arrays.items()}


@functools.cache
def make_update(
    objectives: tuple[Objective, ...],
    optimiser: optax.GradientTransformation,
    rate: optax.Schedule,
    compute: ComputeOptions,
) -> Update:
    """Return the update of one role.

    Equal arguments give the same function, so that a second run in one process, or a segment that begins anew, compiles
    nothing; nor does a new value of a coefficient. An update is refused, and the new state equals the old one in all
    its parts, if no token is in the loss, if loss or gradient are not finite (so the state that a guard saves is
    sound), or if the policy is already further than ``target_kl`` from the old one (k3, nats per token); the metrics
    ``refused/...`` give the reason, as 0 or 1. All ``objectives`` are of the role; ``rate``, the learning rate, is of
    the updates so far; a coefficient ``lr_scale`` multiplies it.
    """
    (name,) = {objective.role for objective in objectives}

    @functools.partial(jax.jit, donate_argnums=0, compiler_options=dict(compute.compiler))
    def update(state: TrainState, base: Any, packed: Packed, coefficients: dict[str, Any]) -> Any:
        coefficients = {key: jnp.asarray(coefficient, jnp.float32) for key, coefficient in coefficients.items()}
        role = state.roles[name]
        with_base = role._replace(base=frozen_base(state.with_role("policy", base=base), name))
        grads, metrics = accumulate(with_base, packed, objectives, coefficients, compute)
        norm = optax.tree.norm(grads)
        lr = jnp.asarray(rate(role.updates), jnp.float32) * coefficients.get("lr_scale", 1.0)
        before = role._replace(opt_state=move_memory(role.opt_state))
        directions, opt_state = optimiser.update(grads, before.opt_state, role.params)
        params = jax.tree.map(lambda w, d: (w.astype(d.dtype) - lr * d).astype(w.dtype), role.params, directions)
        new = Role(params, opt_state, role.updates + 1)
        counted = sum(packed.counts[objective.name].tokens for objective in objectives)
        refused = {"refused/empty": counted == 0, "refused/not_finite": ~jnp.isfinite(norm + metrics["loss"])}
        if "target_kl" in coefficients and "policy_kl" in metrics:
            refused["refused/far"] = metrics["policy_kl"] > coefficients["target_kl"]
        stays = functools.reduce(jnp.logical_or, refused.values())
        updated = jax.tree.map(lambda a, b: jnp.where(stays, b, a), new, before)
        updated = updated._replace(opt_state=move_memory(updated.opt_state, role.opt_state))
        reasons = {reason: flag.astype(jnp.float32) for reason, flag in refused.items()}
        return state._replace(roles=state.roles | {name: updated}), metrics | reasons | {
            "grad_norm": norm,
            "lr": lr,
        }

    return Update(update)


class NewRole(NamedTuple):
    """The initialisation of a role other than the policy, by its ``name``.

    Attributes:
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
    checksums: dict[str, jax.Array] | None = None,
) -> TrainState:
    """Create a state laid out on the mesh; the reference, if any, and every role have buffers of their own.

    Args:
      model: the policy, or with ``lora`` the base; of a scalar model the decoder is the base, and the head is trained
        with the adapter. Donated: arrays with the right layout become the state's.
      optimiser: the policy's, from ``build``.
      reference: whether the state has one.
      seed: of the adapter's first values.
      others: roles in addition to the policy.
      checksums: of the base as it was read, by path, if it is packed.
    """
    layout = shardings(abstract_state(model, optimiser, reference, lora, others), mesh)

    models = model, {other.name: other.load() for other in others if other.load is not None}
    # Each result of a compiled program has a buffer of its own.
    initialise = functools.partial(fresh_state, optimiser, reference, lora, seed, others)
    create = jax.jit(initialise, out_shardings=layout, donate_argnums=(0, 1))
    state = create(*jax.device_put(models, shardings(models, mesh)))
    if checksums:
        state = state.with_role("policy", checksums=jax.device_put(checksums, replicated(mesh)))
    return freeze_base(state, lora, mesh)


def abstract_state(
    model: Decoder | ScalarModel,
    optimiser: optax.GradientTransformation,
    reference: bool,
    lora: Lora = Lora(),
    others: Sequence[NewRole] = (),
) -> TrainState:
    """Return shapes and dtypes of the state, without arrays."""
    shapes = {other.name: other.shapes for other in others if other.load is not None}
    return jax.eval_shape(functools.partial(fresh_state, optimiser, reference, lora, 0, others), model, shapes)


def fresh_state(
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
    frozen = (decoder, checksums_by_name(decoder)) if lora.rank else ()
    roles = {"policy": Role(params, optimiser.init(params), jnp.int32(0), *frozen)}
    for other in others:
        first = other.first(loaded.get(other.name, model))
        roles[other.name] = Role(first, other.optimiser.init(first), jnp.int32(0))
    return TrainState(roles, {"reference": params} if reference else {})


def with_reference(state: TrainState, needed: bool) -> TrainState:
    """Return the state with a reference, if missing a copy of the current policy; or the state without one."""
    if not needed:
        return state._replace(frozen={name: params for name, params in state.frozen.items() if name != "reference"})
    if state.reference is not None:
        return state
    return state._replace(frozen=state.frozen | {"reference": copy_params(state.policy.params)})


def reset_reference(state: TrainState, share: float = 1.0) -> TrainState:
    """Return the state with ``(1 - share) reference + share policy`` as the reference, by weight, in buffers of its
    own. A share of 1 copies the policy. Below, the reference is donated; it is computed in float32, and the dtype of
    each weight stays. Unchanged without a reference.
    """
    if state.reference is None:
        return state
    policy = state.policy.params
    mixed = copy_params(policy) if share == 1 else mix_params(state.reference, policy, jnp.float32(share))
    return state._replace(frozen=state.frozen | {"reference": mixed})


@jax.jit
def copy_params(params: Any) -> Any:
    """Return equal parameters in buffers of their own, by one program for all of them."""
    return jax.tree.map(jnp.copy, params)


@functools.partial(jax.jit, donate_argnums=0)
def mix_params(reference: Any, policy: Any, share: jax.Array) -> Any:
    """Return ``(1 - share) reference + share policy``, computed in float32, in the dtypes of the reference."""
    wide = optax.tree.cast((reference, policy), jnp.float32)
    return jax.tree.map(lambda old, r, p: (r + share * (p - r)).astype(old.dtype), reference, *wide)


def reset_optimiser(state: TrainState, optimiser: optax.GradientTransformation) -> TrainState:
    """Return the state with a fresh state of this optimiser for the policy; its kind may differ from the one before. It
    is on the policy's mesh, or on its device without one.
    """
    params = state.policy.params
    layout = jax.tree.leaves(params)[0].sharding
    if isinstance(layout, NamedSharding):
        layout = shardings(jax.eval_shape(optimiser.init, params), layout.mesh)
    fresh = jax.jit(optimiser.init, out_shardings=layout)(params)
    return state.with_role("policy", opt_state=fresh)


Metrics = dict[str, float]
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
        program without them.
        """
        names = {objective.name for objective in self.objectives}
        lacking = PRECOMPUTED.keys() - self.needs
        return packed._replace(
            by_token={name: array for name, array in packed.by_token.items() if name not in lacking},
            by_column=packed.by_column if self.role == "policy" else without_routes(packed).by_column,
            counted={name: counted for name, counted in packed.counted.items() if name in names},
            counts={name: count for name, count in packed.counts.items() if name in names},
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
) -> tuple[TrainState, Metrics]:
    """Update each role on every minibatch of the groups, in every epoch that the role makes.

    The passes end with the first update of the policy that is refused for its distance from the old one (early
    stopping; never the very first), and with any update refused for a non-finite loss or gradient; one without tokens
    is skipped.

    Args:
      state: donated.
      groups: samples of each prompt.
      settings: epochs, minibatches, ``target_kl``.
      forward: how models are run.
      training: of each role that learns, in the order of updates; the policy first, if it learns.
      coefficients: numbers that objectives read, by name.
      seed: of the groups' order in each epoch after the first.
      measure_kl: measure the KL over the whole batch after the policy's last update, for a controller
        (``kl_of_policy``).
      monitor_kl: no objective reads the reference, and the KL to it is measured before any update
        (``kl_to_reference``).

    Returns:
      The new state, and metrics averaged over the applied updates (``sampler/`` ones from the first, the only on-policy
      one), NaN without any; ``updates`` counts them, ``updates/not_finite`` those refused for their loss or gradient,
      and ``not_finite/...`` is what was not finite. Names of other roles' metrics begin with the role's name.
    """
    objectives = tuple(objective.name for trained in training for objective in trained.objectives)
    needed = set().union(*(trained.needs for trained in training))
    learns_policy = any(trained.role == "policy" for trained in training)
    measure_kl = measure_kl and learns_policy
    kl_to = kl_arrays(state, training, measure_kl, monitor_kl)
    batches = []
    for trained in training:
        trained.update.compiled()
    for samples in split_minibatches(groups, settings.minibatches):
        packed = forward.packed(samples, objectives)
        packed = with_replayed_routes(packed, settings.routing_replay, model_of(state), forward.compute)
        missing = (needed | kl_to) - set(packed.by_token)
        batches.append(packed.with_tokens(**precompute(state, packed, forward, missing)))
    measured: dict[str, Any] = {}
    if learns_policy:
        measured = expert_load([s for group in groups for s in group], model_of(state).config.experts)
        measured |= kl_to_reference(state, batches, forward) if monitor_kl else {}
    coefficients = {"temperature": forward.temperature} | coefficients
    rows: dict[str, list[Metrics]] = {trained.role: [] for trained in training}
    for epoch, packed in iterate_epochs(batches, max(trained.passes(settings) for trained in training), seed):
        learning = [trained for trained in training if epoch < trained.passes(settings)]
        state, refused = update_roles(state, packed, settings, learning, coefficients, rows)
        if refused:
            break
    measured |= kl_of_policy(state, batches, forward) if measure_kl else {}
    metrics = {"updates": 0.0} | count_not_finite(groups)
    metrics |= {name: float(metric) for name, metric in jax.device_get(measured).items()}
    for trained in training:
        prefix = "" if trained.role == "policy" else f"{trained.role}/"
        metrics |= {prefix + name: metric for name, metric in summarise_updates(rows[trained.role], settings).items()}
    return state, metrics


def kl_arrays(state: TrainState, training: Sequence[Training], measure_kl: bool, monitor_kl: bool) -> set[str]:
    """Return the names of the arrays that ``kl_of_policy`` compares with; the arguments are those of ``learn``."""
    if not measure_kl:
        return set()
    return {"old_logp" if state.reference is None or monitor_kl else "ref_logp"}


def planned_data(
    samples: Sequence[Sample], forward: Forward, training: Sequence[Training], others: Collection[str] = ()
) -> tuple[Packed, int]:
    """Return the data of an update of these samples as shapes on ``forward.mesh``, and the number of non-empty
    microbatches. ``others``: names of arrays that are computed before the updates, besides those that roles need.
    """
    names = tuple(objective.name for trained in training for objective in trained.objectives)
    packed, microbatches = packed_shapes(samples, forward.layout, names)
    needed = set(others).union(*(trained.needs for trained in training)) - set(packed.by_token)
    computed = jax.ShapeDtypeStruct(packed.mask.shape, np.float32)
    packed = packed.with_tokens(**dict.fromkeys(sorted(needed), computed))
    return as_shapes(packed, batch_shardings(packed, forward.mesh)), microbatches


def compile_ahead(
    state: TrainState,
    samples: Sequence[Sample],
    settings: Learner,
    forward: Forward,
    training: Sequence[Training],
    coefficients: dict[str, Any],
    others: Collection[str] = (),
) -> None:
    """Begin to compile the updates of all roles in threads, and before them the passes for arrays that they need.
    ``samples``: of an update, at their longest; the other arguments are those of ``learn`` and of ``planned_data``.
    """
    packed, _ = planned_data(samples, forward, training, others)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    programs = []
    if settings.routing_replay == "off" or model_of(state).config.experts is None:
        given = set().union(*(sample.arrays for sample in samples))
        passes = scored(shapes, packed, (set(PRECOMPUTED) & packed.by_token.keys()) - given)
        programs = [functools.partial(forward.lower_score, *arguments) for arguments in passes.values()]
    shapes = shapes._replace(frozen={})
    coefficients = {"temperature": forward.temperature} | coefficients
    for trained in training:
        limit = settings.target_kl is not None and trained.role == "policy"
        numbers = coefficients | ({"target_kl": math.inf} if limit else {})
        update = functools.partial(trained.update.lower, shapes, trained.reads(packed), numbers)
        trained.update.compile_ahead([*programs, update], forward.mesh)
        programs = []


def count_not_finite(groups: Sequence[Sequence[Sample]]) -> Metrics:
    """Return how many samples have numbers that count and are not finite, by the names of such numbers."""
    counts: collections.Counter[str] = collections.Counter()
    for sample in itertools.chain.from_iterable(groups):
        floats = {name: x for name, x in sample.arrays.items() if x.ndim == 1 and x.dtype.kind == "f"}
        counted = {name: x[sample.mask] for name, x in floats.items()}
        numbers = (sample.scalars if sample.mask.any() else {}) | counted
        counts.update(NOT_FINITE + name for name, array in numbers.items() if not np.isfinite(array).all())
    return {name: float(count) for name, count in counts.items()}


def update_roles(
    state: TrainState,
    packed: Packed,
    settings: Learner,
    training: Sequence[Training],
    coefficients: dict[str, Any],
    rows: dict[str, list[Metrics]],
) -> tuple[TrainState, bool]:
    """Update every role on one minibatch, and append each update's metrics to ``rows``; return the state, and whether
    the passes end here. Frozen models are kept out of the updates, so that these are the same programs without them.
    """
    frozen = state.frozen
    state = state._replace(frozen={})
    for trained in training:
        updates, numbers = rows[trained.role], coefficients
        if settings.target_kl is not None and trained.role == "policy":
            numbers = numbers | {"target_kl": settings.target_kl if any(map(is_applied, updates)) else math.inf}
        state, metrics = trained.update(state, trained.reads(packed), numbers)
        updates.append({name: float(metric) for name, metric in jax.device_get(metrics).items()})
        if updates[-1]["refused/not_finite"] or updates[-1].get("refused/far"):
            return state._replace(frozen=frozen), True
    return state._replace(frozen=frozen), False


def precompute(state: TrainState, packed: Packed, forward: Forward, names: set[str]) -> dict[str, jax.Array]:
    """Compute the arrays [M, B, T] of these names, at the shapes that the updates use."""
    return {name: forward.score(*arguments) for name, arguments in scored(state, packed, names).items()}


def scored(state: TrainState, packed: Packed, names: set[str]) -> dict[str, tuple[Any, Packed, Output]]:
    """Return (model, data, output) of the passes for these names of ``PRECOMPUTED``. Experts are replayed for the
    policy alone.
    """
    passes = {}
    for name in sorted(names):
        role, output = PRECOMPUTED[name]
        passes[name] = model_of(state, role), packed if role == "policy" else without_routes(packed), output
    return passes


def kl_of_policy(state: TrainState, batches: Sequence[Packed], forward: Forward) -> dict[str, Any]:
    """Return the policy's KL for a controller, by one forward pass over all data that it learned from:
    ``controller/kl``, nats per token, and ``controller/kl_sequence``, nats per sequence, summed over its tokens; NaN if
    no token is in the loss. It is the KL to the reference if the batches have its log-probabilities, else to the old
    policy.
    """
    model = model_of(state, "policy")
    kl = sum(summed_kl(packed, forward.score(model, packed)) for packed in batches)
    counts = [packed.counts["policy"] for packed in batches]
    return {
        "controller/kl": kl / sum(count.tokens for count in counts),
        "controller/kl_sequence": kl / sum(count.sequences for count in counts),
    }


def kl_to_reference(state: TrainState, batches: Sequence[Packed], forward: Forward) -> dict[str, Any]:
    """Return ``kl``, the policy's distance in nats per token to a reference that no objective reads. It uses forward
    passes of its own, so that learning is the same bit for bit without it. The estimate is unbiased k3, weighted by
    policy over sampler; 0 while the policy equals the reference; NaN if no token is in the loss.
    """
    kl: Any = 0
    for packed in batches:
        missing = {"old_logp", "ref_logp"} - set(packed.by_token)
        with_both = packed.with_tokens(**precompute(state, packed, forward, missing))
        kl += summed_kl(with_both, with_both.by_token["old_logp"])
    return {"kl": kl / sum(packed.counts["policy"].tokens for packed in batches)}


def iterate_epochs(batches: list[Packed], epochs: int, seed: int) -> Iterator[tuple[int, Packed]]:
    """Yield the number and the minibatches of every epoch: in order in the first, shuffled in each later one."""
    for epoch in range(epochs):
        order = np.random.default_rng((seed, epoch)).permutation(len(batches)) if epoch else range(len(batches))
        yield from ((epoch, batches[index]) for index in order)


def split_minibatches(groups: Sequence[Sequence[Sample]], parts: int) -> list[list[Sample]]:
    """Split the groups into minibatches as evenly as possible, whole and in order."""
    bounds = np.linspace(0, len(groups), min(parts, len(groups)) + 1).round().astype(int)
    return [[s for group in groups[a:b] for s in group] for a, b in itertools.pairwise(bounds)]


def is_applied(row: Metrics) -> bool:
    """Whether the update of these metrics was applied."""
    return not any(refused for name, refused in row.items() if name.startswith("refused/"))


def summarise_updates(rows: list[Metrics], settings: Learner) -> Metrics:
    """Combine the metrics of one role's updates; see ``learn``."""
    if not rows:  # the passes ended before its first update
        return {"updates": 0.0}
    applied = [row for row in rows if is_applied(row)]
    names = [name for name in rows[0] if not name.startswith("refused/")]
    means = {name: float(np.mean([row[name] for row in applied])) if applied else math.nan for name in names}
    # The updates measure shares of all tokens, of which the mean over those that are clipped is made here.
    for side in ("low", "high"):
        if (name := f"{CLIP_PROBABILITY}/{side}") in means:
            share = means[f"clip_fraction/{side}"]
            means[name] = means[name] / share if share else math.nan
    first = {name: metric for name, metric in applied[0].items() if name.startswith("sampler/")} if applied else {}
    counts = {"updates": float(len(applied)), "updates/not_finite": sum(row["refused/not_finite"] for row in rows)}
    if counts["updates/not_finite"]:
        not_finite = {"loss", "grad_norm"} & rows[-1].keys()
        counts |= {NOT_FINITE + name: 1.0 for name in sorted(not_finite) if not math.isfinite(rows[-1][name])}
    if settings.target_kl is not None and "refused/far" in rows[-1]:
        counts["target_kl/early_stops"] = rows[-1]["refused/far"]
    return means | first | counts
