"""A plan: the needs of a run on a machine, from the compiler where there is one, and from formulas elsewhere."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxrl_llm import config as configs
from jaxrl_llm.config import Configuration
from jaxrl_llm.engine.scheduler import PROMPT_BYTES
from jaxrl_llm.learner.platform import compute_for, token_bytes
from jaxrl_llm.learner.samples import estimator_bytes
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import count_parameters
from jaxrl_llm.models.heads import split_head
from jaxrl_llm.models.quantised import QuantisedMatrix
from jaxrl_llm.plan import programs, roofline
from jaxrl_llm.plan.machines import CUDNN, Machine, is_installed
from jaxrl_llm.rollout.settings import USUAL_SLOTS
from jaxrl_llm.runs import architecture_of
from jaxrl_llm.sharding import batch_parts, bytes_per_device, memory_limit, platform_of, repeated_heads
from jaxrl_llm.sharding.mesh import GIB, check_dtype
from jaxrl_llm.stages.stage import Architectures, Groups
from jaxrl_llm.types import TrainState


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one device by kind, exact sizes of arrays, but for ``temporary``: memory of programs beside their
    arguments, and padding of layouts. ``weights``: the policy that learns, and the frozen base under its adapter;
    ``optimiser``: its moments. ``critic``, ``critic_optimiser``: of all roles but the policy. ``reference``: the frozen
    policy. ``judges``: reward models. ``batch``: a step's packed data, of all its updates. ``sampled``: the weights to
    sample from. ``cache``: keys and values of slots and prompts.
    """

    weights: float = 0
    optimiser: float = 0
    reference: float = 0
    critic: float = 0
    critic_optimiser: float = 0
    judges: float = 0
    batch: float = 0
    sampled: float = 0
    cache: float = 0
    temporary: float = 0

    @property
    def total(self) -> float:
        """Return the sum of all kinds."""
        return sum(dataclasses.astuple(self))


def state_memory(arrays: programs.Arrays) -> DeviceMemory:
    """Return the memory of the training state, resident in both halves; moments kept in host memory do not count."""
    weights, moments = {"policy": 0, "critic": 0}, {"policy": 0, "critic": 0}
    for name, role in arrays.state.roles.items():
        kind = "policy" if name == "policy" else "critic"
        on_device = [x for x in jax.tree.leaves(role.opt_state) if x.sharding.memory_kind != "pinned_host"]
        weights[kind] += bytes_per_device((role.params, role.base))
        moments[kind] += bytes_per_device(on_device)
    return DeviceMemory(
        weights=weights["policy"],
        optimiser=moments["policy"],
        reference=bytes_per_device(arrays.state.reference),
        critic=weights["critic"],
        critic_optimiser=moments["critic"],
    )


def judge_bytes(arrays: programs.Arrays) -> float:
    """Return the bytes of the reward models, which stay on the devices that sample."""
    return sum(planned.spec.copies * bytes_per_device(planned.model) for planned in arrays.passes)


def memory_of_learning(
    run: Configuration, arrays: programs.Arrays, compiled: Mapping[str, programs.Compiled]
) -> DeviceMemory:
    """Return the memory while learning: state and data; weights to sample from only where sampling runs ahead. Reward
    models count too, unless they have devices of their own. ``compiled`` is empty for formulas.
    """
    base = state_memory(arrays)
    packed = bytes_per_device(arrays.packed)
    batch = packed * run.learner.minibatches
    needs = []
    for planned in arrays.learned:
        if compiled:
            needs.append(compiled_temporary(compiled[planned.name], bytes_per_device(arrays.state) + packed))
            continue
        # Gradients twice: those of a microbatch, and their sum in float32.
        params = jax.tree.leaves(planned.role.params)
        gradients = sum(bytes_per_device(x) * (1 + 4 / x.dtype.itemsize) for x in params)
        needs.append(gradients + pass_by_formula(planned, update=True))
    for planned in arrays.passes:
        # A step's data is packed for its updates after the passes. What reads all data before the first step does so
        # before there is a state.
        if not planned.spec.copies:
            counted = batch + (0 if planned.spec.calls else base.total - bytes_per_device(planned.model))
            needs.append(pass_bytes(planned, compiled) - counted)
    if isinstance(run, configs.Run) and configs.samples_groups(run):
        layout, rows = arrays.learned[0].forward.layout, run.rollout.prompts * run.rollout.group
        estimate = estimator_bytes(run.recipe.algorithm.advantage, rows, layout.completion_tokens)
        needs.append(estimate / layout.parts - batch)  # of which a step's data is made
    sampled = 0
    if (
        isinstance(arrays, programs.SamplingArrays)
        and arrays.sampler.rollout.collect.staleness
        and not run.mesh.rollout
    ):
        sampled = programs.sampling_bytes(arrays, apart=False)
    judges = 0 if run.mesh.rollout else judge_bytes(arrays)
    return dataclasses.replace(base, judges=judges, sampled=sampled, batch=batch, temporary=max(needs))


def memory_of_sampling(
    run: Configuration, arrays: programs.SamplingArrays, compiled: Mapping[str, programs.Compiled]
) -> DeviceMemory:
    """Return the memory while sampling: the state (where the same devices learn), weights to sample from, the cache."""
    rollout = arrays.sampler.rollout
    parts = arrays.slot_shape.parts
    sampled = bytes_per_device(arrays.sampled)
    copied = programs.sampling_bytes(arrays, bool(run.mesh.rollout))
    slots = bytes_per_device(arrays.slots)
    # The blocks that prompts had before, while they become more.
    blocks = bytes_per_device(arrays.slots.blocks) / 2
    # Calls with keys and values that wait at one time to be copied into slots, at the first filling.
    rows, piece, calls = programs.prompt_calls(rollout.max_prompt_tokens, parts)
    filling = -(-min(-(-rollout.engine.slots // rollout.group), rollout.prompts) // rows)
    needs = [pass_bytes(planned, compiled) for planned in arrays.passes if planned.spec.copies]
    if compiled:
        waiting = max(compiled["prompts"].outputs + compiled["prompts"].arguments - sampled, 0) * filling
        decode = compiled_temporary(compiled["decode"], sampled + slots)
        weights = compiled.get("weights", programs.Compiled())
        moving = weights.refused or weights.temporary + max(weights.outputs - sampled, 0)
        refill = compiled_temporary(compiled["refill"], slots + waiting)
        # Slots are empty while weights are laid out; what one call of prompts returns is already among those that wait.
        busiest = max(decode, blocks, refill, compiled["prompts"].temporary)
        needs += [busiest + waiting, moving - slots]
    else:
        config = arrays.sampled.config
        share = programs.device_share(arrays.sampled)
        cache = arrays.slots.cache
        (_, slots_of_device, _, columns, _) = cache.v.sharding.shard_shape(cache.v.shape)
        states = bytes_per_device(cache.state)
        by_token = (bytes_per_device(cache) - states) / (slots_of_device * columns)
        waiting = filling * rows / parts * (piece * calls * by_token + states / slots_of_device)
        logits = 4 * 4 * rollout.engine.slots / parts * config.vocab_size * share
        # A decode step has the states before and after it.
        needs.append(max(logits, blocks, widened_experts(arrays.learned[0])) + max(waiting, states))
        learns = arrays.learned[0].forward.mesh
        if platform_of(learns) == "tpu" and learns.shape["fsdp"] > 1 and not run.mesh.rollout:
            needs.append(copied - slots)  # gathered in one layout, then copied into another; slots are empty then
    base = DeviceMemory() if run.mesh.rollout else state_memory(arrays)
    cache = slots + episode_prompt_bytes(run, arrays)
    return dataclasses.replace(base, judges=judge_bytes(arrays), sampled=copied, cache=cache, temporary=max(needs))


def episode_prompt_bytes(run: Configuration, arrays: programs.SamplingArrays) -> int:
    """Return the bytes on a device of the prompts of episodes that the engine keeps between turns, at most."""
    if not any(task.plays for task in configs.tasks_in(run.task)):
        return 0
    blocks = arrays.slots.blocks
    each = bytes_per_device(blocks) * arrays.slot_shape.parts // blocks.v.shape[1]
    each += bytes_per_device(arrays.slots.cache.state) * arrays.slot_shape.parts // arrays.slots.cache.v.shape[1]
    return min(PROMPT_BYTES, each * run.rollout.prompts)


def compiled_temporary(program: programs.Compiled, size: float) -> float:
    """Return the bytes that a program needs in addition to arguments of ``size`` bytes; their padding counts."""
    padding = max(program.arguments - size, 0)
    return program.refused - size if program.refused else program.temporary + program.outputs + padding


def pass_bytes(planned: programs.PlannedModel, compiled: Mapping[str, programs.Compiled]) -> float:
    """Return the bytes that a pass needs in addition to its model: data and temporaries."""
    packed = bytes_per_device(planned.packed)
    if not compiled:
        return packed + pass_by_formula(planned, update=False)
    return packed + compiled_temporary(compiled[planned.name], packed + bytes_per_device(planned.model))


def widened_experts(planned: programs.PlannedModel) -> float:
    """Return the bytes on a device of one layer's packed experts in their wide form."""
    decoder = split_head(planned.model)[0]
    experts = vars(getattr(decoder.weights.blocks, "experts", object)).values()
    arrays = [item for matrix in experts if isinstance(matrix, QuantisedMatrix) for item in matrix.arrays().items()]
    # A byte has one code, or two.
    numbers = sum(bytes_per_device(x) * {"codes": 1, "nibbles": 2}.get(name, 0) for name, x in arrays)
    return numbers * planned.width / max(len(decoder.config.layers_with("experts")), 1)


def pass_by_formula(planned: programs.PlannedModel, update: bool) -> float:
    """Estimate without compiling the bytes that a pass needs beside its arguments: the model in the compute type, in
    its layout, what is kept of each token, and the larger of a layer's work and, where the model predicts tokens, that
    of a chunk of logits: the head is done with before the backward pass reaches a layer. Where ``fsdp`` divides the
    weights, those of the layer or the head are there whole meanwhile, and so are their gradients, the head's in
    float32.
    """
    layout, mesh = planned.forward.layout, planned.forward.mesh
    compute = planned.forward.compute
    config = planned.model.config
    share = programs.device_share(planned.gathered)
    widths = ((x, planned.width / x.dtype.itemsize) for x in jax.tree.leaves(planned.model))
    cast = sum(bytes_per_device(x) * ratio for x, ratio in widths if ratio != 1)
    blocks = split_head(planned.model)[0].weights.blocks
    frozen = hasattr(blocks, "adapter")
    if frozen:  # each product converts its own; separate layers are stacked
        cast = bytes_per_device(blocks) if hasattr(blocks, "0") else 0
    elif platform_of(mesh) == "tpu" and compute.dtype == "float32":
        # Its products are of bfloat16, and the compiler moves gathers and conversions out of the loop over layers.
        cast = bytes_per_device(planned.gathered) / 2
    tokens = layout.rows * layout.row_tokens / layout.parts
    positions = planned.packed.predictions.target.shape[-1]
    logits = 2 * 4 * min(positions, compute.head_chunk) * config.vocab_size * share  # and their gradient, float32
    kept, in_use = token_bytes(compute, config, layout.row_tokens, share, update)
    layer, head = tokens * in_use + widened_experts(planned), logits
    if mesh.shape["fsdp"] > 1:
        trained = update and not frozen
        whole = bytes_per_device(split_head(planned.gathered)[0].weights.blocks)
        layer += whole / config.layers * (1 + trained)
        head += config.vocab_size * config.width * share * (planned.width + 4 * trained)
    return cast + tokens * kept + max(layer, head * planned.predicts)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The predicted memory and time of a resolved run on a machine. ``state``: all that it learns and keeps, as shapes.
    ``learning``, ``sampling``: memory of one device meanwhile; None where no step samples. ``phases``: of a step, with
    their least times. ``compiled``: programs by name; empty for formulas. ``chosen``: notes on backends of attention
    and matrix products, and on assumptions. ``more``: bytes that one more adds to a device: "groups", "slots", "rows"
    of a microbatch.
    """

    run: Any
    machine: Machine
    mesh: Mapping[str, int]
    state: TrainState
    work: roofline.Work
    groups: Groups
    learning: DeviceMemory
    sampling: DeviceMemory | None
    phases: tuple[roofline.StepPart, ...]
    compiled: dict[str, programs.Compiled]
    chosen: tuple[str, ...]
    more: dict[str, float]

    @property
    def parameters(self) -> tuple[int, int]:
        """Return the number of the policy's parameters, without an adapter's, and of those that one token uses: all but
        those of the experts that it does not take.
        """
        policy = self.state.policy
        decoder, scalar = split_head(policy.params if policy.base is None else policy.base)
        total, active, _ = count_parameters(decoder.config)
        more = 0 if scalar is None else scalar.size
        return total + more, active + more

    @property
    def refused(self) -> tuple[str, ...]:
        """Return the programs that need more memory than the device has."""
        return tuple(name for name, program in self.compiled.items() if program.refused)

    @property
    def halves(self) -> dict[str, DeviceMemory]:
        """Return the memory of one device, by the half of the step."""
        halves = {} if self.sampling is None else {"sampling": self.sampling}
        return halves | {"learning": self.learning}

    @property
    def peak(self) -> float:
        """Return the bytes of one device in the larger of the two halves."""
        return max(half.total for half in self.halves.values())

    @property
    def fits(self) -> bool:
        """Whether both halves fit the device."""
        return self.peak <= self.machine.chip.memory

    @property
    def seconds(self) -> float:
        """Return the least seconds of a step: its parts run in sequence, or sampling and learning side by side."""
        sampled = sum(p.seconds for p in self.phases if p.samples)
        learned = sum(p.seconds for p in self.phases if not p.samples)
        return max(sampled, learned) if self.run.mesh.rollout else sampled + learned

    @property
    def slowest(self) -> roofline.StepPart:
        """Return the part that takes longest."""
        return max(self.phases, key=lambda p: p.seconds)

    def utilisation(self, seconds: float) -> float:
        """Return the model FLOPs utilisation (MFU): training FLOPs as a share of the machine's peak in that time."""
        return self.work.train_flops / (seconds * self.machine.devices * self.machine.chip.flops)

    def most(self, kind: str) -> int | None:
        """Return how many "groups", "slots" or "rows" of a microbatch fit next to everything else, as a multiple of
        what the run divides them by; None for rows where that is unknown, 0 for slots where nothing is sampled.
        Temporaries are taken to grow with the cache: they grow less.
        """
        if kind == "slots" and self.sampling is None:
            return 0
        if kind not in self.more:
            return None
        learner, parts = self.run.learner, batch_parts(self.mesh)
        half, current, unit = {
            "groups": (self.learning, self.groups.count, learner.minibatches),
            "slots": (self.sampling, self.sampling and self.run.rollout.engine.slots, parts),
            "rows": (self.learning, learner.compute.microbatch_rows, parts),
        }[kind]
        free = self.machine.chip.memory - half.total
        if free == -math.inf:  # refused, without a word about its size
            return 0
        return max(int((current + free / self.more[kind]) // unit * unit), 0)


def plan_run(
    run: Configuration,
    config: ModelConfig,
    machine: Machine,
    devices: list[Any] | None,
    mean: int | None,
    compiling: bool,
    more: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan a resolved run on a machine, by its compiled programs, or by formula if not ``compiling``. ``devices``: as
    their compiler describes them; None to use formulas. ``mean``: tokens of a completion, for the times; None for the
    longest, on which memory is always based. ``more``: find out how large microbatches may be, which takes one more
    compilation. ``say``: called with a line about each compilation.
    """
    check_dtype(run.learner.compute.dtype, machine.chip)
    run, notes = compilable(run, config, machine) if compiling else (run, ())
    find, assumed = programs.architecture_finder(config)
    run, choices = choose_slots(run, config, find, machine)
    run = with_microbatch_rows(run, config, machine, find)
    target = programs.planned_run(run, config, devices, find, machine)
    compiled = {}
    for name in programs.program_meshes(target) if compiling else ():
        say(f"compiling {name} for {machine.name}")
        compiled[name] = programs.compile_program(target, name)
    planned = _build_plan(
        target,
        machine,
        roofline.device_places(machine, devices and target.mesh.devices.flat),
        mean,
        compiled,
        (*notes, *assumed, *choices),
    )
    if not more or not compiling:
        return planned
    say(f"compiling update for {machine.name} with other microbatches")
    # Twice as many rows, or half as many if the update was refused.
    update, rows = compiled["update"], run.learner.compute.microbatch_rows
    unit = batch_parts(run.mesh.sizes(machine.devices))
    other_rows = 2 * rows if not update.refused else rows // 2 // unit * unit
    if not other_rows:
        return planned
    with_other_rows = dataclasses.replace(run, learner=run.learner.computing(microbatch_rows=other_rows))
    recompiled = programs.compile_program(programs.planned_run(with_other_rows, config, devices, find), "update")
    needs = [program.refused or program.arguments + program.temporary for program in (update, recompiled)]
    if math.inf in needs:
        return planned
    return dataclasses.replace(planned, more=planned.more | {"rows": (needs[1] - needs[0]) / (other_rows - rows)})


def with_microbatch_rows(
    run: Configuration, config: ModelConfig, machine: Machine, find: Architectures
) -> Configuration:
    """Return the run with the rows of a microbatch that it would choose on the machine, if it leaves them open."""
    if run.learner.compute.microbatch_rows:
        return run
    layout = programs.planned_run(run, config, None, find, machine).outline.forward.layout
    return dataclasses.replace(run, learner=run.learner.computing(microbatch_rows=layout.rows))


def with_engine(run: configs.Run, **changes: Any) -> configs.Run:
    """Return the run with changes of ``rollout.engine``."""
    engine = dataclasses.replace(run.rollout.engine, **changes)
    return dataclasses.replace(run, rollout=dataclasses.replace(run.rollout, engine=engine))


def choose_slots(
    run: Configuration, config: ModelConfig, find: Architectures = architecture_of, machine: Machine | None = None
) -> tuple[Any, list[str]]:
    """Return the run with its number of slots, and a note if memory bounds it. A run that leaves it open takes the
    usual one, or half of it, a quarter, ..., until ``memory_of_sampling`` fits the device of the machine, or by default
    of this process. On devices of unknown memory, CPUs among them, and where no number fits, it takes the usual one.
    """
    if not isinstance(run, configs.Run) or run.rollout.engine.slots:
        return run, []
    _, where = programs.run_meshes(run, None, machine)
    memory, usual = machine.chip.memory if machine else memory_limit(where), with_engine(run, slots=USUAL_SLOTS)
    if memory == math.inf:
        return usual, []

    def most(run: configs.Run, least: int) -> tuple[int, int]:
        """Return the slots that fit, 0 where ``least`` do not, and the rows of a microbatch."""
        slots, rows = USUAL_SLOTS, 0
        while slots >= min(least, USUAL_SLOTS):
            tried = with_engine(run, slots=slots)
            target = programs.planned_run(tried, config, None, find, machine)
            assert isinstance(target.arrays, programs.SamplingArrays)
            rows = target.outline.forward.layout.rows
            if memory_of_sampling(tried, target.arrays, {}).total <= memory:
                return slots, rows
            slots //= 2
        return 0, rows

    parts, lora = batch_parts(where), run.learner.lora
    slots, rows = most(run, parts)
    if slots == USUAL_SLOTS:
        return usual, []
    others = {"--rollout.engine.kv_cache_dtype int8": with_engine(run, kv_cache_dtype="int8")}
    if not lora.packed:
        name, value = ("base", "nf4") if lora.rank else ("rank", 16)
        learner = dataclasses.replace(run.learner, lora=dataclasses.replace(lora, **{name: value}))
        others = {f"--learner.lora.{name} {value}": dataclasses.replace(run, learner=learner)} | others
    room = ((flag, most(other, max(2 * slots, parts))[0]) for flag, other in others.items())
    faster = next((f"; {flag} leaves room for {number} slots" for flag, number in room if number), "")
    if not slots:
        return usual, [f"no number of slots fits {memory / GIB:.1f} GiB by formula{faster}"]
    chosen = f"{slots} slots, microbatch_rows {rows}, remat {run.learner.compute.remat}"
    return with_engine(run, slots=slots), [f"chosen for {memory / GIB:.1f} GiB: {chosen}{faster}"]


def compilable(run: Any, config: ModelConfig, machine: Machine) -> tuple[Any, tuple[str, ...]]:
    """Return the run with an attention that can be compiled here, and a note if that is not its own."""
    if compute_for(run.learner, config, machine.chip.platform).attention != "cudnn" or is_installed(CUDNN):
        return run, ()
    learner = run.learner.computing(attention="xla")
    return dataclasses.replace(run, learner=learner), (
        "the run takes cuDNN's attention, which needs other memory; to compile that: pip install nvidia-cudnn-cu13",
    )


def _build_plan(
    target: programs.PlannedRun,
    machine: Machine,
    spots: roofline.Places,
    mean: int | None,
    compiled: dict[str, programs.Compiled],
    notes: Sequence[str],
) -> Plan:
    run, outline, arrays = target.run, target.outline, target.arrays
    todo = roofline.step_work(run, outline, arrays.learned, mean)
    sizes = run.mesh.sizes(machine.devices)
    traffics = roofline.traffic_by_formula(run, arrays, todo, sizes, spots)
    clock = machine.chip.clock
    costs = {}
    for name, program in compiled.items():
        if not program.refused:
            traffics[name] = roofline.sum_by_kind(
                roofline.traffic_of(c, spots) for loop in program.loops for c in loop.collectives
            )
            costs[name] = roofline.CompiledCost(program.cycles / clock if clock else 0.0, program.loops[0].moved)
    more = {"groups": bytes_per_device(arrays.packed) * run.learner.minibatches / outline.groups.count}
    sampling, repeated, decoding = None, [], []
    if isinstance(arrays, programs.SamplingArrays):
        sampling = memory_of_sampling(run, arrays, compiled)
        tensor = run.mesh.sampling_sizes(machine.devices)["tensor"]
        repeated = repeated_heads(arrays.sampled.config.cached_heads, tensor)
        filled = roofline.slot_occupancy(arrays, todo)
        form = arrays.build.form
        columns_read = "every slot to the longest one's length"
        columns_read = columns_read if form is None else f"each slot by its length ({form.platform} kernel)"
        decoding = [
            f"attention of decoding: {columns_read}, keys and values in {arrays.build.dtype}",
            f"decoding, by the engine's rules for {todo.completions} completions of {todo.mean} tokens "
            f"({'log-normal, sigma ' + str(roofline.SIGMA) if todo.mean < outline.groups.longest else 'all as long'}): "
            f"{filled.chunks} chunks read {filled.read:.1%} of the cache on average, and {filled.live:.1%} is live",
        ]
        more["slots"] = (sampling.cache + sampling.temporary) / arrays.sampler.rollout.engine.slots
    products = [  # where the compiler had a choice
        f"matrix products of {name}, as compiled: {', '.join(f'{n} by {kernel}' for kernel, n in counts.items())}"
        for name in ("update", "decode")
        if name in compiled and (counts := compiled[name].products)
    ]
    compute = outline.forward.compute
    options = []
    if compute.compiler:
        values = (f"{name} {str(value).lower()}" for name, value in compute.compiler)
        options = [f"options of the learner's compiler: {', '.join(values)}"]
    return Plan(
        run, machine, sizes, arrays.state, todo, outline.groups,
        memory_of_learning(run, arrays, compiled), sampling,
        tuple(roofline.step_parts(run, arrays, todo, machine.chip, traffics, costs)), compiled,
        (f"attention: {compute.attention}", *options, *products, *repeated, *decoding, *notes, *outline.notes), more,
    )  # fmt: skip


def candidate_runs(run: Any, config: ModelConfig, machine: Machine) -> list[Any]:
    """Return every mesh that divides heads, rows and devices, with some microbatches not larger than an update. More
    devices than key/value heads take copies of these, which divide the query heads evenly.
    """
    per_slice = (machine.devices - run.mesh.rollout) // run.mesh.slices // run.mesh.expert
    heads = config.attention.heads
    divides = [
        tensor
        for tensor in range(1, per_slice + 1)
        if per_slice % tensor == heads % tensor == run.learner.compute.row_tokens % tensor == 0
        and all(0 in (count % tensor, tensor % count) for count in config.cached_heads)
    ]
    groups = programs.planned_stage(run).groups(run)
    completions = groups.count * groups.each // run.learner.minibatches
    meshes = [
        dataclasses.replace(run.mesh, data=data, fsdp=per_slice // tensor // data, tensor=tensor)
        for tensor in divides
        for data in range(1, math.isqrt(per_slice // tensor) + 1)
        if per_slice // tensor % data == 0
    ]
    runs = []
    for mesh in meshes:
        parts = per_slice // mesh.tensor * mesh.slices * mesh.expert
        rows = [n * parts for n in (1, 2, 4, 8) if n == 1 or n * parts <= completions]
        learners = [run.learner.computing(microbatch_rows=n) for n in rows]
        runs += [dataclasses.replace(run, mesh=mesh, learner=learner) for learner in learners]
    return runs


def best_plans(
    run: Configuration,
    config: ModelConfig,
    machine: Machine,
    devices: list[Any] | None,
    mean: int | None,
    quick: bool,
    say: Callable[[str], None],
) -> list[Plan]:
    """Return the fastest plans that fit, the best first; compiled where that is possible, until a few fit. A formula's
    memory is rough, so plans that exceed it a little are compiled too.
    """
    ranked, enough = [], 3
    for number, candidate in enumerate(runs := candidate_runs(run, config, machine)):
        say(f"by formula: {number + 1} of {len(runs)}")
        planned = plan_run(candidate, config, machine, devices, mean, False)
        slots = planned.most("slots") // batch_parts(planned.mesh)
        if slots and planned.sampling.total > machine.chip.memory:  # with as many slots as fit
            slots = (1 << slots.bit_length() - 1) * batch_parts(planned.mesh)
            planned = plan_run(with_engine(planned.run, slots=slots), config, machine, devices, mean, False)
        ranked.append(planned)
    ranked.sort(key=lambda p: p.seconds)
    if quick or devices is None:
        return [p for p in ranked if p.fits][: 2 * enough]
    fitting: list[Plan] = []
    # Formulas may overestimate memory by so much.
    for candidate in [p for p in ranked if p.peak <= 1.3 * machine.chip.memory][: 3 * enough]:
        tried = plan_run(candidate.run, config, machine, devices, mean, True, False, say)
        fitting += [tried] if tried.fits else []
        if len(fitting) == enough:
            break
    return sorted(fitting, key=lambda p: p.seconds)
