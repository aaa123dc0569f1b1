"""Generated programming problems with tests and reference solutions. A template stands for several problems: ``{a}``,
``{b}`` in its texts are constants.
"""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from jaxrl_llm.errors import require
from jaxrl_llm.system.setting import Count
from jaxrl_llm.tasks.prompts import problem_of
from jaxrl_llm.types import Problem


class Template(NamedTuple):
    """Problems that differ in their constants alone. ``level``: 1, an expression; 2, one pass over a list, a text or a
    number; 3, an algorithm. ``parameters``: of the function, each with the kind of its values (see
    ``programs.VALUES``). ``returns``: the end of the sentence "Write a function that returns ...". ``body``: of the
    reference solution. ``constants``: the values of each constant, by its name in the texts; names in a tuple are set
    together.
    """

    level: int
    parameters: dict[str, str]
    returns: str
    body: str
    constants: dict[Any, tuple[Any, ...]] = {}  # noqa: RUF012


DIGITS = tuple(range(2, 10))
LETTERS = ("a", "e", "o", "t")
X, N = {"x": "integer"}, {"n": "natural"}
NUMBERS, TEXT, WORDS = {"numbers": "integers"}, {"text": "text"}, {"words": "words"}

TEMPLATES: dict[str, Template] = {
    "plus": Template(1, X, "x plus {a}", "return x + {a}", {"a": DIGITS}),
    "minus": Template(1, X, "x minus {a}", "return x - {a}", {"a": DIGITS}),
    "times": Template(1, X, "{a} times x", "return {a} * x", {"a": DIGITS}),
    "line": Template(1, X, "{a} times x plus {b}", "return {a} * x + {b}", {"a": (2, 3, 4), "b": (1, 5, 9)}),
    "square": Template(1, X, "the square of x, plus {a}", "return x * x + {a}", {"a": DIGITS[:4]}),
    "remainder": Template(1, N, "the remainder of n divided by {a}", "return n % {a}", {"a": DIGITS}),
    "quotient": Template(1, N, "how many times {a} goes into n, as a whole number", "return n // {a}", {"a": DIGITS}),
    "larger": Template(1, X, "the larger of x and {a}", "return max(x, {a})", {"a": DIGITS[:6]}),
    "smaller": Template(1, X, "the smaller of x and {a}", "return min(x, {a})", {"a": DIGITS[:6]}),
    "distance": Template(1, X, "the distance between x and {a}", "return abs(x - {a})", {"a": DIGITS}),
    "divisible": Template(1, N, "True if {a} divides n, else False", "return n % {a} == 0", {"a": (2, 3, 4, 5)}),
    "above": Template(1, X, "True if x is greater than {a}, else False", "return x > {a}", {"a": DIGITS[:6]}),
    "repeated": Template(1, TEXT, "the text repeated {a} times", "return text * {a}", {"a": DIGITS[:4]}),
    "first": Template(1, TEXT, "the first {a} characters of the text", "return text[:{a}]", {"a": DIGITS[:4]}),
    "last": Template(1, TEXT, "the last {a} characters of the text", "return text[-{a}:]", {"a": DIGITS[:4]}),
    "longer_by": Template(1, TEXT, "the length of the text plus {a}", "return len(text) + {a}", {"a": DIGITS[:4]}),
    "capitals": Template(1, TEXT, "the text in capital letters", "return text.upper()"),
    "backwards": Template(1, TEXT, "the text backwards", "return text[::-1]"),
    "total_above": Template(
        2, NUMBERS, "the sum of the numbers greater than {a}", "return sum(x for x in numbers if x > {a})",
        {"a": (0, 2, 5, 8)},
    ),
    "count_divisible": Template(
        2, NUMBERS, "how many of the numbers are divisible by {a}", "return sum(x % {a} == 0 for x in numbers)",
        {"a": DIGITS[:4]},
    ),
    "scaled": Template(
        2, NUMBERS, "a list of the numbers, each times {a}", "return [{a} * x for x in numbers]", {"a": DIGITS[:6]}
    ),
    "without": Template(
        2, NUMBERS, "a list of those numbers that are not divisible by {a}",
        "return [x for x in numbers if x % {a} != 0]", {"a": DIGITS[:4]},
    ),
    "each_nth": Template(
        2, NUMBERS, "a list of each {a}th of the numbers, beginning with the first", "return numbers[::{a}]",
        {"a": (4, 5, 6)},
    ),
    "first_above": Template(
        2, NUMBERS, "the index of the first number greater than {a}, or -1 without one",
        "return next((i for i, x in enumerate(numbers) if x > {a}), -1)", {"a": (1, 4, 7)},
    ),
    "by_remainder": Template(
        2, NUMBERS, "the numbers sorted by their remainder divided by {a}, equal remainders by size",
        "return sorted(numbers, key=lambda x: (x % {a}, x))", {"a": (3, 5, 10)},
    ),
    "rotated": Template(
        2, NUMBERS, "the list of numbers rotated to the left by {a} places",
        "k = {a} % len(numbers) if numbers else 0\nreturn numbers[k:] + numbers[:k]", {"a": DIGITS[:4]},
    ),
    "letter_count": Template(
        2, TEXT, 'how often the letter "{a}" occurs in the text', 'return text.count("{a}")', {"a": LETTERS}
    ),
    "letter_swap": Template(
        2, TEXT, 'the text with each "{a}" in place of "{b}"', 'return text.replace("{b}", "{a}")',
        {"a": ("x", "-"), "b": LETTERS},
    ),
    "long_words": Template(
        2, WORDS, "a list of the words with more than {a} letters", "return [w for w in words if len(w) > {a}]",
        {"a": (2, 3, 4)},
    ),
    "joined": Template(
        2, WORDS, 'the words in one text, with "{a}" between them', 'return "{a}".join(words)',
        {"a": ("-", "+", ", ", "/")},
    ),
    "power_sum": Template(
        2, N, "the sum of i ** {a} for all i from 1 to n", "return sum(i ** {a} for i in range(1, n + 1))",
        {"a": (2, 3, 4)},
    ),
    "digit_sum": Template(
        2, N, "the sum of the digits of {a} times n", "return sum(int(digit) for digit in str({a} * n))",
        {"a": (1, 7, 13, 99)},
    ),
    "product": Template(
        2, NUMBERS, "the product of the numbers modulo {a}",
        "found = 1\nfor x in numbers:\n    found = found * x % {a}\nreturn found % {a}", {"a": (7, 11, 101)},
    ),
    "primes": Template(
        3, N, "how many primes up to {a} times n there are",
        "return sum(all(p % d for d in range(2, int(p ** 0.5) + 1)) for p in range(2, {a} * n + 1))",
        {"a": (1, 2, 3, 5)},
    ),
    "sequence": Template(
        3, N, "s(n) modulo 1000, where s(0) = {a}, s(1) = {b} and s(k) = s(k - 1) + s(k - 2)",
        "s, t = {a}, {b}\nfor _ in range(n):\n    s, t = t, (s + t) % 1000\nreturn s % 1000",
        {"a": (0, 1, 2), "b": (1, 3, 7)},
    ),
    "run_above": Template(
        3, NUMBERS, "the length of the longest run of neighbouring numbers that are all at least {a}",
        "best = run = 0\nfor x in numbers:\n    run = run + 1 if x >= {a} else 0\n    best = max(best, run)\n"
        "return best",
        {"a": (0, 2, 4, 6)},
    ),
    "coins": Template(
        3, N, "the least number of coins of {a} that sum to n, or -1 if none do; each may be used often",
        "least = [0] + [n + 1] * n\nfor value in range(1, n + 1):\n    for coin in {a}:\n"
        "        if coin <= value:\n            least[value] = min(least[value], least[value - coin] + 1)\n"
        "return least[n] if least[n] <= n else -1",
        {"a": ((3, 5), (2, 7), (4, 9), (1, 5, 8))},
    ),
    "stairs": Template(
        3, {"n": "small"}, "in how many ways one can climb n steps, taking {a} at a time",
        "ways = [1] + [0] * n\nfor step in range(1, n + 1):\n"
        "    ways[step] = sum(ways[step - k] for k in {b} if k <= step)\nreturn ways[n]",
        {("a", "b"): (("1 or 2", (1, 2)), ("1 or 3", (1, 3)), ("2 or 3", (2, 3)), ("1, 2 or 3", (1, 2, 3)))},
    ),
    "shifted": Template(
        3, TEXT, "the text with each of its lower case letters moved {a} places on in the alphabet, z followed by a",
        "return ''.join(chr((ord(c) - 97 + {a}) % 26 + 97) if 'a' <= c <= 'z' else c for c in text)", {"a": DIGITS},
    ),
    "in_base": Template(
        3, N, "n written in base {a}, as text",
        "digits = ''\nwhile n:\n    n, digit = divmod(n, {a})\n    digits = str(digit) + digits\nreturn digits or '0'",
        {"a": DIGITS},
    ),
    "window": Template(
        3, NUMBERS, "the largest sum of {a} neighbouring numbers, or 0 if there are fewer",
        "return max((sum(numbers[i : i + {a}]) for i in range(len(numbers) - {a} + 1)), default=0)", {"a": (2, 3, 4)},
    ),
    "pairs": Template(
        3, NUMBERS, "how many pairs of different positions have numbers that sum to {a}",
        "return sum(x + y == {a} for i, x in enumerate(numbers) for y in numbers[:i])", {"a": (5, 6, 8, 10)},
    ),
    "common_divisor": Template(
        3, {"n": "natural", "m": "natural"}, "the greatest common divisor of {a} times n and {b} times m",
        "n, m = {a} * n, {b} * m\nwhile m:\n    n, m = m, n % m\nreturn n", {"a": (1, 6, 10), "b": (4, 15)},
    ),
    "halving": Template(
        3, {"n": "positive"}, "how many steps take n to 1, where a step halves an even number and else adds {a}, up to "
        "100 steps",
        "steps = 0\nwhile n > 1 and steps < 100:\n    n = n // 2 if n % 2 == 0 else n + {a}\n    steps += 1\n"
        "return steps",
        {"a": (1, 3, 5)},
    ),
    "increasing": Template(
        3, NUMBERS, "the length of the longest subsequence that rises by at least {a} each time",
        "best = []\nfor i, x in enumerate(numbers):\n"
        "    best.append(1 + max((best[j] for j in range(i) if x - numbers[j] >= {a}), default=0))\n"
        "return max(best, default=0)",
        {"a": (1, 2, 3)},
    ),
    "balanced": Template(
        3, {"text": "brackets"},
        "True if the brackets in the text are balanced and nested at most {a} deep, else False",
        "depth = 0\nfor c in text:\n    depth += 1 if c == '(' else -1\n    if not 0 <= depth <= {a}:\n"
        "        return False\nreturn depth == 0",
        {"a": (2, 3, 9)},
    ),
    "runs": Template(
        3, {"text": "letters"}, "the text with each run of equal letters as the letter and the length of the run",
        "found = ''\nwhile text:\n    rest = text.lstrip(text[0])\n    found += text[0] + str(len(text) - len(rest))\n"
        "    text = rest\nreturn found",
    ),
    "edits": Template(
        3, {"text": "letters", "other": "letters"},
        "the least number of letters to insert, delete or replace that turns the first text into the other one",
        "row = list(range(len(other) + 1))\nfor i, c in enumerate(text, 1):\n    before, row = row, [i]\n"
        "    for j, d in enumerate(other, 1):\n"
        "        row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (c != d)))\nreturn row[-1]",
    ),
}  # fmt: skip
"""All templates, by name."""


NAME = "solve"
"""The name of the function that a problem asks for."""
LEXICON = ("tree", "a", "moon", "otter", "to", "letters", "sea", "stone", "at", "yellow", "the", "oat", "east", "toe")


VALUES: dict[str, Callable[[random.Random], Any]] = {
    "integer": lambda draws: draws.randint(-12, 20),
    "natural": lambda draws: draws.randint(0, 40),
    "positive": lambda draws: draws.randint(1, 60),
    "small": lambda draws: draws.randint(0, 12),
    "integers": lambda draws: [draws.randint(-4, 12) for _ in range(draws.randint(0, 8))],
    "text": lambda draws: " ".join(draws.choices(LEXICON, k=draws.randint(1, 3))),
    "words": lambda draws: draws.choices(LEXICON, k=draws.randint(0, 5)),
    "letters": lambda draws: "".join(draws.choices("abc", k=draws.randint(0, 6))),
    "brackets": lambda draws: draws.choice(("", "()", "(())", "()()", "((()))", ")(", "(()", "(((())))", "(()(()))")),
}
"""Draws of a value of each kind."""


@dataclasses.dataclass(frozen=True)
class Programs:
    """Programming problems of three levels, from one expression to an algorithm, each with tests of its answer.

    A problem asks for a Python function ``solve``; its tests are asserts in the column ``tests``, for the reward
    ``CodeTests``, and ``solution`` is a program that passes them. Use it as ``Task(..., extractor="whole",
    verifier="code")``; with a ``holdout`` whole problems are held out, with all of their tests.

    Attributes:
      levels: of the problems.
      size: problems at most; 0 for all.
      tests: of each problem, at least 2.
      seed: of the inputs that are tested, and of the order of the problems.
    """

    levels: tuple[int, ...] = (1, 2, 3)
    size: Annotated[int, Count(0)] = 0
    tests: Annotated[int, Count(2)] = 6
    seed: int = 0
    label: ClassVar[str] = "programs"

    def problems(self) -> Iterator[Problem]:
        """Yield the problems; ``metadata`` holds ``tests``, ``solution``, ``level`` and ``template``."""
        levels = sorted({template.level for template in TEMPLATES.values()})
        require(
            bool(self.levels) and set(self.levels) <= set(levels),
            f"source Programs has levels {self.levels}; choose of {', '.join(map(str, levels))}",
        )
        require(self.size >= 0, f"source Programs has size {self.size}; give at least 1, or 0 for all")
        require(self.tests >= 2, f"source Programs has {self.tests} tests of each problem; give at least 2")
        names = [name for name, template in TEMPLATES.items() if template.level in self.levels]
        variants = [(name, constants) for name in names for constants in constants_of(TEMPLATES[name])]
        random.Random(self.seed).shuffle(variants)
        for name, constants in variants[: self.size or None]:
            yield self._problem(name, constants)

    def _problem(self, name: str, constants: Mapping[str, Any]) -> Problem:
        template = TEMPLATES[name]
        solution = solution_of(template, constants)
        rivals = [load_solution(solution_of(template, other)) for other in constants_of(template) if other != constants]
        draws = random.Random(f"{self.seed} {name} {constants}")
        inputs = [tuple(VALUES[kind](draws) for kind in template.parameters.values()) for _ in range(80)]
        tests = [
            f"assert {NAME}({', '.join(map(repr, arguments))}) == {result}"
            for arguments, result in choose_tests(inputs, load_solution(solution), rivals, self.tests)
        ]
        signature = f"{NAME}({', '.join(template.parameters)})"
        text = (
            f"Write a Python function {signature} that returns {fill_constants(template.returns, constants)}.\n"
            f"For example, {tests[0].removeprefix('assert ')}."
        )
        metadata = {"tests": tests, "solution": solution, "level": template.level, "template": name}
        return problem_of(({"role": "user", "content": text},), "", self.label, metadata)


def choose_tests(
    inputs: list[tuple[Any, ...]], solution: Callable[..., Any], rivals: list[Callable[..., Any]], most: int
) -> list[tuple[tuple[Any, ...], str]]:
    """Return so many different inputs with their results, as Python text, that every other solution fails on one. Each
    input is the one that most of the remaining solutions fail on, the first of equal ones; a solution that always
    returns the first result counts as one of them.
    """
    inputs = list({repr(arguments): arguments for arguments in inputs}.values())
    expected = [repr(solution(*copy_arguments(arguments))) for arguments in inputs]
    wrong = [[repr(other(*copy_arguments(arguments))) for arguments in inputs] for other in rivals]
    places = [0]
    remaining = [results for results in (*wrong, [expected[0]] * len(inputs)) if results[0] == expected[0]]
    while len(places) < min(most, len(inputs)):
        free = [place for place in range(len(inputs)) if place not in places]
        best = max(free, key=lambda place: sum(results[place] != expected[place] for results in remaining))
        places.append(best)
        remaining = [results for results in remaining if results[best] == expected[best]]
    return [(inputs[place], expected[place]) for place in places]


def constants_of(template: Template) -> Iterator[dict[str, Any]]:
    """Yield the constants of each of a template's problems; names that stand together are set together."""
    for values in itertools.product(*template.constants.values()):
        constants: dict[str, Any] = {}
        for name, value in zip(template.constants, values, strict=True):
            constants |= {name: value} if isinstance(name, str) else dict(zip(name, value, strict=True))
        yield constants


def fill_constants(text: str, constants: Mapping[str, Any]) -> str:
    """Return a template's text with its constants."""
    for name, value in constants.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def solution_of(template: Template, constants: Mapping[str, Any]) -> str:
    """Return the reference solution, a function definition."""
    lines = fill_constants(template.body, constants).split("\n")
    return "\n".join([f"def {NAME}({', '.join(template.parameters)}):", *(f"    {line}" for line in lines)]) + "\n"


def load_solution(solution: str) -> Callable[..., Any]:
    """Return the function that a reference solution, a text of this package, defines."""
    names: dict[str, Any] = {}
    exec(solution, names)
    return names[NAME]


def copy_arguments(arguments: tuple[Any, ...]) -> list[Any]:
    """Return arguments that a solution may change."""
    return [list(value) if isinstance(value, list) else value for value in arguments]
