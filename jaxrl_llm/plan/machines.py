"""Machines by name: what a chip can do at best, by its maker's data sheet, and how many there are."""

import dataclasses
import math
import re

from jaxrl_llm.errors import InputError
from jaxrl_llm.folders import GPU_SHARE

GB, GIB = 1e9, 2.0**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one device as JAX counts devices.

    Attributes:
      name: as in a topology.
      platform: "tpu" or "gpu".
      flops: bfloat16 matrix products, FLOP/s, dense.
      bandwidth: of its memory, bytes/s.
      memory: bytes that a program may use.
      link: bytes/s one way over one link to a neighbour (TPU), or to all others of its host together (GPU).
      network: bytes/s one way out of its slice (TPU) or host (GPU), for each chip.
      dimensions: of the torus that links make; 0 for a switch.
      per_host: devices of a host; for a GPU those behind one switch, where a topology does not say.
      wrap: how long an axis of the torus must be for its ends to be linked; 0 for never.
    """

    name: str
    platform: str
    flops: float
    bandwidth: float
    memory: float
    link: float
    network: float
    dimensions: int = 0
    per_host: int = 8
    wrap: int = 0


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 275e12, 1228 * GB, 31.25 * GIB, 45 * GB, 6.25 * GB, 3, 4, 4),
        Chip("v5e", "tpu", 197e12, 819 * GB, 15.75 * GIB, 45 * GB, 3.125 * GB, 2, 4, 16),
        Chip("v5p", "tpu", 459e12, 2765 * GB, 95.74 * GIB, 90 * GB, 6.25 * GB, 3, 4, 4),
        Chip("v6e", "tpu", 918e12, 1640 * GB, 31.25 * GIB, 90 * GB, 12.5 * GB, 2, 4, 16),
        # Two devices make a chip, which shares links and network among them.
        Chip("tpu7x", "tpu", 1153e12, 3690 * GB, 94.75 * GIB, 50 * GB, 6.25 * GB, 3, 8, 4),
        Chip("a100", "gpu", 312e12, 2039 * GB, GPU_SHARE * 80 * GB, 300 * GB, 25 * GB),
        Chip("h100", "gpu", 989e12, 3350 * GB, GPU_SHARE * 80 * GB, 450 * GB, 50 * GB),
        Chip("h200", "gpu", 989e12, 4800 * GB, GPU_SHARE * 141 * GB, 450 * GB, 50 * GB),
        Chip("b200", "gpu", 2250e12, 8000 * GB, GPU_SHARE * 180 * GB, 900 * GB, 50 * GB),
    )
}
"""Sources: Google Cloud's TPU system pages and the scaling book (TPUs), NVIDIA's data sheets (GPUs). A TPU's memory is
what its compiler lets a program use, a GPU's what the trainer lets JAX take."""

EXAMPLES = {"v4": "v4:2x2x4", "v5e": "v5e:4x4", "v5p": "v5p:4x4x4", "v6e": "v6e:4x4", "tpu7x": "tpu7x:2x2x1",
            "a100": "a100:8", "h100": "h100:8", "h200": "h200:8", "b200": "b200:8"}  # fmt: skip

_OTHER_NAMES = {
    "v5litepod": "v5e",
    "v5lite": "v5e",
    "v5": "v5p",
    "trillium": "v6e",
    "ironwood": "tpu7x",
    "v7x": "tpu7x",
}


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind.

    Attributes:
      chip: each of them.
      shape: of the torus of one slice; (hosts, devices of each) for GPUs.
      slices: how many such, linked by the data centre's network.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def per_slice(self) -> int:
        """Devices of a slice."""
        return math.prod(self.shape) * (2 if self.chip.name == "tpu7x" else 1)

    @property
    def devices(self) -> int:
        """All of them."""
        return self.per_slice * self.slices

    @property
    def name(self) -> str:
        """As on the command line."""
        if self.chip.platform == "gpu":
            hosts, each = self.shape
            return f"{self.chip.name}:{self.devices if hosts == 1 or each == self.chip.per_host else f'{hosts}x{each}'}"
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}" + (
            f" x {self.slices} slices" if self.slices > 1 else ""
        )


def parse_topology(text: str, slices: int = 1) -> Machine:
    """A machine from ``v5p:8x8x4``, ``h100:64`` or, where hosts hold other numbers than 8, ``h100:2x4``.

    Raises:
      InputError: no such chip, or no such shape; the line says what to write.
    """
    if slices < 1:
        raise InputError(f"--slices must be at least 1, got {slices}")
    match = re.fullmatch(r"([a-z0-9]+)[:=_](\d+(?:x\d+)*)", text.lower())
    chip = CHIPS.get(match[1]) if match else None
    if chip is None:
        raise InputError(f"no topology {text!r}: {_hint(text)}")
    shape = tuple(int(size) for size in match[2].split("x"))
    if min(shape) < 1 or len(shape) not in ({chip.dimensions} if chip.dimensions else {1, 2}):
        kind = f"{chip.dimensions} sizes" if chip.dimensions else "a number of devices, or hosts x devices of each"
        raise InputError(f"topology {text!r}: {chip.name} takes {kind}, as in {EXAMPLES[chip.name]}")
    if chip.platform == "gpu":
        if slices > 1:
            raise InputError(f"--slices is for TPUs; write hosts x devices of each: {chip.name}:{slices}x{shape[0]}")
        shape = shape if len(shape) == 2 else _hosts(chip, shape[0])
    return Machine(chip, shape, slices)


def _hosts(chip: Chip, devices: int) -> tuple[int, int]:
    """So many GPUs as whole hosts, or a part of one."""
    if devices <= chip.per_host:
        return 1, devices
    if devices % chip.per_host:
        raise InputError(
            f"{devices} devices are no whole hosts of {chip.per_host}: write hosts x devices of each, as in "
            f"{chip.name}:2x{chip.per_host}"
        )
    return devices // chip.per_host, chip.per_host


def _hint(text: str) -> str:
    """What was probably meant: the cloud's own names count chips, or cores on v4 and v5p."""
    match = re.fullmatch(r"([a-z0-9]+?)(?:pod)?[-:](\d+)", text.lower())
    name = match and _OTHER_NAMES.get(match[1], match[1])
    if name not in CHIPS:
        return f"there are {', '.join(EXAMPLES.values())} and other sizes of these"
    chip = CHIPS[name]
    count = int(match[2])
    if chip.platform == "gpu":
        return f"write {name}:{count}"
    chips = count // 2 if name in ("v4", "v5p") and "-" in text else count
    return f"write {name}:{'x'.join(map(str, _near_square(chips, chip.dimensions)))}"


def _near_square(count: int, dimensions: int) -> tuple[int, ...]:
    """``count`` as a product of sizes that differ little, smallest first on two dimensions and last on three."""
    best = min((sizes for sizes in _products(count, dimensions)), key=lambda sizes: (max(sizes) / min(sizes), sizes))
    return tuple(sorted(best, reverse=dimensions == 3))


def _products(count: int, dimensions: int) -> list[tuple[int, ...]]:
    if dimensions == 1:
        return [(count,)]
    return [(d, *rest) for d in range(1, count + 1) if count % d == 0 for rest in _products(count // d, dimensions - 1)]
