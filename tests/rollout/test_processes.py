"""Several real processes run one schedule and get the same completions."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
from commands import environment
from rollout.two_processes import LENGTH, sampled
from tiny import tiny

from jaxrl_llm.rollout import Engine

PROGRAM = Path(__file__).parent / "two_processes.py"


def test_two_processes_sample_what_one_does():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    variables = environment(JAX_NUM_CPU_DEVICES="2")
    variables["PYTHONPATH"] += f":{PROGRAM.parents[1]}"
    command = [sys.executable, str(PROGRAM), address, "2"]
    processes = [
        subprocess.Popen([*command, str(i)], env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    assert first == second
    for (tokens, logp, reason), alone in zip(
        first, sampled(Engine(tiny("windows"), 4, LENGTH, 2), tiny("windows")), strict=True
    ):
        assert tokens == alone.tokens.tolist() and reason == alone.finish_reason
        np.testing.assert_allclose(logp, alone.sampler_logp, atol=1e-5)
