"""Which of a problem's verified answers become rows, and how an answer is cut into steps."""

import numpy as np
import pytest

from jaxrl_llm.collection.rejection_sampling import SampledAnswer, decode_answer, make_rows, prefix_tokens
from jaxrl_llm.data import Collected
from jaxrl_llm.data.datasets import split_steps, step_lengths
from jaxrl_llm.models import load_pretrained
from jaxrl_llm.tasks import ReasoningGym, Task
from jaxrl_llm.types import Completion, Problem

TASK = Task(ReasoningGym("chain_sum"))
PROBLEM = Problem("7", ({"role": "user", "content": "1 + 1?"},), "2", "sums")


def answer(text, right, length=None, ended=True):
    return SampledAnswer(text, len(text) if length is None else length, ended, right)


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
    data = Collected(TASK, keep=keep)
    rows = make_rows(PROBLEM, ANSWERS, data, "texts")
    assert rows == [{"prompt": "1 + 1?", "completion": text, "id": "7"} for text in wanted]
    assert make_rows(PROBLEM, ANSWERS[:1], data, "texts") == []


@pytest.mark.parametrize(("keep", "match_length", "wanted"), [
    ("first", False, [("the right one", "wrong one")]),
    ("shortest", False, [("right", "wrong one")]),
    ("all", False, [("the right one", "wrong one"), ("right", "wro")]),
    ("first", True, [("right", "false")]),
    ("shortest", True, [("right", "false")]),
    ("all", True, [("right", "false"), ("the right one", "wrong one")]),
])  # fmt: skip
def test_which_pairs_are_made(keep, match_length, wanted):
    data = Collected(TASK, keep=keep, match_length=match_length)
    rows = make_rows(PROBLEM, ANSWERS, data, "pairs")
    assert [(row["chosen"], row["rejected"]) for row in rows] == wanted
    assert make_rows(PROBLEM, ANSWERS[1:6], data, "pairs") == []


def test_lengths_are_matched_to_the_shortest_right_answer_where_that_alone_is_kept():
    answers = (answer("a longer right one", True), answer("a longer wrong one", False), answer("no", False))
    answers += (answer("right", True), answer("wrong, too", False))
    nearest = [("a longer right one", "a longer wrong one"), ("right", "no")]
    for keep, wanted in {"first": nearest[:1], "shortest": nearest[1:], "all": nearest}.items():
        rows = make_rows(PROBLEM, answers, Collected(TASK, keep=keep, match_length=True), "pairs")
        assert [(row["chosen"], row["rejected"]) for row in rows] == wanted


def test_right_answers_are_preferred_to_ones_that_were_cut_off_too_and_their_rows_say_so():
    answers = (answer("right", True), answer("cut", False, ended=False), answer("wrong", False))
    found = {
        cut_off: make_rows(PROBLEM, answers, Collected(TASK, cut_off=cut_off), "pairs") for cut_off in (False, True)
    }
    told = {
        cut_off: [(row["rejected"], row.get("rejected_cut_off")) for row in rows] for cut_off, rows in found.items()
    }
    assert told == {False: [("wrong", None)], True: [("wrong", None), ("cut", True)]}
    assert {row["chosen"] for rows in found.values() for row in rows} == {"right"}
    more = (answer("right, too", True), answer(" ", False, ended=False), answer("right, though cut", True, ended=False))
    _, last = make_rows(PROBLEM, more[::-1] + answers, Collected(TASK, cut_off=True, keep="all"), "pairs")
    assert last["rejected"] == "cut", "what is blank, or right as far as it goes, is not rejected"
    never = (answer("right", True, ended=False), answer("wrong", False), answer("cut", False, ended=False))
    assert make_rows(PROBLEM, never, Collected(TASK, cut_off=True), "pairs") == []


def test_unpaired_answers_are_right_and_wrong_ones_with_their_labels():
    answers = (
        answer("right", True),
        answer("cut", False, ended=False),
        answer("wrong", False),
        answer("right 2", True),
    )
    found = {
        (keep, cut_off): [
            (row["completion"], row["label"], row.get("completion_cut_off"))
            for row in make_rows(PROBLEM, answers, Collected(TASK, keep=keep, cut_off=cut_off), "unpaired")
        ]
        for keep, cut_off in (("first", False), ("all", True))
    }
    right, wrong, cut = ("right", True, None), ("wrong", False, None), ("cut", False, True)
    assert found == {("first", False): [right, wrong], ("all", True): [right, ("right 2", True, None), wrong, cut]}


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


@pytest.mark.parametrize(("last", "reason", "text"), [
    (257, "stop", "12 3"),
    (ord("."), "stop", "12 3"),
    (ord("."), "length", "12 3."),
])  # fmt: skip
def test_what_ends_an_answer_is_no_part_of_its_text(last, reason, text):
    tokens = np.array([*b"12 3", last], np.int32)
    done = Completion(tokens, np.zeros(5, np.float32), reason, np.ones(5, bool), np.zeros(5, np.int32))
    assert decode_answer(load_pretrained("tiny-random")[1], done, True) == SampledAnswer(
        text, 5, reason == "stop", True
    )
