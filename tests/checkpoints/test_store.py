"""Checkpoints: bit for bit, on whatever mesh, under names that belong to nobody's library."""

import dataclasses
import datetime
import decimal
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from learner.rollouts import one_device
from tiny import tiny

from jaxrl_llm import codec
from jaxrl_llm.checkpoints.step_files import recorded_sums
from jaxrl_llm.checkpoints.store import Checkpoints, flatten, read_host, steps_in, unflatten
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Optimiser, create_state
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.rollout.groups import GROUP_RECORDS, Carryover, PartialGroup, RolloutBatch
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
from jaxrl_llm.trainer.state import LoopState
from jaxrl_llm.types import Completion, Group, Problem

OPTIMISER = build(Optimiser())


def state_on(mesh, kind="plain", reference=True, dtype="float32"):
    """A state in which every array is different, as after some updates."""
    state = create_state(tiny(kind, dtype=dtype), OPTIMISER, reference, mesh)
    leaves, treedef = jax.tree.flatten(state)
    layouts = [x.sharding for x in leaves]
    random = np.random.default_rng(1)
    noisy = [np.asarray(random.normal(size=x.shape) * 9, x.dtype) for x in leaves]
    return jax.tree.unflatten(treedef, [jax.device_put(x, s) for x, s in zip(noisy, layouts, strict=True)])


def like(kind="plain", reference=True, dtype="float32"):
    return abstract_state(tiny(kind, dtype=dtype), OPTIMISER, reference)


@pytest.mark.slow(but="float32")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_comes_back_bit_for_bit_on_every_mesh(tmp_path, dtype):
    saved = state_on(make_mesh(MeshShape(1, 8, 1)), "gemma", dtype=dtype)
    host = {"cursor": 12, "best": 0.1, "carried": [{"x": [1.5, float("nan")]}], "stalled": 0}
    store = Checkpoints(tmp_path)
    arrays = {"stored": [np.arange(3, dtype=np.int32), np.array([[0.1], [np.nan]])], "none": np.zeros((0, 2), bool)}
    store.save(3, saved, host | arrays)
    store.wait()
    assert (tmp_path / "3/host/arrays.zlib").exists() and "host/arrays.zlib" in recorded_sums(tmp_path / "3")
    assert same(read_host(tmp_path / "3"), host | arrays)
    for mesh in (make_mesh(MeshShape(1, 8, 1)), make_mesh(MeshShape(2, 2, 2)), one_device()):
        found, values = store.restore(3, like("gemma", dtype=dtype), mesh)
        assert same(values, host | arrays)
        assert jax.tree.structure(found) == jax.tree.structure(saved)
        wanted = jax.tree.leaves(shardings(found, mesh))
        for a, b, layout in zip(jax.tree.leaves(found), jax.tree.leaves(saved), wanted, strict=True):
            assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
            assert a.sharding.is_equivalent_to(layout, a.ndim)
    store.close()


def test_a_state_may_be_donated_as_soon_as_save_returns(tmp_path):
    saved = state_on(one_device())
    copy = jax.device_get(saved)
    store = Checkpoints(tmp_path)
    store.save(1, saved, {})
    jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)(saved)
    found, _ = store.restore(1, like(), one_device())
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), copy)
    store.close()


def test_names_are_ours():
    names = flatten(like("full_norm"))
    assert {"policy/embed", "policy/blocks/attn/q", "reference/head", "updates"} <= names.keys()
    for name in names:
        assert not {"weights", "value", "Param", "config", "GetAttrKey"} & set(name.split("/")), name
        assert all(part.replace("_", "").isalnum() for part in name.split("/")), name
    assert sum(name.startswith("opt_state/") for name in names) > len([n for n in names if n.startswith("policy/")])


def test_flatten_and_unflatten_are_inverse():
    state = state_on(one_device())
    again = unflatten(flatten(state), like())
    jax.tree.map(np.testing.assert_array_equal, again, state)
    assert len(flatten(state)) == len(jax.tree.leaves(state))


def test_the_newest_stay_and_others_go(tmp_path):
    state = state_on(one_device(), reference=False)
    assert steps_in(tmp_path / "nowhere") == []
    store = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.save(step, state, {"step": step})
    store.close()
    assert steps_in(tmp_path) == [2, 10]
    store = Checkpoints(tmp_path)
    assert store.restore(10, like(reference=False), one_device())[1] == {"step": 10}
    store.close()


@pytest.mark.slow
def test_what_a_run_was_stopped_with_takes_no_place_of_a_checkpoint_that_is_due(tmp_path):
    state = state_on(one_device(), reference=False)
    due = lambda step: step % 2 == 0
    for steps, left in (((2, 4, 5), [2, 4, 5]), ((6,), [2, 4, 6]), ((7,), [2, 4, 6, 7]), ((8, 9), [4, 6, 8, 9])):
        with Checkpoints(tmp_path, 3, due) as store:
            for step in steps:
                store.save(step, state, {})
        assert steps_in(tmp_path) == left


def test_a_half_written_step_is_not_seen(tmp_path):
    state = state_on(one_device(), reference=False)
    store = Checkpoints(tmp_path)
    store.save(1, state, {})
    store.close()
    half = tmp_path / "2.orbax-checkpoint-tmp-1234"
    half.mkdir()
    (half / "state").mkdir()
    assert steps_in(tmp_path) == [1]
    store = Checkpoints(tmp_path)
    store.save(2, state, {})
    store.close()
    assert steps_in(tmp_path) == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed", [{"kind": "bias"}, {"kind": "full_norm"}, {"reference": False}, {"reference": True}]
)
def test_another_configuration_is_refused(tmp_path, changed):
    store = Checkpoints(tmp_path)
    store.save(1, state_on(one_device(), reference=not changed.get("reference", False)), {})
    store.close()
    store = Checkpoints(tmp_path)  # as the process that resumes does
    with pytest.raises(InputError, match="start over with --fresh") as refused:
        store.restore(1, like(**changed), one_device())
    assert "\n" not in str(refused.value)
    store.close()


def completion(size, reason="stop"):
    random = np.random.default_rng(size)
    entropy, kept = random.random(size).astype(np.float32), random.integers(0, 1 << 32, (size, 3), np.uint32)
    return Completion(
        random.integers(0, 9, size).astype(np.int32), random.normal(size=size).astype(np.float32), reason,
        random.random(size) < 0.5, np.full(size, 7, np.int32), {"entropy": entropy, "kept": kept}, f"text {size} é",
    )  # fmt: skip


def same(a, b):
    """Whether two values are equal, their arrays bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if dataclasses.is_dataclass(a):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(one, other) for one, other in zip(a, b, strict=True))
    return repr(a) == repr(b)  # NaN is not equal to itself


def again(host):
    """A run's host values once they were saved and read."""
    packed = LoopState.from_json(json.loads(json.dumps(codec.to_json(vars(host), GROUP_RECORDS))), GROUP_RECORDS)
    arrays = bytearray()
    told = codec.to_json(vars(host), GROUP_RECORDS, arrays)
    found = LoopState.from_json(codec.together(json.loads(json.dumps(told)), bytes(arrays)), GROUP_RECORDS)
    assert same(vars(packed), vars(found))
    return found


def group():
    """Two completions of a problem that holds what the columns of a Parquet file may hold."""
    metadata = {
        "level": 2,
        "row": "x:1",
        "day": datetime.date(2025, 7, 1),
        "price": decimal.Decimal("1.50"),
        "raw": b"\x00",
        "weight": np.float32(0.1),
        "steps": [(1, 2), {3: datetime.datetime(2025, 7, 1, tzinfo=datetime.UTC)}],
    }
    problem = Problem("a-1", ({"role": "user", "content": "?"},), "4", "sums", "boxed", "math", metadata)
    return Group(
        problem,
        np.array([3, 4], np.int32),
        (completion(1), completion(4)),
        np.random.default_rng(0).normal(size=2),
        np.array([1.0, np.nan]),
        {"accuracy": np.array([1 / 3, 0.1])},
    )


def test_what_a_step_leaves_to_the_next_survives_json_exactly():
    odd = dataclasses.replace(completion(2, "aborted"), extras={"entropy": np.array([np.nan, -0.0], np.float32)})
    problem = Problem("a", ({"role": "user", "content": "?"},), "4", "sums", metadata={"entry": (1, 2)})
    asked = PartialGroup(3, (completion(4), None, odd), problem, np.array([5, 6], np.int32), 2)
    unfinished = (asked, PartialGroup(5, (None, None, None)))
    left = Carryover(12, (group(),), unfinished, 0.1, 1 / 3, {"seen": 4})
    found = again(LoopState(left, None, {"stall": {"best": 0.3}}, {"kl_coef": 0.08}, {"training": {"count": 1}}))
    assert same(found, LoopState(left, None, {"stall": {"best": 0.3}}, {"kl_coef": 0.08}, {"training": {"count": 1}}))


def test_groups_sampled_ahead_survive_json_exactly():
    measured = {"reward/mean": 1 / 3, "rollout/useful_fraction": float("inf")}
    ready = RolloutBatch([group()], [], Carryover(3, (group(),)), 7, 5, measured)
    assert same(again(LoopState(None, ready)), LoopState(None, ready))


def test_a_counter_is_an_array_like_any_other():
    assert flatten(like())["updates"] == jax.ShapeDtypeStruct((), jnp.int32)
