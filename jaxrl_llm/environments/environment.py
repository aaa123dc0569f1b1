"""The interface of an environment: the world of an episode, which answers the model's replies."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.types import Message

ENDS = (
    "completed",
    "tool_stopped",
    "max_turns",
    "max_tokens",
    "max_tool_calls",
    "context_overflow",
    "parse_error",
    "environment_error",
    "timeout",
)
"""Reasons why an episode ends. ``completed``: the model's last reply needs no answer, or the environment is done;
``tool_stopped``: the environment is done after a reply with tool calls."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Answer of an environment to one reply of the model.

    Attributes:
      messages: what the model reads next, of the roles user, tool or system.
      reward: of this turn; an episode's reward has the sum of them.
      done: whether the episode ends here.
      metrics: numbers by name.
      state: name of the state that the environment is in now, for estimators that compare turns (``GiGPO``): equal
        names are equal states of one row and seed. Empty: the state is all that was said so far.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    done: bool = False
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
    state: str = ""


class Environment:
    """Base of environments: each episode has an instance of its own.

    ``reset``, ``step``, ``close`` and ``copy`` run on one thread, and may be ``async``. Their draws should come from
    ``seed``: an episode is then the same whenever it runs.

    Attributes:
      tools: JSON schemas, each ``{"type": "function", "function": {...}}``, of the calls that ``step`` answers.
      joint: text between the row's last user message and a user message that ``reset`` returns first.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    joint: str = "\n\n"

    def reset(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """Begin the episode of a row; return the messages that follow the row's own."""
        return ()

    def step(self, reply: Message) -> Step:
        """Answer the model's reply: an assistant's message, with ``tool_calls`` if it has calls, arguments as dicts."""
        raise NotImplementedError

    def close(self) -> None:
        """Free what the episode held; called once at its end."""

    def copy(self) -> "Environment":
        """Return an environment in the same state, for another branch of the episode."""
        raise NotImplementedError


def has(environment: Any, method: str) -> bool:
    """Whether the environment defines this method itself, such as ``step`` or ``copy``."""
    return getattr(type(environment), method) is not getattr(Environment, method)
