"""What a step's programs send, by formula: where nothing is compiled, and to rank meshes before compiling."""

import numpy as np

from jaxrl_llm.config import Configuration
from jaxrl_llm.plan.arrays import Arrays, Learned, Reading, SamplingArrays, bytes_per_device, width_of
from jaxrl_llm.plan.formulas import REMAT_PASSES, Work
from jaxrl_llm.plan.hlo import Collective
from jaxrl_llm.plan.network import Places, Traffic, by_kind, traffic

Groups = tuple[np.ndarray, np.ndarray, np.ndarray]
"""The partitions that differ along data, fsdp and tensor only."""


def groups(sizes: tuple[int, int, int], axis: int) -> np.ndarray:
    """int[groups, members]: the partitions that differ along one axis of the mesh only."""
    return np.moveaxis(np.arange(np.prod(sizes)).reshape(sizes), axis, -1).reshape(-1, sizes[axis])


def by_formula(
    run: Configuration, arrays: Arrays, work: Work, sizes: tuple[int, int, int], where: Places
) -> dict[str, tuple[Traffic, ...]]:
    """One call of each program: weights gathered over fsdp, gradients summed over data, activations over tensor."""
    axes = groups(sizes, 0), groups(sizes, 1), groups(sizes, 2)
    parts = sizes[0] * sizes[1]
    rows = work.rows * work.row_tokens / parts / max(work.microbatches, 1)
    sent: dict[str, list[Collective]] = {}
    if isinstance(arrays, SamplingArrays):
        rollout = arrays.rollout
        config = arrays.sampled.config
        width = arrays.slots.cache.k.dtype.itemsize
        summed = Collective(
            "all-reduce", rollout.slots / parts * config.width * width, axes[2], 2 * config.layers * rollout.chunk
        )
        sent = {
            "weights": [Collective("all-gather", bytes_per_device(arrays.sampled), axes[1], 1)],
            "decode": [summed],
        }
    policy = arrays.learned[0]
    sent["score"] = _passed(policy, work.microbatches, rows, axes)
    for one in arrays.readings:
        each = one.forward.layout
        sent[one.asked.name] = _passed(one, one.microbatches, each.rows * each.row_tokens / each.parts, axes)
    for one in arrays.learned:
        sent[one.program] = _updated(one, work.microbatches, rows, axes, 2 + REMAT_PASSES[run.learner.remat])
    return {
        name: by_kind(traffic(one, where) for one in several if one.groups.shape[1] > 1)
        for name, several in sent.items()
    }


def _passed(one: Learned | Reading, microbatches: int, tokens: float, axes: Groups) -> list[Collective]:
    """A forward pass: weights gathered for each microbatch, activations of so many tokens summed."""
    config = one.model.config
    size = tokens * config.width * width_of(one)
    return [
        Collective("all-gather", bytes_per_device(one.gathered), axes[1], microbatches),
        Collective("all-reduce", size, axes[2], 2 * config.layers * microbatches),
    ]


def _updated(one: Learned, microbatches: int, tokens: float, axes: Groups, passes: float) -> list[Collective]:
    """An update: so many passes beside the first one, and the sums of gradients."""
    weights, activations = _passed(one, microbatches, tokens, axes)
    return [
        Collective("all-gather", weights.size, axes[1], passes * microbatches),
        Collective("reduce-scatter", weights.size, axes[1], microbatches),
        Collective("all-reduce", bytes_per_device(one.role.params), axes[0], microbatches),
        Collective("all-reduce", activations.size, axes[2], (1 + passes) * activations.times),
    ]
