"""Programs in the sandbox: what they may do, and how they end."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_llm.rewards.sandbox import LEVELS, run_python
from jaxrl_llm.sandbox.client import ServerPool

pytestmark = pytest.mark.sandbox("landlock+seccomp")

ENDS = {
    "print(input()[::-1])": ("ok", "cba\n"),
    "import sys\nprint('said')\nsys.exit(3)": ("error", "said\n"),
    "print(1)\n1 / 0": ("error", "1\n"),
    "print(2)\nexit()": ("ok", "2\n"),
    "def f(": ("error", ""),
    "x = [0] * 10**10": ("memory", ""),
    "while True: pass": ("timeout", ""),
    "import time\ntime.sleep(60)": ("timeout", ""),
    "open('x', 'w').write('own')\nprint(open('x').read())": ("ok", "own\n"),
    "import threading\nthreading.Thread(target=lambda: print('thread')).start()": ("ok", "thread\n"),
    "import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))": ("ok", "5\n"),
}


def test_each_end_has_its_status():
    for code, (status, stdout) in ENDS.items():
        found = run_python(code, "abc", timeout_s=0.3)
        assert (found.status, found.stdout) == (status, stdout), code


def test_an_error_has_the_trace_of_the_program_alone():
    found = run_python("def f():\n    return 1 / 0\nf()")
    assert found.stderr.splitlines()[1] == '  File "<program>", line 3, in <module>'
    assert found.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_output_is_capped():
    found = run_python("while True: print('a' * 10**6)")
    assert found.status == "output"
    assert len(found.stdout) == 4 << 20


def test_a_run_leaves_nothing_to_the_next():
    assert run_python("open('left', 'w').write('x')\nimport json\njson.left = 1").status == "ok"
    assert run_python("import json, os\nprint(os.listdir('.'), hasattr(json, 'left'))").stdout == "[] False\n"


def test_the_environment_is_empty():
    os.environ["SECRET_OF_THIS_TEST"] = "x"
    assert run_python("import os\nprint(dict(os.environ))").stdout == "{}\n"
    del os.environ["SECRET_OF_THIS_TEST"]


HELD = """
import sys, threading
from jaxrl_llm.sandbox.client import Server
server = Server(sys.argv[1])
threading.Thread(target=server.run, args=({"code": "print(1, flush=True)\\nwhile True: pass"}, b"", 60.0, 256)).start()
print(server.folder, server.process.pid, flush=True)
"""


@pytest.mark.parametrize("level", [pytest.param(one, marks=pytest.mark.sandbox(one)) for one in LEVELS[1:]])
def test_nothing_is_left_of_a_parent_that_is_killed(level):
    with subprocess.Popen([sys.executable, "-c", HELD, level], stdout=subprocess.PIPE, text=True) as parent:
        folder, server = parent.stdout.readline().split()
        time.sleep(0.3)  # the program runs
        parent.kill()
    until = time.monotonic() + 20
    while time.monotonic() < until and (os.path.exists(folder) or os.path.exists(f"/proc/{server}")):
        time.sleep(0.05)
    assert not os.path.exists(folder)
    assert not os.path.exists(f"/proc/{server}")
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [command for command in commands if folder.encode() in command]


def test_a_server_that_died_is_replaced():
    servers = ServerPool()
    for _ in range(2):
        with servers.acquire() as server:
            os.kill(server.process.pid, signal.SIGKILL)
        assert servers.run({"code": "print(1)"}, b"", 2.0, 256).stdout == b"1\n"
    servers.close()


@pytest.mark.sandbox("full")
def test_nothing_outside_is_even_seen_in_namespaces():
    servers = ServerPool("full")
    code = "import os\nfor path in ('/tmp', '/etc/passwd', '/home', '/usr/bin'):\n    print(os.path.exists(path))"
    assert servers.run({"code": code}, b"", 2.0, 256).stdout == b"False\n" * 4
    servers.close()


FORBIDDEN = """
import ctypes, json, struct, sys
from jaxrl_llm.rewards.sandbox import level, run_python
numbers = json.loads(sys.argv[1])
filter = [(0x20, 0, 0, 0)]  # load the number, compare, fail with EPERM
for number in numbers:
    filter += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
filter += [(0x06, 0, 0, 0x7FFF0000)]
program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *one) for one in filter))
packed = ctypes.create_string_buffer(struct.pack("@HP", len(filter), ctypes.addressof(program)))
library = ctypes.CDLL(None)
assert library.prctl(38, 1, 0, 0, 0) == 0 and library.prctl(22, 2, packed, 0, 0) == 0
print(json.dumps([level(), run_python("print(1)"), run_python("print(1)", unsafe=True)]))
"""
UNSHARE = {"x86_64": 272}.get(platform.machine(), 97)
LANDLOCK = 444


def forbidding(*numbers):
    """The level, and the outcomes of a program, where the system forbids these calls as a container does."""
    command = [sys.executable, "-c", FORBIDDEN, json.dumps(numbers)]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


@pytest.mark.slow
def test_a_container_without_namespaces_has_the_level_below():
    assert forbidding(UNSHARE) == ["landlock+seccomp", ["ok", "1\n", ""], ["ok", "1\n", ""]]


def test_a_program_is_refused_where_it_cannot_be_confined():
    level, outcome, unsafe = forbidding(UNSHARE, LANDLOCK)
    assert level == "rlimits only"
    assert outcome[:2] == ["refused", ""] and "Landlock" in outcome[2]
    assert unsafe == ["ok", "1\n", ""]
