"""Right answers score 1 however they are written, and wrong ones less."""

import dataclasses

import numpy as np
import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards import accuracy
from jaxrl_llm.rewards.math_answer import score_math as math_score
from jaxrl_llm.tasks import ReasoningGym
from jaxrl_llm.types import Completion, Problem


def problem(answer, **fields):
    return Problem("1", ({"role": "user", "content": "?"},), answer, "test", **fields)


def completion(text):
    return Completion(np.zeros(3, np.int32), np.zeros(3), "stop", np.ones(3, bool), np.zeros(3, np.int32), text=text)


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        ("The answer is 3.", "3", 1.0),
        ("3.0", "3", 1.0),
        ("so $1,000", "1000", 1.0),
        ("1000", "1,000", 1.0),
        ("答案是１，０００", "1000", 1.0),
        ("-3", "－３", 1.0),
        ("\N{MINUS SIGN}3", "-3", 1.0),
        ("13", "3", 0.0),
        ("-3", "3", 0.0),
        ("no number", "3", 0.0),
        ("", "3", 0.0),
    ],
)
@pytest.mark.parametrize("verifier", ["match", "integer", "math"])
def test_numbers(text, answer, score, verifier):
    assert accuracy(problem(answer, verifier=verifier), completion(text)) == score


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (r"\boxed{\$18.90}", "18.90", 1.0),
        (r"\boxed{1\,250}", "£1{,}250.00", 1.0),
        (r"\boxed{0.00001}", "1e-05", 1.0),
        (r"\boxed{0.00002}", "1e-05", 0.0),
        (r"\boxed{2 \cdot 10^{-7}}", r"1 \times 10^{-7}", 0.0),
        (r"\boxed{100000000000000000001}", "1e20", 0.0),
        (r"\boxed{0.3333333}", "0.33333331", 1.0),
        (r"\boxed{2.9999999}", "3", 0.0),
        (r"\boxed{**Paris**}", r"\text{paris}", 1.0),
        (r"\boxed{2} and \boxed{3}", "2,3", 1.0),
        (r"\boxed{2} and \boxed{3}", "3", 0.0),
    ],
)
@pytest.mark.parametrize("verifier", ["match", "math"])
def test_reference_and_answer_are_read_alike(text, answer, score, verifier):
    assert accuracy(problem(answer, extractor="boxed", verifier=verifier), completion(text)) == score


@pytest.mark.parametrize(
    ("text", "answer", "score"),
    [
        (r"\boxed{\frac{0.0000004}{2}}", "0.0000001", 0.0),
        (r"\boxed{\frac{10^9}{7.0}}", "142857142.857", 1.0),
        ("The answer is **5**.", "5", 1.0),
        ("The answer is 2**3 = 8", "8", 1.0),
        ("It is 1e-3.", "0.001", 1.0),
        ("It is 1e-3.", "1", 0.0),
        (r"so \fbox{7}, not 8", "7", 1.0),
        (r"\frac{1}{3} is about 0.3333", r"0.3333", 1.0),
    ],
)
def test_math_reads_prose(text, answer, score):
    assert accuracy(problem(answer, extractor="whole", verifier="math"), completion(text)) == score


def test_match_compares_texts_but_for_case_space_and_full_stop():
    whole = {"extractor": "whole", "verifier": "match"}
    assert accuracy(problem("New York", **whole), completion(" new  york.\n")) == 1.0
    assert accuracy(problem("New York", **whole), completion("York")) == 0.0
    assert accuracy(problem("Ａ。", **whole), completion("a")) == 1.0
    assert accuracy(problem("x2", **whole), completion("x²")) == 0.0


def test_integer_never_matches_what_is_none():
    assert accuracy(problem("half", verifier="integer", extractor="whole"), completion("half")) == 0.0
    assert accuracy(problem("2.5", verifier="integer"), completion("2.5")) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        (r"\frac{1}{2}", "0.5", 1.0),
        ("1/2", r"\frac12", 1.0),
        (r"2^{1/2}", r"\sqrt{2}", 1.0),
        ("(x+1)^2", "x^2+2x+1", 1.0),
        ("(1, 2]", "(1,2]", 1.0),
        ("(3, 2]", "(1,2]", 0.0),
        ("(1, 2)", "(1,2]", 0.0),
        (r"\{2, 1\}", r"\{1,2\}", 1.0),
        (r"\{2, 3\}", r"\{1,2\}", 0.0),
        ("x=3", "3", 1.0),
        ("１／２", "0.5", 1.0),
        ("－３", "３", 0.0),
        ("4", "3", 0.0),
        (r"\frac{", "3", 0.0),
    ],
)
def test_math_compares_expressions(answer, reference, score):
    boxed = problem(reference, extractor="boxed", verifier="math")
    assert math_score(answer, boxed) == score


def test_math_finds_the_expression_in_a_whole_text():
    whole = problem("0.5", extractor="whole", verifier="math")
    assert accuracy(whole, completion(r"We get $x = \frac{1}{2}$.")) == 1.0
    assert accuracy(whole, completion("The answer is 0.7")) == 0.0
    after = dataclasses.replace(whole, extractor="after:think")
    assert accuracy(after, completion(r"Perhaps $0.7$.</think>We get $x = ０．５$.")) == 1.0
    assert accuracy(after, completion(r"We get $x = \frac{1}{2}$.")) == 0.0, "cut off within its thoughts"


def test_reasoning_gym_scores_the_extracted_answer():
    source = ReasoningGym("chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}, size=50)
    generated = next(row for row in source.problems() if row.answer == "3")
    extracted, raw = (
        dataclasses.replace(generated, verifier="reasoning_gym", extractor=extractor)
        for extractor in ("last_number", "whole")
    )
    assert accuracy(extracted, completion("The answer is 3.")) == 1.0
    assert accuracy(raw, completion("The answer is 3")) == pytest.approx(0.067, abs=1e-3)
    assert accuracy(extracted, completion("13")) == 0.5  # partial credit for a wrong number stays below 1
    assert accuracy(extracted, completion("I do not know")) == 0.0


def test_an_unknown_verifier_is_refused():
    with pytest.raises(InputError, match="verifier 'exact' of problem 1 is unknown; choose one of match, integer"):
        accuracy(problem("3", verifier="exact"), completion("3"))
