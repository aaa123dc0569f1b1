"""Where requests lie, and that those of one prompt read it from one block."""

import collections
import functools

import numpy as np
import pytest
from engine.test_engine import finished, model, same
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny

from jaxrl_llm.engine.requests import (
    Request,
    SlotShape,
    assign_blocks,
    assign_slots,
    block_table,
    grow_blocks,
)
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.types import Prompt

RULES = Sampling(max_new_tokens=6)
PROMPTS = ([3, 1, 4, 1, 5], [9, 2], [6, 5, 3])


def request(handle, key):
    return Request(handle, np.zeros(1, np.int32), 0, 1, block_key=key)


def check(running, shape):
    """Every request has a lane of its own, in its part, of a block that holds its prompt."""
    lanes = [r.lane for r in running.values()]
    assert len(set(lanes)) == len(lanes) and all(lane < shape.group for _, lane in lanes)
    keys = collections.defaultdict(set)
    for slot, r in running.items():
        assert r.slot == slot and r.lane[0] // (shape.blocks // shape.parts) == shape.part(slot)
        keys[r.lane[0]].add(r.block_key)
    assert all(len(found) == 1 for found in keys.values())
    table, each = block_table(running, shape), shape.blocks // shape.parts * shape.group
    for slot in range(shape.rows):
        wanted = (
            each
            if slot not in running
            else np.ravel_multi_index(running[slot].lane, (shape.blocks, shape.group)) % each
        )
        assert table[slot] == wanted


waves = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=12), st.sets(st.integers(0, 11))), min_size=1, max_size=5
)


@settings(max_examples=100, deadline=None)
@given(waves, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]))
def test_requests_come_and_go_and_every_one_reads_its_own_prompt(waves, parts, group):
    running, handle, held = {}, 0, None
    for keys, gone in waves:
        running = {slot: r for slot, r in running.items() if slot not in gone}
        taken = [request(handle + i, key) for i, key in enumerate(keys[: 12 - len(running)])]
        handle += len(taken)
        shape = SlotShape(12, 8, 0, 8, parts, group)
        before = {r.handle: (r.slot, r.lane) for r in running.values()}
        stored = {r.lane[0]: r.block_key for r in running.values()}
        assign_slots(running, taken, shape)
        if not running:
            continue
        shape = grow_blocks(running, shape, 12, False)
        order = assign_blocks(running, shape, held == shape)
        check(running, shape)
        assert all(r.slot == before[r.handle][0] for r in running.values() if r.handle in before)
        if order is None:
            assert all(r.lane == before[r.handle][1] for r in running.values() if r.handle in before)
            order = np.arange(shape.blocks)
        assert all(stored[order[r.lane[0]]] == r.block_key for r in running.values() if r.handle in before)
        held = shape


def test_a_group_needs_one_block_and_a_part_of_its_own():
    running, shape = {}, SlotShape(8, 8, 0, 8, 2, 4)
    assign_slots(running, [request(i, i // 4) for i in range(8)], shape)
    assert grow_blocks(running, shape, 8, False).blocks == 2
    assert [{running[slot].block_key for slot in part} for part in (range(4), range(4, 8))] == [{0}, {1}]


def test_lanes_that_lie_too_scattered_are_brought_together():
    shape = SlotShape(4, 8, 2, 8, 1, 4)
    running = {i: request(i, "a") for i in range(2)} | {2: request(2, "b")}
    for i, lane in enumerate([(0, 0), (1, 0)]):
        running[i].slot, running[i].lane = i, lane
    running[2].slot = 2
    assert assign_blocks(running, shape, True) is not None
    check(running, shape)
    assert running[0].lane[0] == running[1].lane[0]


def stored(e):
    """How many prompts each of its chunks had room for."""
    return [int(text.split(" prompts")[0].split()[-1]) for text in e.shapes if " prompts of" in text]


@functools.cache
def wide(group):
    return Engine(model(), slots=24, max_length=24, chunk=4, group=group)


@functools.cache
def sampled(group):
    """48 completions of three prompts by their own limits; two thirds of the slots turn over while others go on."""
    e = wide(group)
    e.start(RULES)
    handles = e.submit([PROMPTS[i // 8 % 3] for i in range(48)], range(48), [1 + i * 5 % 6 for i in range(48)])
    done = {}
    while e.busy:
        e.step(model())
        done |= dict(e.collect())
    return [done[handle] for handle in handles]


@pytest.mark.slow(but="8")
@pytest.mark.parametrize("group", [3, 8])
def test_sharing_a_prompt_draws_the_same_tokens(group):
    for found, wanted in zip(sampled(group), sampled(1), strict=True):
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
        np.testing.assert_allclose(found.sampler_logp, wanted.sampler_logp, atol=1e-5)


def test_a_group_is_stored_once():
    sampled(8), sampled(1)
    assert max(stored(wide(1))) == 24 and max(stored(wide(8))) <= 12


@pytest.mark.slow
def test_other_weights_never_read_a_prompt_of_these():
    e = Engine(model(), slots=4, max_length=24, chunk=2, group=4)
    alone = e.generate(tiny(seed=9), PROMPTS[:1], [7], RULES)[0]
    e.start(RULES)
    e.submit(PROMPTS[:1], [3])
    e.step(model())
    (late,) = e.submit(PROMPTS[:1], [7])
    while e.busy:
        e.step(tiny(seed=9))
    same(dict(e.collect())[late], alone)


@pytest.mark.parametrize("keep", [True, False])
def test_interrupted_completions_share_their_prompt_again(keep):
    e, prompts, seeds = (
        Engine(model(), slots=24, max_length=24, chunk=4, group=8),
        [PROMPTS[i // 8] for i in range(24)],
        range(24),
    )
    whole = e.generate(model(), prompts, seeds, RULES)
    e.start(RULES)
    handles = e.submit(prompts, seeds, keep=keep)
    e.step(model())
    e.abort(handles)
    done = dict(e.collect())
    again = e.submit(prompts, seeds, partials=[done[handle] for handle in handles])
    for found, wanted in zip(finished(e, again), whole, strict=True):
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
        np.testing.assert_allclose(found.sampler_logp, wanted.sampler_logp, atol=1e-5)
    assert set(stored(e)) == {3}


def test_prompts_of_equal_tokens_with_other_arrays_share_nothing():
    tokens = np.asarray(PROMPTS[0], np.int32)
    seen = [Prompt(tokens, {"image": np.full(5, value, np.float32)}) for value in (1.0, 2.0, 1.0)]
    assert seen[0].key == seen[2].key != seen[1].key != Prompt(tokens).key
    e = Engine(model(), slots=4, max_length=24, chunk=2, group=4)
    alone = e.generate(model(), [tokens] * 3, range(3), RULES)
    assert e.prompts_prefilled == 1
    found = e.generate(model(), seen, range(3), RULES)
    assert e.prompts_prefilled == 2
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
