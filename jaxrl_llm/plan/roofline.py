"""The least time of a step: for each of its parts the slowest of computing, reading memory and sending."""

import dataclasses
import math

from jaxrl_llm.config import Run
from jaxrl_llm.engine.blocks import power_of_two
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.plan.arrays import Arrays, bytes_per_device
from jaxrl_llm.plan.formulas import REMAT_PASSES, Work, counts, forward_flops, update_flops, visible_pairs
from jaxrl_llm.plan.machines import Chip
from jaxrl_llm.plan.network import Traffic
from jaxrl_llm.plan.sampler import prompt_calls


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of the step on one device; computing, reading and sending may overlap, so the slowest decides.

    Attributes:
      name: "weights", "prompts", "decode", "score" or "update".
      calls: of its program in a step.
      flops: of one device, in all calls.
      bytes: that one device reads and writes, in all calls.
      traffic: that it sends, in all calls.
      compute_s: at the peak of matrix products.
      memory_s: at the peak of its memory.
      ici_s: inside a slice or host.
      dcn_s: between them.
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


@dataclasses.dataclass(frozen=True)
class Device:
    """One device's share of the work.

    Attributes:
      chip: its peaks.
      share: of every matrix product, by the tensor axis.
      parts: into which rows of a batch are divided.
      slot_parts: into which slots are.
    """

    chip: Chip
    share: float
    parts: int
    slot_parts: int


def phase(name: str, chip: Chip, calls: float, flops: float, moved: float, traffic: tuple[Traffic, ...]) -> Phase:
    """A phase with its times."""
    return Phase(
        name, calls, flops, moved, traffic, flops / chip.flops, moved / chip.bandwidth, sum(t.ici_s for t in traffic),
        sum(t.dcn_s for t in traffic),
    )  # fmt: skip


def calls_of(run: Run, work: Work, parts: int) -> dict[str, float]:
    """How often a step calls each program; slots are always full, and wait for the longest only at the end."""
    rows, _, calls = prompt_calls(run.rollout.max_prompt_tokens, parts)
    waves = max(work.completions / run.rollout.slots, 1.0)
    return {
        "weights": 1.0, "prompts": math.ceil(run.rollout.prompts / rows) * calls,
        "decode": math.ceil(waves * work.mean / run.rollout.chunk),
        "score": work.score_passes * run.learner.minibatches,
        "update": work.updates,
    }  # fmt: skip


def phases(
    run: Run,
    config: ModelConfig,
    arrays: Arrays,
    work: Work,
    device: Device,
    compute: Compute,
    sent: dict[str, tuple[Traffic, ...]],
) -> list[Phase]:
    """The parts of a step; ``sent`` is what one call of each program sends."""
    calls = calls_of(run, work, device.slot_parts)
    costs = {
        "weights": (
            0.0,
            bytes_per_device((arrays.state.policy.params, arrays.state.policy.base)) + bytes_per_device(arrays.sampled),
        ),
        "prompts": prompts_cost(run, config, arrays, device),
        "decode": decode_cost(run, config, arrays, work, device),
        "score": score_cost(config, arrays, work, device, compute),
        "update": update_cost(run, config, arrays, work, device, compute),
    }
    return [
        phase(name, device.chip, calls[name], flops * calls[name], moved * calls[name],
              tuple(t.times(calls[name]) for t in sent.get(name, ())))
        for name, (flops, moved) in costs.items() if calls[name]
    ]  # fmt: skip


def prompts_cost(run: Run, config: ModelConfig, arrays: Arrays, device: Device) -> tuple[float, float]:
    """FLOPs and bytes of one call."""
    rows, piece, calls = prompt_calls(run.rollout.max_prompt_tokens, device.slot_parts)
    pairs = visible_pairs(config, 0, piece * calls) / calls
    flops = forward_flops(config, piece, pairs, 0) * rows / device.slot_parts * device.share
    return flops, bytes_per_device(arrays.sampled)


def decode_cost(run: Run, config: ModelConfig, arrays: Arrays, work: Work, device: Device) -> tuple[float, float]:
    """FLOPs and bytes of one chunk, averaged over the lengths of the cache as it grows."""
    rollout = run.rollout
    shape = arrays.slot_shape
    slots = run.rollout.slots / device.slot_parts
    pairs = config.layers * (rollout.max_prompt_tokens + work.mean / 2)
    flops = forward_flops(config, 1, pairs, 1) * slots * device.share
    columns = mean_columns(work.mean, rollout.chunk, shape.columns)
    prompts = min(slots / shape.group * 2, slots)  # some groups end while others begin
    blocks = bytes_per_device(arrays.slots.blocks) * prompts * device.slot_parts / shape.blocks
    moved = bytes_per_device(arrays.sampled) + bytes_per_device(arrays.slots.cache) * columns / shape.columns + blocks
    return flops * rollout.chunk, moved * rollout.chunk


def mean_columns(length: int, chunk: int, most: int) -> float:
    """Columns that a chunk reads, on average while all slots grow together: the next power of two of what is there."""
    steps = range(0, length, chunk)
    return sum(min(power_of_two(at + chunk), most) for at in steps) / len(steps)


def score_cost(
    config: ModelConfig, arrays: Arrays, work: Work, device: Device, compute: Compute
) -> tuple[float, float]:
    """One forward pass over one update's data."""
    flops = update_flops(config, work, "none", compute.attention) / 3
    return flops * device.share / device.parts, work.microbatches * 2 * bytes_per_device(arrays.sampled)


def update_cost(
    run: Run, config: ModelConfig, arrays: Arrays, work: Work, device: Device, compute: Compute
) -> tuple[float, float]:
    """One optimiser update: for each microbatch weights are written and read in each pass, and activations moved."""
    width = 2 if compute.dtype == "bfloat16" else 4
    passes = 3 + REMAT_PASSES[compute.remat]
    tokens = work.rows * work.row_tokens / device.parts
    a = config.attention
    layer = 16 * config.width + (6 * (a.heads + a.kv_heads) * a.head_dim + 8 * config.mlp_width) * device.share
    weights = counts(config).total * width * device.share
    state = bytes_per_device(arrays.state.policy.params) + bytes_per_device(arrays.state.policy.opt_state)
    gradients = bytes_per_device(arrays.state.policy)
    moved = (
        work.microbatches * (2 * passes * weights + 2 * gradients)
        + tokens * config.layers * layer * width * passes
        + 2 * state
    )
    flops = update_flops(config, work, compute.remat, compute.attention) * device.share / device.parts
    return flops, moved
