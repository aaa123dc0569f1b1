"""How much of the cache a step reads: as little as the longest row needs, without another token coming out."""

import functools

import numpy as np
import pytest
from tiny import Compilations, tiny

from jaxrl_llm.rollout import Engine, Sampling

LENGTH = 400
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(1, 40, size).tolist() for size in (3, 5, 150, 7, 250, 2)]
SEEDS = range(len(PROMPTS))
RULES = Sampling(max_new_tokens=20)


@functools.cache
def engine(strict):
    return Engine(tiny("windows"), slots=2, max_length=LENGTH, chunk=4, strict=strict)


@functools.cache
def sampled(strict):
    return engine(strict).generate(tiny("windows"), PROMPTS, SEEDS, RULES)


@pytest.mark.slow
def test_reading_less_draws_the_same_tokens():
    for few, all_ in zip(sampled(False), sampled(True), strict=True):
        np.testing.assert_array_equal(few.tokens, all_.tokens)
        np.testing.assert_allclose(few.sampler_logp, all_.sampler_logp, atol=1e-5)


@pytest.mark.parametrize("mates", [(), (2,), (4, 3)])
def test_a_strict_engine_gives_the_same_bits_beside_neighbours_of_any_length(mates):
    for index in (0, 5):
        chosen = [index, *mates]
        found = engine(True).generate(tiny("windows"), [PROMPTS[i] for i in chosen], chosen, RULES)[0]
        assert found.tokens.tobytes() == sampled(True)[index].tokens.tobytes()
        assert found.sampler_logp.tobytes() == sampled(True)[index].sampler_logp.tobytes()


@pytest.mark.slow
def test_chunks_of_few_sizes_are_compiled_and_none_twice():
    fresh = Engine(tiny("windows"), slots=17, max_length=LENGTH, chunk=4)
    with Compilations() as first:
        fresh.generate(tiny("windows"), PROMPTS[:2], SEEDS[:2], RULES)
        fresh.generate(tiny("windows"), PROMPTS, SEEDS, RULES)
    assert 2 <= sum("run_chunk" in name for name in first.heard) <= 4
    with Compilations() as again:
        fresh.generate(tiny("windows"), PROMPTS[::-1], SEEDS, RULES)
    assert not any("run_chunk" in name for name in again.heard)


def test_a_row_that_grows_past_a_size_goes_on():
    rules = Sampling(max_new_tokens=150)
    long, short = (e.generate(tiny("windows"), [PROMPTS[0]], [7], rules)[0] for e in (engine(True), engine(False)))
    np.testing.assert_array_equal(long.tokens, short.tokens)
    np.testing.assert_allclose(long.sampler_logp, short.sampler_logp, atol=1e-5)
