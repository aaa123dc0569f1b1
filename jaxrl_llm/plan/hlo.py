"""The text of a compiled program, as far as it says who talks to whom, how much and how often."""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
_WIDTHS = {"pred": 1, "s4": 0.5, "u4": 0.5, "bf16": 2, "f16": 2, "f8": 1, "token": 0}

_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) .*\{$")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|branch_computations|called_computations)=(\{[^}]*\}|%?[\w.-]+)")


class Instruction(NamedTuple):
    """One line: its name, the shapes that it returns, its operation, operands' names, and all that follows them."""

    name: str
    shapes: str
    operation: str
    operands: tuple[str, ...]
    rest: str
    root: bool


@dataclasses.dataclass(frozen=True)
class Collective:
    """A transfer between devices.

    Attributes:
      kind: of ``KINDS``.
      size: bytes of the whole, on one device: what an all-gather returns, what the others take.
      groups: int[groups, members], partition numbers that talk to each other; a permute has its cycles or pairs.
      times: how often it runs in one call of the program.
    """

    kind: str
    size: float
    groups: np.ndarray
    times: float = 1.0

    @property
    def moved(self) -> float:
        """Bytes that one device sends over its links in one run, by a ring."""
        n = self.groups.shape[1]
        return (
            self.size
            if self.kind == "collective-permute"
            else self.size * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """A parsed program.

    Attributes:
      computations: instructions by the computation's name.
      entry: where it begins.
      devices: partitions.
    """

    computations: dict[str, dict[str, Instruction]]
    entry: str
    devices: int


def parse(text: str, devices: int) -> Program:
    """The program of ``compiled.as_text()``."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry = ""
    current = None
    for line in text.splitlines():
        if current is None and (head := _COMPUTATION.match(line)):
            current = computations.setdefault(head[2], {})
            entry = head[2] if head[1] else entry
        elif line.rstrip() == "}":  # kernels write attributes over several lines, which may begin so too
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)):
            instruction = _instruction(line[match.end() :], match[2], bool(match[1]))
            current[match[2]] = instruction
    return Program(computations, entry, devices)


def _instruction(text: str, name: str, root: bool) -> Instruction:
    """``shapes operation(operands), rest`` taken apart; shapes may be a tuple, and layouts hold parentheses."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    opened = text.index("(", end)
    closed = _closing(text, opened)
    operands = tuple(re.findall(r"%([\w.-]+)", text[opened:closed]))
    return Instruction(name, text[:end], text[end:opened].strip(), operands, text[opened:], root)


def _closing(text: str, opened: int) -> int:
    depth = 0
    for at in range(opened, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    return len(text) - 1


def collectives(program: Program, unknown: Sequence[float] = ()) -> list[Collective]:
    """Every transfer of one call, loops multiplied out.

    Args:
      program: from ``parse``.
      unknown: how often loops run whose bounds are data, the outermost first; deeper ones are taken to run once.
    """
    return list(_walk(program, program.entry, 1.0, tuple(unknown)))


PRODUCTS = {
    "cuBLAS": r'custom_call_target="__cublas',
    "cuDNN": r'custom_call_target="__cudnn',
    "Triton": r'"kind":"__triton\w*gemm',
}
"""What a GPU's compiler may make of a matrix product, and how that stands in its program."""


def products(text: str) -> dict[str, int]:
    """How many matrix products a GPU's program has, by who computes them."""
    found = {name: len(re.findall(pattern, text)) for name, pattern in PRODUCTS.items()}
    return {name: count for name, count in found.items() if count}


def _walk(program: Program, name: str, times: float, unknown: tuple[float, ...]) -> Iterator[Collective]:
    yield from own_collectives(program, name, times)
    for instruction in program.computations[name].values():
        called = calls(instruction)
        if instruction.operation == "while":
            trips = trip_count(program, program.computations[name], instruction)
            first, rest = (unknown[0], unknown[1:]) if unknown else (1.0, ())
            known = trips is not None
            yield from _walk(
                program, called["body"][0], times * (trips if known else first), unknown if known else rest
            )
        elif instruction.operation in ("call", "conditional", "async-start"):
            for names in (names for key, names in called.items() if key != "condition"):
                for other in names:
                    yield from _walk(program, other, times, unknown)


def calls(instruction: Instruction) -> dict[str, list[str]]:
    """Names of the computations that an instruction calls, by role."""
    return {key: re.findall(r"%?([\w.-]+)", names) for key, names in _CALLED.findall(instruction.rest)}


def own_collectives(program: Program, name: str, times: float = 1.0) -> Iterator[Collective]:
    """Transfers of one computation and its fusions, without the loops in it.

    One that is spread over several fusions, to overlap, bears one channel.
    """
    seen: set[tuple[str, str]] = set()
    for instruction, fusion in _flat(program, name, ""):
        kind = instruction.operation.removesuffix("-start")
        if kind not in KINDS:
            continue
        channel = re.search(r"channel_id=(\d+)", instruction.rest)
        if fusion and channel and (kind, channel[1]) in seen:
            continue
        seen |= {(kind, channel[1])} if fusion and channel else set()
        scattered = kind == "all-reduce" and fusion.startswith("all-reduce-scatter")
        yield _collective("reduce-scatter" if scattered else kind, instruction, program, times)


def _flat(program: Program, name: str, fusion: str) -> Iterator[tuple[Instruction, str]]:
    """Instructions of a computation and of its fusions, with the fusion that they are in."""
    for instruction in program.computations[name].values():
        yield instruction, fusion
        if instruction.operation == "fusion":
            for other in calls(instruction).get("calls", []):
                yield from _flat(program, other, other)


def _collective(kind: str, instruction: Instruction, program: Program, times: float) -> Collective:
    groups = _groups(instruction.rest, program.devices)
    parts = parts_of(instruction.shapes) if instruction.operation.endswith("-start") else []
    if kind == "all-reduce" or len(parts) < 2:
        size = bytes_of(instruction.shapes)
        if instruction.operation.startswith("reduce-scatter"):
            size *= groups.shape[1]
    else:  # what begins only: its operands, its results, then flags
        size = bytes_of(parts[0] if kind == "reduce-scatter" else parts[1])
    return Collective(kind, size, groups, times)


def parts_of(shapes: str) -> list[str]:
    """The members of a tuple's shape, each a shape or a tuple of them; none where it is no tuple."""
    if not shapes.startswith("("):
        return []
    found = [""]
    depth = 0
    for letter in shapes[1 : _closing(shapes, 0)]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found


def bytes_of(shapes: str) -> float:
    """Bytes of all arrays that a shape text names."""
    return sum(
        math.prod(int(n) for n in sizes.split(",") if n) * width_of(dtype)
        for dtype, sizes in re.findall(r"\b([a-z]+\d*\w*)\[([\d,]*)\]", shapes)
    )


def width_of(dtype: str) -> float:
    """Bytes of one number."""
    for name, width in _WIDTHS.items():
        if dtype.startswith(name):
            return width
    return int(re.search(r"\d+", dtype)[0]) / 8


def _groups(rest: str, devices: int) -> np.ndarray:
    """Who talks to whom, in every notation that XLA has for it."""
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", rest):
        return np.array([[int(x) for x in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs[1])])
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", rest):
        axes = [(name, int(size)) for name, size in re.findall(r"'?(\w+)'?=(\d+)", mesh[1])]
        chosen = set(re.findall(r"\w+", mesh[2]))
        whole = np.arange(math.prod(size for _, size in axes)).reshape([size for _, size in axes])
        order = [i for i, (name, _) in enumerate(axes) if name not in chosen]
        members = math.prod(size for name, size in axes if name in chosen)
        return whole.transpose(order + [i for i in range(len(axes)) if i not in order]).reshape(-1, members)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        sizes = [int(x) for x in iota[3].split(",")]
        order = [int(x) for x in iota[4].split(",")] if iota[4] else range(len(sizes))
        return np.arange(math.prod(sizes)).reshape(sizes).transpose(order).reshape(int(iota[1]), int(iota[2]))
    if written := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", rest):
        return np.array([[int(x) for x in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", written[1])])
    return np.arange(devices)[None]


def trip_count(program: Program, around: dict[str, Instruction], loop: Instruction) -> int | None:
    """How often a loop runs: noted by the compiler, or from a counter that is compared with a constant.

    None for data.
    """
    if noted := re.search(r"known_trip_count[^\d]*(\d+)", loop.rest):
        return int(noted[1])
    called = calls(loop)
    condition, body = (program.computations[called[role][0]] for role in ("condition", "body"))
    compare = next((i for i in condition.values() if i.root), None)
    if compare is None or compare.operation != "compare" or "direction=LT" not in compare.rest:
        return None
    counter, bound = (condition[name] for name in compare.operands)
    limit = _constant(bound)
    place = re.search(r"index=(\d+)", counter.rest)
    if limit is None or place is None:
        return None
    index = int(place[1])
    first = _first_value(around, loop, index)
    return max(-(-(limit - first) // _stride(body, index)), 0)


def _constant(instruction: Instruction | None) -> int | None:
    found = instruction and instruction.operation == "constant" and re.match(r"\((-?\d+)\)", instruction.rest)
    return int(found[1]) if found else None


def _first_value(around: dict[str, Instruction], loop: Instruction, index: int) -> int:
    """What the counter begins with: 0, unless the operands say otherwise."""
    given = around.get(loop.operands[0])
    if given is None or given.operation != "tuple":
        return 0
    name = given.operands[index]
    while name in around and around[name].operation in ("copy", "bitcast"):
        name = around[name].operands[0]
    return _constant(around.get(name)) or 0


def _stride(body: dict[str, Instruction], index: int) -> int:
    """By how much the counter grows in one run of the body: 1, unless it adds another constant."""
    root = next(i for i in body.values() if i.root)
    name = root.operands[index] if root.operation == "tuple" else ""
    while name in body and body[name].operation in ("copy", "bitcast"):
        name = body[name].operands[0]
    if name not in body or body[name].operation != "add":
        return 1
    return next((value for operand in body[name].operands if (value := _constant(body.get(operand)))), 1)
