"""The experts of each token, as the sampler records them: those of the pass that predicted it."""

import dataclasses

import numpy as np
import pytest
from tiny import tiny

from jaxrl_llm.engine.requests import first_tokens, with_tokens
from jaxrl_llm.models.decoder import causal_rows, routed
from jaxrl_llm.models.experts import EXPERTS
from jaxrl_llm.rollout import Engine, Sampling

MODEL = tiny("experts")
RULES = Sampling(max_new_tokens=12)
PROMPTS, SEEDS = ([1, 2, 3, 4, 5], [7, 8, 9], [4], [1, 2, 3, 4, 5]), (1, 2, 3, 4)
ENGINE = Engine(MODEL, slots=2, max_length=40, chunk=4, group=2)


def of_full_forward(prompt, completion):
    """Sets of experts [p + t - 1, L, k] of all passes but the last."""
    tokens = np.array([[*prompt, *completion.tokens]])
    return np.sort(np.asarray(routed(MODEL, causal_rows(tokens))[1])[0], axis=-1)[:-1]


def recorded(completion):
    whole = np.concatenate([completion.prompt_extras[EXPERTS], completion.extras[EXPERTS]])
    assert whole.dtype == np.uint8 and not whole[0].any()
    return np.sort(whole[1:], axis=-1)


def done(handles):
    while ENGINE.busy:
        ENGINE.step(MODEL)
    found = dict(ENGINE.collect())
    return [found[handle] for handle in handles]


@pytest.mark.slow
def test_they_are_those_of_the_full_forward():
    for prompt, completion in zip(PROMPTS, ENGINE.generate(MODEL, PROMPTS, SEEDS, RULES), strict=True):
        assert completion.extras[EXPERTS].shape == (len(completion.tokens), 2, 3)
        assert completion.prompt_extras[EXPERTS].shape == (len(prompt), 2, 3)
        np.testing.assert_array_equal(recorded(completion), of_full_forward(prompt, completion))


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
def test_a_completion_that_resumes_has_them_of_a_tools_tokens_too(keep):
    """Resumed from kept keys and values, or computed anew; sampled tokens keep those of the pass that sampled them."""
    ENGINE.start(RULES)
    begun = done(ENGINE.submit(PROMPTS[:2], SEEDS[:2], [4, 4], keep=keep))
    told = [with_tokens(first_tokens(one, 3), [11, 12, 13]) for one in begun]
    marked = [dataclasses.replace(one, extras=one.extras | {EXPERTS: one.extras[EXPERTS].copy()}) for one in told]
    marked[0].extras[EXPERTS][1] = 5
    for prompt, start, whole in zip(PROMPTS, marked, done(ENGINE.submit(PROMPTS[:2], SEEDS[:2], partials=marked)),
                                    strict=False):  # fmt: skip
        wanted = of_full_forward(prompt, whole)
        if start is marked[0]:
            wanted[len(prompt)] = 5
        np.testing.assert_array_equal(recorded(whole), wanted)


def test_a_dense_model_records_none():
    model = tiny("plain")
    (one,) = Engine(model, slots=2, max_length=40, chunk=4).generate(model, [[1, 2]], [1], RULES)
    assert EXPERTS not in one.extras and not one.prompt_extras
