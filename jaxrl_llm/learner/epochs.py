"""From scored samples to a new state: epochs and minibatches over one rollout."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.learner.batch import Layout, Packed, Sample, pack, places
from jaxrl_llm.learner.settings import Learner
from jaxrl_llm.learner.update import score
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import Lora
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import create, policy_model, reference_model
from jaxrl_llm.sharding import BATCH, fitting, laid_out, replicated, shardings
from jaxrl_llm.types import TrainState


def create_state(
    model: Decoder, optimiser: optax.GradientTransformation, reference: bool, mesh: Mesh, lora: Lora = Lora(), seed: int = 0
) -> TrainState:
    """A fresh state laid out on the mesh; the reference has buffers of its own.

    Args:
      model: the policy, or with ``lora`` the base. Donated: where it lies as it should already, its arrays become the state's.
      optimiser: from ``build``.
      reference: whether the state has one.
      mesh: where it lives.
      lora: of what size the adapter is, if there is one.
      seed: of the adapter's first values.
    """
    layout = shardings(abstract_state(model, optimiser, reference, lora), mesh)
    build = lambda m: jax.tree.map(jnp.copy, _fresh(m, optimiser, reference, lora, seed))
    return jax.jit(build, out_shardings=layout, donate_argnums=0)(jax.device_put(model, shardings(model, mesh)))


def _fresh(model: Decoder, optimiser: optax.GradientTransformation, reference: bool, lora: Lora, seed: int) -> TrainState:
    policy = create(model.config, lora, jax.random.key(seed)) if lora.rank else model
    return TrainState(policy, optimiser.init(policy), policy if reference else None, jnp.int32(0), model if lora.rank else None)


def reset_reference(state: TrainState) -> TrainState:
    """The state whose reference is its policy, in buffers of its own; without a reference nothing changes."""
    return state if state.reference is None else state._replace(reference=jax.tree.map(jnp.copy, state.policy))


def reset_optimiser(state: TrainState, optimiser: optax.GradientTransformation) -> TrainState:
    """The state with an optimiser that has seen nothing, laid out as the one before."""
    layout = jax.tree.map(lambda x: x.sharding, state.opt_state)
    return state._replace(opt_state=jax.jit(optimiser.init, out_shardings=layout)(state.policy))


def abstract_state(
    model: Decoder, optimiser: optax.GradientTransformation, reference: bool, lora: Lora = Lora()
) -> TrainState:
    """Shapes and dtypes of the state, without arrays."""
    return jax.eval_shape(lambda m: _fresh(m, optimiser, reference, lora, 0), model)


def place(packed: Packed, mesh: Mesh) -> Packed:
    """A step's data on the mesh."""
    return laid_out(packed, batch_shardings(packed, mesh))


def batch_shardings(packed: Packed, mesh: Any) -> Packed:
    """Rows and their predictions divided over data and fsdp, the small per-completion arrays everywhere."""
    divided = {name: getattr(packed, name) for name in ("rows", "source", "target", "place", "kept")}
    lay = lambda x: NamedSharding(mesh, fitting(x.shape, (None, BATCH), mesh))
    rest = jax.tree.map(lambda _: replicated(mesh), packed._replace(**dict.fromkeys(divided)))
    return rest._replace(**jax.tree.map(lay, divided))


def learn(
    state: TrainState, groups: Sequence[Sequence[Sample]], settings: Learner, layout: Layout, compute: Compute,
    update: Callable[..., Any], temperature: float, seed: int, mesh: Mesh, reference: bool = True,
) -> tuple[TrainState, dict[str, float]]:
    """Every epoch over every minibatch of the groups.

    Args:
      state: donated.
      groups: samples of each prompt.
      settings: epochs, minibatches, ``target_kl``.
      layout: shapes of a microbatch.
      compute: as in ``update``.
      update: from ``make_update``.
      temperature: of the sampling, applied to every log-probability.
      seed: orders the groups anew in each epoch after the first.
      mesh: where the state lives.
      reference: whether the loss reads the reference, if the state has one.

    Returns:
      The new state, and metrics averaged over the updates made (``sampler/`` ones from the first, the only on-policy one).
    """
    anchor = settings.epochs * settings.minibatches > 1
    rows: list[dict[str, float]] = []
    state_in_loss = state if reference else state._replace(reference=None)
    batches = _scored(state_in_loss, _split(groups, settings.minibatches), layout, compute, temperature, mesh, anchor)
    for epoch in range(settings.epochs):
        order = np.arange(len(batches)) if epoch == 0 else np.random.default_rng((seed, epoch)).permutation(len(batches))
        for index in order:
            state, metrics = update(state, batches[index], temperature)
            rows.append({name: float(value) for name, value in jax.device_get(metrics).items()})
            if settings.target_kl is not None and rows[-1]["policy_kl"] > settings.target_kl:
                return state, _summary(rows) | {"target_kl/early_stops": 1.0}
    stops = {} if settings.target_kl is None else {"target_kl/early_stops": 0.0}
    return state, _summary(rows) | stops


def _split(groups: Sequence[Sequence[Sample]], parts: int) -> list[list[Sample]]:
    """Groups dealt into minibatches, as even as can be, whole and in order."""
    bounds = np.linspace(0, len(groups), min(parts, len(groups)) + 1).round().astype(int)
    return [[s for group in groups[a:b] for s in group] for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


def _scored(
    state: TrainState, batches: list[list[Sample]], layout: Layout, compute: Compute, temperature: float, mesh: Mesh, anchor: bool
) -> list[Packed]:
    """Packed minibatches with ``old_logp`` where several updates follow and ``ref_logp`` where there is a reference.

    Both are computed before the first update, at the shapes that the updates use.
    """
    out = []
    for samples in batches:
        packed = place(pack(samples, layout), mesh)
        run = lambda model, p=packed: score(model, p, jnp.float32(temperature), compute)
        old = run(policy_model(state)) if anchor else None
        reference = run(reference_model(state)) if state.reference is not None else None
        out.append(packed._replace(old_logp=old, ref_logp=reference))
    return out


def completion_logps(
    model: Decoder, samples: Sequence[Sample], layout: Layout, compute: Compute, temperature: float, mesh: Mesh
) -> list[np.ndarray]:
    """Log-probabilities (nats, float32[t]) of each sample's tokens under a model that is not differentiated."""
    packed = place(pack(samples, layout), mesh)
    # A process can read what its own devices hold, no more.
    everywhere = jax.device_put(score(model, packed, jnp.float32(temperature), compute), replicated(mesh))
    values = np.asarray(jax.device_get(everywhere))
    return [values[at][: len(s.tokens)] for s, at in zip(samples, places(samples, layout), strict=True)]


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    means = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
    first = {name: value for name, value in rows[0].items() if name.startswith("sampler/")}
    return means | first | {"updates": float(len(rows))}
