"""Messages of chats in rows: their fields, the calls of tools in them, and the options that the chat template gets. The
caller adds the row's place to the errors raised here.
"""

import decimal
import itertools
import json
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.errors import InputError, as_input_error, require
from jaxrl_llm.tasks.tables import is_empty, short_repr
from jaxrl_llm.types import Message

OPTIONS = "chat_template_kwargs"
"""Column of every kind: options of the chat template in addition to the messages, such as ``enable_thinking``."""
TOOLS = "tools"
"""Column of every kind: JSON schemas of the tools that the assistant may call, which the chat template writes."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields of a message with the assistant's reasoning; the chat template writes them."""
WEIGHT = "weight"
"""Field of a message, as in OpenAI's fine-tuning format: ``"0"`` if it is not learned, absent otherwise."""
MARKS = dict.fromkeys(
    (WEIGHT, "loss_weight", "loss", "loss_mask", "train", "trainable", "training", "train_on_turn", "learn"), True
) | dict.fromkeys(("masked", "ignore", "mask_loss"), False)
"""Fields by which data sets mark whether a message is learned, with the value of one that is."""
CALLS = "tool_calls"
"""Field of an assistant's message: its calls of tools, as in OpenAI's chats."""
UNREAD = ("image", "images", "video", "videos", "audio", "audios")
"""Columns of rows with what models here do not read."""
UNWRITTEN = {
    "function_call": "a call in an older form than tool_calls",
    "images": "images",
    "videos": "videos",
    "audio": "sound",
    "mask": "a mask that does not say whether it marks what is learned (name it train, or masked)",
    "train_detail": "marks within a message",
}
"""Fields of a message that are never written, so that a row with one is refused."""
ToolCall = tuple[str, dict[str, Any]]
"""Name and arguments of a call of a tool."""
LONGEST_NAME = 40
"""Maximum number of characters of a name quoted in a message."""


def options_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row's options of the chat template by name, with its tools under ``TOOLS``; None counts as absent."""
    options = _parse_json({} if row.get(OPTIONS) is None else row[OPTIONS])
    try:
        plain = isinstance(options, dict) and json.loads(json.dumps(options)) == options
    except (TypeError, ValueError):
        plain = False
    require(plain, f"{OPTIONS} is {short_repr(options)}; it must be a JSON object of the template's options by name")
    set_options = {name: value for name, value in options.items() if value is not None}
    tools = _parse_json(row.get(TOOLS) or [])
    tools = [*map(_parse_json, tools)] if isinstance(tools, list) else tools
    fits = isinstance(tools, list) and all(map(schema_name, tools))
    require(fits, f"{TOOLS} is {short_repr(tools)}; it must be a list of JSON schemas, each with function and its name")
    return set_options | ({TOOLS: tools} if tools else {})


def _parse_json(value: Any) -> Any:
    """Return the value of a JSON text, which keeps the order and the nulls that a table would change; others stay."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def plain_text(value: Any, column: str) -> str:
    """Return a text that is not empty."""
    require(isinstance(value, str), f"{column} is a {type(value).__name__}; it must be text")
    require(bool(value.strip()), f"{column} is empty; complete the row or leave it out")
    return value


def chat_of(value: Any, column: str) -> list[Message]:
    """Return chat messages with role, content, reasoning, calls of tools, the call that a result answers, and
    ``WEIGHT`` where they are not learned. The whole, or a message's calls, may be JSON text.
    """
    value = _parse_json(value)
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"{column} is not a list of chat messages with role and content")
    return [_read_message(message, column) for message in value]


def _read_message(message: Any, column: str) -> Message:
    calls = None
    if isinstance(message, dict):
        calls = _parse_json(message.get(CALLS)) if message.get("role") == "assistant" else None
        parts = message.get("content")
        if isinstance(parts, list):
            kinds = {part.get("type") if isinstance(part, dict) else type(part).__name__ for part in parts}
            require(
                kinds <= {"text"}, f"{column} holds {', '.join(map(str, kinds - {'text'}))}: models read text alone"
            )
            message = {**message, "content": "".join(str(part.get("text") or "") for part in parts)}
        if not is_empty(calls):
            message = {**message, "content": message.get("content") or ""}
    if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
        raise InputError(f"{column} holds an item that is not a chat message with role and content, both text")
    for name, what in UNWRITTEN.items():
        require(is_empty(message.get(name)), f"{column} holds {what}, which is not written; leave the row out")
    read: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if not is_empty(calls):
        with as_input_error(f"{column} holds a call of a tool that cannot be read", "correct it"):
            read[CALLS] = read_calls(calls)
    tool_fields = ("name", "tool_call_id") if message["role"] == "tool" else ()
    read |= {name: message[name] for name in tool_fields if isinstance(message.get(name), str)}
    for name in THOUGHTS:
        if not is_empty(message.get(name)):
            read[name] = plain_text(message[name], f"{name} in {column}")
    marks = {name: _flag(message[name], f"{name} in {column}") for name in MARKS if message.get(name) is not None}
    learned = all(flag is MARKS[name] for name, flag in marks.items())
    return read if learned else read | {WEIGHT: "0"}


def _flag(value: Any, name: str) -> bool:
    flags = {"true": True, "1": True, "false": False, "0": False}
    number = number_in(value)
    flag = flags.get(f"{number:g}" if number is not None else str(value).lower())
    require(flag is not None, f"{name} is {short_repr(value)}; it is 1 or true, or 0 or false")
    return bool(flag)


def validate_call(name: Any, arguments: Any) -> ToolCall:
    """Return a call as plain JSON values. ValueError: it is none."""
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call has no name")
    name = name.strip()
    short_name = name[:LONGEST_NAME]
    if isinstance(arguments, str):
        arguments = json_value(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {short_name} are not a JSON object")
    try:
        text = json.dumps([name, arguments], ensure_ascii=False, allow_nan=False)
        text.encode()
        return name, json.loads(text)[1]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of {short_name} are not JSON") from error


def json_value(text: str) -> Any:
    """Return the value of a JSON text. ValueError: it is none."""
    text = text.strip()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the call is not valid JSON ({error.msg} at character {error.pos})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("the call is not valid JSON (a number is too long, or lists are nested too deep)") from error


def parse_calls(value: Any) -> list[ToolCall]:
    """Return the calls of a JSON object or a list of them. ValueError: they are none."""
    calls = []
    for part in value if isinstance(value, list) else [value]:
        if isinstance(part, dict) and isinstance(part.get("function"), dict):
            part = part["function"]
        if not isinstance(part, dict):
            raise ValueError('the call is not a JSON object with "name" and "arguments"')
        name = part.get("name", part.get("tool_name"))
        calls.append(validate_call(name, part.get("arguments", part.get("parameters"))))
    if not calls:
        raise ValueError("the list of calls is empty")
    return calls


def tool_call(index: int, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call of a message; its id has the nine letters and digits that some templates ask for."""
    return {"id": f"call{index:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def read_calls(calls: Any) -> list[dict[str, Any]]:
    """Return the calls of a chat message as those of a reply, with ids that they have. ValueError: they are none."""
    read = []
    for index, (source, call) in enumerate(zip(calls, parse_calls(calls), strict=True)):
        has_id = isinstance(source, Mapping) and isinstance(source.get("id"), str)
        read.append(tool_call(index, *call) | ({"id": source["id"]} if has_id else {}))
    return read


def schema_name(schema: Any) -> str:
    """Return the name in a tool's schema; empty if it is no schema."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def join_messages(prompt: Sequence[Message], following: Sequence[Message], joint: str) -> list[Message]:
    """Return a prompt with more messages; a user message after a user message is appended to it behind ``joint``."""
    messages = list(prompt)
    for message in following:
        if messages and message["role"] == messages[-1]["role"] == "user":
            messages[-1] = {**messages[-1], "content": f"{messages[-1]['content']}{joint}{message['content']}"}
        else:
            messages.append(message)
    return messages


def number_in(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | decimal.Decimal):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):  # more than a float holds; a decimal that signals not-a-number
        return None
    return number if math.isfinite(number) else None


def common_prefix(first: Any, second: Any) -> Any:
    """Return the longest common beginning of two sequences."""
    return first[: sum(itertools.takewhile(bool, map(operator.eq, first, second)))]


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return what the system message says about tools: a line for each schema, and one of instruction."""
    schemas = (json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    instruction = (
        'To call a tool, write <tool_call>{"name": ..., "arguments": {...}}</tool_call>; '
        "its result follows as <tool_response>...</tool_response>."
    )
    return "\n".join(["You have these tools:", *schemas, instruction])


def with_tools(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Return the messages with the tools at the end of the system message, which is added if there is none."""
    first, *rest = messages
    if first["role"] == "system":
        return [first | {"content": f"{first['content']}\n\n{describe_tools(tools)}"}, *rest]
    return [{"role": "system", "content": describe_tools(tools)}, *messages]


def as_text(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with calls and results as text; adjacent results are one message of the user."""
    texts: list[Message] = []
    previous_role = ""
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>{message['content']}</tool_response>"
            if previous_role == "tool":
                result = f"{texts.pop()['content']}\n{result}"
            texts.append({"role": "user", "content": result})
        else:
            parts = [message.get("content")]
            for call in message.get("tool_calls", ()):
                function = {name: call["function"][name] for name in ("name", "arguments")}
                parts.append(f"<tool_call>{json.dumps(function, ensure_ascii=False)}</tool_call>")
            content = "\n".join(filter(None, parts))
            fields = {name: value for name, value in message.items() if name != "tool_calls"}
            texts.append(fields | {"content": content})
        previous_role = message["role"]
    return texts
