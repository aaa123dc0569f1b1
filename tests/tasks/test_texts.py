"""Rows to learn, of every format and source: what they become, what is held out, what has changed, what is refused."""

import dataclasses
import decimal
import functools
import json

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.config import dated
from jaxrl_llm.data import Pairs, Steps, Texts, load_texts, longest
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.pretrained import tiny_tokenizer
from jaxrl_llm.tasks import HubDataset, ReasoningGym, Table, Task, difference, fingerprint, load

TINY = tiny_tokenizer()
STOP = (TINY.eos_token_id,)
ASK = {"role": "user", "content": "q"}
A, B, C = ({"role": "assistant", "content": text} for text in "abc")


def loaded(data):
    return load_texts(data, TINY, STOP)


def plain(row):
    """A row as values that compare, without where it stands."""
    return json.dumps(dataclasses.asdict(row) | {"where": ""}, default=np.ndarray.tolist)


def answers(row):
    return [TINY.decode(tokens, skip_special_tokens=True) for tokens in row.completions]


TABLES = [
    (Texts, [{"prompt": f"{n}?", "completion": f"{n}!"} for n in range(3)]),
    (Texts, [{"messages": [ASK, {"role": "assistant", "content": f"{n}"}]} for n in range(3)]),
    (Texts, [{"text": f"{n} and {n}"} for n in range(3)]),
    (Pairs, [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no", "margin": n / 2} for n in range(3)]),
    (Pairs, [{"chosen": [ASK, A], "rejected": [ASK, {"role": "assistant", "content": f"{n}"}]} for n in range(3)]),
    (Pairs, [{"prompt": f"{n}?", "completions": ["a", "b", "c"]} for n in range(3)]),
    (Steps, [{"prompt": f"{n}?", "completions": ["a", "b"], "labels": [True, False]} for n in range(3)]),
]


@pytest.mark.parametrize(("kind", "rows"), TABLES)
def test_every_source_gives_the_same_rows_and_says_where_they_stand(tmp_path, kind, rows):
    lines, columns = tmp_path / "rows.jsonl", tmp_path / "rows.parquet"
    lines.write_text("\n\n".join(json.dumps(row) for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), columns)
    found = [
        loaded(kind(source))
        for source in (rows, Table(str(lines)), Table(str(columns)), datasets.Dataset.from_list(rows))
    ]
    assert len(found[0].train) == 3 and found[0].notes == ()
    for other in found[1:]:
        assert [plain(row) for row in other.train] == [plain(row) for row in found[0].train]
    assert [row.where for row in found[0].train] == ["rows[0]", "rows[1]", "rows[2]"]
    assert [row.where for row in found[1].train] == [f"{lines}:1", f"{lines}:3", f"{lines}:5"]
    assert [row.where for row in found[2].train] == [f"{columns}:1", f"{columns}:2", f"{columns}:3"]


def test_columns_of_other_rows_that_hold_nothing_are_not_there():
    # a table of several formats has every column in each row
    rows = [{"text": "t"}, {"prompt": "q", "completion": "a"}, {"messages": [ASK, A]}]
    every = [dict.fromkeys(("text", "prompt", "completion", "messages", "id")) | row for row in rows]
    assert [plain(row) for row in loaded(Texts(every)).train] == [plain(row) for row in loaded(Texts(rows)).train]
    assert len(loaded(Texts([{**rows[0], **rows[1]}])).train[0].prompt) > 1


@pytest.mark.parametrize("row", [
    {"prompt": "q", "chosen": "a", "rejected": "b"},
    {"prompt": [ASK], "chosen": [A], "rejected": [B]},
    {"prompt": "q", "chosen": [A], "rejected": "b", "margin": None},
    {"prompt": "q", "chosen": [ASK, A], "rejected": [ASK, B], "margin": 0},
    {"chosen": [ASK, A], "rejected": [ASK, B]},
    {"prompt": "q", "completions": ["a", "b"]},
    {"prompt": [ASK], "completions": [[A], [B]]},
])  # fmt: skip
def test_a_preference_is_the_same_in_each_format(row):
    (found,) = loaded(Pairs([row])).train
    (usual,) = loaded(Texts([{"prompt": "q", "completion": "a"}])).train
    assert answers(found) == ["a", "b"] and found.margin == 0.0
    assert all(tokens.dtype == "int32" and tokens[-1] == STOP[0] for tokens in found.completions)
    assert found.prompt.tolist() == usual.prompt.tolist() and found.completions[0].tolist() == usual.tokens.tolist()
    assert found.id == usual.id


def test_chats_share_their_prompt_up_to_the_last_message():
    chat = [ASK, A, {"role": "user", "content": "r"}]
    (found,) = loaded(Pairs([{"chosen": [*chat, B], "rejected": [*chat, C], "margin": 2}])).train
    (usual,) = loaded(Pairs([{"prompt": chat, "chosen": "b", "rejected": "c", "margin": 2.0}])).train
    assert plain(found) == plain(usual) and found.margin == 2.0 and answers(found) == ["b", "c"]


def test_no_end_is_learned_of_an_answer_that_was_cut_off():
    row = {"prompt": "q", "chosen": "a", "rejected": "b c"}
    (whole,) = loaded(Pairs([row], template="plain")).train
    (cut,) = loaded(Pairs([row | {"rejected_cut_off": True}], template="plain")).train
    assert [*cut.completions[1], *STOP] == list(whole.completions[1])
    assert list(cut.completions[0]) == list(whole.completions[0])


def test_rankings_keep_their_order():
    (found,) = loaded(Pairs([{"prompt": "q", "completions": ["c", "a", "bb"]}])).train
    assert answers(found) == ["c", "a", "bb"] and found.length == len(found.prompt) + 3


def test_whole_rows_that_are_equal_are_merged():
    rows = [{"prompt": "q", "completion": "a"}, {"messages": [ASK, A]}, {"prompt": "q", "completion": "b"}]
    found = loaded(Texts(rows))
    assert [row.where for row in found.train] == ["rows[0]", "rows[2]"]
    assert found.notes == ("1 duplicates of a row merged, 2 distinct rows left",)


def test_what_is_held_out_is_what_a_task_holds_out_and_no_prompt_is_on_both_sides():
    prompts = [f"What is {n}?" for n in range(40)]
    rows = [{"prompt": prompt, "completion": f"{n}"} for n in range(3) for prompt in prompts]
    found = loaded(Texts(rows, holdout=0.2))
    task = load(Task([{"prompt": prompt} for prompt in prompts], verifier="none", holdout=0.2))
    assert len(found.train) == 96 and len(found.held_out) == 24
    assert [row.id for row in found.held_out[::3]] == [problem.id for problem in task.held_out]
    assert {row.id for row in found.train} == {problem.id for problem in task.train}
    assert [row.where for row in found.train] == sorted((row.where for row in found.train), key=lambda w: int(w[5:-1]))
    reworded = loaded(Texts(rows[::-1], holdout=0.2, system="Be brief.", suffix="!", template="chatml"))
    assert {row.id for row in reworded.held_out} == {row.id for row in found.held_out}
    with pytest.raises(InputError, match="rows has no row left to train on: 1 from the source, 1 held out"):
        loaded(Texts(rows[:1], holdout=0.5))


TALK = [ASK, A, {"role": "user", "content": "r"}, B]
BEGAN = {
    Texts: [{"prompt": "q", "completion": "a"}, {"messages": TALK}],
    Pairs: [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "r", "completions": ["a", "b", "c"]}],
    Steps: [
        {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0.5]},
        {"prompt": "r", "completions": ["a"], "labels": [1]},
    ],
}  # fmt: skip
EDITED = "the prompts are the same, but answers or other fields have changed"


@pytest.mark.parametrize(("kind", "first", "change"), [
    (Texts, {}, ""),
    (Texts, {"completion": "b"}, EDITED),
    (Texts, {"prompt": "s"}, "there are 2 as before, but prompts have changed"),
    (Texts, {"other": "column"}, ""),
    (Pairs, {"rejected": "c"}, EDITED), (Pairs, {"margin": 1}, EDITED), (Pairs, {"margin": 0}, ""),
    (Pairs, {"chosen": "b", "rejected": "a"}, EDITED),
    (Steps, {"labels": [1, 0.25]}, EDITED), (Steps, {"completions": ["a", "c"]}, EDITED),
    (Steps, {"labels": [True, 0.5]}, ""),
])  # fmt: skip
def test_what_has_changed_of_the_rows_is_said(tmp_path, kind, first, change):
    before = json.loads(json.dumps(fingerprint(loaded(kind(BEGAN[kind])).train)))
    now = [{**BEGAN[kind][0], **first}, BEGAN[kind][1]]
    moved = tmp_path / "rows.jsonl"
    moved.write_text("\n".join(json.dumps(row) for row in now))
    assert difference(before, fingerprint(loaded(kind(Table(str(moved)))).train)) == change
    assert difference(before, fingerprint(loaded(kind(BEGAN[kind][:1])).train)) == "there were 2 and there are 1"
    turned = fingerprint(loaded(kind(BEGAN[kind][::-1])).train)
    assert difference(before, turned) == "they are the same in another order"


def test_what_is_learned_of_the_same_rows_is_told_apart():
    first = fingerprint(loaded(Texts(BEGAN[Texts])).train)
    for settings in ({"learn": "all"}, {"suffix": "!"}, {"system": "S"}):
        assert difference(first, fingerprint(loaded(Texts(BEGAN[Texts], **settings)).train)) == EDITED
    steps = fingerprint(loaded(Steps(BEGAN[Steps])).train)
    assert difference(steps, fingerprint(loaded(Steps(BEGAN[Steps], separator=" ")).train)) == EDITED


def test_the_longest_row_is_named():
    rows = loaded(Pairs([{"prompt": "q" * n, "chosen": "a", "rejected": "b" * (9 - 2 * n)} for n in (1, 2, 3)])).train
    assert longest(rows) == (len(rows[0].prompt) + 8, "rows[0]") and longest(()) == (0, "")
    (steps,) = loaded(Steps(BEGAN[Steps][:1])).train
    (text,) = loaded(Texts([{"prompt": "q", "completion": "a\nb"}])).train
    assert steps.length == text.length == len(text.prompt) + 4


def test_names_and_dates_are_those_of_tasks():
    assert [data.label for data in (Texts([]), Pairs(Table("x/y.jsonl")), Steps(HubDataset("a/b")))] == [
        "rows",
        "y",
        "b",
    ]
    assert Texts([], name="n").label == "n"
    assert dated(Pairs([]), "2025-07-01").date == "2025-07-01"
    assert dated(Pairs([], date="2024-02-29"), "2025-07-01").date == "2024-02-29"


@pytest.mark.parametrize(("data", "message"), [
    (Texts(ReasoningGym("chain_sum")), "a ReasoningGym makes problems, and Texts needs rows"),
    (Texts([{"text": "a"}], holdout=1.0), "holdout is 1.0"), (Texts([{"text": "a"}], date="today"), "date 'today'"),
    (Texts([]), "rows has no row left to train on: 0 from the source, 0 held out; give it more rows"),
    (Texts(Table("none.jsonl")), "none.jsonl not found"),
])  # fmt: skip
def test_wrong_data_are_refused_in_one_line(data, message):
    with pytest.raises(InputError, match=message) as caught:
        loaded(data)
    assert "\n" not in str(caught.value)


GOOD = {
    Texts: {"prompt": "q", "completion": "a"},
    Pairs: {"prompt": "q", "chosen": "a", "rejected": "b"},
    Steps: {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0]},
}


@pytest.mark.parametrize(("kind", "row", "message"), [
    (Texts, ["q", "a"], "rows.jsonl:2 is a list; a row is an object with fields"),
    (Texts, {"question": "q", "answer": "a", "id": None}, "columns question, answer; a row has messages; or prompt"),
    (Texts, {}, "the columns none; a row has"),
    (Texts, {"prompt": "q", "completion": ""}, "completion is empty"),
    (Texts, {"prompt": "q", "completion": 3}, "completion is not a list of chat messages"),
    (Texts, {"prompt": "q", "completion": [ASK, A]}, "completion begins with a message of the user"),
    (Texts, {"prompt": "q", "completion": [A, ASK]}, "completion ends with a message of the user"),
    (Texts, {"prompt": " ", "completion": "a"}, "prompt is empty"),
    (Texts, {"prompt": [], "completion": "a"}, "prompt is not a list of chat messages"),
    (Texts, {"prompt": [A], "completion": "a"}, "prompt has no message of the user"),
    (Texts, {"prompt": [{"role": "user"}], "completion": "a"}, "prompt holds an item that is not a chat message"),
    (Texts, {"text": ""}, "text is empty"), (Texts, {"text": ["a"]}, "text is a list; it must be text"),
    (Texts, {"messages": [ASK]}, "messages ends with a message of the user"),
    (Texts, {"messages": [A]}, "messages has no message of the user"),
    (Texts, {"messages": "q"}, "messages is not a list of chat messages"),
    (Texts, {"messages": [ASK, {"role": "assistant", "content": ""}]}, "the assistant's message in messages is empty"),
    (Texts, {"messages": [ASK, {"role": "assistant", "content": " "}, ASK, A]}, "assistant's message in messages is"),
    (Texts, {"messages": [ASK, A | {"tool_calls": [1]}]}, "messages holds a call of a tool that cannot be read"),
    (Texts, {"messages": [ASK, A], "tools": [{"name": "f"}]}, "it must be a list of JSON schemas"),
    (Pairs, {"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are equal"),
    (Pairs, {"chosen": [ASK, A], "rejected": [ASK, A]}, "chosen and rejected are equal"),
    (Pairs, {"chosen": [ASK, A], "rejected": [A]}, "chosen and rejected share no prompt"),
    (Pairs, {"chosen": [ASK, A], "rejected": [ASK, A, ASK, B]}, "chosen has 0 messages after the prompt"),
    (Pairs, {"chosen": [ASK, A], "rejected": [ASK, B, ASK, B]}, "rejected has 3 messages after the prompt .assist"),
    (Pairs, {"chosen": "a", "rejected": "b"}, "the row has no prompt; give it one, or chats"),
    (Pairs, {"prompt": "q", "chosen": "a"}, "columns prompt, chosen; a row has prompt, chosen, rejected; or"),
    (Pairs, {"prompt": "q", "chosen": "", "rejected": "b"}, "chosen is empty"),
    (Pairs, {"prompt": "q", "chosen": "a", "rejected": 1}, "rejected is not a list of chat messages"),
    (Pairs, GOOD[Pairs] | {"margin": "1"}, "margin is '1'; it must be a number"),
    (Pairs, GOOD[Pairs] | {"margin": True}, "margin is True"),
    (Pairs, {"prompt": "q", "completions": ["a"]}, "completions is not a list of two or more"),
    (Pairs, {"prompt": "q", "completions": "ab"}, "completions is not a list of two or more"),
    (Pairs, {"prompt": "q", "completions": ["a", "b", "a"]}, r"completions\[0\] and completions\[2\] are equal"),
    (Steps, {"prompt": "q", "completions": ["a"]}, "columns prompt, completions; a row has prompt, completions,"),
    (Steps, GOOD[Steps] | {"labels": [1]}, "the row has 2 steps in completions and 1 labels; give each step one"),
    (Steps, GOOD[Steps] | {"labels": [1, 1.5]}, r"labels\[1\] is 1.5; a label is true, false, or from 0 to 1"),
    (Steps, GOOD[Steps] | {"labels": [-1, 1]}, r"labels\[0\] is -1"),
    (Steps, GOOD[Steps] | {"labels": ["+", 1]}, r"labels\[0\] is '\+'"),
    (Steps, GOOD[Steps] | {"labels": [float("nan"), 1]}, r"labels\[0\] is nan"),
    (Steps, {"prompt": "q", "completions": [], "labels": []}, "completions is not a list with entries"),
    (Steps, {"prompt": "q", "completions": "ab", "labels": [1, 1]}, "completions is not a list with entries"),
    (Steps, {"prompt": "q", "completions": ["a", ""], "labels": [1, 1]}, r"completions\[1\] is empty"),
    (Pairs, {"prompt": "q", "completions": ["a", "b"], "labels": [True, False]}, "has labels, which Pairs does not"),
    (Texts, GOOD[Steps], "the row has completions, which Texts does not read .Pairs does, as a ranking, and Steps"),
    (Texts, GOOD[Texts] | {"labels": [1]}, "the row has labels, which Texts does not read .Steps does.*column out"),
    (Texts, GOOD[Pairs] | {"text": "a"}, "the row has chosen, which Texts does not read .Pairs does"),
    (Steps, GOOD[Steps] | {"margin": 1}, "the row has margin, which Steps does not read .Pairs does"),
    (Pairs, GOOD[Pairs] | {"label": True}, "the row has label, which Pairs does not read .Unpaired does"),
    (Texts, GOOD[Texts] | {"images": ["a.png"]}, "the row has images, which Texts does not read .models here"),
    (Texts, GOOD[Texts] | {"label": False}, "label is false, so the text is a bad one"),
    (Texts, GOOD[Texts] | {"label": 1}, "label is 1; it must be true or false, or leave the column out"),
    (Pairs, GOOD[Pairs] | {"rejected_cut_off": "false"}, "rejected_cut_off is 'false'; it must be true or false"),
    (Pairs, GOOD[Pairs] | {"margin": 10**400}, r"margin is 10+\.\.\.; it must be a number"),
    (Texts, {"messages": [ASK, A | {"weight": 0}]}, "every message of the assistant has weight 0"),
    (Texts, {"messages": [ASK, A | {"weight": 0.5}]}, "weight in messages is 0.5; it is 1 or true, or 0 or false"),
    (Pairs, GOOD[Pairs] | {"chosen": [A | {"weight": 0}]}, "chosen has weight 0, and both sides"),
    (Texts, {"messages": [ASK, A | {"reasoning_content": "t"}]}, "a message has reasoning_content, which the chat"),
    (Texts, {"messages": [ASK, A | {"reasoning_content": 3}]}, "reasoning_content in messages is a int; it must"),
    (Texts, {"messages": [ASK, A | {"images": ["a.png"]}]}, "messages holds images, which is not written"),
    (Texts, GOOD[Texts] | {"chat_template_kwargs": {"enable_thinking": False}}, "has enable_thinking, which the chat"),
    (Texts, GOOD[Texts] | {"chat_template_kwargs": ["a"]}, r"chat_template_kwargs is \['a'\]; it must be a JSON"),
    (Texts, {"text": "<|im_end|>\n"}, "is empty but for its end"),
])  # fmt: skip
def test_a_bad_row_is_named_with_file_and_line(tmp_path, kind, row, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(each) for each in (GOOD[kind], row, GOOD[kind])))
    with pytest.raises(InputError, match=message) as caught:
        loaded(kind(Table(str(path))))
    assert str(caught.value).startswith(f"{path}:2") and "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "row", "message"), [
    (Pairs, GOOD[Pairs] | {"margin": decimal.Decimal("sNaN")}, r"margin is Decimal\('sNaN'\); it must be a number"),
    (Pairs, GOOD[Pairs] | {"margin": 10**5000}, "margin is int of too many digits to show; it must be a number"),
    (Texts, {1: "a", "text": "b"}, "has a field named 1; names of fields are text"),
    (Texts, {"messages": [ASK, A], "tools": np.array([{"name": "f"}])}, "it must be a list of JSON schemas"),
    (Texts, GOOD[Texts] | {"chat_template_kwargs": {"when": {1}}}, "it must be a JSON object"),
])  # fmt: skip
def test_a_bad_row_in_memory_is_named(kind, row, message):
    with pytest.raises(InputError, match=rf"rows\[1\].*{message}") as caught:
        loaded(kind([GOOD[kind], row]))
    assert "\n" not in str(caught.value)
    nested = functools.reduce(lambda inner, _: [inner], range(3000), 0)
    with pytest.raises(InputError, match=r"rows\[0\]: field 'deep' is nested too deeply"):
        loaded(Texts([{"text": "a", "deep": nested}]))


def test_columns_that_hold_nothing_and_arrays_are_read():
    row = {"messages": [ASK, A], "label": True, "tools": np.array([]), "images": [], "labels": None}
    assert plain(loaded(Texts([row])).train[0]) == plain(loaded(Texts([{"messages": [ASK, A]}])).train[0])
    row = {"prompt": "q", "completions": np.array(["a", "b"]), "labels": np.array([True, False])}
    assert plain(loaded(Steps([row])).train[0]) == plain(loaded(Steps([GOOD[Steps]])).train[0])
    cut = {"rejected_cut_off": np.bool_(False), "margin": np.float32(0)}
    assert plain(loaded(Pairs([GOOD[Pairs] | cut])).train[0]) == plain(loaded(Pairs([GOOD[Pairs]])).train[0])
