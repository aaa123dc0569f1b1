"""Machines by name, and descriptions of absent TPUs and GPUs for a compiler."""

import contextlib
import dataclasses
import importlib.util
import itertools
import math
import os
import re
import sys
from collections.abc import Generator
from typing import Any

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.sharding.mesh import CHIPS, Chip
from jaxrl_llm.system.paths import GPU_SHARE

EXAMPLES = {"v4": "v4:2x2x4", "v5e": "v5e:4x4", "v5p": "v5p:4x4x4", "v6e": "v6e:4x4", "tpu7x": "tpu7x:2x2x1",
            "t4": "t4:1", "l4": "l4:1", "rtx4090": "rtx4090:1", "a100-40": "a100-40:8", "a100": "a100:8",
            "h100": "h100:8", "h200": "h200:8", "b200": "b200:8"}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind. ``chip``: the kind of device. ``shape``: of the torus of one slice; (hosts, devices per
    host) for GPUs. ``slices``: number of slices, linked by the data centre's network.
    """

    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def hosts(self) -> int:
        """Return the number of hosts, each with a process of a run; up to eight chips of v5e and v6e are one."""
        if self.chip.platform == "gpu":
            return self.shape[0]
        inside = self.devices // self.slices
        alone = self.chip.dimensions == 2 and inside <= 8
        return self.slices * (1 if alone else -(-inside // self.chip.per_host))

    @property
    def devices(self) -> int:
        """Return the number of all devices."""
        return math.prod(self.shape) * (2 if self.chip.name == "tpu7x" else 1) * self.slices

    @property
    def name(self) -> str:
        """Return the name as on the command line."""
        if self.chip.platform == "gpu":
            hosts, each = self.shape
            return f"{self.chip.name}:{self.devices if hosts == 1 or each == self.chip.per_host else f'{hosts}x{each}'}"
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}" + (
            f" x {self.slices} slices" if self.slices > 1 else ""
        )


def parse_topology(text: str, slices: int = 1) -> Machine:
    """Parse a machine: ``v5p:8x8x4``, ``h100:64`` or, where hosts do not hold 8 devices, ``h100:2x4``."""
    require(slices >= 1, f"--slices must be at least 1, got {slices}")
    match = re.fullmatch(r"([a-z0-9]+(?:-40)?)[:=_](\d+(?:x\d+)*)", text.lower())
    chip = CHIPS.get(match[1]) if match else None
    if chip is None:
        raise InputError(f"no topology {text!r}: {_hint(text)}")
    shape = tuple(int(size) for size in match[2].split("x"))
    if min(shape) < 1 or len(shape) not in ({chip.dimensions} if chip.dimensions else {1, 2}):
        kind = f"{chip.dimensions} sizes" if chip.dimensions else "a number of devices, or hosts x devices of each"
        raise InputError(f"topology {text!r}: {chip.name} takes {kind}, as in {EXAMPLES[chip.name]}")
    if chip.platform == "gpu":
        message = f"--slices is for TPUs; write hosts x devices of each: {chip.name}:{slices}x{shape[0]}"
        require(slices == 1, message)
        if len(shape) == 1:
            hosts, remainder = divmod(shape[0], chip.per_host)
            require(
                not hosts or not remainder,
                f"{shape[0]} devices are not whole hosts of {chip.per_host}: write hosts x devices of each, as in "
                f"{chip.name}:2x{chip.per_host}",
            )
            shape = (hosts, chip.per_host) if hosts else (1, *shape)
    return Machine(chip, shape, slices)


def _hint(text: str) -> str:
    """Suggest a topology for an unknown one: the cloud's own names count chips, or cores on v4 and v5p."""
    synonyms = {"v5litepod": "v5e", "v5lite": "v5e", "v5": "v5p", "trillium": "v6e", "ironwood": "tpu7x",
                "v7x": "tpu7x"}  # fmt: skip
    match = re.fullmatch(r"([a-z0-9]+?)(?:pod)?[-:](\d+)", text.lower())
    name = match and synonyms.get(match[1], match[1])
    if name not in CHIPS:
        return f"there are {', '.join(EXAMPLES.values())} and other sizes of these"
    chip = CHIPS[name]
    count = int(match[2])
    if chip.platform == "gpu":
        return f"write {name}:{count}"
    chips = count // 2 if name in ("v4", "v5p") and "-" in text else count
    # A product of sizes that differ little, smallest first on two dimensions and last on three.
    divisors = [size for size in range(1, chips + 1) if chips % size == 0]
    shapes = (sizes for sizes in itertools.product(divisors, repeat=chip.dimensions) if math.prod(sizes) == chips)
    best = min(shapes, key=lambda sizes: (max(sizes) / min(sizes), sizes))
    return f"write {name}:{'x'.join(map(str, sorted(best, reverse=chip.dimensions == 3)))}"


KIB, MIB = 1 << 10, 1 << 20


TARGETS = {
    "t4": (7, 5, {
        "core_count": 40, "shared_memory_per_core": 64 * KIB, "l2_cache_size": 4 * MIB, "clock_rate_ghz": 1.59,
        "fpus_per_core": 64, "shared_memory_per_block_optin": 64 * KIB, "threads_per_core_limit": 1024,
    }),
    "l4": (8, 9, {
        "core_count": 58, "shared_memory_per_core": 100 * KIB, "l2_cache_size": 48 * MIB, "clock_rate_ghz": 2.04,
        "threads_per_core_limit": 1536,
    }),
    "rtx4090": (8, 9, {
        "core_count": 128, "shared_memory_per_core": 100 * KIB, "l2_cache_size": 72 * MIB, "clock_rate_ghz": 2.52,
        "threads_per_core_limit": 1536,
    }),
    "a100": (8, 0, {
        "core_count": 108, "shared_memory_per_core": 164 * KIB, "l2_cache_size": 40 * MIB, "clock_rate_ghz": 1.41,
        "fpus_per_core": 64,
    }),
    "h100": (9, 0, {
        "core_count": 132, "shared_memory_per_core": 228 * KIB, "l2_cache_size": 50 * MIB, "clock_rate_ghz": 1.98,
    }),
    "b200": (10, 0, {
        "core_count": 148, "shared_memory_per_core": 228 * KIB, "l2_cache_size": 126 * MIB, "clock_rate_ghz": 1.965,
    }),
}  # fmt: skip
"""Compute capability of a GPU, and further numbers for its compiler: NVIDIA's white papers and guides. A block may have
1 KiB less than the shared memory of a core (a T4's as much); h200 and a100-40 are h100 and a100 with other memory.
"""


def target_config(chip: Chip) -> str:
    """Return the text that describes a GPU to XLA."""
    major, minor, limits = TARGETS[{"h200": "h100", "a100-40": "a100"}.get(chip.name, chip.name)]
    device = {
        "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_block_optin": limits["shared_memory_per_core"] - KIB, "threads_per_core_limit": 2048,
        "fpus_per_core": 128, "block_dim_limit_x": 2**31 - 1, "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1, "memory_bandwidth": int(chip.bandwidth),
        "device_memory_size": int(chip.memory / GPU_SHARE), "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536, **limits,
    }  # fmt: skip
    numbers = " ".join(f"{name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{ {numbers} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
        "runtime_version { major: 12 minor: 8 patch: 0 } "
        f'device_description_str: "{chip.name.upper()}"'
    )


NO_COMPILER = {
    "tpu": "planning for a TPU needs its compiler: pip install -e '.[compilers]' in the checkout (no TPU is needed)",
    "gpu": "by formula alone; to compile instead: pip install -e '.[compilers]' in the checkout (no GPU is needed)",
}

CUDNN = "nvidia.cudnn"
"""The module of cuDNN, without which its attention cannot be compiled."""


def describe_devices(machine: Machine) -> list[Any]:
    """Return the machine's devices, for meshes and ahead-of-time compilation only; InputError where that cannot be."""
    prepare_compilers()
    require(machine.chip.platform != "gpu" or compiles_for_gpus(), NO_COMPILER["gpu"])
    import jax
    from jax.experimental import topologies

    if machine.chip.platform == "tpu":
        platform, name = "tpu", f"{machine.chip.name}:{'x'.join(map(str, machine.shape))}"
        # Hosts hold 2x2 chips; a smaller slice is one host. Both cores of a v4 chip work as one.
        options: dict[str, Any] = {"chips_per_host_bounds": (*(min(size, 2) for size in machine.shape[:2]), 1)}
        options |= {"num_slices": machine.slices} if machine.slices > 1 else {}
        options |= {"chip_config_name": "megacore"} if machine.chip.name == "v4" else {}
    else:
        platform, name = "cuda", ""
        shape = "x".join(map(str, (1, *machine.shape)))
        options = {"target_config": target_config(machine.chip), "topology": shape}
    try:
        with _quiet():
            return list(topologies.get_topology_desc(platform=platform, topology_name=name, **options).devices)
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, ModuleNotFoundError) as error:
        text = str(error)
        if "lockfile" in text or "libtpu_lock" in text:
            raise InputError(
                "libtpu is in use by another process that does not share it: wait for it to end, then run the same "
                "command again"
            ) from None
        if "TPU support not installed" in text or "No module" in text:
            raise InputError(NO_COMPILER[machine.chip.platform]) from None
        line = next(iter(text.splitlines()), "")
        remedy = "; sizes of 1, 2 or multiples of 4 are known" if machine.chip.platform == "tpu" else ""
        raise InputError(f"topology {machine.name}: the compiler refuses it ({line}){remedy}") from None


def prepare_compilers() -> None:
    """Set the environment before JAX looks for devices: it finds none, asks no metadata server, and claims no TPU.
    Other processes may compile at the same time.
    """
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "JAX_PLATFORMS": "cpu",
    }.items():  # fmt: skip
        os.environ.setdefault(name, value)
    if "jax" in sys.modules:  # it has read its environment already
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])


def compiles_for_gpus() -> bool:
    """Whether JAX's CUDA plugin and the compiler for GPU code are installed."""
    plugins = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
    # Folders of the CUDA 13 and 12 wheels with the compiler from XLA's code to a GPU's.
    folders = (os.path.join(root, part) for part in ("nvidia/cu13/nvvm", "nvidia/cuda_nvcc/nvvm") for root in sys.path)
    return any(map(is_installed, plugins)) and any(map(os.path.isdir, folders))


def is_installed(name: str) -> bool:
    """Whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@contextlib.contextmanager
def _quiet() -> Generator[None]:
    """Silence the file descriptor of stderr: compilers report missing devices there, not through Python."""
    stderr = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
