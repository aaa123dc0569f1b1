"""A plan for people and for machines."""

import collections
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxrl_llm.folders import new_file
from jaxrl_llm.plan.memory import Memory
from jaxrl_llm.plan.movement import Loop
from jaxrl_llm.plan.network import by_kind
from jaxrl_llm.plan.planning import Plan

GIB = 2.0**30
WORDS = {
    "weights": "weights ({dtype})", "optimiser": "optimiser", "reference": "reference",
    "critic": "critic ({dtype})", "critic_optimiser": "optimiser of the critic", "judges": "reward models ({compute})",
    "batch": "batch",
    "sampled": "weights to sample from ({compute})", "cache": "key/value cache",
    "temporary": "activations and other temporaries",
}  # fmt: skip
"""Names of the kinds of memory."""


def lines(plan: Plan, source: str) -> list[str]:
    """The report; ``source`` says where the model's shapes come from."""
    return [
        *head(plan, source),
        "",
        *memory_lines(plan),
        "",
        *time_lines(plan),
        "",
        *network_lines(plan),
        "",
        *plan.chosen,
        *conclusion(plan),
    ]


def head(plan: Plan, source: str) -> list[str]:
    """What is planned."""
    run = plan.run
    w = plan.work
    data, fsdp, tensor = plan.mesh
    g = plan.groups
    apart = f", and {run.mesh.rollout} devices that only sample" if run.mesh.rollout else ""
    work = f"{w.train_flops:.2e} FLOP to learn"
    if plan.sampling is not None:
        work = f"{w.prompts_flops + w.decode_flops:.2e} FLOP to sample, {w.train_flops:.2e} to learn"
    return [
        f"{run.model}: {plan.parameters:,} parameters ({source})",
        f"on {plan.machine.name}: {plan.machine.devices} devices, mesh data {data} x fsdp {fsdp} x tensor "
        f"{tensor}{apart}",
        f"a step: {g.count} {g.words} {w.mean} tokens, {w.updates} "
        f"update{'s' * (w.updates > 1)} of {w.microbatches} microbatches ({run.learner.microbatch_rows} rows of "
        f"{w.row_tokens} tokens)",
        f"by formula: {work} (6 N per "
        f"token and causal attention; {sum(p.flops for p in plan.phases) * plan.machine.devices:.2e} are run), "
        f"{sum(p.bytes for p in plan.phases) * plan.machine.devices:.2e} bytes of memory read and written",
    ]


def memory_lines(plan: Plan) -> list[str]:
    """The table of memory."""
    words = {
        name: text.format(dtype=plan.run.learner.dtype, compute=plan.run.learner.compute_dtype)
        for name, text in WORDS.items()
    }
    whose = "the compiler's" if plan.learning.compiled else "a formula's"
    halves = plan.halves
    rows = [f"{'memory of one device, GiB':<50}" + "".join(f"{name:>10}" for name in halves)]

    def row(text: str, values: Iterable[float]) -> str:
        return f"  {text:<48}" + "".join(map(_gib, values))

    for name, text in words.items():
        values = [half.kinds()[name] for half in halves.values()]
        if any(values):
            rows.append(row(f"{text}, {whose}" if name == "temporary" else text, values))
    rows.append(row("in all", [half.total for half in halves.values()]))
    return [*rows, row("there is", [plan.machine.chip.memory] * len(halves))]


def _gib(value: float) -> str:
    return f"{'-':>10}" if not value else f"{value / GIB:>10.2f}"


def time_lines(plan: Plan) -> list[str]:
    """The table of times."""
    rows = [
        f"{'seconds of a step, at least (formulas)':<50}{'compute':>10}{'memory':>10}{'ICI':>10}{'DCN':>10}   binds"
    ]
    for p in plan.phases:
        times = "".join(f"{x:>10.3f}" for x in (p.compute_s, p.memory_s, p.ici_s, p.dcn_s))
        rows.append(f"  {f'{p.name} x {p.calls:.0f}':<48}{times}   {p.binds}")
    return rows


def network_lines(plan: Plan) -> list[str]:
    """The table of collectives."""
    rows = [f"{'sent by one device in a step':<50}{'count':>10}{'ICI, GB':>10}{'DCN, GB':>10}"]
    for p in plan.phases:
        whose = "compiled" if p.name in plan.compiled and not refused(plan, p.name) else "formula"
        for t in by_kind(p.traffic):
            rows.append(
                f"  {f'{p.name}: {t.kind} ({whose})':<48}{t.count:>10.0f}{t.ici / 1e9:>10.2f}{t.dcn / 1e9:>10.2f}"
            )
    return rows if len(rows) > 1 else ["nothing is sent between devices"]


def refused(plan: Plan, name: str) -> bool:
    """Whether the compiler found that a program needs more memory than there is."""
    return name in plan.refused


def loop_lines(plan: Plan) -> list[str]:
    """What the compiled programs move in memory, loop by loop; loops of less than a hundredth of theirs left out."""
    rows = [
        f"{'read and written by one device, as compiled':<50}{'rounds':>10}{'each, GiB':>12}{'copied':>10}{'sent':>10}"
    ]
    for name, one in plan.compiled.items():
        for loop in one.loops:
            if loop.times * loop.moved < one.loops[0].moved / 100:
                continue
            place = "  " * (loop.depth + 1)
            least = name == "decode" and loop.depth == 1 and loop.moved > one.arguments
            beside = f", {loop.moved / one.arguments:.2f} times weights and cache" if least else ""
            what = f"loop{beside}" if loop.depth else name
            copied = sum(copy.size for copy in loop.copies) / GIB
            sent = sum(c.moved for c in loop.collectives) / GIB
            rows.append(f"{place + what:<50}{loop.times:>10.0f}{loop.moved / GIB:>12.3f}{copied:>10.3f}{sent:>10.3f}")
            details = (*_most((f"{c.kind}: {c.source}", c.size) for c in loop.copies),
                       *_most((f"{c.kind} among {c.groups.shape[1]}", c.size) for c in loop.collectives))  # fmt: skip
            rows += [f"{place}  {text}" for text in details]
    return rows


def _most(items: Iterable[tuple[str, float]]) -> list[str]:
    """The largest sums of items by name, of a MiB or more."""
    sums: collections.Counter[str] = collections.Counter()
    counts: collections.Counter[str] = collections.Counter()
    for name, size in items:
        sums.update({name: size})
        counts.update({name: 1})
    return [f"{size / 2**20:,.0f} MiB in {counts[name]}: {name}" for name, size in sums.most_common(5) if size >= 2**20]


def conclusion(plan: Plan) -> list[str]:
    """Whether it fits, how large it may be, how fast it can be."""
    half = max(plan.halves, key=lambda name: plan.halves[name].total)
    verdict = "FITS" if plan.fits else "DOES NOT FIT"
    slowest = plan.slowest
    update = sum(p.seconds for p in plan.phases if p.learns)
    rows = [f"{verdict}: {plan.peak / GIB:.1f} of {plan.machine.chip.memory / GIB:.1f} GiB, most while {half}"]
    most = f"{plan.groups.field} {plan.most_groups} (by its data)"
    if plan.sampling is not None:
        most += f", rollout.slots {plan.most_slots} (by the cache)"
    if plan.most_rows is not None:
        most += f", learner.microbatch_rows {plan.most_rows} (from two compilations)"
    rows.append(f"the largest of each that fits beside the rest: {most}")
    rows.append(
        f"a step takes at least {plan.seconds:.1f} s, of which {slowest.name} {slowest.seconds:.1f} s, bound by "
        f"{slowest.binds}; MFU at most {plan.utilisation(plan.seconds):.1%} of the step, "
        f"{plan.utilisation(update):.1%} of the updates"
    )
    return rows


def to_json(plan: Plan, source: str) -> dict[str, Any]:
    """Everything in the report as plain values: bytes, seconds, FLOPs."""

    def memory(m: Memory) -> dict[str, float]:
        return Memory.kinds(m) | {"total": m.total, "temporary_compiled": m.compiled}

    return {
        "model": plan.run.model, "model_source": source, "machine": plan.machine.name, "devices": plan.machine.devices,
        "mesh": dict(zip(("data", "fsdp", "tensor"), plan.mesh, strict=True)), "parameters": plan.parameters,
        "work": dataclasses.asdict(plan.work) | {"sampled": plan.work.sampled, "train_flops": plan.work.train_flops},
        "memory": {
            "available": plan.machine.chip.memory,
            "sampling": None if plan.sampling is None else memory(plan.sampling),
            "learning": memory(plan.learning),
        },
        "phases": [dataclasses.asdict(p) | {"seconds": p.seconds, "binds": p.binds} for p in plan.phases],
        "compiled_s": {name: one.seconds for name, one in plan.compiled.items()},
        "loops": {name: [loop_json(loop) for loop in one.loops] for name, one in plan.compiled.items()},
        "chosen": list(plan.chosen), "refused": list(plan.refused), "fits": plan.fits,
        "step_s": plan.seconds,
        "mfu": plan.utilisation(plan.seconds),
        "most": {
            plan.groups.field.rpartition(".")[2]: plan.most_groups,
            "slots": plan.most_slots,
            "microbatch_rows": plan.most_rows,
        },
    }  # fmt: skip


def loop_json(loop: Loop) -> dict[str, Any]:
    """A loop as plain values."""
    sent = [{"kind": c.kind, "bytes": c.size, "members": c.groups.shape[1]} for c in loop.collectives]
    return {
        "depth": loop.depth, "times": loop.times, "bytes": loop.moved,
        "copies": [dataclasses.asdict(copy) for copy in loop.copies], "collectives": sent,
    }  # fmt: skip


def write(path: Path, plans: list[tuple[Plan, str]]) -> None:
    """The plans as JSON; one alone as an object."""
    values = [to_json(*one) for one in plans]
    with new_file(path) as part:
        part.write_text(json.dumps(values[0] if len(values) == 1 else values, indent=1))
