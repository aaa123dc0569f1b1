"""What a compiled program moves through a device's memory: each loop's bytes, copies and transfers."""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from jaxrl_llm.plan import hlo
from jaxrl_llm.plan.hlo import Collective, Instruction, Program

FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "iota", "broadcast",
}  # fmt: skip
"""What reads and writes nothing of its own; a value that is the same everywhere is made where it is used."""
MOVES = (
    "transpose", "concatenate", "pad", "gather", "reverse", "dynamic-update-slice", "dynamic-slice", "slice", "convert",
    "copy", "reshape",
)  # fmt: skip
"""What computes no number; first what says most, where a kernel does several."""
WORTH_TELLING = 2**20
"""Bytes of a copy that is told, at least."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """Something that is written only because it has to lie elsewhere or otherwise.

    Attributes:
      kind: of ``MOVES``; the one that says most, where a kernel does several.
      shape: what is written.
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
      name: of its computation.
      depth: of the loop; 0 for the program.
      times: how often it runs in one call of the program.
      moved: bytes that one round reads and writes in the device's memory, inner loops multiplied out.
      copies: those in its own body, of at least ``WORTH_TELLING`` bytes.
      collectives: those in its own body, once.
    """

    name: str
    depth: int
    times: float
    moved: float
    copies: tuple[Copy, ...]
    collectives: tuple[Collective, ...]


def loops(program: Program, unknown: Sequence[float] = ()) -> list[Loop]:
    """The program and its loops, outer ones before those in them.

    Args:
      program: from ``hlo.parse``.
      unknown: how often loops run whose bounds are data, the outermost first; deeper ones are taken to run once.
    """
    return list(_loops(program, program.entry, 0, 1.0, tuple(unknown)))


def _loops(program: Program, name: str, depth: int, times: float, unknown: tuple[float, ...]) -> Iterator[Loop]:
    own = list(_straight(program, name))
    told = (_copy(program, where, one) for where, one in own)
    copies = tuple(copy for copy in told if copy is not None and copy.size >= WORTH_TELLING)
    sent = tuple(c for where in dict.fromkeys(where for where, _ in own) for c in hlo.own_collectives(program, where))
    yield Loop(name, depth, times, moved(program, name, unknown), copies, sent)
    for where, one in own:
        if one.operation == "while":
            rounds, rest = _rounds(program, where, one, unknown)
            yield from _loops(program, hlo.calls(one)["body"][0], depth + 1, times * rounds, rest)


def _straight(program: Program, name: str) -> Iterator[tuple[str, Instruction]]:
    """The instructions of a computation, and of those that it calls once, with the computation that each is in."""
    for one in program.computations[name].values():
        yield name, one
        for other in _once(one):
            yield from _straight(program, other)


def _once(one: Instruction) -> list[str]:
    """The computations that an instruction runs itself, where it is no loop and no kernel."""
    if one.operation not in ("call", "conditional", "async-start"):
        return []
    return [name for role, names in hlo.calls(one).items() if role != "condition" for name in names]


def _rounds(
    program: Program, where: str, loop: Instruction, unknown: tuple[float, ...]
) -> tuple[float, tuple[float, ...]]:
    """How often a loop runs, and what is left of ``unknown`` for the loops in it."""
    trips = hlo.trip_count(program, program.computations[where], loop)
    if trips is not None:
        return trips, unknown
    return (unknown[0], unknown[1:]) if unknown else (1.0, ())


def moved(program: Program, name: str, unknown: tuple[float, ...] = ()) -> float:
    """Bytes that a computation reads and writes in memory in one run, its loops multiplied out.

    A kernel reads its operands once, of those that it slices only the slices, and writes its results once; what is
    updated in place costs what is put there. Of branches the dearest counts. What lies in a chip's own fast memory
    costs nothing.
    """
    total = 0.0
    for one in program.computations[name].values():
        if one.operation == "while":
            rounds, rest = _rounds(program, name, one, unknown)
            total += rounds * moved(program, hlo.calls(one)["body"][0], rest)
        elif inside := _once(one):
            total += max(moved(program, other, unknown) for other in inside)
        else:
            total += sum(_read(program, name, one)) + _written(program, name, one)
    return total


def _read(program: Program, name: str, one: Instruction) -> Iterator[float]:
    """Bytes of each operand that an instruction reads."""
    if one.operation in FREE or one.operation.endswith("-done"):
        return
    around = program.computations[name]
    for place, operand in enumerate(one.operands):
        if operand in around:
            yield _used(program, around[operand].shapes, one, place)


def _used(program: Program, shapes: str, user: Instruction, place: int) -> float:
    """Bytes that ``user`` reads of its operand at ``place``, which has these shapes."""
    whole = in_memory(shapes)
    if user.operation in ("dynamic-slice", "slice", "gather", "slice-start") and place == 0:
        parts = hlo.parts_of(user.shapes)
        return min(whole, hlo.bytes_of(parts[1] if len(parts) > 1 else user.shapes))
    if user.operation == "dynamic-update-slice" and place == 0:
        return 0.0
    if user.operation != "fusion":
        return whole
    kernel = program.computations[hlo.calls(user)["calls"][0]]
    given = next((x for x in kernel.values() if x.operation == "parameter" and x.rest.startswith(f"({place})")), None)
    return whole if given is None else min(whole, _used_in(program, kernel, given, shapes))


def _used_in(program: Program, kernel: dict[str, Instruction], value: Instruction, shapes: str) -> float:
    """Bytes that a kernel reads of one of its values."""
    total = 0.0
    for user in kernel.values():
        for place, operand in enumerate(user.operands):
            if operand == value.name and user.operation == "bitcast":
                total += _used_in(program, kernel, user, shapes)
            elif operand == value.name and user.operation != "tuple":
                total += _used(program, shapes, user, place)
    return total


def _written(program: Program, name: str, one: Instruction) -> float:
    """Bytes that an instruction writes."""
    if one.operation in FREE or one.operation.endswith("-done"):
        return 0.0
    parts = hlo.parts_of(one.shapes)
    if one.operation.endswith("-start"):  # operands and results, in this order but for a copy, then flags
        at = 0 if one.operation == "copy-start" else 1
        return in_memory(parts[at]) if len(parts) > 1 else in_memory(one.shapes)
    around = program.computations[name]
    return sum(map(_put, parts or [one.shapes], _roots(program, around, one, len(parts) or 1)))


def _put(shapes: str, update: str) -> float:
    """Bytes of a result, or of what is put into it."""
    return min(in_memory(shapes), hlo.bytes_of(update))


def _roots(program: Program, around: dict[str, Instruction], one: Instruction, count: int) -> list[str]:
    """For each result of an instruction the shapes of what is written: all of it, or what is put into it."""
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
    """Bytes of the arrays that a shape text names, but of those in fast memory on the chip: ``S(1)`` and up."""
    arrays = re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", shapes)
    return sum(hlo.bytes_of(array) for array in arrays if not re.search(r"S\([1-9]\)", array))


def _copy(program: Program, name: str, one: Instruction) -> Copy | None:
    """The instruction as a copy; None if it computes something, or writes nothing to memory."""
    kinds = _kinds(program, one)
    size = _written(program, name, one)
    if not kinds or not size:
        return None
    kind = min(kinds, key=MOVES.index)
    shape = re.sub(r"\{[^}]*\}", "", one.shapes)
    source = re.search(r'op_name="([^"]*)"', one.rest)
    return Copy(kind, shape, size, _short(source[1]) if source else one.name)


def _kinds(program: Program, one: Instruction) -> set[str]:
    """What an instruction does, if it only moves: empty if it computes."""
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


def _short(source: str) -> str:
    """The end of a traced operation's path, without the loops that it is in."""
    parts = [part for part in source.split("/") if part not in ("while", "body", "closed_call", "cond", "shard_map")]
    return "/".join(parts[-3:])
