"""Checkpoints in object storage, on emulators of both kinds."""

import jax
import numpy as np
import pytest
from learner.rollouts import one_device
from storages import BUCKET, on_another_machine, storage
from tiny import tiny

from jaxrl_llm.checkpoints.dependents import drop_copies, keep_copy, kept_copy, noted, write_note
from jaxrl_llm.checkpoints.snapshots import BEST, keep, keep_only, kept, listed, newest_whole, phase_of, standing
from jaxrl_llm.checkpoints.step_files import MARKER, fault, mark, move_step, recorded_sums
from jaxrl_llm.checkpoints.store import Checkpoints, read_host, steps_in
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Optimiser, create_state
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.learner.update import abstract_state
from jaxrl_llm.system import lease
from jaxrl_llm.system import storage as stored

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["gs", "s3"])
def run(request, tmp_path_factory):
    """The address of a run with two checkpoints of three, the last of which was begun again, and a snapshot; its
    state."""
    storage(request.param)
    on_another_machine(tmp_path_factory.mktemp("cache"))
    name = f"{request.param}://{BUCKET}/of-checkpoints/run"
    path = stored.mirror(name)
    state = create_state(tiny(), build(Optimiser()), True, one_device())
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    with Checkpoints(path / "checkpoints", 2) as store:
        for step in (1, 2, 3):
            store.save(step, state, {"phase": step, "kept": np.arange(step)})
    with Checkpoints(path / "checkpoints", 2) as store:
        store.save(3, state, {"phase": 3, "kept": np.arange(3)})
    keep(path, 2, state, phase=1)
    return name, state


@pytest.fixture
def elsewhere(run, tmp_path):
    """Its mirror on another machine."""
    on_another_machine(tmp_path)
    return stored.folder(run[0])


def test_checkpoints_come_back_bit_for_bit_on_another_machine(run, elsewhere):
    assert steps_in(elsewhere / "checkpoints") == [2, 3] and steps_in(elsewhere / "snapshots") == [2]
    assert list(kept(elsewhere)) == [2, 3] and phase_of(kept(elsewhere)[3]) == 3
    assert read_host(elsewhere / "checkpoints/3")["kept"].tolist() == [0, 1, 2]
    assert newest_whole(elsewhere) == (3, "")
    like = abstract_state(tiny(), build(Optimiser()), True)
    with Checkpoints(elsewhere / "checkpoints", 2) as store:
        for _ in range(2):
            found, _ = store.restore(3, like, one_device())
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(run[1]), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert steps_in(elsewhere / "checkpoints") == [2, 3], "opening them has removed some"


def test_the_best_model_is_replaced_once_a_better_one_is_whole(run, elsewhere):
    for step in (3, 5):
        keep(elsewhere, step, run[1], folder=BEST)
    assert steps_in(elsewhere / BEST) == [3, 5] and kept(elsewhere)[5] == elsewhere / BEST / "5"
    assert kept(elsewhere)[3].parent.name == "checkpoints" and not fault(elsewhere / BEST / "5")
    assert listed(elsewhere) == "2, 3 and snapshots of 2 and the best models of 3, 5"
    keep_only(elsewhere / BEST, {5, 9})
    assert steps_in(elsewhere / BEST) == [5] and list(kept(elsewhere)) == [2, 3, 5]
    keep(elsewhere, 5, run[1], folder=BEST)
    keep_only(elsewhere / BEST, ())
    assert steps_in(elsewhere / BEST) == [] and steps_in(elsewhere / "snapshots") == [2]


def test_damage_is_found_without_reading_and_put_aside(elsewhere):
    place = elsewhere / "checkpoints/3"
    names = recorded_sums(place)
    assert {name.partition("/")[0] for name in names} == {"state", "host"} and len(mark(place)) == 16
    files, name = stored.system(stored.address(place)), "host/arrays.zlib"
    where = f"{stored.address(place)}/{name}"
    content = files.cat_file(where)
    for changed, why in (
        (content[:-3], f"file {name}: 3 bytes missing"),
        (bytes(len(content)), f"file {name} is not what was written: its checksum differs"),
    ):
        files.pipe_file(where, changed)
        assert fault(place) == why
    assert newest_whole(elsewhere) == (2, f"checkpoints/3 is damaged ({why}); resuming from 2")
    assert steps_in(elsewhere / "checkpoints") == [2]
    aside = place.with_name("3.damaged")
    files.pipe_file(f"{stored.address(aside)}/{name}", content)
    move_step(aside, place)
    assert steps_in(elsewhere / "checkpoints") == [2, 3]
    files.rm_file(where)
    assert fault(place) == f"file {name} is missing"
    files.pipe_file(where, content)


def test_a_step_without_its_marker_is_not_there(elsewhere):
    place = stored.place(elsewhere / "checkpoints/2")
    text = (place / MARKER).read_text()
    (place / MARKER).unlink()
    assert steps_in(elsewhere / "checkpoints") == [3] and steps_in(elsewhere / "none") == []
    (place / MARKER).write_text(text)
    record = (place / "checksums.json").read_text()
    (place / "checksums.json").unlink()
    assert fault(elsewhere / "checkpoints/2") == "its checksums.json is missing or unreadable"
    (place / "checksums.json").write_text(record)


def test_who_has_lost_the_run_completes_no_checkpoint(run, elsewhere):
    path = elsewhere.with_name("lost")
    path.mkdir(parents=True)
    with lease.leased(path, "wait"):
        lock = f"{stored.address(path)}/lock"
        lease.put(lock, b'{"id": "other", "pid": 1, "host": "far"}', lease.get(lock)[1])
        store = Checkpoints(path / "checkpoints")
        store.save(1, run[1], {})
        with pytest.raises(InputError, match="lost was taken over by process 1 on far"):
            store.close()
        (path / "config.json").write_text("{}")
        lease.upload_last(path)
    assert not stored.place(path / "config.json").exists()
    assert steps_in(path / "checkpoints") == []


def test_a_step_is_kept_in_the_storage_and_from_it(run, elsewhere, tmp_path):
    name, state = run
    theirs, was = stored.mirror(f"{name}-b"), mark(elsewhere / "checkpoints/3")
    stored.place(theirs / "config.json").write_text("{}")
    like = abstract_state(tiny(), build(Optimiser()), True)
    for holder in (tmp_path / "local", theirs):
        assert keep_copy(holder, elsewhere, elsewhere / "checkpoints/3", 3, was, most=9).startswith("its 0.0 GB can ")
        assert kept_copy(holder, elsewhere, 3, was) is None
        assert keep_copy(holder, elsewhere, elsewhere / "checkpoints/3", 3, was) == ""
        copy = standing(elsewhere.with_name("gone") / elsewhere.name, 3, was, holder)
        assert copy == holder / f"needs/run-{was}" and steps_in(copy / "checkpoints") == [3]
        assert fault(copy / "checkpoints/3") == "" and read_host(copy / "checkpoints/3")["phase"] == 3
        with Checkpoints(copy / "checkpoints", 2) as store:
            found, _ = store.restore(3, like, one_device())
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
            assert np.array_equal(a, b)
    write_note(elsewhere, was, theirs)
    assert noted(elsewhere) == {was}
    drop_copies(theirs, ())
    assert standing(elsewhere.with_name("gone") / elsewhere.name, 3, was, theirs) is None
    stored.system(name).rm(f"{name}-b", recursive=True)
    assert noted(elsewhere) == set()
