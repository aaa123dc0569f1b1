"""Interrupted, resumed, continued and branched completions, and what is reused of their caches."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from engine.test_engine import distributions, finished, model, same
from tiny import tiny

from jaxrl_llm.engine.requests import Request, SlotShape
from jaxrl_llm.engine.scheduler import EngineSpec, chunk_shape
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.decoder import logits
from jaxrl_llm.rollout import Engine, Sampling, first_tokens, with_tokens
from jaxrl_llm.sharding import bytes_per_device
from jaxrl_llm.types import Prompt

RULES = Sampling(max_new_tokens=12)
PROMPTS = ([3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5], [8], [3, 1, 4])
SEEDS = tuple(range(5))


@functools.cache
def engine(strict=False):
    return Engine(model(), slots=3, max_length=24, chunk=2, strict=strict)


@functools.cache
def expected():
    return engine().generate(model(), PROMPTS, SEEDS, RULES)


def prefills(e):
    return [text for text in e.shapes if text.startswith("prompts")]


def interrupted(e, steps, keep):
    """Completions after some chunks, ended by their caller."""
    e.start(RULES)
    handles = e.submit(PROMPTS, SEEDS, keep=keep)
    done = {}
    for _ in range(steps):
        e.step(model())
        done |= dict(e.collect())
    e.abort(handles)
    done |= dict(e.collect())
    assert not e.busy
    return [done[handle] for handle in handles]


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
def test_an_aborted_completion_is_the_beginning_of_the_whole(steps):
    for cut, whole in zip(interrupted(engine(), steps, False), expected(), strict=True):
        count = len(cut.tokens)
        assert cut.tokens.tobytes() == whole.tokens[:count].tobytes()
        assert cut.sampler_logp.tobytes() == whole.sampler_logp[:count].tobytes()
        assert cut.finish_reason == ("aborted" if count < 12 else "length")
    assert steps or not any(len(c.tokens) for c in interrupted(engine(), 0, False))


@pytest.mark.parametrize("steps", [0, 1, 3, 8])
@pytest.mark.parametrize("keep", [True, False])
def test_resumed_completions_are_those_of_one_go(steps, keep):
    e = engine()
    begun = interrupted(e, steps, keep)
    left = [i for i, c in enumerate(begun) if c.finish_reason == "aborted"]
    before = e.prompts_prefilled
    handles = e.submit([PROMPTS[i] for i in left], [SEEDS[i] for i in left], partials=[begun[i] for i in left])
    for i, found in zip(left, finished(e, handles), strict=True):
        if keep:  # from the same keys and values: the same bits
            same(found, expected()[i])
        else:
            np.testing.assert_array_equal(found.tokens, expected()[i].tokens)
            np.testing.assert_allclose(found.sampler_logp, expected()[i].sampler_logp, atol=1e-5)
    started = sum(len(c.tokens) > 0 for c in begun if c.finish_reason == "aborted")
    assert e.prompts_prefilled - before <= (0 if keep and started == len(left) else len(left))


def test_earlier_tokens_keep_what_they_were_sampled_with():
    e, other = engine(), tiny(seed=9)
    begun = interrupted(e, 3, False)
    left = [i for i, c in enumerate(begun) if 0 < len(c.tokens) < 12]
    assert left
    handles = e.submit([PROMPTS[i] for i in left], [SEEDS[i] for i in left], partials=[begun[i] for i in left])
    for i, found in zip(left, finished(e, handles, other, 7), strict=True):
        count = len(begun[i].tokens)
        assert found.sampler_logp[:count].tobytes() == begun[i].sampler_logp.tobytes()
        assert found.version.tolist() == [0] * count + [7] * (12 - count) and found.mask.all()
        assert found.extras["entropy"].shape == (12,)


def test_other_weights_never_meet_keys_and_values_that_were_kept():
    e, other = engine(), tiny(seed=9)
    begun = interrupted(e, 3, True)
    (handle,) = e.submit(PROMPTS[:1], SEEDS[:1], partials=begun[:1])
    (kept,) = finished(e, [handle], other)
    e.start(RULES)
    (handle,) = e.submit(PROMPTS[:1], SEEDS[:1], partials=begun[:1])
    same(finished(e, [handle], other)[0], kept)


def with_leaf(index, change):
    """The model with one of its arrays changed, counted from the first."""
    leaves, structure = jax.tree.flatten(model())
    leaves[index] = change(leaves[index])
    return jax.tree.unflatten(structure, leaves)


def test_weights_are_others_where_any_one_of_their_arrays_is():
    e = engine()
    for index in range(len(jax.tree.leaves(model()))):
        e.start(RULES)
        (first,) = finished(e, e.submit(PROMPTS[:1], SEEDS[:1], [4], keep=True))
        other = with_leaf(index, lambda leaf: leaf * 1.5)
        (found,) = finished(e, e.submit(PROMPTS[:1], SEEDS[:1], partials=[first]), other)
        assert e.prompts_prefilled == 2
        e.start(RULES)
        same(found, finished(e, e.submit(PROMPTS[:1], SEEDS[:1], partials=[first]), other)[0])


def test_a_prompt_is_kept_for_the_next_turns_until_the_weights_change_and_computed_again_to_equal_bits():
    e = engine()
    kept = {"keep_prompt": True}
    e.start(RULES)
    (first,) = finished(e, e.submit(PROMPTS[2:3], SEEDS[:1], [4], **kept))
    turn = with_tokens(first, [7, 8])
    (found,) = finished(e, e.submit(PROMPTS[2:3], SEEDS[:1], partials=[turn], **kept))
    assert e.prompts_prefilled == 2, "the prompt, and what follows it"
    e.start(RULES)
    (again,) = finished(e, e.submit(PROMPTS[2:3], SEEDS[:1], partials=[turn], **kept))
    assert e.prompts_prefilled == 2
    same(found, again)
    other = with_leaf(0, lambda leaf: leaf * 1.5)
    (moved,) = finished(e, e.submit(PROMPTS[2:3], SEEDS[:1], partials=[turn], **kept), other)
    e.start(RULES)
    same(moved, finished(e, e.submit(PROMPTS[2:3], SEEDS[:1], partials=[turn], **kept), other)[0])


def test_a_turn_finds_its_prompt_beside_turns_of_prompts_that_were_dropped():
    e, oldest = engine(), [2, 0, 1]
    prompts = [[1 + n % 40, 1 + n // 40] for n in range(8)]
    e.start(RULES)
    prefixes = e._scheduler.prefixes
    finished(e, e.submit(prompts[:1], [0], [1], keep_prompt=True))
    (one,) = prefixes._prompts.values()
    prefixes.prompt_bytes = 6 * bytes_per_device(one.cache)
    firsts = finished(e, e.submit(prompts, range(len(prompts)), [1] * len(prompts), keep_prompt=True))
    assert len(prefixes._prompts) == 6, "the oldest two are dropped"
    begun = [with_tokens(firsts[n], [7]) for n in oldest]
    asked = [prompts[n] for n in oldest]
    found = finished(e, e.submit(asked, oldest, partials=begun, keep_prompt=True))
    for one in range(3):
        e.start(RULES)
        turn = e.submit(asked[one : one + 1], oldest[one : one + 1], partials=begun[one : one + 1], keep_prompt=True)
        same(found[one], finished(e, turn)[0])


def test_prompts_are_dropped_as_others_are_computed():
    """Not only at the end of an admission, when all of them would be there."""
    e = engine()
    e.start(RULES)
    prefixes = e._scheduler.prefixes
    prefixes.prompt_bytes = 1
    asked = [Request(n, Prompt(np.array(PROMPTS[n], np.int32)), n, 1, keep_prompt=True) for n in range(3)]
    prefixes.prepare(model(), asked)
    assert not prefixes._prompts
    prefixes.prepare(model(), asked, needed={request.prompt.key for request in asked})
    prefixes.prepare(model(), [Request(3, Prompt(np.array(PROMPTS[3], np.int32)), 3, 1, keep_prompt=True)])
    assert not prefixes._prompts, "those that were needed go with the next"


def test_an_array_that_may_change_in_place_is_never_taken_for_known():
    e, loose = engine(), with_leaf(-1, lambda leaf: np.array(leaf))
    e.start(RULES)
    (first,) = finished(e, e.submit(PROMPTS[:1], SEEDS[:1], [4], keep=True), loose)
    jax.tree.leaves(loose)[-1][...] *= 1.5
    finished(e, e.submit(PROMPTS[:1], SEEDS[:1], partials=[first]), loose)
    assert e.prompts_prefilled == 2


def test_a_request_that_met_two_weights_is_not_kept():
    e, other = engine(), tiny(seed=9)
    e.start(RULES)
    (handle,) = e.submit(PROMPTS[:1], SEEDS[:1], [6], keep=True)
    e.step(model())
    (mixed,) = finished(e, [handle], other)
    before = e.prompts_prefilled
    finished(e, e.submit(PROMPTS[:1], SEEDS[:1], partials=[mixed]), other)
    assert e.prompts_prefilled == before + 1


def full_logp(prompt, found):
    everything = distributions("plain", prompt, found.tokens)
    return everything[np.arange(len(found.tokens)), found.tokens]


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False])
def test_a_tool_answers_and_the_completion_goes_on(keep):
    e = engine()
    e.start(RULES)
    limits = [4] * len(PROMPTS)
    first = finished(e, e.submit(PROMPTS, SEEDS, limits, keep=keep))
    before = e.prompts_prefilled
    told = [with_tokens(c, [7, 7, 9], version=5) for c in first]
    found = finished(e, e.submit(PROMPTS, SEEDS, partials=told))
    for prompt, start, completion in zip(PROMPTS, first, found, strict=True):
        assert completion.tokens[:7].tolist() == [*start.tokens, 7, 7, 9] and len(completion.tokens) == 12
        assert completion.mask.tolist() == [True] * 4 + [False] * 3 + [True] * 5
        assert not completion.sampler_logp[4:7].any() and completion.version[4:7].tolist() == [5] * 3
        np.testing.assert_allclose(
            completion.sampler_logp[completion.mask], full_logp(prompt, completion)[completion.mask], atol=1e-5
        )
    assert e.prompts_prefilled - before == len(PROMPTS)


def test_going_on_from_a_kept_cache_computes_only_what_is_new():
    e = Engine(model(), slots=3, max_length=24, chunk=2)
    e.start(RULES)
    (first,) = finished(e, e.submit(PROMPTS[2:3], SEEDS[2:3], [4], keep=True))
    assert prefills(e) == ["prompts: 1 x 16 tokens"]
    finished(e, e.submit(PROMPTS[2:3], SEEDS[2:3], partials=[with_tokens(first, [7, 7, 9])]))
    assert prefills(e) == ["prompts: 1 x 16 tokens", "prompts: 1 x 16 tokens, resumed"]


@pytest.mark.parametrize("at", [1, 5, 11])
def test_branches_start_from_any_token(at):
    e = engine()
    e.start(RULES)
    (trunk,) = finished(e, e.submit(PROMPTS[:1], SEEDS[:1], keep=True))
    branches = [first_tokens(trunk, at)] * 4
    found = finished(e, e.submit([PROMPTS[0]] * 4, [SEEDS[0], 11, 12, 13], partials=branches))
    np.testing.assert_array_equal(found[0].tokens, trunk.tokens)  # its own seed: the trunk again
    for branch in found:
        assert branch.tokens[:at].tolist() == trunk.tokens[:at].tolist()
        np.testing.assert_allclose(branch.sampler_logp, full_logp(PROMPTS[0], branch), atol=1e-5)
    assert at == 11 or len({c.tokens.tobytes() for c in found}) > 1


def test_abort_takes_some_and_leaves_the_others_alone():
    e = engine()
    e.start(RULES)
    handles = e.submit(PROMPTS, SEEDS)
    e.step(model())
    e.abort([handles[0], handles[4]])
    done = dict(e.collect())
    assert {done[handles[i]].finish_reason for i in (0, 4)} == {"aborted"}
    assert len(done[handles[0]].tokens) == 2 and len(done[handles[4]].tokens) == 0
    for i, found in zip((1, 2, 3), finished(e, handles[1:4]), strict=True):
        same(found, expected()[i])


def test_what_cannot_go_on_is_refused():
    e = engine()
    e.start(RULES)
    whole = expected()[0]
    with pytest.raises(InputError, match="a limit must be from 13 to max_new_tokens 12, got 12"):
        e.submit(PROMPTS[:1], SEEDS[:1], partials=[whole])
    with pytest.raises(InputError, match="every prompt needs one partial completion: got 2 prompts and 1"):
        e.submit(PROMPTS[:2], SEEDS[:2], partials=[None])


# Of 24 slots three are an eighth: what is left where it takes long, a quarter of the slots where it does not.
@pytest.mark.slow
@pytest.mark.parametrize(("left", "longest", "few"), [(6, 12, 6), (3, 12, 3), (5, 7, 6), (2, 7, 6)])
def test_a_batch_shrinks_when_few_requests_are_left_and_draws_the_same_tokens(left, longest, few):
    prompts, seeds = [PROMPTS[i % 5] for i in range(24)], range(24)
    limits = [2] * (24 - left) + [longest] * left
    found = {}
    for strict in (False, True):
        e = Engine(model(), slots=24, max_length=24, chunk=2, strict=strict)
        e.start(RULES)
        found[strict] = finished(e, e.submit(prompts, seeds, limits))
        widths = {int(text.split()[1]) for text in e.shapes if text.startswith("decode")}
        assert widths == ({24} if strict else {24, few})
        assert e.slot_steps == (longest * 24 if strict else 4 * 24 + (longest - 4) * few)
    for one, other in zip(found[False], found[True], strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.sampler_logp, other.sampler_logp, atol=1e-5)


@pytest.mark.parametrize(
    ("count", "held", "rows"),
    [(20, None, 20), (20, 80, 20), (21, 80, 80), (3, 40, 20), (30, 40, 40), (41, 40, 80), (3, 10, 10), (90, 80, 80)],
)
def test_a_batch_of_short_completions_has_all_slots_those_it_has_or_a_quarter(count, held, rows):
    build = EngineSpec(model().config, np.float32, 80, 64, 8, None, False, 8)
    requests = [Request(i, np.zeros(3, np.int32), 0, 24) for i in range(count)]
    shape = held and SlotShape(held, 64, 10, 32, 1, 8)
    found = chunk_shape(build, Sampling(max_new_tokens=24), requests, shape, False)
    assert (found.rows, found.blocks) == (rows, 10 if held else 0), "blocks are not made anew for so short a time"


@pytest.mark.slow
def test_long_prompts_are_computed_in_pieces():
    prompt = np.random.default_rng(0).integers(1, 40, 1300)
    e = Engine(tiny("windows"), slots=2, max_length=1312, chunk=2)
    found = e.generate(tiny("windows"), [prompt, prompt[:1023]], [0, 1], dataclasses.replace(RULES, max_new_tokens=4))
    assert prefills(e) == ["prompts: 3 x 512 tokens", "prompts: 1 x 1024 tokens"]
    for ids, completion in zip((prompt, prompt[:1023]), found, strict=True):
        row = np.zeros((1, 1312), np.int32)
        row[0, : len(ids) + 4] = [*ids, *completion.tokens]
        wanted = np.asarray(jax.nn.log_softmax(logits(tiny("windows"), row)[0]))[len(ids) - 1 : len(ids) + 3]
        np.testing.assert_allclose(completion.sampler_logp, wanted[np.arange(4), completion.tokens], atol=2e-5)
