"""The device mesh: axes ``data`` and ``fsdp`` divide the batch, ``fsdp`` and ``tensor`` divide the weights."""

import dataclasses
import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.errors import InputError

BATCH = ("data", "fsdp")
"""The axes over which rows of a batch are divided."""


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """How many devices each axis has; at most one may be -1, which takes what is left.

    Attributes:
      data: copies of the weights.
      fsdp: parts of the weights, gathered when used; also divides the batch.
      tensor: parts of every matrix product (heads, MLP width).
      rollout: devices that only sample, the last ones; 0 samples where it learns.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    rollout: int = 0

    def sizes(self, devices: int) -> tuple[int, int, int]:
        """The three axis sizes for this many devices, those for sampling left out; InputError where they do not fit."""
        if not 0 <= self.rollout < devices:
            raise InputError(f"mesh.rollout must be from 0 to {devices - 1} with {devices} devices, got {self.rollout}")
        devices -= self.rollout
        given = (self.data, self.fsdp, self.tensor)
        known = math.prod(size for size in given if size > 0)
        if given.count(-1) > 1 or any(size == 0 or size < -1 for size in given):
            raise InputError(f"mesh sizes must be positive, one of them may be -1: got data, fsdp, tensor = {given}")
        rest = devices // known
        sizes = tuple(rest if size == -1 else size for size in given)
        if math.prod(sizes) != devices:
            raise InputError(f"mesh data, fsdp, tensor = {given} does not fit {devices} devices: set one of them to -1")
        return sizes


def make_mesh(shape: MeshShape) -> Mesh:
    """The learner's mesh: all devices of all processes but those that only sample."""
    sizes = shape.sizes(jax.device_count())
    return _mesh(sizes, jax.devices()[: math.prod(sizes)])


def rollout_mesh(shape: MeshShape) -> Mesh:
    """The sampler's mesh: the devices set aside for it, or else the learner's. Its heads are divided as the learner's are."""
    if not shape.rollout:
        return make_mesh(shape)
    tensor = math.gcd(shape.sizes(jax.device_count())[2], shape.rollout)
    return _mesh((shape.rollout // tensor, 1, tensor), jax.devices()[-shape.rollout :])


def _mesh(sizes: tuple[int, ...], devices: list[jax.Device]) -> Mesh:
    return jax.make_mesh(sizes, ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3, devices=devices)


def batch_parts(mesh: Mesh) -> int:
    """Into how many parts the mesh divides a batch."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *spec: str | tuple[str, ...] | None) -> jax.Array:
    """Ask for a layout inside jit, on the mesh set by ``jax.set_mesh``.

    Without a mesh x is returned as it is; an axis that does not divide its dimension leaves it whole.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, fitting(x.shape, spec, mesh))


def fitting(shape: tuple[int, ...], spec: Any, mesh: Any) -> PartitionSpec:
    """``spec`` without the axes that do not divide their dimension of ``shape`` (9 heads on 2 devices)."""
    parts = [math.prod(mesh.shape[name] for name in ((axis,) if isinstance(axis, str) else axis or ())) for axis in spec]
    return PartitionSpec(*(a if size % n == 0 else None for a, n, size in zip(spec, parts, shape, strict=False)))
