"""Loading a task: what is kept, what is merged, what is held out, and that no prompt stands on both sides."""

import dataclasses
import datetime
import json
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks import ReasoningGym, Table, Task, difference, fingerprint, load
from jaxrl_llm.tasks.prompts import prompt_key
from jaxrl_llm.types import Problem

ONE_DIGIT_SUMS = Task(
    ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=3000),
    verifier="integer",
    keep="jaxrl_llm.tasks.filters:nonnegative_answer",
    holdout=0.5,
)


def table(folder, rows):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in rows))
    return Table(str(path))


def texts(problems):
    return [problem.prompt[-1]["content"] for problem in problems]


@pytest.mark.slow
def test_one_digit_sums_are_155_problems_of_which_half_are_held_out():
    # 100 sums and 55 differences that are not negative; the generator has not missed one at this size
    loaded = load(ONE_DIGIT_SUMS)
    assert len(loaded.train) == 77 and len(loaded.held_out) == 78
    assert len({*texts(loaded.train), *texts(loaded.held_out)}) == 155
    assert all(int(problem.answer) >= 0 for problem in (*loaded.train, *loaded.held_out))
    assert {problem.task for problem in loaded.train} == {"chain_sum"}
    assert len(loaded.notes) == 2 and "nonnegative_answer" in loaded.notes[0] and "155 distinct" in loaded.notes[1]


@pytest.mark.slow
def test_the_split_is_the_same_in_another_process_and_for_another_wording():
    program = (
        f"from jaxrl_llm.tasks import *; task = {ONE_DIGIT_SUMS!r};"
        "print(*[problem.id for problem in load(task).held_out])"
    )
    ids = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    reworded = dataclasses.replace(ONE_DIGIT_SUMS, suffix=" Think.", system="Be brief.", extractor="boxed", name="sums")
    assert ids == [problem.id for problem in load(reworded).held_out]


@given(
    st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=3), min_size=4, max_size=30),
    st.floats(0.0, 0.7),
)
def test_no_prompt_is_on_both_sides(tmp_path_factory, prompts, holdout):
    source = table(tmp_path_factory.mktemp("rows"), [(prompt, "1") for prompt in [*prompts, "a", "b"]])
    loaded = load(Task(source, holdout=holdout))
    train, held_out = texts(loaded.train), texts(loaded.held_out)
    assert sorted(train + held_out) == sorted({*prompts, "a", "b"})
    assert len(held_out) == (max(1, round(holdout * len({*prompts, "a", "b"}))) if holdout else 0)


def test_more_rows_move_few_prompts_across(tmp_path):
    rows = [(f"What is {n}?", "1") for n in range(1000)]
    small = {problem.id for problem in load(Task(table(tmp_path, rows[:500]), holdout=0.2)).held_out}
    loaded = load(Task(table(tmp_path, rows), holdout=0.2))
    common = {problem.id for problem in loaded.train} & small
    assert len(small) == 100 and len(common) < 25


def test_duplicates_are_merged_and_other_answers_counted(tmp_path):
    loaded = load(Task(table(tmp_path, [("a", "1"), ("b", "2"), ("a", "1"), ("a", "3")])))
    assert [problem.answer for problem in loaded.train] == ["1", "2", "3"]
    assert loaded.notes == (
        "1 duplicates of a row merged, 3 distinct rows left",
        "1 prompts belong to several problems each, 1 of them with different answers",
    )


@pytest.mark.parametrize(
    "others",
    [{"secret": 3}, {"tests": ["assert f(1) == 1"]}, {"chat_template_kwargs": {"style": "brief"}}, {"n": None}],
)
def test_rows_with_one_prompt_are_one_problem_only_if_all_else_is_equal(others):
    row = {"prompt": "Guess.", "answer": "1"}
    loaded = load(Task([row, row | others, row, row | others]))
    assert len(loaded.train) == 2 and len({problem.id for problem in loaded.train}) == 2
    assert loaded.train[0].id == load(Task([row])).train[0].id
    split = load(Task([row, row | others, {"prompt": "b", "answer": "1"}], holdout=0.5))
    assert len({problem.prompt[0]["content"] for problem in split.train}) == 1, "one prompt is on one side"


def test_the_integer_verifier_drops_and_names_what_is_no_integer(tmp_path):
    rows = [("a", "3.0"), ("b", "1,000"), ("c", "half"), ("d", "2.5"), ("e", "x"), ("f", "y")]
    loaded = load(Task(table(tmp_path, rows), verifier="integer"))
    assert texts(loaded.train) == ["a", "b"]
    (note,) = loaded.notes
    assert note.startswith("4 of 6 dropped because the answer is not an integer: ")
    assert "rows.jsonl:3 ('half')" in note and "rows.jsonl:5" in note and note.endswith(", ...")


def test_a_task_with_nothing_to_train_on_is_refused_with_the_reason(tmp_path):
    with pytest.raises(InputError, match="no problem left to train on: 1 from the source, 0 held out; 1 of 1 dropped"):
        load(Task(table(tmp_path, [("a", "x")]), verifier="integer"))
    with pytest.raises(InputError, match="1 held out"):
        load(Task(table(tmp_path, [("a", "1")]), holdout=0.5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extractor": "last"}, "extractor 'last' is unknown"),
        ({"verifier": "exact"}, "verifier 'exact' is unknown; choose one of match, integer"),
        ({"verifier": "reasoning_gym"}, "needs a ReasoningGym source"),
        ({"holdout": 1.0}, "holdout is 1.0"),
        ({"holdout": float("nan")}, "holdout is nan"),
        ({"keep": "nonnegative_answer"}, "names no function; write module:function"),
        ({"keep": "jaxrl_llm.tasks.filters:nonnegative"}, "did you mean nonnegative_answer"),
        ({"keep": "no_such_module:keep"}, "cannot be imported"),
        ({"keep": "jaxrl_llm.tasks.task:VERIFIERS"}, "is a tuple; name a function"),
    ],
)
def test_a_wrong_task_is_refused_in_one_line(tmp_path, change, message):
    with pytest.raises(InputError, match=message) as caught:
        load(Task(table(tmp_path, [("a", "1")]), **change))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_filters_of_the_current_folder_are_found(tmp_path):
    (tmp_path / "my_filters_here.py").write_text("def short(problem):\n    return len(problem.answer) < 2\n")
    program = (
        "from jaxrl_llm.tasks import *; import sys; sys.path.remove('')\n"
        "loaded = load(Task(Table('rows.jsonl'), keep='my_filters_here:short'))\n"
        "print(len(loaded.train))"
    )
    table(tmp_path, [("a", "1"), ("b", "22")])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


@pytest.mark.slow
def test_reading_tasks_needs_no_jax_and_no_generator():
    program = (
        "import sys, jaxrl_llm.tasks, jaxrl_llm.rewards; "
        "print([name for name in ('jax', 'reasoning_gym', 'transformers', 'datasets', 'math_verify') "
        "if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_problems_without_an_answer_are_allowed_where_none_is_needed(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "answer": null}\n{"prompt": "c", "answer": {"tests": [1]}}\n')
    note = "no problem of prompts has a reference answer: nothing is verified, only the reward is reported"
    for task, notes in [
        (Task(Table(str(path))), (note,)), (Task(Table(str(path), answer_field=None)), (note,)),
        (Task(Table(str(path)), verifier="none"), ()), (Task(Table(str(path)), verifier="integer"), (note,)),
    ]:  # fmt: skip
        loaded = load(task, answers=False)
        assert [problem.answer for problem in loaded.train] == ["", "", ""] and loaded.notes == notes
        assert {problem.verifier for problem in loaded.train} == {"none"}
        assert loaded.train[2].metadata["answer"] == {"tests": [1]}
    assert load(Task(Table(str(path)), verifier="none")).train[0].verifier == "none"
    with pytest.raises(InputError, match=r"prompts.jsonl:1 has no answer in field.*take rewards that need no answer"):
        load(Task(Table(str(path))))
    assert load(Task(table(tmp_path, [("a", "1")])), answers=False).train[0].verifier == "match"
    loaded = load(Task(table(tmp_path, [("a", "1")]), verifier="none"), answers=True)
    assert loaded.train[0].verifier == "none"


@pytest.mark.parametrize("answers", [True, False])
def test_all_problems_have_an_answer_or_none_has(tmp_path, answers):
    with pytest.raises(InputError, match=r"rows.jsonl:2 has no answer in field 'answer' .it has prompt, answer."):
        load(Task(table(tmp_path, [("a", "1"), ("b", None)])), answers)


@pytest.mark.parametrize("date", ["today", "2025-13-01", "01.07.2025"])
def test_a_date_that_is_none_is_refused(tmp_path, date):
    with pytest.raises(InputError, match=f"date '{date}' is not a date; write it as 2025-07-01"):
        load(Task(table(tmp_path, [("a", "1")]), date=date))


def problem(prompt, answer="1", **metadata):
    messages = ({"role": "user", "content": prompt},)
    return Problem(prompt_key(messages), messages, answer, "t", metadata=metadata)


EDITED = "the prompts are the same, but answers or other fields have changed"
BEGAN = [problem("a", level=1), problem("b", level=2, row="x.jsonl:2"), problem("c", day=datetime.date(2025, 7, 1))]


@pytest.mark.parametrize(
    ("now", "change"),
    [
        (BEGAN, ""),
        ([BEGAN[0], problem("b", row="moved/x.jsonl:2", level=2), BEGAN[2]], ""),
        (BEGAN[:2], "there were 3 and there are 2"),
        ([*BEGAN[:2], problem("d")], "there are 3 as before, but prompts have changed"),
        ([*BEGAN[:2], problem("c", day=datetime.date(2025, 7, 2))], EDITED),
        ([problem("a", "2", level=1), *BEGAN[1:]], EDITED),
        (BEGAN[::-1], "they are the same in another order"),
    ],
)  # fmt: skip
def test_what_has_changed_of_the_problems_is_said(now, change):
    before = json.loads(json.dumps(fingerprint(BEGAN)))
    assert difference(before, fingerprint(now)) == change


def test_held_out_prompts_that_are_nearly_training_prompts_are_counted():
    told = "1 of 1 held-out prompts are training prompts too, but for white space and case"
    for other, notes in (("what  is IT?", (told,)), ("What is that?", ())):
        rows = [{"prompt": text, "answer": "1"} for text in ("What is it?", other)]
        assert load(Task(rows, holdout=0.5)).notes == notes
