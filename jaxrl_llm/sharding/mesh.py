"""The device mesh: axes ``data``, ``fsdp`` and ``expert`` divide the batch, ``fsdp`` and ``tensor`` all weights, and
``expert`` those of experts. A mesh has the axis ``expert`` only if it is larger than 1.

Several slices (groups of devices with a fast network of their own) are arranged along ``data``: each has whole copies
of the weights, and only sums of gradients cross the slow network between them.
"""

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.errors import InputError, require

AXES = ("data", "fsdp", "expert", "tensor")
BATCH = ("data", "fsdp", "expert")
"""The axes that divide the rows of a batch."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """The number of devices on each axis; at most one of them may be -1, which takes the rest.

    Attributes:
      data: copies of the weights, in each slice.
      fsdp: parts of the weights, gathered when used; also divides the batch.
      tensor: parts of every matrix product (heads, MLP width).
      rollout: devices that only sample, the last ones; 0 samples where it learns.
      slices: groups of devices that only a slow network joins (TPU slices, or GPU nodes); no weight is divided across
        them.
      expert: parts of the experts, each on devices of its own; also divides the batch, and each layer's tokens are
        gathered over it.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    rollout: int = 0
    slices: int = 1
    expert: int = 1

    def sizes(self, devices: int) -> dict[str, int]:
        """Return the axis sizes by name for this many devices: data over all slices, without the sampling devices.

        Raises:
          InputError: they do not fit.
        """
        if not 0 <= self.rollout < devices:
            raise InputError(f"mesh.rollout must be from 0 to {devices - 1} with {devices} devices, got {self.rollout}")
        devices -= self.rollout
        if self.slices < 1 or devices % self.slices:
            raise InputError(f"mesh.slices must divide the {devices} devices that learn, got {self.slices}")
        devices //= self.slices
        sizes = zip(AXES, (self.data, self.fsdp, self.expert, self.tensor), strict=True)
        given = {axis: size for axis, size in sizes if (axis, size) != ("expert", 1)}
        said = f"{', '.join(given)} = {tuple(given.values())}"
        counts = list(given.values())
        known = math.prod(size for size in counts if size > 0)
        if counts.count(-1) > 1 or any(size == 0 or size < -1 for size in counts):
            raise InputError(f"mesh sizes must be positive, one of them may be -1: got {said}")
        rest = devices // known
        sizes = {axis: rest if size == -1 else size for axis, size in given.items()}
        if math.prod(sizes.values()) != devices:
            where = "devices" if self.slices == 1 else "devices of a slice"
            remedy = f"the others must divide {devices}" if -1 in counts else "set one of them to -1"
            raise InputError(f"mesh {said} does not fit {devices} {where}: {remedy}")
        return sizes | {"data": sizes["data"] * self.slices}

    def sampling_sizes(self, devices: int, slices: int = 1) -> dict[str, int]:
        """Return the sizes of the sampling mesh, as ``sizes`` does; its devices are in this many slices."""
        sizes = self.sizes(devices)
        if not self.rollout:
            return sizes
        tensor = math.gcd(sizes["tensor"], self.rollout // slices)
        return dict.fromkeys(sizes, 1) | {"data": self.rollout // tensor, "tensor": tensor}


COMPUTES = {
    "jax_enable_x64": (False,),
    "jax_threefry_partitionable": (True,),
    "jax_default_prng_impl": ("threefry2x32",),
    "jax_random_seed_offset": (0,),
    "jax_high_dynamic_range_gumbel": (False,),
    "jax_transfer_guard": ("allow", "log", None),
}
"""Settings of JAX, with the values that our programs are made for: with others they compute other numbers, or fail."""


def all_devices() -> list[Any]:
    """Return the devices of all processes.

    Raises:
      InputError: JAX_PLATFORMS names devices that are not there, or the environment sets one of ``COMPUTES`` otherwise.
    """
    for name, usual in COMPUTES.items():
        value = getattr(jax.config, name, usual[0])
        require(value in usual, f"{name.upper()}={value} gives other numbers, or none: unset it, or set {usual[0]}")
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that there is a driver
        if str(error) and "initialize backend" not in str(error):
            raise
        asked, reason = os.environ.get("JAX_PLATFORMS", ""), str(error).partition(" (set JAX")[0] or "no driver"
        raise InputError(f"JAX_PLATFORMS={asked} finds no device ({reason}): unset it, or set it to cpu") from None


def make_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Make the learner's mesh: all devices of all processes (or these), except for those that only sample.

    Raises:
      InputError: the shape does not fit the devices, or would divide weights across slices.
    """
    devices = list(all_devices() if devices is None else devices)
    sizes = shape.sizes(len(devices))
    return _mesh(sizes, devices[: math.prod(sizes.values())], shape.slices)


def rollout_mesh(shape: MeshShape, devices: Sequence[Any] | None = None) -> Mesh:
    """Make the sampler's mesh: of the devices set aside for it, or else the learner's.

    Heads are divided as the learner's are.
    """
    if not shape.rollout:
        return make_mesh(shape, devices)
    devices = list(all_devices() if devices is None else devices)
    apart = devices[-shape.rollout :]
    slices = len(_by_slice(apart))
    return _mesh(shape.sampling_sizes(len(devices), slices), apart, slices)


def head_copies(kv_heads: int, tensor: int | None = None) -> int:
    """Return the number of copies of each key/value head with which ``tensor`` devices divide them all evenly.

    ``tensor``: None for the size on the mesh set by ``jax.set_mesh``, which is 1 without a mesh.
    """
    if tensor is None:
        mesh = jax.sharding.get_abstract_mesh()
        tensor = 1 if mesh.empty else mesh.shape["tensor"]
    return tensor // math.gcd(kv_heads, tensor)


def repeated_heads(kv_heads: int, tensor: int) -> list[str]:
    """Return a note if ``tensor`` devices hold copies of the heads of a key/value cache, since they are too many."""
    copies = head_copies(kv_heads, tensor)
    if copies == 1:
        return []
    return [
        f"mesh.tensor {tensor} does not divide the model's {kv_heads} key/value heads: the cache holds each of them "
        f"{copies} times; mesh.tensor {tensor // copies} and a larger mesh.fsdp hold it once"
    ]


def _mesh(sizes: Mapping[str, int], devices: list[Any], slices: int) -> Mesh:
    """Make a mesh with slices along its first axis; the other axes stay inside a slice."""
    found = _by_slice(devices)
    if len(found) > 1 and (len(found) != slices or len({len(part) for part in found}) > 1):
        sizes_found = ", ".join(str(len(part)) for part in found)
        raise InputError(
            f"the devices are in slices of {sizes_found}: set mesh.slices to {len(found)}, and mesh.rollout so that as "
            "many of each slice learn"
        )
    size = len(devices) // slices
    parts = found if len(found) > 1 else [devices[i : i + size] for i in range(0, len(devices), size)]
    inside = {**sizes, "data": sizes["data"] // slices}
    shape = tuple(inside.values())
    names = tuple(sizes)
    kinds = (AxisType.Auto,) * len(sizes)
    arranged = []
    for part in parts:
        try:  # devices with coordinates: neighbours along each axis are near each other
            arranged.append(jax.make_mesh(shape, names, devices=part, axis_types=kinds).devices)
        except NotImplementedError:  # the axes do not multiply to the torus' sides: let two of them share a side
            arranged.append(mesh_utils.create_device_mesh(shape, part, allow_split_physical_axes=True))
    return Mesh(np.concatenate(arranged), names, axis_types=kinds)


def _by_slice(devices: list[Any]) -> list[list[Any]]:
    numbers = [getattr(device, "slice_index", 0) for device in devices]
    return [[d for d, n in zip(devices, numbers, strict=True) if n == number] for number in sorted(set(numbers))]


def batch_parts(mesh: Mesh | AbstractMesh | Mapping[str, int]) -> int:
    """Return the number of parts into which a mesh, or one of these sizes, divides a batch."""
    sizes = mesh if isinstance(mesh, Mapping) else mesh.shape
    return math.prod(sizes.get(axis, 1) for axis in BATCH)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Return "cpu", "gpu" or "tpu", also for a mesh of described devices; "" if they have no description."""
    if isinstance(mesh, AbstractMesh):
        return "" if mesh.abstract_device is None else mesh.abstract_device.platform
    return mesh.devices.flat[0].platform


def memory_of(mesh: Mesh | AbstractMesh) -> float:
    """Return the bytes that a program may use on each device; infinite if unknown: for CPUs and described devices.

    Devices of other processes are assumed to equal this one's.
    """
    if isinstance(mesh, AbstractMesh):
        return math.inf
    own = set(jax.local_devices())
    here = next((device for device in mesh.devices.flat if device in own), None)
    stats = here and here.memory_stats()
    return stats.get("bytes_limit", math.inf) if stats else math.inf


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the layout with a copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
    """Constrain the layout of x inside jit, on the mesh set by ``jax.set_mesh``.

    Without a mesh x is returned unchanged; an axis that does not divide its dimension leaves it whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, fitting(x.shape, spec, mesh))


def fitting(shape: tuple[int, ...], spec: Any, mesh: Any) -> PartitionSpec:
    """Return ``spec`` without axes that the mesh lacks, or that do not divide their dimension (9 heads on 2 devices),
    dropping the last first."""
    found = []
    for size, axis in zip(shape, spec, strict=False):
        names = tuple(name for name in ((axis,) if isinstance(axis, str) else axis or ()) if name in mesh.shape)
        while names and size % math.prod(mesh.shape[name] for name in names):
            names = names[:-1]
        found.append(names[0] if len(names) == 1 else names or None)
    return PartitionSpec(*found)
