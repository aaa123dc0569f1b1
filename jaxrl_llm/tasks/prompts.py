"""Prompts: made from the rows of a table, refused, identified, and compared with those of an earlier run."""

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.errors import InputError
from jaxrl_llm.tasks.extract import extract
from jaxrl_llm.types import Message, Problem

CHAT = "prompt_is_chat"
"""Key in a problem's metadata that marks a row with a prompt of chat messages rather than text."""


LONGEST_SHOWN = 60
"""Maximum number of characters of a value in a message."""


class BadRow(InputError):
    """Error in one row; the rows after it are usable."""


def sound(where: str, row: Any) -> tuple[str, dict[str, Any]]:
    """Return a row unchanged, after its place.

    Raises:
      BadRow: the row is not an object with named fields, or has text that no tokenizer and no file can take.
    """
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
                f"{where}: field {name!a} holds {broken!a}, half of a surrogate pair, which UTF-8 "
                "cannot hold; write the character, or leave the row out"
            )
    return where, row


def shown(value: Any) -> str:
    """Format a value for a message: its beginning on one line."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # a whole number of more digits than Python writes
        text = f"{type(value).__name__} of too many digits to show"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def unwritable(value: Any) -> str:
    """Return the first character of a value's texts that UTF-8 cannot hold; empty if it can hold all."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return value[error.start]
    parts = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next(filter(None, map(unwritable, parts)), "")


def problem_of(prompt: tuple[Message, ...], answer: str, label: str, metadata: dict[str, Any]) -> Problem:
    """Return a problem with an id made from its prompt."""
    return Problem(prompt_key(prompt)[:16], prompt, answer, label, metadata=metadata)


def prompt_key(prompt: Iterable[Message]) -> str:
    """Return the SHA-256, in hex, of a prompt's roles and contents; equal on every machine."""
    text = json.dumps([[message["role"], message["content"]] for message in prompt], ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def answer_in(source: Any, row: dict[str, Any], where: str, needed: bool) -> str:
    """Return the reference in a row of a ``RowSource``; empty if no answer is needed and it has none, or a record
    there.
    """
    if source.answer_field is None:
        return ""
    found = field_of(row, source.answer_field)
    if not needed and (is_empty(found) or isinstance(found, list | dict)):
        return ""
    answer = required(row, source.answer_field, where, "answer")
    if isinstance(answer, list | dict):
        raise InputError(f"{where}: the answer is a {type(answer).__name__}; it must be text or a number")
    reference = extract(str(answer), source.answer_extractor)
    if reference is None:
        raise InputError(
            f"{where}: {source.answer_extractor} finds no answer in field {source.answer_field!r}; "
            f"change answer_extractor or the row"
        )
    return reference


def required(row: dict[str, Any], name: str, where: str, role: str) -> Any:
    """Return the value of a field, the prompt's or the answer's by its ``role``; InputError if it is empty."""
    value = field_of(row, name)
    if is_empty(value):
        remedy = ", or take rewards that need no answer (no Accuracy)" if role == "answer" else ""
        raise InputError(
            f"{where} has no {role} in field {name!r} (it has {', '.join(row) or 'none'}); "
            f"set {role}_field or complete the row{remedy}"
        )
    return value


def field_of(row: dict[str, Any], name: str) -> Any:
    """Return the value of a field, None if it is missing; a dot reaches into a nested record."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def is_empty(value: Any) -> bool:
    """Whether a field has no value: None, or a text, list or record without content."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def messages_of(prompt: Any, where: str) -> tuple[Message, ...]:
    """Convert a prompt to chat messages; a text becomes one message of the user.

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


Fingerprint = dict[str, int | str]
"""Number of problems; digests of their prompts and contents, both independent of order; digest with the order."""


def fingerprint(problems: Sequence[Problem | Any]) -> Fingerprint:
    """Return a fingerprint of problems or rows, independent of their table's place; small JSON, saved with a run."""
    whole = [_digest([content(problem)]) for problem in problems]
    return {
        "count": len(problems),
        "prompts": _digest(sorted(problem.id for problem in problems)),
        "contents": _digest(sorted(whole)),
        "order": _digest(whole),
    }


def difference(before: Fingerprint, now: Fingerprint) -> str:
    """Describe in a few words how two fingerprints differ; empty if they are equal."""
    differences = {
        "count": f"there were {before['count']} and there are {now['count']}",
        "prompts": f"there are {now['count']} as before, but prompts have changed",
        "contents": "the prompts are the same, but answers or other fields have changed",
        "order": "they are the same in another order",
    }
    return next((words for part, words in differences.items() if before[part] != now[part]), "")


def content(problem: Problem | Any) -> str:
    """Return all of a problem that verifiers and rewards may read or training learns, without the row's place.

    JSON, equal for equal content.
    """
    if not isinstance(problem, Problem):
        fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
        return json.dumps(fields | {"where": ""}, sort_keys=True, default=np.ndarray.tolist)
    metadata = {name: value for name, value in problem.metadata.items() if name != "row"}
    return json.dumps([problem.id, list(problem.prompt), problem.answer, codec.to_json(metadata)], sort_keys=True)


def _digest(texts: Iterable[str]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode("utf-8", "surrogatepass") + b"\n")
    return found.hexdigest()[:16]
