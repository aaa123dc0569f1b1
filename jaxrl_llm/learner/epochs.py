"""From scored samples to a new state: epochs and minibatches over one rollout."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.learner.batch import Layout, Packed, Sample, pack, places
from jaxrl_llm.learner.settings import Learner
from jaxrl_llm.learner.update import divergence, score
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
    update: Callable[..., Any], temperature: float, seed: int, mesh: Mesh, reference: bool = True, judge: bool = False,
) -> tuple[TrainState, dict[str, float]]:
    """Every epoch over every minibatch of the groups.

    The passes end with the first update that is refused for its distance from the old policy or for a gradient that is not
    finite; an update without tokens is passed over. The first update is never too far: nothing has moved before it.

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
      judge: measure the KL of the whole batch after the last update, for a controller; see ``judged``.

    Returns:
      The new state, and metrics averaged over the updates that were applied (``sampler/`` ones from the first, the only on-policy
      one), NaN where none was; ``updates`` counts those, ``updates/not_finite`` those refused for their gradient.
    """
    several, held = settings.updates > 1, state.reference is not None
    scored_by = state if reference or judge else state._replace(reference=None)
    anchor = several or (judge and not held)
    batches = _scored(scored_by, _split(groups, settings.minibatches), layout, compute, temperature, mesh, anchor)
    rows: list[dict[str, float]] = []
    for packed in _passes(batches, settings.epochs, seed):
        given = packed if several else packed._replace(old_logp=None)
        given = given if reference else given._replace(ref_logp=None)
        begun = any(_applied(row) for row in rows)
        limit = {} if settings.target_kl is None else {"target_kl": settings.target_kl if begun else math.inf}
        state, metrics = update(state, given, temperature, **limit)
        rows.append({name: float(value) for name, value in jax.device_get(metrics).items()})
        if rows[-1]["refused/not_finite"] or rows[-1].get("refused/far"):
            break
    stops = {} if settings.target_kl is None else {"target_kl/early_stops": rows[-1]["refused/far"]}
    measured = judged(state, batches, compute, temperature) if judge else {}
    return state, _summary(rows) | stops | {name: float(value) for name, value in jax.device_get(measured).items()}


def _passes(batches: list[Packed], epochs: int, seed: int) -> Iterator[Packed]:
    """The minibatches of every epoch: of the first one in their order, then in another one each time."""
    for epoch in range(epochs):
        order = np.arange(len(batches)) if epoch == 0 else np.random.default_rng((seed, epoch)).permutation(len(batches))
        yield from (batches[index] for index in order)


def judged(state: TrainState, batches: Sequence[Packed], compute: Compute, temperature: float) -> dict[str, jax.Array]:
    """How far the policy is from what a KL coefficient holds it to, by one forward pass over all that it learned from.

    ``controller/kl``: nats per token; ``controller/kl_sequence``: nats per sequence, summed over its tokens; NaN where no token is
    in the loss. To the reference where the batches have its log-probabilities, else to the old policy, whose they have then.
    """
    model = policy_model(state)
    far = [divergence(p, score(model, p, jnp.float32(temperature), compute)) for p in batches]
    tokens, sequences = (sum(getattr(p.totals, name) for p in batches) for name in ("tokens", "sequences"))
    return {"controller/kl": sum(far) / tokens, "controller/kl_sequence": sum(far) / sequences}


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


def _applied(row: dict[str, float]) -> bool:
    return not any(value for name, value in row.items() if name.startswith("refused/"))


def _summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """What the updates have measured together; see ``learn``."""
    applied = [row for row in rows if _applied(row)]
    names = [name for name in rows[0] if not name.startswith("refused/")]
    means = {name: float(np.mean([row[name] for row in applied])) if applied else math.nan for name in names}
    first = {name: value for name, value in applied[0].items() if name.startswith("sampler/")} if applied else {}
    counts = {"updates": float(len(applied)), "updates/not_finite": sum(row["refused/not_finite"] for row in rows)}
    return means | first | counts
