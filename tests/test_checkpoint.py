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

from jaxrl_llm.checkpoint import Checkpoints, flatten, steps_in, unflatten
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Optimiser, create_state
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.state import abstract_state
from jaxrl_llm.rollout.groups import Carryover, PartialGroup
from jaxrl_llm.rollout.saved import carryover_from_json, carryover_to_json, group_from_json, group_to_json
from jaxrl_llm.sharding import MeshShape, make_mesh, shardings
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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_comes_back_bit_for_bit_on_every_mesh(tmp_path, dtype):
    saved = state_on(make_mesh(MeshShape(1, 8, 1)), "gemma", dtype=dtype)
    host = {"cursor": 12, "best": 0.1, "carried": [{"x": [1.5, float("nan")]}], "stalled": 0}
    store = Checkpoints(tmp_path)
    store.save(3, saved, host)
    for mesh in (make_mesh(MeshShape(1, 8, 1)), make_mesh(MeshShape(2, 2, 2)), one_device()):
        found, values = store.restore(3, like("gemma", dtype=dtype), mesh)
        assert json.dumps(values) == json.dumps(host)
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
    assert Checkpoints(tmp_path / "none").latest() is None and steps_in(tmp_path / "nowhere") == []
    store = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 10):
        store.save(step, state, {"step": step})
    store.close()
    assert steps_in(tmp_path) == [2, 10]
    store = Checkpoints(tmp_path)
    assert store.latest() == 10
    assert store.restore(10, like(reference=False), one_device())[1] == {"step": 10}
    store.close()


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
    assert store.latest() == 1
    store.save(2, state, {})
    store.close()
    assert steps_in(tmp_path) == [1, 2]


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
    """Whether two arrays, or two completions, are equal bit for bit."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, Completion):
        return all(same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    return {k: same(v, b[k]) for k, v in a.items()} == dict.fromkeys(b, True) if isinstance(a, dict) else a == b


def test_what_a_step_leaves_to_the_next_survives_json_exactly():
    odd = dataclasses.replace(completion(2, "aborted"), extras={"entropy": np.array([np.nan, -0.0], np.float32)})
    backlog = Carryover(
        12, (), (PartialGroup(3, (completion(4), None, odd)), PartialGroup(5, (None, None, None))), 0.1, 1 / 3
    )
    again = carryover_from_json(json.loads(json.dumps(carryover_to_json(backlog))))
    assert [g.number for g in again.unfinished] == [3, 5] and again.unfinished[1] == backlog.unfinished[1]
    assert all(map(same, again.unfinished[0].completions, backlog.unfinished[0].completions))
    assert dataclasses.replace(again, unfinished=()) == dataclasses.replace(backlog, unfinished=())


def test_what_was_asked_is_kept_with_the_unfinished_group():
    problem = Problem("a", ({"role": "user", "content": "?"},), "4", "sums", metadata={"entry": (1, 2)})
    backlog = Carryover(
        12, (), (PartialGroup(3, (None,), problem, np.array([5, 6], np.int32)), PartialGroup(4, (None,)))
    )
    data = json.loads(json.dumps(carryover_to_json(backlog)))
    asked, other = carryover_from_json(data).unfinished
    assert asked.problem == problem and same(asked.prompt, backlog.unfinished[0].prompt)
    assert other.problem is None and other.prompt is None
    for group in data["unfinished"]:  # as they were written before prompts were kept
        del group["problem"], group["prompt"]
    assert carryover_from_json(data).unfinished == (PartialGroup(3, (None,)), PartialGroup(4, (None,)))


def test_a_group_survives_json_exactly():
    random = np.random.default_rng(0)
    completions = (completion(1), completion(4))
    # What the columns of a Parquet file may hold.
    metadata = {
        "level": 2,
        "row": "x:1",
        "day": datetime.date(2025, 7, 1),
        "price": decimal.Decimal("1.50"),
        "raw": b"\x00",
    }
    metadata |= {"weight": np.float32(0.1), "steps": [(1, 2), {3: datetime.datetime(2025, 7, 1, tzinfo=datetime.UTC)}]}
    problem = Problem("a-1", ({"role": "user", "content": "?"},), "4", "sums", "boxed", "math", metadata)
    group = Group(
        problem,
        np.array([3, 4], np.int32),
        completions,
        random.normal(size=2),
        np.array([1.0, np.nan]),
        {"accuracy": np.array([1 / 3, 0.1])},
    )
    again = group_from_json(json.loads(json.dumps(group_to_json(group))))
    assert again.problem == problem and repr(again.problem) == repr(problem)
    assert all(same(getattr(group, name), getattr(again, name)) for name in ("prompt", "rewards", "accuracy"))
    assert same(group.parts["accuracy"], again.parts["accuracy"])
    assert all(map(same, group.completions, again.completions))


def test_a_counter_is_an_array_like_any_other():
    assert flatten(like())["updates"] == jax.ShapeDtypeStruct((), jnp.int32)
