"""A configuration's parts, whatever kind of run it is: looked through, and changed, wherever they stand in it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any


def parts_of(value: Any) -> Iterator[Any]:
    """The value and all that it holds."""
    yield value
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parts_of(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from parts_of(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from parts_of(item)


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """The value with every dataclass in it, innermost first, as ``change`` returns it; what stays is the same."""
    if isinstance(value, (tuple, list)):
        items = [with_parts(item, change) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if isinstance(value, dict):
        found = {key: with_parts(item, change) for key, item in value.items()}
        return value if all(found[key] is value[key] for key in value) else found
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {}
    for field in dataclasses.fields(value):
        old = getattr(value, field.name)
        new = with_parts(old, change)
        if new is not old:
            fields[field.name] = new
    return change(dataclasses.replace(value, **fields) if fields else value)


def dated(run: Any, day: str) -> Any:
    """The run with what templates that read the clock are to see as today, where its data does not say so itself."""

    def on_the_day(part: Any) -> Any:
        undated = hasattr(part, "template") and getattr(part, "date", day) is None
        return dataclasses.replace(part, date=day) if undated else part

    return with_parts(run, on_the_day)


def day_of(run: Any) -> str | None:
    """What the run's data sees as today; None where nothing says it."""
    days = [getattr(part, "date", None) for part in parts_of(run) if hasattr(part, "template")]
    return next((day for day in days if day), None)
