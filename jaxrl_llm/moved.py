"""Fields that have moved into a part of their dataclass: configurations and runs still name them where they were."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)


def taking_old_names(part: str, empty: Callable[[], Any], moved: Mapping[str, str]) -> Callable[[Kind], Kind]:
    """A class decorator: the constructor, and ``dataclasses.replace``, also take fields by the names they once had.

    Args:
      part: the field that holds them now.
      empty: makes what is there by default.
      moved: from the old names to those of the part's fields.
    """

    def taking(kind: Kind) -> Kind:
        made = kind.__init__

        @functools.wraps(made)
        def __init__(self: Any, *args: Any, **values: Any) -> None:
            old = {moved[name]: values.pop(name) for name in moved if name in values}
            if old:
                values[part] = dataclasses.replace(values.get(part, empty()), **old)
            made(self, *args, **values)

        setattr(kind, "__init__", __init__)  # noqa: B010  a type checker takes no assignment to it
        return kind

    return taking
