"""Hostile programs do none of what they try, at both levels of protection, and cheats pass no test."""

import contextlib
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sandbox.programs import BOMBS, CHEATS, EXPRESSIONS, HONEST, LASTING, TESTS, attempt, cheat

from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.code import grade
from jaxrl_llm.sandbox.client import ServerPool

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LEVELS = [pytest.param(level, marks=pytest.mark.sandbox(level)) for level in ("landlock+seccomp", "full")]


@pytest.fixture(scope="module")
def around(tmp_path_factory):
    """What hostile programs try to reach, by name."""
    folder = tmp_path_factory.mktemp("around")
    (folder / "secret").write_text("secret")
    with contextlib.ExitStack() as stack:
        kinds = {
            "tcp": (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
            "udp": (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
            "unix": (socket.AF_UNIX, socket.SOCK_STREAM, f"{folder}/unix"),
            "datagrams": (socket.AF_UNIX, socket.SOCK_DGRAM, f"{folder}/datagrams"),
        }
        names: dict[str, object] = {"secret": folder / "secret", "parent": os.getpid(), "project": ROOT}
        names["name"] = f"left-{os.getpid()}"
        for name, (family, kind, address) in kinds.items():
            listening = stack.enter_context(socket.socket(family, kind))
            listening.bind(address)
            if kind == socket.SOCK_STREAM:
                listening.listen()
            names[name] = listening.getsockname()[1] if family == socket.AF_INET else address
        yield names


def ended(servers, code, seconds=1.0):
    return sandbox.outcome(servers.run({"code": code}, b"", seconds, 256))


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_outside_is_reached(level, around):
    servers = ServerPool(level)
    assert servers.level == level
    before = os.stat(around["secret"])
    outcomes = {name: ended(servers, attempt(text, around)) for name, text in EXPRESSIONS.items()}
    reached = {name: one for name, one in outcomes.items() if "stopped" not in one.stdout or "BREACH" in one.stdout}
    assert not reached
    after = os.stat(around["secret"])
    assert (before.st_mode, before.st_mtime, before.st_size) == (after.st_mode, after.st_mtime, after.st_size)
    servers.close()


@pytest.mark.parametrize("level", LEVELS)
def test_bombs_end_and_harm_no_later_program(level):
    servers = ServerPool(level)
    for name, code in BOMBS.items():
        found = ended(servers, code)
        assert "BREACH" not in found.stdout, name
        assert found.status in ("error", "memory", "output", "ok"), (name, found.status)
        assert ended(servers, "print(1)").stdout == "1\n", name
    servers.close()


@pytest.mark.sandbox("landlock+seccomp")
def test_programs_that_last_are_ended_in_time():
    began = time.monotonic()
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda code: sandbox.run_python(code, timeout_s=0.3), LASTING.values()))
    assert {one.status for one in found} <= {"timeout", "error", "output", "memory"}
    assert time.monotonic() - began < 30
    assert sandbox.run_python("import threading\nprint(threading.active_count())").stdout == "1\n"


@pytest.mark.sandbox("landlock+seccomp")
def test_no_cheat_passes_a_test():
    for kind, tests in TESTS.items():
        assert grade(HONEST, tests) == (1.0, ("passed", "passed"), ""), kind
    with ThreadPoolExecutor() as pool:
        graded = {
            (name, kind): pool.submit(grade, cheat(body), tests, stop_early=True)
            for name, body in CHEATS.items()
            for kind, tests in TESTS.items()
        }
        scores = {key: one.result() for key, one in graded.items()}
    assert {key: one for key, one in scores.items() if one.score != 0} == {}
