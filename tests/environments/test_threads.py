import asyncio
import threading
import time

import pytest

from jaxrl_llm.environments.world import Caller, EventLoop, FunctionCall, count_hanging, format_error


async def nap(seconds):
    await asyncio.sleep(seconds)
    return seconds


def spin():
    while True:
        pass


def statuses(outcomes):
    return [outcome.status for outcome in outcomes]


def test_outcomes_come_in_the_order_of_the_calls():
    calls = [
        FunctionCall(lambda: "a"),
        FunctionCall(nap, {"seconds": 0.02}, apart=True),
        FunctionCall(nap, {"seconds": 0.0}),
        FunctionCall(lambda: "d", apart=True),
    ]
    assert [outcome.value for outcome in Caller().call_all(calls, 5.0)] == ["a", 0.02, 0.0, "d"]


def test_calls_of_an_episode_share_a_thread_and_those_apart_do_not():
    caller, seen = Caller(), []
    caller.call_all(
        [FunctionCall(lambda: seen.append(threading.get_ident()), apart=apart) for apart in (False, True, False)], 5.0
    )
    caller.call(lambda: seen.append(threading.get_ident()), 5.0)
    assert len(set(seen)) == 2 and max(map(seen.count, seen)) == 3
    assert threading.get_ident() not in seen


def test_calls_apart_and_async_ones_run_at_the_same_time():
    calls = [FunctionCall(lambda: time.sleep(0.2), apart=True) for _ in range(8)]
    calls += [FunctionCall(nap, {"seconds": 0.2}, apart=index % 2 == 0) for index in range(8)]
    began = time.monotonic()
    assert statuses(Caller().call_all(calls, 5.0)) == ["ok"] * 16
    assert time.monotonic() - began < 0.9  # one after the other: 3.2


def test_a_call_that_hangs_is_left_behind_and_the_next_ones_are_made_once():
    caller, made = Caller(), []
    calls = [
        FunctionCall(lambda: made.append(1)),
        FunctionCall(lambda: time.sleep(0.4)),
        FunctionCall(lambda: made.append(2)),
        FunctionCall(nap, {"seconds": 9}),
    ]
    began = time.monotonic()
    assert statuses(caller.call_all(calls, 0.15)) == ["ok", "timeout", "ok", "timeout"]
    assert time.monotonic() - began < 1.0
    time.sleep(0.3)  # the late call has ended by now: nothing that it left undone is done twice
    assert made == [1, 2]
    assert caller.call(lambda: 3, 1.0).value == 3


def test_a_loop_of_python_code_ends_when_its_time_is_over():
    before = set(threading.enumerate())
    assert Caller().call(spin, 0.05).status == "timeout"
    for thread in set(threading.enumerate()) - before:
        if thread.name == "episode":
            thread.join(5.0)
            assert not thread.is_alive()


def test_an_async_call_that_blocks_the_loop_costs_no_later_one():
    async def block():
        time.sleep(0.5)

    loop = EventLoop(grace_s=0.1)
    assert Caller(loop).call(block, 0.05).status == "timeout"
    began = time.monotonic()
    assert Caller(loop).call(nap, 1.0, {"seconds": 0.01}).status == "ok"
    assert time.monotonic() - began < 0.2


def test_async_calls_of_all_episodes_share_a_loop():
    async def loop():
        return asyncio.get_running_loop()

    assert len({id(Caller().call(loop, 1.0).value) for _ in range(3)}) == 1


def test_a_coroutine_that_refuses_to_be_cancelled_is_left_behind():
    async def stubborn():
        for _ in range(10):
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    async def running():
        return asyncio.get_running_loop()

    caller = Caller(EventLoop(grace_s=0.1))
    before = caller.call(running, 5.0).value
    assert caller.call(stubborn, 0.05).status == "timeout"
    assert caller.call(running, 5.0).value is before


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
@pytest.mark.parametrize("waits", [False, True])
def test_whatever_a_call_raises_is_its_outcome(error, waits):
    def fail():
        raise error

    async def fail_later():
        raise error

    outcome = Caller().call(fail_later if waits else fail, 5.0)
    assert outcome.status == "error" and outcome.error is error


def test_the_value_is_finished_within_the_limit():
    class Slow:
        def __str__(self):
            time.sleep(9)
            return ""

    outcomes = Caller().call_all(
        [FunctionCall(Slow), FunctionCall(lambda: 5), FunctionCall(nap, {"seconds": 0})], 0.1, str
    )
    assert statuses(outcomes) == ["timeout", "ok", "ok"]
    assert [outcome.value for outcome in outcomes[1:]] == ["5", "0"]


def test_a_thread_ends_with_its_episode_or_when_nobody_has_it():
    before = set(threading.enumerate())
    closed, lost = Caller(), Caller()
    closed.call(int, 1.0)
    lost.call(int, 1.0)
    threads = [thread for thread in set(threading.enumerate()) - before if thread.name == "episode"]
    assert len(threads) == 2
    closed.close()
    del lost
    for thread in threads:
        thread.join(5.0)
        assert not thread.is_alive()
    assert closed.call(lambda: 1, 1.0).value == 1


def test_errors_are_told_on_one_line_even_those_that_cannot_be_told():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert format_error(ValueError("a\n b")) == "ValueError: a b"
    assert format_error(ValueError("a\n b"), kind=False) == "a b"
    assert format_error(KeyError(), kind=False) == "KeyError"
    assert format_error(Mute()) == "Mute"
    assert format_error(ValueError("\ud800")).isascii()
    assert len(format_error(ValueError("x" * 10_000))) < 600


def test_threads_that_hang_are_counted_until_they_end():
    before, go_on = count_hanging(), threading.Event()
    assert Caller().call(go_on.wait, 0.01).status == "timeout" and count_hanging() == before + 1
    go_on.set()
    end = time.monotonic() + 10
    while count_hanging() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert count_hanging() == before
