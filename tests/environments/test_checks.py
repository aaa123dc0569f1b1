"""Environments that fail, and return what they should not."""

import asyncio
import enum
import json
import math
import time

import numpy as np
import pytest
from environments.worlds import USER, Counting, begun, says

from jaxrl_llm.environments import Environment, Factory, Limits, Step
from jaxrl_llm.environments.environment import check_messages, check_step


class Faulty(Environment):
    """Returns or raises what it is told."""

    def __init__(self, reset=(), step=Step(done=True)):
        self.at_reset, self.at_step = reset, step

    def reset(self, row, seed):
        return self._done(self.at_reset)

    def step(self, reply):
        return self._done(self.at_step)

    def _done(self, what):
        if isinstance(what, BaseException):
            raise what
        return what() if callable(what) else what


async def late():
    await asyncio.sleep(9)


TOLD = [{"role": "user", "content": "x"}]
BAD_STEPS = {
    "ZeroDivisionError": (lambda: 1 / 0, "environment_error"),
    "SystemExit: 1": (SystemExit(1), "environment_error"),
    "returned a NoneType; return a Step": (None, "environment_error"),
    "returned a tuple; return a Step": ((TOLD, 1.0, True), "environment_error"),
    "nothing to answer": (Step(), "environment_error"),
    "returned a str for messages": (Step("hello"), "environment_error"),
    "returned a dict for messages": (Step(TOLD[0]), "environment_error"),
    "the message 'hello'": (Step(["hello"]), "environment_error"),
    "the message {'role': 'user'}": (Step([{"role": "user"}]), "environment_error"),
    "message of role 'assistant'": (Step([{"role": "assistant", "content": ""}]), "environment_error"),
    "reward is nan": (Step(TOLD, math.nan), "environment_error"),
    "reward is inf": (Step(TOLD, math.inf), "environment_error"),
    "reward is 1e+16": (Step(TOLD, 1e16), "environment_error"),
    "reward is None": (Step(TOLD, None), "environment_error"),
    "reward is '1'": (Step(TOLD, "1"), "environment_error"),
    "metric a is 'x'": (Step(TOLD, metrics={"a": "x"}), "environment_error"),
    "state is 3; give text": (Step(TOLD, state=3), "environment_error"),
    "a message, 'who': <object": (Step([{**TOLD[0], "who": object()}]), "environment_error"),
    "a message, 'at': nan": (Step([{**TOLD[0], "at": math.nan}]), "environment_error"),
    "a message, 'parts': b'x'": (Step([{**TOLD[0], "parts": [b"x"]}]), "environment_error"),
    "metrics is a list": (Step(TOLD, metrics=[1]), "environment_error"),
    "not finished after 0.1 s": (lambda: time.sleep(0.3), "timeout"),
    "step: not finished after": (late, "timeout"),
}


@pytest.mark.parametrize("said", BAD_STEPS)
def test_an_environment_that_fails_in_a_step_ends_its_episode(said):
    bad, end = BAD_STEPS[said]
    world = begun(lambda: Faulty(step=bad), tool_timeout_s=0.1)
    answer = world.reply(says("hi"))
    assert (answer.end, answer.reward) == (end, 0.0)
    assert said in answer.error and answer.error.startswith("Faulty: step: ") and "\n" not in answer.error
    assert world.error == answer.error and world.close() == ""


@pytest.mark.parametrize(
    ("bad", "end", "said"),
    [
        (RuntimeError("no server"), "environment_error", "RuntimeError: no server"),
        ("hello", "environment_error", "returned a str for messages"),
        ([{"role": "world", "content": ""}], "environment_error", "message of role 'world'"),
        ([{"role": "user", "content": ["x"]}], "environment_error", "the message {'role'"),
        (lambda: time.sleep(0.3), "timeout", "not finished after 0.1 s"),
        (late, "timeout", "not finished after 0.1 s"),
    ],
)
def test_an_environment_that_fails_in_reset_ends_its_episode(bad, end, said):
    world = Factory(lambda: Faulty(bad)).world({}, 0, Limits(tool_timeout_s=0.1))
    prompt, answer = world.reset(USER)
    assert (prompt, answer.end) == (USER, end) and said in answer.error
    assert "test_checks.py:" in answer.error or not isinstance(bad, RuntimeError)


def test_an_environment_that_cannot_be_made_ends_its_episode():
    made = []

    def once():
        made.append(1)
        if len(made) > 1:
            raise ConnectionError("no more servers")
        return Faulty()

    world = Factory(once).world({}, 0, Limits())
    _, answer = world.reset(USER)
    assert answer.end == "environment_error" and "making the environment: ConnectionError" in answer.error
    assert world.close() == ""


@pytest.mark.parametrize(
    ("reset", "said"),
    [(lambda: [1], "reset returned a list; return None or text"), (lambda: 1 / 0, "division by zero")],
)
def test_a_duck_typed_reset_that_fails_ends_its_episode(reset, said):
    class Duck:
        def reset(self):
            return reset()

    _, answer = Factory(Duck).world({}, 0, Limits()).reset(USER)
    assert answer.end == "environment_error" and said in answer.error and answer.error.startswith("Duck: reset: ")


@pytest.mark.parametrize(
    ("value", "reward", "said"),
    [
        (1, 1.0, ""),
        (True, 1.0, ""),
        (None, math.nan, ""),
        (math.nan, math.nan, ""),
        (math.inf, math.nan, "get_reward is inf"),
        ("1", math.nan, "get_reward is '1', which is not a number"),
        (lambda: 1 / 0, math.nan, "ZeroDivisionError"),
        (lambda: time.sleep(0.3), math.nan, "not finished after 0.1 s"),
    ],
)
@pytest.mark.parametrize("waits", [False, True])
def test_rewards_are_numbers_or_nan_with_the_reason(value, reward, said, waits):
    class Duck:
        def reset(self, **kwargs): ...

        def get_reward(self):
            return value() if callable(value) else value

    class AsyncDuck(Duck):
        async def get_reward(self):
            await asyncio.sleep(0.3 if "not finished" in said else 0)
            return Duck.get_reward(self)

    world = begun(AsyncDuck if waits else Duck, tool_timeout_s=0.1)
    assert world.reward() == pytest.approx(reward, nan_ok=True)
    assert said in world.error and bool(said) == bool(world.error)


def test_a_copy_that_fails_says_so():
    class Uncopied(Counting):
        def copy(self):
            raise OSError("one server only")

    class Nothing(Counting):
        def copy(self):
            return None

    with pytest.raises(RuntimeError, match="Uncopied: copy: OSError: one server only"):
        begun(Uncopied, row={"start": 0}).copy()
    with pytest.raises(RuntimeError, match="Nothing: copy: TypeError: it returned a NoneType"):
        begun(Nothing, row={"start": 0}).copy()


class Role(str, enum.Enum):  # noqa: UP042  as people write it
    USER = "user"


class Text(str):
    """A text of another class."""


def test_messages_are_saved_as_what_they_are_whatever_their_classes():
    message = {"role": Role.USER, "content": Text("x"), "n": np.int64(3), "at": np.float32(0.5), "parts": (True, None)}
    [found] = check_step(Step([message], state=Text("s"))).messages
    assert found == {"role": "user", "content": "x", "n": 3, "at": 0.5, "parts": [True, None]}
    assert json.loads(json.dumps(found)) == found
    assert [type(one) for one in found.values()] == [str, str, int, float, list]
    assert check_messages([message])[0] == found
