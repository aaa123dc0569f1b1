"""The report holds what the run's files hold, as data and never as markup, and leaves out of long runs what it says."""

import base64
import gzip
import html.parser
import json
import math
import re
import time

import pytest
from commands import command

from jaxrl_llm.codec import flat
from jaxrl_llm.errors import InputError
from jaxrl_llm.telemetry.records import RunWriter
from jaxrl_llm.telemetry.report import (
    MOST_BYTES,
    MOST_COMPLETIONS,
    MOST_POINTS,
    Reporter,
    choose_lines,
    collect_curves,
    render_page,
    thin_curve,
    write_report,
)

NASTY = '</script><script>alert(1)</script><img src="x"> & [[data]] \\u2028 \u2028 日'
CONFIG = {
    "type": "a.b:Run",
    "model": "tiny",
    "task": {"source": {"size": 3}},
    "rewards": [{"weight": 1.0}],
    "ends": [1],
}


def sample(step, kind="training", **more):
    return {"step": step, "kind": kind, "prompt": "1 + 1 =", "completion": f"{step}", "reward": 1.0} | more


def a_run(directory, rows, samples=(), config=CONFIG, torn=""):
    directory.mkdir(parents=True, exist_ok=True)
    for name, lines in (("metrics.jsonl", rows), ("samples.jsonl", samples)):
        (directory / name).write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class Elements(html.parser.HTMLParser):
    """Every element's name and attributes, and the text of the data elements, as a browser would read them."""

    def __init__(self, text):
        super().__init__()
        self.found, self.data, self._open = [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.found.append((tag, attributes))
        self._open = attributes["id"] if attributes.get("type") == "application/octet-stream" else None

    def handle_endtag(self, tag):
        self._open = None

    def handle_data(self, data):
        if self._open is not None:
            self.data[self._open] = gzip.decompress(base64.b64decode(data)).decode()


def read(text):
    """What the page's scripts will read: the history, and the rows of each run's samples."""
    data = Elements(text).data
    rows = {name: [json.loads(line) for line in blob.splitlines()] for name, blob in data.items() if name != "history"}
    return json.loads(data["history"]), rows


def unpacked(run, name):
    gaps, values = run["curves"][name]
    steps = [sum(gaps[: place + 1]) for place in range(len(gaps))]
    return list(zip(steps, values, strict=True))


def test_the_page_holds_the_runs_rows_samples_and_settings(tmp_path):
    rows = [{"step": 0, "eval/x/pass@1": 0.25}]
    rows += [{"step": n, "loss": n / 7, "time/step_s": 2.0, "event/resumed": n == 2} for n in (1, 2, 3)]
    rows[3]["event/reward_failed"] = "a.py:3"
    samples = [sample(1, completion=NASTY), sample(3, "evaluation", correct=True)]
    data, found = read(render_page([a_run(tmp_path / "run", rows, samples)]))
    (run,) = data["runs"]
    assert unpacked(run, "loss") == [(1, 0.14286), (2, 0.28571), (3, 0.42857)]
    assert unpacked(run, "eval/x/pass@1") == [(0, 0.25)]
    assert run["clock"] == [[0, 1, 1, 1], [0, 2, 4, 6]]
    assert run["means"]["time/step_s"] == [2.0, 3]
    assert run["events"] == [[2, "resumed", ""], [3, "reward failed", "a.py:3"]]
    assert found["samples-0"] == samples and run["samples"] == [2, 2]
    assert run["config"] == {
        "type": "a.b:Run", "model": "tiny", "task.source.size": 3, "rewards.0.weight": 1.0, "ends": [1]
    }  # fmt: skip


def test_nothing_of_a_run_becomes_markup(tmp_path):
    run = a_run(tmp_path / 'a<b>"&run', [{"step": 1, NASTY: 1.0, "event/<i>": NASTY}], [sample(1, completion=NASTY)])
    text = render_page([run])
    elements = Elements(text)
    assert text.count("alert(1)") == 0 and "[[" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    kinds = [attributes.get("type") for tag, attributes in elements.found if tag == "script"]
    assert kinds == ["application/octet-stream"] * 2 + [None]
    assert "<title>a&lt;b&gt;&quot;&amp;run" in text
    assert json.loads(elements.data["samples-0"])["completion"] == NASTY


def test_the_page_asks_nobody_for_anything(tmp_path):
    text = render_page([a_run(tmp_path / "run", [{"step": 1, "loss": 1.0}])])
    elements = Elements(text).found
    assert not [one for one in elements if {"src", "action"} & set(one[1])]
    assert [attributes["href"] for tag, attributes in elements if tag == "link"] == ["data:,"]
    assert "default-src 'none'" in text and "connect-src" not in text
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\(", text)
    assert "Permission is hereby granted" in text, "the licence of what is in it"


def test_what_was_not_measured_is_no_point():
    rows = [
        {"step": 1, "kl": None, "a": math.nan, "b": math.inf, "c": True, "d": "text", "e": 3},
        {"step": 2, "a": 0.5},
    ]
    assert collect_curves(rows) == {"e": ([1], [3]), "a": ([2], [0.5])}


def test_numbers_that_no_json_holds_are_null(tmp_path):
    rows = [{"step": n, "reward/mean": 1.5e308, "reward/std": math.nan} for n in (1, 2)]
    run = read(render_page([a_run(tmp_path / "run", rows, config={"high": math.inf, "on_error": math.nan})]))[0][
        "runs"
    ][0]
    assert run["config"] == {"high": None, "on_error": None}
    assert run["means"] == {"reward/mean": [None, 2]} and unpacked(run, "reward/mean")[0] == (1, 1.5e308)


def test_seconds_that_were_not_measured_are_none_of_the_work(tmp_path):
    odd = '{"step": 2, "time/step_s": NaN}\n{"step": 3, "time/step_s": "3"}\n{"step": 4, "time/step_s": 1, "x": null}\n'
    run = a_run(tmp_path / "run", [{"step": 1, "time/step_s": 2.0, "time/evaluation_s": 0.5}])
    (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text() + odd)
    assert read(render_page([run]))[0]["runs"][0]["clock"] == [[1, 1, 1, 1], [2.5, 2.5, 2.5, 3.5]]


def test_torn_last_lines_are_passed_over(tmp_path):
    run = a_run(tmp_path / "run", [{"step": 1, "loss": 1.0}], [sample(1)], torn='{"step": 2, "kind": "training", "pro')
    data, found = read(render_page([run]))
    assert data["runs"][0]["last"] == 1 and found["samples-0"] == [sample(1)]


def test_a_broken_line_inside_is_named(tmp_path):
    run = a_run(tmp_path / "run", [{"step": 1}], torn="no json\n")
    with pytest.raises(InputError, match=r"metrics.jsonl: line 2 is not a JSON object"):
        render_page([run])
    a_run(run, [{"step": 1}])
    (run / "samples.jsonl").write_text('{"kind": "training"}\n')
    with pytest.raises(InputError, match=r"samples.jsonl: line 1 is not a sample"):
        render_page([run])


@pytest.mark.slow
def test_several_runs_share_a_page_and_its_room(tmp_path):
    steps = range(3000)
    names = [f"metric {number}" for number in range(40)]
    rows = [{"step": step, **{name: math.sin(step * len(name)) for name in names}} for step in steps]
    runs = [a_run(tmp_path / name, rows, [sample(n, completion=name) for n in range(20)]) for name in ("a", "b", "c")]
    text = render_page(runs)
    data, found = read(text)
    assert [run["name"] for run in data["runs"]] == ["a", "b", "c"]
    assert {row["completion"] for row in found["samples-2"]} == {"c"}
    points = MOST_POINTS // (3 * (len(names) + 1))  # a clock beside the metrics
    assert [run["thinned"] for run in data["runs"]] == [[points, 3000]] * 3
    assert len(text) < 1_000_000


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    runs = [a_run(tmp_path / name / "run", [{"step": 1, "loss": 1.0}]) for name in ("a", "b")]
    assert [run["name"] for run in read(render_page(runs))[0]["runs"]] == [str(run) for run in runs]


def test_a_thinned_curve_keeps_its_ends_and_its_extremes():
    steps = list(range(10, 10_010))
    values = [math.sin(step) for step in steps]
    values[4321], values[8765] = 7.0, -9.0
    kept, shown = thin_curve(steps, values, 500)
    assert len(kept) <= 502 and kept == sorted(set(kept))
    assert {10, 4331, 8775, 10_009} <= set(kept) and max(shown) == 7.0 and min(shown) == -9.0
    assert all(values[step - 10] == value for step, value in zip(kept, shown, strict=True))
    assert thin_curve(steps, values, 10_000) == (steps, values)
    assert len(thin_curve(steps[:1000], values[:1000], 100)[0]) <= 100


@pytest.mark.slow
def test_of_many_completions_whole_steps_are_kept_the_first_and_the_last_among_them(tmp_path):
    path = tmp_path / "samples.jsonl"
    count = MOST_COMPLETIONS // 8 + 500
    lines = [sample(step, member=n) for step in range(1, count + 1) for n in range(8)]
    lines += [sample(step, "evaluation") for step in (0, count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    chosen, count_there = choose_lines(path)
    rows = [json.loads(line) for line in chosen]
    assert count_there == len(lines) and MOST_COMPLETIONS // 2 < len(rows) <= MOST_COMPLETIONS
    assert [row["step"] for row in rows if row["kind"] == "evaluation"] == [0, count]
    training = [row for row in rows if row["kind"] == "training"]
    assert {training[0]["step"], training[-1]["step"]} == {1, count}
    assert [row["member"] for row in training] == [*range(8)] * (len(training) // 8)
    assert len(choose_lines(path, runs=4)[0]) <= MOST_COMPLETIONS // 4
    assert choose_lines(tmp_path / "none.jsonl") == ([], 0) == choose_lines(tmp_path)


def test_runs_share_the_bytes_of_a_page(tmp_path):
    path = tmp_path / "samples.jsonl"
    line = json.dumps(sample(1, completion="x" * (MOST_BYTES // 20))).encode() + b"\n"
    path.write_bytes(b"".join(line.replace(b'"step": 1', b'"step": %d' % step) for step in range(1, 26)))
    steps = [[json.loads(line)["step"] for line in choose_lines(path, runs)[0]] for runs in (1, 2)]
    assert steps == [[*range(1, 26, 2)], [*range(1, 26, 4)]] and choose_lines(path)[1] == 25


def test_a_run_whose_files_cannot_be_read_is_named(tmp_path):
    run = a_run(tmp_path / "run", [{"step": 1, "loss": 1.0}])
    (run / "samples.jsonl").unlink()
    (run / "samples.jsonl").symlink_to("/proc/self/mem")  # opens, and cannot be read
    with pytest.raises(InputError, match=r"a file of .*run cannot be read: .*Input/output error"):
        write_report([run], tmp_path / "report.html")


def test_settings_have_dotted_names():
    assert flat({"a": {"b": [{"c": 1}, {"c": 2}]}, "d": [1, 2], "e": None}, whole_lists=True) == {
        "a.b.0.c": 1, "a.b.1.c": 2, "d": [1, 2], "e": None
    }  # fmt: skip


def test_a_run_writes_its_report_at_evaluations_and_at_its_end(tmp_path):
    report = tmp_path / "report.html"
    with RunWriter(tmp_path, None) as writer:
        writer.write(0, {"eval/x/pass@1": 0.5})
        writer.report()
        while not report.exists():
            time.sleep(0.01)
        assert read(report.read_text())[0]["runs"][0]["last"] == 0
        writer.write(1, {"loss": 1.0})
    assert read(report.read_text())[0]["runs"][0]["last"] == 1
    assert not list(tmp_path.glob("*.part"))


def test_no_run_ends_for_its_report(tmp_path, caplog):
    (tmp_path / "report.html").mkdir()
    with RunWriter(tmp_path, None) as writer:
        writer.write(0, {"loss": 0.5})
        writer.report()
        writer.write(1, {"loss": 0.5})
    assert (tmp_path / "report.html").is_dir() and not list(tmp_path.glob("*.part"))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and all(line.startswith("report.html was not written: ") for line in said)


def test_a_run_that_is_quit_does_not_wait_for_its_report(tmp_path):
    with pytest.raises(KeyboardInterrupt), RunWriter(tmp_path, None) as writer:
        writer.write(0, {"loss": 0.5})
        writer.report()
        raise KeyboardInterrupt
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "samples.jsonl"}


def test_the_report_takes_its_share_of_a_runs_time_alone(tmp_path):
    a_run(tmp_path, [{"step": 0, "loss": 0.5}])
    reporter = Reporter(tmp_path)
    reporter.begin(0)
    reporter.wait()
    first = (tmp_path / "report.html").stat().st_mtime_ns
    reporter.begin(1)
    reporter.wait()
    assert (tmp_path / "report.html").stat().st_mtime_ns == first
    reporter.finish(1)
    assert (tmp_path / "report.html").stat().st_mtime_ns > first


def test_a_report_that_holds_all_is_not_written_again(tmp_path):
    a_run(tmp_path, [{"step": 0, "loss": 0.5}])
    reporter = Reporter(tmp_path)
    reporter.begin(0)
    reporter.wait()
    (tmp_path / "report.html").unlink()
    reporter.finish(0)
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_failed_is_tried_again_at_the_end(tmp_path):
    a_run(tmp_path, [{"step": 0, "loss": 0.5}])
    (tmp_path / "report.html").mkdir()
    reporter = Reporter(tmp_path)
    reporter.begin(0)
    reporter.wait()
    (tmp_path / "report.html").rmdir()
    reporter.finish(0)
    assert (tmp_path / "report.html").is_file()


def test_the_command_writes_a_page_into_the_run_or_where_it_is_told_to(tmp_path):
    a_run(tmp_path / "runs/a", [{"step": 1, "loss": 1.0}])
    a_run(tmp_path / "runs/b", [{"step": 1, "loss": 2.0}])
    done = command("report", "runs/a", folder=tmp_path)
    assert (done.code, done.err) == (0, "") and done.out == "runs/a/report.html is written: open it in a browser\n"
    assert command("report", "runs/a", "runs/b", "--out", "both.html", folder=tmp_path).code == 0
    assert len(read((tmp_path / "both.html").read_text())[0]["runs"]) == 2
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "report needs a run: jaxrl-llm report runs/quickstart"),
        ("nowhere", "nowhere is not a run: give the folder that holds its metrics.jsonl"),
        ("empty", "empty is not a run: give a folder with metrics.jsonl"),
        ("begun", "begun is not a run: it has no metrics.jsonl yet: wait for its first step"),
        ("a --out none/x.html", "--out none/x.html: there is no folder none; make it first"),
        ("a --out empty", "--out empty is a folder: give a file in it"),
        ("a --out", "--out needs a value"),
        ("a --otu x.html", "report does not know --otu: jaxrl-llm report RUN [RUN ...] [--out FILE]"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(tmp_path, arguments, said):
    a_run(tmp_path / "a", [{"step": 1, "loss": 1.0}])
    (tmp_path / "empty").mkdir()
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/config.json").write_text("{}")
    answer = command("report", *arguments.split(), folder=tmp_path)
    assert answer.code == 2 and answer.out == "" and answer.err.count("\n") == 1
    assert answer.err.startswith(f"jaxrl-llm: {said}")
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.slow
def test_help_and_a_report_need_no_jax(tmp_path):
    run = a_run(tmp_path / "a", [{"step": 1, "loss": 1.0}])
    check = "import atexit, sys; atexit.register(lambda: print(*{'jax', 'transformers'} & set(sys.modules)))"
    told = command("report", "--help", folder=tmp_path, before=check, anew=True)
    assert told.code == 0 and told.out.startswith("usage: jaxrl-llm report")
    assert told.out.endswith("end.\n\n")
    answer = command("report", "a", folder=tmp_path, before=check, anew=True)
    assert answer.code == 0 and answer.out.splitlines()[1:] == [""]
    write_report([run], tmp_path / "again.html")
    assert (tmp_path / "again.html").stat().st_size < 300_000
