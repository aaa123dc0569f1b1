"""Rewards of programs by tests, in the forms of ``code_formats``, which a program cannot pass without solving them.

What a test expects never enters the process that runs the program: it gets the input, and what it prints or returns is
compared outside. Each test has a fresh process. Exit codes count for nothing, and a program that writes a result itself
has only said what it returns. Assertions that cannot be split (``code_tests``), and those that compare objects of the
program with each other, are not counted unless allowed.
"""

import ast
import dataclasses
import functools
import json
import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from jaxrl_llm.errors import InputError, naming, require
from jaxrl_llm.rewards import sandbox
from jaxrl_llm.rewards.code_formats import (
    Asserted,
    Called,
    Printed,
    Test,
    close,
    foreign,
    parse_tests,
    same_output,
    same_value,
    truth,
)
from jaxrl_llm.rewards.code_tests import split_asserts
from jaxrl_llm.rewards.functions import Call
from jaxrl_llm.sandbox.client import START_S, Ended, SandboxError, Servers
from jaxrl_llm.sandbox.server import STARVED_TIMES
from jaxrl_llm.system.setting import Range
from jaxrl_llm.types import Problem

MOST_TIMEOUTS = 3
"""Number of tests of a program that may time out; after it, the rest are not run and count as failed."""
PRELUDE = """
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string
from bisect import bisect_left, bisect_right, insort
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
from builtins import pow

class CaptureFixture:
    result = collections.namedtuple("CaptureResult", "out err")
    def __init__(self):
        self.readouterr()
    def readouterr(self):
        import io, sys
        texts = [getattr(one, "getvalue", str)() for one in (sys.stdout, sys.stderr)]
        sys.stdout, sys.stderr = io.StringIO(), io.StringIO()
        return self.result(*texts)
"""
"""Names that solutions of LeetCode's form take for granted, as LiveCodeBench and APPS provide them; and the class of
pytest's ``capsys``.
"""
JUDGE = Path(__file__).with_name("code_judge.py").read_text()
_BLOCK = re.compile(r"```([^\n`]*)\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_PYTHON = re.compile(r"\W*(?:i?python|py)[\d.]*\b", re.IGNORECASE)


class Verdict(NamedTuple):
    """Result of a program's tests.

    Attributes:
      score: share passed of the tests that have a verdict, in [0, 1]; None if none has, or the sandbox failed. No
        program can take a test out of it that it fails: only tests that hold no value of their own, such as ``V(1) +
        V(2) == V(3)``, can turn out to be opaque, and these could be passed without a solution as well.
      results: for each test ``passed``, ``failed``, the status of ``Outcome`` that the program ended with, ``opaque``
        (nobody outside the program can tell: not counted), or ``not run``.
      note: what else to know, in one line; empty if nothing.
    """

    score: float | None
    results: tuple[str, ...]
    note: str


@functools.cache
def referees() -> Servers:
    """Return the fork servers that see what is expected, and never a program."""
    return Servers()


def extracted(text: str) -> str:
    """Return the code of a completion: the last fenced block that is marked as Python or compiles to more than bare
    values, such as an example's output; else its last block, or all of it if it has none.
    """
    blocks = _BLOCK.findall(text.rpartition("</think>")[2])
    programs = (body for mark, body in reversed(blocks) if _PYTHON.match(mark) or _is_program(body))
    return next(programs, blocks[-1][1] if blocks else text)


def _is_program(text: str) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            lines = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(line, ast.Expr) or isinstance(line.value, ast.Call) for line in lines)


@functools.lru_cache(maxsize=1024)
def _split(text: str, entry: str) -> list[Asserted]:
    return split_asserts(text, entry)


def read_tests(tests: Any) -> list[Test]:
    """Return the tests of a row's column.

    Raises:
      InputError: its form is unknown; the message has no place.
    """
    return parse_tests(tests, _split)


def grade(
    code: str, tests: Any, timeout_s: float = 2.0, memory_mb: int = 256, allow_opaque_asserts: bool = False,
    stop_early: bool = False,
) -> Verdict:  # fmt: skip
    """Run a program's tests; ``timeout_s`` and ``memory_mb`` are for each test, as in ``run_python``.

    ``code`` may be a completion (``extracted``). ``stop_early`` ends at the first test that fails.

    Raises:
      InputError: the tests have no known form.
    """
    found = read_tests(tests)
    limits = timeout_s, memory_mb
    program = extracted(code)
    results: list[str] = []
    try:
        if sandbox.level() == sandbox.LEVELS[0]:
            return Verdict(None, ("refused",) * len(found), sandbox.REFUSED)
        for test in found:
            if test.opaque and not allow_opaque_asserts:
                results.append("opaque")
            elif results.count("timeout") >= MOST_TIMEOUTS or (stop_early and {*results} - {"passed", "opaque"}):
                results.append("not run")
            else:
                result = run_test(program, test, *limits)
                if result == "opaque" and allow_opaque_asserts:
                    result = run_test(program, Asserted(test.whole, (), "opaque"), *limits)
                results.append(result)
    except SandboxError as error:
        return Verdict(None, (*results, *["not run"] * (len(found) - len(results))), str(error))
    counted = [result for result in results if result != "opaque"]
    known = sum(test.opaque for test in found)
    others = len(results) - len(counted) - (0 if allow_opaque_asserts else known)
    note = f"{known} of {len(found)} tests are opaque" if known else ""
    note += " and not counted" if known and not allow_opaque_asserts else ""
    note += "; " if note and others else ""
    note += f"{others} of {len(found)} compare only objects of the program: not counted" if others else ""
    return Verdict(counted.count("passed") / len(counted) if counted else None, tuple(results), note)


def run_test(code: str, test: Test, timeout_s: float, memory_mb: int) -> str:
    """Return the result of one test of ``Verdict.results``. Raises ``SandboxError``."""
    asked: dict[str, Any] = {"code": code}
    stdin = b""
    if isinstance(test, Printed):
        stdin = test.stdin.encode("utf-8", "surrogatepass")
    elif isinstance(test, Called):
        asked |= {"prelude": PRELUDE, "entry": test.entry, "args": test.args}
    else:
        setup = JUDGE + test.setup if test.opaque and "apart_" in test.setup else test.setup
        asked |= {"prelude": PRELUDE, "setup": setup, "expressions": test.expressions or ["True"]}
    ended = sandbox.servers().run(asked, stdin, timeout_s, memory_mb)
    outcome = sandbox.outcome(ended)
    if isinstance(test, Printed):
        # Like the benchmarks: a program that printed the answer and then failed has not solved the test.
        right = outcome.status == "ok" and same_output(outcome.stdout, test.expected)
    else:
        values = _values(ended, 1 if isinstance(test, Called) else len(test.expressions) or 1)
        right = values is not None and _right(test, values)
        larger = None if right or values is None else getattr(test, "larger", None)
        if larger and (test.judge != "truth" or foreign(values)):
            return run_test(code, larger, timeout_s, memory_mb)
    if right:
        return "passed"
    if right is None:
        return "opaque"
    return "failed" if outcome.status == "ok" else outcome.status


def _values(ended: Ended, count: int) -> list[Any] | None:
    """Return the values that a program's process computed; None if it did not."""
    try:
        found = json.loads(ended.result, parse_float=_bare, parse_constant=_bare)
        foreign(found)  # it may be too deep
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and len(found) == count else None


def _bare(text: str) -> None:
    raise ValueError(f"the number {text} has no type")


def _right(test: Called | Asserted, values: list[Any]) -> bool | None:
    """Return whether the values of a test's calls are right; None if nobody can tell."""
    try:
        if isinstance(test, Called):
            return any(same_value(values[0], one, as_json=True) for one in test.accepted)
        if test.judge == "equal":
            return same_value(values[0], test.expected)
        if test.judge == "close":
            return close(values[0], test.expected)
        if test.judge == "judged":
            return _judged(test, values)
        return truth(values[0]) == (test.judge == "opaque" or test.expected)
    except (ValueError, TypeError, RecursionError, ArithmeticError):  # nothing encodes such a value
        return False


def _judged(test: Asserted, values: list[Any]) -> bool | None:
    names = {f"_{number}": value for number, value in enumerate(values)}
    asked = {"prelude": JUDGE, "code": test.apart, "names": names}
    ended = referees().run(asked | {"expressions": [f"apart_told(lambda: {test.expected})"]}, b"", 10.0, 1024)
    found = _values(ended, 1)
    if found is None and sandbox.outcome(ended).status == "error":
        return None  # whatever the program returned: what the test itself needs is not there
    return None if found == [None] else found == [True]


@dataclasses.dataclass(frozen=True)
class CodeTests:
    """Share of a row's tests that the program in the completion passes, or whether it passes all.

    Completions run in ``rewards.sandbox``, in worker processes. If the sandbox fails there is no score: the completion
    is unscorable, and the failure is counted as that of a reward.

    Attributes:
      all_or_nothing: 1 if all tests pass, else 0; the first that fails is then the last that is run.
      column: of the row, with the tests (``code_formats``).
      before: column of the row with the beginning of the program, which the completion continues; None without one.
      timeout_s: seconds for each test.
      memory_mb: MiB for each test.
      allow_opaque_asserts: count assertions that only the program's own process can judge, which it may deceive.
      weight: in the sum of the rewards.
      name: of its column in metrics and samples.
    """

    all_or_nothing: bool = True
    column: str = "tests"
    before: str | None = None
    timeout_s: Annotated[float, Range("(0, inf)")] = 2.0
    memory_mb: Annotated[int, Range("[16, inf]")] = 256
    allow_opaque_asserts: bool = False
    weight: float = 1.0
    name: ClassVar[str] = "code_tests"

    def call(self, problem: Problem, text: str) -> Call:
        """Return the call that scores a completion's text, in a worker process."""
        tests = problem.metadata[self.column]
        text = text if self.before is None else problem.metadata[self.before] + extracted(text)
        most = STARVED_TIMES * self.timeout_s * len(read_tests(tests))
        return Call(f"{__name__}:score", [(self, (tests, text))], timeout_s=START_S + most, on_error=math.nan)

    def check(self, problems: Sequence[Problem]) -> None:
        """Refuse problems with tests that cannot be run.

        Raises:
          InputError: a row lacks the column, or its tests have no known form, or none of them counts.
        """
        for problem in problems:
            place = f"{problem.metadata.get('row', problem.id)}, column {self.column}"
            begun = self.before is None or isinstance(problem.metadata.get(self.before), str)
            remedy = "name the column with beginnings of programs (CodeTests.before), or leave it out"
            require(
                begun, f"{problem.metadata.get('row', problem.id)}, column {self.before}: there is no text; {remedy}"
            )
            if self.column not in problem.metadata:
                raise InputError(f"{place}: there is none; name the column with the tests (CodeTests.column)")
            with naming(place):
                found = read_tests(problem.metadata[self.column])
            counts = self.allow_opaque_asserts or not all(test.opaque for test in found)
            require(
                counts, f"{place}: only the program itself could judge its assertions; allow_opaque_asserts counts them"
            )


def score(settings: CodeTests, asked: tuple[Any, str]) -> float:
    """Return the score of a completion's text by tests, in a worker process; ``asked`` is the tests and the text.

    Raises:
      SandboxError: there is no verdict.
    """
    tests, text = asked
    limits = settings.timeout_s, settings.memory_mb
    found = grade(text, tests, *limits, settings.allow_opaque_asserts, stop_early=settings.all_or_nothing)
    if found.score is None:
        raise SandboxError(found.note)
    return float(found.score == 1) if settings.all_or_nothing else found.score
