"""Where everything lives: one table from a parameter's path to its mesh axes, and one from an activation's name."""

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.sharding.mesh import BATCH, constrain, fitting

RULES: dict[str, tuple[str | tuple[str, ...] | None, ...]] = {
    # The vocabulary takes both axes: a width divided over fsdp would clash with the batch, which fsdp divides too.
    "embed": (("tensor", "fsdp"), None),
    "head": ("fsdp", "tensor"),
    "blocks/attn/q": (None, "fsdp", "tensor", None),
    "blocks/attn/k": (None, "fsdp", "tensor", None),
    "blocks/attn/v": (None, "fsdp", "tensor", None),
    "blocks/attn/o": (None, "tensor", None, "fsdp"),
    "blocks/attn/q_bias": (None, "tensor", None),
    "blocks/attn/k_bias": (None, "tensor", None),
    "blocks/attn/v_bias": (None, "tensor", None),
    "blocks/mlp/gate": (None, "fsdp", "tensor"),
    "blocks/mlp/up": (None, "fsdp", "tensor"),
    "blocks/mlp/down": (None, "tensor", "fsdp"),
    # Adapters are divided as the weight that they are added to, so that forming their product moves nothing.
    "blocks/attn/q/a": (None, "fsdp", None),
    "blocks/attn/q/b": (None, None, "tensor", None),
    "blocks/attn/k/a": (None, "fsdp", None),
    "blocks/attn/k/b": (None, None, "tensor", None),
    "blocks/attn/v/a": (None, "fsdp", None),
    "blocks/attn/v/b": (None, None, "tensor", None),
    "blocks/attn/o/a": (None, "tensor", None, None),
    "blocks/attn/o/b": (None, None, "fsdp"),
    "blocks/mlp/gate/a": (None, "fsdp", None),
    "blocks/mlp/gate/b": (None, None, "tensor"),
    "blocks/mlp/up/a": (None, "fsdp", None),
    "blocks/mlp/up/b": (None, None, "tensor"),
    "blocks/mlp/down/a": (None, "tensor", None),
    "blocks/mlp/down/b": (None, None, "fsdp"),
}
"""Mesh axis of each dimension, by parameter path; what is not listed (norms) is on every device."""

ACTIVATIONS: dict[str, tuple[str | tuple[str, ...] | None, ...]] = {
    # Between the matrix products each device of ``tensor`` has some of the positions: norms, and what the backward pass
    # keeps of a layer, shrink by it. The sums after a product are scattered and gathered again before the next one,
    # which moves as much as making them whole everywhere would (Korthikanti et al., arXiv 2205.05198).
    "residual": (BATCH, "tensor", None),
    "hidden": (BATCH, None, None),
    "heads": (BATCH, None, "tensor", None),
    "mlp": (BATCH, None, "tensor"),
}
"""Mesh axes of what flows through a layer: residual and hidden [B, S, D], heads [B, S, N, H], MLP [B, S, F]."""


def activation(x: jax.Array, name: str) -> jax.Array:
    """``x`` laid out as ``ACTIVATIONS`` says, inside jit on the mesh set by ``jax.set_mesh``.

    As it is where there is none.
    """
    return constrain(x, *ACTIVATIONS[name])


def shardings(tree: Any, mesh: Mesh) -> Any:
    """A ``NamedSharding`` for every leaf of a tree that holds models: weights, gradients, optimiser moments, states.

    Leaves that belong to no model (counters) are on every device; those below ``on_host`` in its host's memory.
    """

    def leaf(path: tuple, x: Any) -> NamedSharding:
        layout = layout_of(parameter_path(path), x.shape, mesh)
        return (
            layout.with_memory_kind("pinned_host")
            if any(getattr(key, "name", "") == "on_host" for key in path)
            else layout
        )

    return jax.tree.map_with_path(leaf, tree)


def constrain_by_path(tree: Any) -> Any:
    """Inside jit: ask for the layout of ``shardings``, on the mesh set by ``jax.set_mesh``; without one, nothing."""
    return jax.tree.map_with_path(lambda path, x: constrain(x, *RULES.get(parameter_path(path), ())), tree)


def layout_of(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """The layout of one parameter, ``blocks/attn/q``."""
    return NamedSharding(mesh, fitting(shape, RULES.get(path, ()), mesh))


def sampling_shardings(tree: Any, mesh: Mesh) -> Any:
    """As ``shardings``, for weights that only sample: whole over ``fsdp``, or each decode step would gather all.

    The weights may be ``by_layer``.
    """

    def leaf(path: tuple, x: Any) -> NamedSharding:
        name, layers = re.subn(r"^blocks/\d+/", "blocks/", parameter_path(path))
        spec = [_without_fsdp(axis) for axis in RULES.get(name, ())[layers:]]
        return NamedSharding(mesh, fitting(x.shape, spec, mesh))

    return jax.tree.map_with_path(leaf, tree)


def _without_fsdp(axis: Any) -> Any:
    names = tuple(name for name in ((axis,) if isinstance(axis, str) else axis or ()) if name != "fsdp")
    return names or None


def parameter_path(path: tuple) -> str:
    """``blocks/attn/q`` from the key path of a leaf inside a model; "" outside of one."""
    names = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path]
    names = names[:-1] if names[-1:] == ["value"] else names
    return "/".join(names[len(names) - names[::-1].index("weights") :]) if "weights" in names else ""
