"""Slots on several devices: what each holds of the cache stays with it when the batch grows and shrinks."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny

from jaxrl_llm.engine.requests import Request, SlotShape, move_slots
from jaxrl_llm.engine.scheduler import COLUMN_ALIGNMENT, EngineSpec, cache_shape, chunk_shape
from jaxrl_llm.engine.slots import empty_slots, rearrange_blocks, rearrange_slots
from jaxrl_llm.rollout import Engine, Sampling
from jaxrl_llm.sharding import MeshShape, make_mesh, sampling_shardings

RULES = Sampling(max_new_tokens=24)
LIMITS = [2, 24, 3, 2, 2, 2, 24, 2] * 4  # the fullest part decides how far the batch can shrink


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from([1, 2, 4]), st.sampled_from([4, 8, 12]), st.sampled_from([4, 8, 12]), st.sets(st.integers(0, 11))
)
def test_no_request_leaves_its_part(parts, old, rows, places):
    before, after = old // parts, rows // parts
    running = {
        slot: Request(slot, np.zeros(1, np.int32), 0, 1) for slot in places if slot < old and slot % before < after
    }
    order, source, moved = move_slots(dict(running), old, rows, parts)
    assert {slot: order[slot] for slot in moved} == {slot: r.handle for slot, r in moved.items()}
    assert sorted(r.handle for r in moved.values()) == sorted(running)
    assert all(slot // after == r.handle // before and r.slot == slot for slot, r in moved.items())
    most = SlotShape(rows, 8, 0, 8, parts, 1)
    lies = {request.handle % before + request.handle // before * 12: slot for slot, request in moved.items()}
    for old_row, slot in lies.items():  # in a cache of 12 rows for each part
        row = most.row(slot, 12 * parts)
        assert source[slot] == (-1 if row == old_row else old_row % 12)
    for of_part in source.reshape(parts, -1):
        assert not {*of_part[of_part >= 0]} & {*np.flatnonzero(of_part >= 0)}  # no row made is another's source


@pytest.mark.slow
def test_a_batch_that_shrinks_moves_what_it_keeps():
    mesh, model = make_mesh(MeshShape(data=1, fsdp=2, tensor=2), jax.devices()[:4]), tiny("plain")
    weights = jax.device_put(model, sampling_shardings(model, mesh))
    engine = Engine(model, 32, 40, 4, mesh, group=4)

    def sampled(which):
        engine.start(RULES)
        handles = engine.submit([[3, 1, 4 + i // 4] for i in which], which, [LIMITS[i] for i in which])
        while engine.busy:
            engine.step(weights)
        done = dict(engine.collect())
        return {i: done[handle].tokens.tolist() for i, handle in zip(which, handles, strict=True)}

    long = [i for i in range(32) if LIMITS[i] == 24]
    together = sampled(list(range(32)))
    assert {" ".join(shape.split()[:4]) for shape in engine.shapes} >= {"decode: 32 slots of", "decode: 8 slots of"}
    alone = sampled(long)  # in a batch of 8 from the beginning
    assert {i: together[i] for i in long} == alone


@pytest.mark.parametrize("slots, rows", [(32, 8), (34, 34)])
def test_a_batch_shrinks_only_where_the_mesh_divides_it(slots, rows):
    mesh = make_mesh(MeshShape(data=2, fsdp=2, tensor=1), jax.devices()[:4])
    build = EngineSpec(tiny("plain").config, np.float32, slots, 64, 4, mesh, False, 4)
    few = [Request(i, np.zeros(3, np.int32), 0, 40) for i in range(5)]
    assert chunk_shape(build, Sampling(max_new_tokens=40), few, None, False).rows == rows


def test_no_device_sends_its_cache_away():
    mesh, config = make_mesh(MeshShape(data=2, fsdp=2, tensor=2)), tiny("plain").config
    shape = SlotShape(16, 64, 8, 32, 4, 4)
    slots = empty_slots(config, shape, np.float32, mesh, cache_shape=(32, 64))
    order = np.arange(8, dtype=np.int32)
    calls = [
        rearrange_slots.lower(slots.cache, slots._replace(cache=None, blocks=None), order, order - 1, mesh),
        rearrange_blocks.lower(slots, np.arange(4, dtype=np.int32), 64, np.zeros(16, np.int32), mesh, 4),
    ]
    for call in calls:
        with jax.set_mesh(mesh):
            text = call.compile().as_text()
        for line in text.splitlines():
            if any(f" {kind}" in line for kind in ("all-gather(", "all-to-all(", "collective-permute(", "all-reduce(")):
                assert not any(f",{columns}" in line.split("=", 1)[1].split("]")[0] for columns in (64, 32)), line


@pytest.mark.parametrize(("length", "columns"), [(1024, 1024), (2**21, 40)])
def test_few_slots_have_one_shape_where_their_cache_is_small(length, columns):
    spec = EngineSpec(tiny("plain").config, np.float32, 8, length, 4, None, False, 4)
    _, found = cache_shape(spec, Sampling(max_new_tokens=40))
    assert 0 <= found - (columns + 4) < COLUMN_ALIGNMENT
