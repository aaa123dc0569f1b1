"""Decoding by length: blocks that the kernels fetch for the engine's own lengths, programs of a run, and its tokens."""

import collections
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from tiny import KINDS, Compilations, tiny

from jaxrl_llm.engine.requests import Request, assign_slots
from jaxrl_llm.engine.scheduler import EngineSpec, chunk_shape, plan_slots, pop_next
from jaxrl_llm.models.decode_kernels import ByLength, ColumnRange, block_columns, fetch_indices, halves_of, read_order
from jaxrl_llm.models.decoding import _read_plans, empty_cache, shared_prefix
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.types import Prompt

SLOTS, GROUP, CHUNK = 64, 16, 128
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(1, 40, size).tolist() for size in (3, 5, 150, 7, 250, 2)]


def chunks(parts, most, prompt, groups=24):
    """Every chunk of a rollout whose lengths are log-normal, sigma 0.9, as the engine seats its requests."""
    random, half = np.random.default_rng(1), prompt // 2
    lengths = np.clip(random.lognormal(np.log(most / 4), 0.9, groups * GROUP), 1, most).astype(int)
    prompts = [Prompt(np.full(size, i, np.int32)) for i, size in enumerate(random.integers(half, prompt, groups))]
    mesh = AbstractMesh((1, parts, 1), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3) if parts > 1 else None
    build = EngineSpec(KINDS["plain"], np.float32, SLOTS, prompt + most, CHUNK, mesh, False, GROUP, ByLength("tpu"))
    queue = collections.deque(
        Request(i, prompts[i // GROUP], i, int(limit), block_key=i // GROUP) for i, limit in enumerate(lengths)
    )
    running, held = {}, None
    while queue or running:
        taken = pop_next(queue, running, held, SLOTS)
        held, running, *_ = plan_slots(build, Sampling(max_new_tokens=most), running, taken, held, False)
        yield held, dict(running)
        for slot, request in list(running.items()):
            request.num_sampled = min(request.num_sampled + CHUNK, request.limit)
            if request.num_sampled == request.limit:
                del running[slot]


order_of = jax.jit(read_order, static_argnums=(1, 2, 3))
place_of = jax.jit(fetch_indices, static_argnums=(0, 3, 4))


def columns_fetched(limits, columns, sparse):
    """Of rows with so many live columns each: those of all blocks whose place differs from the step's before."""
    block, rows = block_columns(columns), len(limits)
    each = columns // block
    seen = ColumnRange(np.zeros((rows, 1), np.int32), limits[:, None].astype(np.int32))
    table = jax.device_get(order_of(seen, block, each, sparse))
    steps, found = int(table.steps[0]), 0
    for half in range(halves_of(rows)):
        _, row, at = (
            x[:steps]
            for x in jax.device_get(place_of(half, np.arange(rows * each // halves_of(rows)), table, rows, each))
        )
        assert np.all(at * block < np.maximum(limits[row], 1))
        found += 1 + np.count_nonzero((np.diff(row) != 0) | (np.diff(at) != 0))
    return found * block


@pytest.mark.slow
@pytest.mark.parametrize("parts, most, prompt", [(1, 16384, 2048), (4, 32768, 2048)])
def test_no_more_than_live_columns_are_fetched_but_for_whole_blocks(parts, most, prompt):
    read = live = whole = longest = 0
    for number, (held, running) in enumerate(chunks(parts, most, prompt)):
        if number % 20:
            continue
        own, shared = np.zeros(SLOTS, int), np.zeros(SLOTS, int)  # fewer rows are dead ones: one program counts all
        for slot, request in running.items():
            own[slot], shared[request.lane[0]] = request.columns, request.prompt_columns
        distinct = {request.block_key: request.prompt_columns for request in running.values()}
        live += sum(own) + sum(distinct.values()) if parts == 1 else sum(own) + sum(shared)
        for of_part, of_blocks in zip(own.reshape(parts, -1), shared.reshape(parts, -1), strict=True):
            read += columns_fetched(of_part, held.columns, False)
            read += columns_fetched(of_blocks, held.prompt_columns, True)
        longest += (1 << (int(own.max()) + CHUNK - 1).bit_length()) * held.rows + sum(shared)
        whole += 1
    assert whole > 10 and read <= 1.15 * live < longest / 2, (read / live, longest / live)


def test_a_run_has_at_most_eight_programs_and_members_of_a_group_stay_together():
    for parts, least in ((1, 1.0), (4, 1.5)):
        shapes, blocks, prompts = set(), 0, 0
        for held, running in chunks(parts, 4096, 512):
            shapes.add(held)
            blocks += len({request.lane[0] for request in running.values()})
            prompts += len({request.block_key for request in running.values()})
        assert 2 <= len(shapes) <= 8 and {shape.columns for shape in shapes} == {held.columns}
        assert blocks <= least * prompts, (blocks, prompts)


@pytest.mark.slow
def test_blocks_and_lanes_without_a_request_are_never_read():
    """Rows 0 and 2 read block 1 of four, row 1 is idle."""
    cache = empty_cache(KINDS["plain"], 4, 256, np.float32)
    lengths = np.array([200, 0, 200], np.int32)
    before = shared_prefix(cache, lengths, np.array([2, 8, 3], np.int32), 1, 2)
    given = cache, before.rows, before.lanes, lengths
    [_, blocks] = _read_plans(ByLength("gpu"), [0], 256, (lengths, lengths, lengths), *given)
    first, end = (x[0] for x in blocks.order)
    np.testing.assert_array_equal(end - first, [0, 4, 0, 0])
    np.testing.assert_array_equal(blocks.lanes[0], [[-1, -1], [0, 2], [-1, -1], [-1, -1]])


def test_every_request_is_taken_once_and_no_slot_stays_free():
    parts, slots = 4, 16
    keys = RANDOM.integers(0, 9, 200)
    queue = collections.deque(Request(i, Prompt(np.full(2, key, np.int32)), i, 1) for i, key in enumerate(keys))
    shape, running, seen = wanted_shape(slots, parts), {}, []
    while queue or running:
        taken = pop_next(queue, running, shape, slots)
        assign_slots(running, taken, shape)
        seen += [request.handle for request in taken]
        assert len(running) == min(slots, 200 - len(seen) + len(running)) and sorted(r.handle for r in queue) == [
            r.handle for r in queue
        ]
        for slot in RANDOM.choice(list(running), min(5, len(running)), replace=False):
            del running[int(slot)]
    assert sorted(seen) == list(range(200))


def wanted_shape(slots, parts):
    """Of a batch with all slots."""
    mesh = AbstractMesh((1, parts, 1), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)
    build = EngineSpec(KINDS["plain"], np.float32, slots, 64, 4, mesh, False, 4, ByLength("tpu"))
    return chunk_shape(
        build, Sampling(max_new_tokens=8), [Request(0, Prompt(np.zeros(2, np.int32)), 0, 8)], None, False
    )


@functools.cache
def sampled(platform, slots, count=6, **options):
    """Completions of the first prompts, three times the same one, and the programs of chunks that were compiled."""
    form = None if platform is None else ByLength(platform, interpret=True)
    engine = Engine(tiny("gemma"), slots=slots, max_length=400, chunk=16, group=3, form=form, **options)
    prompts = (PROMPTS[:1] + PROMPTS)[:count]
    with Compilations() as heard:
        found = engine.generate(tiny("gemma"), prompts, range(count), Sampling(max_new_tokens=140))
    return found, sum("run_chunk" in name for name in heard.heard)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_the_kernels_draw_the_tokens_of_the_plain_form(platform, cache):
    """With windows of 3 and 4 columns, soft-capped scores, and rows past a block of 128 columns; float32."""
    (found, programs), (chunk_shape, _) = (sampled(form, 4, kv_cache_dtype=cache) for form in (platform, None))
    assert programs == 1
    for one, other in zip(found, chunk_shape, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        # Both round 150 sums of one layer otherwise, of terms around 1: some 10 units in the last place of a logit.
        np.testing.assert_allclose(one.sampler_logp, other.sampler_logp, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "gpu"])
def test_neighbours_change_no_bit_of_what_the_kernels_sample(platform):
    (few, _), (many, _) = sampled(platform, 4, 2), sampled(platform, 4, kv_cache_dtype="auto")
    for one, other in zip(few, many, strict=False):
        assert one.tokens.tobytes() == other.tokens.tobytes()
        assert one.sampler_logp.tobytes() == other.sampler_logp.tobytes()
