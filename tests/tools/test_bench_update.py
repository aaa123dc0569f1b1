"""The learner's benchmark: what it counts."""

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import bench_rollout
import bench_update

from jaxrl_llm.learner import Compute, Learner
from jaxrl_llm.models.config import Embeddings
from jaxrl_llm.models.decoder import initialise

pytestmark = pytest.mark.slow

SMALL = Learner(optimiser=bench_update.ADAM, compute=Compute(microbatch_rows=8, row_tokens=32))


def test_a_row_counts_the_tokens_of_completions_and_the_padding_around_them():
    options = bench_update.Options(
        "tiny-random", "equal", rows=16, group=2, prompt=8, completion=8, repeats=1, learner=SMALL
    )
    row = bench_update.run(options)
    assert row["tokens"] == 16 * 8 and row["mean_over_max"] == 1
    # A group of 8 + 2 * 8 tokens fills three quarters of a row of 32.
    assert row["filled"] == 0.75
    assert row["tokens_per_s"] == pytest.approx(128 / row["update_s"], rel=0.1)
    assert (
        0 < row["mfu"] < 1
        and row["temp_mb"] > 0
        and row["backward_s"] > 0
        and row["learner"]["compute"]["microbatch_rows"] == 8
    )


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_of_single_tokens(tied):
    config = dataclasses.replace(bench_rollout.SHAPES["7m"], embeddings=Embeddings(tied=tied))
    model = jax.eval_shape(lambda key: initialise(config, key), jax.random.key(0))
    D, L, F, a = config.width, config.layers, config.mlp_width, config.attention
    weights = D * a.heads * a.head_dim * 2 + D * a.kv_heads * a.head_dim * 2 + 3 * D * F
    limits, total = np.array([3, 1, 2, 2]), 0
    for prompt in (range(5), range(5)):
        total += sum(L * (2 * weights + 4 * a.heads * a.head_dim * (position + 1)) for position in prompt)
    for limit in limits:
        for position in range(5, 5 + limit):
            total += L * (2 * weights + 4 * a.heads * a.head_dim * (position + 1)) + 2 * D * config.vocab_size
    assert bench_update.least_operations(model, 5, limits, 2) == pytest.approx(3 * total, rel=2e-3)
