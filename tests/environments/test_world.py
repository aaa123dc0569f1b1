import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from environments.worlds import (
    USER,
    Counting,
    Guess,
    await_nap,
    begun,
    call,
    contents,
    multiply,
    nap,
    says,
)

from jaxrl_llm.environments import ENDS, Environment, Factory, Limits, Step, World
from jaxrl_llm.environments.calls import ParsedReply


def test_the_text_of_a_duck_typed_reset_is_appended_to_the_last_user_message():
    rows = [{"role": "system", "content": "Play."}, *USER]
    prompt, answer = Factory(Guess).world({"secret": 4}, 0, Limits()).reset(rows)
    assert [message["content"] for message in prompt] == ["Play.", "Begin. It is between 1 and 8."]
    assert answer.end == "" and USER[0]["content"] == "Begin."


def test_messages_of_a_native_reset_follow_the_rows_own():
    prompt, _ = Factory(Counting).world({"start": 0}, 7, Limits()).reset(USER)
    assert prompt == [{"role": "user", "content": "Begin.\n\nseed 7"}]
    few = [*USER, {"role": "assistant", "content": "ok"}]
    prompt, _ = Factory(Counting).world({"start": 0}, 7, Limits()).reset(few)
    assert [message["role"] for message in prompt] == ["user", "assistant", "user"]
    assert Factory(tools=[multiply]).world({}, 0, Limits()).reset([])[0] == []


def test_an_episode_of_tools_ends_with_a_reply_without_calls():
    world = begun(tools=[multiply])
    answer = world.reply(says("Let me see.", call("multiply", "c1", a=6, b=7)))
    assert answer.messages == ({"role": "tool", "name": "multiply", "content": "42", "tool_call_id": "c1"},)
    assert (answer.end, answer.tool_calls, answer.tool_errors) == ("", 1, 0)
    last = world.reply(says("42"))
    assert (last.end, last.messages, last.tool_calls) == ("completed", (), 0)
    assert world.reward() is None and world.close() == ""


def test_a_duck_typed_environment_plays_and_rewards():
    world = begun(Guess, row={"secret": 13})
    answer = world.reply(says("", call("guess", number=1), call("hint"), call("guess", number=13)))
    assert contents(answer) == ["wrong", "the last digit is 3", "right"]
    assert world.reward() == 0.5
    assert [schema["function"]["name"] for schema in world.tools] == ["guess", "hint"]


def test_a_native_environment_steps_rewards_and_ends():
    world = begun(Counting, row={"start": 3})
    first = world.reply(says("4"))
    assert (contents(first), first.reward, first.end, first.metrics) == (["next"], 1.0, "", {"at": 4.0})
    peeked = world.reply(says("", call("peek"), call("peek")))
    assert (contents(peeked), peeked.tool_calls, peeked.end) == (["4", "4"], 2, "")
    last = world.reply(says("9"))
    assert (last.reward, last.end) == (0.0, "completed")


def test_an_environment_that_is_done_after_a_call_stopped_it():
    class Submit(Counting):
        def step(self, reply):
            return Step(done=True, reward=2.0)

    answer = begun(Submit, row={"start": 0}).reply(says("", call("peek")))
    assert (answer.end, answer.reward, answer.tool_calls) == ("tool_stopped", 2.0, 1)


def test_functions_and_a_native_environment_answer_one_reply_in_its_order():
    world = begun(Counting, [multiply], row={"start": 3})
    reply = says("", call("multiply", a=2, b=2), call("peek"), call("divide"), call("peek"), call("multiply", a=3, b=3))
    answer = world.reply(reply)
    unknown = "{'error': 'Tool divide not found; there are: peek, multiply.'}"
    assert contents(answer) == ["4", "3", unknown, "3", "9"]
    assert answer.metrics["tool_errors/unknown"] == 1.0
    assert len(reply.message["tool_calls"]) == 5, "the reply is the caller's"


def fail(kind: str):
    """Fail.

    Args:
      kind: how.
    """
    if kind == "silent":
        raise KeyError
    if kind == "exit":
        raise SystemExit(2)
    raise ValueError(f"bad\nnews {kind}")


def test_tools_that_fail_are_told_apart_and_answered():
    world = begun(tools=[fail, multiply, nap], tool_timeout_s=0.1)
    asked = [
        call("fail", kind="x"),
        call("none"),
        call("nap", seconds=0.3),
        call("multiply", a=1),
        call("fail", kind="silent"),
    ]
    answer = world.reply(says("", *asked, call("fail", kind="exit"), call("multiply", a=2, b=3)))
    said = contents(answer)
    assert said[0] == "{'error': 'bad news x'}"
    assert "not found" in said[1] and "did not finish within 0.1 s" in said[2]
    assert "missing 1 required positional argument: 'b'" in said[3]
    assert said[4:] == ["{'error': 'KeyError'}", "{'error': '2'}", "6"]
    counts = {"tool_errors/raised": 4.0, "tool_errors/unknown": 1.0, "tool_errors/timeout": 1.0}
    assert (answer.end, answer.tool_calls, answer.tool_errors, answer.metrics) == ("", 7, 6, counts)


@pytest.mark.parametrize("arguments", ["text", [1], 3, {"a": [1], "b": {}}, {1: 2}])
def test_arguments_that_fit_no_tool_are_an_error_of_the_call(arguments):
    asked = {"type": "function", "function": {"name": "multiply", "arguments": arguments}}
    answer = begun(tools=[multiply]).reply(says("", asked))
    assert (answer.end, answer.tool_errors) == ("", 1)


def test_arguments_nested_deeply_are_no_harm():
    deep = []
    for _ in range(900):
        deep = [deep]

    def depth(value: list) -> int:
        """Measure.

        Args:
          value: nested.
        """
        found = 0
        while value:
            value, found = value[0], found + 1
        return found

    assert contents(begun(tools=[depth]).reply(says("", call("depth", value=deep)))) == ["900"]


@pytest.mark.parametrize("asked", [{}, 3, None, {"function": 3}, {"function": {}}, {"name": ["x"]}])
def test_calls_without_a_name_are_unknown_tools(asked):
    answer = begun(tools=[multiply]).reply(says("", asked))
    assert (answer.end, answer.metrics) == ("", {"tool_errors/unknown": 1.0})


def test_calls_of_one_reply_run_at_the_same_time_and_are_answered_in_order():
    world = begun(tools=[nap, await_nap])
    began = time.monotonic()
    naps = [call(name, seconds=seconds) for seconds in (0.2, 0.1, 0.15) for name in ("nap", "await_nap")]
    said = contents(world.reply(says("", *naps)))
    assert time.monotonic() - began < 0.6  # one after the other: 0.9
    assert said == [f"{word} {seconds}" for seconds in (0.2, 0.1, 0.15) for word in ("slept", "awaited")]


def test_64_episodes_wait_at_the_same_time_and_one_that_hangs_costs_itself_alone():
    others, never = threading.Barrier(63), threading.Event()

    def meet(hang: bool) -> str:
        """Wait for the others.

        Args:
            hang: for ever.
        """
        never.wait() if hang else others.wait()
        return "met"

    def episode(index):
        world = begun(tools=[meet], tool_timeout_s=2.0)
        answer = world.reply(says("", call("meet", hang=index == 5)))
        world.close()
        return answer.tool_errors

    with ThreadPoolExecutor(64) as pool:
        errors = list(pool.map(episode, range(64)))
    never.set()
    assert errors == [int(index == 5) for index in range(64)]


@pytest.mark.parametrize(("side", "kept"), [("end", "01234567["), ("start", "]23456789"), ("middle", "0123[")])
def test_long_results_are_cut_on_the_named_side(side, kept):
    def digits() -> str:
        """Return digits."""
        return "0123456789"

    (said,) = contents(begun(tools=[digits], max_result_chars=8, cut=side).reply(says("", call("digits"))))
    assert kept in said and "2 characters left out" in said


def test_what_tools_return_becomes_text_of_bounded_length():
    class Bad:
        def __str__(self):
            raise RuntimeError("no text")

    values = iter([None, 1.5, {"a": [1]}, b"x", "x" * 10_000_000, "\ud800", Bad(), ""])

    def anything():
        """Return anything."""
        return next(values)

    world = begun(tools=[anything], max_turns=9)
    said = [contents(world.reply(says("", call("anything"))))[0] for _ in range(8)]
    assert said[:4] == ["None", "1.5", "{'a': [1]}", "b'x'"]
    assert len(said[4]) < 2100 and said[5] == "\\ud800" and said[6:] == ["{'error': 'no text'}", ""]


def test_calls_that_cannot_be_parsed_are_answered_and_then_end_the_episode():
    world = begun(tools=[multiply], max_parse_errors=1)
    bad = ParsedReply({"role": "assistant", "content": "<tool_call>{"}, "no JSON")
    answer = world.reply(bad)
    assert (answer.end, answer.tool_errors) == ("", 1)
    assert answer.metrics == {"tool_errors/unparsed": 1.0}
    assert answer.messages == ({"role": "user", "content": "The tool call could not be read: no JSON"},)
    assert world.reply(says("", call("multiply", a=1, b=1))).end == ""
    assert world.reply(bad).end == "parse_error"


def test_turns_are_limited_and_the_calls_of_the_last_are_made():
    world = begun(Guess, row={"secret": 3}, max_turns=2)
    assert world.reply(says("", call("guess", number=1))).end == ""
    last = world.reply(says("", call("guess", number=3)))
    assert (last.end, contents(last), world.reward()) == ("max_turns", ["right"], 0.5)
    assert begun(tools=[multiply], max_turns=1).reply(says("5")).end == "completed"
    bad = ParsedReply({"role": "assistant", "content": ""}, "no")
    assert begun(tools=[multiply], max_turns=1).reply(bad).end == "max_turns"


def test_calls_are_limited_and_those_beyond_are_not_made():
    made = []

    def mark() -> str:
        """Mark."""
        made.append(1)
        return "marked"

    world = begun(tools=[mark], max_tool_calls=3)
    assert world.reply(says("", call("mark"), call("mark"))).end == ""
    answer = world.reply(says("", call("mark"), call("mark")))
    assert (answer.end, answer.tool_calls, len(made)) == ("max_tool_calls", 1, 3)
    full = begun(Counting, row={"start": 0}, max_tool_calls=1)
    assert full.reply(says("", call("peek"))).end == ""
    assert full.reply(says("", call("peek"))).end == "max_tool_calls"


def test_all_of_an_environment_may_be_async():
    class Later(Environment):
        async def reset(self, row, seed):
            return [{"role": "user", "content": "later"}]

        async def step(self, reply):
            await asyncio.sleep(0)
            return Step(done=True, reward=0.5)

        async def close(self):
            raise RuntimeError("closed badly")

    class LaterDuck:
        async def reset(self, word):
            return f" {word}"

        async def get_reward(self):
            return 0.25

    world = Factory(Later).world({}, 0, Limits())
    assert world.reset(USER)[0][0]["content"] == "Begin.\n\nlater"
    assert world.reply(says("x")).reward == 0.5
    assert "Later: close: RuntimeError: closed badly" in world.close() and world.close() == ""
    duck = Factory(LaterDuck).world({"word": "yes", "other": 1}, 0, Limits())
    assert duck.reset(USER)[0][0]["content"] == "Begin. yes" and duck.reward() == 0.25


def test_a_close_that_hangs_is_left_behind():
    class Clinging(Environment):
        def close(self):
            time.sleep(0.4)

    world = World(Clinging(), {}, 0, Limits(tool_timeout_s=0.05))
    world.reset(USER)
    assert "Clinging: close: not finished" in world.close()


def test_a_duck_typed_environment_gets_the_columns_and_the_seed_that_it_names():
    class Duck:
        def reset(self, word, seed=None):
            self.seen = (word, seed)

    assert begun(Duck, row={"word": "a", "row": 3}, seed=5).environment.instance.seen == ("a", 5)
    assert begun(Duck, row={"word": "a", "seed": 9}, seed=5).environment.instance.seen == ("a", 9)
    _, answer = Factory(Duck).world({"row": 3}, 0, Limits()).reset(USER)
    assert answer.end == "environment_error" and "'word'" in answer.error


def test_the_rows_of_a_group_are_not_shared():
    factory, row = Factory(Counting), {"start": 3}
    worlds = [factory.world(row, seed, Limits()) for seed in range(2)]
    for world in worlds:
        assert world.reset(USER)[1].end == ""
    assert row == {"start": 3} and [world.reply(says("4")).reward for world in worlds] == [1.0, 1.0]


def test_a_copy_goes_on_alone_with_the_same_counts():
    world = begun(Counting, [multiply], row={"start": 3}, max_turns=3)
    world.reply(says("4"))
    branch = world.copy()
    assert branch.tools == world.tools
    assert [one.reply(says("5")).reward for one in (world, branch, world)] == [1.0, 1.0, 0.0]
    assert branch.reply(says("6")).end == "max_turns"
    assert begun(tools=[multiply]).copy().reply(says("", call("multiply", a=2, b=2))).messages[0]["content"] == "4"


def test_every_end_has_one_name():
    assert len(set(ENDS)) == len(ENDS) == 9
