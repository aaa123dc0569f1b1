"""How much memory a run takes, against what the kernel says elsewhere, and for devices that report it."""

import re
from pathlib import Path

from jaxrl_llm.telemetry.screens import GIB, memory_in_words, memory_now, resident


def test_the_memory_of_this_process_is_what_the_kernel_counts():
    kilobytes = int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    assert abs(resident() - 1024 * kilobytes) < 0.1 * resident()
    before = resident()
    held = b"x" * 2**28
    assert resident() - before > 0.9 * len(held)


def test_a_cpu_has_the_memory_of_its_process_alone():
    assert re.fullmatch(r"memory \d+\.\d GiB", memory_now())


def test_of_several_devices_the_fullest_is_told():
    half = {"bytes_in_use": 8 * GIB, "bytes_limit": 16 * GIB, "peak_bytes_in_use": 12 * GIB}
    full = {"bytes_in_use": 6 * GIB, "bytes_limit": 8 * GIB, "peak_bytes_in_use": 7 * GIB}
    assert memory_in_words(3 * GIB // 2, [half]) == "memory 1.5 GiB  device 8.0 of 16.0 GiB, 12.0 at most"
    assert memory_in_words(GIB, [half, full, {}]) == "memory 1.0 GiB  fullest device 6.0 of 8.0 GiB, 7.0 at most"
    assert memory_in_words(GIB, [{"bytes_in_use": GIB}]) == "memory 1.0 GiB  device 1.0 GiB"
    assert memory_in_words(None, [half]) == "device 8.0 of 16.0 GiB, 12.0 at most" and memory_in_words(None, [{}]) == ""
