"""Problems whose answers are known by construction, to measure what rewriting answers as integers keeps and loses.

Right answers in several forms must stay right, and math-verify must have called them so. Wrong ones may become right,
since a sum does not say its parts: each is a slip of one number or two of the right answer, its sign, its reciprocal.
"""

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from integer_templates import DECIMAL, rewritten

from jaxrl_llm.rewards.verify import accuracy
from jaxrl_llm.types import Completion, Problem

Numbers = tuple[int, ...]
SLIPS = (-2, -1, 1, 2)
SQUARE_FREE = (2, 3, 5, 6, 7, 10, 11, 13)


@dataclasses.dataclass(frozen=True)
class Family:
    """Answers of one form.

    Attributes:
      template: by which they are rewritten.
      draw: the numbers of an answer.
      normal: the same value's numbers in the form that is asked for; None where the numbers are no such value.
      asked: the integer, from numbers in that form.
      forms: the value as texts.
      originals: how many of the forms, from the first on, may stand in the data.
    """

    template: str
    draw: Callable[[random.Random], Numbers]
    normal: Callable[[Numbers], Numbers | None]
    asked: Callable[[Numbers], int]
    forms: Callable[[Numbers], list[str]]
    originals: int = 1


def lowest(numbers: Numbers, free: int | None = None) -> Numbers | None:
    """Divided by what the numbers but the one at ``free`` have in common, the last one positive; None where it is 0."""
    if numbers[-1] == 0:
        return None
    others = [number for at, number in enumerate(numbers) if at != free]
    common = math.gcd(*others) * (1 if numbers[-1] > 0 else -1)
    return tuple(number if at == free else number // common for at, number in enumerate(numbers))


def rooted(factor: int, under: int) -> Numbers | None:
    """``factor sqrt(under)`` with what is under the root free of squares; None where nothing is left of the root."""
    for root in range(math.isqrt(max(under, 1)), 1, -1):
        if under % root**2 == 0:
            return rooted(factor * root, under // root**2)
    return (factor, under) if under > 1 and factor else None


def with_root(numbers: Numbers, at: int) -> Numbers | None:
    """Numbers with factor and radicand at ``at`` and after in the form of ``rooted``."""
    found = rooted(*numbers[at : at + 2])
    return None if found is None else (*numbers[:at], *found, *numbers[at + 2 :])


def over(numbers: Numbers | None, free: int | None) -> Numbers | None:
    """``lowest`` where there is something, over more than 1."""
    found = None if numbers is None else lowest(numbers, free)
    return found if found and found[-1] > 1 and any(found[:-1]) else None


def some(draws: random.Random, most: int) -> int:
    """A number from -most to most, not 0, more often positive."""
    return draws.randint(1, most) * draws.choice((1, 1, 1, -1))


def fraction(top: Any, bottom: Any, command: str = "frac") -> str:
    """In LaTeX."""
    return rf"\{command}{{{top}}}{{{bottom}}}"


def times(factor: int, root: str) -> str:
    """A multiple, without a factor of 1."""
    return {1: root, -1: f"-{root}"}.get(factor, f"{factor}{root}")


def plus(one: int, other: str) -> str:
    """A sum, in which the second part may begin with its sign."""
    return f"{one} - {other[1:]}" if other.startswith("-") else f"{one} + {other}"


def fractions_of(numbers: Numbers) -> list[str]:
    """m/n as people write it."""
    m, n = numbers
    mixed = [rf"{m // n}\frac{{{m % n}}}{{{n}}}"] if m > n else []
    texts = [
        fraction(m, n),
        fraction(m, n, "dfrac"),
        f"{m}/{n}",
        fraction(2 * m, 2 * n),
        fraction(-m, -n),
        f"x = {m}/{n}",
    ]
    return [*texts, *mixed]


def decimals_of(numbers: Numbers) -> list[str]:
    """v/100 as a decimal, and as what equals it."""
    (v,) = numbers
    text = f"{'-' * (v < 0)}{abs(v) // 100}.{abs(v) % 100:02d}"
    return [text, f"{text}0", fraction(v, 100)]


def roots_of(a: int, b: int) -> list[str]:
    """a sqrt(b) with square-free b, and what equals it."""
    root = rf"\sqrt{{{b}}}"
    return [times(a, root), rf"{'-' * (a < 0)}\sqrt{{{a * a * b}}}", fraction(a * b, root)]


FAMILIES = (
    Family(
        "m/n",
        lambda d: (some(d, 40), d.randint(2, 30)),
        lambda n: over(n, None),
        lambda n: n[0] + n[1],
        fractions_of,
        6,
    ),
    Family(
        "m/n, cm^2",
        lambda d: (d.randint(1, 40), d.randint(2, 30)),
        lambda n: over(n, None),
        lambda n: n[0] + n[1],
        lambda n: [rf"{text}\text{{ cm}}^2" for text in fractions_of(n)[:2]] + fractions_of(n)[:3],
        2,
    ),
    Family(
        DECIMAL,
        lambda d: (some(d, 3000),),
        lambda n: n,
        sum,
        decimals_of,
    ),
    Family(
        "integer, percent",
        lambda d: (d.randint(1, 99),),
        lambda n: n,
        lambda n: n[0],
        lambda n: [rf"{n[0]}\%", f"{n[0]}%", fraction(n[0], 100)],
        2,
    ),
    Family("k pi", lambda d: (some(d, 30),), lambda n: n if n[0] else None, sum, lambda n: [times(n[0], r"\pi")]),
    Family(
        "m pi/n",
        lambda d: (some(d, 20), d.randint(2, 12)),
        lambda n: over(n, None),
        sum,
        lambda n: [fraction(times(n[0], r"\pi"), n[1]), rf"{fraction(*n)}\pi", fraction(rf"{2 * n[0]}\pi", 2 * n[1])],
        3,
    ),
    Family(
        "a + b pi",
        lambda d: (some(d, 20), some(d, 20)),
        lambda n: n if all(n) else None,
        sum,
        lambda n: [plus(n[0], times(n[1], r"\pi")), rf"{n[1]}\pi + {n[0]}".replace("+ -", "- ")],
        2,
    ),
    Family(
        "(a + b pi)/c",
        lambda d: (some(d, 20), some(d, 20), d.randint(2, 9)),
        lambda n: over(n, None) if n[0] and n[1] else None,
        sum,
        lambda n: [fraction(plus(n[0], times(n[1], r"\pi")), n[2]), plus_fractions(n, r"\pi")],
        2,
    ),
    Family(
        "a sqrt(b)",
        lambda d: (some(d, 12), d.choice(SQUARE_FREE)),
        lambda n: with_root(n, 0),
        sum,
        lambda n: roots_of(*n),
        3,
    ),
    Family(
        "a sqrt(b)/c",
        lambda d: (some(d, 12), d.choice(SQUARE_FREE), d.randint(2, 9)),
        lambda n: over(with_root(n, 0), 1),
        sum,
        lambda n: [fraction(text, n[2]) for text in roots_of(*n[:2])],
        2,
    ),
    Family(
        "a + b sqrt(c)",
        lambda d: (some(d, 20), some(d, 9), d.choice(SQUARE_FREE)),
        lambda n: with_root(n, 1) if n[0] else None,
        sum,
        lambda n: [plus(n[0], text) for text in roots_of(*n[1:])],
        3,
    ),
    Family(
        "(a + b sqrt(c))/d",
        lambda d: (some(d, 20), some(d, 9), d.choice(SQUARE_FREE), d.randint(2, 9)),
        lambda n: over(with_root(n, 1), 2) if n[0] else None,
        sum,
        lambda n: [
            fraction(plus(n[0], times(n[1], rf"\sqrt{{{n[2]}}}")), n[3]),
            plus_fractions(n, rf"\sqrt{{{n[2]}}}"),
        ],
        2,
    ),
)  # fmt: skip


def plus_fractions(numbers: Numbers, root: str) -> str:
    """``(a + b root)/c`` as two fractions."""
    a, b, *_, c = numbers
    return rf"{fraction(a, c)} {'+' if b > 0 else '-'} {fraction(abs(b), c)}{root}"


def slips(family: Family, numbers: Numbers) -> Iterator[tuple[str, Numbers]]:
    """Values near the right one, each once with the kind of slip, in the form that is asked for."""
    seen = {numbers}
    changes = [("sign", tuple(-n if at == 0 else n for at, n in enumerate(numbers)))]
    if family.template in ("m/n", "m pi/n"):
        changes.append(("reciprocal", numbers[::-1]))
    for count, name in ((1, "one number"), (2, "two numbers")):
        for places in itertools.combinations(range(len(numbers)), count):
            for by in itertools.product(SLIPS, repeat=count):
                moved = dict(zip(places, by, strict=True))
                changes.append((name, tuple(n + moved.get(at, 0) for at, n in enumerate(numbers))))
    for name, changed in changes:
        normal = family.normal(changed)
        if normal is not None and normal not in seen:
            seen.add(normal)
            yield name, normal


def says(problem: Problem, answer: str) -> bool:
    """Whether the problem's verifier calls a boxed answer right."""
    nothing = np.zeros(0)
    text = rf"So the answer is \boxed{{{answer}}}."
    return accuracy(problem, Completion(nothing, nothing, "stop", nothing, nothing, text=text)) == 1.0


@dataclasses.dataclass(frozen=True)
class Found:
    """What was found of the answers of one template.

    Attributes:
      problems: answers that were rewritten.
      forms: right answers, in all their forms.
      original: of them, those that math-verify calls right by the original answer.
      integer: and then the integer that is asked for, which the verifier ``integer`` calls right.
      wrong: wrong answers, by the kind of slip.
      passed: those of them that have the same integer.
      told_apart: those of ``passed`` that math-verify calls wrong by the original answer.
    """

    problems: int = 0
    forms: int = 0
    original: int = 0
    integer: int = 0
    wrong: Counter[str] = dataclasses.field(default_factory=Counter)
    passed: Counter[str] = dataclasses.field(default_factory=Counter)
    told_apart: int = 0

    @property
    def holds(self) -> bool:
        """Whether every right answer is right by both verifiers, and every wrong one wrong by the original answer."""
        return self.forms == self.original == self.integer and self.told_apart == self.passed.total()

    def __add__(self, other: "Found") -> "Found":
        return Found(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def check(family: Family, draws: random.Random) -> Found:
    """One problem: its right answers in all forms, and the wrong ones near it."""
    numbers = None
    while numbers is None:
        numbers = family.normal(family.draw(draws))
    forms = family.forms(numbers)
    original = draws.choice(forms[: family.originals])
    new = rewritten(original)
    assert new.template == family.template, (original, new)
    before = Problem("", (), original, "", "boxed", "math")
    after = dataclasses.replace(before, answer=str(new.answer), verifier="integer")
    slipped = list(slips(family, numbers))
    passed = [(slip, wrong) for slip, wrong in slipped if says(after, str(family.asked(wrong)))]
    return Found(
        problems=1,
        forms=len(forms),
        original=sum(says(before, form) for form in forms),
        integer=len(forms) * says(after, str(family.asked(numbers))),
        wrong=Counter(slip for slip, _ in slipped),
        passed=Counter(slip for slip, _ in passed),
        told_apart=sum(not says(before, family.forms(wrong)[0]) for _, wrong in passed),
    )


def measure(count: int, seed: int = 0) -> dict[str, Found]:
    """What was found by template, of ``count`` problems in turn of all families."""
    draws = random.Random(seed)
    by_template: dict[str, Found] = {family.template: Found() for family in FAMILIES}
    for family in itertools.islice(itertools.cycle(FAMILIES), count):
        by_template[family.template] += check(family, draws)
    return by_template


def table(found: dict[str, Found]) -> str:
    """The numbers for people, the sum last."""
    total = sum(found.values(), Found())
    kinds = list(total.wrong)
    heads = ("template", "problems", "right", "math-verify", "integer", "wrong", "passed", *kinds)
    lines = [heads]
    for name, one in (found | {"all": total}).items():
        parts = (f"{one.passed[kind]}/{one.wrong[kind]}" for kind in kinds)
        counts = (one.problems, one.forms, one.original, one.integer, one.wrong.total(), one.passed.total())
        lines.append((name, *map(str, counts), *parts))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
