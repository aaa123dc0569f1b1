"""Meshes and microbatches: ranked by formula, the most promising compiled."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_llm.config import Configuration
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.plan.lowering import planned_stage
from jaxrl_llm.plan.machines import Machine
from jaxrl_llm.plan.planning import Plan, plan

COMPILED, SLACK, ROWS = 3, 1.3, (1, 2, 4, 8)
"""How many are compiled; how much a formula's memory may exceed what there is.

Rows of a microbatch for each part of the batch.
"""


def candidates(run: Any, config: ModelConfig, machine: Machine) -> list[Any]:
    """Every mesh that divides heads, rows and devices, with some microbatches that hold no more than an update."""
    inside = (machine.devices - run.mesh.rollout) // run.mesh.slices
    groups = planned_stage(run).groups(run)
    found = []

    def divides(t: int) -> bool:
        return config.attention.kv_heads % t == 0 and run.learner.row_tokens % t == 0

    for tensor in (t for t in _divisors(inside) if divides(t)):
        for data in (d for d in _divisors(inside // tensor) if d * d <= inside // tensor):
            mesh = dataclasses.replace(run.mesh, data=data, fsdp=inside // tensor // data, tensor=tensor)
            parts = inside // tensor * run.mesh.slices
            completions = groups.count * groups.each // run.learner.minibatches
            rows = [n * parts for n in ROWS if n == 1 or n * parts <= completions]
            found += [
                dataclasses.replace(run, mesh=mesh, learner=dataclasses.replace(run.learner, microbatch_rows=n))
                for n in rows
            ]
    return found


def _divisors(count: int) -> list[int]:
    return [d for d in range(1, count + 1) if count % d == 0]


def best(
    run: Configuration,
    config: ModelConfig,
    machine: Machine,
    devices: list[Any] | None,
    mean: int | None,
    quick: bool,
    say: Callable[[str], None],
) -> list[Plan]:
    """The fastest plans that fit, the best first; compiled where that is possible, until a few fit.

    A formula's memory is rough, so plans that exceed it a little are compiled too.
    """
    ranked = []
    for number, one in enumerate(every := candidates(run, config, machine)):
        say(f"by formula: {number + 1} of {len(every)}")
        ranked.append(_with_fewer_slots(plan(one, config, machine, devices, mean, False), config, devices, mean))
    ranked.sort(key=lambda p: p.seconds)
    if quick or devices is None:
        return [p for p in ranked if p.fits][: 2 * COMPILED]
    found: list[Plan] = []
    for one in [p for p in ranked if p.peak <= SLACK * machine.chip.memory][: 3 * COMPILED]:
        tried = plan(one.run, config, machine, devices, mean, True, False, say)
        found += [tried] if tried.fits else []
        if len(found) == COMPILED:
            break
    return sorted(found, key=lambda p: p.seconds)


def _with_fewer_slots(first: Plan, config: ModelConfig, devices: list[Any] | None, mean: int | None) -> Plan:
    """The same plan where its cache fits, or it has none; else with as many slots as do, if any."""
    limit = first.machine.chip.memory
    if first.sampling is None or first.sampling.total <= limit or not first.most_slots:
        return first
    slots = 1 << (first.most_slots // (first.mesh[0] * first.mesh[1])).bit_length() - 1
    rollout = dataclasses.replace(first.run.rollout, slots=slots * first.mesh[0] * first.mesh[1])
    return plan(dataclasses.replace(first.run, rollout=rollout), config, first.machine, devices, mean, False)


def table(plans: list[Plan]) -> list[str]:
    """One line for each."""
    gib = 2.0**30
    rows = ["data x fsdp x tensor   microbatch_rows   slots   GiB sampling   learning   seconds of a step   binds"]
    for p in plans:
        mesh = " x ".join(map(str, p.mesh))
        rows_each = p.run.learner.microbatch_rows
        where = f"{p.slowest.name}, {p.slowest.binds}"
        slots, sampling = "-", "-"
        if p.sampling is not None:
            slots, sampling = str(p.run.rollout.slots), f"{p.sampling.total / gib:.1f}"
        rows.append(
            f"{mesh:<20}   {rows_each:>15}   {slots:>5}   {sampling:>12}   "
            f"{p.learning.total / gib:>8.1f}   {p.seconds:>17.1f}   {where}"
        )
    return rows
