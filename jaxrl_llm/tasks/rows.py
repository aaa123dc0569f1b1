"""Rows in one form, however they were given: by files, data sets, or lists in memory."""

import contextlib
import math
from typing import Any

import numpy as np

from jaxrl_llm.errors import InputError

LONGEST_SHOWN = 60
"""Maximum number of characters of a value in a message."""
DEEPEST = 200
"""The deepest nesting of a row's values."""


class BadRow(InputError):
    """Error in one row; the rows after it are usable."""


def sound(where: str, row: Any) -> tuple[str, dict[str, Any]]:
    """Return a row with its values as ``cleaned`` returns them, after its place.

    Raises:
      BadRow: the row is not an object with named fields, is nested too deeply, or has text that no tokenizer and no
        file can take.
    """
    if not isinstance(row, dict):
        raise BadRow(f"{where} is a {type(row).__name__}; a row is an object with fields")
    found = {}
    for name, value in row.items():
        if not isinstance(name, str):
            raise BadRow(f"{where} has a field named {shown(name)}; names of fields are text")
        try:
            found[name] = _present(cleaned(value))
            broken = unwritable([name, found[name]])
        except RecursionError:
            raise BadRow(f"{where}: field {name!a} is nested too deeply to be read; leave the row out") from None
        if broken:
            raise BadRow(
                f"{where}: field {name!a} holds {broken!a}, half of a surrogate pair, which UTF-8 "
                "cannot hold; write the character, or leave the row out"
            )
    return where, found


def cleaned(value: Any, depth: int = 0) -> Any:
    """Return a field's value in the form that it has by every way, as values of JSON where it can be.

    Arrow fills in nulls where records of a list differ: names in records that hold None, or a number that is none
    (NaN), are left out. A number of another precision is the decimal that was written, so a float32 0.1 is 0.1. Bytes
    of UTF-8 are text, and arrays and tuples lists. Other values stay.

    Raises:
      RecursionError: the value is nested too deeply.
    """
    if depth > DEEPEST:
        raise RecursionError
    if isinstance(value, dict):
        items = ((name, _present(cleaned(item, depth + 1))) for name, item in value.items())
        return {name: item for name, item in items if item is not None}
    if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
        return [cleaned(item, depth + 1) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        value = float(str(value)) if np.issubdtype(value.dtype, np.floating) else value.item()
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            text = value.decode()
            return text if all(character.isprintable() or character.isspace() for character in text) else value
    return value


def _present(value: Any) -> Any:
    """Return a field's value; None for the number that stands for a missing one in tables."""
    return None if isinstance(value, float) and math.isnan(value) else value


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


def field_of(row: dict[str, Any], name: str) -> Any:
    """Return the value of a field, None if it is missing; a dot reaches into a nested record."""
    value: Any = row
    for part in [name] if name in row else name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def is_empty(value: Any) -> bool:
    """Whether a field has no value: None, or a text, list or record without content."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)
