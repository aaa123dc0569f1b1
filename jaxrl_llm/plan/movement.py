"""Cost of a compiled program on one device: each loop's bytes, copies and transfers, and the cycles of its kernels."""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.plan import hlo
from jaxrl_llm.plan.hlo import Collective, Instruction, Program

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "iota", "broadcast",
}  # fmt: skip
"""Operations without memory traffic of their own; a broadcast is made where it is used."""
MOVES = (
    "transpose", "concatenate", "pad", "gather", "reverse", "dynamic-update-slice", "dynamic-slice", "slice", "convert",
    "copy", "reshape",
)  # fmt: skip
"""Operations that only move data; the most telling first, for a kernel that does several."""
PASSING = ("pad", "convert", "copy", "reshape", "transpose", "reverse")
"""Operations inside a kernel whose own user decides how much of their operand is read."""
WORTH_TELLING = 2**20
"""Least bytes of a copy that is reported."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """Data that is written only to change its place or layout.

    Attributes:
      kind: one of ``MOVES``; the most telling, where a kernel does several.
      shape: shape of the written array.
      size: its bytes.
      source: the traced operation that it comes from.
    """

    kind: str
    shape: str
    size: float
    source: str


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop's body, or the program outside of all loops.

    Attributes:
      depth: nesting depth of the loop; 0 for the program.
      times: how often it runs in one call of the program.
      moved: bytes that one round reads and writes in the device's memory, inner loops multiplied out.
      copies: those in its own body, of at least ``WORTH_TELLING`` bytes.
      collectives: those in its own body, ``times`` times each.
    """

    depth: int
    times: float
    moved: float
    copies: tuple[Copy, ...]
    collectives: tuple[Collective, ...]


def loops(
    program: Program, unknown: Sequence[float] = (), name: str = "", depth: int = 0, times: float = 1.0
) -> list[Loop]:
    """Return a computation and the loops in it, outer loops before inner ones.

    Args:
      program: from ``hlo.parse``.
      unknown: trip counts of loops with a bound in the data, the outermost first; deeper loops count once.
      name: name of the computation; "" for the program's entry.
      depth: number of loops around it.
      times: how often it runs in one call of the program.
    """
    name = name or program.entry
    own = list(hlo.walk(program, name, hlo.called_once))
    told = (_copy(program, where, one) for where, one in own)
    copies = tuple(copy for copy in told if copy is not None and copy.size >= WORTH_TELLING)
    places = dict.fromkeys(where for where, _ in own)
    sent = tuple(c for where in places for c in hlo.own_collectives(program, where, times))
    found = [Loop(depth, times, moved(program, name, tuple(unknown)), copies, sent)]
    for where, one in own:
        if one.operation == "while":
            rounds, rest = hlo.rounds(program, where, one, tuple(unknown))
            found += loops(program, rest, hlo.calls(one)["body"][0], depth + 1, times * rounds)
    return found


def moved(program: Program, name: str, unknown: tuple[float, ...] = ()) -> float:
    """Return the bytes that a computation reads and writes in memory in one run, its loops multiplied out.

    A kernel reads its operands once, but only the slices of those it slices, and writes its results once; an update in
    place costs the inserted part, attention by length all columns of a layer. Of branches
    the most expensive counts. Data in a chip's fast memory costs nothing.
    """

    def own(around: dict[str, Instruction], one: Instruction) -> float:
        if one.operation in FREE or one.operation.endswith("-done"):
            return 0.0
        given = ((place, around[operand]) for place, operand in enumerate(one.operands) if operand in around)
        read = sum(_used(program, value.shapes, one, place) for place, value in given)
        return read + _written(program, around, one)

    return _summed(program, name, unknown, own)


def cycles(program: Program, name: str = "", unknown: tuple[float, ...] = ()) -> float:
    """Return the cycles of a TPU's core in one run of a computation, "" for the program's entry, by its compiler.

    Its static model of each kernel writes them into the program; kernels of Pallas and collectives have none. 0 for
    other platforms.
    """

    def own(around: dict[str, Instruction], one: Instruction) -> float:
        noted = re.search(r'"estimated_cycles":"?(\d+)', one.rest)
        return float(noted[1]) if noted else 0.0

    return _summed(program, name or program.entry, unknown, own)


def _summed(program: Program, name: str, unknown: tuple[float, ...], own: Any) -> float:
    """Add up ``own(computation, instruction)``, loops multiplied out; of branches the most expensive counts."""
    total = 0.0
    around = program.computations[name]
    for one in around.values():
        if one.operation == "while":
            rounds, rest = hlo.rounds(program, name, one, unknown)
            total += rounds * _summed(program, hlo.calls(one)["body"][0], rest, own)
        elif inside := hlo.called_once(one):
            total += max(_summed(program, other, unknown, own) for other in inside)
        else:
            total += own(around, one)
    return total


def _used(program: Program, shapes: str, user: Instruction, place: int) -> float:
    """Return the bytes that ``user`` reads of its operand at ``place``, which has these shapes."""
    whole = in_memory(shapes)
    if user.operation in ("dynamic-slice", "slice", "gather", "slice-start") and place == 0:
        parts = hlo.parts_of(user.shapes)
        taken = parts[1] if len(parts) > 1 else user.shapes
        return min(whole, hlo.bytes_of(taken) * _width(shapes) / _width(taken))
    if user.operation == "dynamic-update-slice" and place == 0:
        return 0.0
    if user.operation == "custom-call" and "attention_by_length" in user.rest:
        layers = re.match(r"\w+\[(\d+)(?:,\d+){4}\]", shapes)  # one layer of a cache, at most: lengths decide
        return whole / int(layers[1]) if layers else whole
    if user.operation != "fusion":
        return whole
    kernel = program.computations[hlo.calls(user)["calls"][0]]
    given = next((x for x in kernel.values() if x.operation == "parameter" and x.rest.startswith(f"({place})")), None)
    return whole if given is None else min(whole, _used_in(program, kernel, given, shapes))


def _used_in(program: Program, kernel: dict[str, Instruction], value: Instruction, shapes: str) -> float:
    """Return the bytes that a kernel reads of one of its values."""
    total = 0.0
    results = {
        name for one in kernel.values() if one.root for name in (one.name, *one.operands * (one.operation == "tuple"))
    }
    for user in kernel.values():
        for place, operand in enumerate(user.operands):
            if operand != value.name or user.operation == "tuple":
                continue
            if user.operation == "bitcast" or (user.operation in PASSING and place == 0 and user.name not in results):
                total += _used_in(program, kernel, user, shapes)
            else:
                total += _used(program, shapes, user, place)
    return total


def _width(shapes: str) -> float:
    """Return the bytes of a number of an array."""
    return hlo.bytes_of(re.sub(r"\[[\d,]*\]", "[]", shapes))


def _written(program: Program, around: dict[str, Instruction], one: Instruction) -> float:
    """Return the bytes that an instruction writes; ``around``: the computation that it is in."""
    parts = hlo.parts_of(one.shapes)
    if one.operation.endswith("-start"):  # operands and results, in this order but for a copy, then flags
        at = 0 if one.operation == "copy-start" else 1
        return in_memory(parts[at]) if len(parts) > 1 else in_memory(one.shapes)
    updates = _roots(program, around, one, len(parts) or 1)
    return sum(
        min(in_memory(x), hlo.bytes_of(update)) for x, update in zip(parts or [one.shapes], updates, strict=False)
    )


def _roots(program: Program, around: dict[str, Instruction], one: Instruction, count: int) -> list[str]:
    """Return the shapes that are written for each result of an instruction: all of it, or the part updated in place."""
    if one.operation == "dynamic-update-slice":
        update = around.get(one.operands[1])
        return [one.shapes if update is None else update.shapes]
    if one.operation == "bitcast" and one.operands and one.operands[0] in around:
        inner = around[one.operands[0]]
        return (
            _roots(program, around, inner, 1) if inner.operation in ("dynamic-update-slice", "fusion") else [one.shapes]
        )
    if one.operation == "fusion":
        kernel = program.computations[hlo.calls(one)["calls"][0]]
        root = next(x for x in kernel.values() if x.root)
        members = [kernel[x] for x in root.operands] if root.operation == "tuple" else [root]
        if len(members) == count:
            return [_roots(program, kernel, member, 1)[0] for member in members]
    return hlo.parts_of(one.shapes) or [one.shapes]


def in_memory(shapes: str) -> float:
    """Return the bytes of the arrays in a text of shapes, without those in fast memory on the chip: ``S(1)`` and up."""
    arrays = re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", shapes)
    return sum(hlo.bytes_of(array) for array in arrays if not re.search(r"S\([1-9]\)", array))


def _copy(program: Program, name: str, one: Instruction) -> Copy | None:
    """Return the instruction as a copy; None if it computes something, or writes nothing to memory."""
    kinds = _kinds(program, one)
    size = _written(program, program.computations[name], one) if kinds else 0.0
    if not size:
        return None
    kind = min(kinds, key=MOVES.index)
    shape = re.sub(r"\{[^}]*\}", "", one.shapes)
    source = re.search(r'op_name="([^"]*)"', one.rest)
    # The end of a traced operation's path, without the loops that it is in.
    around = ("while", "body", "closed_call", "cond", "shard_map")
    path = [part for part in source[1].split("/") if part not in around] if source else [one.name]
    return Copy(kind, shape, size, "/".join(path[-3:]))


def _kinds(program: Program, one: Instruction) -> set[str]:
    """Return the kinds of movement of an instruction; empty if it computes something."""
    if one.operation != "fusion":
        name = one.operation.removesuffix("-start")
        return {name} if name in MOVES else set()
    found = set()
    for part in program.computations[hlo.calls(one)["calls"][0]].values():
        if part.operation in FREE or "[]" in part.shapes or part.shapes.startswith("pred"):
            continue
        inner = _kinds(program, part)
        if not inner:
            return set()
        found |= inner
    return found
