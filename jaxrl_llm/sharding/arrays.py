"""Arrays that are born in their layout: no process ever holds more of one than its devices do."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

Part = tuple[slice, ...]
"""A slice with a start and a stop for each dimension of an array."""


def from_parts(
    shape: tuple[int, ...], dtype: Any, layout: NamedSharding, read: Callable[[Part], np.ndarray]
) -> jax.Array:
    """The global array whose parts ``read`` gives, one at a time.

    Each process reads only the parts that its own devices hold; a part that several of them hold is read once.

    Args:
      shape: of the whole.
      dtype: of the whole.
      layout: where it is to live.
      read: from a part's place to its values in that dtype; they are copied, so the memory may be anyone's.
    """
    arrays = []
    for place, devices in held_parts(shape, layout).items():
        values = read(tuple(slice(*bounds) for bounds in place))
        arrays += [jax.device_put(values, device, may_alias=False) for device in devices]
        # Otherwise the host would keep the values of every transfer that is still under way.
        jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(shape, layout, arrays, dtype=dtype)


def laid_out(tree: Any, layout: Any) -> Any:
    """Host values that are the same on every process, as global arrays.

    ``jax.device_put`` compares them across the processes first, in a program of its own for each shape.

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
    """Shapes and dtypes of a tree with a tree of shardings, without arrays."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layout)


def held_parts(shape: tuple[int, ...], layout: NamedSharding) -> dict[tuple[tuple[int, int], ...], list[jax.Device]]:
    """The different parts that this process' devices hold, as (start, stop) of each dimension, and who holds them."""
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in layout.addressable_devices_indices_map(shape).items():
        place = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        holders.setdefault(place, []).append(device)
    return holders
