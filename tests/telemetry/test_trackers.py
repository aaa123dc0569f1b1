"""Trackers get what the files hold, are found by name, and never end a run."""

import dataclasses
import itertools
import json
import math
import os
import sqlite3
import subprocess
import sys

import pytest

from jaxrl_llm import train
from jaxrl_llm.config import LoadedConfig, Origin, Output, load_config
from jaxrl_llm.errors import InputError
from jaxrl_llm.sharding.distributed import ALONE
from jaxrl_llm.telemetry.records import SAMPLE_COLUMNS, RunWriter, choose_samples, import_extra, tracker_factories
from jaxrl_llm.trainer.launch import decide_start

FAKE = """
import json


class Noted:
    def __init__(self, run):
        self.path = run.directory / "noted.txt"
        self.note("open", dict(run.config), run.project, run.resumed_at, run.identity("noted"))

    def note(self, *words):
        with open(self.path, "a") as file:
            print(json.dumps(words), file=file)

    def write(self, step, values):
        self.note("write", step, values)
        values.clear()

    def samples(self, step, rows):
        self.note("samples", step, rows)

    def close(self):
        self.note("close")


class Failing(Noted):
    def write(self, step, values):
        super().write(step, values)
        if step == 1:
            raise ConnectionError("no route\\nto host")


class Tired(Noted):
    def close(self):
        raise OSError("disk full")


def offline(run):
    raise TimeoutError("nobody answers")


def lacking(run):
    return object()
"""


@pytest.fixture
def offered(tmp_path):
    """A package that offers trackers, as pip would have installed it."""
    number = offered.numbers.__next__()
    place, module = tmp_path / "site", f"noted_{number}"

    def install(package, names):
        about = place / f"{package}-1.0.dist-info"
        about.mkdir(parents=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {value.format(module)}" for name, value in names.items()]
        (about / "entry_points.txt").write_text("\n".join(["[jaxrl_llm.writers]", *lines, ""]))

    parts = ("Noted", "Failing", "Tired", "offline", "lacking")
    install("first", {part.lower(): f"{{}}:{part}" for part in parts} | {"broken": "{}:nothing", "twice": "{}:Noted"})
    install("second", {"twice": "{}:Failing", "wandb": "{}:Noted"})
    (place / f"{module}.py").write_text(FAKE)
    sys.path.insert(0, str(place))
    yield
    sys.path.remove(str(place))
    sys.modules.pop(module, None)


offered.numbers = itertools.count()


def noted(folder):
    return [json.loads(line) for line in (folder / "noted.txt").read_text().splitlines()]


def test_a_tracker_of_another_package_gets_what_the_files_get(tmp_path, offered):
    answer = {"kind": "evaluation", "prompt": "p", "completion": "c", "correct": True}
    with RunWriter(tmp_path / "run", None, ("noted:sums",), {"seed": 3}) as writer:
        writer.samples(0, [answer])
        writer.samples(1, [answer | {"kind": "training"}])
        writer.write(1, {"loss": 0.5, "kl": None, "bad": math.nan, "event/x": "told"})
    (_, config, project, resumed, name), sample, row, end = noted(tmp_path / "run")
    assert (config, project, resumed) == ({"seed": 3}, "sums", None)
    assert sample == ["samples", 0, [dict(zip(SAMPLE_COLUMNS, (0, "evaluation", "p", "c", 1.0), strict=True))]]
    assert row == ["write", 1, {"loss": 0.5, "event/x": "told"}] and end == ["close"]
    with RunWriter(tmp_path / "run", 0, ("noted",)) as writer:
        writer.write(1, {})
    assert noted(tmp_path / "run")[4] == ["open", {}, None, 0, name]


def test_a_tracker_that_fails_is_left_out_with_one_warning(tmp_path, offered):
    told = []
    with RunWriter(tmp_path, None, ("failing", "tired", "offline", "tensorboard"), warn=told.append) as writer:
        for step in range(4):
            writer.write(step, {"loss": step / 4})
    assert told == [
        "tracker offline failed and is left out: TimeoutError: nobody answers",
        "tracker failing failed in write and is left out: ConnectionError: no route to host",
        "tracker tired failed in close and is left out: OSError: disk full",
    ]
    steps = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2, 3] and curve(tmp_path / "tensorboard", "loss") == [(step, step / 4) for step in range(4)]
    assert [words[1] for words in noted(tmp_path) if words[0] == "write"] == [0, 0, 1, 1, 2, 3]


def test_what_is_no_writer_is_refused_where_a_run_begins_and_left_out_where_it_resumes(tmp_path, offered):
    with pytest.raises(InputError, match="tracker lacking made a object, which lacks write, samples or close"):
        RunWriter(tmp_path, None, ("noted", "lacking"))
    assert noted(tmp_path)[-1] == ["close"] and not (tmp_path / "metrics.jsonl").exists()
    told = []
    RunWriter(tmp_path, -1, ("lacking",), warn=told.append).close()
    assert len(told) == 1 and "which lacks write" in told[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("wandbb", "output.trackers 'wandbb' is unknown: did you mean wandb?"),
        ("mlflow", "unknown: there are broken, failing, lacking, noted, offline, tensorboard, tired, trackio, twice, "),
        ("twice", r"offered twice, by noted_\d+:Failing and noted_\d+:Noted: uninstall one of them"),
        ("broken", r"'broken' cannot be imported from noted_\d+:nothing \(.*nothing.*\); repair it or leave it out"),
    ],
)
def test_what_is_not_there_is_refused_in_one_line_before_a_file_is_touched(tmp_path, offered, name, words):
    with pytest.raises(InputError, match=words) as refused:
        RunWriter(tmp_path / "run", None, ("noted", name))
    assert "\n" not in str(refused.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("trackers", "words"),
    [
        ((3,), r"output.trackers is \(3,\): give a tuple of text"),
        (("wandb", "wandb:a"), "output.trackers has wandb twice: name it once"),
        (("wandb,trackio",), "'wandb,trackio': write NAME or NAME:PROJECT for each, apart by spaces"),
        (("wandb:",), "output.trackers has 'wandb:': write NAME"),
        (("",), "output.trackers has '': write NAME"),
        (("wandbb",), "output.trackers 'wandbb' is unknown"),
    ],
)
def test_a_run_with_wrong_trackers_makes_nothing(tmp_path, trackers, words):
    run = dataclasses.replace(load_config("smoke")[1], output=Output(run_dir=str(tmp_path / "run"), trackers=trackers))
    with pytest.raises(InputError, match=words):
        train(run)
    assert not list(tmp_path.iterdir())


def test_an_unknown_tracker_is_refused_before_the_directory_is_claimed(tmp_path):
    """There one process decides for all: later, the others would wait for the one that writes."""
    run = dataclasses.replace(
        load_config("smoke")[1], output=Output(run_dir=str(tmp_path / "run"), trackers=("wandbb",))
    )
    with pytest.raises(InputError, match="'wandbb' is unknown"):
        decide_start(ALONE, LoadedConfig("run", run, Origin(str(tmp_path))), False, None)


@pytest.mark.slow
def test_a_package_cannot_take_the_name_of_a_built_in_tracker(offered):
    assert tracker_factories(("wandb",))["wandb"].__module__ == "jaxrl_llm.telemetry.records"


TWICE = """
import sys
from pathlib import Path
from jaxrl_llm.telemetry.records import RunWriter
answer = {"kind": "evaluation", "prompt": "p", "completion": "c", "correct": True}
for resumed, steps in ((None, (0, 1)), (1, (2, 3))):
    with RunWriter(Path("run"), resumed, ("trackio:sums",), {"seed": 3}) as writer:
        for step in steps:
            writer.samples(step, [answer] if step == 0 else [])
            writer.write(step, {"loss": step / 4, "event/x": "told"})
"""


@pytest.mark.slow
def test_trackio_continues_its_run(tmp_path):
    """In a process of its own: trackio reads where its data lies when it is imported."""
    place = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    ran = subprocess.run(
        [sys.executable, "-c", TWICE], cwd=tmp_path, env=os.environ | place, capture_output=True, text=True, check=True
    )
    assert not ran.stdout and not ran.stderr
    with sqlite3.connect(tmp_path / "trackio/sums.db") as data:
        rows = data.execute("select run_name, step, metrics from metrics order by id").fetchall()
        ((config,),) = data.execute("select config from configs").fetchall()
    data.close()
    samples, *steps = [(step, json.loads(metrics)) for _, step, metrics in rows]
    assert steps == [(step, {"loss": step / 4, "event/x": "told"}) for step in range(4)]
    assert samples[0] == 0 and [row["completion"] for row in samples[1]["samples"]["_value"]] == ["c"]
    assert len({name for name, *_ in rows}) == 1 and rows[0][0].startswith("run-") and json.loads(config)["seed"] == 3


def test_curves_hold_what_the_rows_hold_and_hide_the_repeated_steps(tmp_path):
    for resumed, steps in ((None, range(4)), (2, range(3, 6))):
        with RunWriter(tmp_path, resumed, ("tensorboard",)) as writer:
            for step in steps:
                writer.write(step, {"loss": step / 4})
    assert curve(tmp_path / "tensorboard", "loss") == [(step, step / 4) for step in range(6)]


def curve(folder, tag):
    """Points of one tag over all event files, in the way TensorBoard reads them: a purge hides later steps."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    points = []
    for path in sorted(folder.glob("events*")):
        for record in records(path.read_bytes()):
            event = Event.FromString(record)
            if event.session_log.status == SessionLog.START:
                points = [point for point in points if point[0] < event.step]
            points += [(event.step, value.simple_value) for value in event.summary.value if value.tag == tag]
    return points


def records(data):
    """The records of a TFRecord file: length (8 bytes), its checksum (4), the record, its checksum (4)."""
    while data:
        size = int.from_bytes(data[:8], "little")
        yield data[12 : 12 + size]
        data = data[16 + size :]


def test_a_missing_extra_is_named_in_one_line():
    with pytest.raises(InputError, match=r"no_such_package is not installed: pip install 'jaxrl-llm\[wandb\]'"):
        import_extra("no_such_package", "wandb")


def test_a_package_that_lacks_another_says_which(tmp_path):
    (tmp_path / "half_there.py").write_text("import no_such_package")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(
        InputError, match=r"half_there cannot be imported \(.*no_such_package.*\): pip install"
    ) as refused:
        import_extra("half_there", "wandb")
    sys.path.remove(str(tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_what_wandb_refuses_is_said_in_one_line(tmp_path):
    with pytest.raises(InputError, match=r"wandb: Invalid project name 'a/b'.*WANDB_MODE=offline") as refused:
        RunWriter(tmp_path, None, ("wandb:a/b",))
    assert "\n" not in str(refused.value)


def test_a_table_of_completions_is_of_evaluations_and_bounded():
    trained = {"kind": "training", "prompt": "p" * 5000, "completion": "c", "reward": 0.5, "parts": {}}
    verified = {"kind": "evaluation", "prompt": "q", "completion": "d" * 1000, "correct": True}
    judged = verified | {"reward": math.nan}
    rows = [trained] * 40 + [verified] * 15 + [judged] * 40
    assert choose_samples(3, [trained]) == []
    shown = choose_samples(3, rows)
    assert all(tuple(line) == SAMPLE_COLUMNS for line in shown)
    found = [list(line.values()) for line in shown]
    assert found[:15] == [[3, "evaluation", "q", "d" * 1000, 1.0]] * 15
    assert found[15:] == [[3, "evaluation", "q", "d" * 1000, None]] + [[3, "training", f"{'p' * 999}…", "c", 0.5]] * 16
