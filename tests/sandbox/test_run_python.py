"""Programs in the sandbox: what they may do, and how they end."""

import os

from jaxrl_llm.rewards.sandbox import run_python

ENDS = {
    "print(input()[::-1])": ("ok", "cba\n"),
    "import sys\nprint('said')\nsys.exit(3)": ("error", "said\n"),
    "print(1)\n1 / 0": ("error", "1\n"),
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
