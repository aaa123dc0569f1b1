"""How long transfers take: over the links of a slice or host (ICI), and between them (DCN)."""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxrl_llm.plan.hlo import Collective
from jaxrl_llm.plan.machines import Machine


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Transfers of one kind.

    Attributes:
      kind: as in the program.
      count: how many.
      ici: bytes that a device sends inside its slice or host.
      dcn: bytes that it sends out of it.
      ici_s: seconds that the first take at best.
      dcn_s: seconds that the second take at best.
    """

    kind: str
    count: float = 0.0
    ici: float = 0.0
    dcn: float = 0.0
    ici_s: float = 0.0
    dcn_s: float = 0.0

    def __add__(self, other: "Traffic") -> "Traffic":
        pairs = zip(dataclasses.astuple(self)[1:], dataclasses.astuple(other)[1:], strict=True)
        return Traffic(self.kind, *(a + b for a, b in pairs))

    def times(self, repeats: float) -> "Traffic":
        """The same, so often."""
        return Traffic(self.kind, *(x * repeats for x in dataclasses.astuple(self)[1:]))


@dataclasses.dataclass(frozen=True)
class Places:
    """Where each partition of a program is.

    Attributes:
      machine: that they are in.
      slices: int[partitions], the slice or host of each.
      coordinates: int[partitions, dimensions] in the torus; no columns where a switch links all.
    """

    machine: Machine
    slices: np.ndarray
    coordinates: np.ndarray


def places(machine: Machine, devices: Iterable[Any]) -> Places:
    """Of described devices, in the order of a program's partitions."""
    devices = list(devices)
    if machine.chip.platform == "gpu":
        return Places(machine, np.array([d.process_index for d in devices]), np.zeros((len(devices), 0), int))
    dimensions = len(machine.shape)
    return Places(
        machine,
        np.array([getattr(d, "slice_index", 0) or 0 for d in devices]),
        np.array([d.coords[:dimensions] for d in devices]),
    )


def hosts(machine: Machine) -> Places:
    """Of GPUs that nothing describes, counted through their hosts."""
    return Places(machine, np.arange(machine.devices) // machine.shape[1], np.zeros((machine.devices, 0), int))


def traffic(collective: Collective, where: Places) -> Traffic:
    """One collective, all its runs.

    Between slices it is thought hierarchical: each device of a slice sends its share out, and the rest stays inside.
    """
    chip = where.machine.chip
    one = collective.groups[0]
    outside = len(set(where.slices[one].tolist()))
    inside = len(one) // outside if outside > 1 else len(one)
    both = 2 if collective.kind == "all-reduce" else 1
    if collective.kind == "collective-permute":
        crossing = any(len(set(where.slices[pair].tolist())) > 1 for pair in collective.groups)
        ici, dcn = (0.0, collective.size) if crossing else (collective.size, 0.0)
    else:
        ici = collective.size * both * (inside - 1) / inside
        dcn = collective.size / inside * both * (outside - 1) / outside if outside > 1 else 0.0
    links = _links(collective, where) * chip.link
    n = collective.times
    return Traffic(collective.kind, n, n * ici, n * dcn, n * ici / links, n * dcn / chip.network)


def _links(collective: Collective, where: Places) -> float:
    """Links over which a device can send at once: two along each closed axis of the torus of its group."""
    groups = collective.groups if collective.kind == "collective-permute" else collective.groups[:1]
    machine = where.machine
    members = np.unique(groups)
    coordinates = where.coordinates[members]
    if coordinates.shape[1] == 0:
        return 1.0
    axes = [axis for axis in range(coordinates.shape[1]) if len(np.unique(coordinates[:, axis])) > 1]

    def wraps(axis: int) -> bool:
        return machine.chip.wrap > 0 and machine.shape[axis] % machine.chip.wrap == 0

    links = sum(2.0 if wraps(axis) else 1.0 for axis in axes) or 1.0
    return min(links, 2.0) if collective.kind == "collective-permute" else links


def by_kind(all_of: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Added up by kind, largest first."""
    sums: dict[str, Traffic] = {}
    for one in all_of:
        sums[one.kind] = sums[one.kind] + one if one.kind in sums else one
    return tuple(sorted(sums.values(), key=lambda t: -(t.ici + t.dcn)))
