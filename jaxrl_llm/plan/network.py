"""Duration of transfers: over the links of a slice or host (ICI), and between them (DCN); also by formula."""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxrl_llm.config import Configuration
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.plan.hlo import Collective, Traffic
from jaxrl_llm.plan.machines import Machine
from jaxrl_llm.plan.roofline import REMAT_PASSES, Work
from jaxrl_llm.plan.shapes import Arrays, PlannedModel, SamplingArrays, bytes_per_device
from jaxrl_llm.sharding import batch_parts


@dataclasses.dataclass(frozen=True)
class Places:
    """The location of each partition of a program.

    Attributes:
      machine: the machine of the partitions.
      slices: int[partitions], the slice or host of each.
      coordinates: int[partitions, dimensions] in the torus; no columns where a switch links all.
    """

    machine: Machine
    slices: np.ndarray
    coordinates: np.ndarray


def places(machine: Machine, devices: Iterable[Any] | None = None) -> Places:
    """Return the places of described devices, in the order of a program's partitions; without them, GPUs by host."""
    if devices is None:
        return Places(machine, np.arange(machine.devices) // machine.shape[1], np.zeros((machine.devices, 0), int))
    devices = list(devices)
    if machine.chip.platform == "gpu":
        return Places(machine, np.array([d.process_index for d in devices]), np.zeros((len(devices), 0), int))
    slices = np.array([getattr(d, "slice_index", 0) or 0 for d in devices])
    return Places(machine, slices, np.array([d.coords[: len(machine.shape)] for d in devices]))


def traffic(collective: Collective, where: Places) -> Traffic:
    """Return the traffic of all runs of one collective.

    Between slices it is assumed hierarchical: each device of a slice sends its share out, and the rest stays inside.
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
    """Return the number of links that a device can use at once: two along each closed axis of its group's torus."""
    permutes = collective.kind == "collective-permute"
    coordinates = where.coordinates[np.unique(collective.groups if permutes else collective.groups[:1])]
    wrap = where.machine.chip.wrap
    links = 0.0
    for axis in range(coordinates.shape[1]):
        if len(np.unique(coordinates[:, axis])) > 1:
            links += 2.0 if wrap and where.machine.shape[axis] % wrap == 0 else 1.0
    links = links or 1.0
    return min(links, 2.0) if permutes else links


def by_kind(all_of: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Add up traffic by kind, largest first."""
    rows = collections.defaultdict(list)
    for one in all_of:
        rows[one.kind].append(dataclasses.astuple(one)[1:])
    sums = (Traffic(kind, *map(sum, zip(*own, strict=True))) for kind, own in rows.items())
    return tuple(sorted(sums, key=lambda t: -(t.ici + t.dcn)))


def traffic_by_formula(
    run: Configuration, arrays: Arrays, work: Work, sizes: Mapping[str, int], where: Places
) -> dict[str, tuple[Traffic, ...]]:
    """Estimate the traffic of one call of each program, without compiling.

    Weights are gathered over fsdp, gradients summed over data, activations over tensor, and tokens gathered and their
    sums scattered over expert.
    """
    partitions = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    # Groups of partitions by mesh axis, int[groups, members]: the members of a group differ along this axis only.
    axes = {name: np.moveaxis(partitions, i, -1).reshape(-1, sizes[name]) for i, name in enumerate(sizes)}
    sent: dict[str, list[Collective]] = {}
    if isinstance(arrays, SamplingArrays):
        rollout = arrays.sampler.rollout
        config = arrays.sampled.config
        width = arrays.slots.cache.k.dtype.itemsize
        slots = rollout.engine.slots / batch_parts(sizes)
        steps = config.layers * rollout.engine.chunk
        sent["weights"] = [Collective("all-gather", bytes_per_device(arrays.sampled), axes["fsdp"], 1)]
        sent["decode"] = [
            Collective("all-reduce", slots * config.width * width, axes["tensor"], 2 * steps),
            *exchanged(config, slots, width, axes, steps),
        ]
    sent["score"] = _passed(arrays.learned[0], work.microbatches, axes)
    for one in arrays.readings:
        sent[one.name] = _passed(one, one.microbatches, axes)
    for one in arrays.learned:
        # ``passes`` passes after the first one, and the sums of gradients.
        passes = 2 + REMAT_PASSES[run.learner.compute.remat]
        weights, activations, *tokens = _passed(one, work.microbatches, axes)
        sent[one.name] = [
            Collective("all-gather", weights.size, axes["fsdp"], passes * work.microbatches),
            Collective("reduce-scatter", weights.size, axes["fsdp"], work.microbatches),
            Collective("all-reduce", bytes_per_device(one.role.params), axes["data"], work.microbatches),
            Collective("all-reduce", activations.size, axes["tensor"], (1 + passes) * activations.times),
            *(dataclasses.replace(one, times=passes * one.times) for one in tokens),
        ]
    return {
        name: by_kind(traffic(one, where) for one in several if one.groups.shape[1] > 1)
        for name, several in sent.items()
    }


def _passed(one: PlannedModel, microbatches: int, axes: Mapping[str, np.ndarray]) -> list[Collective]:
    """Return the collectives of a forward pass: weights gathered, activations summed, and what experts exchange, in
    each microbatch."""
    config = one.model.config
    layout = one.forward.layout
    tokens = layout.rows * layout.row_tokens / layout.parts
    times = config.layers * microbatches
    return [
        Collective("all-gather", bytes_per_device(one.gathered), axes["fsdp"], microbatches),
        Collective("all-reduce", tokens * config.width * one.width, axes["tensor"], 2 * times),
        *exchanged(config, tokens, one.width, axes, times),
    ]


def exchanged(
    config: ModelConfig, tokens: float, width: int, axes: Mapping[str, np.ndarray], times: float
) -> list[Collective]:
    """Return what devices with different experts exchange for ``tokens`` of each; backward passes send as much.

    Hidden states of ``width`` bytes a number are gathered with weights and numbers of experts; sums are float32.
    """
    if config.experts is None or "expert" not in axes:
        return []
    both = tokens * axes["expert"].shape[1]
    gathered = config.width * width + 8 * config.experts.active
    return [
        Collective("all-gather", both * gathered, axes["expert"], times),
        Collective("reduce-scatter", both * config.width * 4, axes["expert"], times),
    ]
