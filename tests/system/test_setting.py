"""Settings that describe themselves: bounds, marks, and the order of refusals."""

import dataclasses
import math
from typing import Annotated

import pytest

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.system.setting import (
    FIXED,
    FREE,
    Choice,
    Count,
    Range,
    Setting,
    annotations,
    check_settings,
    names_marked,
    parts_of,
    settings_in,
    with_parts,
)


@dataclasses.dataclass(frozen=True)
class Inner(Setting):
    rate: Annotated[float, Range("(0, inf)"), FREE] = 1.0
    kind: Annotated[str, Choice("a", "b", "c")] = "a"
    size: Annotated[int, Count(1)] = 1

    def check(self, run, where):
        require(self.rate <= run.most, f"{where}rate exceeds most")

    def notes(self, run):
        return ["even"] if self.size % 2 == 0 else []


@dataclasses.dataclass(frozen=True)
class Whole(Setting):
    most: Annotated[float | None, Range("[0, 1]", "nothing")] = 1.0
    last_part: Annotated[Inner | None, FIXED] = None
    first_part: Inner = Inner()
    first = ("first_part",)

    def check(self, run, where):
        require(self.most != 0, "most is 0")


# The classes of this file stand for the package's own.
Inner.__module__ = Whole.__module__ = "jaxrl_llm.example"


@pytest.mark.parametrize(("interval", "note", "words", "inside", "outside"), [
    ("[1, inf]", "", "at least 1", (1, math.inf), (0, math.nan)),
    ("[0, inf)", "0 is off", "at least 0 (0 is off), and finite", (0, 9), (-1, math.inf)),
    ("(0, inf)", "", "above 0, and finite", (1e-9,), (0, math.inf)),
    ("(0, 1]", "", "above 0 and at most 1", (1,), (0, 1.1)),
    ("[0, 1)", "off", "from 0 (off) to below 1", (0,), (1, -0.1)),
    ("[0, 7]", "", "from 0 to 7", (0, 7), (8,)),
])  # fmt: skip
def test_an_interval_is_checked_and_said_in_words(interval, note, words, inside, outside):
    bounds = Range(interval, note)
    for value in (*inside, None):
        bounds.check("x", value)
    for value in outside:
        with pytest.raises(InputError) as refusal:
            bounds.check("x", value)
        assert str(refusal.value) == f"x must be {words}, got {value}"


def test_a_choice_names_the_others():
    with pytest.raises(InputError, match=r"^x must be a, b or c, got d$"):
        Choice("a", "b", "c").check("x", "d")
    with pytest.raises(InputError, match=r"^x 'd' is unknown: a or b$"):
        Choice("a", "b", unknown=True).check("x", "d")


def test_counts_come_first_and_what_concerns_the_whole_comes_last():
    check_settings(Whole(last_part=Inner(0.5)))
    wrong = Whole(0, Inner(-1.0, size=0), Inner(2.0, "d"))
    said = []
    for part, right in (
        ("last_part", {"size": 1}),
        ("first_part", {"kind": "a"}),
        ("first_part", {"rate": 0.5}),
        (None, {"most": 1.0}),
        ("last_part", {"rate": 0.5}),
    ):
        with pytest.raises(InputError) as refusal:
            check_settings(wrong)
        said.append(str(refusal.value))
        wrong = dataclasses.replace(
            wrong, **right if part is None else {part: dataclasses.replace(getattr(wrong, part), **right)}
        )
    assert said == [
        "last_part.size must be at least 1, got 0",
        "first_part.kind must be a, b or c, got d",
        "first_part.rate exceeds most",
        "first_part.rate exceeds most",
        "last_part.rate must be above 0, and finite, got -1.0",
    ]
    check_settings(wrong)
    with pytest.raises(InputError, match="most is 0"):
        Whole(0).check(Whole(0), "")


def test_marks_are_found_by_name_below_any_part():
    assert names_marked(Whole, FREE) == ["last_part.rate", "first_part.rate"]
    assert names_marked(Whole, FIXED) == ["last_part"]
    assert annotations(Inner)["rate"] == (float, (Range("(0, inf)"), FREE))


def test_notes_are_those_of_every_part():
    whole = Whole(last_part=Inner(size=2))
    assert [line for part, _ in settings_in(whole) for line in part.notes(whole)] == ["even"]


def test_parts_are_looked_through_and_changed_wherever_they_stand():
    value = {"a": (Whole(), 3), "b": [Inner(2.0)]}
    assert [part.rate for part in parts_of(value) if isinstance(part, Inner)] == [1.0, 2.0]
    halved = with_parts(value, lambda part: dataclasses.replace(part, rate=0.5) if isinstance(part, Inner) else part)
    assert halved == {"a": (Whole(first_part=Inner(0.5)), 3), "b": [Inner(0.5)]}
    assert with_parts(value, lambda part: part) is value
