"""How much memory a run takes, against what the kernel says elsewhere, and for devices that report it."""

import re
from pathlib import Path

from jaxrl_llm.telemetry.screens import GIB, describe_memory, memory_now, resident_bytes


def test_the_memory_of_this_process_is_what_the_kernel_counts():
    kilobytes = int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert abs(resident_bytes() - 1024 * kilobytes) < 0.1 * resident_bytes()
    before = resident_bytes()
    held = b"x" * 2**28
    assert resident_bytes() - before > 0.9 * len(held)


def test_a_cpu_has_the_memory_of_its_process_alone():
    assert re.fullmatch(r"memory \d+\.\d GiB", memory_now())


def test_of_several_devices_the_fullest_is_told():
    half = {"bytes_in_use": 8 * GIB, "bytes_limit": 16 * GIB, "peak_bytes_in_use": 12 * GIB}
    full = {"bytes_in_use": 6 * GIB, "bytes_limit": 8 * GIB, "peak_bytes_in_use": 7 * GIB}
    assert describe_memory(3 * GIB // 2, [half]) == "memory 1.5 GiB  device 8.0 of 16.0 GiB, 12.0 at most"
    assert describe_memory(GIB, [half, full, {}]) == "memory 1.0 GiB  fullest device 6.0 of 8.0 GiB, 7.0 at most"
    assert describe_memory(GIB, [{"bytes_in_use": GIB}]) == "memory 1.0 GiB  device 1.0 GiB"
    assert describe_memory(None, [half]) == "device 8.0 of 16.0 GiB, 12.0 at most" and describe_memory(None, [{}]) == ""
