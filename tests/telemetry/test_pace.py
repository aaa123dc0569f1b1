"""The time left counts steps, evaluations and saves, each at its own pace."""

import time

import pytest

from jaxrl_llm.telemetry.progress import Pace, Schedule, time_left


@pytest.mark.parametrize(
    "schedule, step, ahead",
    [
        (Schedule(6, 0, 2), 1, (5, 1, 3)),
        (Schedule(6, 2, 2), 1, (5, 3, 3)),
        (Schedule(6, 2, 2), 2, (4, 3, 3)),
        (Schedule(7, 2, 3), 3, (4, 3, 3)),
        (Schedule(7, 2, 3), 7, (0, 1, 1)),
        (Schedule(400, 0, 50), 399, (1, 1, 1)),
    ],
)
def test_what_is_ahead_is_what_the_loop_will_do(schedule, step, ahead):
    assert tuple(schedule.ahead(step).values()) == ahead


def test_the_start_of_a_run_is_not_saved():
    assert [step for step in range(5) if Schedule(9, save_every=2).saves(step)] == [2, 4]


def test_the_time_left_is_that_of_all_that_is_ahead():
    ahead = {"step": 10, "evaluation": 2, "save": 5}
    assert time_left({}, ahead) is None and time_left({"evaluation": (9.0,)}, ahead) is None
    assert time_left({"step": (3.0,)}, ahead) == 30.0
    assert time_left({"step": (60.0, 2.0, 4.0), "evaluation": (7.0,), "save": (9.0, 1.0)}, ahead) == 30.0 + 14.0 + 5.0
    assert time_left({"step": (3.0,), "evaluation": (7.0,)}, {"step": 0, "evaluation": 0, "save": 0}) == 0.0


def test_each_kind_of_work_takes_the_time_since_the_one_before():
    pace = Pace(lambda: 0.0)
    time.sleep(0.05)
    pace.took("step")
    pace.took("save")
    assert pace.durations["save"] < pace.durations["step"]
