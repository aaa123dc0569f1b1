"""The programs of a run, compiled for a machine from shapes alone: no array is made."""

import dataclasses
import functools
import json
import re
import time
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxrl_llm import sharding
from jaxrl_llm.config import Configuration, split_step, without_step
from jaxrl_llm.config.origin import SAVED_RUNS
from jaxrl_llm.engine.engine import cache_dtype, for_sampling
from jaxrl_llm.engine.requests import Request, SlotShape
from jaxrl_llm.engine.sampling import draw_options as asked_of
from jaxrl_llm.engine.sampling import to_traced
from jaxrl_llm.engine.scheduler import EngineSpec, bucket_length, call_rows, chunk_shape, prefill_shape
from jaxrl_llm.engine.slots import (
    Slots,
    empty_admission,
    empty_slots,
    extend_prompts,
    fill_slots,
    run_chunk,
    slot_shardings,
)
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.learner import Forward, Training
from jaxrl_llm.learner.batch import Packed, packed_shapes
from jaxrl_llm.learner.forward import batch_shardings, jitted_score
from jaxrl_llm.learner.update import planned_data
from jaxrl_llm.models.config import Lora, ModelConfig
from jaxrl_llm.models.decode_kernels import form_for
from jaxrl_llm.models.decoder import Adapter, Decoder, cast, initialise
from jaxrl_llm.models.decoding import empty_cache
from jaxrl_llm.models.heads import ScalarModel
from jaxrl_llm.models.hf import read_config
from jaxrl_llm.models.lora import frozen_base, frozen_form, model_of, policy_shapes
from jaxrl_llm.models.peft import base_model_name, is_adapter
from jaxrl_llm.models.pretrained import model_config_of
from jaxrl_llm.plan import hlo
from jaxrl_llm.plan.hlo import HloLoop, cycles, find_loops
from jaxrl_llm.plan.machines import Machine
from jaxrl_llm.runs import architecture_of, find_run
from jaxrl_llm.sharding.mesh import Chip, without_compilation_cache
from jaxrl_llm.sharding.rules import bytes_per_device, parameter_path
from jaxrl_llm.stages import stage_of
from jaxrl_llm.stages.stage import Architectures, Outline, Pass, PlannedSampler
from jaxrl_llm.system import storage
from jaxrl_llm.types import Prompt, Role, TrainState


@dataclasses.dataclass(frozen=True)
class PlannedModel:
    """A model on the devices, and ``packed``, the data of one call of a program. ``name``: "update" for the policy, or
    that of another role or of a pass. ``predicts``: whether it predicts tokens; a scalar model does not.
    ``microbatches``: non-empty ones of the data.
    """

    name: str
    forward: Forward
    predicts: bool
    model: Any
    packed: Packed
    microbatches: int

    @functools.cached_property
    def gathered(self) -> Any:
        """The model as its layers read it: in the compute type, divided over the tensor axis alone."""
        narrow = jax.eval_shape(lambda m: cast(m, self.forward.compute.dtype), self.model)
        return sharding.as_shapes(narrow, sharding.sampling_shardings(narrow, self.forward.mesh))

    @property
    def width(self) -> int:
        """Return the bytes of a number in the compute type of the model's layers."""
        return jnp.dtype(self.forward.compute.dtype).itemsize


@dataclasses.dataclass(frozen=True)
class PlannedRole(PlannedModel):
    """One role on the devices, with its training functions; ``role`` has its weights and optimiser."""

    training: Training
    role: Role

    @property
    def adapter(self) -> int | None:
        """Return the number of weights of its adapter, as in ``training_flops``; None if the whole model learns."""
        return sum(x.size for x in jax.tree.leaves(self.role.params)) if isinstance(self.role.params, Adapter) else None


@dataclasses.dataclass(frozen=True)
class PlannedPass(PlannedModel):
    """A pass on the devices; ``spec``: the pass to run."""

    spec: Pass


@dataclasses.dataclass(frozen=True)
class Arrays:
    """All arrays on the devices, as ``ShapeDtypeStruct`` with sharding: ``state`` (weights, optimiser, reference);
    ``packed``, one optimiser update's data, for all roles; ``learned``, one for each role, the policy first;
    ``passes``.
    """

    state: TrainState
    packed: Packed
    learned: tuple[PlannedRole, ...]
    passes: tuple[PlannedPass, ...]


@dataclasses.dataclass(frozen=True)
class SamplingArrays(Arrays):
    """All arrays of a run that samples: also the weights to sample from, and the engine's slots at their largest."""

    sampler: PlannedSampler
    sampled: Decoder
    slots: Slots
    slot_shape: SlotShape
    build: EngineSpec


def abstract_mesh(sizes: Mapping[str, int], chip: Chip | None = None) -> AbstractMesh:
    """Return a mesh without devices, for arrays on chips: enough to compute the size of each device's part."""
    device = AbstractDevice(chip.name, None, chip.platform) if chip else None
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes), abstract_device=device)


def abstract_model(config: ModelConfig, dtype: str) -> Decoder:
    """Return the model as shapes."""
    return jax.eval_shape(lambda key: initialise(config, key, jnp.dtype(dtype)), jax.random.key(0))


def planned_arrays(outline: Outline, initial: Decoder, mesh: Any, where: Any, lora: Lora = Lora()) -> Arrays:
    """Return the run's arrays, where ``mesh`` learns and ``where`` samples (either may be abstract). ``initial``: the
    policy at the start as it is sampled from, as shapes.
    """
    state = outline.state
    if state.policy.base is not None:
        convert = functools.partial(frozen_form, lora=lora, mesh=mesh)
        state = state.with_role("policy", base=jax.eval_shape(convert, state.policy.base))
    state = sharding.as_shapes(state, sharding.shardings(state, mesh))
    samples = outline.samples(outline.groups.longest)
    packed, microbatches = planned_data(samples, outline.forward, outline.training)
    learned = []
    for training in outline.training:
        role = state.roles[training.role]._replace(base=frozen_base(state, training.role))
        model, forward = model_of(state, training.role), outline.forwards[training.role]
        name = "update" if training.role == "policy" else training.role
        predicts = not isinstance(model, ScalarModel)
        learned.append(PlannedRole(name, forward, predicts, model, packed, microbatches, training, role))
    passes = []
    for spec in outline.passes:
        mesh_of_pass = spec.forward.mesh
        model = (
            model_of(state, spec.role)
            if spec.role
            else sharding.as_shapes(spec.model, sharding.shardings(spec.model, mesh_of_pass))
        )
        data, count = packed_shapes(spec.samples, spec.forward.layout)
        data = sharding.as_shapes(data, batch_shardings(data, mesh_of_pass))
        predicts = spec.output != "values"
        passes.append(PlannedPass(spec.name, spec.forward, predicts, model, data, count, spec))
    planned = Arrays(state, packed, tuple(learned), tuple(passes))
    if outline.sampler is None:
        return planned
    return _with_sampling(planned, outline.sampler, initial, jnp.dtype(outline.forward.compute.dtype), where)


def _with_sampling(arrays: Arrays, sampler: PlannedSampler, model: Decoder, dtype: Any, where: Any) -> SamplingArrays:
    """Add the sampling weights, and all slots at their largest: longest prompts and completions, most prompt blocks."""
    rollout = sampler.rollout
    sampled = jax.eval_shape(lambda m: for_sampling(m, sharding.platform_of(where), dtype=dtype), model)
    engine = rollout.engine
    group = 1 if engine.strict else min(rollout.group, engine.slots)
    form = form_for(model.config.widest_attention, engine.slots, where) if engine.attention == "auto" else None
    build = EngineSpec(
        model.config,
        cache_dtype(engine.kv_cache_dtype, dtype),
        engine.slots,
        rollout.max_length,
        engine.chunk,
        where,
        engine.strict,
        group,
        form,
    )
    prompt = Prompt(np.zeros(rollout.max_prompt_tokens, np.int32))
    most = rollout.max_new_tokens
    at_their_end = [Request(i, prompt, 0, most, num_sampled=most - 1, block_key=i) for i in range(engine.slots)]
    shape = chunk_shape(build, sampler.rules, at_their_end, None, False)
    shape = shape._replace(blocks=shape.rows)
    with jax.sharding.use_abstract_mesh(where.abstract_mesh):
        slots = jax.eval_shape(lambda: empty_slots(model.config, shape, build.dtype, None, sampler.rules.repetition))
    return SamplingArrays(
        **vars(arrays), sampler=sampler,
        sampled=sharding.as_shapes(sampled, sharding.sampling_shardings(sampled, where)),
        slots=sharding.as_shapes(slots, slot_shardings(slots, where)), slot_shape=shape, build=build,
    )  # fmt: skip


def sampling_bytes(arrays: SamplingArrays, apart: bool) -> int:
    """Return the bytes of the weights to sample from on one device, without those of a frozen model that the learner
    holds there in the same layout. ``apart``: whether other devices sample.
    """
    base = {} if apart else {parameter_path(p): x for p, x in jax.tree.leaves_with_path(arrays.state.policy.base)}

    def is_shared(path: tuple, x: Any) -> bool:
        learned = base.get(parameter_path(path))
        key = lambda x: (x.dtype, x.sharding.shard_shape(x.shape))  # noqa: E731
        return learned is not None and key(learned) == key(x)

    return bytes_per_device([x for path, x in jax.tree.leaves_with_path(arrays.sampled) if not is_shared(path, x)])


def device_share(tree: Any) -> float:
    """Return one device's share of arrays by bytes, which is also its share of their matrix products."""
    return bytes_per_device(tree) / sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def prompt_calls(tokens: int, parts: int) -> tuple[int, int, int]:
    """Return how prompts of ``tokens`` tokens are prefilled: sequences per call, tokens per call, calls per prompt."""
    shape = prefill_shape(tokens)
    return call_rows(shape.piece * shape.calls, parts), shape.piece, shape.calls


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A compiled program and its needs on one device. ``arguments``, ``outputs``, ``temporary``: bytes; outputs are in
    new memory. ``cycles``: of a TPU's core in one call, by its compiler, without kernels of Pallas and collectives; 0
    on GPUs. ``products``: matrix products by implementation, which a GPU's compiler chooses. ``seconds``: of
    compilation. ``refused``: bytes that it would need, if that is more than the device has; the other numbers are then
    0.
    """

    arguments: int = 0
    outputs: int = 0
    temporary: int = 0
    loops: tuple[HloLoop, ...] = ()
    cycles: float = 0.0
    products: Mapping[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    refused: float = 0.0
    text: str = dataclasses.field(default="", repr=False)


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A resolved run on described devices, ready to compile: ``arrays`` are the arguments of the trainer's functions.
    ``mesh`` learns and ``where`` samples; both are abstract where nothing is compiled.
    """

    run: Configuration
    mesh: Any
    where: Any
    outline: Outline
    arrays: Arrays


def planned_run(
    run: Configuration,
    config: ModelConfig,
    devices: list[Any] | None,
    find: Architectures = architecture_of,
    machine: Machine | None = None,
) -> PlannedRun:
    """Return the run's functions and their arguments on these devices. ``find``: returns the architecture of other
    models. Without devices the meshes are abstract, of the ``machine``, and nothing can be compiled.
    """
    mesh, where = run_meshes(run, devices, machine)
    model, lora = abstract_model(config, run.learner.initial_dtype), run.learner.lora
    outline = planned_stage(run).outline(run, model, mesh, where, find)
    policy = policy_shapes(model, lora, mesh)
    return PlannedRun(run, mesh, where, outline, planned_arrays(outline, policy, mesh, where, lora))


def run_meshes(run: Configuration, devices: list[Any] | None, machine: Machine | None = None) -> tuple[Any, Any]:
    """Return the run's meshes for learning and for sampling, of these devices, or abstract ones of the machine."""
    if devices is not None or machine is None:
        return sharding.make_mesh(run.mesh, devices), sharding.rollout_mesh(run.mesh, devices)
    sizes = run.mesh.sizes(machine.devices), run.mesh.sampling_sizes(machine.devices)
    return abstract_mesh(sizes[0], machine.chip), abstract_mesh(sizes[1], machine.chip)


def planned_stage(run: Configuration) -> ModuleType:
    """Return the module of the run's kind of training, which outlines its computation."""
    stage = stage_of(run)
    kind = type(run).__name__
    require(hasattr(stage, "outline"), f"a {kind} cannot be planned: its stage has no outline (stages/stage.py)")
    return stage


def lower_program(target: PlannedRun, name: str) -> jax.stages.Lowered:
    """Lower a program of the run, at its largest: all slots, the longest prompts, the last call of several. ``weights``
    casts and lays out the policy for sampling, and ``refill`` fills slots and blocks with a call's prompts.
    """
    arrays = target.arrays
    scalar = jax.ShapeDtypeStruct((), np.float32)
    for planned in arrays.learned:
        if planned.name == name:
            trained = planned.training
            coefficients = dict.fromkeys(target.outline.coefficients[trained.role], scalar)
            with jax.set_mesh(target.mesh):
                return trained.update.lower(arrays.state, trained.reads(arrays.packed), coefficients)
    for planned_pass in arrays.passes:
        if planned_pass.name == name:
            with jax.set_mesh(planned_pass.forward.mesh):
                compute = planned_pass.forward.compute
                program = jitted_score(compute.compiler)
                return program.lower(planned_pass.model, planned_pass.packed, scalar, compute, planned_pass.spec.output)
    assert isinstance(arrays, SamplingArrays)
    sampler = arrays.sampler
    if name == "weights":
        with jax.set_mesh(target.mesh):
            transfer: Any = sampler.transfer(target.mesh, target.where)
            return transfer.lower(model_of(arrays.state))
    shape, where = arrays.slot_shape, target.where
    rows, piece, calls = prompt_calls(sampler.rollout.max_prompt_tokens, sharding.batch_parts(where))
    dtype = arrays.build.dtype
    with jax.set_mesh(where):
        cache = jax.eval_shape(lambda: empty_cache(arrays.sampled.config, rows, bucket_length(calls * piece), dtype))
        cache = sharding.as_shapes(cache, slot_shardings(cache, where))
        if name == "prompts":
            lengths = jax.ShapeDtypeStruct((rows,), np.int32)
            tokens = jax.ShapeDtypeStruct((rows, piece), np.int32)
            before = cache if calls > 1 else None
            return extend_prompts.lower(arrays.sampled, before, lengths, tokens, lengths, cache.columns, where, dtype)
        if name == "refill":
            waiting = jax.eval_shape(lambda: empty_admission(shape, cache.v.shape[1], sampler.rules.repetition))
            return fill_slots.lower(arrays.slots, cache, waiting, where)
        rules = jax.eval_shape(lambda: to_traced(sampler.rules))
        chunk = sampler.rollout.engine.chunk
        options = {"group": shape.group, "mesh": where, "form": arrays.build.form}
        return run_chunk.lower(arrays.sampled, arrays.slots, rules, chunk, asked_of(sampler.rules), **options)


def program_meshes(target: PlannedRun) -> dict[str, Mesh]:
    """Return the run's programs in order, each with its mesh; weights that move to other devices need none."""
    meshes = {}
    if isinstance(target.arrays, SamplingArrays):
        adapter = getattr(target.arrays.sampled.weights.blocks, "adapter", None)
        meshes = {} if target.run.mesh.rollout or adapter is not None else {"weights": target.mesh}
        meshes |= dict.fromkeys(("prompts", "refill", "decode"), target.where)
    return meshes | {model.name: model.forward.mesh for model in (*target.arrays.passes, *target.arrays.learned)}


def compile_program(target: PlannedRun, name: str) -> Compiled:
    """Compile one of the programs; one that needs more memory than the device has is returned as refused."""
    began = time.monotonic()
    with without_compilation_cache():
        try:
            compiled = lower_program(target, name).compile()
        except jax.errors.JaxRuntimeError as error:
            return Compiled(seconds=time.monotonic() - began, refused=memory_needed(str(error)))
    memory = compiled.memory_analysis()
    text = str(compiled.as_text())
    # Trip counts of loops with a bound in the data: microbatches and chunks of predictions, or decode steps.
    repeats: tuple[float, ...] = ()
    if isinstance(target.arrays, SamplingArrays) and name == "decode":
        repeats = (target.arrays.sampler.rollout.engine.chunk,)
    for model in (*target.arrays.learned, *target.arrays.passes):
        if model.name == name:
            chunks = -(-model.packed.predictions.target.shape[-1] // model.forward.compute.head_chunk)
            repeats = (model.microbatches,) + (chunks,) * model.predicts
    program = hlo.parse_hlo(text, program_meshes(target)[name].size)
    return Compiled(
        memory.argument_size_in_bytes, memory.output_size_in_bytes - memory.alias_size_in_bytes,
        memory.temp_size_in_bytes, tuple(find_loops(program, repeats)), cycles(program, unknown=repeats),
        hlo.count_products(text), time.monotonic() - began, text=text,
    )  # fmt: skip


def memory_needed(text: str) -> float:
    """Return the bytes that a program would have needed, from the compiler's error; InputError for any other."""
    match = re.search(r"Used ([\d.]+)([KMGT]?) of|required for HLO temporaries \(([\d.]+)([KMGT]?)\)", text)
    require("RESOURCE_EXHAUSTED" in text or match is not None, f"the compiler failed: {text.splitlines()[0]}")
    if match is None:
        return float("inf")
    number, unit = match[1] or match[3], match[2] or match[4] or " "
    return float(number) * 2.0 ** (10 * " KMGT".index(unit))


def find_model_config(name: str) -> tuple[ModelConfig, str]:
    """Return the architecture of a model or adapter directory, .gguf file, built-in name, hub id or RUN[@STEP], and its
    source. The package holds a copy of config.json for well-known models, so that planning needs no network.
    """
    if name in published_configs() and not Path(name).is_dir():
        return read_config(published_configs()[name]), "its published shapes, copied into this package"
    trained = find_run(name)
    adapter = is_adapter(storage.folder(name))
    if trained is None and not adapter:
        return model_config_of(name)
    base = base_model_name(storage.folder(name)) if trained is None else without_step(trained.run.model)
    config, source = find_model_config(base)
    return config, f"of {'adapter' if adapter else 'run'} {name}: {source}"


def architecture_finder(policy: ModelConfig) -> tuple[Architectures, list[str]]:
    """Return a function from the name of a run's other model to its architecture, and the notes that it adds to. A run
    that has not been trained yet has no directory: the function assumes the policy's architecture and notes that. It
    raises InputError for a model that exists, but cannot be read.
    """
    notes: list[str] = []

    @functools.cache
    def find(name: str) -> ModelConfig:
        directory, _ = split_step(name)
        # Where there is no folder of runs yet, its name would read as a hub id.
        if directory.parent.name != SAVED_RUNS or directory.exists():
            try:
                return find_model_config(name)[0]
            except InputError:
                if directory.exists():
                    raise
        notes.append(f"{name} not found: planned as a model of the policy's architecture")
        return policy

    return find, notes


@functools.cache
def published_configs() -> dict[str, dict[str, Any]]:
    """Return the config.json of well-known models by hub id; attributes that change no shape are left out."""
    text = (resources.files("jaxrl_llm.plan") / "published.json").read_text()
    return {name: entry["config"] for entry in json.loads(text) for name in entry["names"]}
