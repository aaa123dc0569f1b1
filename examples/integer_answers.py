r"""Rewrite problems so that each answer is an integer, as DAPO's data does (arXiv 2503.14476, appendix).

    python examples/integer_answers.py problems.jsonl [--out integers.jsonl] [--keep]

A row whose answer is no integer gets a sentence after its question that asks for one, and that integer as its answer:
m + n for m/n, a + b for a sqrt(b), and so on (``SENTENCES``). Integers stay; rows that no template fits are left out,
or kept with ``--keep``; it prints how many, and why. Train on it with ``verifier="integer"``.

A value is a + b r, with rational a and b, and r the root of a square-free integer, pi, or nothing. All else is refused
rather than guessed at, since math-verify's parser reads "0.\overline{3}" as 0 and "(3)(2)" as 5.
"""

import json
import math
import re
import sys
from collections import Counter
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import math_verify
import sympy
import tyro

from jaxrl_llm.errors import InputError, require
from jaxrl_llm.rewards.math_answer import score_math
from jaxrl_llm.system.paths import check_file, new_file
from jaxrl_llm.tasks import Table, extract, integer
from jaxrl_llm.tasks.extract import normalise
from jaxrl_llm.types import Problem

LONGEST_NUMBER, MOST_PLACES = 12, 6  # digits of a number, and of a decimal's fraction
UNITS = set(
    "mm cm dm m km in inch inche ft foot feet yd yard mi mile mg g gram kg kilogram lb lbs pound oz ounce ton ml l "
    "liter litre gallon cup s sec second min minute h hr hour day week month year cent dollar euro degree radian "
    "percent unit mph kph per square cubic sq cu meter metre centimeter centimetre kilometer kilometre".split()
)
"""Without the s of their plurals."""
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
_ENDS = {"percent": r"\\?%|\\?text\{\s*percent\s*\}", "degrees": r"\^\s*\{?\s*\\circ\s*\}?|°|\\degree"}
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
_FREE = "no square above 1 divides"
SENTENCES = {
    "m/n": r"$\frac{m}{n}$ in lowest terms, with integers $m$ and $n > 0$, and give $m + n$.",
    "k pi": r"$k\pi$ with an integer $k$, and give $k$.",
    "m pi/n": r"$\frac{m\pi}{n}$ in lowest terms, with integers $m$ and $n > 0$, and give $m + n$.",
    "a + b pi": r"$a + b\pi$ with integers $a$ and $b$, and give $a + b$.",
    "(a + b pi)/c": r"$\frac{a + b\pi}{c}$ in lowest terms, with integers $a$, $b$ and $c > 0$, and give $a + b + c$.",
    "a sqrt(b)": rf"$a\sqrt{{b}}$ with integers $a$ and $b > 1$, where {_FREE} $b$, and give $a + b$.",
    "a sqrt(b)/c": rf"$\frac{{a\sqrt{{b}}}}{{c}}$ with integers $a$, $b > 1$ and $c > 0$, where $a$ and $c$ have no "
    rf"common factor and {_FREE} $b$, and give $a + b + c$.",
    "a + b sqrt(c)": rf"$a + b\sqrt{{c}}$ with integers $a$, $b$ and $c > 1$, where {_FREE} $c$, and give $a + b + c$.",
    "(a + b sqrt(c))/d": rf"$\frac{{a + b\sqrt{{c}}}}{{d}}$ with integers $a$, $b$, $c > 1$ and $d > 0$, where $a$, "
    rf"$b$ and $d$ have no common factor and {_FREE} $c$, and give $a + b + c + d$.",
}
"""By the names of forms, what is asked for after "Write the answer as"."""


class Unsuitable(ValueError):
    """There is no template for an answer; the message says why."""


class Value(NamedTuple):
    """``rational + factor * root``; ``root`` is 0 for none, -1 for pi, else the square-free number under the root."""

    rational: Fraction
    factor: Fraction = Fraction(0)
    root: int = 0


class Rewritten(NamedTuple):
    """An answer as an integer, by which template, and the sentence that asks for it."""

    template: str
    answer: int
    sentence: str


def as_integer(value: Value) -> Rewritten:
    """The sum of the integers of ``(a + b root) / scale``, where each that the form lacks counts as 0."""
    scale = math.lcm(value.rational.denominator, value.factor.denominator)
    number = int((value.rational + value.factor) * scale) + max(value.root, 0) + (scale if scale > 1 else 0)
    if not value.root and scale == 1:
        return Rewritten("integer", number, "Give the answer as one integer.")
    kinds = {0: ("m/n",) * 2, -1: ("k pi", "m pi/n", "a + b pi", "(a + b pi)/c")}
    names = kinds.get(value.root, ("a sqrt(b)", "a sqrt(b)/c", "a + b sqrt(c)", "(a + b sqrt(c))/d"))
    name = names[2 * bool(value.root and value.rational) + (scale > 1)]
    return Rewritten(name, number, f"Write the answer as {SENTENCES[name]}")


def rewritten(answer: str) -> Rewritten:
    """An answer that is no integer as one; raises Unsuitable if there is no template for it."""
    text, unit = _bare(answer)
    places = len(text.partition(".")[2])
    if _DECIMAL.fullmatch(text):  # it may have been rounded
        if places > MOST_PLACES:
            raise Unsuitable(f"a decimal of {places} places, more than {MOST_PLACES}")
        asks = f"Give {10**places} times the answer, rounded to the nearest integer."
        new = Rewritten("decimal", int(Decimal(text).scaleb(places)), asks)
    else:
        new = as_integer(value_of(text))
    if len(str(abs(new.answer))) > LONGEST_NUMBER:
        raise Unsuitable(f"an integer of more than {LONGEST_NUMBER} digits")
    original = answer.strip().lstrip("\\").lstrip("$") if unit == "dollars" else answer
    if not score_math(rf"{text}\%" if unit == "percent" else text, Problem("", (), original, "", "boxed", "math")):
        raise Unsuitable("math-verify reads another value in it: write it in LaTeX")
    asks = f"State the answer in {unit}. {new.sentence}"
    return Rewritten(f"{new.template}, {unit}", new.answer, asks) if unit else new


def value_of(text: str) -> Value:
    """The exact value of an expression without a unit."""
    if rest := _KNOWN.sub("", text):
        several = set(rest) & set(",;[]")
        raise Unsuitable("several values, or an interval" if several else f"there is {rest[:20]!r} in it")
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
    parts = [term.as_coeff_Mul() for term in sympy.Add.make_args(exact)]
    if not all(factor.is_Rational for factor, _ in parts):
        raise Unsuitable("its value is not exact")
    found = {root: Fraction(int(factor.p), int(factor.q)) for factor, root in parts}
    rational = found.pop(sympy.S.One, Fraction(0))
    if not found:
        return Value(rational)
    ((root, factor), *more) = found.items()
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
    """The expression without what stands around it, and its unit, empty for none."""
    text = normalise(answer).strip().removesuffix(".").strip()
    text = (extract(text, "boxed") or text) if text.startswith(r"\boxed") else text
    wrapped = _WRAPPED.fullmatch(text)
    text = next(part for part in wrapped.groups() if part is not None).strip() if wrapped else text
    text = re.sub(r"^[a-zA-Z]\w*\s*=\s*", "", text)
    unit = "dollars" if text.startswith(("$", r"\$")) else ""
    text = text.removeprefix("\\").removeprefix("$") if unit else text
    for pattern, replacement in _REWRITES:
        text = re.sub(pattern, replacement, text)
    for name, pattern in _ENDS.items():
        if found := re.search(rf"(?:{pattern})\s*$", text):
            return text[: found.start()].strip(), name
    found = re.search(rf"(?:{_UNIT.pattern})\s*$", text)
    if not found or not text[: found.start()].strip():
        return text.strip(), unit
    words = (found[1] or found[2]).strip()
    if found[2] and len(words) == 1 and not found[0][0].isspace():
        raise Unsuitable(f"{words!r} may be a unit or a variable")
    if not words or not all(word in UNITS or word.removesuffix("s") in UNITS for word in re.split(r"[\s/]+", words)):
        raise Unsuitable(f"{words!r} is no unit that is known here")
    return text[: found.start()].strip(), words + (found[3] or "").replace("{", "").replace("}", "")


def asked(prompt: Any, sentence: str) -> Any:
    """The prompt with a sentence after its text, or after that of a chat's last message."""
    if isinstance(prompt, str):
        return f"{prompt.rstrip()} {sentence}"
    *before, last = prompt
    return [*before, last | {"content": asked(last["content"], sentence)}]


def rewrite(
    file: Annotated[Path, tyro.conf.Positional], out: Path | None = None, prompt_field: str = "question",
    answer_field: str = "answer", answer_extractor: str = "whole", keep: bool = False,
) -> Counter[str]:  # fmt: skip
    """Write the new file; count rows by what became of them.

    Args:
      file: of the problems, .jsonl: one JSON object a line.
      out: of the new ones; None means .integer.jsonl in the same place.
      prompt_field: holds text, or chat messages.
      answer_field: holds text or a number.
      answer_extractor: cuts the answer out of a longer solution; the names are those of Task's extractor.
      keep: rows that no template fits are kept as they were.
    """
    out, counts = out or file.with_suffix(".integer.jsonl"), Counter()
    require(out.suffix == ".jsonl" and out.absolute() != file.absolute(), f"--out {out}: give another .jsonl")
    check_file(out, "--out")
    with new_file(out) as place, place.open("w", encoding="utf-8") as kept:
        for where, row in Table(str(file)).read():
            missing = [name for name in (prompt_field, answer_field) if name not in row]
            require(not missing, f"{where} has no {', '.join(missing)} (it has {', '.join(row)})")
            answer = extract(str(row[answer_field]), answer_extractor) or ""
            try:
                known = integer(answer) is not None
                new = Rewritten("none", answer, "") if known else rewritten(answer)
                row[answer_field] = str(new.answer)
                if not known:
                    row[prompt_field] = asked(row[prompt_field], new.sentence)
                counts["integers before" if known else f"rewritten: {new.template}"] += 1
            except Unsuitable as reason:
                counts[f"{'kept' if keep else 'left out'}: {reason}"] += 1
                if not keep:
                    continue
            kept.write(json.dumps(row, ensure_ascii=False) + "\n")
    return counts


if __name__ == "__main__":
    try:
        counts = tyro.cli(rewrite, description=__doc__, use_underscores=True)
    except InputError as error:
        sys.exit(f"integer_answers: {error}")
    print("\n".join(f"{count} {status}" for status, count in counts.most_common()))
