"""Numbers as people read them, and a table that fits."""

import pytest

from jaxrl_llm.system.text import count, seconds, short
from jaxrl_llm.telemetry import screens
from jaxrl_llm.telemetry.report import step_events

ROW = {
    "reward/mean": -0.0769,
    "reward/accuracy": 1.0,
    "completions/mean_length": 8191.5,
    "entropy": 2.5e-5,
    "grad_norm": float("nan"),
    "throughput/sampled_tokens_per_s": 123456.7,
    "time/step_s": 1234.5,
}


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0.0 s"),
        (8.24, "8.2 s"),
        (99.9, "99.9 s"),
        (100.0, "1m40"),
        (185.9, "3m05"),
        (3599.9, "59m59"),
        (7620.0, "2h07"),
        (99 * 3600 + 60, "4d03h"),
    ],
)
def test_durations(value, text):
    assert seconds(value) == text


@pytest.mark.parametrize(
    "value, text",
    [
        (0.0, "0.000"),
        (0.3124, "0.312"),
        (-0.0312, "-0.0312"),
        (12.34, "12.3"),
        (2.5e-5, "2.5e-05"),
        (1.23e7, "1.2e+07"),
    ],
)
def test_numbers(value, text):
    assert short(value) == text


def titles(width, row=ROW):
    return [column.title for column in screens.fit_columns(width, row)[0]]


def test_eighty_characters_hold_what_a_step_of_reinforcement_learning_has():
    everything = ["reward", "accuracy", "length", "entropy", "grad norm", "tokens/s", "seconds"]
    assert titles(80) == titles(80, ROW | {"loss": 0.5}) == everything
    assert [screens.fit_columns(width, ROW)[1] for width in (80, 120)] == [1, 2]
    assert "loss" in titles(120, ROW | {"loss": 0.5})
    assert titles(120, ROW | {"throughput/mfu": 0.4})[5:8] == ["tokens/s", "MFU", "seconds"]


def test_a_run_has_the_columns_of_what_it_measures():
    assert titles(120, {"loss": 1.0, "pairs/accuracy": 0.5, "grad_norm": 1.0}) == ["pairs", "loss", "grad norm"]


@pytest.mark.parametrize("width", [20, 40, 60, 79, 80, 100])
def test_a_line_is_no_wider_than_the_terminal_and_ends_under_its_heading(width):
    layout = screens.fit_columns(width, ROW)
    line, heading = screens.format_row(*layout, "12/400", "2h07", ROW), screens.format_row(*layout, "step", "left")
    assert len(line) == len(heading) <= width
    for column in layout[0]:
        end = heading.index(column.title) + len(column.title)
        assert line[:end].endswith(column.cell(ROW)) and line[end] == " "


def test_the_reward_is_the_last_column_to_go():
    assert titles(30) == ["reward"]


def test_what_is_missing_or_not_finite_is_shown_as_such():
    cells = {column.title: column.cell(ROW) for column in screens.COLUMNS}
    assert next(x for x in screens.COLUMNS if x.title == "MFU").cell({"throughput/mfu": 0.412}) == "41.2 %"
    assert cells["grad norm"] == "-" and cells["accuracy"] == "100.0 %"
    assert [screens.COLUMNS[0].cell(row) for row in ({}, {"reward/mean": None})] == ["-", "-"]
    assert screens.COLUMNS[0].cell({"reward/mean": float("inf")}) == "inf"


def test_an_evaluation_is_told_by_task_and_what_happened_by_name():
    found = {
        "eval/a/b/pass@1": 0.5,
        "eval/a/b/mean_length": 8.0,
        "eval/a/b/problems": 26.0,
        "eval/c/reward": float("nan"),
    }
    assert screens.evaluation_line(found) == "a/b  pass@1 0.500  mean length 8.000  c  reward -"
    assert screens.evaluation_line({"entropy": 1.0}) == ""
    row = {
        "event/reference_reset": True,
        "event/resumed": False,
        "event/teaches_nothing": "no token is in the loss",
        "kl": 0.0,
    }
    assert step_events(row) == [("reference reset", ""), ("teaches nothing", "no token is in the loss")]


@pytest.mark.parametrize(
    "value, text",
    [
        (960, "960"),
        (90_600, "90.6 k"),
        (134_515_008, "134.5 M"),
        (32_763_876_352, "32.8 B"),
    ],
)
def test_sizes(value, text):
    assert count(value) == text
