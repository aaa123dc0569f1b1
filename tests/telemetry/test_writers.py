"""A run's records: each step once, valid JSON, nothing lost by a kill and nothing doubled by a resume."""

import json
import math

import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.system.json_lines import read_rows
from jaxrl_llm.telemetry.records import RunWriter


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_steps(run_dir, steps, resumed_at=None, trackers=()):
    with RunWriter(run_dir, resumed_at, trackers) as writer:
        for step in steps:
            writer.write(step, {"loss": step / 4})
            writer.samples(step, [{"prompt": "p", "completion": str(n)} for n in range(2)])


def test_a_row_is_on_the_disk_when_write_returns_with_step_first(tmp_path):
    writer = RunWriter(tmp_path / "run", None)
    writer.write(3, {"loss": 0.5, "event/resumed": True, "model": "tiny", "step": 3})
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())
    assert row == {"step": 3, "loss": 0.5, "event/resumed": True, "model": "tiny"}
    assert next(iter(row)) == "step"
    writer.close()


def test_what_is_not_finite_becomes_null(tmp_path):
    with RunWriter(tmp_path, None) as writer:
        writer.write(1, {"a": math.nan, "b": math.inf, "c": np.float32(np.nan), "d": np.float32(0.5), "e": np.int64(7)})
        writer.samples(1, [{"rewards": np.array([1.0, np.nan])}])
    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert json.loads(text) == {"step": 1, "a": None, "b": None, "c": None, "d": 0.5, "e": 7}
    assert lines(tmp_path / "samples.jsonl") == [{"step": 1, "rewards": [1.0, None]}]


def test_a_step_is_written_once(tmp_path):
    with RunWriter(tmp_path, None) as writer:
        writer.write(1, {})
        with pytest.raises(ValueError, match="step 1 is already written"):
            writer.write(1, {})
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_a_resumed_run_holds_each_step_once(tmp_path):
    write_steps(tmp_path, range(5))
    write_steps(tmp_path, range(3, 6), resumed_at=2)
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert [row["step"] for row in lines(tmp_path / "samples.jsonl")] == [n // 2 for n in range(12)]
    assert not list(tmp_path.glob("*.part"))


def test_minus_one_starts_over(tmp_path):
    write_steps(tmp_path, range(3))
    write_steps(tmp_path, range(2), resumed_at=-1)
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [0, 1]


@pytest.mark.parametrize("torn", ['{"step": 3, "lo', '{"step": 3', "{", '{"step": 3, "text": "\u00e4'])
def test_a_line_torn_by_a_kill_is_dropped(tmp_path, torn):
    write_steps(tmp_path, range(3))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(torn.encode()[:-1] if torn.endswith("\u00e4") else torn.encode())
    write_steps(tmp_path, [3], resumed_at=2)
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]


def test_a_whole_row_without_its_newline_is_kept(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}')
    write_steps(tmp_path, [2], resumed_at=1)
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [0, 1, 2]


def test_a_broken_line_inside_is_refused_and_the_file_left_alone(tmp_path):
    before = '{"step": 0}\nnot json\n{"step": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(before)
    with pytest.raises(InputError, match=r"metrics.jsonl: line 2 is not a JSON object") as refused:
        RunWriter(tmp_path, 0)
    assert "\n" not in str(refused.value)
    assert (tmp_path / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("size", [10, 40_000, 200_000])
def test_a_resumed_run_reads_no_more_than_what_it_cuts_off(tmp_path, size):
    """Earlier rows stay as they were written, whole or not: nobody looks."""
    samples = tmp_path / "samples.jsonl"
    rows = [json.dumps({"step": step, "text": "\u00e4" * size}, ensure_ascii=False) for step in (0, 0, 1, 2, 2, 2, 3)]
    samples.write_text("\n".join(["no row", *rows, rows[-1][:-4]]))
    before = samples.stat().st_ino
    RunWriter(tmp_path, 2).close()
    assert samples.read_text() == "\n".join(["no row", *rows[:-1]]) + "\n" and samples.stat().st_ino == before
    RunWriter(tmp_path, -1).close()
    assert samples.read_bytes() == b""


def test_a_new_run_does_not_write_into_an_old_one(tmp_path):
    write_steps(tmp_path, [0])
    with pytest.raises(InputError, match="already holds a run"):
        RunWriter(tmp_path, None)
    assert len(lines(tmp_path / "metrics.jsonl")) == 1


def test_no_file_has_no_rows(tmp_path):
    assert list(read_rows(tmp_path / "metrics.jsonl")) == []
