"""Answers as integers: each template by hand, what is refused, and the tool's files."""

import contextlib
import json
import sys
from fractions import Fraction
from pathlib import Path

import pytest
from commands import tool

from jaxrl_llm.tasks import Table, Task, load

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import integer_answers  # noqa: E402
from integer_templates import TEMPLATES, Unsuitable, Value, rewritten  # noqa: E402

pytestmark = pytest.mark.slow


def run(*arguments, **place):
    return tool("integer_answers", *map(str, arguments), **place)


@pytest.mark.parametrize(
    ("answer", "template", "number"),
    [
        (r"\frac{3}{4}", "m/n", 7), ("-6/8", "m/n", 1), ("－３／４", "m/n", 1), (r"$3\frac12$", "m/n", 9),
        (r"-3\frac{1}{2}", "m/n", -5),
        (r"\boxed{x = \dfrac{1}{2}}", "m/n", 3), ("0.75", "decimal", 75), ("-.5", "decimal", -5),
        ("12.50", "decimal", 1250), (r"25\%", "integer, percent", 25), ("12.5%", "decimal, percent", 125),
        (r"\$3.50", "decimal, dollars", 350), (r"12\text{ cm}^2", "integer, cm^2", 12), ("1/2 mile", "m/n, mile", 3),
        (r"30^\circ", "integer, degrees", 30), ("2^{10}", "integer", 1024), (r"3 \times 10^4", "integer", 30000),
        (r"\pi", "k pi", 1), (r"-3\pi", "k pi", -3), (r"\frac{6\pi}{4}", "m pi/n", 5), (r"4-2\pi", "a + b pi", 2),
        (r"\frac{4+2\pi}{6}", "(a + b pi)/c", 6), (r"\sqrt{2}", "a sqrt(b)", 3), (r"-\sqrt{12}", "a sqrt(b)", 1),
        ("2sqrt(3)", "a sqrt(b)", 5), (r"\frac{2}{\sqrt{3}}", "a sqrt(b)/c", 8),
        (r"\sqrt{\frac{2}{3}}", "a sqrt(b)/c", 10), (r"5 - \sqrt 8", "a + b sqrt(c)", 5),
        (r"\frac{1}{1+\sqrt{2}}", "a + b sqrt(c)", 2), (r"\sqrt{3+2\sqrt{2}}", "a + b sqrt(c)", 4),
        (r"\frac{1+\sqrt5}{2}", "(a + b sqrt(c))/d", 9), (r"\frac{1}{2}-\frac{\sqrt{3}}{6}", "(a + b sqrt(c))/d", 11),
    ],
)  # fmt: skip
def test_an_answer_is_asked_for_as_an_integer(answer, template, number):
    new = rewritten(answer)
    assert (new.template, new.answer) == (template, number)
    name, _, unit = template.partition(", ")
    asks = TEMPLATES[name].sentence if name in TEMPLATES else "times the answer, rounded to the nearest integer."
    assert new.sentence.endswith(asks)
    assert new.sentence.startswith(f"State the answer in {unit}. ") == bool(unit)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("(1, 2)", "several values"), ("1/2, 3", "several values"), (r"[0, 1)", "several values"), ("x + 1", "'x'"),
        (r"\pm 3", r"\\pm"), ("yes", "'yes'"), ("", "no value"), (r"0.\overline{3}", "overline"), ("1:2", "':'"),
        (r"\sqrt{2}+\sqrt{3}", "no template has the form"), (r"\sqrt{-4}", "no template"), (r"\pi^2", "no template"),
        (r"\sqrt{2}\pi", "no template"), (r"\frac{1}{0}", "no finite value"), ("2^{99}", "more than 12 digits"),
        ("9^{9^{9}}", "exponent"), ("0.12345678", "8 places"), (r"(3)(2)", "side by side"), ("3 1/2", "side by side"),
        (r"3\frac{5}{2}", "side by side"), (r"2\frac{1}{2}\sqrt{3}", "side by side"), (r"1/2\pi", "is not clear"),
        (r"3/4\sqrt{2}", "is not clear"), (r"\sqrt12", "braces"), ("12 apples", "'apples' is no unit"),
        ("5m", "variable"),
        ("pi/6", "math-verify reads another value"), ("1.5/2", "'.'"), ("1" * 13 + "/2", "more than 12 digits"),
    ],
)  # fmt: skip
def test_what_no_template_has_is_refused_with_the_reason(answer, reason):
    with pytest.raises(Unsuitable, match=reason):
        rewritten(answer)


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_integers_of_a_form_are_added_in_lowest_terms(name):
    values = {
        "integer": (Value(Fraction(-3)), -3), "m/n": (Value(Fraction(-6, 4)), -1),
        "k pi": (Value(Fraction(0), Fraction(5), -1), 5), "m pi/n": (Value(Fraction(0), Fraction(5, 10), -1), 3),
        "a + b pi": (Value(Fraction(1), Fraction(5), -1), 6),
        "(a + b pi)/c": (Value(Fraction(1, 2), Fraction(1, 3), -1), 11),
        "a sqrt(b)": (Value(Fraction(0), Fraction(2), 3), 5), "a sqrt(b)/c": (Value(Fraction(0), Fraction(2, 4), 3), 6),
        "a + b sqrt(c)": (Value(Fraction(1), Fraction(2), 3), 6),
        "(a + b sqrt(c))/d": (Value(Fraction(1, 6), Fraction(1, 4), 3), 20),
    }  # fmt: skip
    value, number = values[name]
    assert TEMPLATES[name].number(value) == number
    assert next(known for known, template in TEMPLATES.items() if template.fits(value)) == name


ROWS = [
    {"id": "a", "question": "Half of 1?", "answer": r"\frac{1}{2}"},
    {"id": "b", "question": "2 + 2?", "answer": 4, "level": 1},
    {"id": "c", "question": "Roots?", "answer": "(1, 2)"},
    {"id": "d", "question": "A quarter?", "answer": 0.25},
    {"id": "e", "question": "Nothing", "answer": None},
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_is_rewritten_and_every_change_is_listed(tmp_path):
    done = run(write(tmp_path / "in.jsonl", ROWS))
    assert done.code == 0, done.err
    out = tmp_path / "in.integer.jsonl"
    assert done.out == f"{out}: 2 rewritten, 1 as they were, 2 left out (see in.integer.changes.jsonl)\n"
    new = read(out)
    ask = TEMPLATES["m/n"].sentence
    assert new[0] == {"id": "a", "question": f"Half of 1? {ask}", "answer": "3"} and new[1] == ROWS[1]
    assert new[2]["answer"] == "25" and new[2]["question"].startswith("A quarter? Give 100 times the answer")
    changes = read(tmp_path / "in.integer.changes.jsonl")
    assert [(one["id"], one["status"]) for one in changes] == [
        ("a", "rewritten"), ("c", "left out"), ("d", "rewritten"), ("e", "left out"),
    ]  # fmt: skip
    first = {"row": f"{tmp_path}/in.jsonl:1", "id": "a", "status": "rewritten", "template": "m/n"}
    assert changes[0] == first | {"old": r"\frac{1}{2}", "new": "3", "sentence": ask}
    assert changes[1]["reason"] == "several values, or an interval" and "holds no answer" in changes[3]["reason"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "in.integer.changes.jsonl",
        "in.integer.jsonl",
        "in.jsonl",
    ]
    loaded = load(Task(Table(str(out), "question"), verifier="integer"))
    assert [problem.answer for problem in loaded.train] == ["3", "4", "25"] and not loaded.notes


def test_chats_nested_fields_and_solutions_are_rewritten_and_others_kept(tmp_path):
    chat = [
        {"role": "user", "content": "Half of 1?"},
        {"role": "assistant", "content": "Of 1?"},
        {"role": "user", "content": "Yes."},
    ]
    rows = [
        {"prompt": chat, "reward_model": {"ground_truth": r"So \boxed{\frac12}.", "style": "rule"}},
        {"prompt": chat, "reward_model": {"ground_truth": r"It is \boxed{7}."}},
        {"prompt": 3, "reward_model": {"ground_truth": r"\boxed{\pi/2}"}},
    ]
    options = integer_answers.Options(
        write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", answer_field="reward_model.ground_truth",
        answer_extractor="boxed", keep=True,
    )  # fmt: skip
    assert integer_answers.rewrite(options) == {"rewritten": 1, "as they were": 1, "kept": 1}
    new = read(tmp_path / "out.jsonl")
    assert new[0]["prompt"][:2] == chat[:2] and new[0]["prompt"][2]["content"] == f"Yes. {TEMPLATES['m/n'].sentence}"
    assert new[0]["reward_model"] == {"ground_truth": "3", "style": "rule"}
    assert new[1]["reward_model"]["ground_truth"] == "7" and new[2] == rows[2]
    assert read(tmp_path / "out.changes.jsonl")[1]["row"] == f"{tmp_path}/in.jsonl:3"


@pytest.mark.parametrize(
    ("rows", "arguments", "message"),
    [
        (ROWS, ["nowhere.jsonl"], "nowhere.jsonl not found"),
        (ROWS, [], "no file is given: python tools/integer_answers.py FILE"),
        (ROWS, ["in.jsonl", "--out", "in.jsonl"], "--out in.jsonl is the file itself: give another"),
        (ROWS, ["in.jsonl", "--out", "out.csv"], "--out out.csv is no .jsonl file"),
        (ROWS, ["in.jsonl", "--out", "nowhere/out.jsonl"], "there is no folder nowhere; make it first"),
        (ROWS, ["in.jsonl", "--answer_field", "solution"], "in.jsonl:1 has no solution (it has id, question, answer)"),
        (ROWS, ["in.jsonl", "--prompt_field", "text"], "in.jsonl:1 has no text (it has id, question, answer): set"),
        (ROWS, ["in.jsonl", "--answer_extractor", "box"], "extractor 'box' is unknown; choose one of last_number"),
        ([], ["in.jsonl"], "in.jsonl has no rows"),
        ([ROWS[0], 3], ["in.jsonl"], "in.jsonl:2 is a int; a row is an object with fields"),
    ],
)  # fmt: skip
def test_wrong_uses_are_one_line_and_leave_nothing(rows, arguments, message, tmp_path, capsys):
    write(tmp_path / "in.jsonl", rows)
    with contextlib.chdir(tmp_path):
        assert integer_answers.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith("integer_answers: ") and said.err.count("\n") == 1 and not said.out
    assert message in said.err and [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_command_ends_with_its_code(tmp_path):
    done = run(tmp_path / "nowhere.jsonl")
    assert done.code == 2 and done.err.startswith("integer_answers: ") and done.err.count("\n") == 1
