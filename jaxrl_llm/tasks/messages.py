"""Messages of chats in rows: their fields, the calls of tools in them, and the options that the chat template gets.

The caller adds the row's place to the errors raised here.
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
from jaxrl_llm.tasks.tables import is_empty, shown
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
Call = tuple[str, dict[str, Any]]
"""Name and arguments of a call of a tool."""
LONGEST_NAME = 40
"""Maximum number of characters of a name quoted in a message."""


def options_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row's options of the chat template by name, with its tools under ``TOOLS``; an option that is None
    counts as absent.

    Raises:
      InputError: the value is not an object with names, or not of plain values; a tool has no name.
    """
    given = _parsed({} if row.get(OPTIONS) is None else row[OPTIONS])
    try:
        plain = isinstance(given, dict) and json.loads(json.dumps(given)) == given
    except (TypeError, ValueError):
        plain = False
    require(plain, f"{OPTIONS} is {shown(given)}; it must be a JSON object of the template's options by name")
    found = {name: value for name, value in given.items() if value is not None}
    tools = _parsed(row.get(TOOLS) or [])
    tools = [*map(_parsed, tools)] if isinstance(tools, list) else tools
    named = isinstance(tools, list) and all(map(name_of, tools))
    require(named, f"{TOOLS} is {shown(tools)}; it must be a list of JSON schemas, each with function and its name")
    return found | ({TOOLS: tools} if tools else {})


def _parsed(value: Any) -> Any:
    """Return the value of a JSON text, which keeps the order and the nulls that a table would change; others stay."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def plain_text(value: Any, column: str) -> str:
    """Return a text that is not empty.

    Raises:
      InputError: the value is not text, or empty.
    """
    require(isinstance(value, str), f"{column} is a {type(value).__name__}; it must be text")
    require(bool(value.strip()), f"{column} is empty; complete the row or leave it out")
    return value


def chat_of(value: Any, column: str) -> list[Message]:
    """Return chat messages with role, content, reasoning, calls of tools, the call that a result answers, and
    ``WEIGHT`` where they are not learned. The whole, or a message's calls, may be JSON text.

    Raises:
      InputError: the value is not a chat, or a message has a field that is not written, a call that cannot be read, or
        a mark (``MARKS``) that is not true or false.
    """
    value = _parsed(value)
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"{column} is not a list of chat messages with role and content")
    return [_message_of(message, column) for message in value]


def _message_of(message: Any, column: str) -> Message:
    calls = None
    if isinstance(message, dict):
        calls = _parsed(message.get(CALLS)) if message.get("role") == "assistant" else None
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
    found: dict[str, Any] = {"role": message["role"], "content": message["content"]}
    if not is_empty(calls):
        with as_input_error(f"{column} holds a call of a tool that cannot be read", "correct it"):
            found[CALLS] = read_calls(calls)
    others = ("name", "tool_call_id") if message["role"] == "tool" else ()
    found |= {name: message[name] for name in others if isinstance(message.get(name), str)}
    for name in THOUGHTS:
        if not is_empty(message.get(name)):
            found[name] = plain_text(message[name], f"{name} in {column}")
    marks = {name: _flag(message[name], f"{name} in {column}") for name in MARKS if message.get(name) is not None}
    learned = all(flag is MARKS[name] for name, flag in marks.items())
    return found if learned else found | {WEIGHT: "0"}


def _flag(value: Any, name: str) -> bool:
    known = {"true": True, "1": True, "false": False, "0": False}
    number = number_in(value)
    flag = known.get(f"{number:g}" if number is not None else str(value).lower())
    require(flag is not None, f"{name} is {shown(value)}; it is 1 or true, or 0 or false")
    return bool(flag)


def checked(name: Any, arguments: Any) -> Call:
    """Return a call as plain JSON values.

    Raises:
      ValueError: the name is no text, or the arguments are not an object of JSON.
    """
    if not isinstance(name, str) or not name.strip():
        raise ValueError("a call has no name")
    name = name.strip()
    shown = name[:LONGEST_NAME]
    if isinstance(arguments, str):
        arguments = json_value(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {shown} are not a JSON object")
    try:
        text = json.dumps([name, arguments], ensure_ascii=False, allow_nan=False)
        text.encode()
        return name, json.loads(text)[1]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the arguments of {shown} are not JSON") from error


def json_value(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
      ValueError: the text is not JSON; the message says where.
    """
    text = text.strip()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"the call is not valid JSON ({error.msg} at character {error.pos})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("the call is not valid JSON (a number is too long, or lists are nested too deep)") from error


def calls_of(value: Any) -> list[Call]:
    """Return the calls of a JSON object or a list of them.

    Raises:
      ValueError: it is neither, or a call has no name or wrong arguments.
    """
    found = []
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, dict) and isinstance(one.get("function"), dict):
            one = one["function"]
        if not isinstance(one, dict):
            raise ValueError('the call is not a JSON object with "name" and "arguments"')
        name = one.get("name", one.get("tool_name"))
        found.append(checked(name, one.get("arguments", one.get("parameters"))))
    if not found:
        raise ValueError("the list of calls is empty")
    return found


def tool_call(index: int, name: str, arguments: Any) -> dict[str, Any]:
    """Return a call of a message; its id has the nine letters and digits that some templates ask for."""
    return {"id": f"call{index:05d}", "type": "function", "function": {"name": name, "arguments": arguments}}


def read_calls(given: Any) -> list[dict[str, Any]]:
    """Return the calls of a chat message as those of a reply, with their ids where they have some.

    Raises:
      ValueError: one has no name, or arguments that are not JSON.
    """
    ids = [{"id": one["id"]} if isinstance(one, Mapping) and isinstance(one.get("id"), str) else {} for one in given]
    return [tool_call(index, *call) | own for index, (call, own) in enumerate(zip(calls_of(given), ids, strict=True))]


def name_of(schema: Any) -> str:
    """Return the name in a tool's schema; empty if it is no schema."""
    function = schema.get("function") if isinstance(schema, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else ""


def joined(prompt: Sequence[Message], more: Sequence[Message], joint: str) -> list[Message]:
    """Return a prompt with more messages; a user message after a user message is appended to it behind ``joint``."""
    found = list(prompt)
    for message in more:
        if found and message["role"] == found[-1]["role"] == "user":
            found[-1] = {**found[-1], "content": f"{found[-1]['content']}{joint}{message['content']}"}
        else:
            found.append(message)
    return found


def number_in(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | decimal.Decimal):
        return None
    try:
        found = float(value)
    except (OverflowError, ValueError):  # more than a float holds; a decimal that signals not-a-number
        return None
    return found if math.isfinite(found) else None


def shared(one: Sequence[Any], other: Sequence[Any]) -> Sequence[Any]:
    """Return the longest common beginning of two sequences."""
    return one[: sum(itertools.takewhile(bool, map(operator.eq, one, other)))]


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
