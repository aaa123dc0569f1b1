"""How much memory a run takes at the moment: this process's own, and that of its fullest device."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

GIB = 2**30
STATM = Path("/proc/self/statm")


def now() -> str:
    """``memory 1.4 GiB  device 12.3 of 79.6 GiB, 61.0 at most``; what the system does not tell is left out."""
    import jax

    return told(resident(), [device.memory_stats() or {} for device in jax.local_devices()])


def resident() -> int | None:
    """Bytes of this process that are in memory, which on a CPU are its arrays too; None where there is no /proc."""
    try:
        pages = STATM.read_text().split()[1]
    except OSError:
        return None
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def told(process: int | None, devices: Sequence[Mapping[str, int]]) -> str:
    """Both in words.

    Args:
      process: bytes.
      devices: of each what JAX reports, in bytes: ``bytes_in_use``, ``bytes_limit`` and ``peak_bytes_in_use``; none of
        them where it reports nothing, as of a CPU.
    """
    parts = [] if process is None else [f"memory {process / GIB:.1f} GiB"]
    if measured := [stats for stats in devices if "bytes_in_use" in stats]:
        fullest = max(measured, key=lambda stats: stats["bytes_in_use"] / stats.get("bytes_limit", GIB))
        name = "device" if len(measured) == 1 else "fullest device"
        limit = f" of {fullest['bytes_limit'] / GIB:.1f}" if fullest.get("bytes_limit") else ""
        peak = f", {fullest['peak_bytes_in_use'] / GIB:.1f} at most" if "peak_bytes_in_use" in fullest else ""
        parts.append(f"{name} {fullest['bytes_in_use'] / GIB:.1f}{limit} GiB{peak}")
    return "  ".join(parts)
