"""Small environments and tools, good and bad, and short ways to speak with a world."""

import asyncio
import sqlite3
import time

from jaxrl_llm.environments import Environment, Factory, Limits, Step
from jaxrl_llm.environments.calls import ParsedReply

USER = [{"role": "user", "content": "Begin."}]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
      a: the first.
      b: the second.
    """
    return a * b


def nap(seconds: float) -> str:
    """Sleep.

    Args:
      seconds: how long.
    """
    time.sleep(seconds)
    return f"slept {seconds}"


async def await_nap(seconds: float) -> str:
    """Sleep without holding a thread.

    Args:
      seconds: how long.
    """
    await asyncio.sleep(seconds)
    return f"awaited {seconds}"


class Guess:
    """After TRL's interface, as its documentation writes one; with a connection that only its own thread may use."""

    def __init__(self):
        self.database = sqlite3.connect(":memory:")
        self.database.execute("create table guesses (number integer)")

    def reset(self, secret, **kwargs):
        self.secret = secret
        self.kwargs = kwargs
        return f" It is between 1 and {2 * secret}."

    def guess(self, number: int) -> str:
        """Guess the secret number.

        Args:
            number: The number.

        Returns:
            Whether it is the secret.
        """
        self.database.execute("insert into guesses values (?)", (number,))
        return "right" if number == self.secret else "wrong"

    async def hint(self) -> str:
        """Ask for a hint."""
        await asyncio.sleep(0)
        return f"the last digit is {self.secret % 10}"

    def get_reward(self) -> float:
        return 1.0 / self.database.execute("select count(*) from guesses").fetchone()[0]


class Counting(Environment):
    """Native: the model counts up; a wrong number ends the episode."""

    tools = ({"type": "function", "function": {"name": "peek", "description": "Look.", "parameters": {}}},)

    def reset(self, row, seed):
        self.at = row["start"]
        row["start"] = None  # rows are shared by a group: this must reach no other episode
        return [{"role": "user", "content": f"seed {seed}"}]

    def step(self, reply):
        if "tool_calls" in reply:
            answers = [{"role": "tool", "name": "peek", "content": str(self.at)} for _ in reply["tool_calls"]]
            reply["tool_calls"].clear()
            return Step(answers)
        right = reply["content"] == str(self.at + 1)
        self.at += 1
        return Step(
            [] if not right else [{"role": "user", "content": "next"}], float(right), not right, {"at": self.at}
        )

    def copy(self):
        other = Counting()
        other.at = self.at
        return other


def call(name, _id=None, **arguments):
    made = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made | ({"id": _id} if _id else {})


def says(text="", *calls):
    return ParsedReply({"role": "assistant", "content": text} | ({"tool_calls": list(calls)} if calls else {}))


def begun(environment=None, tools=(), row=None, seed=0, **limits):
    """A world that is reset; the reset worked."""
    world = Factory(environment, tools).world(row or {}, seed, Limits(**limits))
    _, answer = world.reset(USER)
    assert answer.end == "", answer.error
    return world


def contents(answer):
    return [message["content"] for message in answer.messages]
