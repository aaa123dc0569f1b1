"""Addresses, their mirrors, and the lock of a run in object storage, on emulators of both kinds."""

import json
import os
import threading
from pathlib import Path

import pytest
from commands import assert_refused, command
from storages import BUCKET, DENIED, on_another_machine, storage

from jaxrl_llm.errors import InputError
from jaxrl_llm.system import lease
from jaxrl_llm.system import storage as stored
from jaxrl_llm.system.paths import InUse, alone

REFUSED = {
    "az://bucket/x": "gs://BUCKET/FOLDER and s3://BUCKET/FOLDER are read and written",
    "gs://bucket": "gs://bucket names no folder of a bucket: give gs://BUCKET/FOLDER",
    "gs://bucket/": "names no folder of a bucket",
    "gs://bucket/../x": "names no folder of a bucket",
    "s3://bucket//x": "names no folder of a bucket",
    "s3://bucket/x*": "names no folder of a bucket",
}


@pytest.fixture(params=["gs", "s3"])
def address(request, tmp_path):
    """An address of this test's own, on a machine without mirrors."""
    storage(request.param)
    on_another_machine(tmp_path / "cache")
    return f"{request.param}://{BUCKET}/{request.node.name}".replace("[", "-").replace("]", "")


def run_at(address, **files):
    """A mirror with a run's files, uploaded."""
    path = stored.mirror(address)
    for name, text in {"config.json": "{}", **files}.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    stored.push(path)
    return path


def objects(address):
    files = stored.system(address)
    return {name.partition(address.partition("://")[2] + "/")[2]: files.cat(name) for name in files.find(address)}


@pytest.mark.parametrize("name", REFUSED)
def test_an_address_that_cannot_be_used_is_refused(name):
    with pytest.raises(InputError, match=r"^run_dir ") as refusal:
        stored.split(name, "run_dir")
    assert REFUSED[name] in str(refusal.value)


def test_a_mirror_tells_its_address(tmp_path):
    on_another_machine(tmp_path)
    path = stored.mirror("gs://bucket/runs/a/")
    assert path == tmp_path / "storage/gs/bucket/runs/a"
    assert stored.address(path / "checkpoints") == "gs://bucket/runs/a/checkpoints"
    assert stored.named(path) == "gs://bucket/runs/a" and stored.shown(f"see {path}/log.txt") == (
        "see gs://bucket/runs/a/log.txt"
    )
    for other in (tmp_path, tmp_path / "storage/gs/bucket", Path("runs/a")):
        assert stored.address(other) == "" and stored.named(other) == str(other)
    assert stored.mirror("runs/a") == Path("runs/a") and stored.split("OWNER/MODEL") is None


@pytest.mark.slow
def test_a_mirror_and_its_address_become_equal_both_ways(address, tmp_path):
    path = run_at(
        address, **{"metrics.jsonl": "1\n", "underway.json": "{}", "tensorboard/a": "curve", "code/1/p/a.py": "1"}
    )
    for name in (
        "lock",
        ".config.json.part",
        ".steps/a",
        "checkpoints/2/a",
        "snapshots/2/a",
        "b/config.json",
        "b/c/d",
    ):  # none of which is pushed
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("mine")
    (path / "metrics.jsonl").write_text("1\n2\n")
    (path / "underway.json").unlink()
    stored.push(path)
    files = {"config.json": b"{}", "metrics.jsonl": b"1\n2\n", "tensorboard/a": b"curve"}
    files |= {"code/1/p/a.py": b"1"}
    assert objects(address) == files
    on_another_machine(tmp_path / "other")
    other = stored.folder(address)
    assert other != path
    assert {str(one.relative_to(other)): one.read_bytes() for one in other.rglob("*") if one.is_file()} == {
        name: text for name, text in files.items() if "/" not in name or name.startswith("code/")
    }
    (other / "code/2").mkdir()
    (other / "code/2/a.py").write_text("of another machine, which was killed")
    stored.fetch(other)
    assert not (other / "code/2/a.py").exists() and (other / "code/1/p/a.py").exists()
    (other / "metrics.jsonl").write_text("1\n2\n3\n")
    stored.push(other)
    on_another_machine(tmp_path / "cache")
    (path / "samples.jsonl").write_text("of steps that are made anew")
    stored.fetch(path)
    assert (path / "metrics.jsonl").read_text() == "1\n2\n3\n" and not (path / "samples.jsonl").exists()
    stored.system(address).rm(address, recursive=True)
    stored.fetch(path)
    assert [one.name for one in path.iterdir()] == ["lock"], "all but what a run in training holds"


@pytest.mark.slow
def test_only_runs_and_models_are_copied_and_never_over_a_run_in_training(address):
    files = stored.system(address)
    files.pipe_file(f"{address}/large.bin", b"a bucket of other things")
    assert not stored.folder(address).exists()
    path = run_at(f"{address}/run")
    files.pipe_file(f"{address}/run/config.json", b'{"other": 1}')
    with alone(path, "wait"):
        assert (stored.folder(f"{address}/run") / "config.json").read_text() == "{}"
    assert (stored.folder(f"{address}/run") / "config.json").read_text() == '{"other": 1}'
    files.pipe_file(f"{address}/model.gguf", b"GGUF")
    assert stored.folder(f"{address}/model.gguf").read_bytes() == b"GGUF"


@pytest.mark.slow
def test_troubles_are_one_line_each(address, tmp_path):
    scheme = address.partition("://")[0]
    missing = f"{scheme}://no-such-bucket/run"
    path = stored.mirror(missing)
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="there is no bucket no-such-bucket, or it is not yours: make it first"):
        stored.push(path)
    with pytest.raises(InputError, match="there is no bucket no-such-bucket"), lease.leased(path, "wait"):
        pass
    if scheme == "gs":
        with pytest.raises(InputError, match=r"give credentials that may use it .gcloud auth application-default"):
            stored.folder(f"gs://{DENIED}/run")


def test_a_missing_package_is_named(tmp_path):
    answer = command("report", "s3://b/x", folder=tmp_path, before="import sys; sys.modules['s3fs'] = None", anew=True)
    assert_refused(answer, "s3://b/x needs s3fs: pip install -e '.[s3]'")


@pytest.mark.slow
def test_a_lock_is_written_only_over_the_version_that_is_named(address):
    first = lease.put(f"{address}/lock", b"{}", None)
    with pytest.raises(lease.Refused):
        lease.put(f"{address}/lock", b"{}", None)
    second = lease.put(f"{address}/lock", b'{"beat": 1}', first)
    with pytest.raises(lease.Refused):
        lease.put(f"{address}/lock", b'{"beat": 2}', first)
    assert lease.get(f"{address}/lock") == ({"beat": 1}, second)
    assert lease.get(f"{address}/other") is None


@pytest.mark.slow
def test_a_second_run_is_refused_and_a_dead_one_taken_over(address, capsys):
    path = stored.mirror(address)
    with lease.leased(path, "go elsewhere"):
        with pytest.raises(InUse, match=f"{address} is in use by process {os.getpid()} on .* or go elsewhere"):
            lease.Lease(path, "go elsewhere").take()
        lease.before_commit(path)
    assert lease.get(f"{address}/lock") is None
    dead = lease.whoami() | {"begun": "1", "id": "before"}  # its number belongs to another process by now
    lease.put(f"{address}/lock", json.dumps(dead).encode(), None)
    with lease.leased(path, "go elsewhere"):
        assert "which has ended: its lock is taken over" in capsys.readouterr().err
    assert lease.get(f"{address}/lock") is None


def elsewhere(address):
    """A lock of a process on another machine, its content without a beat."""
    return json.dumps(lease.whoami() | {"boot": "another", "id": "other", "host": "far"}).encode()


@pytest.mark.slow
def test_the_lock_of_another_machine_is_watched(address, capsys):
    path, lock = stored.mirror(address), f"{address}/lock"
    version = lease.put(lock, elsewhere(address), None)
    mine = lease.Lease(path, "wait", beat_s=100.0, lease_s=0.1)
    mine.take()
    assert "far: it is watched for up to 0 s, whether it lives" in capsys.readouterr().err
    with pytest.raises(lease.Refused):  # the other one wakes up again
        lease.put(lock, elsewhere(address) + b" ", version)
    lease.put(lock, elsewhere(address), lease.get(lock)[1])  # in a storage without preconditions
    with pytest.raises(InputError, match=r"was taken over by process .* on far.* nothing more is written there"):
        mine.renew()
    mine.close()
    assert lease.get(lock)[0]["id"] == "other", "the lock of another was removed"
    end = threading.Event()

    def beats():
        count = 0
        while not end.wait(0.01):
            count += 1
            lease.put(lock, elsewhere(address) + b" " * count, lease.get(lock)[1])

    other = threading.Thread(target=beats)
    other.start()
    try:
        with pytest.raises(InUse, match=r"is in use by process .* on far: wait until it ends, or wait"):
            lease.Lease(path, "wait", lease_s=2.0).take()
    finally:
        end.set()
        other.join()


def test_files_that_cannot_be_uploaded_wait_for_the_next_time(tmp_path, capsys):
    storage("gs")
    on_another_machine(tmp_path)
    path = stored.mirror("gs://no-such-bucket/run")
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    lease.before_commit(path)
    assert "uploaded again at the next checkpoint" in capsys.readouterr().err
