"""A full disk and too little memory: one line that says what to do, and nothing half-written."""

import json

import pytest
from commands import ROOT, command

from jaxrl_llm.system.signals import UNHEARD

pytestmark = pytest.mark.slow

CONFIG = ROOT / "tests" / "fixtures" / "runs" / "sums.py"
FILES = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0}))"
UNREAD = "import os; reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1); os.dup2(writer, 2)"
MEMORY = f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({1 << 35}, {1 << 35}))"


def train(folder, *arguments, before="", **changes):
    return command("train", str(CONFIG), "--steps", "2", *arguments, folder=folder, before=before, **changes)


def train_with_small_files(folder, limit, *arguments):
    # Compiled programs are read from the cache but not written: their files would meet the limit first.
    return train(folder, *arguments, before=FILES.format(limit), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="1000")


def last_line(answer):
    assert answer.code == 2 and "Traceback" not in answer.err, answer.err
    return answer.err.splitlines()[-1]


def test_a_full_disk_at_a_checkpoint_and_then_room_again_though_nobody_listens(tmp_path):
    answer = train_with_small_files(tmp_path, 100_000)
    assert last_line(answer).startswith("jaxrl-llm: the disk is full")
    run = tmp_path / "runs/sums"
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]
    assert not list((run / "checkpoints").iterdir())
    again = train(tmp_path, before=UNREAD)
    assert again.code == 0, (run / "log.txt").read_text()
    assert (run / "log.txt").read_text().count(UNHEARD) == 1
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["2"]
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [0, 1, 2]


def test_a_full_disk_at_the_first_row(tmp_path):
    answers = ["--evaluation.samples", "8", "--evaluation.temperature", "1", "--output.samples", "200"]
    answer = train_with_small_files(tmp_path, 15_000, *answers)  # config.json has less, they have more
    assert last_line(answer).startswith("jaxrl-llm: the disk is full")
    assert "evaluation at step 0" in answer.err and not (tmp_path / "runs/sums/checkpoints/2").exists()


def test_a_full_disk_at_the_configuration(tmp_path):
    answer = train_with_small_files(tmp_path, 100)
    assert last_line(answer).startswith("jaxrl-llm: the disk is full")
    assert not list(tmp_path.iterdir())


def test_too_little_memory_names_the_two_fields_and_leaves_the_way_free(tmp_path):
    answer = train(tmp_path, "--rollout.engine.slots", "30000000", before=MEMORY)
    fields = "--learner.compute.microbatch_rows (learning) or --rollout.engine.slots (sampling)"
    expected = f"jaxrl-llm: out of memory: lower {fields}"
    assert last_line(answer) == expected
    assert not list(tmp_path.iterdir())
    answer = train(tmp_path, "--learner.compute.microbatch_rows", "30000000", before=MEMORY)
    assert last_line(answer) == expected
    assert not list(tmp_path.iterdir())
