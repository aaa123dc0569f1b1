"""The lines below a terminal's steps, against what they should draw."""

import math

import pytest

from jaxrl_llm.telemetry.screens import BLOCKS, PLAIN, Panel, sparkline, time_split


@pytest.mark.parametrize(
    ("values", "width", "wanted"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, BLOCKS),
        ([7.0, 0.0], 8, "█▁"),
        ([5.0, 5.0, 5.0], 8, "▁▁▁"),
        ([0, 0, 4, 4, 8, 8], 3, "▁▅█"),
        ([-3.0, -1.0, -2.0], 8, "▁█▅"),
        ([1.0], 8, "▁"),
    ],
)
def test_a_curve_goes_from_its_lowest_to_its_highest_level(values, width, wanted):
    assert sparkline(values, width) == wanted
    assert sparkline(values, width, PLAIN) == wanted.translate(str.maketrans(BLOCKS, PLAIN))


def panel_of(rows, tests=()):
    panel = Panel()
    for row in rows:
        panel.show_step(row)
    for row in tests:
        panel.show_evaluation(row)
    return panel


ROWS = [{"reward/mean": n / 9, "entropy": 1 - n / 9, "kl": n / 90, "loss": n % 2, "lr": 1e-5} for n in range(10)]


def drawn(panel, width=100):
    return [line.plain for line in panel.lines(width)]


def test_what_was_measured_is_drawn_the_most_telling_first():
    tests = [{"step": 0, "eval/sums/pass@1": 0.5, "eval/sums/problems": 78.0}, {"eval/sums/pass@1": 0.9}]
    tests = [row | {"eval/other/reward": 1.0} for row in tests]
    (line,) = drawn(panel_of(ROWS, tests))
    assert [word for word in line.split() if word[0].isalpha()] == ["pass@1", "reward", "entropy", "kl"]
    assert line.split()[:3] == ["pass@1", "▁█", "0.900"]
    (line,) = drawn(panel_of([{"loss": 3.0 - n} for n in range(3)]))
    assert line == "loss █▅▁ 1.000"
    (line,) = drawn(panel_of([{"loss": n % 7} for n in range(99)]))
    assert len(line) == 100 // 4 - 2, "one curve alone is no wider than one of four"


def test_what_was_not_measured_or_never_changed_is_not_drawn():
    rows = [{"reward/mean": value, "entropy": 0.5} for value in (0.1, None, math.nan, 0.4, math.inf)]
    (line,) = drawn(panel_of(rows))
    assert line == "reward ▁█ 0.400"
    assert drawn(panel_of(ROWS[:1])) == drawn(panel_of([])) == []


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_wider_than_the_terminal(width):
    panel = panel_of(ROWS * 50, [{"eval/sums/pass@1": 0.5}, {"eval/sums/pass@1": 0.9}])
    lines = drawn(panel, width)
    assert len(lines) == 1 and len(lines[0]) <= width
    assert drawn(panel, 59) == []


def test_the_time_of_the_last_step_is_split_and_the_last_finding_stays():
    timed = {"time/step_s": 10.0, "time/rollout_s": 2.5, "time/reward_s": 0.0, "time/update_s": 7.0}
    panel = panel_of([*ROWS, ROWS[0] | timed])
    panel.finding = "stalled since step 3: no"
    assert drawn(panel)[1:] == ["time  sample 25 %  update 70 %  of 10.0 s", "stalled since step 3: no"]
    assert time_split({"time/step_s": 10.0, "time/update_s": 7.0}) == "update 70 %  of 10.0 s"
    assert time_split({}) == time_split({"time/step_s": None}) == ""


def test_memory_stands_beside_the_time_where_there_is_room():
    panel = Panel()
    panel.memory = lambda: "memory 1.4 GiB  device 12.3 of 79.6 GiB, 61.0 at most"
    assert drawn(panel) == [panel.memory()], "before the first step too"
    panel.show_step({"time/step_s": 10.0, "time/update_s": 7.0})
    assert drawn(panel) == [f"time  update 70 %  of 10.0 s    {panel.memory()}"]
    assert drawn(panel, 80) == ["time  update 70 %  of 10.0 s", panel.memory()]
