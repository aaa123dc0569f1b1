"""Which of a problem's verified answers become rows, and how an answer is cut into steps."""

import pytest

from jaxrl_llm.collection.rows import Answer, pair_rows, prefix_tokens, split_steps, step_lengths, text_rows
from jaxrl_llm.types import Problem

PROBLEM = Problem("7", ({"role": "user", "content": "1 + 1?"},), "2", "sums")


def answer(text, right, length=None, ended=True):
    return Answer(text, len(text) if length is None else length, ended, right)


ANSWERS = (
    answer("wrong one", False),
    answer("the right one", True),
    answer("cut", True, ended=False),
    answer(" \n", True),
    answer("right", True),
    answer("the right one", True),
    answer("wro", False),
    answer("false", False),
)


@pytest.mark.parametrize(("keep", "wanted"), [
    ("first", ["the right one"]),
    ("shortest", ["right"]),
    ("all", ["the right one", "right"]),
])  # fmt: skip
def test_which_right_answers_are_kept(keep, wanted):
    rows = text_rows(PROBLEM, ANSWERS, keep)
    assert rows == [{"prompt": "1 + 1?", "completion": text, "id": "7"} for text in wanted]
    assert text_rows(PROBLEM, ANSWERS[:1], keep) == []


@pytest.mark.parametrize(("keep", "match_length", "wanted"), [
    ("first", False, [("the right one", "wrong one")]),
    ("shortest", False, [("right", "wrong one")]),
    ("all", False, [("the right one", "wrong one"), ("right", "wro")]),
    ("first", True, [("right", "false")]),
    ("shortest", True, [("right", "false")]),
    ("all", True, [("right", "false"), ("the right one", "wrong one")]),
])  # fmt: skip
def test_which_pairs_are_made(keep, match_length, wanted):
    rows = pair_rows(PROBLEM, ANSWERS, keep, match_length)
    assert [(row["chosen"], row["rejected"]) for row in rows] == wanted
    assert pair_rows(PROBLEM, ANSWERS[1:6], keep, match_length) == []


@pytest.mark.parametrize(("text", "steps"), [
    ("a\nb", ["a", "b"]),
    ("\n\na\n\n\nb \n", ["\n\na\n\n", "b \n"]),
    ("a", ["a"]),
    (" \n", []),
    ("", []),
])  # fmt: skip
def test_steps_are_the_text_again(text, steps):
    assert split_steps(text, "\n") == steps
    assert not steps or "\n".join(steps) == text


def test_a_step_ends_with_the_token_that_holds_its_end():
    tokens = ["x", " =", " 1\n", "y", "\n\n", "z\nq", "r"]
    steps = split_steps("".join(tokens), "\n")
    assert steps == ["x = 1", "y\n", "z", "qr"]
    assert prefix_tokens(tokens, steps, "\n", "".join) == [3, 5, 6]
    assert step_lengths(steps, "\n")[-1] == len("\n".join(steps))
