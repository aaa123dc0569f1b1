"""What a step's programs send, by formula: where nothing is compiled, and to rank meshes before compiling."""

import numpy as np

from jaxrl_llm.config import Run
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.plan.arrays import Arrays, bytes_per_device
from jaxrl_llm.plan.formulas import REMAT_PASSES, Work
from jaxrl_llm.plan.hlo import Collective
from jaxrl_llm.plan.network import Places, Traffic, by_kind, traffic


def groups(sizes: tuple[int, int, int], axis: int) -> np.ndarray:
    """int[groups, members]: the partitions that differ along one axis of the mesh only."""
    return np.moveaxis(np.arange(np.prod(sizes)).reshape(sizes), axis, -1).reshape(-1, sizes[axis])


def by_formula(
    run: Run, config: ModelConfig, arrays: Arrays, work: Work, sizes: tuple[int, int, int], where: Places
) -> dict[str, tuple[Traffic, ...]]:
    """One call of each program: weights gathered over fsdp, gradients summed over data, activations over tensor."""
    data, fsdp, tensor = (groups(sizes, axis) for axis in range(3))
    sampled = bytes_per_device(arrays.sampled)
    policy = bytes_per_device(arrays.state.policy.params)
    width = arrays.slots.cache.k.dtype.itemsize
    rows = work.rows * work.row_tokens / (sizes[0] * sizes[1]) / max(work.microbatches, 1)
    passes = 2 + REMAT_PASSES[run.learner.remat]
    M = work.microbatches

    def summed(tokens: float, times: float) -> Collective:
        return Collective("all-reduce", tokens * config.width * width, tensor, 2 * config.layers * times)

    def gather(times: float) -> Collective:
        return Collective("all-gather", sampled, fsdp, times)

    slots = run.rollout.slots / (sizes[0] * sizes[1])
    sent = {
        "weights": [gather(1)],
        "decode": [summed(slots, run.rollout.chunk)],
        "score": [gather(M), summed(rows, M)],
        "update": [
            gather(passes * M), Collective("reduce-scatter", sampled, fsdp, M),
            Collective("all-reduce", policy, data, M),
            summed(rows, (1 + passes) * M),
        ],
    }  # fmt: skip
    return {
        name: by_kind(traffic(one, where) for one in several if one.groups.shape[1] > 1)
        for name, several in sent.items()
    }
