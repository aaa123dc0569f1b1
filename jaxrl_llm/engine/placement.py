"""Where the cache and the slots lie on the mesh, and what each device does to its own rows and heads."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models.cache import Cache, insert, insert_divided, take_rows, with_columns
from jaxrl_llm.sharding import BATCH, batch_parts, constrain, fitting

PLACE = (None, BATCH, "tensor")
"""Of a cache's arrays: rows over data and fsdp, heads over tensor."""


def parts_of(mesh: Mesh | None, rows: int) -> int:
    """Into how many parts the mesh divides the slots and the blocks that they read."""
    parts = 1 if mesh is None else batch_parts(mesh)
    return parts if rows % parts == 0 else 1


def slot_shardings(slots: Any, mesh: Any) -> Any:
    """Where each array of slots or of a cache is: B and U over data and fsdp, key/value heads over tensor."""

    def spec(x: Any) -> tuple[Any, ...]:
        return PLACE if x.ndim == 5 else (BATCH,)

    return jax.tree.map(lambda x: NamedSharding(mesh, fitting(x.shape, spec(x), mesh)), slots)


def placed(cache: Cache) -> Cache:
    """Rows over data and fsdp, heads over tensor."""
    return jax.tree.map(lambda x: constrain(x, *PLACE), cache)


def on_own_rows(change: Callable[..., Cache], mesh: Mesh | None, cache: Cache, new: Any, *index: jax.Array) -> Cache:
    """``change(cache, new, *index)`` on every device's own rows and heads; ``index`` has an entry for each slot.

    ``new``: None, or a cache of as many rows, divided alike.
    """
    if mesh is None:
        return change(cache, new, *index)
    rows = fitting(cache.k.shape, PLACE, mesh)
    inside = (Cache(rows, rows), jax.tree.map(lambda _: rows, new), *(PartitionSpec(rows[1]) for _ in index))
    return jax.shard_map(change, mesh=mesh, in_specs=inside, out_specs=Cache(rows, rows), check_vma=False)(
        cache, new, *index
    )


def inserted(
    mesh: Mesh | None, cache: Cache, given: Cache, needed: jax.Array, source: jax.Array, start: jax.Array
) -> Cache:
    """``insert`` on every device's own rows and heads, of rows given that may be divided too."""
    if mesh is None:
        return insert(cache, given, source, start)
    rows = fitting(cache.k.shape, PLACE, mesh)
    there = fitting(given.k.shape, PLACE, mesh)
    change = functools.partial(insert_divided, axes=there[1]) if there[1] else _insert_whole
    each = PartitionSpec(rows[1])
    inside = (Cache(rows, rows), Cache(there, there), each, each, PartitionSpec())
    return jax.shard_map(change, mesh=mesh, in_specs=inside, out_specs=Cache(rows, rows), check_vma=False)(
        cache, given, source, start, needed
    )


def _insert_whole(cache: Cache, given: Cache, source: jax.Array, start: jax.Array, needed: jax.Array) -> Cache:
    return insert(cache, given, source, start)


def resized(cache: Cache, order: jax.Array, columns: int, mesh: Mesh | None, parts: int) -> Cache:
    """Rows in that order, of ``columns`` columns; every device moves its own, or each would gather the whole cache."""
    if mesh is None or parts == 1:
        return with_columns(take_rows(cache, order), columns)
    rows = fitting(cache.k.shape, PLACE, mesh)

    def own(cache: Cache, order: jax.Array) -> Cache:
        return with_columns(take_rows(cache, order % cache.v.shape[1]), columns)

    inside = Cache(rows, rows), PartitionSpec(rows[1])
    return jax.shard_map(own, mesh=mesh, in_specs=inside, out_specs=Cache(rows, rows), check_vma=False)(cache, order)
