"""The layout of all arrays: a table from parameter paths to mesh axes, and one from names of activations. Arrays are
created in their layout: no process ever holds more of one than its devices do. Fingerprints of weights are a few bytes
for each, which other weights would not have, and which the layout does not change.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxrl_llm.codec import digest_of_parts
from jaxrl_llm.sharding.mesh import BATCH, constrain, fit_spec

RULES: dict[str, tuple[str | tuple[str, ...] | None, ...]] = {
    # The vocabulary takes both axes: a width divided over fsdp would clash with the batch, which fsdp divides too.
    "embed": (("tensor", "fsdp"), None),
    "head": ("fsdp", "tensor"),
    "per_layer_embed": (("tensor", "fsdp"), None),
    "per_layer_projection": ("fsdp", None),
    "blocks/per_layer/gate": (None, "fsdp", None),
    "blocks/per_layer/projection": (None, None, "fsdp"),
    **dict.fromkeys(("blocks/attn/q", "blocks/attn/k", "blocks/attn/v"), (None, "fsdp", "tensor", None)),
    "blocks/attn/o": (None, "tensor", None, "fsdp"),
    **dict.fromkeys(("blocks/attn/q_bias", "blocks/attn/k_bias", "blocks/attn/v_bias"), (None, "tensor", None)),
    **dict.fromkeys(
        (f"blocks/{part}/{name}" for part in ("mlp", "shared") for name in ("gate", "up")), (None, "fsdp", "tensor")
    ),
    **dict.fromkeys(("blocks/mlp/down", "blocks/shared/down"), (None, "tensor", "fsdp")),
    **dict.fromkeys(("blocks/experts/gate", "blocks/experts/up"), (None, "expert", "fsdp", "tensor")),
    "blocks/experts/down": (None, "expert", "tensor", "fsdp"),
    "blocks/attn/gate": (None, "fsdp", "tensor", None),
    "blocks/attn/q_latent": (None, "fsdp", None),
    **dict.fromkeys(("blocks/attn/latent", "blocks/attn/k_rotary"), (None, "fsdp", None)),
    **dict.fromkeys(("blocks/attn/k_up", "blocks/attn/v_up"), (None, "fsdp", "tensor", None)),
    "blocks/attn/sinks": (None, "tensor"),
    **dict.fromkeys((f"blocks/delta/{name}" for name in "qkvz"), (None, "fsdp", "tensor", None)),
    "blocks/delta/o": (None, "tensor", None, "fsdp"),
    **dict.fromkeys((f"blocks/delta/{name}_conv" for name in "qkv"), (None, "tensor", None, None)),
    **dict.fromkeys((f"blocks/conv/{name}" for name in "bcx"), (None, "fsdp", "tensor")),
    "blocks/conv/o": (None, "tensor", "fsdp"),
    **dict.fromkeys(("blocks/experts/gate_bias", "blocks/experts/up_bias"), (None, "expert", "tensor")),
    "blocks/experts/down_bias": (None, "expert", None),
}
"""The mesh axis of each dimension, by parameter path; unlisted parameters (norms) are on every device."""

for _name, _axes in list(RULES.items()):
    # Adapters are divided as the weight that they are added to, so that forming their product moves nothing.
    if _name.startswith("blocks/") and not _name.endswith(("_bias", "_conv")):
        _outer = 2 if "/experts/" in _name else 1  # the layer's dimension, and the experts'
        _inputs = _outer + (2 if _name in ("blocks/attn/o", "blocks/delta/o") else 1)
        RULES |= {f"{_name}/a": (*_axes[:_inputs], None), f"{_name}/b": (*_axes[:_outer], None, *_axes[_inputs:])}
        # Packed matrices too, whose nibbles have one axis of inputs; scales are small, but for those of many experts.
        RULES |= {f"{_name}/codes": _axes, f"{_name}/nibbles": (*_axes[: _outer + 1], *_axes[_inputs:])}
        RULES |= {f"{_name}/scales": _axes[:_outer]}

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
    """Lay out ``x`` by ``ACTIVATIONS``, inside jit on the mesh set by ``jax.set_mesh``; unchanged without a mesh."""
    return constrain(x, *ACTIVATIONS[name])


def shardings(tree: Any, mesh: Mesh, skip: Sequence[str] = ()) -> Any:
    """Return a ``NamedSharding`` for every leaf of a tree with models: weights, gradients, optimiser moments, states.
    Leaves outside a model (counters) are on every device; those below ``on_host`` are in its host's memory. ``skip``:
    mesh axes that divide no weights.
    """

    def leaf(path: tuple, x: Any) -> NamedSharding:
        layout = layout_of(parameter_path(path), x.shape, mesh, skip)
        on_host = any(getattr(key, "name", "") == "on_host" for key in path)
        return layout.with_memory_kind("pinned_host") if on_host else layout

    return jax.tree.map_with_path(leaf, tree)


sampling_shardings = functools.partial(shardings, skip=("fsdp",))
"""``shardings`` of weights that only sample: whole over ``fsdp``, or each decode step would gather them all."""


def rule_of(path: str) -> tuple[str | tuple[str, ...] | None, ...]:
    """Return the mesh axis of each dimension of a parameter; parts like attention or an MLP with other sizes, such as
    ``global_attn``, have its rules.
    """
    return RULES.get(re.sub(r"^blocks/\w+_(attn|mlp)/", r"blocks/\1/", path), ())


def layout_of(path: str, shape: tuple[int, ...], mesh: Mesh | AbstractMesh, skip: Sequence[str] = ()) -> NamedSharding:
    """Return the layout of one parameter, such as ``blocks/attn/q``, or of a layer's own, ``blocks/0/attn/q``.
    ``skip``: mesh axes that do not divide it.
    """
    name, layers = re.subn(r"^blocks/\d+/", "blocks/", path)
    axes = [(axis,) if isinstance(axis, str) else axis or () for axis in rule_of(name)[layers:]]
    spec = [tuple(axis for axis in group if axis not in skip) for group in axes]
    return NamedSharding(mesh, fit_spec(shape, spec, mesh))


def gather_layer(layer: Any) -> Any:
    """Return one layer's weights whole over ``fsdp``, inside jit on the mesh set by ``jax.set_mesh``.

    Their gradients are divided again (ZeRO-3, arXiv 1910.02054). A product with divided weights would be computed in as
    many parts, which are added up in the dtype of activations. A TPU's compiler cuts the products of the gradients too,
    into parts of D / fsdp rows, few for its tiles: where ``tensor`` divides them they are computed whole, and scattered
    as they are added. With ``fsdp`` alone it would send twice the bytes for that. Without a mesh, or with one part, the
    weights are returned unchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return layer if mesh.empty or mesh.shape["fsdp"] == 1 else _gather(layer)


@jax.custom_vjp
def _gather(layer: Any) -> Any:
    return _constrain_layer(layer, ("fsdp",))


def _gather_backward(_: None, gradient: Any) -> tuple[Any]:
    if jax.sharding.get_abstract_mesh().shape["tensor"] > 1:
        gradient = _constrain_layer(gradient, ("fsdp",))
    return (_constrain_layer(gradient, ()),)


_gather.defvjp(lambda layer: (_gather(layer), None), _gather_backward)


def _constrain_layer(layer: Any, skip: Sequence[str]) -> Any:
    mesh = jax.sharding.get_abstract_mesh()

    def leaf(path: tuple, x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, layout_of(f"blocks/0/{leaf_name(path)}", x.shape, mesh, skip).spec)

    return jax.tree.map_with_path(leaf, layer)


def parameter_path(path: tuple) -> str:
    """Return ``blocks/attn/q`` from the key path of a leaf inside a model; "" outside of one."""
    _, inside, parameter = f"/{leaf_name(path)}".rpartition("/weights/")
    return parameter if inside else ""


def leaf_name(path: tuple) -> str:
    """Return a leaf's key path as text; of an attached adapter's factors that of the weight, and the factor."""
    name = jax.tree_util.keystr(path, simple=True, separator="/").removesuffix("/value")
    return name.replace("adapter/weights/", "")


def only_shapes(mesh: Any) -> bool:
    """Whether the mesh is abstract (``mesh.abstract_mesh``): what is loaded for it are shapes, and no weights."""
    return isinstance(mesh, AbstractMesh)


def from_parts(
    shape: tuple[int, ...], dtype: Any, layout: NamedSharding, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array | jax.ShapeDtypeStruct:
    """Make a global array of the parts that ``read`` returns, one at a time; on an abstract mesh only its shape. Each
    process reads only the parts of its own devices; a part that several of them have is read once. ``read`` takes a
    part's place (slices with start and stop); its values are copied, so the memory may be anyone's.
    """
    if only_shapes(layout.mesh):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=layout)
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


def lay_out(tree: Any, layout: Any) -> Any:
    """Turn host values that are equal on every process into global arrays, or into shapes on an abstract mesh.
    ``layout``: a sharding for all of them, or a tree of shardings. ``jax.device_put`` would first compare the values
    across the processes, in one program per shape.
    """
    layout = jax.tree.broadcast(layout, tree)
    if only_shapes(jax.tree.leaves(layout)[0].mesh):
        return as_shapes(tree, layout)
    if jax.process_count() == 1:
        return jax.device_put(tree, layout)

    def spread(x: Any, layout: Any) -> jax.Array:
        return jax.make_array_from_callback(np.shape(x), layout, lambda index: np.asarray(np.asarray(x)[index]))

    return jax.tree.map(spread, tree, layout)


def bytes_per_device(tree: Any) -> int:
    """Return the bytes of these arrays on one device, without padding of their layout."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def as_shapes(tree: Any, layout: Any) -> Any:
    """Return the shapes and dtypes of a tree with a tree of shardings, without arrays."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layout)


@jax.jit
def weight_checksums(model: Any, first: Any = 0) -> Any:
    """Return a 64-bit checksum, uint32[2], of every weight; the sharding of the weights does not change it. Each
    element's bits are mixed with its place and added up modulo 2 ** 32, which no order of summation changes. Those of
    parts of a stack, which begin at layer ``first``, add up to the stack's.
    """
    return jax.tree.map(functools.partial(_checksum, first=first), model)


def checksums_by_name(model: Any) -> dict[str, jax.Array]:
    """Return the ``weight_checksums`` of a model by parameter path."""
    return {parameter_path(path): x for path, x in jax.tree.leaves_with_path(weight_checksums(model))}


def weights_digest(model: Any) -> str:
    """Return 16 hexadecimal digits that identify the weights; results computed from a model are stored under them."""
    return digest_of_checksums(checksums_by_name(model))


def digest_of_checksums(checksums: dict[str, jax.Array]) -> str:
    """Return the ``weights_digest`` of a model with these checksums, by parameter path."""
    paths = sorted(checksums, key=lambda path: path.split("/"))
    return digest_of_parts(jax.device_get([checksums[path] for path in paths]))


def _checksum(x: jax.Array, first: Any) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}")).astype(jnp.uint32)
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        place += jnp.uint32(0 if axis else first)
    sums = [
        jnp.sum(_mix_bits(_mix_bits(place + jnp.uint32(seed)) ^ bits), dtype=jnp.uint32) for seed in (1, 0x9E3779B9)
    ]
    return jnp.stack(sums)


def _mix_bits(x: jax.Array) -> jax.Array:
    """Apply a bijection of uint32 in which every input bit moves half of the output bits (MurmurHash3's finaliser)."""
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> jnp.uint32(13))) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))
