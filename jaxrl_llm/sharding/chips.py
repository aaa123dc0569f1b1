"""Accelerators that are known: the peaks of one device, and the names that JAX has for its kind."""

import dataclasses
import re

from jaxrl_llm.system.paths import GPU_SHARE

GB, GIB = 1e9, 2.0**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one device, as JAX counts devices.

    Attributes:
      name: as in a topology.
      platform: "tpu" or "gpu".
      flops: bfloat16 matrix products, FLOP/s, dense.
      bandwidth: of its memory, bytes/s.
      memory: bytes that a program may use.
      link: bytes/s one way over one link to a neighbour (TPU), or to all others of its host together (GPU).
      network: bytes/s one way out of its slice (TPU) or host (GPU), for each chip.
      dimensions: of the torus that links make; 0 for a switch.
      per_host: devices of a host; for a GPU those behind one switch, unless the topology gives another number.
      wrap: the ends of a torus axis are linked if its length is a multiple of this; 0 for never.
      clock: Hz of the cores of a TPU: its peak over the products that its matrix units begin in a cycle.
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
    clock: float = 0.0


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v4", "tpu", 275e12, 1228 * GB, 31.25 * GIB, 45 * GB, 6.25 * GB, 3, 4, 4, 1.05e9),
        Chip("v5e", "tpu", 197e12, 819 * GB, 15.75 * GIB, 45 * GB, 3.125 * GB, 2, 4, 16, 1.5e9),
        Chip("v5p", "tpu", 459e12, 2765 * GB, 95.74 * GIB, 90 * GB, 6.25 * GB, 3, 4, 4, 1.75e9),
        Chip("v6e", "tpu", 918e12, 1640 * GB, 31.25 * GIB, 90 * GB, 12.5 * GB, 2, 4, 16, 1.75e9),
        # Two devices make a chip, which shares links and network among them.
        Chip("tpu7x", "tpu", 1153e12, 3690 * GB, 94.75 * GIB, 50 * GB, 6.25 * GB, 3, 8, 4, 2.2e9),
        Chip("a100", "gpu", 312e12, 2039 * GB, GPU_SHARE * 80 * GB, 300 * GB, 25 * GB),
        Chip("h100", "gpu", 989e12, 3350 * GB, GPU_SHARE * 80 * GB, 450 * GB, 50 * GB),
        Chip("h200", "gpu", 989e12, 4800 * GB, GPU_SHARE * 141 * GB, 450 * GB, 50 * GB),
        Chip("b200", "gpu", 2250e12, 8000 * GB, GPU_SHARE * 180 * GB, 900 * GB, 50 * GB),
    )
}
"""Sources: Google Cloud's TPU system pages and the scaling book (TPUs), NVIDIA's data sheets (GPUs). The memory of a
TPU is what its compiler lets a program use, that of a GPU what the trainer lets JAX take.
"""

KINDS = {
    "TPU v4": "v4",
    "TPU v5 lite|TPU v5e": "v5e",
    "TPU v5|TPU v5p": "v5p",
    "TPU v6 lite|TPU v6e": "v6e",
    "TPU7x": "tpu7x",
    r"NVIDIA A100[- ].*GB( PCIe)?": "a100",
    r"NVIDIA H100 \d+GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
}
"""Patterns of ``device_kind``. H100 and H200 are those of SXM boards: cards for PCIe have lower peaks, and a slice of a
divided GPU (MIG) has a part of them."""


def chip_of(device_kind: str) -> Chip | None:
    """Return the chip of JAX's name for a kind of device; None if its peaks are not known, as on a CPU.

    >>> chip_of("TPU v5 lite").name
    'v5e'
    """
    return next((CHIPS[name] for kinds, name in KINDS.items() if re.fullmatch(kinds, device_kind)), None)
