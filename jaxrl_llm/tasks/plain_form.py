"""Tools for chat templates that know none: schemas in the system message, calls and results as text between marks."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.types import Message

INSTRUCTION = (
    'To call a tool, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>; '
    "its result follows as <tool_response>...</tool_response>."
)


def described(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what the system message says about tools: a line for each schema, and one of instruction."""
    schemas = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return "\n".join(["You have these tools:", *schemas, INSTRUCTION])


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages with the tools at the end of the system message, which is added if there is none."""
    first, *rest = messages
    if first["role"] == "system":
        return [first | {"content": f"{first['content']}\n\n{described(tools)}"}, *rest]
    return [{"role": "system", "content": described(tools)}, *messages]


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and results as text; adjacent results are one message of the user. Other fields of
    a message stay.
    """
    written: list[Message] = []
    before = ""
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>{message['content']}</tool_response>"
            if before == "tool":
                result = f"{written.pop()['content']}\n{result}"
            written.append({"role": "user", "content": result})
        else:
            calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
            content = "\n".join(filter(None, [message.get("content"), *calls]))
            others = {name: value for name, value in message.items() if name != "tool_calls"}
            written.append(others | {"content": content})
        before = message["role"]
    return written


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>{json.dumps(call, ensure_ascii=False)}</tool_call>"
