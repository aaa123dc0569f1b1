"""Rows of the supervised stages, in the formats of TRL's data sets: which columns they have, and what stands there.

What is refused here is named with the row's place by the caller.
"""

import decimal
import math
import numbers
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.types import Message

Columns = tuple[str, ...]

TEXT_COLUMNS: tuple[Columns, ...] = (("messages",), ("prompt", "completion"), ("text",))
PAIR_COLUMNS: tuple[Columns, ...] = (
    ("prompt", "chosen", "rejected"),
    ("chosen", "rejected"),
    ("prompt", "completions"),
)
CUT_OFF = "rejected_cut_off"
"""A column of pairs: true where the worse completion was cut off, and so has no end of its turn."""
STEP_COLUMNS: tuple[Columns, ...] = (("prompt", "completions", "labels"),)


def columns_of(row: dict[str, Any], known: Sequence[Columns]) -> Columns:
    """The first of some sets of columns that a row has; a column that holds None is not there.

    Raises:
      InputError: it has none of them, or the columns of a call of tools, which no format here has.
    """
    has = [name for name, value in row.items() if value is not None]
    if row.get("tools"):
        raise InputError("the row has tools, which are not written into prompts; leave the column out")
    for columns in known:
        if all(name in has for name in columns):
            return columns
    sets = "; or ".join(", ".join(columns) for columns in known)
    raise InputError(f"the row has the columns {', '.join(has) or 'none'}; a row has {sets}")


def plain_text(value: Any, column: str) -> str:
    """A text that is not empty.

    Raises:
      InputError: it is another thing.
    """
    if not isinstance(value, str):
        raise InputError(f"{column} is a {type(value).__name__}; it must be text")
    if not value.strip():
        raise InputError(f"{column} is empty; complete the row or leave it out")
    return value


def chat_of(value: Any, column: str) -> list[Message]:
    """Chat messages.

    Raises:
      InputError: it is another thing, or the assistant says nothing or calls tools.
    """
    if not isinstance(value, list | tuple) or not value:
        raise InputError(f"{column} is no list of chat messages with role and content")
    for message in value:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise InputError(f"{column} holds what is no chat message with role and content, both text")
        if message.get("tool_calls"):
            raise InputError(f"{column} holds a call of tools, which is not written; leave the row out")
    return [{"role": message["role"], "content": message["content"]} for message in value]


def prompt_of(value: Any) -> list[Message]:
    """A prompt as chat messages; text is one of the user.

    Raises:
      InputError: it is neither, it is empty, or nobody asks.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": plain_text(value, "prompt")}]
    chat = chat_of(value, "prompt")
    if not any(message["role"] == "user" for message in chat):
        raise InputError("prompt has no message of the user; add one")
    return chat


def answer_of(value: Any, column: str) -> list[Message]:
    """What follows a prompt: messages whose first and last are the assistant's; text is one of them.

    Raises:
      InputError: it is another thing, or the assistant says nothing.
    """
    if isinstance(value, str):
        return [{"role": "assistant", "content": plain_text(value, column)}]
    chat = chat_of(value, column)
    if chat[0]["role"] != "assistant":
        raise InputError(f"{column} begins with a message of the {chat[0]['role']}; it is the assistant's")
    return _answered(chat, column)


def split_chat(chat: list[Message]) -> tuple[list[Message], list[Message]]:
    """A chat's prompt, and the rest: from the assistant's first message after one of the user on.

    Raises:
      InputError: the assistant does not have the last word, or says nothing.
    """
    _answered(chat[-1:], "messages")
    asked = [at for at, message in enumerate(chat) if message["role"] == "user"]
    if not asked:
        raise InputError("messages has no message of the user; add one")
    first = next(at for at in range(asked[0], len(chat)) if chat[at]["role"] == "assistant")
    return chat[:first], _answered(chat[first:], "messages")


def ranking_of(row: dict[str, Any], columns: Columns) -> tuple[list[Message], list[str], tuple[str, ...]]:
    """The prompt, what the assistant says in each completion, the best first, and what the completions are called.

    Raises:
      InputError: too few completions, or they share no prompt.
    """
    if "completions" in columns:
        sides = row["completions"]
        if not isinstance(sides, list | tuple) or len(sides) < 2:
            raise InputError("completions is no list of two or more, the best first")
        names = tuple(f"completions[{index}]" for index in range(len(sides)))
    else:
        sides, names = (row["chosen"], row["rejected"]), ("chosen", "rejected")
    if "prompt" in columns:
        prompt = prompt_of(row["prompt"])
        rests = [_rest(side, prompt, name) for side, name in zip(sides, names, strict=True)]
        return prompt, rests, names
    if any(isinstance(side, str) for side in sides):
        raise InputError("chosen and rejected are text, and the row has no prompt; give it one, or chats")
    chats = [chat_of(side, name) for side, name in zip(sides, names, strict=True)]
    shared = _shared(*chats)
    if not shared or len(shared) == len(chats[0]) == len(chats[1]):
        raise InputError(f"chosen and rejected {'are equal' if shared else 'share no prompt'}; mend the row")
    prompt = prompt_of(shared)
    return prompt, [_rest(chat, prompt, name) for chat, name in zip(chats, names, strict=True)], names


def margin_of(row: dict[str, Any]) -> float:
    """By how much a pair's better side should win; 0 where the row does not say.

    Raises:
      InputError: it is no number.
    """
    given = row.get("margin")
    margin = 0.0 if given is None else _number(given)
    if margin is None:
        raise InputError(f"margin is {given!r}; it must be a number")
    return margin


def steps_of(row: dict[str, Any]) -> tuple[list[str], list[float]]:
    """The steps of a solution, and the label of each, in [0, 1].

    Raises:
      InputError: they are other things, or their counts do not fit.
    """
    steps, labels = row["completions"], row["labels"]
    for name, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list | tuple) or not value:
            raise InputError(f"{name} is no list with something in it; give one for each step")
    if len(steps) != len(labels):
        raise InputError(f"the row has {len(steps)} steps in completions and {len(labels)} labels; give each step one")
    texts = [plain_text(step, f"completions[{index}]") for index, step in enumerate(steps)]
    return texts, [_label(label, f"labels[{index}]") for index, label in enumerate(labels)]


def _label(value: Any, name: str) -> float:
    found = float(value) if isinstance(value, bool) else _number(value)
    if found is None or not 0 <= found <= 1:
        raise InputError(f"{name} is {value!r}; a label is true, false, or from 0 to 1")
    return found


def _rest(side: Any, prompt: list[Message], name: str) -> str:
    """What the assistant says in a completion: text, its message, or a chat that repeats the prompt before it.

    Raises:
      InputError: it is anything else.
    """
    if isinstance(side, str):
        return plain_text(side, name)
    chat = chat_of(side, name)
    rest = chat[len(prompt) :] if chat[: len(prompt)] == prompt else chat
    if [message["role"] for message in rest] != ["assistant"]:
        raise InputError(
            f"{name} has {len(rest)} messages after the prompt ({', '.join(m['role'] for m in rest[:4])}); "
            "it is one of the assistant"
        )
    return _answered(rest, name)[0]["content"]


def _shared(one: list[Message], other: list[Message]) -> list[Message]:
    """The messages with which two chats begin alike."""
    count = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: min(len(one), len(other)) if count is None else count]


def _answered(chat: list[Message], column: str) -> list[Message]:
    """The chat.

    Raises:
      InputError: its last message is not the assistant's, or one of the assistant's is empty.
    """
    if chat[-1]["role"] != "assistant":
        raise InputError(f"{column} ends with a message of the {chat[-1]['role']}; the assistant's is learned")
    for message in chat:
        if message["role"] == "assistant":
            plain_text(message["content"], f"the assistant's message in {column}")
    return chat


def _number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real | decimal.Decimal):
        return None
    return float(value) if math.isfinite(value) else None
