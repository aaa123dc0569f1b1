"""The engine against the full forward pass, and a completion's independence of everything but its request."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import kept_tokens
from tiny import VOCAB, Compilations, tiny

from jaxrl_llm.engine.sampling import uniforms
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.decoder import logits
from jaxrl_llm.rollout import Engine, Sampling

SLOTS, LENGTH = 4, 24
PROMPTS = ([3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8], [9, 7], [3, 1, 4], list(range(17)), [2, 7, 1, 8, 2, 8, 1], [8])
SEEDS = tuple(range(100, 100 + len(PROMPTS)))
RULES = Sampling(max_new_tokens=7, stop_ids=(0, 11, 23, 37))


@functools.cache
def model(kind="plain"):
    return tiny(kind)


@functools.cache
def engine(kind="plain", group=1):
    return Engine(model(kind), slots=SLOTS, max_length=LENGTH, chunk=3, group=group)


@functools.cache
def expected(group=1):
    """All requests in one call."""
    return engine(group=group).generate(model(), PROMPTS, SEEDS, RULES)


def distributions(kind, prompt, tokens, temperature=1.0):
    """Log-probabilities float32[t, V] that the full forward pass gives each sampled position."""
    row = np.zeros((1, LENGTH), np.int32)
    row[0, : len(prompt) + len(tokens)] = [*prompt, *tokens]
    found = np.asarray(jax.nn.log_softmax(logits(model(kind), row)[0] / max(temperature, 1e-6)))
    return found[len(prompt) - 1 : len(prompt) + len(tokens) - 1]


def finished(e, handles, weights=None, version=0):
    """Completions of these handles, run until no request is left."""
    done = {}
    while e.busy:
        e.step(weights or model(), version)
        done |= dict(e.collect())
    return [(done | dict(e.collect()))[handle] for handle in handles]


def same(a, b):
    assert a.finish_reason == b.finish_reason
    for name in ("tokens", "sampler_logp", "mask", "version"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
    assert a.extras["entropy"].tobytes() == b.extras["entropy"].tobytes()


@pytest.mark.slow(but="sampling0-gemma")
@pytest.mark.parametrize("kind", ["plain", "gemma"])
@pytest.mark.parametrize("sampling", [
    RULES, dataclasses.replace(RULES, temperature=0.6), dataclasses.replace(RULES, top_k=6),
    dataclasses.replace(RULES, temperature=1.4, top_p=0.7)])  # fmt: skip
def test_sampler_logp_is_that_of_the_full_forward(kind, sampling):
    for prompt, found in zip(PROMPTS, engine(kind).generate(model(kind), PROMPTS, SEEDS, sampling), strict=True):
        everything = distributions(kind, prompt, found.tokens, sampling.temperature)
        for logp, token, given_logp, entropy in zip(
            everything, found.tokens, found.sampler_logp, found.extras["entropy"], strict=True
        ):
            p = np.exp(np.float64(logp))
            kept = kept_tokens(p, sampling.top_k, sampling.top_p)
            assert kept[token]
            np.testing.assert_allclose(given_logp, logp[token] - np.log(p[kept].sum()), atol=1e-5, rtol=1e-5)
            np.testing.assert_allclose(entropy, -np.sum(p * logp), atol=5e-5)


@pytest.mark.slow(but=("windows", "gemma"))
@pytest.mark.parametrize("kind", ["plain", "windows", "bias", "full_norm", "gemma"])
def test_greedy_is_the_argmax_of_the_full_forward(kind):
    for prompt, found in zip(
        PROMPTS, engine(kind).generate(model(kind), PROMPTS, SEEDS, Sampling(0.0, max_new_tokens=7)), strict=True
    ):
        np.testing.assert_array_equal(found.tokens, np.argmax(distributions(kind, prompt, found.tokens), axis=-1))
        assert not found.sampler_logp.any() and found.finish_reason == "length" and len(found.tokens) == 7


@pytest.mark.slow
@pytest.mark.parametrize("group", [1, 4])
def test_a_token_is_drawn_by_the_number_of_its_seed_and_its_place_in_the_sequence(group):
    """Where the number falls among the probabilities of the full forward pass, added up in the vocabulary's order."""
    for prompt, seed, found in zip(PROMPTS, SEEDS, expected(group), strict=True):
        positions = np.arange(len(found.tokens), dtype=np.int32) + len(prompt)
        words = np.tile(np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32), (len(positions), 1))
        numbers = np.asarray(uniforms(words, positions))
        above = np.cumsum(np.exp(np.float64(distributions("plain", prompt, found.tokens))), axis=-1)
        below = np.concatenate([np.zeros((len(above), 1)), above[:, :-1]], axis=-1)
        for row, (number, token) in enumerate(zip(numbers, found.tokens, strict=True)):
            assert below[row, token] - 1e-5 <= number <= above[row, token] + 1e-5


def test_what_a_completion_holds():
    reasons = set()
    for found in expected():
        reasons.add(found.finish_reason)
        count = len(found.tokens)
        assert 1 <= count <= 7 and found.mask.all()
        assert {len(x) for x in (found.sampler_logp, found.mask, found.version, found.extras["entropy"])} == {count}
        kinds = [x.dtype for x in (found.tokens, found.sampler_logp, found.mask, found.version)]
        assert kinds == [np.int32, np.float32, np.bool_, np.int32]
        stops = np.isin(found.tokens, RULES.stop_ids)
        assert not stops[:-1].any() and (found.finish_reason == "stop") == bool(stops[-1])
        assert found.finish_reason == "stop" or count == 7
    assert reasons == {"stop", "length"}


@pytest.mark.parametrize("group", [1, 4])
@settings(max_examples=30, deadline=None)
@given(st.permutations(range(len(PROMPTS))), st.integers(1, len(PROMPTS)))
def test_a_completion_does_not_depend_on_mates_order_slots_or_refill(group, order, count):
    chosen = order[:count]
    found = engine(group=group).generate(model(), [PROMPTS[i] for i in chosen], [SEEDS[i] for i in chosen], RULES)
    for index, completion in zip(chosen, found, strict=True):
        same(completion, expected(group)[index])


def test_a_request_that_comes_while_others_run_is_the_same():
    e = engine()
    e.start(RULES)
    handles = e.submit(PROMPTS[:3], SEEDS[:3])
    e.step(model())
    handles += e.submit(PROMPTS[3:], SEEDS[3:])
    done = {}
    while e.busy:
        e.step(model())
        done |= dict(e.collect())
    for handle, wanted in zip(handles, expected(), strict=True):
        same(done[handle], wanted)


def test_other_seeds_give_other_completions_also_in_the_high_bits():
    seeds = [7, 7 + (1 << 31), 7 + (1 << 32), 7 + (1 << 40), 7 + (1 << 63), 8]
    found = engine().generate(model(), [PROMPTS[0]] * 6, seeds, Sampling(max_new_tokens=12))
    assert len({c.tokens.tobytes() for c in found}) == 6
    again = engine().generate(model(), [PROMPTS[0]] * 2, [7, 7], Sampling(max_new_tokens=12))
    assert again[0].tokens.tobytes() == again[1].tokens.tobytes() == found[0].tokens.tobytes()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_batches_of_any_size(count):
    found = engine().generate(model(), PROMPTS[:count], SEEDS[:count], RULES)
    assert len(found) == count
    for completion, wanted in zip(found, expected(), strict=False):
        same(completion, wanted)


@pytest.mark.slow(but="1-3")
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("chunk", [1, 16])
def test_slots_and_chunks_of_another_size_draw_the_same_tokens(slots, chunk):
    found = Engine(model(), slots, LENGTH, chunk).generate(model(), PROMPTS, SEEDS, RULES)
    for completion, wanted in zip(found, expected(), strict=True):
        np.testing.assert_array_equal(completion.tokens, wanted.tokens)
        np.testing.assert_allclose(completion.sampler_logp, wanted.sampler_logp, atol=1e-5)


def test_a_prompt_that_fills_the_length_to_the_last_column():
    greedy = Sampling(0.0, max_new_tokens=8)
    prompt = list(range(1, LENGTH - 8 + 1))
    found = engine().generate(model(), [prompt], [0], greedy)[0]
    assert len(prompt) + len(found.tokens) == LENGTH
    np.testing.assert_array_equal(found.tokens, np.argmax(distributions("plain", prompt, found.tokens), axis=-1))
    with pytest.raises(
        InputError,
        match="a prompt of 17 tokens and max_new_tokens 8 do not fit max_length 24: prompts must have 1 to 16",
    ):
        engine().generate(model(), [[*prompt, 1]], [0], greedy)
    with pytest.raises(InputError, match="a prompt of 0 tokens"):
        engine().generate(model(), [[]], [0], greedy)


def test_one_new_token():
    found = engine().generate(model(), PROMPTS, SEEDS, dataclasses.replace(RULES, max_new_tokens=1))
    for completion, wanted in zip(found, expected(), strict=True):
        assert completion.tokens.tolist() == wanted.tokens[:1].tolist()
        assert completion.sampler_logp.tobytes() == wanted.sampler_logp[:1].tobytes()


def test_a_stop_token_may_come_first_and_everything_may_stop_at_once():
    everything = tuple(sorted({int(c.tokens[0]) for c in expected()}))[:8]
    found = engine().generate(model(), PROMPTS, SEEDS, dataclasses.replace(RULES, stop_ids=everything))
    firsts = [int(c.tokens[0]) for c in expected()]
    for completion, first in zip(found, firsts, strict=True):
        if first in everything:
            assert completion.tokens.tolist() == [first] and completion.finish_reason == "stop"
    assert sum(first in everything for first in firsts) >= len(PROMPTS) - 1


def test_a_stop_at_the_limit_counts_as_a_stop():
    index = int(np.argmax([len(c.tokens) for c in expected()]))
    rules = dataclasses.replace(RULES, stop_ids=(int(expected()[index].tokens[2]),), max_new_tokens=3)
    found = engine().generate(model(), [PROMPTS[index]], [SEEDS[index]], rules)[0]
    assert found.finish_reason == "stop"


def test_a_request_may_have_a_limit_of_its_own():
    e, rules = engine(), dataclasses.replace(RULES, stop_ids=())
    whole = e.generate(model(), PROMPTS, SEEDS, rules)
    e.start(rules)
    limits = [1, 7, 3, 2, 5, 7, 4, 6, 1]
    handles, done = e.submit(PROMPTS, SEEDS, limits), {}
    while e.busy:
        e.step(model())
        done |= dict(e.collect())
    for handle, limit, long in zip(handles, limits, whole, strict=True):
        assert done[handle].tokens.tobytes() == long.tokens[:limit].tobytes()
        assert done[handle].sampler_logp.tobytes() == long.sampler_logp[:limit].tobytes()
        assert done[handle].finish_reason == "length"
    for wrong in (0, 8):
        with pytest.raises(InputError, match=f"a limit must be from 1 to max_new_tokens 7, got {wrong}"):
            e.submit(PROMPTS[:1], SEEDS[:1], [wrong])


def test_each_distinct_prompt_is_prefilled_once():
    e = engine()
    each = [PROMPTS[i] for i in (0, 2, 4) for _ in range(6)]
    e.generate(model(), each, range(18), RULES)
    assert e.prompts_prefilled == 3
    e.generate(model(), PROMPTS, SEEDS, RULES)
    assert e.prompts_prefilled == len({tuple(p) for p in PROMPTS})


def test_start_forgets_everything():
    e = engine()
    e.start(RULES)
    e.submit(PROMPTS, SEEDS)
    e.step(model())
    e.start(RULES)
    assert not e.busy and e.collect() == [] and e.prompts_prefilled == 0
    assert e.submit(PROMPTS[:2], SEEDS[:2]) == [0, 1]
    for completion, wanted in zip(e.generate(model(), PROMPTS, SEEDS, RULES), expected(), strict=True):
        same(completion, wanted)


def test_versions_say_which_weights_sampled_each_token():
    e, first, second = engine(), model(), tiny("plain", seed=9)
    e.start(Sampling(max_new_tokens=5))
    e.submit([PROMPTS[0]], [0])
    e.step(first, 4)
    while e.busy:
        e.step(second, 5)
    ((_, mixed),) = e.collect()
    assert mixed.version.tolist() == [4, 4, 4, 5, 5]
    pure = e.generate(first, [PROMPTS[0]], [0], Sampling(max_new_tokens=5), version=4)[0]
    assert mixed.tokens[:3].tolist() == pure.tokens[:3].tolist() and pure.version.tolist() == [4] * 5


def test_other_numbers_in_the_settings_compile_nothing():
    expected()
    engine().generate(model(), PROMPTS, SEEDS, dataclasses.replace(RULES, top_k=3))
    with Compilations() as compilations:
        for changes in (
            {"temperature": 0.3},
            {"temperature": 0.0},
            {"max_new_tokens": 2, "stop_ids": (1,)},
            {"top_k": 9},
            {"top_p": 0.5},
        ):
            engine().generate(tiny("plain", seed=5), PROMPTS[::-1], SEEDS, dataclasses.replace(RULES, **changes))
    assert compilations.heard == []
    with Compilations() as compilations:
        Engine(model(), SLOTS + 1, LENGTH, 3).generate(model(), PROMPTS[:1], SEEDS[:1], RULES)
    assert compilations.heard != []


@pytest.mark.parametrize("other", ["bias", "windows"])
def test_a_model_of_another_structure_is_refused(other):
    with pytest.raises(InputError, match="another structure, shape or dtype: build a new Engine"):
        engine().generate(model(other), PROMPTS, SEEDS, RULES)
    with pytest.raises(InputError, match="another structure, shape or dtype"):
        engine().generate(tiny("plain", dtype="bfloat16"), PROMPTS, SEEDS, RULES)


def test_shapes_of_a_model_are_enough_to_build_an_engine():
    shapes = jax.eval_shape(lambda m: m, model())
    for completion, wanted in zip(
        Engine(shapes, SLOTS, LENGTH, 3).generate(model(), PROMPTS, SEEDS, RULES), expected(), strict=True
    ):
        same(completion, wanted)


@pytest.mark.slow
def test_bfloat16_samples_and_reports_float32():
    narrow = tiny("plain", dtype="bfloat16")
    for found in Engine(narrow, SLOTS, LENGTH, 3).generate(narrow, PROMPTS, SEEDS, RULES):
        assert found.sampler_logp.dtype == np.float32 and np.all(found.sampler_logp <= 0)
        assert np.all((found.tokens >= 0) & (found.tokens < VOCAB))


def test_what_cannot_work_is_refused():
    with pytest.raises(InputError, match="every prompt needs one seed: got 9 prompts and 2 seeds"):
        engine().generate(model(), PROMPTS, SEEDS[:2], RULES)
    with pytest.raises(InputError, match="slots must be at least 1 and max_length at least 2, got 0 and 24"):
        Engine(model(), 0, LENGTH)
    assert engine().generate(model(), [], [], RULES) == []
    arrays = engine().generate(model(), [jnp.asarray(p) for p in PROMPTS[:2]], np.asarray(SEEDS[:2]), RULES)
    same(arrays[1], expected()[1])
