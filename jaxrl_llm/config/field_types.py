"""What a configuration's fields may hold, as their annotations say it: a value of another type would fail far away."""

import dataclasses
import functools
import math
import operator
import os
import types
import typing
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from jaxrl_llm.config.code import is_ours
from jaxrl_llm.errors import InputError

NAMES = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "text",
    types.NoneType: "None",
}
"""Of the types of plain values, for people."""
PLAIN = (bool, int, float, str, types.NoneType, tuple, list, dict, type)
"""What can stand for no dataclass; an object of one's own can."""


def check_types(value: Any) -> None:
    """Refuse a field whose value is of none of the types that its annotation names, in this dataclass and in those that
    it holds.

    Raises:
      InputError: names the field, its value, and what it takes.
    """
    for name, found, hint in _fields(value):
        if not _fits(found, hint):
            shown = f"{type(found).__name__}(...)" if dataclasses.is_dataclass(type(found)) else f"{found!r:.80}"
            raise InputError(f"{name} is {shown}: give {_described(hint)}")


def check_finite(value: Any) -> None:
    """Refuse an infinite number in this dataclass and in those that it holds: no JSON holds one, and a run's settings
    and its report are JSON. Classes of one's own may have them.

    Raises:
      InputError: names the field, its value, and what it takes.
    """
    for name, found, hint in _fields(value):
        numbers = found if isinstance(found, (tuple, list)) else (found,)
        if any(isinstance(one, Real) and abs(one) == math.inf for one in numbers):
            free = types.NoneType in _alternatives(hint)
            raise InputError(f"{name} must be finite, got {found}: give a finite number{' or None' if free else ''}")


def _fields(value: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The fields of a dataclass of ours and of those that it holds: dotted name, value and annotation, each before what
    is in it. ``where``: the dataclass's own field, with a dot at the end."""
    hints = _hints(type(value)) if is_ours(type(value)) else {}
    for field in dataclasses.fields(value):
        found = getattr(value, field.name)
        name = f"{where}{field.name}"
        if field.name in hints:
            yield name, found, hints[field.name]
        for part, label in _inside(found, name):
            yield from _fields(part, f"{label}.")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _inside(value: Any, name: str) -> list[tuple[Any, str]]:
    """Dataclasses to look into, with their names."""
    if isinstance(value, (tuple, list)):
        return [pair for index, item in enumerate(value) for pair in _inside(item, f"{name}[{index}]")]
    return [(value, name)] if dataclasses.is_dataclass(value) and not isinstance(value, type) else []


def _fits(value: Any, wanted: Any) -> bool:
    """Whether the annotation lets it in; whatever is said of functions, protocols and what containers hold does."""
    return any(_fits_one(value, one) for one in _alternatives(wanted))


def _fits_one(value: Any, wanted: Any) -> bool:
    if typing.get_origin(wanted) is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(wanted))
    if wanted is bool:
        return isinstance(value, bool)
    if wanted is int:
        return not isinstance(value, bool) and _is_whole(value)
    if wanted is float:
        return not isinstance(value, bool) and hasattr(value, "__float__")
    if wanted is str:
        return isinstance(value, (str, os.PathLike))
    if wanted is types.NoneType:
        return value is None
    if typing.get_origin(wanted) is tuple:
        return isinstance(value, (tuple, list)) and all(_fits(item, typing.get_args(wanted)[0]) for item in value)
    if typing.get_origin(wanted) is Mapping:
        return isinstance(value, Mapping)
    if dataclasses.is_dataclass(wanted):
        return isinstance(value, wanted) or not (isinstance(value, PLAIN) or is_ours(type(value)))
    return True


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _alternatives(wanted: Any) -> tuple[Any, ...]:
    together = typing.get_origin(wanted) in (typing.Union, types.UnionType)
    return typing.get_args(wanted) if together else (wanted,)


def _described(wanted: Any) -> str:
    """An annotation for people: ``a whole number or None``."""
    found = []
    for one in _alternatives(wanted):
        if typing.get_origin(one) is typing.Literal:
            found.extend(repr(choice) for choice in typing.get_args(one))
        elif one in NAMES:
            found.append(NAMES[one])
        elif typing.get_origin(one) is tuple:
            inner = _described(typing.get_args(one)[0])
            found.append(f"a tuple of {inner}, of one alone as (x,)")
        elif typing.get_origin(one) is Mapping:
            found.append("a dict")
        else:
            found.append(f"{one.__name__}(...)")
    return " or ".join(dict.fromkeys(found))
