"""The layout of all arrays: a table from parameter paths to mesh axes, and one from names of activations.

Arrays are created in their layout: no process ever holds more of one than its devices do.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
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
}
"""The mesh axis of each dimension, by parameter path; unlisted parameters (norms) are on every device."""

for _name, _axes in list(RULES.items()):
    # Adapters are divided as the weight that they are added to, so that forming their product moves nothing.
    if _name.startswith("blocks/") and not _name.endswith("_bias"):
        _inputs = 3 if _name.endswith("/o") else 2  # the layer's dimension among them
        RULES |= {f"{_name}/a": (*_axes[:_inputs], None), f"{_name}/b": (None, None, *_axes[_inputs:])}

ACTIVATIONS: dict[str, tuple[str | tuple[str, ...] | None, ...]] = {
    # Between the matrix products each device of ``tensor`` has some of the positions: norms, and what the backward pass
    # keeps of a layer, shrink by it. The sums after a product are scattered and gathered again before the next one,
    # which moves as much as making them whole everywhere would (Korthikanti et al., arXiv 2205.05198).
    "residual": (BATCH, "tensor", None),
    "hidden": (BATCH, None, None),
    "heads": (BATCH, None, "tensor", None),
    "mlp": (BATCH, None, "tensor"),
}
"""The mesh axes of activations in a layer: residual and hidden [B, S, D], heads [B, S, N, H], MLP [B, S, F]."""


def activation(x: jax.Array, name: str) -> jax.Array:
    """Lay out ``x`` by ``ACTIVATIONS``, inside jit on the mesh set by ``jax.set_mesh``.

    Without a mesh it is returned unchanged.
    """
    return constrain(x, *ACTIVATIONS[name])


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Return a ``NamedSharding`` for every leaf of a tree with models: weights, gradients, optimiser moments, states.

    Leaves outside a model (counters) are on every device; those below ``on_host`` are in its host's memory.
    """

    def leaf(path: tuple, x: Any) -> NamedSharding:
        layout = layout_of(parameter_path(path), x.shape, mesh)
        return (
            layout.with_memory_kind("pinned_host")
            if any(getattr(key, "name", "") == "on_host" for key in path)
            else layout
        )

    return jax.tree.map_with_path(leaf, tree)


def layout_of(path: str, shape: tuple[int, ...], mesh: Mesh) -> NamedSharding:
    """Return the layout of one parameter, such as ``blocks/attn/q``."""
    return NamedSharding(mesh, fitting(shape, RULES.get(path, ()), mesh))


def sampling_shardings(tree: Any, mesh: Mesh) -> Any:
    """Return ``shardings`` for weights that only sample: whole over ``fsdp``, or each decode step would gather all.

    The weights may be ``by_layer``.
    """

    def leaf(path: tuple, x: Any) -> NamedSharding:
        name, layers = re.subn(r"^blocks/\d+/", "blocks/", parameter_path(path))
        axes = [(axis,) if isinstance(axis, str) else axis or () for axis in RULES.get(name, ())[layers:]]
        spec = [tuple(one for one in several if one != "fsdp") or None for several in axes]
        return NamedSharding(mesh, fitting(x.shape, spec, mesh))

    return jax.tree.map_with_path(leaf, tree)


def parameter_path(path: tuple) -> str:
    """Return ``blocks/attn/q`` from the key path of a leaf inside a model; "" outside of one."""
    names = [str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path]
    names = names[:-1] if names[-1:] == ["value"] else names
    return "/".join(names[len(names) - names[::-1].index("weights") :]) if "weights" in names else ""


def from_parts(
    shape: tuple[int, ...], dtype: Any, layout: NamedSharding, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Make a global array of the parts that ``read`` returns, one at a time.

    Each process reads only the parts of its own devices; a part that several of them have is read once.

    Args:
      shape: of the whole.
      dtype: of the whole.
      layout: of the array.
      read: from a part's place (slices with start and stop) to its values in that dtype; they are copied, so the
        memory may be anyone's.
    """
    holders: dict[tuple[tuple[int, ...], ...], list[jax.Device]] = {}
    for device, index in layout.addressable_devices_indices_map(shape).items():
        place = tuple(part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        holders.setdefault(place, []).append(device)
    arrays = []
    for place, devices in holders.items():
        values = read(tuple(slice(*bounds) for bounds in place))
        arrays += [jax.device_put(values, device, may_alias=False) for device in devices]
        # Otherwise the host would keep the values of every transfer that is still under way.
        jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(shape, layout, arrays, dtype=dtype)


def laid_out(tree: Any, layout: Any) -> Any:
    """Turn host values that are equal on every process into global arrays.

    ``jax.device_put`` would first compare them across the processes, in one program per shape.

    Args:
      tree: of arrays.
      layout: a sharding for all of them, or a tree of shardings.
    """
    if jax.process_count() == 1:
        return jax.device_put(tree, layout)

    def put(x: Any, layout: Any) -> jax.Array:
        return jax.make_array_from_callback(np.shape(x), layout, lambda index: np.asarray(np.asarray(x)[index]))

    return jax.tree.map(put, tree, jax.tree.broadcast(layout, tree))


def abstract(tree: Any, layout: Any) -> Any:
    """Return the shapes and dtypes of a tree with a tree of shardings, without arrays."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layout)
