"""Answers as integers: each template by hand, what is refused, and the files."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks import Table, Task, load

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

from integer_answers import SENTENCES, Unsuitable, Value, as_integer, rewrite, rewritten  # noqa: E402


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
    asks = {"integer": "one integer.", "decimal": "times the answer, rounded to the nearest integer."} | SENTENCES
    assert new.sentence.endswith(asks[name])
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


@pytest.mark.parametrize("name", ["integer", *SENTENCES])
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
    assert as_integer(value)[:2] == (name, number)


ROWS = [
    {"question": "Half of 1?", "answer": r"\frac{1}{2}"},
    {"question": "2 + 2?", "answer": 4, "level": 1},
    {"question": "Roots?", "answer": "(1, 2)"},
    {
        "question": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A quarter?"}],
        "answer": 0.25,
    },
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_rewritten_kept_or_left_out(tmp_path):
    path, ask = write(tmp_path / "in.jsonl", ROWS), f"Write the answer as {SENTENCES['m/n']}"
    done = subprocess.run(
        [sys.executable, EXAMPLES / "integer_answers.py", path], capture_output=True, text=True, check=True
    )
    assert sorted(done.stdout.splitlines()) == [
        "1 integers before", "1 left out: several values, or an interval", "1 rewritten: decimal", "1 rewritten: m/n"
    ]  # fmt: skip
    first, second, third = read(tmp_path / "in.integer.jsonl")
    assert first == {"question": f"Half of 1? {ask}", "answer": "3"} and second == ROWS[1] | {"answer": "4"}
    assert third["answer"] == "25" and third["question"][0] == ROWS[3]["question"][0]
    assert third["question"][1]["content"].startswith("A quarter? Give 100 times the answer")
    loaded = load(Task(Table(str(tmp_path / "in.integer.jsonl"), "question"), verifier="integer"))
    assert [problem.answer for problem in loaded.train] == ["3", "4", "25"] and not loaded.notes


def test_an_answer_is_cut_out_of_a_solution_and_unsuitable_rows_can_be_kept(tmp_path):
    rows = [{"prompt": "?", "solution": rf"It is \boxed{{{answer}}}."} for answer in (r"\frac12", "7", r"\pi^2")]
    path, out = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    counts = rewrite(path, out, "prompt", "solution", "boxed", keep=True)
    assert counts == {"rewritten: m/n": 1, "integers before": 1, "kept: no template has the form pi**2": 1}
    new = read(out)
    assert [row["solution"] for row in new] == ["3", "7", rows[2]["solution"]] and new[2] == rows[2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": Path("nowhere.jsonl")}, "nowhere.jsonl"),
        ({"out": Path("out.csv")}, "--out out.csv: give another .jsonl"),
        ({"answer_field": "solution"}, r"in.jsonl:1 has no solution \(it has question, answer\)"),
        ({"answer_extractor": "box"}, "extractor 'box' is unknown"),
    ],
)
def test_wrong_uses_leave_nothing(change, message, tmp_path):
    path = write(tmp_path / "in.jsonl", ROWS)
    with pytest.raises(InputError, match=message):
        rewrite(**({"file": path} | change))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
