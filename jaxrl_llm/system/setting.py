"""Settings that describe themselves: bounds and marks in a field's annotation, checks and notes as methods.

A field's annotation says which values it may have, and how they may change::

    epochs: Annotated[int, Count(1)] = 1
    row_tokens: Annotated[int, Count(0), FREE] = 0
    b1: Annotated[float, Range("[0, 1)")] = 0.9

``check`` refuses, and ``notes`` reports, what depends on other settings.
"""

import dataclasses
import enum
import functools
import itertools
import types
import typing
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from jaxrl_llm.errors import require

OURS = __name__.partition(".")[0]


class Mark(enum.Enum):
    """A property of a field that other code asks for."""

    FREE = "a run may be resumed with another value"
    RECORDED = "a run may be resumed with another value, and the row of its next step tells it"
    FIXED = "the value is the same in all phases of a run"
    PATH = "the value names a file or a folder, or several"
    MODEL = "the value names a model, or several"


FREE, RECORDED, FIXED, PATH, MODEL = Mark


@dataclasses.dataclass(frozen=True)
class Range:
    """The ``interval`` of a number, such as "[0, 1)"; None is always allowed, and an included bound of inf excludes
    nothing. ``note``: a meaning of the lower bound, in parentheses behind it. ``words``: describe the bounds in a
    refusal; if empty they are made from the interval.
    """

    interval: str
    note: str = ""
    words: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise InputError if the value is outside the interval; ``name`` is the field."""
        if value is None:
            return
        low, high = self.interval[1:-1].split(", ")
        above, below = self.interval[0] == "(", self.interval[-1] == ")"
        from_low = value > float(low) if above else value >= float(low)
        to_high = value < float(high) if below else value <= float(high)
        first = f"{low} ({self.note})" if self.note else low
        words = f"above {first} and at most {high}" if above else f"from {first} to {'below ' * below}{high}"
        if high == "inf":
            words = f"{'above' if above else 'at least'} {first}{', and finite' * below}"
        require(from_low and to_high, f"{name} must be {self.words or words}, got {value}")


class Count(Range):
    """The smallest value of an integer. Counts are checked before everything else, since other checks compare them."""

    def __init__(self, least: int):
        super().__init__(f"[{least}, inf]")


class Choice:
    """The values that a string may have; with ``unknown`` the refusal shows the value in quotes."""

    def __init__(self, *choices: str, unknown: bool = False):
        self.known, self.unknown = choices, unknown

    def check(self, name: str, value: Any) -> None:
        """Raise InputError for any other value; ``name`` is the field."""
        listing = " or ".join((", ".join(self.known[:-1]), self.known[-1]))
        said = f"{name} {value!r} is unknown: {listing}" if self.unknown else f"{name} must be {listing}, got {value}"
        require(value in self.known, said)


class Setting:
    """A part of a run's configuration: a frozen dataclass."""

    first: ClassVar[tuple[str, ...]] = ()
    """Fields with settings that are checked before those of the other fields."""

    def check(self, run: Any, where: str) -> None:
        """Refuse values that the annotations cannot exclude. InputError: names field, value and remedy. ``run``: the
        whole configuration, resolved. ``where``: dotted name of this setting with a final dot; empty for the run
        itself.
        """

    def notes(self, run: Any) -> list[str]:
        """Return notes on values that have no effect in this run, or an unexpected one, one line each."""
        return []


def is_ours(kind: type) -> bool:
    """Whether a class is defined in this package."""
    return kind.__module__.partition(".")[0] == OURS


@functools.cache
def annotations(kind: type) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Return the type and marks of each field of a class of this package, or of the nearest such base of another."""
    ours = next(filter(is_ours, kind.__mro__), None)
    types_alone = {} if ours is None else typing.get_type_hints(ours)
    hints = {} if ours is None else typing.get_type_hints(ours, include_extras=True)
    return {name: (types_alone[name], getattr(hint, "__metadata__", ())) for name, hint in hints.items()}


def settings_in(value: Setting, where: str = "") -> Iterator[tuple[Setting, str]]:
    """Yield the setting and those inside it, outer ones first, each with its ``where`` (see ``Setting.check``)."""
    yield value, where
    for name in dict.fromkeys((*value.first, *(field.name for field in dataclasses.fields(value)))):  # ty: ignore[invalid-argument-type]
        part = getattr(value, name)
        if isinstance(part, Setting):
            yield from settings_in(part, f"{where}{name}.")


def check_fields(value: Any, where: str = "", kinds: tuple[type, ...] = (Range, Choice)) -> None:
    """Refuse field values outside their bounds. InputError: names field, value and bounds."""
    for name, (_, marks) in annotations(type(value)).items():
        for mark in marks:
            if isinstance(mark, kinds):
                mark.check(f"{where}{name}", getattr(value, name))


def check_settings(run: Setting) -> None:
    """Refuse settings that cannot work: check counts, then each setting's fields and its ``check``, and the run's own
    last. InputError: names field, value and remedy.
    """
    root, *parts = settings_in(run)
    for setting, where in (root, *parts):
        check_fields(setting, where, (Count,))
    check_fields(*root)
    for setting, where in (*parts, root):
        check_fields(setting, where)
        setting.check(run, where)


def names_marked(kind: type, mark: Mark, where: str = "") -> list[str]:
    """Return the dotted names of the fields with this mark, in a settings class and in those of its fields."""
    names = []
    for name, (hint, marks) in annotations(kind).items():
        if mark in marks:
            names.append(f"{where}{name}")
            continue
        for member in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
            if isinstance(member, type) and issubclass(member, Setting):
                names += names_marked(member, mark, f"{where}{name}.")
    return names


def parts_of(value: Any) -> Iterator[Any]:
    """Yield the value and everything inside it, recursively."""
    yield value
    if dataclasses.is_dataclass(value):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return
    for item in value:
        yield from parts_of(item)


def has_default(field: dataclasses.Field) -> bool:
    """Whether a field of a dataclass may be left out."""
    return field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING


def differing(value: Any, usual: Any, where: str = "") -> list[str]:
    """List the dotted names at which a value differs from the usual one. A value of another class is named ``X.type``,
    and its fields are compared with the defaults of that class.
    """
    if isinstance(value, (tuple, list)) and any(map(dataclasses.is_dataclass, value)):
        usual_items = usual if isinstance(usual, (tuple, list)) else ()
        pairs = itertools.zip_longest(value, usual_items[: len(value)])
        return [name for at, pair in enumerate(pairs) for name in differing(*pair, f"{where}.{at}")]
    if not dataclasses.is_dataclass(value):
        return [where] if usual is dataclasses.MISSING or repr(value) != repr(usual) else []
    alike = type(value) is type(usual)
    names = [] if alike else [f"{where}.type"]
    for field in dataclasses.fields(value):
        if not field.init:
            continue
        has_factory = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if has_factory else field.default
        name = f"{where}.{field.name}" if where else field.name
        names += differing(getattr(value, field.name), getattr(usual, field.name) if alike else default, name)
    return names


def with_parts(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return the value with ``change`` applied to every dataclass in it, innermost first, unchanged parts shared."""
    if isinstance(value, (tuple, list)):
        items = [with_parts(item, change) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        return value if same else type(value)(items)
    if isinstance(value, dict):
        changed = {key: with_parts(item, change) for key, item in value.items()}
        return value if all(changed[key] is value[key] for key in value) else changed
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    old = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    new = {name: with_parts(part, change) for name, part in old.items()}
    new = {name: part for name, part in new.items() if part is not old[name]}
    return change(dataclasses.replace(value, **new) if new else value)
