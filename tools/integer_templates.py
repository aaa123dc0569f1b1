r"""Answers as integers: what an exact value is asked for, so that one integer says whether it was found.

A value is a + b r, with rational a and b, and r the root of a square-free integer, pi, or nothing. The templates are
those that the data of DAPO (arXiv 2503.14476, appendix) show, and their like. What a text may hold is listed here; all
else is refused rather than guessed at, since math-verify's parser reads "0.\overline{3}" as 0 and "(3)(2)" as 5.
"""

import math
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import math_verify
import sympy

from jaxrl_llm.rewards.math_answer import score
from jaxrl_llm.tasks.extract import extract, normalised
from jaxrl_llm.types import Problem

LONGEST_NUMBER, MOST_PLACES = 12, 6
"""Digits of a number in a text, and of a decimal's fraction: more are no answer that a person has written."""
UNITS = frozenset(
    "mm cm dm m km in inch inches ft foot feet yd yard yards mi mile miles mg g gram grams kg kilogram kilograms lb "
    "lbs pound pounds oz ounce ounces ton tons ml l liter liters litre litres gallon gallons cup cups s sec second "
    "seconds min minute minutes h hr hour hours day days week weeks month months year years cent cents dollar "
    "dollars euro euros degree degrees radian radians percent unit units mph kph per square cubic sq cu meter meters "
    "metre metres centimeter centimeters centimetre centimetres kilometer kilometers kilometre kilometres".split()
)
_REWRITES = (
    (r"\\left|\\right|\\displaystyle|\\!", ""),
    (r"\\[,;:\s]|~|\\quad", " "),
    (r"\\[dtc]frac", r"\\frac"),
    (r"√|(?<![\\a-zA-Z])sqrt", r"\\sqrt"),
    (r"π|(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\{,\}", ","),
    (r"(?<=\d),(?=\d{3}(?!\d))", ""),
)
_WRAPPED = re.compile(r"\$\$(.*)\$\$|\$([^$]*)\$|\\\((.*)\\\)|\\\[(.*)\\\]", re.DOTALL)
_NAMED = re.compile(r"[a-zA-Z]\w*\s*=\s*")
_PERCENT = re.compile(r"\\?%|\\?text\{\s*percent\s*\}")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree")
_UNIT = re.compile(
    r"\s*(?:\\(?:text|mathrm|mbox|rm)\s*\{([^{}]*)\}|(?<![\\a-zA-Z])([a-zA-Z][a-zA-Z ]*))(\^\{?[23]\}?)?"
)
_DECIMAL = re.compile(rf"-?\d{{0,{LONGEST_NUMBER}}}\.\d+")
_KNOWN = re.compile(r"\\frac|\\sqrt|\\pi(?![a-zA-Z])|\\cdot|\\times|\d+|[-+*/^(){}\s]")
_UNCLEAR = (
    (r"\d\s+\d|[\d)}]\s*\(\s*-?\d+\s*\)|\(\s*-?\d+\s*\)\s*[\d(]", "numbers stand side by side"),
    (r"/(?!\s*\d+\s*(?:$|[-+)]))", "what is divided by is not clear: write a fraction"),
    (r"\^(?!\d(?!\d)|\{-?\d{1,2}\})", "a power has no small integer as exponent"),
    (r"\\sqrt\s*\d\d|\\frac\s*\d{3}|\\frac\s*\d\s+\d\d", "braces are missing"),
    (rf"\d{{{LONGEST_NUMBER + 1}}}", f"a number has more than {LONGEST_NUMBER} digits"),
    (r"\^.*\^|\^\d\s*\\frac", "it is not clear what a power belongs to"),
)
_MIXED = re.compile(r"(\d+)\s*\\frac\s*(?:\{(\d+)\}|(\d))\s*(?:\{(\d+)\}|(\d))(.?)")


class Unsuitable(ValueError):
    """There is no template for an answer; the message says why."""


class Value(NamedTuple):
    """``rational + factor * root``; ``root`` is 0 for none, -1 for pi, else the square-free number under the root."""

    rational: Fraction
    factor: Fraction = Fraction(0)
    root: int = 0

    @property
    def scale(self) -> int:
        """The least denominator of both parts."""
        return math.lcm(self.rational.denominator, self.factor.denominator)


class Template(NamedTuple):
    r"""What is asked for of values of one form.

    Attributes:
      fits: whether a value has the form.
      number: the integer that is asked for.
      sentence: asks for it.
    """

    fits: Callable[[Value], bool]
    number: Callable[[Value], int]
    sentence: str


class Rewritten(NamedTuple):
    """An answer as an integer, by which template, and the sentence that asks for it."""

    template: str
    answer: int
    sentence: str


def _whole(value: Fraction) -> int:
    return value.numerator // value.denominator


def _sum(value: Value, *, rational: bool, root: bool, scale: bool) -> int:
    """The sum of the integers of ``(a + b root) / scale``, without those that the form has not."""
    parts = _whole(value.factor * value.scale)
    parts += _whole(value.rational * value.scale) if rational else 0
    return parts + (value.root if root else 0) + (value.scale if scale else 0)


_FORM = "Write the answer as"
TEMPLATES: dict[str, Template] = {
    "integer": Template(
        lambda v: not v.root and v.scale == 1, lambda v: _whole(v.rational), "Give the answer as one integer."
    ),
    "m/n": Template(
        lambda v: not v.root,
        lambda v: v.rational.numerator + v.rational.denominator,
        rf"{_FORM} $\frac{{m}}{{n}}$ in lowest terms, with integers $m$ and $n > 0$, and give $m + n$.",
    ),
    "k pi": Template(
        lambda v: v.root == -1 and not v.rational and v.scale == 1,
        lambda v: _whole(v.factor),
        rf"{_FORM} $k\pi$ with an integer $k$, and give $k$.",
    ),
    "m pi/n": Template(
        lambda v: v.root == -1 and not v.rational,
        lambda v: v.factor.numerator + v.factor.denominator,
        rf"{_FORM} $\frac{{m\pi}}{{n}}$ in lowest terms, with integers $m$ and $n > 0$, and give $m + n$.",
    ),
    "a + b pi": Template(
        lambda v: v.root == -1 and v.scale == 1,
        lambda v: _sum(v, rational=True, root=False, scale=False),
        rf"{_FORM} $a + b\pi$ with integers $a$ and $b$, and give $a + b$.",
    ),
    "(a + b pi)/c": Template(
        lambda v: v.root == -1,
        lambda v: _sum(v, rational=True, root=False, scale=True),
        rf"{_FORM} $\frac{{a + b\pi}}{{c}}$ in lowest terms, with integers $a$, $b$ and $c > 0$, and give "
        "$a + b + c$.",
    ),
    "a sqrt(b)": Template(
        lambda v: not v.rational and v.scale == 1,
        lambda v: _sum(v, rational=False, root=True, scale=False),
        rf"{_FORM} $a\sqrt{{b}}$ with integers $a$ and $b > 1$, where no square above 1 divides $b$, and give "
        "$a + b$.",
    ),
    "a sqrt(b)/c": Template(
        lambda v: not v.rational,
        lambda v: _sum(v, rational=False, root=True, scale=True),
        rf"{_FORM} $\frac{{a\sqrt{{b}}}}{{c}}$ with integers $a$, $b > 1$ and $c > 0$, where $a$ and $c$ have no "
        "common factor and no square above 1 divides $b$, and give $a + b + c$.",
    ),
    "a + b sqrt(c)": Template(
        lambda v: v.scale == 1,
        lambda v: _sum(v, rational=True, root=True, scale=False),
        rf"{_FORM} $a + b\sqrt{{c}}$ with integers $a$, $b$ and $c > 1$, where no square above 1 divides $c$, and give "
        "$a + b + c$.",
    ),
    "(a + b sqrt(c))/d": Template(
        lambda v: True,
        lambda v: _sum(v, rational=True, root=True, scale=True),
        rf"{_FORM} $\frac{{a + b\sqrt{{c}}}}{{d}}$ with integers $a$, $b$, $c > 1$ and $d > 0$, where $a$, $b$ and $d$ "
        "have no common factor and no square above 1 divides $c$, and give $a + b + c + d$.",
    ),
}
"""By their names; a value takes the first whose form it has."""
DECIMAL = "decimal"
"""The template of a decimal, which is multiplied by a power of ten: so it may have been rounded, too."""


def rewritten(answer: str) -> Rewritten:
    """An answer that is no integer as one.

    Raises:
      Unsuitable: there is no template for it.
    """
    text, unit = _bare(answer)
    places = len(text.partition(".")[2])
    if _DECIMAL.fullmatch(text):
        if places > MOST_PLACES:
            raise Unsuitable(f"a decimal of {places} places, more than {MOST_PLACES}")
        name, number = DECIMAL, int(Decimal(text).scaleb(places))
        asks = f"Give {10**places} times the answer, rounded to the nearest integer."
    else:
        value = value_of(text)
        name, template = next((name, one) for name, one in TEMPLATES.items() if one.fits(value))
        number, asks = template.number(value), template.sentence
    if len(str(abs(number))) > LONGEST_NUMBER:
        raise Unsuitable(f"an integer of more than {LONGEST_NUMBER} digits")
    original = answer.strip().lstrip("\\").lstrip("$") if unit == "dollars" else answer
    if not score(rf"{text}\%" if unit == "percent" else text, Problem("", (), original, "", "boxed", "math")):
        raise Unsuitable("math-verify reads another value in it: write it in LaTeX")
    if not unit:
        return Rewritten(name, number, asks)
    return Rewritten(f"{name}, {unit}", number, f"State the answer in {unit}. {asks}")


def value_of(text: str) -> Value:
    """The exact value of an expression without a unit.

    Raises:
      Unsuitable: it is none of the form above, or it is not clear which.
    """
    rest = _KNOWN.sub("", text)
    if rest:
        raise Unsuitable(
            "several values, or an interval" if set(rest) & set(",;[]") else f"there is {rest[:20]!r} in it"
        )
    for pattern, reason in _UNCLEAR:
        if re.search(pattern, text):
            raise Unsuitable(reason)
    if any(int(m[2] or m[3]) >= int(m[4] or m[5]) or m[6] not in "+-" for m in _MIXED.finditer(text)):
        raise Unsuitable("numbers stand side by side")
    found = math_verify.parse(f"${text}$", parsing_timeout=None)
    if not found or not isinstance(found[0], sympy.Expr):
        raise Unsuitable("math-verify's parser finds no value")
    exact = sympy.expand(sympy.radsimp(sympy.sqrtdenest(found[0].doit())))
    if not exact.is_finite:
        raise Unsuitable("it has no finite value")
    return _as_value(exact)


def _as_value(exact: sympy.Expr) -> Value:
    rational, others = Fraction(0), []
    for term in sympy.Add.make_args(exact):
        factor, root = term.as_coeff_Mul()
        if not factor.is_Rational:
            raise Unsuitable("its value is not exact")
        fraction = Fraction(int(factor.p), int(factor.q))
        if root == 1:
            rational += fraction
        else:
            others.append((fraction, root))
    if not others:
        return Value(rational)
    ((factor, root), *more) = others
    square = root**2
    if more or not (root == sympy.pi or (root.is_positive and square.is_Integer)):
        raise Unsuitable(f"no template has the form {exact}")
    if root == sympy.pi:
        return Value(rational, factor, -1)
    under = int(square)
    if any(power > 1 for power in sympy.factorint(under).values()):
        raise Unsuitable(f"{under} has a square factor that sympy does not take out")
    return Value(rational, factor, under)


def _bare(answer: str) -> tuple[str, str]:
    """The expression without what stands around it, and its unit, empty for none.

    Raises:
      Unsuitable: what follows the number is no unit.
    """
    text = normalised(answer).strip().removesuffix(".").strip()
    text = (extract(text, "boxed") or text) if text.startswith(r"\boxed") else text
    wrapped = _WRAPPED.fullmatch(text)
    text = next(part for part in wrapped.groups() if part is not None).strip() if wrapped else text
    named = _NAMED.match(text)
    text = text[named.end() :] if named else text
    unit = "dollars" if text.startswith(("$", r"\$")) else ""
    text = text.removeprefix("\\").removeprefix("$") if unit else text
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    for pattern, name in ((_PERCENT, "percent"), (_DEGREES, "degrees")):
        if found := re.search(rf"(?:{pattern.pattern})\s*$", text):
            return text[: found.start()].strip(), name
    found = re.search(rf"(?:{_UNIT.pattern})\s*$", text)
    if not found or not text[: found.start()].strip():
        return text.strip(), unit
    words = (found[1] or found[2]).strip()
    if found[2] and len(words) == 1 and not found[0][0].isspace():
        raise Unsuitable(f"{words!r} may be a unit or a variable")
    if not words or not set(re.split(r"[\s/]+", words)) <= UNITS:
        raise Unsuitable(f"{words!r} is no unit that is known here")
    return text[: found.start()].strip(), words + (found[3] or "").replace("{", "").replace("}", "")
