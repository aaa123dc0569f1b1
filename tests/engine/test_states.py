"""The engine on layers with a state, latent attention or shared keys: what it samples is what the forward pass says."""

import functools

import jax
import numpy as np
import pytest
from tiny import VOCAB, tiny

from jaxrl_llm.engine import Engine, Sampling
from jaxrl_llm.models.decoder import logits

LONGEST, NEW = 40, 12
RULES = Sampling(temperature=1.0, max_new_tokens=NEW)


@functools.cache
def prompts():
    random = np.random.default_rng(0)
    return [random.integers(0, VOCAB, size).tolist() for size in (1, 3, 9, 20, 2)] * 2


def worst_gap(model, answers, asked):
    """The largest difference of a sampled token's log-probability from that of the forward pass."""
    rows = np.zeros((len(answers), LONGEST), np.int64)
    for row, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        rows[row, : len(prompt) + len(answer.tokens)] = [*prompt, *answer.tokens]
    logp = np.asarray(jax.nn.log_softmax(logits(model, rows), axis=-1))
    gaps = [
        np.abs(logp[row, np.arange(len(prompt) - 1, len(prompt) - 1 + len(answer.tokens)), answer.tokens]
               - answer.sampler_logp).max()
        for row, (prompt, answer) in enumerate(zip(asked, answers, strict=True))
    ]  # fmt: skip
    return max(gaps)


@pytest.mark.slow(but="delta-group")
@pytest.mark.parametrize("how", [{"slots": 4, "group": 2}, {"slots": 3, "strict": True}], ids=["group", "strict"])
@pytest.mark.parametrize("kind", ["delta", "conv", "latent", "gemma4"])
def test_what_is_sampled_has_the_probabilities_of_the_forward_pass(kind, how):
    """Slots are refilled, and grow and shrink; two requests share each prompt."""
    model = tiny(kind)
    engine = Engine(model, max_length=LONGEST, chunk=5, **how)
    answers = engine.generate(model, prompts(), list(range(len(prompts()))), RULES)
    assert {len(answer.tokens) for answer in answers} == {NEW}
    assert worst_gap(model, answers, prompts()) < 2e-5


def resumed(model, keep, limit=NEW):
    """Requests that end after two chunks or at a limit, and are resumed; and how many sequences were computed."""
    engine = Engine(model, slots=4, max_length=LONGEST, chunk=4)
    asked = prompts()[:4]
    whole = engine.generate(model, asked, [1, 2, 3, 4], RULES)
    engine.start(RULES)
    handles = engine.submit(asked, [1, 2, 3, 4], limits=[min(limit + i, NEW) for i in range(4)], keep=keep)
    engine.step(model)
    engine.step(model)
    engine.abort(handles)
    parts = dict(engine.collect())
    again = engine.submit(asked, [1, 2, 3, 4], partials=[parts[handle] for handle in handles], keep=keep)
    while engine.busy:
        engine.step(model)
    ends = dict(engine.collect())
    return whole, [ends[handle] for handle in again], engine.prompts_prefilled


@pytest.mark.slow(but="delta-6")
@pytest.mark.parametrize("limit", [NEW, 6])
@pytest.mark.parametrize("kind", ["delta", "conv", "latent", "gemma4"])
def test_a_request_resumes_from_the_state_that_was_kept(kind, limit):
    """With the limit it ends within a chunk, whose other steps change nothing."""
    model = tiny(kind)
    whole, again, computed = resumed(model, True, limit)
    assert computed == 4, "nothing is computed again"
    for before, after in zip(whole, again, strict=True):
        np.testing.assert_array_equal(before.tokens, after.tokens)
        # Chunks begin where a request does: after a limit they lie otherwise.
        atol = 0 if limit == NEW else 2e-6
        np.testing.assert_allclose(before.sampler_logp, after.sampler_logp, atol=atol, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "conv"])
def test_without_a_kept_state_a_request_is_computed_from_its_beginning(kind):
    whole, again, computed = resumed(tiny(kind), keep=False)
    assert computed == 8
    for before, after in zip(whole, again, strict=True):
        np.testing.assert_array_equal(before.tokens, after.tokens)
        np.testing.assert_allclose(before.sampler_logp, after.sampler_logp, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["delta", "conv", "latent", "gemma4"])
def test_turns_of_an_episode_go_on_from_the_end_of_their_prompt(kind):
    """What another request's branch left does not count, and the numbers are those of the forward pass."""
    model = tiny(kind)
    engine = Engine(model, slots=4, max_length=LONGEST, chunk=4)
    engine.start(RULES)
    asked = [prompts()[3][:9], prompts()[2]]
    handles = engine.submit(asked, [1, 2], limits=[5, 5], keep_prompt=True)
    while engine.busy:
        engine.step(model)
    first = dict(engine.collect())
    again = engine.submit(asked, [1, 2], partials=[first[handle] for handle in handles], keep_prompt=True)
    while engine.busy:
        engine.step(model)
    ends = dict(engine.collect())
    assert worst_gap(model, [ends[handle] for handle in again], asked) < 2e-5
