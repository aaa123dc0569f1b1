"""Formats of the rows of the supervised stages, after TRL's data sets: their columns, and the values in them.

The caller adds the row's place to the errors raised here.
"""

import itertools
from typing import Any, NamedTuple

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.tasks.messages import CALLS, OPTIONS, TOOLS, UNREAD, WEIGHT, chat_of, number_in, plain_text, shared
from jaxrl_llm.tasks.tables import is_empty, shown
from jaxrl_llm.types import Message

Columns = tuple[str, ...]


class RowFormat(NamedTuple):
    """Columns of the rows of a kind of data.

    Attributes:
      kind: its name.
      sets: of columns: a row has at least one of them, and the first that it has is read.
      beside: further columns, read if a row has them.
    """

    kind: str
    sets: tuple[Columns, ...]
    beside: Columns


CUT_OFF, END_CUT_OFF = "rejected_cut_off", "completion_cut_off"
"""Columns of pairs and of Unpaired: true if the (worse) completion was truncated, and so has no end of its turn."""
LABEL = "label"
"""Column of unpaired preferences and of texts, as in TRL: true if the completion is a good one."""

TEXTS = RowFormat("Texts", (("messages",), ("prompt", "completion"), ("text",)), (LABEL, OPTIONS, TOOLS))
PAIRS = RowFormat(
    "Pairs",
    (("prompt", "chosen", "rejected"), ("chosen", "rejected"), ("prompt", "completions")),
    ("margin", CUT_OFF, OPTIONS, TOOLS),
)
UNPAIRED = RowFormat("Unpaired", (("prompt", "completion", LABEL),), (END_CUT_OFF, OPTIONS, TOOLS))
STEPS = RowFormat("Steps", (("prompt", "completions", "labels"),), (OPTIONS, TOOLS))

ELSEWHERE = {
    "chosen": "Pairs does",
    "rejected": "Pairs does",
    "margin": "Pairs does",
    CUT_OFF: "Pairs does",
    "completions": "Pairs does, as a ranking, and Steps, with labels",
    "labels": "Steps does, for a process reward model",
    END_CUT_OFF: "Unpaired does",
    LABEL: "Unpaired does; or make Pairs of the good and the bad completions of a prompt",
} | dict.fromkeys(UNREAD, "models here read text alone")
"""Columns that change the lesson of a row, so that no kind of data ignores one silently: the kind that reads each, or
the reason why none does.
"""


def columns_of(row: dict[str, Any], form: RowFormat) -> Columns:
    """Return the first set of columns that a row has; a column that holds None counts as absent.

    Raises:
      InputError: the row has no set, or a column that changes its lesson and that this kind of data does not read.
    """
    has = [name for name, value in row.items() if value is not None]
    reads = {*form.beside, *itertools.chain(*form.sets)}
    for name in has:
        if name in ELSEWHERE and name not in reads and not is_empty(row[name]):
            raise InputError(
                f"the row has {name}, which {form.kind} does not read ({ELSEWHERE[name]}); leave the column out"
            )
    for columns in form.sets:
        if all(name in has for name in columns):
            return columns
    sets = "; or ".join(", ".join(columns) for columns in form.sets)
    raise InputError(f"the row has the columns {', '.join(has) or 'none'}; a row has {sets}")


def flag_of(row: dict[str, Any], column: str) -> bool | None:
    """Return whether a column is true; None if the row lacks it.

    Raises:
      InputError: the value is not a boolean.
    """
    value = row.get(column)
    if value is None or isinstance(value, bool):
        return value
    raise InputError(f"{column} is {shown(value)}; it must be true or false, or leave the column out")


def prompt_of(value: Any) -> list[Message]:
    """Convert a prompt to chat messages; a text becomes one of the user.

    Raises:
      InputError: the value is neither, it is empty, or it has no message of the user.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": plain_text(value, "prompt")}]
    chat = chat_of(value, "prompt")
    require(any(message["role"] == "user" for message in chat), "prompt has no message of the user; add one")
    return chat


def answer_of(value: Any, column: str) -> list[Message]:
    """Convert an answer to messages that begin and end with the assistant's; a text becomes one of them.

    Raises:
      InputError: the value has another form, or a message of the assistant is empty.
    """
    if isinstance(value, str):
        return [{"role": "assistant", "content": plain_text(value, column)}]
    chat = chat_of(value, column)
    if chat[0]["role"] != "assistant":
        raise InputError(f"{column} begins with a message of the {chat[0]['role']}; it is the assistant's")
    return _answered(chat, column)


def split_chat(chat: list[Message]) -> tuple[list[Message], list[Message]]:
    """Split a chat into its prompt and the rest, from the assistant's first message after one of the user on.

    Raises:
      InputError: the last message is not the assistant's, or one of the assistant's is empty.
    """
    _answered(chat[-1:], "messages")
    asked = [at for at, message in enumerate(chat) if message["role"] == "user"]
    require(bool(asked), "messages has no message of the user; add one")
    first = next(at for at in range(asked[0], len(chat)) if chat[at]["role"] == "assistant")
    return chat[:first], _answered(chat[first:], "messages")


def ranking_of(row: dict[str, Any], columns: Columns) -> tuple[list[Message], list[Message], tuple[str, ...]]:
    """Return the prompt, the assistant's message in each completion, the best first, and the names of the completions.

    Raises:
      InputError: there are too few completions, or they share no prompt.
    """
    if "completions" in columns:
        sides = row["completions"]
        if not isinstance(sides, list | tuple) or len(sides) < 2:
            raise InputError("completions is not a list of two or more, the best first")
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
    begins = shared(*chats)
    if not begins or len(begins) == len(chats[0]) == len(chats[1]):
        raise InputError(f"chosen and rejected {'are equal' if begins else 'share no prompt'}; correct the row")
    prompt = prompt_of(begins)
    return prompt, [_rest(chat, prompt, name) for chat, name in zip(chats, names, strict=True)], names


def margin_of(row: dict[str, Any]) -> float:
    """Return the margin by which a pair's better side should win; 0 if the row has none.

    Raises:
      InputError: the value is not a number.
    """
    given = row.get("margin")
    margin = 0.0 if given is None else number_in(given)
    if margin is None:
        raise InputError(f"margin is {shown(given)}; it must be a number")
    return margin


def steps_of(row: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Return the steps of a solution, and the label of each, in [0, 1].

    Raises:
      InputError: a value has another form, or the counts differ.
    """
    steps, labels = row["completions"], row["labels"]
    for name, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list | tuple) or not value:
            raise InputError(f"{name} is not a list with entries; give one for each step")
    if len(steps) != len(labels):
        raise InputError(f"the row has {len(steps)} steps in completions and {len(labels)} labels; give each step one")
    texts = [plain_text(step, f"completions[{index}]") for index, step in enumerate(steps)]
    values = []
    for index, label in enumerate(labels):
        value = float(label) if isinstance(label, bool) else number_in(label)
        if value is None or not 0 <= value <= 1:
            raise InputError(f"labels[{index}] is {shown(label)}; a label is true, false, or from 0 to 1")
        values.append(value)
    return texts, values


def _rest(side: Any, prompt: list[Message], name: str) -> Message:
    """Return the assistant's message in a completion: text, its message, or a chat that repeats the prompt before it.

    Raises:
      InputError: the value has another form.
    """
    if isinstance(side, str):
        return {"role": "assistant", "content": plain_text(side, name)}
    chat = chat_of(side, name)
    rest = chat[len(prompt) :] if chat[: len(prompt)] == prompt else chat
    if [message["role"] for message in rest] != ["assistant"]:
        raise InputError(
            f"{name} has {len(rest)} messages after the prompt ({', '.join(m['role'] for m in rest[:4])}); "
            "it is one of the assistant"
        )
    if WEIGHT in rest[0]:
        raise InputError(f"{name} has {WEIGHT} 0, and both sides of a comparison are learned; leave the row out")
    return _answered(rest, name)[0]


def _answered(chat: list[Message], column: str) -> list[Message]:
    """Check a chat and return it; a message of the assistant with calls may have no text.

    Raises:
      InputError: its last message is not the assistant's, or one of the assistant's is empty.
    """
    if chat[-1]["role"] != "assistant":
        raise InputError(f"{column} ends with a message of the {chat[-1]['role']}; the assistant's is learned")
    for message in chat:
        if message["role"] == "assistant" and CALLS not in message:
            plain_text(message["content"], f"the assistant's message in {column}")
    return chat
