"""Damaged checkpoints: the newest whole one is gone on from, and a line says which were passed over, and why."""

import dataclasses
import errno
import os
import shutil
from pathlib import Path

import pytest
from learner.rollouts import one_device
from tiny import tiny

from jaxrl_llm.checkpoints.snapshots import check_whole, check_writable, keep, newest_whole
from jaxrl_llm.checkpoints.step_files import CHECKSUMS, fault, recorded_sums
from jaxrl_llm.checkpoints.store import Checkpoints, steps_in
from jaxrl_llm.cli import explain
from jaxrl_llm.config import load_config
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner import Optimiser, create_state
from jaxrl_llm.learner.optimiser import build
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.trainer.launch import report_finished


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Three checkpoints of a small state, and a snapshot of the second."""
    folder = tmp_path_factory.mktemp("integrity") / "run"
    state = create_state(tiny(), build(Optimiser()), True, one_device())
    with Checkpoints(folder / "checkpoints", 3) as store:
        for step in (1, 2, 3):
            store.save(step, state, {"step": step})
    keep(folder, 2, state)
    return folder


@pytest.fixture
def run(folder, tmp_path):
    """A copy of them."""
    return Path(shutil.copytree(folder, tmp_path / "run"))


def largest(run, step):
    """The file of a checkpoint that holds most."""
    files = [path for path in (run / "checkpoints" / str(step) / "state").rglob("*") if path.is_file()]
    return max(files, key=os.path.getsize)


def flip(run, step):
    path = largest(run, step)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def cut(run, step):
    path = largest(run, step)
    path.write_bytes(path.read_bytes()[:-3])


def halve(run, step):
    path = largest(run, step)
    os.truncate(path, os.path.getsize(path) // 2)


def remove(run, step):
    largest(run, step).unlink()


def lengthen(run, step):
    with open(largest(run, step), "ab") as file:
        file.write(b"0")


def forget_host(run, step):
    shutil.rmtree(run / "checkpoints" / str(step) / "host")


DAMAGES = {
    flip: " is not what was written: its checksum differs",
    cut: ": 3 bytes missing",
    remove: " is missing",
    lengthen: ": 1 byte too many",
    forget_host: "host/",
}


def test_every_file_of_a_checkpoint_and_of_a_snapshot_has_a_checksum(run):
    for step in (run / "checkpoints" / "3", run / "snapshots" / "2"):
        files = {str(path.relative_to(step)) for path in step.glob("*/**/*") if path.is_file()}
        assert recorded_sums(step).keys() == files and fault(step) == ""
        assert any(os.path.getsize(step / name) > 10_000 for name in files), "the arrays are among them"
    assert newest_whole(run) == (3, "")


def test_processes_read_each_file_of_a_checkpoint_once(run):
    step = run / "checkpoints" / "3"
    for name in recorded_sums(step):
        content = (step / name).read_bytes()
        (step / name).write_bytes(bytes([content[0] ^ 4]) + content[1:])
        found = sorted(fault(step, part, 3) for part in range(3))
        assert found[:2] == ["", ""] and found[2].startswith(f"file {name} is not what was written")
        (step / name).write_bytes(content)


class FirstOfTwo(Peers):
    """The other process says what it finds in its part of the files of each step, the newest first."""

    def __init__(self, run):
        super().__init__(0, 2)
        self.others = iter([fault(run / "checkpoints" / str(step), 1, 2) for step in (3, 2)])

    def gather(self, value):
        return [value, next(self.others)] if isinstance(value, str) else [value, None]


def test_damage_that_another_process_finds_counts(run):
    name = list(recorded_sums(run / "checkpoints" / "3"))[1]
    path = run / "checkpoints" / "3" / name
    path.write_bytes(bytes([path.read_bytes()[0] ^ 4]) + path.read_bytes()[1:])
    told = f"checkpoints/3 is damaged (file {name} is not what was written: its checksum differs); resuming from 2"
    assert newest_whole(run, FirstOfTwo(run)) == (2, told)
    assert steps_in(run / "checkpoints") == [1, 2]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_passed_over_and_kept_aside(run, damage):
    damage(run, 3)
    step, told = newest_whole(run)
    assert step == 2 and told.startswith("checkpoints/3 is damaged (file ") and told.endswith("; resuming from 2")
    assert DAMAGES[damage] in told and "\n" not in told
    assert steps_in(run / "checkpoints") == [1, 2] and (run / "checkpoints" / "3.damaged" / "state").is_dir()
    assert newest_whole(run) == (2, "")


def test_several_damaged_ones_are_told_and_names_are_not_taken_twice(run):
    (run / "checkpoints" / "2.damaged").mkdir()
    flip(run, 3)
    remove(run, 2)
    step, told = newest_whole(run)
    assert step == 1 and "checkpoints/3 is damaged" in told and "; checkpoints/2 is damaged" in told
    assert (run / "checkpoints" / "2.damaged-2" / "state").is_dir()


def test_where_none_is_whole_nothing_is_touched(run):
    for step in (1, 2, 3):
        cut(run, step)
    with pytest.raises(InputError) as refused:
        newest_whole(run)
    told = str(refused.value)
    assert "has no whole checkpoint: checkpoints/3 is damaged" in told and f"--from {run}@2" in told
    assert told.endswith("or --fresh to start over") and "\n" not in told
    assert steps_in(run / "checkpoints") == [1, 2, 3]
    assert newest_whole(run / "nowhere") == (None, "")


@pytest.mark.parametrize("content", [None, "", '{"state/x": [1', "[]"])
def test_a_checkpoint_without_checksums_is_damaged(run, content):
    seal = run / "checkpoints" / "3" / CHECKSUMS
    seal.unlink()
    if content is not None:
        seal.write_text(content)
    assert newest_whole(run) == (
        2, "checkpoints/3 is damaged (its checksums.json is missing or unreadable); resuming from 2"
    )  # fmt: skip


def test_what_host_values_cannot_be_read_is_damaged_too(run):
    step = run / "checkpoints" / "3"
    (step / CHECKSUMS).unlink()
    (step / "host" / "metadata").write_text("{")
    assert newest_whole(run)[0] == 2


def test_a_run_whose_last_step_is_damaged_is_not_finished(run, capsys):
    settings = dataclasses.replace(load_config("smoke")[1], steps=3)
    assert report_finished(run, settings) and "3 of 3 steps" in capsys.readouterr().out
    flip(run, 3)
    assert not report_finished(run, settings)


def test_other_commands_refuse_what_is_damaged(run):
    flip(run, 3)
    with pytest.raises(InputError, match=rf"3 is damaged \(.*\): give another: {run}@1, {run}@2"):
        check_whole(run / "checkpoints" / "3")
    check_whole(run / "checkpoints" / "2")


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_computed(run):
    shutil.move(run / "checkpoints", run / "elsewhere")
    (run / "checkpoints").write_text("")
    with pytest.raises(InputError, match=r"checkpoints cannot be written \(.*\): make it writable") as refused:
        check_writable(run)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_becomes_read_only_ends_the_run_in_one_line(number):
    told = explain(OSError(number, os.strerror(number), "run/checkpoints/9"), "train")
    assert told == (
        f"{os.strerror(number).lower()} (run/checkpoints/9): make it readable and writable, and run the same command "
        "again"
    )
    assert explain(ValueError(f"PERMISSION_DENIED: {os.strerror(number)}"), "train") is not None
