"""From the rows of a table to problems."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.extract import extract
from jaxrl_llm.types import Message, Problem

CHAT = "prompt_is_chat"
"""In a problem's metadata, where the row's prompt was chat messages and no text."""


LONGEST_SHOWN = 60
"""Characters of a value in a message."""


class BadRow(InputError):
    """One row cannot be used; those after it can."""


class Fields(Protocol):
    """Where a table's prompts and answers stand; the attributes are those of ``Table``."""

    prompt_field: str
    answer_field: str | None
    answer_extractor: str
    label: str


def sound(rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields rows as they are, each with where it stands; goes on after one that it has refused, if it is asked to.

    Raises:
      BadRow: one is no object with named fields, or has text that no tokenizer and no file can take.
    """
    return itertools.starmap(_sound, rows)


def _sound(where: str, row: Any) -> tuple[str, dict[str, Any]]:
    if not isinstance(row, dict):
        raise BadRow(f"{where} is a {type(row).__name__}; a row is an object with fields")
    for name, value in row.items():
        if not isinstance(name, str):
            raise BadRow(f"{where} has a field named {shown(name)}; names of fields are text")
        try:
            broken = unwritable([name, value])
        except RecursionError:
            raise BadRow(f"{where}: field {name!a} is nested too deeply to be read; leave the row out") from None
        if broken:
            raise BadRow(
                f"{where}: field {name!a} holds {broken!a}, half of a pair that stands for a character, and UTF-8 "
                "has no place for it; write the character, or leave the row out"
            )
    return where, row


def shown(value: Any) -> str:
    """A value for a message: its beginning on one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # a whole number of more digits than Python writes
        text = f"{type(value).__name__} of too many digits to show"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def unwritable(value: Any) -> str:
    """The first character of a value's texts that UTF-8 cannot hold; empty where it can hold all."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return value[error.start]
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(unwritable, parts)), "")


def problems_of(fields: Fields, rows: Iterable[tuple[str, Any]], answers: bool) -> Iterator[Problem]:
    """Yields a problem for each row, given with where it stands.

    ``answers``: whether each must have one; else the answer of a row without one is empty.

    Raises:
      InputError: a row that cannot be used.
    """
    for where, row in sound(rows):
        prompt = messages_of(_field(row, fields.prompt_field, where, "prompt"), where)
        answer = _answer(fields, row, where, answers)
        asked = fields.prompt_field.split(".")[0]
        # A reward may ask for any column by its name, the answer's with what it was cut out of too.
        metadata = {name: value for name, value in row.items() if name != asked} | {"row": where}
        if not isinstance(_field(row, fields.prompt_field, where, "prompt"), str):
            metadata[CHAT] = True
        yield problem_of(prompt, answer, fields.label, metadata)


def problem_of(prompt: tuple[Message, ...], answer: str, label: str, metadata: dict[str, Any]) -> Problem:
    """A problem whose id is made from its prompt."""
    return Problem(prompt_key(prompt)[:16], prompt, answer, label, metadata=metadata)


def prompt_key(prompt: Iterable[Message]) -> str:
    """The SHA-256, in hex, of a prompt's roles and contents: the same on every machine."""
    text = json.dumps([[message["role"], message["content"]] for message in prompt], ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _answer(fields: Fields, row: dict[str, Any], where: str, needed: bool) -> str:
    """The reference; empty where the row has none, or a record in its place, and none is needed."""
    if fields.answer_field is None:
        return ""
    found = _found(row, fields.answer_field)
    if not needed and (_is_empty(found) or isinstance(found, list | dict)):
        return ""
    answer = _field(row, fields.answer_field, where, "answer")
    if isinstance(answer, list | dict):
        raise InputError(f"{where}: the answer is a {type(answer).__name__}; it must be text or a number")
    reference = extract(str(answer), fields.answer_extractor)
    if reference is None:
        raise InputError(
            f"{where}: {fields.answer_extractor} finds no answer in field {fields.answer_field!r}; "
            f"change answer_extractor or the row"
        )
    return reference


def _field(row: dict[str, Any], name: str, where: str, role: str) -> Any:
    value = _found(row, name)
    if _is_empty(value):
        remedy = ", or take rewards that need no answer (no Accuracy)" if role == "answer" else ""
        raise InputError(
            f"{where} has no {role} in field {name!r} (it has {', '.join(row) or 'none'}); "
            f"set {role}_field or complete the row{remedy}"
        )
    return value


def _found(row: dict[str, Any], name: str) -> Any:
    """What stands in a field, None where there is no such field; a dot reaches into a nested record."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | tuple) and not value)


def messages_of(prompt: Any, where: str) -> tuple[Message, ...]:
    """A prompt as chat messages: text is one of the user.

    Raises:
      InputError: it is neither text nor a chat with a message of the user; ``where`` is named.
    """
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    messages = prompt if isinstance(prompt, list | tuple) else [prompt]
    for message in messages:
        if not (isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise InputError(f"{where}: the prompt is neither text nor chat messages with role and content")
    if not any(message["role"] == "user" for message in messages):
        raise InputError(f"{where}: the prompt has no message of the user; add one")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)
