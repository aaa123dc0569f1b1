"""The least time of a step, from the sizes of a run alone: nothing is compiled or measured."""

import dataclasses
import math
from collections.abc import Sequence

from jaxrl_llm.config import Configuration
from jaxrl_llm.engine.requests import power_of_two
from jaxrl_llm.learner.packing import packed_shapes
from jaxrl_llm.models.by_length import columns_read
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.flops import counts, forward_flops, training_flops, visible_pairs
from jaxrl_llm.models.layers import BLOCKS, part_columns
from jaxrl_llm.plan.hlo import Traffic
from jaxrl_llm.plan.shapes import (
    Arrays,
    PlannedModel,
    PlannedRole,
    SamplingArrays,
    bytes_per_device,
    prompt_calls,
    share_of,
)
from jaxrl_llm.sharding.chips import Chip
from jaxrl_llm.stages.stage import Outline


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a step, over all devices; a completion has ``mean`` tokens and a prompt the maximum.

    Attributes:
      completions: B.
      mean: tokens of each.
      prompts_flops: prefill of all prompts, once for each group; 0 where nothing is sampled.
      decode_flops: all sampled tokens.
      score_passes: forward passes over the batch that are not differentiated: old policy, reference.
      update_flops: useful FLOPs of one update of every role, the policy and the others; a role with more passes counts
        with its share of those.
      predictions: tokens of one update.
      rows: of packed tokens that an update computes, padding included.
      row_tokens: S.
      microbatches: non-empty microbatches of an update.
      updates: optimiser steps.
    """

    completions: int
    mean: int
    prompts_flops: float
    decode_flops: float
    score_passes: int
    update_flops: float
    predictions: int
    rows: int
    row_tokens: int
    microbatches: int
    updates: int

    @property
    def sampled(self) -> int:
        """Return the number of sampled tokens, B * mean."""
        return self.completions * self.mean

    @property
    def train_flops(self) -> float:
        """Return the useful FLOPs of all updates: without recomputation, and without gradients of frozen weights."""
        return self.update_flops * self.updates


def work(run: Configuration, outline: Outline, learned: Sequence[PlannedRole], mean: int | None = None) -> Work:
    """Return the step's work; ``mean`` tokens of a completion, the longest if not given."""
    groups = outline.groups
    layout = outline.forward.layout
    mean = groups.longest if mean is None else mean
    samples = outline.samples(mean)
    prompt = len(samples[0].prompt)
    tokens = len(samples[0].tokens)
    completions = groups.count * groups.each

    def sizes(config: ModelConfig, predicts: bool) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        own = groups.count * prompt, groups.count * visible_pairs(config, 0, prompt), 0.0
        after = completions * visible_pairs(config, prompt, prompt + tokens)
        return own, (completions * tokens, after, completions * tokens * predicts)

    _, microbatches = packed_shapes(samples, layout)
    policy = outline.training[0]
    scored = policy.needs | ({"old_logp", "ref_logp"} if run.output.monitor_kl else set())
    in_reward = outline.state.reference is not None and "ref_logp" not in scored
    settings = run.learner
    counted = sum(
        training_flops(one.model.config, *size, one.adapter) * one.training.passes(settings) / settings.epochs
        for one in learned
        for size in sizes(one.model.config, one.predicts)
    )
    config = learned[0].model.config
    prefill, decode = (forward_flops(config, *size) if outline.sampler else 0.0 for size in sizes(config, True))
    return Work(
        completions, mean, prefill, decode, len(scored) + in_reward, counted / settings.minibatches,
        sum(len(sample.tokens) for sample in samples), microbatches * layout.rows, layout.row_tokens, microbatches,
        settings.updates,
    )  # fmt: skip


REMAT_PASSES = {"none": 0.0, "dots": 0.0, "full": 1.0}
"""Forward passes that the backward pass recomputes; "dots" repeats no matrix product."""


def attention_share(attention: str, columns: int) -> float:
    """Return the share of a row's pairs of columns that an attention backend computes; some skip future pairs."""
    if attention == "xla":
        parts = -(-columns // part_columns(columns))
        return (parts + 1) / (2 * parts)
    return 0.5 + BLOCKS[0] / (2 * columns) if attention == "splash" else 1.0


def update_flops(one: Work, learned: PlannedRole) -> float:
    """Return the FLOPs that one update of a role runs on all devices, with padding and recomputation by remat."""
    config = learned.model.config
    compute = learned.forward.compute
    tokens = one.rows * one.row_tokens
    pairs = packed_pairs(config, compute.attention, one.rows, one.row_tokens)
    predictions = one.predictions if learned.predicts else 0
    once = training_flops(config, tokens, pairs, predictions, learned.adapter)
    # Nobody asks for what the last product of a layer returned, so that one is not repeated.
    last = 2.0 * config.layers * config.width * config.active_width * tokens
    repeated = forward_flops(config, tokens, pairs, 0) - last
    # The head's logits are always computed again in the backward pass.
    return once + REMAT_PASSES[compute.remat] * repeated + forward_flops(config, 0, 0, predictions)


def packed_pairs(config: ModelConfig, attention: str, rows: int, row_tokens: int) -> float:
    """Return the pairs of queries and keys that attention computes in packed rows, padding included."""
    return config.layers * rows * row_tokens**2 * min(attention_share(attention, row_tokens), 1.0)


@dataclasses.dataclass(frozen=True)
class StepPart:
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
      dcn_s: between slices or hosts.
      samples: whether it is part of the sampling half.
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
        """Return the least seconds of the part."""
        return max(self.compute_s, self.memory_s, self.ici_s + self.dcn_s)

    @property
    def binds(self) -> str:
        """Return the limiting resource: compute, memory, ICI or DCN."""
        times = {"compute": self.compute_s, "memory": self.memory_s, "ICI": self.ici_s, "DCN": self.dcn_s}
        network = max(("ICI", "DCN"), key=times.__getitem__)
        return network if self.seconds == self.ici_s + self.dcn_s else max(("compute", "memory"), key=times.__getitem__)


def phases(
    run: Configuration, arrays: Arrays, work: Work, chip: Chip, sent: dict[str, tuple[Traffic, ...]]
) -> list[StepPart]:
    """Return the parts of a step on one device; those that a step never calls are left out.

    Args:
      run: resolved.
      arrays: the run's arrays.
      work: of a step.
      chip: its peaks.
      sent: traffic of one call of each program.
    """
    found = []

    def add(name: str, calls: float, cost: tuple[float, float], samples: bool = False, learns: bool = False) -> None:
        if calls:
            flops, moved = (calls * each for each in cost)
            sends = tuple(one.times(calls) for one in sent.get(name, ()))
            times = flops / chip.flops, moved / chip.bandwidth, sum(t.ici_s for t in sends), sum(t.dcn_s for t in sends)
            found.append(StepPart(name, calls, flops, moved, sends, *times, samples, learns))

    if isinstance(arrays, SamplingArrays):
        for name, (calls, cost) in sampling_phases(arrays, work).items():
            add(name, calls, cost, samples=True)
    for one in arrays.readings:
        predictions = sum(len(sample.tokens) for sample in one.asked.samples) if one.predicts else 0
        add(one.name, one.asked.calls, pass_cost(one, one.microbatches, predictions), samples=one.asked.copies > 0)
    minibatches = run.learner.minibatches
    scored = pass_cost(arrays.learned[0], work.microbatches, work.predictions)
    add("score", work.score_passes * minibatches, scored)
    for held in arrays.learned:
        add(held.name, held.training.passes(run.learner) * minibatches, update_cost(arrays, held, work), learns=True)
    return found


def sampling_phases(arrays: SamplingArrays, work: Work) -> dict[str, tuple[float, tuple[float, float]]]:
    """Return the calls of each sampling program, and the FLOPs and bytes of one call on one device.

    Slots are assumed full until the last completions end; a decode chunk is averaged over the lengths of the cache as
    it grows.
    """
    rollout = arrays.sampler.rollout
    shape = arrays.slot_shape
    config = arrays.sampled.config
    share = share_of(arrays.sampled)
    weights = bytes_per_device(arrays.sampled)
    policy = arrays.state.policy
    rows, piece, calls = prompt_calls(rollout.max_prompt_tokens, shape.parts)
    pairs = visible_pairs(config, 0, piece * calls) / calls
    prefill = forward_flops(config, piece, pairs, 0) * rows / shape.parts * share
    slots, chunk = rollout.engine.slots / shape.parts, rollout.engine.chunk
    pairs = config.layers * (rollout.max_prompt_tokens + work.mean / 2)
    decode = forward_flops(config, 1, pairs, 1) * slots * share
    # Without kernels by length, a chunk reads the next power of two of the columns that are there while all slots grow
    # together.
    steps = range(0, work.mean, chunk)
    if arrays.form is not None:
        columns = sum(columns_read(arrays.form, at, shape.columns) for at in steps) / len(steps)
    else:
        columns = sum(min(power_of_two(at + chunk), shape.columns) for at in steps) / len(steps)
    prompts = min(slots / shape.group * 2, slots)  # some groups end while others begin
    blocks = bytes_per_device(arrays.slots.blocks) * prompts * shape.parts / shape.blocks
    moved = weights + bytes_per_device(arrays.slots.cache) * columns / shape.columns + blocks
    waves = max(work.completions / rollout.engine.slots, 1.0)
    return {
        "weights": (1.0, (0.0, bytes_per_device((policy.params, policy.base)) + weights)),
        "prompts": (math.ceil(rollout.prompts / rows) * calls, (prefill, weights)),
        "decode": (math.ceil(waves * work.mean / chunk), (decode * chunk, moved * chunk)),
    }


def pass_cost(one: PlannedModel, microbatches: int, predictions: int) -> tuple[float, float]:
    """Return FLOPs and bytes of one device in a pass over ``microbatches`` that predicts ``predictions`` tokens."""
    layout = one.forward.layout
    config = one.model.config
    rows = microbatches * layout.rows
    pairs = packed_pairs(config, one.forward.compute.attention, rows, layout.row_tokens)
    flops = forward_flops(config, rows * layout.row_tokens, pairs, predictions)
    moved = microbatches * 2 * bytes_per_device(one.gathered)
    return flops * share_of(one.gathered) / layout.parts, moved


def update_cost(arrays: Arrays, held: PlannedRole, work: Work) -> tuple[float, float]:
    """Return FLOPs and bytes of one device in an update of a role.

    Each microbatch's passes read and write weights and move activations.
    """
    config = held.model.config
    compute = held.forward.compute
    share = share_of(held.gathered)
    width = held.width
    parts = held.forward.layout.parts
    passes = 3 + REMAT_PASSES[compute.remat]
    tokens = work.rows * work.row_tokens / parts
    a = config.attention
    layer = 16 * config.width + (6 * (a.heads + a.kv_heads) * a.head_dim + 8 * config.active_width) * share
    weights = counts(config)[0] * width * share
    role = arrays.state.roles[held.training.role]
    state = bytes_per_device((role.params, role.opt_state))
    gradients = bytes_per_device(role)
    moved = (
        work.microbatches * (2 * passes * weights + 2 * gradients)
        + tokens * config.layers * layer * width * passes
        + 2 * state
    )
    return update_flops(work, held) * share / parts, moved
