"""A plan: what a run needs of a machine, by the compiler's word where there is one, and by formulas elsewhere."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_llm.config import Run
from jaxrl_llm.learner.platform import compute_for, layout_for
from jaxrl_llm.models.compute import Compute
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.plan import collectives, memory
from jaxrl_llm.plan.arrays import Arrays, abstract_mesh, arrays, bytes_per_device, meshes
from jaxrl_llm.plan.formulas import Work, counts, work
from jaxrl_llm.plan.lowering import Compiled, compile_one, names, subject
from jaxrl_llm.plan.machines import Machine
from jaxrl_llm.plan.memory import Memory
from jaxrl_llm.plan.network import Places, by_kind, hosts, places, traffic
from jaxrl_llm.plan.roofline import Device, Phase, phases
from jaxrl_llm.plan.topology import compiles_cudnn


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a run on a machine.

    Attributes:
      run: with its settings resolved.
      machine: that it is planned for.
      mesh: sizes of data, fsdp and tensor.
      parameters: of the model.
      work: of a step.
      learning: memory of one device while it learns.
      sampling: and while it samples.
      phases: of a step, with their least times.
      compiled: programs by name; empty where all is by formula.
      chosen: what computes attention and matrix products, in words.
      more: bytes that one more of each adds to a device: "prompts", "slots", "rows" of a microbatch.
    """

    run: Run
    machine: Machine
    mesh: tuple[int, int, int]
    parameters: int
    work: Work
    learning: Memory
    sampling: Memory
    phases: tuple[Phase, ...]
    compiled: dict[str, Compiled]
    chosen: tuple[str, ...]
    more: dict[str, float]

    @property
    def refused(self) -> tuple[str, ...]:
        """The programs that need more memory than there is."""
        return tuple(name for name, one in self.compiled.items() if one.refused)

    @property
    def peak(self) -> float:
        """Bytes of one device, at the worse of both halves."""
        return max(self.learning.total, self.sampling.total)

    @property
    def fits(self) -> bool:
        """Whether both halves do."""
        return self.peak <= self.machine.chip.memory

    @property
    def seconds(self) -> float:
        """Of a step at least: its parts follow each other, or sampling and learning run side by side."""
        learned = sum(p.seconds for p in self.phases if p.name in ("score", "update"))
        sampled = sum(p.seconds for p in self.phases) - learned
        return max(sampled, learned) if self.run.mesh.rollout else sampled + learned

    @property
    def slowest(self) -> Phase:
        """The part that takes longest."""
        return max(self.phases, key=lambda p: p.seconds)

    def utilisation(self, seconds: float) -> float:
        """Share of the machine's peak that the training FLOPs would take in that time (MFU)."""
        return self.work.train_flops / (seconds * self.machine.devices * self.machine.chip.flops)

    @property
    def most_prompts(self) -> int:
        """The largest ``rollout.prompts`` whose data fits beside the rest."""
        free = self.machine.chip.memory - self.learning.total
        unit = self.run.learner.minibatches
        return max(int((self.run.rollout.prompts + free / self.more["prompts"]) // unit * unit), 0)

    @property
    def most_slots(self) -> int:
        """The largest ``rollout.slots`` that fits, if temporaries grow as the cache does: they grow less."""
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
    run: Run,
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
    sizes = run.mesh.sizes(machine.devices)
    run, lacking = compilable(run, config, machine) if compiling else (run, ())
    compute = compute_for(run.learner, config, machine.chip.platform)
    if not compiling:
        described = abstract_mesh(sizes), abstract_mesh(run.mesh.sampling_sizes(machine.devices))
        mesh, where = described if devices is None else meshes(run, devices)
        spots = hosts(machine) if devices is None else places(machine, mesh.devices.flat)
        lengths = run.rollout.max_length, run.rollout.max_new_tokens
        layout = layout_for(run.learner, compute, *lengths, mesh, machine.chip.platform)
        held = arrays(run, config, layout, mesh, where)
        todo = work(run, config, layout, mean)
        return _assembled(run, config, machine, sizes, held, todo, compute, spots, {})
    one = subject(run, config, devices)
    done = {}
    for name in names(one):
        say(f"compiling {name} for {machine.name}")
        done[name] = compile_one(one, name)
    todo = work(run, config, one.programs.forward.layout, mean)
    spots = places(machine, one.mesh.devices.flat)
    found = _assembled(run, config, machine, sizes, one.arrays, todo, compute, spots, done)
    found = dataclasses.replace(found, chosen=(*found.chosen, *lacking))
    if not more:
        return found
    say(f"compiling update for {machine.name} with other microbatches")
    return dataclasses.replace(found, more=found.more | row_bytes(run, config, devices, done["update"]))


def compilable(run: Run, config: ModelConfig, machine: Machine) -> tuple[Run, tuple[str, ...]]:
    """The run with an attention that can be compiled here, and what to know where that is not its own."""
    if compute_for(run.learner, config, machine.chip.platform).attention != "cudnn" or compiles_cudnn():
        return run, ()
    learner = dataclasses.replace(run.learner, attention="xla")
    return dataclasses.replace(run, learner=learner), (
        "the run takes cuDNN's attention, which needs less memory; to compile that: pip install nvidia-cudnn-cu13",
    )


def row_bytes(run: Run, config: ModelConfig, devices: list[Any], update: Compiled) -> dict[str, float]:
    """What a row of a microbatch adds to an update's memory, from compiling it with twice as many.

    Half as many if refused.
    """
    rows = run.learner.microbatch_rows
    unit = math.prod(run.mesh.sizes(len(devices))[:2])
    other = 2 * rows if not update.refused else rows // 2 // unit * unit
    if not other:
        return {}
    changed = dataclasses.replace(run, learner=dataclasses.replace(run.learner, microbatch_rows=other))
    again = compile_one(subject(changed, config, devices), "update")
    needs = [one.refused or one.arguments + one.temporary for one in (update, again)]
    return {"rows": (needs[1] - needs[0]) / (other - rows)} if math.inf not in needs else {}


def _assembled(
    run: Run,
    config: ModelConfig,
    machine: Machine,
    sizes: tuple[int, int, int],
    held: Arrays,
    todo: Work,
    compute: Compute,
    spots: Places,
    done: dict[str, Compiled],
) -> Plan:
    base = memory.resident(held)
    device = _device(machine, held, sizes)
    traffics = collectives.by_formula(run, config, held, todo, sizes, spots)
    traffics |= {
        name: by_kind(traffic(c, spots) for c in one.collectives) for name, one in done.items() if not one.refused
    }
    learn, sample = _temporaries(run, config, held, todo, device, done)
    sampler = memory.sampling(run, held, base, sample, bool(done))
    return Plan(
        run, machine, sizes, counts(config).total, todo,
        memory.learning(run, held, base, learn, bool(done)), sampler,
        tuple(phases(run, config, held, todo, device, compute, traffics)),
        done,
        (f"attention: {compute.attention}", *_products(done)),
        {
            "prompts": bytes_per_device(held.packed) * run.learner.minibatches / run.rollout.prompts,
            "slots": (sampler.cache + sample) / run.rollout.slots,
        },
    )  # fmt: skip


def _products(done: dict[str, Compiled]) -> list[str]:
    """Who computes the matrix products of the update and of decoding, where the compiler had a choice."""
    found = []
    for name in ("update", "decode"):
        products = done[name].products if name in done else {}
        if products:
            shares = ", ".join(f"{count} by {who}" for who, count in products.items())
            found.append(f"matrix products of {name}, as compiled: {shares}")
    return found


def _device(machine: Machine, held: Arrays, sizes: tuple[int, int, int]) -> Device:
    """One device's share: of a matrix product it does as much as it holds of the weights to sample from."""
    leaves = jax.tree.leaves(held.sampled)
    share = bytes_per_device(held.sampled) / sum(x.size * x.dtype.itemsize for x in leaves)
    return Device(machine.chip, share, sizes[0] * sizes[1], held.slot_shape.parts)


def _temporaries(
    run: Run, config: ModelConfig, held: Arrays, todo: Work, device: Device, done: dict[str, Compiled]
) -> tuple[float, float]:
    """What learning and sampling need beside the arrays that are counted by kind."""
    if not done:
        learn = memory.update_temporary(run, config, held, todo, device.parts, device.share)
        return learn, memory.sampling_temporary(run, config, held, device.slot_parts, device.share)
    size = bytes_per_device
    state = size(held.state)
    sampled = size(held.sampled)
    slots = size(held.slots)
    learn = memory.compiled_temporary(done["update"], state + size(held.packed))
    waiting = done["prompts"].outputs + done["prompts"].arguments - sampled
    waiting = max(waiting, 0) * memory.prompts_waiting(run, device.slot_parts)
    decode = memory.compiled_temporary(done["decode"], sampled + slots)
    weights = done.get("weights", Compiled("weights"))
    moving = weights.refused or weights.temporary + max(weights.outputs - sampled, 0)
    refill = memory.compiled_temporary(done["refill"], slots + waiting)
    # The blocks that prompts had before, while they become more.
    blocks = size(held.slots.blocks) / 2
    # Slots are empty while weights are laid out; what one call of prompts returns is already among those that wait.
    busiest = max(decode, blocks, refill, done["prompts"].temporary)
    return learn, max(busiest + waiting, moving - slots)
