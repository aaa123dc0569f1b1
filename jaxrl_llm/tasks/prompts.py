"""Prompts: made from the rows of a table, refused, identified, and compared with those of an earlier run."""

import dataclasses
import decimal
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm import codec
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.tasks.extract import extract
from jaxrl_llm.tasks.messages import WEIGHT, chat_of
from jaxrl_llm.tasks.tables import is_empty, nested_field
from jaxrl_llm.types import Message, Problem


def problem_of(prompt: tuple[Message, ...], answer: str, label: str, metadata: dict[str, Any]) -> Problem:
    """Return a problem with an id made from its prompt."""
    return Problem(prompt_key(prompt)[:16], prompt, answer, label, metadata=metadata)


def prompt_key(prompt: Sequence[Message]) -> str:
    """Return the SHA-256, in hex, of a prompt's messages; equal on every machine."""
    chat = []
    for message in prompt:
        more = {name: value for name, value in message.items() if name not in ("role", "content")}
        chat.append([message.get("role"), message.get("content"), *filter(None, [more])])
    text = json.dumps(chat, ensure_ascii=False)
    return codec.digest(text, 64)


def answer_in(source: Any, row: dict[str, Any], where: str, needed: bool) -> str:
    """Return the reference in a row of a ``RowSource``; empty if none is needed and there is none, or a record."""
    if source.answer_field is None:
        return ""
    field = nested_field(row, source.answer_field)
    if not needed and (is_empty(field) or isinstance(field, list | dict)):
        return ""
    answer = required(row, source.answer_field, where, "answer")
    if isinstance(answer, list | dict | bytes):
        raise InputError(f"{where}: the answer is a {type(answer).__name__}; it must be text or a number")
    reference = extract(_as_text(answer), source.answer_extractor)
    if reference is None:
        raise InputError(
            f"{where}: {source.answer_extractor} finds no answer in field {source.answer_field!r}; "
            f"change answer_extractor or the row"
        )
    return reference


def _as_text(answer: Any) -> str:
    """Return an answer as text, a number with all its digits: 0.00001 and not 1e-05."""
    text = str(answer)
    scientific = isinstance(answer, float | decimal.Decimal) and "e" in text.lower()
    return f"{decimal.Decimal(text):f}" if scientific and abs(decimal.Decimal(text).adjusted()) < 400 else text


def required(row: dict[str, Any], name: str, where: str, role: str) -> Any:
    """Return the value of a field, the prompt's or the answer's by its ``role``; InputError if it is empty."""
    value = nested_field(row, name)
    if is_empty(value):
        remedy = ", or take rewards that need no answer (no Accuracy)" if role == "answer" else ""
        raise InputError(
            f"{where} has no {role} in field {name!r} (it has {', '.join(row) or 'none'}); "
            f"set {role}_field or complete the row{remedy}"
        )
    return value


def messages_of(prompt: Any, where: str) -> tuple[Message, ...]:
    """Convert a prompt to chat messages (``chat_of``); a text becomes one message of the user."""
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    try:
        require(isinstance(prompt, list | tuple | dict), "the prompt is neither text nor chat messages")
        messages = chat_of([prompt] if isinstance(prompt, dict) else prompt, "the prompt")
    except InputError as error:
        raise InputError(f"{where}: {error}") from error
    if not any(message["role"] == "user" for message in messages):
        raise InputError(f"{where}: the prompt has no message of the user; add one")
    return tuple({name: value for name, value in message.items() if name != WEIGHT} for message in messages)


def fingerprint(problems: Sequence[Problem | Any]) -> dict[str, int | str]:
    """Return a fingerprint of problems or rows, independent of their table's place; small JSON, saved with a run."""
    digests = [codec.digest_of_parts([content(problem)]) for problem in problems]
    return {
        "count": len(problems),
        "prompts": codec.digest_of_parts(sorted(problem.id for problem in problems)),
        "contents": codec.digest_of_parts(sorted(digests)),
        "order": codec.digest_of_parts(digests),
    }


def difference(before: dict[str, int | str], now: dict[str, int | str]) -> str:
    """Describe in a few words how two fingerprints differ; empty if they are equal."""
    differences = {
        "count": f"there were {before['count']} and there are {now['count']}",
        "prompts": f"there are {now['count']} as before, but prompts have changed",
        "contents": "the prompts are the same, but answers or other fields have changed",
        "order": "they are the same in another order",
    }
    return next((words for part, words in differences.items() if before[part] != now[part]), "")


def content(problem: Problem | Any) -> str:
    """Return all of a problem that verifiers, rewards or training may read, without the row's place, as sorted JSON."""
    if not isinstance(problem, Problem):
        fields = {field.name: getattr(problem, field.name) for field in dataclasses.fields(problem)}
        return json.dumps(fields | {"where": ""}, sort_keys=True, default=np.ndarray.tolist)
    metadata = {name: value for name, value in problem.metadata.items() if name != "row"}
    return json.dumps([problem.id, list(problem.prompt), problem.answer, codec.to_json(metadata)], sort_keys=True)
