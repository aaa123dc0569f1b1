"""A plan: what a run needs of a machine, by the compiler's word where there is one, and by formulas elsewhere."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxrl_llm.config import Configuration
from jaxrl_llm.learner.platform import compute_for, tokens_in_memory
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.plan import collectives, memory
from jaxrl_llm.plan.arrays import (
    Arrays,
    Learned,
    SamplingArrays,
    abstract_mesh,
    abstract_model,
    arrays,
    bytes_per_device,
    meshes,
)
from jaxrl_llm.plan.formulas import Work, work
from jaxrl_llm.plan.lowering import Compiled, Subject, compile_one, names, planned_stage, subject
from jaxrl_llm.plan.machines import Machine
from jaxrl_llm.plan.memory import Memory
from jaxrl_llm.plan.network import Places, by_kind, hosts, places, traffic
from jaxrl_llm.plan.roofline import Phase, phases
from jaxrl_llm.plan.shapes import architectures
from jaxrl_llm.plan.topology import compiles_cudnn
from jaxrl_llm.stages.critic import Architectures
from jaxrl_llm.stages.outline import Groups, Outline


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a run on a machine.

    Attributes:
      run: with its settings resolved.
      machine: that it is planned for.
      mesh: sizes of data, fsdp and tensor.
      parameters: of the model.
      work: of a step.
      groups: what a step learns from.
      learning: memory of one device while it learns.
      sampling: and while it samples; None where the run's steps sample nothing.
      phases: of a step, with their least times.
      compiled: programs by name; empty where all is by formula.
      chosen: what computes attention and matrix products, and what was taken for granted, in words.
      more: bytes that one more of each adds to a device: "groups", "slots", "rows" of a microbatch.
    """

    run: Any
    machine: Machine
    mesh: tuple[int, int, int]
    parameters: int
    work: Work
    groups: Groups
    learning: Memory
    sampling: Memory | None
    phases: tuple[Phase, ...]
    compiled: dict[str, Compiled]
    chosen: tuple[str, ...]
    more: dict[str, float]

    @property
    def refused(self) -> tuple[str, ...]:
        """The programs that need more memory than there is."""
        return tuple(name for name, one in self.compiled.items() if one.refused)

    @property
    def halves(self) -> dict[str, Memory]:
        """The memory of one device, by what it does."""
        found = {} if self.sampling is None else {"sampling": self.sampling}
        return found | {"learning": self.learning}

    @property
    def peak(self) -> float:
        """Bytes of one device, at the worse of both halves."""
        return max(half.total for half in self.halves.values())

    @property
    def fits(self) -> bool:
        """Whether both halves do."""
        return self.peak <= self.machine.chip.memory

    @property
    def seconds(self) -> float:
        """Of a step at least: its parts follow each other, or sampling and learning run side by side."""
        sampled = sum(p.seconds for p in self.phases if p.samples)
        learned = sum(p.seconds for p in self.phases if not p.samples)
        return max(sampled, learned) if self.run.mesh.rollout else sampled + learned

    @property
    def slowest(self) -> Phase:
        """The part that takes longest."""
        return max(self.phases, key=lambda p: p.seconds)

    def utilisation(self, seconds: float) -> float:
        """Share of the machine's peak that the training FLOPs would take in that time (MFU)."""
        return self.work.train_flops / (seconds * self.machine.devices * self.machine.chip.flops)

    @property
    def most_groups(self) -> int:
        """The largest number of groups whose data fits beside the rest."""
        free = self.machine.chip.memory - self.learning.total
        unit = self.run.learner.minibatches
        return max(int((self.groups.count + free / self.more["groups"]) // unit * unit), 0)

    @property
    def most_slots(self) -> int:
        """The largest ``rollout.slots`` that fits, if temporaries grow as the cache does: they grow less.

        0 where nothing is sampled.
        """
        if self.sampling is None:
            return 0
        free = self.machine.chip.memory - self.sampling.total
        unit = self.mesh[0] * self.mesh[1]
        return max(int((self.run.rollout.slots + free / self.more["slots"]) // unit * unit), 0)

    @property
    def most_rows(self) -> int | None:
        """The largest ``learner.microbatch_rows`` whose activations fit beside the rest; None where it is not known."""
        if "rows" not in self.more:
            return None
        free = self.machine.chip.memory - self.learning.total
        unit = self.mesh[0] * self.mesh[1]
        return max(int((self.run.learner.microbatch_rows + free / self.more["rows"]) // unit * unit), 0)


def plan(
    run: Configuration,
    config: ModelConfig,
    machine: Machine,
    devices: list[Any] | None,
    mean: int | None,
    compiling: bool,
    more: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Plan:
    """A plan for the run.

    Args:
      run: resolved.
      config: the model's.
      machine: what is planned for.
      devices: as their compiler describes them; None where all is by formula.
      mean: tokens of a completion, for the times; None for the longest. Memory is always that of the longest.
      compiling: whether the run's programs are compiled; if not all is by formula.
      more: find out how large microbatches may be, which takes one more compilation.
      say: told what is being compiled.
    """
    run, lacking = compilable(run, config, machine) if compiling else (run, ())
    find, assumed = architectures(run, config)
    run = with_rows(run, config, machine, find)
    notes = (*lacking, *assumed)
    if not compiling:
        outline, held, spots = by_formula(run, config, machine, devices, find)
        return _assembled(run, machine, held, (outline, work(run, outline, held.learned, mean)), spots, {}, notes)
    one = subject(run, config, devices or [], find)
    done = {}
    for name in names(one):
        say(f"compiling {name} for {machine.name}")
        done[name] = compile_one(one, name)
    todo = work(run, one.outline, one.arrays.learned, mean)
    spots = places(machine, one.mesh.devices.flat)
    found = _assembled(run, machine, one.arrays, (one.outline, todo), spots, done, notes)
    if not more:
        return found
    say(f"compiling update for {machine.name} with other microbatches")
    again = functools.partial(subject, config=config, devices=devices, find=find)
    return dataclasses.replace(found, more=found.more | row_bytes(run, again, machine.devices, done["update"]))


def with_rows(run: Configuration, config: ModelConfig, machine: Machine, find: Architectures) -> Configuration:
    """The run with the rows of a microbatch that it would choose on the machine, where it leaves them open."""
    if run.learner.microbatch_rows:
        return run
    mesh = abstract_mesh(run.mesh.sizes(machine.devices), machine.chip.platform)
    where = abstract_mesh(run.mesh.sampling_sizes(machine.devices), machine.chip.platform)
    found = planned_stage(run).outline(run, abstract_model(config, run.learner.dtype), mesh, where, find).forward
    layout = found.layout
    sizes = (mesh.shape["fsdp"], mesh.shape["tensor"])
    tokens = tokens_in_memory(run.learner, found.compute, config, layout.row_tokens, sizes, machine.chip.memory)
    rows = min(layout.rows, layout.parts * max(int(tokens // layout.row_tokens), 1))
    return dataclasses.replace(run, learner=dataclasses.replace(run.learner, microbatch_rows=rows))


def by_formula(
    run: Configuration, config: ModelConfig, machine: Machine, devices: list[Any] | None, find: Architectures
) -> tuple[Outline, Arrays, Places]:
    """What the run computes and keeps, and where its partitions are, on devices that need not be described."""
    platform = machine.chip.platform
    if devices is None:
        mesh = abstract_mesh(run.mesh.sizes(machine.devices), platform)
        where = abstract_mesh(run.mesh.sampling_sizes(machine.devices), platform)
        spots = hosts(machine)
    else:
        mesh, where = meshes(run, devices)
        spots = places(machine, mesh.devices.flat)
    model = abstract_model(config, run.learner.dtype)
    outline = planned_stage(run).outline(run, model, mesh, where, find)
    return outline, arrays(outline, model, mesh, where), spots


def compilable(run: Any, config: ModelConfig, machine: Machine) -> tuple[Any, tuple[str, ...]]:
    """The run with an attention that can be compiled here, and what to know where that is not its own."""
    if compute_for(run.learner, config, machine.chip.platform).attention != "cudnn" or compiles_cudnn():
        return run, ()
    learner = dataclasses.replace(run.learner, attention="xla")
    return dataclasses.replace(run, learner=learner), (
        "the run takes cuDNN's attention, which needs less memory; to compile that: pip install nvidia-cudnn-cu13",
    )


def row_bytes(run: Any, again: Callable[[Any], Subject], devices: int, update: Compiled) -> dict[str, float]:
    """What a row of a microbatch adds to an update's memory, from compiling it with twice as many.

    Half as many if refused. ``again``: the programs of a run with other settings.
    """
    rows = run.learner.microbatch_rows
    unit = math.prod(run.mesh.sizes(devices)[:2])
    other = 2 * rows if not update.refused else rows // 2 // unit * unit
    if not other:
        return {}
    changed = dataclasses.replace(run, learner=dataclasses.replace(run.learner, microbatch_rows=other))
    larger = compile_one(again(changed), "update")
    needs = [one.refused or one.arguments + one.temporary for one in (update, larger)]
    return {"rows": (needs[1] - needs[0]) / (other - rows)} if math.inf not in needs else {}


def _assembled(
    run: Configuration,
    machine: Machine,
    held: Arrays,
    planned: tuple[Outline, Work],
    spots: Places,
    done: dict[str, Compiled],
    notes: Sequence[str],
) -> Plan:
    outline, todo = planned
    sizes = run.mesh.sizes(machine.devices)
    base = memory.resident(held)
    traffics = collectives.by_formula(run, held, todo, sizes, spots)
    traffics |= {
        name: by_kind(traffic(c, spots) for c in one.collectives) for name, one in done.items() if not one.refused
    }
    learn = memory.learning_temporary(run, held, done, base)
    more = {"groups": bytes_per_device(held.packed) * run.learner.minibatches / outline.groups.count}
    sampling = None
    if isinstance(held, SamplingArrays):
        sample = memory.sampling_temporary(held, done, held.slot_shape.parts)
        sampling = memory.sampling(run, held, base, sample, bool(done))
        more["slots"] = (sampling.cache + sample) / held.rollout.slots
    return Plan(
        run, machine, sizes, parameters(held.learned[0]), todo, outline.groups,
        memory.learning(run, held, base, learn, bool(done)), sampling,
        tuple(phases(run, held, todo, machine.chip, sizes[0] * sizes[1], traffics)),
        done,
        (f"attention: {outline.forward.compute.attention}", *_products(done), *notes, *outline.notes),
        more,
    )  # fmt: skip


def parameters(policy: Learned) -> int:
    """Of the model that learns, an adapter left out."""
    role = policy.role
    return sum(x.size for x in jax.tree.leaves(role.params if role.base is None else role.base))


def _products(done: dict[str, Compiled]) -> list[str]:
    """Who computes the matrix products of the update and of decoding, where the compiler had a choice."""
    found = []
    for name in ("update", "decode"):
        products = done[name].products if name in done else {}
        if products:
            shares = ", ".join(f"{count} by {who}" for who, count in products.items())
            found.append(f"matrix products of {name}, as compiled: {shares}")
    return found
