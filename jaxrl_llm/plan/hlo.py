"""Parser of a compiled program's text: its collectives, and each loop's bytes, copies and cycles of kernels."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Instruction(NamedTuple):
    """One line of a program: name, shapes of the result, operation, names of the operands, and the remaining text."""

    name: str
    shapes: str
    operation: str
    operands: tuple[str, ...]
    rest: str
    root: bool


@dataclasses.dataclass(frozen=True)
class Collective:
    """A transfer between devices. ``kind``: "all-gather", "all-reduce", "reduce-scatter", "all-to-all" or
    "collective-permute". ``size``: bytes of the whole array on one device: the result of an all-gather, the operand of
    the others. ``groups``: int[groups, members], partitions that communicate; a permute has its cycles or pairs.
    ``times``: how often it runs in one call of the program.
    """

    kind: str
    size: float
    groups: np.ndarray
    times: float = 1.0

    @property
    def moved(self) -> float:
        """Return the bytes that one device sends over its links in one run, by a ring."""
        n = self.groups.shape[1]
        if self.kind == "collective-permute":
            return self.size
        return self.size * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Transfers of one kind. ``ici``, ``dcn``: bytes that a device sends inside its slice or host, and out of it;
    ``ici_s``, ``dcn_s``: least seconds for these.
    """

    kind: str
    count: float = 0.0
    ici: float = 0.0
    dcn: float = 0.0
    ici_s: float = 0.0
    dcn_s: float = 0.0

    def times(self, repeats: float) -> "Traffic":
        """Return the traffic of ``repeats`` repetitions."""
        return Traffic(self.kind, *(x * repeats for x in dataclasses.astuple(self)[1:]))


@dataclasses.dataclass(frozen=True)
class HloProgram:
    """A parsed program: instructions by name, by the computation's name; ``devices``: number of partitions."""

    computations: dict[str, dict[str, Instruction]]
    entry: str
    devices: int


def parse_hlo(text: str, devices: int) -> HloProgram:
    """Parse the text of ``compiled.as_text()``."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    current = None
    computation = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
    end_of_computation = re.compile(r"^\}(, execution_thread=\"[\w.-]+\")?\s*$")
    instruction = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
    for line in text.splitlines():
        if current is None and (head := computation.match(line)):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif end_of_computation.match(line):  # kernels write attributes over several lines, which may begin so too
            current = None
        elif current is not None and (match := instruction.match(line)):
            # ``shapes operation(operands), rest``; shapes may be a tuple, and layouts may contain parentheses.
            rest = line[match.end() :]
            end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
            opened = rest.index("(", end)
            operands = tuple(re.findall(r"%([\w.-]+)", rest[opened : _closing(rest, opened)]))
            operation = rest[end:opened].strip()
            current[match[2]] = Instruction(match[2], rest[:end], operation, operands, rest[opened:], bool(match[1]))
    return HloProgram(computations, entry, devices)


def _closing(text: str, opened: int) -> int:
    depth = 0
    for at in range(opened, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    return len(text) - 1


def count_products(text: str) -> dict[str, int]:
    """Count the matrix products of a GPU's program by implementation."""
    custom, triton = r'custom_call_target="__', r'"kind":"__triton\w*gemm'
    patterns = {"cuBLAS": custom + "cublas", "cuDNN": custom + "cudnn", "Triton": triton}
    counts = {name: len(re.findall(pattern, text)) for name, pattern in patterns.items()}
    return {name: count for name, count in counts.items() if count}


def callees(instruction: Instruction) -> dict[str, list[str]]:
    """Return the names of the computations that an instruction calls, by role."""
    roles = r"\b(calls|body|condition|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.-]+)"
    return {role: re.findall(r"%?([\w.-]+)", names) for role, names in re.findall(roles, instruction.rest)}


def inlined_callees(instruction: Instruction) -> list[str]:
    """Return the computations of a call, a conditional or an asynchronous start; empty for loops and kernels."""
    if instruction.operation not in ("call", "conditional", "async-start"):
        return []
    return [name for role, names in callees(instruction).items() if role != "condition" for name in names]


def walk(
    program: HloProgram, name: str, follow: Callable[[Instruction], Sequence[str]]
) -> Iterator[tuple[str, Instruction]]:
    """Yield the instructions of a computation and of those that ``follow`` names, each with its computation's name."""
    for instruction in program.computations[name].values():
        yield name, instruction
        for other in follow(instruction):
            yield from walk(program, other, follow)


def rounds(
    program: HloProgram, computation: str, loop: Instruction, unknown: tuple[float, ...]
) -> tuple[float, tuple[float, ...]]:
    """Return how often a loop of a computation runs, and the rest of ``unknown`` for the loops inside it."""
    trips = trip_count(program, program.computations[computation], loop)
    if trips is not None:
        return trips, unknown
    return (unknown[0], unknown[1:]) if unknown else (1.0, ())


def collectives_of(program: HloProgram, name: str, times: float) -> Iterator[Collective]:
    """Yield the transfers of one computation and its fusions, without those in its loops. A transfer that is split over
    several fusions, to overlap, has one channel and counts once.
    """
    seen: set[tuple[str, str]] = set()
    for computation, op in walk(program, name, lambda op: callees(op)["calls"] if op.operation == "fusion" else ()):
        kind = op.operation.removesuffix("-start")
        if kind not in ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"):
            continue
        channel = re.search(r"channel_id=(\d+)", op.rest)
        fused = computation != name
        if fused and channel and (kind, channel[1]) in seen:
            continue
        seen |= {(kind, channel[1])} if fused and channel else set()
        if kind == "all-reduce" and fused and computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        groups = _device_groups(op.rest, program.devices)
        parts = split_shapes(op.shapes) if op.operation.endswith("-start") else []
        if kind == "all-reduce" or len(parts) < 2:
            size = bytes_of(op.shapes)
            if op.operation.startswith("reduce-scatter"):
                size *= groups.shape[1]
        else:  # what begins only: its operands, its results, then flags
            size = bytes_of(parts[0] if kind == "reduce-scatter" else parts[1])
        yield Collective(kind, size, groups, times)


def split_shapes(shapes: str) -> list[str]:
    """Split a tuple's shape into its members, each a shape or a tuple; an empty list if it is not a tuple."""
    if not shapes.startswith("("):
        return []
    parts = [""]
    depth = 0
    for letter in shapes[1 : _closing(shapes, 0)]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def bytes_of(shapes: str) -> float:
    """Return the bytes of all arrays in a text of shapes."""
    total: float = 0
    widths = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f8": 1, "token": 0}
    for dtype, sizes in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shapes):
        width = next((width for name, width in widths.items() if dtype.startswith(name)), None)
        if width is None:
            width = int(re.search(r"\d+", dtype)[0]) / 8
        total += math.prod(int(n) for n in sizes.split(",") if n) * width
    return total


def _device_groups(rest: str, devices: int) -> np.ndarray:
    """Parse the groups of communicating devices, in every notation of XLA."""
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", rest):
        return np.array([[int(x) for x in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        axes = [(name, int(size)) for name, size in re.findall(r"'?(\w+)'?=(\d+)", mesh[1])]
        chosen = set(re.findall(r"\w+", mesh[2]))
        partitions = np.arange(math.prod(size for _, size in axes)).reshape([size for _, size in axes])
        order = [i for i, (name, _) in enumerate(axes) if name not in chosen]
        members = math.prod(size for name, size in axes if name in chosen)
        return partitions.transpose(order + [i for i in range(len(axes)) if i not in order]).reshape(-1, members)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        sizes = [int(x) for x in iota[3].split(",")]
        order = [int(x) for x in iota[4].split(",")] if iota[4] else range(len(sizes))
        return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(int(iota[1]), int(iota[2]))
    if groups := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", rest):
        return np.array([[int(x) for x in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", groups[1])])
    return np.arange(devices)[None]


def trip_count(program: HloProgram, around: dict[str, Instruction], loop: Instruction) -> int | None:
    """Return how often a loop runs, by the compiler's note or a counter's constant bound; None if the data decides."""
    if noted := re.search(r"known_trip_count[^\d]*(\d+)", loop.rest):
        return int(noted[1])
    called = callees(loop)
    condition, body = (program.computations[called[role][0]] for role in ("condition", "body"))
    compare = next((i for i in condition.values() if i.root), None)
    if compare is None or compare.operation != "compare" or "direction=LT" not in compare.rest:
        return None
    counter, bound = (condition[name] for name in compare.operands)
    limit = _constant(bound)
    index_match = re.search(r"index=(\d+)", counter.rest)
    if limit is None or index_match is None:
        return None
    index = int(index_match[1])
    # The counter begins at 0 and grows by 1, unless the operands and the body give other constants.
    initial = around.get(loop.operands[0])
    starts = initial is not None and initial.operation == "tuple"
    first = _constant(_origin(around, initial.operands[index])) or 0 if starts else 0
    root = next(i for i in body.values() if i.root)
    increment = _origin(body, root.operands[index]) if root.operation == "tuple" else None
    stride = 1
    if increment is not None and increment.operation == "add":
        stride = next((value for operand in increment.operands if (value := _constant(body.get(operand)))), 1)
    return max(-(-(limit - first) // stride), 0)


def _origin(around: dict[str, Instruction], name: str) -> Instruction | None:
    """Return the instruction that gives a value, before any copies of it."""
    while name in around and around[name].operation in ("copy", "bitcast"):
        name = around[name].operands[0]
    return around.get(name)


def _constant(instruction: Instruction | None) -> int | None:
    match = instruction and instruction.operation == "constant" and re.match(r"\((-?\d+)\)", instruction.rest)
    return int(match[1]) if match else None


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

MIN_COPY = 2**20
"""Least bytes of a copy that is reported."""


@dataclasses.dataclass(frozen=True)
class Copy:
    """Data that is written only to change its place or layout. ``kind``: one of ``MOVES``; the most telling, where a
    kernel does several. ``shape``: of the written array; ``size``: its bytes. ``source``: the traced operation that it
    comes from.
    """

    kind: str
    shape: str
    size: float
    source: str


@dataclasses.dataclass(frozen=True)
class HloLoop:
    """A loop's body, or the program outside of all loops, with ``depth`` 0. ``times``: how often it runs in one call of
    the program. ``moved``: bytes that one round reads and writes in the device's memory, inner loops multiplied out. In
    its own body: ``copies`` of at least ``MIN_COPY`` bytes, and ``collectives``, ``times`` times each.
    """

    depth: int
    times: float
    moved: float
    copies: tuple[Copy, ...]
    collectives: tuple[Collective, ...]


def find_loops(
    program: HloProgram, unknown: Sequence[float] = (), name: str = "", depth: int = 0, times: float = 1.0
) -> list[HloLoop]:
    """Return a computation, "" for the program's entry, and the loops in it, outer loops before inner ones.
    ``unknown``: trip counts of loops with a bound in the data, the outermost first; deeper loops count once. ``depth``:
    loops around the computation. ``times``: how often it runs in one call of the program.
    """
    name = name or program.entry
    instructions = list(walk(program, name, inlined_callees))
    all_copies = (_as_copy(program, computation, op) for computation, op in instructions)
    copies = tuple(copy for copy in all_copies if copy is not None and copy.size >= MIN_COPY)
    places = dict.fromkeys(computation for computation, _ in instructions)
    sent = tuple(c for computation in places for c in collectives_of(program, computation, times))
    program_loops = [HloLoop(depth, times, bytes_moved(program, name, tuple(unknown)), copies, sent)]
    for computation, op in instructions:
        if op.operation == "while":
            repeats, rest = rounds(program, computation, op, tuple(unknown))
            program_loops += find_loops(program, rest, callees(op)["body"][0], depth + 1, times * repeats)
    return program_loops


def bytes_moved(program: HloProgram, name: str, unknown: tuple[float, ...] = ()) -> float:
    """Return the bytes that a computation reads and writes in memory in one run, its loops multiplied out. A kernel
    reads its operands once, but only the slices of those it slices, and writes its results once; an update in place
    costs the inserted part, attention by length all columns of a layer. Of branches the most expensive counts. Data in
    a chip's fast memory costs nothing.
    """

    def traffic(around: dict[str, Instruction], op: Instruction) -> float:
        if op.operation in FREE or op.operation.endswith("-done"):
            return 0.0
        operands = ((place, around[operand]) for place, operand in enumerate(op.operands) if operand in around)
        read = sum(_bytes_read(program, value.shapes, op, place) for place, value in operands)
        return read + _bytes_written(program, around, op)

    return _sum_costs(program, name, unknown, traffic)


def cycles(program: HloProgram, name: str = "", unknown: tuple[float, ...] = ()) -> float:
    """Return the cycles of a TPU's core in one run of a computation, "" for the program's entry, by its compiler's
    static model, which has none for kernels of Pallas and collectives. 0 for other platforms.
    """

    def estimate(around: dict[str, Instruction], op: Instruction) -> float:
        noted = re.search(r'"estimated_cycles":"?(\d+)', op.rest)
        return float(noted[1]) if noted else 0.0

    return _sum_costs(program, name or program.entry, unknown, estimate)


def _sum_costs(program: HloProgram, name: str, unknown: tuple[float, ...], cost: Any) -> float:
    """Add up ``cost(computation, op)``, loops multiplied out; of branches the most expensive counts."""
    total = 0.0
    around = program.computations[name]
    for op in around.values():
        if op.operation == "while":
            repeats, rest = rounds(program, name, op, unknown)
            total += repeats * _sum_costs(program, callees(op)["body"][0], rest, cost)
        elif inside := inlined_callees(op):
            total += max(_sum_costs(program, other, unknown, cost) for other in inside)
        else:
            total += cost(around, op)
    return total


def _bytes_read(program: HloProgram, shapes: str, user: Instruction, index: int) -> float:
    """Return the bytes that ``user`` reads of its operand at ``index``, which has these shapes."""
    total = in_memory(shapes)
    if user.operation in ("dynamic-slice", "slice", "gather", "slice-start") and index == 0:
        parts = split_shapes(user.shapes)
        sliced = parts[1] if len(parts) > 1 else user.shapes
        return min(total, bytes_of(sliced) * _width(shapes) / _width(sliced))
    if user.operation == "dynamic-update-slice" and index == 0:
        return 0.0
    if user.operation == "custom-call" and "attention_by_length" in user.rest:
        layers = re.match(r"\w+\[(\d+)(?:,\d+){4}\]", shapes)  # one layer of a cache, at most: lengths decide
        return total / int(layers[1]) if layers else total
    if user.operation != "fusion":
        return total
    kernel = program.computations[callees(user)["calls"][0]]
    parameter = next(
        (x for x in kernel.values() if x.operation == "parameter" and x.rest.startswith(f"({index})")), None
    )
    return total if parameter is None else min(total, _kernel_reads(program, kernel, parameter, shapes))


def _kernel_reads(program: HloProgram, kernel: dict[str, Instruction], value: Instruction, shapes: str) -> float:
    """Return the bytes that a kernel reads of one of its values."""
    total = 0.0
    # Their own user decides how much of their operand is read.
    pass_through = ("pad", "convert", "copy", "reshape", "transpose", "reverse")
    results = {
        name for op in kernel.values() if op.root for name in (op.name, *op.operands * (op.operation == "tuple"))
    }
    for user in kernel.values():
        for place, operand in enumerate(user.operands):
            if operand != value.name or user.operation == "tuple":
                continue
            if user.operation == "bitcast" or (
                user.operation in pass_through and place == 0 and user.name not in results
            ):
                total += _kernel_reads(program, kernel, user, shapes)
            else:
                total += _bytes_read(program, shapes, user, place)
    return total


def _width(shapes: str) -> float:
    """Return the bytes of a number of an array."""
    return bytes_of(re.sub(r"\[[\d,]*\]", "[]", shapes))


def _bytes_written(program: HloProgram, around: dict[str, Instruction], op: Instruction) -> float:
    """Return the bytes that an op writes; ``around``: the computation that it is in."""
    parts = split_shapes(op.shapes)
    if op.operation.endswith("-start"):  # operands and results, in this order but for a copy, then flags
        at = 0 if op.operation == "copy-start" else 1
        return in_memory(parts[at]) if len(parts) > 1 else in_memory(op.shapes)
    updates = _written_shapes(program, around, op, len(parts) or 1)
    return sum(min(in_memory(x), bytes_of(update)) for x, update in zip(parts or [op.shapes], updates, strict=False))


def _written_shapes(program: HloProgram, around: dict[str, Instruction], op: Instruction, count: int) -> list[str]:
    """Return the shapes that are written for each result of an op: all of it, or the part updated in place."""
    if op.operation == "dynamic-update-slice":
        update = around.get(op.operands[1])
        return [op.shapes if update is None else update.shapes]
    if op.operation == "bitcast" and op.operands and op.operands[0] in around:
        inner = around[op.operands[0]]
        return (
            _written_shapes(program, around, inner, 1)
            if inner.operation in ("dynamic-update-slice", "fusion")
            else [op.shapes]
        )
    if op.operation == "fusion":
        kernel = program.computations[callees(op)["calls"][0]]
        root = next(x for x in kernel.values() if x.root)
        members = [kernel[x] for x in root.operands] if root.operation == "tuple" else [root]
        if len(members) == count:
            return [_written_shapes(program, kernel, member, 1)[0] for member in members]
    return split_shapes(op.shapes) or [op.shapes]


def in_memory(shapes: str) -> float:
    """Return the bytes of the arrays in a text of shapes, without those in fast memory on the chip: ``S(1)`` and up."""
    arrays = re.findall(r"\b[a-z]+\d*\w*\[[\d,]*\](?:\{[^}]*\})?", shapes)
    return sum(bytes_of(array) for array in arrays if not re.search(r"S\([1-9]\)", array))


def _as_copy(program: HloProgram, name: str, op: Instruction) -> Copy | None:
    """Return the op as a copy; None if it computes something, or writes nothing to memory."""
    kinds = _move_kinds(program, op)
    size = _bytes_written(program, program.computations[name], op) if kinds else 0.0
    if not size:
        return None
    kind = min(kinds, key=MOVES.index)
    shape = re.sub(r"\{[^}]*\}", "", op.shapes)
    source = re.search(r'op_name="([^"]*)"', op.rest)
    # The end of a traced operation's path, without the loops that it is in.
    around = ("while", "body", "closed_call", "cond", "shard_map")
    path = [part for part in source[1].split("/") if part not in around] if source else [op.name]
    return Copy(kind, shape, size, "/".join(path[-3:]))


def _move_kinds(program: HloProgram, op: Instruction) -> set[str]:
    """Return the kinds of movement of an op; empty if it computes something."""
    if op.operation != "fusion":
        name = op.operation.removesuffix("-start")
        return {name} if name in MOVES else set()
    kinds = set()
    for part in program.computations[callees(op)["calls"][0]].values():
        if part.operation in FREE or "[]" in part.shapes or part.shapes.startswith("pred"):
            continue
        inner = _move_kinds(program, part)
        if not inner:
            return set()
        kinds |= inner
    return kinds
