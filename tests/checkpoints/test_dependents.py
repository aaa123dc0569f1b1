"""Steps that other runs depend on: kept whole or not at all, and not dropped while the dependent run is there."""

import json
import os
import shutil
import zlib
from pathlib import Path

import pytest

from jaxrl_llm.checkpoints import dependents
from jaxrl_llm.checkpoints.dependents import (
    depended_on,
    drop_copies,
    keep_copy,
    kept_copy,
    noted,
    set_aside,
    write_note,
)
from jaxrl_llm.checkpoints.snapshots import BEST, keep_only, standing
from jaxrl_llm.checkpoints.step_files import fault, mark
from jaxrl_llm.checkpoints.store import Checkpoints, _Newest, steps_in


def written(folder, step, text="w"):
    """A run's folder with a step in it."""
    place = folder / "checkpoints" / str(step)
    (place / "state").mkdir(parents=True)
    (place / "state/d").write_text(text)
    (place / "_METADATA").write_text("{}")
    (place / "checksums.json").write_text(json.dumps({"state/d": [len(text), zlib.crc32(text.encode())]}))
    (folder / "config.json").write_text("{}")
    return place


@pytest.fixture
def runs(tmp_path):
    """Another run with two steps, and one that depends on the second."""
    for step in (1, 2):
        written(tmp_path / "a", step, f"weights {step}")
    (tmp_path / "b").mkdir()
    (tmp_path / "b/config.json").write_text("{}")
    return tmp_path / "a", tmp_path / "b"


def kept_by(b, a, most=dependents.MOST_COPIED):
    place = a / "checkpoints/2"
    return mark(place), keep_copy(b, a, place, 2, mark(place), most)


def test_a_copy_is_the_same_files_and_stands_where_the_step_does_not(runs):
    a, b = runs
    was, why = kept_by(b, a)
    copy = kept_copy(b, a, 2, was)
    assert why == "" and fault(copy / "checkpoints/2") == "" and (copy / "config.json").exists()
    for name in ("state/d", "_METADATA", "checksums.json"):
        assert os.path.samefile(copy / "checkpoints/2" / name, a / "checkpoints/2" / name)
    assert standing(a, 2, was, b) == a
    shutil.rmtree(a / "checkpoints/2")
    assert standing(a, 2, was, b) == copy and standing(a, 2, was) is None
    written(a, 2, "others")
    assert standing(a, 2, was, b) == copy, "a step trained anew is another"
    shutil.rmtree(a)
    assert standing(a, 2, was, b) == copy and standing(a, 2, "0" * 16, b) is None
    assert standing(a, 2, was, copy) == copy, "what a copy needs lies beside it"


def test_above_the_bound_it_is_named_instead_where_no_link_is_possible(runs):
    a, b = runs
    assert kept_by(b, a, most=0)[1] == "", "links cost nothing"
    drop_copies(b, ())
    far = Path(f"/dev/shm/dependents-{os.getpid()}")
    try:
        if os.stat("/dev/shm").st_dev != os.stat(b).st_dev:
            was, why = kept_by(far, a, most=8)
            assert why == "its 0.0 GB can only be copied, and the most is 0 GB" and kept_copy(far, a, 2, was) is None
            assert not list((far / "needs").iterdir())
            assert kept_by(far, a, most=9)[1] == "" and fault(kept_copy(far, a, 2, was) / "checkpoints/2") == ""
    finally:
        shutil.rmtree(far, ignore_errors=True)


@pytest.mark.parametrize("lost", ["state/d", "checksums.json"])
def test_a_step_that_goes_meanwhile_leaves_no_copy(runs, lost):
    a, b = runs
    was = mark(a / "checkpoints/2")
    (a / "checkpoints/2" / lost).unlink()
    assert keep_copy(b, a, a / "checkpoints/2", 2, was) == "it went away meanwhile"
    assert kept_copy(b, a, 2, was) is None and not list((b / "needs").iterdir())


def test_what_a_kill_leaves_is_no_copy_and_is_made_again(runs):
    a, b = runs
    was = mark(a / "checkpoints/2")
    shutil.copytree(a, b / f"needs/.a-{was}.part")
    assert kept_copy(b, a, 2, was) is None and standing(a, 3, was, b) is None
    assert kept_by(b, a) == (was, "") and [path.name for path in (b / "needs").iterdir()] == [f"a-{was}"]
    drop_copies(b, {was})
    assert kept_copy(b, a, 2, was)
    drop_copies(b, ())
    assert not list((b / "needs").iterdir()) and fault(a / "checkpoints/2") == ""


def test_a_note_holds_a_step_while_the_dependent_run_is_there(runs):
    a, b = runs
    for step in (3, 4, 5):
        written(a, step, f"weights {step}")
    newest = _Newest(1, lambda step: True, a / "checkpoints")
    assert newest.kept([1, 2, 3, 4]) == [False, False, False, True]
    was = mark(a / "checkpoints/2")
    write_note(a, was, b)
    write_note(a, mark(a / "checkpoints/3"), b.parent / "gone")
    assert noted(a) == {was} and depended_on(a / "checkpoints", [1, 2, 3]) == {2}
    assert newest.kept([1, 2, 3, 4]) == [False, True, False, True]
    keep_only(a / "checkpoints", [4])
    assert steps_in(a / "checkpoints") == [2, 4]
    shutil.rmtree(b)
    keep_only(a / "checkpoints", [4])
    assert steps_in(a / "checkpoints") == [4]


def test_a_note_that_cannot_be_left_is_not_left(runs):
    a, b = runs
    shutil.rmtree(a)
    write_note(a, "0" * 16, b)
    assert not a.exists() and noted(a) == set()
    a.write_text("a file")
    write_note(a, "0" * 16, b)


def test_a_step_that_is_replaced_is_set_aside_for_those_who_only_named_it(runs):
    a, b = runs
    was = mark(a / "checkpoints/2")
    set_aside(a / "checkpoints/2")
    assert not (a / "needs").exists(), "nobody needs it"
    write_note(a, was, b)
    set_aside(a / "checkpoints/2")
    set_aside(a / "checkpoints/7")
    shutil.rmtree(a / "checkpoints/2")
    written(a, 2, "others")
    assert fault(standing(a, 2, was, b) / "checkpoints/2") == "" and standing(a, 2, was, b) == kept_copy(a, a, 2, was)


def test_the_model_that_a_run_began_with_needs_its_settings_alone(runs):
    a, b = runs
    assert keep_copy(b, a, a / BEST / "0", 0, "") == "" and standing(a, 0, "", b) == a
    shutil.rmtree(a)
    copy = standing(a, 0, "", b)
    assert copy == b / "needs/a-0" and [path.name for path in copy.iterdir()] == ["config.json"]


def test_a_save_replaces_a_step_that_others_depend_on_and_retention_leaves_it(tmp_path):
    import jax.numpy as jnp

    from jaxrl_llm.checkpoints.store import parts_of

    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
    save = lambda store, step, value: store.save(step, parts_of({"w": jnp.full(2, value)}), {})
    with Checkpoints(a / "checkpoints", 1) as store:
        save(store, 1, 1.0)
        store.wait()
        write_note(a, was := mark(a / "checkpoints/1"), b)
        for step in (2, 3):
            save(store, step, 2.0)
    assert steps_in(a / "checkpoints") == [1, 3]
    with Checkpoints(a / "checkpoints", 1) as store:
        save(store, 1, 3.0)
    assert mark(a / "checkpoints/1") != was
    assert fault(standing(a, 1, was, b) / "checkpoints/1") == ""
    shutil.rmtree(b)
    with Checkpoints(a / "checkpoints", 1) as store:
        save(store, 4, 2.0)
    assert steps_in(a / "checkpoints") == [4]
