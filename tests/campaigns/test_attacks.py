"""Hostile programs at random, several at a time, between honest ones: nothing is reached, harmed or left."""

import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from campaigns.extent import PATIENCE_S, SEED, TIMES
from sandbox.programs import BOMBS, EXPRESSIONS, LASTING, attempt

from jaxrl_llm.rewards import sandbox
from jaxrl_llm.sandbox.client import SandboxError, ServerPool

pytestmark = [pytest.mark.campaign, pytest.mark.timeout(PATIENCE_S)]
SECONDS = 10


def hostile(folder):
    """Programs by what they try, against things of this process."""
    (folder / "secret").write_text("secret")
    names = {"secret": folder / "secret", "parent": os.getpid(), "project": Path(__file__).parents[2]}
    names |= {"name": f"left-{os.getpid()}", "tcp": 9, "udp": 9}
    names |= {"unix": folder / "unix", "datagrams": folder / "datagrams"}
    return {name: attempt(text, names) for name, text in EXPRESSIONS.items()} | BOMBS | LASTING


def attacked(servers, programs, seed):
    """Run programs at random for a while, an honest one after each; what went wrong, and how many have run."""
    draws, until, count, wrong = random.Random(f"{SEED} {seed}"), time.monotonic() + SECONDS * TIMES, 0, []
    while time.monotonic() < until:
        name = draws.choice(list(programs))
        try:
            found = sandbox.outcome(servers.run({"code": programs[name]}, b"", 0.2, 128))
        except SandboxError:  # too busy to tell
            continue
        honest = sandbox.outcome(servers.run({"code": "print(input())"}, b"honest", 5.0, 128))
        wrong += [name] * ("BREACH" in found.stdout)
        wrong += [f"after {name} an honest program ended with {honest}"] * (honest.stdout != "honest\n")
        count += 1
    return count, wrong


def servers_left():
    """Processes of the sandbox that this one has begun and that are still there."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
            parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            continue
        if b"jaxrl_llm.sandbox.server" in command and int(parent) == os.getpid():
            found.append(process.name)
    return found


@pytest.mark.parametrize(
    "level", [pytest.param(level, marks=pytest.mark.sandbox(level)) for level in ("landlock+seccomp", "full")]
)
def test_programs_at_random_reach_nothing_and_harm_no_other(level, tmp_path):
    before, servers, programs = servers_left(), ServerPool(level), hostile(tmp_path)
    assert servers.level == level
    with ThreadPoolExecutor() as pool:
        workers = range(os.cpu_count() or 1)
        found = list(pool.map(lambda seed: attacked(servers, programs, seed), workers))
    servers.close()
    assert [wrong for _, wrong in found] == [[] for _ in workers]
    assert sum(count for count, _ in found) > 10 and servers_left() == before
    assert (tmp_path / "secret").read_text() == "secret"
