"""Rows become problems; a row that cannot be used is named."""

import datetime
import decimal
import json
import os
import subprocess
import sys
import zoneinfo
from pathlib import Path

import pandas
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm import codec
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.functions import is_chat, row_columns
from jaxrl_llm.tasks import ReasoningGym, Rows, Table, Task, generate_ahead, load
from jaxrl_llm.tasks.gym import CACHE

FIXTURES = Path(__file__).parent.parent / "fixtures" / "tasks"


def test_jsonl_takes_text_chats_and_numbers():
    problems = list(Table(str(FIXTURES / "sums.jsonl")).problems())
    assert [problem.answer for problem in problems] == ["2", "4", "1,001", "0.5"]
    assert problems[0].prompt == ({"role": "user", "content": "What is 1 + 1?"},)
    assert [message["role"] for message in problems[1].prompt] == ["system", "user"]
    assert problems[0].metadata["level"] == 1 and [is_chat(problem) for problem in problems] == [
        False,
        True,
        False,
        False,
    ]
    assert [problem.metadata["answer"] for problem in problems] == [2, "4", "1,001", 0.5]
    assert problems[2].metadata["row"].endswith("sums.jsonl:4")
    assert {problem.task for problem in problems} == {"sums"}


def test_parquet_gives_what_jsonl_gives(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 1?"}], "answer": str(n + 1)} for n in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    from_parquet, from_jsonl = (list(Table(str(tmp_path / name)).problems()) for name in ("rows.parquet", "rows.jsonl"))
    assert len(from_parquet) == 5
    for ours, theirs in zip(from_parquet, from_jsonl, strict=True):
        assert (ours.id, ours.prompt, ours.answer) == (theirs.id, theirs.prompt, theirs.answer)
    assert all(is_chat(problem) and row_columns(problem).keys() == {"answer", "row"} for problem in from_parquet)
    assert from_parquet[4].metadata["row"].endswith("rows.parquet:5")


def test_csv_and_json_give_what_jsonl_gives(tmp_path):
    rows = [{"prompt": f'What is "{n}", + 1?\nIn words.', "answer": str(n + 1)} for n in range(3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "rows.csv").write_bytes(pandas.DataFrame(rows).to_csv(index=False).encode("utf-8-sig"))
    found = {name: list(Table(str(tmp_path / f"rows.{name}")).problems()) for name in ("jsonl", "json", "csv")}
    for ours in (found["json"], found["csv"]):
        assert [(one.id, one.prompt, one.answer) for one in ours] == [
            (one.id, one.prompt, one.answer) for one in found["jsonl"]
        ]
    assert found["json"][2].metadata["row"].endswith("rows.json:3")
    assert found["csv"][2].metadata["row"].endswith("rows.csv:6"), "its first line"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b'{"prompt": "a"}\n{"prompt": "b"}', "a.json is not JSON .*one object a line is a .jsonl file"),
        ("a.json", b'{"rows": []}', "a.json holds a dict; write a list of objects"),
        ("a.json", b'[{"prompt": "a", "answer": 1}, 3]', "a.json:2 is a int; a row is an object"),
        ("a.csv", b"", "a.csv:1 must name the columns"),
        ("a.csv", b"prompt,prompt\n1,2\n", "a.csv:1 must name the columns, each once"),
        ("a.csv", b"prompt;answer\na;1\n", "a.csv:2 has no prompt in field 'prompt'"),
        ("a.csv", b"prompt,answer\na,b,1\n", "a.csv:2 has 3 cells, and the first line names 2"),
        ("a.csv", b'prompt,answer\n"a"b,1\n', "a.csv:2 is not CSV"),
        ("a.csv", b"prompt,answer\n\xff,1\n", "a.csv has text that is not UTF-8"),
    ],
)
def test_csv_and_json_that_cannot_be_read_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(Table(str(tmp_path / name)).problems())


def test_parquet_keeps_its_types_and_a_checkpoint_can_hold_them(tmp_path):
    zone = zoneinfo.ZoneInfo("Europe/Berlin")
    row = {
        "prompt": "a", "answer": decimal.Decimal("1.50"), "price": decimal.Decimal("0.10"), "raw": b"\x00",
        "day": datetime.date(2025, 7, 1), "when": datetime.datetime(2025, 7, 1, 12, tzinfo=zone),
        "scores": [float("nan"), float("inf")],
        "nested": {"days": [datetime.date(2025, 1, 1)], "took": datetime.timedelta(seconds=3)},
    }  # fmt: skip
    columns = pyarrow.Table.from_pylist([row])
    row["nanoseconds"] = pandas.Timestamp("2025-07-01T12:00:00.000000001")
    columns = columns.append_column("nanoseconds", pyarrow.array([row["nanoseconds"]], pyarrow.timestamp("ns")))
    pyarrow.parquet.write_table(columns, tmp_path / "rows.parquet")
    (problem,) = load(Task(Table(str(tmp_path / "rows.parquet")))).train
    assert problem.answer == "1.50" and problem.metadata["price"] == row["price"]
    for name in row.keys() - {"prompt", "answer"}:
        assert repr(problem.metadata[name]) == repr(row[name])
    again = codec.from_json(json.loads(json.dumps(codec.to_json(problem.metadata))))
    assert repr(again) == repr(problem.metadata)


def test_rows_are_read_with_where_they_stand(tmp_path):
    rows = [{"text": "a"}, {"text": "b", "n": 1}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = list(Table(str(tmp_path / "rows.jsonl")).read())
    assert found == [(f"{tmp_path}/rows.jsonl:1", rows[0]), (f"{tmp_path}/rows.jsonl:2", rows[1])]
    assert list(Rows(rows).read()) == [("rows[0]", rows[0]), ("rows[1]", rows[1])]
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{')
    with pytest.raises(InputError, match=r"rows.jsonl:2 is not JSON"):
        list(Table(str(tmp_path / "rows.jsonl")).read())


def test_a_dot_reaches_into_records_and_the_reference_is_cut_out():
    table = Table(str(FIXTURES / "solutions.jsonl"), "question", "solution.text", answer_extractor="last_number")
    assert [problem.answer for problem in table.problems()] == ["6", "7"]


GOOD = '{"prompt": "a", "answer": "b"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"}', r"rows.jsonl:2 has no answer in field 'answer' \(it has prompt\)"),
        ('{"prompt": "a", "answer": null}', "rows.jsonl:2 has no answer"),
        ('{"prompt": "a", "answer": ""}', "rows.jsonl:2 has no answer"),
        ('{"answer": "b"}', "rows.jsonl:2 has no prompt"),
        ('{"prompt": [], "answer": "b"}', "rows.jsonl:2 has no prompt"),
        ('{"prompt": "a", "answer": ["b"]}', "rows.jsonl:2: the answer is a list"),
        ('{"prompt": 3, "answer": "b"}', "rows.jsonl:2: the prompt is neither text nor chat messages"),
        ('{"prompt": [{"role": "user"}], "answer": "b"}', "rows.jsonl:2: the prompt holds an item that is not a chat"),
        ('{"prompt": [{"role": "system", "content": "a"}], "answer": "b"}', "rows.jsonl:2: the prompt has no message"),
        ('{"prompt": "a"', "rows.jsonl:2 is not JSON"),
        (
            r'{"prompt": "a \ud800", "answer": "b"}',
            r"rows.jsonl:2: field 'prompt' holds '\\ud800', half of a surrogate pair",
        ),
        (r'{"prompt": "a", "answer": "b", "seen": [{"\ude00": 1}]}', r"rows.jsonl:2: field 'seen' holds '\\ude00'"),
        ('"prompt"', "rows.jsonl:2 is a str; a row is an object"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(tmp_path, line, message):
    (tmp_path / "rows.jsonl").write_text(f"{GOOD}\n{line}\n{GOOD}\n")
    with pytest.raises(InputError, match=message) as caught:
        list(Table(str(tmp_path / "rows.jsonl")).problems())
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_named_with_their_file(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match=r"rows.jsonl:2 is not JSON"):
        list(Table(str(tmp_path / "rows.jsonl")).problems())
    broken = pyarrow.array([b"a", b"\xff"], pyarrow.binary()).buffers()
    column = pyarrow.Array.from_buffers(pyarrow.string(), 2, broken)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": column}), tmp_path / "rows.parquet")
    with pytest.raises(InputError, match=r"rows.parquet has text that is not UTF-8"):
        list(Table(str(tmp_path / "rows.parquet"), answer_field=None).problems())


def test_a_reference_that_cannot_be_cut_out_is_named(tmp_path):
    (tmp_path / "rows.jsonl").write_text(GOOD)
    with pytest.raises(InputError, match=r"rows.jsonl:1: last_number finds no answer in field 'answer'"):
        list(Table(str(tmp_path / "rows.jsonl"), answer_extractor="last_number").problems())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.tsv", b"", r"suffix '.tsv'; tables are .jsonl, .json, .csv or .parquet"),
        ("missing.jsonl", None, "missing.jsonl not found"),
        ("rows.parquet", b"no parquet", "rows.parquet is not a Parquet file"),
    ],
)
def test_a_bad_file_is_refused(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        list(Table(str(tmp_path / name)).problems())


@pytest.mark.slow
def test_options_that_only_a_problem_shows_to_be_wrong_are_refused():
    source = ReasoningGym("spell_backward", {"min_word_len": 60, "max_word_len": 70}, size=2)
    with pytest.raises(InputError, match=r"spell_backward fails at problem 0 of size 2, .*IndexError.*; change them"):
        list(source.problems())


@pytest.mark.slow
def test_reasoning_gym_repeats_itself_by_seed():
    found = []
    for seed in (1, 1, 2):
        CACHE.clear()
        found.append([problem.id for problem in ReasoningGym("chain_sum", size=20, seed=seed).problems()])
    first, again, other = found
    assert first == again != other


def generating():
    """Processes of this one that generate problems."""
    command = ["pgrep", "-P", str(os.getpid()), "-f", "jaxrl_llm.tasks.gym"]
    return set(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split())


@pytest.mark.slow
def test_what_is_begun_is_generated_once_and_does_not_outlive_its_block():
    CACHE.clear()
    source, other = ReasoningGym("chain_sum", size=20, seed=3), ReasoningGym("chain_sum", size=20, seed=4)
    with generate_ahead([source, other]):
        children = generating()
        assert len(children) == 2
        first = list(source.problems())
        assert generating() <= children, "another process generated them"
    assert not children & generating(), "nobody asked for the other's"
    with generate_ahead([source]):
        assert not generating(), "they are known"
        assert list(source.problems()) == first
    refused = ReasoningGym("chain_sums")
    with generate_ahead([refused]), pytest.raises(InputError, match="no data set 'chain_sums'"):
        list(refused.problems())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ransom_note", "list_functions"])
def test_reasoning_gym_repeats_what_hangs_on_hashes_or_on_global_random_numbers(name):
    # ransom_note walks through sets of strings; list_functions draws from the random module
    program = (
        f"from jaxrl_llm.tasks import ReasoningGym;"
        f"print(*[problem.id for problem in ReasoningGym({name!r}, size=20).problems()])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1


@pytest.mark.slow
def test_reasoning_gym_entries_are_of_pythons_own_types():
    # knights_knaves draws its names as NumPy strings, and its statements are nested tuples
    for problem in ReasoningGym("knights_knaves", size=3).problems():
        entry = problem.metadata["entry"]["metadata"]
        assert {type(name) for name in entry["names"]} == {str} and isinstance(entry["statements"], tuple)


def test_reasoning_gym_passes_its_options_on():
    options = {"min_terms": 5, "max_terms": 5}
    for problem in ReasoningGym("chain_sum", options, size=5).problems():
        assert problem.metadata["entry"]["metadata"]["num_terms"] == 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (ReasoningGym("chain_sums"), "no data set 'chain_sums'; did you mean chain_sum"),
        (ReasoningGym("chain_sum", {"max_term": 2}), "chain_sum has no option 'max_term'; did you mean max_terms"),
        (ReasoningGym("chain_sum", {"max_terms": 0}), "chain_sum refuses .*max_terms must be >= min_terms"),
        (ReasoningGym("chain_sum", {"max_terms": "two"}), "chain_sum refuses"),
        (ReasoningGym("chain_sum", {"size": 5}), "set the source's field size"),
        (ReasoningGym("chain_sum", size=0), "size must be positive"),
    ],
)
def test_reasoning_gym_refuses_in_one_line(source, message):
    with pytest.raises(InputError, match=message) as caught:
        list(source.problems())
    assert "\n" not in str(caught.value)


OFFLINE = """
from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.functions import is_chat, row_columns
from jaxrl_llm.tasks import HubDataset
import sys
local = HubDataset(sys.argv[1], split="train", answer_field="solution.text", answer_extractor="last_number")
print([problem.answer for problem in local.problems()])
print([where.rpartition(":")[2] for where, row in local.read() if "solution" in row])
for broken in (HubDataset("nobody/nothing"), HubDataset(sys.argv[1], split="trian")):
    try:
        print(list(broken.problems()))
    except InputError as error:
        print("refused:", error)
"""


@pytest.mark.slow
def test_a_hub_dataset_is_read_or_refused_in_one_line(tmp_path):
    folder = tmp_path / "gsm"
    folder.mkdir()
    (folder / "train.jsonl").write_bytes((FIXTURES / "solutions.jsonl").read_bytes())
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-c", OFFLINE, str(folder)]
    out = subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert out[0] == "['6', '7']"
    assert out[1] == "['0', '1']"
    assert out[2].startswith("refused: data set nobody/nothing (subset None, split train) cannot be loaded")
    assert out[3].startswith("refused: data set") and "trian" in out[3]
    assert len(out) == 4
