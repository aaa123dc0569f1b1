"""The time of a step, from compiled programs where there are some, and by formula from the sizes of a run elsewhere.
With the occupancy of the engine's slots, and the duration of transfers over ICI and DCN.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.config import Configuration
from jaxrl_llm.engine.scheduler import chunk_columns, chunk_rows
from jaxrl_llm.learner.batch import packed_shapes
from jaxrl_llm.models import gpu_attention
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decode_kernels import ByLength, columns_read
from jaxrl_llm.models.decoder import attention_layers, count_parameters, forward_flops, training_flops, visible_pairs
from jaxrl_llm.models.heads import saves_logits
from jaxrl_llm.models.layers import BLOCKS, part_columns
from jaxrl_llm.plan import programs
from jaxrl_llm.plan.hlo import Collective, Traffic
from jaxrl_llm.plan.machines import Machine
from jaxrl_llm.sharding import batch_parts, bytes_per_device
from jaxrl_llm.sharding.mesh import Chip
from jaxrl_llm.stages.stage import Outline

SIGMA = 0.9
"""Standard deviation of the logarithm of a completion's length, as reasoning models have it early in a run."""


@dataclasses.dataclass(frozen=True)
class Occupancy:
    """A step's decoding. ``chunks``: calls of the decode program; ``read``: share of the whole cache, slots by columns,
    that a call reads on average; ``live``: share of the whole cache that holds keys and values of running completions,
    on average.
    """

    chunks: int
    read: float
    live: float


def completion_lengths(count: int, mean: float, longest: int) -> np.ndarray:
    """Return the tokens of ``count`` completions, int[count]: log-normal, cut at ``longest``, of this mean, shuffled. A
    mean of ``longest`` gives that length to all.
    """
    if mean >= longest:
        return np.full(count, longest)
    spread = np.exp(SIGMA * np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]))
    low, high = 0.0, float(longest) / spread[0]
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * spread, longest).mean() < mean else (low, middle)
    return np.random.default_rng(0).permutation(np.maximum(np.rint(np.minimum(high * spread, longest)), 1).astype(int))


@functools.lru_cache
def occupancy(
    completions: int,
    mean: int,
    longest: int,
    slots: int,
    chunk: int,
    room: int,
    parts: int = 1,
    form: ByLength | None = None,
) -> Occupancy:
    """Run a step's completions through the slots by the engine's rules for the rows and columns of a chunk. A slot
    whose completion ends takes the next one of the queue at the next chunk. ``room``: columns of the whole cache.
    ``form``: kernels that read each row by its length; None for the plain form, which reads all alike.
    """
    queue = completion_lengths(completions, mean, longest)
    running = queue[:slots]
    progress = np.zeros(len(running), int)
    next_index = len(running)
    chunks, read, live = 0, 0.0, 0.0
    while len(running):
        chunks += 1
        if form is None:
            # The chunk before has not been read when the next one is sent.
            columns = chunk_columns(int(progress.max()) + 2 * chunk, slots, room)
            read += chunk_rows(len(running), slots, parts) * columns
        else:
            read += sum(columns_read(form, int(live), room) for live in progress)
        live += float(progress.sum())
        progress = progress + chunk
        ended = progress >= running
        new = queue[next_index : next_index + int(ended.sum())]
        next_index += len(new)
        running = np.concatenate([running[~ended], new])
        progress = np.concatenate([progress[~ended], np.zeros(len(new), int)])
    capacity = slots * room * chunks
    return Occupancy(chunks, read / capacity, live / capacity)


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a step, over all devices; a completion has ``mean`` tokens and a prompt the maximum.
    ``prompts_flops``: prefill of all prompts, once for each group; 0 where nothing is sampled. ``score_passes``:
    forward passes over the batch without gradients: old policy, reference. ``update_flops``: useful FLOPs of one update
    of every role; one with more passes counts with its share of those. Of an update: ``predictions``: tokens; ``rows``:
    of packed tokens, padding included; ``microbatches``: non-empty ones.
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


def step_work(
    run: Configuration, outline: Outline, learned: Sequence[programs.PlannedRole], mean: int | None = None
) -> Work:
    """Return the step's work; ``mean`` tokens of a completion, the longest if not given."""
    groups = outline.groups
    layout = outline.forward.layout
    mean = groups.longest if mean is None else mean
    samples = outline.samples(mean)
    prompt = len(samples[0].prompt)
    tokens = len(samples[0].tokens)
    completions = groups.count * groups.each

    def sizes(config: ModelConfig, predicts: bool) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
        of_prompts = groups.count * prompt, groups.count * visible_pairs(config, 0, prompt), 0.0
        after = completions * visible_pairs(config, prompt, prompt + tokens)
        return of_prompts, (completions * tokens, after, completions * tokens * predicts)

    _, microbatches = packed_shapes(samples, layout)
    policy = outline.training[0]
    scored = policy.needs | ({"old_logp", "ref_logp"} if run.output.monitor_kl else set())
    in_reward = outline.state.reference is not None and "ref_logp" not in scored
    settings = run.learner
    flops = sum(
        training_flops(role.model.config, *size, role.adapter) * role.training.passes(settings) / settings.epochs
        for role in learned
        for size in sizes(role.model.config, role.predicts)
    )
    config = learned[0].model.config
    prefill, decode = (forward_flops(config, *size) if outline.sampler else 0.0 for size in sizes(config, True))
    return Work(
        completions, mean, prefill, decode, len(scored) + in_reward, flops / settings.minibatches,
        sum(len(sample.tokens) for sample in samples), microbatches * layout.rows, layout.row_tokens, microbatches,
        settings.updates,
    )  # fmt: skip


REMAT_PASSES = {"none": 0.0, "dots": 0.0, "full": 1.0, "offload": 1.0}
"""Forward passes that the backward pass recomputes; "dots" repeats no matrix product."""


def attention_share(attention: str, columns: int) -> float:
    """Return the share of a row's pairs of columns that an attention backend computes; some skip future pairs."""
    if attention == "xla":
        parts = -(-columns // part_columns(columns))
        return (parts + 1) / (2 * parts)
    tile = {"splash": BLOCKS[0], "triton": gpu_attention.FORWARD.queries}.get(attention, columns)
    return 0.5 + tile / (2 * columns)


def update_flops(work: Work, planned: programs.PlannedRole) -> float:
    """Return the FLOPs that one update of a role runs on all devices, with padding and recomputation by remat."""
    config = planned.model.config
    compute = planned.forward.compute
    tokens = work.rows * work.row_tokens
    pairs = packed_pairs(config, compute.attention, work.rows, work.row_tokens)
    predictions = work.predictions if planned.predicts else 0
    once = training_flops(config, tokens, pairs, predictions, planned.adapter)
    # Nobody asks for what the last product of a layer returned, so that one is not repeated.
    last = 2.0 * config.layers * config.width * config.active_width * tokens
    repeated = forward_flops(config, tokens, pairs, 0) - last
    # The head's logits are computed again in the backward pass, if they are too large to be kept.
    saved = saves_logits(planned.packed.predictions.target.shape[-1], compute.head_chunk, config.vocab_size)
    return once + REMAT_PASSES[compute.remat] * repeated + (not saved) * forward_flops(config, 0, 0, predictions)


def packed_pairs(config: ModelConfig, attention: str, rows: int, row_tokens: int) -> float:
    """Return the pairs of queries and keys that attention computes in packed rows, padding included."""
    return attention_layers(config) * rows * row_tokens**2 * min(attention_share(attention, row_tokens), 1.0)


class Cost(NamedTuple):
    """The cost of one call of a program on one device, by formula: ``flops``, and ``bytes`` read and written.
    ``kernels``: FLOPs of fused attention in a TPU's program, which its compiler does not count. ``fixed``: of the
    bytes, those that every call reads; a compiled program at its largest reads a ``share`` of the rest.
    """

    flops: float
    bytes: float
    kernels: float = 0.0
    fixed: float = 0.0
    share: float = 1.0


class CompiledCost(NamedTuple):
    """The cost of one call of a compiled program on one device, at its largest, read from its text. ``seconds``: of its
    kernels by a TPU's compiler; 0 where the text has none. ``bytes``: that it reads and writes.
    """

    seconds: float
    bytes: float


FORMULAS, BYTES, CYCLES = "formulas", "compiled bytes", "compiled cycles and bytes"
"""Sources of a part's times."""


@dataclasses.dataclass(frozen=True)
class StepPart:
    """A part of the step on one device; computing, reading and sending may overlap, so the slowest decides.

    ``name``: "weights", "prompts", "decode", "score", "update", or that of another role or of a pass. ``flops``,
    ``bytes``, ``traffic``: in all ``calls`` of a step. ``compute_s``, ``memory_s``: at the peaks of matrix products and
    of memory, by ``source``: ``FORMULAS``, ``BYTES`` or ``CYCLES``. ``ici_s``, ``dcn_s``: inside a slice or host, and
    between them. ``samples``: it is part of the sampling half; ``learns``: it updates a role.
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
    source: str = FORMULAS

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


def step_parts(
    run: Configuration,
    arrays: programs.Arrays,
    work: Work,
    chip: Chip,
    traffic: Mapping[str, tuple[Traffic, ...]],
    costs: Mapping[str, CompiledCost],
) -> list[StepPart]:
    """Return the parts of a step on one device; those that a step never calls are left out. ``traffic``: of one call of
    each program. ``costs``: of compiled programs; others cost what formulas say.
    """
    parts = []

    def add(name: str, calls: float, cost: Cost, samples: bool = False, learns: bool = False) -> None:
        if not calls:
            return
        compute, moved, source = cost.flops / chip.flops, cost.bytes, FORMULAS
        if program := costs.get(name):
            rest = max(program.bytes - cost.fixed, 0.0)
            moved = program.bytes - rest + rest * cost.share
            source = CYCLES if program.seconds else BYTES
            if program.seconds:
                compute = program.seconds * moved / program.bytes + cost.kernels / chip.flops
        sends = tuple(transfer.times(calls) for transfer in traffic.get(name, ()))
        times = (
            calls * compute, calls * moved / chip.bandwidth, sum(t.ici_s for t in sends), sum(t.dcn_s for t in sends),
        )  # fmt: skip
        parts.append(StepPart(name, calls, calls * cost.flops, calls * moved, sends, *times, samples, learns, source))

    if isinstance(arrays, programs.SamplingArrays):
        for name, (calls, cost) in sampling_costs(arrays, work).items():
            add(name, calls, cost, samples=True)
    for planned in arrays.passes:
        predictions = sum(len(sample.tokens) for sample in planned.spec.samples) if planned.predicts else 0
        add(
            planned.name,
            planned.spec.calls,
            pass_cost(planned, planned.microbatches, predictions),
            samples=planned.spec.copies > 0,
        )
    minibatches = run.learner.minibatches
    scored = pass_cost(arrays.learned[0], work.microbatches, work.predictions)
    add("score", work.score_passes * minibatches, scored)
    for role in arrays.learned:
        add(role.name, role.training.passes(run.learner) * minibatches, update_cost(arrays, role, work), learns=True)
    return parts


def slot_occupancy(arrays: programs.SamplingArrays, work: Work) -> Occupancy:
    """Return how a step's completions fill the engine's slots."""
    rollout, shape = arrays.sampler.rollout, arrays.slot_shape
    engine = rollout.engine
    settings = (rollout.max_new_tokens, engine.slots, engine.chunk, shape.columns, shape.parts, arrays.build.form)
    filled = occupancy(work.completions, work.mean, *settings)
    return dataclasses.replace(filled, read=1.0) if engine.strict and arrays.build.form is None else filled


def sampling_costs(arrays: programs.SamplingArrays, work: Work) -> dict[str, tuple[float, Cost]]:
    """Return the calls of each sampling program, and the cost of one call; a decode chunk is averaged over the step."""
    rollout = arrays.sampler.rollout
    shape = arrays.slot_shape
    config = arrays.sampled.config
    share = programs.device_share(arrays.sampled)
    weights = bytes_per_device(arrays.sampled)
    policy = arrays.state.policy
    copied = programs.sampling_bytes(arrays, apart=False)
    rows, piece, calls = programs.prompt_calls(rollout.max_prompt_tokens, shape.parts)
    pairs = visible_pairs(config, 0, piece * calls) / calls
    prefill = forward_flops(config, piece, pairs, 0) * rows / shape.parts * share
    slots, chunk = rollout.engine.slots / shape.parts, rollout.engine.chunk
    pairs = attention_layers(config) * (rollout.max_prompt_tokens + work.mean / 2)
    decode = forward_flops(config, 1, pairs, 1) * slots * share
    prompts = min(slots / shape.group * 2, slots)  # some groups end while others begin
    blocks = bytes_per_device(arrays.slots.blocks)
    filled = slot_occupancy(arrays, work)
    states = bytes_per_device(arrays.slots.cache.state)
    moved = (
        weights
        + (bytes_per_device(arrays.slots.cache) - states) * filled.read
        + 2 * states
        + blocks * prompts * shape.parts / shape.blocks
    )
    fixed = (weights + blocks) * chunk
    return {
        "weights": (1.0, Cost(0.0, copied + (copied if policy.base else bytes_per_device(policy.params)))),
        "prompts": (math.ceil(rollout.prompts / rows) * calls, Cost(prefill, weights)),
        "decode": (filled.chunks, Cost(decode * chunk, moved * chunk, fixed=fixed, share=filled.read)),
    }


def pass_cost(planned: programs.PlannedModel, microbatches: int, predictions: int) -> Cost:
    """Return the cost of a pass over ``microbatches`` that predicts ``predictions`` tokens."""
    layout = planned.forward.layout
    config = planned.model.config
    rows = microbatches * layout.rows
    pairs = packed_pairs(config, planned.forward.compute.attention, rows, layout.row_tokens)
    flops = forward_flops(config, rows * layout.row_tokens, pairs, predictions)
    share = programs.device_share(planned.gathered) / layout.parts
    moved = microbatches * 2 * bytes_per_device(planned.gathered)
    return Cost(flops * share, moved, fused_flops(planned, rows, layout.row_tokens) * share)


def fused_flops(planned: programs.PlannedModel, rows: int, row_tokens: int) -> float:
    """Return the FLOPs of a forward pass's fused attention on all devices; 0 where XLA computes it."""
    attention = planned.forward.compute.attention
    if attention == "xla":
        return 0.0
    return forward_flops(planned.model.config, 0, packed_pairs(planned.model.config, attention, rows, row_tokens), 0)


def update_cost(arrays: programs.Arrays, planned: programs.PlannedRole, work: Work) -> Cost:
    """Return the cost of an update of a role: each microbatch's passes read and write weights and move activations."""
    config = planned.model.config
    compute = planned.forward.compute
    share = programs.device_share(planned.gathered)
    width = planned.width
    parts = planned.forward.layout.parts
    passes = 3 + REMAT_PASSES[compute.remat]
    tokens = work.rows * work.row_tokens / parts
    a = config.widest_attention
    layer = 16 * config.width + (6 * (a.heads + a.kv_heads) * a.head_dim + 8 * config.active_width) * share
    weights = count_parameters(config)[0] * width * share
    role = arrays.state.roles[planned.training.role]
    state = bytes_per_device((role.params, role.opt_state))
    gradients = bytes_per_device(role)
    moved = (
        work.microbatches * (2 * passes * weights + 2 * gradients)
        + tokens * config.layers * layer * width * passes
        + 2 * state
    )
    # What is not kept between the passes is computed again, kernels too. Fused attention's backward kernels have 3.5
    # times the products of its forward kernel: both compute scores and slopes.
    kernels = fused_flops(planned, work.rows, work.row_tokens) * (1 + (compute.remat != "none") + 3.5)
    return Cost(update_flops(work, planned) * share / parts, moved, kernels * share / parts)


@dataclasses.dataclass(frozen=True)
class Places:
    """The location of each partition of a program on ``machine``. ``slices``: int[partitions], its slice or host;
    ``coordinates``: int[partitions, dimensions] in the torus, no columns where a switch links all.
    """

    machine: Machine
    slices: np.ndarray
    coordinates: np.ndarray


def device_places(machine: Machine, devices: Iterable[Any] | None = None) -> Places:
    """Return the places of described devices, in the order of a program's partitions; without them, GPUs by host."""
    if devices is None:
        return Places(machine, np.arange(machine.devices) // machine.shape[1], np.zeros((machine.devices, 0), int))
    devices = list(devices)
    if machine.chip.platform == "gpu":
        return Places(machine, np.array([d.process_index for d in devices]), np.zeros((len(devices), 0), int))
    slices = np.array([getattr(d, "slice_index", 0) or 0 for d in devices])
    return Places(machine, slices, np.array([d.coords[: len(machine.shape)] for d in devices]))


def traffic_of(collective: Collective, places: Places) -> Traffic:
    """Return the traffic of all runs of one collective. Between slices it is assumed hierarchical: each device of a
    slice sends its share out, and the rest stays inside.
    """
    chip = places.machine.chip
    group = collective.groups[0]
    outside = len(set(places.slices[group].tolist()))
    inside = len(group) // outside if outside > 1 else len(group)
    passes = 2 if collective.kind == "all-reduce" else 1
    if collective.kind == "collective-permute":
        crossing = any(len(set(places.slices[pair].tolist())) > 1 for pair in collective.groups)
        ici, dcn = (0.0, collective.size) if crossing else (collective.size, 0.0)
    else:
        ici = collective.size * passes * (inside - 1) / inside
        dcn = collective.size / inside * passes * (outside - 1) / outside if outside > 1 else 0.0
    links = _links(collective, places) * chip.link
    n = collective.times
    return Traffic(collective.kind, n, n * ici, n * dcn, n * ici / links, n * dcn / chip.network)


def _links(collective: Collective, places: Places) -> float:
    """Return the number of links that a device can use at once: two along each closed axis of its group's torus."""
    permutes = collective.kind == "collective-permute"
    coordinates = places.coordinates[np.unique(collective.groups if permutes else collective.groups[:1])]
    wrap = places.machine.chip.wrap
    links = 0.0
    for axis in range(coordinates.shape[1]):
        if len(np.unique(coordinates[:, axis])) > 1:
            links += 2.0 if wrap and places.machine.shape[axis] % wrap == 0 else 1.0
    links = links or 1.0
    return min(links, 2.0) if permutes else links


def sum_by_kind(transfers: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """Add up traffic by kind, largest first."""
    rows = collections.defaultdict(list)
    for transfer in transfers:
        rows[transfer.kind].append(dataclasses.astuple(transfer)[1:])
    sums = (Traffic(kind, *map(sum, zip(*amounts, strict=True))) for kind, amounts in rows.items())
    return tuple(sorted(sums, key=lambda t: -(t.ici + t.dcn)))


def traffic_by_formula(
    run: Configuration, arrays: programs.Arrays, work: Work, sizes: Mapping[str, int], places: Places
) -> dict[str, tuple[Traffic, ...]]:
    """Estimate the traffic of one call of each program, without compiling. Weights are gathered over fsdp, gradients
    summed over data, activations over tensor, and tokens gathered and their sums scattered over expert.
    """
    partitions = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    # Groups of partitions by mesh axis, int[groups, members]: the members of a group differ along this axis only.
    axes = {name: np.moveaxis(partitions, i, -1).reshape(-1, sizes[name]) for i, name in enumerate(sizes)}
    sent: dict[str, list[Collective]] = {}
    if isinstance(arrays, programs.SamplingArrays):
        rollout = arrays.sampler.rollout
        config = arrays.sampled.config
        width = arrays.sampled.weights.final_norm.dtype.itemsize
        slots = rollout.engine.slots / batch_parts(sizes)
        steps = config.layers * rollout.engine.chunk
        copied = programs.sampling_bytes(arrays, apart=False)
        sent["weights"] = [Collective("all-gather", copied, axes["fsdp"], 1)]
        sent["decode"] = [
            Collective("all-reduce", slots * config.width * width, axes["tensor"], 2 * steps),
            *expert_exchange(config, slots, width, axes, steps),
        ]
    sent["score"] = _pass_collectives(arrays.learned[0], work.microbatches, axes)
    for planned in arrays.passes:
        sent[planned.name] = _pass_collectives(planned, planned.microbatches, axes)
    for role in arrays.learned:
        # ``passes`` passes after the first one, and the sums of gradients.
        passes = 2 + REMAT_PASSES[run.learner.compute.remat]
        weights, activations, *tokens = _pass_collectives(role, work.microbatches, axes)
        sent[role.name] = [
            Collective("all-gather", weights.size, axes["fsdp"], passes * work.microbatches),
            Collective("reduce-scatter", weights.size, axes["fsdp"], work.microbatches),
            Collective("all-reduce", bytes_per_device(role.role.params), axes["data"], work.microbatches),
            Collective("all-reduce", activations.size, axes["tensor"], (1 + passes) * activations.times),
            *(dataclasses.replace(transfer, times=passes * transfer.times) for transfer in tokens),
        ]
    return {
        name: sum_by_kind(traffic_of(transfer, places) for transfer in transfers if transfer.groups.shape[1] > 1)
        for name, transfers in sent.items()
    }


def _pass_collectives(
    planned: programs.PlannedModel, microbatches: int, axes: Mapping[str, np.ndarray]
) -> list[Collective]:
    """Return the collectives of a forward pass, in each microbatch: weights, sums of activations, experts' exchange."""
    config = planned.model.config
    layout = planned.forward.layout
    tokens = layout.rows * layout.row_tokens / layout.parts
    times = config.layers * microbatches
    return [
        Collective("all-gather", bytes_per_device(planned.gathered), axes["fsdp"], microbatches),
        Collective("all-reduce", tokens * config.width * planned.width, axes["tensor"], 2 * times),
        *expert_exchange(config, tokens, planned.width, axes, times),
    ]


def expert_exchange(
    config: ModelConfig, tokens: float, width: int, axes: Mapping[str, np.ndarray], times: float
) -> list[Collective]:
    """Return what devices with different experts exchange for ``tokens`` of each; backward passes send as much. Hidden
    states of ``width`` bytes a number are gathered with weights and numbers of experts; sums are float32.
    """
    if config.experts is None or "expert" not in axes:
        return []
    all_tokens = tokens * axes["expert"].shape[1]
    gathered = config.width * width + 8 * config.experts.active
    return [
        Collective("all-gather", all_tokens * gathered, axes["expert"], times),
        Collective("reduce-scatter", all_tokens * config.width * 4, axes["expert"], times),
    ]
