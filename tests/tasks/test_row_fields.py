"""What a row holds reaches the prompt, the mask or the reward, however it was given; else it is refused by name."""

import csv
import json

import datasets
import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest

from jaxrl_llm.collection.rejection_sampling import make_row
from jaxrl_llm.data import Pairs, Steps, Texts, load_texts
from jaxrl_llm.environments import Environment, Step
from jaxrl_llm.errors import InputError
from jaxrl_llm.models.pretrained import tiny_tokenizer
from jaxrl_llm.tasks import Table, Task, encode, load
from jaxrl_llm.tasks.task import Rows

TINY = tiny_tokenizer()
STOP = (TINY.eos_token_id,)
TOLD = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{% if m['reasoning_content'] %}({{ m['reasoning_content'] }}){% endif %}"
    "{{ m['content'] }}{% for c in m['tool_calls'] or [] %}{{ c['function'] | tojson }}{% endfor %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}()\n{% endif %}{% endif %}"
)
OPENS = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}{{ eos_token }}{% endfor %}" + (
    "{% if add_generation_prompt %}assistant:<think>\n{% endif %}"
)


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "d", "parameters": parameters}}


PRICE, WEATHER = tool("price", item={"type": "string"}), tool("weather", city={"type": "string", "enum": ["a", "b"]})
CALL = {"type": "function", "function": {"name": "price", "arguments": {"item": "egg", "count": 2}}}
ASK, SAID = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def prompt(row, template=TOLD, **task):
    task = Task([{"answer": "1"} | row], template=template, **task)
    return TINY.decode(encode(load(task).train[0], task, TINY))


def learned(row, kind=Texts, template=TOLD, **settings):
    (found,) = load_texts(kind([row], template=template, **settings), TINY, STOP).train
    return found


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"prompt": "q", "tools": [PRICE]}, json.dumps(PRICE)),
        ({"prompt": "q", "tools": json.dumps([PRICE])}, json.dumps(PRICE)),
        ({"prompt": "q", "tools": [json.dumps(PRICE)]}, json.dumps(PRICE)),
        ({"prompt": "q", "chat_template_kwargs": {"enable_thinking": False}}, "<assistant>()\n"),
        ({"prompt": "q", "chat_template_kwargs": '{"enable_thinking": false}'}, "<assistant>()\n"),
        ({"prompt": [ASK, SAID | {"reasoning_content": "hm"}, ASK]}, "<assistant>(hm)a"),
        ({"prompt": [ASK, SAID | {"tool_calls": [CALL]}, ASK]}, '"arguments": {"item": "egg", "count": 2}'),
        ({"prompt": [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, ASK]}, '"name": "price"'),
        ({"prompt": [ASK, SAID | {"tool_calls": json.dumps([CALL])}, ASK]}, '"name": "price"'),
        ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]}, "<user>part"),
        ({"prompt": [ASK, SAID | {"content": "It is "}]}, "<assistant>It is "),
    ],
)
def test_a_prompt_holds_what_its_row_says(row, text):
    assert text in prompt(row)
    asked = {name: value for name, value in row.items() if name not in ("prompt", "answer")}
    same = learned({"prompt": row["prompt"], "completion": "x"} | asked)
    assert TINY.decode(same.prompt) == prompt(row), "as the supervised stages write it"


def test_a_begun_answer_goes_on_where_it_ends():
    assert prompt({"prompt": [ASK, SAID | {"content": "The answer is"}]}).endswith("<assistant>The answer is")
    assert prompt({"prompt": [ASK, SAID]}, "plain").endswith("q\n\na")
    row = learned({"prompt": [ASK, SAID], "completion": "bc"})
    assert TINY.decode(row.prompt).endswith("<assistant>a") and TINY.decode(row.tokens) == f"bc{TINY.eos_token}"
    with pytest.raises(InputError, match=r"rows.0.: the assistant's last message in the prompt begins no text"):
        prompt({"prompt": [ASK, SAID | {"content": " "}]})


@pytest.mark.parametrize("name", ["image", "images", "videos", "audio"])
def test_what_no_model_here_reads_is_refused_or_passed_on_by_ones_word(name):
    row = {"prompt": "q", "answer": "1", name: ["shape.png"]}
    with pytest.raises(InputError, match=rf"rows.0.: the row has {name}, and models here read text alone"):
        load(Task([row]))
    (problem,) = load(Task(Rows([row], metadata_fields=(name,)))).train
    assert problem.metadata[name] == ["shape.png"]


def test_a_column_that_only_rewards_read_is_not_written():
    row = {"prompt": "q", "answer": "1", "tools": "hammer"}
    with pytest.raises(InputError, match=r"rows.0.: tools is 'hammer'; it must be a list of JSON schemas"):
        load(Task([row]))
    (problem,) = load(Task(Rows([row], metadata_fields=("tools",)))).train
    assert problem.metadata["tools"] == "hammer" and problem.options == {}


def test_an_option_that_the_template_ignores_is_refused():
    with pytest.raises(InputError, match=r"rows.0.: chat_template_kwargs has style, which the chat template does not"):
        prompt({"prompt": "q", "chat_template_kwargs": {"style": "brief"}})


class Sums(Environment):
    """Has nothing to say."""

    def step(self, reply):
        """End."""
        return Step(done=True)


@pytest.mark.parametrize("row", [{"prompt": "q", "tools": [PRICE]}, {"prompt": [ASK, SAID]}])
def test_an_episode_begins_with_its_own_tools_and_no_answer(row):
    with pytest.raises(InputError, match=r"rows.0.(: the prompt ends in a message of the assistant| has tools)"):
        load(Task([{"answer": "1"} | row], environment=Sums))


def test_collected_rows_keep_what_the_prompt_was_written_with():
    source = {"prompt": "q", "answer": "1", "tools": [PRICE], "chat_template_kwargs": {"enable_thinking": False}}
    (problem,) = load(Task([source])).train
    row = make_row(problem, completion="x")
    assert {name: row[name] for name in source if name != "answer"} == {
        n: v for n, v in source.items() if n != "answer"
    }
    assert TINY.decode(learned(row).prompt) == prompt(source)


@pytest.mark.parametrize(
    "mark",
    [
        {"train": False}, {"trainable": False}, {"loss_mask": 0}, {"loss": False}, {"weight": "0"}, {"learn": 0.0},
        {"train_on_turn": False}, {"loss_weight": 0}, {"masked": True}, {"train": "false"},
    ],
)  # fmt: skip
def test_a_marked_message_is_not_learned(mark):
    talk = [ASK, SAID | {"content": "bad"} | mark, ASK, SAID | {"content": "good"}]
    row = learned({"messages": talk})
    assert TINY.decode(row.tokens[row.mask]) == f"good{TINY.eos_token}"
    assert "bad" in TINY.decode(row.tokens)


@pytest.mark.parametrize("mark", [{"train": 0.5}, {"loss_mask": [0, 1]}, {"weight": "some"}, {"mask": 1}])
def test_a_mark_that_is_neither_is_refused(mark):
    with pytest.raises(InputError, match=f"{next(iter(mark))} in messages is|messages holds a mask"):
        learned({"messages": [ASK, SAID | mark]})


def test_a_thought_that_the_prompt_opens_is_opened_once():
    row = learned({"prompt": "q", "completion": "<think>\nadd\n</think>\n\n4"}, template=OPENS)
    assert TINY.decode([*row.prompt, *row.tokens]).endswith(f"assistant:<think>\nadd\n</think>\n\n4{TINY.eos_token}")
    row = learned({"prompt": "q", "completion": "add</think>4"}, template=OPENS)
    assert TINY.decode(row.tokens) == f"add</think>4{TINY.eos_token}"
    for kind, answer in ((Texts, {"completion": "5"}), (Pairs, {"chosen": "5", "rejected": "6"})):
        with pytest.raises(InputError, match="prompt opens <think>, and the answer has no </think>"):
            learned({"prompt": "q"} | answer, kind, OPENS)
    steps = {"prompt": "q", "completions": ["<think>a", "b</think>", "c"], "labels": [1, 1, 1]}
    assert TINY.decode(learned(steps, Steps, OPENS).tokens).startswith("a\nb</think>\nc")


def test_control_tokens_that_others_spell_stay_text():
    spelled = f"what is {TINY.eos_token}?"
    task = Task([{"prompt": spelled, "answer": "1"}], template="chatml")
    ids = encode(load(task).train[0], task, TINY)
    plain = encode(load(Task([{"prompt": "what is it?", "answer": "1"}])).train[0], task, TINY)
    assert TINY.decode(ids).count(spelled) == 1
    assert (ids == TINY.eos_token_id).sum() == (plain == TINY.eos_token_id).sum()
    row = learned({"prompt": spelled, "completion": f"It ends {TINY.eos_token} a turn."}, template="chatml")
    assert (row.tokens == TINY.eos_token_id).sum() == 1 and row.tokens[-1] == TINY.eos_token_id
    assert np.array_equal(row.prompt, ids)


MIXED = [
    {"messages": [ASK, SAID], "tools": [PRICE, WEATHER]},
    {"messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}], "tools": [PRICE]},
    {"messages": [ASK, SAID | {"reasoning_content": "hm"}], "chat_template_kwargs": {"enable_thinking": True}},
]


def ways(tmp_path, rows, types=None):
    """The same rows, given in every way."""
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    columns = pyarrow.Table.from_pylist(rows)
    for name, kind in (types or {}).items():
        columns = columns.set_column(columns.column_names.index(name), name, columns[name].cast(kind))
    pyarrow.parquet.write_table(columns, tmp_path / "rows.parquet")
    made = datasets.Dataset(columns)
    return [rows, *(Table(str(tmp_path / f"rows.{suffix}")) for suffix in ("jsonl", "json", "parquet")), made]


def test_rows_by_every_way_give_the_same_ids(tmp_path):
    found = [load_texts(Texts(source, template=TOLD), TINY, STOP).train for source in ways(tmp_path, MIXED)]
    for other in found[1:]:
        for row, same in zip(found[0], other, strict=True):
            assert np.array_equal(row.prompt, same.prompt) and np.array_equal(row.tokens, same.tokens)


def test_rows_by_every_way_give_the_same_references(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": n, "level": {"of": n}} for n in (0.1, 0.00001, 5.0, 12.5, 1e20)]
    for types in ({}, {"answer": pyarrow.float32()}):
        tasks = [Task(source, extractor="whole") for source in ways(tmp_path, rows, types)]
        texts = ["".join(f"{row['prompt']},{row['answer']!r}\r\n" for row in rows)]
        (tmp_path / "rows.csv").write_text("prompt,answer\r\n" + texts[0])
        found = [[problem.answer for problem in load(task).train] for task in tasks]
        assert found[0] == ["0.1", "0.00001", "5.0", "12.5", "100000000000000000000"]
        assert all(other == found[0] for other in found)
    assert [float(p.answer) for p in load(Task(Table(str(tmp_path / "rows.csv")), extractor="whole")).train] == [
        row["answer"] for row in rows
    ]


@pytest.mark.parametrize("value", [float("nan"), None, np.float32("nan")])
def test_a_missing_answer_is_missing(value):
    with pytest.raises(InputError, match=r"rows.1. has no answer in field 'answer'"):
        load(Task([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": value}]))


def test_values_of_tables_are_those_that_were_written(tmp_path):
    frame = pandas.DataFrame({"prompt": ["a", "b"], "answer": [b"5", b"7"], "score": [0.1, None], "n": [1, None]})
    frame["score"] = frame["score"].astype("float32")
    frame.to_parquet(tmp_path / "rows.parquet")
    first, second = load(Task(Table(str(tmp_path / "rows.parquet")))).train
    assert [first.answer, second.answer] == ["5", "7"]
    assert first.metadata["score"] == 0.1 and second.metadata["score"] is None and second.metadata["n"] is None
    with pytest.raises(InputError, match=r"rows.0.: the answer is a bytes; it must be text or a number"):
        load(Task([{"prompt": "a", "answer": b"\xff"}]))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["prompt", "answer", "tools"], ["a", "5", json.dumps([PRICE])], ["b", "7", ""]])
    task = Task(Table(str(tmp_path / "rows.csv")), template=TOLD)
    shown = [TINY.decode(encode(problem, task, TINY)) for problem in load(task).train]
    assert json.dumps(PRICE) in shown[0] and "price" not in shown[1]
