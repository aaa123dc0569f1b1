"""GPUs that are not there, as XLA's compiler wants them described: numbers of their makers' data sheets."""

import dataclasses

from jaxrl_llm.folders import GPU_SHARE
from jaxrl_llm.plan.machines import Chip

KIB, MIB = 1 << 10, 1 << 20


@dataclasses.dataclass(frozen=True)
class Target:
    """What a compiler asks of a GPU beside its ``Chip``.

    Attributes:
      compute_capability: major and minor.
      cores: streaming multiprocessors.
      shared: bytes of shared memory of each; a block may have 1 KiB less.
      cache: bytes of level 2.
      clock: GHz, boosted.
      lanes: float32 units of a core.
    """

    compute_capability: tuple[int, int]
    cores: int
    shared: int
    cache: int
    clock: float
    lanes: int = 128


TARGETS: dict[str, Target] = {
    "a100": Target((8, 0), 108, 164 * KIB, 40 * MIB, 1.41, 64),
    "h100": Target((9, 0), 132, 228 * KIB, 50 * MIB, 1.98),
    "h200": Target((9, 0), 132, 228 * KIB, 50 * MIB, 1.98),
    "b200": Target((10, 0), 148, 228 * KIB, 126 * MIB, 1.965),
}
"""NVIDIA's architecture white papers and tuning guides."""


def target_config(chip: Chip) -> str:
    """The text that XLA reads a GPU from."""
    target = TARGETS[chip.name]
    major, minor = target.compute_capability
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * KIB,
        "shared_memory_per_core": target.shared,
        "shared_memory_per_block_optin": target.shared - KIB,
        "threads_per_core_limit": 2048,
        "core_count": target.cores,
        "fpus_per_core": target.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": int(chip.bandwidth),
        "l2_cache_size": target.cache,
        "clock_rate_ghz": target.clock,
        "device_memory_size": int(chip.memory / GPU_SHARE),
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    numbers = " ".join(f"{name}: {value}" for name, value in device.items())
    return (
        f"gpu_device_info {{ {numbers} cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } '
        "runtime_version { major: 12 minor: 8 patch: 0 } "
        f'device_description_str: "{chip.name.upper()}"'
    )
