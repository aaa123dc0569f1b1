"""The state on the device: creation, shapes, resets."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.models.config import Lora
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.heads import ScalarModel, split
from jaxrl_llm.models.lora import create
from jaxrl_llm.sharding import shardings
from jaxrl_llm.types import Role, TrainState


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
    decoder, scalar = split(model)
    params: Any = create(decoder.config, lora, jax.random.key(seed), scalar) if lora.rank else model
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
