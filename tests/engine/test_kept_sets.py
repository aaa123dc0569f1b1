"""What the engine says of a truncated draw: the tokens that were kept, and what the policy itself thought."""

import dataclasses

import numpy as np
import pytest
from engine.test_engine import LENGTH, PROMPTS, RULES, SEEDS, distributions, finished, model
from oracles import kept_tokens
from tiny import VOCAB

from jaxrl_llm.rollout import Engine

ENGINE = Engine(model(), slots=8, max_length=LENGTH, chunk=3)
TRUNCATED = dataclasses.replace(RULES, temperature=1.3, top_k=30, top_p=0.9, min_p=0.02, keep_mask=True)


def kept_sets(completion):
    """bool[t, V]."""
    bits = completion.extras["kept"][:, :, None] >> np.arange(32, dtype=np.uint32) & 1
    return bits.reshape(len(bits), -1)[:, :VOCAB].astype(bool)


@pytest.mark.slow
def test_kept_sets_are_those_of_the_full_forward():
    for prompt, found in zip(PROMPTS, ENGINE.generate(model(), PROMPTS, SEEDS, TRUNCATED), strict=True):
        hot, cold = (np.float64(distributions("plain", prompt, found.tokens, t)) for t in (1.3, 1.0))
        assert found.extras["kept"].dtype == np.uint32
        for t, (kept, token) in enumerate(zip(kept_sets(found), found.tokens, strict=True)):
            np.testing.assert_array_equal(kept, kept_tokens(np.exp(hot[t]), 30, 0.9, 0.02))
            assert kept[token]
            np.testing.assert_allclose(
                found.sampler_logp[t], hot[t, token] - np.log(np.exp(hot[t])[kept].sum()), atol=1e-5
            )
        policy = cold[np.arange(len(found.tokens)), found.tokens]
        np.testing.assert_allclose(found.extras["policy_logp"], policy, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_what_was_not_asked_for_is_not_there():
    names = lambda **changes: set(
        ENGINE.generate(model(), PROMPTS[:1], SEEDS[:1], dataclasses.replace(RULES, **changes))[0].extras
    )
    assert names() == {"entropy"}
    assert names(temperature=0.5) == names(temperature=0.0) == names(top_p=0.5) == {"entropy", "policy_logp"}


@pytest.mark.parametrize("first", [1, 3])
def test_kept_sets_survive_an_interruption(first):
    whole = ENGINE.generate(model(), PROMPTS, SEEDS, TRUNCATED)
    ENGINE.start(TRUNCATED)
    parts = finished(ENGINE, ENGINE.submit(PROMPTS, SEEDS, [first] * len(PROMPTS)))
    going_on = [i for i, part in enumerate(parts) if part.finish_reason == "length"]
    assert going_on
    begun = [parts[i] for i in going_on]
    again = finished(
        ENGINE, ENGINE.submit([PROMPTS[i] for i in going_on], [SEEDS[i] for i in going_on], partials=begun)
    )
    for i, found in zip(going_on, again, strict=True):
        assert found.tokens.tolist() == whole[i].tokens.tolist()
        np.testing.assert_array_equal(found.extras["kept"], whole[i].extras["kept"])
