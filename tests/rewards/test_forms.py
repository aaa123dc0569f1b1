"""Functions of your own in all the forms that people bring: what each is given, and what its answers mean."""

import asyncio
import dataclasses
import functools
import math

import numpy as np
import pytest
from rewards import sample_forms as forms

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.functions import AT_ONCE, RewardCall, RewardOutcome, form_of, perform
from jaxrl_llm.types import Completion, Problem


def item(text, level=1, answer="7", messages=1, **metadata):
    prompt = tuple({"role": "user", "content": "why?"} for _ in range(messages))
    completion = Completion(np.arange(3), np.zeros(3), "stop", np.ones(3, bool), np.zeros(3, int), text=text)
    return Problem("1", prompt, answer, "sums", metadata={"level": level} | metadata), completion


ITEMS = [item("7", 1), item("30", 2)]


def asked(function, items, batch=None, seconds=5.0):
    """The outcomes, of one call for a batch or what is async, else of one for each item."""
    form = form_of(function, batch)
    shares = [items] if form.batch or form.waits else [[one] for one in items]
    with asyncio.Runner() as runner:
        return [
            outcome
            for share in shares
            for outcome in perform(function, RewardCall("f", share, form, seconds), runner.run)
        ]


def values(function, items=ITEMS, batch=None):
    outcomes = asked(function, items, batch)
    assert all(outcome.status == "ok" for outcome in outcomes), outcomes
    return [outcome.value for outcome in outcomes]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (forms.single, [8.0, 31.0]),
        (forms.by_any_name, [18.0, 42.0]),
        (forms.with_columns, [3.0, 4.0]),
        (forms.completion_only, [1.0, 0.0]),
        (forms.batch, [10.0, 34.0]),
        (forms.trl, [6.0, 8.0]),
        (forms.verl, [1.0, 0.0]),
        (forms.verl_batch, [1.0, 0.0]),
        (forms.judge_batch, [7.0, 30.0]),
        (functools.partial(forms.by_any_name, missing=0), [8.0, 32.0]),
        (lambda *both: len(both), [2.0, 2.0]),
        (lambda problem, completion: forms.judge_batch([], [completion.text]), None),
    ],
)
def test_the_names_of_its_parameters_say_what_a_function_is_given(function, expected):
    if expected is None:  # what it waits for is no number
        assert "returned [7.0], which is not a number" in asked(function, ITEMS)[0].message
    else:
        assert values(function) == expected


def test_a_batch_may_be_told_where_the_names_do_not_say_it():
    assert values(lambda ps, cs: [len(ps)] * len(cs), batch=True) == [2.0, 2.0]
    assert values(lambda problem, completions: len(completions.text), batch=False) == [1.0, 2.0]
    assert values(lambda ps, cs, level: level, batch=True) == [1.0, 2.0]


def test_trls_prompts_and_completions_are_chats_where_the_rows_are():
    assert values(forms.trl_chat, [item("ab", prompt_is_chat=True), item("abc", messages=2)]) == [13.0, 15.0]
    assert asked(forms.trl_chat, [item("ab")])[0].message.startswith("TypeError: string indices")


def test_what_is_known_of_a_prompt_is_no_column():
    seen = []
    values(lambda problem, completion, **columns: seen.append(list(columns)) or 0.0, [item("1", prompt_is_chat=True)])
    assert seen == [["answer", "level"]]


def test_verls_functions_see_the_rows_own_source_and_information():
    seen = []

    def look(data_source, solution_str, ground_truth, extra_info):
        seen.append((data_source, extra_info))
        return 0.0

    values(look, [item("1"), item("1", data_source="gsm8k", extra_info={"index": 3})])
    assert seen == [("sums", {"level": 1}), ("gsm8k", {"index": 3})]


def test_a_call_of_many_that_wait_has_time_for_all_of_them_in_turn():
    waiting = form_of(forms.judge)
    limits = [RewardCall("f", [None] * count, waiting, 2.0).limit_s for count in (1, AT_ONCE, AT_ONCE + 1)]
    assert limits == [4.0, 4.0, 6.0]
    assert (
        RewardCall("f", [None] * 100, form_of(forms.judge_batch), 2.0).limit_s
        == RewardCall("f", [None], timeout_s=2.0).limit_s
        == 2.0
    )


def test_a_column_that_only_some_rows_have_is_none_in_the_others_of_a_batch():
    rows = [item("1", colour="red"), item("2")]
    seen = []

    def look(problems, completions, colour, answer):
        seen.append((colour, answer))
        return [1.0, 1.0]

    assert values(look, rows) == [1.0, 1.0] and seen == [(["red", None], ["7", "7"])]


def test_the_answer_is_the_rows_column_where_it_has_one():
    problem, completion = item("1")
    solved = dataclasses.replace(problem, metadata={"answer": "6 + 1 #### 7"})
    assert values(lambda problem, completion, answer: len(answer), [(problem, completion), (solved, completion)]) == [
        1.0,
        12.0,
    ]


def test_a_column_that_the_row_has_not_is_named():
    (outcome,) = asked(lambda problem, completion, colour: 1.0, ITEMS[:1])
    assert outcome.message == "LookupError: it wants colour, and the row has only answer, level"
    assert "test_forms.py:" in outcome.place and outcome.trace == ""


@pytest.mark.parametrize("function", [lambda: 1, lambda problem: 1, lambda *, problem, completion=1: 1])
def test_what_cannot_take_a_problem_and_a_completion_is_refused(function):
    with pytest.raises(InputError, match=r"cannot be a reward: write it as f.problem, completion"):
        form_of(function)


@pytest.mark.slow
def test_calls_of_an_async_function_wait_together_and_are_lost_one_by_one():
    forms.TOGETHER.clear()
    outcomes = asked(forms.judge, [item(text) for text in ("2", "hang", "raise", "4")], seconds=1.5)
    assert [outcome.status for outcome in outcomes] == ["ok", "timeout", "error", "ok"]
    assert (outcomes[0].value, outcomes[3].value) == (1.0, 2.0)
    assert outcomes[1].message == "call not finished after 1.5 s" and "sample_forms.py" in outcomes[1].place
    assert outcomes[2].message == "ConnectionError: no judge" and "raise ConnectionError" in outcomes[2].trace


def test_none_in_a_batch_cannot_be_scored_and_what_is_no_number_fails_alone():
    outcomes = asked(forms.some_none, [item(text) for text in ("1", "none", "text")])
    assert outcomes[0] == RewardOutcome("ok", 1.0) and outcomes[1].status == "ok" and math.isnan(outcomes[1].value)
    assert outcomes[2].message == "TypeError: returned 'a', which is not a number"


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (forms.too_few, "ValueError: returned 1 scores for 2 completions"),
        (forms.whole_batch_fails, "ZeroDivisionError: division by zero"),
        (lambda problems, completions: 1.0, "TypeError: returned 1.0, which is not a list of scores"),
        (
            lambda problems, completions: {"score": 1.0},
            "TypeError: returned {'score': 1.0}, which is not a list of scores",
        ),
    ],
)
def test_a_batch_without_a_score_for_each_fails_as_a_whole(function, message):
    outcomes = asked(function, ITEMS)
    assert [(outcome.status, outcome.message) for outcome in outcomes] == [("error", message)] * 2
    assert outcomes[1].trace == "" and ("Zero" in outcomes[0].trace) == ("Zero" in message)


def test_arrays_are_lists_of_scores():
    assert values(lambda problems, completions: np.array([0.5, 1.0], np.float32)) == [0.5, 1.0]
