"""Calls of one reply, made by tools and answered in their order."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.environments.checks import readable
from jaxrl_llm.environments.limits import Limits
from jaxrl_llm.environments.threads import Call, Caller, Outcome, told
from jaxrl_llm.environments.tools import Tool
from jaxrl_llm.tasks.messages import name_of
from jaxrl_llm.types import Message


class Result(NamedTuple):
    """Answer to one call.

    Attributes:
      message: of role tool.
      error: ``unknown`` (no tool has its name), ``raised`` or ``timeout``; empty if the tool returned.
    """

    message: Message
    error: str = ""


def make_calls(
    caller: Caller, calls: Sequence[Any], tools: Mapping[str, Tool], others: Iterable[str], limits: Limits
) -> list[Result]:
    """Make calls and return their results, in order.

    Args:
      caller: makes them.
      calls: of the model.
      tools: by name.
      others: names of further tools, which other calls may ask for.
      limits: of the episode.
    """
    made = []
    for call in calls:
        tool = tools.get(name_in(call))
        if tool is not None:
            made.append(Call(tool.function, _arguments(call), tool.apart))
    outcomes = iter(caller.each(made, limits.tool_timeout_s, lambda value: readable(str(value))))
    known = (*others, *tools)
    return [_result(call, next(outcomes) if name_in(call) in tools else None, known, limits) for call in calls]


def _result(call: Any, outcome: Outcome | None, known: Sequence[str], limits: Limits) -> Result:
    name = name_in(call)
    text, error = "", ""
    if outcome is None:
        text, error = f"Tool {name} not found; there are: {', '.join(known) or 'none'}.", "unknown"
    elif outcome.status == "timeout":
        text, error = f"Tool {name} did not finish within {limits.tool_timeout_s:g} s.", "timeout"
    elif outcome.status == "error":
        text, error = told(outcome.error, kind=False), "raised"
    text = str({"error": text}) if error else outcome.value
    message = {"role": "tool", "name": name, "content": limits.shortened(text)}
    if isinstance(call, Mapping) and call.get("id"):
        message["tool_call_id"] = call["id"]
    return Result(message, error)


def name_in(call: Any) -> str:
    """Return the name of the tool that a call asks for."""
    return name_of(call) or name_of({"function": call})


def _arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    return call.get("function", call).get("arguments") or {}


def in_order(calls: Sequence[Any], results: Mapping[int, Message], messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return results by the place of their calls, with an environment's tool messages at the other places, in turn,
    and the rest of its messages behind."""
    own = list(messages)
    found = []
    for index in range(len(calls)):
        if index in results:
            found.append(results[index])
        elif own and own[0]["role"] == "tool":
            found.append(own.pop(0))
    return (*found, *own)
