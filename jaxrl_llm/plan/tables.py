"""Output of a plan for people and programs: tables, JSON, and a chart of one device's memory."""

import collections
import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

from jaxrl_llm.checkpoints.snapshots import snapshot_of
from jaxrl_llm.checkpoints.store import flatten
from jaxrl_llm.errors import InputError
from jaxrl_llm.plan.planning import Plan
from jaxrl_llm.plan.roofline import CYCLES
from jaxrl_llm.sharding.mesh import GIB
from jaxrl_llm.system.paths import new_file

GB = 1e9


@dataclasses.dataclass(frozen=True)
class Totals:
    """A run from its first step to its last, at the least time of a step. ``device_hours``: of all devices. ``cost``:
    in the currency of the price; None without one. ``checkpoint_bytes``, ``snapshot_bytes``: of one on disk.
    ``best_bytes``: of the models of the best evaluation, as of now and of each checkpoint, at most; 0 if none is kept.
    ``disk_bytes``: of ``output.keep`` checkpoints, one in writing, and one of an interruption. ``step_grace_s``: half
    of ``output.grace_s``, in which a step has to end after a signal; None if that is infinite.
    """

    steps: int
    run_s: float
    checkpoint_every_s: float
    device_hours: float
    cost: float | None
    checkpoint_bytes: int
    snapshot_bytes: int
    best_bytes: int
    disk_bytes: int
    step_grace_s: float | None


def totals_of(plan: Plan, price: float | None = None) -> Totals:
    """Return the whole of a planned run; ``price``: of one device for an hour."""
    run, step = plan.run, plan.seconds
    output = run.output
    run_s = run.steps * step
    # A step ends before a checkpoint is due by minutes, and the last step has one.
    minutes = math.ceil(60 * output.checkpoint_minutes / step) * step if output.checkpoint_minutes else math.inf
    hours = plan.machine.devices * run_s / 3600
    # Bytes on disk, before compression: those of the arrays.
    leaves = [jax.tree.leaves(flatten(state)) for state in (plan.state, snapshot_of(plan.state))]
    checkpoint, snapshot = (sum(math.prod(x.shape) * x.dtype.itemsize for x in arrays) for arrays in leaves)
    return Totals(
        run.steps, run_s, min(output.checkpoint_every * step, minutes, run_s), hours,
        None if price is None else hours * price,
        checkpoint, snapshot, output.keep_best * (output.keep + 2) * snapshot, (output.keep + 2) * checkpoint,
        None if math.isinf(output.grace_s) else output.grace_s / 2,
    )  # fmt: skip


def totals_lines(plan: Plan, totals: Totals) -> list[str]:
    """Return the lines about the whole run."""
    hours = f"{totals.device_hours:,.1f}" if totals.device_hours >= 1 else f"{totals.device_hours:.2g}"
    cost = "" if totals.cost is None else f", cost {totals.cost:,.2f} (at your price)"
    checkpoint, snapshot, models, disk = (
        format_bytes(count)
        for count in (totals.checkpoint_bytes, totals.snapshot_bytes, totals.best_bytes, totals.disk_bytes)
    )
    best = f", up to {models} for the best models (output.keep_best)" if totals.best_bytes else ""
    return [
        f"the run takes at least {format_seconds(totals.run_s)} ({totals.steps} steps): {hours} device "
        f"hours{cost}; a checkpoint every {format_seconds(totals.checkpoint_every_s)}",
        f"a checkpoint has {checkpoint}, a snapshot {snapshot}; disk needed: {disk} for {plan.run.output.keep + 2} "
        f"checkpoints (output.keep + 2){best}, and snapshots",
        _signal_line(plan, totals),
    ]


def _signal_line(plan: Plan, totals: Totals) -> str:
    """Return the line about a signal: whether a step ends in its half of ``output.grace_s``."""
    half, grace = totals.step_grace_s, plan.run.output.grace_s
    if half is None:
        return "a signal to stop: the step is finished, however long it takes (output.grace_s inf)"
    limit = f"{half:g} s (half of output.grace_s)"
    save = f"saving in the other half needs {totals.checkpoint_bytes / half / GB:.2g} GB/s"
    if plan.seconds <= half:
        return f"a signal to stop: a step can end in {limit}; {save}"
    update = sum(p.seconds for p in plan.phases if p.learns)
    if plan.sampling is None or plan.run.rollout.collect.staleness:
        return (
            f"a signal to stop: a step does not end in {limit}, and is finished all the same: set output.grace_s to "
            f"{math.ceil(2 * plan.seconds)} or more where the machine gives it ({grace:g} now); {save}"
        )
    late = "" if update <= half else f"; once it learns, it is finished ({format_seconds(update)})"
    return f"a signal to stop: a step does not end in {limit}, and is stopped within its sampling{late}; {save}"


def format_bytes(count: float) -> str:
    """Return bytes for people, in powers of 1000.

    >>> format_bytes(18_521_000_000), format_bytes(1_087_000), format_bytes(1.2e12)
    ('18.5 GB', '1.1 MB', '1.2 TB')
    """
    for unit, scale in (("TB", 1e12), ("GB", 1e9)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count / 1e6:.1f} MB"


def format_seconds(seconds: float) -> str:
    """Return a time for people.

    >>> format_seconds(0.25), format_seconds(75), format_seconds(5400), format_seconds(1e6)
    ('0.25 s', '75 s', '1.5 h', '11.6 days')
    """
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


MEMORY_KINDS = {
    "weights": ("weights ({dtype})", "#4269d0"), "optimiser": ("optimiser", "#6c8ae0"),
    "reference": ("reference", "#97bbf5"), "critic": ("critic ({dtype})", "#a463f2"),
    "critic_optimiser": ("optimiser of the critic", "#c9a3f7"), "judges": ("reward models ({compute})", "#ff8ab7"),
    "batch": ("batch", "#9c6b4e"), "sampled": ("weights to sample from ({compute})", "#3ca951"),
    "cache": ("key/value cache", "#efb118"), "temporary": ("activations and temporaries", "#ff725c"),
}  # fmt: skip
"""Label and colour of each kind of memory."""
TIMES = f"{'seconds of a step':<50}{'compute':>10}{'memory':>10}{'ICI':>10}{'DCN':>10}   {'binds':<10}from"
"""Head of the table of times."""


def report_lines(plan: Plan, source: str, price: float | None = None) -> list[str]:
    """Return the report's lines; ``source``: of the model's shapes; ``price``: of a device and hour."""
    rows = [*head_lines(plan, source), "", *memory_lines(plan), "", TIMES]
    for p in plan.phases:
        times = "".join(f"{x:>10.3f}" for x in (p.compute_s, p.memory_s, p.ici_s, p.dcn_s))
        rows.append(f"  {f'{p.name} x {p.calls:.0f}':<48}{times}   {p.binds:<10}{p.source}")
    if any(p.source == CYCLES for p in plan.phases):
        rows.append("  by formula there: fused attention, its FLOPs at the peak; ICI and DCN, bytes over their links")
    collectives = []
    for p in plan.phases:
        origin = "compiled" if p.name in plan.compiled and p.name not in plan.refused else "formula"
        for t in p.traffic:
            amounts = f"{t.count:>10.0f}{t.ici / 1e9:>10.2f}{t.dcn / 1e9:>10.2f}"
            collectives.append(f"  {f'{p.name}: {t.kind} ({origin})':<48}{amounts}")
    sent_head = f"{'sent by one device in a step':<50}{'count':>10}{'ICI, GB':>10}{'DCN, GB':>10}"
    rows += ["", *([sent_head, *collectives] if collectives else ["nothing is sent between devices"])]
    of_run = totals_lines(plan, totals_of(plan, price))
    return [*rows, "", *plan.chosen, *verdict_lines(plan), "", *of_run]


def head_lines(plan: Plan, source: str) -> list[str]:
    """Return the lines about model, machine and work."""
    run = plan.run
    w = plan.work
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    g = plan.groups
    samplers = f", and {run.mesh.rollout} devices that only sample" if run.mesh.rollout else ""
    work = f"{w.train_flops:.2e} FLOP to learn"
    if plan.sampling is not None:
        work = f"{w.prompts_flops + w.decode_flops:.2e} FLOP to sample, {w.train_flops:.2e} to learn"
    parameters, active = plan.parameters
    share = "" if active == parameters else f", {active:,} of them for each token"
    return [
        f"{run.model}: {parameters:,} parameters{share} ({source})",
        f"on {plan.machine.name}: {plan.machine.devices} devices, mesh {mesh}{samplers}",
        f"a step: {g.count} {g.words} {w.mean} tokens, {w.updates} "
        f"update{'s' * (w.updates > 1)} of {w.microbatches} microbatches ({run.learner.compute.microbatch_rows} rows "
        f"of {w.row_tokens} tokens)",
        f"by formula: {work} (6 N per "
        f"token and causal attention; {sum(p.flops for p in plan.phases) * plan.machine.devices:.2e} are run), "
        f"{sum(p.bytes for p in plan.phases) * plan.machine.devices:.2e} bytes of memory read and written",
    ]


def memory_lines(plan: Plan) -> list[str]:
    """Return the table of memory."""
    learner = plan.run.learner
    dtypes = {"dtype": learner.lora.base if learner.lora.rank else learner.dtype, "compute": learner.compute.dtype}
    words = {name: text.format(**dtypes) for name, (text, _) in MEMORY_KINDS.items()}
    whose = "the compiler's" if plan.compiled else "a formula's"
    halves = plan.halves
    rows = [f"{'memory of one device, GiB':<50}" + "".join(f"{name:>10}" for name in halves)]

    def row(text: str, values: Iterable[float]) -> str:
        return f"  {text:<48}" + "".join(f"{value / GIB:>10.2f}" if value else f"{'-':>10}" for value in values)

    for name, text in words.items():
        values = [getattr(half, name) for half in halves.values()]
        if any(values):
            rows.append(row(f"{text}, {whose}" if name == "temporary" else text, values))
    rows.append(row("in all", [half.total for half in halves.values()]))
    return [*rows, row("there is", [plan.machine.chip.memory] * len(halves))]


def loop_lines(plan: Plan) -> list[str]:
    """Return the memory traffic of compiled programs by loop, without loops below a hundredth of a program's total."""
    rows = [
        f"{'read and written by one device, as compiled':<50}{'rounds':>10}{'each, GiB':>12}{'copied':>10}{'sent':>10}"
    ]
    for name, program in plan.compiled.items():
        for loop in program.loops:
            if loop.times * loop.moved < program.loops[0].moved / 100:
                continue
            indent = "  " * (loop.depth + 1)
            least = name == "decode" and loop.depth == 1 and loop.moved > program.arguments
            beside = f", {loop.moved / program.arguments:.2f} times weights and cache" if least else ""
            label = f"loop{beside}" if loop.depth else name
            copied = sum(copy.size for copy in loop.copies) / GIB
            sent = sum(c.moved for c in loop.collectives) / GIB
            rows.append(f"{indent + label:<50}{loop.times:>10.0f}{loop.moved / GIB:>12.3f}{copied:>10.3f}{sent:>10.3f}")
            sums = [
                *_largest((f"{c.kind}: {c.source}", c.size) for c in loop.copies),
                *_largest((f"{c.kind} among {c.groups.shape[1]}", c.size) for c in loop.collectives),
            ]
            rows += [f"{indent}  {text}" for text in sums]
    return rows


def _largest(items: Iterable[tuple[str, float]]) -> list[str]:
    """Return the largest sums of items by name, of a MiB or more."""
    sums: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for name, size in items:
        sums.update({name: size})
        counts.update({name: 1})
    return [f"{size / 2**20:,.0f} MiB in {counts[name]}: {name}" for name, size in sums.most_common(5) if size >= 2**20]


def verdict_lines(plan: Plan) -> list[str]:
    """Return the verdict: whether the run fits, how large it may be, how fast it can be."""
    half = max(plan.halves, key=lambda name: plan.halves[name].total)
    verdict = "FITS" if plan.fits else "DOES NOT FIT"
    slowest = plan.slowest
    update = sum(p.seconds for p in plan.phases if p.learns)
    rows = [f"{verdict}: {plan.peak / GIB:.1f} of {plan.machine.chip.memory / GIB:.1f} GiB, most while {half}"]
    most = f"{plan.groups.field} {plan.most('groups')} (by its data)"
    if plan.sampling is not None:
        most += f", rollout.engine.slots {plan.most('slots')} (by the cache)"
    if (rows_fit := plan.most("rows")) is not None:
        most += f", learner.compute.microbatch_rows {rows_fit} (from two compilations)"
    rows.append(f"the largest of each that fits with the rest: {most}")
    rows.append(
        f"a step takes at least {plan.seconds:.1f} s, of which {slowest.name} {slowest.seconds:.1f} s, bound by "
        f"{slowest.binds}; MFU at most {plan.utilisation(plan.seconds):.1%} of the step, "
        f"{plan.utilisation(update):.1%} of the updates"
    )
    return rows


def plans_table(plans: list[Plan]) -> list[str]:
    """Return a table with one line per plan."""
    rows = ["data x fsdp x tensor   microbatch_rows   slots   GiB sampling   learning   seconds of a step   binds"]
    for p in plans:
        mesh = " x ".join(map(str, p.mesh.values()))
        rows_each = p.run.learner.compute.microbatch_rows
        where = f"{p.slowest.name}, {p.slowest.binds}"
        slots, sampling = "-", "-"
        if p.sampling is not None:
            slots, sampling = str(p.run.rollout.engine.slots), f"{p.sampling.total / GIB:.1f}"
        rows.append(
            f"{mesh:<20}   {rows_each:>15}   {slots:>5}   {sampling:>12}   "
            f"{p.learning.total / GIB:>8.1f}   {p.seconds:>17.1f}   {where}"
        )
    return rows


def plan_to_json(plan: Plan, source: str, price: float | None = None) -> dict[str, Any]:
    """Return everything in the report as plain values: bytes, seconds, FLOPs."""

    halves = {
        name: dataclasses.asdict(half) | {"total": half.total, "temporary_compiled": bool(plan.compiled)}
        for name, half in plan.halves.items()
    }
    loops: dict[str, list[dict[str, Any]]] = {}
    for name, program in plan.compiled.items():
        loops[name] = []
        for loop in program.loops:
            collectives = [{"kind": c.kind, "bytes": c.size, "members": c.groups.shape[1]} for c in loop.collectives]
            copies = [dataclasses.asdict(copy) for copy in loop.copies]
            fields = {"depth": loop.depth, "times": loop.times, "bytes": loop.moved, "copies": copies}
            loops[name].append(fields | {"collectives": collectives})
    return {
        "model": plan.run.model, "model_source": source, "machine": plan.machine.name, "devices": plan.machine.devices,
        "mesh": dict(plan.mesh), "parameters": plan.parameters[0], "active_parameters": plan.parameters[1],
        "work": dataclasses.asdict(plan.work) | {"sampled": plan.work.sampled, "train_flops": plan.work.train_flops},
        "memory": {"available": plan.machine.chip.memory, "sampling": None} | halves,
        "phases": [dataclasses.asdict(p) | {"seconds": p.seconds, "binds": p.binds} for p in plan.phases],
        "compiled_s": {name: program.seconds for name, program in plan.compiled.items()},
        "loops": loops,
        "chosen": list(plan.chosen), "refused": list(plan.refused), "fits": plan.fits,
        "step_s": plan.seconds, "run": dataclasses.asdict(totals_of(plan, price)),
        "mfu": plan.utilisation(plan.seconds),
        "most": {
            plan.groups.field.rpartition(".")[2]: plan.most("groups"),
            "slots": plan.most("slots"),
            "microbatch_rows": plan.most("rows"),
        },
    }  # fmt: skip


def write_plans(path: Path, plans: list[tuple[Plan, str]], price: float | None = None) -> None:
    """Write the plans as JSON: a list, or an object for a single plan."""
    values = [plan_to_json(*plan_and_source, price) for plan_and_source in plans]
    with new_file(path) as part:
        part.write_text(json.dumps(values[0] if len(values) == 1 else values, indent=1))


def draw_plans(plans: list[dict[str, Any]], path: Path) -> None:
    """Draw two bars for each plan (from ``plan_to_json``): memory while sampling, if it samples, and while learning."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise InputError("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(9, 0.9 + 0.95 * len(plans)), layout="constrained")
    axes = figure.add_subplot()
    halves = [[half for half in ("sampling", "learning") if p["memory"][half]] for p in plans]
    words = {kind: text.partition(" (")[0].replace(" and ", ", ") for kind, (text, _) in MEMORY_KINDS.items()}
    labels = []
    for number, plan in enumerate(plans):
        for offset, half in enumerate(halves[number]):
            y = 2.4 * number + offset
            model = plan["model"].rsplit("/", 1)[-1]
            labels.append((y, half if offset else f"{model} on {plan['machine']}, {half}"))
            offset_gib = 0.0
            for kind, (_, colour) in MEMORY_KINDS.items():
                if value := plan["memory"][half].get(kind, 0.0) / GIB:  # plans that were kept earlier know fewer kinds
                    axes.barh(y, value, left=offset_gib, height=0.85, color=colour, label=words[kind])
                    offset_gib += value
            available = plan["memory"]["available"] / GIB
            axes.plot([available, available], [y - 0.5, y + 0.5], color="black", linewidth=1.5)
    axes.set_yticks([y for y, _ in labels], [text for _, text in labels], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("GiB of one device (black line: the limit)")
    axes.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    used = [label for label in words.values() if label in handles]
    figure.legend(
        [handles[label] for label in used], used, loc="outside upper center", ncols=4, fontsize=8, frameon=False
    )
    figure.savefig(path)
