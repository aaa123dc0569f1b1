"""The least time of a step: for each of its parts the slowest of computing, reading memory and sending."""

import dataclasses
import math
from typing import NamedTuple

from jaxrl_llm.config import Configuration
from jaxrl_llm.engine.blocks import power_of_two
from jaxrl_llm.plan.arrays import Arrays, Learned, Reading, SamplingArrays, bytes_per_device, share_of, width_of
from jaxrl_llm.plan.formulas import (
    REMAT_PASSES,
    Work,
    counts,
    forward_flops,
    packed_flops,
    update_flops,
    visible_pairs,
)
from jaxrl_llm.plan.machines import Chip
from jaxrl_llm.plan.network import Traffic
from jaxrl_llm.plan.sampler import prompt_calls


class Cost(NamedTuple):
    """What one call of a program costs one device.

    Attributes:
      flops: that it runs.
      bytes: that it reads and writes.
      samples: whether it belongs to the half that samples.
      learns: whether it updates a role.
    """

    flops: float
    bytes: float
    samples: bool = False
    learns: bool = False


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of the step on one device; computing, reading and sending may overlap, so the slowest decides.

    Attributes:
      name: "weights", "prompts", "decode", "score", "update", or that of another role or of a pass.
      calls: of its program in a step.
      flops: of one device, in all calls.
      bytes: that one device reads and writes, in all calls.
      traffic: that it sends, in all calls.
      compute_s: at the peak of matrix products.
      memory_s: at the peak of its memory.
      ici_s: inside a slice or host.
      dcn_s: between them.
      samples: whether it belongs to the half that samples.
      learns: whether it updates a role.
    """

    name: str
    calls: float
    flops: float
    bytes: float
    traffic: tuple[Traffic, ...]
    compute_s: float
    memory_s: float
    ici_s: float
    dcn_s: float
    samples: bool = False
    learns: bool = False

    @property
    def seconds(self) -> float:
        """At least."""
        return max(self.compute_s, self.memory_s, self.ici_s + self.dcn_s)

    @property
    def binds(self) -> str:
        """What decides."""
        times = {"compute": self.compute_s, "memory": self.memory_s, "ICI": self.ici_s, "DCN": self.dcn_s}
        network = max(("ICI", "DCN"), key=times.__getitem__)
        return network if self.seconds == self.ici_s + self.dcn_s else max(("compute", "memory"), key=times.__getitem__)


def phase(name: str, chip: Chip, calls: float, cost: Cost, traffic: tuple[Traffic, ...]) -> Phase:
    """A phase with its times; ``cost`` and ``traffic`` are of one call."""
    sent = tuple(t.times(calls) for t in traffic)
    flops = cost.flops * calls
    moved = cost.bytes * calls
    return Phase(
        name, calls, flops, moved, sent, flops / chip.flops, moved / chip.bandwidth, sum(t.ici_s for t in sent),
        sum(t.dcn_s for t in sent), cost.samples, cost.learns,
    )  # fmt: skip


def phases(
    run: Configuration, arrays: Arrays, work: Work, chip: Chip, parts: int, sent: dict[str, tuple[Traffic, ...]]
) -> list[Phase]:
    """The parts of a step on one device; those that a step never calls are left out.

    Args:
      run: resolved.
      arrays: its.
      work: of a step.
      chip: its peaks.
      parts: into which rows of a batch are divided.
      sent: what one call of each program sends.
    """
    updates = {
        held.program: (
            held.training.passes(run.learner) * run.learner.minibatches, update_cost(arrays, held, work, parts)
        )
        for held in arrays.learned
    }  # fmt: skip
    scores = work.score_passes * run.learner.minibatches
    found = sampling_phases(arrays, work) if isinstance(arrays, SamplingArrays) else {}
    for reading in arrays.readings:
        found[reading.asked.name] = reading.asked.calls, reading_cost(reading)
    found["score"] = scores, score_cost(arrays.learned[0], work, parts)
    return [
        phase(name, chip, calls, cost, sent.get(name, ())) for name, (calls, cost) in (found | updates).items() if calls
    ]


def sampling_phases(arrays: SamplingArrays, work: Work) -> dict[str, tuple[float, Cost]]:
    """The calls and cost of the programs that sample; slots are always full, and wait for the longest only at the
    end."""
    rollout = arrays.rollout
    parts = arrays.slot_shape.parts
    rows, _, calls = prompt_calls(rollout.max_prompt_tokens, parts)
    waves = max(work.completions / rollout.slots, 1.0)
    policy = arrays.state.policy
    moved = bytes_per_device((policy.params, policy.base)) + bytes_per_device(arrays.sampled)
    return {
        "weights": (1.0, Cost(0.0, moved, True)),
        "prompts": (math.ceil(rollout.prompts / rows) * calls, prompts_cost(arrays)),
        "decode": (math.ceil(waves * work.mean / rollout.chunk), decode_cost(arrays, work)),
    }


def prompts_cost(arrays: SamplingArrays) -> Cost:
    """Of one call."""
    config = arrays.sampled.config
    parts = arrays.slot_shape.parts
    rows, piece, calls = prompt_calls(arrays.rollout.max_prompt_tokens, parts)
    pairs = visible_pairs(config, 0, piece * calls) / calls
    flops = forward_flops(config, piece, pairs, 0) * rows / parts * share_of(arrays.sampled)
    return Cost(flops, bytes_per_device(arrays.sampled), True)


def decode_cost(arrays: SamplingArrays, work: Work) -> Cost:
    """Of one chunk, averaged over the lengths of the cache as it grows."""
    rollout = arrays.rollout
    config = arrays.sampled.config
    shape = arrays.slot_shape
    slots = rollout.slots / shape.parts
    pairs = config.layers * (rollout.max_prompt_tokens + work.mean / 2)
    flops = forward_flops(config, 1, pairs, 1) * slots * share_of(arrays.sampled)
    columns = mean_columns(work.mean, rollout.chunk, shape.columns)
    prompts = min(slots / shape.group * 2, slots)  # some groups end while others begin
    blocks = bytes_per_device(arrays.slots.blocks) * prompts * shape.parts / shape.blocks
    moved = bytes_per_device(arrays.sampled) + bytes_per_device(arrays.slots.cache) * columns / shape.columns + blocks
    return Cost(flops * rollout.chunk, moved * rollout.chunk, True)


def mean_columns(length: int, chunk: int, most: int) -> float:
    """Columns that a chunk reads, on average while all slots grow together: the next power of two of what is there."""
    steps = range(0, length, chunk)
    return sum(min(power_of_two(at + chunk), most) for at in steps) / len(steps)


def score_cost(policy: Learned, work: Work, parts: int) -> Cost:
    """One forward pass over one update's data."""
    compute = policy.forward.compute
    flops = packed_flops(policy.config, compute.attention, work.rows, work.row_tokens)
    flops += forward_flops(policy.config, 0, 0, work.predictions)
    size = bytes_per_device(policy.gathered)
    return Cost(flops * share_of(policy.gathered) / parts, work.microbatches * 2 * size)


def reading_cost(one: Reading) -> Cost:
    """One call of a pass."""
    layout = one.forward.layout
    config = one.model.config
    flops = packed_flops(config, one.forward.compute.attention, one.microbatches * layout.rows, layout.row_tokens)
    if one.predicts:
        flops += forward_flops(config, 0, 0, sum(len(sample.tokens) for sample in one.asked.samples))
    moved = one.microbatches * 2 * bytes_per_device(one.gathered)
    return Cost(flops * share_of(one.gathered) / layout.parts, moved, one.asked.copies > 0)


def update_cost(arrays: Arrays, held: Learned, work: Work, parts: int) -> Cost:
    """One optimiser update of a role: for each microbatch weights are written and read in each pass, and activations
    moved."""
    config = held.config
    compute = held.forward.compute
    share = share_of(held.gathered)
    width = width_of(held)
    passes = 3 + REMAT_PASSES[compute.remat]
    tokens = work.rows * work.row_tokens / parts
    a = config.attention
    layer = 16 * config.width + (6 * (a.heads + a.kv_heads) * a.head_dim + 8 * config.mlp_width) * share
    weights = counts(config).total * width * share
    role = arrays.state.roles[held.training.role]
    state = bytes_per_device(role.params) + bytes_per_device(role.opt_state)
    gradients = bytes_per_device(role)
    moved = (
        work.microbatches * (2 * passes * weights + 2 * gradients)
        + tokens * config.layers * layer * width * passes
        + 2 * state
    )
    return Cost(update_flops(work, held) * share / parts, moved, learns=True)
