"""Keys and values in int8: near the full ones, in less memory, and as independent of everything but the request."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from tiny import tiny

from jaxrl_llm.models.decoder import logits
from jaxrl_llm.rollout import Engine, Sampling

PROMPTS = ([3, 1, 4], [5, 9, 2, 6, 5, 3, 5], [3, 1, 4], list(range(17)), [8])
SEEDS = (5, 6, 7, 8, 9)
RULES = Sampling(max_new_tokens=7)


@functools.cache
def sampled(kind="gemma"):
    """An engine, and a completion of each prompt."""
    engine = Engine(tiny(kind), slots=3, max_length=24, chunk=3, group=4, kv_cache_dtype="int8")
    return engine, engine.generate(tiny(kind), PROMPTS, SEEDS, RULES)


@pytest.mark.parametrize("kind", [pytest.param("windows", marks=pytest.mark.slow), "gemma"])
def test_log_probabilities_are_near_those_of_the_full_forward(kind):
    gaps = []
    for prompt, completion in zip(PROMPTS, sampled(kind)[1], strict=True):
        tokens = np.array([*prompt, *completion.tokens])
        expected = jax.nn.log_softmax(logits(tiny(kind), tokens[None])[0])[len(prompt) - 1 : -1]
        gaps.append(np.abs(completion.sampler_logp - expected[np.arange(7), completion.tokens]))
    assert 1e-3 < np.mean(gaps) < 0.01 and np.max(gaps) < 0.05


def test_a_key_takes_a_byte_a_number_and_four():
    state = sampled()[0]._scheduler._state
    for cache in (state.cache, state.blocks):
        size = 2 * cache.v.size * (1 + 4 / cache.v.shape[-1])
        assert sum(x.nbytes for x in jax.tree.leaves(cache)) == size


def test_a_completion_depends_on_its_request_alone():
    engine, expected = sampled()
    for chosen in ([4, 2, 0, 3, 1], [1], [3, 0]):
        found = engine.generate(tiny("gemma"), [PROMPTS[i] for i in chosen], [SEEDS[i] for i in chosen], RULES)
        for i, completion in zip(chosen, found, strict=True):
            np.testing.assert_array_equal(completion.tokens, expected[i].tokens)
            np.testing.assert_array_equal(completion.sampler_logp, expected[i].sampler_logp)


def test_tokens_that_are_computed_in_one_call_read_what_they_read_one_by_one():
    engine, expected = sampled()
    engine.start(RULES)
    begun = [dataclasses.replace(c, tokens=c.tokens[:5], sampler_logp=c.sampler_logp[:5], mask=c.mask[:5],
                                 version=c.version[:5], extras={k: x[:5] for k, x in c.extras.items()})
             for c in expected]  # fmt: skip
    handles = engine.submit(PROMPTS, SEEDS, partials=begun)
    while engine.busy:
        engine.step(tiny("gemma"))
    found = dict(engine.collect())
    for handle, completion in zip(handles, expected, strict=True):
        np.testing.assert_array_equal(found[handle].tokens, completion.tokens)
        np.testing.assert_allclose(found[handle].sampler_logp, completion.sampler_logp, rtol=0, atol=1e-5)
