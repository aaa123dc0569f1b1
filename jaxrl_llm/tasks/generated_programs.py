"""Generated programming problems with tests and reference solutions: see ``program_templates.py``."""

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar

from jaxrl_llm.errors import require
from jaxrl_llm.system.setting import Count
from jaxrl_llm.tasks.program_templates import TEMPLATES, Template
from jaxrl_llm.tasks.prompts import problem_of
from jaxrl_llm.types import Problem

NAME = "solve"
"""The name of the function that a problem asks for."""
TESTS = "tests"
"""The column with a problem's tests."""
DRAWN = 80
"""Inputs that are drawn, of which the tests of a problem are chosen."""
LEXICON = ("tree", "a", "moon", "otter", "to", "letters", "sea", "stone", "at", "yellow", "the", "oat", "east", "toe")


def _integers(draws: random.Random) -> list[int]:
    return [draws.randint(-4, 12) for _ in range(draws.randint(0, 8))]


VALUES: dict[str, Callable[[random.Random], Any]] = {
    "integer": lambda draws: draws.randint(-12, 20),
    "natural": lambda draws: draws.randint(0, 40),
    "positive": lambda draws: draws.randint(1, 60),
    "small": lambda draws: draws.randint(0, 12),
    "integers": _integers,
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
        """Yield the problems; ``metadata`` holds ``tests``, ``solution``, ``level`` and ``template``.

        Raises:
          InputError: there is no such level, or a number is too small.
        """
        known = sorted({template.level for template in TEMPLATES.values()})
        require(
            bool(self.levels) and set(self.levels) <= set(known),
            f"source Programs has levels {self.levels}; choose of {', '.join(map(str, known))}",
        )
        require(self.size >= 0, f"source Programs has size {self.size}; give at least 1, or 0 for all")
        require(self.tests >= 2, f"source Programs has {self.tests} tests of each problem; give at least 2")
        of_levels = {name: one for name, one in TEMPLATES.items() if one.level in self.levels}
        made = [(name, constants) for name, one in of_levels.items() for constants in constants_of(one)]
        random.Random(self.seed).shuffle(made)
        for name, constants in made[: self.size or None]:
            yield self._problem(name, constants)

    def _problem(self, name: str, constants: Mapping[str, Any]) -> Problem:
        template = TEMPLATES[name]
        solution = solution_of(template, constants)
        others = [solution_of(template, other) for other in constants_of(template) if other != constants]
        draws = random.Random(f"{self.seed} {name} {constants}")
        drawn = [tuple(VALUES[kind](draws) for kind in template.parameters.values()) for _ in range(DRAWN)]
        tests = [
            f"assert {called(given)} == {result}"
            for given, result in chosen(drawn, loaded(solution), list(map(loaded, others)), self.tests)
        ]
        signature = f"{NAME}({', '.join(template.parameters)})"
        text = (
            f"Write a Python function {signature} that returns {filled(template.returns, constants)}.\n"
            f"For example, {tests[0].removeprefix('assert ')}."
        )
        metadata = {TESTS: tests, "solution": solution, "level": template.level, "template": name}
        return problem_of(({"role": "user", "content": text},), "", self.label, metadata)


def chosen(
    drawn: list[tuple[Any, ...]], solution: Callable[..., Any], others: list[Callable[..., Any]], most: int
) -> list[tuple[tuple[Any, ...], str]]:
    """Return so many different inputs with their results, as Python text, that every other solution fails on one.

    Each input is the one that most of the remaining others fail on, the first of equal ones; a solution that always
    returns the first result counts as one of them.
    """
    inputs = list({repr(given): given for given in drawn}.values())
    results = [repr(solution(*copies(given))) for given in inputs]
    wrong = [[repr(other(*copies(given))) for given in inputs] for other in others]
    places = [0]
    left = [one for one in (*wrong, [results[0]] * len(inputs)) if one[0] == results[0]]
    while len(places) < min(most, len(inputs)):
        free = [place for place in range(len(inputs)) if place not in places]
        best = max(free, key=lambda place: sum(one[place] != results[place] for one in left))
        places.append(best)
        left = [one for one in left if one[best] == results[best]]
    return [(inputs[place], results[place]) for place in places]


def constants_of(template: Template) -> Iterator[dict[str, Any]]:
    """Yield the constants of each of a template's problems; names that stand together are set together."""
    for values in itertools.product(*template.constants.values()):
        found: dict[str, Any] = {}
        for name, value in zip(template.constants, values, strict=True):
            found |= {name: value} if isinstance(name, str) else dict(zip(name, value, strict=True))
        yield found


def filled(text: str, constants: Mapping[str, Any]) -> str:
    """Return a template's text with its constants."""
    for name, value in constants.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def solution_of(template: Template, constants: Mapping[str, Any]) -> str:
    """Return the reference solution, a function definition."""
    lines = filled(template.body, constants).split("\n")
    return "\n".join([f"def {NAME}({', '.join(template.parameters)}):", *(f"    {line}" for line in lines)]) + "\n"


def loaded(solution: str) -> Callable[..., Any]:
    """Return the function that a reference solution, a text of this package, defines."""
    names: dict[str, Any] = {}
    exec(solution, names)
    return names[NAME]


def called(given: tuple[Any, ...]) -> str:
    """Return a call of the function, as Python text."""
    return f"{NAME}({', '.join(map(repr, given))})"


def copies(given: tuple[Any, ...]) -> list[Any]:
    """Return arguments that a solution may change."""
    return [list(value) if isinstance(value, list) else value for value in given]
