"""Several real processes run one schedule and get the same completions."""

import json
import socket
from pathlib import Path

import numpy as np
import pytest
from commands import environment
from nursery import Forked
from rollout.two_processes import LENGTH, sampled
from several import codes
from tiny import tiny

from jaxrl_llm.rollout import Engine

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).parent / "two_processes.py"


def test_two_processes_sample_what_one_does(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    changes = {"JAX_NUM_CPU_DEVICES": "2", "PYTHONPATH": str(PROGRAM.parents[1])}
    outs, errs = ([tmp_path / f"{kind}{i}" for i in range(2)] for kind in ("out", "err"))
    processes = [
        Forked(
            PROGRAM.read_text(),
            [address, "2", str(i)],
            tmp_path,
            ["/dev/null", outs[i], errs[i]],
            environment(),
            changes,
        )
        for i in range(2)
    ]
    assert codes(processes) == [0, 0], [path.read_text() for path in errs]
    first, second = (json.loads(out.read_text().splitlines()[-1]) for out in outs)
    assert first == second
    for (tokens, logp, reason), alone in zip(
        first, sampled(Engine(tiny("windows"), 4, LENGTH, 2), tiny("windows")), strict=True
    ):
        assert tokens == alone.tokens.tolist() and reason == alone.finish_reason
        np.testing.assert_allclose(logp, alone.sampler_logp, atol=1e-5)
